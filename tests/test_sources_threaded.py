"""Blocks from a second thread: the same, in order, with their errors; and no thread is left behind."""

import gzip
import itertools
import threading

import pytest

from memledger.sources import open_input
from memledger.sources.threaded import BLOCKS_AHEAD, made_ahead


def names():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("memledger")]


def test_blocks_come_in_order_and_the_thread_ends_with_the_last():
    blocks = [b"%d" % n for n in range(100)]
    assert list(made_ahead(iter(blocks))) == blocks
    assert names() == []


def test_what_making_a_block_raises_is_raised_after_the_blocks_before_it():
    def failing():
        yield b"first"
        raise EOFError("cut")

    blocks = made_ahead(failing())
    assert next(blocks) == b"first"
    with pytest.raises(EOFError, match="cut"):
        next(blocks)
    assert names() == []


def test_no_more_is_made_than_is_held_and_the_thread_ends_with_its_reader():
    made = []

    def endless():
        for number in itertools.count():
            made.append(number)
            yield b"x"

    blocks = made_ahead(endless())
    next(blocks)
    blocks.close()
    assert names() == []
    assert len(made) <= BLOCKS_AHEAD * 2 + 3


def test_a_compressed_file_that_is_not_read_to_its_end_leaves_no_thread(tmp_path):
    path = tmp_path / "server.log.gz"
    path.write_bytes(gzip.compress(b"a line of the log\n" * 500_000))
    with open_input(str(path)) as source:
        blocks = source.blocks()
        assert next(blocks).startswith(b"a line")
        assert names() != []
        blocks.close()
        assert names() == []
