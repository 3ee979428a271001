"""Usage lines by the hundred thousand: which of them raise a maximum, without reading each.

A serving log prints one line per scheduler and interval. A report needs their peaks only. Lines that are the same but
for their digits have the same numbers in the same order, so one line that was read by its rule tells which of the
numbers are which fields; the others of its shape are compared column by column. A line that raises any field's maximum
(per rank, process and source) is then read by its rule like any other line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from memledger.events import MOST_SHARE, Event
from memledger.grammar import find

DIGITS: Final = b"0123456789"
MOST_SHAPES: Final = 4096
LONGEST_SHAPE: Final = 2000
"""Bytes of a line; a longer one is no usage line."""
COUNTERS: Final = frozenset(
    {"preemptions", "requests", "retracted", "retractions", "total", "context_requests", "generation_requests"}
)
"""Fields that a reader adds up (or that tell of an event of its own): every line where one is not zero is read."""
LABELS: Final = frozenset({"engine"})
"""Fields that say whose line it is: maxima are kept for each."""

SHARES: Final = frozenset({"kv", "state", "swa", "swa049"})
"""Fields that are fractions of a pool."""

_SEPARATOR: Final = b"\x01"
_NUMBERS_ONLY: Final = bytes(c if c in b"0123456789." or c == 1 else 32 for c in range(256))
_NUMBER: Final = re.compile(rb"[0-9.]+")
_NOT_A_LABEL: Final = re.compile(
    rb"(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?|\d{4}-\d\d-\d\d|\b\d\d-\d\d(?= \d\d:)"
    rb"|[A-Z][a-z]{2} [ \d]\d(?= \d\d:)|\.(?:py|cpp|cc|rs):\d+|\bt:\d+"
)


Maxima = dict[tuple[bytes, ...], list[float]]
"""The largest value of each column so far, by the labels of the lines."""


class Columns:
    """Which numbers of a line of some shape mean what: indexes into the line's numbers."""

    def __init__(
        self,
        count: int,
        labels: tuple[int, ...],
        values: tuple[int, ...],
        counters: tuple[int, ...],
        limits: tuple[float, ...] = (),
    ) -> None:
        self.count = count
        self.labels = labels
        self.values = values
        self.counters = counters
        # What is above a column's limit is no fraction: it must not hide the largest that is one.
        self.limits = limits or (math.inf,) * len(values)


class Shape:
    """What is known about lines of one shape. `columns`: usage lines; else lines that need no reading."""

    __slots__ = ("columns", "lines", "maxima", "offsets", "unrecognized")

    def __init__(self, columns: Columns | None = None, unrecognized: bool = False) -> None:
        self.columns = columns
        self.unrecognized = unrecognized
        self.lines: list[bytes] = []
        self.offsets: list[int] = []
        self.maxima: Maxima = {}


class Shapes:
    """The shapes known, by what is left of their lines without the digits."""

    def __init__(self) -> None:
        self._known: dict[bytes, Shape] = {}
        self.get: Final = self._known.get
        """The shape for a line without its digits."""
        self.learnt = 0
        """How many shapes of usage lines were learnt."""
        self.forgotten = 0
        """How often shapes were forgotten, for want of room."""

    def remember(self, line: bytes, shape: Shape) -> None:
        """Lines like this one are of `shape`."""
        if len(line) > LONGEST_SHAPE:
            return
        if len(self._known) >= MOST_SHAPES:
            self._forget()
        self._known[line.translate(None, DIGITS)] = shape
        self.learnt += shape.columns is not None

    def _forget(self) -> None:
        usage = {key: shape for key, shape in self._known.items() if shape.columns is not None}
        self._known.clear()
        if len(usage) <= MOST_SHAPES // 2:
            self._known.update(usage)
        self.forgotten += 1


def learn(line: bytes, event: Event) -> Columns | None:
    """The columns of `line`, from the event read from it; None where they can't be told from its bytes.

    Labels are the numbers before the message that are not a time or a source line (ranks, pids, hosts). A field must be
    one number exactly, without a sign or separators.
    """
    message = event.message.encode()
    at = line.find(message)
    found = find(event.rule, event.message)
    if at < 0 or found is None or not message.isascii():
        return None
    numbers = {m.start(): (i, m.end()) for i, m in enumerate(_NUMBER.finditer(line))}
    values: list[int] = []
    counters: list[int] = []
    whose: list[int] = []
    limits: list[float] = []
    for name, kind in event.rule.fields.items():
        if found.group(name) is None:
            continue
        start, end = found.span(name)
        if kind in {"text", "flag"}:
            if any(c in "0123456789" for c in found.group(name)):
                return None
            continue
        index, stop = numbers.get(at + start, (-1, -1))
        if index < 0 or stop != at + end or kind.endswith("*") or found.group(name).count(".") > 1:
            return None
        (whose if name in LABELS else counters if name in COUNTERS else values).append(index)
        if values and values[-1] == index:
            share = name in SHARES
            limits.append(MOST_SHARE * (100 if kind == "percent" else 1) if share else math.inf)
    times = [m.span() for m in _NOT_A_LABEL.finditer(line, 0, at)]
    labels = tuple(i for s, (i, _) in numbers.items() if s < at and not any(a <= s < b for a, b in times))
    return Columns(len(numbers), (*labels, *whose), tuple(values), tuple(counters), tuple(limits))


