"""ML401 to ML404: memory of the host that the server keeps, and machines whose GPU shares the host's memory."""

from __future__ import annotations

from typing import Final

from memledger import words as n
from memledger.findings.figures import NO_CONTEXT, WORTH_SAYING, Context, each, held, on_cpu, opening, share, whole
from memledger.ledger import Entry, Finding, Rank, Server
from memledger.units import GIB

MUCH: Final = 64 * GIB
NEARLY_FULL: Final = 0.8
"""Share of the host's available memory from which the server's own host memory is a danger."""
THIN: Final = 0.05
_KILLED: Final = frozenset({"host_memory", "killed", "exit_137", "host_failed", "host_memory_too_small"})


def host_memory(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML401: the sum of all host accounts over all ranks. A CPU build keeps everything there: no finding."""
    if on_cpu(server):
        return None
    entries = _entries(server)
    size = sum(e.bytes for _, e in entries)
    if size < WORTH_SAYING:
        return None
    names = dict.fromkeys(e.account.removeprefix("host/").replace("_", " ").replace("/", ", ") for _, e in entries)
    over = f" over {n.plural(len({id(rank) for rank, _ in entries}), 'rank')}" if len(server.ranks) > 1 else ""
    text = f"The server also keeps {n.gib_about(size)} in host memory{over} ({', '.join(names)}): no part of the GPU's ledger."
    evidence = tuple(e for _, entry in entries[:4] for e in entry.evidence)
    return Finding("ML401", "host memory", "note" if size >= MUCH else "info", size, text, evidence)


def host_nearly_full(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML402: offloaded weights or KV take most of a host's memory, or the host's own killer ended the server."""
    if on_cpu(server):
        return None
    entries = _entries(server)
    size = sum(e.bytes for _, e in entries)
    evidence = tuple(e for _, entry in entries[:4] for e in entry.evidence)
    available = whole(server.config.get("host_available_bytes"))
    unified = _unified(server)
    killed = next((f for f in server.failures if f.kind in _KILLED), None)
    if size >= WORTH_SAYING and killed is not None:
        text = f"The server kept {n.gib_about(size)} in host memory{_of(size, available)}, and host memory ran out or the process was killed."
        return Finding("ML402", "host memory nearly full", "warning", size, text, (*evidence, *killed.evidence)[:6])
    if unified is not None and (size >= WORTH_SAYING or killed is not None):
        what = (
            f"the {n.gib_about(size)} kept for the host come" if size >= WORTH_SAYING else "the host's processes live"
        )
        text = f"The GPU shares the host's memory: {what} out of the same memory, and when it is full the system ends a process without a word here."
        lines = evidence or (killed.evidence if killed is not None else ())
        return Finding("ML402", "host memory nearly full", "warning", size, text, lines)
    if available is not None and size >= NEARLY_FULL * available and size >= WORTH_SAYING:
        text = f"The server keeps {n.gib_about(size)} in host memory{_of(size, available)}: little is left for the page cache and others."
        return Finding("ML402", "host memory nearly full", "warning", size, text, evidence)
    if unified is not None and any(e.account == "free" for e in unified.entries):
        left = held(unified, "free")
        if opening(unified) and share(unified, left) < THIN:
            text = f"The GPU shares the host's memory, and only {n.gib_about(left)} of it is left after the start: the system may end a process."
            return Finding("ML402", "host memory nearly full", "warning", left, text, ())
    return None


def unified_memory(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML403: the GPU has no memory of its own: the page cache counts as used, and the fraction is of the whole machine."""
    rank = _unified(server)
    if rank is None:
        return None
    failed = next((f for f in server.failures if f.kind == "free_memory_too_small"), None)
    name = rank.gpu.name or "The GPU"
    text = f"{name} shares the host's memory: a memory fraction is one of the whole machine, and the page cache can count as used."
    if failed is None:
        return Finding("ML403", "unified memory", "info", 0, text)
    text += " After a first load of the weights it holds their files: dropping it (or a lower fraction) lets the check pass."
    return Finding("ML403", "unified memory", "note", 0, text, failed.evidence)


def host_cache_doubled(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML404: a host cache of fixed size is taken once for KV and once more for the recurrent state."""
    for rank in server.ranks:
        kv = sum(e.bytes for e in rank.entries if e.account.startswith("host/kv_cache"))
        state = sum(e.bytes for e in rank.entries if e.account.startswith("host/recurrent_state"))
        gb = server.config.get("host_cache_gb")
        # Without a fixed size both pools follow a ratio, and equal sizes are a coincidence.
        if on_cpu(server) or kv < WORTH_SAYING or state < WORTH_SAYING or gb == 0 or abs(kv - state) > 0.05 * kv:
            continue
        asked = f"--hicache-size {gb} was asked for, and " if isinstance(gb, int) and gb else ""
        text = (
            f"{asked}{n.gib_about(kv)} of host memory went to the KV cache and {n.gib_about(state)} to the recurrent state"
            f"{each(server)}: a hybrid takes the size twice."
        )
        evidence = tuple(e for entry in rank.entries if entry.account.startswith("host/") for e in entry.evidence)
        return Finding("ML404", "host cache taken twice", "warning", state, text, evidence[:4])
    return None


def _entries(server: Server) -> list[tuple[Rank, Entry]]:
    return [(rank, e) for rank in server.ranks for e in rank.entries if e.account.startswith("host/")]


def _of(size: int, available: int | None) -> str:
    return f" of the {n.gib_about(available)} that were available" if available is not None and available > size else ""


def _unified(server: Server) -> Rank | None:
    return next((r for r in server.ranks if r.gpu.unified_memory), None)
