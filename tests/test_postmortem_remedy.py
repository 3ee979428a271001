"""The arithmetic of an advice: how far a setting moves, and what it costs."""

import pytest

from memledger.events import Prefix
from memledger.ledger import Capacity, Entry, Gpu, Rank, Residual, Server
from memledger.postmortem.causes import Cause
from memledger.postmortem.incident import Advice, Numbers, ServerState
from memledger.postmortem.remedy import figured
from memledger.postmortem.symptom import Symptom
from memledger.units import GIB, MIB, Amount

TOTAL = 80 * GIB


def root(rule="any.oom", kind="torch_oom", amounts=None, **fields):
    sizes = {name: Amount(size) for name, size in (amounts or {}).items()}
    return Symptom(kind, "cause", rule, Prefix(), 0, 9, "a line", amounts=sizes, **fields)


def server(framework="vllm", fraction=0.9, entries=None, **config):
    held = entries if entries is not None else (Entry("kv_cache/pool", 40 * GIB, 0, "logged"),)
    rank = Rank(
        tp=0,
        gpu=Gpu(total_bytes=TOTAL),
        entries=held,
        capacity=Capacity(kv_tokens=400_000),
        residual=Residual("device", 0, 0, "open", TOTAL),
    )
    return Server(framework=framework, config={"memory_fraction": fraction, **config}, ranks=(rank,))


def cause(kind, *settings, direction="lower"):
    advice = tuple(Advice(direction, f"General advice on the {name}.", setting=name) for name in settings)
    return Cause(kind, 0.7, "Because.", "a line", advice=advice)


def numbers(asked, free, **more):
    return Numbers(requested_bytes=asked, free_bytes=free, total_bytes=TOTAL, **more)


def flags(advice):
    return [one.remedy.flags for one in advice if one.remedy is not None]


@pytest.mark.parametrize(
    ("missing", "fraction", "new"),
    [(100 * MIB, 0.9, "0.89"), (GIB, 0.9, "0.88"), (5 * GIB, 0.94, "0.86"), (100 * MIB, 0.925, "0.91")],
)
def test_the_fraction_goes_down_by_what_was_missing(missing, fraction, new):
    (advice,) = figured(
        cause("graph_capture", "fraction"), root(), numbers(missing + GIB, GIB), server(fraction=fraction), None
    )
    assert advice.remedy.flags == ("--gpu-memory-utilization", new)
    given_up = round((fraction - float(new)) * TOTAL)
    assert given_up >= missing
    assert advice.remedy.effects[0].bytes == pytest.approx(given_up, abs=2)


def test_it_costs_the_tokens_of_that_memory():
    (advice,) = figured(cause("decode", "fraction"), root(), numbers(2 * GIB, GIB), server(), None)
    cost = next(effect.change for effect in advice.remedy.effects if effect.capacity == "kv_tokens")
    # 0.02 of 80 GiB are 1.6 GiB of a pool of 40 GiB with 400,000 tokens.
    assert cost == pytest.approx(-16_000, abs=2)
    assert "16K KV tokens" in advice.text


def test_no_tokens_are_named_where_recurrent_state_shares_the_pool():
    pool = (Entry("kv_cache/pool", 40 * GIB, 0, "logged", {"includes_recurrent_state": True}),)
    (advice,) = figured(cause("decode", "fraction"), root(), numbers(2 * GIB, GIB), server(entries=pool), None)
    assert all(effect.capacity is None for effect in advice.remedy.effects)


def test_more_free_than_asked_is_one_step():
    (advice,) = figured(cause("graph_capture", "fraction"), root(), numbers(50 * MIB, 57 * MIB), server(), None)
    assert advice.remedy.flags[1] == "0.89"
    assert "next to nothing was missing" in advice.text


def test_without_the_fraction_the_step_is_named():
    (advice,) = figured(cause("graph_capture", "fraction"), root(), numbers(2 * GIB, GIB), None, None)
    assert advice.remedy is None
    assert "by 0.02 at least" in advice.text


@pytest.mark.parametrize("found", [Numbers(), Numbers(requested_bytes=GIB), numbers(None, GIB)])
def test_without_figures_the_advice_stays(found):
    whole = cause("graph_capture", "fraction")
    assert figured(whole, root(), found, None, None) == whole.advice


def test_a_request_that_no_fraction_serves_gets_no_figure():
    whole = cause("prefill", "fraction")
    assert figured(whole, root(), numbers(74 * GIB, GIB), server(), None) == whole.advice


