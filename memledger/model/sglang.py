"""SGLang's pools as its own sizing makes them: budget, state slots, KV tokens, caps; and the smallest that serves a load.

Pure functions over frozen values. `size` answers for one reading; where the version or the strategy is not certain,
`readings` gives every one that differs. Sources by release are named where the rules are (`sglang_rules`,
`sglang_state`) and in docs/arithmetic-sglang.md; the budget is `_profile_available_bytes` (0.5.10+) and
`profile_max_num_token` before, both in SGLang's `model_executor` or `mem_cache/kv_cache_configurator.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import msgspec

from memledger import words
from memledger.model.architecture import NotModelledError
from memledger.model.sglang_rules import (
    DEFAULT_SPECULATIVE_REQUESTS,
    DEFAULT_STATE_RATIO,
    PrefixCost,
    Strategy,
    Version,
    dotted,
    eras,
    prefix_cost,
    slots_per_request,
    strategies,
)
from memledger.model.sglang_state import (
    SlotRequest,
    Speculation,
    StatePool,
    StateSlot,
    choose_slots,
    state_pool,
)
from memledger.units import MIB

INT32: Final = 4
MULTIMODAL_CACHE: Final = 100 * MIB
"""`SGLANG_VLM_CACHE_SIZE_MB`: taken off the budget of multimodal models (0.5.18+)."""
MULTIMODAL_TRANSPORT: Final = 1024 * MIB
"""`SGLANG_MM_FEATURE_CACHE_MB`: besides, where features travel by cuda_ipc or cuda_vmm (0.5.18+)."""
TRANSPORTS: Final = frozenset({"cuda_ipc", "cuda_vmm"})
ANY_VERSION: Final = ((0,), (99,))
_REQUEST_EXTRA: Final = 4
"""Columns of the request table beyond the context length, draft tokens not counted."""


class Budget(msgspec.Struct, frozen=True):
    """What the pools may take, bytes. `pre`: free memory before the weights (least over the ranks), `fraction` of it static."""

    rest: int
    pre: int | None = None
    fraction: float | None = None

    def at_fraction(self, fraction: float) -> Budget:
        """The budget under another `--mem-fraction-static`: `pre * (difference)` more.

        Raises:
            NotModelledError: the free memory before the weights, or the fraction in effect, is not known.
        """
        if self.pre is None or self.fraction is None:
            raise NotModelledError(
                "the effect of --mem-fraction-static is a share of the free memory before the weights, which is not known"
            )
        more = self.pre * (exact(fraction) - exact(self.fraction))
        return Budget(self.rest + math.floor(more), self.pre, fraction)

    def fraction_for(self, needed: int) -> float:
        """The smallest `--mem-fraction-static`, in thousandths, whose budget holds `needed` bytes."""
        if self.pre is None or self.fraction is None or self.pre <= 0:
            raise NotModelledError("the free memory before the weights, or the fraction in effect, is not known")
        least = exact(self.fraction) + Fraction(needed - self.rest, self.pre)
        return math.ceil(least * 1000) / 1000


def budget(
    version: Version,
    pre: int,
    available: int,
    fraction: float,
    *,
    multimodal: bool = False,
    transport: str | None = None,
) -> Budget:
    """What remains for the pools: `available - pre * (1 - fraction)`, less what multimodal models keep (0.5.18+).

    Args:
        version: one release.
        pre: free bytes before the weights, the least over the ranks.
        available: free bytes when the pools are sized, the least over the ranks.
        fraction: `--mem-fraction-static`.
        multimodal: whether the model is multimodal.
        transport: `mm_feature_transport`.
    """
    kept = 0
    if multimodal and version >= (0, 5, 18):
        kept = MULTIMODAL_CACHE + (MULTIMODAL_TRANSPORT if transport in TRANSPORTS else 0)
    return Budget(math.floor(available - pre * (1 - exact(fraction))) - kept, pre, fraction)


def exact(number: float | str) -> Fraction:
    """The decimal that was typed, not its binary neighbour."""
    return Fraction(str(number))


class KvToken(msgspec.Struct, frozen=True):
    """KV bytes of one token on one rank, by account. `draft`: the draft model's; `swa_*`: per sliding-window token."""

    keys: int = 0
    values: int = 0
    latent: int = 0
    index: int = 0
    draft: int = 0
    swa_keys: int = 0
    swa_values: int = 0

    @property
    def full(self) -> int:
        """Of the layers that keep every token (not the draft's)."""
        return self.keys + self.values + self.latent + self.index

    @property
    def sliding(self) -> int:
        """Of the sliding-window layers."""
        return self.swa_keys + self.swa_values


