"""What a printed token figure counts, and the same figures in units that compare.

Four rules exist (docs/compare.md; vLLM v1/core/kv_cache_utils.py, SGLang's memory pools):

* `slots`, SGLang: tokens of the full-attention pool; recurrent state and sliding-window layers have pools of their own.
* `blocks`, vLLM with one kind of layer: blocks times block size.
* `blocks_per_group`, vLLM 0.9.1 to 0.20.0 with several kinds: blocks divided by the groups of layers, times the block size.
* `effective`, vLLM from 0.20.1: requests of the maximum length that fit at once, times that length.

The figures are tested, the version only breaks ties: a figure that the printed concurrency does not give is of the old rule.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final, Literal

import msgspec

from memledger import words
from memledger.compare.side import POOL, Side, whole_pools
from memledger.compare.values import Fits, Meaning
from memledger.ledger import Capacity, Entry
from memledger.model.versions import release
from memledger.units import GIB, Amount

Rule = Literal["slots", "blocks", "blocks_per_group", "effective", "not_printed"]

EFFECTIVE_SINCE: Final = (0, 20, 1)
"""First vLLM release that prints concurrency times maximum length (v1/core/kv_cache_utils.py)."""
MODEL_SHARE: Final = Fraction(1, 20)
"""The model's bytes per token stand for the measured ones where they agree within this share on both sides."""
GROUP_SHARE: Final = 0.02
"""How near to a whole number the groups of a modelled pool must come out to be used for another context."""


class Measured(msgspec.Struct, frozen=True):
    """One side in the waterfall's terms: `printed` = `pool` x `per_byte` + what the rest of the steps explain.

    `effective`: tokens by the common measure; `per_byte`: effective tokens of a byte of the pool, `model` by the
    model's arithmetic. All exact.
    """

    side: Side
    printed: int | None
    printed_note: str | None
    rule: Rule
    effective: Fraction | None
    effective_tolerance: Fraction
    length: int | None
    several_kinds: bool
    model: Fraction | None

    @property
    def per_byte(self) -> Fraction | None:
        """Effective tokens of one byte of the pool, as the figures give it."""
        pool = self.side.pool.amount
        if pool is None or pool.bytes <= 0 or self.effective is None or self.effective <= 0:
            return None
        return self.effective / pool.bytes


# -------------------------------------------------------------------------------------------------------- reading


def maximum_length(side: Side) -> int | None:
    """Tokens of the longest request: what the concurrency figure is for, else the configured length."""
    told = side.rank.capacity.concurrency.tokens_per_request
    configured = side.server.config.get("context_length")
    return told or (configured if isinstance(configured, int) and configured > 0 else None)


def measure(side: Side, context: int | None = None, *, several: bool = False) -> Measured:
    """What one side's figure counts; with `context` the effective tokens are those of requests of that length, where known.

    `several`: layers of several kinds are known of the model from elsewhere (the other side's log).
    """
    capacity = side.rank.capacity
    printed, note = _printed(side)
    length = maximum_length(side)
    model = model_bytes_per_token(side)
    if side.server.framework == "sglang":
        effective = Fraction(printed) if printed is not None else None
        return Measured(
            side, printed, note, "slots" if printed else "not_printed", effective, Fraction(0), length, False, model
        )
    several = several or has_several_kinds(side)
    product, spread = _concurrency_tokens(capacity)
    agrees = printed is None or product is None or abs(printed - product) <= spread + 1
    if printed is None:
        rule: Rule = "not_printed"
    elif not agrees:
        rule = "blocks_per_group"
        several = True
    else:
        rule = "effective" if _is_effective(side, several=several) else "blocks"
    effective = Fraction(printed) if printed is not None and agrees else product
    tolerance = spread if not agrees else Fraction(0)
    if context is not None and several and context != length:
        at_context = requests_at(side, context)
        if at_context is not None:
            effective, tolerance = at_context * context, Fraction(0)
            length = context
    return Measured(side, printed, note, rule, effective, tolerance, length, several, model if not several else None)


