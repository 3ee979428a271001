"""SGLang's reader: events in order to starts. What a start makes of its events is in `sglang_start`."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from memledger.events import Event
from memledger.frameworks.sglang_config import BEFORE_THE_DUMP
from memledger.frameworks.sglang_start import StartBuilder
from memledger.ledger import Server

MOST_WAITING: Final = 200
"""Lines held back until it is known which start they belong to."""


class SglangReader:
    """Builds the servers of SGLang logs: fed events in order, keeps running figures of each start only."""

    framework: ClassVar[Literal["sglang", "vllm"]] = "sglang"

    def __init__(self) -> None:
        self._starts: list[StartBuilder] = []
        self._current: dict[tuple[int, str | None], StartBuilder] = {}
        self._waiting: dict[tuple[int, str | None], list[Event]] = {}
        self._last: tuple[int, str | None] | None = None

    def feed(self, event: Event) -> None:
        """Take one event of SGLang, or one of torch or the kernel seen while SGLang was the engine in hand."""
        stream = (event.input, event.prefix.source)
        if (
            event.rule.framework == "any"
            and stream not in self._current
            and self._last is not None
            and self._last[0] == event.input
        ):
            stream = self._last
        self._last = stream
        start = self._current.get(stream)
        if start is None:
            start = self._new(stream)
        elif event.id in BEFORE_THE_DUMP and event.rule.framework != "any" and start.begun:
            waiting = self._waiting.setdefault(stream, [])
            waiting.append(event)
            if len(waiting) > MOST_WAITING:
                start.take(waiting.pop(0))
            return
        elif event.rule.framework != "any" and start.contradicts(event):
            start = self._new(stream)
        for earlier in self._waiting.pop(stream, ()):
            start.take(earlier)
        start.take(event)

    def servers(self) -> list[Server]:
        """Every start found, in order of its first line. May be called again after more events."""
        for stream, waiting in list(self._waiting.items()):
            for event in waiting:
                self._current[stream].take(event)
            self._waiting.pop(stream)
        built = [start.build() for start in self._starts]
        found = [server for server in built if server is not None]
        return sorted(found, key=lambda s: (s.span[0].input, s.span[0].first_line))

    def _new(self, stream: tuple[int, str | None]) -> StartBuilder:
        start = StartBuilder(stream[1])
        self._starts.append(start)
        self._current[stream] = start
        return start
