"""The engine of one machine: processes that start once and are given one file after the other.

The standard pools lose what a killed process had, or wait for it for ever; here a process that ends costs its file a second try.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final

import msgspec

from memledger.fleet import one
from memledger.fleet.engine import EngineError, Reader
from memledger.fleet.limits import GRACE_SECONDS, limit_memory
from memledger.fleet.one import Outcome, Settings, Work

TRIES: Final = 2
"""A file is given to so many processes that end over it, before its row says so."""
START_TRIES: Final = 3
POLL_SECONDS: Final = 0.2
KILL_AFTER_SECONDS: Final = GRACE_SECONDS + 5.0
"""Beyond a file's time: a process ends itself; where it is stopped and can't, it is killed."""


class _Worker:
    """One process. `work` is the file it has; None: it waits for one."""

    def __init__(self, context: Any, settings: Settings, reader: Reader) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings, reader), daemon=True)
        # Ctrl-C reaches all processes of a terminal: this one decides what becomes of it. The mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.ready = False
        self.work: Work | None = None
        self.since = 0.0

    def give(self, work: Work) -> bool:
        """Hand a file over; False where the process has ended."""
        try:
            self.pipe.send_bytes(msgspec.json.encode(work))
        except OSError:
            return False
        self.work, self.since = work, time.monotonic()
        return True

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class LocalEngine:
    """Processes of this machine; `reader` is what they do with a file."""

    def __init__(self, workers: int, settings: Settings, reader: Reader = one.read) -> None:
        self._count = workers
        self._settings = settings
        self._reader = reader
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._never_ready = 0

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    @property
    def pids(self) -> list[int]:
        """The processes that read."""
        return [worker.process.pid for worker in self._workers]

    def results(self, work: Sequence[Work], ended: Callable[[], bool]) -> Iterator[tuple[Work, Outcome]]:
        """See `memledger.fleet.engine.Engine`."""
        waiting = deque(work)
        tries: dict[Work, int] = {}
        while (waiting or any(worker.work for worker in self._workers)) and not ended():
            self._fill(waiting)
            for pipe in wait([worker.pipe for worker in self._workers], POLL_SECONDS):
                worker = next(w for w in self._workers if w.pipe is pipe)
                done = self._heard(worker, waiting, tries)
                if done is not None:
                    yield done
            for worker in [w for w in self._workers if self._is_late(w)]:
                late = worker.work
                self._drop(worker)
                if late is not None:
                    yield late, one.failure(late, "time_limit", one.time_words(self._settings))

    def _fill(self, waiting: deque[Work]) -> None:
        while len(self._workers) < min(self._count, len(waiting) + sum(w.work is not None for w in self._workers)):
            try:
                self._workers.append(_Worker(self._context, self._settings, self._reader))
            except OSError as error:
                raise EngineError(f"a process can't be started: {error.strerror or error}.") from error
        for worker in self._workers:
            if worker.ready and worker.work is None and waiting and worker.give(waiting[0]):
                waiting.popleft()

    def _heard(self, worker: _Worker, waiting: deque[Work], tries: dict[Work, int]) -> tuple[Work, Outcome] | None:
        """What a process said: that it is ready, the outcome of its file, or (it has ended) nothing."""
        try:
            said = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return self._died(worker, waiting, tries)
        if not worker.ready:
            worker.ready = True
            self._never_ready = 0
            return None
        work, worker.work = worker.work, None
        assert work is not None
        outcome = msgspec.json.decode(said, type=Outcome)
        if outcome.status == "memory_limit":
            self._drop(worker)  # what it holds, it may never give back
        return work, outcome

    def _died(self, worker: _Worker, waiting: deque[Work], tries: dict[Work, int]) -> tuple[Work, Outcome] | None:
        worker.process.join()
        code, took = worker.process.exitcode, time.monotonic() - worker.since
        work = worker.work
        self._drop(worker)
        if work is None:
            self._never_ready += not worker.ready
            if self._never_ready >= START_TRIES:
                raise EngineError(f"the processes that read end as they start ({_how(code)}).")
            return None
        if took >= self._settings.time_limit_s + GRACE_SECONDS:
            return work, one.failure(work, "time_limit", one.time_words(self._settings))
        tries[work] = tries.get(work, 0) + 1
        if tries[work] < TRIES:
            waiting.appendleft(work)
            return None
        return work, one.failure(work, "crashed", f"the process that read it ended {TRIES} times: {_how(code)}.")

    def _is_late(self, worker: _Worker) -> bool:
        return (
            worker.work is not None
            and time.monotonic() - worker.since > self._settings.time_limit_s + KILL_AFTER_SECONDS
        )

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()


def _how(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"{name}: killed by hand, or by the kernel for want of memory" if name == "SIGKILL" else name


def _end_with_parent() -> None:
    """End this process when the one that asks has ended, whatever it does then: a file may keep it for long."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve(pipe: Connection, settings: Settings, reader: Reader) -> None:
    """What a process does: files in, outcomes out, until nobody asks any more."""
    _end_with_parent()
    one.prepare(settings)
    limit_memory(settings.memory_limit_bytes)
    try:
        pipe.send_bytes(b"ready")
        while True:
            work = msgspec.json.decode(pipe.recv_bytes(), type=Work)
            pipe.send_bytes(msgspec.json.encode(reader(work, settings)))
    except (EOFError, OSError):
        return  # the process that asks has ended
