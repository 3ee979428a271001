"""ML201 to ML205: what failed, in words, with the figures that the failing line gives, and what the start says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from memledger import words as n
from memledger.findings.figures import NO_CONTEXT, Context
from memledger.ledger import Effect, Failure, Finding, Remedy, Server, Severity, account_total
from memledger.sanitize import clean

_WORDS: Final = {
    # kinds of incidents
    "other_process": "Another process holds the GPU's memory",
    "weights": "The weights did not fit on the GPU",
    "profiling": "Memory ran out in the profiling run, which tries the largest batch",
    "kv_pool": "The memory left after the weights is too small for the KV cache",
    "state_pool": "The memory left after the weights is too small for the recurrent state",
    "graph_capture": "Memory ran out while CUDA graphs were captured",
    "warmup": "Memory ran out in the warm-up",
    "prefill": "Memory ran out in a prefill batch",
    "decode": "Memory ran out in a decode batch",
    "workspace": "A workspace could not be allocated",
    "communication": "A communication library found no memory for its buffers",
    "fragmentation": "An allocation failed although more than its size was reserved and unused: the memory is fragmented",
    "host_memory": "Host memory ran out",
    "library": "A library found no memory for its handle or workspace",
    "not_device_memory": "A kernel asked for more on-chip memory than there is (device memory is not short)",
    # wordings of one engine
    "cuda_oom": "The GPU ran out of memory",
    "cuda_error": "A call to the device failed",
    "library_error": "A library's call failed",
    "config_error": "The server refused its configuration",
    "exception": "A process of the server ended with an exception",
    "other_process_killed": "Host memory ran out, and the kernel killed a process that is none of the server's own",
    "hip_oom": "The GPU ran out of memory",
    "no_cache_blocks": "Weights, activations and graphs leave nothing of the memory budget for the KV cache",
    "free_memory_changed": "Another process took or gave back GPU memory while this one measured it",
    "pool_exhausted": "The KV cache ran out of blocks",
    "unified_failed": "The shared buffer of KV cache and state is too small for one request",
    "checkpoint_failed": "There is no room for the int8 copies of the state",
    "host_failed": "Host memory is too small for a host pool",
    "weights_leave_no_kv": "The weights leave no room for the KV cache under --mem-fraction-static",
    "state_no_memory": "There is no room for the recurrent state after the weights",
    "state_pool_too_small": "The memory left after the weights holds too few recurrent-state slots",
    "swa_too_small": "The sliding-window pool is too small for one request",
    "pool_assertion": "The memory pool is too small to serve a request",
    "unbalanced": "One rank's GPU has much less free memory than another's: another process may hold it",
    "graph_capture_failed": "Graph capture failed",
    "load_unfinished": "Other ranks did not finish loading the weights",
    "scheduler_exception": "A scheduler process ended with an exception",
    "child_died": "A worker process died",
    "process_died": "A worker process died",
    "killed": "The server's process was killed",
    "kv_allocation_failed": "The KV cache ran out of tokens (a limit of the pool, not of the GPU)",
    "request_slots_failed": "The request slots ran out",
    "retract_failed": "The KV cache ran out even after running requests were put back",
    "state_slots_exhausted": "The recurrent-state slots ran out while serving",
    "workspace_allocation_failed": "A workspace could not be allocated",
    "preprocessing_out_of_memory": "Multimodal preprocessing ran out of GPU memory and went on on the CPU",
    "gemm_workspace_failed": "There is no room for the workspace of the grouped matrix product",
    "preprocess_oom": "Multimodal preprocessing ran out of GPU memory and went on on the CPU",
    "exit_137": "The process was ended by signal 9: host memory ran out, or somebody ended it",
    "host_memory_too_small": "Host memory is too small",
    "workspace_locked_growth": "A kernel asked for more workspace than was measured at the start",
}
_CONSEQUENCES: Final = {
    "child_died",
    "process_died",
    "scheduler_exception",
    "load_unfinished",
    "killed",
    "unknown",
    "library",
    "not_device_memory",
    "preprocess_oom",
    "preprocessing_out_of_memory",
}
"""Kinds that tell least: a failure of another kind in the same start is the better answer."""

_PHASES: Final = {
    "start": "at the start",
    "startup": "during start-up",
    "init": "during start-up",
    "weights": "while loading weights",
    "draft_weights": "while loading the draft's weights",
    "profiling": "in the profiling run",
    "kv_pool": "while allocating the KV cache",
    "pools": "while allocating the pools",
    "draft_pools": "while allocating the draft's pool",
    "graph_capture": "while capturing CUDA graphs",
    "graphs": "while capturing CUDA graphs",
    "warmup": "in the warm-up",
    "serving": "while serving",
    "prefill": "in a prefill batch",
    "decode": "in a decode batch",
    "sleep": "on going to sleep or waking up",
}
_PHASE_ADDS: Final = {
    "cuda_oom",
    "hip_oom",
    "communication",
    "workspace",
    "library",
    "fragmentation",
    "host_memory",
    "host_failed",
    "scheduler_exception",
    "child_died",
    "process_died",
    "killed",
    "exit_137",
    "cuda_error",
    "library_error",
    "exception",
}
"""Kinds that may happen at any time: the phase is part of the answer."""


def failure_summary(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML201: the failure that explains most, in a sentence."""
    failures = [f for f in server.failures if not _stopped(f)]
    if not failures:
        return None
    failure = min(failures, key=lambda f: (f.kind in _CONSEQUENCES, not f.numbers))
    text = describe(failure)
    others = list(dict.fromkeys(f.kind for f in failures if f.kind != failure.kind and f.kind not in _CONSEQUENCES))
    if others:
        text += f" Also: {', '.join(kind.replace('_', ' ') for kind in others[:3])}."
    size = failure.numbers.get("requested_bytes")
    severity: Severity = "error" if server.state == "failed" else "warning"
    evidence = tuple(e for f in (failure, *failures) for e in f.evidence[:1])
    remedy = _printed_remedy(failure)
    return Finding(
        "ML201",
        "failure",
        severity,
        size if isinstance(size, int) else 0,
        text,
        tuple(dict.fromkeys(evidence))[:6],
        () if remedy is None else (remedy,),
    )


