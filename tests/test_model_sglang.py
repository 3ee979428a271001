"""SGLang's pool sizing against figures of SGLang's own planning code, of real logs, and against its own inverse.

Where figures come from: `tests/data/sglang-0.5.23-state-pools.json` was computed by SGLang 0.5.23's MambaPool on
full-size models; the other figures stand in public logs (a bare pool line each) or in logs of 0.5.23 with tiny models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.ledger import Capacity, Entry, Evidence, Gpu, Rank, Server
from memledger.model import sglang_inputs, sglang_plan, sglang_rules
from memledger.model.architecture import (
    Architecture,
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    NotModelledError,
    Parallel,
    ShortConvolution,
)
from memledger.model.sglang import (
    ANY_VERSION,
    Budget,
    KvToken,
    SglangServer,
    agreed,
    budget,
    readings,
    request_table_bytes,
    size,
)
from memledger.model.sglang_state import Speculation, StateSlot, state_pool
from memledger.units import GIB, MIB

POOLS = json.loads((Path(__file__).parent / "data" / "sglang-0.5.23-state-pools.json").read_text())["rows"]
WIDTHS = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}


def gib(size_: int) -> float:
    """As SGLang prints it."""
    return float(f"{size_ / GIB:.2f}")


def model(layers: list[Layer], **fields: Any) -> Architecture:
    """An architecture of these layers."""
    named: dict[str, Any] = {"name": "m", "model_type": "qwen3_next", "class_name": "C", "hidden": 1, "vocabulary": 1}
    return Architecture(layers=tuple(layers), **(named | fields))


def heads(kv_heads: int, dim: int, window: int | None = None) -> Layer:
    return Layer(Attention(kv_heads, kv_heads, dim, dim, window))


# ------------------------------------------------------------------------- equal to SGLang 0.5.23's own planning code


@pytest.mark.parametrize(
    "row", POOLS, ids=lambda r: f"{r['model']}-tp{r['tp']}-{r['ssm_env']}-{r['slots']}-{r['spec_draft_tokens']}"
)
def test_state_pool_equals_the_engines_own(row: dict[str, Any]) -> None:
    conv = sum(a * b for a, b in row["conv_shapes"]) * WIDTHS[row["conv_dtype"]] * row["state_layers"]
    a, b, c = row["temporal_shape"]
    kda = row["params"] == "KimiLinearCacheParams"
    slot = StateSlot(
        conv,
        a * b * c * WIDTHS[row["ssm_dtype"]] * row["state_layers"],
        conv_kernel=1 + min(shape[0 if kda else 1] for shape in row["conv_shapes"]),
        dense_windows=kda,
    )
    speculation = Speculation(row["spec_draft_tokens"]) if row["spec_draft_tokens"] else None
    pool = state_pool(slot, row["slots"], version=(0, 5, 23), requests=row["spec_state_size"], speculation=speculation)
    assert slot.total == row["bytes_per_slot"]
    assert pool.total == row["mem_usage_bytes"]
    assert [pool.printed((0, 5, 23))] == row["log"]


# Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B have the same layers in other numbers: 16 key heads, 32 value heads of 128,
# kernel 4; 2 KV heads of 256 (their config.json on the model hub).
GDN_LAYERS = {"qwen3-next-80b-a3b": (36, 12), "qwen3.5-35b-a3b": (30, 10)}


@pytest.mark.parametrize(
    "row", POOLS, ids=lambda r: f"{r['model']}-tp{r['tp']}-{r['ssm_env']}-{r['slots']}-{r['spec_draft_tokens']}"
)
def test_an_architecture_gives_the_same_pool(row: dict[str, Any]) -> None:
    if row["model"] not in GDN_LAYERS:
        pytest.skip("no architecture of this model beside this test")
    state_layers, full = GDN_LAYERS[row["model"]]
    arch = model([Layer(state=GatedDeltaNet(16, 32, 128, 128, 4))] * state_layers + [heads(2, 256)] * full)
    speculation = Speculation(row["spec_draft_tokens"]) if row["spec_draft_tokens"] else None
    server = sglang_inputs.from_architecture(
        arch,
        Parallel(tp=row["tp"]),
        version="0.5.23",
        state_dtype=row["ssm_env"],
        state_slots=row["slots"],
        max_running_requests=row["spec_state_size"],
        per_request=1,
        speculation=speculation,
    )
    sizing = size(server)
    assert sizing.state_bytes == row["mem_usage_bytes"]
    assert sizing.state is not None and [sizing.state.printed((0, 5, 23))] == row["log"]


# --------------------------------------------------------------------------------------------------- the worked example

# 48 GDN layers of 16 key and 48 value heads of 128, kernel 4, float32; 16 full-attention layers of 4 KV heads of 256.
SLOT = StateSlot(conv=2_949_120, ssm=150_994_944, conv_kernel=4)
TOKEN = KvToken(keys=32_768, values=32_768)
H100 = SglangServer(
    versions=((0, 5, 18), (0, 5, 18)),
    budget=Budget(125 * SLOT.total + 330_323 * TOKEN.full),
    slot=SLOT,
    kv=TOKEN,
    strategy="extra_buffer",
    overlap=True,
    context_length=262_144,
)


def test_by_default_nearly_half_of_the_budget_is_state() -> None:
    sizing = size(H100)
    assert (sizing.state_slots, sizing.slots_per_request, sizing.max_running_requests) == (124, 5, 24)
    assert sizing.binding == ("state_slots",)
    assert sizing.kv_tokens == 330_323
    assert gib(sizing.state_bytes) == 17.92 and gib(sizing.kv_bytes) == 20.16
    assert sizing.state is not None
    assert (gib(sizing.state.conv), gib(sizing.state.ssm)) == (0.34, 17.58)
    assert gib(sizing.accounts["kv_cache/k"]) == 10.08
    assert sizing.spare_slots == 4


@pytest.mark.parametrize(
    ("settings", "slots", "state", "tokens", "running"),
    [
        ({"state_slots": 20}, 20, 3.01, 574_619, 4),
        ({"state_memory_ratio": 0.086}, 20, 3.01, 574_619, 4),
        ({"state_slots": 80}, 80, 11.61, 433_679, 16),
        ({"prefix_caching": False, "max_running_requests": 4}, 4, 0.72, 612_203, 4),
    ],
)
def test_fewer_slots_become_kv_tokens(
    settings: dict[str, Any], slots: int, state: float, tokens: int, running: int
) -> None:
    after = size(sglang_plan.changed(H100, settings))
    assert (after.state_slots, gib(after.state_bytes), after.kv_tokens) == (slots, state, tokens)
    assert after.max_running_requests == running


def test_state_in_16_bits_halves_its_larger_part() -> None:
    slot = sglang_plan.resized_state(SLOT, "float32", "bfloat16")
    after = size(sglang_plan.changed(H100, {"state_slots": 20}, slot=slot))
    assert (gib(after.state_bytes), after.kv_tokens) == (1.53, 598_811)


def test_speculation_halves_the_slots() -> None:
    after = size(sglang_plan.changed(H100, {"speculative_draft_tokens": 4}))
    assert (after.state_slots, after.max_running_requests) == (67, 13)
    assert after.accounts["recurrent_state/speculative_ssm"] == 14 * 4 * SLOT.ssm
    assert after.accounts["recurrent_state/speculative_conv"] == 14 * SLOT.conv // 3 * 6


def test_kv_in_8_bits_doubles_the_tokens() -> None:
    after = size(sglang_plan.changed(H100, {}, kv=sglang_plan.resized_kv(TOKEN, "bfloat16", "fp8_e4m3")))
    assert after.kv_tokens == 2 * 330_323 and after.state_slots == 124


def test_the_smallest_reservation_and_its_flags() -> None:
    found = sglang_plan.smallest(H100, 4, 131_072)
    assert (found.minimum.state_slots, found.minimum.kv_tokens) == (20, 524_288)
    assert gib(found.minimum.pool_bytes) == 35.01
    assert found.flags == ("--max-mamba-cache-size", "20", "--max-running-requests", "4")
    assert found.fits is True
    assert found.after is not None and found.after.kv_tokens == 574_619
    assert sglang_plan.ratio_for(20, SLOT.total, size(H100).budget or 0) == 0.086


def test_a_load_that_does_not_fit_says_so() -> None:
    found = sglang_plan.smallest(H100, 5, 131_072)
    assert found.fits is False and found.binding == ("kv_tokens",)


def test_without_a_radix_cache_the_request_cap_sets_the_slots() -> None:
    bare = msgspec.structs.replace(H100, radix_cache=False, max_running_requests=64)
    assert sglang_plan.smallest(bare, 4, 1000).flags == ("--max-running-requests", "4")
    assert size(bare).binding == ("max_running_requests", "state_slots")


def test_prefixes_that_are_to_stay_take_a_slot_each() -> None:
    assert sglang_plan.smallest(H100, 4, 1000, cached_prefixes=10).minimum.state_slots == 30


def test_the_difference_names_accounts_and_capacities() -> None:
    effects = sglang_plan.difference(size(H100), size(sglang_plan.changed(H100, {"state_slots": 20})))
    changes = {e.account or e.capacity: e.bytes if e.account else e.change for e in effects}
    assert changes["recurrent_state/ssm"] == -104 * SLOT.ssm
    assert changes["kv_tokens"] == 244_296 and changes["state_slots"] == -104
    assert changes["max_running_requests"] == -20


# -------------------------------------------------------------------------------------------- figures of public logs


LING_FLASH = model(
    # 35 KDA layers of 32 heads of 128, kernel 4, and 7 latent layers of 512 + 64 (config.json of Ling-3.0-flash).
    [Layer(state=KimiDeltaAttention(32, 128, 4))] * 35 + [Layer(LatentAttention(32, 512, 64, 128, 128))] * 7,
    model_type="bailing_hybrid",
)
KIMI_K3_LIKE = model(
    [Layer(state=KimiDeltaAttention(96, 128, 4))] * 69 + [Layer(LatentAttention(96, 512, 64, 128, 128))] * 24,
    model_type="kimi_k3",
)
DEEPSEEK_R1 = model([Layer(LatentAttention(128, 512, 64, 128, 128, 1536))] * 61, model_type="deepseek_v3")
DEEPSEEK_V32 = model([Layer(LatentAttention(128, 512, 64, 128, 128, 1536, 128, 64))] * 61, model_type="deepseek_v32")
QWEN3_235B = model([Layer(Attention(64, 4, 128, 128))] * 94, model_type="qwen3_moe")
QWEN3_30B = model([Layer(Attention(32, 4, 128, 128))] * 48, model_type="qwen3_moe")
QWEN3_32B = model([Layer(Attention(64, 8, 128, 128))] * 64, model_type="qwen3")
QWEN3_NEXT = model([Layer(state=GatedDeltaNet(16, 32, 128, 128, 4))] * 36 + [Layer(Attention(16, 2, 256, 256))] * 12)
LFM2_LIKE = model(
    [Layer(state=ShortConvolution(1536, 3))] * 10 + [Layer(Attention(24, 8, 64, 64))] * 6, model_type="lfm2"
)


def kv_accounts(arch: Architecture, parallel: Parallel, tokens: int, page: int, **fields: Any) -> dict[str, int]:
    server = SglangServer(kv=sglang_inputs.kv_token(arch, parallel, **fields), kv_tokens=tokens, page_size=page)
    return size(server).accounts


def test_s2_ling_flash_on_one_gpu() -> None:
    slot = sglang_inputs.state_slot(LING_FLASH, Parallel())
    assert slot is not None
    pool = state_pool(slot, 117)
    assert (gib(pool.conv), gib(pool.ssm)) == (0.28, 8.07)
    # 9.21 is printed; one hundredth off (9.215), as in the validation table.
    assert kv_accounts(LING_FLASH, Parallel(), 1_226_984, 1)["kv_cache/latent"] == pytest.approx(9.21 * GIB, rel=0.001)


@pytest.mark.parametrize(
    ("arch", "parallel", "tokens", "account", "printed", "layout"),
    [
        (DEEPSEEK_R1, Parallel(tp=16, dp=4, dp_attention=True), 75_904, "kv_cache/latent", 4.98, {}),
        (DEEPSEEK_R1, Parallel(tp=32, dp=8, dp_attention=True), 179_328, "kv_cache/latent", 11.74, {}),
        (QWEN3_235B, Parallel(tp=16), 441_600, "kv_cache/k", 9.90, {}),
        (QWEN3_235B, Parallel(tp=32, dp=32, dp_attention=True), 190_976, "kv_cache/k", 17.13, {}),
        (QWEN3_30B, Parallel(tp=2), 802_688, "kv_cache/k", 18.38, {}),
        (QWEN3_32B, Parallel(tp=8), 1_172_096, "kv_cache/k", 17.89, {}),
    ],
    ids=["S3a", "S3b", "S5a", "S5b", "S6a", "S6b"],
)
def test_kv_pools_of_named_models(
    arch: Architecture, parallel: Parallel, tokens: int, account: str, printed: float, layout: dict[str, Any]
) -> None:
    # Pages of 128 on Ascend: one more page than tokens. The printed figure is within its rounding.
    assert kv_accounts(arch, parallel, tokens, 128, **layout)[account] == pytest.approx(printed * GIB, abs=0.0051 * GIB)


def test_s4_sparse_attention_keeps_16_bit_indexer_keys_on_ascend() -> None:
    accounts = kv_accounts(DEEPSEEK_V32, Parallel(tp=32, dp=8, dp_attention=True), 220_416, 128, index_16bit=True)
    assert gib(accounts["kv_cache/latent"] + accounts["kv_cache/index"]) == 17.64


def test_s7_consistent_with_a_geometry_that_was_inferred() -> None:
    slot = sglang_inputs.state_slot(KIMI_K3_LIKE, Parallel(tp=8))
    assert slot is not None
    pool = state_pool(slot, 257)
    assert (gib(pool.conv), gib(pool.ssm)) == (0.46, 13.04)
    assert (
        gib(kv_accounts(KIMI_K3_LIKE, Parallel(tp=8), 1_167_552, 64, kv_dtype="fp8_e4m3")["kv_cache/latent"]) == 15.03
    )


def test_s8_an_old_ascend_server_gave_every_layer_kv() -> None:
    """Expected difference: before 0.5.23 the "ascend" backend allocated KV for all 48 layers, four times the model's need."""
    slot = sglang_inputs.state_slot(QWEN3_NEXT, Parallel(tp=4))
    assert slot is not None and gib(state_pool(slot, 80).ssm) == 1.42
    modelled = kv_accounts(QWEN3_NEXT, Parallel(tp=4), 450_560, 128)["kv_cache/k"]
    assert gib(modelled) == 2.58
    assert gib(modelled * 48 // 12) == 10.32


def test_s9_consistent_with_a_hidden_size_that_was_inferred() -> None:
    slot = sglang_inputs.state_slot(LFM2_LIKE, Parallel())
    assert slot is not None
    pool = state_pool(slot, 85_292)
    assert (gib(pool.conv), pool.ssm) == (4.88, 0)
    assert gib(kv_accounts(LFM2_LIKE, Parallel(), 473_854, 1)["kv_cache/k"]) == 2.71


def test_s10_tokens_from_free_memory_and_fraction() -> None:
    """Consistency: 36 layers of 8 KV heads of 128 were assumed for Qwen3-4B."""
    rest = budget((0, 4, 6), round((36.25 + 7.63) * GIB), round(36.25 * GIB), 0.88)
    kv = KvToken(keys=36 * 8 * 128 * 2, values=36 * 8 * 128 * 2)
    server = SglangServer(versions=((0, 4, 6), (0, 4, 6)), budget=rest, kv=kv, context_length=40_960)
    assert size(server).kv_tokens == 225_621  # 225,647 are printed: both memory figures are rounded
    assert size(server).max_running_requests == 2820


def test_s11_sliding_window_tokens_by_ratio() -> None:
    kv = KvToken(keys=1000, values=1000, swa_keys=500, swa_values=500)
    rest = Budget(565_446 * 2000 + 35_341 * 1000)
    server = SglangServer(versions=((0, 5, 12), (0, 5, 12)), budget=rest, kv=kv, swa_ratio=0.0625)
    sizing = size(server)
    assert (sizing.kv_tokens, sizing.kv_swa_tokens) == (565_446, 35_340)


def test_k_from_free_memory_is_within_a_slot() -> None:
    rest = budget((0, 5, 18), round(78.48 * GIB), round(50.01 * GIB), 0.85, multimodal=True)
    sizing = size(msgspec.structs.replace(H100, budget=rest))
    assert sizing.state_slots == pytest.approx(124, abs=1)
    assert sizing.budget == pytest.approx(size(H100).budget, rel=0.003)


def test_thousand_slots_that_twenty_requests_never_need() -> None:
    server = sglang_inputs.from_architecture(
        QWEN3_NEXT, Parallel(tp=4), version="0.5.18", budget=Budget(38 * GIB), strategy="extra_buffer", overlap=True
    )
    sizing = size(msgspec.structs.replace(server, context_length=262_144))
    assert (sizing.state_slots, sizing.max_running_requests) == (999, 199)
    assert sizing.kv_tokens == pytest.approx(1_750_000, rel=0.01)


# ------------------------------------------------------------------- runs of 0.5.23 with a tiny model (6 GDN, 2 full)

TINY = model(
    [Layer(state=GatedDeltaNet(2, 4, 128, 128, 4))] * 6 + [Layer(Attention(4, 2, 64, 64))] * 2, max_positions=32_768
)


@pytest.mark.parametrize(
    ("slots", "tokens", "running", "fields"),
    [
        (310, 546_159, 103, {}),
        (311, 545_642, 8, {"max_running_requests": 8}),
        (322, 567_047, 8, {"max_running_requests": 8}),
        (16, 997_857, 16, {"max_running_requests": 16, "radix_cache": False}),
    ],
)
def test_pools_of_a_real_server(slots: int, tokens: int, running: int, fields: dict[str, Any]) -> None:
    as_logged = sglang_inputs.from_architecture(
        TINY,
        Parallel(),
        version="0.5.23",
        **({"overlap": False, "state_slots": slots, "kv_tokens": tokens, "running_requests": running} | fields),
    )
    logged = size(as_logged)
    assert (logged.max_running_requests, logged.slots_per_request) == (running, 3 if slots > 16 else 1)
    # The engine's own choice from the budget that these pools took is the same again.
    again = size(sglang_plan.changed(as_logged, {"state_memory_ratio": 0.9}))
    assert (again.state_slots, again.kv_tokens, again.max_running_requests) == (slots, tokens, running)


def test_printed_sizes_of_a_real_server() -> None:
    server = sglang_inputs.from_architecture(
        TINY, Parallel(), version="0.5.23", overlap=False, state_slots=310, kv_tokens=546_159
    )
    sizing = size(server)
    assert sizing.state is not None
    assert sizing.state.printed((0, 5, 23)) == (
        "Mamba Cache is allocated. max_mamba_cache_size: 310, conv_state size: 0.01GB, ssm_state size: 0.46GB "
    )
    assert (gib(sizing.accounts["kv_cache/k"]), gib(sizing.accounts["kv_cache/v"])) == (0.26, 0.26)


def test_a_budget_without_room_for_a_slot_is_refused() -> None:
    rest = budget((0, 5, 23), round(20.54 * GIB), round(20.53 * GIB), 0.0001)
    server = sglang_inputs.from_architecture(TINY, Parallel(), version="0.5.23", overlap=False, budget=rest)
    with pytest.raises(NotModelledError, match="holds no state slot"):
        size(server)


# --------------------------------------------------------------------------------------------------- rules by release


@pytest.mark.parametrize(
    ("version", "fields", "slots"),
    [
        ((0, 5, 3), {}, 1),
        ((0, 5, 6), {}, 3),
        ((0, 5, 7), {}, 5),
        ((0, 5, 7), {"strategy": "extra_buffer", "speculative": True}, 4),
        ((0, 5, 9), {}, 3),
        ((0, 5, 9), {"strategy": "extra_buffer"}, 5),
        ((0, 5, 9), {"strategy": "extra_buffer", "speculative": True}, 4),
        ((0, 5, 12), {"strategy": "extra_buffer"}, 5),
        ((0, 5, 12), {"strategy": "extra_buffer", "overlap": False}, 4),
        ((0, 5, 13), {"strategy": "extra_buffer_lazy"}, 4),
        ((0, 5, 23), {}, 3),
        ((0, 5, 23), {"strategy": "extra_buffer", "skip_decode_lock": True}, 4),
        ((0, 5, 23), {"skip_decode_lock": True}, 3),
        ((0, 5, 23), {"radix_cache": False}, 1),
    ],
)
def test_slots_of_a_running_request(version: tuple[int, int, int], fields: dict[str, Any], slots: int) -> None:
    settings: dict[str, Any] = {"radix_cache": True, "strategy": "no_buffer", "overlap": True} | fields
    assert sglang_rules.slots_per_request(version, **settings) == slots


@pytest.mark.parametrize(
    ("version", "slots", "charged"),
    [
        # The budget of the worked example with 4 draft tokens and 10 requests: 100 slots' worth of state share and more.
        ((0, 5, 6), 25, 25 * 5),
        ((0, 5, 12), 106, 106 + 40),
        ((0, 5, 16), 69, 69 + 40),
        ((0, 5, 17), 67, 68 + 44),
    ],
)
def test_slots_under_speculation_by_release(version: tuple[int, int, int], slots: int, charged: int) -> None:
    server = msgspec.structs.replace(
        H100,
        versions=(version, version),
        per_request=5,
        strategy="extra_buffer" if version > (0, 5, 7) else None,
        speculation=Speculation(4, steps=3, topk=1),
        max_running_requests=10,
    )
    if version < (0, 5, 7):
        server = msgspec.structs.replace(server, per_request=3)
    sizing = size(server)
    assert sizing.state_slots == slots
    assert sizing.charged_state == charged * SLOT.total


def test_up_to_0_5_16_the_padding_slot_is_an_overdraft() -> None:
    old = size(msgspec.structs.replace(H100, versions=((0, 5, 16), (0, 5, 16))))
    assert old.state_slots == 125
    assert old.unused is not None and -SLOT.total - TOKEN.full <= old.unused <= -SLOT.total + TOKEN.full


def test_speculative_states_of_old_releases_go_by_slots() -> None:
    pool = state_pool(SLOT, 47, version=(0, 5, 6), speculation=Speculation(4))
    assert (pool.speculative_ssm, pool.speculative_conv) == (48 * 4 * SLOT.ssm, 48 * 4 * SLOT.conv)


@pytest.mark.parametrize(
    ("version", "fields", "window"),
    [
        ((0, 5, 13), {}, 4 * SLOT.conv),
        ((0, 5, 14), {}, 2 * SLOT.conv),
        ((0, 5, 14), {"cuda": False}, 4 * SLOT.conv),
    ],
)
def test_windows_are_deduplicated_from_0_5_14_on_cuda(
    version: tuple[int, int, int], fields: dict[str, Any], window: int
) -> None:
    pool = state_pool(SLOT, 47, version=version, requests=4, speculation=Speculation(4), **fields)
    assert pool.speculative_conv == 5 * window


def test_a_tree_of_drafts_and_kda_keep_dense_windows() -> None:
    tree = state_pool(SLOT, 47, version=(0, 5, 23), requests=4, speculation=Speculation(4, topk=2))
    kda = msgspec.structs.replace(SLOT, dense_windows=True)
    assert tree.speculative_conv == 5 * 4 * SLOT.conv
    assert (
        state_pool(kda, 47, version=(0, 5, 23), requests=4, speculation=Speculation(4)).speculative_conv
        == 5 * 4 * SLOT.conv
    )


def test_a_prefill_worker_keeps_no_speculative_states_from_0_5_22() -> None:
    def total(version: tuple[int, int, int]) -> int:
        return state_pool(
            SLOT, 9, version=version, requests=1, speculation=Speculation(2), prefill_worker=True
        ).speculative_ssm

    assert total((0, 5, 22)) == 0 < total((0, 5, 21))


def test_without_a_version_every_reading_is_given_and_none_chosen() -> None:
    unknown = SglangServer(slot=SLOT, kv=TOKEN, state_slots=124, kv_tokens=330_323, versions=((0, 5, 13), (99,)))
    assert {(r.slots_per_request, r.max_running_requests) for r in readings(unknown)} == {(3, 41), (5, 24)}
    with pytest.raises(NotModelledError, match="neither is certain"):
        size(unknown)
    with pytest.raises(NotModelledError, match="3 or 5 state slots"):
        sglang_plan.smallest(unknown, 4, 1000)


def test_what_all_readings_say_can_be_used_without_a_version() -> None:
    slots = sglang_inputs.from_architecture(QWEN3_NEXT, Parallel(tp=4), state_slots=256)
    common = agreed(readings(slots))
    assert common.state_bytes == 257 * 19_316_736 and common.state_slots == 256
    assert common.slots_per_request is None and common.max_running_requests is None


def test_running_requests_in_effect_tell_the_readings_apart() -> None:
    told = SglangServer(
        slot=SLOT,
        kv=TOKEN,
        state_slots=124,
        kv_tokens=330_323,
        running_requests=24,
        context_length=262_144,
        versions=((0, 5, 13), (99,)),
    )
    assert size(told).slots_per_request == 5
    assert size(sglang_plan.changed(told, {"state_slots": 20})).kv_tokens == 574_619


def test_an_unknown_release_is_refused() -> None:
    with pytest.raises(NotModelledError, match=r"0\.5\.24 is not modelled"):
        size(msgspec.structs.replace(H100, versions=((0, 5, 24), (0, 5, 24))))


def test_slots_that_the_ratio_does_not_explain_are_not_chosen_anew() -> None:
    fixed = SglangServer(
        versions=((0, 5, 12),) * 2,
        slot=SLOT,
        kv=TOKEN,
        state_slots=360,
        kv_tokens=228_520,
        per_request=5,
        strategy="extra_buffer",
    )
    assert size(sglang_plan.changed(fixed, {"state_slots": 20})).state_slots == 20
    with pytest.raises(NotModelledError, match="how the 360 state slots were chosen"):
        size(sglang_plan.changed(fixed, {"state_memory_ratio": 0.5}))


def test_a_pool_that_a_flag_cut_short_tells_no_budget() -> None:
    capped = SglangServer(
        versions=((0, 5, 23),) * 2,
        slot=SLOT,
        kv=TOKEN,
        state_slots=49,
        kv_tokens=3000,
        max_total_tokens=3000,
        overlap=False,
    )
    assert size(capped).budget is None
    found = sglang_plan.smallest(capped, 4, 1000)
    assert found.fits is None and found.minimum.state_slots == 12


@pytest.mark.parametrize(
    "fields",
    [{"unified_pool": True}, {"replay": True}, {"checkpoint_pool": True}, {"disaggregation": "decode"}],
    ids=lambda fields: next(iter(fields)),
)
def test_pools_that_are_made_otherwise_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(NotModelledError):
        size(msgspec.structs.replace(H100, **fields))


@pytest.mark.parametrize(
    ("setting", "version", "words"),
    [
        ("state_cache_mode", (0, 5, 12), ("--mamba-scheduler-strategy", "x")),
        ("state_cache_mode", (0, 5, 14), ("--mamba-radix-cache-strategy", "x")),
        ("state_dtype", (0, 5, 23), ("--mamba-ssm-dtype", "x")),
        ("state_slots", (0, 5, 7), ("--max-mamba-cache-size", "x")),
    ],
)
def test_flags_by_release(setting: str, version: tuple[int, int, int], words: tuple[str, ...]) -> None:
    assert sglang_rules.flags(setting, "x", version, version) == words


def test_a_flag_that_was_renamed_between_is_not_named() -> None:
    with pytest.raises(NotModelledError, match=r"mamba-scheduler-strategy from 0\.5\.7 to 0\.5\.13"):
        sglang_rules.flags("state_cache_mode", "no_buffer", (0, 5, 12), (0, 5, 14))


def test_releases_that_ignore_the_slots_flag_get_no_such_advice() -> None:
    old = msgspec.structs.replace(H100, versions=((0, 5, 6), (0, 5, 6)), strategy=None)
    with pytest.raises(NotModelledError, match="ignore --max-mamba-cache-size"):
        sglang_plan.smallest(old, 4, 1000)


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("0.5.15.post1", ((0, 5, 15), (0, 5, 15))),
        ("0.5.7.dev12+gabc", ((0, 5, 6), (0, 5, 7))),
        ("v0.5.10", ((0, 5, 10), (0, 5, 10))),
        ("0.0.0.dev11582+g4df60434d", None),
        (None, None),
    ],
)
def test_versions(text: str | None, versions: Any) -> None:
    assert sglang_rules.version_of(text) == versions


