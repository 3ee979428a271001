"""A watch in a file: one JSON document a line, masked, in files of bounded size; and the way back.

The lines: `start` (the server, its report, all that was sampled), `sample` (all that was sampled, after something came or went),
`tick` (what changed since), `report` (the log says more), `end`. Every file begins with a `start` and a `sample`, so that each can be
read alone; a run that goes on in another file keeps its `run`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from memledger import __version__, foreign
from memledger.ledger import Report
from memledger.live.sample import Sample
from memledger.live.snapshot import masked
from memledger.opening import open_file
from memledger.sanitize import clean
from memledger.watch.moment import (
    End,
    Event,
    Grown,
    Moment,
    Serving,
    Start,
    Tick,
    restored,
    still_of,
    tick_of,
    without_pages,
)

SCHEMA: Final = "memledger-recording/1"
LONGEST_LINE: Final = 64 * 2**20
"""Bytes of a line; a sample of a machine with 64 processes has some ten thousand."""
DEFAULT_SIZE: Final = 64 * 2**20
DEFAULT_KEPT: Final = 4
MOST_KEPT: Final = 99
MOST_TROUBLES: Final = 5


class RecordingError(Exception):
    """A recording can't be written, or can't be read; one sentence."""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a recording; which fields it has depends on `kind`."""

    kind: Literal["start", "sample", "tick", "report", "end"]
    schema: str | None = None
    version: str | None = None
    run: str | None = None
    at: str | None = None
    clock_s: float | None = None
    interval_s: float | None = None
    pid: int | None = None
    own_log: bool = False
    built: bool = False
    report: Report | None = None
    sample: Sample | None = None
    tick: Tick | None = None
    serving: tuple[Serving, ...] = ()
    reason: str | None = None


def is_recording(head: bytes) -> bool:
    """Whether a file that begins like this is a recording."""
    return head.lstrip().startswith(b'{"kind":"start"') and SCHEMA.partition("/")[0].encode() in head[:200]


# ------------------------------------------------------------------------------------------------------------- writing


