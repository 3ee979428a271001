"""What a server was doing when it failed: vLLM's crash dump, else the last usage line before.

Usage lines come by the hundred thousand; the scanner hands over those that raise a peak and the last one before anything
else (`memledger.scan`). Only those right before a failure are kept.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

from memledger.events import Event
from memledger.ledger import Server
from memledger.postmortem.incident import Phase, ServerState
from memledger.postmortem.symptom import Symptom

Value = TypeVar("Value")

MOST_KEPT: Final = 200
"""Moments that are kept from the beginning of the inputs, and as many from the end."""
MOST_SOURCES: Final = 256
DUMP_LINES: Final = 3000
"""How far from the failing line the crash dump may stand: it comes from another process."""

_BEFORE_A_FAILURE: Final = frozenset(
    {"frame", "frame_code", "vllm_frame", "traceback", "traceback_begin", "exception", "engine_died", "alloc_retry"}
)
_SCHEDULED: Final = re.compile(r"\btotal_num_scheduled_tokens=(\d{1,9})\b")
_NEW_TOKENS: Final = re.compile(r"#new-token: (\d{1,3}(?:,\d{3}){1,3}|\d{1,9})\b")
LONGEST_LOOK: Final = 2**16
"""How much of a dumped scheduler step is looked through: a step of many requests is a line of megabytes."""


class Doing:
    """Takes all events of a reading in order; `at` answers for one failure."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int | None], Event] = {}
        self._usage: dict[tuple[int, int], Event] = {}
        self._dumps: dict[tuple[int, int], Event] = {}
        self._steps: dict[tuple[int, int], int] = {}

    def feed(self, event: Event) -> None:
        """Take one event."""
        if event.rule.kind == "usage":
            key = (event.input, _engine(event))
            if key in self._latest or len(self._latest) < MOST_SOURCES:
                self._latest[key] = event
        elif event.id == "crash_scheduler":
            if event.count("running") is not None:
                _keep(self._dumps, event, event)
            elif (tokens := _step(event.message)) is not None:
                _keep(self._steps, event, tokens)
        elif (event.rule.kind == "failure" or event.id in _BEFORE_A_FAILURE) and self._latest:
            for usage in self._latest.values():
                _keep(self._usage, usage, usage)
            self._latest.clear()

    def at(self, symptom: Symptom, server: Server | None) -> ServerState | None:
        """What the server did when the line was printed; None where no line of this start says it."""
        spans = [s for s in server.span if s.input == symptom.input] if server is not None else []
        first = min((span.first_line for span in spans), default=1)
        # Behind the end of this start stand the lines of another.
        end = max((span.last_line for span in spans), default=symptom.line + DUMP_LINES)
        dump = _nearest(self._dumps, symptom, first, end)
        if dump is not None:
            return ServerState(
                dump.count("running"),
                dump.count("waiting"),
                dump.share("kv"),
                scheduled_tokens=_nearest(self._steps, symptom, first, end),
                basis="vLLM's crash dump",
                at=dump.prefix.time,
                evidence=(dump.evidence,),
            )
        found = [e for (at, line), e in self._usage.items() if at == symptom.input and first <= line < symptom.line]
        if not found:
            return None
        dp = symptom.prefix.ranks.get("dp")
        last = max([e for e in found if dp is not None and _engine(e) == dp] or found, key=lambda e: e.line)
        tokens = _NEW_TOKENS.search(last.message) if last.id == "prefill_batch" else None
        return ServerState(
            last.count("running"),
            last.count("queued") if last.count("queued") is not None else last.count("waiting"),
            last.share("kv"),
            last.share("state"),
            new_tokens=int(tokens[1].replace(",", "")) if tokens is not None else None,
            basis="the last usage line",
            at=last.prefix.time,
            evidence=(last.evidence,),
        )


def phase_of_step(state: ServerState | None, server: Server | None) -> Phase | None:
    """Prefill or decode, where the crash dump counts the tokens of the step: a decode step has one for each request, and the drafted."""
    if state is None or state.scheduled_tokens is None or not state.running:
        return None
    config = server.config if server is not None else {}
    drafted = config.get("speculative_draft_tokens")
    if config.get("speculative_algorithm") and not isinstance(drafted, int):
        return None
    each = 1 + (drafted if isinstance(drafted, int) else 0)
    return "prefill" if state.scheduled_tokens > state.running * each else "decode"


def _step(message: str) -> int | None:
    for text in (message[:LONGEST_LOOK], message[-LONGEST_LOOK:]):
        if (found := _SCHEDULED.search(text)) is not None:
            return int(found[1])
    return None


def _engine(event: Event) -> int | None:
    """Whose usage it is, where several engines print theirs: the data-parallel rank."""
    engine = event.count("engine")
    return engine if engine is not None else event.prefix.ranks.get("dp")


def _keep(kept: dict[tuple[int, int], Value], event: Event, value: Value) -> None:
    """Keep what stands on a line; of too many those in the middle go."""
    kept[(event.input, event.line)] = value
    if len(kept) > 2 * MOST_KEPT:
        del kept[list(kept)[MOST_KEPT]]


def _nearest(kept: dict[tuple[int, int], Value], symptom: Symptom, first: int, last: int) -> Value | None:
    near = {
        abs(line - symptom.line): value
        for (at, line), value in kept.items()
        if at == symptom.input and first <= line <= last and abs(line - symptom.line) <= DUMP_LINES
    }
    return near[min(near)] if near else None
