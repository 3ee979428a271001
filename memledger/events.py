"""Events: recognised log lines with typed fields, the prefix that stood before the message, and where the line is."""

from __future__ import annotations

import msgspec

from memledger.grammar import WORDING_MARK, Rule, Value
from memledger.ledger import Evidence
from memledger.units import Amount

MOST_SHARE: float = 1.05
"""Pools are overshot by a little, and fractions printed above 1 then; what is larger is no fraction."""


class Prefix(msgspec.Struct, frozen=True):
    """What stood before the message: every layer taken off (container, journal, colour, engine).

    `time` is the engine's own time stamp as ISO text (a missing year stays missing: `--11-02T10:12:56`; only a time of
    day: `11:57:18`); `wrapper_time` the outermost container's or journal's. `ranks` holds the labels as printed, in
    lower case: {"dp": 0, "tp": 3, "ep": 3, "rank": 1}. `process` is the name in vLLM's or Ray's `(Worker_TP0 pid=81)`.
    `source` tells streams apart that were merged into one file: compose service, pod, host, journal unit.
    `style` is the engine whose prefix it is.
    """

    time: str | None = None
    wrapper_time: str | None = None
    ranks: dict[str, int] = {}
    pid: int | None = None
    process: str | None = None
    host: str | None = None
    level: str | None = None
    file: str | None = None
    source: str | None = None
    style: str | None = None
    repeated: int | None = None


class Event(msgspec.Struct, frozen=True):
    """One recognised line. `message` is the text after all prefixes, `text` the whole line as it may be shown."""

    rule: Rule
    fields: dict[str, Value]
    prefix: Prefix
    input: int
    line: int
    message: str
    text: str

    @property
    def id(self) -> str:
        """The id of what the line means, without its framework: that of the bundled rule for another wording of it."""
        return self.rule.id.partition(WORDING_MARK)[0]

    @property
    def evidence(self) -> Evidence:
        """This line as evidence."""
        return Evidence(self.input, self.line, self.text)

    def amount(self, name: str) -> Amount | None:
        """A memory figure; None where it was not printed or stands for "not available"."""
        value = self.fields.get(name)
        return value if isinstance(value, Amount) else None

    def count(self, name: str) -> int | None:
        """A whole number; None where it was not printed."""
        value = self.fields.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, name: str) -> float | None:
        """A number, whole or not (fractions as 0..1); None where it was not printed."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def share(self, name: str) -> float | None:
        """A fraction of a whole; None where it was not printed, or cannot be one (negative, or far above 1)."""
        value = self.number(name)
        return value if value is not None and 0 <= value <= MOST_SHARE else None

    def word(self, name: str) -> str | None:
        """A text; None where it was not printed."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool | None:
        """A yes or no; None where it was not printed."""
        value = self.fields.get(name)
        return value if isinstance(value, bool) else None
