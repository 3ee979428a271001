"""Opening a file that must be one: what is put in its place meanwhile (a pipe, a device) is refused, and never waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotAFileError(OSError):
    """It is there, and no regular file."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(None, "it is no regular file", str(path))


def descriptor_of(path: str | Path) -> int:
    """A descriptor of a regular file, to be closed by the caller.

    Asking first what is there and opening it then leaves a moment in which somebody may put a pipe there, and opening that
    waits for ever: so what was opened is asked, and the opening waits for nothing.

    Raises:
        OSError: it can't be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(path)
    return descriptor


def open_file(path: str | Path) -> BinaryIO:
    """A regular file, opened for reading.

    Raises:
        OSError: it can't be opened, or is no regular file.
    """
    return os.fdopen(descriptor_of(path), "rb")


def read_file(path: str | Path, most: int) -> bytes | None:
    """The content of a regular file; None where it has more than `most` bytes.

    Raises:
        OSError: it can't be read, or is no regular file.
    """
    with open_file(path) as stream:
        data = stream.read(most + 1)
    return data if len(data) <= most else None
