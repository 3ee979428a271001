"""Rules: what each program's lines look like, as data.

A rule file (`parsers/*.toml`, or a user's own through `--rules`) names one framework and holds rules: an id, literal
anchors, a pattern, typed fields with their units, what the line means, and sample lines with the values expected of
them. A rule file is data only: it can name no code.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from memledger import __version__, opening
from memledger.cache import cached, key_of
from memledger.units import UNIT_BYTES, Amount, parse_amount

Kind = Literal["ledger", "capacity", "config", "usage", "failure", "marker", "not_memory"]
Value = str | int | float | bool | Amount | tuple[Any, ...] | None

MATCH_TIMEOUT_SECONDS: Final = 1.0
"""No single pattern may run longer on one line; a line that does is reported as not understood."""

LARGEST_RULE_FILE: Final = 4 * 2**20
"""Bytes; the bundled files together have a tenth of that."""

LONGEST_PLAIN: Final = 2000
"""Longer lines are matched by `regex`, with a timeout."""

FRAMEWORKS: Final = ("sglang", "vllm", "any", "system")
PREFIX_FILE: Final = "prefixes.toml"
WORDING_MARK: Final = "@"
"""Behind the id of a user's rule that is another wording of a bundled one: `kv_pool@1`, from the first file."""
_NAMED_GROUP: Final = re.compile(r"\(\?<(?=[A-Za-z_])")
_bundled_patterns: Final[set[str]] = set()
_SIZE_UNITS: Final = {"bytes": "B", "byte": "B", "b": "B", "kib": "KiB", "mib": "MiB", "gib": "GiB", "tib": "TiB"}


class GrammarError(ValueError):
    """A rule file that cannot be used; the message names the file, the rule and what is wrong."""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line as printed and the values that its rule must read from it (printed numbers, not converted to bytes)."""

    line: str
    expect: dict[str, Any] = {}


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One recognised wording.

    `anchor` (or `anchors`): literals, at least one of which is in every such line (the pre-filter looks for them).
    `pattern`: matched at the start of the message, after every prefix is taken off; named groups are the fields.
    `fields`: group name to type: `count`, `float`, `percent`, `text`, `flag`, `size` (number with its unit in the
    text, as torch prints it), or a unit of `memledger.units` (`GiB`, `GiB.2`, `MiB`, `B`, `GB10` ...). A type followed
    by `*` collects every repetition of the group into a tuple.
    """

    id: str
    pattern: str
    means: str
    kind: Kind = "ledger"
    anchor: str | None = None
    anchors: tuple[str, ...] = ()
    fields: dict[str, str] = {}
    versions: str = ""
    sample: tuple[Sample, ...] = ()
    framework: str = ""
    last: bool = False
    """Tried after the rules of all files: it takes what no other rule does, whatever that is about."""

    @property
    def literals(self) -> tuple[str, ...]:
        """All anchors of the rule."""
        return (self.anchor, *self.anchors) if self.anchor is not None else self.anchors

    @property
    def full_id(self) -> str:
        """`sglang.kv_pool`: unique over all rule files."""
        return f"{self.framework}.{self.id}"


class RuleFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One TOML file: the framework whose lines it describes, and its rules.

    `any`: lines that a server prints whichever engine it is, as torch's; `system`: the kernel's, containers', the driver's.
    """

    framework: str
    rule: tuple[Rule, ...] = ()
    about: str = ""


class RuleSet:
    """All rules in force, in order of trust: files in name order, user files first, rules in file order."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules: tuple[Rule, ...] = tuple(rules)
        seen: set[str] = set()
        for rule in self.rules:
            if rule.full_id in seen:
                raise GrammarError(f"rule {rule.full_id} is defined twice")
            seen.add(rule.full_id)
        self.by_anchor: dict[str, tuple[Rule, ...]] = {}
        for rule in self.rules:
            for literal in rule.literals:
                self.by_anchor[literal] = (*self.by_anchor.get(literal, ()), rule)
        ordered = sorted(self.rules, key=lambda rule: rule.last)
        self.order: dict[str, int] = {rule.full_id: i for i, rule in enumerate(ordered)}

    @property
    def anchors(self) -> tuple[str, ...]:
        """Every distinct literal, for the pre-filter."""
        return tuple(self.by_anchor)


def compile_pattern(pattern: str) -> Any:
    """The compiled pattern (cached). Compiled on first use: most logs meet a few dozen of all rules."""
    return _compile(pattern)


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str) -> Any:
    import regex

    return regex.compile(pattern, regex.VERSION0)


