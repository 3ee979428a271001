"""What-if on SGLang's pools: another setting, and the smallest reservation that serves a load, with the flags for it.

The arithmetic is `memledger.model.sglang`'s; the rules by release are in `sglang_rules` and `sglang_state`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

import msgspec

from memledger.ledger import ACCOUNTS, Effect
from memledger.model.architecture import NotModelledError
from memledger.model.dtypes import element_bits, normal_name
from memledger.model.sglang import (
    Budget,
    KvToken,
    SglangServer,
    Sizing,
    cost,
    exact,
    page_down,
    page_up,
    possible_slots,
    readings,
    settled,
    size,
)
from memledger.model.sglang_rules import Version, eras, flags, slots_flag_works
from memledger.model.sglang_state import Speculation, StateSlot

# ------------------------------------------------------------------------------------------------------------- changes


def changed(
    server: SglangServer, settings: Mapping[str, Any], *, slot: StateSlot | None = None, kv: KvToken | None = None
) -> SglangServer:
    """The server with other settings, its pools to be sized anew from the same budget.

    Args:
        server: as it is; numbers in effect (`state_slots`, `kv_tokens` ...) fix the budget.
        settings: config names of the contract: `state_slots`, `state_memory_ratio`, `max_running_requests`,
            `max_total_tokens`, `context_length`, `memory_fraction`, `page_size`, `prefix_caching`, `state_cache_mode`,
            `overlap_disabled`, `speculative_draft_tokens` (0: off), `swa_full_tokens_ratio`, `pool_bytes`.
        slot: bytes per slot after the change where it changes them (`resized_state`).
        kv: bytes per token after the change.

    Raises:
        NotModelledError: a setting that this arithmetic does not know.
    """
    server = settled(server)
    original = server if server.original is None else server.original
    fields: dict[str, Any] = {"original": original, "running_requests": None}
    if set(settings) - _LEAVE_THE_POOLS or slot is not None or kv is not None:
        fields |= {"kv_tokens": None, "kv_swa_tokens": None}
    if slot is not None or _chooses_slots(server, set(settings)):
        fields["state_slots"] = None
    if slot is not None:
        fields["slot"] = slot
    if kv is not None:
        fields["kv"] = kv
    for name, value in settings.items():
        fields |= _setting(server, name, value)
    if set(settings) & {"state_cache_mode", "overlap_disabled", "prefix_caching", "speculative_draft_tokens"}:
        fields["per_request"] = None
    return msgspec.structs.replace(server, **fields)


_LEAVE_THE_POOLS: Final = frozenset({"context_length"})
"""Settings that change a cap or a table only."""


def _chooses_slots(server: SglangServer, names: set[str]) -> bool:
    """Whether these settings make the engine choose the number of slots anew; else it stays what it is."""
    if names & {
        "state_slots",
        "state_memory_ratio",
        "memory_fraction",
        "pool_bytes",
        "prefix_caching",
        "speculative_draft_tokens",
    }:
        return True
    by_requests = not server.radix or server.speculation is not None
    return by_requests and bool(names & {"max_running_requests", "state_cache_mode", "overlap_disabled"})


_PLAIN: Final = {
    "state_slots": "state_slots_requested",
    "state_memory_ratio": "state_ratio",
    "max_running_requests": "max_running_requests",
    "max_total_tokens": "max_total_tokens",
    "context_length": "context_length",
    "page_size": "page_size",
    "prefix_caching": "radix_cache",
    "state_cache_mode": "strategy",
    "swa_full_tokens_ratio": "swa_ratio",
}


def _setting(server: SglangServer, name: str, value: Any) -> dict[str, Any]:
    if name in _PLAIN:
        return {_PLAIN[name]: value}
    if name == "overlap_disabled":
        return {"overlap": not value}
    if name == "pool_bytes":
        return {"budget": Budget(int(value))}
    if name == "memory_fraction":
        return _fraction(server, float(value))
    if name == "speculative_draft_tokens":
        if not value:
            return {"speculation": None}
        if server.speculation is None:
            return {"speculation": Speculation(int(value))}
        return {
            "speculation": msgspec.structs.replace(
                server.speculation, draft_tokens=int(value), logged_conv_request=None
            )
        }
    raise NotModelledError(f"a change of {name} is not modelled for SGLang")


def _fraction(server: SglangServer, fraction: float) -> dict[str, Any]:
    """Another `--mem-fraction-static`: the budget grows by that share of the free memory before the weights."""
    if server.budget is not None:
        return {"budget": server.budget.at_fraction(fraction), "fraction": fraction}
    if server.pre is None or server.fraction is None:
        raise NotModelledError(
            "the effect of --mem-fraction-static is a share of the free memory before the weights, which is not known"
        )
    more = math.floor(server.pre * (exact(fraction) - exact(server.fraction)))
    return {"more_budget": server.more_budget + more, "fraction": fraction}


def resized_state(slot: StateSlot, before: str, after: str) -> StateSlot:
    """The slot with another temporal state type (`--mamba-ssm-dtype`); the convolution's stays bfloat16."""
    bits_before, bits_after = element_bits(before), element_bits(after)
    charged = slot.charged
    ssm = slot.ssm * bits_after // bits_before
    if charged is not None and slot.total:
        charged = charged * (slot.conv + ssm) // slot.total
    return msgspec.structs.replace(slot, ssm=ssm, charged=charged)