class UsageLines:
    """Usage lines of a chunk by shape, and the maxima since the last other event."""

    def __init__(self) -> None:
        self.pending: list[Shape] = []
        self._shapes: set[Shape] = set()
        self.newest: tuple[int, bytes, int | None] | None = None
        self.newest_told = False

    def reset(self) -> None:
        """Forget the maxima: what follows may be another server."""
        for shape in self._shapes:
            shape.maxima.clear()
        self._shapes.clear()

    def add(self, shape: Shape, line: bytes, offset: int) -> None:
        """Keep a line until `raised`."""
        if not shape.lines:
            self.pending.append(shape)
        shape.lines.append(line)
        shape.offsets.append(offset)

    def raised(self) -> Iterator[tuple[int, bytes]]:
        """The lines kept that raise a maximum, in order of their offsets."""
        if not self.pending:
            return
        found: dict[int, bytes] = {}
        newest = max((shape.offsets[-1], shape.lines[-1]) for shape in self.pending)
        for shape in self.pending:
            for index in _raised(shape):
                found[shape.offsets[index]] = shape.lines[index]
            shape.lines = []
            shape.offsets = []
            self._shapes.add(shape)
        self.pending.clear()
        self.newest = (newest[0], newest[1], None)
        self.newest_told = newest[0] in found
        yield from sorted(found.items())


def _raised(shape: Shape) -> list[int]:
    """Indexes of the lines of a shape that raise a maximum, are the first of their labels, or count something."""
    columns = shape.columns
    assert columns is not None
    return _compared(columns, shape.maxima, shape.lines)


def candidates(columns: Columns, lines: list[bytes]) -> list[int]:
    """Indexes of the lines of which some may raise a maximum, whatever came before them: no other line does."""
    return _compared(columns, {}, lines)


def _compared(columns: Columns, maxima: Maxima, lines: list[bytes]) -> list[int]:
    step = columns.count + 1
    tokens = _tokens(lines)
    if len(tokens) == step * len(lines) and tokens[columns.count :: step].count(_SEPARATOR) == len(lines):
        try:
            return _all_raised(columns, maxima, tokens)
        except ValueError:  # a full stop without digits, where the line that was learnt from has a number
            pass
    # Not the same numbers after all: each line that has others is read.
    same = [i for i, line in enumerate(lines) if _has_numbers(line, columns)]
    odd = sorted(set(range(len(lines))) - set(same))
    raised = _all_raised(columns, maxima, _tokens([lines[i] for i in same])) if same else []
    return odd + [same[i] for i in raised]


def _tokens(lines: list[bytes]) -> list[bytes]:
    return (b" \x01 ".join(lines) + b" \x01").translate(_NUMBERS_ONLY).split()


def _has_numbers(line: bytes, columns: Columns) -> bool:
    tokens = line.translate(_NUMBERS_ONLY).split()
    if len(tokens) != columns.count or _SEPARATOR in tokens:
        return False
    return all(tokens[i].count(b".") <= 1 and tokens[i] != b"." for i in columns.values)


def _all_raised(columns: Columns, maxima: Maxima, tokens: list[bytes]) -> list[int]:
    """The lines of `tokens` (numbers and a separator for each) that raise one of the maxima, which are raised.

    Raises:
        ValueError: a value is no number; no maximum was raised.
    """
    step = columns.count + 1
    values = [list(map(float, tokens[i::step])) for i in columns.values]
    counters = [tokens[i::step] for i in columns.counters]
    found = [i for texts in counters if any(map(_counts, set(texts))) for i, text in enumerate(texts) if _counts(text)]
    labels = [tokens[i::step] for i in columns.labels]
    if all(len(set(column)) == 1 for column in labels):
        found += _raise(columns, maxima, tuple(column[0] for column in labels), values)
        return found
    members: dict[tuple[bytes, ...], list[int]] = {}
    for index, key in enumerate(zip(*labels, strict=True)):
        members.setdefault(key, []).append(index)
    for key, indexes in members.items():
        mine = [[column[i] for i in indexes] for column in values]
        found += (indexes[i] for i in _raise(columns, maxima, key, mine))
    return found


def _counts(text: bytes) -> bool:
    return bool(text.strip(b"0."))


def _raise(columns: Columns, maxima: Maxima, key: tuple[bytes, ...], values: list[list[float]]) -> Iterator[int]:
    """The lines of one key that raise a maximum of it: indexes into `values`, which has a list for each column."""
    known = maxima.get(key)
    if known is None:
        known = maxima[key] = [-1.0] * len(values)
        yield 0
    for slot, column in enumerate(values):
        largest = max(column)
        if largest > known[slot] and largest > (most := columns.limits[slot]):
            largest = max((value for value in column if value <= most), default=-1.0)
        if largest > known[slot]:
            known[slot] = largest
            yield column.index(largest)
