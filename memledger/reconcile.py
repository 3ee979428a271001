"""The log's ledger lined up with what a machine shows now: the same ledger with more rows; pure.

Per device: total = driver + this server's processes + other processes + free + unattributed. Per process: what the driver says it uses
= the rank's entries + CUDA context + growth since the start (signed). Growth and what is unattributed are never entries: they are
what remains, and stand in the residual.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from memledger.ledger import (
    CONTRADICTION,
    Entry,
    Gpu,
    Live,
    LiveGpu,
    LiveProcess,
    LiveRow,
    LiveUsage,
    LogCheck,
    Rank,
    Report,
    Residual,
    Server,
    Source,
    Stage,
    StageResidual,
    close,
    entry,
    held,
)
from memledger.live import logcheck
from memledger.live.placement import Placed, host_pids_seen, place, without_prefix
from memledger.live.sample import Device, GpuProcess, LiveServer, Metrics, Process, Sample
from memledger.sanitize import clean
from memledger.units import MIB, Amount, total

CONTEXT: Final = Amount(450 * MIB, 160 * MIB)
"""CUDA context, loaded modules and library handles of one process: about 0.3 to 0.6 GiB on recent GPUs. Not a constant of any
source; measured as the driver's figure of a process less what torch reserved."""

SMI_ROUNDING: Final = MIB
"""nvidia-smi prints whole MiB, cut or rounded."""

TOTALS_APART: Final = 0.03
"""A log's total and the device's (less the driver's part) differ by no more than this, or they are different cards."""

_NOT_HELD: Final = frozenset({"in_use_at_start", "reserve", "free", "activations"})
"""Accounts of the log that a live reading replaces: what was in use before the start is told apart, and room that was kept
(vLLM's reserve and its profiled peak) is free or in the process's growth."""

_TOLD_LIVE: Final = frozenset({"the device's total", "the budget", "the activation peak"})
"""What a vLLM ledger misses and a live reading supplies."""

CANDIDATES: Final = ("activations that torch keeps", "kernels loaded on first use", "workspaces of the first requests")
NO_TABLE: Final = "the driver does not list the processes of this device"


def reconcile(
    report: Report, sample: Sample, *, pid: int | None = None, own_log: bool = False, built: bool = False
) -> Report:
    """The report with the machine's rows.

    Args:
        report: the report on the log, complete (its findings are those of the log).
        sample: what was seen of the machine.
        pid: the process that was asked for, where the sample holds several servers.
        own_log: the log is the file that the process writes to.
        built: `report.servers[0]` was made from the running server itself, not from a log.
    """
    server = next(
        (s for s in sample.servers if pid is None or pid == s.pid or pid in {p.pid for p in s.processes}), None
    )
    check = None if built or server is None else _checked(report.servers, server, own_log=own_log)
    index = _chosen(report, server, check)
    found = report.servers[index] if index is not None else None
    placed = place(found, server, sample)
    ranks, processes = _lined_up(found, placed, sample, server.started_at if server is not None else None)
    servers = list(report.servers)
    if index is not None and found is not None:
        servers[index] = msgspec.structs.replace(found, ranks=ranks)
    live = Live(
        taken_at=sample.taken_at,
        server=index,
        pid=server.pid if server is not None else None,
        started_at=server.started_at if server is not None else None,
        host=sample.host,
        port=server.port if server is not None else None,
        container=server.container if server is not None else None,
        driver_version=sample.devices.driver_version if sample.devices is not None else None,
        log=check,
        gpus=_gpus(sample, placed, server.processes if server is not None else (), on_cpu=_on_cpu(found)),
        processes=processes,
        usage=_usage(server.metrics if server is not None else None),
        notes=_notes(sample, server, placed),
    )
    return msgspec.structs.replace(report, servers=tuple(servers), sources=_sources(report, sample), live=live)


def _on_cpu(server: Server | None) -> bool:
    return server is not None and bool(server.ranks) and all(r.gpu.kind == "cpu" for r in server.ranks)