@pytest.mark.parametrize(
    ("version", "overlap", "page", "model_class", "expected"),
    [
        ((0, 5, 12), None, None, None, {"no_buffer"}),
        ((0, 5, 14), True, 1, "Qwen3NextForCausalLM", {"extra_buffer"}),
        ((0, 5, 14), False, 1, "Qwen3NextForCausalLM", {"no_buffer"}),
        ((0, 5, 14), True, 1, None, {"no_buffer", "extra_buffer"}),
    ],
)
def test_what_auto_stands_for(
    version: tuple[int, int, int], overlap: bool | None, page: int | None, model_class: str | None, expected: set[str]
) -> None:
    found = sglang_rules.strategies(
        version, strategy="auto", overlap=overlap, page_size=page, model_class=model_class, linear_backend="triton"
    )
    assert {strategy for strategy, _ in found} == expected


def test_a_cached_prefix_keeps_one_slot_of_the_same_pool() -> None:
    kept = sglang_rules.prefix_cost((0, 5, 23), radix_cache=True, strategy="extra_buffer", overlap=True)
    assert (kept.slots_per_prefix, kept.tracking_slots_per_request, kept.evictable) == (1, 2, True)
    off = sglang_rules.prefix_cost((0, 5, 23), radix_cache=False, strategy="no_buffer", overlap=True)
    old = sglang_rules.prefix_cost((0, 5, 3), radix_cache=True, strategy="no_buffer", overlap=True)
    assert off.slots_per_prefix == old.slots_per_prefix == 0


