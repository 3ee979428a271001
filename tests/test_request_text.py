"""Where a logged request ends: on its line, further down where its text has line ends, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.request_text import _CLOSES, _OPENS, LONGEST_REQUEST, _closes_on_its_line, end_of_request, shows_request

OPEN = b"INFO 09-09 10:00:00 [logger.py:37] Received request c-1: prompt: 'a"
PIECES = st.sampled_from(
    [b"', params: ", b'", params: ', b"', prompt_token_ids: ", b", stream=", b"sampling_params=", b")", b" ", b"\r", b"\t", b"x", b"'", b"\v"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=12))
def test_a_line_closes_its_request_where_the_pattern_says_so_or_a_bracket_ends_it(pieces):
    line = OPEN + b"".join(pieces)
    start = _OPENS.search(line).end()
    expected = _CLOSES.search(line, start) is not None or line.rstrip().endswith(b")")
    assert _closes_on_its_line(line, start, 0, len(line)) == expected


def test_blanks_after_the_bracket_do_not_matter_however_many():
    line = OPEN + b")" + b" " * 500
    assert end_of_request(line + b"\nnext\n", 0, len(line), more=True) == len(line)


@pytest.mark.parametrize("more", [True, False])
def test_a_request_goes_on_to_the_line_that_closes_it(more):
    data = OPEN + b"\nb\nc', params: SamplingParams(n=1)\nnext\n"
    assert end_of_request(data, 0, len(OPEN), more) == data.index(b"\nnext")


def test_where_the_closing_line_may_still_come_it_is_waited_for_so_far():
    assert end_of_request(OPEN + b"\nb\n", 0, len(OPEN), more=True) is None
    assert end_of_request(OPEN + b"\nb\n", 0, len(OPEN), more=False) == len(OPEN)
    assert end_of_request(OPEN + b"\n" + b"b\n" * LONGEST_REQUEST, 0, len(OPEN), more=True) == len(OPEN)


def test_another_request_before_the_end_says_that_this_one_was_cut():
    data = OPEN + b"\nb\n" + OPEN + b"', params: SamplingParams(n=1)\n"
    assert end_of_request(data, 0, len(OPEN), more=False) == len(OPEN)


def test_only_a_message_that_starts_so_shows_a_request():
    assert shows_request(OPEN)
    assert not shows_request(b"[2026-09-09 10:00:00 TP0] Memory pool end. Received request c-1: prompt: 'a")
