"""Everything that was sampled, with the log's report, in one JSON file: `memledger explain FILE.json` gives the same report elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from memledger import foreign
from memledger.atomic import write_bytes
from memledger.ledger import Report
from memledger.live.sample import Sample
from memledger.opening import read_file
from memledger.sanitize import clean

SCHEMA: Final = "memledger-snapshot/1"
LARGEST: Final = 256 * 2**20
"""Bytes of a file that is read as a snapshot at most."""


class SnapshotError(Exception):
    """A snapshot can't be written, or can't be read; one sentence."""


class Snapshot(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """`report` is the log's, complete but without the machine's rows: they are made anew from `sample`.

    `kind` is the command that wrote it; `command` stands where the report's advice repeats the command line.
    """

    schema_: str
    version: str
    sample: Sample
    kind: Literal["explain", "ps", "doctor"] = "explain"
    report: Report | None = None
    pid: int | None = None
    own_log: bool = False
    built: bool = False
    command: str = "memledger explain"
    unreadable_processes: int = 0


def encode(snapshot: Snapshot) -> bytes:
    """The file's content: the schema first, every text cleaned and masked."""
    plain = masked(msgspec.to_builtins(snapshot))
    ordered = {"schema": SCHEMA, **{k: v for k, v in plain.items() if k != "schema"}}
    return msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n"


def masked(value: Any) -> Any:
    """Every text cleaned once more: nothing that a log, a process or a server said leaves the machine unmasked."""
    if isinstance(value, str):
        return clean(value.encode("utf-8", "replace").decode(), 32_000)
    if isinstance(value, dict):
        return {_key(k): masked(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(v) for v in value]
    return value


def _key(key: Any) -> Any:
    return clean(key, 400) if isinstance(key, str) else key


def write(path: Path, snapshot: Snapshot) -> None:
    """Write the file in one step (the whole of it or nothing), readable by its owner only.

    Raises:
        SnapshotError: it can't be written.
    """
    try:
        write_bytes(path, encode(snapshot), mode=0o600)
    except OSError as error:
        raise SnapshotError(
            f"the snapshot can't be written to {clean(str(path))}: {error.strerror or error}"
        ) from error


def read(path: str) -> Snapshot:
    """A snapshot from a file.

    Raises:
        SnapshotError: the file is not one that this version reads.
    """
    shown = clean(path)
    try:
        data = read_file(path, LARGEST)
        if data is None:
            raise SnapshotError(f"{shown}: larger than any snapshot ({LARGEST >> 20} MiB)")
        # It may be somebody else's file: no text of it is shown as it stands.
        document = masked(msgspec.json.decode(data))
        snapshot = msgspec.convert(document, Snapshot)
    except OSError as error:
        raise SnapshotError(f"{shown}: can't be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(
            f"{shown}: a snapshot that is cut off or of another form: {clean(str(error), 200)}"
        ) from error
    if snapshot.schema_ != SCHEMA:
        raise SnapshotError(
            f"{shown}: a snapshot of another version ({clean(snapshot.schema_, 60)}); this memledger reads {SCHEMA}"
        )
    if (why := foreign.problem(document, snapshot.report)) is not None:
        raise SnapshotError(f"{shown}: a snapshot that can't be shown: {why}")
    return snapshot
