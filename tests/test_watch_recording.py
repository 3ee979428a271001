"""A watch in a file and back: whole, small, masked, in files of bounded size, whatever ended it."""

import json
import os

import live_cases
import msgspec
import pytest
from watch_cases import CASE, at, fed, moment, start

from memledger.watch import recording
from memledger.watch.board import Board
from memledger.watch.moment import End, Grown, Moment, Serving, restored, still_of, tick_of, without_pages
from memledger.watch.recording import Reader, Recorder, RecordingError


@pytest.fixture(scope="module")
def sample():
    return live_cases.sample(CASE)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "watch.jsonl"


def record(path, events, **how):
    recorder = Recorder(path, **how)
    for event in events:
        recorder.write(event)
    recorder.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(path):
    reader = Reader(str(path))
    return list(reader.events()), reader.troubles


def test_what_changes_and_what_stays_make_the_sample_again(sample):
    assert restored(still_of(sample), tick_of(sample)) == without_pages(sample)
    assert still_of(moment(sample, 5, own=77, kv=0.9).sample) == still_of(moment(sample, 0).sample)
    assert still_of(moment(sample, 5, others=77).sample) != still_of(moment(sample, 0).sample)


def test_a_recording_says_the_same_as_the_watch(path, sample):
    looks = [moment(sample, i, own=i, others=100 * (i > 30)) for i in range(90)]
    events = [start(), *looks, Grown(live_cases.log_report(CASE)), End(at(90), "process 4242 ended")]
    record(path, events)
    found, troubles = read(path)
    assert troubles == []
    assert fed(Board(), found).report() == fed(Board(), events).report()
    assert [type(e) for e in found] == [type(e) for e in events]


def test_a_look_at_which_nothing_came_or_went_takes_few_bytes(path, sample):
    record(path, [start(), *(moment(sample, i, own=i) for i in range(100))])
    kinds = [line["kind"] for line in lines(path)]
    assert kinds == ["start", "sample", *["tick"] * 99]
    assert max(len(line) for line in path.read_text().splitlines()[2:]) < 700


def test_serving_lines_of_a_log_are_kept(path):
    told = Moment(at(1), 1.0, serving=(Serving("DP0", running=3, kv=0.25),))
    record(path, [msgspec.structs.replace(start(), pid=None), told])
    assert read(path)[0][1] == told


def test_a_full_file_moves_on_and_each_file_can_be_read_alone(path, sample):
    looks = [moment(sample, i, own=i) for i in range(400)]
    record(path, [start(), *looks], most_bytes=60_000, kept=2)
    names = sorted(p.name for p in path.parent.iterdir())
    assert names == ["watch.jsonl", "watch.jsonl.1", "watch.jsonl.2"]
    for part in path.parent.iterdir():
        assert [line["kind"] for line in lines(part)[:2]] == ["start", "sample"]
        assert part.stat().st_size < 80_000
    newest, _ = read(path.with_name("watch.jsonl.1"))
    together, _ = read(path)
    moments = [e for e in together if isinstance(e, Moment)]
    assert moments == [msgspec.structs.replace(m, sample=without_pages(m.sample)) for m in looks[-len(moments) :]]
    assert len(moments) > len([e for e in newest if isinstance(e, Moment)])
    assert fed(Board(), together).starts == 1


def test_without_full_files_only_the_last_one_is_there(path, sample):
    record(path, [start(), *(moment(sample, i) for i in range(400))], most_bytes=60_000, kept=0)
    assert [p.name for p in path.parent.iterdir()] == ["watch.jsonl"]


def test_a_second_run_goes_on_in_the_same_file(path, sample):
    record(path, [start(), moment(sample, 0)])
    with path.open("ab") as file:
        file.write(b'{"kind":"tick","at":"2026')  # the first one was killed while it wrote
    record(path, [start(run="run2"), moment(sample, 9)])
    found, troubles = read(path)
    assert [type(e).__name__ for e in found] == ["Start", "Moment", "Start", "Moment"]
    assert len(troubles) == 1
    assert "line 3 can't be read" in troubles[0]


