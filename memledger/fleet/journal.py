"""What is done, so that it is not done again: one line for each file in a journal beside the output.

A line is written as soon as its file is done. What was cut off in the middle (a killed process, a full disk) is dropped when the
journal is opened again. Names stand in it as hashes, rows with their secrets masked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from memledger import __version__
from memledger.fleet.columns import Row
from memledger.fleet.one import GOOD, Outcome, Settings, Status
from memledger.fleet.sources import File

HEAD: Final = b'{"journal":"memledger-fleet/1"}\n'
SYNC_BYTES: Final = 2**20
"""What a machine that loses power may lose; a process that is killed loses nothing."""


class JournalError(Exception):
    """The journal can't be used; the text is one sentence."""


class _Line(msgspec.Struct):
    id: str
    key: str
    status: Status
    rows: msgspec.Raw


class _Place(msgspec.Struct, frozen=True):
    offset: int
    length: int
    key: str
    good: bool


def fingerprint(settings: Settings) -> str:
    """What rows depend on beside their file: this program's version, the rules given, the card, the model's config."""
    digest = hashlib.sha256(f"{__version__}\0{settings.gpu_total}\0".encode())
    config = Path(settings.model_config) if settings.model_config else None
    if config is not None and config.is_dir():
        config = config / "config.json"
    for path in [*map(Path, settings.rule_files), *([config] if config else [])]:
        try:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()[:16]


class Journal:
    """A journal, open for this process alone: a context manager."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self._settings = fingerprint(settings)
        self._places: dict[str, _Place] = {}
        self._fresh: dict[str, _Place] = {}
        self._unsynced = 0

    def __enter__(self) -> Journal:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise JournalError(f"{self.path}: it can't be opened: {error.strerror}.") from error
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise JournalError(f"{self.path}: another memledger fleet is writing to it; name another --out.") from error
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def restart(self) -> None:
        """Forget all that was done."""
        self._places.clear()
        self._fresh.clear()
        self._file.truncate(len(HEAD))
        self._end = len(HEAD)

    def has(self, file: File, *, retry_failed: bool = False) -> bool:
        """Whether this file, as it is now, was done with these settings by this version."""
        place = self._places.get(file.identity)
        if place is None or not file.stamp or place.key != self._key(file):
            return False
        return place.good or not retry_failed

    def add(self, file: File, outcome: Outcome) -> None:
        """Keep what became of a file.

        Raises:
            JournalError: it can't be written.
        """
        line = _Line(file.identity, self._key(file), outcome.status, outcome.rows)
        data = msgspec.json.encode(line) + b"\n"
        try:
            os.pwrite(self._file.fileno(), data, self._end)
            self._unsynced += len(data)
            if self._unsynced >= SYNC_BYTES:
                os.fsync(self._file.fileno())
                self._unsynced = 0
        except OSError as error:
            raise JournalError(f"{self.path}: it can't be written: {error.strerror}.") from error
        self._fresh[file.identity] = _Place(self._end, len(data), line.key, outcome.status in GOOD)
        self._end += len(data)

    def rows(self, file: File) -> list[Row] | None:
        """The rows of a file; None where it is not done."""
        place = self._fresh.get(file.identity)
        if place is None and self.has(file):
            place = self._places[file.identity]
        if place is None:
            return None
        line = msgspec.json.decode(os.pread(self._file.fileno(), place.length, place.offset), type=_Line)
        rows: list[Row] = msgspec.json.decode(line.rows, type=list[Row])
        return rows

    def _key(self, file: File) -> str:
        return f"{self._settings}:{hashlib.sha256(file.stamp.encode()).hexdigest()[:24]}" if file.stamp else ""

    def _open(self) -> None:
        self._file.seek(0)
        with os.fdopen(os.dup(self._file.fileno()), "rb") as reader:
            head = reader.readline()
            if head and head != HEAD and HEAD.startswith(head):
                head = b""  # cut off in its first line
            if head not in {b"", HEAD}:
                raise JournalError(f"{self.path}: it is there and no journal of memledger fleet; name another --out.")
            self._end = len(HEAD)
            if head:
                self._index(reader)
        if not head:
            os.pwrite(self._file.fileno(), HEAD, 0)
        self._file.truncate(self._end)

    def _index(self, reader: object) -> None:
        decoder = msgspec.json.Decoder(_Line)
        for data in reader:  # type: ignore[attr-defined]
            try:
                line = decoder.decode(data)
            except msgspec.DecodeError:
                return
            if not data.endswith(b"\n"):
                return
            self._places[line.id] = _Place(self._end, len(data), line.key, line.status in GOOD)
            self._end += len(data)
