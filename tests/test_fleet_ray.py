"""Ray gives the same rows, to the byte; its own retries and limits are what a lost or crashed worker meets."""

import signal
from pathlib import Path

import fleet_logs
import msgspec
import pytest

from memledger.cli import app
from memledger.fleet import one
from memledger.fleet.engine import EngineError
from memledger.fleet.one import Settings, Work
from memledger.fleet.ray_engine import BATCH_BYTES, BATCH_FILES, RayEngine, batches

ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")


@pytest.fixture(scope="module")
def cluster():
    """One local cluster for all tests: it takes seconds to start."""
    ray.cloudpickle.register_pickle_by_value(fleet_logs)
    with RayEngine(Settings(), workers=2, retries=1) as engine:
        yield engine


@pytest.fixture
def engine(cluster):
    """The cluster with another reader and other settings."""

    def made(reader=one.read, **settings):
        cluster._reader, cluster._settings = reader, Settings(**settings)
        return cluster

    yield made
    made()


def never():
    return False


def test_the_same_parquet_to_the_byte_as_local_processes_write(tmp_path, cluster, monkeypatch):
    fleet_logs.write_logs(tmp_path / "logs", 5)
    (tmp_path / "logs" / "demo.log").write_bytes(fleet_logs.DEMO.read_bytes())
    (tmp_path / "logs" / "none.txt").write_text("nothing\n")
    asked = ["fleet", str(tmp_path / "logs"), str(tmp_path / "gone.log")]
    monkeypatch.setattr(RayEngine, "__enter__", lambda _: cluster)
    monkeypatch.setattr(RayEngine, "__exit__", lambda *_: None)
    for kind in ("local", "ray"):
        assert app.run([*asked, "--out", str(tmp_path / kind), "--engine", kind]) == app.DONE
    for name in ("ranks.parquet", "ranks.jsonl"):
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes()


def test_a_worker_that_is_killed_in_the_middle_loses_nothing(tmp_path, engine):
    paths = fleet_logs.write_logs(tmp_path, 4)
    paths[1] = paths[1].rename(tmp_path / "once.log")
    work = [Work(str(path)) for path in paths]
    found = dict(engine(fleet_logs.killed_once).results(work, never))
    assert Path(f"{paths[1]}.seen").exists()
    assert {w: found[w] for w in work} == {w: one.read(w, Settings()) for w in work}


def test_a_file_that_ends_its_worker_is_a_row_and_the_others_of_its_batch_are_read(tmp_path, engine, monkeypatch):
    monkeypatch.setattr("memledger.fleet.ray_engine.BATCHES_PER_CORE", 1)
    work = [Work(str(path)) for path in fleet_logs.write_logs(tmp_path, 3)]
    bad = Work(str(tmp_path / "crash.log"))
    found = dict(engine(fleet_logs.crashing).results([*work, bad], never))
    assert [found[w].status for w in work] == ["ok"] * 3
    assert found[bad].status == "crashed"
    assert "ended 2 times" in msgspec.json.decode(found[bad].rows)[0]["error"]


def test_another_version_on_a_node_is_said_and_no_rows_are_mixed(tmp_path, engine, monkeypatch):
    (log,) = fleet_logs.write_logs(tmp_path, 1)
    monkeypatch.setattr("memledger.fleet.ray_engine.__version__", "9.9.9")
    with pytest.raises(EngineError, match=r"this machine has 9\.9\.9"):
        list(engine().results([Work(str(log))], never))


def test_what_is_asked_to_end_ends(tmp_path, engine):
    work = [Work(str(path)) for path in fleet_logs.write_logs(tmp_path, 2)]
    assert list(engine().results(work, lambda: True)) == []


def test_a_cluster_that_does_not_answer_is_one_sentence(monkeypatch):
    def refuse(**_):
        raise ConnectionError("no cluster\nat 10.0.0.1")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(EngineError, match="Ray: no cluster at"), RayEngine(Settings(), address="10.0.0.1:6379"):
        pass


def test_batches_are_of_like_size_and_leave_no_core_without():
    small = [Work(str(n), 1000) for n in range(1000)]
    assert {len(batch) for batch in batches(small, 2)} <= {BATCH_FILES, 1000 % BATCH_FILES}
    assert len(batches(small[:16], 2)) == 8
    large = [Work(str(n), BATCH_BYTES // 2) for n in range(1000)]
    assert {len(batch) for batch in batches(large, 2)} == {2}
    assert [w for batch in batches(small, 3) for w in batch] == small
    assert batches([], 2) == []


def test_sigint_is_left_to_the_program():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
