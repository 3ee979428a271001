"""A file written in one step: the whole of it or nothing."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write `data` to `path` through a temporary file beside it; what was there before is replaced. `mode` less the umask.

    A link is replaced, and its target left alone: in a shared folder it may be somebody else's. What is there and no
    file (a device, a pipe, a folder) is never replaced.

    Raises:
        OSError: it can't be written; the old file stays.
    """
    with replacing(path, mode=mode) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file to be written in parts; it takes the place of `path` at the end, or, where an error comes, never.

    The same holds as for `write_bytes`.

    Raises:
        OSError: it can't be written; the old file stays.
    """
    with contextlib.suppress(FileNotFoundError):
        there = path.lstat().st_mode
        if not (stat.S_ISREG(there) or stat.S_ISLNK(there)):
            raise OSError(None, "it is there and no regular file; name a file")
    handle, part = _new(path, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _new(path: Path, mode: int) -> tuple[int, Path]:
    """A new file beside `path`. Its mode is given as it is made: by name, a folder's owner could put a link there first."""
    while True:
        part = path.with_name(f".{path.name[:100]}.{os.urandom(6).hex()}.part")
        with contextlib.suppress(FileExistsError):
            return os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), part
