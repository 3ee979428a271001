"""What every engine's reader offers: it is fed the events of its engine in order and gives the servers it found."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from memledger.events import Event
from memledger.ledger import Server


class FrameworkReader(Protocol):
    """Builds servers from the events of one engine.

    Readers keep running figures only (peaks, the latest value), never all events: memory does not grow with the log.
    """

    framework: ClassVar[Literal["sglang", "vllm"]]

    def feed(self, event: Event) -> None:
        """Take one event of this engine, or one of framework `any` (torch, the kernel) seen while it was the engine in hand."""

    def servers(self) -> list[Server]:
        """Every start found, in order of its first line. May be called again after more events."""