def test_request_table_rows_by_release() -> None:
    assert request_table_bytes((0, 5, 11), 2048, 262_144) == 2049 * 262_148 * 4
    assert request_table_bytes((0, 5, 10), 2048, 262_144, 4) == 2048 * 262_152 * 4


def test_memory_fraction_moves_the_budget_by_a_share_of_the_free_memory_before() -> None:
    first = budget((0, 5, 23), 80 * GIB, 50 * GIB, 0.85)
    assert first.rest == 38 * GIB
    assert first.at_fraction(0.9).rest == 42 * GIB
    assert first.fraction_for(42 * GIB) == 0.9
    with pytest.raises(NotModelledError):
        Budget(1).at_fraction(0.9)


def test_attention_data_parallel_ranks_share_what_is_asked_for() -> None:
    shared = msgspec.structs.replace(H100, attention_dp=4, state_slots_requested=80, max_running_requests=16)
    assert size(shared).state_slots == 20 and size(shared).max_running_requests == 4
    assert sglang_plan.smallest(shared, 4, 1000).flags == (
        "--max-mamba-cache-size",
        "80",
        "--max-running-requests",
        "16",
    )


# ------------------------------------------------------------------------------------------------------ from a log alone


def logged(account: str, printed: float, **detail: Any) -> Entry:
    return Entry(account, round(printed * GIB), round(0.005 * GIB), "logged", detail, (Evidence(0, 1, ""),))


