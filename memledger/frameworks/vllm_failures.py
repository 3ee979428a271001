"""Failures of vLLM, torch and the host in contract form: kinds, phases, numbers in bytes."""

from __future__ import annotations

from typing import Any, Final

from memledger.events import Event
from memledger.frameworks.kernel import kind_of_kill
from memledger.frameworks.torch_oom import OWN_PROCESS_NOTE, own_process
from memledger.ledger import Failure
from memledger.units import GIB, Amount

_KINDS: Final = {
    "oom": "cuda_oom",
    "oom_rejected": "cuda_oom",
    "nvml_hides_oom": "cuda_oom",
    "cuda_error_oom": "cuda_oom",
    "load_oom": "cuda_oom",
    "alloc_call_failed": "allocation_failed",
    "ray_oom": "host_memory",
    "library_alloc_failed": "library",
    "nccl_alloc_failed": "communication",
    "host_alloc_failed": "host_memory",
    "shm_failed": "host_memory",
    "host_memory_too_small": "host_memory",
    "killed_process": "host_memory",
    "oom_kill": "host_memory",
    "exit_137": "host_memory",
    "warmup_oom": "cuda_oom",
    "workspace_locked_growth": "workspace",
    "free_memory_changed": "free_memory_changed",
    "sleep_leak": "free_memory_changed",
}

_PHASES: Final = {
    "load_oom": "weights",
    "warmup_oom": "warmup",
    "free_memory_too_small": "start",
    "free_memory_changed": "profiling",
    "no_cache_blocks": "kv_pool",
    "kv_too_small": "kv_pool",
    "multimodal_too_large": "kv_pool",
    "state_blocks_too_few": "graph_capture",
    "sleep_leak": "sleep",
}

_SIZES: Final = {
    "tried": "requested_bytes",
    "array": "requested_bytes",
    "total": "total_bytes",
    "free": "free_bytes",
    "process": "process_bytes",
    "allocated": "torch_allocated_bytes",
    "private": "private_pools_bytes",
    "unallocated": "reserved_unallocated_bytes",
    "reserved": "torch_reserved_bytes",
    "allowed": "allowed_bytes",
    "needed": "needed_bytes",
    "available": "available_bytes",
    "requested": "requested_bytes",
    "before": "before_bytes",
    "now": "now_bytes",
    "before_bytes": "before_bytes",
    "now_bytes": "now_bytes",
    "required": "required_bytes",
    "current": "current_bytes",
    "cpu_free": "free_bytes",
    "cpu_total": "total_bytes",
    "held": "held_bytes",
    "held_total": "total_bytes",
    "used": "used_bytes",
    "pool": "pool_bytes",
    "shm_needed": "needed_bytes",
    "shm_free": "free_bytes",
    "anon_rss": "anon_rss_bytes",
    "file_rss": "file_rss_bytes",
    "shmem_rss": "shmem_rss_bytes",
    "total_vm": "total_vm_bytes",
}

_COUNTS: Final = {
    "gpu": "gpu_index",
    "length": "max_model_len",
    "old_length": "max_model_len",
    "fits": "estimated_max_model_len",
    "tokens": "kv_tokens",
    "seqs": "max_num_seqs",
    "blocks": "kv_blocks",
    "requests": "max_num_seqs",
    "victim": "pid",
}


_FRAME_PHASES: Final = (
    ("wake_up", "sleep"),
    ("profile_run", "profiling"),
    ("profile_cudagraph_memory", "profiling"),
    ("determine_available_memory", "profiling"),
    ("determine_num_available_blocks", "profiling"),
    ("capture_model", "graph_capture"),
    ("capture_begin", "graph_capture"),
    ("capture_end", "graph_capture"),
    ("initialize_kv_cache", "kv_pool"),
    ("_allocate_kv_cache", "kv_pool"),
    ("initialize_from_config", "kv_pool"),
    ("load_model", "weights"),
    ("process_weights_after_loading", "weights"),
    ("kernel_warmup", "warmup"),
    ("compile_or_warm_up_model", "warmup"),
    ("execute_model", "serving"),
)
"""Functions of vLLM's worker from the most telling on: profiling runs the model too, and warm-up captures."""


def phase_of_frames(functions: set[str]) -> str | None:
    """The phase that a traceback through these functions failed in; None where they do not say."""
    return next((phase for function, phase in _FRAME_PHASES if function in functions), None)


def failure(event: Event, phase: str) -> Failure:
    """The failure that one line reports.

    Args:
        event: an event of kind `failure`.
        phase: where the start stood, used where the line does not say it itself.
    """
    kind = kind_of_kill(event) or _KINDS.get(event.id, event.id)
    return Failure(kind, _PHASES.get(event.id, phase), numbers(event), (event.evidence,))


def numbers(event: Event) -> dict[str, Any]:
    """The numbers of a failure line under the contract's names; what the line does not say is absent."""
    found: dict[str, Any] = {}
    for field, value in event.fields.items():
        if isinstance(value, Amount) and field in _SIZES:
            found[_SIZES[field]] = value.bytes
        elif field in _COUNTS and isinstance(value, int) and not isinstance(value, bool):
            found[_COUNTS[field]] = value
    if (fraction := event.number("utilization")) is not None:
        found["memory_fraction"] = fraction
    if (requested := event.fields.get("requested")) is not None and isinstance(requested, str):
        found["requested_bytes"] = int(float(requested) * GIB)
    for field in ("device", "library", "where", "what", "scope", "name", "constraint"):
        if (word := event.word(field)) is not None:
            found[field] = word
    others = other_processes(event)
    if (mine := own_process(event)) is not None:
        found["process_bytes"] = others[mine]["bytes"]
        found["process_note"] = OWN_PROCESS_NOTE
        others = [other for i, other in enumerate(others) if i != mine]
    if others:
        found["other_processes"] = others
    return found


def other_processes(event: Event) -> list[dict[str, int | None]]:
    """The other processes of torch's message; a size that stands for "not available" is None."""
    pids, sizes = event.fields.get("other_pid"), event.fields.get("other")
    if not isinstance(pids, tuple) or not isinstance(sizes, tuple):
        return []
    return [
        {"pid": pid, "bytes": size.bytes if isinstance(size, Amount) else None}
        for pid, size in zip(pids, sizes, strict=False)
        if isinstance(pid, int)
    ]


def same_incident(a: Failure, b: Failure) -> bool:
    """Whether two failures are one incident printed twice (worker, executor, engine core, front end)."""
    if a.kind != b.kind:
        return False
    mine, other = a.numbers.keys() - {"device"}, b.numbers.keys() - {"device"}
    if not mine or not other:
        return True
    shared = mine & other
    return bool(shared) and all(a.numbers[k] == b.numbers[k] for k in shared)


def merged(a: Failure, b: Failure) -> Failure:
    """One failure from two lines of the same incident: the fuller numbers, the earlier phase, some of the evidence."""
    return Failure(a.kind, a.phase, {**b.numbers, **a.numbers}, (*a.evidence, *b.evidence)[:4])
