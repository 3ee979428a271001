"""How the pools of a watched server filled, look by look: what the charts of a recording's HTML report show.

The memory it takes does not grow with the recording: of stretches of looks the first one and the peaks are kept.
"""

from __future__ import annotations

from typing import Final

from memledger.history import DeviceTrack, Held, History, Sample, Track, thinned
from memledger.ledger import Report
from memledger.watch import growth_findings
from memledger.watch.board import Board, gpu_key, usages
from memledger.watch.growth import Point
from memledger.watch.moment import Event, Moment

MOST_KEPT: Final = 4096
"""Looks of one scheduler that are kept before they are thinned: more than that makes of them."""

NOTHING_TOLD: Final = "no look of the recording tells of requests or of a pool"

_HOLDERS: Final = {"others": "other processes", "nobody": "held by no process", "free": "free"}
_ORDER: Final = ("process", *_HOLDERS)


class OverTime:
    """The load of each scheduler of the server that is watched; `take` follows what the board was given."""

    def __init__(self) -> None:
        self._starts = 0
        self._looks = 0
        self._samples: dict[str, list[Sample]] = {}
        self._seconds: dict[str, dict[int, float]] = {}

    def take(self, event: Event, board: Board) -> None:
        """One event, after the board has taken it."""
        if board.starts != self._starts:
            # Another server, or another start: the report is of the last one.
            self._starts, self._looks = board.starts, 0
            self._samples, self._seconds = {}, {}
        if not isinstance(event, Moment):
            return
        self._looks += 1
        for name, use in usages(event):
            figures = (use.running_requests, use.queued_requests, use.kv_usage, use.state_usage, use.swa_usage)
            if all(figure is None for figure in figures):
                continue
            samples = self._samples.setdefault(name, [])
            seconds = self._seconds.setdefault(name, {})
            samples.append(Sample(0, self._looks, event.at, *figures))
            seconds[self._looks] = board.clock_s
            if len(samples) >= MOST_KEPT:
                samples[:] = thinned(samples)
                self._seconds[name] = {sample.line: seconds[sample.line] for sample in samples}

    def history(self, report: Report, board: Board) -> History:
        """The tracks, under the server of the report that was watched."""
        server = growth_findings.watched(report)
        if server is None:
            return History()
        place = next(i for i, one in enumerate(report.servers) if one is server)
        devices = {place: _devices(board)}
        if not self._samples:
            return History(missing={place: NOTHING_TOLD}, devices=devices)
        return History({place: tuple(self._track(name) for name in sorted(self._samples))}, devices=devices)

    def _track(self, name: str) -> Track:
        samples = thinned(self._samples[name])
        seconds = self._seconds[name]
        first = seconds[samples[0].line]
        since = tuple(seconds[sample.line] - first for sample in samples)
        return Track(name, tuple(samples), since if since[-1] > 0 else None, "look")


def _devices(board: Board) -> tuple[DeviceTrack, ...]:
    """What the board followed of each device that holds memory of the server's."""
    sample = board.last.sample if board.last is not None else None
    seen = sample.devices.devices if sample is not None and sample.devices is not None else ()
    names = {gpu_key(d.index, d.uuid): f"GPU {d.index}" if d.index is not None else "the GPU" for d in seen}
    begins = [points[0][0] for _, points in _series(board)]
    found = []
    for key, name in names.items():
        held = [
            Held(label, kind, tuple((at - min(begins), round(size)) for at, size in points))
            for (kind, device, whose), points in _series(board)
            if device == key and (label := f"pid {whose}" if kind == "process" else _HOLDERS.get(kind))
        ]
        if any(one.kind == "process" for one in held):
            found.append(DeviceTrack(name, tuple(sorted(held, key=lambda one: (_ORDER.index(one.kind), one.name)))))
    return tuple(found)


def _series(board: Board) -> list[tuple[growth_findings.Key, list[Point]]]:
    """The points of each series, the last one among them."""
    found = []
    for key, series in board.series.items():
        if series.last is not None:
            points = series.points
            found.append((key, points if points and points[-1] == series.last else [*points, series.last]))
    return found