class SglangServer(msgspec.Struct, frozen=True):
    """What decides one rank's pools. Everything that is not known is None; nothing is filled in silently.

    `versions`: oldest and newest release that it may be. Bytes are per rank. `state_slots`, `kv_tokens`, `kv_swa_tokens`
    and `running_requests` are numbers in effect (from a log); the other numbers are flags, for the whole server.
    `original`: the server as logged, from whose pools the budget is worked out when this one is a change of it.
    `pre`, `fraction`: free memory before the weights and `--mem-fraction-static`, where no `budget` is given;
    `more_budget`: bytes that another fraction adds to what the original's pools took. `tolerance`: relative error of bytes that come from rounded figures.
    `flags_known`: whether flags that are None were not given (True), or are not known (False).
    """

    versions: tuple[tuple[int, ...], tuple[int, ...]] = ANY_VERSION
    budget: Budget | None = None
    slot: StateSlot | None = None
    kv: KvToken | None = None
    page_size: int = 1
    radix_cache: bool | None = None
    strategy: str | None = None
    overlap: bool | None = None
    model_class: str | None = None
    linear_backend: str | None = None
    skip_decode_lock: bool = False
    per_request: int | None = None
    state_ratio: float | None = None
    state_slots_requested: int | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    context_length: int | None = None
    attention_dp: int = 1
    speculation: Speculation | None = None
    swa_ratio: float = 0.8
    window: int | None = None
    cuda: bool = True
    disaggregation: str | None = None
    unified_pool: bool = False
    replay: bool = False
    checkpoint_pool: bool = False
    state_slots: int | None = None
    kv_tokens: int | None = None
    kv_swa_tokens: int | None = None
    running_requests: int | None = None
    pre: int | None = None
    fraction: float | None = None
    more_budget: int = 0
    original: SglangServer | None = None
    tolerance: float = 0.0
    flags_known: bool = False

    @property
    def radix(self) -> bool:
        """Whether the radix cache is on: it is unless turned off."""
        return self.radix_cache is not False

    @property
    def running_requested(self) -> int | None:
        """`--max-running-requests`, or what speculation resets it to."""
        if self.max_running_requests is None and self.speculation is not None:
            return DEFAULT_SPECULATIVE_REQUESTS
        return self.max_running_requests


class Sizing(msgspec.Struct, frozen=True):
    """One rank's pools: bytes by account, what they hold, what binds.

    `versions`: the releases for which it holds. `budget`: bytes for state and KV together (None: not known). `unused`:
    bytes of the budget that no pool took (negative: padding rows and pages that sizing does not charge).
    """

    versions: tuple[Version, Version]
    accounts: dict[str, int]
    state_slots: int | None = None
    slots_per_request: int | None = None
    kv_tokens: int | None = None
    kv_swa_tokens: int | None = None
    max_running_requests: int | None = None
    page_size: int = 1
    binding: tuple[str, ...] = ()
    budget: int | None = None
    charged_state: int = 0
    state: StatePool | None = None
    prefix: PrefixCost | None = None
    slots_from: str | None = None

    @property
    def pool_bytes(self) -> int:
        """KV and state together."""
        return sum(size for name, size in self.accounts.items() if name != "request_tables")

    @property
    def state_bytes(self) -> int:
        """Recurrent state, speculative states included."""
        return self._under("recurrent_state/")

    @property
    def kv_bytes(self) -> int:
        """All KV pools."""
        return self._under("kv_cache/")

    @property
    def unused(self) -> int | None:
        """Budget less what the pools take."""
        return None if self.budget is None else self.budget - self.pool_bytes

    @property
    def spare_slots(self) -> int | None:
        """State slots that only cached prefixes can ever hold: `K - r * R`."""
        if self.state_slots is None or self.slots_per_request is None or self.max_running_requests is None:
            return None
        return self.state_slots - self.slots_per_request * self.max_running_requests

    def _under(self, prefix: str) -> int:
        return sum(size for name, size in self.accounts.items() if name.startswith(prefix))

    def requests_of(self, tokens: int, draft_tokens: int = 0) -> tuple[int | None, tuple[str, ...]]:
        """Requests of `tokens` tokens that run at once, and what binds them (`kv_tokens`, `state_slots`, ...)."""
        if self.kv_tokens is None:
            return None, ()
        by_tokens = self.kv_tokens // max(1, page_up(tokens + draft_tokens, self.page_size))
        if self.max_running_requests is None:
            return None, ()
        if by_tokens < self.max_running_requests:
            return by_tokens, ("kv_tokens",)
        more = ("kv_tokens",) if by_tokens == self.max_running_requests else ()
        return self.max_running_requests, tuple(dict.fromkeys((*self.binding, *more)))


