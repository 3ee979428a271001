"""Scanning ahead: helper processes find the literals of a large file's blocks, and count its lines, on other cores.

What a line means depends on the lines before it, so one reader goes through the file in order. Where the literals stand
does not: helpers, forked from the reader, take block after block from one queue and send back offsets and a line count
(a few bytes for each hit). The reader takes from the same queue whatever no helper has begun, and waits for none: a block
that a helper has not finished when all others near it are done, the reader scans itself.

What the reader gets for a block is what scanning it would have given it (`tests/test_ahead.py`), however many help.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import select
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from memledger.prefilter import Hits, Prefilter
from memledger.thin import Thinner

MOST_HELPERS: Final = 7
"""The reader's own share of the work is a tenth: more helpers than this would wait for it."""
BLOCKS_AHEAD: Final = 16
MOST_AHEAD: Final = 48
"""How far each process, and all of them, may be ahead of the reader: what they found is held until then."""
RENEWED_AFTER: Final = 256
"""Blocks after which helpers are started anew, if the reader has learnt a shape since."""

_TOKEN: Final = struct.Struct("<Q")
_FRAME: Final = struct.Struct("<QIII")
_NUMBER_BYTES: Final = array("I").itemsize
_PIPE_BYTES: Final = 2**20
_READ_BYTES: Final = 2**20


class Found(NamedTuple):
    """What is in one block: its bytes, its line ends, and its literals, their ends counted from the block's start.

    `flat` has a literal and its end in turn: a tenth of the memory of pairs.
    """

    length: int
    newlines: int
    flat: array[int]

    @property
    def hits(self) -> Hits:
        """The literals."""
        return list(zip(self.flat[::2], self.flat[1::2], strict=True))


class Block(NamedTuple):
    """Where a block lies in the file."""

    number: int
    length: int


