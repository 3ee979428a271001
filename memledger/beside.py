"""Reading several files beside each other: forked processes, each of which takes file after file.

What a file holds does not depend on the others, so it does not matter who reads it: what comes back is put in the order in
which the files were named. A file that a process did not bring back (it was killed, or the file can't be read) is left to
the caller, who then says why.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from memledger.ahead import may_fork, usable_cores
from memledger.sources import InputError

if TYPE_CHECKING:
    from memledger.pipeline import ReadInput

WORTH_IT: Final = 8 * 2**20
"""Bytes of all files from which starting processes (some milliseconds each) is worth it."""
LARGEST: Final = 64 * 2**20
"""Larger files are read one after the other, each with helpers that scan ahead: one that is left for last has no company."""
MOST_PROCESSES: Final = 32

_TOKEN: Final = struct.Struct("<I")
_FRAME: Final = struct.Struct("<IQ")
_READ_BYTES: Final = 2**20

One = Callable[[str, int], "ReadInput"]
"""Reads a file: its name, and its place among the inputs."""


def read(names: Sequence[str], one: One, cores: int | None) -> dict[tuple[str, int], ReadInput]:
    """What was read of the files, by name and place; those that are missing are the caller's to read.

    Args:
        names: the inputs in order; only where all of them are files, none too large, is anything read.
        one: reads one of them.
        cores: how many processes; None: as many as this process has cores.
    """
    processes = min(cores or usable_cores(), len(names), MOST_PROCESSES)
    if processes < 2 or not _is_worth_it(names) or not may_fork():
        return {}
    # What every process would import for itself.
    import memledger.frameworks.sglang
    import memledger.frameworks.vllm  # noqa: F401

    gc.freeze()  # collecting what the caller has would copy its memory in each process
    queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    children: dict[int, int] = {}
    try:
        for _ in range(processes):
            reading, writing = os.pipe()
            child = _forked(writing)
            if child == 0:
                _help(names, one, queue, writing, (reading, *children))
            os.close(writing)
            children[reading] = child
            if child < 0:
                break
        queue[1].close()
        found = _gathered(len(names), queue[0], list(children))
    finally:
        gc.unfreeze()
        for end in queue:
            end.close()
        for reading, child in children.items():
            os.close(reading)
            if child > 0:
                _end(child)
    return {(names[index], index): what for index, what in found.items()}


def _is_worth_it(names: Sequence[str]) -> bool:
    sizes = []
    for name in names:
        try:
            file = Path(name)
            if name == "-" or not file.is_file():
                return False
            sizes.append(file.stat().st_size)
        except (OSError, ValueError):
            return False
    return sum(sizes) >= WORTH_IT and max(sizes) <= LARGEST


def _forked(writing: int) -> int:
    try:
        return os.fork()
    except OSError:  # no more processes allowed, or no memory for one
        return -1


def _gathered(count: int, queue: socket.socket, pipes: list[int]) -> dict[int, ReadInput]:
    """Hand out the files in order, and take what comes back until every process has ended."""
    import fcntl

    found: dict[int, ReadInput] = {}
    rest = dict.fromkeys(pipes, b"")
    queue.setblocking(False)
    handed_out = 0
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_NONBLOCK)
            selector.register(pipe, selectors.EVENT_READ)
        selector.register(queue, selectors.EVENT_WRITE)
        while rest:
            for key, _ in selector.select():
                if key.fileobj is queue:
                    if handed_out < count and _handed(queue, handed_out):
                        handed_out += 1
                    if handed_out == count:
                        selector.unregister(queue)
                        queue.close()  # who finds nothing more ends
                    continue
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    selector.unregister(key.fd)
                    del rest[key.fd]
                    if not rest:
                        break
                    continue
                rest[key.fd] = _take(rest[key.fd] + data, found)
    return found


def _handed(queue: socket.socket, index: int) -> bool:
    try:
        queue.send(_TOKEN.pack(index))
    except (BlockingIOError, BrokenPipeError):
        return False
    return True


def _take(data: bytes, found: dict[int, ReadInput]) -> bytes:
    """Put the frames that are whole into `found`; gives back the rest."""
    at = 0
    while len(data) - at >= _FRAME.size:
        index, size = _FRAME.unpack_from(data, at)
        stop = at + _FRAME.size + size
        if stop > len(data):
            break
        # From a process of our own, forked above.
        found[index] = pickle.loads(data[at + _FRAME.size : stop])
        at = stop
    return data[at:]


def _end(child: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the program that we are part of does not keep its children
        os.waitpid(child, 0)


def _help(
    names: Sequence[str], one: One, queue: tuple[socket.socket, socket.socket], writing: int, others: Sequence[int]
) -> NoReturn:
    """Read file after file until there are no more; never returns."""
    status = 1
    try:
        # Ctrl-C goes to the whole group: the caller decides what it means. Its end is ours.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        queue[0].close()
        for other in others:
            os.close(other)
        while token := queue[1].recv(_TOKEN.size):
            (index,) = _TOKEN.unpack(token)
            with contextlib.suppress(InputError):
                what = pickle.dumps(one(names[index], index), pickle.HIGHEST_PROTOCOL)
                _write(writing, _FRAME.pack(index, len(what)) + what)
        status = 0
    finally:
        # Not `sys.exit`: what the caller has in its buffers and registered for its end is the caller's.
        os._exit(status)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
