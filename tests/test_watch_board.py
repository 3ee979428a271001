"""What a watch says of what it saw: growth told apart, comings and goings, starts that do not mix."""

import live_cases
import msgspec
import pytest
from watch_cases import CASE, at, fed, moment, start

from memledger.live.sample import Sample
from memledger.units import GIB, MIB
from memledger.watch.board import Board
from memledger.watch.moment import End, Grown, Moment, Serving


@pytest.fixture(scope="module")
def sample():
    return live_cases.sample(CASE)


def codes(board):
    return {f.code: f for f in board.findings() if f.code.startswith("ML01")}


def watched(sample, count=600, **changes):
    """A board fed with `count` looks; each change is a function of the second."""
    looks = (moment(sample, i, **{name: change(i) for name, change in changes.items()}) for i in range(count))
    return fed(Board(), [start(), *looks])


def test_a_server_whose_memory_stays_is_flat(sample):
    found = codes(watched(sample))
    assert set(found) == {"ML016"}
    assert "did not grow in 10 min" in found["ML016"].text


def test_growth_at_the_same_load_is_a_leak_with_the_time_that_is_left(sample):
    found = codes(watched(sample, own=lambda i: i))
    assert set(found) == {"ML010"}
    told = found["ML010"]
    assert told.severity == "warning"
    assert told.bytes == pytest.approx(599 * MIB, rel=0.02)
    assert "TP0 (pid 4243) took 599 MiB more on GPU 0 in 10 min, 3.52 GiB an hour" in told.text
    assert "6.08 GiB are free: full in 104 min" in told.text


def test_growth_that_fills_the_gpu_within_the_hour_is_an_error(sample):
    assert codes(watched(sample, own=lambda i: 6 * i))["ML010"].severity == "error"


def test_growth_with_new_peaks_of_load_is_the_allocators(sample):
    found = codes(watched(sample, own=lambda i: i // 60 * 128, running=lambda i: 1 + i // 60))
    assert set(found) == {"ML011"}
    assert "100 % of it as more ran" in found["ML011"].text


def test_a_step_is_the_allocators_and_ends(sample):
    found = codes(watched(sample, own=lambda i: 512 * (i > 200)))
    assert set(found) == {"ML011"}
    assert "in one step" in found["ML011"].text
    assert "full in" not in found["ML011"].text


def test_growth_without_any_figure_of_load_is_not_called_a_leak_for_sure(sample):
    def look(i):
        one = moment(sample, i, own=i)
        servers = tuple(msgspec.structs.replace(s, metrics=None) for s in one.sample.servers)
        return msgspec.structs.replace(one, sample=msgspec.structs.replace(one.sample, servers=servers))

    text = codes(fed(Board(), [start(), *map(look, range(600))]))["ML010"].text
    assert "can't be told apart" in text


def test_other_processes_that_grow_are_not_the_servers(sample):
    found = codes(watched(sample, others=lambda i: 500 + i))
    assert "ML010" not in found
    assert "Other processes took 599 MiB more on GPU 0" in found["ML012"].text


def test_a_pool_that_fills_takes_no_memory(sample):
    found = codes(watched(sample, kv=lambda i: 0.2 + i / 1000))
    assert set(found) == {"ML013"}
    assert "no device memory is taken by it" in found["ML013"].text
    assert found["ML013"].bytes == 0


def test_memory_that_nobody_listed_holds_is_said_to_be_nobodys(sample):
    def look(i):
        one = moment(sample, i)
        devices = tuple(
            msgspec.structs.replace(d, used_bytes=d.used_bytes + i * MIB, free_bytes=d.free_bytes - i * MIB)
            for d in one.sample.devices.devices
        )
        changed = msgspec.structs.replace(one.sample.devices, devices=devices)
        return msgspec.structs.replace(one, sample=msgspec.structs.replace(one.sample, devices=changed))

    found = codes(fed(Board(), [start(), *map(look, range(600))]))
    assert "ML015" in found
    assert "ML010" not in found


def test_another_start_begins_anew_and_the_first_ones_growth_is_not_its_own(sample):
    board = watched(sample, own=lambda i: i)
    assert "ML010" in codes(board)
    later = [moment(sample, 700 + i) for i in range(120)]
    fed(board, [End(at(650), "process 4242 ended"), start(seconds=690), *later])
    assert set(codes(board)) == {"ML016"}
    assert board.starts == 2


def test_a_recording_that_goes_on_in_another_file_is_one_watch(sample):
    first = [moment(sample, i, own=i) for i in range(300)]
    second = [moment(sample, i, own=i) for i in range(300, 600)]
    board = fed(Board(), [start(), *first, start(), *second])
    assert board.starts == 1
    assert codes(board)["ML010"].bytes == pytest.approx(599 * MIB, rel=0.02)


def test_a_later_run_of_the_same_file_counts_the_time_between(sample):
    board = fed(Board(), [start(), moment(sample, 0), moment(sample, 1)])
    fed(board, [start(run="run2", seconds=3600), msgspec.structs.replace(moment(sample, 3600), clock_s=0.0)])
    assert board.clock_s == pytest.approx(3600, abs=2)


def test_processes_that_come_and_go_are_told(sample):
    board = fed(Board(), [start(), moment(sample, 0), moment(sample, 1, others=512), moment(sample, 2)])
    assert [seen.text for seen in board.happened] == [
        "+ pid 99999 (python train.py) 0.50 GiB on GPU 0",
        "- pid 99999 (python train.py) 0.50 GiB left GPU 0",
    ]
    assert board.happened[0].at == at(1)


def test_the_report_is_the_last_moments_ledger(sample):
    board = fed(Board(), [start(), moment(sample, 0), moment(sample, 1, others=2048)])
    (gpu,) = board.report().live.gpus
    others = [row for row in gpu.rows if row.account == "other_processes"]
    assert [row.bytes for row in others][-1] == 2 * GIB
    assert "ML001" in {f.code for f in board.findings()}
    assert board.first_seen["ML004"] == at(0)


def test_a_log_alone_gives_its_ledger_and_the_serving_lines_of_now():
    report = live_cases.log_report(CASE)
    board = Board()
    board.take(msgspec.structs.replace(start(), pid=None, report=report))
    for i in range(120):
        board.take(Moment(at(i), float(i), serving=(Serving(running=i, kv=0.5),)))
    assert board.report().servers[0].ranks == report.servers[0].ranks
    assert board.series[("running", "", "")].peak == 119
    board.take(Grown(msgspec.structs.replace(report, servers=())))
    assert board.report().servers == ()


def test_a_moment_before_any_start_is_no_error():
    board = fed(Board(), [Moment(at(0), 0.0, Sample(at(0)))])
    assert board.report().servers == ()
    assert board.findings() == ()


def test_the_conclusion_says_how_much_was_seen(sample):
    report = watched(sample, 30).concluded()
    assert report.live.notes[0] == f"a recording of 30 looks from {at(0)} to {at(29)}"
