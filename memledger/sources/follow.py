"""An input that grows: wait for more, notice truncation and rotation of a file."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from memledger.opening import descriptor_of

WAIT_SECONDS: Final = 0.25


def never() -> bool:
    """For an input that nobody ends early."""
    return False


def growing(
    path: Path,
    stream: BinaryIO,
    block_bytes: int,
    note: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
    ended: Callable[[], bool] = never,
) -> Iterator[bytes]:
    """The file's bytes until `ended` says so. An empty block each time there is nothing new.

    A file cut to nothing is read again from its start; a file moved away (log rotation) is read to its end, then its
    successor is read.
    """
    descriptor = stream.fileno()
    own: int | None = None
    last = b"\n"
    idle = False
    try:
        while not ended():
            if block := os.read(descriptor, block_bytes):
                last = block[-1:]
                idle = False
                yield block
                continue
            if _was_cut(descriptor):
                note("it was cut while it was read; reading goes on from its start.")
                os.lseek(descriptor, 0, os.SEEK_SET)
                if last != b"\n":
                    yield b"\n"
                continue
            successor = _successor(path, descriptor)
            if successor is not None:
                # What was written between the last read and the move.
                while block := os.read(descriptor, block_bytes):
                    last = block[-1:]
                    yield block
                note("it was rotated while it was read; reading goes on in its successor.")
                if last != b"\n":
                    yield b"\n"
                    last = b"\n"
                if own is not None:
                    os.close(own)
                own = descriptor = successor
                continue
            if not idle:
                idle = True
                yield b""
            wait(WAIT_SECONDS)
    finally:
        if own is not None:
            os.close(own)


def arriving(
    descriptor: int,
    block_bytes: int,
    wait: Callable[[float], None] = time.sleep,
    ended: Callable[[], bool] = never,
) -> Iterator[bytes]:
    """A pipe's bytes to its end, or until `ended` says so. An empty block each time there is nothing new."""
    idle = False
    while not ended():
        if not has_more(descriptor):
            if not idle:
                idle = True
                yield b""
            wait(WAIT_SECONDS)
            continue
        block = os.read(descriptor, block_bytes)
        if not block:
            return
        idle = False
        yield block


def has_more(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether reading would give something (or the end) at once, or within some seconds."""
    return bool(select.select([descriptor], [], [], seconds)[0])


def _was_cut(descriptor: int) -> bool:
    return os.fstat(descriptor).st_size < os.lseek(descriptor, 0, os.SEEK_CUR)


def _successor(path: Path, descriptor: int) -> int | None:
    """Another file under the same name, opened; None while there is none."""
    try:
        now = path.stat()
        here = os.fstat(descriptor)
        if (now.st_ino, now.st_dev) == (here.st_ino, here.st_dev):
            return None
        return descriptor_of(path)
    except OSError:
        return None
