"""Between which releases a start's wordings lie. Forks and dev builds carry other numbers: the wording decides."""

from __future__ import annotations

import re
from typing import Final

from memledger.events import Event

Version = tuple[int, ...]
OLDEST: Final[Version] = (0, 0)
NEWEST: Final[Version] = (99,)

_SINCE: Final[dict[str, Version]] = {
    "baseline": (0, 5, 21),
    "init_end_bare": (0, 5, 21),
    "graph_begin": (0, 5, 14),
    "graph_end": (0, 5, 14),
    "linear_attention": (0, 5, 10),
    "linear_dispatcher": (0, 5, 10),
    "state_cap": (0, 5, 17),
    "tree_cache": (0, 5, 13),
    "mm_reserve": (0, 5, 18),
    "weights_leave_no_kv": (0, 5, 14),
    "state_pool_too_small": (0, 5, 13),
    "state_no_memory": (0, 5, 13),
    "unified_pool": (0, 5, 15),
    "requests_reduced": (0, 5, 14),
    "requests_final": (0, 5, 13),
    "state_pool": (0, 5, 2),
}
_UNTIL: Final[dict[str, Version]] = {
    "graph_begin_old": (0, 5, 13),
    "graph_end_old": (0, 5, 13),
    "kv_dtype": (0, 5, 12),
    "requests_final": (0, 5, 13),
    "init_end": (0, 5, 20),
}


class VersionRange:
    """The newest "not before" and the oldest "not after" of all lines seen."""

    def __init__(self) -> None:
        self.low: Version = OLDEST
        self.high: Version = NEWEST

    def see(self, event: Event) -> None:
        """Narrow the range by one line's wording."""
        if event.rule.framework == "any":
            return
        low, high = _SINCE.get(event.id, OLDEST), _UNTIL.get(event.id, NEWEST)
        if event.id == "load_weight_end":
            low, high = _load_end(event)
        elif event.id == "kv_pool":
            low = (0, 5, 13) if event.word("dtype") else (0, 4, 2)
            high = NEWEST if event.word("dtype") else (0, 5, 12)
        elif event.id == "server_args" and (event.word("args") or "").startswith("{"):
            low = (0, 5, 19)
        elif event.id == "server_args":
            high = (0, 5, 18)
        elif event.id == "decode_batch" and event.message.startswith("Decode batch."):
            high = (0, 5, 3)
        self.low, self.high = max(self.low, low), min(self.high, high)

    def bounds(self, printed: str | None) -> tuple[Version, Version]:
        """The range; wordings that contradict each other (a fork) leave it open, a printed version narrows an open one."""
        low, high = (self.low, self.high) if self.low <= self.high else (OLDEST, NEWEST)
        if printed and (found := re.match(r"\d+(?:\.\d+)*", printed)):
            version = tuple(int(n) for n in found.group().split("."))
            if low <= version <= high and version > (0, 1):
                return version, version
        return low, high


def _load_end(event: Event) -> tuple[Version, Version]:
    """`elapsed=` from 0.5.9, `dtype=` up to 0.5.9, `mem usage=` from 0.4.4."""
    complete = event.amount("avail") is not None
    if event.number("elapsed") is not None:
        return (0, 5, 9) if event.word("dtype") else (0, 5, 10), (0, 5, 9) if event.word("dtype") else NEWEST
    if event.word("dtype") and complete:
        return ((0, 4, 4), (0, 5, 8)) if event.amount("usage") is not None else (OLDEST, (0, 4, 3))
    return OLDEST, NEWEST
