"""Lines made to hold up a regular expression, from the expression itself.

For each place where a pattern repeats something: what stands before it, then the repeated part (or what follows it, whole and
without its last character) again and again, then a character that nothing takes. Patterns with two ways to read the same
text take time that grows faster than the text on one of these.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

if sys.version_info >= (3, 11):
    from re import _constants as constants
    from re import _parser as parser
else:
    import sre_constants as constants
    import sre_parse as parser

ONE_BY_ONE: Final = 36
MANY: Final = 8
"""Repetitions from which a repeat is worth pumping."""
NOTHING_TAKES: Final = "\x00"
ALPHABET: Final = "a0 .,:-_=x/'\"()[]{}#%|\t\n"
LINEAR_WITHIN: Final = 3.0
"""How much more than its share of time a longer line may take: measured times of a busy machine differ by less."""
WORTH_MEASURING_SECONDS: Final = 0.02


def attacks(pattern: str, flags: int = 0) -> Iterator[tuple[str, str]]:
    """(what stands before, what is repeated) for each repeat of the pattern, and for the pattern as a whole."""
    tree = parser.parse(pattern, flags)
    seen = set()
    for before, pump in (*_attacks(tree, "", ""), ("", _example(tree))):
        if pump and (before, pump) not in seen:
            seen.add((before, pump))
            yield before, pump


def line(before: str, pump: str, times: int) -> str:
    """A hostile line: the repeated part so many times."""
    return before + pump * times + NOTHING_TAKES


def _attacks(nodes: Any, before: str, after: str) -> Iterator[tuple[str, str]]:
    items = list(nodes)
    for index, (op, argument) in enumerate(items):
        rest = _example(items[index + 1 :]) + after
        if op in {constants.MAX_REPEAT, constants.MIN_REPEAT, getattr(constants, "POSSESSIVE_REPEAT", None)}:
            _, most, body = argument
            if most is constants.MAXREPEAT or most >= MANY:
                for pump in dict.fromkeys((*_examples(body), rest[:60], rest[:1], rest[:60][:-1])):
                    yield before, pump
            yield from _attacks(body, before, rest)
        elif op is constants.SUBPATTERN:
            yield from _attacks(argument[-1], before, rest)
        elif op is constants.BRANCH:
            for branch in argument[1]:
                yield from _attacks(branch, before, rest)
        elif op is getattr(constants, "ATOMIC_GROUP", None):
            yield from _attacks(argument, before, rest)
        before += _example([(op, argument)])


def _examples(nodes: Any) -> list[str]:
    """Texts that the nodes take: with the first of each branch and each kind of character, a few of them."""
    items = list(nodes)
    if len(items) == 1 and items[0][0] is constants.BRANCH:
        return [_example(branch) for branch in items[0][1][1]][:6]
    if len(items) == 1 and items[0][0] is constants.SUBPATTERN:
        return _examples(items[0][1][-1])
    if len(items) == 1 and items[0][0] in {constants.IN, constants.ANY, constants.NOT_LITERAL}:
        return [c for c in ALPHABET if _takes(items[0], c)][:3] or [_example(items)]
    return [_example(items)]


def _example(nodes: Any) -> str:
    """A short text that the nodes take."""
    return "".join(_one(op, argument) for op, argument in nodes)


def _one(op: Any, argument: Any) -> str:
    if op is constants.LITERAL:
        return chr(argument)
    if op in {constants.ANY, constants.IN, constants.NOT_LITERAL}:
        return next(
            (c for c in ALPHABET + "ZMGTBiK" + "".join(map(chr, range(33, 127))) if _takes((op, argument), c)),
            _first(argument),
        )
    if op is constants.SUBPATTERN:
        return _example(argument[-1])
    if op is constants.BRANCH:
        return _example(argument[1][0])
    if op in {constants.MAX_REPEAT, constants.MIN_REPEAT, getattr(constants, "POSSESSIVE_REPEAT", None)}:
        return _example(argument[2]) * max(argument[0], 1 if argument[1] else 0)
    if op is getattr(constants, "ATOMIC_GROUP", None):
        return _example(argument)
    return ""  # anchors, lookarounds and references take nothing that is needed here


def _first(argument: Any) -> str:
    """A character of a class that holds none of the usual ones."""
    for kind, value in argument if isinstance(argument, list) else ():
        if kind is constants.LITERAL:
            return chr(value)
        if kind is constants.RANGE:
            return chr(value[0])
    return ""


def _takes(node: Any, character: str) -> bool:
    op, argument = node
    if op is constants.ANY:
        return character != "\n"
    if op is constants.NOT_LITERAL:
        return ord(character) != argument
    negated, found = False, False
    for kind, value in argument:
        if kind is constants.NEGATE:
            negated = True
        elif kind is constants.LITERAL:
            found = found or ord(character) == value
        elif kind is constants.RANGE:
            found = found or value[0] <= ord(character) <= value[1]
        elif kind is constants.CATEGORY:
            found = found or re.match(_CATEGORIES[value], character) is not None
    return found != negated


_CATEGORIES: Final = {
    constants.CATEGORY_DIGIT: r"\d",
    constants.CATEGORY_NOT_DIGIT: r"\D",
    constants.CATEGORY_SPACE: r"\s",
    constants.CATEGORY_NOT_SPACE: r"\S",
    constants.CATEGORY_WORD: r"\w",
    constants.CATEGORY_NOT_WORD: r"\W",
}


def grows_faster_than_its_text(read: Callable[[str], object], before: str, pump: str, longest: int) -> str | None:
    """How the time of `read` grows with the repetitions, where it grows faster than the text; None where it does not.

    One repetition more at a time at first, so that even time that doubles with each is seen before it is waited for. No time
    counts by itself, only how it compares with a quarter of the text, each measured three times.
    """
    times, most = 1, max(2, (longest - len(before)) // len(pump))
    while times < most:
        times = min(most, times + 1 if times < ONE_BY_ONE else times * 4)
        text = line(before, pump, times)
        if _time(read, text) < WORTH_MEASURING_SECONDS:
            continue
        short = line(before, pump, max(1, times // 4))
        long_time, short_time = (min(_time(read, one) for _ in range(3)) for one in (text, short))
        if long_time > LINEAR_WITHIN * max(short_time, 1e-5) * len(text) / len(short):
            return (
                f"{short_time * 1e3:.2f} ms for {len(short):,} characters, {long_time * 1e3:.2f} ms for {len(text):,}"
            )
    return None


def _time(read: Callable[[str], object], text: str) -> float:
    began = time.thread_time()
    read(text)
    return time.thread_time() - began
