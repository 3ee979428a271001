"""`memledger fleet`: many logs in, one row per rank and the worst of them out; interrupted, killed, resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from fleet_logs import DEMO, log, parquet, write_logs

from memledger.cli import app
from memledger.fleet import output
from memledger.fleet.columns import COLUMNS
from memledger.report.fleet_json import schema, schema_text

SCHEMA_FILE = Path(__file__).parent.parent / "docs" / "schema" / "fleet.schema.json"
PATIENCE = 120
"""Seconds that a condition is waited for: far beyond what a loaded machine takes."""


def run(capfd, *arguments):
    code = app.run(["fleet", *map(str, arguments)])
    out, err = capfd.readouterr()
    return code, out, err


def report(capfd, *arguments):
    code, out, err = run(capfd, *arguments, "--format", "json")
    return code, json.loads(out), err


def lines(out):
    return [json.loads(line) for line in (out / "ranks.jsonl").read_text().splitlines()]


def test_rows_of_all_logs_stand_in_parquet_and_in_json_lines(tmp_path, capfd):
    write_logs(tmp_path / "logs", 3)
    out = tmp_path / "out"
    code, found, err = report(capfd, tmp_path / "logs", "--out", out)
    assert (code, err) == (app.DONE, "")
    table = parquet().read_table(out / "ranks.parquet")
    assert table.schema.equals(output.schema(), check_metadata=False)
    assert table.schema.field("kv_pool_bytes").metadata[b"unit"] == b"bytes"
    assert table.to_pylist() == lines(out)
    assert [row["weights_bytes"] for row in lines(out)] == [(10 + n) * 2**30 for n in range(3)]
    assert [list(row) for row in lines(out)] == [[c.name for c in COLUMNS]] * 3
    assert found["outputs"] == {
        "parquet": str(out / "ranks.parquet"), "json_lines": str(out / "ranks.jsonl"), "rows": 3
    }  # fmt: skip
    jsonschema.Draft202012Validator(schema()).validate(found)


def test_the_schema_in_docs_is_current(update_golden):
    if update_golden:
        SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "pytest --update-golden writes it anew"


def test_what_is_done_is_not_done_again_and_what_changed_is(tmp_path, capfd):
    paths = write_logs(tmp_path / "logs", 3)
    asked = (tmp_path / "logs", "--out", tmp_path / "out", "--workers", 1)
    _, first, _ = report(capfd, *asked)
    assert (first["read"], first["kept"]) == (3, 0)
    before = (tmp_path / "out" / "ranks.parquet").read_bytes()
    _, again, _ = report(capfd, *asked)
    assert (again["read"], again["kept"]) == (0, 3)
    assert (tmp_path / "out" / "ranks.parquet").read_bytes() == before
    paths[1].write_text(log(30))
    (tmp_path / "logs" / "new.log").write_text(log(8))
    _, changed, _ = report(capfd, *asked)
    assert (changed["read"], changed["kept"]) == (2, 2)
    assert [row["weights_bytes"] // 2**30 for row in lines(tmp_path / "out")] == [10, 40, 12, 18]
    _, anew, _ = report(capfd, *asked, "--restart")
    assert (anew["read"], anew["kept"]) == (4, 0)


def test_what_can_not_be_read_is_a_row_and_no_end(tmp_path, capfd):
    (good,) = write_logs(tmp_path / "logs", 1)
    (tmp_path / "logs" / "picture.png").write_bytes(b"\x89PNG" + bytes(range(256)) * 40)
    code, out, _ = run(capfd, good.parent, tmp_path / "gone.log", "--out", tmp_path / "out")
    assert code == app.DONE
    assert "3 logs: 1 with nothing of SGLang or vLLM, 1 read, 1 not readable" in " ".join(out.split())
    assert f"{tmp_path}/gone.log: there is no such file" in " ".join(out.split())
    rows = {Path(row["file"]).name: row for row in lines(tmp_path / "out")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "000.log": "ok", "gone.log": "unreadable", "picture.png": "nothing_recognised"
    }  # fmt: skip
    assert "there is no such file" in rows["gone.log"]["error"]
    assert rows["gone.log"]["weights_bytes"] is None


def test_a_file_that_could_not_be_read_is_tried_again(tmp_path, capfd):
    missing = tmp_path / "late.log"
    asked = (missing, "--out", tmp_path / "out", "--workers", 1)
    code, found, _ = report(capfd, *asked)
    assert (code, found["fleet"]["statuses"]) == (app.UNREADABLE, {"unreadable": 1})
    missing.write_text(log(1))
    code, found, _ = report(capfd, *asked)
    assert (code, found["fleet"]["statuses"]) == (app.DONE, {"ok": 1})


def test_exit_codes(tmp_path, capfd):
    out = ("--out", tmp_path / "out", "--workers", 1)
    (tmp_path / "a.txt").write_text("nothing\n")
    (good,) = write_logs(tmp_path / "logs", 1)
    assert run(capfd)[0] == app.WRONG_USAGE
    assert run(capfd, tmp_path / "a.txt", *out)[0] == app.NOTHING_RECOGNISED
    assert run(capfd, tmp_path / "*.none", *out)[0] == app.UNREADABLE
    code, found, err = report(capfd, good, tmp_path / "*.none", *out)
    assert code == app.UNREADABLE
    assert found["problems"] == [err.strip().removeprefix("memledger: ")]
    assert found["fleet"]["statuses"] == {"ok": 1}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--group-by", "colour"], "no such column: colour"),
        (["--memory-limit", "much"], "no size"),
        (["--gpu-total", "much"], "--gpu-total"),
        (["--ray-address", "auto"], "--engine ray"),
        (["--out", "s3://bucket/out"], "of this machine"),
        (["--rules", "none.toml"], "none.toml"),
        (["--model-config", "none.json"], "--model-config"),
        (["--files-from", "none.txt"], "--files-from"),
    ],
)
def test_wrong_usage_is_one_sentence_before_anything_is_read(tmp_path, capfd, monkeypatch, wrong, says):
    monkeypatch.chdir(tmp_path)
    write_logs(tmp_path / "logs", 1)
    code, out, err = run(capfd, "logs", "--out", "out", *wrong)
    assert (code, out) == (app.WRONG_USAGE, "")
    assert says in err
    assert not (tmp_path / "out" / "ranks.parquet").exists()


def test_an_output_that_can_not_be_written_is_said(tmp_path, capfd):
    (good,) = write_logs(tmp_path / "logs", 1)
    (tmp_path / "out").write_text("precious")
    code, _, err = run(capfd, good, "--out", tmp_path / "out")
    assert code == 74
    assert "no folder" in err
    assert (tmp_path / "out").read_text() == "precious"


def test_a_missing_extra_is_said_with_what_installs_it(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    code, _, err = run(capfd, tmp_path, "--out", tmp_path / "out")
    assert code == app.WRONG_USAGE
    assert re.search(r"pip install 'fsspec>=[\d.]+' 'pyarrow>=[\d.]+'$", err.strip())


def test_ray_is_said_with_what_installs_it(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    write_logs(tmp_path / "logs", 1)
    code, _, err = run(capfd, tmp_path / "logs", "--engine", "ray", "--out", tmp_path / "out")
    assert code == app.WRONG_USAGE
    assert re.search(r"pip install 'fsspec>=[\d.]+' 'pyarrow>=[\d.]+' 'ray>=[\d.]+'$", err.strip())


def test_a_parquet_file_may_be_named_and_a_list_be_given(tmp_path, capfd):
    paths = write_logs(tmp_path / "logs", 2)
    (tmp_path / "list.txt").write_text(f"# two\n{paths[0]}\n\n{paths[1]}\n")
    code, _, _ = run(capfd, "--files-from", tmp_path / "list.txt", "--out", tmp_path / "deep" / "mine.parquet")
    assert code == app.DONE
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["mine.journal.jsonl", "mine.jsonl", "mine.parquet"]


def test_the_table_is_grouped_and_cut_as_asked(tmp_path, capfd):
    write_logs(tmp_path / "logs", 3)
    (tmp_path / "logs" / "demo.log").write_bytes(DEMO.read_bytes())
    asked = (tmp_path / "logs", "--out", tmp_path / "out", "--workers", 1)
    _, found, _ = report(capfd, *asked, "--group-by", "version", "--top", 1)
    fleet = found["fleet"]
    assert fleet["group_by"] == ["framework_version"]
    assert [group["values"] for group in fleet["groups"]] == [["SGLang 0.5.18"]]
    assert fleet["groups_in_all"] == 2
    assert fleet["groups"][0]["figures"]["idle_state_bytes"] == lines(tmp_path / "out")[3]["idle_state_bytes"]
    assert fleet["total"]["kv_never_used_bytes"] == sum(row["kv_never_used_bytes"] for row in lines(tmp_path / "out"))
    assert [Path(worst["file"]).name for worst in fleet["worst"]] == ["demo.log"]
    _, found, _ = report(capfd, *asked, "--group-by", "none")
    assert [group["figures"] for group in found["fleet"]["groups"]] == [found["fleet"]["total"]]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_text_keeps_to_its_width(tmp_path, capfd, width):
    write_logs(tmp_path / "logs", 2)
    (tmp_path / "logs" / "demo.log").write_bytes(DEMO.read_bytes())
    _, out, _ = run(
        capfd, tmp_path / "logs", tmp_path / "gone.log", "--out", tmp_path / "out", "--workers", 1, "--width", width
    )
    assert all(len(line) <= width or str(tmp_path) in line for line in out.splitlines())
    assert "idle state" in out
    assert "15.63" in out


# ---------------------------------------------------------------------------------------- interrupted, killed, resumed


@pytest.fixture
def stuck(tmp_path):
    """A fleet that has read all its logs but one: nobody writes to a pipe. Started, and ended with the test."""
    write_logs(tmp_path / "logs", 5)
    pipe = tmp_path / "logs.pipe"
    os.mkfifo(pipe)
    asked = [str(tmp_path / "logs"), str(pipe), "--out", str(tmp_path / "out"), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "memledger", "fleet", *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    journal = tmp_path / "out" / "journal.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not journal.exists() or journal.read_bytes().count(b"\n") < 6:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process, asked
    process.kill()
    process.communicate()


def test_ctrl_c_keeps_what_was_done_and_the_same_command_goes_on(tmp_path, capfd, stuck):
    process, asked = stuck
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (app.INTERRUPTED, b"")
    assert b"1 log left" in b" ".join(out.split())
    assert len(lines(tmp_path / "out")) == 5
    finish(tmp_path, capfd, asked)


def test_a_killed_driver_started_again_repeats_no_finished_file(tmp_path, capfd, stuck):
    process, asked = stuck
    process.kill()
    process.communicate(timeout=PATIENCE)  # its worker has ended, too: it would hold the output open
    assert not (tmp_path / "out" / "ranks.parquet").exists()
    finish(tmp_path, capfd, asked)


def finish(tmp_path, capfd, asked):
    """Run the same command again, the last file now readable: only that one is read, and the rows are those of one run."""
    pipe = tmp_path / "logs.pipe"
    pipe.unlink()
    pipe.write_text(log(9))
    _, found, _ = report(capfd, *asked)
    assert (found["read"], found["kept"], found["left"]) == (1, 5, 0)
    report(capfd, *asked[:3], tmp_path / "whole", "--workers", 1)
    assert (tmp_path / "out" / "ranks.parquet").read_bytes() == (tmp_path / "whole" / "ranks.parquet").read_bytes()
