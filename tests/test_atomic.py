"""Files are written whole or not at all, and nothing but a file is replaced."""

import os
import stat

import pytest

from memledger.atomic import write_bytes


def test_a_file_is_replaced_with_the_mode_asked_for(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"old")
    write_bytes(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path) == ["out"]


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path):
    (tmp_path / "file").write_bytes(b"somebody else's")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").read_bytes() == b"new"
    assert (tmp_path / "file").read_bytes() == b"somebody else's"


def test_a_pipe_or_folder_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="no regular file"):
            write_bytes(tmp_path / name, b"new")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert names(tmp_path) == ["folder", "pipe"]


def test_a_failure_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["out"]
