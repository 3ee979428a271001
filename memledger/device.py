"""Closing a log's ledger against the card: `--gpu-total` where the log does not print the device's total."""

from __future__ import annotations

from typing import Final

import msgspec

from memledger.ledger import Basis, Budget, Gpu, Rank, Server, Stage, StageResidual, close, entry
from memledger.units import Amount

OPTION: Final = "--gpu-total"


def with_device_total(server: Server, total: Amount, basis: Basis, label: str | None = None) -> Server:
    """The server with every rank's ledger opened at the device's total instead of at its first reading.

    The part of the card that was taken before the first free-memory reading becomes `in_use_at_start` (context,
    communication, other processes: a log cannot tell them apart). A rank whose log prints a total of its own keeps it.

    Args:
        server: a server from a log.
        total: the device's total as CUDA reports it, bytes.
        basis: `derived` for a size the user gave, `assumed` for one looked up by a card's name.
        label: the card's name, where one was given.
    """
    ranks, notes = [], list(server.notes)
    for rank in server.ranks:
        changed, note = _rebase(rank, total, basis, label, _fraction(server))
        ranks.append(changed)
        if note is not None and note not in notes:
            notes.append(note)
    return msgspec.structs.replace(server, ranks=tuple(ranks), notes=tuple(notes))


def _fraction(server: Server) -> float | None:
    """The share of the device that vLLM was allowed; SGLang's fraction is of what was free before loading."""
    found = server.config.get("memory_fraction")
    return float(found) if server.framework == "vllm" and isinstance(found, (int, float)) else None


def _budget(rank: Rank, total: Amount, fraction: float | None) -> Budget:
    """`requested = total x utilisation` (vLLM, v1/worker/gpu_worker.py) where the log does not print it."""
    if fraction is None or rank.budget.static_bytes is not None or rank.budget.rule is not None:
        return rank.budget
    static = int(total.bytes * fraction)
    rule = f"device total ({OPTION}) x utilisation {fraction:g}"
    return msgspec.structs.replace(rank.budget, static_bytes=static, slack_bytes=total.bytes - static, rule=rule)


def _still_missing(reason: str | None, *, budget: bool) -> str:
    """Why the ledger is open, without what the option tells."""
    known = {"the device's total", *({"the budget"} if budget else ())}
    lead = "not in the log: "
    if reason is None or not reason.startswith(lead):
        return reason or "no free-memory reading in the log"
    left = [part for part in reason.removeprefix(lead).split(", ") if part not in known]
    return lead + ", ".join(left) if left else "no free-memory reading in the log"


def _rebase(
    rank: Rank, total: Amount, basis: Basis, label: str | None, fraction: float | None
) -> tuple[Rank, str | None]:
    if rank.gpu.total_bytes is not None:
        return rank, f"{OPTION} is not used for a rank whose log prints the device's total"
    if rank.gpu.kind == "cpu":
        return rank, f"{OPTION} is not used: the server runs on a CPU"
    gpu: Gpu = msgspec.structs.replace(rank.gpu, total_bytes=total.bytes, name=rank.gpu.name or label)
    opening = rank.residual.opening_bytes
    if rank.residual.base != "first_reading" or opening is None or not rank.stages:
        if not rank.entries:
            return msgspec.structs.replace(rank, gpu=gpu), None
        budget = _budget(rank, total, fraction)
        reason = _still_missing(rank.residual.reason, budget=budget.static_bytes is not None)
        residual = close("device", total, rank.entries, open_reason=reason)
        return msgspec.structs.replace(rank, gpu=gpu, budget=budget, residual=residual), None
    taken = total - Amount(opening)
    if taken.bytes < -taken.tolerance:
        return rank, f"{OPTION} is smaller than the first free-memory reading of {rank.label}: not used"
    # The first reading is the log's; the total, and with it this row, is only as right as what the user gave.
    row = entry(
        "in_use_at_start",
        taken,
        basis,
        stage="init",
        evidence=rank.residual.evidence,
        source=OPTION,
        note=f"{OPTION} less the first reading",
    )
    entries = (row, *rank.entries)
    first = rank.stages[0]
    if first.name == "init":
        stages = (msgspec.structs.replace(first, free_before_bytes=total.bytes), *rank.stages[1:])
    else:
        stages = (Stage("init", total.bytes, opening, StageResidual(0, 0)), *rank.stages)
    why_open = rank.residual.reason if rank.residual.verdict == "open" else None
    # The total is in the opening and in `in_use_at_start`: its uncertainty cancels and is not the residual's.
    cancelled = [msgspec.structs.replace(row, tolerance_bytes=0), *rank.entries]
    unified = bool(rank.gpu.unified_memory)
    residual = close("device", Amount(total.bytes), cancelled, open_reason=why_open, unified_memory=unified)
    return msgspec.structs.replace(rank, gpu=gpu, entries=entries, stages=stages, residual=residual), None