def _is_effective(side: Side, *, several: bool) -> bool:
    told = _pool_detail(side).get("tokens_rule")
    if told in {"concurrency x longest request", "blocks x block size"}:
        return bool(told == "concurrency x longest request")
    at = release(side.server.framework_version)
    return several or (at is not None and at >= EFFECTIVE_SINCE)


def _printed(side: Side) -> tuple[int | None, str | None]:
    """The printed tokens; where only blocks are printed, blocks times a block size that the figures fix."""
    capacity = side.rank.capacity
    if capacity.kv_tokens is not None:
        return capacity.kv_tokens, None
    blocks = capacity.kv_blocks
    if blocks is None or blocks <= 0:
        return None, None
    if capacity.kv_block_tokens is not None:
        return blocks * capacity.kv_block_tokens, "blocks times block size, both printed"
    product, spread = _concurrency_tokens(capacity)
    if product is None:
        return None, None
    size = round(product / blocks)
    # Another whole block size must be out of the concurrency's rounding.
    if size < 1 or spread * 2 >= blocks or abs(product - size * blocks) > spread + 1:
        return None, None
    return blocks * size, f"{blocks:,} blocks of {size} tokens: the block size from the printed concurrency"


def _concurrency_tokens(capacity: Capacity) -> tuple[Fraction | None, Fraction]:
    """Printed concurrency times its length, and half of its last digit times it."""
    length, requests = capacity.concurrency.tokens_per_request, capacity.concurrency.requests
    if length is None or requests is None or length <= 0 or requests <= 0:
        return None, Fraction(0)
    return Fraction(str(requests)) * length, Fraction(length, 200)


def _pool_entries(side: Side) -> list[Entry]:
    return [e for e in whole_pools(side.rank) if e.account in POOL]


def _pool_detail(side: Side) -> dict[str, Any]:
    found = next((e for e in _pool_entries(side) if e.account == "kv_cache/pool"), None)
    return found.detail if found is not None else {}


def _modelled(side: Side) -> dict[str, Any]:
    return _pool_detail(side).get("modelled") or {}


def has_several_kinds(side: Side) -> bool:
    """Whether a log or the model says that layers of several kinds (state, sliding windows) keep a cache."""
    if side.server.framework == "sglang":
        return bool(side.rank.capacity.kv_swa_tokens or side.rank.capacity.state_slots)
    detail, modelled = _pool_detail(side), _modelled(side)
    told = detail.get("includes_recurrent_state") or detail.get("padding_layers") or modelled.get("state")
    return bool(told or ("block_bytes" in modelled and "tokens_that_fit" not in modelled))


def model_bytes_per_token(side: Side) -> Fraction | None:
    """KV bytes of one token on the rank by the model's arithmetic, the pool's own layers only; None where not known."""
    entries = _pool_entries(side)
    each = Fraction(0)
    for entry in entries:
        modelled = entry.detail.get("modelled") or {}
        if isinstance(modelled.get("token_bytes"), int):
            each += modelled["token_bytes"]
        elif "tokens_that_fit" in modelled and modelled.get("block_tokens"):
            each += Fraction(modelled["block_bytes"], modelled["block_tokens"])
        else:
            return None
    return each if entries and each > 0 else None


# --------------------------------------------------------------------------------------------- requests of a length


