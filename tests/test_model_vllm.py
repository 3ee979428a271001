"""vLLM's pool arithmetic: equal to the digit to the engine's own planner, to real servers and to public logs.

Geometries are written out beside the rows that use them, with their source. `tests/data/vllm-0.33.0-planned-pools.json`
holds figures computed by vLLM 0.33.0's own planning code.
"""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.model import vllm, vllm_facts
from memledger.model.architecture import (
    Architecture,
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    Mamba1,
    Mamba2,
    NotModelledError,
    Parallel,
    ShortConvolution,
)
from memledger.model.layers import stage_sizes
from memledger.model.vllm import CacheLayer, Settings
from memledger.units import GIB, MIB, parse_amount

ONE = Parallel()


def model(name, model_type, full, *, state=None, states=0, attention=None, sliding=0, window=None, draft=0, **more):
    """An architecture of `full` attention layers, `states` layers of `state`, `sliding` layers with a window."""
    layers = [Layer(state=state)] * states + [Layer(attention=attention)] * full
    if sliding:
        layers += [Layer(attention=msgspec.structs.replace(attention, window=window))] * sliding
    return Architecture(
        name,
        model_type,
        "",
        more.pop("hidden", 4096),
        32000,
        tuple(layers),
        draft_layers=(Layer(attention=attention),) * draft,
        **more,
    )


def gdn(v_heads, k_heads=16):
    return GatedDeltaNet(k_heads, v_heads, 128, 128, 4)


# Source of these fields: the models' config.json as copied in public repositories (ai-dynamo/aiconfigurator
# @ 095f58a51c4c for the Qwen3.5, Nemotron-3, gpt-oss and Llama ones; transformers' defaults for Qwen3-Next, Kimi-Linear).
QWEN_35B = model(
    "Qwen3.6-35B-A3B", "qwen3_5_moe", 10, attention=Attention(16, 2, 256, 256), state=gdn(32), states=30, draft=1,
    state_dtype="float32",
)  # fmt: skip
QWEN_27B = model(
    "Qwen3.5-27B", "qwen3_5", 16, attention=Attention(24, 4, 256, 256), state=gdn(48), states=48, draft=1,
    state_dtype="float32",
)  # fmt: skip
QWEN_NEXT = model(
    "Qwen3-Next-80B-A3B", "qwen3_next", 12, attention=Attention(16, 2, 256, 256), state=gdn(32), states=36
)
NEMOTRON_NANO = model(
    "Nemotron-3-Nano", "nemotron_h", 6, attention=Attention(32, 2, 128, 128),
    state=Mamba2(64, 64, 8, 128, 4), states=23, state_dtype="float32",
)  # fmt: skip
NEMOTRON_SUPER = model(
    "Nemotron-3-Super", "nemotron_h", 8, attention=Attention(32, 2, 128, 128),
    state=Mamba2(128, 64, 8, 128, 4), states=40, draft=1, state_dtype="float32",
)  # fmt: skip
GRANITE_SMALL = model(
    "granite-4.0-h-small", "granitemoehybrid", 4, attention=Attention(32, 8, 128, 128),
    state=Mamba2(128, 64, 1, 128, 4), states=36,
)  # fmt: skip
KIMI_LINEAR = model(
    "Kimi-Linear-48B", "kimi_linear", 7, attention=LatentAttention(32, 512, 64, 128, 128),
    state=KimiDeltaAttention(32, 128, 4), states=20,
)  # fmt: skip
JAMBA = model("Jamba-v0.1", "jamba", 4, attention=Attention(32, 8, 128, 128), state=Mamba1(8192, 16, 4), states=28)
LFM2 = model("LFM2-1.2B", "lfm2", 6, attention=Attention(32, 8, 64, 64), state=ShortConvolution(2048, 3), states=10)
LLAMA_8B = model("Llama-3-8B", "llama", 32, attention=Attention(32, 8, 128, 128))
LLAMA_8B_EAGLE = model("Llama-3-8B + EAGLE", "llama", 33, attention=Attention(32, 8, 128, 128))
LLAMA_70B = model("Llama-3.3-70B", "llama", 80, attention=Attention(64, 8, 128, 128))
QWEN3_30B = model("Qwen3-30B-A3B", "qwen3_moe", 48, attention=Attention(32, 4, 128, 128))
GPT_OSS_20B = model("gpt-oss-20b", "gpt_oss", 12, attention=Attention(64, 8, 64, 64), sliding=12, window=128)
GEMMA_27B = model("gemma-3-27b", "gemma3", 10, attention=Attention(32, 16, 128, 128), sliding=52, window=1024)
TINY_GDN = model(
    "tiny GDN", "qwen3_next", 2, attention=Attention(4, 2, 64, 64), state=gdn(4, 2), states=6
)  # the test server's model: 8 layers, every fourth full attention
TINY_LLAMA = model("tiny Llama", "llama", 4, attention=Attention(8, 2, 32, 32))


def at(version, length=4096, **more):
    return Settings(vllm.modelled_release(version), length, **more)


def gib(text):
    amount = parse_amount(text, "GiB.2")
    assert amount is not None
    return amount


# The engine's own planner

PLANNED = json.loads((Path(__file__).parent / "data" / "vllm-0.33.0-planned-pools.json").read_text())["rows"]
ROWS = [row for row in PLANNED if "expect" in row]
REFUSALS = [row for row in PLANNED if "longest" in row]


