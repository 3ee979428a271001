"""One row per rank, with the figures of the reports: nothing is counted twice, nothing unknown is zero."""

from pathlib import Path

import msgspec
import pytest
from fleet_logs import DEMO, FIXTURES

from memledger import pipeline
from memledger.conclude import complete
from memledger.fleet import columns, one
from memledger.fleet.columns import COLUMNS, NAMES, TOP_ACCOUNTS
from memledger.fleet.one import Settings, Work
from memledger.fleet.rows import failed, latest_starts

DOC = Path(__file__).parent.parent / "docs" / "fleet.md"
LOGS = sorted(FIXTURES.glob("*/*.log"))


def rows_of(path, **settings):
    found = one.read(Work(str(path), Path(path).stat().st_size), Settings(**settings))
    return found.status, msgspec.json.decode(found.rows)


@pytest.fixture(scope="module")
def all_rows():
    return {path: rows_of(path)[1] for path in LOGS}


def test_accounts_and_residual_sum_to_the_opening_on_every_rank(all_rows):
    judged = 0
    for path, rows in all_rows.items():
        for row in rows:
            if "residual_bytes" in row:
                held = sum(row.get(f"{name}_bytes", 0) for name in TOP_ACCOUNTS)
                assert held + row["residual_bytes"] == row["opening_bytes"], path
                judged += 1
    assert judged > 50


def test_a_row_has_no_column_that_is_not_documented_and_values_of_its_type(all_rows):
    types = {"int": int, "float": (int, float), "text": str, "texts": list, "bool": bool}
    kinds = {column.name: types[column.kind] for column in COLUMNS}
    for rows in all_rows.values():
        for row in rows:
            for name, value in row.items():
                assert isinstance(value, kinds[name]), name
                assert kinds[name] is bool or not isinstance(value, bool), name


def test_there_is_a_row_for_each_rank_of_each_start(all_rows):
    for path, rows in all_rows.items():
        report = pipeline.explain([str(path)])
        ranks = [(i + 1, r.label) for i, s in enumerate(report.servers) for r in s.ranks]
        assert [(row["start"], row["rank"]) for row in rows if "rank" in row] == ranks


def test_idle_state_and_unused_kv_are_those_of_the_findings():
    def both(path, code):
        found = {f.code: f.bytes for f in complete(pipeline.explain([str(path)]), None).servers[0].findings}
        row = rows_of(path)[1][0]
        assert row["findings"] == sorted(found)
        return found[code], row

    idle, row = both(DEMO, "ML101")
    assert row["idle_state_bytes"] == idle > 0
    assert row["state_slots"] == 124
    assert row["state_slots_needed"] == 15
    unused, row = both(FIXTURES / "two-servers-at-once" / "server.log", "ML505")
    assert row["kv_never_used_bytes"] == unused > 0


def test_what_the_log_does_not_tell_is_no_zero(tmp_path):
    text = DEMO.read_text()
    short = tmp_path / "short.log"
    short.write_text(text[: min(text.index("Decode batch"), text.index("Prefill batch"))].rpartition("\n")[0] + "\n")
    _, rows = rows_of(short)
    assert rows[0]["kv_pool_bytes"] > 0
    assert not {"kv_never_used_bytes", "idle_state_bytes", "kv_peak_usage"} & set(rows[0])


def test_incidents_stand_with_their_start(all_rows):
    rows = all_rows[FIXTURES / "oom-vllm-prefill" / "server.log"]
    assert [row["oom_kinds"] for row in rows] == [["prefill"]]


def test_an_incident_of_no_server_has_a_row_of_its_own(tmp_path):
    kernel = tmp_path / "dmesg.txt"
    kernel.write_text(
        "[ 8123.123456] Out of memory: Killed process 4242 (python) total-vm:99999999kB, anon-rss:52428800kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:9kB oom_score_adj:0\n"
    )
    status, rows = rows_of(kernel)
    assert status == "ok"
    assert [(row.get("start"), row["oom_kinds"]) for row in rows] == [(None, ["host_memory"])]


def test_a_pool_shared_with_recurrent_state_is_whole_for_what_was_never_used(all_rows):
    row = all_rows[FIXTURES / "vllm-0.25-hybrid-known-model" / "server.log"][0]
    assert row["recurrent_state_bytes"] > 0
    assert row["kv_pool_bytes"] > row["kv_cache_bytes"]


def test_the_last_start_that_holds_pools_counts():
    report = pipeline.explain([str(FIXTURES / "sglang-restart-loop" / "server.log")])
    assert len(report.servers) > 1
    latest = latest_starts(report.servers)
    assert latest == {len(report.servers) - 1} or all(
        not any(e.account.startswith("kv_cache") for r in s.ranks for e in r.entries)
        for s in report.servers[max(latest) + 1 :]
    )


def test_secrets_of_names_and_errors_are_masked():
    (row,) = failed(
        "s3://user:hunter2hunter2@bucket/a.log", 5, "unreadable", "api_key=abcdefgh12345678 was refused\x1b[2J"
    )
    assert "hunter2" not in row["file"]
    assert "abcdefgh" not in row["error"]
    assert "\x1b" not in row["error"]


def test_a_figure_beyond_64_bits_is_no_figure():
    (row,) = failed("a.log", 2**64, "unreadable", "why")
    assert "file_bytes" not in row


def test_what_is_no_log_is_a_row_that_says_what_it_looks_like(tmp_path):
    (tmp_path / "a.log").write_text("nothing to see\n" * 10)
    status, rows = rows_of(tmp_path / "a.log")
    assert status == "nothing_recognised"
    assert "nothing of SGLang or vLLM" in rows[0]["error"]


def test_a_log_that_breaks_off_is_read_in_part(tmp_path):
    import gzip

    whole = gzip.compress(DEMO.read_bytes())
    (tmp_path / "a.log.gz").write_bytes(whole[: len(whole) * 3 // 4])
    status, rows = rows_of(tmp_path / "a.log.gz")
    assert status == "partial"
    assert "ends too early" in rows[0]["error"]
    assert rows[0]["weights_bytes"] > 0


def test_the_columns_in_docs_are_current(update_golden):
    text = DOC.read_text(encoding="utf-8")
    start, end = text.index("| column |"), text.index("\n\n", text.index("| column |")) + 1
    if update_golden:
        DOC.write_text(text[:start] + columns.document() + text[end:], encoding="utf-8")
        text = DOC.read_text(encoding="utf-8")
        end = text.index("\n\n", start) + 1
    assert text[start:end] == columns.document(), "pytest --update-golden writes it anew"


def test_names_of_columns_are_unique():
    assert len(NAMES) == len(COLUMNS)
