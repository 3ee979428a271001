"""A snapshot holds everything that was sampled, masked, and gives the same report elsewhere."""

import json
import stat

import msgspec
import pytest
from live_cases import CASES, log_report, sample

from memledger.findings import live as live_findings
from memledger.live import snapshot
from memledger.live.sample import Endpoint, LiveServer, Process, Sample
from memledger.live.snapshot import SCHEMA, Snapshot, SnapshotError
from memledger.reconcile import reconcile
from memledger.report.json import encode
from memledger.report.markdown import render as markdown
from memledger.report.text import render


def taken(case, **changes):
    given = {"report": log_report(case), "own_log": True, "command": "memledger explain --pid 1"}
    return Snapshot(SCHEMA, "0", sample(case), **{**given, **changes})


def shown(one):
    report = live_findings.attach(reconcile(one.report, one.sample, pid=one.pid, own_log=one.own_log, built=one.built))
    return render(report), markdown(report), encode(report)


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_back_gives_the_same_reports(case, tmp_path):
    file = tmp_path / "s.json"
    before = taken(case)
    snapshot.write(file, before)
    assert shown(snapshot.read(str(file))) == shown(before)


def test_the_file_is_written_whole_and_for_its_owner_only(tmp_path):
    file = tmp_path / "s.json"
    file.write_text("old")
    file.chmod(0o644)
    snapshot.write(file, taken(CASES[0]))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "s.json").symlink_to(target)
    snapshot.write(tmp_path / "s.json", taken(CASES[0]))
    assert target.read_text() == "mine"


def test_nothing_is_left_where_it_cant_be_written(tmp_path):
    with pytest.raises(SnapshotError, match="can't be written"):
        snapshot.write(tmp_path / "none" / "s.json", taken(CASES[0]))
    folder = tmp_path / "s.json"
    folder.mkdir()
    with pytest.raises(SnapshotError, match="can't be written"):
        snapshot.write(folder, taken(CASES[0]))
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_texts_are_masked_wherever_they_stand():
    server = LiveServer(
        1,
        "vllm",
        processes=(Process(1, arguments=("--hf-token hf_abcdefghijklmnopqrstuvwx",)),),
        endpoints=(
            Endpoint("/server_info", 200, {"api_key": "x", "note": "token=sk-abcdefghijklmnopqrstuvwx \x1b[31m"}),
        ),
    )
    text = snapshot.encode(Snapshot(SCHEMA, "0", Sample("2026", servers=(server,)))).decode()
    assert "abcdefghijklmnop" not in text
    assert "\\u001b" not in text


def test_the_schema_comes_first_so_that_a_snapshot_is_known_by_its_beginning():
    head = snapshot.encode(taken(CASES[0]))[:60].decode()
    assert head.startswith('{\n "schema": "memledger-snapshot/1"')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(schema="memledger-snapshot/9"), "of another version"),
        (lambda d: d.update(sample=[]), "of another form"),
        (lambda d: d["report"].update(servers=3), "of another form"),
    ],
)
def test_what_is_no_snapshot_of_ours_is_refused(change, said, tmp_path):
    document = json.loads(snapshot.encode(taken(CASES[0])))
    change(document)
    file = tmp_path / "s.json"
    file.write_text(json.dumps(document))
    with pytest.raises(SnapshotError, match=said):
        snapshot.read(str(file))


def test_somebody_elses_snapshot_prints_no_escapes(tmp_path):
    document = json.loads(snapshot.encode(taken("live-vllm-tp2")))
    device = document["sample"]["devices"]["devices"][1]
    device["name"] = "card\x1b[2J"
    device["processes"][1]["command"] = "evil\x1b]0;x\x07\u202e"
    document["report"]["servers"][0]["findings"][0]["text"] = "\x1b[31mred"
    document["report"]["servers"][0]["notes"] = ["\x1b[31mred"]
    file = tmp_path / "s.json"
    file.write_text(json.dumps(document))
    for text in shown(snapshot.read(str(file))):
        plain = text.decode() if isinstance(text, bytes) else text
        assert "\x1b" not in plain
        assert "\\u001b" not in plain
        assert "\u202e" not in plain


def test_later_fields_are_passed_over(tmp_path):
    document = json.loads(snapshot.encode(taken(CASES[0])))
    document["sample"]["something_new"] = 1
    file = tmp_path / "s.json"
    file.write_text(json.dumps(document))
    assert snapshot.read(str(file)).sample.host == "gpu-host"


def test_numbers_survive_as_they_are(tmp_path):
    file = tmp_path / "s.json"
    before = taken(CASES[0])
    snapshot.write(file, before)
    assert msgspec.to_builtins(snapshot.read(str(file)).sample) == msgspec.to_builtins(before.sample)