def _checked(servers: Sequence[Server], live: LiveServer, *, own_log: bool) -> LogCheck | None:
    if not servers:
        return None
    check = logcheck.check(servers, live)
    if own_log and check.verdict == "unknown":
        return msgspec.structs.replace(check, verdict="yes", reasons=("the process writes to it", *check.reasons))
    return check


def _chosen(report: Report, server: LiveServer | None, check: LogCheck | None) -> int | None:
    """The start that is lined up: what the check found, else the last one; None where the log is another's."""
    if not report.servers:
        return None
    if check is not None:
        return None if check.verdict == "no" else check.start
    return 0 if server is not None else len(report.servers) - 1


def _sources(report: Report, sample: Sample) -> tuple[Source, ...]:
    told = list(sample.sources)
    if sample.devices is not None and all(s.name != sample.devices.source.name for s in told):
        told.insert(0, sample.devices.source)
    first = [s for s in report.sources if s.name == "log"]
    rest = [s for s in report.sources if s.name not in {"log", *(t.name for t in told)}]
    return (*first, *told, *rest)


def _usage(metrics: Metrics | None) -> LiveUsage | None:
    if metrics is None:
        return None
    return LiveUsage(**{name: getattr(metrics, name) for name in LiveUsage.__struct_fields__})


# --------------------------------------------------------------------------------------------------------- the devices


def _rounding(sample: Sample) -> int:
    return SMI_ROUNDING if sample.devices is not None and sample.devices.source.name == "smi" else 0


def _gpus(sample: Sample, placed: Sequence[Placed], own: Sequence[Process], *, on_cpu: bool) -> tuple[LiveGpu, ...]:
    """The devices that the server uses, or all where none is known to be its own."""
    if sample.devices is None or (on_cpu and all(p.device is None for p in placed)):
        return ()
    devices = sample.devices.devices
    used = {p.device for p in placed if p.device is not None}
    if not used:
        used = {i for i, d in enumerate(devices) if not (d.mig_mode and d.parent_uuid is None)}
    ours: dict[tuple[int | None, int], Placed] = {(p.device, p.driver.pid): p for p in placed if p.driver is not None}
    blind = {p.device for p in placed if p.rank is not None and p.device is not None and p.driver is None}
    by_pid = {p.pid: p for p in own} if host_pids_seen(sample) else {}
    return tuple(_gpu(devices[i], i, ours, by_pid, _rounding(sample), blind=i in blind) for i in sorted(used))


def _gpu(
    device: Device,
    at: int,
    ours: dict[tuple[int | None, int], Placed],
    own: dict[int, Process],
    rounding: int,
    *,
    blind: bool,
) -> LiveGpu:
    rows: list[LiveRow] = []
    if device.reserved_bytes is not None:
        rows.append(LiveRow("driver_reserved", device.reserved_bytes, rounding, "live"))
    for seen in sorted(device.processes or (), key=lambda p: -(p.used_bytes or 0)):
        mine = ours.get((at, seen.pid))
        process = own.get(seen.pid) or (mine.process if mine is not None else None)
        account = "server_processes" if process is not None or mine is not None else "other_processes"
        rows.append(LiveRow(account, seen.used_bytes, rounding, "live", _whose(seen, process, mine)))
    free, remark = _free(device)
    cache = min(device.page_cache_bytes or 0, free or 0) if device.unified_memory else 0
    if cache:
        note = "given back when memory is short"
        rows.append(LiveRow("page_cache", cache, rounding, "live", {"note": note}))
    if free is not None:
        rows.append(LiveRow("free", free - cache, rounding, "live", {"note": remark} if remark else {}))
    # Where what is used is known, the rest is on the table as it is.
    told = {"reserved_bytes", "free_bytes"} if free is not None else set()
    return LiveGpu(
        device.index,
        device.uuid,
        device.name,
        device.total_bytes,
        device.memory_call,
        device.unified_memory,
        device.lost_bytes,
        tuple(rows),
        _device_residual(device, rows, blind=blind),
        (
            *device.notes,
            *(f"{name.replace('_', ' ')}: {why}" for name, why in device.missing.items() if name not in told),
        ),
    )


