"""Peaks of one SGLang scheduler over its batch lines."""

from __future__ import annotations

from collections.abc import Iterable

from memledger.events import Event
from memledger.ledger import Usage


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

    def take(self, event: Event) -> None:
        """One prefill, decode or retraction line."""
        if event.id == "retraction":
            # `#retracted-req` of a decode server's batch lines is a queue length, not a retraction.
            self.retracted += event.count("requests") or 0
            return
        self.seen = True
        running = event.count("running")
        self.running = _most(self.running, event.count("mixed") if running is None else running)
        self.queued = _most(self.queued, event.count("queued"))
        self.slots = _most(self.slots, event.count("slots"))
        self.kv = _top(self.kv, event.number("kv"))
        self.state = _top(self.state, event.number("state"))
        self.swa = _top(self.swa, event.number("swa"), event.number("swa049"))

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
        )


def largest(usages: Iterable[Usage]) -> Usage:
    """The peaks of the busiest scheduler, each figure the largest of any one; counts of events are summed."""
    found = list(usages)
    if len(found) == 1:
        return found[0]
    retractions = [u.retractions for u in found if u.retractions is not None]
    return Usage(
        peak_running_requests=_most(*(u.peak_running_requests for u in found)),
        peak_queued_requests=_most(*(u.peak_queued_requests for u in found)),
        peak_kv_usage=_top(*(u.peak_kv_usage for u in found)),
        peak_state_usage=_top(*(u.peak_state_usage for u in found)),
        peak_swa_usage=_top(*(u.peak_swa_usage for u in found)),
        retractions=sum(retractions) if retractions else None,
        peak_state_slots=_most(*(u.peak_state_slots for u in found)),
        seen=any(u.seen for u in found),
    )


def _most(*values: int | None) -> int | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def _top(*values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None