def test_a_last_line_that_is_cut_off_is_said_and_the_rest_reported(path, sample):
    record(path, [start(), *(moment(sample, i) for i in range(20))])
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    found, troubles = read(path)
    assert len(found) == 20
    assert troubles == [f"{path}: the last line is cut off; what stands before it is reported."]


def test_the_file_is_its_owners_alone(path, sample):
    record(path, [start()])
    assert path.stat().st_mode & 0o777 == 0o600


def test_secrets_and_terminal_escapes_stay_out(path, sample):
    server = msgspec.structs.replace(
        sample.servers[0], notes=("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345", "\x1b[2Jred"), model="a\x1b]0;x\x07b"
    )
    record(path, [start(), Moment(at(0), 0.0, msgspec.structs.replace(sample, servers=(server,)))])
    text = path.read_text()
    assert "abcdefghijklmnop" not in text
    assert "\\u001b" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("content", [b"important\n", b'{"kind":"other"}\n'])
def test_a_file_that_is_no_recording_is_left_alone(path, content):
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="no recording of memledger; name another"):
        Recorder(path)
    assert path.read_bytes() == content


def test_devices_pipes_and_links_are_not_written_to(path, tmp_path):
    with pytest.raises(RecordingError, match="no regular file"):
        Recorder(tmp_path / ".." / ".." / ".." / ".." / "dev" / "null")
    os.mkfifo(path)
    with pytest.raises(RecordingError):
        Recorder(path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with pytest.raises(RecordingError):
        Recorder(link)
    assert not (tmp_path / "target").exists()


def test_a_full_disk_is_one_sentence(path, monkeypatch):
    recorder = Recorder(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording.os, "write", full)
    with pytest.raises(RecordingError, match=r"can't be written to .*watch.jsonl: No space left on device"):
        recorder.write(start())


def hostile(**changes):
    line = {"kind": "tick", "at": at(1), "clock_s": 1.0, "tick": {"taken_at": at(1)}}
    return json.dumps(line | changes)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[" * 100_000,
        "null",
        '{"kind":"nothing of this"}',
        '{"kind":"tick","clock_s":"x"}',
        hostile(clock_s=1e300),
        hostile(tick={"taken_at": "x", "devices": [{"used_bytes": 2**70}]}),
        hostile(tick={"taken_at": "x", "devices": [{}, {}, {}]}),
        hostile(tick={"taken_at": "x", "servers": []}),
        "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    ],
)
def test_a_line_that_memledger_never_wrote_is_passed_over_and_said(path, sample, line):
    record(path, [start(), moment(sample, 0)])
    with path.open("a", encoding="latin-1") as file:
        file.write(line + "\n")
    record(path, [moment(sample, 2)])
    found, troubles = read(path)
    assert [type(e).__name__ for e in found][:2] == ["Start", "Moment"]
    assert len(troubles) == 1
    assert len(troubles[0]) < 400


def test_a_file_of_another_kind_or_version_is_refused_in_a_sentence(path):
    path.write_text("Decode batch\n")
    with pytest.raises(RecordingError, match="no recording"):
        read(path)
    path.write_text('{"kind":"start","schema":"memledger-recording/99"}\n')
    with pytest.raises(RecordingError, match="of another version; this memledger reads memledger-recording/1"):
        read(path)
    with pytest.raises(RecordingError, match="can't be read"):
        read(path.with_name("missing"))


def test_a_thousand_bad_lines_are_five_sentences_and_a_number(path, sample):
    record(path, [start(), moment(sample, 0)])
    with path.open("a") as file:
        file.write("x\n" * 1000)
    _, troubles = read(path)
    assert len(troubles) == 6
    assert "995 more lines" in troubles[-1]