def _whose(seen: GpuProcess, process: Process | None, mine: Placed | None) -> dict[str, Any]:
    detail: dict[str, Any] = {"pid": seen.pid, "kind": seen.kind}
    for name in ("user", "command", "started_at", "orphan"):
        if (value := getattr(seen, name)) is not None:
            detail[name] = clean(value) if isinstance(value, str) else value
    if process is not None:
        detail["role"] = process.role
        if process.title and "command" not in detail:
            detail["command"] = clean(process.title)
    if mine is not None and mine.rank is not None:
        detail["rank"] = mine.rank
        detail["matched"] = mine.matched
    if why := seen.missing.get("used_bytes"):
        detail["note"] = why
    return detail


FREE_AND_DRIVER: Final = "with what the driver keeps: nvidia-smi's table does not tell them apart"


def _free(device: Device) -> tuple[int | None, str | None]:
    """Free memory, and what is to be said of it: a table of nvidia-smi tells no more than what is used."""
    if device.free_bytes is not None or device.total_bytes is None or device.used_bytes is None:
        return device.free_bytes, None
    return device.total_bytes - device.used_bytes, FREE_AND_DRIVER


def _device_residual(device: Device, rows: Sequence[LiveRow], *, blind: bool) -> Residual:
    """`blind`: a rank is on the device, and none of the driver's processes is known to be its own."""
    if device.total_bytes is None or _free(device)[0] is None:
        why = (
            device.missing.get("total_bytes") or device.missing.get("free_bytes") or "the device's memory was not told"
        )
        return Residual(None, None, None, "open", device.total_bytes, why)
    amounts = [Amount(r.bytes, r.tolerance_bytes) for r in rows if r.bytes is not None]
    rest = Amount(device.total_bytes) - total(amounts)
    reason = None
    if device.processes is None:
        reason = device.missing.get("processes") or NO_TABLE
    elif any(r.bytes is None for r in rows):
        reason = next((r.detail["note"] for r in rows if r.bytes is None and "note" in r.detail), None) or (
            "the driver gives no figure for some processes"
        )
    elif blind and not device.processes:
        reason = "the driver lists no process here, not even the server's own (a container)"
    elif device.unified_memory:
        reason = "the GPU shares the host's memory: what the system and other programs hold is not listed by process"
    if reason is not None:
        return Residual("device", rest.bytes, rest.tolerance, "open", device.total_bytes, reason)
    entries = [Entry("free", a.bytes, a.tolerance, "live") for a in amounts]
    return close("device", Amount(device.total_bytes), entries)


# ----------------------------------------------------------------------------------------------- ranks and processes


def _lined_up(
    server: Server | None, placed: Sequence[Placed], sample: Sample, started_at: str | None
) -> tuple[tuple[Rank, ...], tuple[LiveProcess, ...]]:
    devices = sample.devices.devices if sample.devices is not None else ()
    ranks = list(server.ranks) if server is not None else []
    processes: list[LiveProcess] = []
    for item in placed:
        device = devices[item.device] if item.device is not None else None
        if item.rank is None or device is None:
            rank = ranks[item.rank] if item.rank is not None else None
            processes.append(_process(item, rank, device))
            continue
        rank = ranks[item.rank]
        if (problem := _other_card(rank, device)) is not None:
            processes.append(_process(item, rank, device, notes=(problem,)))
            continue
        ranks[item.rank], parts = _with_live(rank, device, item, _rounding(sample), started_at)
        processes.append(_compared(item, rank, device, parts, _rounding(sample)))
    return tuple(ranks), tuple(processes)


