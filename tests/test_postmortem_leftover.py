"""Memory of a previous start, told by its process id or by its own ledger."""

import pytest

from memledger.events import Prefix
from memledger.ledger import Engine, Entry, Rank, Report, Server, Span
from memledger.postmortem.incident import Numbers, OtherProcess
from memledger.postmortem.leftover import previous_start
from memledger.postmortem.symptom import Symptom
from memledger.units import GIB


def line(time="2026-07-09T21:35:16", at=90):
    return Symptom("startup_check", "cause", "vllm.free_memory_too_small", Prefix(), 0, at, "a line", time=time)


def report(size=67 * GIB, ended="2026-07-09T21:34:16", pid=4242):
    entries = (Entry("weights/model", 6 * GIB, 0, "logged"), Entry("kv_cache/pool", size - 6 * GIB, 0, "logged"))
    before = Server(
        framework="vllm",
        span=(Span(0, 1, 50),),
        ended_at=ended,
        ranks=(Rank(pid=pid, entries=entries),),
        engines=(Engine(pid=pid),),
    )
    return Report("1", (), (), (before, Server(framework="vllm", span=(Span(0, 51, 100),))))


def check(free):
    return Numbers(total_bytes=79 * GIB, free_bytes=free)


def test_what_is_held_is_what_the_start_before_had_taken():
    found = previous_start(report(), 1, line(), check(8 * GIB))
    assert found.kind == "other_process"
    assert "its last line is 60 s earlier" in found.cause
    assert "67.0 GiB by its own lines (kv cache 61.00, weights 6.00), and 71.0 GiB were held" in found.cause
    assert found.command.endswith("-p 4242")


@pytest.mark.parametrize("size", [20 * GIB, 78 * GIB])
def test_sizes_that_do_not_fit_tell_nothing(size):
    assert previous_start(report(size), 1, line(), check(8 * GIB)) is None


@pytest.mark.parametrize("ended", ["2026-07-09T19:34:16", "2026-07-09T22:34:16"])
def test_a_start_long_ago_or_later_tells_nothing(ended):
    assert previous_start(report(ended=ended), 1, line(), check(8 * GIB)) is None


def test_a_listed_process_of_the_start_before_is_named():
    listed = Numbers(total_bytes=79 * GIB, other_processes=(OtherProcess(4242, 9 * GIB),))
    found = previous_start(report(), 1, line(), listed)
    assert found.command == "kill 4242"


def test_the_first_start_has_none_before_it():
    assert previous_start(report(), 0, line(), check(8 * GIB)) is None
    assert previous_start(report(), None, line(), check(8 * GIB)) is None


def test_a_start_of_another_input_is_none():
    other = Symptom("startup_check", "cause", "vllm.free_memory_too_small", Prefix(), 1, 90, "a line")
    assert previous_start(report(), 1, other, check(8 * GIB)) is None
