"""A stable code for the cause of every incident; their pages stand in `memledger.findings.incident_pages`.

The kind says what ran out; the code says in which way, and so which way the remedy goes: a pool that is larger than what is
free and one that is too small for a request are of one kind and have opposite remedies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from memledger.postmortem.causes import Cause
from memledger.postmortem.incident import Candidate, Phase
from memledger.postmortem.symptom import Symptom

OTHER_PROCESS: Final = "ML211"
PREVIOUS_START: Final = "ML212"
MEMORY_CHANGED: Final = "ML213"
NOT_BACK_AFTER_SLEEP: Final = "ML214"
DIED_IN_SILENCE: Final = "ML248"
NOT_TOLD: Final = "ML249"

_OF_A_KIND: Final = {
    "weights": "ML215",
    "profiling": "ML216",
    "graph_capture": "ML222",
    "warmup": "ML223",
    "prefill": "ML224",
    "decode": "ML225",
    "communication": "ML228",
    "library": "ML229",
    "fragmentation": "ML230",
}
_OF_A_POOL: Final = {
    # The kind and whether the engine refused by its arithmetic, ran out while serving, or an allocation failed.
    ("kv_pool", "allocation"): "ML217",
    ("kv_pool", "refusal"): "ML218",
    ("kv_pool", "run time"): "ML219",
    ("state_pool", "allocation"): "ML220",
    ("state_pool", "refusal"): "ML221",
    ("state_pool", "run time"): "ML221",
}
_OF_THE_HOST: Final = {
    "kernel_oom": "ML231",
    "oomd": "ML231",
    "unit_oom": "ML231",
    "evicted": "ML231",
    "ray_memory_monitor": "ML231",
    "cgroup_oom": "ML232",
    "container_killed": "ML232",
    "slurm_oom": "ML232",
    "shm_full": "ML233",
    "host_alloc": "ML234",
    "pinned_failed": "ML234",
    "exit_code": "ML235",
    "container_exit": "ML235",
}


def code_of(cause: Cause, root: Symptom, phase: Phase, candidates: Iterable[Candidate] = ()) -> str:
    """The code of a cause.

    Args:
        cause: the conclusion.
        root: the line that it is drawn from.
        phase: when it happened.
        candidates: what else it may be; a start before this one that may hold the memory is among them.
    """
    if root.role == "consequence":
        return DIED_IN_SILENCE
    if cause.kind == "other_process":
        return _other_process(root, phase, candidates)
    if cause.kind == "host_memory":
        return _OF_THE_HOST.get(root.kind, "ML234")
    if cause.kind == "workspace":
        return "ML227" if cause.device_memory is False else "ML226"
    if cause.kind == "not_device_memory":
        return "ML241" if root.kind in {"allocator_retry", "recovered"} else "ML240"
    if cause.kind in {"kv_pool", "state_pool"}:
        how = {"engine_refusal": "refusal", "engine_runtime": "run time"}.get(root.kind, "allocation")
        return _OF_A_POOL[cause.kind, how]
    return _OF_A_KIND.get(cause.kind, NOT_TOLD)


def _other_process(root: Symptom, phase: Phase, candidates: Iterable[Candidate]) -> str:
    if root.rule.endswith(".free_memory_changed"):
        return MEMORY_CHANGED
    if phase == "wake_up":
        return NOT_BACK_AFTER_SLEEP
    return PREVIOUS_START if any(c.previous_start for c in candidates) else OTHER_PROCESS
