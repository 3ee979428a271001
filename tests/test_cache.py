"""The cache of what takes long to prepare: used where it can be trusted, silent where it can't be."""

import os
from pathlib import Path

import pytest

from memledger.cache import MOST_FILES, cached, key_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMLEDGER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fail() -> bytes:
    raise AssertionError("made again")


def test_what_was_made_is_found_again(folder: Path) -> None:
    assert cached("rules", "k", lambda: b"made") == b"made"
    assert cached("rules", "k", fail) == b"made"
    assert cached("rules", "other", lambda: b"other") == b"other"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_key_follows_the_content() -> None:
    assert key_of("a", b"b") == key_of(b"a", "b")
    assert len({key_of("a", "b"), key_of("ab"), key_of("b", "a"), key_of("ab", "")}) == 4


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_could_have_written_is_not_trusted(folder: Path, mode: int) -> None:
    cached("rules", "k", lambda: b"made")
    (folder / "rules-k").chmod(mode)
    assert cached("rules", "k", lambda: b"again") == b"again"


def test_a_folder_that_others_can_write_is_neither_trusted_nor_written(folder: Path) -> None:
    cached("rules", "k", lambda: b"made")
    folder.chmod(0o777)
    assert cached("rules", "k", lambda: b"again") == b"again"
    assert cached("rules", "k", lambda: b"and again") == b"and again"


def test_a_file_of_another_user_is_not_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached("rules", "k", lambda: b"made")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cached("rules", "k", lambda: b"again") == b"again"


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    cached("rules", "k", lambda: b"made")
    (folder / "rules-k").rename(tmp_path / "elsewhere")
    (folder / "rules-k").symlink_to(tmp_path / "elsewhere")
    assert cached("rules", "k", lambda: b"again") == b"again"


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100])
def test_a_damaged_file_is_made_again(folder: Path, content: bytes) -> None:
    cached("rules", "k", lambda: b"made")
    (folder / "rules-k").write_bytes(content)
    assert cached("rules", "k", lambda: b"again") == b"again"
    assert cached("rules", "k", fail) == b"again"


@pytest.mark.parametrize("where", ["", "/proc/nowhere", "/dev/null/x"])
def test_no_place_to_write_is_no_failure(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setenv("MEMLEDGER_CACHE", where)
    assert cached("rules", "k", lambda: b"made") == b"made"


def test_old_files_are_forgotten(folder: Path) -> None:
    for number in range(MOST_FILES + 5):
        cached("rules", str(number), lambda: b"made")
    assert len(list(folder.iterdir())) == MOST_FILES
