"""KV bytes per token: formulas, sharding, and figures that engines printed for named models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.model import kv, table
from memledger.model.architecture import Architecture, Attention, LatentAttention, Layer, NotModelledError, Parallel
from memledger.units import GIB

ONE = Parallel()
MLA = LatentAttention(query_heads=128, latent_dim=512, rope_dim=64, nope_dim=128, v_dim=128, q_lora_rank=1536)
DSA = LatentAttention(
    query_heads=128, latent_dim=512, rope_dim=64, nope_dim=128, v_dim=128, index_dim=128, index_heads=64
)


def arch(name: str) -> Architecture:
    found = table.look_up(name)
    assert found is not None
    return found.architecture


@pytest.mark.parametrize(
    ("name", "full", "sliding"),
    [
        ("meta-llama/Meta-Llama-3.1-8B", 131072, 0),
        ("meta-llama/Meta-Llama-3.1-70B", 327680, 0),
        ("Qwen/Qwen3-32B", 262144, 0),
        ("Qwen/Qwen3-235B-A22B", 192512, 0),
        ("deepseek-ai/DeepSeek-V3", 70272, 0),
        ("openai/gpt-oss-120b", 36864, 36864),
        ("google/gemma-3-27b-it", 81920, 425984),
        ("Qwen/Qwen3-Next-80B-A3B", 24576, 0),
        ("Qwen/Qwen3.5-27B", 65536, 0),
        ("Qwen/Qwen3.6-27B", 65536, 0),
        ("Qwen/Qwen3.5-35B-A3B", 20480, 0),
        ("Qwen/Qwen3.6-35B-A3B", 20480, 0),
        ("Qwen/Qwen3.5-122B-A10B", 24576, 0),
        ("Qwen/Qwen3.5-397B-A17B", 30720, 0),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 8064, 0),
        ("moonshotai/Kimi-K3", 27648, 0),
        ("inclusionAI/Ling-3.0-flash", 8064, 0),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 6144, 0),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", 8192, 0),
        ("nvidia/Nemotron-H-56B-Base-8K", 40960, 0),
        ("ibm-granite/granite-4.0-h-small", 16384, 0),
        ("tiiuae/Falcon-H1-7B-Instruct", 45056, 0),
        ("ai21labs/Jamba-v0.1", 16384, 0),
        ("MiniMaxAI/MiniMax-Text-01", 40960, 0),
        ("inclusionAI/Ring-mini-linear-2.0", 8192, 0),
        ("LiquidAI/LFM2-1.2B", 12288, 0),
        ("LiquidAI/LFM2-8B-A1B", 12288, 0),
    ],
)
def test_bytes_per_token_of_known_models(name: str, full: int, sliding: int):
    model = arch(name)
    assert kv.model_token_bytes(model, ONE, "bfloat16") == full
    assert kv.model_token_bytes(model, ONE, "bfloat16", layers="sliding") == sliding
    assert kv.model_token_bytes(model, ONE, "bfloat16", layers="all") == full + sliding


# What SGLang logged for a named model: tokens, page, the "GB" it printed, to within half of its last digit.
# The pool has one page more than the tokens it announces.
@pytest.mark.parametrize(
    ("name", "parallel", "dtype", "tokens", "page", "printed", "keys_only"),
    [
        pytest.param("inclusionAI/Ling-3.0-flash", ONE, "bfloat16", 1226984, 1, 9.21, False, id="S2"),
        pytest.param(
            "deepseek-ai/DeepSeek-R1",
            Parallel(tp=16, dp=16, dp_attention=True),
            "bfloat16",
            75904,
            128,
            4.98,
            False,
            id="S3 tp16",
        ),
        pytest.param(
            "deepseek-ai/DeepSeek-R1",
            Parallel(tp=32, dp=32, dp_attention=True),
            "bfloat16",
            179328,
            128,
            11.74,
            False,
            id="S3 tp32",
        ),
        pytest.param(
            "Qwen/Qwen3-235B-A22B", Parallel(tp=16), "bfloat16", 441600, 128, 9.90, True, id="S5 replicated heads"
        ),
        pytest.param(
            "Qwen/Qwen3-235B-A22B",
            Parallel(tp=32, dp=32, dp_attention=True),
            "bfloat16",
            190976,
            128,
            17.13,
            True,
            id="S5 dp attention",
        ),
        pytest.param("Qwen/Qwen3-30B-A3B", Parallel(tp=2), "bfloat16", 802688, 128, 18.38, True, id="S6 tp2"),
        pytest.param("Qwen/Qwen3-32B", Parallel(tp=8), "bfloat16", 1172096, 128, 17.89, True, id="S6 tp8"),
        pytest.param(
            "Qwen/Qwen3.5-27B", ONE, "bfloat16", 330323, 1, 10.08, True, id="S1 (consistency: geometry of a relative)"
        ),
        pytest.param(
            "moonshotai/Kimi-K3",
            Parallel(tp=8),
            "fp8_e4m3",
            1167552,
            64,
            15.03,
            False,
            id="S7 (consistency: model not named)",
        ),
    ],
)
def test_logged_kv_sizes(name, parallel, dtype, tokens, page, printed, keys_only):
    parts = kv.model_token_parts(arch(name), parallel, dtype)
    size = (tokens + page) * (parts.keys if keys_only else parts.total) / GIB
    assert size == pytest.approx(printed, abs=0.0052)


def test_logged_kv_size_with_16_bit_index_keys():
    """S4: DeepSeek-V3.2 on Ascend keeps the indexer's keys in bfloat16."""
    per_token = kv.model_token_bytes(
        arch("deepseek-ai/DeepSeek-V3.2"), Parallel(tp=16, dp=16, dp_attention=True), "bfloat16", index_16bit=True
    )
    assert (220416 + 128) * per_token / GIB == pytest.approx(17.64, abs=0.005)


