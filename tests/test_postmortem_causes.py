"""Each cause fires on its figures, its words or its traceback, and not beside them."""

import pytest

from memledger.events import Prefix
from memledger.postmortem import causes, figures
from memledger.postmortem.incident import MOST_WITHOUT_PROOF
from memledger.postmortem.symptom import KINDS, Frame, Symptom
from memledger.units import GIB, MIB, Amount


def symptom(kind="torch_oom", *, rule="any.oom", others=(), counts=None, words=None, hint=None, **sizes):
    amounts = {f"{name}_bytes": Amount(int(size)) for name, size in sizes.items() if size is not None}
    return Symptom(
        kind,
        KINDS[kind],
        rule,
        Prefix(),
        0,
        1,
        "a line",
        None,
        amounts,
        counts or {},
        words or {},
        (),
        tuple({"pid": pid, "bytes": int(size)} for pid, size in others),
        phase_hint=hint,
    )


def message(**changes):
    """Torch's message on an 80 GiB card that its own process fills."""
    sizes = {
        "requested": 512 * MIB,
        "total": 80 * GIB,
        "free": 100 * MIB,
        "process": 79.5 * GIB,
        "torch_allocated": 76 * GIB,
        "reserved_unallocated": 300 * MIB,
    }
    return symptom(**{**sizes, **changes})


def judged(one, phase="unknown", functions=(), server=None):
    frames = tuple(Frame("x.py", 1, name) for name in functions)
    return causes.judge(one, figures.numbers_of(one), phase, frames, server)


# ------------------------------------------------------------------------------------------------------ other processes


@pytest.mark.parametrize(
    ("held", "fires"),
    [
        (20 * GIB, True),
        (2.6 * GIB, True),
        (1.2 * GIB, False),  # less than 3 % of the card
        (184 * MIB, False),  # a bare context of another rank
    ],
)
def test_a_listed_process_is_the_cause_where_it_holds_a_share(held, fires):
    cause = judged(message(process=79.5 * GIB - held, torch_allocated=50 * GIB, others=[(812, held)]), "prefill")
    assert (cause.kind == "other_process") is fires
    assert not fires or (cause.confidence == 0.9 and "812" in cause.text)


def test_others_are_no_cause_of_a_request_beyond_their_memory():
    cause = judged(message(requested=70 * GIB, process=20 * GIB, torch_allocated=18 * GIB, others=[(812, 59 * GIB)]))
    assert cause.kind != "other_process"


@pytest.mark.parametrize(
    ("process", "free", "fires"),
    [
        (60 * GIB, 100 * MIB, True),
        (60 * GIB, 15 * GIB, False),  # it is free, and nobody's
        (79 * GIB, 100 * MIB, False),
    ],
)
def test_what_is_neither_free_nor_ours_is_anothers(process, free, fires):
    cause = judged(message(process=process, torch_allocated=process - GIB, free=free), "decode")
    assert (cause.kind == "other_process") is fires
    assert not fires or cause.confidence <= MOST_WITHOUT_PROOF


# -------------------------------------------------------------------------------------------------------- fragmentation


@pytest.mark.parametrize(
    ("rest", "asked", "fires"),
    [
        (9 * GIB, 2 * GIB, True),
        (9 * GIB, 9.5 * GIB, False),  # would not have served it
        (1 * GIB, 128 * MIB, False),  # what every run of activations leaves
    ],
)
def test_fragmentation_only_where_it_would_have_served_the_request(rest, asked, fires):
    cause = judged(message(requested=asked, torch_allocated=79 * GIB - rest, reserved_unallocated=rest), "prefill")
    assert (cause.kind == "fragmentation") is fires
    told = [advice.remedy.flags[0] for advice in cause.advice if advice.remedy is not None]
    assert any("expandable_segments" in flag for flag in told) is fires


# -------------------------------------------------------------------------------------------- memory outside torch


@pytest.mark.parametrize(
    ("changes", "phase", "fires"),
    [
        ({}, "unknown", True),
        ({"private_pools": 40 * MIB}, "unknown", False),  # graphs lie outside torch as well
        ({}, "graph_capture", False),
        ({"torch_allocated": 75 * GIB}, "unknown", False),
    ],
)
def test_much_outside_torch_at_the_start_is_communication(changes, phase, fires):
    cause = judged(message(**{"torch_allocated": 64 * GIB, **changes}), phase)
    assert (cause.kind == "communication") is fires
    assert cause.confidence <= 0.7


