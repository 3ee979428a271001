"""Files that are something else: pipes, devices, links, /proc, files swapped while they are looked at, folders of somebody else's.

Compressed inputs are in test_sources.py, files replaced by outputs in test_atomic.py, the cache in test_cache.py.
"""

import os
import stat
import threading
from pathlib import Path

import pytest

from memledger import cache
from memledger.atomic import write_bytes
from memledger.cli import app
from memledger.compare.load import read_json
from memledger.grammar import GrammarError, load_rules
from memledger.live.snapshot import SnapshotError
from memledger.live.snapshot import read as read_snapshot
from memledger.model.find import ModelConfigError, read_file
from memledger.opening import NotAFileError, descriptor_of, open_file
from memledger.opening import read_file as read_bytes
from memledger.postmortem.torch_snapshot import SnapshotPickleError
from memledger.postmortem.torch_snapshot import read as read_pickle

WITHIN = 60


def ended(work):
    """What `work` gives, or raises; it must not wait for a pipe's other end."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WITHIN)
    assert not thread.is_alive(), "it waits for the pipe's other end"
    return found[0]


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def says_file(path):
    """What `Path.is_file` says of a file that is a pipe by the time it is opened."""
    return True


class TestWhatIsOpened:
    def test_a_file_is_read_and_one_that_is_too_long_is_not(self, tmp_path):
        (tmp_path / "file").write_bytes(b"12345")
        assert read_bytes(tmp_path / "file", 5) == b"12345"
        assert read_bytes(tmp_path / "file", 4) is None
        (tmp_path / "link").symlink_to(tmp_path / "file")
        with open_file(tmp_path / "link") as stream:
            assert stream.read() == b"12345"

    @pytest.mark.parametrize("name", ["/dev/null", "/dev/zero", "/", "pipe"])
    def test_what_is_no_file_is_refused_and_its_descriptor_closed(self, name, pipe):
        before = len(list(Path("/proc/self/fd").iterdir()))
        found = ended(lambda: descriptor_of(pipe if name == "pipe" else name))
        assert isinstance(found, NotAFileError)
        assert found.strerror == "it is no regular file"
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    @pytest.mark.parametrize(
        ("read", "refusal"),
        [
            (read_file, ModelConfigError),
            (lambda path: read_snapshot(str(path)), SnapshotError),
            (lambda path: load_rules([path]), GrammarError),
            (read_pickle, SnapshotPickleError),
        ],
        ids=["config", "snapshot", "rules", "pickle"],
    )
    @pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
    def test_a_pipe_or_device_put_in_a_files_place_is_refused_in_a_sentence(
        self, read, refusal, name, pipe, monkeypatch
    ):
        monkeypatch.setattr(Path, "is_file", says_file)
        found = ended(lambda: read(pipe if name == "pipe" else Path(name)))
        assert isinstance(found, refusal)
        assert "\n" not in str(found)

    def test_a_pipe_in_a_reports_place_is_no_report(self, pipe, monkeypatch):
        monkeypatch.setattr(Path, "is_file", says_file)
        monkeypatch.setattr("memledger.compare.load.LARGEST_JSON", 2**62)
        assert ended(lambda: read_json(str(pipe))) is None

    def test_a_rule_file_has_a_largest_size(self, tmp_path):
        (tmp_path / "r.toml").write_bytes(b"#" * (2**22 + 1))
        with pytest.raises(GrammarError, match="larger than 4 MiB"):
            load_rules([tmp_path / "r.toml"])


class TestInputs:
    @pytest.mark.parametrize(
        "name",
        [
            "/dev/zero",
            "/dev/mem",
            "/dev/random",
            "/proc/self/mem",
            "/proc/kcore",
            "/proc/self/fd",
            "/proc/1/environ",
            "/",
        ],
    )
    def test_devices_and_files_of_the_kernel_end_in_a_sentence(self, name, capsys):
        if not Path(name).exists():
            pytest.skip(f"no {name} here")
        if name == "/proc/kcore":
            pytest.skip("a regular file of the kernel's, as long as the address space: read as any other file")
        code = ended(lambda: app.run(["explain", "--no-live", name]))
        out, err = capsys.readouterr()
        assert code in {app.NOTHING_RECOGNISED, app.UNREADABLE}
        assert out == ""
        assert "Traceback" not in err
        assert "internal error" not in err

    def test_a_link_that_leads_to_itself(self, tmp_path, capsys):
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        assert app.run(["explain", "--no-live", str(tmp_path / "loop")]) == app.UNREADABLE
        assert "Traceback" not in capsys.readouterr().err

    def test_a_name_that_acts_on_a_terminal_is_shown_without_acting(self, tmp_path, capsys):
        bad = tmp_path / "\x1b[2J\x1b]0;title\x07\u202egol.log"
        for arguments in (
            ["explain", str(bad)],
            ["explain", str(bad), "--rank", "\x1b[5m"],
            ["explain", f"--{bad.name}"],
            [bad.name],
        ):
            bad.unlink(missing_ok=True)
            for _ in range(2):
                assert app.run(arguments) != app.INTERNAL_ERROR
                shown = "".join(capsys.readouterr())
                assert shown
                assert not set(shown) & {"\x1b", "\x07", "\u202e"}
                bad.write_text("no log\n")


class TestOutputs:
    def test_a_new_file_has_its_mode_from_the_beginning_and_the_umask_holds(self, tmp_path, monkeypatch):
        """Set by name afterwards, who owns the folder could put a link there and have another file's mode changed."""
        monkeypatch.setattr(os, "chmod", None)
        monkeypatch.setattr(Path, "chmod", None)
        before = os.umask(0o077)
        try:
            write_bytes(tmp_path / "private", b"x")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600

    def test_names_of_parts_cannot_be_told_in_advance(self, tmp_path, monkeypatch):
        seen = []
        monkeypatch.setattr(Path, "replace", lambda part, path: seen.append(part.name))
        for _ in range(2):
            write_bytes(tmp_path / "out", b"x")
        assert len(set(seen)) == 2

    def test_a_part_that_is_there_is_never_opened(self, tmp_path, monkeypatch):
        (tmp_path / "target").write_bytes(b"somebody else's")
        names = iter([b"\0" * 6, b"\1" * 6])
        monkeypatch.setattr(os, "urandom", lambda size: next(names))
        (tmp_path / f".out.{'00' * 6}.part").symlink_to(tmp_path / "target")
        write_bytes(tmp_path / "out", b"new")
        assert (tmp_path / "target").read_bytes() == b"somebody else's"
        assert (tmp_path / "out").read_bytes() == b"new"


