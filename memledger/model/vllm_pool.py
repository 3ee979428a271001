"""vLLM's block pool: from layers to one page size, groups, bytes per block, and blocks per request.

Every layer's cache is cut into pages of one size; layers are put in groups of equally many layers; one block is a page of
each layer of one group, and any group may use any block. So recurrent state has no pool of its own: it takes blocks of
the same pool as the KV cache, and nothing is set aside for requests that do not run.

Source: vLLM 0.9.2 to 0.33.0 `v1/core/kv_cache_utils.py` (0.33.0 `kv_cache_planning.py`), `v1/kv_cache_interface.py`,
`platforms/interface.py` (docs/arithmetic-vllm.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from memledger.model import vllm_facts as facts
from memledger.model.architecture import NotModelledError
from memledger.model.versions import Release
from memledger.model.vllm_facts import CacheMode

Kind = Literal["full", "sliding", "state"]


class CacheLayer(msgspec.Struct, frozen=True):
    """What one layer keeps on one GPU: attention (`token_bytes` per token) or recurrent state (`state_bytes`), not both.

    A layer with both (Falcon-H1), and a sparse-attention indexer's keys, are layers of their own here. `window`: tokens
    of a sliding window. `latent`: MLA. `layout` tells apart layers whose bytes agree but whose shapes do not (other head
    counts): they do not share a group. `stage`: pipeline stage, from 0.
    """

    token_bytes: int = 0
    state_bytes: int = 0
    window: int | None = None
    latent: bool = False
    layout: str = ""
    stage: int = 0

    @property
    def kind(self) -> Kind:
        """Full attention, sliding window or state."""
        if self.state_bytes:
            return "state"
        return "full" if self.window is None else "sliding"


class Settings(msgspec.Struct, frozen=True):
    """The server's settings that decide the pool's shape. Tokens throughout.

    * `block_size`: `--block-size`; `default_block`: the platform's or backend's (16 on CUDA, 128 on a CPU).
    * `backend`: attention backend as vLLM names it; `kernel_block`: its smallest kernel block where that is known itself;
      `other_kernel_blocks`: those of further backends in the same model.
    * `head_dim`, `blackwell` (compute capability 10.x): decide the alignment in 0.11.1 to 0.17.
    * `state_mode`, `state_chunk` (the model's chunk size), `state_block` (`--mamba-block-size`): in a hybrid, mode `all`
      needs one of the last two.
    * `checkpoint_blocks`, `checkpoint_alignment`: see `vllm_facts.checkpoint`.
    * `in_flight_tokens`: see `vllm_facts.in_flight_tokens`; needed for sliding windows.
    * `extra_window_tokens`: kept below the window for drafts with several modules.
    * `decode_context_parallel`, `prefill_context_parallel`: ranks that share a request's tokens.
    """

    release: Release
    max_model_len: int
    block_size: int | None = None
    default_block: int = 16
    backend: str | None = None
    kernel_block: int | None = None
    other_kernel_blocks: tuple[int, ...] = ()
    head_dim: int | None = None
    blackwell: bool | None = None
    state_mode: CacheMode = "none"
    state_chunk: int | None = None
    state_block: int | None = None
    draft_tokens: int = 0
    checkpoint_blocks: int = 0
    checkpoint_alignment: int = 1
    in_flight_tokens: int | None = None
    extra_window_tokens: int = 0
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    hybrid_manager: bool = True


class BlockSize(msgspec.Struct, frozen=True):
    """The attention block size and what it does to the state's page.

    `tokens`: of one block. `enlarged`: the engine raised it to cover the state ("Setting attention block size ...").
    `page_bytes`: one attention layer's page; `state_bytes`: what one layer's state needs of it (0 without state).
    `state_tokens`: tokens between kept states in mode `all`.
    """

    tokens: int
    enlarged: bool
    page_bytes: int
    state_bytes: int = 0
    state_tokens: int = 0

    @property
    def padding_percent(self) -> float:
        """Percent by which the state's page is larger than the state; 0 without state, or where they are equal."""
        if not self.state_bytes:
            return 0.0
        return 100 * (self.page_bytes - self.state_bytes) / self.state_bytes


class Group(msgspec.Struct, frozen=True):
    """A group of layers that share a block table.

    `layers`: real ones; `padding`: empty places up to the pool's group size. `block_tokens`: tokens of one of its blocks.
    `stage_bytes`: bytes of one block on each pipeline stage; `state_bytes`: state really stored in one, on each stage.
    """

    kind: Kind
    layers: int
    padding: int
    block_tokens: int
    stage_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...] = ()
    window: int | None = None


