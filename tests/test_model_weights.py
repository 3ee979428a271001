"""Weights: parameter counts, sharding, formats, and figures that engines printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memledger.model import table, weights
from memledger.model.architecture import (
    Architecture,
    Attention,
    DenseMlp,
    Layer,
    MoeMlp,
    NotModelledError,
    Parallel,
    Quantization,
)
from memledger.units import GIB

ONE = Parallel()


def arch(name: str) -> Architecture:
    found = table.look_up(name)
    assert found is not None
    return found.architecture


def gib(model: Architecture, parallel: Parallel = ONE, framework="vllm", **options) -> float:
    return weights.weight_bytes(model, parallel, framework, **options).bytes / GIB


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Meta-Llama-3.1-8B", 8.030),
        ("meta-llama/Meta-Llama-3.1-70B", 70.554),
        ("Qwen/Qwen3-32B", 32.762),
        ("Qwen/Qwen3-235B-A22B", 235.094),
        ("deepseek-ai/DeepSeek-V3", 671.026),
        ("openai/gpt-oss-120b", 116.829),
        ("Qwen/Qwen3-Next-80B-A3B", 79.674),
        ("Qwen/Qwen3.5-27B", 26.896),
        ("Qwen/Qwen3.5-35B-A3B", 34.661),
        ("Qwen/Qwen3.5-122B-A10B", 122.112),
        ("Qwen/Qwen3.5-397B-A17B", 396.346),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.578),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", 120.669),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 49.123),
    ],
)
def test_parameters_of_known_models(name, billions):
    assert weights.parameter_count(arch(name)) / 1e9 == pytest.approx(billions, abs=0.00051)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        # Counts published with another framework's presets (keras-hub gemma3_presets.py).
        ("google/gemma-3-1b-it", 999_885_952),
        ("google/gemma-3-4b-it", 3_880_099_328),
        ("google/gemma-3-12b-it", 11_765_788_416),
    ],
)
def test_gemma_parameters_to_the_digit(name, exact):
    """The preset's vocabulary is 262144; the released config rounds it up."""
    assert weights.parameter_count(replace(arch(name), vocabulary=262144)) == exact


def llama3(**changes) -> Architecture:
    return replace(arch("meta-llama/Meta-Llama-3.1-8B"), **changes)


# "Model loading took" of vLLM for a named model, in GiB as printed.
@pytest.mark.parametrize(
    ("model", "parallel", "options", "printed", "relative"),
    [
        pytest.param("meta-llama/Meta-Llama-3-8B", ONE, {}, 14.9596, 0.0001, id="W1"),
        pytest.param("meta-llama/Meta-Llama-3.1-8B", ONE, {}, 14.9889, 0.0001, id="W2"),
        pytest.param("meta-llama/Llama-3.3-70B", Parallel(tp=8), {}, 16.46, 0.0004, id="W3"),
        pytest.param("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", ONE, {}, 58.91, 0.0004, id="W6"),
        pytest.param("Qwen/Qwen3.6-35B-A3B", ONE, {"language_only": True}, 64.69, 0.0001, id="W5"),
        pytest.param("openai/gpt-oss-20b", ONE, {"expert_kernel": "marlin"}, 13.7193, 0.0025, id="W9"),
        # These three hold tensors that torch's blocks exceed.
        pytest.param("Qwen/Qwen2.5-32B-Instruct", Parallel(tp=4), {}, 15.3916, 0.0001, id="Qwen2.5-32B"),
        pytest.param("Qwen/Qwen2.5-7B-Instruct", ONE, {}, 14.25, 0.0004, id="Qwen2.5-7B"),
        pytest.param("nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", ONE, {}, 7.43, 0.0007, id="Nemotron-3-Nano-4B"),
        pytest.param("microsoft/Phi-3-mini-4k-instruct", ONE, {}, 7.12, 0.0007, id="Phi-3-mini"),
    ],
)
def test_logged_weights(model, parallel, options, printed, relative):
    assert gib(arch(model), parallel, **options) == pytest.approx(printed, rel=relative)


def test_logged_weights_of_a_later_release():
    """W4, W8: the 2507 releases of Qwen3-30B-A3B have 262144 positions; nothing else differs."""
    assert gib(replace(arch("Qwen/Qwen3-30B-A3B"), max_positions=262144)) == pytest.approx(56.9342, rel=0.0001)
    assert gib(replace(arch("Qwen/Qwen3-30B-A3B-FP8"), max_positions=262144)) == pytest.approx(29.08, rel=0.0007)


