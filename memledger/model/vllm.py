"""vLLM's pool arithmetic by version: sizes, what the printed figures mean, what a request costs, and the way back.

`cache_layers` turns an `Architecture` into layers, `vllm_pool.plan` those into a pool's shape; everything else here takes
that shape. All bytes are per GPU; all functions are pure. Formulas and sources: docs/arithmetic-vllm.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, Decimal

import msgspec

from memledger.model import vllm_facts as facts
from memledger.model.architecture import Architecture, Attention, LatentAttention, Layer, NotModelledError, Parallel
from memledger.model.kv import layer_token_bytes, resolve_dtype
from memledger.model.layers import stage_sizes
from memledger.model.state import default_dtypes, layer_state_bytes
from memledger.model.vllm_facts import CacheMode, TokenRule, modelled_release
from memledger.model.vllm_pool import (
    BlockSize,
    CacheLayer,
    Group,
    PaddingLayers,
    Pool,
    RequestBlocks,
    Settings,
    blocks,
    context_parallel,
    plan,
    request_blocks,
)
from memledger.units import GIB, Amount

__all__ = [
    "BlockRange",
    "BlockSize",
    "Budget",
    "CacheLayer",
    "Capacity",
    "Group",
    "PaddingLayers",
    "Pool",
    "RequestBlocks",
    "Reservation",
    "Settings",
    "Split",
    "StateCost",
    "blocks",
    "blocks_from_figures",
    "budget",
    "cache_layers",
    "capacity",
    "log_lines",
    "longest_context",
    "meaning",
    "modelled_release",
    "needed_bytes",
    "physical_tokens",
    "plan",
    "pool_of",
    "request_blocks",
    "smallest_reservation",
    "split_pool",
    "state_cost",
]


# From an architecture


def cache_layers(
    arch: Architecture,
    parallel: Parallel,
    version: str | None,
    *,
    kv_dtype: str = "auto",
    conv_dtype: str | None = None,
    state_dtype: str | None = None,
    draft_tokens: int = 0,
    draft: bool = False,
) -> tuple[CacheLayer, ...]:
    """The model's layers as the block pool sees them, in order; `draft`: its draft (MTP) layers after them.

    `kv_dtype`, `conv_dtype`, `state_dtype`: element types, vLLM's default of that version where None. `draft_tokens`
    (`num_speculative_tokens`) widens the convolution's window.
    """
    tp = parallel.attention_tp
    conv, ssm = conv_dtype, state_dtype
    if (conv is None or ssm is None) and arch.state_layers:
        default_conv, default_ssm = default_dtypes(arch, "vllm", version)
        conv, ssm = conv or default_conv, ssm or default_ssm
    dtype = resolve_dtype(kv_dtype, arch.dtype)
    sizes = stage_sizes(len(arch.layers), parallel.pp, "vllm")
    stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    found: list[CacheLayer] = []
    for layer, stage in zip(arch.layers, stages, strict=True):
        found.extend(_attention_layers(layer, tp, dtype, stage))
        if layer.state is not None and conv and ssm:
            state = sum(layer_state_bytes(layer.state, tp, conv, ssm, "vllm", draft_tokens))
            found.append(CacheLayer(state_bytes=state, layout=type(layer.state).__name__, stage=stage))
    if draft:
        for layer in arch.draft_layers:
            found.extend(_attention_layers(layer, tp, dtype, parallel.pp - 1))
    return tuple(found)


def _attention_layers(layer: Layer, tp: int, dtype: str, stage: int) -> list[CacheLayer]:
    attention = layer.attention
    if attention is None:
        return []
    size = layer_token_bytes(attention, tp, dtype, "vllm")
    if isinstance(attention, LatentAttention):
        found = [CacheLayer(token_bytes=size.keys + size.values, latent=True, layout="latent", stage=stage)]
        if size.index:
            found.append(CacheLayer(token_bytes=size.index, latent=True, layout="index", stage=stage))
        return found
    layout = f"{attention.k_dim}+{attention.v_dim}"
    return [CacheLayer(token_bytes=size.total, window=attention.window, layout=layout, stage=stage)]


def pool_of(
    arch: Architecture,
    parallel: Parallel,
    version: str | None,
    max_model_len: int,
    *,
    kv_dtype: str = "auto",
    conv_dtype: str | None = None,
    state_dtype: str | None = None,
    prefix_caching: bool | None = None,
    state_mode: CacheMode | None = None,
    prefill_backend: str | None = None,
    draft_tokens: int = 0,
    draft: bool | None = None,
    settings: Settings | None = None,
) -> Pool:
    """The pool's shape for a model, with that version's defaults for what is None.

    `settings`: further settings; its release, length, draft tokens, state mode, head dimension and checkpoint are set
    here. `state_mode`: `--mamba-cache-mode`, else what `prefix_caching` gives. `draft`: whether the model's own draft layers are loaded (default: if `draft_tokens`).

    Raises:
        NotModelledError: unknown version or combination; also where a GDN or KDA layer's prefill backend decides the
            blocks of a request and `prefill_backend` is None (two readings: see `vllm_facts.checkpoint`).
    """
    at = modelled_release(version)
    layers = cache_layers(
        arch,
        parallel,
        version,
        kv_dtype=kv_dtype,
        conv_dtype=conv_dtype,
        state_dtype=state_dtype,
        draft_tokens=draft_tokens,
        draft=bool(draft_tokens) if draft is None else draft,
    )
    base = settings or Settings(at, max_model_len)
    state = next((layer.state for layer in arch.state_layers), None)
    hybrid = state is not None
    caching = facts.default_prefix_caching(at, hybrid=hybrid) if prefix_caching is None else prefix_caching
    mode = state_mode or facts.default_cache_mode(at, state, prefix_caching=caching)
    checkpoint = (0, 1)
    if state is not None and mode == "align":
        readings = facts.checkpoint(at, state, prefill_backend)
        if len(readings) > 1:
            raise NotModelledError(
                f"each state group takes {2 + draft_tokens} or {3 + draft_tokens} blocks a request: the linear "
                "attention prefill backend decides and is not known"
            )
        checkpoint = readings[0]
    head_dim = next((one.attention.k_dim for one in arch.layers if isinstance(one.attention, Attention)), None)
    return plan(
        layers,
        msgspec.structs.replace(
            base,
            release=at,
            max_model_len=max_model_len,
            draft_tokens=draft_tokens,
            state_mode=mode,
            head_dim=base.head_dim if base.head_dim is not None else head_dim,
            checkpoint_blocks=checkpoint[0],
            checkpoint_alignment=checkpoint[1],
        ),
    )


# What the engine prints


class Capacity(msgspec.Struct, frozen=True):
    """The pool's capacity as the engine prints it: blocks, the token figure, requests of the longest length at once."""

    blocks: int
    tokens: int
    concurrency: float


