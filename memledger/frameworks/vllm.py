"""vLLM 0.4 .. 0.33, both engines: events to servers.

A start is one server (front end, engines, workers) or one offline `LLM`. Lines are told apart by process and pid where
vLLM prints them; without them they belong to the start last heard on the same stream. What a line means by version is
in docs/ledger.md; where one wording means two things the figures are tested, the version only breaks ties.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final, Literal

from memledger.events import Event, Prefix
from memledger.frameworks.base import MOST_STARTS, header
from memledger.frameworks.vllm_start import Start
from memledger.ledger import Server

MOST_EARLY: Final = 100
"""Lines of other programs kept until the first start is known."""

FRONT_RULES: Final = frozenset({"version", "non_default_args", "all_args"})
_ENGINE: Final = re.compile(r"(?:DP)?(?:MoE)?EngineCore")
_FRONT: Final = re.compile(r"(?:API|Api)Server|DPSupervisor|MainProcess")
_EXTRA_FRONT: Final = re.compile(r"(?:Api|API)Server_\w*\d$")
"""One of several HTTP servers: their parent printed the arguments."""

MOST_RECENT: Final = 64
"""Starts of one stream that a line may still belong to."""

MOST_REPEATED: Final = 64
"""Figures of one line, and repeated lines, that are kept to tell a second run from a repetition."""

_STEP: Final = {
    "weights": "weights",
    "kv_available": "profile",
    "v0_budget": "profile",
    "v0_split": "profile",
    "v0_profile": "profile",
    "kv_capacity": "capacity",
    "concurrency": "capacity",
    "blocks": "capacity",
    "graphs": "capture",
    "budget_split": "capture",
    "budget_consumed": "capture",
}
"""Lines that a start prints once per rank, and the step they belong to: all ranks finish a step before the next one."""


class Printed:
    """What the pasted lines of one start said, step by step: tells another start's lines that carry no pid.

    A pasted comparison of two runs has no start line between them, and each run goes through the same steps. A line of
    an earlier step that comes again with another figure is the next run's; with the same figure it may be a repetition.
    """

    def __init__(self) -> None:
        self._held: list[Event] = []
        self._first: str | None = None
        self._figures: dict[str, list[object]] = {}
        self._step: str | None = None
        self._engines: dict[int | None, int] = {}

    def take(self, event: Event) -> bool:
        """Note a line; False, and nothing noted, where it is the next run's."""
        step = _STEP.get(event.id)
        if step is None or event.prefix.repeated:
            return True
        if event.prefix.pid is not None:
            return self._take_engine(event, event.prefix.pid)
        if event.prefix.ranks:
            return True
        self._first = self._first or event.id
        seen = self._figures.setdefault(event.id, [])
        figures = {name: value for name, value in event.fields.items() if name != "seconds"}
        if seen and figures not in seen and (self._step != step or self._held):
            return False
        if figures not in seen:
            self._held.clear()
            if len(seen) < MOST_REPEATED:
                seen.append(figures)
        elif (self._step != step or self._held) and len(self._held) < MOST_REPEATED:
            self._held.append(event)
        self._step = step
        return True

    def of_next(self, event: Event) -> list[Event]:
        """The lines of the run that `event` belongs to that came before it, with the figures of this one."""
        if event.id == self._first:
            return []
        begins = [i for i, held in enumerate(self._held) if held.id == self._first]
        return self._held[begins[-1] if begins else 0 :]

    def _take_engine(self, event: Event, pid: int) -> bool:
        if not _ENGINE.match(event.prefix.process or ""):
            return True
        return self._engines.setdefault(event.prefix.ranks.get("dp"), pid) == pid


