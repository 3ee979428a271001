"""The local engine: a file that ends, stops or fills its process costs one row, and a process that is killed costs nothing."""

import os
import signal

import fleet_logs
import msgspec
import pytest
from fleet_logs import write_logs

from memledger.fleet import local, one
from memledger.fleet.engine import EngineError
from memledger.fleet.local import LocalEngine
from memledger.fleet.one import Settings, Work


def never():
    return False


def run(work, reader=one.read, workers=2, ended=never, **settings):
    with LocalEngine(workers, Settings(**settings), reader) as engine:
        found = dict(engine.results(work, ended))
        pids = engine.pids
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # noqa: PTH110
    return found


def row(outcome):
    return msgspec.json.decode(outcome.rows)[0]


def test_every_file_has_its_outcome_and_processes_start_once(tmp_path):
    work = [Work(str(path)) for path in write_logs(tmp_path, 7)]
    with LocalEngine(2, Settings(), one.read) as engine:
        results = engine.results(work, never)
        found = dict([next(results)])
        before = engine.pids
        found.update(results)
        assert engine.pids == before
        assert len(before) == 2
    assert found.keys() == set(work)
    assert all(found[w] == one.read(w, Settings()) for w in work)


def test_a_file_that_ends_its_process_is_a_row_and_the_others_are_read(tmp_path):
    good = [Work(str(path)) for path in write_logs(tmp_path, 3)]
    bad = Work(str(tmp_path / "crash.log"), 5)
    found = run([bad, *good], fleet_logs.crashing)
    assert found[bad].status == "crashed"
    assert row(found[bad]) == {
        "file": bad.name, "file_bytes": 5, "status": "crashed", "error": "the process that read it ended 2 times: SIGSEGV."
    }  # fmt: skip
    assert [found[w].status for w in good] == ["ok"] * 3


def test_a_process_that_is_killed_in_the_middle_loses_nothing(tmp_path):
    paths = write_logs(tmp_path, 4)
    paths[1] = paths[1].rename(tmp_path / "once.log")
    work = [Work(str(path)) for path in paths]
    found = run(work, fleet_logs.killed_once)
    assert (tmp_path / "once.log.seen").exists()
    assert {w: found[w] for w in work} == {w: one.read(w, Settings()) for w in work}


def test_a_process_that_does_nothing_any_more_is_ended_at_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "KILL_AFTER_SECONDS", 0.1)
    (good,) = write_logs(tmp_path, 1)
    bad = Work(str(tmp_path / "stop.log"))
    found = run([bad], fleet_logs.stopped, time_limit_s=0.5)
    assert found[bad].status == "time_limit"
    assert row(found[bad])["error"] == "reading took longer than 0.5 s (--time-limit)."
    assert run([Work(str(good))], fleet_logs.stopped)[Work(str(good))].status == "ok"


def test_time_memory_and_faults_of_one_file_are_rows(tmp_path):
    good = [Work(str(path)) for path in write_logs(tmp_path, 2)]
    busy, hungry, faulty = (Work(str(tmp_path / f"{name}.log")) for name in ("busy", "hungry", "faulty"))
    found = run([busy], fleet_logs.busy_or_hungry, workers=1, time_limit_s=0.3)
    found |= run([hungry, faulty, *good], fleet_logs.busy_or_hungry, workers=1, memory_limit_bytes=2**28)
    assert [found[w].status for w in (busy, hungry, faulty, *good)] == [
        "time_limit", "memory_limit", "internal_error", "ok", "ok",
    ]  # fmt: skip
    assert row(found[hungry])["error"] == "reading took more than 256 MiB of memory (--memory-limit)."
    assert "ZeroDivisionError" in row(found[faulty])["error"]
    assert "abcdefgh" not in row(found[faulty])["error"]


def test_what_is_asked_to_end_ends_with_what_is_done(tmp_path):
    work = [Work(str(path)) for path in write_logs(tmp_path, 6)]
    done = []
    with LocalEngine(1, Settings(), one.read) as engine:
        for item, _ in engine.results(work, lambda: len(done) >= 2):
            done.append(item)
    assert done == work[:2]


def test_processes_that_end_as_they_start_are_no_endless_loop(tmp_path):
    (log,) = write_logs(tmp_path, 1)
    with pytest.raises(EngineError, match="end as they start"):
        run([Work(str(log))], rule_files=(str(tmp_path / "none.toml"),))


def test_how_a_process_ended_is_said():
    assert local._how(-signal.SIGKILL).startswith("SIGKILL: killed by hand, or by the kernel")
    assert local._how(-signal.SIGBUS) == "SIGBUS"
    assert local._how(3) == "exit code 3"
    assert local._how(-99) == "signal 99"
