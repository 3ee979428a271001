"""What is done is kept as soon as it is done, and is not done again unless something changed."""

import os

import pytest

from memledger import __version__
from memledger.fleet import journal as module
from memledger.fleet.journal import Journal, JournalError, fingerprint
from memledger.fleet.one import Settings, Work, failure, outcome
from memledger.fleet.sources import File

A = File("/logs/a.log", 5, "5:1")
B = File("/logs/b.log", 6, "6:1")
ROWS = [{"file": "/logs/a.log", "status": "ok"}]
SETTINGS = Settings()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


def kept(path, file, settings=SETTINGS, **how):
    with Journal(path, settings) as journal:
        return journal.has(file, **how)


def with_a_done(path):
    with Journal(path, SETTINGS) as journal:
        journal.add(A, outcome("ok", ROWS))
    return path


def test_what_is_done_is_found_again_with_its_rows(path):
    with_a_done(path)
    with Journal(path, SETTINGS) as journal:
        assert journal.has(A)
        assert not journal.has(B)
        assert journal.rows(A) == ROWS
        assert journal.rows(B) is None


@pytest.mark.parametrize(
    "changed", [File(A.name, 6, "6:1"), File(A.name, 5, "5:2"), File("/logs/other.log", 5, "5:1"), File(A.name, 5, "")]
)
def test_a_file_that_changed_is_not_done(path, changed):
    assert not kept(with_a_done(path), changed)


def test_other_settings_or_another_version_are_not_done(path, tmp_path, monkeypatch):
    with_a_done(path)
    rules = tmp_path / "rules.toml"
    rules.write_text("a")
    assert not kept(path, A, Settings(gpu_total="80GiB"))
    assert not kept(path, A, Settings(rule_files=(str(rules),)))
    assert kept(path, A, Settings(time_limit_s=1.0, memory_limit_bytes=2**20)), "limits change no figure"
    monkeypatch.setattr(module, "__version__", __version__ + ".post1")
    assert not kept(path, A)


def test_the_content_of_rules_and_config_counts_not_their_names(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text("the same")
    one, two = (Settings(rule_files=(str(tmp_path / name),)) for name in "ab")
    assert fingerprint(one) == fingerprint(two)
    (tmp_path / "b").write_text("another")
    assert fingerprint(one) != fingerprint(two)


def test_the_last_outcome_of_a_file_counts(path):
    with Journal(path, SETTINGS) as journal:
        journal.add(A, failure(Work(A.name), "unreadable", "no"))
        journal.add(A, outcome("ok", ROWS))
        assert journal.rows(A) == ROWS
    with Journal(path, SETTINGS) as journal:
        assert journal.rows(A) == ROWS


def test_a_failure_is_kept_unless_it_is_to_be_tried_again(path):
    with Journal(path, SETTINGS) as journal:
        journal.add(A, failure(Work(A.name), "crashed", "twice"))
    assert kept(path, A)
    assert not kept(path, A, retry_failed=True)
    assert kept(with_a_done(path), A, retry_failed=True)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_off_is_dropped_and_the_rest_stays(path, cut):
    with Journal(path, SETTINGS) as journal:
        journal.add(A, outcome("ok", ROWS))
        journal.add(B, outcome("ok", ROWS))
    os.truncate(path, path.stat().st_size - cut)
    with Journal(path, SETTINGS) as journal:
        assert journal.has(A)
        assert not journal.has(B)
        journal.add(B, outcome("ok", ROWS))
    assert kept(path, A)
    assert kept(path, B)


def test_a_journal_that_was_cut_in_its_first_line_is_empty(path):
    path.write_bytes(module.HEAD[:10])
    assert not kept(path, A)
    assert kept(with_a_done(path), A)


def test_a_file_that_is_no_journal_is_left_alone(path):
    path.write_text("precious\n")
    with pytest.raises(JournalError, match="no journal"):
        kept(path, A)
    assert path.read_text() == "precious\n"


def test_a_link_is_not_followed(path, tmp_path):
    target = tmp_path / "precious"
    target.write_text("")
    path.symlink_to(target)
    with pytest.raises(JournalError, match="can't be opened"):
        kept(path, A)


def test_two_runs_do_not_write_one_journal(path):
    with Journal(path, SETTINGS), pytest.raises(JournalError, match="another memledger fleet"):
        kept(path, A)
    assert not kept(path, A)


def test_restart_forgets(path):
    with_a_done(path)
    with Journal(path, SETTINGS) as journal:
        journal.restart()
        assert not journal.has(A)
        journal.add(B, outcome("ok", ROWS))
    assert not kept(path, A)
    assert kept(path, B)


def test_a_file_without_a_stamp_has_its_rows_in_this_run_only(path):
    unknown = File("/dev/stdin")
    with Journal(path, SETTINGS) as journal:
        journal.add(unknown, outcome("ok", ROWS))
        assert journal.rows(unknown) == ROWS
    with Journal(path, SETTINGS) as journal:
        assert journal.rows(unknown) is None
