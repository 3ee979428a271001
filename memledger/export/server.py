"""One running server in a thread of its own: its processes, its port, its log, and the ledger that lines them up.

A server that answers late, or whose report fails, holds up no other server and hides in no other's figures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from memledger.conclude import complete
from memledger.export.families import Answer, AnswerName, Ledger
from memledger.export.logs import FollowedLog, LogState
from memledger.findings import live as live_findings
from memledger.ledger import Report, Source
from memledger.live import attach, gather, meminfo, rebuild
from memledger.live import process as proc
from memledger.live.sample import DeviceSample, LiveServer
from memledger.reconcile import reconcile


class Seen(NamedTuple):
    """What one look at the machine says of a server."""

    scan: proc.Table
    tree: attach.Tree
    devices: DeviceSample
    host_pids: bool | None


class Asking(NamedTuple):
    """How servers are asked. `told` is called after each new ledger."""

    interval_s: float
    api_key: str | None
    ask: bool
    told: Callable[[], None]


class ServerThread:
    """Makes a ledger of one server for each look at the machine; of several looks that came meanwhile, for the last."""

    def __init__(self, asking: Asking, created: float | None) -> None:
        self._asking = asking
        self._created = created
        self._next: Seen | None = None
        self._wake = threading.Condition()
        self._ended = False
        self._log: FollowedLog | None = None
        self._completed: tuple[Report, Report] | None = None
        self.ledger: Ledger | None = None
        """The last one that was made; None before the first."""
        threading.Thread(target=self._run, name="memledger-server", daemon=True).start()

    def is_of(self, root: proc.Seen) -> bool:
        """Whether a process is the server's own, not one that got its id later."""
        if self._created is None or root.created is None:
            return self._created is root.created
        return abs(self._created - root.created) <= proc.CLOCK_SLACK

    def look(self, seen: Seen) -> None:
        """The machine was looked at again; never waits."""
        with self._wake:
            self._next = seen
            self._wake.notify()

    def close(self) -> None:
        """The server is gone; the thread ends when it is done with what it does."""
        with self._wake:
            self._ended = True
            self._wake.notify()

    def _run(self) -> None:
        while (seen := self._wait()) is not None:
            self.ledger = self._made(seen)
            self._asking.told()
        if self._log is not None:
            self._log.close()

    def _wait(self) -> Seen | None:
        with self._wake:
            self._wake.wait_for(lambda: self._ended or self._next is not None)
            seen, self._next = self._next, None
            return None if self._ended else seen

    def _made(self, seen: Seen) -> Ledger:
        pid = seen.tree.root.pid
        live: LiveServer | None = None
        try:
            live = attach.describe(seen.scan, seen.tree, seen.devices, self._asking.api_key, ask=self._asking.ask)
            report, answers = self._report(live, seen)
            return Ledger(pid, time.monotonic(), live, report, (*answers, Answer("ledger", True)))
        except Exception as error:
            # Not swallowed: it becomes the server's source `ledger` without success, and a sentence on stderr.
            failed = Answer("ledger", False, f"{type(error).__name__}: {error}")
            return Ledger(pid, time.monotonic(), live, None, (failed,))

    def _report(self, live: LiveServer, seen: Seen) -> tuple[Report | None, tuple[Answer, ...]]:
        """The server's ledger, and which of its sources answered; no ledger while its log is read for the first time."""
        sample = gather.compose(seen.devices, (live,), host_pids=seen.host_pids, memory=meminfo.read(pid=live.pid))
        asked = _answers(sample.sources, *(("proc", "metrics") if self._asking.ask else ("proc",)))
        state = self._log_state(live.log.path)
        if state == LogState():
            return None, (*asked, Answer("log", False, "it is still being read"))
        read = state.report if state is not None else None
        built = not _has_start(read)
        if read is None or built:
            report = rebuild.report(live, sample, read=read, why=_why(live, state))
        else:
            report = self._complete(read)
        own = _answers(report.sources, "log", "model")
        report = reconcile(report, sample, pid=live.pid, own_log=not built, built=built)
        return live_findings.attach(report), (*asked, *own)

    def _complete(self, read: Report) -> Report:
        """The report with its findings; made anew only where the log has grown."""
        if self._completed is None or self._completed[0] is not read:
            self._completed = (read, complete(read, None))
        return self._completed[1]

    def _log_state(self, path: str | None) -> LogState | None:
        """How the reading of the server's log stands; a log that got another name is another log."""
        if self._log is not None and self._log.path != path:
            self._log.close()
            self._log = None
        if path is None:
            return None
        if self._log is None:
            self._log = FollowedLog(path, self._asking.interval_s)
        return self._log.state()


def _has_start(report: Report | None) -> bool:
    return report is not None and any(rank.entries for one in report.servers for rank in one.ranks)


def _why(live: LiveServer, state: LogState | None) -> str:
    if state is None:
        return ""
    return state.problem or f"its log ({live.log.path}) holds nothing of a start"


def _answers(sources: Sequence[Source], *names: AnswerName) -> tuple[Answer, ...]:
    return tuple(Answer(n, s.status == "ok", s.reason) for s in sources for n in names if s.name == n)


def is_waiting(ledger: Ledger | None) -> bool:
    """Whether a server's first figures are still to come."""
    return ledger is None or (ledger.report is None and all(answer.ok for answer in ledger.answers[-1:]))


def with_age_checked(ledger: Ledger, oldest: float) -> Ledger:
    """The ledger without its figures where it was made before `oldest` (monotonic seconds)."""
    if ledger.at >= oldest:
        return ledger
    late = "its last figures are too old to show: the server, its log or the machine answers late"
    return Ledger(ledger.pid, ledger.at, answers=(Answer("ledger", False, late),))
