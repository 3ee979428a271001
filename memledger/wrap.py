"""Lines cut by a terminal or a pager: finding the width at which they were cut, and putting them together again.

A log copied from a screen has line ends wherever the screen ended: inside words, figures and the words that rules look
for. It is told by its line lengths. No line is longer than the width, many are exactly as long (whatever they say), and
what follows these carries no prefix where lines after shorter ones do. Only then are lines joined: each that is as long
as the width with the next, up to one that is shorter, unless the next starts a record of its own.

Where lines end at one width and each is followed by a record of its own, they were chopped: the rest is lost. What
stands in those is doubtful, and is said to be.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from memledger.prefix import start_style, text_after_prefix
from memledger.sanitize import strip_terminal

NARROWEST: Final = 40
WIDEST: Final = 500
GATHERED: Final = 64 * 2**10
"""A pipe gives little at a time; fewer bytes than this are not judged by themselves."""
WHOLLY_READ: Final = 2 * 2**20
"""So far every line's length is looked at, later only a sample of each block's, unless lines were wrapped before."""
SAMPLE: Final = 4 * 2**10
LONGEST_PARTIAL: Final = 256 * 2**10
MOST_STYLES: Final = 4096
MOST_CANDIDATES: Final = 5
LOOKED_AT: Final = 24
FEW_LINES: Final = 6
"""In fewer lines, one alone says nothing."""
STYLE_CHARACTERS: Final = 200

_DIGITS: Final = b"0123456789"
_ANY_DIGIT: Final = bytes(48 if 48 <= c <= 57 else c for c in range(256))
_ODD: Final = re.compile(rb"[\x1b\r\x80-\xff]")
_EVEN: Final = bytes(c for c in range(0x80) if c not in b"\x1b\r")
_RULER: Final = re.compile(r"\W{10,}\Z")
_ROW: Final = re.compile(r"[|+│┃║╭╰├┌└#].*[|+│┃║╮╯┤┐┘#]\s*\Z", re.DOTALL)
_LEAD: Final = re.compile(rb"(?:> ?| {2,8}|\t)(?=\S)")
_SOME_WIDTHS: Final = frozenset({79, 127, 128, 132, 211, 212, 236, 237, 238, 239, 256})
_LOOSE: Final = frozenset(
    {"indented", "markdown", "numbered", "slurm", "grep", "shell_prompt", "box", "custom_level", "blank"}
)
"""Styles that the rest of a cut line may seem to have by chance."""


class Piece(NamedTuple):
    """Bytes to read, the offsets at which a line end was taken out, and the ends of lines that may have been chopped."""

    data: bytes
    seams: tuple[int, ...] = ()
    doubtful: tuple[int, ...] = ()


class Stretch(NamedTuple):
    """Lines `start` to `stop` (without) of a block that were cut at `width` columns."""

    start: int
    stop: int
    width: int
    styles: frozenset[str]
    stripped: bool
    chopped: bool
    score: int


class Unwrapper:
    """Joins the wrapped lines of one input. `widths` are those found, with how many line ends were taken out."""

    def __init__(self, is_record: Callable[[bytes], bool]) -> None:
        self.widths: Counter[int] = Counter()
        self.chopped: Counter[int] = Counter()
        self._is_record = is_record
        self._held = b""
        self._after_full = False
        self._last: Stretch | None = None
        self._read = 0
        self._styles: dict[bytes, str | None] = {}

    def pieces(self, blocks: Iterable[bytes]) -> Iterator[Piece]:
        """The blocks with wrapped lines joined; an empty piece stands for an empty block ("nothing more for now")."""
        for block in blocks:
            data = self._held + block if self._held else block
            if block and len(data) < GATHERED:
                self._held = data
                continue
            if data:
                self._held = b""
                piece = self._piece(data, final=False)
                if piece.data:
                    yield piece
            if not block:
                yield Piece(b"")
        if self._held:
            data, self._held = self._held, b""
            yield self._piece(data, final=True)

    def _piece(self, data: bytes, final: bool) -> Piece:
        self._read += len(data)
        if self._last is None and self._read > WHOLLY_READ and not self._seems_wrapped(data):
            return Piece(data)
        lines = data.split(b"\n")
        found = self.stretches(lines)
        last = found[-1] if found and found[-1].stop == len(lines) else None
        self._last = last
        if not found:
            self._after_full = False
            return Piece(data)
        kept = len(lines)
        if last is not None and not final and len(lines) > 1 and len(lines[-1]) < LONGEST_PARTIAL:
            kept -= 1
        return self._joined(lines, found, kept)

    def _seems_wrapped(self, data: bytes) -> bool:
        """Whether some lines in the middle of a block may be wrapped: the longest are as long, and one goes on."""
        start = data.find(b"\n", len(data) // 2) + 1
        lines = data[start : start + SAMPLE].split(b"\n")[:-1]
        widths = [len(line) for line in lines]
        most = max(widths, default=0)
        if not start or not NARROWEST <= most <= WIDEST or widths.count(most) < 2:
            return False
        full = [i for i, width in enumerate(widths[:-1]) if width == most]
        return any(self._style(lines[i + 1]) is None for i in full) and bool(self.stretches(lines))

    def _joined(self, lines: list[bytes], found: list[Stretch], kept: int) -> Piece:
        """The first `kept` lines, joined where they were wrapped; the rest is held back with the line end before it."""
        out: list[bytes] = []
        seams: list[int] = []
        doubtful: list[int] = []
        size = 0
        number = 0
        after_full = self._after_full
        self._after_full = False
        self._held = b"\n".join(lines[kept:])
        for stretch in [*found, None]:
            start = stretch.start if stretch is not None else kept
            if start > number:
                out.append(b"\n".join(lines[number:start]) + (b"\n" if start < len(lines) else b""))
                size += len(out[-1])
                number = start
            if stretch is None:
                break
            lead = _common_lead(lines[stretch.start : stretch.stop])
            whole = b""
            for number in range(stretch.start, min(stretch.stop, kept)):
                line = lines[number]
                if whole and lead and line.startswith(lead):
                    line = line[len(lead) :]
                out.append(line)
                size += len(line)
                whole += line if len(whole) < WIDEST else b""
                full = (number == 0 and after_full) or _is_full(lines[number], stretch.width)
                glue = b"" if full else self._glue(lines[number], stretch)
                follows = lines[number + 1] if number + 1 < len(lines) else None
                if follows is None:
                    break
                if number + 1 >= kept and (full or glue):
                    self._after_full = bool(full)
                    if full:
                        self._held = b"\n" + self._held
                        break
                if (full or glue) and self._goes_on(whole, follows, stretch, bool(full)):
                    if out[-1].endswith(b"\r"):
                        out[-1] = out[-1][:-1]
                        size -= 1
                    out.append(glue)
                    size += len(glue)
                    seams.append(size)
                    self.widths[stretch.width] += 1
                    continue
                if full and (stretch.chopped or (line[-1:].isdigit() and follows)):
                    doubtful.append(size)
                    self.chopped[stretch.width] += stretch.chopped
                out.append(b"\n")
                size += 1
                whole = b""
            number = min(stretch.stop, kept)
        return Piece(b"".join(out), tuple(seams), tuple(doubtful))

    @staticmethod
    def _glue(line: bytes, stretch: Stretch) -> bytes:
        """The blank that was taken off the end of a line, where lines lost theirs."""
        return b" " if stretch.stripped and _is_full(line, stretch.width - 1) else b""

    def _goes_on(self, whole: bytes, follows: bytes, stretch: Stretch, full: bool) -> bool:
        if stretch.chopped or not follows.strip() or (not full and follows[:1] == b" "):
            return False
        if self._starts(whole, follows, stretch.styles) or _is_of_box(whole, follows):
            return False
        # Where records have prefixes, one without is not expected; elsewhere what it says tells it.
        return self._style(whole) in stretch.styles or _only_prefix(whole) or not self._is_record(follows)

    def _starts(self, line: bytes, follows: bytes, styles: frozenset[str]) -> bool:
        """Whether the line after `line` starts a record, where records start with one of `styles`."""
        style = self._style(follows)
        if style is None or style in styles:
            return style is not None
        return not _is_loose(style) and not _only_prefix(line)

    def _style(self, line: bytes) -> str | None:
        key = line[:STYLE_CHARACTERS].translate(_ANY_DIGIT)
        if key not in self._styles:
            if len(self._styles) >= MOST_STYLES:
                self._styles.clear()
            style = start_style(line[:STYLE_CHARACTERS].decode("utf-8", "replace"))
            # One blank may be the one between two words.
            one = style is not None and style.startswith("indented") and line[1:2] not in {b" ", b"\t"}
            self._styles[key] = "blank" if one else style
        return self._styles[key]

    def stretches(self, lines: list[bytes]) -> list[Stretch]:
        """Where lines were cut, and at which width; in order."""
        widths = [len(line) for line in lines]
        odd = self._odd(lines, widths)
        for i, measures in odd.items():
            widths[i] = min(measures)
        if self._after_full and self._last is not None:
            widths[0] = self._last.width
        longest = max(widths, default=0)
        found: list[Stretch] = []
        for width, full in _as_long(self._candidates(widths), widths, odd).items():
            some = full[:: max(1, len(full) // LOOKED_AT)]
            if width < longest and self._last is None and all(self._style(lines[i + 1]) for i in some):
                continue
            limits = [-1, *[i for i, w in enumerate(widths) if w > width], len(lines)]
            for before, after in itertools.pairwise(limits):
                here = full[bisect_left(full, before + 1) : bisect_left(full, after - 1)]
                stretch = self._judged(lines, widths, here, before + 1, after, width)
                if stretch is not None:
                    found.append(stretch)
        chosen: list[Stretch] = []
        for stretch in sorted(found, key=lambda s: (s.chopped, -s.score)):
            if all(stretch.stop <= other.start or stretch.start >= other.stop for other in chosen):
                chosen.append(stretch)
        return sorted(chosen)

    @staticmethod
    def _odd(lines: list[bytes], widths: list[int]) -> dict[int, set[int]]:
        """The lines whose length is a matter of how one counts, with what they may measure."""
        if not _holds_odd(lines):
            return {}
        return {i: _measures(line) for i, line in enumerate(lines) if widths[i] <= 4 * WIDEST and _ODD.search(line)}

    def _candidates(self, widths: list[int]) -> list[int]:
        twice = Counter(a for a, b in itertools.pairwise(widths) if a == b and NARROWEST <= a <= WIDEST).most_common(
            MOST_CANDIDATES
        )
        most = max(widths, default=0)
        found = [most] if NARROWEST <= most <= WIDEST else []
        found += [self._last.width] if self._last is not None else []
        return list(dict.fromkeys(found + [width for width, _ in twice]))

    def _judged(
        self, lines: list[bytes], widths: list[int], full: list[int], start: int, stop: int, width: int
    ) -> Stretch | None:
        """The stretch, where its lines were cut at `width` (`full` are those as long)."""
        goes_on = self._last is not None and self._last.width == width and start == 0
        whole = start == 0 and stop == len(lines)
        if not goes_on and len(full) < (1 if whole else 3):
            return None
        styles = self._own_styles(lines, widths, start, stop, width)
        if goes_on and self._last is not None:
            styles |= self._last.styles
        cut: set[bytes] = set()
        other: set[bytes] = set()
        for i in full:
            follows = lines[i + 1]
            kind = lines[i].translate(None, _DIGITS)
            if self._starts(lines[i], follows, styles):
                other.add(kind)
            elif not _is_of_table(lines[i], follows):
                cut.add(kind)
        common = width % 10 == 0 or width in _SOME_WIDTHS
        if goes_on and self._last is not None and not self._last.chopped and len(other) <= len(cut) + 3:
            enough = 0
        elif whole:
            first = any(self._style(lines[i]) in styles and self._style(lines[i + 1]) not in styles for i in full)
            enough = (1 if styles and first and stop > FEW_LINES else 2) if common else 3
        else:
            enough = 3 if common else 6
        if enough == 1 and all(lines[i].endswith((b".", b"!", b"?")) for i in full):
            # One line alone that ends as a sentence does is as long as that by chance.
            enough = 2
        ends_blank = any(lines[i][-1:] == b" " for i in full)
        if len(cut) >= enough and len(other) <= len(cut) / 3 + 1:
            return Stretch(start, stop, width, styles, not ends_blank, False, len(cut))
        if whole and styles and len(other) >= (4 if common else 8) and len(cut) <= len(other) / 4:
            return Stretch(start, stop, width, styles, False, True, len(other))
        return None

    def _own_styles(self, lines: list[bytes], widths: list[int], start: int, stop: int, width: int) -> frozenset[str]:
        """The prefix styles of lines after one that was not cut: with these a record starts."""
        seen: Counter[str | None] = Counter()
        for i in range(start, min(stop, start + 2000)):
            if (i == start or widths[i - 1] < width - 1) and lines[i].strip():
                seen[self._style(lines[i])] += 1
        total = sum(seen.values())
        return frozenset(s for s, n in seen.items() if s is not None and (not _is_loose(s) or n * 2 > total))


def _holds_odd(lines: list[bytes]) -> bool:
    """Whether any line may be an odd one: all at once, since most blocks have none."""
    return bool(b"".join(lines).translate(None, _EVEN))


def _as_long(candidates: list[int], widths: list[int], odd: dict[int, set[int]]) -> dict[int, list[int]]:
    """For each candidate, in order, the lines but the last that are as long."""
    found: dict[int, list[int]] = {width: [] for width in candidates}
    for i, width in enumerate(widths[:-1]):
        if i in odd:
            for measure in odd[i] | {width}:
                if measure in found:
                    found[measure].append(i)
        elif width in found:
            found[width].append(i)
    return found


def describe(widths: Counter[int], chopped: Counter[int]) -> Iterator[str]:
    """What was done, one sentence per width."""
    for width, count in sorted(widths.items()):
        yield f"lines wrapped at {width} columns were joined ({count:,} line ends)."
    for width, count in sorted(chopped.items()):
        if count:
            yield f"lines were cut off at {width} columns; what stands at their ends is not read ({count:,} lines)."


def seams_before(seams: list[int], offset: int) -> int:
    """How many of the sorted seams are before `offset`, or at it."""
    return bisect_left(seams, offset + 1)


def _measures(line: bytes) -> set[int]:
    """How long a line is: in bytes, characters and columns, with and without what a carriage return overwrote."""
    found = {len(line)}
    if line.endswith(b"\r"):
        line = line[:-1]
        found = {len(line), len(line) + 1}
    for part in {line, line.rpartition(b"\r")[2]}:
        text = part.decode("utf-8", "replace")
        shown = strip_terminal(text)
        found |= {len(part), len(text), len(shown), sum(map(_columns, shown))}
    return found


def _columns(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _is_full(line: bytes, width: int) -> bool:
    return len(line) == width if not _ODD.search(line) else len(line) <= 4 * WIDEST and width in _measures(line)


def _is_loose(style: str) -> bool:
    return style.removeprefix("indented+").split("+")[0] in _LOOSE


def _is_of_box(line: bytes, follows: bytes) -> bool:
    """Whether a line or the next has no word at all (a ruler), or both are rows of a table or box."""
    first, second = (other[:WIDEST].decode("utf-8", "replace") for other in (line, follows))
    if _RULER.match(first) or _RULER.match(second):
        return True
    return _ROW.match(first) is not None and _ROW.match(second) is not None


def _is_of_table(line: bytes, follows: bytes) -> bool:
    """Whether a line may end where it does because it was filled up, or set under the one before it."""
    if not follows.strip() or line.endswith(b"  ") or follows.startswith(b"    "):
        return True
    first, second = (other.translate(None, _DIGITS).split(None, 1)[:1] for other in (line, follows))
    return first == second or _is_of_box(line, follows)


def _only_prefix(line: bytes) -> bool:
    return not text_after_prefix(strip_terminal(line.decode("utf-8", "replace")) + " ").strip()


def _common_lead(lines: list[bytes]) -> bytes:
    """What a quotation or an indentation put in front of every line."""
    written = [line for line in lines if line.strip()]
    found = _LEAD.match(written[0]) if written else None
    if found is None:
        return b""
    lead = found.group()
    return lead if sum(line.startswith(lead) for line in written) * 20 >= len(written) * 19 else b""
