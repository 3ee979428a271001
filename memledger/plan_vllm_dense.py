"""A logged vLLM pool that needs no architecture: where every layer keeps every token, bytes are in proportion to tokens.

The pool's bytes over its blocks give a block's bytes, and its tokens follow; what another setting gives is a matter of
that. Whether a pool is of this kind is told from the log's own figures (`dense_pool`), never from the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from memledger import words
from memledger.ledger import Entry, Rank
from memledger.model import vllm, vllm_facts
from memledger.model.architecture import NotModelledError
from memledger.model.dtypes import element_bits, normal_name
from memledger.model.versions import Release
from memledger.model.vllm import BlockSize, Group, Pool, Settings
from memledger.model.vllm_facts import EFFECTIVE_TOKENS_SINCE, SLIDING_GROUPS_SINCE

DEFAULT_BLOCK: Final = 16
"""Tokens of a block on CUDA where the log does not say (`--block-size`, every modelled release)."""
GROUPS_PRINTED_SINCE: Final[Release] = (0, 30, 0)
"""From here the sizes of the groups are printed wherever there is more than one."""
_HELPS: Final = "--model-config FILE would tell"
_PLAIN: Final = frozenset({"bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""KV types without scales or packed layouts beside them."""
_NEEDS_SHAPES: Final = ("tp_size", "pp_size", "dcp_size", "speculative_draft_tokens", "speculative_algorithm")
_NO_STATE: Final = ("state_dtype", "state_cache_mode", "state_checkpoint_blocks", "kernel_block_tokens")


class Draw(msgspec.Struct, frozen=True):
    """A reading of the logged pool: its shape, its blocks, and the bytes that it was cut from."""

    pool: Pool
    blocks: int
    available: int


