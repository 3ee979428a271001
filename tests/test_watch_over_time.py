"""How a recording's pools filled, as tracks for the charts of its report."""

from pathlib import Path

import msgspec
import pytest
from watch_cases import BEGIN, fed, live_cases, moment, start

from memledger.cli import app
from memledger.live.sample import Metrics
from memledger.report.html_time import growth_of
from memledger.units import MIB
from memledger.watch.board import Board
from memledger.watch.over_time import MOST_KEPT, NOTHING_TOLD, OverTime

CASE = "live-sglang-hybrid"
RECORDING = Path(__file__).parent.parent / "fixtures" / "watch-leak" / "watch.jsonl"


@pytest.fixture(scope="module")
def sample():
    return live_cases.sample(CASE)


def told(events):
    board, over_time = Board(), OverTime()
    for event in events:
        fed(board, [event])
        over_time.take(event, board)
    return over_time.history(board.concluded(), board)


def test_every_look_is_a_sample_at_its_time(sample):
    looks = [
        moment(sample, at, running=running, kv=kv) for at, running, kv in ((0, 1, 0.1), (60, 4, 0.5), (90, 2, 0.3))
    ]
    ((track,),) = told([start(), *looks]).tracks.values()
    assert track.of == "look"
    assert track.seconds == (0.0, 60.0, 90.0)
    assert [(s.line, s.running, s.queued, s.kv) for s in track.samples] == [
        (1, 1, 0, 0.1),
        (2, 4, 0, 0.5),
        (3, 2, 0, 0.3),
    ]
    assert track.samples[1].time == BEGIN.replace(minute=1).isoformat(timespec="seconds")


def test_a_long_recording_keeps_its_peaks_and_few_looks(sample):
    peak = MOST_KEPT + 17
    looks = (moment(sample, at, running=99 if at == peak else 1) for at in range(MOST_KEPT * 2))
    ((track,),) = told([start(), *looks]).tracks.values()
    assert len(track.samples) < 1000
    assert [s.line for s in track.samples if s.running == 99] == [peak + 1]
    assert list(track.seconds) == sorted(track.seconds)
    assert track.seconds[-1] == MOST_KEPT * 2 - 1


def test_another_server_begins_anew(sample):
    events = [start(), moment(sample, 0, running=50), start(run="run2", seconds=100), moment(sample, 0, running=1)]
    ((track,),) = told([*events, moment(sample, 5, running=2)]).tracks.values()
    assert [s.running for s in track.samples] == [1, 2]
    assert track.seconds == (0.0, 5.0)


def test_engines_have_a_track_each(sample):
    look = moment(sample, 0)
    each = {"0": Metrics(running_requests=1), "1": Metrics(running_requests=2)}
    servers = tuple(msgspec.structs.replace(s, metrics_by_engine=each) for s in look.sample.servers)
    look = msgspec.structs.replace(look, sample=msgspec.structs.replace(look.sample, servers=servers))
    (tracks,) = told([start(), look]).tracks.values()
    assert [(t.name, t.samples[0].running) for t in tracks] == [("engine 0", 1), ("engine 1", 2)]


def test_where_no_look_tells_of_a_pool_that_is_said(sample):
    look = moment(sample, 0)
    servers = tuple(msgspec.structs.replace(s, metrics=None) for s in look.sample.servers)
    look = msgspec.structs.replace(look, sample=msgspec.structs.replace(look.sample, servers=servers))
    assert list(told([start(), look]).missing.values()) == [NOTHING_TOLD]


def test_the_report_of_a_recording_draws_them(tmp_path, capsys):
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    assert app.run(["explain", str(RECORDING), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "hours since the first look" in text
    assert "Use of the pools over time" in text
    assert "Nothing is drawn over time" not in text
    assert "Peak use of what was reserved, by the log" in text
    assert "What grew" in text
    assert "GPU 0: memory against the first look" in text
    assert "From look 1 to look 121: KV cache at most 48 % of its pool, at most 5 running requests" in text


def test_what_holds_a_devices_memory_is_followed_from_the_first_look(sample):
    looks = [moment(sample, at, own=at) for at in range(0, 120, 10)]
    ((device,),) = told([start(), *looks]).devices.values()
    held = {one.name: one for one in device.held}
    process = next(one for one in device.held if one.kind == "process")
    assert device.device == "GPU 0"
    assert [at for at, _ in process.points] == [float(at) for at in range(0, 120, 10)]
    assert process.points[-1][1] - process.points[0][1] == 110 * MIB
    assert held["free"].points[-1][1] - held["free"].points[0][1] == -110 * MIB
    (figure,) = growth_of([device])
    assert figure.title == "GPU 0: memory against the first look"
    curves = {curve.name: curve.values for curve in figure.chart.counts}
    assert curves[process.name][0] == 0.0
    assert curves[process.name][-1] == pytest.approx(110 / 1024, abs=1e-4)
    assert [row[4].text for row in figure.table.rows if row[0].text == "free"] == ["-0.11"]


def test_of_one_look_nothing_grew(sample):
    ((device,),) = told([start(), moment(sample, 0)]).devices.values()
    assert growth_of([device]) == ()
