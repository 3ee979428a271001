"""ML001 to ML009: what the running machine shows beside the log. All need `Context.live`, and say nothing without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from memledger import words as n
from memledger.findings.figures import NO_CONTEXT, WORTH_SAYING, Context, held
from memledger.ledger import Finding, Live, LiveGpu, LiveProcess, LiveRow, LiveUsage, Report, Server, Severity
from memledger.units import GIB, MIB

LARGE_SHARE: Final = 0.1
"""Share of the card from which what others hold, or what grew, is a warning."""
MUCH_ELSEWHERE: Final = 0.05
GROWTH_SHARE: Final = 0.01
LEAST_GROWTH: Final = GIB // 2
THIN: Final = 0.02
"""Share of the card under which free memory is thin for a server that grows."""
FULL: Final = 0.9
LEAST_LOST: Final = 64 * MIB
MOST_NAMED: Final = 3
_MAY_BE_RANKS: Final = frozenset({"worker", "scheduler", "engine", "other"})


def other_processes(_: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML001: processes that are not this server's hold memory on its GPUs."""
    found = _worst(context, lambda row: row.account == "other_processes" and not row.detail.get("orphan"))
    if found is None:
        return None
    gpu, rows, size = found
    severity: Severity = "warning" if size >= LARGE_SHARE * (gpu.total_bytes or size) else "note"
    text = (
        f"{n.gib_about(size)} on {gpu_name(gpu)}{_of(gpu, size)} belongs to other processes: {_named(rows)}. "
        "The server can't use it, and sizes its pools by what they leave at its start."
    )
    return Finding("ML001", "other processes on the GPU", severity, size, text)


