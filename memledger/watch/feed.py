"""What a watch tells, as it comes: from a running server, from a growing log, or from a recording played again.

Whatever takes long (the driver, a port, a disk) is waited for in threads of their own; who asks for events never waits.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from memledger.conclude import complete
from memledger.export.logs import FollowedLog, LogState
from memledger.grammar import RuleSet, load_rules
from memledger.history import ServingLines
from memledger.ledger import Report, Usage
from memledger.live import attach, gather, rebuild
from memledger.live.sample import LiveServer, Sample
from memledger.opening import open_file
from memledger.sanitize import clean
from memledger.watch.moment import End, Event, Grown, Moment, Serving, Start

FIRST_READING_S: Final = 3.0
"""How long the first look waits for the log to be read; a longer log is shown when it is read."""
REPORT_EVERY_S: Final = 15.0
"""Seconds after which a log that only tells of new peaks is reported on again."""
TAIL_BYTES: Final = 32 * 1024

Sink = Callable[[Event], None]


class Feed(Protocol):
    """A source of events."""

    def events(self) -> list[Event]:
        """What happened since the last call; never waits."""

    def close(self) -> None:
        """Look no further."""

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""


class Thread:
    """Events made in a thread. `sink` is given each of them first, there (a recorder); an error of it ends the feed.

    `failed`: the error that ended it, to be raised where it can be said.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.failed: Exception | None = None
        self._thread = threading.Thread(target=self._guarded, name="memledger-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def events(self) -> list[Event]:
        """What happened since the last call; never waits."""
        found: list[Event] = []
        while True:
            try:
                found.append(self._queue.get_nowait())
            except queue.Empty:
                return found

    def close(self) -> None:
        """Look no further; what the sink was given is complete when this returns, unless a driver hangs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return not self._thread.is_alive() and self._queue.empty()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.failed = error

    def _run(self) -> None:
        raise NotImplementedError

    def _tell(self, event: Event) -> None:
        if self._sink is not None:
            self._sink(event)
        self._queue.put(event)


class LogReports:
    """The report of a log that is read on, with its findings; a new value only where there is something new to tell."""

    def __init__(self, path: str, interval_s: float, *, rules: RuleSet, model_config: Path | None = None) -> None:
        self.path = path
        self._log = FollowedLog(path, interval_s)
        self._model_config = model_config
        self._told: tuple[Any, float] | None = None
        self._last: Report | None = None
        self._tail = Tail(path, rules)

    def close(self) -> None:
        """Read no further."""
        self._log.close()

    @property
    def problem(self) -> str | None:
        """Why the log can't be read; None where it can."""
        return self._log.state().problem

    @property
    def is_read(self) -> bool:
        """Whether its end was reached once."""
        return self._log.state() != LogState()

    def news(self) -> Report | None:
        """The report, where it says more than the one before."""
        read = self._log.state().report
        if read is None or read is self._last:
            return None
        what, now = _gist(read), time.monotonic()
        if self._told is not None and self._told[0] == what and now - self._told[1] < REPORT_EVERY_S:
            return None
        self._last, self._told = read, (what, now)
        return complete(read, None, self._model_config, look_here=True)

    def serving(self) -> tuple[Serving, ...]:
        """The last serving line of each scheduler."""
        return self._tail.read()


def _gist(report: Report) -> Any:
    """What of a report is news at once: everything but peaks, and how far it was read."""
    return tuple(msgspec.structs.replace(s, usage=Usage(), engines=(), span=(), ended_at=None) for s in report.servers)


class Tail:
    """The last serving lines of a log, read from its end: what runs now, whatever the peaks were."""

    def __init__(self, path: str, rules: RuleSet) -> None:
        self._path = path
        self._reader = ServingLines(rules)
        self._state: tuple[int, int] | None = None
        self._lines: dict[str, Serving] = {}

    def read(self) -> tuple[Serving, ...]:
        """What the last lines of each scheduler say; nothing where the log can't be read."""
        try:
            with open_file(self._path) as file:
                found = os.fstat(file.fileno())
                if (found.st_ino, found.st_size) != self._state:
                    self._state = (found.st_ino, found.st_size)
                    file.seek(max(0, found.st_size - TAIL_BYTES))
                    self._take(file.read(TAIL_BYTES))
        except (OSError, ValueError):
            # The log's own reader says what is wrong with it.
            return ()
        if len(self._lines) == 1:
            return tuple(msgspec.structs.replace(one, scheduler="") for one in self._lines.values())
        return tuple(self._lines[name] for name in sorted(self._lines))

    def _take(self, data: bytes) -> None:
        # A line that is still being written, or begins before the piece, is no line.
        first, last = data.find(b"\n") + 1, data.rfind(b"\n") + 1
        whole = data[0 if len(data) < TAIL_BYTES else first : last]
        for name, line in self._reader.read(whole):
            was = self._lines.get(name, Serving(name))
            said: dict[str, object] = {"time": line.time, "running": line.running, "queued": line.queued}
            said |= {"kv": line.kv, "state": line.state, "swa": line.swa}
            self._lines[name] = msgspec.structs.replace(was, **{k: v for k, v in said.items() if v is not None})


# -------------------------------------------------------------------------------------------------------- live watches


class ServerFeed(Thread):
    """A running server, looked at every `interval_s` seconds; its log is read on beside it."""

    def __init__(
        self,
        pid: int,
        interval_s: float,
        *,
        api_key: str | None = None,
        ask: bool = True,
        model_config: Path | None = None,
        sink: Sink | None = None,
    ) -> None:
        super().__init__(sink)
        self._pid, self._interval_s = pid, interval_s
        self._watch = gather.Watch(pid, api_key, ask=ask)
        self._model_config = model_config
        self._rules = load_rules()
        self._run_id = uuid.uuid4().hex[:16]
        self._log: LogReports | None = None
        self._start: Start | None = None
        self._server: LiveServer | None = None

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            with self._watch:
                while not self._stop.is_set():
                    looked = time.monotonic()
                    sample = self._watch.sample()
                    self._look(sample, looked - begun)
                    self._stop.wait(max(0.05, self._interval_s - (time.monotonic() - looked)))
        except attach.AttachError as error:
            self._tell(End(gather.now(), str(error)))
        finally:
            if self._log is not None:
                self._log.close()

    def _look(self, sample: Sample, clock_s: float) -> None:
        (server,) = sample.servers
        if self._server is not None and server.started_at != self._server.started_at:
            raise attach.AttachError(f"process {self._server.pid} ended; its number is another server's now")
        self._server = server
        if self._start is None:
            self._begin(server, sample)
        self._read_on(server, sample)
        serving = self._log.serving() if self._log is not None and server.metrics is None else ()
        self._tell(Moment(gather.now(), clock_s, sample, serving))

    def _begin(self, server: LiveServer, sample: Sample) -> None:
        if server.log.path is not None:
            self._log = LogReports(
                server.log.path, self._interval_s, rules=self._rules, model_config=self._model_config
            )
            ends = time.monotonic() + FIRST_READING_S
            while not self._log.is_read and time.monotonic() < ends and not self._stop.wait(0.05):
                pass
        read = self._log.news() if self._log is not None else None
        self._tell(self._new_start(server, sample, read))

    def _new_start(self, server: LiveServer, sample: Sample, read: Report | None) -> Start:
        built = not _has_start(read)
        report = (
            rebuild.report(server, sample, model_config=self._model_config, read=read, why=self._why(server))
            if read is None or built
            else read
        )
        at = gather.now()
        self._start = Start(self._run_id, at, self._interval_s, report, server.pid, not built, built)
        return self._start

    def _why(self, server: LiveServer) -> str:
        if self._log is None:
            return ""
        if not self._log.is_read:
            return "its log is still being read"
        return self._log.problem or f"its log ({clean(server.log.path or '')}) holds nothing of a start"

    def _read_on(self, server: LiveServer, sample: Sample) -> None:
        read = self._log.news() if self._log is not None else None
        if read is None or self._start is None:
            return
        if self._start.built:
            if _has_start(read):
                self._tell(self._new_start(server, sample, read))
            return
        self._tell(Grown(read))


class LogFeed(Thread):
    """A log alone, read on as it grows."""

    def __init__(
        self, path: str, interval_s: float, *, model_config: Path | None = None, sink: Sink | None = None
    ) -> None:
        super().__init__(sink)
        self._interval_s = interval_s
        self._log = LogReports(path, interval_s, rules=load_rules(), model_config=model_config)
        self._run_id = uuid.uuid4().hex[:16]
        self._servers = -1

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            while not self._stop.is_set():
                if (problem := self._log.problem) is not None:
                    self._tell(End(gather.now(), problem))
                    return
                if (report := self._log.news()) is not None:
                    self._tell_report(report)
                if self._log.is_read:
                    self._tell(Moment(gather.now(), time.monotonic() - begun, serving=self._log.serving()))
                self._stop.wait(self._interval_s if self._log.is_read else 0.05)
        finally:
            self._log.close()

    def _tell_report(self, report: Report) -> None:
        count = len(report.servers)
        if count == self._servers:
            self._tell(Grown(report))
            return
        if self._servers > 0:
            self._tell(End(gather.now(), "the log tells of another start from here on"))
        self._servers = count
        self._tell(Start(self._run_id, gather.now(), self._interval_s, report))


def _has_start(report: Report | None) -> bool:
    return report is not None and any(rank.entries for one in report.servers for rank in one.ranks)


# -------------------------------------------------------------------------------------------------------------- replay


class Replay:
    """A recording played again: what happened in `speed` seconds comes in one."""

    def __init__(self, events: Iterator[Event], speed: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._speed, self._clock = events, speed, clock
        self._begun: float | None = None
        self._at_s = 0.0
        self._before_s: float | None = None
        self._next = self._fetch()

    def events(self) -> list[Event]:
        """What is due by now."""
        if self._begun is None:
            self._begun = self._clock()
        played = (self._clock() - self._begun) * self._speed
        found: list[Event] = []
        while self._next is not None and self._at_s <= played:
            found.append(self._next)
            self._next = self._fetch()
        return found

    def close(self) -> None:
        """Play no further."""
        self._next = None

    @property
    def done(self) -> bool:
        """Whether all of it was played."""
        return self._next is None

    def _fetch(self) -> Event | None:
        """The next event, due so long after the one before as it was recorded; a run that begins anew follows at once."""
        event = next(self._events, None)
        if isinstance(event, Moment):
            if self._before_s is not None:
                self._at_s += max(0.0, event.clock_s - self._before_s)
            self._before_s = event.clock_s
        return event