def log_server(**config: Any) -> tuple[Server, Rank]:
    """The worked example as a log prints it."""
    rank = Rank(
        tp=0,
        gpu=Gpu("cuda"),
        entries=(
            logged("recurrent_state/conv", 0.34, rows=125, slots=124),
            logged("recurrent_state/ssm", 17.58, rows=125, slots=124),
            logged("kv_cache/k", 10.08, tokens=330_323, dtype="torch.bfloat16"),
            logged("kv_cache/v", 10.08, tokens=330_323, dtype="torch.bfloat16"),
        ),
        capacity=Capacity(kv_tokens=330_323, state_slots=124, max_running_requests=24),
    )
    return Server("sglang", "0.5.18", config=config, ranks=(rank,)), rank


def test_figures_of_a_log_are_enough() -> None:
    found = sglang_inputs.from_rank(*log_server(max_running_requests=32, context_length=262_144))
    sizing = size(found.server)
    assert (sizing.slots_per_request, sizing.binding) == (5, ("state_slots",))
    after = size(sglang_plan.changed(found.server, {"state_slots": 20}))
    ends = sorted(
        size(sglang_plan.changed(each, {"state_slots": 20})).kv_tokens or 0 for each in (found.more, found.less)
    )
    assert ends[0] <= 574_619 <= ends[1]
    assert after.kv_tokens == pytest.approx(574_619, rel=0.001)
    assert ends[1] - ends[0] < 0.002 * 574_619


