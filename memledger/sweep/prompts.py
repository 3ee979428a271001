"""Prompts of an exact length in the server's own tokens; pure.

Where the server has a tokenizer endpoint, a text is turned into token ids once, and every prompt is put together from these
ids: its length is exact by construction, and each answer's usage figure checks it. A prompt begins with a number in a
number system whose digits are token ids, so no two prompts of a run (nor, through the run's seed, of two runs) share a first
block, and the prefix cache has nothing to answer with.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

LEAST_IDS: Final = 16
"""Distinct tokens without which prompts can't be told apart in few digits."""
MOST_DIGITS: Final = 512
_DIGITS: Final = 4
"""Digits of a prompt's number, and of the run's seed behind it."""

TEXT: Final = """\
The ledger of a machine lists what it was given, what it spent, and what is left at the end of the day. A reader who adds the
rows must arrive at the total, or say by how much the rows miss it. On the first morning the clerk weighs the sacks of grain,
counts the lamps along the quay, and writes both figures beside the names of their owners; by noon three ships have come in
from the north with salt, copper wire, paper, and nine crates of glass. Some of it is sold at once. The rest goes into the
long store behind the harbour wall, where every shelf has a number and every number an owner. Rain came in the evening, and
with it a letter: the bridge upstream is closed until spring, so the wagons have to take the road around the hill, a journey
of two days instead of one. What does this change? Four horses more, hay for each, a second driver, and a lantern that burns
through the night. The clerk writes it down, draws a line, and adds again. Nothing is hidden, nothing is spread over other
rows to make the page look tidy, and what nobody can explain keeps a row of its own with a question mark at the margin.
"""
"""What prompts are made of where the user names no data: written for this purpose, any text does."""


class PromptError(Exception):
    """Prompts of exact length can't be made; one sentence."""


class IdPrompts:
    """Prompts as lists of token ids.

    `shared`: the share of each prompt (0..1) that all prompts of one length have in common, at their beginning.
    """

    def __init__(self, ids: Sequence[int], seed: int, shared: float = 0.0) -> None:
        self._digits = sorted(set(ids))
        if len(self._digits) < LEAST_IDS:
            raise PromptError(
                f"the text has {len(self._digits)} distinct tokens only: name a longer one with --dataset"
            )
        random.Random(seed).shuffle(self._digits)
        self._ids = tuple(ids)
        self._seed = seed
        self._shared = shared
        self._number = itertools.count(1)

    def make(self, tokens: int) -> list[int]:
        """The next prompt, of exactly `tokens` tokens.

        Raises:
            PromptError: a prompt so short can't be told apart from the ones before.
        """
        number = next(self._number)
        shared = self._common(int(tokens * self._shared))
        head = self._head(number, tokens - len(shared))
        return [*shared, *head, *self._body(tokens - len(shared) - len(head), number * 7919)]

    def _common(self, tokens: int) -> list[int]:
        """The beginning that prompts have in common: another one in every run."""
        head = list(itertools.islice(self._in_digits(self._seed), tokens))
        return [*head, *self._body(tokens - len(head), self._seed)]

    def _head(self, number: int, room: int) -> list[int]:
        digits = list(self._in_digits(number))
        if len(digits) > room:
            raise PromptError(f"prompts of {room} tokens of their own are too short to differ from each other")
        # The lowest digit first: neighbouring prompts differ in their first token.
        digits += [self._digits[0]] * (min(_DIGITS, room) - len(digits))
        return digits + list(itertools.islice(self._in_digits(self._seed), min(_DIGITS, room - len(digits))))

    def _in_digits(self, number: int) -> Iterator[int]:
        while number:
            number, digit = divmod(number, len(self._digits))
            yield self._digits[digit]

    def _body(self, tokens: int, start: int) -> list[int]:
        start %= len(self._ids)
        again = itertools.cycle(self._ids)
        return list(itertools.islice(again, start, start + tokens)) if tokens > 0 else []


class TextPrompts:
    """Prompts as text, for servers without a tokenizer endpoint: their length is found with the server's usage figures.

    A prompt is a head that tells it apart, and words; how many words make the wanted number of tokens is learnt from
    answers (`learn`). What a prompt measured is always its answer's own figure.
    """

    def __init__(self, text: str, seed: int, shared: float = 0.0) -> None:
        self._words = text.split()
        if len(set(self._words)) < LEAST_IDS:
            raise PromptError(
                f"the text has {len(set(self._words))} distinct words only: name a longer one with --dataset"
            )
        self._random = random.Random(seed)
        self._seed = seed
        self._shared = shared
        self._number = itertools.count(1)
        self._lengths: dict[int, int] = {}

    def make(self, tokens: int) -> str:
        """The next prompt: as many words as `learn` found for this many tokens."""
        return self.of_words(self._lengths.get(tokens, tokens))

    def of_words(self, words: int) -> str:
        """The next prompt of so many words."""
        number = next(self._number)
        common = int(words * self._shared)
        shared = self._run(common, self._seed)
        own = self._run(max(0, words - common - 1), number * 7919)
        # A fixed width, so that heads differ little in tokens.
        head = f"{self._seed % 10**6:06d}{number:06d}"
        return " ".join([*shared, head, *own]) if shared else " ".join([head, *own])

    def _run(self, words: int, start: int) -> list[str]:
        start %= len(self._words)
        return list(itertools.islice(itertools.cycle(self._words), start, start + words))

    def learn(self, tokens: int, words: int) -> None:
        """`words` words were `tokens` tokens."""
        self._lengths[tokens] = words


def next_guess(wanted: int, tried: Sequence[tuple[int, int]]) -> int | None:
    """The number of words to try next, from (words, tokens) that were tried; None where the nearest has been tried.

    The first guess is a word for each token; the second scales it; later ones go by the difference.
    """
    if not tried:
        return wanted
    words, tokens = min(tried, key=lambda one: abs(one[1] - wanted))
    if tokens == wanted:
        return None
    guess = round(words * wanted / tokens) if len(tried) == 1 else words + (wanted - tokens)
    if guess == words:
        guess += 1 if tokens < wanted else -1
    return None if guess < 1 or guess in {w for w, _ in tried} else guess


def texts_of(data: str, decode: Callable[[str], object]) -> str:
    """The text of a data file: JSON lines by their longest texts, anything else as it is."""
    found: list[str] = []
    for line in data.splitlines():
        stripped = line.strip()
        if not stripped.startswith(("{", "[")):
            return data
        try:
            found.append(_longest(decode(stripped)))
        except ValueError:
            return data
    return "\n".join(found) or data


def _longest(value: object, depth: int = 0) -> str:
    if isinstance(value, str):
        return value
    if depth > 20:
        return ""
    if isinstance(value, dict):
        return max((_longest(item, depth + 1) for item in value.values()), key=len, default="")
    if isinstance(value, list):
        return "\n".join(_longest(item, depth + 1) for item in value)
    return ""