def _compared(item: Placed, rank: Rank, device: Device, parts: tuple[LiveRow, ...], rounding: int) -> LiveProcess:
    """A rank's process with what it has grown by; `rank` is the log's."""
    plain = _process(item, rank, device)
    missing = _incomplete(rank)
    if missing is not None and parts:
        notes = (*plain.notes, f"what it holds beyond the ledger is not told apart: {missing}")
        return msgspec.structs.replace(plain, rows=parts, notes=notes)
    expected = next((e.bytes for e in rank.entries if e.account == "activations"), None)
    plain = msgspec.structs.replace(plain, rows=parts, expected_bytes=expected)
    if plain.used_bytes is None or not parts:
        return plain
    grown = Amount(plain.used_bytes, rounding) - total([Amount(r.bytes or 0, r.tolerance_bytes) for r in parts])
    return msgspec.structs.replace(plain, growth_bytes=grown.bytes, growth_tolerance_bytes=grown.tolerance)


def _process(item: Placed, rank: Rank | None, device: Device | None, notes: tuple[str, ...] = ()) -> LiveProcess:
    """A process as it was sampled, without its ledger."""
    own, seen = item.process, item.driver
    return LiveProcess(
        pid=own.pid if own is not None else seen.pid if seen is not None else 0,
        role=own.role if own is not None else "other",
        label=rank.label if rank is not None else None,
        rank=item.rank,
        gpu_index=device.index if device is not None else None,
        gpu_uuid=device.uuid if device is not None else None,
        matched=item.matched,
        used_bytes=seen.used_bytes if seen is not None else None,
        resident_bytes=own.resident_bytes if own is not None else None,
        zombie=own.zombie if own is not None else False,
        notes=(*item.notes, *notes),
    )


def _other_card(rank: Rank, device: Device) -> str | None:
    """Why a rank can't be on this device: their totals differ."""
    logged = rank.gpu.total_bytes
    if logged is None or device.total_bytes is None or device.unified_memory:
        return None
    whole = device.total_bytes - (device.reserved_bytes or 0)
    if abs(logged - whole) <= TOTALS_APART * whole:
        return None
    gib = 2**30
    return (
        f"not lined up: {rank.label}'s card has {logged / gib:.1f} GiB in the log, GPU {device.index} has "
        f"{device.total_bytes / gib:.1f} GiB"
    )


def _with_live(
    rank: Rank, device: Device, item: Placed, rounding: int, started_at: str | None
) -> tuple[Rank, tuple[LiveRow, ...]]:
    """The rank's ledger of now, and the rows of its process (without its growth)."""
    kept = [e for e in rank.entries if e.account not in _NOT_HELD]
    own = [e for e in kept if not e.account.startswith("host/")]
    ledger = held(own)
    others = _others(device, item, rounding)
    context = entry(
        "cuda_context", CONTEXT, "assumed", stage="init", note="context and libraries, 0.3 to 0.6 GiB a process"
    )
    first = _first_reading(rank)
    before = _before_start(
        rank, device, others, first, (item.process.started_at if item.process is not None else None) or started_at
    )
    gpu = msgspec.structs.replace(
        rank.gpu,
        kind=rank.gpu.kind or device.kind,
        index=device.index,
        uuid=device.uuid,
        name=device.name or rank.gpu.name,
        total_bytes=device.total_bytes if device.total_bytes is not None else rank.gpu.total_bytes,
        unified_memory=device.unified_memory if device.unified_memory is not None else rank.gpu.unified_memory,
    )
    parts = [
        LiveRow("ledger", ledger.bytes, ledger.tolerance, _basis(own), {"accounts": sorted({e.account for e in own})})
    ]
    parts.append(LiveRow("cuda_context", context.bytes, context.tolerance_bytes, "assumed", dict(context.detail)))
    if before is not None:
        parts.append(LiveRow(before.account, before.bytes, before.tolerance_bytes, before.basis, dict(before.detail)))
    left, remark = _free(device)
    if device.total_bytes is None or left is None or not own:
        return msgspec.structs.replace(rank, gpu=gpu), tuple(parts) if own else ()
    driver = (
        [entry("driver_reserved", Amount(device.reserved_bytes, rounding), "live", stage="init")]
        if device.reserved_bytes
        else []
    )
    free = entry("free", Amount(left, rounding), "live", reading=device.memory_call or "live")
    if remark is not None:
        free = msgspec.structs.replace(free, detail={**free.detail, "note": remark})
    rows = [*driver, context, *([before] if before is not None else []), *others, *kept, free]
    residual = close(
        "device",
        Amount(device.total_bytes, rounding),
        rows,
        open_reason=_still_open(rank, device, item),
        unified_memory=bool(device.unified_memory),
    )
    used = item.driver.used_bytes if item.driver is not None else None
    if used is not None and _incomplete(rank) is None:
        explained = sum(r.bytes or 0 for r in parts)
        residual = msgspec.structs.replace(residual, since_start_bytes=used - explained)
    stages = _stages(rank, rows, device.total_bytes, first, left)
    changed = msgspec.structs.replace(rank, gpu=gpu, entries=tuple(rows), stages=stages, residual=residual)
    return changed, tuple(parts)


