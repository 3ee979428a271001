"""A running server's log, read once and then read on as it grows."""

from __future__ import annotations

import threading
import time
from typing import Final

import msgspec

from memledger import pipeline
from memledger.ledger import Report

RETRY_S: Final = 60.0
"""Seconds after which a log that could not be read is tried again."""


class LogState(msgspec.Struct, frozen=True):
    """How far the reading is: the report so far (None before the end was first reached), and why nothing more comes."""

    report: Report | None = None
    problem: str | None = None


class FollowedLog:
    """One log in a thread of its own, so that a long one, or a folder that hangs, holds up nothing else.

    The file is read to its end, and from there on at intervals: what was read is never read again. Rotation and truncation are
    noticed by `memledger.sources.follow`. A compressed log is read once.
    """

    def __init__(self, path: str, interval_s: float) -> None:
        self.path = path
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._state = LogState()
        self._thread = self._started()

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="memledger-log", daemon=True)
        thread.start()
        return thread

    def state(self) -> LogState:
        """What is known by now; never waits."""
        if self._state.problem is not None and not self._thread.is_alive() and time.monotonic() > self._retry_at:
            self._thread = self._started()
        return self._state

    def close(self) -> None:
        """Read no further; the thread ends by itself."""
        self._ended.set()

    def _run(self) -> None:
        try:
            got = pipeline.read([self.path], on_idle=self._take, ended=self._ended.is_set)
            problem = " ".join(got.problems) or None
            state = LogState(None if problem else got.report, problem)
        except Exception as error:
            # Kept, said on stderr and shown as a source without success: the other servers go on.
            state = LogState(None, f"{type(error).__name__}: {error}")
        self._retry_at = time.monotonic() + RETRY_S
        self._state = state

    def _take(self, report: Report) -> bool:
        self._state = LogState(report)
        return not self._ended.wait(self._interval_s)
