"""The rows on disk: typed, in parts, whole or not at all."""

import json

import pytest
from fleet_logs import parquet

from memledger.fleet import output
from memledger.fleet.columns import COLUMNS
from memledger.fleet.output import places, write

ROWS = [
    {"file": f"/logs/{n}.log", "status": "ok", "kv_tokens": n, "latest": True, "findings": ["ML101"]} for n in range(5)
]


def test_parts_are_one_table_and_unknown_is_null(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "GROUP_ROWS", 2)
    where = places(tmp_path)
    assert write(where, iter(ROWS)) == 5
    file = parquet().ParquetFile(where.parquet)
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [2, 2, 1]
    whole = [{**dict.fromkeys(c.name for c in COLUMNS), **row} for row in ROWS]
    assert file.read().to_pylist() == whole
    assert [json.loads(line) for line in where.lines.read_text().splitlines()] == whole


def test_no_rows_are_an_empty_table_with_its_columns(tmp_path):
    assert write(places(tmp_path), []) == 0
    assert parquet().read_table(tmp_path / "ranks.parquet").column_names == [c.name for c in COLUMNS]
    assert (tmp_path / "ranks.jsonl").read_bytes() == b""


def test_an_end_in_the_middle_leaves_what_was_there(tmp_path):
    where = places(tmp_path)
    write(where, ROWS)
    before = [path.read_bytes() for path in (where.parquet, where.lines)]

    def broken():
        yield ROWS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(where, broken())
    assert [path.read_bytes() for path in (where.parquet, where.lines)] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks.jsonl", "ranks.parquet"]


def test_every_column_says_its_meaning_in_the_file(tmp_path):
    write(places(tmp_path), ROWS)
    schema = parquet().read_schema(tmp_path / "ranks.parquet")
    for column in COLUMNS:
        assert schema.field(column.name).metadata[b"meaning"].decode() == column.meaning
