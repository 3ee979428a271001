"""Quantiles of measured values with intervals that assume nothing of how the values are distributed; pure.

A quantile is the nearest-rank one: the smallest value that at least the share `p` of all values does not exceed. Its interval
is the order-statistics interval (H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1): the number of
values below the true quantile is binomial(n, p), so the l-th and u-th smallest values hold it between them with a probability
that follows from n and p alone. Where n is too small for an end (the 99th percentile of fewer than 368 values has no upper one),
that end is None: the measurement does not tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

CONFIDENCE: Final = 0.95
"""Intervals hold the true quantile 19 times in 20; what is missed is divided evenly between the two ends."""


class Quantile(msgspec.Struct, frozen=True):
    """A quantile of measured values; `low` and `high` None: too few values for that end of the interval."""

    value: float
    low: float | None = None
    high: float | None = None


class Distribution(msgspec.Struct, frozen=True):
    """What `count` measured values say: mean, median and 99th percentile."""

    count: int
    mean: float
    p50: Quantile
    p99: Quantile
    largest: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """The figures of a set of values; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(len(ordered), mean, quantile(ordered, 0.5), quantile(ordered, 0.99), ordered[-1])


def quantile(ordered: Sequence[float], p: float) -> Quantile:
    """The quantile of values in ascending order, with its interval.

    Raises:
        ValueError: there are no values, or `p` is not between 0 and 1.
    """
    if not ordered or not 0 < p < 1:
        raise ValueError("a quantile needs values and a share between 0 and 1")
    n = len(ordered)
    low, high = ranks(n, p)
    return Quantile(
        ordered[math.ceil(n * p) - 1],
        ordered[low - 1] if low is not None else None,
        ordered[high - 1] if high is not None else None,
    )


def ranks(n: int, p: float, confidence: float = CONFIDENCE) -> tuple[int | None, int | None]:
    """Ranks (from 1) of the values between which the true quantile lies; None where `n` values do not bound it on that side.

    The lower one is the largest l with P(Binomial(n, p) < l) <= (1 - confidence) / 2, the upper one the smallest u with
    P(Binomial(n, p) >= u) <= (1 - confidence) / 2.
    """
    missed = (1 - confidence) / 2
    low: int | None = None
    below = 0.0
    for k in range(n):
        below += _binomial(n, k, p)
        if below > missed:
            break
        low = k + 1
    high: int | None = None
    above = 0.0
    for k in range(n, 0, -1):
        above += _binomial(n, k, p)
        if above > missed:
            break
        high = k
    return low, high


def _binomial(n: int, k: int, p: float) -> float:
    """The probability of `k` of `n`, by logarithms: factorials of thousands fit no float."""
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))


class Growth(msgspec.Struct, frozen=True):
    """Memory that a request takes: `per_token` for each token of its context and `per_request` beside that, bytes.

    `misfit`: the largest distance of a step's figure from `requests x (per_request + per_token x tokens)`.
    """

    per_token: float
    per_request: float
    misfit: float
    steps: int


def growth(points: Sequence[tuple[int, int, float]]) -> Growth | None:
    """Bytes per token and per request, by least squares over steps of (requests, tokens of each, bytes in use).

    None where the steps do not tell the two apart: at least two lengths of context are needed.
    """
    if len({tokens for _, tokens, _ in points}) < 2:
        return None
    # Unknowns: per_token (a = requests x tokens) and per_request (b = requests); the normal equations of two columns.
    aa = math.fsum((r * t) ** 2 for r, t, _ in points)
    ab = math.fsum(r * r * t for r, t, _ in points)
    bb = math.fsum(r * r for r, _, _ in points)
    ay = math.fsum(r * t * y for r, t, y in points)
    by = math.fsum(r * y for r, _, y in points)
    divisor = aa * bb - ab * ab
    if divisor <= 0:
        return None
    per_token, per_request = (ay * bb - by * ab) / divisor, (by * aa - ay * ab) / divisor
    misfit = max(abs(y - r * (per_request + per_token * t)) for r, t, y in points)
    return Growth(per_token, per_request, misfit, len(points))
