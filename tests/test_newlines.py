"""Line ends are counted alike, whatever counts them."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.newlines import counter, plain


@pytest.fixture
def chosen_anew():
    counter.cache_clear()
    yield
    counter.cache_clear()


@given(st.binary(max_size=300), st.integers(0, 200))
def test_every_line_end_counts_once_wherever_it_stands(data, before):
    block = b"x" * before + data
    assert counter()(block) == plain(block) == sum(byte == 10 for byte in block)


def test_a_block_of_nothing_but_line_ends():
    assert counter()(b"\n" * 262_145) == 262_145


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python's own is as fast from 3.14 on")
def test_the_fast_counter_is_the_one_that_counts(chosen_anew):
    assert counter() is not plain


def test_without_it_python_counts(chosen_anew, monkeypatch):
    monkeypatch.setitem(sys.modules, "stringzilla", None)
    assert counter() is plain