def planned_pool(row, length=None):
    layers = [CacheLayer(state_bytes=row["conv_bytes"] + row["temporal_bytes"])] * row["state_layers"]
    layers += [CacheLayer(token_bytes=row["token_bytes"])] * row["attention_layers"]
    settings = at("0.33.0", length or row["max_model_len"], kernel_block=row["kernel_block"], state_mode=row["mode"])
    return vllm.plan(layers, settings)


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_every_planned_pool_comes_out_to_the_digit(row):
    pool, expect = planned_pool(row), row["expect"]
    assert pool.block.tokens == expect["block_size"]
    assert {size // group.layers for group in pool.groups for size in group.stage_bytes} == {expect["page_bytes"]}
    assert pool.bytes_per_block == expect["bytes_per_block"]
    names = {"full": "FullAttentionSpec", "state": "MambaSpec"}
    assert [[names[group.kind], group.layers, group.block_tokens] for group in pool.groups] == expect["groups"]
    number = vllm.blocks(pool, row["available"])
    assert number == expect["num_blocks"]
    printed = vllm.capacity(pool, number)
    assert (printed.tokens, printed.concurrency) == (expect["tokens"], expect["concurrency"])
    lines = list(vllm.log_lines(pool, number))
    if not any("KV cache size" in line for line in expect["log"]):
        lines = [line for line in lines if "KV cache size" not in line]  # printed once per process by the planner
    assert lines == expect["log"]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_the_same_pools_come_from_the_architecture(row):
    arch = {"qwen3-next-80b-a3b": QWEN_NEXT, "qwen3.5-35b-a3b": QWEN_35B, "llama-3.1-8b": LLAMA_8B}[row["model"]]
    temporal = row["temporal_bytes"] // (32 * 128 * 128) if row["state_layers"] else 0
    pool = vllm.pool_of(
        arch,
        ONE,
        "0.33.0",
        row["max_model_len"],
        kv_dtype="fp8" if row["token_bytes"] == 1024 else "auto",
        state_dtype={4: "float32", 2: "bfloat16", 0: None}[temporal],
        prefix_caching=row["mode"] == "align" or not row["state_layers"],
        prefill_backend="triton",
        settings=at("0.33.0", kernel_block=row["kernel_block"]),
    )
    expect = row["expect"]
    assert pool.block.tokens == expect["block_size"]
    assert pool.bytes_per_block == expect["bytes_per_block"]
    assert vllm.capacity(pool, expect["num_blocks"]).tokens == expect["tokens"]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row['model']}-{row['available']}")
def test_what_the_planner_says_when_a_request_does_not_fit(row):
    pool = planned_pool(PLANNED[row["like"]], row["max_model_len"])
    assert vllm.gib(vllm.needed_bytes(pool, row["max_model_len"])) == row["needed_gib"]
    assert vllm.gib(row["available"] - pool.bytes_per_block) == row["usable_gib"]
    assert vllm.longest_context(pool, row["available"]) == row["longest"]


# Real servers on a CPU (block size 128 by default; float32 state from 0.29)


@pytest.mark.parametrize(
    ("version", "arch", "size", "length", "caching", "number", "tokens", "concurrency", "block", "padding"),
    [
        ("0.27.1", TINY_GDN, 256, 4096, None, 682, "199,533", "48.71", 384, "43.28"),
        ("0.28.0", TINY_GDN, 256, 4096, None, 682, "164,321", "40.12", 384, "43.28"),
        ("0.30.0", TINY_GDN, 256, 4096, None, 409, "128,866", "31.46", 640, "22.14"),
        ("0.32.0", TINY_GDN, 256, 4096, None, 409, "128,866", "31.46", 640, "22.14"),
        ("0.32.0", TINY_GDN, 256, 4096, False, 409, "167,526", "40.90", 640, "22.14"),
        ("0.32.0", TINY_GDN, 24, 2048, None, 38, "7,782", "3.80", 640, "22.14"),
        ("0.32.0", TINY_GDN, 64, 4096, None, 102, "32,137", "7.85", 640, "22.14"),
        ("0.28.0", TINY_LLAMA, 256, 4096, None, 2048, "262,144", "64.00", 128, None),
        ("0.30.0", TINY_LLAMA, 256, 4096, None, 2048, "262,144", "64.00", 128, None),
        ("0.32.0", TINY_LLAMA, 64, 8192, None, 512, "65,536", "8.00", 128, None),
    ],
)
def test_real_servers_print_these_figures(
    version, arch, size, length, caching, number, tokens, concurrency, block, padding
):
    float32 = arch is TINY_GDN and vllm.modelled_release(version) >= (0, 29, 0)
    pool = vllm.pool_of(
        arch,
        ONE,
        version,
        length,
        state_dtype="float32" if float32 else None,
        prefix_caching=caching,
        prefill_backend="triton",
        settings=at(version, default_block=128),
    )
    assert pool.block.tokens == block
    assert vllm.blocks(pool, size * MIB) == number
    lines = vllm.log_lines(pool, number, "CPU")
    word = "CPU" if vllm.modelled_release(version) >= (0, 30, 0) else "GPU"
    size_line = f"{word} KV cache size: {tokens} tokens"
    most = f"Maximum concurrency for {length:,} tokens per request: {concurrency}x"
    assert lines[-2:] == (size_line, most) if version == "0.27.1" else lines[-1] == f"{size_line}, {most}"
    if padding is not None:
        assert lines[0].startswith(f"Setting attention block size to {block} tokens")
        assert lines[1].startswith(f"Padding mamba page size by {padding}%")


@pytest.mark.parametrize(
    ("arch", "size", "length", "needed", "longest"),
    [(TINY_LLAMA, 2, 8192, "0.01", 1920), (TINY_GDN, 4, 32768, "0.04", 0)],
)
def test_real_servers_refuse_with_these_figures(arch, size, length, needed, longest):
    pool = vllm.pool_of(
        arch, ONE, "0.32.0", length, state_dtype="float32", prefill_backend="triton",
        settings=at("0.32.0", default_block=128),
    )  # fmt: skip
    assert vllm.gib(vllm.needed_bytes(pool, length)) == needed
    assert vllm.longest_context(pool, size * MIB) == longest


# Public logs: the printed bytes, tokens and concurrency must leave at least one block count

