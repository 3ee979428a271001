"""What each rule's line is to the postmortem: its kind of symptom, the phase it names, the contract names of its figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from memledger.events import Event
from memledger.frameworks.exceptions import is_wrapper
from memledger.frameworks.torch_oom import deviation, printed_time
from memledger.postmortem.symptom import KINDS, Frame
from memledger.sanitize import clean

KIND_OF_RULE: Final[dict[str, str]] = {
    "any.oom": "torch_oom",
    "any.oom_rejected": "torch_limit",
    "any.cuda_error_oom": "cuda_error",
    "any.library_alloc_failed": "library",
    "any.nccl_alloc_failed": "communication",
    "any.library_init_failed": "library",
    "any.buffer_alloc_failed": "communication",
    "any.nvml_hides_oom": "nvml_hides_oom",
    "any.alloc_call_failed": "allocation_failed",
    "any.alloc_retry": "allocator_retry",
    "any.xla_program_too_large": "runtime_oom",
    "any.xla_oom": "runtime_oom",
    "any.xla_on_chip": "on_chip_memory",
    "any.ascend_oom": "runtime_oom",
    "any.ascend_host_oom": "pinned_failed",
    "any.host_alloc_failed": "host_alloc",
    "any.shm_failed": "shm_full",
    "any.on_chip_memory": "on_chip_memory",
    "any.workspace_overflow": "workspace_overflow",
    "any.illegal_access": "illegal_access",
    "any.size_bug": "size_bug",
    "any.exception": "exception",
    "any.killed_process": "kernel_oom",
    "any.oom_kill": "kernel_oom",
    "any.oom_invoked": "oom_invoked",
    "any.exit_137": "exit_code",
    "any.ray_oom": "ray_memory_monitor",
    "any.ray_node_memory": "ray_node",
    "any.ray_process_memory": "ray_process",
    "vllm.free_memory_too_small": "startup_check",
    "vllm.free_memory_changed": "startup_check",
    "vllm.load_oom": "torch_oom",
    "vllm.warmup_oom": "torch_oom",
    "vllm.no_cache_blocks": "engine_refusal",
    "vllm.kv_too_small": "engine_refusal",
    "vllm.state_blocks_too_few": "engine_refusal",
    "vllm.multimodal_too_large": "engine_refusal",
    "vllm.workspace_locked_growth": "engine_runtime",
    "vllm.pool_exhausted": "engine_runtime",
    "vllm.sleep_leak": "startup_check",
    "vllm.host_memory_too_small": "host_alloc",
    "vllm.engine_died": "consequence",
    "vllm.warmup_failed": "recovered",
    "sglang.kv_too_small": "engine_refusal",
    "sglang.weights_leave_no_kv": "engine_refusal",
    "sglang.state_no_memory": "engine_refusal",
    "sglang.state_pool_too_small": "engine_refusal",
    "sglang.swa_too_small": "engine_refusal",
    "sglang.pool_assertion": "engine_refusal",
    "sglang.unified_failed": "engine_refusal",
    "sglang.checkpoint_failed": "engine_refusal",
    "sglang.host_failed": "host_alloc",
    "sglang.host_short": "host_alloc",
    "sglang.unbalanced": "startup_check",
    "sglang.graph_capture_failed": "exception",
    "sglang.load_unfinished": "consequence",
    "sglang.scheduler_exception": "consequence",
    "sglang.child_died": "consequence",
    "sglang.killed": "exit_code",
    "sglang.kv_allocation_failed": "engine_runtime",
    "sglang.request_slots_failed": "engine_runtime",
    "sglang.retract_failed": "engine_runtime",
    "sglang.state_slots_exhausted": "engine_runtime",
    "sglang.gemm_workspace_failed": "engine_runtime",
    "sglang.preprocess_oom": "recovered",
}
PHASE_OF_RULE: Final[dict[str, str]] = {
    "vllm.free_memory_too_small": "start",
    "vllm.free_memory_changed": "profiling",
    "vllm.load_oom": "weights",
    "vllm.warmup_oom": "warmup",
    "vllm.no_cache_blocks": "pools",
    "vllm.kv_too_small": "pools",
    "vllm.state_blocks_too_few": "pools",
    "vllm.multimodal_too_large": "pools",
    "vllm.sleep_leak": "wake_up",
    "sglang.kv_too_small": "pools",
    "sglang.weights_leave_no_kv": "pools",
    "sglang.state_no_memory": "pools",
    "sglang.state_pool_too_small": "pools",
    "sglang.swa_too_small": "pools",
    "sglang.pool_assertion": "pools",
    "sglang.unified_failed": "pools",
    "sglang.checkpoint_failed": "pools",
    "sglang.unbalanced": "start",
    "sglang.graph_capture_failed": "graph_capture",
    "sglang.load_unfinished": "weights",
    "sglang.request_slots_failed": "serving",
    "sglang.retract_failed": "serving",
    "sglang.state_slots_exhausted": "serving",
}
_SHORT: Final = {"tried": "requested", "free": "free", "total": "total", "program": "program", "missing": "missing"}
SIZE_NAMES: Final[dict[str, str]] = {
    "tried": "requested",
    "array": "requested",
    "allocated": "torch_allocated",
    "private": "private_pools",
    "unallocated": "reserved_unallocated",
    "reserved": "torch_reserved",
    "allowed": "limit",
    "cap": "swa_pool_cap",
    "least": "least_free_of_any_rank",
    "own": "own_free",
    "rest": "rest",
    "per_slot": "state_per_slot",
    "cpu_free": "free",
    "cpu_total": "total",
    "held_total": "total",
    "shm_needed": "requested",
    "shm_free": "free",
    "before_bytes": "before",
    "now_bytes": "now",
    "asked": "requested",
    "current": "torch_allocated",
    "device_limit": "total",
    "mapped": "requested",
    "segment": "requested",
    "bytes": "requested",
    "size": "requested",
    **{f"{name}_{unit}": full for name, full in _SHORT.items() for unit in ("mib", "kib")},
    **{f"limit_{unit}": "limit" for unit in ("gib", "mib", "kib", "tib", "g", "m", "b")},
}
COUNT_NAMES: Final[dict[str, str]] = {
    "gpu": "gpu_index",
    "fraction": "memory_fraction",
    "utilization": "memory_fraction",
    "above": "raise_above",
    "minimum": "minimum_viable",
    "length": "max_model_len",
    "old_length": "max_model_len",
    "fits": "estimated_max_model_len",
    "seqs": "max_num_seqs",
    "requests": "max_num_seqs",
    "blocks": "state_blocks",
    "slots": "state_slots",
    "code2": "exit_code",
    "process_code": "exit_code",
    "worker_code": "exit_code",
    "code": "exit_code",
    "victim": "pid",
    "docker": "exit_code",
    "used": "used_gb",
    "limit": "limit_gb",
    "task": "killed_process_gb",
    "asked": "asked_tokens",
    "rank2": "rank",
}
SIZE_NAMES_OF_RULE: Final[dict[str, dict[str, str]]] = {
    "vllm.free_memory_too_small": {"requested": "desired"},
    "vllm.host_memory_too_small": {"reserved": "reserved", "used": "used"},
    "vllm.multimodal_too_large": {"reserved": "requested"},
    "vllm.workspace_locked_growth": {"required": "requested", "current": "workspace"},
    "any.workspace_overflow": {"available": "workspace"},
    "any.oom": {"cached": "reserved_unallocated"},
    "sglang.unbalanced": {"own": "own_free"},
}
WORDS: Final = frozenset(
    {
        "device",
        "library",
        "where",
        "at",
        "func",
        "what",
        "scope",
        "name",
        "constraint",
        "cause",
        "type",
        "inner",
        "text",
        "call",
        "codes",
        "phase",
        "object",
        "file",
        "written",
        "resized",
        "why",
        "group",
        "duration",
        "container",
        "ready",
        "threshold",
        "available",
        "exit",
        "pci",
    }
)
_KILLED_CODES: Final = frozenset({-9, 137})
_BUS_ERROR_CODES: Final = frozenset({-7, 135})
STARTS: Final = frozenset({"sglang.server_args", "vllm.version", "vllm.non_default_args", "vllm.engine_config"})
FRAME_RULES: Final = frozenset({"system.frame", "system.frame_code", "any.vllm_frame", "sglang.traceback"})
_FRAME: Final = re.compile(
    r"""\s*File \\?"(?P<file>[^"\\\n]{1,400})\\?",?(?:\s*line (?P<line>\d+)(?:,?\s*in (?P<function>[\w<>.]{1,120}))?)?"""
)
_RESUME: Final = re.compile(r"\[torch_memory_saver\.cpp\]|func=resume")
SMI_NAME: Final = re.compile(
    r"\|\s{1,6}(?P<gpu>\d{1,3})\s{1,6}(?P<name>[A-Za-z][^|]{0,60}?)\s+(?:On|Off|N/A|WDDM|TCC|ERR!)\s*\|\s+[0-9A-Fa-f]{8}:"
)
SMI_MEMORY: Final = re.compile(r"\|\s*(?P<used>\d{1,9})MiB\s*/\s*(?P<total>\d{1,9})MiB\s*\|\s*(?:\d{1,3}%|N/A)")
SMI_PROCESS: Final = re.compile(
    r"\|\s+(?P<gpu>\d{1,3})\s+(?:(?:N/A|\d{1,3})\s+(?:N/A|\d{1,3})\s+)?(?P<pid>\d{1,9})\s+(?:M\+C|C\+G|C|G)\s+"
    r"(?P<name>[^|]{1,80}?)\s+(?P<used>\d{1,9})MiB\s*\|"
)
SUMMARY_ROWS: Final[dict[str, str]] = {
    "Allocated": "torch_allocated",
    "Active": "torch_active",
    "Requested": "torch_requested",
    "GPU reserved": "torch_reserved",
    "Non-releasable": "non_releasable",
}
_MONTHS: Final = "JanFebMarAprMayJunJulAugSepOctNovDec"
_SYSLOG_TIME: Final = re.compile(r"(?P<month>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<time>\d\d:\d\d:\d\d)(?:\.\d+)?")
_KERNEL_TIME: Final = re.compile(
    r"\[[A-Z][a-z]{2} (?P<month>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<time>\d\d:\d\d:\d\d) (?P<year>\d{4})\]"
)
UNITS: Final = ("b", "kib", "mib", "gib", "tib")
_RAISED: Final = re.compile(r"(?:[A-Za-z_]\w*\.){0,8}[A-Z]\w*(?:Error|Exception)(?:\(\w+\))?:")
_CAPTURE_FAILED: Final = re.compile(r"[^\n]{0,200}?Capture [\w -]{1,60} failed:")
_OOM_WORDS: Final = re.compile(r"out of memory|OUT_OF_MEMORY|_ALLOC_FAILED", re.IGNORECASE)
_CODES: Final = re.compile(r"-?\d+")