def _stopped(failure: Failure) -> bool:
    """Whether a process was told to end (SIGINT, SIGTERM): somebody stopped the server, nothing failed."""
    return failure.kind in _CONSEQUENCES and failure.numbers.get("exit_code") in {-2, -15, 130, 143}


def describe(failure: Failure) -> str:
    """A failure in a sentence: what, when, the figures."""
    special = _SPECIAL.get(failure.kind)
    if special is not None and (text := special(failure.numbers)) is not None:
        return text
    what, phase = _WORDS.get(failure.kind), _PHASES.get(failure.phase)
    if what is None:
        what = (f"The server failed {phase}" if phase else "The server failed") + (
            f" ({failure.kind.replace('_', ' ')})" if failure.kind != "unknown" else ""
        )
    elif phase is not None and failure.kind in _PHASE_ADDS:
        what += f" {phase}"
    if isinstance(cause := failure.numbers.get("cause"), str):
        kind = failure.numbers.get("exception")
        return f"{what}: {f'{clean(kind, 80)}: ' if isinstance(kind, str) else ''}{clean(cause).rstrip('.')}."
    figures = _figures(failure.numbers)
    return f"{what}: {figures}." if figures else f"{what}."


def _kv_too_small(numbers: dict[str, Any]) -> str | None:
    length, needed, available = (numbers.get(k) for k in ("max_model_len", "needed_bytes", "available_bytes"))
    tokens, fits = numbers.get("kv_tokens"), numbers.get("estimated_max_model_len")
    profiled, fraction = numbers.get("profiled_tokens"), numbers.get("memory_fraction")
    if isinstance(length, int) and isinstance(needed, int) and isinstance(available, int):
        text = f"One request of {n.count(length)} tokens needs {n.gib_about(needed)} of KV cache, and {n.gib_about(available)} are there"
    elif isinstance(length, int) and isinstance(tokens, int):
        text = f"One request may have {n.count(length)} tokens, and the KV cache holds {n.count(tokens)}"
    elif isinstance(profiled, int):
        return f"No KV token fits after the weights: the engine's own count came to {n.count(profiled)} tokens."
    elif isinstance(fraction, (int, float)):
        return f"No KV token fits after the weights at --mem-fraction-static {fraction:g}."
    else:
        return None
    if isinstance(fits, int):
        text += f": --max-model-len {fits} would fit"
    return text + "."


