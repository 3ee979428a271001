"""Failures of an SGLang start: kinds, phases, numbers in bytes; the same failure of several ranks is one."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from memledger.events import Event
from memledger.frameworks.kernel import kind_of_kill
from memledger.frameworks.torch_oom import OWN_PROCESS_NOTE, own_process
from memledger.ledger import Failure
from memledger.sanitize import clean
from memledger.units import Amount

MOST_FAILURES: Final = 50
MOST_EVIDENCE: Final = 8

_KINDS: Final[dict[str, str]] = {
    "oom": "cuda_oom",
    "oom_rejected": "cuda_oom",
    "cuda_error_oom": "cuda_oom",
    "library_alloc_failed": "cuda_oom",
    "nccl_alloc_failed": "cuda_oom",
    "nvml_hides_oom": "cuda_oom",
    "host_alloc_failed": "host_memory",
    "shm_failed": "host_memory",
    "host_failed": "host_memory",
    "host_short": "host_memory_short",
    "state_no_memory": "state_pool_too_small",
    "state_pool_too_small": "state_pool_too_small",
    "checkpoint_failed": "state_pool_too_small",
    "swa_too_small": "kv_too_small",
    "unified_failed": "kv_too_small",
    "pool_assertion": "kv_too_small",
    "child_died": "process_died",
    "gemm_workspace_failed": "workspace_allocation_failed",
    "preprocess_oom": "preprocessing_out_of_memory",
}
_PHASES: Final[dict[str, str]] = {
    "kv_too_small": "pools",
    "weights_leave_no_kv": "pools",
    "state_no_memory": "pools",
    "state_pool_too_small": "pools",
    "swa_too_small": "pools",
    "unified_failed": "pools",
    "checkpoint_failed": "pools",
    "pool_assertion": "pools",
    "unbalanced": "weights",
    "load_unfinished": "weights",
    "graph_capture_failed": "graph_capture",
    "kv_allocation_failed": "serving",
    "request_slots_failed": "serving",
    "retract_failed": "serving",
    "state_slots_exhausted": "serving",
    "preprocess_oom": "serving",
    "host_failed": "pools",
}
_FATAL: Final = frozenset(
    {
        "kv_too_small",
        "weights_leave_no_kv",
        "state_pool_too_small",
        "unbalanced",
        "graph_capture_failed",
        "load_unfinished",
        "scheduler_exception",
        "process_died",
        "killed",
        "cuda_oom",
        "host_memory",
        "state_slots_exhausted",
        "kv_allocation_failed",
        "request_slots_failed",
    }
)
_NAMES: Final[dict[str, str]] = {
    "tried": "requested",
    "process": "process",
    "allocated": "torch_allocated",
    "private": "private_pools",
    "unallocated": "reserved_unallocated",
    "rest": "total_rest_memory",
    "per_slot": "state_per_slot",
    "least": "least_free_of_any_rank",
    "own": "own_free",
    "cap": "swa_pool_cap",
}
_COUNTS: Final[dict[str, str]] = {
    "gpu": "gpu_index",
    "fraction": "memory_fraction",
    "above": "raise_above",
    "minimum": "minimum_viable",
    "slots": "state_slots",
    "per_request": "slots_per_request",
    "requests": "max_running_requests",
    "tokens": "swa_tokens",
    "code": "exit_code",
    "code2": "exit_code",
    "rank2": "rank",
    "profiled": "profiled_tokens",
    "asked": "asked_tokens",
}


CONSEQUENCES: Final = frozenset({"scheduler_exception", "process_died", "killed"})
"""Kinds that say that a process ended and not why."""


def allocation_failure(event: Event, phase: str) -> Failure:
    """The failure of torch's warning on a failed try, where the process died without another word on memory."""
    return Failure("cuda_oom", phase, _numbers(event), (event.evidence,))


class FailureLog:
    """Failures in order; repeats of other ranks add their line to the first."""

    def __init__(self) -> None:
        self._found: list[Failure] = []
        self.left_out = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def fatal(self) -> bool:
        """Whether one of them ends the server."""
        return any(f.kind in _FATAL for f in self._found)

    @property
    def memory(self) -> bool:
        """Whether one of them is about memory."""
        return any(f.kind in _FATAL - {"process_died", "killed", "scheduler_exception"} for f in self._found)

    def add(self, event: Event, phase: str, *, kind: str | None = None) -> None:
        """Take one failure line. `phase` is where the rank stood."""
        kind = kind or kind_of_kill(event) or _KINDS.get(event.id, event.id)
        if event.rule.framework == "any" and "graph failed" in event.message[:200]:
            phase = "graph_capture"
        phase = _PHASES.get(event.id, phase)
        numbers = _numbers(event)
        for index, earlier in enumerate(self._found):
            if earlier.kind == kind and _same(earlier.numbers, numbers):
                merged = {**earlier.numbers, **numbers}
                evidence = earlier.evidence
                if len(evidence) < MOST_EVIDENCE:
                    evidence = (*evidence, event.evidence)
                self._found[index] = msgspec.structs.replace(earlier, numbers=merged, evidence=evidence)
                return
        if len(self._found) >= MOST_FAILURES:
            self.left_out += 1
            return
        self._found.append(Failure(kind, phase, numbers, (event.evidence,)))

    def build(self) -> tuple[Failure, ...]:
        """All of them."""
        return tuple(self._found)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two failures say nothing different."""
    return all(other.get(name, value) == value for name, value in one.items())


def _numbers(event: Event) -> dict[str, Any]:
    """Figures in bytes, counts and fractions as they are; lists (other processes) as lists of bytes."""
    numbers: dict[str, Any] = {}
    for name, value in event.fields.items():
        if isinstance(value, Amount):
            numbers[f"{_NAMES.get(name, name)}_bytes"] = value.bytes
        elif isinstance(value, bool) or value is None or isinstance(value, str):
            if name == "cause" and isinstance(value, str):
                numbers["cause"] = clean(value, 200)
        elif isinstance(value, tuple):
            if value:
                numbers[_NAMES.get(name, name)] = [v.bytes if isinstance(v, Amount) else v for v in value]
        else:
            numbers[_COUNTS.get(name, name)] = value
    if (mine := own_process(event)) is not None:
        numbers["process_bytes"] = numbers["other"][mine]
        numbers["process_note"] = OWN_PROCESS_NOTE
        for name in ("other", "other_pid"):
            numbers[name] = [v for i, v in enumerate(numbers.get(name, ())) if i != mine]
            if not numbers[name]:
                del numbers[name]
    return numbers
