"""vLLM's block pool against the model's arithmetic, and how much of it is recurrent state.

The pool's shape follows from the model, the flags and the release. Where the log leaves a choice open (the attention
backend's alignment, the chunk of state cache mode `all`), the readings are tried against the block size that the engine
printed, and only one that gives it is taken; none, or several that differ, is a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, cast

import msgspec

from memledger.ledger import Entry, Rank, Server
from memledger.model import vllm, vllm_facts
from memledger.model.architecture import Architecture, NotModelledError, Parallel
from memledger.model.check import SHARE, model_dtype, own_draft, parallel_of
from memledger.model.dtypes import normal_name
from memledger.model.kv import model_token_bytes, resolve_dtype
from memledger.model.state import default_dtypes, slot_bytes
from memledger.model.versions import Release, release
from memledger.model.vllm_facts import CacheMode
from memledger.model.vllm_pool import Pool, Settings
from memledger.units import Amount

_RULES: Final = {"blocks x block size": ("slots", "blocks_per_group"), "concurrency x longest request": ("effective",)}
"""The reader's words for what the printed tokens were tested to be, and the rules of `vllm_facts.token_rule` they allow."""
_KERNEL_BLOCKS: Final = (16, 32, 64, 128)
_CHUNKS: Final = (64, 128, 256, 512)