def test_logged_keys_of_a_hybrid_that_gave_every_layer_kv():
    """S8: an expected difference. That release allocated KV for all 48 layers; the model needs it in 12."""
    model, parallel = arch("Qwen/Qwen3-Next-80B-A3B"), Parallel(tp=4)
    needed = kv.model_token_parts(model, parallel, "bfloat16").keys
    assert (450560 + 128) * needed / GIB == pytest.approx(2.579, abs=0.001)
    assert (450560 + 128) * needed * 48 / 12 / GIB == pytest.approx(10.32, abs=0.005)


@pytest.mark.parametrize(
    ("attention", "dtype", "framework", "options", "expected"),
    [
        (MLA, "bfloat16", "vllm", {}, 1152),
        (MLA, "fp8_e4m3", "sglang", {}, 576),
        (MLA, "fp8_ds_mla", "vllm", {}, 656),
        (MLA, "nvfp4_ds_mla", "vllm", {}, 352),
        (DSA, "fp8_e4m3", "sglang", {}, 656 + 132),
        (DSA, "fp8_e4m3", "sglang", {"dsa_scaled": False}, 576 + 132),
        (DSA, "bfloat16", "sglang", {"index_16bit": True}, 1152 + 256),
        (Attention(32, 8, 128, 128), "bfloat16", "vllm", {}, 8 * 256 * 2),
        (Attention(32, 8, 192, 128), "bfloat16", "vllm", {}, 8 * 320 * 2),
        (Attention(32, 8, 128, 128), "fp8", "vllm", {}, 8 * 256),
        (Attention(32, 8, 128, 128), "nvfp4", "vllm", {}, 8 * 2 * (64 + 8)),
        (Attention(32, 8, 128, 128), "fp4_e2m1", "sglang", {}, 8 * 2 * (64 + 8)),
        (Attention(32, 8, 128, 128), "fp8_per_token_head", "vllm", {}, 8 * 2 * (128 + 4)),
        (Attention(32, 8, 128, 128), "mxfp8", "sglang", {}, 8 * 2 * (128 + 4)),
    ],
)
def test_one_layer(attention, dtype, framework, options, expected):
    assert kv.layer_token_bytes(attention, 1, dtype, framework, **options).total == expected


def test_latent_attention_is_not_divided():
    assert kv.layer_token_bytes(MLA, 16, "bfloat16") == kv.layer_token_bytes(MLA, 1, "bfloat16")


