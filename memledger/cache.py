"""What takes long to prepare and is always the same (parsed rule files, compiled literals), kept between starts.

The cache is a convenience: it is keyed by the content that it was made from, never trusted if somebody else could have
written it, and left alone where it can't be written. `MEMLEDGER_CACHE` names another folder; empty switches it off.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

MOST_FILES: Final = 16
_DIGEST_BYTES: Final = 20
_GROUP_OR_WORLD_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


def key_of(*parts: bytes | str) -> str:
    """A name for content: the same for the same parts."""
    digest = _blake2b()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return str(digest.hexdigest())


def _blake2b() -> Any:
    # `hashlib` loads OpenSSL: 3 ms of every start for a digest that Python has built in.
    try:
        from _blake2 import blake2b
    except ImportError:
        from hashlib import blake2b
    return blake2b(digest_size=_DIGEST_BYTES)


def _digest(content: bytes) -> bytes:
    digest = _blake2b()
    digest.update(content)
    return bytes(digest.digest())


def cached(kind: str, key: str, make: Callable[[], bytes]) -> bytes:
    """What `make` gives, from the cache where an earlier start left it there."""
    place = folder()
    if place is None:
        return make()
    name = f"{kind}-{key}"
    found = _read(place, name)
    if found is not None:
        return found
    made = make()
    _write(place, name, made)
    return made


def folder() -> Path | None:
    """Where the cache is; None where it is switched off, or there is no place for it."""
    named = os.environ.get("MEMLEDGER_CACHE")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    place = Path(base) if base else Path(home, ".cache")
    return place / "memledger" if place.is_absolute() else None


def is_trusted(place: Path) -> bool:
    """Whether only we can have written what is in the folder."""
    try:
        status = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and _is_ours(status)


def _read(place: Path, name: str) -> bytes | None:
    """The file's content, if it is whole and only we can have written it."""
    try:
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not _is_ours(os.fstat(folder)):
            return None
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                return None
            data = stream.read()
    except OSError:
        return None
    finally:
        os.close(folder)
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return content if _digest(content) == digest else None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _GROUP_OR_WORLD_WRITABLE


def _write(place: Path, name: str, content: bytes) -> None:
    """Leave the content for the next start; nothing is said where that can't be done.

    Everything is done in the folder that was looked at, by its descriptor: by name, who owns the folder above could put
    a link to any other folder in its place.
    """
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if _is_ours(os.fstat(folder)):
            _leave(folder, name, content)
            _forget_old(folder)
    except OSError:
        return
    finally:
        os.close(folder)


def _leave(folder: int, name: str, content: bytes) -> None:
    unfinished = f"{name}.{os.getpid()}"
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(unfinished, how, 0o600, dir_fd=folder), "wb") as stream:
        stream.write(_digest(content) + content)
    os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)


def _forget_old(folder: int) -> None:
    """Keep the newest files only: each version of the program and each rule file of the user's leaves one."""
    with os.scandir(folder) as entries:
        files = [(e.stat(follow_symlinks=False).st_mtime, e.name) for e in entries if e.is_file(follow_symlinks=False)]
    for _, name in sorted(files, reverse=True)[MOST_FILES:]:
        os.unlink(name, dir_fd=folder)