def page_up(tokens: int, page: int) -> int:
    """Tokens rounded up to whole pages."""
    return -(-tokens // page) * page


def page_down(tokens: int, page: int) -> int:
    """Tokens rounded down to whole pages."""
    return tokens // page * page


# -------------------------------------------------------------------------------------------------------------- sizing


def size(server: SglangServer) -> Sizing:
    """The pools of one rank.

    Raises:
        NotModelledError: not modelled, or there is more than one reading; the message says what they are.
    """
    found = readings(server)
    if len(found) > 1:
        told = "; ".join(f"{_span(s.versions)}: {_in_words(s)}" for s in found)
        raise NotModelledError(f"the version or the strategy decides, and neither is certain: {told}")
    return found[0]


def readings(server: SglangServer) -> tuple[Sizing, ...]:
    """Every sizing that the known facts allow, equal ones together; the first is of the oldest release.

    A release whose rules contradict the figures (a capacity in effect that they cannot give) is passed over.

    Raises:
        NotModelledError: no release within the bounds is modelled for this server.
    """
    if server.unified_pool:
        raise NotModelledError("with --enable-unified-memory KV and state share one buffer; its split is nominal only")
    if server.replay:
        raise NotModelledError("replay rings are not modelled")
    if server.checkpoint_pool:
        raise NotModelledError("the pool of 8-bit checkpoints follows the slots outside the budget; it is not modelled")
    if server.slot is not None and server.disaggregation == "decode":
        raise NotModelledError(
            "a disaggregated decode server enlarges its state pool for requests on their way; not modelled"
        )
    found, refusal = _over_releases(settled(server))
    if found:
        return tuple(found)
    if refusal is not None:
        raise refusal
    raise NotModelledError(
        "no known release gives these figures: slots, running requests and flags contradict each other"
    )


def agreed(found: Sequence[Sizing]) -> Sizing:
    """What every reading says: accounts and capacities on which they differ are left out (None)."""
    first = found[0]
    fields: dict[str, object] = {
        "versions": (min(s.versions[0] for s in found), max(s.versions[1] for s in found)),
        "accounts": {k: v for k, v in first.accounts.items() if all(s.accounts.get(k) == v for s in found)},
    }
    for name in ("state_slots", "slots_per_request", "kv_tokens", "kv_swa_tokens", "max_running_requests"):
        if any(getattr(s, name) != getattr(first, name) for s in found):
            fields[name] = None
    for name, other in (("binding", ()), ("budget", None), ("prefix", None), ("slots_from", None), ("state", None)):
        if any(getattr(s, name) != getattr(first, name) for s in found):
            fields[name] = other
    return msgspec.structs.replace(first, **fields)


def settled(server: SglangServer) -> SglangServer:
    """The server with the requests in effect taken as asked for, where no release explains them by slots or tokens.

    Only where the flags are not in the log: then a flag that is not in it is what remains.
    """
    told = server.running_requests
    if told is None or server.max_running_requests is not None or server.flags_known or server.original is not None:
        return server
    found, refusal = _over_releases(server)
    if found or refusal is not None:
        return server
    return msgspec.structs.replace(server, max_running_requests=told * server.attention_dp)


def _over_releases(server: SglangServer) -> tuple[list[Sizing], NotModelledError | None]:
    """The different sizings over all possible releases, and the first reason why a release gives none."""
    found: list[Sizing] = []
    refusal: NotModelledError | None = None
    for span in eras(*server.versions, state=server.slot is not None):
        try:
            for one in _agreeing(server, span):
                _merge(found, one)
        except NotModelledError as error:
            refusal = refusal or error
    return found, refusal


def _agreeing(server: SglangServer, span: tuple[Version, Version]) -> list[Sizing]:
    """One release's sizings that agree with the numbers in effect, of this server and of the one it is a change of."""
    kept: set[int | None] | None = None
    original = server.original
    if original is not None:
        kept = {one.slots_per_request for one in _agreeing(original, span)}
        if not kept:
            return []
        if _rule(server) != _rule(original):
            kept = None
    found = []
    for per_request, strategy in possible_slots(server, span[0]):
        if kept is not None and server.slot is not None and per_request not in kept:
            continue
        one = _size_one(server, span, per_request, strategy)
        if _explains(one, server.running_requests, span[0]):
            found.append(one)
    return found


def _explains(sizing: Sizing, told: int | None, version: Version) -> bool:
    """Whether running requests in effect are what this reading gives (up to 0.5.1 the padding row may be counted)."""
    given = sizing.max_running_requests
    if told is None or given is None:
        return True
    return told == given or (version < (0, 5, 2) and told == given + 1)


def _rule(server: SglangServer) -> tuple[object, ...]:
    """What the slots per request depend on, apart from the version."""
    return (
        server.radix,
        server.strategy,
        server.overlap,
        server.page_size,
        server.per_request,
        server.speculation is None,
    )


def _merge(found: list[Sizing], one: Sizing) -> None:
    """Add a reading, or widen an equal one's releases.

    The smaller budget is kept: what surely is there. A request table that has another row since 0.5.11 is left out.
    """
    for index, other in enumerate(found):
        if _same(other, one):
            found[index] = msgspec.structs.replace(
                other,
                versions=(min(other.versions[0], one.versions[0]), max(other.versions[1], one.versions[1])),
                budget=None if other.budget is None or one.budget is None else min(other.budget, one.budget),
                accounts={name: size for name, size in other.accounts.items() if one.accounts.get(name) == size},
            )
            return
    found.append(one)


def possible_slots(server: SglangServer, version: Version) -> Sequence[tuple[int, tuple[Strategy, bool] | None]]:
    """(r, the strategy and overlap it follows from) for each strategy that is possible; one (1, None) without state."""
    if server.slot is None:
        return [(1, None)]
    if not server.radix or version < (0, 5, 4):
        return [(1, ("no_buffer", False))]
    possible = strategies(
        version,
        strategy=server.strategy,
        overlap=server.overlap,
        page_size=server.page_size,
        model_class=server.model_class,
        linear_backend=server.linear_backend,
    )
    found = [
        (
            slots_per_request(
                version,
                radix_cache=True,
                strategy=strategy,
                overlap=overlap,
                speculative=server.speculation is not None,
                skip_decode_lock=server.skip_decode_lock,
            ),
            (strategy, overlap),
        )
        for strategy, overlap in possible
    ]
    if server.per_request is None:
        return list({r: (r, pair) for r, pair in reversed(found)}.values())[::-1]
    fitting = [(r, pair) for r, pair in found if r == server.per_request]
    return fitting[:1] or [(server.per_request, possible[0])]


_COMPARED: Final = (
    "state_slots",
    "slots_per_request",
    "kv_tokens",
    "kv_swa_tokens",
    "max_running_requests",
    "binding",
    "pool_bytes",
)


def _same(one: Sizing, other: Sizing) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _COMPARED)


