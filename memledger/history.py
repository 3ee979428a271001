"""How the pools of a server filled over time, from its serving lines: a second look at the inputs for the charts.

The first look keeps the peaks alone (`memledger.usage`). This one reads every serving line of a small input. A large one
it cuts into stretches of the same size, and keeps of every stretch its first serving line and those that reach its
peaks, so that no burst is lost, however long the log. Only files can be looked at twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from memledger.around import is_a_file
from memledger.events import Event
from memledger.grammar import RuleSet
from memledger.ledger import Report, Server
from memledger.scan import Scanner
from memledger.sources import InputError, open_input
from memledger.usage import UsageLines
from memledger.words import seconds_between

MOST_STRETCHES: Final = 400
READ_LINE_BY_LINE: Final = 2**20
"""Bytes of an input of which every serving line is read; of larger ones, the first and the peaks of each stretch."""
MOST_BUCKETS: Final = 120
"""Of each of these a track keeps the first sample and the peaks: at most six samples."""

NO_SERVING_LINE: Final = "no serving line is in the log"


class Sample(msgspec.Struct, frozen=True):
    """What one serving line says. `time` is ISO text as printed; requests are counts, usages fractions of a pool."""

    input: int
    line: int
    time: str | None
    running: int | None = None
    queued: int | None = None
    kv: float | None = None
    state: float | None = None
    swa: float | None = None


FIGURES: Final[tuple[Callable[[Sample], float | None], ...]] = (
    lambda s: s.running,
    lambda s: s.queued,
    lambda s: s.kv,
    lambda s: s.state,
    lambda s: s.swa,
)


class Track(msgspec.Struct, frozen=True):
    """The samples of one scheduler, in order. `name`: `DP1`, or empty where there is only one.

    `seconds`: of each sample since the first one; None where the lines carry no time, or the times do not rise. `of`: what the
    samples' numbers count, lines of a log or looks of a recording.
    """

    name: str
    samples: tuple[Sample, ...]
    seconds: tuple[float, ...] | None
    of: Literal["line", "look"] = "line"


class Held(msgspec.Struct, frozen=True):
    """Bytes of one holder on a device (or what is free there), each at seconds since the first look. `kind`: as what it is drawn."""

    name: str
    kind: str
    points: tuple[tuple[float, int], ...]


class DeviceTrack(msgspec.Struct, frozen=True):
    """Who held a device's memory over the looks of a recording."""

    device: str
    held: tuple[Held, ...]


class History(msgspec.Struct, frozen=True):
    """The tracks of each server by its place in the report; `missing` says in a sentence why one has none.

    `devices`: what the server's GPUs held over time, of a recording alone.
    """

    tracks: dict[int, tuple[Track, ...]] = {}
    missing: dict[int, str] = {}
    devices: dict[int, tuple[DeviceTrack, ...]] = {}


def look_again(report: Report, rules: RuleSet) -> History:
    """Read the inputs of a report once more, for the serving lines of its servers."""
    found: dict[int, dict[tuple[str, int], list[Sample]]] = {}
    missing: dict[int, str] = {}
    for place, server in enumerate(report.servers):
        if (why := _not_told(report, place, server)) is not None:
            missing[place] = why
    wanted = {span.input for place, s in enumerate(report.servers) if place not in missing for span in s.span}
    seen: dict[tuple[int, int], str] = {}
    for index in sorted(wanted):
        for event in _serving(report, index, rules):
            seen[event.input, event.line] = event.text
            whose = _whose(report, event)
            if whose is not None and whose not in missing and (sample := _sample(event)) is not None:
                found.setdefault(whose, {}).setdefault(_scheduler(event), []).append(sample)
    for place, server in enumerate(report.servers):
        if place not in missing and any(seen.get((e.input, e.line)) != e.text for e in server.usage.evidence):
            # Rotated meanwhile, or a snapshot's log of another machine: what stands there now is not what was read.
            missing[place] = "its log does not say any more what was read"
    tracks = {place: _tracks(by_scheduler) for place, by_scheduler in found.items() if place not in missing}
    return History(tracks, missing)


def _not_told(report: Report, place: int, server: Server) -> str | None:
    if not server.usage.seen or not server.span:
        return NO_SERVING_LINE
    if not all(s.input < len(report.inputs) and is_a_file(report.inputs[s.input].path) for s in server.span):
        return "its log can't be read a second time (a pipe, or a file that is gone)"
    others = [s for i, s in enumerate(report.servers) if i != place and s.framework == server.framework]
    if any(
        mine.input == other.input and mine.first_line <= other.last_line and other.first_line <= mine.last_line
        for mine in server.span
        for one in others
        for other in one.span
    ):
        return "the lines of several servers stand between one another"
    return None


def _whose(report: Report, event: Event) -> int | None:
    """The one server whose lines these are; None where it can't be told."""
    for place, server in enumerate(report.servers):
        if server.framework == event.rule.framework and any(
            s.input == event.input and s.first_line <= event.line <= s.last_line for s in server.span
        ):
            return place
    return None


