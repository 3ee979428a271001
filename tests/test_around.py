"""The lines beside quoted ones: the right ones, cleaned, and none from a file that says something else by now."""

import gzip

import pytest

from memledger.around import LONGEST_NEIGHBOUR, REQUEST_LEFT_OUT, is_a_file, neighbours
from memledger.ledger import Evidence, Input
from memledger.sources import BLOCK_BYTES


def told(path, *lines, count=2):
    quoted = [Evidence(0, line, f"line {line} of the log") for line in lines]
    return [(n.line, n.text) for n in neighbours([Input(str(path), 0, 0)], quoted, count)]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("".join(f"line {i} of the log\n" for i in range(1, 21)))
    return path


def test_two_lines_on_each_side(log):
    assert told(log, 10) == [(i, f"line {i} of the log") for i in (8, 9, 11, 12)]


def test_at_the_ends_there_are_fewer(log):
    assert [line for line, _ in told(log, 1)] == [2, 3]
    assert [line for line, _ in told(log, 20)] == [18, 19]


def test_what_is_quoted_is_nobodys_neighbour_and_nothing_stands_twice(log):
    assert [line for line, _ in told(log, 9, 11)] == [7, 8, 10, 12, 13]


def test_a_last_line_without_an_end_is_a_line(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("line 1 of the log\nnot ended")
    assert told(path, 1) == [(2, "not ended")]


def test_lines_that_blocks_cut_in_two_are_whole(tmp_path):
    path = tmp_path / "a.log"
    filler = "x" * (BLOCK_BYTES - 40)
    path.write_text(f"{filler}\nline 2 of the log\nafter it, over the end of the block\nlast\n")
    assert told(path, 2) == [
        (1, "x" * (LONGEST_NEIGHBOUR - 1) + "…"),
        (3, "after it, over the end of the block"),
        (4, "last"),
    ]


def test_compressed_inputs_count_the_same(tmp_path, log):
    packed = tmp_path / "server.log.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    assert told(packed, 10) == told(log, 10)


def test_a_file_that_says_something_else_now_has_no_neighbours(log):
    log.write_text("another log\n" * 20)
    assert told(log, 10) == []


def test_a_file_that_is_gone_and_a_pipe_have_none(tmp_path):
    assert told(tmp_path / "gone.log", 1) == []
    assert neighbours([Input("-", 0, 0)], [Evidence(0, 1, "line 1 of the log")]) == ()
    assert not is_a_file("a\0b")


def test_secrets_and_escapes_do_not_come_in_through_the_side_door(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("\x1b[31mexport HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123\x1b[0m\nline 2 of the log\n")
    ((_, text),) = told(path, 2)
    assert "\x1b" not in text
    assert "hf_abcdefghij" not in text


def test_a_request_is_left_out(tmp_path):
    path = tmp_path / "a.log"
    request = "INFO 09-01 10:00:00 logger.py:42] Received request cmpl-1: prompt: 'my diary', params: None"
    path.write_text(f"{request}\nline 2 of the log\n")
    assert told(path, 2) == [(1, REQUEST_LEFT_OUT)]


def test_of_a_progress_bar_its_last_state(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"  0%|  | 0/2\r 50%|  | 1/2\r100%|  | 2/2\r\nline 2 of the log\n")
    assert told(path, 2) == [(1, "100%|  | 2/2")]
