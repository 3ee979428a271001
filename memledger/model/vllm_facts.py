"""What differs between vLLM releases: defaults, alignments, counting rules. Tables and small functions, no sizes of models.

Read in vLLM's Python sources of 0.9.2, 0.10.2, 0.11.2, 0.14.1, 0.15.0, 0.15.1, 0.16.0, 0.27.1 to 0.32.0, and for the
releases between and for 0.33.0 in the notes behind docs/arithmetic-vllm.md.
"""

from __future__ import annotations

from typing import Final, Literal

from memledger.model.architecture import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Lightning,
    Mamba1,
    Mamba2,
    NotModelledError,
    ShortConvolution,
    State,
)
from memledger.model.versions import Release, release
from memledger.units import GIB

CacheMode = Literal["none", "align", "all"]
"""What the state groups keep: one state per running request; states at block boundaries; a state per block."""

TokenRule = Literal["slots", "blocks_per_group", "effective"]
"""What "GPU KV cache size: N tokens" counts; see `token_rule`."""

OLDEST: Final[Release] = (0, 8, 0)
NEWEST: Final[Release] = (0, 33, 0)

SLIDING_GROUPS_SINCE: Final[Release] = (0, 9, 1)
STATE_BLOCKS_SINCE: Final[Release] = (0, 10, 0)
STATE_PER_BLOCK_SINCE: Final[Release] = (0, 11, 1)
CACHE_MODES_SINCE: Final[Release] = (0, 15, 0)
BACKEND_ALIGNMENT_SINCE: Final[Release] = (0, 20, 0)
LATENT_128_SINCE: Final[Release] = (0, 27, 0)
CHECKPOINT_BLOCKS_SINCE: Final[Release] = (0, 29, 0)
NULL_BLOCK_CHECKED_SINCE: Final[Release] = (0, 29, 0)
DRAFT_BLOCKS_IN_ALL_SINCE: Final[Release] = (0, 27, 1)
ALL_MODE_GONE_SINCE: Final[Release] = (0, 32, 0)
EFFECTIVE_TOKENS_SINCE: Final[Release] = (0, 20, 1)
IN_FLIGHT_BATCHES_SINCE: Final[Release] = (0, 26, 0)
KV_CACHE_MEMORY_FLAG_SINCE: Final[Release] = (0, 10, 2)
PREFIX_CACHING_FOR_HYBRIDS_SINCE: Final[Release] = (0, 28, 0)

_CHECKPOINT_ALIGNMENT_SINCE: Final[Release] = (0, 33, 0)
_OTHER_BACKENDS_ALIGN_SINCE: Final[Release] = (0, 32, 0)
_PADDED_ATTENTION_PAGES_SINCE: Final[Release] = (0, 29, 0)
_UNEQUAL_PAGES_SINCE: Final[Release] = (0, 14, 0)
_PADDED_STATE_PAGES_SINCE: Final[Release] = (0, 27, 1)
_MIXED_STAGES_SINCE: Final[Release] = (0, 27, 1)

KERNEL_BLOCKS: Final[dict[str, tuple[int, ...]]] = {
    "FLASH_ATTN": (16,),
    "TRITON_ATTN": (16,),
    "FLEX_ATTENTION": (16,),
    "FLASHINFER": (16, 32, 64),
    "TURBOQUANT": (16, 32, 64, 128),
    "TRITON_MLA": (16,),
    "FLASH_ATTN_MLA": (16,),
    "FLASHINFER_MLA": (32, 64),
    "TOKENSPEED_MLA": (32, 64),
    "FLASHMLA": (64,),
    "FLASHMLA_SPARSE": (64,),
    "FLASH_ATTN_MLA_SPARSE": (64,),
    "FLASHINFER_MLA_SPARSE": (32,),
    "CUTLASS_MLA": (128,),
    "CPU_ATTN": (32,),
}
"""Block sizes (or the step between them) that an attention backend's kernels take, in tokens, 0.33.0."""