def kind_of(event: Event) -> tuple[str, str | None]:
    """The kind of symptom that a line is, and the phase that it names itself; no kind: no symptom."""
    rule = f"{event.rule.framework}.{event.id}"
    kind = KIND_OF_RULE.get(rule)
    phase = PHASE_OF_RULE.get(rule)
    if kind is None and event.rule.framework == "system" and event.id in KINDS:
        kind = event.id
    refine = _REFINED.get(rule)
    if refine is not None:
        kind = refine(event)
    if event.rule.framework == "any" and _CAPTURE_FAILED.match(event.message):
        phase = "graph_capture"
    if kind == "wake_up_failed":
        phase = "wake_up"
    if kind == "torch_oom" and deviation(event.message) is not None:
        kind = "unreliable"
    return kind or "", phase


def _kind_of_kill(event: Event) -> str:
    limited = event.word("scope") == "Memory cgroup out of memory" or event.word("constraint") == "CONSTRAINT_MEMCG"
    return "cgroup_oom" if limited else "kernel_oom"


def _kind_of_exit(event: Event) -> str:
    if "OOMKilled" in event.message:
        return "container_killed"
    if "slurmstepd" in event.message or "Out Of Memory" in event.message:
        return "slurm_oom"
    return "exit_code"


def _kind_of_communication(event: Event) -> str:
    # NCCL is a library below the server; NVSHMEM and DeepEP hold the server's own buffers for expert parallelism.
    return "communication" if "mem_heap" in event.message or "non-zero status" in event.message else "library"


