"""What every engine's reader offers: it is fed the events of its engine in order and gives the servers it found."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Protocol

import msgspec

from memledger.events import Event
from memledger.ledger import Entry, Rank, Residual, Server

MOST_STARTS: Final = 2000
"""Starts of one log that are kept in full: of more, the first and the last thousand."""


def header(server: Server) -> Server:
    """A start without lines and stages, its ledger that of the first rank only. A restart loop has thousands like it."""
    note = f"one of more than {MOST_STARTS} starts: of its ledger only the first rank's sizes are kept, without their lines"
    ranks = tuple(_bare(rank) if rank is server.ranks[0] else _empty(rank, note) for rank in server.ranks)
    failures = tuple(msgspec.structs.replace(f, numbers={}) for f in server.failures[:1])
    sizes = {name: value for name, value in server.config.items() if isinstance(value, (int, float))}
    return msgspec.structs.replace(server, config=sizes, ranks=ranks, engines=(), failures=failures, notes=(note,))


def _bare(rank: Rank) -> Rank:
    entries = tuple(Entry(e.account, e.bytes, e.tolerance_bytes, e.basis) for e in rank.entries)
    return msgspec.structs.replace(
        rank, entries=entries, stages=(), residual=msgspec.structs.replace(rank.residual, evidence=())
    )


def _empty(rank: Rank, why: str) -> Rank:
    return msgspec.structs.replace(rank, entries=(), stages=(), residual=Residual(None, None, None, "open", None, why))


class FrameworkReader(Protocol):
    """Builds servers from the events of one engine.

    Readers keep running figures only (peaks, the latest value), never all events: memory does not grow with the log.
    """

    framework: ClassVar[Literal["sglang", "vllm"]]

    def feed(self, event: Event) -> None:
        """Take one event of this engine, or one of framework `any` (torch, the kernel) seen while it was the engine in hand."""

    def servers(self) -> list[Server]:
        """Every start found, in order of its first line. May be called again after more events."""
