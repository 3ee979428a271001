"""All that a watch has seen so far, as far as it is shown: the last moment lined up, peaks, growth, and what came and went.

Events go in, in order, from a running server or from a recording; the same events always give the same board.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

import msgspec

from memledger import __version__
from memledger.findings import live as live_findings
from memledger.ledger import Finding, LiveUsage, Report, Source
from memledger.live.sample import Device, GpuProcess, LiveServer, Sample
from memledger.reconcile import reconcile
from memledger.watch import growth_findings
from memledger.watch.moment import End, Event, Grown, Moment, Serving, Start
from memledger.watch.series import Load, Series

MOST_KNOWN: Final = 60
"""Comings and goings that are kept."""
MOST_SERIES: Final = 512
JUDGED_EVERY_S: Final = 15.0
"""Seconds between judgements of growth while nobody asks."""


class Seen(msgspec.Struct, frozen=True):
    """Something that happened, in words."""

    at: str
    text: str


class Board:
    """The state of a watch."""

    def __init__(self) -> None:
        self.start: Start | None = None
        self.starts = 0
        self.moments = 0
        self.first_at: str | None = None
        self.last: Moment | None = None
        self.end: End | None = None
        self.series: dict[growth_findings.Key, Series] = {}
        self.happened: deque[Seen] = deque(maxlen=MOST_KNOWN)
        self.first_seen: dict[str, str] = {}
        """When each finding was first there, by its code."""
        self._report: Report | None = None
        self._lined_up: Report | None = None
        self._growth: tuple[Finding, ...] = ()
        self._judged_s: float | None = None
        self._whose: tuple[object, frozenset[tuple[str, int]]] | None = None
        self._load = Load()
        self._offset_s = 0.0
        self._clock_s = 0.0

    def take(self, event: Event) -> None:
        """What happened next."""
        if isinstance(event, Start):
            self._begin(event)
        elif isinstance(event, Grown):
            self._report, self._lined_up = event.report, None
        elif isinstance(event, End):
            self.end = event
            self.happened.append(Seen(event.at, event.reason))
        else:
            self._moment(event)

    def report(self) -> Report:
        """The ledger of the last moment, with the findings on it and on growth."""
        report = self._ledger()
        if self._judged_s != self._clock_s:
            self._judge(report)
        return growth_findings.attach(report, self._growth)

    def _ledger(self) -> Report:
        """The ledger of the last moment without what grew; made once for each."""
        if self._lined_up is None:
            report = self._report or _nothing()
            last, start = self.last, self.start
            if last is not None and last.sample is not None and start is not None:
                report = reconcile(report, last.sample, pid=start.pid, own_log=start.own_log, built=start.built)
                report = live_findings.attach(report, self._peaks())
            self._lined_up = report
        return self._lined_up

    def _peaks(self) -> LiveUsage | None:
        """The most that was seen at once: of several engines together, the requests of all and the use of the fullest."""

        def most(kind: str) -> list[float]:
            return [one.peak for key, one in self.series.items() if key[0] == kind and one.peak is not None]

        running, queued, kv, state = (most(kind) for kind in ("running", "queued", "kv", "state"))
        return LiveUsage(
            round(sum(running)) if running else None,
            round(sum(queued)) if queued else None,
            max(kv, default=None),
            max(state, default=None),
        )

    def _judge(self, report: Report) -> None:
        self._growth, self._judged_s = growth_findings.of_series(self.series, report), self._clock_s
        at = self.last.at if self.last is not None else ""
        server = growth_findings.watched(growth_findings.attach(report, self._growth))
        for finding in server.findings if server is not None else ():
            self.first_seen.setdefault(finding.code, at)

    def concluded(self) -> Report:
        """The report as it stands for the whole watch: with a note on how much was seen."""
        report = self.report()
        if not self.moments or self.last is None:
            return report
        note = f"a recording of {self.moments:,} looks from {self.first_at} to {self.last.at}"
        note += (
            f", over {self.starts} starts of the server: what grew is said of the last one" if self.starts > 1 else ""
        )
        if report.live is not None:
            return msgspec.structs.replace(
                report, live=msgspec.structs.replace(report.live, notes=(note, *report.live.notes))
            )
        server = growth_findings.watched(report)
        if server is None:
            return report
        changed = msgspec.structs.replace(server, notes=(note, *server.notes))
        return msgspec.structs.replace(report, servers=tuple(changed if s is server else s for s in report.servers))

    def findings(self) -> tuple[Finding, ...]:
        """What is known of the server that is watched, the gravest first."""
        server = growth_findings.watched(self.report())
        return server.findings if server is not None else ()

    @property
    def clock_s(self) -> float:
        """Seconds since the first moment; over several calls of the recorder, by the machine's date between them."""
        return self._clock_s

    # ---------------------------------------------------------------------------------------------------------- events

    def _begin(self, start: Start) -> None:
        before = self.start
        if before is not None and before.run == start.run and before.pid == start.pid and self.end is None:
            # The same watch in another file.
            self.start = start
            self._report, self._lined_up = start.report or self._report, None
            return
        if self.last is not None and (before is None or before.run != start.run):
            self._offset_s = self._clock_s + max(start.interval_s, _seconds(self.last.at, start.at))
        self.start, self.end = start, None
        self.starts += 1
        self._report, self._lined_up = start.report, None
        self.series.clear()
        self._load, self._whose, self._judged_s = Load(), None, None
        if before is not None:
            self.happened.append(Seen(start.at, f"{_named(start)} is watched from here on"))

    def _moment(self, moment: Moment) -> None:
        self.moments += 1
        self.first_at = self.first_at or moment.at
        self._clock_s = self._offset_s + moment.clock_s
        before, self.last, self._lined_up = self.last, moment, None
        if before is not None and before.sample is not None and moment.sample is not None:
            self.happened.extend(_comings(before.sample, moment.sample))
        self._follow(moment)
        # Judging all series takes longer than a look: now and then will do, and whenever somebody asks.
        if self._judged_s is None or self._clock_s - self._judged_s >= JUDGED_EVERY_S:
            self._judge(self._ledger())

    def _follow(self, moment: Moment) -> None:
        """Every figure of the moment into its series."""
        rose = self._load.rose(self._clock_s, dict(load_figures(moment)))
        for key, value in figures(moment, self._own_processes(moment)):
            if key not in self.series:
                if len(self.series) >= MOST_SERIES:
                    continue
                self.series[key] = Series()
            self.series[key].add(self._clock_s, moment.at, value, load_rose=rose)

    def _own_processes(self, moment: Moment) -> frozenset[tuple[str, int]]:
        """Which of the driver's processes are the server's, by device; worked out anew when one comes or goes."""
        there = _there(moment.sample)
        if self._whose is None or self._whose[0] != there:
            live = self._ledger().live
            self._whose = (
                there,
                frozenset(
                    (gpu_key(gpu.index, gpu.uuid), row.detail["pid"])
                    for gpu in (live.gpus if live is not None else ())
                    for row in gpu.rows
                    if row.account == "server_processes" and "pid" in row.detail
                ),
            )
        return self._whose[1]


