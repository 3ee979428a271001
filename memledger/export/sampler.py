"""Samples in threads of their own: whatever a driver, a file or a server's port takes, no scrape waits for it.

One thread looks at the machine, one makes the ledger of each server (`memledger.export.server`), one puts the page together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from memledger.export.families import Page, render
from memledger.export.server import Asking, Seen, ServerThread, is_waiting, with_age_checked
from memledger.ledger import Source
from memledger.live import attach, gather, nvml
from memledger.live import process as proc
from memledger.live.sample import DeviceSample

MOST_SERVERS: Final = 64
OLDEST_S: Final = 60.0
"""Figures older than this and three intervals are left out."""
BETWEEN_PAGES_S: Final = 0.2
"""Ledgers that come soon after one another share a page."""


class Look:
    """Looks at the machine: the driver stays open between looks."""

    def __init__(self, pid: int | None) -> None:
        self._driver = nvml.Sampler()
        self._pid = pid

    def devices(self) -> DeviceSample:
        """The GPUs; a driver that hangs or is missing is said in the sample's source."""
        return self._driver.sample()

    def trees(self, scan: proc.Table) -> list[attach.Tree]:
        """The servers that were asked for.

        Raises:
            AttachError: the process that was named is gone, or is no server.
        """
        if self._pid is None:
            return attach.trees(scan)
        tree = attach.tree_of(scan, self._pid)
        self._pid = tree.root.pid  # a worker that was named may end before its server
        return [tree]


class Sampler:
    """Samples one server, or all of the machine, and keeps the page that the last samples make."""

    def __init__(
        self,
        pid: int | None,
        interval_s: float,
        api_key: str | None = None,
        *,
        ask: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._look = Look(pid)
        self._interval_s = interval_s
        self._asking = Asking(interval_s, api_key, ask, self._news)
        self._say, self._said = say, set[str]()
        self._lock = threading.Lock()
        self._servers: dict[int, ServerThread] = {}
        self._machine = Page(time.time(), 0.0, time.monotonic(), failed="no sample was taken yet")
        self._page, self._rendered_at = render(self._machine), time.monotonic()
        self._dirty, self._stop = threading.Event(), threading.Event()
        self.failed: str | None = None
        """Why the last look gave no server; None where it did."""

    def start(self) -> None:
        """Sample from now on; the threads end with the program."""
        threading.Thread(target=self._watch, name="memledger-machine", daemon=True).start()
        threading.Thread(target=self._write, name="memledger-page", daemon=True).start()

    def stop(self) -> None:
        """No further sample."""
        self._stop.set()
        self._dirty.set()
        with self._lock:
            servers, self._servers = self._servers, {}
        for server in servers.values():
            server.close()

    def page(self) -> bytes:
        """The page as it was last put together; never waits for anything.

        Should the thread that makes it have stopped, the page says so instead of showing the past.
        """
        with self._lock:
            page, machine, at = self._page, self._machine, self._rendered_at
        if time.monotonic() - at > 3 * self._interval_s + OLDEST_S:
            return render(Page(machine.at, machine.took, machine.looked_at, failed="no page was made for too long"))
        return page

    def once(self, limit_s: float) -> bytes:
        """One sample: look, wait for the ledger of each server (and for logs to be read) as long as the limit allows."""
        self.look()
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends and any(is_waiting(one.ledger) for one in self._servers.values()):
            self._dirty.wait(0.2)
            self._dirty.clear()
            waiting = [one for one in self._servers.values() if one.ledger is not None and is_waiting(one.ledger)]
            if waiting and not self._stop.wait(0.3):
                self.look()  # a log was still being read
        self.put_together()
        return self.page()

    def look(self) -> None:
        """Look at the machine once, and hand what is there to the servers' threads."""
        at, begun = time.time(), time.monotonic()
        devices: DeviceSample | None = None
        sources: tuple[Source, ...] = ()
        failed = None
        try:
            devices = self._look.devices()
            sources = (devices.source, _UNREAD)
            scan = proc.table()
            devices = gather.named(devices, scan, foreign_pids=bool(proc.in_pid_namespace()))
            sources = (devices.source, Source("proc", "ok"))
            self._hand_out(scan, self._look.trees(scan), devices)
        except attach.AttachError as error:
            failed = str(error)
            self._let_go(())
        except Exception as error:
            # Said on stderr and by `memledger_sample_success`; the next look may do better.
            failed = f"{type(error).__name__}: {error}"
        machine = Page(at, time.monotonic() - begun, time.monotonic(), devices, sources, failed=failed)
        with self._lock:
            self._machine, self.failed = machine, failed
        if failed is not None:
            self._tell(failed)
        self._news()

    def put_together(self) -> None:
        """Make the page of what is known by now."""
        oldest = time.monotonic() - 3 * self._interval_s - OLDEST_S
        with self._lock:
            machine, servers = self._machine, list(self._servers.values())
        ledgers = tuple(with_age_checked(one.ledger, oldest) for one in servers if one.ledger is not None)
        if machine.looked_at < oldest:
            machine = Page(machine.at, machine.took, machine.looked_at, failed="the last sample is too old")
        page = render(msgspec.structs.replace(machine, ledgers=ledgers))
        for ledger in ledgers:
            for answer in ledger.answers:
                if answer.source == "ledger" and not answer.ok:
                    self._tell(f"server {ledger.pid}: {answer.reason}")
        with self._lock:
            self._page, self._rendered_at = page, time.monotonic()

    def _news(self) -> None:
        self._dirty.set()

    def _tell(self, sentence: str) -> None:
        """Say it, once."""
        if sentence not in self._said and len(self._said) < 1000:
            self._said.add(sentence)
            self._say(sentence)

    def _hand_out(self, scan: proc.Table, trees: list[attach.Tree], devices: DeviceSample) -> None:
        chosen = trees[:MOST_SERVERS]
        self._let_go([tree.root for tree in chosen])
        host_pids = gather.host_pids()
        for tree in chosen:
            with self._lock:
                if self._stop.is_set():
                    return
                if tree.root.pid not in self._servers:
                    self._servers[tree.root.pid] = ServerThread(self._asking, tree.root.created)
                server = self._servers[tree.root.pid]
            server.look(Seen(scan, tree, devices, host_pids))

    def _let_go(self, still_there: Sequence[proc.Seen]) -> None:
        """End the threads of servers that are gone; a process id may have become another server's."""
        now = {one.pid: one for one in still_there}
        with self._lock:
            gone = [pid for pid, one in self._servers.items() if pid not in now or not one.is_of(now[pid])]
            ended = [self._servers.pop(pid) for pid in gone]
        for one in ended:
            one.close()

    def _watch(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            self.look()
            self._stop.wait(max(0.1, self._interval_s - (time.monotonic() - begun)))

    def _write(self) -> None:
        while not self._stop.wait(BETWEEN_PAGES_S):
            self._dirty.wait(self._interval_s)
            self._dirty.clear()
            try:
                self.put_together()
            except Exception as error:
                # `page` leaves the figures out when this goes on.
                self._tell(f"the page can't be made: {type(error).__name__}: {error}")


_UNREAD: Final = Source("proc", "unavailable", "/proc could not be read")
