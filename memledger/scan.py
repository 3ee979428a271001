"""Bytes to events: a multi-literal pre-filter finds the lines that matter, then one pattern per rule reads each.

One pass, bounded memory. Lines without a literal are only counted. Lines of a shape seen before (the same line but for
its digits) are decided by that shape: a serving log prints a few shapes a hundred thousand times. Of usage lines only
those are read that raise a maximum (see `memledger.usage`), so a reader gets every peak, with its own line, and little
else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from memledger import newlines
from memledger.events import Event, Prefix
from memledger.grammar import Rule, RuleSet, Sample, Value, expectation_matches, match_rule
from memledger.ledger import Evidence, Unrecognized
from memledger.prefilter import MEMORY_LITERALS, Prefilter, PythonPrefilter, prefilter
from memledger.prefix import (
    Record,
    is_fragment,
    is_users_text,
    joined_fragments,
    peel,
    records,
    under_wrapper,
    wrapper_of,
)
from memledger.request_text import LONGEST_LINE, MARKS, end_of_request, shows_request
from memledger.sanitize import clean
from memledger.thin import Thinner
from memledger.usage import DIGITS, LONGEST_SHAPE, Shape, Shapes, UsageLines, learn
from memledger.wrap import NARROWEST, Unwrapper, describe, seams_before

if TYPE_CHECKING:
    from memledger.ahead import Ahead, Block
    from memledger.prefilter import Hits
    from memledger.wrap import Piece

MOST_EXAMPLES: Final = 20
KEEP_BELOW: Final = 8 * 2**20
MOST_IN_VAIN: Final = 4096
MOST_CANDIDATES: Final = 4096
MOST_CONTINUATION_LINES: Final = 8
LONGEST_WRAPPED: Final = 64 * 2**10
LONGEST_CONTINUATION: Final = 4096
MOST_FRAGMENTS: Final = 64
LONGEST_FRAGMENT: Final = 128 * 2**10
OFTEN: Final = 50
LONGEST_UNKNOWN_PREFIX: Final = 60
STARTS_ALONE: Final = 4 * 2**20
"""So much of an input is read before helpers are started: by then it is known whether lines have to be joined."""

_MEMORY_LIKE: Final = re.compile(
    rb"(?<![\w./-])[\d.,]*\d\s?[GMT]i?B\b(?!/s|ps)"
    rb"|(?i:\b(?:memory|kv|cache|mamba|pool|gpu|state)\b[^\n]{0,60}?\d[\d,]*\s(?:tokens|slots|blocks)\b(?!/s))"
)
_EXCEPTION_NAME: Final = re.compile(r"(?:(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt|Failure|Exit): +){1,3}")
_QUOTES: Final = re.compile(r"""['"{=]""")
_UNFINISHED: Final = re.compile(r"(?:[,;(=:]|\bunder|\babove|\band|\bof|\bis|\bwhich|\.{3})$")


def keep_example(examples: list[Evidence], example: Evidence) -> None:
    """Keep an example; where there is no room, only one of a new shape, for the last one of a shape with several."""
    if len(examples) < MOST_EXAMPLES:
        examples.append(example)
        return
    shapes = [_shape_of(known) for known in examples]
    if _shape_of(example) in shapes:
        return
    for index in range(len(shapes) - 1, -1, -1):
        if shapes.index(shapes[index]) != index:
            del examples[index]
            examples.append(example)
            return


def together(parts: Iterable[Unrecognized]) -> Unrecognized:
    """What was not understood in several inputs, in their order."""
    count = 0
    examples: list[Evidence] = []
    for part in parts:
        count += part.count
        for example in part.examples:
            keep_example(examples, example)
    return Unrecognized(count, tuple(examples))


class Scanner:
    """Reads events from streams of bytes; `unrecognized` counts memory-like lines that no rule took."""

    def __init__(self, rules: RuleSet, *, fallback: bool = False, matcher: Prefilter | None = None) -> None:
        self.rules = rules
        anchors = [a.encode() for a in rules.anchors]
        extra = [m for m in (*MEMORY_LITERALS, *MARKS) if m not in set(anchors)]
        literals = [*anchors, *extra]
        self.matcher = matcher or prefilter(literals, fallback=fallback)
        self.longest_literal = max(map(len, literals))
        self._marks = frozenset(i for i, literal in enumerate(literals) if literal in MARKS)
        self._anchor_count = len(anchors)
        self._rules_of = [rules.by_anchor[a] for a in rules.anchors]
        self._candidates: dict[frozenset[int], tuple[Rule, ...]] = {}
        self.bytes = 0
        self.lines = 0
        self._unrecognized = 0
        self._examples: list[Evidence] = []
        self._shapes = Shapes()
        self._vain: dict[bytes, int] = {}
        self.thinner = Thinner(self._shapes, self._marks, MOST_FRAGMENTS + 2)
        self._usage = UsageLines()
        self._input = 0
        self._before = b""
        self._joined_lines = 0
        self._seams: list[int] = []
        self._doubtful: set[int] = set()
        self._unwrapper = Unwrapper(self._is_record)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was odd about the lines of the input read last, one sentence each."""
        return tuple(describe(self._unwrapper.widths, self._unwrapper.chopped))

    @property
    def unrecognized(self) -> Unrecognized:
        """Memory-like lines that no rule took, over all streams so far."""
        return Unrecognized(self._unrecognized, tuple(self._examples))

    def events(self, blocks: Iterable[bytes], input_index: int, ahead: Ahead | None = None) -> Iterator[Event]:
        """The events of one input, in order. `bytes` and `lines` are the input's when the iterator ends.

        `blocks` are UTF-8 bytes cut anywhere; an empty block means "nothing more for now": what is there is read.
        `ahead` finds the literals of blocks that are the file's own.
        """
        # glibc gives large blocks back to the system on each free, and 60 page faults are a fifth of a block's time. A
        # larger block freed once (never touched) makes it keep them.
        bytearray(KEEP_BELOW)
        self.bytes = self.lines = 0
        self._input = input_index
        self._before = b""
        self._usage.reset()
        self._unwrapper = Unwrapper(self._is_record)
        self._seams = []
        self._doubtful = set()
        rest = b""
        inside_line = False
        finder = _Finder(self.matcher, ahead)
        for piece in self._unwrapper.pieces(self._counted(blocks)):
            data = rest + piece.data if rest else piece.data
            idle = not piece.data
            finder.add(piece, len(rest), self.bytes)
            self._seams += [len(rest) + seam for seam in piece.seams]
            self._doubtful.update(len(rest) + end for end in piece.doubtful)
            start = 0
            if inside_line:
                # The rest of a line that was too long: nothing in it is looked at.
                start = _line_end(data)
                if start == len(data):
                    rest = b""
                    self.lines += len(self._seams)
                    self._seams = []
                    continue
                inside_line = False
            cut = _cut(data)
            if cut == 0:
                rest = data
                inside_line = start > 0
                continue
            stop = yield from self._chunk(data, start, cut, not idle, finder)
            inside_line = stop == cut and data[cut - 1 : cut] not in {b"\n", b"\r"}
            rest = data[stop:]
            if self._seams or self._doubtful:
                self._seams = [seam - stop for seam in self._seams if seam > stop]
                self._doubtful = {end - stop for end in self._doubtful if end >= stop}
        if rest:
            start = _line_end(rest) if inside_line else 0
            yield from self._chunk(rest, start, len(rest), False, finder)
            self.lines += not rest.endswith(b"\n")
        elif inside_line:
            self.lines += 1
        yield from self._last_usage()

    def _counted(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.bytes += len(block)
            yield block

    def _is_record(self, line: bytes) -> bool:
        """Whether a line without a prefix says what a rule takes, from its start on."""
        ids = frozenset(i for i, _ in self.matcher.scan(line[:LONGEST_SHAPE]) if i < self._anchor_count)
        return bool(ids) and self._match(line.decode("utf-8", "replace"), self._rules_for(ids)) is not None

    def _chunk(self, data: bytes, start: int, cut: int, more: bool, finder: _Finder) -> Generator[Event, None, int]:
        """The events of the whole lines before `cut`; gives back how far was read (a line that needs `more` stays)."""
        hits, line_ends = finder.find(data)
        reader = _ChunkReader(data, self.lines + 1, self._seams, line_ends)
        stop = cut
        position = start
        known, pending, doubtful = self._shapes.get, self._usage.pending, self._doubtful
        for index, (_, end) in enumerate(hits):
            if end <= position:
                continue
            left = data.rfind(b"\n", position, end) + 1 or position
            right = data.find(b"\n", end, cut)
            if right < 0:
                if end > cut:
                    break
                right = cut
            line = data[left:right]
            position = right
            if (
                right - left <= LONGEST_SHAPE
                and (shape := known(line.translate(None, DIGITS))) is not None
                and right not in doubtful
            ):
                if shape.columns is not None:
                    if not shape.lines:
                        pending.append(shape)
                    shape.lines.append(line)
                    shape.offsets.append(left)
                    continue
                if not shape.unrecognized or len(self._examples) >= MOST_EXAMPLES:
                    self._unrecognized += shape.unrecognized
                    continue
            after = yield from self._new_line(data, left, right, _literals_before(hits, index, right), more, reader)
            if after is None:
                stop = left
                break
            position = after
        yield from self._flush(reader)
        self.lines = reader.number(stop) - 1
        finder.read_to(data, stop, cut)
        if stop:
            self._before = data[data.rfind(b"\n", 0, stop - 1) + 1 : stop][-LONGEST_FRAGMENT:]
        return stop

    def _new_line(
        self, data: bytes, left: int, right: int, ids: frozenset[int], more: bool, reader: _ChunkReader
    ) -> Generator[Event, None, int | None]:
        """The events of a line whose shape is not known; gives back where reading goes on (None: it needs `more`)."""
        line = data[left:right]
        if not ids.isdisjoint(self._marks) and shows_request(line):
            return end_of_request(data, left, right, more)
        following = self._following(data, line, right, ids, more)
        if following is None:
            return None
        self._joined_lines = 0
        yield from self._hit_line(line, ids, reader, left, following)
        # Lines that were the rest of this record are no records of their own.
        return right + sum(len(other) + 1 for other in following[: self._joined_lines])

    def _following(self, data: bytes, line: bytes, right: int, ids: frozenset[int], more: bool) -> list[bytes] | None:
        """The lines after a hit line, in case it was wrapped or split; None: not all of them are here yet."""
        if len(line) > LONGEST_WRAPPED or not any(i < self._anchor_count for i in ids):
            return []
        most = MOST_FRAGMENTS if is_fragment(line) else MOST_CONTINUATION_LINES
        longest = LONGEST_FRAGMENT if most == MOST_FRAGMENTS else LONGEST_CONTINUATION
        found: list[bytes] = []
        position = right + 1
        while len(found) < most:
            end = data.find(b"\n", position, position + longest)
            if end < 0:
                if len(data) - position >= longest:
                    break
                if more:
                    return None
                if position < len(data):
                    found.append(data[position:])
                break
            found.append(data[position:end])
            if most == MOST_FRAGMENTS and not is_fragment(found[-1]):
                most = len(found) + 1  # one more: the other stream may write in between
            position = end + 1
        return found

    def _hit_line(
        self, line: bytes, ids: frozenset[int], reader: _ChunkReader, left: int, following: list[bytes]
    ) -> Iterator[Event]:
        anchored = any(i < self._anchor_count for i in ids)
        if not anchored and not _MEMORY_LIKE.search(line):
            self._shapes.remember(line, Shape())
            return
        before = self._before if left == 0 else reader.line_before(left)
        text, whole = joined_fragments(before, line, following)
        if text is None:
            return
        if left + len(line) in self._doubtful:
            yield from self._cut_off(text, ids, reader.number(left))
            return
        if not whole:
            following = []
        number = reader.number(left)
        pieces = [p for p in text[:LONGEST_LINE].rstrip("\r\n").split("\r") if p.strip()]
        found: list[Event] = []
        verdicts: list[str] = []
        outer = wrapper_of(pieces[0]) if len(pieces) > 1 else Prefix()
        for piece in pieces:
            for record in records(piece):
                whole_record = under_wrapper(record, outer)
                verdict, event = self._read(whole_record, ids, number, [] if len(pieces) > 1 else following)
                verdicts.append(verdict)
                if event is not None:
                    found.append(event)
        if verdicts == ["usage"] and whole:
            columns = learn(line, found[0])
            if columns is not None:
                shape = Shape(columns=columns)
                self._shapes.remember(line, shape)
                self._usage.add(shape, line, left)
                return
        elif (
            len(verdicts) == 1
            and whole
            and (verdicts[0] == "known" or (not found and (not anchored or self._often(line))))
        ):
            self._shapes.remember(line, Shape(unrecognized=verdicts[0] == "unrecognized"))
        if found:
            yield from self._flush(reader)
            if any(event.rule.kind != "usage" for event in found):
                yield from self._last_usage()
                if not all(event.rule.last or event.rule.framework == "system" for event in found):
                    # An exception begins no other server, nor does a line of the system: the maxima before it still stand.
                    self._usage.reset()
            else:
                # Itself the newest line of its kind: the one before it says nothing more at the end.
                self._usage.newest_told = True
            yield from found

    def _cut_off(self, text: str, ids: frozenset[int], number: int) -> Iterator[Event]:
        """The event of a line whose end may be missing: nothing with figures that may be half of themselves."""
        for record in records(text.rstrip("\r\n")):
            found = self._match(record.message, self._rules_for(ids))
            if found is None or found[0].kind in {"ledger", "capacity", "usage"}:
                if found is not None or _MEMORY_LIKE.search(record.message.encode("utf-8", "replace")):
                    self._not_understood(record, number)
                continue
            # What is said before the last word is whole.
            message = record.message.rpartition(" ")[0]
            found = self._match(message, self._rules_for(ids))
            if found is not None and found[0].kind != "not_memory":
                yield Event(found[0], found[1], record.prefix, self._input, number, message, clean(record.text))

    def _read(
        self, record: Record, ids: frozenset[int], number: int, following: Sequence[bytes]
    ) -> tuple[str, Event | None]:
        """What a record is: "event", "usage", "known" (and not memory), "nothing" or "unrecognized"; and its event."""
        message = record.message
        try:
            found = self._match(message, self._rules_for(ids))
            if following and _may_go_on(message, found, record.text, following):
                longer = self._joined(record, found, ids, following)
                if longer is not None:
                    found, message = longer
        except TimeoutError:
            return self._not_understood(record, number)
        if found is not None:
            rule, fields = found
            if rule.kind == "not_memory":
                return "known", None
            if rule.last and not is_users_text(message) and _MEMORY_LIKE.search(message.encode("utf-8", "replace")):
                self._not_understood(record, number)
            event = Event(rule, fields, record.prefix, self._input, number, message, clean(record.text))
            return ("usage" if rule.kind == "usage" else "event"), event
        if is_users_text(message) or not _MEMORY_LIKE.search(message.encode("utf-8", "replace")):
            return "nothing", None
        if record.prefix == Prefix() and not self._behind_unknown_prefix(message, ids):
            return "nothing", None
        return self._not_understood(record, number)

    def _behind_unknown_prefix(self, message: str, ids: frozenset[int]) -> bool:
        """Whether a short line without a known prefix holds what a line of figures or a failure says: it may be one.

        It is not read (a message can start only where its prefix is known), but it is not passed over in silence.
        """
        return any(
            0 < (at := message.find(literal)) <= LONGEST_UNKNOWN_PREFIX and not _QUOTES.search(message, 0, at)
            for rule in self._rules_for(ids)
            if rule.kind in {"ledger", "capacity", "failure"}
            for literal in rule.literals
        )

    def _not_understood(self, record: Record, number: int) -> tuple[str, None]:
        self._unrecognized += 1
        self._keep_example(Evidence(self._input, number, clean(record.text)))
        return "unrecognized", None

    def _keep_example(self, example: Evidence) -> None:
        keep_example(self._examples, example)

    def _joined(
        self,
        record: Record,
        found: tuple[Rule, dict[str, Value]] | None,
        ids: frozenset[int],
        following: Sequence[bytes],
    ) -> tuple[tuple[Rule, dict[str, Value]], str] | None:
        """The record with the next lines appended, where these carry no prefix of their own and say more."""
        best: tuple[tuple[Rule, dict[str, Value]], str] | None = None
        had = -1 if found is not None and found[0].last else _said(found)
        rules = self._rules_for(ids)
        bases = [record.message]
        for count, raw in enumerate(following, 1):
            piece = self._continuation(raw)
            if piece is None:
                break
            # Between two digits a cut number is likelier than a blank.
            glues = ("", " ") if bases[-1][-1:].isdigit() and piece[:1].isdigit() else (" ", "")
            tries = [base + glue + piece for base in bases for glue in glues]
            more = None
            for joined in tries:
                longer = self._match(joined, rules)
                if longer is None or longer[0].last:
                    continue
                if found is not None and not found[0].last and longer[0] is not found[0]:
                    continue
                if _said(longer) > had:
                    best = more = (longer, joined)
                    had = _said(longer)
                    self._joined_lines = count
            if more is not None:
                bases = [more[1]]
            elif best is not None:
                break
            else:
                bases = [tries[0], tries[-1]]
        return best

    def _continuation(self, raw: bytes) -> str | None:
        """A line that may go on with the record before it; None where it has a prefix or is a record of its own."""
        here = records(raw.decode("utf-8", "replace").rstrip("\r\n"))
        prefix, message = here[0].prefix, here[0].message
        if len(here) != 1 or not message or prefix.time or prefix.ranks or prefix.process:
            return None
        return None if self.recognise(message) else message

    def _rules_for(self, ids: frozenset[int]) -> tuple[Rule, ...]:
        known = self._candidates.get(ids)
        if known is None:
            rules = {r.full_id: r for i in ids if i < self._anchor_count for r in self._rules_of[i]}
            known = tuple(sorted(rules.values(), key=lambda r: self.rules.order[r.full_id]))
            if len(self._candidates) < MOST_CANDIDATES:
                self._candidates[ids] = known
        return known

    @staticmethod
    def _match(message: str, rules: Iterable[Rule]) -> tuple[Rule, dict[str, Value]] | None:
        """The first of the rules that takes `message`, else the message without the name of the exception raised."""
        for rule in rules:
            if (fields := _fields(rule, message)) is not None:
                return rule, fields
        raised = _EXCEPTION_NAME.match(message)
        if raised is not None:
            rest = message[raised.end() :]
            for rule in rules:
                if (fields := _fields(rule, rest)) is not None:
                    return rule, fields
        return None

    def recognise(self, message: str) -> tuple[Rule, dict[str, Value]] | None:
        """The first rule in force that takes `message`, with its fields."""
        return self._match(
            message, self._rules_for(frozenset(i for i, a in enumerate(self.rules.anchors) if a in message))
        )

    def _often(self, line: bytes) -> bool:
        """Whether an anchored line of this shape was in vain many times (once may be a line cut short)."""
        if len(line) > LONGEST_SHAPE:
            return False
        key = line.translate(None, DIGITS)
        if len(self._vain) >= MOST_IN_VAIN:
            self._vain.clear()
        self._vain[key] = self._vain.get(key, 0) + 1
        return self._vain[key] >= OFTEN

    def _flush(self, reader: _ChunkReader) -> Iterator[Event]:
        """The usage lines gathered so far that raise a maximum, in order."""
        for left, line in self._usage.raised():
            number = reader.number(left)
            yield from self._usage_event(line, number)
        last = self._usage.newest
        if last is not None and last[2] is None:
            self._usage.newest = (last[0], last[1], reader.number(last[0]))

    def _last_usage(self) -> Iterator[Event]:
        """The last usage line before something else: the log goes on to here."""
        last = self._usage.newest
        if last is not None and last[2] is not None and not self._usage.newest_told:
            yield from self._usage_event(last[1], last[2])
        self._usage.newest = None

    def _usage_event(self, line: bytes, number: int) -> Iterator[Event]:
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        for record in records(text):
            found = self.recognise(record.message)
            if found is not None:
                yield Event(found[0], found[1], record.prefix, self._input, number, record.message, clean(record.text))


class _Finder:
    """Finds the literals of chunk after chunk: itself, or by what was scanned ahead where the chunk is the file's own.

    A chunk is what was left of the one before it, and a piece. Literals that end in the rest were found with that chunk.
    """

    def __init__(self, matcher: Prefilter, ahead: Ahead | None) -> None:
        self._matcher = matcher
        self._ahead = ahead
        self._count: Callable[[bytes], int] = newlines.plain
        self._position = 0
        self._block: Block | None = None
        self._rest = 0
        self._hits: Hits = []
        self._kept: Hits | None = []
        self._kept_line_ends = 0
        self._is_read = True

    def add(self, piece: Piece, rest: int, read: int) -> None:
        """The next chunk is `rest` bytes of the last one, and `piece`; `read` bytes were read of the input."""
        start, self._position = self._position, self._position + len(piece.data)
        if self._position > newlines.WORTH_LOADING:
            self._count = newlines.counter()
        if self._ahead is None:
            return
        if not self._is_read:
            self._kept = None  # the last piece made no chunk: nobody looked what is in it
        self._is_read = False
        self._block, self._rest = None, rest
        if piece.seams or piece.doubtful:
            self._ahead.close()
            self._ahead = None
        elif self._position == read and self._position > STARTS_ALONE:
            # Nothing was held back, taken out or put in: these are the file's bytes from `start` on.
            self._block = self._ahead.block_at(start, len(piece.data))

    def find(self, data: bytes) -> tuple[Hits, int]:
        """The literals of the chunk, and how many line ends it has."""
        block, self._block = self._block, None
        found = None
        if self._ahead is not None and block is not None and self._kept is not None:
            found = self._ahead.take(block)
        if found is None:
            self._hits = self._matcher.scan(data)
            return self._hits, self._count(data)
        rest = self._rest
        self._hits = (self._kept or []) + [(literal, end + rest) for literal, end in found.hits]
        return self._hits, self._kept_line_ends + found.newlines

    def read_to(self, data: bytes, stop: int, cut: int) -> None:
        """The chunk was read to `stop`: the rest belongs to the next."""
        if self._ahead is None:
            return
        self._is_read = True
        # A line before the cut that is not read yet may take lines of the next piece with it.
        if stop == cut and data[stop - 1 : stop] == b"\n":
            self._kept = [(literal, end - stop) for literal, end in self._hits if end > stop]
            self._kept_line_ends = data.count(b"\n", stop)
        else:
            self._kept = None


class _ChunkReader:
    """Line numbers and neighbours inside a chunk."""

    def __init__(self, data: bytes, first: int, seams: list[int], line_ends: int) -> None:
        self._data = data
        self._first = first
        self._seams = seams
        self._line_ends = line_ends
        self._at = 0
        self._passed = 0

    def number(self, offset: int) -> int:
        """The number of the line that starts at `offset`."""
        number = self._first + self._line_ends_before(offset)
        if self._seams:
            number += seams_before(self._seams, offset) - seams_before(self._seams, 0)
        return number

    def _line_ends_before(self, offset: int) -> int:
        """Counted from where that is least work: the offset asked for last, or the end."""
        if len(self._data) - offset < abs(offset - self._at):
            self._passed = self._line_ends - self._data.count(b"\n", offset)
        elif offset >= self._at:
            self._passed += self._data.count(b"\n", self._at, offset)
        else:
            self._passed -= self._data.count(b"\n", offset, self._at)
        self._at = offset
        return self._passed

    def line_before(self, offset: int) -> bytes:
        """The line before the one that starts at `offset` (of which there is one)."""
        return self._data[self._data.rfind(b"\n", 0, offset - 1) + 1 : offset - 1]


def _literals_before(hits: Hits, index: int, right: int) -> frozenset[int]:
    """The literals from the hit at `index` on that end before `right`, or there: those of its line."""
    found = set()
    while index < len(hits) and hits[index][1] <= right:
        found.add(hits[index][0])
        index += 1
    return frozenset(found)


def _line_end(data: bytes) -> int:
    """Where the first line (or piece before a carriage return) of `data` ends; its length if it does not."""
    return min(i for i in (data.find(b"\n"), data.find(b"\r"), len(data)) if i >= 0)


def _cut(data: bytes) -> int:
    """How much of `data` can be read: whole lines; of a line that never ends, whole pieces between carriage returns."""
    cut = data.rfind(b"\n") + 1
    if cut or len(data) < LONGEST_LINE:
        return cut
    return data.rfind(b"\r") + 1 or len(data)


def _shape_of(example: Evidence) -> bytes:
    return example.text.encode().translate(None, DIGITS)


def _fields(rule: Rule, message: str) -> dict[str, Value] | None:
    """The fields under `rule`; None where it does not match, or where a figure is no number after all."""
    try:
        return match_rule(rule, message)
    except (ValueError, OverflowError):
        return None


def _said(found: tuple[Rule, dict[str, Value]] | None) -> int:
    """How much a match says: fields that were printed (also as "not available")."""
    return -1 if found is None else sum(value != () for value in found[1].values())


def _may_go_on(
    message: str, found: tuple[Rule, dict[str, Value]] | None, text: str, following: Sequence[bytes]
) -> bool:
    """Whether the next line may belong to the record.

    It was not understood, or ends as nothing ends, or is an error's; or no line near is longer, as where a terminal
    wrapped them (too few to tell the width from).
    """
    if found is None or found[0].kind == "failure":
        return True
    if _UNFINISHED.search(message) is not None or _cut_in_number(message, following[0]):
        return True
    return len(text) >= NARROWEST and all(len(line) <= len(text) for line in following)


def _cut_in_number(message: str, following: bytes) -> bool:
    """Whether the line may end inside a number.

    It is read so only if the next line completes the record: many lines end with a number, and the next may be another
    program's that starts with one.
    """
    return message[-1:].isdigit() and following[:1].isdigit()


def check_rules(rules: RuleSet) -> list[str]:
    """What is wrong with the rules' samples (empty: every sample is taken by its own rule with the values it says)."""
    scanner = Scanner(rules, matcher=PythonPrefilter([b"\n"]))
    problems = []
    for rule in rules.rules:
        if not rule.sample:
            problems.append(f"{rule.full_id}: no sample")
        for sample in rule.sample:
            problems.extend(_check_sample(scanner, rule, sample))
    return problems


def _check_sample(scanner: Scanner, rule: Rule, sample: Sample) -> Iterator[str]:
    _, message = peel(sample.line)
    found = scanner.recognise(message)
    if found is None:
        yield f"{rule.full_id}: not recognised: {sample.line!r}"
        return
    taken, fields = found
    if taken.full_id != rule.full_id:
        yield f"{rule.full_id}: taken by {taken.full_id}: {sample.line!r}"
        return
    for name, value in sample.expect.items():
        if name not in rule.fields:
            yield f"{rule.full_id}: sample expects unknown field {name!r}"
        elif not expectation_matches(value, fields.get(name), rule.fields[name]):
            yield f"{rule.full_id}: {name}: expected {value!r}, got {fields.get(name)!r}: {sample.line!r}"