class VllmReader:
    """Builds servers from vLLM's events; keeps running figures only."""

    framework: ClassVar[Literal["sglang", "vllm"]] = "vllm"

    def __init__(self) -> None:
        self._starts: list[Start] = []
        self._reduced: list[Server] = []
        self._by_source: dict[str | None, list[Start]] = {}
        self._command: Event | None = None
        self._early: list[Event] = []
        self._printed: dict[int, Printed] = {}

    def feed(self, event: Event) -> None:
        """Take one event in order."""
        if event.id == "command_line" and event.rule.framework == "vllm":
            # Inside a record of a server the words are somebody's text; a pasted issue quotes its command in prose.
            if event.word("lead") is None or event.prefix == Prefix():
                self._command = event
            return
        if event.rule.framework == "any":
            self._feed_foreign(event)
            return
        self._start_of(event).take(event)

    def servers(self) -> list[Server]:
        """Every start found, in order of its first line."""
        if not self._starts and self._early:
            self._starts.append(Start(None))
            self._flush(self._starts[0])
        half = MOST_STARTS // 2
        full = [start.server() if start.worth_telling else None for start in self._starts]
        return [server for server in (*full[:half], *self._reduced, *full[half:]) if server is not None]

    def _feed_foreign(self, event: Event) -> None:
        """A line of torch, the kernel or the HTTP server: the start of its process, of its stream, or the last one."""
        pid = (event.prefix.host, event.prefix.pid) if event.prefix.pid is not None else None
        recent = self._starts[-MOST_RECENT:]
        same = self._by_source.get(event.prefix.source) or recent
        known = next((s for s in reversed(recent) if pid is not None and pid in s.pids), None)
        start = known or (same[-1] if same else None)
        if start is not None:
            start.take(event)
        elif len(self._early) < MOST_EARLY:
            self._early.append(event)

    def _flush(self, start: Start) -> None:
        for event in self._early:
            start.take(event)
        self._early.clear()

    # -- which start a line belongs to

    def _start_of(self, event: Event) -> Start:
        group = self._by_source.get(event.prefix.source, [])
        pid = (event.prefix.host, event.prefix.pid) if event.prefix.pid is not None else None
        known = next((s for s in reversed(group) if pid is not None and pid in s.pids), None)
        if event.rule.framework == "vllm" and event.id == "engine_config":
            start = self._of_engine(event, group, known)
        elif event.rule.framework == "vllm" and event.id in FRONT_RULES:
            start = self._of_front_end(event, group, known)
        elif known is not None:
            start = known
        else:
            start = self._of_other(event, group)
        start = self._or_next_run(start, event)
        if pid is not None:
            start.pids.add(pid)
        return start

    def _or_next_run(self, start: Start, event: Event) -> Start:
        """The start, or a new one where a pasted line without a start line before it is the next run's."""
        printed = self._printed.setdefault(id(start), Printed())
        if printed.take(event) or start.engine_lines:
            return start
        following = self._new(event)
        again = self._printed[id(following)] = Printed()
        for earlier in printed.of_next(event):
            following.take(earlier)
            again.take(earlier)
        again.take(event)
        return following

    def _of_engine(self, event: Event, group: list[Start], known: Start | None) -> Start:
        if (again := next((s for s in reversed(group) if s.has_line(event)), None)) is not None:
            return again
        rank = event.prefix.ranks.get("dp")
        latest = group[-1] if group else None
        if latest is not None and latest.waits_for_engine:
            same_model = [s for s in group if s.waits_for_engine and s.model_agrees(event)]
            return same_model[-1] if same_model else latest
        if known is not None and not known.engine_lines:
            return known
        if latest is not None and latest.quotes_before(event):
            return latest
        if rank is not None:
            for start in reversed(group):
                if not start.over and start.takes_engine(rank, event.prefix.pid):
                    return start
        return self._new(event)

    def _of_front_end(self, event: Event, group: list[Start], known: Start | None) -> Start:
        if (again := next((s for s in reversed(group) if s.has_line(event)), None)) is not None:
            return again
        latest = group[-1] if group else None
        if latest is None:
            return self._new(event)
        if _EXTRA_FRONT.match(event.prefix.process or "") and not latest.over:
            return latest
        if latest.waits_for_front_line(event) or latest.quotes_before(event) or latest.same_moment(event):
            return latest
        return self._new(event)

    def _of_other(self, event: Event, group: list[Start]) -> Start:
        if not group:
            return self._new(event)
        label = tuple(sorted(event.prefix.ranks.items()))
        if label and event.prefix.pid is not None and process_kind(event) == "worker":
            if group[-1].label_is_free(label):
                return group[-1]
            # Two servers that start at once: an earlier one may still wait for its workers.
            for start in reversed(group):
                if not start.over and start.waits_for_workers:
                    return start
        return group[-1]

    def _new(self, event: Event) -> Start:
        start = Start(event.prefix.source)
        if self._command is not None:
            start.config.take(self._command)
            start.begin(self._command)
            self._command = None
        pid = (event.prefix.host, event.prefix.pid)
        group = self._by_source.setdefault(start.source, [])
        for other in group:
            if event.prefix.pid is None or pid in other.pids or other.over:
                # Containers and restarts reuse pids: what the new start prints is not the old one's.
                other.pids.clear()
        self._starts.append(start)
        group.append(start)
        del group[:-MOST_RECENT]
        if len(self._starts) > MOST_STARTS:
            self._reduce()
        self._flush(start)
        return start

    def _reduce(self) -> None:
        """Keep the oldest start of the middle by its header only, unless lines of it may still come."""
        start = self._starts[MOST_STARTS // 2]
        if any(start is other for other in self._by_source.get(start.source, ())):
            return
        del self._starts[MOST_STARTS // 2]
        self._printed.pop(id(start), None)
        if start.worth_telling:
            self._reduced.append(header(start.server()))


def process_kind(event: Event) -> Literal["front", "engine", "worker"] | None:
    """What kind of process printed a line; None where no process name stands before it."""
    name = event.prefix.process
    if name is None:
        return None
    if _FRONT.match(name):
        return "front"
    return "engine" if _ENGINE.match(name) else "worker"