# ------------------------------------------------------------------------------------------------------------- reading


class _Stretches(UsageLines):
    """Usage lines whose maxima are forgotten at the end of each stretch: every stretch tells its own."""

    def raised(self) -> Iterator[tuple[int, bytes]]:
        self.reset()
        yield from super().raised()


class _EveryLine(UsageLines):
    """Usage lines of which each is told."""

    def raised(self) -> Iterator[tuple[int, bytes]]:
        every = {at: line for shape in self.pending for at, line in zip(shape.offsets, shape.lines, strict=True)}
        every.update(super().raised())
        self.newest_told = self.newest_told or bool(every)
        yield from sorted(every.items())


class _Again(Scanner):
    def __init__(self, rules: RuleSet, usage: UsageLines) -> None:
        super().__init__(rules)
        self._usage = usage


def _serving(report: Report, index: int, rules: RuleSet) -> Iterator[Event]:
    size = report.inputs[index].bytes
    scanner = _Again(rules, _EveryLine() if size <= READ_LINE_BY_LINE else _Stretches())
    try:
        with open_input(report.inputs[index].path) as source:
            for event in scanner.events(_stretches(source.blocks(), size // MOST_STRETCHES + 1), index):
                if event.rule.kind == "usage":
                    yield event
    except InputError:
        return


class ServingLines:
    """Reads every serving line of pieces of a log."""

    def __init__(self, rules: RuleSet) -> None:
        self._scanner = _Again(rules, _EveryLine())

    def read(self, data: bytes) -> Iterator[tuple[str, Sample]]:
        """The serving lines of some text, each with its scheduler (`DP0`); `data` begins and ends anywhere."""
        for event in self._scanner.events([data], 0):
            if event.rule.kind == "usage" and (sample := _sample(event)) is not None:
                name, number = _scheduler(event)
                yield f"{name}{number}", sample


def _stretches(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of about `size`: the scanner looks for maxima piece by piece."""
    kept: list[bytes] = []
    held = 0
    for block in blocks:
        for start in range(0, len(block), size):
            kept.append(block[start : start + size])
            held += len(kept[-1])
            if held >= size:
                yield b"".join(kept)
                kept, held = [], 0
    if kept:
        yield b"".join(kept)


def _sample(event: Event) -> Sample | None:
    """What a serving line says; None where it tells neither a pool nor requests (or sums several engines)."""
    if event.id == "usage_sum" and (event.count("engines") or 1) > 1:
        return None
    running = event.count("running")
    if event.id == "iteration":
        running = (event.count("context_requests") or 0) + (event.count("generation_requests") or 0)
    elif running is None:
        running = event.count("mixed")
    queued = event.count("queued") if event.count("queued") is not None else event.count("waiting")
    window = event.share("swa") if event.share("swa") is not None else event.share("swa049")
    kv, state = event.share("kv"), event.share("state")
    if all(figure is None for figure in (running, queued, kv, state, window)):
        return None
    shares = [None if share is None else round(share, 6) for share in (kv, state, window)]
    return Sample(event.input, event.line, event.prefix.time, running, queued, *shares)


def _scheduler(event: Event) -> tuple[str, int]:
    engine = event.count("engine")
    if engine is None:
        engine = event.prefix.ranks.get("dp", 0)
    return ("DP", engine)


# ------------------------------------------------------------------------------------------------------------- thinning


def _tracks(by_scheduler: dict[tuple[str, int], list[Sample]]) -> tuple[Track, ...]:
    several = len(by_scheduler) > 1
    return tuple(
        _track(f"{name}{number}" if several else "", samples)
        for (name, number), samples in sorted(by_scheduler.items())
    )


def _track(name: str, samples: Sequence[Sample]) -> Track:
    kept = thinned(samples)
    seconds = [seconds_between(kept[0].time, sample.time) for sample in kept]
    known = [s for s in seconds if s is not None]
    rising = len(known) == len(kept) and all(a <= b for a, b in itertools.pairwise(known))
    return Track(name, tuple(kept), tuple(known) if rising and known[-1] > 0 else None)


def thinned(samples: Sequence[Sample], buckets: int = MOST_BUCKETS) -> list[Sample]:
    """At most six samples of each bucket: its first, and the one with the largest of every figure; and the last of all."""
    if len(samples) <= buckets:
        return list(samples)
    kept: set[int] = {len(samples) - 1}
    for bucket in range(buckets):
        start, end = bucket * len(samples) // buckets, (bucket + 1) * len(samples) // buckets
        kept.add(start)
        for figure in FIGURES:
            told = [(value, -at) for at in range(start, end) if (value := figure(samples[at])) is not None]
            if told:
                kept.add(-max(told)[1])
    return [samples[at] for at in sorted(kept)]
