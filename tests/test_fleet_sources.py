"""Which files a fleet is: each once, in one order, whatever names it."""

import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
from fleet_logs import DEMO, write_logs

from memledger.fleet import one, remote, sources
from memledger.fleet.one import Settings, Work
from memledger.fleet.remote import RemoteError, listing, open_remote
from memledger.fleet.sources import Choice, find, listed
from memledger.sources import InputError


def names(found):
    return [Path(file.name).name for file in found.files]


def test_a_folder_is_all_its_files_but_hidden_ones_and_our_own(tmp_path):
    write_logs(tmp_path / "b", 2)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "log").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ranks.jsonl").write_text("x")
    found = find([str(tmp_path)], Choice(), [tmp_path / "out"])
    assert names(found) == ["a.txt", "000.log", "001.log"]
    assert found.problems == ()


def test_a_file_that_several_sources_name_is_one(tmp_path, monkeypatch):
    write_logs(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    found = find(["000.log", "./000.log", str(tmp_path), "*.log", "../" + tmp_path.name], Choice())
    assert names(found) == ["000.log", "001.log"]
    assert all(Path(file.name).is_absolute() for file in found.files)


def test_patterns_choose(tmp_path):
    write_logs(tmp_path, 3)
    (tmp_path / "001.log.gz").write_text("x")
    assert names(find([str(tmp_path)], Choice(include=("*.gz", "000*")))) == ["000.log", "001.log.gz"]
    assert names(find([str(tmp_path / "*")], Choice(exclude=("*.gz", "000*")))) == ["001.log", "002.log"]
    assert names(find([f"{tmp_path}/**/00[12].log"], Choice())) == ["001.log", "002.log"]


def test_a_name_with_brackets_is_a_name_where_there_is_such_a_file(tmp_path):
    (tmp_path / "[a].log").write_text("x")
    assert names(find([str(tmp_path / "[a].log")], Choice())) == ["[a].log"]


def test_what_is_not_there_is_tried_and_what_matches_nothing_is_said(tmp_path):
    found = find([str(tmp_path / "no.log"), str(tmp_path / "*.none"), str(tmp_path)], Choice())
    assert names(found) == ["no.log"]
    assert found.files[0].stamp == ""
    assert [p.rpartition(": ")[2] for p in found.problems] == [
        "no file matches.",
        "no files in this folder (hidden ones are passed over).",
    ]


def test_a_changed_file_has_another_stamp(tmp_path):
    (path,) = write_logs(tmp_path, 1)
    before = find([str(path)], Choice()).files[0]
    path.write_text(path.read_text() + "more\n")
    after = find([str(path)], Choice()).files[0]
    assert before.identity == after.identity
    assert before.stamp != after.stamp


def test_a_list_names_sources_one_a_line():
    assert listed("a.log\n\n# old ones\n  s3://bucket/b.log  \n") == ["a.log", "s3://bucket/b.log"]


def test_urls_are_told_from_paths():
    assert all(map(one.is_remote, ["s3://b/a.log", "zip://a.log::file:///b.zip", "gs://b", "hdfs://host:9000/a"]))
    assert not any(map(one.is_remote, ["/a/b.log", "a.log", "C:/a", "://x", "2026-09-09 a://b"]))


def test_a_url_is_listed_and_read_like_the_file(tmp_path):
    write_logs(tmp_path / "logs", 2)
    found = find([f"file://{tmp_path}/logs", f"file://{tmp_path}/logs/*.log"], Choice())
    assert [file.name for file in found.files] == [f"file://{tmp_path}/logs/00{i}.log" for i in range(2)]
    assert all(file.stamp for file in found.files)
    for file in found.files:
        far, near = (
            msgspec.json.decode(one.read(Work(n, file.size), Settings()).rows)[0] for n in (file.name, file.name[7:])
        )
        assert far.pop("file") != near.pop("file")
        assert far == near


def test_files_in_an_archive_are_files(tmp_path):
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        archive.write(DEMO, "deep/server.log")
    found = find([f"zip://**/*.log::file://{tmp_path}/logs.zip"], Choice())
    assert [file.name for file in found.files] == [f"zip://deep/server.log::file://{tmp_path}/logs.zip"]
    outcome = one.read(found.files[0].work, Settings())
    assert outcome.status == "ok"


def test_a_url_that_is_not_there_is_one_sentence(tmp_path):
    found = find([f"file://{tmp_path}/none", "nosuchscheme://a/b"], Choice())
    assert found.files == ()
    assert found.problems[0] == f"file://{tmp_path}/none: there is no such file or folder; check the name."
    assert "nosuchscheme" in found.problems[1]
    outcome = one.read(Work(f"file://{tmp_path}/none"), Settings())
    assert outcome.status == "unreadable"


def test_the_package_of_a_store_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(RemoteError, match=r"s3:// takes a package of its own: pip install s3fs"):
        listing("s3://bucket/logs")


def test_fsspec_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(InputError, match=r"pip install 'fsspec>=[\d.]+' 'pyarrow>=[\d.]+'"):
        open_remote("s3://bucket/a.log")


class Breaking:
    """A stream that breaks off."""

    def __init__(self, data):
        self.data = data

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def read(self, size):
        if not self.data:
            raise ConnectionError("the store hung up")
        data, self.data = self.data[:size], b""
        return data


def test_a_store_that_breaks_off_gives_what_came_and_says_so(monkeypatch):
    monkeypatch.setattr(remote, "open_remote", lambda url: remote.RemoteInput(url, Breaking(DEMO.read_bytes()), None))
    outcome = one.read(Work("s3://bucket/a.log", 9), Settings())
    row = msgspec.json.decode(outcome.rows)[0]
    assert outcome.status == "partial"
    assert "the store hung up" in row["error"]
    assert row["weights_bytes"] > 0


def test_a_reader_that_ends_early_leaves_no_thread(tmp_path):
    (tmp_path / "a.log").write_bytes(b"line\n" * 10**6)
    with open_remote(f"file://{tmp_path}/a.log") as source:
        next(source.blocks())
    assert not source._thread.is_alive()


def test_identities_hold_no_secret():
    file = sources.File("s3://key:secretsecret@bucket/a.log")
    assert "secret" not in file.identity