class PaddingLayers(msgspec.Struct, frozen=True):
    """Empty places in the last groups of a kind: "Add N padding layers, may waste at most X% KV cache memory"."""

    layers: int
    percent: float


class Pool(msgspec.Struct, frozen=True):
    """The pool's shape: how many bytes a block has, and who shares it."""

    settings: Settings
    block: BlockSize
    groups: tuple[Group, ...]
    padding: tuple[PaddingLayers, ...] = ()

    @property
    def stage_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block on each pipeline stage: those of the largest group there."""
        return tuple(max(sizes) for sizes in zip(*(group.stage_bytes for group in self.groups), strict=True))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on the GPU where it is largest."""
        return max(self.stage_block_bytes)

    @property
    def hybrid(self) -> bool:
        """Whether state and attention share the pool."""
        return len({"state" if group.kind == "state" else "tokens" for group in self.groups}) > 1

    def count(self, kind: Kind) -> int:
        """Groups of one kind."""
        return sum(group.kind == kind for group in self.groups)


class RequestBlocks(msgspec.Struct, frozen=True):
    """Blocks of one request in the groups of each kind."""

    full: int
    sliding: int
    state: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.full + self.sliding + self.state


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def block_size(layers: Sequence[CacheLayer], settings: Settings) -> BlockSize:
    """The block size of these layers, raised where a state would not fit in an attention page.

    `alignment * ceil(state / (alignment * token_bytes))`, at least the block size already chosen. In mode `all` the
    alignment also divides by the state's chunk.

    Raises:
        NotModelledError: what decides the alignment is not known, and it matters; the message gives the readings.
    """
    attention = [layer for layer in layers if layer.kind != "state"]
    state = max((layer.state_bytes for layer in layers), default=0)
    if settings.block_size is not None:
        start = settings.block_size
    elif settings.kernel_block is not None:
        taken = settings.default_block % settings.kernel_block == 0
        start = settings.default_block if taken else settings.kernel_block
    else:
        start = facts.preferred_block(settings.backend, default=settings.default_block)
    if not attention:
        return BlockSize(start, False, state, state, settings.state_block or start)
    token = attention[0].token_bytes
    if not state:
        return BlockSize(start, False, start * token)
    if settings.release < facts.STATE_BLOCKS_SINCE:
        raise NotModelledError(f"vLLM {facts.wording(settings.release)} keeps recurrent state outside the block pool")
    readings = {_covering(state, token, alignment, settings) for alignment in _alignments(attention, settings, start)}
    if len(readings) > 1:
        sizes = " or ".join(str(max(start, reading)) for reading in sorted(readings))
        raise NotModelledError(f"block size {sizes} tokens: the attention backend or the card decides and is not known")
    covering = readings.pop()
    tokens = max(start, covering)
    return BlockSize(tokens, covering > start, tokens * token, state, covering)


def _alignments(attention: list[CacheLayer], settings: Settings, start: int) -> tuple[int, ...]:
    latent = attention[0].latent
    at = settings.release
    if settings.kernel_block is None:
        return facts.alignments(
            at,
            latent=latent,
            block_size=start,
            user_block=settings.block_size is not None,
            backend=settings.backend,
            head_dim=settings.head_dim,
            blackwell=settings.blackwell,
        )
    if at < facts.BACKEND_ALIGNMENT_SINCE:
        return (settings.kernel_block,)
    least = 128 if latent and at >= facts.LATENT_128_SINCE else 1
    return (max(settings.kernel_block, start, least),)


def _covering(state: int, token: int, alignment: int, settings: Settings) -> int:
    """The smallest block size of this alignment whose page covers the state."""
    at = settings.release
    if settings.state_mode == "align" and facts.uses_checkpoint_alignment(at):
        alignment = math.lcm(alignment, settings.checkpoint_alignment)
    if settings.state_mode == "all":
        alignment = math.lcm(alignment, _chunk(settings))
    tokens = alignment * _ceil(state, alignment * token)
    if facts.uses_other_backends_alignment(at):
        step = math.lcm(*settings.other_kernel_blocks)
        tokens = step * _ceil(tokens, step)
    return tokens


def _chunk(settings: Settings) -> int:
    chunk = settings.state_block or settings.state_chunk
    if chunk is None:
        raise NotModelledError("state cache mode 'all' aligns to the model's chunk size, which is not known")
    return chunk


