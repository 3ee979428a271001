"""A sweep's results file: one JSON document a line, written as it comes, and the way back.

Whatever ends the program, all lines but the one that was being written are whole; a torn last line is passed over and said.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from memledger.opening import open_file
from memledger.sanitize import clean_tree
from memledger.sweep.values import SCHEMA, Begun, Event

LONGEST_LINE: Final = 4 * 2**20
LARGEST: Final = 2**30
HEAD: Final = 4096
_DECODER: Final = msgspec.json.Decoder(Event)


class JournalError(Exception):
    """A results file can't be written, or can't be read; one sentence."""


class Writer:
    """Writes events to a new file."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o644)
        except FileExistsError as error:
            raise JournalError(f"{_name(path)} is there already: name another file with --results") from error
        except (OSError, ValueError) as error:
            raise JournalError(
                f"{_name(path)} can't be written: {getattr(error, 'strerror', None) or error}"
            ) from error
        self._path = path

    def write(self, event: Event) -> None:
        """One line.

        Raises:
            JournalError: it can't be written.
        """
        data = memoryview(line_of(event))
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise JournalError(f"{_name(self._path)} can't be written: {error.strerror or error}") from error

    def close(self) -> None:
        """No further line."""
        os.close(self._file)


def line_of(event: Event) -> bytes:
    """An event as its line; every text in it clean and masked."""
    return msgspec.json.encode(clean_tree(msgspec.to_builtins(event))) + b"\n"


def is_results(head: bytes) -> bool:
    """Whether a file that begins like this is a results file."""
    return head.startswith(b'{"kind":"begin"') and b'"settings":{' in head


def is_file_of_results(path: str) -> bool:
    """Whether a path is a results file, by its beginning."""
    file = Path(path)
    try:
        if path == "-" or not file.is_file():
            return False
        with open_file(file) as stream:
            return is_results(stream.read(HEAD))
    except OSError:
        return False


def read(path: Path) -> tuple[list[Event], tuple[str, ...]]:
    """The events of a file, and what is to be said of it.

    Raises:
        JournalError: it can't be read, or is no results file of this version.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise JournalError(f"{_name(path)} is larger than {LARGEST // 2**30} GiB")
        with open_file(path) as stream:
            data = stream.read()
    except OSError as error:
        raise JournalError(f"{_name(path)}: {error.strerror or error}") from error
    return decoded(data, _name(path))


def decoded(data: bytes, name: str) -> tuple[list[Event], tuple[str, ...]]:
    """The events of a file's bytes, and what is to be said of it.

    Raises:
        JournalError: it is no results file of this version.
    """
    events: list[Event] = []
    damaged = 0
    lines = data.split(b"\n")
    torn = bool(lines.pop())
    for line in lines:
        try:
            events.append(_decoded(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            if not events:
                break
            damaged += 1
    if not events or not isinstance(events[0], Begun):
        raise JournalError(f"{name} is no results file of memledger sweep")
    if events[0].schema != SCHEMA:
        raise JournalError(f"{name} is of another version ({events[0].schema[:40]}); this one reads {SCHEMA}")
    return events, tuple(_remarks(damaged, torn=torn))


def _decoded(line: bytes) -> Event:
    if len(line) > LONGEST_LINE:
        raise ValueError("too long")
    found: Any = _DECODER.decode(line)
    # What it holds may be somebody else's text.
    event: Event = msgspec.convert(clean_tree(msgspec.to_builtins(found)), Event)
    return event


def _remarks(damaged: int, *, torn: bool) -> Iterator[str]:
    if torn:
        yield "the results end in the middle of a line: the run was ended from outside; that line is left out"
    if damaged:
        yield f"{damaged} damaged lines of the results are left out"


def _name(path: Path) -> str:
    from memledger.sanitize import clean

    return clean(str(path).encode("utf-8", "replace").decode(), 200)
