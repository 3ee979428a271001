"""The one way through: inputs to events, events to servers, servers to a report value."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from memledger import __version__
from memledger.events import Event
from memledger.frameworks.base import FrameworkReader
from memledger.grammar import RuleSet, load_rules
from memledger.ledger import Input, Report, Server, Source
from memledger.scan import Scanner


class Router:
    """Hands each event to its engine's reader; lines of torch or the kernel go to the engine last heard."""

    def __init__(self) -> None:
        self._readers: dict[str, FrameworkReader] = {}
        self._current: str | None = None
        self._waiting: list[Event] = []

    def feed(self, event: Event) -> None:
        """Take one event in order."""
        name = event.rule.framework
        if name == "any":
            if self._current is None:
                if len(self._waiting) < 1000:
                    self._waiting.append(event)
                return
            self._readers[self._current].feed(event)
            return
        if name not in self._readers:
            self._readers[name] = _reader(name)
        if self._current is None:
            for earlier in self._waiting:
                self._readers[name].feed(earlier)
            self._waiting.clear()
        self._current = name
        self._readers[name].feed(event)

    def servers(self) -> list[Server]:
        """Every server of every engine, in order of its first line."""
        found = [server for reader in self._readers.values() for server in reader.servers()]
        return sorted(found, key=lambda s: (s.span[0].input, s.span[0].first_line) if s.span else (0, 0))


def _reader(name: str) -> FrameworkReader:
    if name == "sglang":
        from memledger.frameworks.sglang import SglangReader

        return SglangReader()
    if name == "vllm":
        from memledger.frameworks.vllm import VllmReader

        return VllmReader()
    raise ValueError(f"no reader for the framework {name!r}; a rule file's framework is sglang, vllm or any")


def explain(paths: Iterable[str], rules: RuleSet | None = None) -> Report:
    """The report on log files.

    Raises:
        OSError: an input can't be read.
    """
    scanner = Scanner(rules or load_rules())
    router = Router()
    inputs = []
    for index, path in enumerate(paths):
        with Path(path).open("rb") as stream:
            for event in scanner.events(iter(lambda s=stream: s.read(1 << 20), b""), index):  # type: ignore[misc]
                router.feed(event)
        inputs.append(Input(path, scanner.bytes, scanner.lines))
    servers = tuple(router.servers())
    return Report(
        version=__version__,
        inputs=tuple(inputs),
        sources=(Source("log", "ok" if servers else "partial", None),),
        servers=servers,
        unrecognized=scanner.unrecognized,
    )


def to_json(report: Report) -> bytes:
    """The report as one JSON document."""
    return msgspec.json.encode(report)
