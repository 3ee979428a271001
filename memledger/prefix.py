"""What stands before a message: peeling containers, journals, colours and engine prefixes off a line.

A literal counts only where a message can really start: at the start of the line, or after known prefixes. Text further
in (a user's prompt that the server logs) is never taken for a line of the server.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from memledger.events import Prefix
from memledger.grammar import PREFIX_FILE, GrammarError, parsers_folder
from memledger.sanitize import strip_terminal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_RANK: Final = re.compile(r"([A-Za-z_]+?)[ _=]?(\d+)(?![\d])")
_MOST_ENGINE_PREFIXES: Final = 3


class PrefixSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line, the groups its prefix must give, and what must be left."""

    line: str
    expect: dict[str, str]
    rest: str


class PrefixRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefix style."""

    id: str
    layer: str
    pattern: str
    means: str
    sample: tuple[PrefixSample, ...] = ()


@functools.lru_cache(maxsize=1)
def prefix_rules() -> tuple[PrefixRule, ...]:
    """The prefix styles of `parsers/prefixes.toml`."""
    path = parsers_folder() / PREFIX_FILE
    with Path(path).open("rb") as stream:
        raw = tomllib.load(stream)
    try:
        return tuple(msgspec.convert(raw["prefix"], list[PrefixRule]))
    except (KeyError, msgspec.ValidationError) as error:
        raise GrammarError(f"{path}: {error}") from error


@functools.lru_cache(maxsize=1)
def _compiled() -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    wrappers = [re.compile(r.pattern) for r in prefix_rules() if r.layer == "wrapper"]
    engines = [re.compile(r.pattern) for r in prefix_rules() if r.layer == "engine"]
    return wrappers, engines


def peel(line: str) -> tuple[Prefix, str]:
    """The prefix of a line and the message after it. Escapes are taken off; no prefix gives an empty `Prefix`."""
    text = strip_terminal(line).lstrip("\ufeff")
    found: dict[str, str] = {}
    styles: list[str] = []
    wrappers, engines = _compiled()
    position = 0
    engine_count = 0
    while True:
        patterns = engines if engine_count else [*wrappers, *engines]
        for pattern in patterns:
            if hit := pattern.match(text, position):
                break
        else:
            break
        if hit.end() == position:
            break
        if pattern in engines:
            engine_count += 1
            styles.append("sglang" if text[position] == "[" else "vllm")
            if engine_count > _MOST_ENGINE_PREFIXES:
                break
        found.update({k: v for k, v in hit.groupdict().items() if v is not None})
        position = hit.end()
    return _prefix(found, styles), text[position:]


def _prefix(found: dict[str, str], styles: list[str]) -> Prefix:
    if not found:
        return Prefix()
    ranks = {name.strip("_").lower(): int(n) for name, n in _RANK.findall(found.get("ranks", ""))}
    process = found.get("process")
    if process and (named := re.match(r"(?:VllmWorker|Worker)[ _-](.*)", process)):
        ranks.update({name.strip("_").lower(): int(n) for name, n in _RANK.findall(named.group(1))})
    elif process and (engine := re.match(r"EngineCore_(?:DP)?(\d+)$", process)):
        ranks["dp"] = int(engine.group(1))
    return Prefix(
        time=_iso(found.get("time")),
        wrapper_time=found.get("wrapper_time"),
        ranks=ranks,
        pid=int(found["pid"]) if "pid" in found else None,
        process=process,
        host=found.get("host"),
        level=found.get("level"),
        file=found.get("file"),
        source=found.get("source"),
        style=styles[-1] if styles else None,
        repeated=None,
    )


def _iso(time: str | None) -> str | None:
    """ISO text; a missing year stays missing (`--11-02T10:12:56`)."""
    if time is None:
        return None
    if re.match(r"\d{4}-", time):
        return time.replace(" ", "T", 1)
    return "--" + time.replace(" ", "T", 1) if re.match(r"\d\d-\d\d ", time) else time


def check_samples() -> list[str]:
    """What is wrong with the prefix samples (empty: all are read as they say)."""
    problems = []
    for rule in prefix_rules():
        for sample in rule.sample:
            _, rest = peel(sample.line)
            hit: Any = re.compile(rule.pattern).search(strip_terminal(sample.line))
            groups = {k: v for k, v in hit.groupdict().items() if v is not None} if hit else None
            if rest != sample.rest or groups != sample.expect:
                problems.append(f"prefix {rule.id}: {sample.line!r}: got {groups} and {rest!r}")
    return problems
