"""`--mem-fraction-static` where it is not given: the share that SGLang works out from card and flags, by release.

`(total - reserved) / total`, rounded to three decimals; what is reserved is for activations and graphs. Read in SGLang's
`server_args.py` of 0.5.4, 0.5.9, 0.5.13 to 0.5.18 and 0.5.20, and `arg_groups/memory_hook.py` of 0.5.23 (sizes in MiB);
0.4.7 to 0.5.2 from the notes behind docs/arithmetic-sglang.md. Between releases that were read the range holds both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from memledger.model.architecture import NotModelledError
from memledger.units import GIB, MIB

Version = tuple[int, ...]
Range = tuple[float, float]

_FLOOR_ABOVE: Final = 60 * 1024
_FLOOR: Final = 10 * 1024
_VISION: Final = (0.95 * 0.8, 0.95 * 1.05)
"""Multimodal models: the share is multiplied by 0.95 and a factor of 0.8 to 1.05 by the size of the vision tower."""
_BY_TP: Final = ((1, 0.88), (2, 0.87), (4, 0.85), (8, 0.81), (16, 0.79))


class Card(msgspec.Struct, frozen=True):
    """What the share follows from: the card's bytes, the sizes, and the flags that are given (None: the default)."""

    total: int
    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    latent: bool = False
    multimodal: bool = False
    speculation: str | None = None
    chunked_prefill_tokens: int | None = None
    max_running_requests: int | None = None


def default_fraction(versions: tuple[Version, Version], card: Card) -> Range:
    """Lowest and highest share that the releases from `versions[0]` to `versions[1]` give.

    Raises:
        NotModelledError: a release before 0.4.7 may be meant, or the card is too small for any share.
    """
    low, high = versions
    found: list[float] = []
    for first, last, rule in _RULES:
        if first <= high and low <= last:
            found += [share for share in rule(card) if 0 < share < 1]
    if low < _RULES[0][0] and not found:
        raise NotModelledError("--mem-fraction-static is worked out otherwise in this release: --set memory_fraction=F")
    if not found:
        raise NotModelledError("the card is too small for SGLang's own --mem-fraction-static: --set memory_fraction=F")
    scale = _VISION if card.multimodal else (1.0, 1.0)
    return round(min(found) * scale[0], 3), round(max(found) * scale[1], 3)


def prefill_graph_sizes(tokens: int) -> int:
    """How many token counts the prefill graphs are captured for, up to `tokens`."""
    spans = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for span in spans for size in range(*span))


def _capacity(card: Card, small: tuple[int, int, int]) -> tuple[int, int]:
    """(chunked prefill tokens, largest graph batch) by the card's memory; `small`: those of cards below 35 GiB."""
    size, wide = card.total / MIB, card.tp >= 4
    if size < 20 * 1024:
        found = (2048, 8)
    elif size < 35 * 1024:
        found = (small[0], small[2] if wide else small[1])
    elif size < 60 * 1024:
        found = (4096, 160 if wide else 32)
    elif size < 160 * 1024:
        found = (8192, 512 if wide else 256)
    else:
        found = (16384, 512)
    return card.chunked_prefill_tokens or found[0], found[1]


def _share(card: Card, small: tuple[int, int, int], *, graphs: bool, drafts: int) -> list[float]:
    """The share with or without what prefill graphs reserve; `drafts`: MiB for a draft (three times that for a whole model)."""
    size = card.total / MIB
    tokens, most = _capacity(card, small)
    # Later releases cut the largest batch to the running requests; when is not known, so both are tried.
    batches = {most, min(most, card.max_running_requests or most)}
    found = []
    for batch in sorted(batches):
        reserved = 512 + max(tokens, 2048) * 1.5 + batch * 2 + card.tp * card.pp / 8 * 1024
        if card.attention_dp > 1:
            reserved += batch * card.attention_dp * (4.5 if batch > 300 else 3)
        if graphs:
            reserved += 1536 if card.latent else prefill_graph_sizes(tokens) * 8
        if size > _FLOOR_ABOVE:
            reserved = max(reserved, _FLOOR)
        if drafts and card.speculation is not None and card.speculation != "ngram":
            reserved += 6 * 1024 if card.speculation == "standalone" else drafts
        found.append(round((size - reserved) / size, 3))
    return found


def _oldest(card: Card) -> list[float]:
    """Up to 0.4.7: by the tensor parallel size alone."""
    return [next((share for tp, share in reversed(_BY_TP) if card.tp >= tp), 0.88)]


def _by_card(card: Card) -> list[float]:
    """0.4.8 to 0.5.2: GiB reserved by the card's class; 2 to 6 more with speculation."""
    size, sizes = card.total / GIB, card.tp * card.pp
    if size < 35:
        reserved = 2.8 + sizes / 10
    elif size < 60:
        reserved = 9.5 + sizes / 2
    elif size < 160:
        reserved = 12 + sizes / 2
    else:
        reserved = 32.0
    more = (2, 6) if card.speculation is not None else (0,)
    return [round((size - reserved - drafts) / size, 3) for drafts in more]


_SMALL_OLD: Final = (2048, 16, 80)
_SMALL: Final = (2048, 24, 80)
_SMALL_NEW: Final = (4096, 48, 160)

_RULES: Final[tuple[tuple[Version, Version, Callable[[Card], list[float]]], ...]] = (
    ((0, 4, 0), (0, 4, 7), _oldest),
    ((0, 4, 8), (0, 5, 2), _by_card),
    ((0, 5, 3), (0, 5, 8), lambda card: _share(card, _SMALL_OLD, graphs=False, drafts=2048)),
    ((0, 5, 5), (0, 5, 12), lambda card: _share(card, _SMALL, graphs=False, drafts=2048)),
    ((0, 5, 10), (0, 5, 13), lambda card: _share(card, _SMALL, graphs=True, drafts=4096)),
    ((0, 5, 14), (0, 5, 19), lambda card: _share(card, _SMALL, graphs=True, drafts=0)),
    ((0, 5, 19), (99,), lambda card: _share(card, _SMALL_NEW, graphs=True, drafts=0)),
)
"""(oldest, newest, rule): spans overlap where the release of a change was not read."""