class TestCacheOfSomebodyElse:
    """Started with another user's HOME (`sudo`), or in a folder that another user owns."""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MEMLEDGER_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_a_link_in_the_folders_place_is_not_entered(self, folder, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        for number in range(30):
            (elsewhere / f"precious-{number}").write_text("x")
        folder.symlink_to(elsewhere)
        assert cache.cached("rules", "k", lambda: b"made") == b"made"
        assert cache.cached("rules", "k", lambda: b"again") == b"again"
        assert len(list(elsewhere.iterdir())) == 30

    def test_a_folder_swapped_for_a_link_while_it_is_written_loses_nothing(self, folder, tmp_path, monkeypatch):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        for number in range(30):
            (elsewhere / f"precious-{number}").write_text("x")
        check = cache._is_ours

        def swapped(status):
            if stat.S_ISDIR(status.st_mode) and folder.is_dir() and not folder.is_symlink():
                folder.rename(tmp_path / "moved")
                folder.symlink_to(elsewhere)
            return check(status)

        folder.mkdir(mode=0o700)
        monkeypatch.setattr(cache, "_is_ours", swapped)
        assert cache.cached("rules", "k", lambda: b"made") == b"made"
        assert len(list(elsewhere.iterdir())) == 30
        assert not any(entry.name.startswith("rules") for entry in elsewhere.iterdir())

    def test_somebody_elses_content_is_never_used(self, folder, monkeypatch):
        cache.cached("rules", "k", lambda: b"made")
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert cache.cached("rules", "k", lambda: b"own") == b"own"
        assert (folder / "rules-k").read_bytes().endswith(b"made")