def find(rule: Rule, message: str) -> Any:
    """The match of the rule's pattern at the start of `message` (of `re` or of `regex`), or None.

    `regex` has a timeout, but takes a few milliseconds for each pattern that it compiles. Bundled patterns are known to
    need linear time (the tests try them on hostile lines): on lines of ordinary length `re` does.

    Raises:
        TimeoutError: the pattern ran longer than `MATCH_TIMEOUT_SECONDS`.
    """
    if (
        len(message) <= LONGEST_PLAIN
        and rule.pattern in _bundled_patterns
        and (plain := _plain(rule.pattern)) is not None
    ):
        return plain.match(message)
    return compile_pattern(rule.pattern).match(message, timeout=MATCH_TIMEOUT_SECONDS)


@functools.lru_cache(maxsize=4096)
def _plain(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(_NAMED_GROUP.sub("(?P<", pattern))
    except re.error:
        return None  # only `regex` knows it: a group named twice, or newer syntax than this Python's


def match_rule(rule: Rule, message: str) -> dict[str, Value] | None:
    """The typed fields of `message` under `rule`; None where its pattern does not match at the start.

    Raises:
        TimeoutError: the pattern ran longer than `MATCH_TIMEOUT_SECONDS`.
    """
    found = find(rule, message)
    if found is None:
        return None
    fields: dict[str, Value] = {}
    for name, kind in rule.fields.items():
        if kind.endswith("*"):
            fields[name] = tuple(convert(text, kind[:-1]) for text in found.captures(name))
        elif (text := found.group(name)) is not None:
            fields[name] = convert(text, kind)
    return fields


def convert(text: str, kind: str) -> Value:
    """The typed value of one printed field; None where it stands for "not available"."""
    if kind == "text":
        return text
    if kind == "count":
        return int(text.replace(",", "").replace("_", ""))
    if kind == "float":
        return _finite(text.replace(",", ""))
    if kind == "percent":
        return _finite(text) / 100
    if kind == "flag":
        return text.lower() in {"true", "yes", "on", "1"}
    if kind == "size":
        return _convert_size(text)
    return parse_amount(text, kind)


def _finite(text: str) -> float:
    """The number; more digits than a float holds are no figure.

    Raises:
        ValueError: it is none.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"not a finite number: {text[:40]!r}")
    return value


def _convert_size(text: str) -> Amount | None:
    number, _, word = text.strip().partition(" ")
    unit = _SIZE_UNITS.get(word.strip().lower())
    return parse_amount(number, unit) if unit else None


def field_type_problem(kind: str) -> str | None:
    """What is wrong with a field's type; None when it is one of ours."""
    base = kind.removesuffix("*")
    unit, _, decimals = base.partition(".")
    if base in {"text", "count", "float", "percent", "flag", "size"} or (
        unit in UNIT_BYTES and (not decimals or decimals in "0123456789")
    ):
        return None
    return f"unknown field type {kind!r}"


def parsers_folder() -> Path:
    """The folder of the bundled rule files: inside the installed package, or beside it in a checkout.

    Raises:
        GrammarError: neither place has them (a broken installation).
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "parsers", package.parent / "parsers"):
        if (folder / PREFIX_FILE).is_file():
            return folder
    raise GrammarError(
        f"the rule files are missing: neither {package / 'parsers'} nor {package.parent / 'parsers'} has {PREFIX_FILE}; reinstall memledger"
    )


def read_rule_file(path: Path) -> RuleFile:
    """One rule file, checked.

    Raises:
        GrammarError: not readable, not TOML, or a rule that cannot work.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = opening.read_file(path, LARGEST_RULE_FILE)
        if data is None:
            raise GrammarError(f"{path}: larger than {LARGEST_RULE_FILE >> 20} MiB: this is no rule file")
        raw = tomllib.loads(data.decode())
    except OSError as error:
        raise GrammarError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GrammarError(f"{path}: {error}") from error
    except RecursionError as error:
        raise GrammarError(f"{path}: nested too deep for a rule file") from error
    try:
        parsed = msgspec.convert(raw, RuleFile)
    except msgspec.ValidationError as error:
        raise GrammarError(f"{path}: {error}") from error
    rules = tuple(msgspec.structs.replace(rule, framework=parsed.framework) for rule in parsed.rule)
    for rule in rules:
        if not rule.literals or any(len(literal) < 3 for literal in rule.literals):
            raise GrammarError(f"{path}: rule {rule.id}: every rule needs an anchor of at least 3 characters")
        for name, kind in rule.fields.items():
            if problem := field_type_problem(kind):
                raise GrammarError(f"{path}: rule {rule.id}: field {name}: {problem}")
    return msgspec.structs.replace(parsed, rule=rules)


def load_rules(extra: Iterable[Path] = ()) -> RuleSet:
    """The bundled rules, with a user's own files before them.

    A user's rule with the id of a bundled one is another wording of that meaning: it takes over its kind, and what the
    line means for the ledger is the bundled id's.

    Raises:
        GrammarError: see `read_rule_file`; or such a rule has a field that the meaning does not know, or of another type.
    """
    bundled = _bundled_rules()
    known = {rule.full_id: rule for rule in bundled}
    own = []
    for number, path in enumerate(extra, start=1):
        for rule in read_rule_file(path).rule:
            meaning = known.get(rule.full_id)
            own.append(rule if meaning is None else _another_wording(rule, meaning, number, path))
            _check_pattern(path, rule)
    return RuleSet((*own, *bundled))


def _check_pattern(path: Path, rule: Rule) -> None:
    """Refuse a user's rule that no line can ever satisfy (of the bundled ones the tests say it)."""
    import regex

    if rule.framework not in FRAMEWORKS:
        raise GrammarError(f"{path}: unknown framework {rule.framework!r}; there are {', '.join(FRAMEWORKS)}")
    try:
        groups = compile_pattern(rule.pattern).groupindex
    except (regex.error, RecursionError, OverflowError) as error:
        raise GrammarError(f"{path}: rule {rule.id}: the pattern is no regular expression: {error}") from error
    if missing := [name for name in rule.fields if name not in groups]:
        raise GrammarError(f"{path}: rule {rule.id}: the pattern has no group {missing[0]!r}")


def _another_wording(rule: Rule, meaning: Rule, number: int, path: Path) -> Rule:
    for name, kind in rule.fields.items():
        expected = meaning.fields.get(name)
        if expected is None:
            names = ", ".join(meaning.fields) or "none"
            raise GrammarError(f"{path}: rule {rule.id}: {meaning.full_id} has no field {name!r}; its fields: {names}")
        if _sort_of(kind) != _sort_of(expected):
            raise GrammarError(
                f"{path}: rule {rule.id}: field {name} is {expected!r} in {meaning.full_id}, not {kind!r}"
            )
    return msgspec.structs.replace(rule, id=f"{rule.id}{WORDING_MARK}{number}", kind=meaning.kind)


def _sort_of(kind: str) -> str:
    """What a field's type gives: all units and `size` give an amount."""
    base = kind.removesuffix("*")
    sort = base if base in {"text", "count", "float", "percent", "flag"} else "amount"
    return ("number" if sort in {"float", "percent"} else sort) + kind[len(base) :]


def _bundled_rules() -> tuple[Rule, ...]:
    """The rules of the bundled files, in name order. Reading TOML takes longer than a short log: the result is kept.

    What is no memory at all comes last: a loose pattern for noise never takes a line that an engine's rule knows.
    """
    files = sorted(
        (p for p in parsers_folder().glob("*.toml") if p.name != PREFIX_FILE), key=lambda p: (p.stem == "noise", p.name)
    )

    def read() -> bytes:
        return msgspec.msgpack.encode([rule for path in files for rule in read_rule_file(path).rule])

    key = key_of(__version__, *(part for path in files for part in (path.name, path.read_bytes())))
    try:
        rules = msgspec.msgpack.decode(cached("rules", key, read), type=tuple[Rule, ...])
    except msgspec.DecodeError:
        rules = msgspec.msgpack.decode(read(), type=tuple[Rule, ...])
    # Repeated groups ("*") need `regex`: `re` keeps only the last repetition.
    _bundled_patterns.update(r.pattern for r in rules if not any(kind.endswith("*") for kind in r.fields.values()))
    return rules


def expectation_matches(expected: Any, got: Value, kind: str) -> bool:
    """Whether a sample's printed expectation equals the value read (in the field's own unit)."""
    if kind.endswith("*"):
        if not isinstance(expected, list) or not isinstance(got, tuple) or len(expected) != len(got):
            return False
        return all(expectation_matches(e, g, kind[:-1]) for e, g in zip(expected, got, strict=True))
    if isinstance(got, Amount):
        wanted = _convert_size(str(expected)) if kind == "size" else parse_amount(str(expected), kind)
        return wanted is not None and wanted.bytes == got.bytes
    if kind == "percent" and isinstance(got, float):
        return abs(got * 100 - float(expected)) < 1e-9
    if isinstance(got, float):
        return abs(got - float(expected)) < 1e-12
    return bool(expected == got)