class _Spec(msgspec.Struct, frozen=True):
    """A layer once its block and page are known; what compares equal shares a bucket."""

    kind: Kind
    tokens: int
    page: int
    window: int | None
    layout: tuple[int, int, bool, str]


def _spec(layer: CacheLayer, settings: Settings, block: BlockSize, *, windows: bool) -> _Spec:
    layout = (layer.token_bytes, layer.state_bytes, layer.latent, layer.layout)
    if layer.kind == "state":
        return _Spec("state", _state_block_tokens(settings, block), block.page_bytes, None, layout)
    window = layer.window if windows else None
    kind: Kind = "full" if window is None else "sliding"
    return _Spec(kind, block.tokens, block.tokens * layer.token_bytes, window, layout)


def _state_block_tokens(settings: Settings, block: BlockSize) -> int:
    """Tokens between the states of a sequence: its whole length where only the last one is kept."""
    if settings.state_mode == "none":
        return settings.max_model_len
    return block.state_tokens if settings.state_mode == "all" else block.tokens


def _unified(specs: list[_Spec], settings: Settings) -> list[_Spec]:
    """All layers with the largest page: smaller ones get a larger block, or padding.

    Source: `unify_kv_cache_spec_page_size`.
    """
    page = max(spec.page for spec in specs)
    done = []
    for spec in specs:
        if spec.page == page:
            done.append(spec)
        elif spec.kind == "state" and facts.state_pages_can_be_padded(settings.release):
            done.append(msgspec.structs.replace(spec, page=page))
        elif spec.kind != "state" and page % spec.page == 0 and facts.unequal_pages_are_unified(settings.release):
            done.append(msgspec.structs.replace(spec, page=page, tokens=spec.tokens * (page // spec.page)))
        elif spec.kind != "state" and not spec.layout[2] and facts.attention_pages_can_be_padded(settings.release):
            done.append(msgspec.structs.replace(spec, page=page))
        else:
            raise NotModelledError(
                f"pages of {spec.page} and {page} bytes: how vLLM {facts.wording(settings.release)} unifies them is not known"
            )
    return done


def _uniform(specs: list[_Spec]) -> bool:
    """Whether one group holds them all: all full attention, or one window, or state only."""
    return len({(spec.kind, spec.window) for spec in specs}) == 1 and len({spec.tokens for spec in specs}) == 1


def plan(layers: Sequence[CacheLayer], settings: Settings) -> Pool:
    """The pool's shape for these layers, in the order in which the model has them.

    Raises:
        NotModelledError: no layers, or a combination whose arithmetic is not known.
    """
    if not layers:
        raise NotModelledError("no layer of this model keeps a cache")
    facts.check_mode(settings.release, settings.state_mode)
    _refuse_unknown(layers, settings)
    block = block_size(layers, settings)
    promoted = not settings.hybrid_manager and any(layer.kind == "full" for layer in layers)
    specs = [_spec(layer, settings, block, windows=not promoted) for layer in layers]
    stages = max(layer.stage for layer in layers) + 1
    if _uniform(specs):
        if len({spec.page for spec in specs}) > 1:
            _check_mixed_pages(settings.release, stages)
        return Pool(settings, block, (_group(list(zip(layers, specs, strict=True)), stages, 0),))
    specs = _unified(specs, settings)
    buckets: dict[_Spec, list[tuple[CacheLayer, _Spec]]] = {}
    for layer, spec in zip(layers, specs, strict=True):
        buckets.setdefault(spec, []).append((layer, spec))
    size = facts.group_layers(settings.release, tuple(len(bucket) for bucket in buckets.values()))
    groups: list[Group] = []
    padding: list[PaddingLayers] = []
    for bucket in buckets.values():
        missing = -len(bucket) % size
        if missing:
            padding.append(PaddingLayers(missing, missing / len(bucket) * 100))
        number = _ceil(len(bucket), size)
        groups.extend(_group(bucket[first::number], stages, size) for first in range(number))
    return Pool(settings, block, tuple(groups), tuple(padding))


def _check_mixed_pages(at: Release, stages: int) -> None:
    """One group of pages of several sizes: from 0.11.0; in 0.16.0 every pipeline stage was charged for all layers."""
    if at < (0, 11, 0) or (stages > 1 and not facts.mixed_pages_over_stages(at)):
        raise NotModelledError(
            f"vLLM {facts.wording(at)}: pages of several sizes in one group are modelled from 0.11.0, "
            "over pipeline stages from 0.27.1"
        )


def _group(members: list[tuple[CacheLayer, _Spec]], stages: int, size: int) -> Group:
    pages, stored = [0] * stages, [0] * stages
    for layer, spec in members:
        pages[layer.stage] += spec.page
        stored[layer.stage] += layer.state_bytes
    spec = members[0][1]
    return Group(
        spec.kind,
        len(members),
        max(0, size - len(members)),
        spec.tokens,
        tuple(pages),
        tuple(stored) if spec.kind == "state" else (),
        spec.window,
    )


def _refuse_unknown(layers: Sequence[CacheLayer], settings: Settings) -> None:
    at = settings.release
    kinds = {layer.kind for layer in layers}
    windows = {layer.window for layer in layers if layer.kind == "sliding"}
    if at < facts.SLIDING_GROUPS_SINCE and (len(kinds) > 1 or len(windows) > 1):
        raise NotModelledError(f"vLLM {facts.wording(at)}: layers of several kinds are modelled from 0.9.1")
    if "state" in kinds and not settings.hybrid_manager:
        raise NotModelledError("recurrent state with --disable-hybrid-kv-cache-manager does not start")
    if not settings.hybrid_manager and "full" not in kinds and len(windows) > 1:
        raise NotModelledError("several sliding windows with --disable-hybrid-kv-cache-manager do not start")
    if len(kinds) > 1 and at < (0, 11, 0) and any(layer.stage for layer in layers):
        raise NotModelledError(f"vLLM {facts.wording(at)}: groups over pipeline stages are modelled from 0.11.0")
    if context_parallel(settings) > 1 and windows:
        raise NotModelledError("decode context parallelism with sliding windows does not start")


def context_parallel(settings: Settings) -> int:
    """Ranks that share one request's tokens: decode times prefill up to 0.19.1, decode alone from 0.27.1."""
    at, prefill = settings.release, settings.prefill_context_parallel
    if at < (0, 10, 2) and settings.decode_context_parallel > 1:
        raise NotModelledError(f"vLLM {facts.wording(at)} has no decode context parallelism (0.10.2 and later)")
    if prefill > 1 and (0, 19, 1) < at < (0, 27, 1):
        raise NotModelledError(
            f"vLLM {facts.wording(at)}: prefill context parallelism's share of the cache is not known"
        )
    return settings.decode_context_parallel * (prefill if at <= (0, 19, 1) else 1)


def request_blocks(pool: Pool, tokens: int, *, resident: bool = False) -> RequestBlocks:
    """Blocks that one request of `tokens` tokens takes at most.

    * full attention: `ceil(tokens / block)` for each group (tokens divided by context parallel ranks first);
    * sliding window: `ceil(min(window - 1 + extra + tokens in flight, tokens) / block) + 1`;
    * state: see `vllm_facts.state_blocks`; `resident` counts what is allocated, not what the concurrency figure counts.

    Source: the specs' `max_memory_usage_bytes`.
    """
    settings = pool.settings
    shared = _ceil(tokens, context_parallel(settings))
    full = sliding = state = 0
    for group in pool.groups:
        if group.kind == "full":
            full += _ceil(shared, group.block_tokens)
        elif group.kind == "sliding":
            sliding += _window_blocks(group, settings, tokens)
        else:
            state += facts.state_blocks(
                settings.release,
                settings.state_mode,
                tokens,
                block_tokens=group.block_tokens,
                draft_tokens=settings.draft_tokens,
                checkpoint_blocks=settings.checkpoint_blocks,
                resident=resident,
            )
    return RequestBlocks(full, sliding, state)


def _window_blocks(group: Group, settings: Settings, tokens: int) -> int:
    if settings.in_flight_tokens is None:
        raise NotModelledError("a sliding window's blocks depend on max_num_batched_tokens, which is not known")
    held = (group.window or 0) - 1 + settings.extra_window_tokens + settings.in_flight_tokens
    return _ceil(min(held, tokens), group.block_tokens) + 1


def blocks(pool: Pool, available: int | Sequence[int]) -> int:
    """Blocks in a pool of `available` bytes per GPU (one figure for all stages, or one each): whole ones, the fewest of all.

    One of them is the null block, which no request gets.
    """
    sizes = pool.stage_block_bytes
    given = (available,) * len(sizes) if isinstance(available, int) else tuple(available)
    if len(given) != len(sizes):
        raise NotModelledError(f"{len(given)} amounts of memory for {len(sizes)} pipeline stages")
    return max(0, min(have // size for have, size in zip(given, sizes, strict=True)))