def _kind_of_death(event: Event) -> str:
    code = exit_code(event)
    return "exit_code" if code in _KILLED_CODES or code in _BUS_ERROR_CODES else "consequence"


def _kind_of_capture(event: Event) -> str:
    return "cuda_error" if _OOM_WORDS.search(event.word("cause") or "") else "exception"


def _kind_of_imbalance(event: Event) -> str:
    raised = _RAISED.match(event.message) is not None or (event.prefix.level or "").upper() == "ERROR"
    return "startup_check" if raised else "imbalance"


_REFINED: Final[dict[str, Callable[[Event], str]]] = {
    "any.killed_process": _kind_of_kill,
    "any.oom_kill": _kind_of_kill,
    "any.exit_137": _kind_of_exit,
    "any.nccl_alloc_failed": _kind_of_communication,
    "any.cuda_error_oom": lambda e: "wake_up_failed" if _RESUME.search(e.message) else "cuda_error",
    "any.exception": lambda e: "consequence" if is_wrapper(e) else "exception",
    "any.ray_node_memory": lambda e: "ray_memory_monitor" if "threshold" in e.message else "ray_node",
    "vllm.engine_died": _kind_of_death,
    "vllm.host_memory_too_small": lambda e: "shm_full" if e.amount("shm_needed") is not None else "host_alloc",
    "sglang.child_died": _kind_of_death,
    "sglang.graph_capture_failed": _kind_of_capture,
    "sglang.unbalanced": _kind_of_imbalance,
    "sglang.host_short": lambda e: "recovered" if "for request" in e.message else "host_alloc",
}


