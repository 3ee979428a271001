"""`memledger oom --collect`: one archive, masked, with a manifest that says what could not be had."""

import gzip
import json
import pickle
import stat
import tarfile

import pytest

from memledger.cli import app
from memledger.postmortem import collect as module
from memledger.postmortem.collect import CollectError, collect


def files_of(path):
    with tarfile.open(path) as archive:
        return {m.name: archive.extractfile(m).read().decode() for m in archive.getmembers()}


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(
        'start \x1b[31m--api-key sk-abcdefghijklmnopqrstuvwxyz123456\n    File "a.py", line 3, in forward\nend\n'
    )
    return path


def test_the_log_is_kept_masked_and_its_indentation_stays(tmp_path, log):
    path, kept = collect(tmp_path / "a.tar.gz", [str(log)], look_here=False)
    text = files_of(path)["memledger/logs/1-server.log"]
    assert "sk-abc" not in text
    assert "\x1b" not in text
    assert '\n    File "a.py", line 3, in forward\nend\n' in text
    assert [one.file for one in kept] == ["logs/1-server.log"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "packed",
    [lambda text: text.encode("utf-16"), lambda text: text.encode("utf-16-le"), lambda t: gzip.compress(t.encode())],
)
def test_secrets_are_masked_in_any_encoding_and_inside_compressed_logs(tmp_path, log, packed):
    text = log.read_text()
    log.write_bytes(packed(text))
    path, _ = collect(tmp_path / "a.tar.gz", [str(log)], look_here=False)
    kept = files_of(path)["memledger/logs/1-server.log"]
    assert "sk-" not in kept.replace("\x00", "").replace("\ufffd", "")
    assert kept.endswith("in forward\nend\n")


def test_what_is_no_text_is_left_out_with_the_reason(tmp_path):
    binary = tmp_path / "snapshot.pickle"
    binary.write_bytes(pickle.dumps({"segments": [{"total_size": n} for n in range(500)]}))
    path, (kept,) = collect(tmp_path / "a.tar.gz", [str(binary)], look_here=False)
    assert (kept.file, kept.reason) == (None, "it is no text, and masking could not see what is in it")
    assert list(files_of(path)) == ["memledger/manifest.json"]


def test_a_large_log_keeps_its_beginning_and_its_end(tmp_path, log, monkeypatch):
    monkeypatch.setattr(module, "HEAD_BYTES", 100)
    monkeypatch.setattr(module, "TAIL_BYTES", 100)
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    path, (kept,) = collect(tmp_path / "a.tar.gz", [str(log)], look_here=False)
    text = files_of(path)["memledger/logs/1-server.log"]
    assert text.startswith("line 0\n")
    assert text.endswith("line 999\n")
    assert "left out" in kept.reason
    assert "left out" in text
    assert len(text) < 400


def test_the_manifest_says_what_could_not_be_had(tmp_path, monkeypatch):
    def refused():
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(
        module, "_MACHINE", (("kernel messages", "dmesg.txt", refused), ("memory", "m.txt", lambda: ("Mem 1", None)))
    )
    path, kept = collect(tmp_path / "a.tar.gz", ["nowhere.log"])
    found = files_of(path)
    sources = {s["source"]: s for s in json.loads(found["memledger/manifest.json"])["sources"]}
    assert sources["kernel messages"] == {
        "source": "kernel messages",
        "file": None,
        "reason": "Operation not permitted",
    }
    assert sources["nowhere.log"]["reason"] == "there is no such file"
    assert found["memledger/m.txt"] == "Mem 1\n"
    assert len(kept) == 3


def test_this_machine_answers_with_its_processes_and_memory(tmp_path):
    path, kept = collect(tmp_path, [])
    found = files_of(path)
    assert "memledger/processes.txt" in found
    assert path.parent == tmp_path
    assert all(one.file or one.reason for one in kept)


def test_nothing_is_overwritten_and_no_device_replaced(tmp_path, log):
    with pytest.raises(CollectError, match="there already"):
        collect(log, [], look_here=False)
    with pytest.raises(CollectError, match="can't be written"):
        collect(tmp_path / "no" / "a.tar.gz", [], look_here=False)
    assert log.read_text().startswith("start")


def test_the_command_says_what_it_kept(tmp_path, log, capsys):
    target = tmp_path / "a.tar.gz"
    assert app.run(["oom", "--collect", str(target), str(log), "--no-live"]) == app.DONE
    assert "logs/1-server.log" in capsys.readouterr().out
    assert app.run(["oom", "--collect", str(target), str(log), "--no-live"]) == app.UNREADABLE
    assert "there already" in capsys.readouterr().err
    assert (
        app.run(["oom", "--collect", str(tmp_path / "b.tar.gz"), str(tmp_path / "gone.log"), "--no-live"])
        == app.UNREADABLE
    )
    assert app.run(["oom", "--collect", str(target), "--format", "json"]) == app.WRONG_USAGE


def test_names_of_logs_cannot_leave_the_archives_folder(tmp_path):
    odd = tmp_path / "..\n\x1b.log"
    odd.write_text("x\n")
    path, _ = collect(tmp_path / "a.tar.gz", [str(odd)], look_here=False)
    assert all(name.startswith("memledger/") and "\n" not in name for name in files_of(path))