LOGS = {
    # id: (arch, version, tp, kv dtype, caching, draft tokens, further settings, A, length, block, padding %, tokens, concurrency)
    "V1": (QWEN_35B, "0.19.2rc1", 1, "auto", False, 0, {}, "47.55", 131072, 1056, "0.76", 623040, "18.44"),
    "V2": (NEMOTRON_SUPER, "0.19.2rc1", 1, "fp8", False, 3, {}, "36.25", 131072, 8432, "0.00", 1399712, "27.81"),
    "V7": (NEMOTRON_NANO, "0.23.1.dev1", 1, "auto", False, 0, {}, "91.13", 8192, 2096, "0.58", 7780352, "949.75"),
    "V8": (
        NEMOTRON_NANO, "0.17.1", 1, "auto", True, 0, {"state_chunk": 128}, "11.94", 8192, 2176, "4.41", 415616, "47.95",
    ),
    "V9": (LLAMA_8B, "0.24.0", 1, "auto", None, 0, {}, "47.32", 8192, 16, None, 387632, None),
    "V12": (
        GPT_OSS_20B, "0.13.0", 1, "auto", None, 0, {"in_flight_tokens": 2048}, "12.94", 8192, 16, None, 282624, "54.44",
    ),
}  # fmt: skip
# The geometry is inferred, not named by the log: these show consistency, not proof.
CONSISTENT = {
    "V3": (QWEN_27B, "0.25.1", 1, "auto", False, 3, {}, "80.17", 262144, 800, "0.25", 1191213, "4.54"),
    "V4": (QWEN_27B, "0.25.1", 1, "fp8", False, 3, {}, "76.4", 262144, 1600, "0.25", 2192477, "8.36"),
}


def logged_pool(row):
    arch, version, tp, kv_dtype, caching, draft, more, _, length, *_ = row
    return vllm.pool_of(
        arch, Parallel(tp=tp), version, length, kv_dtype=kv_dtype, prefix_caching=caching, draft_tokens=draft,
        prefill_backend="triton", settings=at(version, length, **more),
    )  # fmt: skip


@pytest.mark.parametrize("row", [*LOGS.values(), *CONSISTENT.values()], ids=[*LOGS, *CONSISTENT])
def test_public_logs_leave_a_number_of_blocks_that_prints_all_their_figures(row):
    *_, available, _, block, padding, tokens, concurrency = row
    pool = logged_pool(row)
    assert pool.block.tokens == block
    if padding is not None:
        assert f"{pool.block.padding_percent:.2f}" == padding
    number = vllm.blocks_from_figures(pool, tokens=tokens, concurrency=concurrency, available=gib(available))
    assert vllm.capacity(pool, number.low).tokens == tokens
    assert concurrency is None or f"{vllm.capacity(pool, number.low).concurrency:.2f}" == concurrency
    # and what the printed bytes give, read as they stand, is within their rounding
    nominal = vllm.blocks(pool, gib(available).bytes)
    assert abs(nominal - number.low) <= gib(available).tolerance // pool.bytes_per_block + len(pool.groups)


@pytest.mark.parametrize("name", ["V1", "V2", "V3", "V4", "V7", "V9"])
def test_figures_computed_from_the_printed_bytes_as_they_stand(name):
    row = {**LOGS, **CONSISTENT}[name]
    *_, available, _, _, _, tokens, concurrency = row
    pool = logged_pool(row)
    printed = vllm.capacity(pool, vllm.blocks(pool, gib(available).bytes))
    assert printed.tokens == tokens
    assert concurrency is None or f"{printed.concurrency:.2f}" == concurrency


def test_v7_has_one_padding_layer_of_23():
    (padding,) = logged_pool(LOGS["V7"]).padding
    assert (padding.layers, f"{padding.percent:.2f}") == (1, "4.35")
    assert "Add 1 padding layers, may waste at most 4.35% KV cache memory" in vllm.log_lines(
        logged_pool(LOGS["V7"]), 7598
    )


@pytest.mark.parametrize(
    ("arch", "version", "tp", "available", "logged", "computed"),
    [
        # Expected differences: the printed bytes are rounded, or hold a reservation that is not printed.
        pytest.param(LLAMA_8B_EAGLE, "0.24.0", 1, "46.77", 371536, 371520, id="V9b"),
        pytest.param(LLAMA_70B, "0.24.0", 8, "46.4", 1216256, 1216336, id="V10"),
        pytest.param(QWEN3_30B, "0.10.2", 1, "8.68", 94784, 94800, id="V11"),
    ],
)
def test_dense_logs_agree_within_the_rounding_of_the_bytes(arch, version, tp, available, logged, computed):
    pool = vllm.pool_of(arch, Parallel(tp=tp), version, 8192)
    assert vllm.blocks(pool, gib(available).bytes) * 16 == computed
    number = vllm.blocks_from_figures(pool, available=gib(available))
    assert number.low * 16 <= logged <= number.high * 16


def test_v4b_differs_by_one_block_because_the_bytes_are_rounded():
    row = (QWEN_35B, "0.25.1", 1, "auto", False, 3, {}, "74.22", 262144, 1072, "0.00", 3366051, "12.84")
    pool = logged_pool(row)
    assert pool.block.tokens == 1072
    assert vllm.capacity(pool, vllm.blocks(pool, gib("74.22").bytes)).tokens == 3365031
    assert vllm.blocks_from_figures(pool, tokens=3366051, available=gib("74.22")).exact is not None


@pytest.mark.parametrize(
    ("arch", "version", "tp", "kv_dtype", "block", "padding"),
    [
        pytest.param(GRANITE_SMALL, "0.11.1rc6", 1, "auto", 528, "0.69", id="V5"),
        pytest.param(QWEN_NEXT, "0.11.0", 1, "auto", 544, "1.49", id="V6, consistency: model not named"),
        # V8b: KV type inferred from the block size
        pytest.param(NEMOTRON_NANO, "0.28.0", 1, "fp8", 4176, "0.19", id="V8b Nano"),
        pytest.param(QWEN_27B, "0.28.0", 1, "fp8", 1568, "0.13", id="V8b 27B"),
        pytest.param(QWEN_35B, "0.28.0", 1, "fp8", 2096, "0.00", id="V8b 35B"),
        pytest.param(QWEN_35B, "0.28.0", 4, "auto", 528, None, id="V8b 35B TP4: two KV heads on four GPUs"),
    ],
)
def test_block_sizes_of_public_logs(arch, version, tp, kv_dtype, block, padding):
    pool = vllm.pool_of(arch, Parallel(tp=tp), version, 8192, kv_dtype=kv_dtype, prefix_caching=False)
    assert pool.block.tokens == block
    if padding is not None:
        assert f"{pool.block.padding_percent:.2f}" == padding