def requests_at(side: Side, context: int) -> Fraction | None:
    """Requests of `context` tokens that fill a modelled vLLM pool of attention and state; None where it is not modelled.

    The model's own full pool gives the number of attention groups: blocks = requests x (groups x ceil(length / block) +
    state blocks). State blocks do not grow with the context but in the cache mode `all`.
    """
    modelled = _modelled(side)
    state, block = modelled.get("state"), modelled.get("block_tokens")
    if not state or not block or not modelled.get("agrees") or state.get("mode") == "all":
        return None
    low, high = modelled["blocks"]
    full, at = state["full_requests"], state["full_request_tokens"]
    if not full or not at:
        return None
    blocks = Fraction(low + high, 2)
    groups = (float(blocks) / full - state["request_blocks"]) / -(-at // block)
    whole = round(groups)
    if whole < 1 or abs(groups - whole) > GROUP_SHARE * whole:
        return None
    each: int = whole * -(-context // block) + state["request_blocks"]
    return blocks / each


def fits(measured: Measured, context: int) -> Fits:
    """Requests of `context` tokens that fit at once on one side."""
    side = measured.side
    capacity = side.rank.capacity
    by_kv, note = _by_kv(measured, context)
    slots, each = capacity.state_slots, capacity.slots_per_request
    by_state = slots // each if slots is not None and each else None
    if by_state is None and slots is not None:
        by_state = slots
        note = note or "slots per request are not in the log: one each is the least"
    limit = capacity.max_running_requests
    known = [
        (count, word)
        for count, word in ((by_kv, "KV pool"), (by_state, "state slots"), (limit, "configured limit"))
        if count is not None
    ]
    if not known or by_kv is None:
        return Fits(context, None, by_kv, by_state, limit, None, note)
    least, word = min(known, key=lambda item: item[0])
    return Fits(context, int(least), by_kv, by_state, limit, word, note)


def _by_kv(measured: Measured, context: int) -> tuple[float | None, str | None]:
    side = measured.side
    longest = maximum_length(side)
    if longest is not None and context > longest:
        return None, f"longer than its maximum of {longest:,} tokens"
    if side.server.framework == "sglang":
        note = None
        if side.rank.capacity.kv_swa_tokens:
            note = "by the full-attention pool; the window pool's need depends on the window, which is not in the log"
        return (measured.printed / context if measured.printed else None), note
    if not measured.several_kinds:
        return (measured.printed / context if measured.printed else None), None
    exact = requests_at(side, context)
    if exact is not None:
        return round(float(exact), 2), "by the model's arithmetic"
    concurrency = side.rank.capacity.concurrency
    if concurrency.tokens_per_request == context and concurrency.requests is not None:
        return concurrency.requests, "as printed"
    told = concurrency.tokens_per_request
    if told is None or concurrency.requests is None:
        return None, "state and window layers share the pool, and no concurrency is printed"
    return None, f"state and window layers share the pool: printed only for {told:,} tokens ({concurrency.requests:g})"


# ------------------------------------------------------------------------------------------------------- in words


def meaning(measured: Measured, context: int | None) -> Meaning:
    """One side's figure in words and in units that compare."""
    side = measured.side
    pool = side.pool.amount
    each, spread = _per_token(pool, measured)
    entries = _pool_entries(side)
    evidence = tuple(dict.fromkeys(line for e in entries for line in e.evidence))
    where = (
        fits(measured, context)
        if context is not None
        else Fits(0, None, None, None, None, None, "no context length is known")
    )
    held = side.parts["recurrent_state"].amount
    return Meaning(
        rule=measured.rule,
        text=_text(measured),
        printed_tokens=measured.printed,
        effective_tokens=round(measured.effective) if measured.effective is not None else None,
        measure=_measure(measured),
        pool_bytes=pool.bytes if pool is not None else None,
        pool_tolerance_bytes=pool.tolerance if pool is not None else None,
        kv_bytes_per_token=each,
        kv_bytes_per_token_tolerance=spread,
        model_bytes_per_token=round(measured.model) if measured.model is not None else None,
        state_bytes_per_request=state_bytes_per_request(side),
        state_bytes_held=held.bytes if held is not None and held.bytes else None,
        fits=where,
        notes=_notes(measured),
        evidence=evidence,
    )


def _per_token(pool: Amount | None, measured: Measured) -> tuple[int | None, int | None]:
    """Bytes of a token, with what the printed digits leave open. SGLang's pool has one page more than it prints tokens."""
    effective = measured.effective
    if pool is None or effective is None or effective <= 0:
        return None, None
    if measured.rule == "slots":
        page = measured.side.server.config.get("page_size")
        effective += page if isinstance(page, int) and page > 0 else 1
    share = Fraction(pool.tolerance) / effective
    share += Fraction(pool.bytes) / effective * measured.effective_tolerance / effective
    return round(pool.bytes / effective), int(share) + 1 if share else 0


def _measure(measured: Measured) -> str:
    if measured.several_kinds and measured.length is not None:
        return f"requests of {measured.length:,} tokens that fit, times {measured.length:,}"
    return "tokens that the pool holds"


def _text(measured: Measured) -> str:
    side = measured.side
    length = measured.side.rank.capacity.concurrency.tokens_per_request or measured.length
    name = f"vLLM {_release(side)}".rstrip()
    if measured.rule == "not_printed":
        return "no token figure in the log"
    if measured.rule == "slots":
        apart = []
        if side.rank.capacity.kv_swa_tokens:
            apart.append(f"sliding-window layers have {side.rank.capacity.kv_swa_tokens:,} tokens of their own")
        if side.rank.capacity.state_slots:
            apart.append(f"recurrent state has {side.rank.capacity.state_slots:,} slots of its own")
        return "; ".join(["tokens of the full-attention pool", *apart])
    if measured.rule == "blocks_per_group":
        return (
            f"{name}: blocks divided by the groups of layers, times the block size: not the tokens that fit, for state and "
            "window layers need few blocks for a long request"
        )
    if measured.rule == "effective" and length is not None:
        if measured.several_kinds:
            return (
                f"{name}: requests of {length:,} tokens that fit at once, times {length:,}: the same bytes print another "
                "figure at another maximum length"
            )
        return f"{name}: tokens that requests of {length:,} tokens can hold: what fits, but for partly filled blocks"
    return f"{name}: blocks times block size"


def _release(side: Side) -> str:
    version = side.server.framework_version
    return version.partition("+")[0] if version else ""


def _notes(measured: Measured) -> tuple[str, ...]:
    side, found = measured.side, []
    if measured.printed_note is not None:
        found.append(measured.printed_note)
    config = side.server.config
    ranks = (config.get("tp_size") or 1) * (config.get("pp_size") or 1)
    pools = sum(any(e.account == "kv_cache/pool" for e in whole_pools(rank)) for rank in side.server.ranks)
    if side.server.framework == "vllm" and side.pool.amount is not None and pools < ranks:
        found.append(
            "bytes per token are an upper bound: the smallest GPU's pool decides the tokens, and the printed pool may be "
            "a larger one's"
        )
    if (config.get("dcp_size") or 1) > 1:
        found.append(f"tokens of {config['dcp_size']} GPUs that share each request's KV: bytes per token are one GPU's")
    return tuple(found)


def state_bytes_per_request(side: Side) -> int | None:
    """Recurrent state that one running request takes on the GPU: its slots (SGLang), its blocks (vLLM, modelled)."""
    if side.server.framework == "vllm":
        found = (_modelled(side).get("state") or {}).get("request_bytes")
        return found if isinstance(found, int) else None
    slot, each = slot_bytes(side), side.rank.capacity.slots_per_request
    return slot.bytes * each if slot is not None and each is not None else None


def slot_bytes(side: Side) -> Amount | None:
    """One SGLang state slot: the pools of convolution and temporal state over slots and the padding slot."""
    slots = side.rank.capacity.state_slots
    entries = [e for e in whole_pools(side.rank) if e.account in {"recurrent_state/conv", "recurrent_state/ssm"}]
    if side.server.framework != "sglang" or slots is None or not entries:
        return None
    size = sum(e.bytes for e in entries)
    rows = slots + 1
    return Amount(size // rows, sum(e.tolerance_bytes for e in entries) // rows + 1)


def common_context(a: Side, b: Side, asked: int | None) -> int | None:
    """The context to compare at: the one asked for, else the smaller of the two maxima."""
    known = [length for length in (maximum_length(a), maximum_length(b)) if length is not None]
    return asked if asked is not None else min(known, default=None)


def per_token(size: int, spread: int | None) -> str:
    """`48,104 ± 30 B`, or in KiB where it is exact."""
    if spread:
        return f"{size:,} ± {spread:,} B"
    return words.amount(size) if size % 1024 == 0 else f"{size:,} B"


def gib_pair(size: int | None) -> str:
    """Bytes in GiB, or a question mark."""
    return "?" if size is None else f"{size / GIB:.2f}"