# -------------------------------------------------------------------------------------------------------------- phases


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("weights", "weights"),
        ("profiling", "profiling"),
        ("pools", "kv_pool"),
        ("graph_capture", "graph_capture"),
        ("warmup", "warmup"),
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("wake_up", "other_process"),
    ],
)
def test_a_phase_without_other_figures_tells_the_kind_and_no_more_than_that(phase, kind):
    cause = judged(message(), phase)
    assert cause.kind == kind
    assert cause.confidence <= 0.7


def test_a_line_that_names_its_phase_is_proof():
    assert judged(message(hint="weights"), "weights").confidence == 0.9


def test_the_state_and_the_workspace_are_told_by_the_traceback():
    assert judged(message(), "pools", ["init_memory_pool", "_init_mamba_pool"]).kind == "state_pool"
    assert judged(message(), "pools", ["init_memory_pool"]).kind == "kv_pool"
    assert judged(message(), "warmup", ["init_attention_backend"]).kind == "workspace"


def test_an_unknown_phase_gives_no_sure_cause():
    for changes in ({}, {"reserved_unallocated": 3 * MIB}, {"private_pools": 40 * MIB}, {"requested": 90 * GIB}):
        cause = judged(message(**changes))
        assert cause.confidence <= 0.5
        assert cause.candidates


# ------------------------------------------------------------------------------------------------ the line itself


@pytest.mark.parametrize(
    ("kind", "rule", "cause", "device"),
    [
        ("engine_refusal", "vllm.no_cache_blocks", "kv_pool", None),
        ("engine_refusal", "vllm.state_blocks_too_few", "state_pool", None),
        ("engine_runtime", "sglang.kv_allocation_failed", "kv_pool", False),
        ("engine_runtime", "sglang.request_slots_failed", "kv_pool", False),
        ("engine_runtime", "vllm.workspace_locked_growth", "workspace", False),
        ("engine_runtime", "sglang.gemm_workspace_failed", "workspace", True),
        ("library", "any.library_alloc_failed", "library", True),
        ("communication", "any.nccl_alloc_failed", "communication", True),
        ("workspace_overflow", "any.workspace_overflow", "workspace", False),
        ("shm_full", "any.shm_failed", "host_memory", False),
        ("pinned_failed", "system.pinned_failed", "host_memory", False),
        ("on_chip_memory", "any.on_chip_memory", "not_device_memory", False),
        ("size_bug", "any.size_bug", "not_device_memory", False),
    ],
)
def test_what_a_line_states_is_certain(kind, rule, cause, device):
    found = judged(symptom(kind, rule=rule))
    assert (found.kind, found.confidence, found.device_memory) == (cause, 0.9, device)


def test_request_slots_are_not_called_tokens():
    text = judged(symptom("engine_runtime", rule="sglang.request_slots_failed")).text
    assert "request slots" in text
    assert "tokens" not in text


@pytest.mark.parametrize("kind", ["exit_code", "container_exit", "nvml_hides_oom", "cuda_error", "runtime_oom"])
def test_words_without_figures_are_not_certain(kind):
    found = judged(symptom(kind, counts={"exit_code": 137}))
    assert found.confidence <= 0.5
    assert found.candidates


@pytest.mark.parametrize(("number", "fires"), [(79, True), (94, True), (31, False), (45, False)])
def test_only_a_fault_of_the_device_ends_processes(number, fires):
    found = judged(symptom("xid", rule="system.xid", counts={"xid": number}))
    assert (found.kind == "not_device_memory" and found.confidence == 0.9) is fires


@pytest.mark.parametrize(("taken", "sure"), [(71.66, 0.7), (1.2, 0.5)])
def test_the_start_check_names_another_process_where_more_than_a_context_is_held(taken, sure):
    found = judged(symptom("startup_check", rule="vllm.free_memory_too_small", total=80 * GIB, free=(80 - taken) * GIB))
    assert (found.kind, found.confidence) == ("other_process", sure)


def test_a_program_of_xla_is_told_with_both_sizes():
    found = judged(symptom("runtime_oom", rule="any.xla_program_too_large", program=20.44 * GIB, total=15.75 * GIB))
    assert "needs 20.44 GiB, and the device has 15.75 GiB" in found.text
    assert found.confidence <= 0.5