def left_behind(_: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML002: workers whose server is gone still hold memory; or processes of this server are dead."""
    found = _worst(context, lambda row: bool(row.detail.get("orphan")), least=0)
    if found is not None:
        gpu, rows, size = found
        pids = " ".join(
            str(pid) for row in rows[:MOST_NAMED] if isinstance(pid := row.detail.get("pid"), int) and pid > 1
        )
        text = (
            f"{n.gib_about(size)} on {gpu_name(gpu)} is held by workers of a server that is gone: {_named(rows)}. "
            + (f"Nothing will end them: `kill {pids}` frees it." if pids else "Nothing will end them.")
        )
        return Finding("ML002", "workers of a dead server", "warning", size, text)
    live = context.live
    dead = [p for p in live.processes if p.zombie] if live is not None else []
    if not dead:
        return None
    names = ", ".join(f"pid {p.pid} ({p.role.replace('_', ' ')})" for p in dead[:MOST_NAMED])
    text = f"{n.plural(len(dead), 'process', 'processes')} of this server ended and {'waits' if len(dead) == 1 else 'wait'} to be collected: {names}. It does not serve any more."
    return Finding("ML002", "workers of a dead server", "warning", 0, text)


def contexts_elsewhere(_: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML003: the launcher, or ranks of other GPUs, hold a CUDA context here as well."""
    live = context.live
    ranks = [p for p in live.processes if p.rank is not None] if live is not None else []
    placed = {p.pid for p in ranks if p.matched is not None}
    if not placed:
        return None

    def computes_elsewhere(row: LiveRow) -> bool:
        # A worker that could not be told to be a rank may hold its own ledger here.
        known = (
            row.detail.get("pid") in placed or row.detail.get("role") not in _MAY_BE_RANKS or len(placed) == len(ranks)
        )
        return row.account == "server_processes" and "rank" not in row.detail and known

    found = _worst(context, computes_elsewhere)
    if found is None:
        return None
    gpu, rows, size = found
    who = "process" if len(rows) == 1 else "processes"
    text = (
        f"{n.gib_about(size)} on {gpu_name(gpu)} is held by {len(rows)} {who} of this server that compute elsewhere: {_named(rows)}. "
        f"Each has a CUDA context here; {gpu_name(gpu)} has that much less than it could, and the rank with least room sizes all pools."
    )
    severity: Severity = "warning" if gpu.total_bytes and size >= MUCH_ELSEWHERE * gpu.total_bytes else "note"
    return Finding("ML003", "contexts of the server's other processes", severity, size, text)


def growth(_: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML004: a rank's process holds more than its ledger and what was profiled for it."""
    live = context.live
    worst: tuple[int, LiveProcess] | None = None
    for process in live.processes if live is not None else ():
        if process.rank is None or process.growth_bytes is None:
            continue
        beyond = process.growth_bytes - (process.expected_bytes or 0)
        whole = _total(live, process) or 0
        if beyond > (process.growth_tolerance_bytes or 0) + max(LEAST_GROWTH, GROWTH_SHARE * whole) and (
            worst is None or beyond > worst[0]
        ):
            worst = (beyond, process)
    if worst is None or live is None:
        return None
    beyond, process = worst
    gpu = _gpu(live, process)
    size = process.growth_bytes or 0
    free = next((row.bytes for row in gpu.rows if row.account == "free"), None) if gpu is not None else None
    whole = (gpu.total_bytes if gpu is not None else None) or 0
    text = (
        f"{process.label or f'pid {process.pid}'} holds {n.gib_about(size)} more than weights, pools, graphs and a context"
        f" ({n.tolerance(process.growth_tolerance_bytes or 0) or '±0'} GiB)"
    )
    if process.expected_bytes:
        text += f", {n.gib_about(beyond)} more than the peak that was profiled"
    text += ": pools do not grow, so it is what torch's allocator keeps after large batches, and libraries loaded since the start"
    text += f". {n.gib_about(free)} are free." if free is not None else "."
    thin = free is not None and whole > 0 and free < THIN * whole
    severity: Severity = "warning" if thin or (whole and beyond > LARGE_SHARE * whole) else "note"
    return Finding("ML004", "growth since the start", severity, size, text)


def pools_now(server: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML005: what of the reserved pools is in use at this moment."""
    live = context.live
    usage = live.usage if live is not None else None
    if usage is None:
        return None
    parts: list[str] = []
    idle = 0
    for account, name, share in (
        ("kv_cache", "KV cache", usage.kv_usage),
        ("recurrent_state", "recurrent state", usage.state_usage),
    ):
        size = max((held(rank, account) for rank in server.ranks), default=0)
        if size < WORTH_SAYING or share is None:
            continue
        idle += int(size * (1 - min(share, 1.0)))
        parts.append(f"{n.percent(share)} of the {n.gib_about(size)} of {name}")
    if not parts:
        return None
    running = f" by {n.plural(usage.running_requests, 'running request')}" if usage.running_requests is not None else ""
    text = f"In use at this moment: {' and '.join(parts)}{running}"
    waiting = usage.queued_requests or 0
    full = max(usage.kv_usage or 0.0, usage.state_usage or 0.0) >= FULL and waiting > 0
    text += f"; {n.plural(waiting, 'request')} wait." if full else "."
    return Finding("ML005", "pools in use now", "note" if full else "info", idle, text)


def other_log(_: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML006: the log is of another start, or of another server, than the process."""
    live = context.live
    check = live.log if live is not None else None
    if live is None or check is None or check.verdict != "no":
        return None
    text = (
        f"The log is not of process {live.pid}: {'; '.join(check.reasons)}. Its figures are another start's, and are not lined up "
        "with what the GPU shows now."
    )
    return Finding("ML006", "log of another start", "warning", 0, text)


def fraction(server: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML007: what vLLM was allowed of the card, and what its process holds now."""
    live = context.live
    asked = server.config.get("memory_fraction")
    if live is None or server.framework != "vllm" or not isinstance(asked, (int, float)):
        return None
    worst: tuple[int, int, LiveProcess] | None = None
    for process in live.processes:
        whole = _total(live, process)
        if process.rank is None or process.used_bytes is None or whole is None:
            continue
        gpu = _gpu(live, process)
        driver = next((r.bytes or 0 for r in gpu.rows if r.account == "driver_reserved"), 0) if gpu is not None else 0
        allowed = int((whole - driver) * asked)
        if worst is None or process.used_bytes - allowed > worst[0]:
            worst = (process.used_bytes - allowed, allowed, process)
    if worst is None:
        return None
    beyond, allowed, process = worst
    name = process.label or f"pid {process.pid}"
    held_now = f"{name} holds {n.gib_about(process.used_bytes or 0)}"
    if beyond > max(GIB // 4, int(GROWTH_SHARE * allowed)):
        text = (
            f"{held_now}, {n.gib_about(beyond)} more than --gpu-memory-utilization {asked:g} of the card ({n.gib_about(allowed)}): "
            "the fraction bounds weights, profiled peak and KV cache; the CUDA context, graphs beyond their estimate and growth come on top."
        )
        return Finding("ML007", "memory fraction and what is held", "note", beyond, text)
    text = f"{held_now}, within --gpu-memory-utilization {asked:g} of the card ({n.gib_about(allowed)})."
    return Finding("ML007", "memory fraction and what is held", "info", beyond, text)


def nobodys(_: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML008: memory in use that no listed process holds."""
    live = context.live
    gpus = [g for g in (live.gpus if live is not None else ()) if g.residual.verdict == "unexplained"]
    gpu = max(gpus, key=lambda g: g.residual.bytes or 0, default=None)
    if gpu is None or (gpu.residual.bytes or 0) < WORTH_SAYING:
        return None
    size = gpu.residual.bytes or 0
    text = (
        f"{n.gib_about(size)} on {gpu_name(gpu)}{_of(gpu, size)} is in use by no process that the driver lists: workers left behind in "
        "another container, or processes outside this view. On the host, `sudo fuser -v /dev/nvidia*` names who has the device open."
    )
    return Finding("ML008", "memory of no listed process", "warning", size, text)


def lost(_: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML009: memory faults took capacity from the card."""
    live = context.live
    gpu = max(
        (g for g in (live.gpus if live is not None else ()) if g.lost_bytes),
        key=lambda g: g.lost_bytes or 0,
        default=None,
    )
    if gpu is None or (gpu.lost_bytes or 0) < LEAST_LOST:
        return None
    size = gpu.lost_bytes or 0
    text = f"{gpu_name(gpu)} has lost {n.amount(size)} to memory faults (retired pages or remapped rows): it has less than its like."
    return Finding("ML009", "capacity lost to memory faults", "note", size, text)


FAMILIES: Final = (
    other_processes,
    left_behind,
    contexts_elsewhere,
    growth,
    pools_now,
    other_log,
    fraction,
    nobodys,
    lost,
)

_OF_LOAD: Final = ("ML1", "ML5")
"""Groups of findings that rest on the log's peaks of load."""
_ANEW: Final = frozenset({"ML301", "ML302", "ML303"})
"""Findings on the balance of the log, which the live rows of a rank replace."""


def attach(report: Report, peaks: LiveUsage | None = None) -> Report:
    """The report with what the machine shows added to the findings of the start that was lined up (else of the last one).

    `peaks`: the most that was seen of the server's load; without them what its metrics say now. Where that is more than the log
    tells of, what was concluded from the log's peaks is concluded anew.
    """
    live = report.live
    if live is None or not report.servers:
        return report
    index = live.server if live.server is not None else len(report.servers) - 1
    server = report.servers[index]
    context = Context(live=live)
    found = [finding for family in FAMILIES if (finding := family(server, context)) is not None]
    lined_up = live.server is not None and any(e.basis == "live" for r in server.ranks for e in r.entries)
    told = _with_more_load(server, peaks or live.usage) if live.server is not None else server.findings
    kept = [f for f in told if not (lined_up and f.code in _ANEW) and f.code not in {g.code for g in found}]
    changed = msgspec.structs.replace(server, findings=tuple(sorted((*kept, *found), key=lambda f: f.code)))
    servers = (*report.servers[:index], changed, *report.servers[index + 1 :])
    return msgspec.structs.replace(report, servers=servers)


def _with_more_load(server: Server, seen: LiveUsage | None) -> tuple[Finding, ...]:
    """The server's findings, those on its load by the most that the log or the machine shows."""
    usage = server.usage
    if seen is None or not usage.seen:
        return server.findings
    raised = msgspec.structs.replace(
        usage,
        peak_running_requests=_most(usage.peak_running_requests, seen.running_requests),
        peak_queued_requests=_most(usage.peak_queued_requests, seen.queued_requests),
        peak_kv_usage=_most(usage.peak_kv_usage, seen.kv_usage),
        peak_state_usage=_most(usage.peak_state_usage, seen.state_usage),
        peak_swa_usage=_most(usage.peak_swa_usage, seen.swa_usage),
        peak_state_slots=usage.peak_state_slots if seen.state_usage is None else None,
    )
    before = msgspec.structs.replace(raised, peak_state_slots=usage.peak_state_slots)
    if before == usage:
        return server.findings
    from memledger import findings

    anew = findings.find(msgspec.structs.replace(server, usage=raised))
    of_load = tuple(f for f in anew if f.code.startswith(_OF_LOAD))
    return (*(f for f in server.findings if not f.code.startswith(_OF_LOAD)), *of_load)


_Figure = TypeVar("_Figure", int, float)


def _most(logged: _Figure | None, seen: _Figure | None) -> _Figure | None:
    """The larger one; a figure that the log never prints stays unknown."""
    return logged if logged is None or seen is None or seen <= logged else seen


# ---------------------------------------------------------------------------------------------------------------- words


def gpu_name(gpu: LiveGpu) -> str:
    """`GPU 0`; a MIG instance by its own id."""
    if gpu.uuid is not None and gpu.uuid.upper().startswith("MIG-"):
        return f"MIG instance {gpu.uuid[4:12]} of GPU {gpu.index}"
    return f"GPU {gpu.index}" if gpu.index is not None else "the GPU"


def process_name(row: LiveRow) -> str:
    """`pid 7781 (alice, python train.py) 2.10 GiB`."""
    detail = row.detail
    who = ", ".join(str(detail[key])[:60] for key in ("user", "command") if detail.get(key)) or str(
        detail.get("role", "")
    ).replace("_", " ")
    size = n.gib_about(row.bytes) if row.bytes is not None else "size not known"
    return f"pid {detail.get('pid')}" + (f" ({who})" if who else "") + f" {size}"


def _named(rows: Sequence[LiveRow]) -> str:
    more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
    return ", ".join(process_name(row) for row in rows[:MOST_NAMED]) + more


def _of(gpu: LiveGpu, size: int) -> str:
    return f" ({n.percent(size / gpu.total_bytes)})" if gpu.total_bytes else ""


def _worst(
    context: Context, wanted: Callable[[LiveRow], bool], *, least: int = WORTH_SAYING
) -> tuple[LiveGpu, list[LiveRow], int] | None:
    """The GPU on which the wanted rows hold most, with them, the largest first."""
    best: tuple[LiveGpu, list[LiveRow], int] | None = None
    for gpu in context.live.gpus if context.live is not None else ():
        rows = sorted((row for row in gpu.rows if wanted(row)), key=lambda row: -(row.bytes or 0))
        size = sum(row.bytes or 0 for row in rows)
        if rows and size >= least and (best is None or size > best[2]):
            best = (gpu, rows, size)
    return best


def _gpu(live: Live | None, process: LiveProcess) -> LiveGpu | None:
    for gpu in live.gpus if live is not None else ():
        if gpu.uuid == process.gpu_uuid and gpu.index == process.gpu_index:
            return gpu
    return None


def _total(live: Live | None, process: LiveProcess) -> int | None:
    gpu = _gpu(live, process)
    return gpu.total_bytes if gpu is not None else None
