"""The one way through: inputs to events, events to servers, servers to a report value."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from memledger import __version__
from memledger.events import Event
from memledger.frameworks.base import FrameworkReader
from memledger.grammar import RuleSet, load_rules
from memledger.join import join_servers
from memledger.ledger import Input, Report, Server, Source, Unrecognized
from memledger.scan import Scanner, together
from memledger.sources import BLOCK_BYTES, InputError, OpenInput, Progress, open_input
from memledger.sources.follow import never
from memledger.twins import read_once

if TYPE_CHECKING:
    from memledger.ahead import Ahead

AHEAD_FROM: Final = 16 * 2**20
"""Bytes of a file from which starting helpers (some milliseconds) is worth it."""


_BEGINS = frozenset({"sglang.server_args", "vllm.version", "vllm.non_default_args"})
"""Lines that a server begins with: a failure in front of one is not of that server."""


class Router:
    """Hands each event of one input to its engine's reader; lines of torch or the kernel go to the engine last heard.

    Every input has a router of its own: what one log says is never taken for a line of another's server.
    """

    def __init__(self) -> None:
        self._readers: dict[str, FrameworkReader] = {}
        self._current: str | None = None
        self._waiting: list[Event] = []

    def feed(self, event: Event) -> None:
        """Take one event in order."""
        name = event.rule.framework
        if name == "system":
            # The kernel's, the container's and the driver's own lines are no line of a server: the postmortem reads them.
            return
        if name == "vllm" and event.prefix.style == "sglang":
            # SGLang prints some of vLLM's sentences (it shares its distributed code); the prefix says whose they are.
            return
        if event.rule.full_id == "sglang.killed" and self._current == "vllm" and "sglang" not in event.message:
            # The shell's own word, under whatever server it started.
            return
        if name == "any":
            # Before any line of an engine, the engine's prefix in front of torch's words says whose they are.
            name = self._current or (event.prefix.style if event.prefix.style in {"sglang", "vllm"} else None) or name
            if name == "any":
                if len(self._waiting) < 1000:
                    self._waiting.append(event)
                return
        if name not in self._readers:
            self._readers[name] = _reader(name)
        if self._current is None:
            for earlier in self._waiting if event.rule.full_id not in _BEGINS else ():
                self._readers[name].feed(earlier)
            self._waiting.clear()
        self._current = name
        self._readers[name].feed(event)

    def servers(self) -> list[Server]:
        """Every server of every engine, in order of its first line."""
        if not self._readers and any(event.id == "vllm_frame" for event in self._waiting):
            # A traceback alone, as threads quote it: vLLM's own frames say whose failure it is.
            self._readers["vllm"] = _reader("vllm")
            for event in self._waiting:
                self._readers["vllm"].feed(event)
        found = [server for reader in self._readers.values() for server in reader.servers()]
        return sorted(found, key=lambda s: (s.span[0].input, s.span[0].first_line) if s.span else (0, 0))


def _log_source(inputs: Sequence[Input], servers: Sequence[Server], missing: Sequence[str]) -> Source:
    """Whether the logs answered: all of every input, a part (with what could not be read), or none."""
    if not inputs:
        return Source("log", "unavailable", " ".join(missing) or "no input")
    reasons = [*missing] if servers else [*missing, "nothing of SGLang or vLLM was recognised"]
    return Source("log", "partial" if reasons else "ok", " ".join(reasons) or None)


def _reader(name: str) -> FrameworkReader:
    if name == "sglang":
        from memledger.frameworks.sglang import SglangReader

        return SglangReader()
    if name == "vllm":
        from memledger.frameworks.vllm import VllmReader

        return VllmReader()
    raise ValueError(f"no reader for the framework {name!r}; a rule file's framework is sglang, vllm or any")


class Reading(msgspec.Struct, frozen=True):
    """A report, what could not be read (one sentence each), and how each input begins (for saying what it is)."""

    report: Report
    problems: tuple[str, ...] = ()
    heads: tuple[bytes, ...] = ()


def explain(paths: Iterable[str], rules: RuleSet | None = None) -> Report:
    """The report on log files; `-` is standard input.

    Raises:
        InputError: an input can't be read.
    """
    return _read(paths, rules, None, [])


def read(
    paths: Iterable[str],
    rules: RuleSet | None = None,
    *,
    progress: Progress | None = None,
    on_idle: Callable[[Report], bool] | None = None,
    ended: Callable[[], bool] = never,
    tap: Callable[[Event], None] | None = None,
    cores: int | None = 1,
    opens: Callable[[str], OpenInput] | None = None,
) -> Reading:
    """The report on every input that can be read, with what is wrong with the others.

    Args:
        paths: file names; `-` is standard input.
        rules: the rules in force; the bundled ones by default.
        progress: told the bytes read and the size of each input.
        on_idle: follows the inputs as they grow: called with the report so far each time there is nothing new;
            False ends it.
        ended: whether to stop reading (with `on_idle`): what was read until then is reported.
        tap: shown every event of every input, in order, also those that are no server's (`memledger.postmortem.facts`).
        cores: how many processes may read (what is read is the same); None: as many as this process has cores.
        opens: opens an input by its name, where that is no file of this machine; may raise `InputError`.
    """
    problems: list[str] = []
    heads: list[bytes] = []
    report = _read(paths, rules, problems, heads, progress, on_idle, ended, tap, cores, opens)
    return Reading(report, tuple(problems), tuple(heads))


def _read(
    paths: Iterable[str],
    rules: RuleSet | None,
    problems: list[str] | None,
    heads: list[bytes],
    progress: Progress | None = None,
    on_idle: Callable[[Report], bool] | None = None,
    ended: Callable[[], bool] = never,
    tap: Callable[[Event], None] | None = None,
    cores: int | None = 1,
    opens: Callable[[str], OpenInput] | None = None,
) -> Report:
    rules = rules or load_rules()
    scanner = Scanner(rules)
    reads: list[ReadInput] = []
    names = list(_each_once(paths))

    def one(path: str, index: int, cores: int | None = cores, progress: Progress | None = progress) -> ReadInput:
        # An input does not change how another one is read, so it does not matter which process reads it.
        own = Scanner(rules, matcher=scanner.matcher)
        idle = None
        if on_idle is not None:

            def idle(now: OpenInput, router: Router) -> bool:
                return on_idle(_report([*reads, _so_far(own, now, router)]))

        if opens is not None:
            source = opens(path)
        else:
            source = open_input(path, follow=on_idle is not None, progress=progress, ended=ended)
        return _one(source, index, own, idle, tap, cores)

    alone = cores == 1 or on_idle is not None or tap is not None or opens is not None
    beside = {} if alone else _beside(names, lambda path, index: one(path, index, 1, None), cores)
    missing: list[str] = []
    for path in names:
        try:
            # By its place among those that could be read, which lines are quoted by.
            read = beside.get((path, len(reads))) or one(path, len(reads))
        except InputError as error:
            if problems is None:
                raise
            problems.append(str(error))
            missing.append(str(error))
            continue
        reads.append(read)
        heads.append(read.head)
        missing.extend(read.incomplete)
    return _report(reads, missing)


class ReadInput(msgspec.Struct, frozen=True):
    """What one input held. `head`: how it begins; `incomplete`: why not all of it could be read."""

    input: Input
    servers: tuple[Server, ...]
    unrecognized: Unrecognized
    head: bytes = b""
    incomplete: tuple[str, ...] = ()


def _one(
    source: OpenInput,
    index: int,
    scanner: Scanner,
    on_idle: Callable[[OpenInput, Router], bool] | None,
    tap: Callable[[Event], None] | None,
    cores: int | None,
) -> ReadInput:
    router = Router()
    with source, _ahead(source, scanner, cores) as ahead:
        blocks = source.blocks()
        if on_idle is not None:
            blocks = _until(blocks, lambda: on_idle(source, router))
        twice: list[str] = []
        events = scanner.events(blocks, index, ahead)
        for event in read_once(events, lambda: source.head, twice.append):
            router.feed(event)
            if tap is not None:
                tap(event)
    found = _so_far(scanner, source, router)
    notes = (*found.input.notes, *(f"{source.path}: {note}" for note in (*scanner.notes, *twice)))
    return msgspec.structs.replace(found, input=msgspec.structs.replace(found.input, notes=notes))


def _so_far(scanner: Scanner, source: OpenInput, router: Router) -> ReadInput:
    return ReadInput(
        Input(source.path, scanner.bytes, scanner.lines, tuple(source.notes)),
        tuple(router.servers()),
        scanner.unrecognized,
        source.head,
        tuple(source.incomplete),
    )


def _beside(
    names: Sequence[str], one: Callable[[str, int], ReadInput], cores: int | None
) -> dict[tuple[str, int], ReadInput]:
    """What was read of several files, by name and place, by processes beside each other; nothing where that is not worth it."""
    if len(names) < 2:
        return {}
    from memledger import beside

    return beside.read(names, one, cores)


def _ahead(source: OpenInput, scanner: Scanner, cores: int | None) -> contextlib.AbstractContextManager[Ahead | None]:
    """What scans a large file ahead of the scanner, where there are cores for it."""
    if cores == 1 or source.size is None or source.size < AHEAD_FROM:
        return contextlib.nullcontext()
    from memledger import newlines
    from memledger.ahead import Ahead, usable_cores

    return Ahead(
        source.descriptor,
        source.size,
        BLOCK_BYTES,
        scanner.matcher,
        scanner.thinner,
        newlines.counter(),
        helpers=(cores or usable_cores()) - 1,
        longest=scanner.longest_literal,
        applies=lambda: source.verbatim,
    )


def _each_once(paths: Iterable[str]) -> Iterator[str]:
    """The inputs, one that is named twice (or reached through a link) only once: it is one log, not two servers."""
    seen: set[str] = set()
    for path in paths:
        key = path if path == "-" else os.path.realpath(path)
        if key not in seen:
            seen.add(key)
            yield path


def _until(blocks: Iterator[bytes], on_idle: Callable[[], bool]) -> Iterator[bytes]:
    for block in blocks:
        yield block
        # The scanner asks for more: what it was given, it has read.
        if not block and not on_idle():
            return


def _report(reads: Sequence[ReadInput], missing: Sequence[str] = ()) -> Report:
    known = [read.input for read in reads]
    servers = tuple(join_servers([server for read in reads for server in read.servers], known))
    return Report(
        version=__version__,
        inputs=tuple(known),
        sources=(_log_source(known, servers, missing),),
        servers=servers,
        unrecognized=together(read.unrecognized for read in reads),
    )