def _size_one(
    server: SglangServer,
    span: tuple[Version, Version],
    per_request: int,
    strategy: tuple[Strategy, bool] | None,
) -> Sizing:
    """One release's sizing with one number of slots per request."""
    version = span[0]
    rest = _rest(server, version, per_request)
    slots: int | None = None
    charged, how = 0, None
    if server.slot is not None:
        choice = choose_slots(version, server.slot, rest, _wanted(server, per_request))
        slots, charged, how = choice.slots, choice.charged, choice.how
        if how == "ratio":
            _check_ratio(server, version, rest, per_request)
    tokens, swa_tokens = _tokens(server, version, None if rest is None else rest - charged)
    rows, running, binding = _requests(server, version, tokens, slots, per_request)
    if server.speculation is not None and version < (0, 5, 7) and tokens is not None and server.kv_tokens is None:
        tokens = _with_draft_tokens(server, tokens, rows)
    accounts: dict[str, int] = {}
    state: StatePool | None = None
    if server.slot is not None and slots is not None:
        state = state_pool(
            server.slot,
            slots,
            version=version,
            requests=rows,
            speculation=server.speculation,
            cuda=server.cuda,
            prefill_worker=server.disaggregation == "prefill",
        )
        accounts |= state.accounts()
    if tokens is not None and server.kv is not None:
        accounts |= _kv_accounts(server, tokens, swa_tokens)
    if (table := _request_table(server, version, rows)) is not None:
        accounts["request_tables"] = table
    prefix = None
    if strategy is not None:
        prefix = prefix_cost(version, radix_cache=server.radix, strategy=strategy[0], overlap=strategy[1])
    return Sizing(
        versions=span,
        accounts=accounts,
        state_slots=slots,
        slots_per_request=per_request if server.slot is not None else None,
        kv_tokens=tokens,
        kv_swa_tokens=swa_tokens,
        max_running_requests=running,
        page_size=server.page_size,
        binding=binding,
        budget=rest,
        charged_state=charged,
        state=state,
        prefix=prefix,
        slots_from=how,
    )


