"""A fleet from its files to its output: what is not done yet is read, then all rows are written in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from memledger.fleet import output
from memledger.fleet.columns import Row
from memledger.fleet.engine import Engine
from memledger.fleet.journal import Journal
from memledger.fleet.one import Work
from memledger.fleet.sources import File
from memledger.fleet.summary import Summarizer, Summary

Progress = Callable[[File, str], None]
"""Told each file that is done, with its status."""


class Result(msgspec.Struct, frozen=True):
    """What a run came to. `read`: files read by it; `kept`: done before; `left`: not done (it was interrupted)."""

    summary: Summary
    rows: int
    read: int
    kept: int
    left: int


def not_done(files: Sequence[File], journal: Journal, *, retry_failed: bool = False) -> list[File]:
    """The files to read, the largest first: so the last ones to end are small."""
    todo = [file for file in files if not journal.has(file, retry_failed=retry_failed)]
    return sorted(todo, key=lambda file: -(file.size or 0))


def read(
    todo: Sequence[File],
    engine: Engine,
    journal: Journal,
    *,
    ended: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> int:
    """Read files and keep what becomes of each; how many were read.

    Raises:
        memledger.fleet.engine.EngineError: the engine can't go on.
        memledger.fleet.journal.JournalError: what was done can't be kept.
    """
    of: dict[Work, File] = {file.work: file for file in todo}
    count = 0
    for work, outcome in engine.results([file.work for file in todo], ended):
        journal.add(of[work], outcome)
        count += 1
        if progress is not None:
            progress(of[work], outcome.status)
    return count


def write(
    files: Sequence[File],
    journal: Journal,
    places: output.Places,
    summarizer: Summarizer,
) -> tuple[Summary, int, int]:
    """Write the rows of all files that are done, in the order of the files: the summary, rows, and files not done.

    Raises:
        OSError: they can't be written.
    """
    left = 0

    def rows() -> Iterator[Row]:
        nonlocal left
        for file in files:
            found = journal.rows(file)
            if found is None:
                left += 1
                continue
            summarizer.add(found)
            yield from found

    count = output.write(places, rows())
    return summarizer.summary(), count, left
