"""ML301 to ML305: what the balance of a rank says when it does not close, what others hold, and how ranks differ."""

from __future__ import annotations

from typing import Final

from memledger import words as n
from memledger.findings.figures import NO_CONTEXT, Context, release
from memledger.ledger import Evidence, Finding, Rank, Server, Severity, Stage, Verdict, account_total
from memledger.units import GIB

CONTEXT_BYTES: Final = GIB
"""Room for what a worker itself holds before its first reading: a CUDA context (0.4 to 0.6 GiB), library handles and
communication set-up. An estimate, used only to decide whether the rest is worth a word."""
IN_USE_LIMIT: Final = 2 * GIB
LARGE_SHARE: Final = 0.2
"""From this share of the card on, what others hold is the first thing to know."""

UNBALANCED: Final = 0.05
"""Share of the opening from which a difference between ranks is worth a word."""
OTHERS_LIMIT: Final = 3 * GIB
"""Above what a worker itself holds outside torch (context, NCCL, library workspaces)."""
_BALANCED: Final = {
    "in_use_at_start": "memory in use before the start",
    "weights": "the weights' size",
    "kv_cache": "the KV cache",
    "recurrent_state": "the recurrent state",
    "cuda_graphs": "the size of the CUDA graphs",
    "free": "memory left free",
}

STAGE_WORDS: Final = {
    "init": "before the weights",
    "weights": "while weights were loaded",
    "draft_weights": "while the draft was loaded",
    "pools": "while the pools were allocated",
    "draft_pools": "while the draft's pool was allocated",
    "warmup": "between the pools and graph capture",
    "graphs": "during graph capture",
    "final": "after graph capture",
    "serving": "since the start",
}