def _check_ratio(server: SglangServer, version: Version, rest: int | None, per_request: int) -> None:
    """Refuse a choice by ratio where the ratio does not explain the slots that the original server has."""
    source = server.original
    if source is None or source.state_slots is None or source.slot is None or source.budget is not None:
        return
    own = _original_per_request(source, version, per_request)
    budget_before = _rest(source, version, own)
    again = choose_slots(version, source.slot, budget_before, msgspec.structs.replace(_wanted(source, own), given=None))
    if abs(again.slots - source.state_slots) > 1 + source.tolerance * source.state_slots:
        raise NotModelledError(
            f"how the {source.state_slots} state slots were chosen is not known (the ratio gives {again.slots}), "
            "so neither is how many another setting gives; --set state_slots=N says how many are wanted"
        )


def _wanted(server: SglangServer, per_request: int) -> SlotRequest:
    ratio = DEFAULT_STATE_RATIO if server.state_ratio is None else server.state_ratio
    return SlotRequest(
        per_request=per_request,
        radix_cache=server.radix,
        ratio=exact(ratio),
        attention_dp=server.attention_dp,
        requested=server.state_slots_requested,
        running=server.running_requested,
        given=server.state_slots,
        draft_tokens=server.speculation.draft_tokens if server.speculation is not None else 0,
        prefill_worker=server.disaggregation == "prefill",
    )


def _rest(server: SglangServer, version: Version, per_request: int) -> int | None:
    """The budget for state and KV: as given, or what the original server's pools took under this release's rules."""
    if server.budget is not None:
        return server.budget.rest
    source = server if server.original is None else server.original
    if source.budget is not None:
        return source.budget.rest
    if source.kv_tokens is None or source.kv is None:
        return None
    if source.slot is not None and source.state_slots is None:
        return None
    if source.max_total_tokens is not None and source.kv_tokens >= page_down(source.max_total_tokens, source.page_size):
        # The flag cut the pool short: what the budget would have held is not in the figures.
        return None
    if source.speculation is not None and source.speculation.reserves_tokens and version < (0, 5, 7):
        return None
    charged = 0
    if source.slot is not None:
        own = per_request if source is server else _original_per_request(source, version, per_request)
        charged = choose_slots(version, source.slot, None, _wanted(source, own)).charged
    return charged + cost(source, version, source.kv_tokens, source.kv_swa_tokens) + server.more_budget


def _original_per_request(source: SglangServer, version: Version, fallback: int) -> int:
    """Slots per request before the change; it matters with speculation only."""
    if source.per_request is not None:
        return source.per_request
    possible = {r for r, _ in possible_slots(source, version)}
    if len(possible) == 1:
        return possible.pop()
    if source.speculation is None:
        return fallback
    raise NotModelledError(
        "how many slots one request takes is not certain, and with speculation the budget depends on it"
    )