def test_wordings_bound_the_releases() -> None:
    server, rank = log_server()
    bare = msgspec.structs.replace(server, framework_version=None)
    assert sglang_inputs.from_rank(bare, rank).server.versions == ((0, 5, 13), (99,))
    without = tuple(
        msgspec.structs.replace(e, detail={k: v for k, v in e.detail.items() if k != "dtype"}) for e in rank.entries
    )
    old = msgspec.structs.replace(rank, entries=without)
    assert sglang_inputs.from_rank(bare, old).server.versions == ((0, 5, 4), (0, 5, 12))


def test_requests_that_nothing_explains_were_asked_for() -> None:
    server, rank = log_server()
    dense = msgspec.structs.replace(
        rank, entries=rank.entries[2:], capacity=Capacity(kv_tokens=330_323, max_running_requests=32)
    )
    context = {"context_length": 262_144}
    found = sglang_inputs.from_rank(msgspec.structs.replace(server, config=context), dense)
    assert size(found.server).binding == ("max_running_requests",)
    assert size(sglang_plan.changed(found.server, {"max_running_requests": 8})).max_running_requests == 8
    told = msgspec.structs.replace(server, config=context | {"memory_fraction": 0.85})
    with pytest.raises(NotModelledError, match="contradict"):
        size(sglang_inputs.from_rank(told, dense).server)