def test_logged_weights_of_4_bit_copies():
    """W7: GPTQ +0.1 %; AWQ -0.5 %, an expected difference beyond the engine's usual 0.2 %."""
    gptq = Quantization("gptq", bits=4, group=128, zero_points=True)
    assert gib(llama3(max_positions=8192, quantization=gptq)) == pytest.approx(5.33, rel=0.0013)
    awq = replace(gptq, method="awq")
    assert gib(llama3(quantization=awq)) == pytest.approx(5.39, rel=0.005)


@pytest.mark.parametrize(
    ("model", "tp", "printed"), [("Qwen/Qwen3-235B-A22B", 16, 27.62), ("Qwen/Qwen3-32B", 8, 8.01)], ids=["W10a", "W10b"]
)
def test_logged_weights_by_free_memory(model, tp, printed):
    """W10: SGLang's meter is the fall of free memory, up to 5 % more than the weights."""
    made = weights.weight_bytes(arch(model), Parallel(tp=tp), "sglang")
    assert made.low <= printed * GIB <= made.high


def test_the_range_holds_what_vllm_printed():
    made = weights.weight_bytes(arch("meta-llama/Meta-Llama-3.1-8B"), ONE, "vllm")
    assert made.low <= 14.9889 * GIB <= made.high
    assert made.high - made.low == pytest.approx(0.004 * made.bytes, rel=0.01)
    assert made.amount.bytes == made.bytes
    assert made.amount.tolerance >= made.bytes - made.low


def test_an_unknown_expert_kernel_widens_the_range():
    made = weights.weight_bytes(arch("openai/gpt-oss-20b"), ONE, "vllm")
    padded = weights.weight_bytes(arch("openai/gpt-oss-20b"), ONE, "vllm", expert_kernel="marlin")
    assert made.bytes < padded.bytes <= made.high
    assert any("kernel" in note for note in made.notes)


def test_parts_add_up():
    made = weights.weight_bytes(arch("Qwen/Qwen3.5-35B-A3B"), Parallel(tp=2), "vllm", draft=True)
    assert sum(made.parts.values()) == made.bytes
    assert {"experts", "state", "attention", "embedding", "rope", "vision", "draft"} <= set(made.parts)


def test_rotary_tables_of_m_rope_are_four_times_as_long_in_vllm():
    model = arch("Qwen/Qwen3.6-35B-A3B")
    assert weights.weight_bytes(model, ONE, "vllm").parts["rope"] == 262144 * 4 * 64 * 2
    assert weights.weight_bytes(model, ONE, "sglang").parts["rope"] == 262144 * 64 * 2


def test_kv_heads_are_replicated_beyond_their_count():
    """More GPUs than KV heads: each GPU keeps one, so attention shrinks by less than half."""
    model = arch("Qwen/Qwen3-235B-A22B")
    at4, at8 = (weights.weight_bytes(model, Parallel(tp=tp), "vllm").parts["attention"] for tp in (4, 8))
    assert at4 / 2 < at8 < at4


def test_dp_attention_keeps_attention_whole_and_cuts_experts():
    model = arch("deepseek-ai/DeepSeek-V3")
    alone = weights.weight_bytes(model, ONE, "sglang").parts
    spread = weights.weight_bytes(model, Parallel(tp=8, ep=8, dp=8, dp_attention=True), "sglang").parts
    assert spread["attention"] == alone["attention"]
    assert spread["experts"] < alone["experts"] / 7


def test_modules_that_a_checkpoint_skips_stay_16_bit():
    fp8 = Quantization("fp8", bits=8)
    kept = ("model.layers.*.self_attn", "re:.*shared_experts.*", "lm_head")
    whole = weights.weight_bytes(llama3(), ONE, "vllm").parts
    some = weights.weight_bytes(llama3(quantization=replace(fp8, skipped=kept)), ONE, "vllm").parts
    assert some["attention"] == whole["attention"]
    assert some["feed_forward"] * 2 == whole["feed_forward"]


def test_a_skipped_layer_is_that_layer_only():
    fp8 = Quantization("fp8", bits=8, skipped=("model.layers.1.*",))
    whole = weights.weight_bytes(llama3(), ONE, "vllm").parts["attention"]
    some = weights.weight_bytes(llama3(quantization=fp8), ONE, "vllm").parts["attention"]
    assert some == whole // 2 + whole // 2 // 32