class PoolCheck(msgspec.Struct, frozen=True):
    """A server's pool as modelled. `tokens`: those that `blocks` (fewest, most) print; `agrees`: so does the log.

    `kv_dtype`, `conv_dtype`, `state_dtype`: element types; `state_bytes`: one request's (convolution, temporal) state on a GPU
    of each pipeline stage; `assumed`: what the log does not say.
    """

    pool: Pool
    blocks: tuple[int, int]
    tokens: tuple[int, int]
    logged_tokens: int
    agrees: bool
    kv_dtype: str
    conv_dtype: str | None = None
    state_dtype: str | None = None
    state_bytes: tuple[tuple[int, int], ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def middle(self) -> int:
        """Blocks in the middle of the range."""
        return sum(self.blocks) // 2


def granted(rank: Rank) -> Amount | None:
    """The bytes that a rank gave to its pool; None where the log does not say."""
    found = [e for e in rank.entries if e.account in {"kv_cache/pool", "kv_cache/unused"}]
    if not any(e.account == "kv_cache/pool" for e in found):
        return None
    return Amount(sum(e.bytes for e in found), sum(e.tolerance_bytes for e in found))


def check_pool(server: Server, arch: Architecture, ranks: tuple[Rank, ...]) -> PoolCheck:
    """The pool of the ranks of one engine.

    Raises:
        NotModelledError: what its shape depends on is not in the log, or not modelled.
    """
    capacity = ranks[0].capacity
    logged = capacity.kv_tokens
    if all(granted(rank) is None for rank in ranks):
        raise NotModelledError("the pool's bytes are not in the log")
    if logged is None:
        raise NotModelledError("the pool's tokens are not in the log")
    if server.config.get("num_gpu_blocks_override"):
        raise NotModelledError("the number of blocks was given by a flag")
    parallel = parallel_of(server)
    at = _release(server, ranks)
    smallest = _stage_grants(ranks, parallel)
    low = tuple(amount.bytes - amount.tolerance for amount in smallest)
    high = tuple(amount.bytes + amount.tolerance for amount in smallest)
    pool, assumed = _pool(server, arch, parallel, at, ranks)
    blocks = (vllm.blocks(pool, low), vllm.blocks(pool, high))
    tokens = tuple(vllm.capacity(pool, count).tokens for count in blocks)
    printed = _printed_block(ranks)
    fits = tokens[0] * (1 - SHARE) <= logged <= tokens[1] * (1 + SHARE) and printed in {None, pool.block.tokens}
    states: tuple[tuple[int, int], ...] = ()
    conv_dtype = state_dtype = None
    if arch.state_layers:
        conv_dtype, state_dtype = _state_dtypes(server, arch)
        draft = int(server.config.get("speculative_draft_tokens") or 0)
        sizes = [
            slot_bytes(arch, parallel, conv_dtype, state_dtype, "vllm", draft, stage) for stage in range(parallel.pp)
        ]
        states = tuple((size.conv, size.temporal) for size in sizes)
    return PoolCheck(
        pool,
        blocks,
        (tokens[0], tokens[1]),
        logged,
        fits,
        resolve_dtype(_kv_dtype(server), model_dtype(server, arch)),
        conv_dtype,
        state_dtype,
        states,
        assumed,
    )


def _stage_grants(ranks: tuple[Rank, ...], parallel: Parallel) -> tuple[Amount, ...]:
    """The least that a rank of each pipeline stage gave to the pool: the engine takes the fewest blocks of all.

    Raises:
        NotModelledError: a stage's figure is not in the log, or not which rank is of which stage, or a rank is of none.
    """
    for rank in ranks:
        if rank.pp is not None and not 0 <= rank.pp < parallel.pp:
            raise NotModelledError(f"there is no pipeline stage {rank.pp} of {parallel.pp}")
    found: list[Amount] = []
    for stage in range(parallel.pp):
        of = [rank for rank in ranks if parallel.pp == 1 or rank.pp == stage]
        grants = [amount for rank in of if (amount := granted(rank)) is not None]
        if not grants:
            raise NotModelledError(f"the pool's bytes on pipeline stage {stage} are not in the log")
        found.append(min(grants, key=lambda amount: amount.bytes))
    return tuple(found)


def _release(server: Server, ranks: tuple[Rank, ...]) -> Release:
    """The release, if what the log prints is what that release prints: forks carry numbers of their own."""
    at = vllm_facts.modelled_release(server.framework_version)
    rules = {e.detail.get("tokens_rule") for rank in ranks for e in rank.entries if e.account == "kv_cache/pool"}
    for told in rules & set(_RULES):
        if vllm_facts.token_rule(at) not in _RULES[str(told)]:
            raise NotModelledError(
                f"vLLM {server.framework_version} is a build whose printed tokens are not that release's"
            )
    return at


def _printed_block(ranks: tuple[Rank, ...]) -> int | None:
    """The block size that the log prints for a hybrid's pool."""
    for rank in ranks:
        for entry in rank.entries:
            if entry.account == "kv_cache/pool" and isinstance(entry.detail.get("block_tokens"), int):
                return int(entry.detail["block_tokens"])
    return None


def _kv_dtype(server: Server) -> str:
    return normal_name(str(server.config.get("kv_cache_dtype") or "auto"))


def _state_dtypes(server: Server, arch: Architecture) -> tuple[str, str]:
    named = server.config.get("state_dtype")
    if isinstance(named, str) and normal_name(named) != "auto":
        return normal_name(model_dtype(server, arch)), normal_name(named)
    return default_dtypes(
        msgspec.structs.replace(arch, dtype=model_dtype(server, arch)), "vllm", server.framework_version
    )


def _pool(
    server: Server, arch: Architecture, parallel: Parallel, at: Release, ranks: tuple[Rank, ...]
) -> tuple[Pool, tuple[str, ...]]:
    """The pool's shape: the plain reading, or the one of several that gives the printed block size."""
    printed = _printed_block(ranks)
    refusal: NotModelledError | None = None
    for readings in _readings(server, ranks, at):
        found: dict[tuple[Any, ...], tuple[Pool, tuple[str, ...]]] = {}
        for settings, assumed in readings:
            try:
                pool, more = _planned(server, arch, parallel, settings)
            except NotModelledError as error:
                refusal = refusal or error
                continue
            if len(readings) == 1 or printed == pool.block.tokens:
                key = (pool.bytes_per_block, pool.groups, vllm.request_blocks(pool, settings.max_model_len))
                found.setdefault(key, (pool, (*assumed, *more)))
        if len(found) == 1:
            return next(iter(found.values()))
        if len(readings) == 1 and found:
            break
    raise refusal or NotModelledError("no reading of the settings gives the printed block size")


def _readings(server: Server, ranks: tuple[Rank, ...], at: Release) -> Iterator[list[tuple[Settings, tuple[str, ...]]]]:
    """Settings to try: what the log says; then, where that is refused, each value of what it leaves open."""
    config = server.config
    length = config.get("context_length") or ranks[0].capacity.concurrency.tokens_per_request
    if not isinstance(length, int) or length < 1:
        raise NotModelledError("the maximum model length is not in the log")
    batched, page = config.get("chunked_prefill_tokens"), config.get("page_size")
    backend = str((config.get("backends_as_printed") or {}).get("attention") or "").upper()
    known = backend in vllm_facts.KERNEL_BLOCKS
    cpu = any(rank.gpu.kind == "cpu" for rank in ranks)
    plain = Settings(
        at,
        length,
        block_size=page if isinstance(page, int) and page > 0 else None,
        default_block=128 if cpu else 16,
        backend=backend if known else None,
        in_flight_tokens=vllm_facts.in_flight_tokens(at, batched) if isinstance(batched, int) else None,
        decode_context_parallel=config.get("dcp_size") or 1,
        prefill_context_parallel=config.get("pcp_size") or 1,
        hybrid_manager=not any(e.detail.get("window_as_full") for rank in ranks for e in rank.entries),
    )
    yield [(plain, ())]
    if _printed_block(ranks) is not None:
        replace = msgspec.structs.replace
        yield [
            (replace(plain, kernel_block=size, backend=None), ("kernel block from the printed block size",))
            for size in _KERNEL_BLOCKS
        ]
        yield [(replace(plain, state_chunk=size), ("state chunk from the printed block size",)) for size in _CHUNKS]
    if plain.in_flight_tokens is None:
        # What a server takes where no flag is given depends on the card; its usual two values bound the figure.
        yield [(msgspec.structs.replace(plain, in_flight_tokens=2048), ("2,048 batched tokens",))]


def _planned(
    server: Server, arch: Architecture, parallel: Parallel, settings: Settings
) -> tuple[Pool, tuple[str, ...]]:
    config, assumed = server.config, []
    draft_tokens = int(config.get("speculative_draft_tokens") or 0)
    draft = own_draft(server, arch)
    caching, mode = config.get("prefix_caching"), config.get("state_cache_mode")
    if arch.state_layers and caching is None:
        assumed.append("prefix caching as that version's default")
    conv = ssm = None
    if arch.state_layers:
        conv, ssm = _state_dtypes(server, arch)
    named = config.get("linear_attention_backend_prefill")
    pool = vllm.pool_of(
        msgspec.structs.replace(arch, dtype=model_dtype(server, arch)),
        parallel,
        server.framework_version,
        settings.max_model_len,
        kv_dtype=_kv_dtype(server),
        conv_dtype=conv,
        state_dtype=ssm,
        prefix_caching=caching if isinstance(caching, bool) else None,
        state_mode=cast(CacheMode, mode) if mode in {"none", "align", "all"} and caching is not False else None,
        prefill_backend=named if isinstance(named, str) else None,
        draft_tokens=draft_tokens,
        draft=draft,
        settings=settings,
    )
    return pool, tuple(assumed)


# ------------------------------------------------------------------------------------------------- models of one kind


def expected_dense(server: Server, arch: Architecture, rank: Rank) -> tuple[int, int, int, int]:
    """(bytes, least, most, bytes of a token) of a pool of full attention only, from its printed tokens: any release.

    Every rule prints `blocks * block size` then, or up to one block of each longest request less (0.20.1 and later).

    Raises:
        NotModelledError: other kinds of layers, other layers in the pool, or tokens not in the log.
    """
    if arch.state_layers or arch.sliding_layers or not arch.full_attention_layers:
        raise NotModelledError("not a model of full attention only")
    parallel = parallel_of(server)
    if (server.config.get("dcp_size") or 1) > 1 or (server.config.get("pcp_size") or 1) > 1:
        raise NotModelledError("context parallelism is not modelled here")
    draft = own_draft(server, arch)
    dtype = resolve_dtype(_kv_dtype(server), model_dtype(server, arch))
    if parallel.pp > 1 and rank.pp is None:
        raise NotModelledError("the rank's pipeline stage is not in the log")
    each = model_token_bytes(
        arch, parallel, dtype, framework="vllm", layers="full", stage=rank.pp if parallel.pp > 1 else None
    )
    if draft:
        each += model_token_bytes(arch, parallel, dtype, framework="vllm", layers="full", draft=True)
    block = _printed_block((rank,)) or server.config.get("page_size") or 16
    tokens = rank.capacity.kv_tokens
    if tokens is None and rank.capacity.kv_blocks:
        tokens = rank.capacity.kv_blocks * block
    if not tokens:
        raise NotModelledError("the pool's tokens are not in the log")
    length = rank.capacity.concurrency.tokens_per_request or server.config.get("context_length") or 0
    at = release(server.framework_version)
    rounded = 0.0
    if length and (at is None or at >= vllm_facts.EFFECTIVE_TOKENS_SINCE):
        rounded = (math.ceil(length / block) * block - length) / length
    size = tokens * each
    return size, int(size * (1 - SHARE)), int((size * (1 + rounded) + block * each) * (1 + SHARE)), each


# ------------------------------------------------------------------------------------------------------- for the ledger


def pool_detail(check: PoolCheck, entry: Entry, stage: int | None = None) -> dict[str, Any]:
    """`detail.modelled` of the pool's entry on a rank of pipeline stage `stage` (0-based, None without stages)."""
    pool, stage = check.pool, stage or 0
    block = pool.stage_block_bytes[stage]
    rule, meaning = vllm.meaning(pool)
    found: dict[str, Any] = {
        "bytes": None,
        "agrees": check.agrees,
        "block_tokens": pool.block.tokens,
        "block_bytes": block,
        "blocks": list(check.blocks),
        "tokens": list(check.tokens),
        "dtype": check.kv_dtype,
        "token_rule": rule,
        "tokens_mean": meaning,
    }
    try:
        size = vllm.blocks_from_figures(pool, tokens=check.logged_tokens).pool_bytes(pool)
        found["bytes"] = size.bytes * block // pool.bytes_per_block
    except NotModelledError:
        pass
    fits = vllm.physical_tokens(pool, check.middle)
    if fits is not None:
        found["tokens_that_fit"] = fits
    if check.assumed:
        found["assumed"] = list(check.assumed)
    if not check.agrees:
        found["causes"] = ["another element type", "layers of a draft model", "padding or a block size of that build"]
    if pool.hybrid and check.agrees:
        found["state"] = _state_detail(check, stage)
    return found


def _state_detail(check: PoolCheck, stage: int) -> dict[str, Any]:
    pool = check.pool
    cost = vllm.state_cost(pool, stage=stage)
    conv, temporal = check.state_bytes[stage]
    length = pool.settings.max_model_len
    filled = vllm.split_pool(pool, check.middle * pool.bytes_per_block)
    return {
        "request_bytes": cost.bytes,
        "live_bytes": cost.live,
        "request_blocks": cost.blocks,
        "padding_bytes": cost.page_padding + cost.layer_padding,
        "page_padding_percent": round(pool.block.padding_percent, 2),
        "mode": pool.settings.state_mode,
        "conv_dtype": check.conv_dtype,
        "dtype": check.state_dtype,
        "conv_bytes": conv,
        "ssm_bytes": temporal,
        "full_requests": round(filled.requests, 2),
        "full_request_tokens": length,
        "full_share": round(filled.state_bytes / (filled.state_bytes + filled.kv_bytes), 4),
    }


__all__ = ["PoolCheck", "check_pool", "expected_dense", "granted", "pool_detail"]
