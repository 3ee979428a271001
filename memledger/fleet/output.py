"""The rows on disk: a Parquet file and JSON lines, written in parts and put in place whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from memledger.atomic import replacing
from memledger.extras import install_command
from memledger.fleet.columns import COLUMNS, Column, Row

GROUP_ROWS: Final = 16_384
"""Rows of one Parquet row group: what is in memory at once, and the same whatever engine read the files."""
_LINES: Final = 512
FOLDER_NAMES: Final = ("ranks.parquet", "ranks.jsonl", "journal.jsonl")


class MissingExtraError(Exception):
    """pyarrow is not installed; the text is one sentence with the command that installs it."""


class Places(msgspec.Struct, frozen=True):
    """The files of an output."""

    parquet: Path
    lines: Path
    journal: Path

    @property
    def all(self) -> tuple[Path, Path, Path]:
        """All of them."""
        return self.parquet, self.lines, self.journal


def places(out: Path) -> Places:
    """The files for `--out`: in a folder, or beside a `.parquet` file, which is named."""
    if out.suffix == ".parquet":
        return Places(out, out.with_suffix(".jsonl"), out.with_suffix(".journal.jsonl"))
    parquet, lines, journal = (out / name for name in FOLDER_NAMES)
    return Places(parquet, lines, journal)


def require(extra: str = "fleet") -> None:
    """Refuse before anything is read where Parquet can't be written; `extra` is the one that has all that is asked for.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"a fleet's rows are written with pyarrow: {install_command(extra)}") from error


def schema() -> Any:
    """The Parquet schema (a `pyarrow.Schema`); each column carries its unit and meaning as metadata."""
    import pyarrow as pa

    kinds = {
        "int": pa.int64(),
        "float": pa.float64(),
        "text": pa.string(),
        "texts": pa.list_(pa.string()),
        "bool": pa.bool_(),
    }

    def field(column: Column) -> Any:
        notes = {"unit": column.unit, "meaning": column.meaning}
        return pa.field(column.name, kinds[column.kind], metadata={k: v for k, v in notes.items() if v})

    return pa.schema([field(column) for column in COLUMNS], metadata={"schema": "memledger-fleet/1"})


def write(places: Places, rows: Iterable[Row]) -> int:
    """Write all rows to both files; how many there were.

    Raises:
        OSError: they can't be written; what was there before stays.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    form = schema()
    count = 0
    with (
        replacing(places.parquet) as binary,
        replacing(places.lines) as text,
        pq.ParquetWriter(binary, form, compression="zstd") as parquet,
    ):
        for group in _groups(_whole(row) for row in rows):
            parquet.write_table(pa.Table.from_pylist(group, schema=form), row_group_size=GROUP_ROWS)
            _write_lines(text, group)
            count += len(group)
        if not count:
            parquet.write_table(form.empty_table())
    return count


def _whole(row: Row) -> Row:
    return {column.name: row.get(column.name) for column in COLUMNS}


def _groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        group.append(row)
        if len(group) == GROUP_ROWS:
            yield group
            group = []
    if group:
        yield group


def _write_lines(file: BinaryIO, rows: list[Row]) -> None:
    encoder = msgspec.json.Encoder()
    for start in range(0, len(rows), _LINES):
        file.write(encoder.encode_lines(rows[start : start + _LINES]))


def prepare(places: Places) -> None:
    """Make the folder, and refuse what can't be written before anything is read.

    Raises:
        OSError: the folder can't be made.
    """
    with contextlib.suppress(FileExistsError):
        places.parquet.parent.mkdir(parents=True)
    if not places.parquet.parent.is_dir():
        raise NotADirectoryError(20, "it is there and no folder; name a folder, or a file that ends in .parquet")