class Recorder:
    """Writes a watch to a file as it goes. At `most_bytes` the file becomes `FILE.1` (that one `FILE.2`, ...), of which `kept` stay.

    Each line is written at once: whatever ends the program, all lines but the one that is being written are whole.
    """

    def __init__(self, path: Path, *, most_bytes: int = DEFAULT_SIZE, kept: int = DEFAULT_KEPT) -> None:
        self._path, self._most, self._kept = path, most_bytes, kept
        self._start: Start | None = None
        self._still: Sample | None = None
        self._file = -1
        self._size = 0
        self._open(fresh=False)

    def close(self) -> None:
        """No further line."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def write(self, event: Event) -> None:
        """One line or more for what happened.

        Raises:
            RecordingError: it can't be written.
        """
        if isinstance(event, Start):
            self._start, self._still = event, None
            self._put(_start_line(event))
        elif isinstance(event, Grown):
            if self._start is not None:
                self._start = msgspec.structs.replace(self._start, report=event.report)
            self._put(Line("report", report=event.report))
        elif isinstance(event, End):
            self._put(Line("end", at=event.at, reason=event.reason))
        else:
            self._moment(event)

    def _moment(self, moment: Moment) -> None:
        if self._size > self._most and self._start is not None:
            self._rotate()
            self._still = None
            self._put(_start_line(self._start))
        sample, tick = None, None
        if moment.sample is not None:
            still = still_of(moment.sample)
            if still == self._still:
                tick = tick_of(moment.sample)
            else:
                sample, self._still = without_pages(moment.sample), still
        kind: Literal["sample", "tick"] = "tick" if sample is None else "sample"
        clock = round(moment.clock_s, 3)
        self._put(Line(kind, at=moment.at, clock_s=clock, sample=sample, tick=tick, serving=moment.serving))

    def _put(self, line: Line) -> None:
        data = msgspec.json.encode(_compact(masked(msgspec.to_builtins(line)))) + b"\n"
        try:
            done = 0
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            raise self._failed(error) from error
        self._size += len(data)

    def _open(self, *, fresh: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._file = os.open(self._path, flags | (os.O_EXCL if fresh else 0), 0o600)
            found = os.fstat(self._file)
            self._size = found.st_size
            why = self._refused(stat.S_ISREG(found.st_mode))
            if why is None and self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
                self._size += os.write(self._file, b"\n")
        except OSError as error:
            raise self._failed(error) from error
        if why is not None:
            self.close()
            raise RecordingError(f"--record {clean(str(self._path))}: {why}")

    def _refused(self, is_file: bool) -> str | None:
        """Why nothing is written to what is there; a recording is gone on with, nothing else is touched."""
        if not is_file:
            return "it is there and no regular file; name a file"
        if self._size and not is_recording(os.pread(self._file, 200, 0)):
            return "the file is there and no recording of memledger; name another"
        return None

    def _rotate(self) -> None:
        self.close()
        try:
            for number in range(self._kept - 1, 0, -1):
                older = _numbered(self._path, number)
                if older.exists():
                    older.replace(_numbered(self._path, number + 1))
            if self._kept:
                self._path.replace(_numbered(self._path, 1))
            else:
                self._path.unlink()
        except OSError as error:
            raise self._failed(error) from error
        self._open(fresh=True)

    def _failed(self, error: OSError) -> RecordingError:
        return RecordingError(f"the recording can't be written to {clean(str(self._path))}: {error.strerror or error}")


def _compact(document: dict[str, Any]) -> dict[str, Any]:
    """The line without what is not known in its samples: there, every field that is left out is unknown again when it is read."""
    return {name: _known(value) if name in {"sample", "tick"} else value for name, value in document.items()}


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _known(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_known(one) for one in value]
    return value


def _start_line(start: Start) -> Line:
    return Line(
        "start",
        SCHEMA,
        __version__,
        start.run,
        at=start.at,
        interval_s=start.interval_s,
        pid=start.pid,
        own_log=start.own_log,
        built=start.built,
        report=start.report,
    )


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


# ------------------------------------------------------------------------------------------------------------- reading


class Reader:
    """The events of a recording, in order and in constant memory. `troubles`: what could not be read, in sentences."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.troubles: list[str] = []
        self._skipped = 0
        self._still: Sample | None = None

    def events(self) -> Iterator[Event]:
        """What was recorded: of the files that the recording was moved to, the oldest first, then the file that was named.

        Raises:
            RecordingError: the file is not one that this version reads.
        """
        for path in parts(self._path):
            yield from self._of_file(path)
        if self._skipped > MOST_TROUBLES:
            self.troubles.append(f"{clean(self._path)}: {self._skipped - MOST_TROUBLES} more lines could not be read.")

    def _of_file(self, path: str) -> Iterator[Event]:
        shown = clean(path)
        self._still = None
        try:
            with open_file(path) as file:
                number = 0
                while data := file.readline(LONGEST_LINE):
                    number += 1
                    if number == 1:
                        _check(data, shown)
                    try:
                        line = _decoded(data)
                        yield from self._of_line(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
                        self._trouble(shown, number, data, error)
        except OSError as error:
            raise RecordingError(f"{shown}: can't be read: {error.strerror or error}") from error

    def _of_line(self, line: Line) -> Iterator[Event]:
        at = line.at or ""
        if line.kind == "start":
            self._still = None
            yield Start(line.run or "", at, line.interval_s or 0.0, line.report, line.pid, line.own_log, line.built)
        elif line.kind == "report" and line.report is not None:
            yield Grown(line.report)
        elif line.kind == "end":
            yield End(at, line.reason or "")
        elif line.kind in {"sample", "tick"} and line.clock_s is not None:
            yield Moment(at, line.clock_s, self._sample(line), line.serving)

    def _sample(self, line: Line) -> Sample | None:
        if line.sample is not None:
            self._still = line.sample
            return line.sample
        if line.tick is None:
            return None
        if self._still is None:
            raise ValueError("what changed is there, and what it changes is not")
        return restored(self._still, line.tick)

    def _trouble(self, shown: str, number: int, data: bytes, error: Exception) -> None:
        self._skipped += 1
        if self._skipped > MOST_TROUBLES:
            return
        if not data.endswith(b"\n"):
            self.troubles.append(f"{shown}: the last line is cut off; what stands before it is reported.")
        else:
            self.troubles.append(f"{shown}: line {number} can't be read and is passed over: {clean(str(error), 160)}.")


def parts(path: str) -> list[str]:
    """The files of a recording: those that it was moved to when it was full, the oldest first, and itself."""
    if any(path.endswith(f".{number}") for number in range(1, MOST_KEPT + 1)):
        return [path]
    found: list[str] = []
    for number in range(1, MOST_KEPT + 1):
        older = _numbered(Path(path), number)
        if not older.is_file():
            break
        with open_file(older) as file:
            if not is_recording(file.read(200)):
                break
        found.append(str(older))
    return [*reversed(found), path]


def _check(data: bytes, shown: str) -> None:
    if not is_recording(data[:200]):
        raise RecordingError(f"{shown}: no recording of memledger watch (its first line begins otherwise)")
    if f'"{SCHEMA}"'.encode() not in data[:200]:
        raise RecordingError(f"{shown}: a recording of another version; this memledger reads {SCHEMA}")


def _decoded(data: bytes) -> Line:
    """A line of a file that may be somebody else's: every text cleaned, no figure that no machine has.

    Raises:
        ValueError: it is of another form; also as a `msgspec.MsgspecError`.
    """
    document: Any = masked(msgspec.json.decode(data))
    line = msgspec.convert(document, Line)
    if (why := foreign.problem(document, line.report)) is not None:
        raise ValueError(why)
    return line
