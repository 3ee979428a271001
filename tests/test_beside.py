"""Several files beside each other give what they give one after the other, whatever happens to the processes."""

import os
import signal
import threading
from pathlib import Path

import pytest

from memledger import beside, pipeline
from memledger.ahead import may_fork
from memledger.grammar import load_rules
from memledger.sources import InputError

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOGS = sorted(str(path) for path in FIXTURES.glob("*/server*.log"))

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture(autouse=True)
def _small_files_are_worth_it(monkeypatch):
    monkeypatch.setattr(beside, "WORTH_IT", 1)
    # Threads that other tests, or libraries of theirs, left in this process take no part in what is read here.
    monkeypatch.setattr(beside, "may_fork", lambda: True)


@pytest.fixture
def forks(monkeypatch):
    """The processes that were started."""
    real, found = os.fork, []

    def fork():
        child = real()
        if child:
            found.append(child)
        return child

    monkeypatch.setattr(os, "fork", fork)
    return found


def both(names, rules=None):
    """(one after the other, beside each other)"""
    return pipeline.read(names, rules), pipeline.read(names, rules, cores=3)


def test_every_fixture_at_once_gives_the_same_report(forks):
    alone, together = both(LOGS)
    assert len(forks) == 3
    assert together == alone
    assert len(together.report.inputs) == len(LOGS) > 40


def test_lines_that_were_not_understood_are_counted_over_all(tmp_path, forks):
    for number in range(4):
        lines = [f"[2026-09-09 10:00:00 TP0] Scratch {chr(97 + number)}{'x' * n} of {n}.5 GiB" for n in range(1, 20)]
        (tmp_path / f"{number}.log").write_text("\n".join(lines) + "\n")
    alone, together = both([str(tmp_path / f"{number}.log") for number in range(4)])
    assert forks
    assert together == alone
    assert together.report.unrecognized.count == 4 * 19


def test_a_file_that_can_not_be_read_is_said_and_the_lines_of_the_others_keep_their_place(tmp_path, monkeypatch, forks):
    names = [LOGS[0], str(tmp_path / "gone.log"), *LOGS[1:4]]
    (tmp_path / "gone.log").write_text("x")
    real = pipeline.open_input

    def refuse(path, **how):
        if path.endswith("gone.log"):
            raise InputError(path, "it can't be read.")
        return real(path, **how)

    monkeypatch.setattr(pipeline, "open_input", refuse)
    alone, together = both(names)
    assert forks
    assert together == alone
    assert together.problems == (f"{tmp_path}/gone.log: it can't be read.",)


def test_a_process_that_is_killed_loses_nothing(monkeypatch, forks):
    real, main = pipeline.open_input, os.getpid()

    def dies(path, **how):
        if os.getpid() != main and path == LOGS[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, **how)

    alone = pipeline.read(LOGS[:8])
    monkeypatch.setattr(pipeline, "open_input", dies)
    assert pipeline.read(LOGS[:8], cores=2) == alone
    assert len(forks) == 2


def test_where_no_process_can_be_started_they_are_read_one_after_the_other(monkeypatch):
    def no():
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", no)
    alone, together = both(LOGS[:4])
    assert together == alone


def test_no_process_is_left_behind(forks):
    pipeline.read(LOGS[:6], cores=2)
    for child in forks:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def test_an_error_of_our_own_is_not_hidden(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline, "_so_far", broken)
    with pytest.raises(ZeroDivisionError):
        pipeline.read(LOGS[:3], cores=2)


@pytest.mark.parametrize("what", ["one file", "standard input", "a missing file", "a large file", "little", "threads"])
def test_where_it_is_not_worth_it_nothing_is_started(what, tmp_path, monkeypatch, forks):
    names = LOGS[:3]
    if what == "one file":
        names = LOGS[:1]
    elif what == "standard input":
        names = [*names, "-"]
    elif what == "a missing file":
        names = [*names, str(tmp_path / "missing")]
    elif what == "a large file":
        monkeypatch.setattr(beside, "LARGEST", 10)
    elif what == "little":
        monkeypatch.setattr(beside, "WORTH_IT", 2**40)
    done = threading.Event()
    if what == "threads":
        monkeypatch.setattr(beside, "may_fork", may_fork)
        threading.Thread(target=done.wait).start()
    try:
        assert beside.read(names, lambda *_: pytest.fail("nothing is read"), 4) == {}
    finally:
        done.set()
    assert not forks


def test_a_users_rules_are_in_force_there_as_well(tmp_path, forks):
    (tmp_path / "own.toml").write_text(
        'framework = "any"\n[[rule]]\nid = "scratch"\nanchor = "Scratch"\npattern = "Scratch arena"\nkind = "not_memory"\nmeans = "x"\n'
        '[[rule.sample]]\nline = "Scratch arena of 3 GiB"\n'
    )
    for number in range(2):
        (tmp_path / f"{number}.log").write_text("Scratch arena of 3 GiB\n" * 5)
    names = [str(tmp_path / f"{number}.log") for number in range(2)]
    alone, together = both(names, load_rules([tmp_path / "own.toml"]))
    assert forks
    assert together == alone
    assert together.report.unrecognized.count == 0