def _nothing() -> Report:
    return Report(__version__, (), (Source("log", "unavailable", "no log was given"),), ())


def _named(start: Start) -> str:
    return f"process {start.pid}" if start.pid is not None else "a log"


def _seconds(before: str, after: str) -> float:
    """Seconds between two ISO times; 0 where they can't be told, or the date went back."""
    try:
        return max(0.0, (datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


# ------------------------------------------------------------------------------------------------------------- figures


def figures(moment: Moment, own: frozenset[tuple[str, int]]) -> Iterator[tuple[growth_findings.Key, float]]:
    """Every figure that is followed: by what it is, and of which GPU, process or scheduler.

    `own`: the server's processes, as pairs of a device and a process id of the driver's.
    """
    for device in _devices(moment.sample):
        yield from _of_device(device, own)
    resident = [p.resident_bytes for s in _servers(moment.sample) for p in s.processes if p.resident_bytes is not None]
    if resident:
        yield ("host", "", ""), sum(resident)
    for name, usage in usages(moment):
        if usage.kv_usage is not None:
            yield ("kv", "", name), usage.kv_usage
        if usage.state_usage is not None:
            yield ("state", "", name), usage.state_usage
        if usage.running_requests is not None:
            yield ("running", "", name), usage.running_requests
        if usage.queued_requests is not None:
            yield ("queued", "", name), usage.queued_requests


def _of_device(device: Device, own: frozenset[tuple[str, int]]) -> Iterator[tuple[growth_findings.Key, float]]:
    name = gpu_key(device.index, device.uuid)
    if device.free_bytes is not None:
        yield ("free", name, ""), device.free_bytes
    others = 0
    complete = device.processes is not None
    for process in device.processes or ():
        mine = (name, process.pid) in own
        if process.used_bytes is None:
            complete = False
        elif mine:
            yield ("process", name, str(process.pid)), process.used_bytes
        else:
            others += process.used_bytes
    if not complete or not any(device_name == name for device_name, _ in own):
        return
    yield ("others", name, ""), others
    if device.used_bytes is not None and not device.unified_memory:
        # What NVML's first call counts as used holds the driver's part as well: it does not grow.
        held = sum(p.used_bytes or 0 for p in device.processes or ())
        yield ("nobody", name, ""), device.used_bytes - held


def _there(sample: Sample | None) -> object:
    """What is on the machine: another value whenever a process or a device came or went."""
    return (
        tuple((d.uuid, d.index, tuple(p.pid for p in d.processes or ())) for d in _devices(sample)),
        tuple((s.pid, tuple(p.pid for p in s.processes)) for s in _servers(sample)),
    )


def gpu_key(index: int | None, uuid: str | None) -> str:
    """What tells one device from another, for as long as the machine runs."""
    return uuid or f"GPU {index}"


def _servers(sample: Sample | None) -> Sequence[LiveServer]:
    return sample.servers if sample is not None else ()


def usages(moment: Moment) -> Iterator[tuple[str, LiveUsage]]:
    """The load of each engine now: by the server's metrics, else by its last serving lines."""
    for server in _servers(moment.sample):
        each = server.metrics_by_engine if len(server.metrics_by_engine) > 1 else {}
        if not each and server.metrics is not None:
            each = {"": server.metrics}
        for name, m in each.items():
            yield (
                f"engine {name}" if name else "",
                LiveUsage(m.running_requests, m.queued_requests, m.kv_usage, m.state_usage, m.swa_usage, m.preemptions),
            )
        if each:
            return
    for line in moment.serving:
        yield line.scheduler, _of_line(line)


def _of_line(line: Serving) -> LiveUsage:
    return LiveUsage(line.running, line.queued, line.kv, line.state, line.swa)


def load_figures(moment: Moment) -> Iterator[tuple[str, float]]:
    """What shows how much a server has to do: requests that run, and use of its pools."""
    for name, usage in usages(moment):
        for kind, value in (
            ("running", usage.running_requests),
            ("kv", usage.kv_usage),
            ("state", usage.state_usage),
        ):
            if value is not None:
                yield f"{kind} {name}", float(value)


# -------------------------------------------------------------------------------------------------- comings and goings


def _comings(before: Sample, now: Sample) -> Iterator[Seen]:
    """Processes that came to a device, or went, and devices that are lost."""
    old = {gpu_key(d.index, d.uuid): d for d in _devices(before)}
    new = {gpu_key(d.index, d.uuid): d for d in _devices(now)}
    for name in old.keys() - new.keys():
        yield Seen(now.taken_at, f"{_shown(old[name])} is not shown any more")
    for name, device in new.items():
        if name not in old or device.processes is None or (was := old[name].processes) is None:
            continue
        gone = {p.pid for p in was} - {p.pid for p in device.processes}
        came = {p.pid for p in device.processes} - {p.pid for p in was}
        yield from (Seen(now.taken_at, f"+ {_process(p)} on {_shown(device)}") for p in _picked(device, came))
        yield from (Seen(now.taken_at, f"- {_process(p)} left {_shown(device)}") for p in _picked(old[name], gone))


def _devices(sample: Sample | None) -> Sequence[Device]:
    return sample.devices.devices if sample is not None and sample.devices is not None else ()


def _picked(device: Device, pids: set[int]) -> Iterable[GpuProcess]:
    return (p for p in device.processes or () if p.pid in pids)


def _process(one: GpuProcess) -> str:
    from memledger import words as n

    size = f" {n.gib_about(one.used_bytes)}" if one.used_bytes is not None else ""
    who = f" ({one.command[:60]})" if one.command else ""
    return f"pid {one.pid}{who}{size}"


def _shown(device: Device) -> str:
    return f"GPU {device.index}" if device.index is not None else "the GPU"