def test_a_process_far_over_its_budget_is_told():
    over = numbers(126 * MIB, 92 * MIB, process_bytes=79 * GIB)
    (advice,) = figured(cause("decode", "fraction"), root(), over, server(fraction=0.85), None)
    assert "11.0 GiB over its budget of 0.85 x 80.0 GiB" in advice.text


def test_the_chunk_is_halved_until_it_fits():
    (advice,) = figured(
        cause("prefill", "chunk"), root(), numbers(2 * GIB, GIB), server(chunked_prefill_tokens=8192), None
    )
    # 4,096 tokens would ask for all that was free; 2,048 for half of it.
    assert advice.remedy.flags == ("--max-num-batched-tokens", "2048")
    assert "256 KiB a token" in advice.text


def test_the_tokens_of_the_step_are_taken_where_they_are_known():
    state = ServerState(scheduled_tokens=4096)
    (advice,) = figured(
        cause("prefill", "chunk"), root(), numbers(2 * GIB, GIB), server(chunked_prefill_tokens=8192), state
    )
    assert advice.remedy.flags == ("--max-num-batched-tokens", "1024")
    assert "512 KiB a token" in advice.text


@pytest.mark.parametrize("chunk", [None, -1, 300, True])
def test_no_chunk_is_made_up(chunk):
    whole = cause("prefill", "chunk")
    config = {} if chunk is None else {"chunked_prefill_tokens": chunk}
    assert figured(whole, root(), numbers(2 * GIB, GIB), server(**config), None) == whole.advice


def test_a_pool_too_small_for_one_request_raises_the_fraction():
    line = root("vllm.kv_too_small", "engine_refusal", {"needed_bytes": 16 * GIB, "available_bytes": 12 * GIB})
    found = figured(cause("kv_pool", "fraction", direction="raise"), line, Numbers(), server(), None)
    assert flags(found) == [("--gpu-memory-utilization", "0.95")]


def test_a_fraction_that_can_not_be_raised_so_far_is_told():
    line = root("vllm.kv_too_small", "engine_refusal", {"needed_bytes": 26 * GIB, "available_bytes": 12 * GIB})
    (advice,) = figured(cause("kv_pool", "fraction", direction="raise"), line, Numbers(), server(), None)
    assert (advice.direction, advice.remedy) == ("none", None)


def test_figures_of_the_line_itself_are_flags():
    short = root(
        "vllm.kv_too_small", "engine_refusal", counts={"estimated_max_model_len": 61440, "max_model_len": 131072}
    )
    few = root("vllm.state_blocks_too_few", "engine_refusal", counts={"state_blocks": 856, "max_num_seqs": 1024})
    assert flags(figured(cause("kv_pool"), short, Numbers(), server(), None)) == [("--max-model-len", "61440")]
    assert flags(figured(cause("state_pool", "requests"), few, Numbers(), server(), None)) == [
        ("--max-num-seqs", "856")
    ]


@pytest.mark.parametrize(
    ("framework", "name"),
    [("sglang", "SGLANG_FLASHINFER_WORKSPACE_SIZE"), ("vllm", "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE")],
)
def test_a_workspace_is_raised_to_hold_the_buffer(framework, name):
    line = root("any.workspace_overflow", "workspace_overflow", {"requested_bytes": 435814400})
    found = figured(cause("workspace", direction="raise"), line, Numbers(), server(framework), None)
    assert flags(found) == [(f"{name}={2**30}",)]


def test_a_killed_compiler_asks_for_fewer_jobs():
    line = root("any.killed_process", "kernel_oom", words={"name": "cicc"})
    assert flags(figured(cause("host_memory"), line, Numbers(), None, None)) == [("MAX_JOBS=1",)]
    other = root("any.killed_process", "kernel_oom", words={"name": "python3"})
    assert figured(cause("host_memory"), other, Numbers(), None, None) == ()


@pytest.mark.parametrize(("least", "new"), [(0.942, "0.95"), (0.95, "0.96"), (0.9, "0.91")])
def test_what_the_weights_leave_is_above_the_printed_fraction(least, new):
    line = root("sglang.weights_leave_no_kv", "engine_refusal", counts={"raise_above": least})
    found = figured(cause("kv_pool", "fraction", direction="raise"), line, Numbers(), server("sglang"), None)
    assert flags(found) == [("--mem-fraction-static", new)]


def test_weights_that_fill_the_card_need_no_other_fraction():
    line = root("sglang.weights_leave_no_kv", "engine_refusal", counts={"raise_above": 1.0})
    (advice,) = figured(cause("kv_pool", "fraction", direction="raise"), line, Numbers(), server("sglang"), None)
    assert (advice.direction, advice.remedy) == ("none", None)
