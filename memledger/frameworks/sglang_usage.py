"""Peaks of one SGLang scheduler over its batch lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from memledger.events import Event
from memledger.ledger import Evidence, Usage

_PEAKS: Final = ("running", "queued", "kv", "state", "swa", "slots")


class UsageBuilder:
    """Running peaks of one scheduler; unknown stays None."""

    def __init__(self) -> None:
        self.running: int | None = None
        self.queued: int | None = None
        self.kv: float | None = None
        self.state: float | None = None
        self.swa: float | None = None
        self.slots: int | None = None
        self.retracted = 0
        self.seen = False
        self.lines: dict[str, Evidence] = {}
        """The line that reached each peak, by the field of `Usage`."""

    def take(self, event: Event) -> None:
        """One prefill, decode or retraction line."""
        if event.id == "retraction":
            # `#retracted-req` of a decode server's batch lines is a queue length, not a retraction.
            self.retracted += event.count("requests") or 0
            return
        self.seen = True
        before = self._peaks()
        running = event.count("running")
        self.running = _most(self.running, event.count("mixed") if running is None else running)
        self.queued = _most(self.queued, event.count("queued"))
        self.slots = _most(self.slots, event.count("slots"))
        self.kv = _top(self.kv, event.number("kv"))
        self.state = _top(self.state, event.number("state"))
        self.swa = _top(self.swa, event.number("swa"), event.number("swa049"))
        for name, value in self._peaks().items():
            if value != before[name]:
                self.lines[name] = event.evidence

    def merge(self, other: UsageBuilder) -> None:
        """Take the peaks of another scheduler where they are higher; counts of events are summed."""
        mine, others = self._peaks(), other._peaks()
        for name, value in others.items():
            known = mine[name]
            if value is not None and (known is None or value > known):
                setattr(self, name, value)
                self.lines[name] = other.lines[name]
        self.retracted += other.retracted
        self.seen = self.seen or other.seen

    def _peaks(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in _PEAKS}

    def build(self) -> Usage:
        """The peaks as a value."""
        return Usage(
            peak_running_requests=self.running,
            peak_queued_requests=self.queued,
            peak_kv_usage=self.kv,
            peak_state_usage=self.state,
            peak_swa_usage=self.swa,
            retractions=self.retracted or None,
            peak_state_slots=self.slots,
            seen=self.seen,
            evidence=tuple(dict.fromkeys(self.lines[name] for name in _PEAKS if name in self.lines)),
        )


def largest(schedulers: Iterable[UsageBuilder]) -> Usage:
    """The peaks of the busiest scheduler, each figure the largest of any one; counts of events are summed."""
    found = UsageBuilder()
    for one in schedulers:
        found.merge(one)
    return found.build()


def _most(*values: int | None) -> int | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def _top(*values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None
