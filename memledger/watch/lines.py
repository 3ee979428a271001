"""A watch as lines of text, for a pipe, a log file, or a terminal without a screen: a line where something moved."""

from __future__ import annotations

from typing import Final

import msgspec

from memledger import words as n
from memledger.live.sample import Device
from memledger.sanitize import clean
from memledger.units import GIB, MIB
from memledger.watch.board import Board, usages
from memledger.watch.moment import Event, Moment

MOVED_BYTES: Final = 64 * MIB
MOVED_SHARE: Final = 0.02
QUIET_S: Final = 60.0
"""Seconds after which a line is written though nothing moved."""


class _Told(msgspec.Struct, frozen=True):
    clock_s: float
    free: tuple[int | None, ...]
    usage: tuple[float | None, ...]
    requests: tuple[int | None, ...]


class Lines:
    """Feeds a board, and says what is worth a line."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: _Told | None = None
        self._happened = 0
        self._findings: set[str] = set()

    def take(self, event: Event) -> list[str]:
        """The lines for what happened."""
        board = self._board
        before = list(board.happened)
        board.take(event)
        lines = [f"{_clock(seen.at)}  {clean(seen.text)}" for seen in board.happened if seen not in before]
        if isinstance(event, Moment):
            lines += self._new_findings(event)
            now = _figures(board.clock_s, event)
            if self._told is None or _moved(self._told, now):
                self._told = now
                lines.append(status(event))
        return lines

    def _new_findings(self, moment: Moment) -> list[str]:
        found = [f for f in self._board.findings() if f.code not in self._findings and f.severity != "info"]
        self._findings |= {f.code for f in found}
        return [f"{_clock(moment.at)}  [{f.code}] {f.title}: {clean(f.text, 2000)}" for f in found]


def status(moment: Moment) -> str:
    """`12:03:55  GPU 0 1.25 of 79.65 GiB free · KV 42 % · 3 running, 0 queued`."""
    parts = [_device(device) for device in _devices(moment) if device.free_bytes is not None]
    for name, usage in usages(moment):
        head = f"{name}: " if name else ""
        said = [f"KV {n.percent(usage.kv_usage)}"] if usage.kv_usage is not None else []
        said += [f"state {n.percent(usage.state_usage)}"] if usage.state_usage is not None else []
        said += [f"{usage.running_requests} running"] if usage.running_requests is not None else []
        said += [f"{usage.queued_requests} queued"] if usage.queued_requests is not None else []
        if said:
            parts.append(head + ", ".join(said))
    return f"{_clock(moment.at)}  {' · '.join(parts) or 'no figures'}"


def _device(device: Device) -> str:
    free, whole = device.free_bytes or 0, device.total_bytes
    name = f"GPU {device.index}" if device.index is not None else "GPU"
    return f"{name} {free / GIB:.2f}" + (f" of {whole / GIB:.2f}" if whole else "") + " GiB free"


def _devices(moment: Moment) -> tuple[Device, ...]:
    sample = moment.sample
    return sample.devices.devices if sample is not None and sample.devices is not None else ()


def _figures(clock_s: float, moment: Moment) -> _Told:
    loads = [usage for _, usage in usages(moment)]
    return _Told(
        clock_s,
        tuple(d.free_bytes for d in _devices(moment)),
        tuple(share for one in loads for share in (one.kv_usage, one.state_usage)),
        tuple(count for one in loads for count in (one.running_requests, one.queued_requests)),
    )


def _moved(before: _Told, now: _Told) -> bool:
    if now.clock_s - before.clock_s >= QUIET_S or now.requests != before.requests:
        return True
    if len(now.free) != len(before.free) or len(now.usage) != len(before.usage):
        return True
    return any(
        abs((a or 0) - (b or 0)) >= least
        for was, is_now, least in ((before.free, now.free, MOVED_BYTES), (before.usage, now.usage, MOVED_SHARE))
        for a, b in zip(was, is_now, strict=True)
    )


def _clock(at: str) -> str:
    """The time of an ISO date, as people read it."""
    return at[11:19] if len(at) >= 19 else at