def modelled_release(version: str | Release | None) -> Release:
    """The release as three numbers, if its arithmetic is known here.

    Raises:
        NotModelledError: no version, one that cannot be read, or one outside 0.8.0 to 0.33.x.
    """
    at = version if isinstance(version, tuple) else release(version)
    if at is None:
        raise NotModelledError("the vLLM version is not known, and its pool arithmetic differs between versions")
    if at < OLDEST:
        raise NotModelledError(f"vLLM {wording(at)}: pool arithmetic before {wording(OLDEST)} is not modelled")
    if at[:2] > NEWEST[:2]:
        raise NotModelledError(f"vLLM {wording(at)}: the newest version whose arithmetic was read is {wording(NEWEST)}")
    return at


def wording(at: Release) -> str:
    """`0.33.0`."""
    return ".".join(map(str, at))


def token_rule(at: Release) -> TokenRule:
    """What the printed token figure counts.

    * `slots`, up to 0.9.0: blocks times block size.
    * `blocks_per_group`, 0.9.1 to 0.20.0: blocks // groups times the smallest block size, times context parallel size.
    * `effective`, from 0.20.1: `int(concurrency * max_model_len)`.
    """
    if at >= EFFECTIVE_TOKENS_SINCE:
        return "effective"
    return "blocks_per_group" if at >= SLIDING_GROUPS_SINCE else "slots"


def group_layers(at: Release, buckets: tuple[int, ...]) -> int:
    """Layers of one group, for buckets of these many layers of one kind each.

    The smallest bucket; the largest instead where it is less than 1.5 times the smallest (0.18.0 and later; 1.25 times in
    0.12.0 to 0.17.1; never in 0.9.1 to 0.11.2). Source: `_get_kv_cache_groups_uniform_page_size`.
    """
    small, large = min(buckets), max(buckets)
    if at >= (0, 18, 0):
        return large if 2 * large < 3 * small else small
    if at >= (0, 12, 0):
        return large if 4 * large < 5 * small else small
    return small


def attention_pages_can_be_padded(at: Release) -> bool:
    """Whether attention layers whose page does not divide the largest one are padded to it (not latent ones).

    Depended on the backend in 0.27.1 and 0.28.0 and is not known before: False there.
    """
    return at >= _PADDED_ATTENTION_PAGES_SINCE


def unequal_pages_are_unified(at: Release) -> bool:
    """Whether layers of several kinds may have pages of several sizes. Not in 0.11.2; not read for 0.12 and 0.13."""
    return at >= _UNEQUAL_PAGES_SINCE


def state_pages_can_be_padded(at: Release) -> bool:
    """Whether state is padded a second time, to a larger page of another attention layer (a draft's).

    Yes in 0.27.1 and later; in 0.16.0 and before the server does not start; between it is not known: False there.
    """
    return at >= _PADDED_STATE_PAGES_SINCE


def mixed_pages_over_stages(at: Release) -> bool:
    """Whether one group of unequal pages is charged by stage. In 0.16.0 every stage was charged for all layers."""
    return at >= _MIXED_STAGES_SINCE


def smallest_kernel_block(backend: str) -> int:
    """The smallest block of an attention backend's kernels, in tokens (`KERNEL_BLOCKS`)."""
    try:
        return min(KERNEL_BLOCKS[backend.upper()])
    except KeyError:
        raise NotModelledError(f"the kernel block sizes of attention backend {backend!r} are not known") from None


def preferred_block(backend: str | None, *, default: int = 16) -> int:
    """The block size chosen for an attention backend when `--block-size` is not given: the default where its kernels take it.

    Source: `AttentionBackend.get_preferred_block_size` (0.20 and later; before, fixed sizes of the same backends).
    """
    if backend is None:
        return default
    smallest_kernel_block(backend)
    sizes = KERNEL_BLOCKS[backend.upper()]
    return default if any(default % size == 0 for size in sizes) else min(sizes)