def capacity(pool: Pool, num_blocks: int) -> Capacity:
    """The printed figures of a pool of `num_blocks` blocks.

    * Concurrency: blocks / blocks of one request of `max_model_len` (up to 0.9.0: tokens / `max_model_len`).
    * Tokens: see `vllm_facts.token_rule`.

    Source: `get_max_concurrency_for_kv_cache_config`, `get_kv_cache_capacity`, before 0.20.1 `_report_kv_cache_config`.
    """
    length = pool.settings.max_model_len
    rule = facts.token_rule(pool.settings.release)
    if rule == "slots":
        tokens = num_blocks * pool.block.tokens
        return Capacity(num_blocks, tokens, tokens / length)
    concurrency = num_blocks / request_blocks(pool, length).total
    if rule == "effective":
        return Capacity(num_blocks, int(concurrency * length), concurrency)
    return Capacity(num_blocks, num_blocks // len(pool.groups) * _printed_block(pool), concurrency)


def _printed_block(pool: Pool) -> int:
    """Tokens of the smallest block over all groups, times the ranks that share a request (rule up to 0.20.0)."""
    return min(group.block_tokens for group in pool.groups) * context_parallel(pool.settings)


def log_lines(pool: Pool, num_blocks: int, device: str = "GPU") -> tuple[str, ...]:
    """The lines about the pool's shape and size that the engine prints, without prefixes, in its order.

    `device`: the word before "KV cache size"; always GPU up to 0.29.0, from 0.30.0 the device type (CPU, XPU).
    """
    at, block = pool.settings.release, pool.block
    lines = []
    if block.enlarged:
        lines.append(
            f"Setting attention block size to {block.tokens} tokens "
            "to ensure that attention page size is >= mamba page size."
        )
    if pool.hybrid and block.page_bytes != block.state_bytes:
        lines.append(
            f"Padding mamba page size by {block.padding_percent:.2f}% to ensure "
            "that mamba page size and attention page size are exactly equal."
        )
    lines.extend(
        f"Add {padding.layers} padding layers, may waste at most {padding.percent:.2f}% KV cache memory"
        for padding in pool.padding
    )
    printed = capacity(pool, num_blocks)
    size = f"{device if at >= (0, 30, 0) else 'GPU'} KV cache size: {printed.tokens:,} tokens"
    most = f"Maximum concurrency for {pool.settings.max_model_len:,} tokens per request: {printed.concurrency:.2f}x"
    lines.extend([f"{size}, {most}"] if at >= (0, 28, 0) else [size, most])
    return tuple(lines)


def physical_tokens(pool: Pool, num_blocks: int) -> int | None:
    """Tokens of KV that really fit if nothing else were in the pool: only where all layers keep every token; else None."""
    if len(pool.groups) != 1 or pool.groups[0].kind != "full":
        return None
    return num_blocks * pool.groups[0].block_tokens * context_parallel(pool.settings)


def meaning(pool: Pool) -> tuple[TokenRule, str]:
    """What the printed token figure means for this pool: the rule, and a sentence."""
    rule = facts.token_rule(pool.settings.release)
    length = pool.settings.max_model_len
    groups = len(pool.groups)
    if groups == 1 and pool.groups[0].kind == "full":
        if rule != "effective":
            return rule, "tokens whose KV fits in the pool"
        return (
            rule,
            f"tokens of KV that requests of {length:,} tokens can hold: what fits, but for partly filled blocks",
        )
    if rule == "blocks_per_group":
        return rule, (
            f"an equal share of the blocks for each of {groups} groups: not the tokens that fit, because state and sliding-"
            "window groups need few blocks for a long request"
        )
    if rule == "slots":
        return rule, "blocks times block size"
    return rule, (
        f"requests of {length:,} tokens that fit at once, times {length:,}: the same bytes print another figure at another "
        "maximum length"
    )


# What a request costs


class StateCost(msgspec.Struct, frozen=True):
    """Recurrent state of one running request on one GPU, in bytes of the pool.

    `bytes` = `stored` + `page_padding` + `layer_padding`. `stored`: all copies that the mode keeps; `live`: the one copy
    that the request computes with. `blocks`: taken at most.
    """

    blocks: int
    bytes: int
    stored: int
    page_padding: int
    layer_padding: int
    live: int


def state_cost(pool: Pool, tokens: int | None = None, stage: int | None = None) -> StateCost:
    """What one running request's state takes, at most; `tokens`: its length (only mode `all` depends on it).

    On a GPU of the pipeline stage `stage`; None for the stage whose blocks are largest.
    """
    length = pool.settings.max_model_len if tokens is None else tokens
    state_groups = [group for group in pool.groups if group.kind == "state"]
    if not state_groups:
        return StateCost(0, 0, 0, 0, 0, 0)
    sizes = pool.stage_block_bytes
    if stage is None:
        stage = sizes.index(max(sizes))
    taken = request_blocks(pool, length, resident=True).state
    copies = taken // len(state_groups)
    stored = sum(group.state_bytes[stage] for group in state_groups)
    pages = sum(group.stage_bytes[stage] for group in state_groups)
    used = len(state_groups) * sizes[stage]
    return StateCost(
        taken, copies * used, copies * stored, copies * (pages - stored), copies * (used - pages), live=stored
    )


class Split(msgspec.Struct, frozen=True):
    """A pool's bytes split into KV and recurrent state; their sum is the pool. `requests`: how many were counted."""

    kv_bytes: int
    state_bytes: int
    requests: float


def split_pool(pool: Pool, pool_bytes: int, *, requests: int | None = None, tokens: int | None = None) -> Split:
    """The pool's bytes as KV and state, for `requests` running requests; without: filled with requests of `tokens` tokens.

    Blocks belong to no one until a request takes them, so the split depends on the load. `tokens`: `max_model_len` by
    default. The state's share is that of its blocks; the KV gets the rest, unusable remainders included.
    """
    length = pool.settings.max_model_len if tokens is None else tokens
    each = request_blocks(pool, length, resident=True)
    if requests is None:
        state = pool_bytes * each.state // each.total
        return Split(pool_bytes - state, state, pool_bytes / (each.total * pool.bytes_per_block))
    state = min(pool_bytes, requests * each.state * pool.bytes_per_block)
    return Split(pool_bytes - state, state, float(requests))


def needed_bytes(pool: Pool, tokens: int) -> int:
    """Bytes that one request of `tokens` tokens needs ("... GiB KV cache is needed"), without the null block."""
    return request_blocks(pool, tokens).total * pool.bytes_per_block


def longest_context(pool: Pool, available: int | Sequence[int], limit: int | None = None) -> int:
    """The longest request that fits ("the estimated maximum model length is N"); 0 if none does.

    From 0.29.0 one block less is counted, the null block. Searched up to `limit` (`max_model_len`).

    Raises:
        NotModelledError: before 0.27.1 for models with several groups: counted otherwise, not read.
    """
    at = pool.settings.release
    if len(pool.groups) > 1 and at < (0, 27, 1):
        raise NotModelledError(
            f"vLLM {facts.wording(at)}: the estimate of the longest length for several groups is not known"
        )
    held_back = 1 if at >= facts.NULL_BLOCK_CHECKED_SINCE else 0
    usable = blocks(pool, available) - held_back
    return _largest(limit or pool.settings.max_model_len, lambda length: request_blocks(pool, length).total <= usable)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# The budget


class Budget(msgspec.Struct, frozen=True):
    """The memory budget of one GPU, bytes. `available`: what the pool gets ("Available KV cache memory")."""

    requested: int
    consumed: int
    headroom: int
    graph_estimate: int
    available: int


def budget(
    version: str | None,
    total: int,
    *,
    consumed: int,
    headroom: int,
    utilization: float | None = None,
    graph_estimate: int = 0,
    graph_charged: bool | None = None,
    external_weights: int = 0,
) -> Budget:
    """The pool's bytes: `total * utilization - consumed - headroom - graph estimate`.

    `consumed`: weights and all else that stays; `headroom`: peak of the profile run above that. Up to 0.26.0 the same
    idea with other meters (weights, torch peak increase, non-torch increase). `graph_charged`: default by version
    (`vllm_facts.graph_estimate_charged`). `external_weights`: held by a weight cache process (0.32.0 and later).

    Source: `v1/worker/gpu_worker.py: determine_available_memory`, `v1/worker/utils.py: request_memory`.

    Raises:
        NotModelledError: before 0.9.1; or a development build for which it is not known whether graphs are charged.
    """
    at = modelled_release(version)
    if at < (0, 9, 1):
        raise NotModelledError(f"vLLM {facts.wording(at)}: the budget is modelled from 0.9.1")
    charged = facts.graph_estimate_charged(at) if graph_charged is None else graph_charged
    if charged is None and graph_estimate:
        raise NotModelledError(
            f"vLLM {facts.wording(at)}: whether the CUDA graph estimate is in the budget is not known"
        )
    share = total * (facts.default_utilization(at) if utilization is None else utilization)
    requested = (math.ceil(share) if at >= (0, 14, 0) else int(share)) - external_weights
    graphs = graph_estimate if charged else 0
    return Budget(requested, consumed, headroom, graphs, requested - consumed - headroom - graphs)


# The way back


class Reservation(msgspec.Struct, frozen=True):
    """The smallest pool that serves `requests` requests of `tokens` tokens at once, without preemption.

    `blocks` include the null block; `bytes`: per GPU (the largest stage); `flags` ask the engine for exactly that.
    `utilization`: the same as `--gpu-memory-utilization`, where the rest of the budget was given.
    """

    requests: int
    tokens: int
    blocks: int
    bytes: int
    flags: tuple[str, ...]
    utilization: float | None = None


def smallest_reservation(
    pool: Pool, requests: int, tokens: int, *, total: int | None = None, outside_pool: int | None = None
) -> Reservation:
    """The smallest pool for `requests` requests of `tokens` tokens each: `1 + requests * blocks of one` blocks.

    `total`, `outside_pool`: the card's bytes, and what the budget holds besides the pool (consumed, headroom, and the
    graph estimate where charged); with both, the utilisation is worked out, rounded up to four decimals.

    `--kv-cache-memory-bytes` exists from 0.10.2; before, the pool is asked for in blocks (`--num-gpu-blocks-override`).
    """
    if requests < 1 or tokens < 1:
        raise NotModelledError("a reservation is for at least one request of at least one token")
    number = 1 + requests * request_blocks(pool, tokens, resident=True).total
    size = number * pool.bytes_per_block
    if pool.settings.release >= facts.KV_CACHE_MEMORY_FLAG_SINCE:
        flag = f"--kv-cache-memory-bytes {size}"
    else:
        flag = f"--num-gpu-blocks-override {number}"
    utilization = None
    if total is not None and outside_pool is not None:
        exact = Decimal(outside_pool + size) / Decimal(total)
        utilization = float(exact.quantize(Decimal("0.0001"), rounding=ROUND_CEILING))
        if utilization > 1:
            utilization = None
    flags = (flag, f"--max-num-seqs {requests}", f"--max-model-len {tokens}")
    return Reservation(requests, tokens, number, size, flags, utilization)


class BlockRange(msgspec.Struct, frozen=True):
    """Block counts that agree with what was printed: from `low` to `high`."""

    low: int
    high: int

    @property
    def exact(self) -> int | None:
        """The count, if only one agrees."""
        return self.low if self.low == self.high else None

    def pool_bytes(self, pool: Pool) -> Amount:
        """Bytes of the pool per GPU, the blocks' range as tolerance."""
        low, high = self.low * pool.bytes_per_block, self.high * pool.bytes_per_block
        return Amount((low + high) // 2, (high - low + 1) // 2)


def blocks_from_figures(
    pool: Pool,
    *,
    tokens: int | None = None,
    concurrency: str | None = None,
    available: Amount | None = None,
) -> BlockRange:
    """The block counts that print these figures: the token figure, the concurrency (text, `18.44`), the pool's bytes.

    Raises:
        NotModelledError: no figure, or no count agrees with all of them (another block size, group or mode than assumed).
    """
    ranges = []
    if tokens is not None:
        ranges.append(_from_tokens(pool, tokens))
    if concurrency is not None:
        ranges.append(_from_concurrency(pool, concurrency))
    if available is not None:
        size = pool.bytes_per_block
        low, high = available.bytes - available.tolerance, available.bytes + available.tolerance
        ranges.append(BlockRange(max(0, low // size), max(0, high // size)))
    if not ranges:
        raise NotModelledError("no printed figure to count blocks from")
    low, high = max(each.low for each in ranges), min(each.high for each in ranges)
    if low > high:
        raise NotModelledError(
            f"no number of blocks agrees with the printed figures (blocks of {pool.block.tokens} tokens, "
            f"{pool.bytes_per_block} bytes, {len(pool.groups)} groups)"
        )
    return BlockRange(low, high)


def _from_tokens(pool: Pool, tokens: int) -> BlockRange:
    rule = facts.token_rule(pool.settings.release)
    if rule == "effective":
        each, length = request_blocks(pool, pool.settings.max_model_len).total, pool.settings.max_model_len
        return _agreeing(
            tokens * each // length, (tokens + 1) * each // length, lambda n: capacity(pool, n).tokens == tokens
        )
    step = pool.block.tokens if rule == "slots" else _printed_block(pool)
    groups = 1 if rule == "slots" else len(pool.groups)
    if tokens % step:
        raise NotModelledError(f"{tokens} tokens are not a multiple of the block size {step}")
    return BlockRange(tokens // step * groups, tokens // step * groups + groups - 1)


def _from_concurrency(pool: Pool, text: str) -> BlockRange:
    value = Decimal(text)
    each = Decimal(request_blocks(pool, pool.settings.max_model_len).total)
    half = Decimal("0.005")
    low, high = int((value - half) * each), int((value + half) * each)
    return _agreeing(low, high, lambda n: f"{capacity(pool, n).concurrency:.2f}" == f"{value:.2f}")


def _agreeing(low: int, high: int, agrees: Callable[[int], bool]) -> BlockRange:
    """The counts about `low` to `high` for which `agrees`: they lie together, so only the ends are tried."""
    low, high = max(0, low - 2), high + 2
    while low <= high and not agrees(low):
        low += 1
    while high >= low and not agrees(high):
        high -= 1
    if low > high:
        raise NotModelledError("no whole number of blocks prints that figure")
    return BlockRange(low, high)


def gib(size: int) -> str:
    """Bytes as the engine prints them: `round(size / 2**30, 2)`, so `1.0` and `6.16`."""
    return f"{round(size / GIB, 2)}"
