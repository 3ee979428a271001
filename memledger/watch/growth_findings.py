"""ML010 to ML016: what a watch saw grow, each with its slope, how sure it is, and when it ends in a full device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from memledger import words as n
from memledger.findings.live import gpu_name
from memledger.ledger import Finding, LiveGpu, LiveProcess, Report, Server, Severity
from memledger.units import GIB, MIB
from memledger.watch.growth import Trend
from memledger.watch.series import Series

Key = tuple[str, str, str]
"""What a series is of: a figure's kind, the device's id (or nothing), and the process or engine (or nothing)."""

DEVICE_NOISE: Final = 32 * MIB
"""The driver hands out memory in pieces of 2 MiB, allocators ask for 20 MiB and more at once."""
HOST_NOISE: Final = 256 * MIB
USAGE_NOISE: Final = 0.05
WITH_LOAD: Final = 0.7
"""Share of the growth that came with new peaks of load from which load explains it."""
SOON_S: Final = 24 * 3600.0
"""A device that is full within a day is worth a warning whatever fills it."""
HOUR: Final = 3600.0


def of_series(series: Mapping[Key, Series], report: Report) -> tuple[Finding, ...]:
    """The findings of all series, at most one of each code: the one with the largest growth."""
    best: dict[str, Finding] = {}
    judged = 0
    for key, one in series.items():
        finding, is_judged = _finding(key, one, series, report)
        judged += is_judged
        if finding is not None and (finding.code not in best or finding.bytes > best[finding.code].bytes):
            best[finding.code] = finding
    if judged and not best:
        best["ML016"] = _flat(series)
    return tuple(best[code] for code in sorted(best))


def attach(report: Report, found: tuple[Finding, ...]) -> Report:
    """The report with these findings at the server that is watched."""
    server = watched(report)
    if server is None or not found:
        return report
    index = report.servers.index(server)
    codes = {f.code for f in found}
    kept = [f for f in server.findings if f.code not in codes]
    changed = msgspec.structs.replace(server, findings=tuple(sorted((*kept, *found), key=lambda f: f.code)))
    servers = (*report.servers[:index], changed, *report.servers[index + 1 :])
    return msgspec.structs.replace(report, servers=servers)


def watched(report: Report) -> Server | None:
    """The start that is watched: the one that was lined up, else the last one."""
    if not report.servers:
        return None
    live = report.live
    return report.servers[live.server if live is not None and live.server is not None else -1]


def _finding(key: Key, one: Series, series: Mapping[Key, Series], report: Report) -> tuple[Finding | None, bool]:
    """What a series says, and whether it was long enough to say something about a device's memory."""
    kind, device, _ = key
    noise = {"host": HOST_NOISE, "kv": USAGE_NOISE, "state": USAGE_NOISE}.get(kind, DEVICE_NOISE)
    if kind not in {"process", "others", "nobody", "host", "kv", "state"}:
        return None, False
    trend = one.trend(noise)
    grows = trend.verdict in {"growing", "uneven", "step", "settled"}
    gpu = _gpu(report, device)
    free = _last(series.get(("free", device, "")))
    if not grows:
        return None, trend.verdict != "not_enough" and kind == "process"
    if kind == "process":
        return _own(key, one, trend, gpu, free, report), True
    if kind == "others":
        return _others(trend, gpu, free), False
    if kind == "nobody":
        return _nobodys(trend, gpu, free), False
    if kind == "host":
        return _host(trend), False
    return _pool(kind, one, trend), False


def _own(
    key: Key, one: Series, trend: Trend, gpu: LiveGpu | None, free: float | None, report: Report
) -> Finding | None:
    """ML010 or ML011: the server's own process on a device."""
    process = next((p for p in _processes(report) if str(p.pid) == key[2]), None)
    who = f"{process.label} (pid {key[2]})" if process is not None and process.label else f"pid {key[2]}"
    where = gpu_name(gpu) if gpu is not None else "its GPU"
    share = one.came_with_load
    ended = trend.verdict in {"step", "settled"}
    text = f"{who} took {_risen(trend)} more on {where} in {span(trend.seconds)}"
    if ended:
        text += ", and has not grown since: " if trend.verdict == "settled" else ", in one step: "
        text += "torch's allocator keeps what the largest batches took, and libraries load on first use"
        return Finding("ML011", "allocator growth", "note", int(trend.rise), f"{text}.{_left(free)}")
    if share is not None and share >= WITH_LOAD:
        text += f"; {n.percent(share)} of it as more ran, or pools were fuller, than ever before: the allocator grows with the largest load"
        return Finding(
            "ML011", "allocator growth", _soon(trend, free, "note"), int(trend.rise), f"{text}.{_ends(trend, free)}"
        )
    if trend.verdict == "uneven":
        return Finding(
            "ML011",
            "allocator growth",
            "note",
            int(trend.rise),
            f"{text}, by fits and starts{_unknown(share)}.{_left(free)}",
        )
    if share is None:
        why = "; how much ran meanwhile is not known, so that a leak and an allocator that follows the load can't be told apart"
    else:
        why = f"; only {n.percent(share)} of it came as load rose above what it had been before: nothing that it serves explains it"
    severity = _soon(trend, free, "warning")
    return Finding(
        "ML010",
        "memory grows at the same load",
        severity,
        int(trend.rise),
        f"{text}, {rate(trend)}{why}.{_ends(trend, free)}",
    )


def _unknown(share: float | None) -> str:
    return "; how much ran meanwhile is not known" if share is None else ""