def alignments(
    at: Release,
    *,
    latent: bool,
    block_size: int,
    user_block: bool,
    backend: str | None = None,
    head_dim: int | None = None,
    blackwell: bool | None = None,
) -> tuple[int, ...]:
    """The alignments, in tokens, that a hybrid's block size may have: one, or several where too little is known.

    * 0.20.0 and later: the larger of the backend's smallest kernel block and the block size already chosen (16, the
      backend's, a CPU's 128, or `--block-size`); 128 at least for latent attention from 0.27.0.
    * 0.11.1 to 0.19.1: latent attention 128 with CUTLASS_MLA, else 64; other attention 16, but 32 for head dimension 256
      on Blackwell data-centre cards with FlashInfer, requested or by default (up to 0.17.1).
    * 0.10.0 to 0.11.0: 16.

    `block_size` is the size before alignment, `user_block` says whether the user gave it.

    Source: `platforms/interface.py: _align_hybrid_block_size`; before 0.20 `model_executor/models/config.py`.
    """
    if at >= BACKEND_ALIGNMENT_SINCE:
        if backend is not None:
            kernels: tuple[int, ...] = (smallest_kernel_block(backend),)
        else:
            kernels = (16, 32, 64, 128) if latent else (16,)
        floor = max(block_size, 128) if latent and at >= LATENT_128_SINCE else block_size
        if latent and backend is None and not user_block and at < LATENT_128_SINCE:
            floor = 0
        return tuple(sorted({max(kernel, floor) for kernel in kernels}))
    if at < STATE_PER_BLOCK_SINCE:
        return (16,)
    if latent:
        if backend is None:
            return (64, 128)
        return (128,) if backend.upper() == "CUTLASS_MLA" else (64,)
    flashinfer = backend is None or backend.upper() == "FLASHINFER"
    if at >= (0, 18, 0) or not flashinfer or blackwell is False or (head_dim is not None and head_dim != 256):
        return (16,)
    if blackwell and head_dim == 256 and at < (0, 17, 0):
        return (32,)
    return (16, 32)


def uses_checkpoint_alignment(at: Release) -> bool:
    """Whether a layer's prefill checkpoint alignment also aligns the block size (mode `align`)."""
    return at >= _CHECKPOINT_ALIGNMENT_SINCE


def uses_other_backends_alignment(at: Release) -> bool:
    """Whether the block size is also rounded up to every other attention backend's smallest kernel block."""
    return at >= _OTHER_BACKENDS_ALIGN_SINCE


