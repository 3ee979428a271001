"""What every engine's reader offers: it is fed the events of its engine in order and gives the servers it found."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Protocol

import msgspec

from memledger.events import Event
from memledger.ledger import Residual, Server, Usage

MOST_STARTS: Final = 2000
"""Starts of one log that are kept in full: of more, the first and the last thousand."""


def header(server: Server) -> Server:
    """A start without its ledger: what it was, when, and how it ended. A restart loop has thousands like it."""
    note = f"one of more than {MOST_STARTS} starts: its ledger is not kept"
    ranks = tuple(
        msgspec.structs.replace(rank, entries=(), stages=(), residual=Residual(None, None, None, "open", None, note))
        for rank in server.ranks[:1]
    )
    return msgspec.structs.replace(
        server, config={}, ranks=ranks, engines=(), usage=Usage(), failures=server.failures[:1], notes=(note,)
    )


class FrameworkReader(Protocol):
    """Builds servers from the events of one engine.

    Readers keep running figures only (peaks, the latest value), never all events: memory does not grow with the log.
    """

    framework: ClassVar[Literal["sglang", "vllm"]]

    def feed(self, event: Event) -> None:
        """Take one event of this engine, or one of framework `any` (torch, the kernel) seen while it was the engine in hand."""

    def servers(self) -> list[Server]:
        """Every start found, in order of its first line. May be called again after more events."""