def test_layers_that_follow_an_indexer_store_no_index_keys():
    model = arch("zai-org/GLM-5.2")
    indexed = [
        layer for layer in model.layers if isinstance(layer.attention, LatentAttention) and layer.attention.index_dim
    ]
    assert 0 < len(indexed) < len(model.layers)
    assert kv.model_token_parts(model, ONE, "bfloat16").index == 132 * len(indexed)


def test_auto_is_the_models_type():
    model = arch("Qwen/Qwen3-32B")
    assert kv.model_token_bytes(model, ONE) == kv.model_token_bytes(model, ONE, "bfloat16")


def test_draft_layers_are_counted_apart():
    assert kv.model_token_bytes(arch("deepseek-ai/DeepSeek-V3"), ONE, draft=True) == 1152
    assert kv.model_token_bytes(arch("Qwen/Qwen3.5-27B"), ONE, draft=True) == 65536 // 16
    assert kv.model_token_bytes(arch("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"), ONE, draft=True) == 1024


def test_a_pipeline_stage_holds_its_layers_only():
    model = arch("meta-llama/Meta-Llama-3.1-8B")
    assert kv.model_token_bytes(model, Parallel(pp=4)) * 4 == kv.model_token_bytes(model, ONE)


def test_vllm_gives_left_over_layers_to_the_last_stages_but_one():
    model, at = arch("deepseek-ai/DeepSeek-V3"), Parallel(pp=4)
    sizes = [kv.model_token_bytes(model, at, framework="vllm", stage=stage) // 1152 for stage in range(4)]
    assert sizes == [15, 15, 16, 15]
    assert kv.model_token_bytes(model, Parallel(pp=2), framework="vllm") == 31 * 1152


def test_stages_of_unequal_size_are_refused_where_the_rule_was_not_read():
    with pytest.raises(NotModelledError, match="61 layers do not divide evenly over 2"):
        kv.model_token_bytes(arch("deepseek-ai/DeepSeek-V3"), Parallel(pp=2))


def test_heads_that_neither_divide_nor_repeat_are_refused():
    with pytest.raises(NotModelledError, match="8 KV heads over tensor parallel size 6"):
        kv.layer_token_bytes(Attention(48, 8, 128, 128), 6, "bfloat16")


def test_an_unknown_type_is_refused():
    with pytest.raises(NotModelledError, match="fp3"):
        kv.layer_token_bytes(Attention(32, 8, 128, 128), 1, "fp3")


heads = st.integers(1, 64)
dims = st.sampled_from([64, 80, 96, 128, 192, 256])
powers = st.sampled_from([1, 2, 4, 8, 16, 32, 64])


@given(heads, heads, dims, st.sampled_from(["bfloat16", "fp8", "nvfp4", "mxfp8"]))
def test_more_heads_take_more_bytes(few, more, dim, dtype):
    small = kv.layer_token_bytes(Attention(64, min(few, more), dim, dim), 1, dtype).total
    large = kv.layer_token_bytes(Attention(64, few + more, dim, dim), 1, dtype).total
    assert large > small


@given(powers, powers, dims)
def test_ranks_hold_the_whole_and_no_more_than_they_must(kv_heads, tp, dim):
    """Summed over ranks: equal where the heads divide, one head a rank where they are replicated."""
    attention = Attention(64, kv_heads, dim, dim)
    whole = kv.layer_token_bytes(attention, 1, "bfloat16").total
    ranks = tp * kv.layer_token_bytes(attention, tp, "bfloat16").total
    assert ranks == (whole if kv_heads >= tp else whole // kv_heads * tp)
    assert ranks >= whole


@given(st.integers(1, 12), powers)
def test_a_model_is_the_sum_of_its_layers(count, tp):
    layer = Layer(Attention(64, 8, 128, 128))
    model = Architecture("m", "llama", "M", 64, 64, (layer,) * count)
    one = kv.layer_token_bytes(layer.attention, tp, "bfloat16").total
    assert kv.model_token_bytes(model, Parallel(tp=tp)) == count * one


@given(powers)
def test_fp8_is_half_of_bfloat16(kv_heads):
    attention = Attention(64, kv_heads, 128, 128)
    wide = kv.layer_token_bytes(attention, 1, "bfloat16").total
    assert kv.layer_token_bytes(attention, 1, "fp8_e5m2").total * 2 == wide