_PLAIN_KV: Final = frozenset({"bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp8_e4m3", "fp8_e5m2"}) | {
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
}


def resized_kv(kv: KvToken, before: str, after: str) -> KvToken:
    """The token with another KV type, where both are plain element types without scales in the cache.

    Raises:
        NotModelledError: a type with block scales, or an index cache (sparse attention), whose layout changes too.
    """
    names = [normal_name(before), normal_name(after)]
    if any(name not in _PLAIN_KV for name in names):
        raise NotModelledError(f"KV bytes from {before} to {after} follow a layout that only the architecture gives")
    if kv.index:
        raise NotModelledError("with sparse attention the KV layout changes with its type; the architecture is needed")
    old, new = element_bits(names[0]), element_bits(names[1])
    return KvToken(*(getattr(kv, name) * new // old for name in KvToken.__struct_fields__))


# ------------------------------------------------------------------------------------------------------------- inverse


class Smallest(msgspec.Struct, frozen=True):
    """The smallest pools that serve so many requests of so many tokens, and how to ask for them.

    `minimum`: those pools, as if nothing else were reserved. `needed`: budget bytes that sizing charges for them.
    `fits`: whether the known budget holds them. `after`: what the engine makes of its budget with `flags` (the KV pool
    takes all that the state leaves). `binding`: what binds then.
    """

    minimum: Sizing
    needed: int
    fits: bool | None
    flags: tuple[str, ...]
    after: Sizing | None
    binding: tuple[str, ...]
    notes: tuple[str, ...] = ()


def smallest(server: SglangServer, requests: int, tokens: int, *, cached_prefixes: int = 0) -> Smallest:
    """The smallest reservation for `requests` requests (per attention data-parallel rank) of `tokens` tokens each.

    State: `r * requests` slots, one more for each cached prefix that is to stay, and the padding row; speculative states
    for `requests + 1`; KV: `requests * ceil_page(tokens + D)` tokens and the extra page.

    Raises:
        NotModelledError: more than one reading, or no flag gives this number of slots in this release.
    """
    if requests < 1 or tokens < 1:
        raise NotModelledError("at least one request of one token is needed")
    budgets, each, versions = _as_it_is(server)
    draft = server.speculation.draft_tokens if server.speculation is not None else 0
    slots = None if server.slot is None or each is None else each * requests + cached_prefixes
    wanted = requests * page_up(tokens + draft, server.page_size)
    fixed = msgspec.structs.replace(
        server,
        versions=versions,
        state_slots=slots,
        kv_tokens=wanted,
        kv_swa_tokens=_swa_for(server, wanted),
        max_running_requests=requests * server.attention_dp,
        running_requests=None,
        original=None,
        budget=None,
        max_total_tokens=None,
    )
    minima = readings(fixed)
    low, high = minima[0].versions[0], minima[-1].versions[1]
    if len({s.pool_bytes for s in minima}) > 1 or len({_needed(fixed, s) for s in minima}) > 1:
        raise NotModelledError("the smallest pools differ between the releases that this may be: name the version")
    needed = _needed(fixed, minima[0])
    given, settings = _flags_for(server, slots, requests, low, high)
    after, notes = None, []
    try:
        after = size(changed(server, settings))
    except NotModelledError as error:
        notes.append(str(error))
    rest = budgets.pop() if len(budgets) == 1 else None
    fits = None if rest is None else needed <= rest
    served, binding = after.requests_of(tokens, draft) if after is not None else (None, ())
    if served is not None and served < requests:
        fits = False
    return Smallest(minima[0], needed, fits, given, after, binding, tuple(notes))


def _as_it_is(
    server: SglangServer,
) -> tuple[set[int | None], int | None, tuple[tuple[int, ...], tuple[int, ...]]]:
    """(budgets, slots per request, releases) that the server as it is allows; without a budget, by the flags alone."""
    spans = eras(*server.versions, state=server.slot is not None)
    try:
        found = readings(server)
        budgets: set[int | None] = {s.budget for s in found}
        each: set[int | None] = {s.slots_per_request for s in found}
        versions: tuple[tuple[int, ...], tuple[int, ...]] = (found[0].versions[0], found[-1].versions[1])
    except NotModelledError:
        if server.kv_tokens is not None or server.budget is not None:
            raise
        budgets = {None}
        each = {r for low, _ in spans for r, _ in possible_slots(server, low)} if server.slot is not None else {None}
        versions = (spans[0][0], spans[-1][1])
    if len(each) > 1:
        told = " or ".join(str(r) for r in sorted(r for r in each if r is not None))
        raise NotModelledError(f"one request takes {told} state slots by version and strategy, and neither is certain")
    return budgets, each.pop(), versions


def _needed(server: SglangServer, sizing: Sizing) -> int:
    """Budget bytes that sizing charges for the pools of `sizing`."""
    version = sizing.versions[0]
    return sizing.charged_state + cost(server, version, sizing.kv_tokens or 0, sizing.kv_swa_tokens)


def _swa_for(server: SglangServer, tokens: int) -> int | None:
    kv = server.kv
    if kv is None or not kv.sliding:
        return None
    return tokens if not kv.full else page_down(math.floor(tokens * exact(server.swa_ratio)), server.page_size)


def _flags_for(
    server: SglangServer, slots: int | None, requests: int, low: Version, high: Version
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The flags that give `slots` slots and `requests` running requests per rank, and the same as settings."""
    total = requests * server.attention_dp
    settings: dict[str, Any] = {"max_running_requests": total}
    words: list[str] = []
    if slots is not None and not _slots_follow_requests(server, slots, requests, low, high):
        works = {slots_flag_works(v, radix_cache=server.radix) for v in (low, high)}
        if works != {True}:
            raise NotModelledError(
                "0.5.4 to 0.5.6 ignore --max-mamba-cache-size while the radix cache is on; only --mamba-full-memory-ratio moves the slots"
            )
        settings["state_slots"] = slots * server.attention_dp
        words += flags("state_slots", slots * server.attention_dp, low, high)
    words += flags("max_running_requests", total, low, high)
    return tuple(words), settings


def _slots_follow_requests(server: SglangServer, slots: int, requests: int, low: Version, high: Version) -> bool:
    """Whether the running requests alone set the slots: no radix cache, or a release that never has one (to 0.5.3)."""
    if server.state_slots_requested is not None or slots != requests:
        return False
    return not server.radix or high < (0, 5, 4)


def ratio_for(slots: int, slot_bytes: int, rest: int) -> float:
    """The smallest `--mamba-full-memory-ratio`, in thousandths, that gives `slots` slots (0.5.17+, no speculation).

    `q = (K + 1) * s / (rest - (K + 1) * s)`.
    """
    taken = (slots + 1) * slot_bytes
    if taken >= rest:
        raise NotModelledError("the slots take the whole budget: no ratio gives them")
    return math.ceil(Fraction(taken, rest - taken) * 1000) / 1000


def difference(before: Sizing, after: Sizing) -> tuple[Effect, ...]:
    """Change of every account (bytes) and capacity that differs, in the order of the ledger."""
    effects = []
    for name in ACCOUNTS:
        change = after.accounts.get(name, 0) - before.accounts.get(name, 0)
        if change:
            effects.append(Effect(account=name, bytes=change))
    for name in _CAPACITIES:
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and old != new:
            effects.append(Effect(capacity=name, change=new - old))
    return tuple(effects)


_CAPACITIES: Final = ("kv_tokens", "kv_swa_tokens", "state_slots", "slots_per_request", "max_running_requests")
