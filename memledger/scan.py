"""Bytes to events: a multi-literal pre-filter finds the lines that matter, then one pattern per rule reads each.

One pass, bounded memory: blocks are read, hit lines are cut out, everything else is only counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from memledger.events import Event, Prefix
from memledger.grammar import Rule, RuleSet, Value, expectation_matches, match_rule
from memledger.ledger import Evidence, Unrecognized
from memledger.prefix import is_users_text, peel, records
from memledger.sanitize import clean

MOST_EXAMPLES: Final = 20
LONGEST_LINE: Final = 4 * 2**20
"""Longer lines are cut for parsing (nothing that the engines print about memory comes near)."""

_MEMORY_LIKE: Final = re.compile(
    rb"\d[\d.,]*\s?(?:[GMT]i?B)\b|(?i:\b(?:memory|kv|cache|mamba|pool|gpu)\b[^\n]{0,60}?\d[\d,]*\s(?:tokens|slots|blocks)\b)"
)


class Scanner:
    """Reads events from streams of bytes; `unrecognized` counts memory-like lines that no rule took."""

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        self._anchors = re.compile(
            b"|".join(re.escape(a.encode()) for a in sorted(rules.anchors, key=len, reverse=True))
        )
        self.bytes = 0
        self.lines = 0
        self._unrecognized = 0
        self._examples: list[Evidence] = []

    @property
    def unrecognized(self) -> Unrecognized:
        """Memory-like lines that no rule took, over all streams so far."""
        return Unrecognized(self._unrecognized, tuple(self._examples))

    def events(self, blocks: Iterable[bytes], input_index: int) -> Iterator[Event]:
        """The events of one input, in order. `bytes` and `lines` are the input's when the iterator ends."""
        self.bytes = self.lines = 0
        for raw in _lines(blocks):
            self.bytes += len(raw)
            self.lines += 1
            if self._anchors.search(raw) or _MEMORY_LIKE.search(raw):
                yield from self._line(raw, input_index, self.lines)

    def _line(self, raw: bytes, input_index: int, number: int) -> Iterator[Event]:
        for piece in raw[:LONGEST_LINE].decode("utf-8", "replace").replace("\r\n", "\n").rstrip("\n").split("\r"):
            if not piece.strip():
                continue
            for prefix, message, text in records(piece):
                yield from self._record(prefix, message, text, input_index, number)

    def _record(self, prefix: Prefix, message: str, piece: str, input_index: int, number: int) -> Iterator[Event]:
        if (found := self.recognise(message)) is not None:
            rule, fields = found
            if rule.kind != "not_memory":
                yield Event(rule, fields, prefix, input_index, number, message, clean(piece))
        elif (
            not is_users_text(message) and _MEMORY_LIKE.search(piece.encode("utf-8", "replace")) and prefix != Prefix()
        ):
            self._unrecognized += 1
            if len(self._examples) < MOST_EXAMPLES:
                self._examples.append(Evidence(input_index, number, clean(piece)))

    def recognise(self, message: str) -> tuple[Rule, dict[str, Value]] | None:
        """The first rule in force that takes `message`, with its fields."""
        candidates = {r.full_id: r for a in self.rules.anchors if a in message for r in self.rules.by_anchor[a]}
        for rule in sorted(candidates.values(), key=lambda r: self.rules.order[r.full_id]):
            if (fields := match_rule(rule, message)) is not None:
                return rule, fields
        return None


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        parts = (rest + block).split(b"\n")
        rest = parts.pop()
        for part in parts:
            yield part + b"\n"
    if rest:
        yield rest


def check_rules(rules: RuleSet) -> list[str]:
    """What is wrong with the rules' samples (empty: every sample is taken by its own rule with the values it says)."""
    scanner = Scanner(rules)
    problems = []
    for rule in rules.rules:
        if not rule.sample:
            problems.append(f"{rule.full_id}: no sample")
        for sample in rule.sample:
            _, message = peel(sample.line)
            found = scanner.recognise(message)
            if found is None:
                problems.append(f"{rule.full_id}: not recognised: {sample.line!r}")
                continue
            taken, fields = found
            if taken.full_id != rule.full_id:
                problems.append(f"{rule.full_id}: taken by {taken.full_id}: {sample.line!r}")
                continue
            for name, value in sample.expect.items():
                if name not in rule.fields:
                    problems.append(f"{rule.full_id}: sample expects unknown field {name!r}")
                elif not expectation_matches(value, fields.get(name), rule.fields[name]):
                    problems.append(
                        f"{rule.full_id}: {name}: expected {value!r}, got {fields.get(name)!r}: {sample.line!r}"
                    )
    return problems
