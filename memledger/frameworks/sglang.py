"""SGLang's reader: events in order to starts. What a start makes of its events is in `sglang_start`."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from memledger.events import Event
from memledger.frameworks.base import MOST_STARTS, header
from memledger.frameworks.sglang_config import BEFORE_THE_DUMP
from memledger.frameworks.sglang_start import StartBuilder
from memledger.ledger import Server

Stream = tuple[int, str | None, str | None]

MOST_WAITING: Final = 200
"""Lines held back until it is known which start they belong to."""

MOST_QUOTED: Final = 50
"""Lines of an excerpt that is looked for in the log after it."""

Said = tuple[str | None, str]


class SglangReader:
    """Builds the servers of SGLang logs: fed events in order, keeps running figures of each start only."""

    framework: ClassVar[Literal["sglang", "vllm"]] = "sglang"

    def __init__(self) -> None:
        self._starts: list[StartBuilder] = []
        self._reduced: list[Server] = []
        self._current: dict[Stream, StartBuilder] = {}
        self._waiting: dict[Stream, list[Event]] = {}
        self._last: Stream | None = None
        self._said: dict[int, set[Said]] = {}
        self._quotes: list[tuple[StartBuilder, set[Said]]] = []

    def feed(self, event: Event) -> None:
        """Take one event of SGLang, or one of torch or the kernel seen while SGLang was the engine in hand."""
        stream = self._stream(event)
        start = self._current.get(stream)
        own = event.rule.framework != "any"
        if start is None:
            start = self._new(stream)
        elif own and event.id in BEFORE_THE_DUMP and start.begun:
            waiting = self._waiting.setdefault(stream, [])
            waiting.append(event)
            if len(waiting) > MOST_WAITING:
                start.take(waiting.pop(0))
            return
        elif own and start.contradicts(event):
            start = self._new(stream)
        if event.id == "server_args":
            start = self._same_job(stream, start, event)
        for earlier in self._waiting.pop(stream, ()):
            start.take(earlier)
        self._hear(start, event)
        start.take(event)

    def servers(self) -> list[Server]:
        """Every start found, in order of its first line. May be called again after more events."""
        for stream, waiting in list(self._waiting.items()):
            for event in waiting:
                self._current[stream].take(event)
            self._waiting.pop(stream)
        quotes = [id(start) for start, unsaid in self._quotes if not unsaid]
        built = [start.build() for start in self._starts if id(start) not in quotes]
        found = [*self._reduced, *(server for server in built if server is not None)]
        return sorted(found, key=lambda s: (s.span[0].input, s.span[0].first_line))

    def _stream(self, event: Event) -> Stream:
        """The stream of a line: a compose service, a pod, a host. A line without one follows the line before it."""
        stream = (event.input, event.prefix.source, event.prefix.host)
        bare = stream[1:] == (None, None)
        if bare and stream not in self._current and self._last is not None and self._last[0] == event.input:
            stream = self._last
        self._last = stream
        return stream

    def _hear(self, start: StartBuilder, event: Event) -> None:
        """Note a line: an excerpt whose every line comes again, with its time, in a later start is no start of its own."""
        time, message = event.prefix.time, event.message
        for quote, unsaid in self._quotes:
            if quote is not start and unsaid:
                unsaid.discard((time, message))
                if time is not None:
                    unsaid.discard((None, message))
        said = self._said.get(id(start))
        if said is not None:
            said.add((time, message))
            if len(said) > MOST_QUOTED or event.id == "server_args":
                del self._said[id(start)]

    def _new(self, stream: Stream) -> StartBuilder:
        before = self._current.get(stream)
        if before is not None and (said := self._said.pop(id(before), None)):
            self._quotes = [*self._quotes, (before, said)][-MOST_QUOTED:]
        start = StartBuilder(stream[1])
        self._said[id(start)] = set()
        self._starts.append(start)
        self._current[stream] = start
        if len(self._starts) > MOST_STARTS:
            self._reduce()
        return start

    def _reduce(self) -> None:
        """Keep the oldest start of the middle by its header only."""
        index = next(
            (i for i, s in enumerate(self._starts) if i >= MOST_STARTS // 2 and s not in self._current.values()), None
        )
        if index is None:
            return
        start = self._starts.pop(index)
        self._said.pop(id(start), None)
        unsaid = [said for quote, said in self._quotes if quote is start]
        self._quotes = [(quote, said) for quote, said in self._quotes if quote is not start]
        if all(unsaid) and (server := start.build()) is not None:
            self._reduced.append(header(server))

    def _same_job(self, stream: Stream, start: StartBuilder, event: Event) -> StartBuilder:
        """Nodes of one job in one file, each a stream of its own: their dumps differ in the node's rank only."""
        if start.begun or start.config.dumped:
            return start
        for other_stream, other in self._current.items():
            if other is not start and other_stream[0] == stream[0] and other.is_node_of(event):
                self._starts.remove(start)
                self._current[stream] = other
                other.absorb(start)
                return other
        return start
