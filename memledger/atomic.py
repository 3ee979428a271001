"""A file written in one step: the whole of it or nothing."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write `data` to `path` through a temporary file beside it; what was there before is replaced.

    A link is replaced, and its target left alone: in a shared folder it may be somebody else's. What is there and no
    file (a device, a pipe, a folder) is never replaced.

    Raises:
        OSError: it can't be written; the old file stays.
    """
    with contextlib.suppress(FileNotFoundError):
        there = path.lstat().st_mode
        if not (stat.S_ISREG(there) or stat.S_ISLNK(there)):
            raise OSError(None, "it is there and no regular file; name a file")
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
