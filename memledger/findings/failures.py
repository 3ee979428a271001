"""ML201: what failed, in words, with the figures that the failing line gives."""

from __future__ import annotations

from typing import Any, Final

from memledger import words as n
from memledger.ledger import Failure, Finding, Server, Severity

_WORDS: Final = {
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
    "communication": "A communication buffer could not be allocated",
    "fragmentation": "An allocation failed although more than its size was reserved and unused: the memory is fragmented",
    "host_memory": "Host memory ran out",
    "library": "A library found no memory for its handle or workspace",
    "not_device_memory": "A kernel asked for more on-chip memory than there is (device memory is not short)",
}
_CONSEQUENCES: Final = ("not_device_memory", "unknown", "library")
"""Kinds that tell least: a failure of another kind in the same log is the better answer."""

_PHASES: Final = {
    "init": "at initialisation",
    "weights": "while loading weights",
    "draft_weights": "while loading the draft's weights",
    "profiling": "in the profiling run",
    "pools": "while allocating the pools",
    "draft_pools": "while allocating the draft's pool",
    "graph_capture": "while capturing graphs",
    "graphs": "while capturing graphs",
    "warmup": "in the warm-up",
    "startup": "during start-up",
    "serving": "while serving",
    "prefill": "in a prefill batch",
    "decode": "in a decode batch",
}


def failure_summary(server: Server) -> Finding | None:
    """ML201: the failure that explains most, in a sentence."""
    if not server.failures:
        return None
    failure = min(server.failures, key=lambda f: (f.kind in _CONSEQUENCES, not f.numbers))
    text = describe(failure)
    others = len({(f.kind, f.phase) for f in server.failures}) - 1
    if others:
        text += f" {n.plural(others, 'other kind')} of failure in this start."
    size = failure.numbers.get("requested_bytes")
    severity: Severity = "error" if server.state == "failed" else "warning"
    evidence = tuple(e for f in (failure, *server.failures) for e in f.evidence[:1])
    return Finding(
        "ML201", "failure", severity, size if isinstance(size, int) else 0, text, tuple(dict.fromkeys(evidence))[:6]
    )


def describe(failure: Failure) -> str:
    """A failure in a sentence: what, when, the figures."""
    what = _WORDS.get(failure.kind)
    phase = _PHASES.get(failure.phase)
    if what is None:
        what = f"The server failed {phase}" if phase else "The server failed"
        if failure.kind != "unknown":
            what += f" ({failure.kind.replace('_', ' ')})"
    elif phase is not None and not any(word in what for word in phase.split()[-2:]):
        what += f", {phase}"
    figures = _figures(failure.numbers)
    return f"{what}: {figures}." if figures else f"{what}."


def _figures(numbers: dict[str, Any]) -> str:
    """The figures of the line, in the order in which they explain: asked, free, total, who holds it, the rest by name."""
    parts: list[str] = []
    used: set[str] = set()

    def take(name: str) -> Any:
        used.add(name)
        return numbers.get(name)

    index = take("gpu_index")
    on = f" on GPU {index}" if isinstance(index, int) else ""
    if isinstance(size := take("requested_bytes"), int):
        parts.append(f"{n.amount(size)} were asked for{on}")
    free, whole = take("free_bytes"), take("total_bytes")
    if isinstance(free, int):
        parts.append(f"{n.amount(free)} were free" + (f" of {n.gib_about(whole)}" if isinstance(whole, int) else ""))
    elif isinstance(whole, int):
        parts.append(f"the card has {n.gib_about(whole)}")
    if isinstance(size := take("process_bytes"), int):
        parts.append(f"this process held {n.gib_about(size)}")
    if isinstance(size := take("torch_allocated_bytes"), int):
        parts.append(f"torch had {n.gib_about(size)} allocated")
    if isinstance(size := take("private_pools_bytes"), int) and size:
        parts.append(f"{n.amount(size)} in graph pools")
    if isinstance(size := take("reserved_unallocated_bytes"), int) and size:
        parts.append(f"{n.amount(size)} reserved but unused")
    others = take("other_processes")
    if isinstance(others, (list, tuple)) and others:
        sizes = [size for p in others if isinstance(p, dict) and isinstance(size := p.get("bytes"), int)]
        if sizes:
            parts.append(f"{n.plural(len(sizes), 'other process', 'other processes')} held {n.gib_about(sum(sizes))}")
    for name, value in numbers.items():
        if name not in used and (word := _named(name, value)) is not None:
            parts.append(word)
    return ", ".join(parts[:8])


def _named(name: str, value: Any) -> str | None:
    label = name.removesuffix("_bytes").replace("_", " ")
    if value is None or isinstance(value, (dict, list, tuple)):
        return None
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{label} {n.amount(value)}"
    if isinstance(value, bool):
        return label if value else None
    if isinstance(value, (int, float)):
        return f"{label} {n.count(value) if isinstance(value, int) else format(value, 'g')}"
    return None