def test_gate_names_the_router_not_the_gate_projection():
    fp8 = Quantization("fp8", bits=8, skipped=("gate",))
    assert gib(llama3(quantization=fp8)) == gib(llama3(quantization=replace(fp8, skipped=())))


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (Quantization("fp8", bits=8), 8),
        (Quantization("fp8", bits=8, group=128), 8 + 32 / 16384),
        (Quantization("gptq", bits=4, group=128, zero_points=True), 4 + 20 / 128),
        (Quantization("awq", bits=4, group=128), 4.125),
        (Quantization("mxfp4", bits=4, group=32), 4.25),
        (Quantization("nvfp4", bits=4, group=16), 4.5),
    ],
)
def test_bits_of_a_weight(quantization, bits):
    assert float(weights.quantized_bits(quantization)) == bits


def test_formats_without_a_known_size_are_refused():
    with pytest.raises(NotModelledError, match="modelopt"):
        gib(arch("nvidia/Qwen3.6-27B-NVFP4"))


def test_a_field_the_source_lacks_is_named():
    with pytest.raises(NotModelledError, match="vocab_size"):
        weights.parameter_count(arch("inclusionAI/Ring-mini-linear-2.0"))


def test_a_gate_that_is_not_modelled_is_refused():
    with pytest.raises(NotModelledError, match="full-rank gate"):
        weights.parameter_count(arch("moonshotai/Kimi-K3"))


def test_the_last_stage_has_the_head_and_the_first_the_embedding():
    stages = [weights.weight_bytes(llama3(), Parallel(pp=2), "vllm", stage=number) for number in (0, 1)]
    assert stages[0].parts["embedding"] == stages[1].parts["embedding"] == 128256 * 4096 * 2


powers = st.sampled_from([1, 2, 4, 8])


def made(heads: int, kv_heads: int, layers: int, experts: int = 0, vocabulary: int = 512) -> Architecture:
    mlp = MoeMlp(experts, 256) if experts else DenseMlp(512)
    layer = Layer(Attention(heads, kv_heads, 64, 64), mlp=mlp)
    return Architecture("made", "llama", "Made", 256, vocabulary, (layer,) * layers)


@given(powers, powers, st.integers(1, 4), st.sampled_from([0, 8, 16]))
def test_ranks_hold_at_least_the_whole(tp, kv_heads, layers, experts):
    """Equal for what divides (vocabulary, projections, feed-forward); norms, router and spare KV heads are repeated."""
    model = made(16, kv_heads, layers, experts)
    whole = weights.weight_bytes(model, ONE, "vllm").parts
    rank = weights.weight_bytes(model, Parallel(tp=tp), "vllm").parts
    assert rank["embedding"] * tp == whole["embedding"]
    assert rank["attention"] * tp >= whole["attention"]
    if kv_heads >= tp:
        assert rank["attention"] * tp == whole["attention"]
    assert rank["norms"] == whole["norms"]
    if not experts:
        assert rank["feed_forward"] * tp == whole["feed_forward"]


@given(st.integers(1, 8), st.integers(1, 8))
def test_more_layers_weigh_more(few, more):
    assert gib(made(16, 8, few + more)) > gib(made(16, 8, few))


@given(powers)
def test_expert_parallel_and_tensor_parallel_cut_experts_alike(ranks):
    model = made(16, 8, 2, experts=16)
    by_expert = weights.weight_bytes(model, Parallel(tp=ranks, ep=ranks), "vllm").parts["experts"]
    by_width = weights.weight_bytes(model, Parallel(tp=ranks), "vllm").parts["experts"]
    assert by_expert == by_width


def test_a_format_known_by_name_leaves_room_for_modules_kept_in_16_bits():
    """Copies of hybrids often leave attention and state unquantised; the range holds that reading too."""
    found = table.look_up("someone/Qwen3.5-27B-AWQ")
    assert found is not None
    made = weights.weight_bytes(found.architecture, ONE, "vllm")
    kept = replace(
        found.architecture,
        quantization=Quantization("awq", bits=4, group=128, zero_points=True, skipped=("linear_attn", "self_attn")),
    )
    assert made.bytes < weights.weight_bytes(kept, ONE, "vllm").bytes <= made.high


def test_small_models_may_show_more_than_the_share_in_sglang():
    made = weights.weight_bytes(arch("Qwen/Qwen2.5-1.5B"), ONE, "sglang")
    assert made.high - made.bytes >= 256 * 2**20
    large = weights.weight_bytes(arch("Qwen/Qwen3-32B"), ONE, "sglang")
    assert large.high - large.bytes == pytest.approx(0.05 * large.bytes, rel=0.001)