def _basis(entries: Iterable[Entry]) -> Any:
    sizes: dict[str, int] = {}
    for item in entries:
        sizes[item.basis] = sizes.get(item.basis, 0) + abs(item.bytes)
    return max(sizes, key=lambda b: sizes[b], default="logged")


def _others(device: Device, item: Placed, rounding: int) -> list[Entry]:
    """Everybody on the device but the rank's own process, one row each."""
    rows = []
    for seen in device.processes or ():
        if item.driver is not None and seen.pid == item.driver.pid:
            continue
        if seen.used_bytes is None:
            continue
        detail = _whose(seen, None, None)
        rows.append(entry("other_processes", Amount(seen.used_bytes, rounding), "live", stage="init", **detail))
    return rows if item.driver is not None else []


def _first_reading(rank: Rank) -> Amount | None:
    """The rank's first reading of free memory, where the log has one."""
    if rank.residual.base == "first_reading" and rank.residual.opening_bytes is not None:
        return Amount(rank.residual.opening_bytes)
    first = rank.stages[0] if rank.stages else None
    if (
        rank.residual.base == "device"
        and first is not None
        and first.name == "init"
        and first.free_after_bytes is not None
    ):
        return Amount(first.free_after_bytes)
    return None


def _before_start(
    rank: Rank, device: Device, others: Sequence[Entry], first: Amount | None, started_at: str | None
) -> Entry | None:
    """What was in use before the log's first reading beyond driver, context and the others: communication, libraries.

    None where it is not known, or less than the context's own range leaves open. Processes that came after the server were not there.
    """
    reserved = device.reserved_bytes
    if reserved is None and device.total_bytes is not None and rank.gpu.total_bytes is not None:
        # What CUDA calls the total (and the log prints) is the device's without the driver's part.
        reserved = max(0, device.total_bytes - rank.gpu.total_bytes)
    if first is None or device.total_bytes is None or reserved is None or device.unified_memory:
        return None
    known = total([e.amount for e in others if not _later(e.detail.get("started_at"), started_at)])
    taken = Amount(device.total_bytes - reserved) - first - known - CONTEXT
    if taken.bytes <= CONTEXT.tolerance:
        return None
    # The context's range is in both and cancels in the sum: it stays with the context.
    return entry(
        "in_use_at_start",
        Amount(taken.bytes, first.tolerance),
        "derived",
        stage="init",
        note="before the first reading: communication, libraries",
        formula="total - driver - first reading - context - others",
    )


def _later(one: str | None, other: str | None) -> bool:
    """Whether a time is after another; False where one is not known."""
    if one is None or other is None:
        return False
    try:
        return datetime.fromisoformat(one) > datetime.fromisoformat(other)
    except (ValueError, TypeError):
        return False