def test_as_many_requests_as_slots_means_no_radix_cache() -> None:
    server, rank = log_server()
    full = msgspec.structs.replace(
        rank, capacity=Capacity(kv_tokens=330_323, state_slots=124, max_running_requests=124)
    )
    assert sglang_inputs.from_rank(server, full).server.radix_cache is False


def test_draft_tokens_from_the_pools_figures() -> None:
    rank = Rank(
        entries=(
            logged("recurrent_state/ssm", 2.58, rows=49, slots=48),
            logged("recurrent_state/speculative_ssm", 1.05, slots=48),
        ),
        capacity=Capacity(state_slots=48, max_running_requests=4),
    )
    assert sglang_inputs.draft_tokens_of(rank) == 4
    unclear = msgspec.structs.replace(rank, capacity=Capacity(state_slots=48))
    with pytest.raises(NotModelledError):
        sglang_inputs.draft_tokens_of(unclear)


def test_pools_of_a_cpu_server_are_host_accounts() -> None:
    server, rank = log_server()
    entries = tuple(msgspec.structs.replace(e, account=f"host/{e.account}") for e in rank.entries)
    on_cpu = msgspec.structs.replace(rank, entries=entries, gpu=Gpu("cpu"))
    assert sglang_inputs.from_rank(server, on_cpu).server.slot is not None