def state_blocks(
    at: Release,
    mode: CacheMode,
    tokens: int,
    *,
    block_tokens: int,
    draft_tokens: int = 0,
    checkpoint_blocks: int = 0,
    resident: bool = False,
) -> int:
    """Blocks that one request of `tokens` tokens takes in each state group.

    As the engine counts them for its concurrency figure; `resident`: as it allocates them at most, which is more in
    0.10 to 0.14 with speculative decoding (the figure printed there counts no draft blocks).

    * none: `1 + draft_tokens`; align: `2 + draft_tokens`, and from 0.29.0 `+ checkpoint_blocks`.
    * all (up to 0.31): a state for every block of the sequence; `+ draft_tokens` from 0.27.1, not in 0.16.0.
    * 0.10.0 to 0.11.0: 1; 0.11.1 to 0.14.x: 1 without prefix caching, else (here: mode `all`) one for every block.

    Source: `v1/kv_cache_interface.py: MambaSpec.max_memory_usage_bytes`.
    """
    check_mode(at, mode)
    extra = draft_tokens if resident else 0
    if mode == "all":
        each_block = -(-tokens // block_tokens)
        if at >= DRAFT_BLOCKS_IN_ALL_SINCE:
            return each_block + draft_tokens
        if draft_tokens and at >= (0, 16, 1):
            raise NotModelledError(f"draft blocks in state cache mode 'all' are not known for vLLM {wording(at)}")
        return each_block + extra
    if at < CACHE_MODES_SINCE:
        return 1 + extra
    if mode == "none":
        return 1 + draft_tokens
    return 2 + draft_tokens + (checkpoint_blocks if at >= CHECKPOINT_BLOCKS_SINCE else 0)


def check_mode(at: Release, mode: CacheMode) -> None:
    """Refuse a state cache mode that the release does not have."""
    if mode == "align" and at < CACHE_MODES_SINCE:
        raise NotModelledError(f"vLLM {wording(at)} has no state cache mode 'align' (0.15.0 and later)")
    if mode == "all" and not STATE_PER_BLOCK_SINCE <= at < ALL_MODE_GONE_SINCE:
        raise NotModelledError(f"vLLM {wording(at)} has no state cache mode 'all' (0.11.1 to 0.31)")


def checkpoint(at: Release, state: State, prefill_backend: str | None = None) -> tuple[tuple[int, int], ...]:
    """(blocks, alignment in tokens) of a layer's prefill checkpoint: one reading, or two where the backend decides.

    From 0.29.0, in mode `align`: Mamba-2 always (1, 1); GDN with the FlashInfer prefill backend (1, 64); KDA with
    FlashKDA (1, 16); anything else none. `prefill_backend`: `flashinfer`, `flashkda`, `triton`, `cutedsl`.
    """
    none = (0, 1)
    if at < CHECKPOINT_BLOCKS_SINCE:
        return (none,)
    if isinstance(state, Mamba2):
        return ((1, 1),)
    exporting = {GatedDeltaNet: ("flashinfer", (1, 64)), KimiDeltaAttention: ("flashkda", (1, 16))}.get(type(state))
    if exporting is None:
        return (none,)
    name, cost = exporting
    if prefill_backend is None:
        return (none, cost)
    return (cost,) if prefill_backend.lower() == name else (none,)


def default_prefix_caching(at: Release, *, hybrid: bool) -> bool:
    """Whether prefix caching is on when no flag says so: always for models of attention only, for hybrids from 0.28.0.

    Source: `engine/arg_utils.py: _set_default_chunked_prefill_and_prefix_caching_args`.
    """
    return not hybrid or at >= PREFIX_CACHING_FOR_HYBRIDS_SINCE


def default_cache_mode(at: Release, state: State | None, *, prefix_caching: bool) -> CacheMode:
    """The state cache mode without `--mamba-cache-mode`.

    `none` without prefix caching. With it: `align` from 0.28.0; in 0.15.0 to 0.27.1 `all` where the model supports it
    (Mamba-1 and Mamba-2), else `align`; in 0.11.1 to 0.14.x what is here called `all`, for the same models.

    Raises:
        NotModelledError: the release has no prefix caching for such a model.
    """
    if (
        not prefix_caching
        or state is None
        or (isinstance(state, ShortConvolution | Lightning) and at < CACHE_MODES_SINCE)
    ):
        return "none"
    supports_all = isinstance(state, Mamba1 | Mamba2)
    if at >= PREFIX_CACHING_FOR_HYBRIDS_SINCE:
        return "align"
    if at >= CACHE_MODES_SINCE:
        return "all" if supports_all else "align"
    if at >= STATE_PER_BLOCK_SINCE and supports_all:
        return "all"
    return "none"


def default_utilization(at: Release) -> float:
    """`--gpu-memory-utilization` when not given: 0.9 up to 0.19.1, 0.92 from 0.20.0."""
    return 0.92 if at >= (0, 20, 0) else 0.9


def graph_estimate_charged(at: Release) -> bool | None:
    """Whether the CUDA graph estimate is taken from the budget by default.

    No up to 0.19.1 (there is none before 0.18.0), yes from 0.20.0; None for development builds between.
    """
    if at >= (0, 20, 0):
        return True
    return False if at <= (0, 19, 1) else None


def default_batched_tokens(at: Release, device_bytes: int, device_name: str = "") -> int:
    """`--max-num-batched-tokens` of a server when not given, on CUDA: 8192 from 70 GiB (A100 excepted), else 2048.

    From 0.28.0 also 16384 from 160 GiB. Source: `engine/arg_utils.py: get_batch_defaults` (0.9.2 to 0.32.0).
    """
    if device_bytes >= 160 * GIB and at >= (0, 28, 0):
        return 16384
    return 8192 if device_bytes >= 70 * GIB and "a100" not in device_name.lower() else 2048


def in_flight_tokens(at: Release, batched_tokens: int, batches: int = 1) -> int:
    """Tokens scheduled and not yet settled, which sliding-window layers must hold: `max_num_batched_tokens`.

    From 0.26.0 times the number of batches in flight: 2 with asynchronous scheduling, the pipeline's depth without.
    Source: `config/vllm.py: max_in_flight_tokens`.
    """
    return batched_tokens * batches if at >= IN_FLIGHT_BATCHES_SINCE else batched_tokens