class Ahead:
    """The blocks of one file, scanned ahead by `helpers` processes; a context manager.

    Nothing is started before the first `take`: a file whose lines have to be put together first needs no helpers.
    """

    def __init__(
        self,
        descriptor: int,
        size: int,
        block_bytes: int,
        matcher: Prefilter,
        thinner: Thinner,
        count: Callable[[bytes], int],
        *,
        helpers: int,
        longest: int,
        applies: Callable[[], bool],
    ) -> None:
        """Prepare; no process is started yet.

        Args:
            descriptor: the open file; it is read by offset, its position stays.
            size: the bytes of the file that are there.
            block_bytes: the length of every block but the last.
            matcher: finds the literals.
            thinner: takes out those that the reader needs not see.
            count: counts line ends.
            helpers: how many processes to start.
            longest: bytes of the longest literal.
            applies: whether the reader gets the file's bytes as they are; asked once, at the first `take`.
        """
        self._descriptor = descriptor
        self._size = size
        self._block_bytes = block_bytes
        self._matcher = matcher
        self._thinner: Thinner | None = thinner
        self._shapes = thinner.shapes
        self._learnt = self._forgotten = self._since = 0
        self._count = count
        self._helpers = min(helpers, MOST_HELPERS)
        self._applies = applies
        self._overlap = longest - 1
        self._ahead = min(BLOCKS_AHEAD * (self._helpers + 1), MOST_AHEAD)
        self._found: dict[int, Found] = {}
        self._results: dict[int, _Frames] = {}
        self._poll = select.poll()
        self._children: list[int] = []
        self._queue: tuple[socket.socket, socket.socket] | None = None
        self._handed_out = 0
        self._over = self._helpers < 1

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def block_at(self, offset: int, length: int) -> Block | None:
        """The block that is these bytes of the file; None where they are no block of it."""
        number, rest = divmod(offset, self._block_bytes)
        expected = min(self._block_bytes, self._size - offset)
        return Block(number, length) if not rest and length == expected and not self._over else None

    def take(self, block: Block) -> Found | None:
        """What is in a block (later ones only, each time); None: nobody has scanned it, and nobody will."""
        if self._over:
            return None
        try:
            if self._queue is not None and self._is_outdated():
                self._end()
            if self._queue is None and not self._start(block.number):
                return None
            return self._taken(block)
        except OSError:
            # A helper was killed, or the file can't be read by offset: the reader goes on alone.
            self.close()
            return None

    def close(self) -> None:
        """End the helpers for good."""
        self._over = True
        self._end()

    def _is_outdated(self) -> bool:
        """Whether the helpers do not know what they should of the shapes of lines."""
        self._since += 1
        if self._shapes.forgotten != self._forgotten:
            # What the reader does not know any more it will learn anew, perhaps otherwise: nothing is left out.
            self._forgotten = self._shapes.forgotten
            was, self._thinner = self._thinner, None
            return was is not None
        new = self._thinner is not None and self._shapes.learnt != self._learnt
        return new and self._since >= RENEWED_AFTER

    def _end(self) -> None:
        """End the helpers, and wait for them."""
        if self._queue is not None:
            for end in self._queue:
                end.close()
            self._queue = None
        for descriptor in self._results:
            os.close(descriptor)
        self._results.clear()
        self._found.clear()
        for child in self._children:
            with contextlib.suppress(ChildProcessError):  # the program that we are part of does not keep its children
                os.waitpid(child, 0)
        self._children.clear()

    # -- the reader's side

    def _taken(self, block: Block) -> Found | None:
        for passed in [number for number in self._found if number < block.number]:
            del self._found[passed]
        self._hand_out(block.number + self._ahead)
        while True:
            self._receive()
            if (found := self._found.pop(block.number, None)) is not None:
                # The file may have been written to between their reading and ours.
                return found if found.length == block.length else None
            number = self._next()
            if number is None or number == block.number:
                # Nobody has begun it; or the helper that has is slow (others use its core): not worth waiting for.
                return None
            if number > block.number:
                self._found[number] = self._scan(number)

    def _hand_out(self, stop: int) -> None:
        assert self._queue is not None
        last = -(-self._size // self._block_bytes)
        for number in range(self._handed_out, min(stop, last)):
            self._queue[0].send(_TOKEN.pack(number))
            self._handed_out = number + 1

    def _next(self) -> int | None:
        """The first block that nobody has begun; None where there is none."""
        assert self._queue is not None
        try:
            token = self._queue[1].recv(_TOKEN.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        return int(_TOKEN.unpack(token)[0])

    def _receive(self) -> None:
        """Take what the helpers sent so far."""
        for descriptor, _ in self._poll.poll(0):
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                raise BrokenPipeError("a helper ended")
            self._found.update(self._results[descriptor].add(data))

    def _scan(self, number: int) -> Found:
        start = number * self._block_bytes
        before = min(self._overlap, start)
        data = os.pread(self._descriptor, before + self._block_bytes, start - before)
        hits = self._matcher.scan(data)
        if self._thinner is not None:
            hits = self._thinner.thinned(data, before, hits)
        if before:
            hits = [(literal, end - before) for literal, end in hits if end > before]
        newlines = self._count(data) - data.count(b"\n", 0, before)
        return Found(len(data) - before, newlines, array("I", itertools.chain.from_iterable(hits)))

    def _start(self, first: int) -> bool:
        """Fork the helpers; False where that can't be done here."""
        if not (self._applies() and may_fork()):
            self._over = True
            return False
        self._handed_out = first
        self._learnt, self._forgotten, self._since = self._shapes.learnt, self._shapes.forgotten, 0
        self._poll = select.poll()
        self._queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range(self._helpers):
            try:
                self._fork()
            except OSError:  # no more processes allowed, or no memory for one
                break
        if not self._children:
            self.close()
        return bool(self._children)

    def _fork(self) -> None:
        reading, writing = os.pipe()
        _enlarge(writing)
        try:
            child = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if child == 0:
            self._help(writing, reading)
        os.close(writing)
        self._results[reading] = _Frames()
        self._poll.register(reading, select.POLLIN)
        self._children.append(child)

    # -- a helper's side

    def _help(self, writing: int, reading: int) -> NoReturn:
        """Scan block after block until the reader closes the queue; never returns."""
        status = 1
        try:
            # Ctrl-C goes to the whole group: the reader decides what it means. Its end is ours.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            gc.freeze()  # collecting what the reader has would copy its memory
            assert self._queue is not None
            self._queue[0].close()
            for other in (reading, *self._results):
                os.close(other)
            while token := self._queue[1].recv(_TOKEN.size):
                number = int(_TOKEN.unpack(token)[0])
                _write(writing, _frame(number, self._scan(number)))
            status = 0
        finally:
            # Not `sys.exit`: what the reader has in its buffers and registered for its end is the reader's.
            os._exit(status)


class _Frames:
    """Puts together what one helper sends."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> Iterator[tuple[int, Found]]:
        """The blocks that are whole now."""
        data = self._rest + data
        at = 0
        while len(data) - at >= _FRAME.size:
            number, length, newlines, count = _FRAME.unpack_from(data, at)
            stop = at + _FRAME.size + _NUMBER_BYTES * count
            if stop > len(data):
                break
            yield number, Found(length, newlines, array("I", data[at + _FRAME.size : stop]))
            at = stop
        self._rest = data[at:]


def _frame(number: int, found: Found) -> bytes:
    return _FRAME.pack(number, found.length, found.newlines, len(found.flat)) + found.flat.tobytes()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _enlarge(pipe: int) -> None:
    """Let a pipe hold the results of many blocks, where the system allows it."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def may_fork() -> bool:
    """Whether a child of this process would be a whole program: on Linux, and no other thread runs here."""
    if sys.platform != "linux":
        return False
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir()) == 1
    except OSError:
        return False


def usable_cores() -> int:
    """How many cores this process may use: its affinity, and its container's quota (cgroup v2) rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(allowed, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no quota ("max"), or no such file
        return allowed
