"""Logs in which every line stands twice: two log handlers of one logger, or `tee` into the same file.

One pool announced twice is not two pools. A single repeated line means nothing (layers of a draft model print equal
lines), so neighbours are taken for one only where nearly all lines at the head of the input come in equal pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from memledger.events import Event

FEWEST_PAIRS: Final = 4
PAIRS_TO_SINGLES: Final = 9

_RECORD: Final = re.compile(
    rb"\s*(?:[\w.-]{1,80} {0,40}\| )?"
    rb"(?:[\[(]|\d{4}-\d\d-\d\d|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|[A-Z][a-z]{2} [ \d]\d )"
)


def stands_twice(head: bytes) -> bool:
    """Whether nearly all records in the first bytes of an input come in pairs of equal neighbours.

    Lines without any prefix (progress bars, banners, tracebacks) are not the logger's and count for neither.
    """
    lines = [line for line in head.split(b"\n")[:-1] if _RECORD.match(line)]
    pairs = singles = at = 0
    while at < len(lines):
        if at + 1 < len(lines) and lines[at] == lines[at + 1]:
            pairs += 1
            at += 2
        else:
            singles += 1
            at += 1
    return pairs >= FEWEST_PAIRS and pairs >= PAIRS_TO_SINGLES * singles


def read_once(events: Iterable[Event], head: Callable[[], bytes], note: Callable[[str], None]) -> Iterator[Event]:
    """The events, the second of each pair of equal neighbours left out where every line stands twice.

    Args:
        events: one input's events in order.
        head: its first bytes, asked for once the first event is there.
        note: told once where lines are left out.
    """
    doubled: bool | None = None
    before: Event | None = None
    for event in events:
        if doubled is None and (doubled := stands_twice(head())):
            note("every line stands twice; it is read once")
        if doubled and before is not None and _is_the_same(before, event):
            before = None
            continue
        before = event
        yield event


def _is_the_same(a: Event, b: Event) -> bool:
    return b.line == a.line + 1 and a.rule is b.rule and a.message == b.message and a.prefix == b.prefix