def _free_memory_too_small(numbers: dict[str, Any]) -> str | None:
    free, whole, asked, fraction = (
        numbers.get(k) for k in ("free_bytes", "total_bytes", "requested_bytes", "memory_fraction")
    )
    if not isinstance(free, int) or not isinstance(whole, int):
        return None
    text = f"At the start {n.gib(free)} of {n.gib(whole)} GiB were free"
    if isinstance(asked, int):
        text += f", less than the {n.gib(asked)} GiB asked for"
        if isinstance(fraction, (int, float)):
            text += f" (--gpu-memory-utilization {fraction:g})"
    return f"{text}: {n.gib(whole - free)} GiB were in use by others or by this process's own context."


def _weights_leave_no_kv(numbers: dict[str, Any]) -> str | None:
    fraction, least = numbers.get("memory_fraction"), numbers.get("raise_above") or numbers.get("minimum_viable")
    if not isinstance(fraction, (int, float)):
        return None
    text = f"The weights leave no room for the KV cache at --mem-fraction-static {fraction:g}"
    if not isinstance(least, (int, float)):
        return f"{text}."
    if least >= 1:
        return f"{text}: no fraction is enough, the weights fill the GPU."
    return f"{text}: it has to be above {least:g}."


def _state_blocks_too_few(numbers: dict[str, Any]) -> str | None:
    requests, blocks = numbers.get("max_num_seqs"), numbers.get("kv_blocks")
    if not isinstance(requests, int) or not isinstance(blocks, int):
        return None
    return f"{n.count(requests)} requests may run, each holds at least one state block, and there are {n.count(blocks)}: --max-num-seqs {blocks} would fit."


def _other_process_killed(numbers: dict[str, Any]) -> str | None:
    name, held = numbers.get("name"), numbers.get("anon_rss_bytes")
    if not isinstance(name, str):
        return None
    size = f" ({n.gib_about(held)})" if isinstance(held, int) else ""
    return f"Host memory ran out, and the kernel killed {clean(name, 40)}{size}, which is none of the server's own processes."


_SPECIAL: Final[dict[str, Callable[[dict[str, Any]], str | None]]] = {
    "kv_too_small": _kv_too_small,
    "free_memory_too_small": _free_memory_too_small,
    "weights_leave_no_kv": _weights_leave_no_kv,
    "state_blocks_too_few": _state_blocks_too_few,
    "other_process_killed": _other_process_killed,
}


def _printed_remedy(failure: Failure) -> Remedy | None:
    """What the failing line itself advises in a figure."""
    fits = failure.numbers.get("estimated_max_model_len")
    if failure.kind == "kv_too_small" and isinstance(fits, int):
        return Remedy(
            ("--max-model-len", str(fits)),
            (Effect(capacity="context_length", change=fits - int(failure.numbers.get("max_model_len") or fits)),),
            "printed by vLLM",
        )
    blocks = failure.numbers.get("kv_blocks")
    if failure.kind == "state_blocks_too_few" and isinstance(blocks, int):
        return Remedy(("--max-num-seqs", str(blocks)), (), "printed by vLLM")
    return None


# ------------------------------------------------------------------------------------- what the start says of a failure

_OOM: Final = frozenset({"cuda_oom", "hip_oom", "prefill", "decode", "workspace", "warmup", "fragmentation"})
_SERVING: Final = frozenset({"serving", "prefill", "decode", "warmup"})
KV_LOW: Final = 0.7