def exit_code(event: Event) -> int | None:
    """The exit code that a line gives; of several processes the one that was killed."""
    if event.word("what") is not None and event.id == "exit_code":
        return -9
    names = ("code", "code2", "process_code", "worker_code", "docker")
    codes = [c for name in names if (c := event.count(name)) is not None]
    codes += [int(found) for found in _CODES.findall((event.word("codes") or "").replace("DP", " "))][:64]
    killed = [code for code in codes if code in _KILLED_CODES]
    return killed[0] if killed else codes[0] if codes else None


def time_of(event: Event) -> str | None:
    """When a line was printed, as ISO text: the program's own stamp, the container's or journal's, or the kernel's."""
    if event.id == "container_time":
        # What it tells of, not when it was printed.
        return _container_time(event)
    if (own := printed_time(event)) is not None:
        return own
    if (outer := event.prefix.wrapper_time) is not None:
        short = _SYSLOG_TIME.fullmatch(outer)
        return outer if short is None else f"--{_month(short['month'])}-{int(short['day']):02d}T{short['time']}"
    found = _KERNEL_TIME.match(event.message)
    return found and f"{found['year']}-{_month(found['month'])}-{int(found['day']):02d}T{found['time']}"


def _container_time(event: Event) -> str | None:
    if (written := event.word("iso")) is not None:
        return written
    year, month, day, clock = (event.word(name) for name in ("year", "month", "day", "clock"))
    return f"{year}-{_month(month or '')}-{day}T{clock}"


def _month(name: str) -> str:
    return f"{_MONTHS.index(name) // 3 + 1:02d}" if name in _MONTHS else "00"


def frame_of(event: Event) -> Frame:
    """The frame of a traceback that a line shows; of a line of source only the function called is known."""
    found = _FRAME.match(event.message)
    if found is None:
        return Frame("", None, event.word("function") or event.word("sampler"))
    return Frame(clean(found["file"], 400), int(found["line"]) if found["line"] else None, found["function"])
