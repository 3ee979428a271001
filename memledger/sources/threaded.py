"""Blocks made in a second thread, a few ahead of who reads them: decompressors let go of the interpreter while they work."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Generator, Iterator
from typing import Final

BLOCKS_AHEAD: Final = 4
"""As many are held; more would only take memory."""


SWITCHES_AFTER_SECONDS: Final = 0.0002
"""How long who reads may keep the interpreter from a thread that wants it for a moment, to begin its next block."""


class _End:
    """What comes after the last block: how it ended."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def made_ahead(blocks: Iterator[bytes]) -> Generator[bytes, None, None]:
    """The same blocks in the same order; what making them raises is raised here.

    The thread ends with the last block, or as soon as this iterator is closed.
    """
    made: queue.Queue[bytes | _End] = queue.Queue(BLOCKS_AHEAD)
    stopped = threading.Event()

    def make() -> None:
        end = _End()
        try:
            for block in blocks:
                made.put(block)
                if stopped.is_set():
                    return
        except BaseException as error:  # the reader raises it
            end = _End(error)
        made.put(end)

    thread = threading.Thread(target=make, name="memledger-decompressor", daemon=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCHES_AFTER_SECONDS)
    thread.start()
    try:
        while not isinstance(block := made.get(), _End):
            yield block
        if block.error is not None:
            raise block.error
    finally:
        sys.setswitchinterval(before)
        stopped.set()
        while thread.is_alive():
            # It may be waiting for room.
            while not made.empty():
                made.get_nowait()
            thread.join(0.01)