def _still_open(rank: Rank, device: Device, item: Placed) -> str | None:
    """Why the ledger of now can't be judged; a live reading supplies the total and shows what is free."""
    if device.unified_memory:
        return "the GPU shares the host's memory: what the system and other programs hold is not listed by process"
    if device.processes is None:
        return device.missing.get("processes") or NO_TABLE
    if item.driver is None:
        return "none of the driver's processes is known to be this rank's"
    if item.driver.used_bytes is None:
        return item.driver.missing.get("used_bytes") or "the driver gives no figure for this process"
    return _incomplete(rank)


def _incomplete(rank: Rank) -> str | None:
    """What the ledger itself lacks beside what a live reading supplies: then what remains of a process is no growth."""
    why = rank.residual.reason if rank.residual.verdict == "open" else None
    lead = "not in the log: "
    if why is not None and why.startswith(lead):
        left = [part for part in why.removeprefix(lead).split(", ") if part not in _TOLD_LIVE]
        why = lead + ", ".join(left) if left else None
    if why is not None and why.startswith(CONTRADICTION):
        return why
    accounts = {e.account.partition("/")[0] for e in rank.entries}
    if why is None and not accounts & {"weights", "weights_and_non_torch"}:
        return "not in the log: the weights"
    if why is None and "kv_cache" not in accounts:
        return "not in the log: the KV cache"
    return why


def _stages(rank: Rank, rows: Sequence[Entry], opening: int, first: Amount | None, free: int) -> tuple[Stage, ...]:
    """The chain from the device's total over the log's readings to the live one; its residuals sum to the rank's.

    vLLM's levels after its first reading are a budget's, not readings: they are passed over.
    """
    if (
        first is None
        or not rank.stages
        or any(s.free_before_bytes is None or s.free_after_bytes is None for s in rank.stages)
    ):
        return ()
    read = any(e.account == "free" and e.basis == "logged" for e in rank.entries)
    early = [s for s in rank.stages if not (s.name == "init" and rank.residual.base == "device")] if read else []
    begin = {"driver_reserved", "cuda_context", "in_use_at_start", "other_processes"}
    taken = total([e.amount for e in rows if e.account in begin])
    kept = total(
        [e.amount for e in rows if e.account not in begin and e.account != "free" and not e.account.startswith("host/")]
    )
    start = Amount(opening) - first - taken
    last = Amount(early[-1].free_after_bytes or 0) if early else first
    inside = total([Amount(s.residual.bytes or 0, s.residual.tolerance_bytes or 0) for s in early])
    # What the log's own stages do not take of the entries (vLLM: all of them) fell between the first reading and now.
    fell = Amount(first.bytes - last.bytes) - inside
    end = last - Amount(free) - Amount(kept.bytes - fell.bytes, 0)
    return (
        Stage("init", opening, first.bytes, StageResidual(start.bytes, start.tolerance)),
        *early,
        Stage(
            "serving",
            last.bytes,
            free,
            StageResidual(end.bytes, end.tolerance + (0 if early else kept.tolerance)),
            CANDIDATES,
        ),
    )


def _notes(sample: Sample, server: LiveServer | None, placed: Sequence[Placed]) -> tuple[str, ...]:
    notes: list[str] = []
    if server is not None:
        told = {s.reason for s in sample.sources}
        notes += [
            *server.notes,
            *(f"{without_prefix(k)}: {why}" for k, why in server.missing.items() if why not in told),
        ]
    if sample.devices is not None and sample.devices.devices and not host_pids_seen(sample):
        mapped = [p for p in placed if p.matched == "size"]
        seen = any(d.processes for d in sample.devices.devices)
        if seen:
            how = "matched by size" if mapped else "not mapped"
            notes.append(f"host PIDs seen, {how}: the driver lists the host's process ids, and these are a container's")
    return tuple(dict.fromkeys(notes))


def gpu_of(device: Device) -> Gpu:
    """A ledger's GPU from a sampled device."""
    return Gpu(device.kind, device.index, device.uuid, device.name, device.total_bytes, device.unified_memory)
