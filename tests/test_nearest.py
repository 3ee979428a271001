"""Suggestions for a mistyped file or rank: the nearest name, and none where nothing is near."""

from memledger.cli import app
from memledger.nearest import nearest, nearest_file
from memledger.resources import demo_log


def test_the_nearest_file_of_the_same_folder_is_named_as_it_was_written(tmp_path, monkeypatch):
    for name in ("server.log", "dmesg.txt"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert nearest_file("servr.log") == "server.log"
    assert nearest_file("./Server.LOG") == "./server.log"
    assert nearest_file(f"{tmp_path}/dmseg.txt") == f"{tmp_path}/dmesg.txt"
    assert nearest_file("zzz") is None
    assert nearest_file("no/such/folder/server.log") is None
    assert nearest_file("a\0b") is None


def test_a_link_to_nothing_is_not_answered_with_itself(tmp_path):
    (tmp_path / "server.log").symlink_to(tmp_path / "gone")
    assert nearest_file(str(tmp_path / "server.log")) is None


def test_the_nearest_of_some_names_whatever_their_case():
    assert nearest("tpo", ["TP0", "DP1 TP3"]) == "TP0"
    assert nearest("x", ["TP0"]) is None


def test_a_mistyped_log_is_answered_with_the_one_that_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.log").write_text("")
    assert app.run(["explain", "sever.log"]) == 4
    assert "sever.log: there is no such file; did you mean server.log?" in capsys.readouterr().err


def test_a_mistyped_rank_is_answered_with_the_one_that_is_there(capsys):
    assert app.run(["explain", str(demo_log()), "--rank", "tpo"]) == 2
    assert "no rank 'tpo' (did you mean 'TP0'?)" in capsys.readouterr().err
