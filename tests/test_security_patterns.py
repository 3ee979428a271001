"""No pattern takes longer than its line is long: each is tried on lines made to hold it up, from the pattern itself."""

import functools
import re

import pytest
from attacks import attacks, grows_faster_than_its_text, line

from memledger.grammar import _NAMED_GROUP, _bundled_patterns, compile_pattern, load_rules
from memledger.prefix import prefix_rules

PLAIN, LONG = 2000, 2**16
GIVES_UP_SECONDS = 60


@functools.lru_cache(maxsize=1)
def rules():
    return load_rules().rules


def plain(pattern):
    """The pattern for `re`, where `re` knows it: a group named twice only `regex` does."""
    try:
        return re.compile(_NAMED_GROUP.sub("(?P<", pattern))
    except re.error:
        return None


def slow(pattern, *readers):
    """The attacks that a pattern does not withstand, with how its time grows; `readers`: (what reads, how long lines)."""
    parsed = plain(pattern)
    found = []
    for before, pump in attacks(parsed.pattern) if parsed is not None else ():
        for read, longest in readers:
            if (growth := grows_faster_than_its_text(read, before, pump, longest)) is not None:
                found.append(f"{before[-40:]!r} {pump[:40]!r}: {growth}")
    return found


@pytest.mark.parametrize("framework", sorted({rule.framework for rule in rules()}))
def test_every_rule_withstands_lines_made_from_its_pattern(framework):
    found = {}
    for rule in rules():
        if rule.framework != framework:
            continue
        timed = compile_pattern(rule.pattern)
        readers = [(functools.partial(timed.match, timeout=GIVES_UP_SECONDS), LONG)]
        if rule.pattern in _bundled_patterns and (compiled := plain(rule.pattern)) is not None:
            readers.append((compiled.match, PLAIN))
        if slow_ones := slow(rule.pattern, *readers):
            found[rule.full_id] = slow_ones
    assert not found


def test_every_prefix_withstands_lines_made_from_its_pattern():
    found = {rule.id: slow(rule.pattern, (re.compile(rule.pattern).match, LONG)) for rule in prefix_rules()}
    assert not {name: slow_ones for name, slow_ones in found.items() if slow_ones}


@pytest.mark.parametrize("pattern", [r"(?:a+)+b", r"(?:\d+,? ?)+\]", r"x\s*\s*y", r"(?:a|a)*b", r"\w+[\w-]*z"])
def test_a_pattern_that_does_not_withstand_them_is_found(pattern):
    assert slow(pattern, (re.compile(pattern).match, LONG))


def test_lines_are_made_from_what_stands_before_what_repeats_and_what_follows():
    made = list(attacks(r"ab(?:c|d)[0-9]*ef"))
    assert ("abc", "0") in made
    assert ("abc", "ef") in made
    assert ("abc", "e") in made
    assert line("abc", "0", 3) == "abc000\x00"
