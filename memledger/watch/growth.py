"""Whether a figure grows over time: pool filling, allocator growth, other processes and leaks told apart; pure.

The slope is Theil's and Sen's (the median of the slopes between all pairs of points: a third of the points may be wrong
without moving it); its interval is Sen's, from the distribution of Kendall's S (P. K. Sen, Journal of the American
Statistical Association 63, 1968, section 4). Both assume nothing of the noise but that it is the same at all times, so
points are first put together in buckets by their median: memory moves in steps, and neighbours resemble each other.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

Point = tuple[float, float]
"""Seconds, and a figure (bytes, or a fraction)."""

Verdict = Literal["not_enough", "flat", "step", "settled", "uneven", "growing", "shrinking"]

LEAST_POINTS: Final = 12
LEAST_SECONDS: Final = 60.0
"""Less than a minute says nothing of a trend."""
MOST_BUCKETS: Final = 90
"""Points that are compared in pairs: 4,005 slopes."""
CONFIDENCE_Z: Final = 1.959964
"""Of the normal distribution, for an interval that holds the true slope 19 times in 20."""
ONE_STEP: Final = 0.7
"""Share of a rise that, taken at once, makes it a step."""
SETTLED: Final = 0.1
"""Share of a rise that the last third may still add where growth has ended."""


class Trend(msgspec.Struct, frozen=True):
    """A judged series. Slopes are the figure's unit per second; `low` and `high` hold the true one 19 times in 20.

    `rise`: of what moves steadily, by the slope over all of the time; else from the first tenth's median to the last's.
    `stepped_at`: the seconds of the step, of a step.
    """

    verdict: Verdict
    points: int = 0
    seconds: float = 0.0
    rise: float = 0.0
    slope: float = 0.0
    low: float = 0.0
    high: float = 0.0
    stepped_at: float | None = None

    def time_to(self, left: float) -> tuple[float, float, float | None] | None:
        """Seconds until `left` more is taken: by the slope, at the earliest, at the latest (None: perhaps never).

        None where nothing grows.
        """
        if self.verdict != "growing" or self.slope <= 0 or self.high <= 0:
            return None
        return left / self.slope, left / self.high, left / self.low if self.low > 0 else None


def judge(points: Sequence[Point], noise: float) -> Trend:
    """The trend of a series in order of time; a rise of up to `noise` is none."""
    if len(points) < LEAST_POINTS or points[-1][0] - points[0][0] < LEAST_SECONDS:
        return Trend("not_enough", len(points), points[-1][0] - points[0][0] if points else 0.0)
    buckets = bucketed(points, MOST_BUCKETS)
    slope, low, high = theil_sen(buckets)
    rise = _level(buckets, 1.0) - _level(buckets, 0.0)
    step, at = _largest_step(buckets)
    verdict = _verdict(buckets, noise, rise, (low, high), step)
    seconds = points[-1][0] - points[0][0]
    if verdict == "growing" or (verdict == "shrinking" and _falls_steadily(buckets, noise, rise, (low, high))):
        # The middles of the first and the last tenth are nine tenths of the time apart.
        rise = slope * seconds
    return Trend(
        verdict,
        len(points),
        seconds,
        rise,
        slope,
        low,
        high,
        at if verdict == "step" else None,
    )


def _verdict(
    buckets: Sequence[Point], noise: float, rise: float, interval: tuple[float, float], step: float
) -> Verdict:
    low, high = interval
    if abs(rise) <= noise:
        return "flat"
    if rise < 0:
        return "shrinking"
    if step >= ONE_STEP * rise:
        return "step"
    levels = [_level(buckets, part / 3) for part in range(4)]
    first, second, third = (after - before for before, after in itertools.pairwise(levels))
    if third <= max(SETTLED * rise, noise / 3):
        return "settled"
    if low > 0 and high > 0 and min(first, second, third) > noise / 3:
        return "growing"
    return "uneven"


def _falls_steadily(buckets: Sequence[Point], noise: float, rise: float, interval: tuple[float, float]) -> bool:
    """Whether a fall would be growth, were it a rise."""
    mirrored = [(at, -value) for at, value in buckets]
    step, _ = _largest_step(mirrored)
    return _verdict(mirrored, noise, -rise, (-interval[1], -interval[0]), step) == "growing"


def theil_sen(points: Sequence[Point]) -> tuple[float, float, float]:
    """The slope with its interval, of at least two points at different times."""
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if b[0] > a[0])
    if not slopes:
        raise ValueError("all points are of one moment: there is no slope")
    n = len(points)
    spread = CONFIDENCE_Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    last = len(slopes) - 1
    low = slopes[max(0, min(last, math.floor((len(slopes) - spread) / 2)))]
    high = slopes[max(0, min(last, math.ceil((len(slopes) + spread) / 2)))]
    return statistics.median(slopes), low, high


def bucketed(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points: the medians of stretches of the same length in time (a gap gives no point)."""
    begin, end = points[0][0], points[-1][0]
    if len(points) <= most or end <= begin:
        return list(points)
    found: list[Point] = []
    width = (end - begin) / most
    for _, group in itertools.groupby(points, key=lambda p: min(int((p[0] - begin) / width), most - 1)):
        stretch = list(group)
        found.append((statistics.median(p[0] for p in stretch), statistics.median(p[1] for p in stretch)))
    return found


def _level(points: Sequence[Point], where: float) -> float:
    """The median around a place in time (0 to 1): of the tenth of the points that is there."""
    begin, end = points[0][0], points[-1][0]
    middle = begin + where * (end - begin)
    nearest = sorted(points, key=lambda p: abs(p[0] - middle))[: max(3, len(points) // 10)]
    return statistics.median(p[1] for p in nearest)


def _largest_step(points: Sequence[Point]) -> tuple[float, float]:
    """The largest rise between neighbours, or over one point between, and when it was."""
    best = (0.0, points[0][0])
    for apart in (1, 2):
        for before, after in zip(points, points[apart:], strict=False):
            best = max(best, (after[1] - before[1], after[0]))
    return best