def cost(server: SglangServer, version: Version, tokens: int, swa_tokens: int | None) -> int:
    """What sizing charges for this many tokens (the extra page is not charged)."""
    kv = server.kv or KvToken()
    own = kv.full + (kv.draft if version >= (0, 5, 11) else 0)
    if not kv.sliding:
        return tokens * own
    if not kv.full:
        return tokens * kv.sliding
    by_ratio = page_down(math.floor(tokens * exact(server.swa_ratio)), server.page_size)
    if swa_tokens is None or swa_tokens == by_ratio:
        return math.ceil(tokens * (own + exact(server.swa_ratio) * kv.sliding))
    return tokens * own + swa_tokens * kv.sliding


def _tokens(server: SglangServer, version: Version, left: int | None) -> tuple[int | None, int | None]:
    """(KV tokens, sliding-window tokens) that `left` bytes hold.

    `floor(left / cell)`, cut to `max_total_tokens` and to whole pages (`pool_configurator.py`, 0.5.12+; the same in
    `profile_max_num_token` before). The draft's layers are in the cell from 0.5.11.
    """
    kv = server.kv
    if server.kv_tokens is not None:
        return server.kv_tokens, server.kv_swa_tokens
    page = server.page_size
    if kv is None or left is None:
        return (None, None)
    if left <= 0:
        raise NotModelledError("the state leaves nothing of the budget for KV: such a server does not start")
    if kv.sliding:
        return _swa_tokens(server, version, left)
    cell = kv.full + (kv.draft if version >= (0, 5, 11) else 0)
    if cell <= 0:
        raise NotModelledError("a token takes no KV bytes on this rank")
    return page_down(_capped(server, left // cell), page), None


def _capped(server: SglangServer, tokens: int) -> int:
    return tokens if server.max_total_tokens is None else min(tokens, server.max_total_tokens)


def _swa_tokens(server: SglangServer, version: Version, left: int) -> tuple[int, int]:
    """The two pools of a sliding-window model: `full * F + swa * S = left`, `swa = ratio * full`.

    Source: `HybridSWAPoolConfigurator` (0.5.12+), `set_num_tokens_hybrid_swa` (0.5.7 to 0.5.11: the same equation after
    a first rounding with every layer counted full).
    """
    if version < (0, 5, 7):
        raise NotModelledError(f"sliding-window pools of SGLang {dotted(version)} are not modelled (0.5.7+ are)")
    if not server.radix and server.max_running_requests is not None and version >= (0, 5, 14):
        raise NotModelledError(
            "without a radix cache, sliding-window pools are sized by running requests (0.5.14+), which is not modelled"
        )
    kv, page, ratio = server.kv or KvToken(), server.page_size, exact(server.swa_ratio)
    draft = kv.draft if version >= (0, 5, 11) else 0
    if not kv.full:
        tokens = page_down(_capped(server, left // (kv.sliding + draft)), page)
        return tokens, tokens
    cell = kv.full + draft + ratio * kv.sliding
    if version < (0, 5, 12):
        whole = page_down(_capped(server, left // (kv.full + kv.sliding)), page)
        tokens = page_down(math.floor(whole * (kv.full + kv.sliding) / cell), page)
    else:
        tokens = page_down(_capped(server, math.floor(left / cell)), page)
    sliding = page_down(math.floor(tokens * ratio), page)
    if server.window is not None and version >= (0, 5, 17) and sliding <= server.window + page:
        raise NotModelledError(
            f"a sliding-window pool of {sliding} tokens holds no request: such a server does not start"
        )
    return tokens, sliding


def _with_draft_tokens(server: SglangServer, tokens: int, rows: int | None) -> int:
    """EAGLE up to 0.5.6 adds room for draft and verified tokens after sizing: `R * (steps * topk + D) + 100`."""
    speculation = server.speculation
    if speculation is None or not speculation.reserves_tokens:
        return tokens
    if speculation.steps is None or speculation.topk is None or rows is None:
        raise NotModelledError("EAGLE up to 0.5.6 adds tokens by draft steps and branches, which are not known")
    more = rows * (speculation.steps * speculation.topk + speculation.draft_tokens) + 100
    return page_down(_capped(server, tokens + more), server.page_size)


def _kv_accounts(server: SglangServer, tokens: int, swa_tokens: int | None) -> dict[str, int]:
    """Bytes of the KV pools: `tokens + page` rows in every buffer (the page at slot 0 takes writes of padded batches)."""
    kv = server.kv or KvToken()
    rows, swa_rows = tokens + server.page_size, (swa_tokens or 0) + server.page_size
    parts = {
        "kv_cache/k": rows * kv.keys,
        "kv_cache/v": rows * kv.values,
        "kv_cache/latent": rows * kv.latent,
        "kv_cache/index": rows * kv.index,
        "kv_cache/swa_k": swa_rows * kv.swa_keys,
        "kv_cache/swa_v": swa_rows * kv.swa_values,
        "kv_cache/draft": rows * kv.draft,
    }
    return {name: bytes_ for name, bytes_ in parts.items() if bytes_}


def default_requests(tokens: int, context_length: int) -> int:
    """Running requests where none are asked for: `tokens / context * 512`, between 2048 and 4096 (0.4.4+)."""
    return max(2048, min(4096, int(tokens / context_length * 512)))


def _requests(
    server: SglangServer, version: Version, tokens: int | None, slots: int | None, per_request: int
) -> tuple[int | None, int | None, tuple[str, ...]]:
    """(rows of the request pool, running requests in effect, what binds them), per attention data-parallel rank.

    Source: `resolve_max_num_reqs` (0.5.14+), `_resolve_max_num_reqs` (0.5.10 to 0.5.13), `init_memory_pool` and
    `tp_worker.py` (to 0.5.9).
    """
    asked = server.running_requested
    here = None if asked is None else asked // server.attention_dp
    by_slots = None if slots is None else slots // per_request
    by_tokens = None if tokens is None else tokens // 2
    estimate: int | None = None
    if tokens is not None and server.context_length:
        estimate = default_requests(tokens, server.context_length)
    if version < (0, 5, 10):
        rows = _least(asked if asked is not None else estimate, by_slots)
        if version >= (0, 5, 9) and server.speculation is not None:
            rows = _least(rows, here)
        limits = {"max_running_requests": here, "kv_tokens": by_tokens if here is None else None}
        if here is None:
            limits["default"] = estimate
        limits["state_slots"] = by_slots
    else:
        limits = {"max_running_requests": here, "state_slots": by_slots}
        if version < (0, 5, 14) and here is not None:
            limits["default"] = estimate
        else:
            limits["kv_tokens"] = by_tokens
            if here is None:
                limits["default"] = estimate
        rows = None
    known = {name: value for name, value in limits.items() if value is not None}
    running = min(known.values()) if known else None
    if here is None and estimate is None and (running is None or running >= 2048):
        # Without a context length the engine's own default may lie anywhere between 2048 and 4096.
        running, known = server.running_requests, {}
    binding = tuple(name for name, value in known.items() if value == running)
    if version >= (0, 5, 10):
        rows = running
    return rows, running, binding


def _least(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return min(known) if known else None


def request_table_bytes(version: Version, requests: int, context_length: int, draft_tokens: int = 0) -> int:
    """The table of request to token indices: `(R [+ 1]) * (context + 4 + D) * 4` bytes; R + 1 rows from 0.5.11.

    Source: `mem_cache/memory_pool.py: ReqToTokenPool`. Outside the budget, and in no line of the log.
    """
    rows = requests + (1 if version >= (0, 5, 11) else 0)
    return rows * (context_length + _REQUEST_EXTRA + draft_tokens) * INT32


def _request_table(server: SglangServer, version: Version, rows: int | None) -> int | None:
    if rows is None or not server.context_length or server.disaggregation == "decode":
        return None
    tokens = server.speculation.draft_tokens if server.speculation is not None else 0
    return request_table_bytes(version, rows, server.context_length, tokens)


def _span(versions: tuple[Version, Version]) -> str:
    low, high = versions
    return dotted(low) if low == high else f"{dotted(low)} to {dotted(high)}"


def _in_words(sizing: Sizing) -> str:
    parts = []
    if sizing.state_slots is not None:
        parts.append(f"{words.plural(sizing.state_slots, 'state slot')} at {sizing.slots_per_request} a request")
    if sizing.kv_tokens is not None:
        parts.append(words.plural(sizing.kv_tokens, "KV token"))
    if sizing.max_running_requests is not None:
        parts.append(words.plural(sizing.max_running_requests, "running request"))
    return ", ".join(parts) or "no pool"
