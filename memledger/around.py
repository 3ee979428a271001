"""The lines around log lines: what a reader would see there, from a second look at the inputs.

Only files are looked at again: what came through a pipe is gone. A file that no longer says what it said (a rotated log)
has no neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from memledger.ledger import Evidence, Input
from memledger.prefix import is_users_text, text_after_prefix
from memledger.sanitize import clean, strip_terminal
from memledger.sources import InputError, open_input

LINES_AROUND: Final = 2
LONGEST_NEIGHBOUR: Final = 400
LONGEST_LOOKED_AT: Final = 8 * 1024
"""Bytes of a line that are looked at; what a neighbour shows of them is less still."""
_COMPARED: Final = 60
REQUEST_LEFT_OUT: Final = "(a request, left out)"


class Neighbour(msgspec.Struct, frozen=True):
    """A line beside one that a report quotes: `line` counts from 1, `text` is cleaned and masked."""

    input: int
    line: int
    text: str


def neighbours(inputs: Sequence[Input], quoted: Iterable[Evidence], count: int = LINES_AROUND) -> tuple[Neighbour, ...]:
    """Up to `count` lines before and after each quoted line, each once, in order; quoted lines themselves are left out."""
    by_input: dict[int, dict[int, Evidence]] = {}
    for evidence in quoted:
        by_input.setdefault(evidence.input, {})[evidence.line] = evidence
    found: list[Neighbour] = []
    for index, lines in sorted(by_input.items()):
        if index < len(inputs) and is_a_file(inputs[index].path):
            found += _of_one(index, inputs[index].path, lines, count)
    return tuple(found)


def is_a_file(path: str) -> bool:
    """Whether an input can be read a second time."""
    try:
        return path != "-" and Path(path).is_file()
    except (OSError, ValueError):
        return False


def _of_one(index: int, path: str, quoted: Mapping[int, Evidence], count: int) -> list[Neighbour]:
    wanted = {line for at in quoted for line in range(max(1, at - count), at + count + 1)}
    try:
        there = _lines(path, wanted)
    except InputError:
        return []
    if not any(_says(there.get(line, b""), evidence) for line, evidence in quoted.items()):
        return []
    return [Neighbour(index, line, _shown(there[line])) for line in sorted(there) if line not in quoted]


def _lines(path: str, wanted: set[int]) -> dict[int, bytes]:
    """The wanted lines of a file by number, each cut; reading ends with the last of them.

    Raises:
        InputError: the file can't be read.
    """
    found: dict[int, bytes] = {}
    last = max(wanted)
    number = 1
    with open_input(path) as source:
        for block in source.blocks():
            ends = block.count(b"\n")
            if any(number <= line <= number + ends for line in wanted):
                for offset, piece in enumerate(block.split(b"\n")):
                    here = number + offset
                    if here in wanted and len(before := found.get(here, b"")) < LONGEST_LOOKED_AT:
                        found[here] = before + piece[:LONGEST_LOOKED_AT]
            number += ends
            if number > last:
                break
    # What follows the last line's end is no line.
    if number in found and not found[number]:
        del found[number]
    return found


def _says(raw: bytes, evidence: Evidence) -> bool:
    text = " ".join(clean(raw.decode("utf-8", "replace"), LONGEST_LOOKED_AT).split())
    return bool(text) and " ".join(evidence.text.split())[:_COMPARED] in text


def _shown(raw: bytes) -> str:
    # Of a progress bar, what a terminal shows in the end.
    text = raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    if is_users_text(text_after_prefix(strip_terminal(text))):
        return REQUEST_LEFT_OUT
    return clean(text, LONGEST_NEIGHBOUR)