@pytest.mark.parametrize(
    ("mib", "extra"),
    [
        (135.0, 1.0),  # to 136: what is left is not above 1 MiB and stays in the block
        (67.5, 0.5),
        (12.5, 0.0),  # 1.5 MiB are left and split off
        (64.0, 0.0),
        (9.5, 0.0),  # from a segment shared with others
    ],
)
def test_blocks_exceed_large_tensors_by_what_is_too_small_to_split_off(mib, extra):
    assert weights.allocator_rounding([int(mib * 2**20)] * 3) == 3 * int(extra * 2**20)


def test_block_rounding_is_a_part_of_vllms_figure_and_may_be_missing():
    model = arch("Qwen/Qwen2.5-7B-Instruct")
    made = weights.weight_bytes(model, ONE, "vllm")
    extra = made.parts["allocator"]
    assert extra > 50 * 2**20
    # Expandable segments round nothing.
    assert made.low <= made.bytes - extra
    assert "allocator" not in weights.weight_bytes(model, ONE, "sglang").parts


def test_dp_attention_and_all_to_all_keep_more_on_every_gpu():
    model = arch("deepseek-ai/DeepSeek-R1")
    cut = Parallel(tp=32, ep=32, dp=8, dp_attention=True)
    plain = weights.weight_bytes(model, cut, "sglang")
    dense = weights.weight_bytes(model, replace(cut, moe_dense_tp=1), "sglang")
    shared = weights.weight_bytes(model, replace(cut, whole_shared_experts=True), "sglang")
    head = weights.weight_bytes(model, replace(cut, dp_lm_head=True), "sglang")
    assert plain.parts["embedding"] == 129280 * 7168 * 2 * (1 + 1 / 32)
    # Three dense layers and 58 shared experts, 8 bits, whole instead of a 32nd.
    assert dense.bytes - plain.bytes == pytest.approx(3 * 3 * 7168 * 18432 * 31 / 32, rel=0.001)
    assert shared.bytes - plain.bytes == pytest.approx(58 * 3 * 7168 * 2048 * 31 / 32, rel=0.001)
    assert head.bytes - plain.bytes == pytest.approx(129280 * 7168 * 2 * (1 / 4 - 1 / 32), rel=0.001)


def test_a_dense_model_knows_no_dense_size_of_experts():
    model = arch("Qwen/Qwen3-32B")
    assert weights.weight_bytes(model, Parallel(tp=4, moe_dense_tp=1), "sglang").bytes == (
        weights.weight_bytes(model, Parallel(tp=4), "sglang").bytes
    )


def test_what_a_prediction_module_gives_back_is_its_embedding_and_head():
    model = arch("deepseek-ai/DeepSeek-R1")
    cut = Parallel(tp=32, ep=32, dp=8, dp_attention=True, dp_lm_head=True, whole_shared_experts=True)
    assert weights.shared_with_target(model, cut) == 129280 * 7168 * 2 * 5 // 4
    assert weights.shared_with_target(model, ONE) == 2 * 129280 * 7168 * 2


def test_a_prediction_module_is_one_layer_with_embedding_and_head():
    model = arch("deepseek-ai/DeepSeek-R1")
    cut = Parallel(tp=32, ep=32, dp=8, dp_attention=True, dp_lm_head=True, whole_shared_experts=True, moe_dense_tp=1)
    made = weights.module_bytes(model, cut, "sglang")
    # Printed by a public server of this shape: 2.77; its rotary table grew later.
    assert (made.bytes - made.parts["rope"]) / GIB == pytest.approx(2.77, abs=0.01)
    assert sum(made.parts.values()) == made.bytes
    with pytest.raises(NotModelledError, match="prediction"):
        weights.module_bytes(arch("Qwen/Qwen3-32B"), ONE, "sglang")


def test_a_4_bit_copy_known_by_name_may_have_finer_or_no_groups():
    named = Quantization("awq", bits=4, group=128, zero_points=True, named_only=True)
    told = replace(named, named_only=False)
    by_name = weights.weight_bytes(llama3(quantization=named), ONE, "vllm")
    known = weights.weight_bytes(llama3(quantization=told), ONE, "vllm")
    finer = weights.weight_bytes(llama3(quantization=replace(told, group=32)), ONE, "vllm")
    none = weights.weight_bytes(llama3(quantization=replace(told, group=None)), ONE, "vllm")
    assert by_name.low < none.bytes < known.bytes < finer.bytes < by_name.high
