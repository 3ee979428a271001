"""Which steps a sweep takes, in which order, and what it may spend; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from memledger.plan_settings import count

MOST_CONCURRENCY: Final = 4096
MOST_STEPS: Final = 1000
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(ms|s|min|m|h|d)?")


class Step(msgspec.Struct, frozen=True, order=True):
    """`concurrency` requests at any time, each with a prompt of exactly `context` tokens."""

    context: int
    concurrency: int

    @property
    def name(self) -> str:
        """`8,192 x 4`, for people."""
        return f"{self.context:,} x {self.concurrency:,}"


class Slo(msgspec.Struct, frozen=True):
    """What a user still accepts, seconds: the 99th percentiles of the time to the first token and of the time per output token."""

    ttft_s: float | None = None
    tpot_s: float | None = None


def steps(contexts: Sequence[int], concurrency: Sequence[int]) -> tuple[Step, ...]:
    """All steps, the smallest first: a context at rising concurrency, then the next context."""
    return tuple(Step(tokens, requests) for tokens in sorted(set(contexts)) for requests in sorted(set(concurrency)))


def counts(text: str) -> tuple[int, ...]:
    """A list of counts: `8k,32k`, `1,4`.

    Raises:
        ValueError: one is no count, or zero.
    """
    found = tuple(count(part.strip()) for part in text.split(","))
    if 0 in found:
        raise ValueError("0 is not a count here: at least 1")
    return found


def seconds(text: str) -> float:
    """A time: `60s`, `50ms`, `4h`, `1.5m`; a bare number is seconds.

    Raises:
        ValueError: not such a time, or zero.
    """
    found = _TIME.fullmatch(text.strip().lower())
    value = float(found[1]) * _SECONDS[found[2] or "s"] if found is not None else 0.0
    if value <= 0:
        raise ValueError(f"{text!r} is not a time, such as 60s, 50ms or 4h")
    return value


def slo(text: str) -> Slo:
    """`ttft=2s,tpot=50ms`, or one of the two.

    Raises:
        ValueError: something else.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if not sign or name not in {"ttft", "tpot"} or name in limits:
            raise ValueError(f"{text!r} is not of the form ttft=2s,tpot=50ms")
        limits[name] = seconds(value)
    return Slo(limits.get("ttft"), limits.get("tpot"))


class Purse:
    """The hard cap on tokens: what a request may take at most is set aside before it is sent, so that the cap is never passed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.spent = 0
        self._set_aside = 0

    def take(self, tokens: int) -> bool:
        """Set `tokens` aside for a request; False where the cap would be passed, and the request must not be sent."""
        if self.spent + self._set_aside + tokens > self.most:
            return False
        self._set_aside += tokens
        return True

    def settle(self, taken: int, used: int | None) -> None:
        """A request has ended: it used `used` of the tokens set aside for it (None: not known, so all of them)."""
        self._set_aside -= taken
        self.spent += taken if used is None else used