def _others(trend: Trend, gpu: LiveGpu | None, free: float | None) -> Finding:
    where = gpu_name(gpu) if gpu is not None else "the GPU"
    text = f"Other processes took {_risen(trend)} more on {where} in {span(trend.seconds)}"
    if trend.verdict == "growing":
        text += f", {rate(trend)}"
    severity: Severity = _soon(trend, free, "warning")
    return Finding(
        "ML012",
        "other processes grow",
        severity,
        int(trend.rise),
        f"{text}: it is not this server's.{_ends(trend, free)}",
    )


def _nobodys(trend: Trend, gpu: LiveGpu | None, free: float | None) -> Finding:
    where = gpu_name(gpu) if gpu is not None else "the GPU"
    text = (
        f"{_risen(trend)} more on {where} in {span(trend.seconds)} is held by no process that the driver lists: processes outside this "
        "view, or the driver itself"
    )
    return Finding(
        "ML015", "memory of no listed process grows", "warning", int(trend.rise), f"{text}.{_ends(trend, free)}"
    )


def _host(trend: Trend) -> Finding | None:
    if trend.verdict != "growing":
        return None
    text = (
        f"The server's processes took {_risen(trend)} more of the host's memory in {span(trend.seconds)}, {rate(trend)}: pinned buffers, "
        "caches and request queues live there; the kernel ends the server when the host, or its cgroup, has no more."
    )
    return Finding("ML014", "host memory grows", "warning", int(trend.rise), text)


def _pool(kind: str, one: Series, trend: Trend) -> Finding | None:
    """ML013: a pool that fills is not memory that is taken."""
    if trend.verdict != "growing" or one.last is None:
        return None
    name = "KV cache" if kind == "kv" else "recurrent state"
    now = one.last[1]
    text = (
        f"The {name} pool went from {n.percent(max(0.0, now - trend.rise))} to {n.percent(now)} in {span(trend.seconds)}. It was reserved at "
        "the start: no device memory is taken by it"
    )
    reach = trend.time_to(max(0.0, 1.0 - now))
    if reach is not None:
        text += f". At this rate it is full in {_reach(reach)}; then requests wait, or are preempted and computed again"
    return Finding("ML013", "a pool fills", "note", 0, f"{text}.")


def _flat(series: Mapping[Key, Series]) -> Finding:
    longest = max((one.trend(DEVICE_NOISE).seconds for key, one in series.items() if key[0] == "process"), default=0.0)
    text = f"What the server's processes hold on their GPUs did not grow in {span(longest)}: within {n.amount(DEVICE_NOISE)}."
    return Finding("ML016", "memory is flat", "info", 0, text)


# --------------------------------------------------------------------------------------------------------------- words


def span(seconds: float) -> str:
    """A length of time: `45 s`, `12 min`, `2 h 10 min`, `3.5 days`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * HOUR:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min" if minutes and hours < 10 else f"{round(seconds / HOUR)} h"
    return f"{seconds / 86400:.1f} days" if seconds < 30 * 86400 else f"{seconds / 86400:.0f} days"


def rate(trend: Trend) -> str:
    """A slope with its interval: `12 MiB an hour (8.0 to 15)`."""
    unit, name, per, word = _unit(abs(trend.slope))
    low, middle, high = (value * per / unit for value in (trend.low, trend.slope, trend.high))
    around = f" ({_number(low)} to {_number(high)})" if _number(low) != _number(high) else ""
    return f"{_number(middle)} {name} {word}{around}"


def _unit(per_second: float) -> tuple[int, str, float, str]:
    hourly = per_second * HOUR
    if hourly >= GIB:
        minute = per_second * 60
        return (GIB, "GiB", 60.0, "a minute") if minute >= GIB else (GIB, "GiB", HOUR, "an hour")
    return MIB, "MiB", HOUR, "an hour"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _risen(trend: Trend) -> str:
    return n.amount(round(trend.rise / MIB) * MIB)


def _ends(trend: Trend, free: float | None) -> str:
    """When the device is full."""
    reach = trend.time_to(free) if free is not None else None
    if free is None or reach is None:
        return _left(free)
    return f" {n.gib_about(int(free))} are free: full in {_reach(reach)}."


def _left(free: float | None) -> str:
    return f" {n.gib_about(int(free))} are free." if free is not None else ""


def _reach(reach: tuple[float, float, float | None]) -> str:
    middle, early, late = reach
    if late is None:
        return f"about {span(middle)} (at the earliest {span(early)})"
    return f"about {span(middle)} ({span(early)} to {span(late)})" if span(early) != span(late) else span(middle)


def _soon(trend: Trend, free: float | None, otherwise: Severity) -> Severity:
    reach = trend.time_to(free) if free is not None else None
    if reach is None or reach[0] > SOON_S:
        return otherwise
    return "error" if otherwise == "warning" and reach[0] <= HOUR else "warning"


def _gpu(report: Report, device: str) -> LiveGpu | None:
    live = report.live
    return next((g for g in _gpus(report) if (g.uuid or f"GPU {g.index}") == device), None) if live else None


def _gpus(report: Report) -> Iterator[LiveGpu]:
    yield from report.live.gpus if report.live is not None else ()


def _processes(report: Report) -> Iterator[LiveProcess]:
    yield from report.live.processes if report.live is not None else ()


def _last(one: Series | None) -> float | None:
    return one.last[1] if one is not None and one.last is not None else None
