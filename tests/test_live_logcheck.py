"""A log is only lined up with the process that wrote it."""

import msgspec
import pytest

from memledger.ledger import Engine, Entry, Rank, Server
from memledger.live.logcheck import check
from memledger.live.sample import LiveServer, Process

HELD = (Entry("weights/model", 1, 0, "logged"),)


def log(**changes):
    given = {
        "framework": "vllm",
        "model": "/models/a-7b",
        "started_at": "--10-08T16:50:00",
        "ended_at": "--10-08T17:50:00",
        "ranks": (Rank(tp=0, pid=190, entries=HELD), Rank(tp=1, pid=191, entries=HELD)),
        "engines": (Engine(0, 171),),
    }
    return Server(**{**given, **changes})


def running(**changes):
    pids = changes.pop("pids", (150, 171, 190, 191))
    given = {
        "pid": 150,
        "framework": "vllm",
        "model": "/models/a-7b",
        "started_at": "2026-10-08T16:49:50+00:00",
        "processes": tuple(Process(pid, namespace_pids=(pid,)) for pid in pids),
    }
    return LiveServer(**{**given, **changes})


def test_process_ids_and_start_time_say_yes():
    found = check([log()], running())
    assert (found.verdict, found.start) == ("yes", 0)
    assert "3 process ids are in both" in found.reasons
    assert any("10 s after the process's start" in r for r in found.reasons)


def test_a_start_time_alone_says_yes_where_the_log_has_no_ids():
    sglang = log(framework="sglang", started_at="2026-10-08T16:50:00", ranks=(Rank(tp=0),), engines=())
    assert check([sglang], running(framework="sglang")).verdict == "yes"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"framework": "sglang"}, "the log is SGLang's, the process is vLLM"),
        ({"ranks": (Rank(pid=900),), "engines": ()}, "the log's processes (900) are not among those running"),
        ({"model": "/models/b-70b"}, "the log is of b-70b, the process serves a-7b"),
        ({"started_at": "--10-07T16:50:00", "ended_at": "--10-07T18:00:00"}, "the log ends 23 h before the process started"),
        ({"started_at": "--10-09T16:50:00", "ended_at": None}, "is 24 h after the process's start"),
        ({"config": {"port": 8001}}, "listens on port 8001, the process on 8000"),
    ],
)  # fmt: skip
def test_what_differs_says_no(changes, said):
    found = check([log(**changes)], running(port=8000))
    assert found.verdict == "no"
    assert said in "; ".join(found.reasons)


def test_an_older_start_with_the_same_ids_is_not_taken():
    """Containers give every start the same small ids."""
    old = log(started_at="--10-01T10:00:00", ended_at="--10-01T11:00:00")
    assert check([old], running()).verdict == "no"


def test_the_start_that_fits_is_found_among_several():
    old = log(started_at="--10-08T12:00:00", ended_at="--10-08T13:00:00")
    later = log(started_at="--10-08T16:55:00", ranks=(Rank(pid=300),), engines=())
    assert check([old, log(), later], running()).start == 1


def test_ids_of_a_container_are_compared_with_the_inner_ones():
    inside = running(processes=(Process(90190, namespace_pids=(90190, 190)),), container="ab12")
    assert check([log()], inside).verdict == "yes"


def test_a_clock_in_another_zone_fits_in_a_container_only():
    started = (Rank(tp=0, entries=HELD),)
    shifted = log(started_at="--10-08T18:50:00", ended_at=None, ranks=started, engines=())
    assert check([shifted], running()).verdict == "no"
    found = check([shifted, log(ranks=started, engines=())], running(container="ab12"))
    assert (found.verdict, found.start) == ("yes", 1)
    assert check([log(started_at="--10-08T18:50:00")], running()).verdict == "yes"


def test_nothing_to_compare_is_unknown():
    bare = log(started_at=None, ended_at=None, ranks=(), engines=())
    found = check([bare], running())
    assert (found.verdict, found.start) == ("unknown", 0)
    assert check([], running()).verdict == "unknown"


def test_a_year_is_taken_from_the_process():
    turn = log(started_at="--01-01T00:00:05", ended_at=None, ranks=(), engines=())
    assert check([turn], running(started_at="2025-12-31T23:59:58+00:00")).verdict == "yes"


def test_the_check_is_plain_data():
    assert msgspec.json.decode(msgspec.json.encode(check([log()], running())))["verdict"] == "yes"


def test_a_rotated_log_without_a_start_is_no_contradiction():
    later = log(started_at="--10-09T16:50:00", ended_at=None, ranks=(Rank(tp=0),), engines=())
    assert check([later], running()).verdict == "unknown"