@pytest.mark.parametrize(
    ("arch", "float32", "bfloat16"),
    [
        (QWEN_NEXT, 1056, 544),
        (QWEN_27B, 784, 400),
        (QWEN_35B, 1056, 544),
        (KIMI_LINEAR, 1920, 1024),
        (NEMOTRON_NANO, 2096, 1072),
        (NEMOTRON_SUPER, 4160, 2112),
        (GRANITE_SMALL, 1040, 528),
        (JAMBA, 144, 80),
        (LFM2, 16, 16),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_reference_block_sizes(arch, float32, bfloat16):
    sizes = [
        vllm.pool_of(arch, ONE, "0.33.0", 8192, state_dtype=dtype, prefix_caching=False).block.tokens
        for dtype in ("float32", "bfloat16")
    ]
    assert sizes == [float32, bfloat16]


# The worked example of the H100 case: 38.08 GiB, Qwen3.5-27B, float32 state, 131072 tokens

H100 = int(38.08 * GIB)


@pytest.mark.parametrize(
    ("version", "mode", "extra", "each", "concurrency", "tokens", "state_mib"),
    [
        ("0.33.0", "none", None, 171, "4.65", 609369, 147),
        ("0.33.0", "align", "triton", 174, "4.57", 598863, 294),
        ("0.32.0", "align", "flashinfer", 177, "4.49", 588713, 441),
        ("0.20.1", "none", None, 171, "4.65", 609369, 147),
        ("0.20.0", "none", None, 171, "4.65", 155232, 147),
        ("0.20.0", "align", None, 174, "4.57", 155232, 294),
    ],
)
def test_the_worked_example_comes_out_to_the_digit(version, mode, extra, each, concurrency, tokens, state_mib):
    pool = vllm.pool_of(QWEN_27B, ONE, version, 131072, state_mode=mode, prefill_backend=extra)
    assert (pool.block.tokens, pool.block.page_bytes, pool.bytes_per_block) == (784, 3_211_264, 49 * MIB)
    assert [group.kind for group in pool.groups] == ["state"] * 3 + ["full"]
    number = vllm.blocks(pool, H100)
    assert number == 795
    assert vllm.request_blocks(pool, 131072).total == each
    printed = vllm.capacity(pool, number)
    assert (printed.tokens, f"{printed.concurrency:.2f}") == (tokens, concurrency)
    assert vllm.state_cost(pool).bytes == state_mib * MIB


def test_the_smallest_pool_of_the_worked_example():
    pool = vllm.pool_of(QWEN_27B, ONE, "0.33.0", 131072, prefill_backend="triton")
    least = vllm.smallest_reservation(pool, 4, 131072)
    assert least.blocks == 697
    assert vllm.gib(least.bytes) == "33.35"
    assert least.flags == ("--kv-cache-memory-bytes 35812016128", "--max-num-seqs 4", "--max-model-len 131072")


def test_fp8_kv_doubles_the_block_and_leaves_bytes_and_blocks():
    wide = vllm.pool_of(QWEN_27B, ONE, "0.33.0", 131072, prefill_backend="triton", state_dtype="float32")
    fp8 = vllm.pool_of(QWEN_27B, ONE, "0.33.0", 131072, prefill_backend="triton", state_dtype="float32", kv_dtype="fp8")
    assert fp8.block.tokens == 2 * wide.block.tokens
    assert fp8.bytes_per_block == wide.bytes_per_block
    assert vllm.blocks(fp8, H100) == vllm.blocks(wide, H100)


# Versions


@pytest.mark.parametrize(
    ("version", "buckets", "size"),
    [
        ("0.9.1", (12, 13), 12),
        ("0.11.2", (12, 13), 12),
        ("0.12.0", (12, 14), 14),
        ("0.12.0", (12, 15), 12),
        ("0.17.1", (12, 15), 12),
        ("0.18.0", (12, 17), 17),
        ("0.18.0", (12, 18), 12),
        ("0.33.0", (30, 10), 10),
        ("0.33.0", (7, 7), 7),
    ],
)
def test_how_many_layers_a_group_has(version, buckets, size):
    assert vllm_facts.group_layers(vllm.modelled_release(version), buckets) == size


@pytest.mark.parametrize(
    ("version", "rule"),
    [("0.8.5", "slots"), ("0.9.0", "slots"), ("0.9.1", "blocks_per_group"), ("0.20.0", "blocks_per_group"),
     ("0.20.1", "effective"), ("0.33.0", "effective")],
)  # fmt: skip
def test_what_the_token_figure_counts(version, rule):
    assert vllm_facts.token_rule(vllm.modelled_release(version)) == rule


@pytest.mark.parametrize(
    ("version", "mode", "blocks"),
    [
        ("0.10.2", "none", 1),
        ("0.14.1", "none", 1),
        ("0.14.1", "all", 10),
        ("0.15.0", "none", 3),
        ("0.16.0", "align", 4),
        ("0.16.0", "all", 10),
        ("0.27.1", "all", 12),
        ("0.28.0", "align", 4),
        ("0.29.0", "align", 5),
        ("0.33.0", "none", 3),
    ],
)
def test_state_blocks_of_a_request_with_two_draft_tokens(version, mode, blocks):
    release = vllm.modelled_release(version)
    counted = vllm_facts.state_blocks(release, mode, 1000, block_tokens=100, draft_tokens=2, checkpoint_blocks=1)
    assert counted == blocks


def test_old_versions_take_more_state_blocks_than_they_count():
    release = vllm.modelled_release("0.12.0")
    assert vllm_facts.state_blocks(release, "none", 1000, block_tokens=1000, draft_tokens=2, resident=True) == 3


@pytest.mark.parametrize(("version", "mode"), [("0.14.1", "align"), ("0.32.0", "all"), ("0.10.2", "all")])
def test_a_mode_that_the_version_does_not_have_is_refused(version, mode):
    with pytest.raises(NotModelledError, match="no state cache mode"):
        vllm.plan([CacheLayer(token_bytes=2), CacheLayer(state_bytes=9)], at(version, state_mode=mode, state_chunk=16))


@pytest.mark.parametrize("version", [None, "", "nightly", "0.7.3", "0.34.0", "1.0.0"])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(NotModelledError, match="vLLM"):
        vllm.modelled_release(version)


@pytest.mark.parametrize(
    ("version", "hybrid", "caching", "utilization", "charged"),
    [
        ("0.19.1", True, False, 0.9, False),
        ("0.20.0", True, False, 0.92, True),
        ("0.27.1", True, False, 0.92, True),
        ("0.28.0", True, True, 0.92, True),
        ("0.12.0", False, True, 0.9, False),
        ("0.19.2rc1", False, True, 0.9, None),
    ],
)
def test_defaults_by_version(version, hybrid, caching, utilization, charged):
    release = vllm.modelled_release(version)
    assert vllm_facts.default_prefix_caching(release, hybrid=hybrid) is caching
    assert vllm_facts.default_utilization(release) == utilization
    assert vllm_facts.graph_estimate_charged(release) is charged


@pytest.mark.parametrize(
    ("version", "state", "caching", "mode"),
    [
        ("0.33.0", gdn(32), True, "align"),
        ("0.33.0", gdn(32), False, "none"),
        ("0.17.1", gdn(32), True, "align"),
        ("0.17.1", Mamba2(64, 64, 8, 128, 4), True, "all"),
        ("0.28.0", Mamba2(64, 64, 8, 128, 4), True, "align"),
        ("0.12.0", Mamba2(64, 64, 8, 128, 4), True, "all"),
        ("0.12.0", gdn(32), True, "none"),
        ("0.33.0", None, True, "none"),
    ],
)
def test_default_state_cache_mode(version, state, caching, mode):
    release = vllm.modelled_release(version)
    assert vllm_facts.default_cache_mode(release, state, prefix_caching=caching) == mode


@pytest.mark.parametrize(
    ("version", "known", "alignments"),
    [
        ("0.10.2", {"latent": False}, (16,)),
        ("0.12.0", {"latent": True, "backend": "CUTLASS_MLA"}, (128,)),
        ("0.12.0", {"latent": True, "backend": "FLASHMLA"}, (64,)),
        ("0.12.0", {"latent": True}, (64, 128)),
        ("0.12.0", {"latent": False, "head_dim": 256, "blackwell": True}, (32,)),
        ("0.12.0", {"latent": False, "head_dim": 256, "blackwell": False}, (16,)),
        ("0.12.0", {"latent": False, "head_dim": 256, "blackwell": True, "backend": "TRITON_ATTN"}, (16,)),
        ("0.12.0", {"latent": False, "head_dim": 256}, (16, 32)),
        ("0.17.1", {"latent": False, "head_dim": 256, "blackwell": True}, (16, 32)),
        ("0.19.1", {"latent": False, "head_dim": 256, "blackwell": True}, (16,)),
        ("0.26.0", {"latent": True, "backend": "FLASHINFER_MLA"}, (32,)),
        ("0.26.0", {"latent": True}, (16, 32, 64, 128)),
        ("0.27.0", {"latent": True, "backend": "FLASHINFER_MLA"}, (128,)),
        ("0.33.0", {"latent": True}, (128,)),
        ("0.33.0", {"latent": False}, (16,)),
    ],
)
def test_alignment_of_the_block_size(version, known, alignments):
    release = vllm.modelled_release(version)
    got = vllm_facts.alignments(release, block_size=16, user_block=False, **known)
    assert got == alignments


def test_where_the_backend_decides_the_block_size_both_readings_are_named():
    with pytest.raises(NotModelledError, match="1888 or 1920"):
        vllm.pool_of(KIMI_LINEAR, ONE, "0.20.0", 8192, prefix_caching=False)
    named = vllm.pool_of(
        KIMI_LINEAR, ONE, "0.20.0", 8192, prefix_caching=False, settings=at("0.20.0", backend="TRITON_MLA")
    )
    assert named.block.tokens == 1888


def test_where_the_readings_agree_there_is_no_doubt():
    assert vllm.pool_of(KIMI_LINEAR, ONE, "0.12.0", 8192, prefix_caching=False).block.tokens == 1920
    assert vllm.pool_of(QWEN_NEXT, ONE, "0.12.0", 8192).block.tokens == 544


def test_a_larger_block_size_of_the_user_aligns_from_0_20_and_only_raises_before():
    state = [CacheLayer(state_bytes=1000 * 100), CacheLayer(token_bytes=100)]
    assert vllm.plan(state, at("0.33.0", block_size=96)).block.tokens == 1056
    assert vllm.plan(state, at("0.19.1", block_size=96)).block.tokens == 1008
    large = vllm.plan(state, at("0.19.1", block_size=2048))
    assert (large.block.tokens, large.block.enlarged) == (2048, False)
    assert [line for line in vllm.log_lines(large, 10) if "Setting" in line] == []


def test_flashinfer_prefill_of_gdn_aligns_to_64_in_0_33_and_takes_a_block_more_from_0_29():
    def pool(version, backend):
        return vllm.pool_of(
            QWEN_NEXT, ONE, version, 8192, state_dtype="float32", state_mode="align", prefill_backend=backend
        )

    assert pool("0.33.0", "flashinfer").block.tokens == 1088
    assert pool("0.32.0", "flashinfer").block.tokens == 1056
    assert vllm.request_blocks(pool("0.32.0", "flashinfer"), 1).state == 9
    assert vllm.request_blocks(pool("0.32.0", "triton"), 1).state == 6
    assert vllm.request_blocks(pool("0.28.0", "flashinfer"), 1).state == 6
    with pytest.raises(NotModelledError, match="2 or 3 blocks"):
        pool("0.32.0", None)


def test_mamba2_always_takes_a_checkpoint_block_from_0_29():
    assert vllm.request_blocks(vllm.pool_of(GRANITE_SMALL, ONE, "0.33.0", 8192), 8192).state == 9 * 3
    assert vllm.request_blocks(vllm.pool_of(GRANITE_SMALL, ONE, "0.28.0", 8192), 8192).state == 9 * 2


# Sliding windows


def test_sliding_window_layers_are_groups_of_the_same_pool():
    pool = vllm.pool_of(GEMMA_27B, ONE, "0.33.0", 32768, settings=at("0.33.0", in_flight_tokens=8192))
    assert [(group.kind, group.layers, group.padding) for group in pool.groups] == [
        ("full", 10, 0),
        *[("sliding", 9, 1)] * 4,
        *[("sliding", 8, 2)] * 2,
    ]
    (padding,) = pool.padding
    assert padding.layers == 8
    assert pool.bytes_per_block == 10 * 16 * 16 * 256 * 2
    each = vllm.request_blocks(pool, 32768)
    assert (each.full, each.sliding) == (2048, 6 * (-(-(1023 + 8192) // 16) + 1))
    assert vllm.request_blocks(pool, 100).sliding == 6 * 8


def test_tokens_in_flight_count_the_batches_from_0_26():
    assert vllm_facts.in_flight_tokens((0, 25, 1), 2048, 2) == 2048
    assert vllm_facts.in_flight_tokens((0, 26, 0), 2048, 2) == 4096


def test_without_the_batch_size_a_window_is_not_guessed():
    pool = vllm.pool_of(GPT_OSS_20B, ONE, "0.33.0", 8192)
    with pytest.raises(NotModelledError, match="max_num_batched_tokens"):
        vllm.capacity(pool, 1000)


def test_without_the_hybrid_manager_every_layer_keeps_every_token():
    pool = vllm.pool_of(GPT_OSS_20B, ONE, "0.33.0", 8192, settings=at("0.33.0", hybrid_manager=False))
    assert [(group.kind, group.layers) for group in pool.groups] == [("full", 24)]
    assert pool.bytes_per_block == 24 * 16 * 2048


# Other shapes


def test_indexer_keys_are_a_layer_beside_the_latent_in_one_group():
    attention = LatentAttention(128, 512, 64, 128, 128, index_dim=128, index_heads=64)
    sparse = model("sparse latent", "deepseek_v32", 61, attention=attention)
    pool = vllm.pool_of(sparse, Parallel(tp=8), "0.33.0", 8192, settings=at("0.33.0", block_size=64))
    assert len(pool.groups) == 1
    assert pool.bytes_per_block == 61 * 64 * (1152 + 132)


def test_pages_of_another_size_get_a_larger_block_or_are_padded():
    layers = [CacheLayer(token_bytes=400)] * 4 + [CacheLayer(token_bytes=200, window=64, layout="draft")] * 4
    pool = vllm.plan(layers, at("0.33.0", in_flight_tokens=1))
    assert [group.block_tokens for group in pool.groups] == [16, 32]
    odd = [CacheLayer(token_bytes=400)] * 4 + [CacheLayer(token_bytes=300, window=64)] * 4
    assert {group.stage_bytes for group in vllm.plan(odd, at("0.33.0")).groups} == {(4 * 6400,)}
    with pytest.raises(NotModelledError, match="pages of 4800 and 6400"):
        vllm.plan(odd, at("0.27.1"))


def test_pipeline_stages_hold_their_layers_and_the_fewest_blocks_count():
    assert stage_sizes(62, 4, "vllm") == (15, 16, 16, 15)
    assert stage_sizes(10, 4, "vllm") == (2, 3, 3, 2)
    pool = vllm.pool_of(LLAMA_8B, Parallel(pp=3), "0.33.0", 8192)
    assert pool.stage_block_bytes == (11 * 65536, 11 * 65536, 10 * 65536)
    assert vllm.blocks(pool, 11 * 65536 * 7) == 7
    assert vllm.blocks(pool, (GIB, GIB, 10 * 65536 * 5)) == 5
    with pytest.raises(NotModelledError, match="2 amounts of memory for 3"):
        vllm.blocks(pool, (1, 2))


def test_context_parallel_ranks_share_a_requests_tokens():
    pool = vllm.pool_of(LLAMA_8B, ONE, "0.19.1", 8192, settings=at("0.19.1", decode_context_parallel=4))
    assert vllm.request_blocks(pool, 8192).total == 128
    assert vllm.capacity(pool, 1000).tokens == 1000 * 16 * 4
    new = vllm.pool_of(LLAMA_8B, ONE, "0.33.0", 8192, settings=at("0.33.0", decode_context_parallel=4))
    assert vllm.capacity(new, 1000).tokens == 1000 * 16 * 4
    with pytest.raises(NotModelledError, match="prefill context"):
        vllm.request_blocks(
            vllm.pool_of(LLAMA_8B, ONE, "0.22.1", 8192, settings=at("0.22.1", prefill_context_parallel=2)), 1
        )


def test_a_model_of_state_only_has_one_group_and_takes_a_block_a_request():
    layers = [CacheLayer(state_bytes=1000)] * 24
    pool = vllm.plan(layers, at("0.33.0"))
    assert (pool.bytes_per_block, vllm.request_blocks(pool, 4096).total) == (24000, 1)
    assert len(vllm.log_lines(pool, 10)) == 1


def test_state_in_versions_that_kept_it_outside_the_pool_is_refused():
    with pytest.raises(NotModelledError, match="outside the block pool"):
        vllm.pool_of(QWEN_NEXT, ONE, "0.9.2", 8192)


# What the printed figure means


def test_the_same_pool_prints_another_figure_by_version_and_by_length():
    def tokens(version, length):
        pool = vllm.pool_of(QWEN_35B, ONE, version, length, state_dtype="float32", prefix_caching=False)
        return vllm.capacity(pool, vllm.blocks(pool, int(47.55 * GIB))).tokens

    assert tokens("0.20.0", 131072) == 623040
    assert tokens("0.20.1", 131072) == 2416640
    assert tokens("0.20.1", 8192) < tokens("0.20.1", 131072)


def test_the_meaning_says_what_is_counted():
    dense = vllm.pool_of(LLAMA_8B, ONE, "0.19.1", 8192)
    assert vllm.meaning(dense) == ("blocks_per_group", "tokens whose KV fits in the pool")
    old = vllm.pool_of(QWEN_35B, ONE, "0.20.0", 8192)
    assert "each of 4 groups" in vllm.meaning(old)[1]
    new = vllm.pool_of(QWEN_35B, ONE, "0.33.0", 8192, prefill_backend="triton")
    assert "another figure at another maximum length" in vllm.meaning(new)[1]
    assert vllm.physical_tokens(dense, 100) == 1600
    assert vllm.physical_tokens(new, 100) is None


# The way back


def test_blocks_from_the_printed_tokens_are_exact_under_the_new_rule():
    pool = vllm.pool_of(QWEN_27B, ONE, "0.33.0", 131072, prefill_backend="triton")
    assert vllm.blocks_from_figures(pool, tokens=598863).exact == 795
    assert vllm.blocks_from_figures(pool, tokens=598863).pool_bytes(pool).bytes == 795 * 49 * MIB


def test_blocks_from_the_printed_tokens_are_a_range_under_the_old_rule_until_more_is_known():
    pool = vllm.pool_of(QWEN_27B, ONE, "0.20.0", 131072)
    number = vllm.blocks_from_figures(pool, tokens=155232)
    assert (number.low, number.high, number.exact) == (792, 795, None)
    amount = number.pool_bytes(pool)
    assert (amount.bytes - amount.tolerance, amount.bytes + amount.tolerance) == (792 * 49 * MIB, 795 * 49 * MIB)
    assert vllm.blocks_from_figures(pool, tokens=155232, available=gib("38.08")).exact == 795


@pytest.mark.parametrize("figures", [{"tokens": 155233}, {"tokens": 155232, "concurrency": "9.99"}, {}])
def test_figures_that_no_number_of_blocks_prints_are_refused(figures):
    with pytest.raises(NotModelledError):
        vllm.blocks_from_figures(vllm.pool_of(QWEN_27B, ONE, "0.20.0", 131072), **figures)


@given(st.integers(0, 10**13), st.none() | st.integers(0, 5000), st.integers(1, 131072))
def test_kv_and_state_together_are_the_logged_pool(size, requests, tokens):
    pool = vllm.pool_of(QWEN_27B, ONE, "0.33.0", 131072, prefill_backend="triton")
    split = vllm.split_pool(pool, size, requests=requests, tokens=tokens)
    assert split.kv_bytes + split.state_bytes == size
    assert min(split.kv_bytes, split.state_bytes) >= 0


def test_the_state_of_running_requests_is_what_they_take():
    pool = vllm.pool_of(QWEN_27B, ONE, "0.33.0", 131072, prefill_backend="triton")
    assert vllm.split_pool(pool, H100, requests=4).state_bytes == 4 * 294 * MIB
    assert vllm.split_pool(pool, H100, requests=0).state_bytes == 0
    full = vllm.split_pool(pool, H100)
    assert full.state_bytes == H100 * 6 // 174


def test_a_dense_pool_is_all_kv():
    pool = vllm.pool_of(LLAMA_8B, ONE, "0.33.0", 8192)
    assert vllm.split_pool(pool, GIB, requests=100).kv_bytes == GIB
    assert vllm.state_cost(pool).bytes == 0


def test_state_cost_is_stored_state_and_padding():
    cost = vllm.state_cost(vllm.pool_of(NEMOTRON_NANO, ONE, "0.33.0", 8192, prefix_caching=False))
    raw = 18432 * 2 + 64 * 64 * 128 * 4
    page = 2096 * 1024
    assert cost.live == cost.stored == 23 * raw
    assert cost.page_padding == 23 * (page - raw)
    assert cost.layer_padding == page
    assert cost.bytes == cost.stored + cost.page_padding + cost.layer_padding == 24 * page


# Reservation and budget


def test_utilisation_for_a_reservation_is_rounded_up_so_that_it_suffices():
    pool = vllm.pool_of(QWEN_27B, ONE, "0.33.0", 131072, prefill_backend="triton")
    least = vllm.smallest_reservation(pool, 4, 131072, total=80 * GIB, outside_pool=30 * GIB)
    assert least.utilization is not None
    got = vllm.budget("0.33.0", 80 * GIB, consumed=30 * GIB, headroom=0, utilization=least.utilization)
    assert least.bytes <= got.available < least.bytes + 0.0002 * 80 * GIB
    too_small = vllm.smallest_reservation(pool, 40, 131072, total=80 * GIB, outside_pool=30 * GIB)
    assert too_small.utilization is None


def test_before_0_10_2_the_pool_is_asked_for_in_blocks():
    pool = vllm.pool_of(LLAMA_8B, ONE, "0.9.2", 8192)
    assert vllm.smallest_reservation(pool, 2, 8192).flags[0] == "--num-gpu-blocks-override 1025"


def test_a_reservation_of_nothing_is_refused():
    with pytest.raises(NotModelledError, match="at least one"):
        vllm.smallest_reservation(vllm.pool_of(LLAMA_8B, ONE, "0.33.0", 8192), 0, 8192)


@pytest.mark.parametrize(
    ("version", "charged", "available"),
    [
        ("0.33.0", None, 92 * GIB - 40 * GIB - GIB),
        ("0.19.1", None, 90 * GIB - 40 * GIB),
        ("0.18.0", True, 90 * GIB - 40 * GIB - GIB),
        ("0.20.0", False, 92 * GIB - 40 * GIB),
    ],
)
def test_the_budget(version, charged, available):
    got = vllm.budget(
        version, 100 * GIB, consumed=38 * GIB, headroom=2 * GIB, graph_estimate=GIB, graph_charged=charged
    )
    assert abs(got.available - available) <= 1
    assert got.requested - got.consumed - got.headroom - got.graph_estimate == got.available


def test_a_development_build_does_not_tell_whether_graphs_are_charged():
    with pytest.raises(NotModelledError, match="CUDA graph estimate"):
        vllm.budget("0.19.2rc1", 100 * GIB, consumed=0, headroom=0, graph_estimate=GIB)


def test_default_batched_tokens_by_card():
    new, old = (0, 33, 0), (0, 27, 1)
    assert vllm_facts.default_batched_tokens(new, 180 * GIB) == 16384
    assert vllm_facts.default_batched_tokens(old, 180 * GIB) == 8192
    assert vllm_facts.default_batched_tokens(new, 80 * GIB, "NVIDIA A100-SXM4-80GB") == 2048
    assert vllm_facts.default_batched_tokens(new, 80 * GIB, "NVIDIA H100") == 8192
    assert vllm_facts.default_batched_tokens(new, 24 * GIB) == 2048


# Properties

HYBRIDS = st.sampled_from([QWEN_27B, QWEN_35B, QWEN_NEXT, NEMOTRON_NANO, GRANITE_SMALL, KIMI_LINEAR, JAMBA])
VERSIONS = st.sampled_from(["0.18.0", "0.19.1", "0.20.1", "0.27.1", "0.28.0", "0.30.0", "0.33.0"])


def any_pool(arch, version, length, caching=False):
    return vllm.pool_of(
        arch, ONE, version, length, prefix_caching=caching, prefill_backend="triton",
        settings=at(version, kernel_block=16, state_chunk=128),
    )  # fmt: skip


@given(HYBRIDS, VERSIONS, st.integers(1, 200_000), st.integers(0, 2**38), st.integers(0, 2**36))
def test_more_memory_never_means_fewer_tokens(arch, version, length, size, more):
    pool = any_pool(arch, version, length)
    small, large = (vllm.capacity(pool, vllm.blocks(pool, each)) for each in (size, size + more))
    assert small.blocks <= large.blocks
    assert small.tokens <= large.tokens
    assert small.concurrency <= large.concurrency


@given(HYBRIDS, VERSIONS, st.integers(1, 100_000), st.integers(0, 100_000), st.booleans())
def test_a_longer_request_never_takes_fewer_blocks(arch, version, tokens, more, caching):
    pool = any_pool(arch, version, 200_000, caching)
    assert vllm.request_blocks(pool, tokens).total <= vllm.request_blocks(pool, tokens + more).total


@given(HYBRIDS, VERSIONS, st.integers(1, 300), st.integers(1, 100_000))
def test_a_reservation_serves_what_it_is_for_and_one_block_less_does_not(arch, version, requests, tokens):
    pool = any_pool(arch, version, tokens)
    least = vllm.smallest_reservation(pool, requests, tokens)
    each = vllm.request_blocks(pool, tokens, resident=True).total
    assert vllm.blocks(pool, least.bytes) - 1 == requests * each
    assert vllm.blocks(pool, least.bytes - 1) - 1 < requests * each


@given(HYBRIDS, VERSIONS, st.integers(1, 200_000), st.integers(1, 10**6))
def test_the_blocks_are_among_those_that_print_their_figures(arch, version, length, number):
    pool = any_pool(arch, version, length)
    printed = vllm.capacity(pool, number)
    back = vllm.blocks_from_figures(pool, tokens=printed.tokens, concurrency=f"{printed.concurrency:.2f}")
    assert back.low <= number <= back.high
    assert back.exact in {None, number}


@given(HYBRIDS, VERSIONS, st.booleans())
def test_a_page_covers_the_state_and_the_groups_hold_every_layer(arch, version, caching):
    pool = any_pool(arch, version, 8192, caching)
    assert pool.block.page_bytes >= pool.block.state_bytes
    assert pool.block.padding_percent >= 0
    assert sum(group.layers for group in pool.groups) == len(vllm.cache_layers(arch, ONE, version))
    assert len({group.layers + group.padding for group in pool.groups}) == 1
    cost = vllm.state_cost(pool)
    assert cost.bytes == cost.stored + cost.page_padding + cost.layer_padding


@given(HYBRIDS, st.integers(1, 2**38))
def test_the_longest_request_fits_and_the_next_does_not(arch, size):
    pool = any_pool(arch, "0.33.0", 50_000, caching=True)
    longest = vllm.longest_context(pool, size)
    usable = vllm.blocks(pool, size) - 1
    if longest:
        assert vllm.request_blocks(pool, longest).total <= usable
    if longest < 50_000:
        assert vllm.request_blocks(pool, longest + 1).total > usable


# What old releases do not do


@pytest.mark.parametrize(
    ("version", "layers", "settings"),
    [
        ("0.10.2", [CacheLayer(token_bytes=8), CacheLayer(token_bytes=4, layout="other")], {}),
        ("0.16.0", [CacheLayer(token_bytes=8), CacheLayer(token_bytes=4, layout="other", stage=1)], {}),
        ("0.11.2", [CacheLayer(token_bytes=8), CacheLayer(token_bytes=4, window=9)], {}),
        ("0.16.0", [CacheLayer(token_bytes=8), CacheLayer(token_bytes=16, window=9), CacheLayer(state_bytes=99)], {}),
        ("0.9.2", [CacheLayer(token_bytes=8)], {"decode_context_parallel": 2}),
        ("0.9.0", [CacheLayer(token_bytes=8), CacheLayer(token_bytes=8, window=9)], {}),
        ("0.33.0", [CacheLayer(token_bytes=8), CacheLayer(state_bytes=9)], {"hybrid_manager": False}),
        ("0.33.0", [CacheLayer(token_bytes=8, window=9)], {"decode_context_parallel": 2}),
        ("0.33.0", [], {}),
    ],
)
def test_shapes_that_a_release_does_not_serve_are_refused(version, layers, settings):
    with pytest.raises(NotModelledError):
        vllm.request_blocks(vllm.plan(layers, at(version, in_flight_tokens=1, **settings)), 100)
