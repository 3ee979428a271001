"""Opening an input and reading it to the end, block by block."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Literal

from memledger.sources.compressed import compression_of, decompressed
from memledger.sources.encoding import encoding_of, to_utf8
from memledger.sources.follow import WAIT_SECONDS, arriving, growing, has_more, never

BLOCK_BYTES: Final = 2**20
HEAD_BYTES: Final = 64 * 2**10
FIRST_BYTES: Final = 512
LEAST_FIRST_BYTES: Final = 8
"""Enough to know a compressed stream by."""
STANDARD_INPUT: Final = "-"

Kind = Literal["text", "binary", "empty", "unknown"]
Progress = Callable[[int, int | None], None]
"""Called with the bytes read so far (of the file, before decompression) and the file's size where it is known."""

_ARCHIVES: Final = (
    (0, b"PK\x03\x04", "a zip archive", "unzip -p"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x -so"),
    (0, b"\x04\x22\x4d\x18", "lz4-compressed", "lz4 -dc"),
    (257, b"ustar", "a tar archive", "tar -xOf"),
)
_CONTROL: Final = bytes(c for c in range(32) if c not in b"\t\n\r\x08\x0c\x1b") + b"\x7f"


class InputError(Exception):
    """An input that can't be read. The message is one sentence that names it and says what to do."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class OpenInput:
    """An input that was opened: a context manager that is read once through `blocks`."""

    def __init__(
        self,
        path: str,
        stream: BinaryIO,
        size: int | None,
        *,
        follow: bool,
        progress: Progress | None,
        ended: Callable[[], bool] = never,
    ) -> None:
        self.path = path
        """The name as given; `-` is standard input."""
        self.size = size
        """Bytes of the file (before decompression); None where it has no size (a pipe)."""
        self.notes: list[str] = []
        """What was odd about the input, one sentence each."""
        self.incomplete: list[str] = []
        """Those of the notes that say why not all of it could be read."""
        self.kind: Kind = "unknown"
        """What the first bytes look like; known from the first block on."""
        self.head = b""
        """The first `HEAD_BYTES` as UTF-8; known from the first block on."""
        self.verbatim = False
        """Whether `blocks` gives the file's own bytes, `BLOCK_BYTES` at a time; known from the first block on."""
        self._stream = stream
        self._follow = follow
        self._ended = ended
        self._progress = progress

    def __enter__(self) -> OpenInput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        """The open file."""
        return self._stream.fileno()

    def close(self) -> None:
        """Close the input (never standard input)."""
        if self.path != STANDARD_INPUT:
            self._stream.close()

    def blocks(self) -> Iterator[bytes]:
        """The input as UTF-8, in blocks of any size; an empty block (only with `follow`) means "nothing new for now".

        With `follow` a file ends only when the caller stops it or `ended` says so, a pipe when it is closed as well.
        """
        first = self._first()
        how = compression_of(first)
        self.verbatim = (
            how is None and self.size is not None and not self._follow and encoding_of(first) == ("utf-8", 0)
        )
        if how is None:
            chunks = self._counted(first, follow=self._follow)
        else:
            if self._follow:
                self._note(f"{how} data is read once and not followed.")
            chunks = decompressed(how, self._counted(first, follow=False), self._cut)
            if self.size is not None:
                # Of a file: a thread that waits for a pipe could not be ended.
                from memledger.sources.threaded import made_ahead

                chunks = made_ahead(chunks)
        started = False
        with contextlib.closing(chunks):
            for block in to_utf8(chunks, self._note):
                if not started and block:
                    started = True
                    self._look_at(block)
                yield block
        if not started:
            self.kind = "empty"

    def _note(self, sentence: str) -> None:
        self.notes.append(f"{self.path}: {sentence}")

    def _cut(self, sentence: str) -> None:
        self._note(sentence)
        self.incomplete.append(self.notes[-1])

    def _look_at(self, block: bytes) -> None:
        self.head = block[:HEAD_BYTES]
        self.kind = "binary" if _is_binary(self.head) else "text"
        for offset, magic, what, command in _ARCHIVES:
            if self.head.startswith(magic, offset):
                self._note(f"it is {what}; unpack it first: {command} {self.path} | memledger explain -")

    def _first(self) -> bytes:
        """The first bytes: enough to know what they are (a pipe may give them one by one)."""
        descriptor = self._stream.fileno()
        first = b""
        try:
            while len(first) < FIRST_BYTES and (self._is_there(first) and (block := os.read(descriptor, BLOCK_BYTES))):
                first += block
        except OSError as error:
            self._stopped(len(first), error)
        return first

    def _is_there(self, first: bytes) -> bool:
        """Whether to read on for the first bytes; a followed pipe may hold back the rest of them for long."""
        if not self._follow or self.size is not None:
            return True
        while not has_more(self._stream.fileno(), WAIT_SECONDS):
            if self._ended() or len(first) >= LEAST_FIRST_BYTES:
                return False
        return True

    def _counted(self, first: bytes, *, follow: bool) -> Generator[bytes, None, None]:
        """The bytes as they are in the file; what is read is told to `progress`."""
        done = 0
        try:
            for block in self._plain(first, follow):
                done += len(block)
                if self._progress is not None:
                    self._progress(done, self.size)
                yield block
        except OSError as error:
            self._stopped(done, error)

    def _plain(self, first: bytes, follow: bool) -> Iterator[bytes]:
        if first:
            yield first
        descriptor = self._stream.fileno()
        if follow and self.size is not None:
            yield from growing(Path(self.path), self._stream, BLOCK_BYTES, self._note, ended=self._ended)
            return
        if self._follow and self.size is None:
            yield from (b for b in arriving(descriptor, BLOCK_BYTES, ended=self._ended) if b or follow)
            return
        # A pipe gives what is there; waiting for whole blocks would hold back the last lines.
        while block := os.read(descriptor, BLOCK_BYTES):
            yield block

    def _stopped(self, done: int, error: OSError) -> None:
        self._cut(f"reading stopped after {done:,} bytes: {error.strerror or error}.")


def open_input(
    name: str, *, follow: bool = False, progress: Progress | None = None, ended: Callable[[], bool] = never
) -> OpenInput:
    """Open a file by name, or standard input (`-`).

    With `follow` an input is read on as it grows, a file through rotation and truncation, until `ended` says so.

    Raises:
        InputError: it can't be read.
    """
    if name == STANDARD_INPUT:
        return OpenInput(name, _standard_input(), None, follow=follow, progress=progress, ended=ended)
    try:
        mode = Path(name).stat().st_mode
        if problem := _not_a_log(name, mode):
            raise InputError(name, problem)
        stream = Path(name).open("rb", buffering=0)  # noqa: SIM115 - closed by OpenInput
        if stat.S_ISREG(mode):
            os.pread(stream.fileno(), 1, 0)  # a file that opens but can't be read (a failing disk, a process's memory)
    except OSError as error:
        raise InputError(name, _not_there(name) if isinstance(error, FileNotFoundError) else _why(error)) from error
    except ValueError as error:  # a NUL in the name
        raise InputError(name.replace("\0", "\\0"), "that is no file name.") from error
    size = os.fstat(stream.fileno()).st_size if stat.S_ISREG(mode) else None
    return OpenInput(name, stream, size, follow=follow, progress=progress, ended=ended)


def _standard_input() -> BinaryIO:
    try:
        sys.stdin.fileno()
    except (AttributeError, OSError, ValueError) as error:
        raise InputError(STANDARD_INPUT, "there is no standard input; name a log file.") from error
    return sys.stdin.buffer


def _not_a_log(name: str, mode: int) -> str | None:
    if stat.S_ISDIR(mode):
        return f"it is a directory; name the log files in it, for example {name.rstrip('/') or '/'}/*.log"
    if stat.S_ISSOCK(mode):
        return "it is a socket, not a log; name a log file."
    if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not _is_harmless_device(name)):
        return "it is a device, not a log; name a log file."
    return None


def _is_harmless_device(name: str) -> bool:
    try:
        return (
            Path(name).resolve().as_posix() in {"/dev/null"}
            or (name in {"/dev/stdin", "/dev/fd/0"})
            or "/pts/" in os.path.realpath(name)
        )
    except OSError:
        return False


def _not_there(name: str) -> str:
    from memledger.nearest import nearest_file

    near = nearest_file(name)
    return f"there is no such file; {f'did you mean {near}?' if near else 'check the name.'}"


def _why(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "no permission to read it; run as a user who may, or make it readable."
    if isinstance(error, NotADirectoryError):
        return "a part of its path is not a directory; check the name."
    return f"it can't be read: {error.strerror or error}."


def _is_binary(head: bytes) -> bool:
    """Whether the first bytes are no text: many NULs or control characters, or mostly no UTF-8 at all."""
    if not head:
        return False
    control = len(head) - len(head.translate(None, _CONTROL))
    if control * 10 > len(head):
        return True
    broken = head.decode("utf-8", "replace").count("\N{REPLACEMENT CHARACTER}")
    return broken * 4 > len(head)