def unexplained(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML301: memory that no line names, beyond what closes; speaks of the worst rank."""
    ranks = _with_verdict(server, "unexplained")
    if not ranks:
        return None
    rank = max(ranks, key=lambda r: r.residual.bytes or 0)
    size = rank.residual.bytes or 0
    text = f"{n.gib_about(size)} {_share(rank, size)}{_where(server, rank)} is held by nothing that the log names"
    stage = _stage(rank, 1)
    if stage is not None:
        text += f"; {n.gib_about(stage.residual.bytes or 0)} of it went {STAGE_WORDS[stage.name]}"
        if stage.candidates:
            text += f" (candidates: {', '.join(stage.candidates)})"
    return Finding("ML301", "memory without an owner", _severity(rank, size), size, text + ".", _readings(rank))


def over_counted(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML302: the entries hold more than free memory fell; speaks of the worst rank."""
    ranks = _with_verdict(server, "over_counted")
    if not ranks:
        return None
    rank = min(ranks, key=lambda r: r.residual.bytes or 0)
    size = -(rank.residual.bytes or 0)
    text = f"The lines name {n.gib_about(size)} {_share(rank, size)} more than free memory fell{_where(server, rank)}"
    stage = _stage(rank, -1)
    if stage is not None:
        text += f", {n.gib_about(-(stage.residual.bytes or 0))} of it {STAGE_WORDS[stage.name]}"
    text += ": memory was given back, or another process released some"
    if rank.gpu.unified_memory:
        text += " (on unified memory the page cache shrinks as well)"
    return Finding("ML302", "more counted than memory fell", "note", -size, text + ".", _readings(rank))


def in_use_at_start(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML303: much of the card was taken before the server's first reading."""
    worst: tuple[int, Rank] | None = None
    for rank in server.ranks:
        amount = account_total(rank.entries, "in_use_at_start")
        if amount is not None and (worst is None or amount.bytes > worst[0]):
            worst = (amount.bytes, rank)
    if worst is None or worst[0] - CONTEXT_BYTES <= IN_USE_LIMIT:
        return None
    size, rank = worst
    rows = [entry for entry in rank.entries if entry.account == "in_use_at_start"]
    # A total that the user gave is no figure of the log: a wrong one must not read as another process.
    given = next((entry.detail["source"] for entry in rows if "source" in entry.detail), None)
    before = f"If the card has the {n.gib_about(rank.residual.opening_bytes or 0)} of {given}, " if given else ""
    unified = bool(rank.gpu.unified_memory)
    shared = ", on this GPU without memory of its own those of the whole system" if unified else ""
    text = (
        f"{before}{n.gib_about(size)}{_where(server, rank)} was in use before the server took its first reading: "
        f"its own context and communication buffers, and other processes{shared}; a log can't tell them apart."
    )
    evidence = tuple(e for entry in rows for e in entry.evidence)
    opening = rank.residual.opening_bytes
    severity: Severity = "warning" if opening and size > LARGE_SHARE * opening and given is None else "note"
    if severity == "warning" and not unified:
        text += " Where nvidia-smi shows no process, workers were left behind or run outside the container's view."
    return Finding("ML303", "memory in use before the start", severity, size, text, evidence)


def unbalanced(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML304: one rank of a stage holds, or has left, much more than another; the smallest one decides for all."""
    worst: tuple[int, str, Rank, Rank] | None = None
    stages: dict[object, list[Rank]] = {}
    for rank in server.ranks:
        stages.setdefault(rank.pp, []).append(rank)
    for ranks in stages.values():
        for account, subject in _BALANCED.items():
            # A rank without a line of its own is not one that holds nothing.
            sizes = [(amount.bytes, r) for r in ranks if (amount := account_total(r.entries, account)) is not None]
            if len(sizes) < 2:
                continue
            (least, low), (most, high) = min(sizes, key=lambda s: s[0]), max(sizes, key=lambda s: s[0])
            if worst is None or most - least > worst[0]:
                worst = (most - least, subject, low, high)
    if worst is None:
        return None
    apart, subject, low, high = worst
    whole = max((r.residual.opening_bytes or 0 for r in (low, high)), default=0)
    if apart < GIB or (whole and apart < UNBALANCED * whole):
        return None
    account = next(a for a, words in _BALANCED.items() if words == subject)
    least_amount, most_amount = account_total(low.entries, account), account_total(high.entries, account)
    assert least_amount is not None and most_amount is not None
    text = (
        f"{subject[0].upper() + subject[1:]} differs between ranks: {n.gib_about(most_amount.bytes)} on {high.label}, "
        f"{n.gib_about(least_amount.bytes)} on {low.label}. The rank with least room sizes the pools of all"
    )
    text += "; other processes on one GPU are a usual cause." if account in {"in_use_at_start", "free"} else "."
    evidence = tuple(
        e for r in (low, high) for entry in r.entries if entry.account.startswith(account) for e in entry.evidence
    )
    return Finding("ML304", "ranks unbalanced", "note", apart, text, evidence[:4])


def others_charged(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML305: a version that counts what other processes hold as its own memory outside torch."""
    version = release(server)
    if server.framework != "vllm" or version is None or version >= (0, 9, 1):
        return None
    for rank in server.ranks:
        amount = account_total(rank.entries, "non_torch")
        if amount is None or amount.bytes < OTHERS_LIMIT:
            continue
        text = (
            f"{n.gib_about(amount.bytes)}{_where(server, rank)} is charged to this server as memory outside torch: up to 0.9.0 "
            "vLLM counts what other processes hold on the GPU there, so a second server on a card finds no room for its KV cache."
        )
        evidence = tuple(e for entry in rank.entries if entry.account == "non_torch" for e in entry.evidence)
        return Finding("ML305", "others' memory charged", "warning", amount.bytes, text, evidence)
    return None


def _with_verdict(server: Server, verdict: Verdict) -> list[Rank]:
    return [r for r in server.ranks if r.residual.verdict == verdict and r.residual.bytes is not None]


def _share(rank: Rank, size: int) -> str:
    opening = rank.residual.opening_bytes
    return f"({n.percent(size / opening, 1)})" if opening else ""


def _where(server: Server, rank: Rank) -> str:
    return f" on {rank.label}" if len(server.ranks) > 1 else ""


def _severity(rank: Rank, size: int) -> Severity:
    opening = rank.residual.opening_bytes
    return "warning" if opening and size > 0.05 * opening else "note"


def _stage(rank: Rank, sign: int) -> Stage | None:
    stages = [s for s in rank.stages if (s.residual.bytes or 0) * sign > 0]
    return max(stages, key=lambda s: abs(s.residual.bytes or 0), default=None)


def _readings(rank: Rank) -> tuple[Evidence, ...]:
    return tuple(e for entry in rank.entries if entry.account == "free" for e in entry.evidence)