def not_the_kv_cache(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML202: memory ran out while serving, with KV tokens left: one allocation of a batch, not the cache."""
    failure = next((f for f in server.failures if f.kind in _OOM and f.phase in {"serving", "prefill", "decode"}), None)
    if failure is None:
        return None
    crash = failure.numbers.get("kv_usage")
    kv = crash if isinstance(crash, float) else server.usage.peak_kv_usage
    asked = failure.numbers.get("requested_bytes")
    if kv is None or kv >= KV_LOW or not isinstance(asked, int):
        return None
    when = "was" if isinstance(crash, float) else "never exceeded"
    free = failure.numbers.get("free_bytes")
    left = f" with {n.amount(free)} free" if isinstance(free, int) else ""
    text = (
        f"KV usage {when} {n.percent(kv)}, so a larger KV cache would not have helped: one allocation of {n.amount(asked)}{left} "
        "failed, a temporary buffer outside the pools. Smaller batches (prefill chunks, tokens per step) or a smaller memory "
        "fraction leave it room."
    )
    return Finding("ML202", "not the KV cache", "note", asked, text, failure.evidence)


def beyond_the_profile(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML203: the allocation that failed is larger than what the start had measured or kept for it (vLLM)."""
    failure = next((f for f in server.failures if f.kind in _OOM and f.phase in _SERVING), None)
    asked = failure.numbers.get("requested_bytes") if failure is not None else None
    if failure is None or not isinstance(asked, int) or server.framework != "vllm":
        return None
    found = [(r, a.bytes) for r in server.ranks if (a := account_total(r.entries, "activations")) is not None]
    if not found:
        return None
    rank, profiled = found[0]
    if asked <= profiled // 2:
        return None
    kept = account_total(rank.entries, "reserve")
    outside = (
        f" and {n.gib_about(kept.bytes)} were kept outside the budget" if kept is not None and kept.bytes > 0 else ""
    )
    text = (
        f"The start measured an activation peak of {n.gib_about(profiled)}{outside}; the allocation that failed asked for "
        f"{n.amount(asked)} by itself. The measurement does not cover everything that a real prompt does (autotuning, long "
        "prefills of state layers): a lower --gpu-memory-utilization or --max-num-batched-tokens leaves room."
    )
    return Finding("ML203", "beyond the profiled peak", "note", asked, text, failure.evidence)


def capture_ran_out(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML204: the start's check passed, the KV cache took its part, and graph capture found no room (vLLM)."""
    failure = next(
        (f for f in server.failures if f.kind == "graph_capture" or (f.kind in _OOM and f.phase == "graph_capture")),
        None,
    )
    captured = any(e.account.startswith("cuda_graphs/") for r in server.ranks for e in r.entries)
    if failure is None or server.framework != "vllm" or captured:
        return None
    estimates = [r.budget.graph_estimate_bytes for r in server.ranks if r.budget.graph_estimate_bytes is not None]
    estimate = max(estimates, default=None)
    fraction = server.config.get("memory_fraction")
    text = "The KV cache had its memory before the graphs were captured, "
    if estimate is None:
        text += "and they must fit into what the memory budget leaves"
    elif estimate == 0:
        text += "and the estimate of the graphs was nothing: they must fit into what the memory budget leaves"
    else:
        text += f"and only their estimate of {n.amount(estimate)} was kept for them (it is made with a tiny pool)"
    text += f" at --gpu-memory-utilization {fraction:g}" if isinstance(fraction, float) else ""
    text += ". A lower utilization, fewer capture sizes or --enforce-eager lets the start pass."
    return Finding("ML204", "no room for graph capture", "note", 0, text, failure.evidence)


def state_needs_blocks(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML205: the pool is too small for one request, and prefix caching makes a hybrid's request larger (vLLM)."""
    failure = next((f for f in server.failures if f.kind in {"kv_too_small", "no_cache_blocks"}), None)
    config = server.config
    if failure is None or server.framework != "vllm" or config.get("prefix_caching") is not True:
        return None
    details = [e.detail for r in server.ranks for e in r.entries if e.account == "kv_cache/pool"]
    hybrid = config.get("state_cache_mode") in {"align", "all"} or any(
        d.get("includes_recurrent_state") or d.get("state_padding_percent") is not None for d in details
    )
    if not hybrid:
        return None
    mode = config.get("state_cache_mode")
    named = f" (mode {mode})" if isinstance(mode, str) else ""
    each = "every block keeps a state" if mode == "all" else "a request keeps further states beside the current one"
    text = (
        f"Prefix caching is on for a model with recurrent state{named}: {each}, each as large as a block. "
        "--no-enable-prefix-caching lowers what one request needs."
    )
    return Finding("ML205", "prefix caching enlarges the state", "note", 0, text, failure.evidence)


# ------------------------------------------------------------------------------------------------------------- figures

_NAMES: Final = {"max_num_seqs": "max_num_seqs", "max_model_len": "max_model_len", "state_per_slot_bytes": "one slot"}
_LEFT_OUT: Final = {
    "pid",
    "largest_process_pid",
    "seconds_after_capture",
    "exit_code",
    "rank",
    "rank2",
    "code",
    "code2",
    "gpu_index",
    "other",
    "other_pid",
}


def _figures(numbers: dict[str, Any]) -> str:
    """The figures of the line, in the order in which they explain: asked, free, total, who holds it, the rest by name."""
    parts: list[str] = []
    used: set[str] = set()

    def take(name: str) -> int | None:
        used.add(name)
        value = numbers.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    index = take("gpu_index")
    on = f" on GPU {index}" if index is not None else ""
    if (size := take("requested_bytes")) is not None:
        parts.append(f"{n.amount(size)} asked for{on}")
    free, whole = take("free_bytes"), take("total_bytes")
    if free is not None:
        parts.append(f"{n.amount(free)} free" + (f" of {n.gib_about(whole)}" if whole is not None else ""))
    elif whole is not None:
        parts.append(f"a card of {n.gib_about(whole)}")
    if (size := take("process_bytes")) is not None:
        parts.append(f"{n.gib_about(size)} held by this process")
    if (size := take("torch_allocated_bytes")) is not None:
        parts.append(f"{n.gib_about(size)} allocated by torch")
    if size := take("private_pools_bytes"):
        parts.append(f"{n.amount(size)} of it in graph pools")
    if size := take("reserved_unallocated_bytes"):
        parts.append(f"{n.amount(size)} reserved but unused")
    used.add("other_processes")
    if sizes := _other_sizes(numbers):
        parts.append(f"{n.gib_about(sum(sizes))} held by {n.plural(len(sizes), 'other process', 'other processes')}")
    rest = [word for name, value in numbers.items() if name not in used and (word := _named(name, value)) is not None]
    return ", ".join([*parts, *rest][:8])


def _other_sizes(numbers: dict[str, Any]) -> list[int]:
    """What other processes hold, as far as torch's message gives a size: a list of records, or of plain sizes."""
    found = numbers.get("other_processes") or numbers.get("other") or ()
    if not isinstance(found, (list, tuple)):
        return []
    sizes = [p.get("bytes") if isinstance(p, dict) else p for p in found]
    return [size for size in sizes if isinstance(size, int)]


def _named(name: str, value: Any) -> str | None:
    if name.endswith("_gb") and isinstance(value, (int, float)):
        # Ray's own unit, whose base its documents do not tell.
        return f"{name.removesuffix('_gb').replace('_', ' ')} {value:,.2f} GB"
    if name in _LEFT_OUT or value is None or isinstance(value, (bool, dict, list, tuple)):
        return None
    label = _NAMES.get(name, name.removesuffix("_bytes").replace("_", " "))
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{label} {n.amount(value)}"
    if isinstance(value, int):
        return f"{label} {n.count(value)}"
    return f"{label} {value:g}" if isinstance(value, float) else None