def dense_pool(rank: Rank, config: Mapping[str, Any], at: Release, assumptions: list[str]) -> tuple[Draw, ...]:
    """The logged pool by its own figures, the likeliest reading first, then the ends of what its rounding allows.

    Raises:
        NotModelledError: the log does not show that every layer keeps every token, or a figure is missing; the message
            says which, and what would help.
    """
    entries = [e for e in rank.entries if e.account in {"kv_cache/pool", "host/kv_cache/pool"}]
    capacity = rank.capacity
    tokens, length = capacity.kv_tokens, config["context_length"]
    _refuse_other_layers(entries, config)
    if tokens is None:
        raise NotModelledError(f"the log has no line 'GPU KV cache size' or '# GPU blocks'; {_HELPS}")
    if not entries:
        raise NotModelledError(
            "the log does not print the pool's bytes ('Available KV cache memory', vLLM 0.9.1 and later), so what a token "
            f"takes is not known; {_HELPS}"
        )
    block = _block_tokens(rank, config, tokens)
    blocks = _blocks(rank, at, tokens, block, length, assumptions)
    size, tolerance = sum(e.bytes for e in entries), sum(e.tolerance_bytes for e in entries)
    least, most = max(1, size - tolerance), size + tolerance
    # A pool is cut in whole blocks: n = floor(bytes / bytes of a block).
    readings = [(size // blocks, size), (least // (blocks + 1) + 1, least), (most // blocks, most)]
    if min(each for each, _ in readings) < 1:
        raise NotModelledError(
            f"the pool's bytes are fewer than its tokens, so the two do not belong together; {_HELPS}"
        )
    low, high = (words.quotient(each, 0, block) for each in (readings[1][0], readings[2][0]))
    assumptions.append(
        f"from the log, the model's layers not being known: {words.gib(size)} GiB of pool for {tokens:,} tokens, so "
        f"{low if low == high else f'{_bare(low, high)} to {high}'} of KV a token (a block's remainder and the rounding "
        "decide); ranges hold that"
    )
    settings = Settings(at, length, block_size=block, decode_context_parallel=1)
    return tuple(Draw(_shape(settings, block, each), blocks, have) for each, have in readings)


def _bare(low: str, high: str) -> str:
    """`low` without its unit where both have the same."""
    unit = high.rpartition(" ")[2]
    return low.removesuffix(f" {unit}")


def _shape(settings: Settings, block: int, size: int) -> Pool:
    return Pool(settings, BlockSize(block, False, size), (Group("full", 1, 0, block, (size,)),))


def _refuse_other_layers(entries: list[Entry], config: Mapping[str, Any]) -> None:
    """Refuse a pool of which some line says that it holds more than tokens of full attention."""
    detail = {name: value for entry in entries for name, value in entry.detail.items()}
    found = None
    if detail.get("includes_recurrent_state") or detail.get("state_padding_percent") is not None:
        found = "'Setting attention block size ...': the pool holds recurrent state too"
    elif any(config.get(name) for name in ("state_dtype", "state_cache_mode", "state_backend", "state_replay")):
        found = "a line on the state's type, mode or backend: the pool holds recurrent state too"
    elif detail.get("groups") or detail.get("padding_layers") is not None:
        found = "'kv cache group sizes' or 'padding layers': layers of several kinds share the pool"
    elif config.get("sliding_window_backend"):
        found = "a sliding-window backend: such layers keep a part of the tokens only"
    if found is not None:
        raise NotModelledError(f"the log has {found}, and what a request takes follows from the layers; {_HELPS}")
    if (config.get("dcp_size") or 1) > 1 or (config.get("pcp_size") or 1) > 1:
        raise NotModelledError(f"context parallelism multiplies the printed tokens; {_HELPS}")


def _block_tokens(rank: Rank, config: Mapping[str, Any], tokens: int) -> int:
    """Tokens of a block: as printed, else the flag's or the default; not where the printed blocks contradict those."""
    if rank.capacity.kv_block_tokens is not None:
        return rank.capacity.kv_block_tokens
    blocks = rank.capacity.kv_blocks
    size: int = config.get("page_size") or DEFAULT_BLOCK
    # A backend may have blocks of its own size, which no line prints.
    return tokens // blocks if blocks and tokens % blocks == 0 and tokens >= blocks * size else size


def _blocks(rank: Rank, at: Release, tokens: int, block: int, length: int, assumptions: list[str]) -> int:
    """The pool's blocks, where the figures show that all of them hold tokens of every layer.

    * blocks printed: tokens are blocks times block size (several groups would share the blocks);
    * up to 0.9.0: always so, the engine had one block table for all layers;
    * 0.9.1 to 0.20.0: tokens over the longest length are the printed concurrency (window and state groups give more);
    * 0.20.1 and later the token figure is worked out from the concurrency, so it proves nothing: then either the groups
      would have been printed (0.30.0), or whole blocks of tokens are taken for the sign that they are.
    """
    printed, requests = rank.capacity.kv_blocks, rank.capacity.concurrency.requests
    if printed is not None:
        if printed * block == tokens:
            return printed
        raise NotModelledError(
            f"{tokens:,} tokens are not {printed:,} blocks of {block} tokens: layers of several kinds share the pool, and what "
            f"a request takes follows from them; {_HELPS}"
        )
    if tokens % block:
        raise NotModelledError(
            f"{tokens:,} tokens are not whole blocks of {block}: layers of several kinds may share the pool; {_HELPS}"
        )
    number = tokens // block
    if at < SLIDING_GROUPS_SINCE:
        return number
    agrees = requests is not None and f"{number / -(-length // block):.2f}" == f"{requests:.2f}"
    if requests is not None and not agrees:
        raise NotModelledError(
            f"{requests:.2f} requests of {length:,} tokens are not {tokens:,} tokens: layers of several kinds share the pool; "
            f"{_HELPS}"
        )
    if at < EFFECTIVE_TOKENS_SINCE:
        if requests is None:
            raise NotModelledError(
                "without the line 'Maximum concurrency for ... tokens per request' it can't be told whether all layers keep "
                f"every token; {_HELPS}"
            )
        return number
    if at >= GROUPS_PRINTED_SINCE:
        assumptions.append(
            "all tokens are kept by every layer: the log prints no group sizes, as it would for several groups"
        )
        return number
    if length % block:
        raise NotModelledError(
            f"the log does not show whether all layers keep every token (the line 'num_gpu_blocks is' would); {_HELPS}"
        )
    assumptions.append(
        "all tokens are kept by every layer: the printed tokens are whole blocks, and no line speaks of windows, state or groups "
        "(--model-config FILE would make it certain)"
    )
    return number


def reshaped(
    draw: Draw, config: Mapping[str, Any], wanted: Mapping[str, Any], length: int, not_modelled: list[str]
) -> Pool:
    """The pool's shape with other settings.

    Raises:
        NotModelledError: a setting whose effect follows from the model's layers.
    """
    needs = [name for name in _NEEDS_SHAPES if wanted.get(name) is not None]
    if needs:
        raise NotModelledError(f"{', '.join(needs)}: what that changes follows from the model's layers; {_HELPS}")
    not_modelled += [
        f"{name}: by its figures this pool holds no recurrent state" for name in _NO_STATE if name in wanted
    ]
    old, size = draw.pool.block.tokens, draw.pool.bytes_per_block
    block = wanted.get("page_size") or old
    size = size * block // old
    if "kv_cache_dtype" in wanted:
        now, then = (_bits(each, config) for each in (config.get("kv_cache_dtype"), wanted["kv_cache_dtype"]))
        size = size * then // now
    settings = msgspec.structs.replace(draw.pool.settings, max_model_len=length, block_size=block)
    return _shape(settings, block, max(1, size))


def _bits(name: Any, config: Mapping[str, Any]) -> int:
    """Bits of one element of a plain KV type; `auto` is the model's."""
    latent = [key for key, value in config.items() if "mla" in key.lower() or "mla" in str(value).lower()]
    if latent or config.get("kv_cache_format"):
        raise NotModelledError(f"kv_cache_dtype: the layout of latent KV changes with its type; {_HELPS}")
    found = normal_name(str(name)) if name is not None else "auto"
    if found == "auto":
        found = normal_name(str(config.get("dtype") or ""))
    if found not in _PLAIN:
        raise NotModelledError(
            f"kv_cache_dtype: {'the type now is not in the log' if not found else f'the layout of {found}'} is not known here; "
            f"{_HELPS}"
        )
    return element_bits(found)


def release_of(version: str) -> Release:
    """The release as three numbers; older ones than the modelled pools', too.

    Raises:
        NotModelledError: no version, or a newer one than was read.
    """
    from memledger.model.versions import release

    at = release(version)
    if at is None:
        raise NotModelledError(f"{version!r} is no vLLM version: --framework-version N")
    return at if OLDEST <= at < vllm_facts.OLDEST else vllm.modelled_release(version)


OLDEST: Final[Release] = (0, 4, 3)
"""The oldest release whose lines on blocks were read: blocks times block size are its tokens."""
