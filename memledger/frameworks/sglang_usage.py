"""Peaks of one SGLang scheduler over its batch lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from memledger.events import Event
from memledger.ledger import Evidence, Usage

HALF_A_HUNDREDTH: Final = 0.005
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
        self.state_at_count: float | None = None
        """The largest share on a line that counts the slots, too."""
        self.retracted = 0
        self.seen = False
        self.ran = False
        self.lines: dict[str, Evidence] = {}
        """The line that reached each peak, by the field of `Usage`."""

    def take(self, event: Event) -> None:
        """One prefill, decode or retraction line."""
        if event.id == "retraction":
            # `#retracted-req` of a decode server's batch lines is a queue length, not a retraction.
            self.retracted += event.count("requests") or 0
            return
        self.seen = True
        self.ran = self.ran or bool(event.count("new")) or event.id == "decode_batch"
        before = self._peaks()
        running = event.count("running")
        self.running = _most(self.running, event.count("mixed") if running is None else running)
        self.queued = _most(self.queued, event.count("queued"))
        self.slots = _most(self.slots, event.count("slots"))
        if event.count("slots") is not None:
            self.state_at_count = _top(self.state_at_count, event.share("state"))
        self.kv = _top(self.kv, event.share("kv"))
        self.state = _top(self.state, event.share("state"))
        self.swa = _top(self.swa, event.share("swa"), event.share("swa049"))
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
        self.ran = self.ran or other.ran
        self.state_at_count = _top(self.state_at_count, other.state_at_count)

    def _held_slots(self, state_slots: int | None) -> int | None:
        """The most slots held, by count and by share: only decode lines count them, every line prints the share.

        `mamba usage` is `mamba num` over the slots, rounded to two decimals (SGLang, managers/scheduler_metrics_mixin.py):
        where a share is larger than the largest count gives, the count is at most what still rounds to it.
        """
        if self.state is None:
            return self.slots
        if state_slots is None or state_slots <= 0:
            # A count that stands beside a larger share elsewhere is not the peak.
            return self.slots if self.state == self.state_at_count else None
        if self.slots is not None and self.state <= self.slots / state_slots + HALF_A_HUNDREDTH:
            return self.slots
        return min(state_slots, int((self.state + HALF_A_HUNDREDTH) * state_slots + 1e-6))

    def _peaks(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in _PEAKS}

    def build(self, state_slots: int | None = None) -> Usage:
        """The peaks as a value; `state_slots`: what the state's usage is a share of, where it is known."""
        return Usage(
            peak_running_requests=self.running,
            peak_queued_requests=self.queued,
            peak_kv_usage=self.kv,
            peak_state_usage=self.state,
            peak_swa_usage=self.swa,
            retractions=self.retracted or None,
            peak_state_slots=self._held_slots(state_slots),
            seen=self.seen,
            ran_between_samples=self.ran,
            evidence=tuple(dict.fromkeys(self.lines[name] for name in _PEAKS if name in self.lines)),
        )


def largest(schedulers: Iterable[UsageBuilder], state_slots: int | None = None) -> Usage:
    """The peaks of the busiest scheduler, each figure the largest of any one; counts of events are summed."""
    found = UsageBuilder()
    for one in schedulers:
        found.merge(one)
    return found.build(state_slots)


def _most(*values: int | None) -> int | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def _top(*values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None
