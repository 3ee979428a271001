"""Which files a fleet is: folders, patterns, URLs and lists, each file once, in one order."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from memledger.fleet.one import Work, is_remote


class File(msgspec.Struct, frozen=True, order=True):
    """One file: absolute path or URL; `stamp` changes when its content does, and is empty where nothing is known of it."""

    name: str
    size: int | None = None
    stamp: str = ""

    @property
    def work(self) -> Work:
        """What an engine is given."""
        return Work(self.name, self.size)

    @property
    def identity(self) -> str:
        """The file's name as a key: no secret of a URL is kept with it."""
        return hashlib.sha256(os.fsencode(self.name)).hexdigest()[:32]


class Choice(msgspec.Struct, frozen=True):
    """Patterns on the last part of the names that a folder or URL lists; all are taken where none includes."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Whether a listed file is one of the fleet's."""
        base = name.partition("::")[0].rpartition("/")[2]
        if base.startswith(".") or any(fnmatch.fnmatchcase(base, pattern) for pattern in self.exclude):
            return False
        return not self.include or any(fnmatch.fnmatchcase(base, pattern) for pattern in self.include)


class Found(msgspec.Struct, frozen=True):
    """All files, sorted by name, and one sentence for each source that gave none."""

    files: tuple[File, ...]
    problems: tuple[str, ...]


def find(sources: Iterable[str], choice: Choice, without: Collection[Path] = ()) -> Found:
    """Every file of the sources once. `without`: files and folders of our own, which may stand in a source."""
    own = tuple(os.path.realpath(path) for path in without)
    files: dict[str, File] = {}
    problems: list[str] = []
    for source in sources:
        found = list(_remote(source, choice, problems) if is_remote(source) else _local(source, choice, problems))
        for file in found:
            if not _is_own(file.name, own):
                files.setdefault(file.name, file)
    return Found(tuple(sorted(files.values(), key=lambda file: os.fsencode(file.name))), tuple(problems))


def listed(text: str) -> list[str]:
    """The sources of a list: one a line; empty lines and those that begin with # are passed over."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _is_own(name: str, own: tuple[str, ...]) -> bool:
    if not own or is_remote(name):
        return False
    real = os.path.realpath(name)
    return any(real == path or real.startswith(f"{path}{os.sep}") for path in own)


def _remote(source: str, choice: Choice, problems: list[str]) -> Iterator[File]:
    from memledger.fleet.remote import RemoteError, listing

    try:
        found = listing(source)
    except RemoteError as error:
        problems.append(f"{source}: {error}")
        return
    several = len(found) != 1 or found[0].name != source
    taken = [one for one in found if not several or choice.takes(one.name)]
    if not taken:
        problems.append(f"{source}: no files there.")
    yield from (File(one.name, one.size, f"{one.size}:{one.stamp}" if one.stamp else "") for one in taken)


def _local(source: str, choice: Choice, problems: list[str]) -> Iterator[File]:
    path = os.path.abspath(source)  # noqa: PTH100 - Path.absolute keeps `..`
    if os.path.isdir(path):  # noqa: PTH112 - a source may be anything, also what Path refuses
        yield from _folder(path, choice, problems)
    elif os.path.lexists(path) or not glob.has_magic(source):
        yield _file(path)  # what is not there becomes a row that says so
    else:
        yield from _pattern(source, path, choice, problems)


def _folder(path: str, choice: Choice, problems: list[str]) -> Iterator[File]:
    count = 0
    refused: list[str] = []
    for folder, folders, names in os.walk(
        path, onerror=lambda error: refused.append(f"{error.filename}: {error.strerror}.")
    ):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if choice.takes(name) and (file := _file(os.path.join(folder, name))).stamp:  # noqa: PTH118
                count += 1
                yield file
    problems += refused
    if not count and not refused:
        problems.append(f"{path}: no files in this folder (hidden ones are passed over).")


def _pattern(source: str, path: str, choice: Choice, problems: list[str]) -> Iterator[File]:
    matched = [name for name in glob.iglob(path, recursive=True) if not os.path.isdir(name)]  # noqa: PTH112, PTH207
    taken = [name for name in matched if choice.takes(name)]
    if not taken:
        problems.append(f"{source}: no file matches.")
    yield from map(_file, taken)


def _file(path: str) -> File:
    """A local file; without a stamp where it is no regular file, or can't be looked at: it is tried, and tried again next time."""
    try:
        there = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return File(path)
    if not stat.S_ISREG(there.st_mode):
        return File(path)
    return File(path, there.st_size, f"{there.st_size}:{there.st_mtime_ns}")
