"""`--fail-on`: conditions on a report that turn into exit code 1, for scripts and CI."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import msgspec

from memledger import words as n
from memledger.ledger import Rank, Server
from memledger.units import UNIT_BYTES

SEVERITIES: Final = ("info", "note", "warning", "error")
VERDICTS: Final = ("closed", "unexplained", "over_counted", "open")
SYNTAX: Final = "unexplained>2%, unexplained>1GiB, code=ML101, severity>=warning or verdict=open"

_EXPRESSION: Final = re.compile(
    r"^\s*(?P<name>[a-z_]+)\s*(?P<sign>>=|<=|==|!=|>|<|=)\s*(?P<value>\S+(?: \S+)?)\s*$", re.IGNORECASE
)
_SIZE: Final = re.compile(r"^(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|B|[KMGT]i?B)$", re.IGNORECASE)
_SIGNS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


class Condition(msgspec.Struct, frozen=True):
    """One parsed expression. `value` is bytes, a fraction (where `share`), a severity, a verdict or a code."""

    text: str
    name: Literal["unexplained", "code", "severity", "verdict"]
    sign: str
    value: float | str
    share: bool = False


def parse_condition(text: str) -> Condition:
    """The condition that an expression means.

    Raises:
        ValueError: it means none; the message says what would do.
    """
    found = _EXPRESSION.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not a condition; write {SYNTAX}")
    name, sign, value = found["name"].lower(), found["sign"], found["value"]
    if name == "unexplained":
        size = _SIZE.match(value)
        if size is None:
            raise ValueError(
                f"{text!r}: {value!r} is neither a share nor a size; write unexplained>2% or unexplained>1GiB"
            )
        number, unit = float(size["number"]), size["unit"]
        if unit == "%":
            return Condition(text, "unexplained", sign, number / 100, share=True)
        letter = unit[0].upper()
        return Condition(text, "unexplained", sign, number * UNIT_BYTES["B" if letter == "B" else f"{letter}iB"])
    if name == "code":
        if sign not in {"=", "==", "!="} or not re.fullmatch(r"(?i)ML\d{3}", value):
            raise ValueError(f"{text!r}: write code=ML101 (a finding's code)")
        return Condition(text, "code", sign, value.upper())
    if name == "severity":
        if value.lower() not in SEVERITIES:
            raise ValueError(f"{text!r}: no severity {value!r}; there are {', '.join(SEVERITIES)}")
        return Condition(text, "severity", sign, value.lower())
    if name == "verdict":
        if sign not in {"=", "==", "!="} or value.lower() not in VERDICTS:
            raise ValueError(f"{text!r}: write verdict=NAME or verdict!=NAME with one of {', '.join(VERDICTS)}")
        return Condition(text, "verdict", sign, value.lower())
    raise ValueError(f"{text!r}: nothing is called {name!r}; write {SYNTAX}")


def reasons(condition: Condition, servers: Iterable[Server]) -> list[str]:
    """Why a condition holds, one sentence per rank or finding; empty where it does not.

    A rank whose ledger is open has no judged residual: `unexplained` says nothing about it (`verdict=open` does).
    """
    servers = list(servers)
    if condition.name in {"code", "severity"}:
        findings = [f for server in servers for f in server.findings]
        if condition.name == "code" and condition.sign == "!=":
            return [] if any(f.code == condition.value for f in findings) else [f"no {condition.value}"]
        return [f"{f.code} ({f.severity})" for f in findings if _finding_holds(condition, f.code, f.severity)]
    found = []
    for rank in (rank for server in servers for rank in server.ranks):
        residual = rank.residual
        if condition.name == "verdict":
            if _SIGNS[condition.sign](residual.verdict, condition.value):
                found.append(f"{rank.label}: {residual.verdict}")
        elif residual.verdict != "open" and residual.bytes is not None and _residual_holds(condition, rank):
            found.append(f"{rank.label}: {n.signed_gib(residual.bytes)} GiB")
    return found


def not_judged(condition: Condition, servers: Iterable[Server]) -> list[str]:
    """The ranks about which `unexplained` cannot be decided, with the reason."""
    if condition.name != "unexplained":
        return []
    open_ranks = [r for server in servers for r in server.ranks if r.residual.verdict == "open"]
    return [f"{r.label}: {r.residual.reason or 'the ledger is open'}" for r in open_ranks]


def _finding_holds(condition: Condition, code: str, severity: str) -> bool:
    compare = _SIGNS[condition.sign]
    if condition.name == "code":
        return compare(code, condition.value)
    return compare(SEVERITIES.index(severity), SEVERITIES.index(str(condition.value)))


def _residual_holds(condition: Condition, rank: Rank) -> bool:
    size: float = rank.residual.bytes or 0
    if condition.share:
        if not rank.residual.opening_bytes:
            return False
        size /= rank.residual.opening_bytes
    return _SIGNS[condition.sign](size, condition.value)
