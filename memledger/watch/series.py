"""A figure over time in bounded memory, and how much of its growth came with load that was not there before."""

from __future__ import annotations

from typing import Final

from memledger.watch.growth import Point, Trend, judge

MOST_POINTS: Final = 1440
"""Points that a series keeps. When they are reached every second one goes, and from then on half as many are taken."""
LEAST_USAGE: Final = 0.02
"""A use of a pool that is higher by less is no new peak of load: a pool that fills slowly would explain all growth."""
WITH_LOAD_S: Final = 5.0
"""A rise within so many seconds after a new peak of load, or one look after it, came with it."""


class Series:
    """One figure: its first, last, largest and smallest value, and a thinned history."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._every = 1
        self._seen = 0
        self.last: Point | None = None
        self.peak: float | None = None
        self.peak_at: str | None = None
        self.risen_with_load = 0.0
        self.risen_without = 0.0

    def add(self, clock_s: float, at: str, value: float, *, load_rose: bool | None = None) -> None:
        """The figure at a moment. `load_rose`: whether load is higher than ever before; None where it isn't known.

        A moment that is not later than the last one (a clock that went back) is passed over.
        """
        if self.last is not None and clock_s <= self.last[0]:
            return
        if self.peak is None or value > self.peak:
            if self.peak is not None and load_rose is not None:
                if load_rose:
                    self.risen_with_load += value - self.peak
                else:
                    self.risen_without += value - self.peak
            self.peak, self.peak_at = value, at
        self.last = (clock_s, value)
        if self._seen % self._every == 0:
            self.points.append(self.last)
        self._seen += 1
        if len(self.points) >= MOST_POINTS:
            self.points = self.points[::2]
            self._every *= 2

    def trend(self, noise: float) -> Trend:
        """How the figure moves."""
        points = self.points
        if self.last is not None and (not points or points[-1] != self.last):
            points = [*points, self.last]
        return judge(points, noise)

    @property
    def came_with_load(self) -> float | None:
        """Share of all new maxima of this figure that came with a new peak of load; None where that is not known."""
        whole = self.risen_with_load + self.risen_without
        return self.risen_with_load / whole if whole > 0 else None


class Load:
    """Whether the server has ever had as much to do as now: requests running, and use of the pools."""

    def __init__(self) -> None:
        self._most: dict[str, float] = {}
        self._rose_at: float | None = None
        self._before: float | None = None

    def rose(self, clock_s: float, figures: dict[str, float]) -> bool | None:
        """Whether a peak of load was passed just now, or shortly before; None where no figure of load is known."""
        raised = False
        for name, value in figures.items():
            known = self._most.get(name)
            least = 0.0 if known is None else known + (LEAST_USAGE if known <= 1 and value <= 1 else 0.5)
            if known is None or value > least:
                self._most[name] = value
                raised = raised or known is not None
        if raised:
            self._rose_at = clock_s
        gap = clock_s - self._before if self._before is not None else 0.0
        self._before = clock_s
        if not self._most:
            return None
        return self._rose_at is not None and clock_s - self._rose_at <= max(WITH_LOAD_S, 1.5 * gap)
