"""`--max-regression 'kv_tokens=-5%'`: how far a figure may fall from an expected report, for scripts and CI."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from memledger.compare.values import Comparison, Regression
from memledger.units import UNIT_BYTES

FIGURES: Final = ("kv_tokens", "pool_bytes", "kv_bytes_per_token", "state_bytes_per_request", "requests_that_fit")
SYNTAX: Final = "'kv_tokens=-5%', 'pool_bytes=-2GiB', 'kv_bytes_per_token=+1%' or 'requests_that_fit=-1'"

_FORM: Final = re.compile(
    r"^\s*(?P<figure>[a-z_]+)\s*=\s*(?P<sign>[+-]?)(?P<number>\d{1,15}(?:\.\d{1,6})?)\s*(?P<unit>%|[KMGT]iB|B)?\s*$",
    re.IGNORECASE,
)


class Limit(msgspec.Struct, frozen=True):
    """One limit: the change from old to new beyond which it holds; negative: a fall, positive: a rise."""

    text: str
    figure: str
    amount: float
    unit: Literal["share", "units"]
    falls: bool


def parse(text: str) -> Limit:
    """The limit that an expression means.

    Raises:
        ValueError: it means none; the message says what would do.
    """
    found = _FORM.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not a limit; write {SYNTAX}")
    figure = found["figure"].lower()
    if figure not in FIGURES:
        raise ValueError(f"{text!r}: there is no figure {figure!r}; there are {', '.join(FIGURES)}")
    falls = found["sign"] == "-"
    number = float(found["number"]) * (-1 if falls else 1)
    if not found["sign"]:
        raise ValueError(f"{text!r}: a fall is written with -, a rise with +; write {SYNTAX}")
    unit = found["unit"]
    if unit == "%":
        return Limit(text, figure, number / 100, "share", falls)
    if unit is not None and "bytes" not in figure:
        raise ValueError(f"{text!r}: {figure} is a count, not a size")
    size = next((size for name, size in UNIT_BYTES.items() if name.lower() == (unit or "B").lower()), 1)
    return Limit(text, figure, number * size, "units", falls)


def judge(limit: Limit, comparison: Comparison | None) -> Regression:
    """Whether the change goes beyond the limit: a fall by more than a negative one, a rise by more than a positive one.

    A figure that the new log lacks holds (a server that did not come up has no capacity); one that the old report lacks is
    not judged. Both say so.
    """
    pair = getattr(comparison.capacity, limit.figure) if comparison is not None else None
    old, new = (pair.a, pair.b) if pair is not None else (None, None)
    if old is None or (limit.unit == "share" and old == 0):
        return Regression(
            limit.text, limit.figure, old, new, None, False, f"not judged: no {limit.figure} in the old report"
        )
    if new is None:
        return Regression(limit.text, limit.figure, old, None, None, True, f"no {limit.figure} in the new log")
    change = (new - old) / old if limit.unit == "share" else float(new - old)
    holds = change < limit.amount if limit.falls else change > limit.amount
    return Regression(limit.text, limit.figure, old, new, change, holds)
