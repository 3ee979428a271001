"""What an engine is: something that reads files, many at a time, and gives each its outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from memledger.fleet.one import Outcome, Settings, Work

Reader = Callable[[Work, Settings], Outcome]
"""What is done with one file, in a worker: `memledger.fleet.one.read`."""


class EngineError(Exception):
    """The engine itself can't work; the text is one sentence."""


class Engine(Protocol):
    """A context manager: entering it starts what it needs, leaving it ends all of that."""

    def __enter__(self) -> Engine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def results(self, work: Sequence[Work], ended: Callable[[], bool]) -> Iterator[tuple[Work, Outcome]]:
        """Each piece of work with its outcome, in the order in which they are done, until all are or `ended` says so.

        Raises:
            EngineError: it can't go on.
        """
        ...