# ---------------------------------------------------------------------------------------------------------- properties

VERSIONS = st.sampled_from([low for low, _ in sglang_rules.ERAS if low >= (0, 5, 4)])


@given(st.integers(1, 10_000), st.integers(1, 100))
def test_more_slots_are_more_bytes(slots: int, more: int) -> None:
    assert state_pool(SLOT, slots + more).total - state_pool(SLOT, slots).total == more * SLOT.total


@given(VERSIONS, st.integers(2 * GIB, 200 * GIB), st.integers(0, 20 * GIB))
def test_a_larger_budget_never_holds_less(version: tuple[int, int, int], rest: int, more: int) -> None:
    def sized(bytes_: int) -> tuple[int, int, int]:
        server = msgspec.structs.replace(
            H100,
            versions=(version, version),
            budget=Budget(bytes_),
            strategy=None if version < (0, 5, 7) else "extra_buffer",
        )
        found = size(server)
        return found.state_slots or 0, found.pool_bytes, found.max_running_requests or 0

    assert all(a <= b for a, b in zip(sized(rest), sized(rest + more), strict=True))


@given(VERSIONS, st.integers(2 * GIB, 200 * GIB))
def test_pools_stay_within_the_budget_but_for_the_padding(version: tuple[int, int, int], rest: int) -> None:
    server = msgspec.structs.replace(
        H100, versions=(version, version), budget=Budget(rest), strategy=None if version < (0, 5, 7) else "extra_buffer"
    )
    unused = size(server).unused
    assert unused is not None and -SLOT.total - TOKEN.full <= unused < TOKEN.full + MIB


@given(st.integers(1, 24), st.integers(1, 60_000))
def test_the_smallest_reservation_serves_its_load(requests: int, tokens: int) -> None:
    found = sglang_plan.smallest(H100, requests, tokens)
    exact = msgspec.structs.replace(
        H100,
        budget=Budget(found.needed),
        state_slots_requested=found.minimum.state_slots,
        max_running_requests=requests,
    )
    served, _ = size(exact).requests_of(tokens)
    assert served == requests or (tokens == 1 and served is not None)
    assert found.minimum.pool_bytes - found.needed == TOKEN.full


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]))
def test_sharding_divides_the_state(slots: int, tp: int) -> None:
    whole, shard = (sglang_inputs.state_slot(QWEN3_NEXT, Parallel(tp=n)) for n in (1, tp))
    assert whole is not None and shard is not None
    assert state_pool(shard, slots).total * tp == state_pool(whole, slots).total


def test_any_version_is_the_default() -> None:
    assert SglangServer().versions == ANY_VERSION
