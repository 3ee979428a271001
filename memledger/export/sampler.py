"""Samples in a thread of their own: whatever a driver, a file or a server's port takes, no scrape waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from memledger.export.families import Ledger, Taken, render, stale
from memledger.findings import live as live_findings
from memledger.ledger import Report, Source
from memledger.live import attach, gather, nvml, rebuild
from memledger.live import process as proc
from memledger.live.sample import LiveServer, Sample
from memledger.reconcile import reconcile

READ_AGAIN_S: Final = 300.0
"""Seconds after which a server's log is read anew: a log of days takes longer than everything else in a sample."""
MOST_SERVERS: Final = 64


class Ledgers:
    """The report of each server, from its own log where that tells its start, else from the server itself."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, str | None], tuple[float, Report | None]] = {}

    def of(self, sample: Sample) -> tuple[Ledger, ...]:
        """The ledgers of the first `MOST_SERVERS` servers of a sample."""
        servers = sample.servers[:MOST_SERVERS]
        alive = {(server.pid, server.started_at) for server in servers}
        self._read = {key: value for key, value in self._read.items() if key in alive}
        return tuple(Ledger(server, self._report(server, sample)) for server in servers)

    def _report(self, server: LiveServer, sample: Sample) -> Report | None:
        # One server whose log or answers trip us must not take the figures of the others away.
        try:
            log = self._log(server)
            report = log if log is not None else rebuild.report(server, sample)
            lined_up = reconcile(report, sample, pid=server.pid, own_log=log is not None, built=log is None)
            return live_findings.attach(lined_up)
        except Exception:
            return None

    def _log(self, server: LiveServer) -> Report | None:
        key = (server.pid, server.started_at)
        before = self._read.get(key)
        if before is not None and time.monotonic() - before[0] < READ_AGAIN_S:
            return before[1]
        report = _started(server.log.path) if server.log.path is not None else None
        self._read[key] = (time.monotonic(), report)
        return report


def _started(path: str) -> Report | None:
    """The log's report; None where it holds nothing of a start."""
    from memledger.cli import reading

    report = reading.read([path], [], None).report
    return report if any(rank.entries for one in report.servers for rank in one.ranks) else None


class Sampler:
    """Takes samples of one server, or of all of the machine, and keeps the page of the last one."""

    def __init__(self, pid: int | None, interval_s: float, api_key: str | None = None, *, ask: bool = True) -> None:
        self._pid, self._interval, self._key, self._ask = pid, interval_s, api_key, ask
        self._ledgers = Ledgers()
        self._look: Callable[[], Sample] | None = None
        self._lock = threading.Lock()
        self._taken = Taken(time.time(), 0.0, failed="no sample was taken yet")
        self._page = render(self._taken)
        self._done_at = time.monotonic()
        self._stop = threading.Event()

    def start(self) -> None:
        """Sample from now on; the thread ends with the program."""
        threading.Thread(target=self._run, name="memledger-sampler", daemon=True).start()

    def stop(self) -> None:
        """No further sample."""
        self._stop.set()

    def page(self) -> bytes:
        """The last sample as a page; never waits. Its figures are left out once they are older than three intervals and a minute."""
        with self._lock:
            taken, page, done_at = self._taken, self._page, self._done_at
        if time.monotonic() - done_at > 3 * self._interval + 60:
            return render(stale(taken))
        return page

    def once(self) -> Taken:
        """Take one sample now, and keep it."""
        started, at = time.monotonic(), time.time()
        try:
            sample = self._sample()
            ledgers = self._ledgers.of(sample)
            taken = Taken(at, time.monotonic() - started, sample, ledgers)
        except attach.AttachError as error:
            taken = Taken(at, time.monotonic() - started, failed=str(error))
        except Exception as error:
            taken = Taken(at, time.monotonic() - started, failed=f"{type(error).__name__}: {error}")
        page = render(taken)
        with self._lock:
            self._taken, self._page, self._done_at = taken, page, time.monotonic()
        return taken

    def _run(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            self.once()
            self._stop.wait(max(0.1, self._interval - (time.monotonic() - begun)))

    def _sample(self) -> Sample:
        if self._look is None:
            if self._pid is None:
                self._look = _Machine(self._key, ask=self._ask).sample
            else:
                self._look = gather.Watch(self._pid, self._key, ask=self._ask).sample
        return self._look()


class _Machine:
    """All servers of the machine; the driver stays open."""

    def __init__(self, api_key: str | None, *, ask: bool) -> None:
        self._driver = nvml.Sampler()
        self._key, self._ask = api_key, ask

    def sample(self) -> Sample:
        """One sample now."""
        scan = proc.table()
        devices = gather.named(self._driver.sample(), scan, foreign_pids=bool(proc.in_pid_namespace()))
        servers = attach.find_servers(devices, self._key, ask=self._ask, table=scan)
        taken = gather.compose(devices, servers, host_pids=gather.host_pids())
        if servers:
            return taken
        return msgspec.structs.replace(taken, sources=devices_only(taken))


def devices_only(sample: Sample) -> tuple[Source, ...]:
    """The sources of a machine without servers: the driver, and `/proc`, which was read and shows none."""
    return (*sample.sources, gather.proc_source(()))
