"""What was asked for: the request behind "Tried to allocate", and the tensor it decodes to where the arithmetic is exact.

The figure that torch prints is what its allocator asked the driver for (c10/cuda/CUDACachingAllocator.cpp,
`get_allocation_size`): requests up to 1 MiB take a block of 2 MiB, those below 10 MiB one of 20 MiB, all others are
rounded up to 2 MiB. `decode` names a tensor only where its size, from numbers that are known, rounds to the printed figure;
where more than three different tensors do, none is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from memledger.ledger import Server
from memledger.model.architecture import (
    Architecture,
    Attention,
    DenseMlp,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Mamba2,
    State,
)
from memledger.units import GIB, KIB, MIB, Amount

SMALL_LIMIT: Final = MIB
SMALL_BLOCK: Final = 2 * MIB
LARGE_LIMIT: Final = 10 * MIB
LARGE_BLOCK: Final = 20 * MIB
ROUNDING: Final = 2 * MIB
SMALLEST: Final = 512
"""c10/cuda/CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer, kRoundLarge, kMinBlockSize."""

CHUNK: Final = 64
"""Tokens of one chunk of the chunked linear-attention kernels (`fla/ops/chunk.py` of both engines, BT = 64)."""

MOST_CANDIDATES: Final = 3

WORKSPACES: Final[dict[str, tuple[int, str]]] = {
    "sglang": (384 * MIB, "SGLANG_FLASHINFER_WORKSPACE_SIZE, 384 MiB by default (SGLang 0.5.23)"),
    "vllm": (394 * MIB, "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, 394 MiB by default (vLLM 0.33)"),
}

_DTYPE_BYTES: Final = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_KV_BYTES: Final = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2}


class Rows(msgspec.Struct, frozen=True):
    """A number that a tensor's first dimension may have: `sequences` or `tokens`, and where it is from, in words."""

    kind: str
    count: int
    source: str


class Known(msgspec.Struct, frozen=True):
    """What is known of the server. Everything may be missing; nothing is assumed for it.

    `dtype`: the element type of activations (`bfloat16` ...). `kv_bytes_per_element`: None also where the KV cache has a
    type with scales.
    """

    architecture: Architecture | None = None
    dtype: str | None = None
    framework: str | None = None
    tp: int | None = None
    rows: tuple[Rows, ...] = ()
    kv_tokens: int | None = None
    kv_bytes_per_element: int | None = None
    page_size: int | None = None
    state_slots: int | None = None


class Candidate(msgspec.Struct, frozen=True):
    """A tensor whose size rounds to the printed figure. `arithmetic` writes it out; `in_traceback`: a frame names it, too."""

    what: str
    bytes: int
    arithmetic: str
    in_traceback: bool = False


class Decoded(msgspec.Struct, frozen=True):
    """The request behind a printed size: between `least_bytes` and `most_bytes`, and the tensors that it may have been."""

    least_bytes: int
    most_bytes: int
    text: str
    candidates: tuple[Candidate, ...] = ()


class _Tensor(NamedTuple):
    what: str
    bytes: int
    arithmetic: str
    frames: frozenset[str]


def request(asked: Amount) -> Decoded:
    """The sizes that the request behind a printed figure can have had."""
    size, slack = asked.bytes, asked.tolerance
    if abs(size - SMALL_BLOCK) <= slack:
        return Decoded(1, SMALL_LIMIT, "2.00 MiB stands for any request up to 1 MiB")
    if abs(size - LARGE_BLOCK) <= slack:
        # One of 18 MiB to 20 MiB rounds up to the same figure.
        return Decoded(
            SMALL_LIMIT + 1, LARGE_BLOCK, "20.00 MiB stands for a request between 1 and 10 MiB, or one of 18 to 20 MiB"
        )
    if _is_rounded(asked):
        most = (size + slack) // ROUNDING * ROUNDING
        least = max(LARGE_LIMIT, _up(size - slack, ROUNDING) - ROUNDING + 1)
        return Decoded(least, most, "rounded up to a multiple of 2 MiB by torch's allocator")
    return Decoded(
        max(1, size - slack - SMALLEST + 1), size + slack, "no multiple of 2 MiB: asked for without that rounding"
    )


def decode(asked: Amount, known: Known, frames: Iterable[str] = ()) -> Decoded:
    """What was asked, with at most three tensors that are exactly so large.

    Args:
        asked: the printed figure.
        known: the model and the settings as far as they are known.
        frames: names of functions and files of the traceback; a tensor that one of them makes comes alone.
    """
    plain = request(asked)
    if asked.bytes < LARGE_LIMIT or abs(asked.bytes - LARGE_BLOCK) <= asked.tolerance:
        return plain
    passed = {name.rpartition("/")[2] for name in frames}
    found: dict[tuple[str, int], Candidate] = {}
    for tensor in _tensors(known):
        if tensor.bytes > 0 and _fits(tensor.bytes, asked):
            told = bool(passed & tensor.frames)
            known_before = found.get((tensor.what, tensor.bytes))
            if known_before is None or (told and not known_before.in_traceback):
                found[tensor.what, tensor.bytes] = Candidate(tensor.what, tensor.bytes, tensor.arithmetic, told)
    candidates = [c for c in found.values() if c.in_traceback] or list(found.values())
    if len(candidates) > MOST_CANDIDATES:
        return plain
    return msgspec.structs.replace(plain, candidates=tuple(candidates))


def known_of(server: Server, architecture: Architecture | None, rows: Iterable[Rows] = ()) -> Known:
    """What a server's log and its model's configuration say. `rows`: more numbers (a batch's tokens, dummy requests)."""
    config: Mapping[str, Any] = server.config
    found = list(rows)
    for key, kind, source in (
        ("max_running_requests", "sequences", "the largest number of running requests"),
        ("chunked_prefill_tokens", "tokens", "the prefill chunk"),
        ("max_prefill_tokens", "tokens", "the largest prefill batch"),
    ):
        if (count := _whole(config.get(key))) is not None:
            found.append(Rows(kind, count, source))
    capacity = next((rank.capacity for rank in server.ranks if rank.capacity is not None), None)
    dtype = _dtype(config.get("dtype"), architecture)
    # Attention is then spread otherwise than the rest, and a stage has some of the layers only.
    spread = bool(config.get("dp_attention")) or (_whole(config.get("pp_size")) or 1) > 1
    cache = str(config.get("kv_cache_dtype"))
    return Known(
        architecture,
        dtype,
        server.framework,
        None if spread else _whole(config.get("tp_size")),
        tuple(dict.fromkeys(found)),
        _whole(capacity.kv_tokens) if capacity is not None else None,
        _DTYPE_BYTES.get(dtype or "") if cache in {"auto", "None"} else _KV_BYTES.get(cache),
        _whole(config.get("page_size")),
        _whole(capacity.state_slots) if capacity is not None else None,
    )


def _dtype(printed: object, architecture: Architecture | None) -> str | None:
    """The element type in effect: what the server says, else the model's own."""
    name = str(printed).removeprefix("torch.")
    if name in _DTYPE_BYTES:
        return name
    return architecture.dtype if architecture is not None and printed in {None, "auto"} else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _is_rounded(asked: Amount) -> bool:
    """Whether a multiple of 2 MiB is within the printed figure's rounding."""
    below = asked.bytes // ROUNDING * ROUNDING
    return asked.bytes - below <= asked.tolerance or below + ROUNDING - asked.bytes <= asked.tolerance


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _fits(size: int, asked: Amount) -> bool:
    """Whether a request of `size` bytes is printed as this figure."""
    if size < LARGE_LIMIT:
        return False
    step = ROUNDING if _is_rounded(asked) else SMALLEST
    return abs(_up(size, step) - asked.bytes) <= asked.tolerance


# ---------------------------------------------------------------------------------------------------------- the tensors

_LOGITS: Final = frozenset(
    {
        "compute_logits",
        "_get_logits",
        "_dummy_sampler_run",
        "sampler.py",
        "logits_processor.py",
        "sample",
        "compute_logprobs",
    }
)
_LINEAR: Final = frozenset(
    {
        "chunk_fwd_o",
        "chunk_gated_delta_rule_fwd",
        "chunk_gated_delta_rule_fwd_h",
        "chunk_gated_delta_rule",
        "chunk_kda_fwd",
        "fused_gdn_gating",
        "chunk_o.py",
        "chunk_delta_h.py",
    }
)
_MLP: Final = frozenset(
    {"fused_experts", "fused_experts_impl", "fused_moe", "silu_and_mul", "fused_moe.py", "activation.py"}
)
_POOLS: Final = frozenset({"_create_buffers", "_allocate_kv_cache", "_allocate_kv_cache_tensors", "init_memory_pool"})
_STATE: Final = frozenset({"_init_mamba_pool", "MambaPool", "HybridReqToTokenPool"})
_WORKSPACE: Final = frozenset(
    {"create_flashinfer_backend", "_get_workspace_buffer", "flashinfer_backend.py", "flashinfer.py"}
)


def _tensors(known: Known) -> Iterator[_Tensor]:
    if known.framework in WORKSPACES:
        size, source = WORKSPACES[known.framework]
        yield _Tensor("FlashInfer's workspace", size, f"{_mib(size)}: {source}", _WORKSPACE)
    if known.architecture is None:
        return
    for rows in known.rows:
        yield from _logits(known.architecture, rows, known)
        if rows.kind == "tokens" and known.tp is not None:
            yield from _activations(known.architecture, rows, known.tp, known.dtype or "")
    if known.tp is not None:
        yield from _pool_tensors(known, known.architecture, known.tp)


def _logits(arch: Architecture, rows: Rows, known: Known) -> Iterator[_Tensor]:
    tp = known.tp
    types = {"float32": 4}
    if known.dtype is not None and (width := _DTYPE_BYTES.get(known.dtype, 4)) != 4:
        types[known.dtype] = width
    for name, element in types.items():
        yield _product(
            f"logits in {name}", [(rows.count, _label(rows)), (arch.vocabulary, "words"), (element, "bytes")], _LOGITS
        )
        if tp is not None and tp > 1 and arch.vocabulary % tp == 0:
            words = (arch.vocabulary // tp, f"words of a rank (vocabulary / {tp})")
            yield _product(
                f"one rank's logits in {name}", [(rows.count, _label(rows)), words, (element, "bytes")], _LOGITS
            )


def _activations(arch: Architecture, rows: Rows, tp: int, dtype: str) -> Iterator[_Tensor]:
    element = _DTYPE_BYTES.get(dtype)
    if element is None:
        return
    lead, bytes_ = (rows.count, _label(rows)), (element, "bytes")
    yield _product("hidden states", [lead, (arch.hidden, "hidden size"), bytes_], frozenset())
    if element != 4:
        yield _product("hidden states in float32", [lead, (arch.hidden, "hidden size"), (4, "bytes")], frozenset())
    for layer in dict.fromkeys(arch.layers):
        if isinstance(layer.mlp, DenseMlp) and layer.mlp.intermediate % tp == 0:
            width = (layer.mlp.intermediate // tp, f"intermediate size{_share(tp)}")
            yield _product("the feed-forward block's activation", [lead, width, bytes_], _MLP)
            if layer.mlp.gated:
                yield _product(
                    "the feed-forward block's two projections", [lead, (2, "projections"), width, bytes_], _MLP
                )
        if isinstance(layer.attention, Attention) and layer.attention.query_heads % tp == 0:
            heads = (layer.attention.query_heads // tp, f"query heads{_share(tp)}")
            yield _product("attention output", [lead, heads, (layer.attention.v_dim, "per head"), bytes_], frozenset())
        if isinstance(layer.attention, LatentAttention) and layer.attention.query_heads % tp == 0:
            heads = (layer.attention.query_heads // tp, f"query heads{_share(tp)}")
            latent = (layer.attention.latent_dim, "latent size")
            yield _product("attention output in the latent space", [lead, heads, latent, bytes_], frozenset())
            yield _product("attention output", [lead, heads, (layer.attention.v_dim, "per head"), bytes_], frozenset())
        if layer.state is not None:
            yield from _linear_attention(layer.state, rows, tp, element)


def _linear_attention(state: State, rows: Rows, tp: int, element: int) -> Iterator[_Tensor]:
    sizes = _linear_sizes(state)
    if sizes is None or sizes[0] % tp:
        return
    heads, k_dim, v_dim = sizes
    lead, own = (rows.count, _label(rows)), (heads // tp, f"value heads{_share(tp)}")
    chunks = (-(-rows.count // CHUNK), f"chunks of {CHUNK} tokens")
    yield _product("linear-attention output", [lead, own, (v_dim, "per head"), (element, "bytes")], _LINEAR)
    yield _product(
        "linear-attention states of every chunk",
        [chunks, own, (k_dim, "key size"), (v_dim, "value size"), (element, "bytes")],
        _LINEAR,
    )
    for name, width in (("float32", 4), ("16 bits", 2)):
        yield _product(
            f"linear-attention matrix within the chunks in {name}",
            [lead, own, (CHUNK, "tokens of a chunk"), (width, "bytes")],
            _LINEAR,
        )


def _linear_sizes(state: State) -> tuple[int, int, int] | None:
    """(heads, key size, value size) of one layer's temporal state; None where it is none of heads times a matrix."""
    if isinstance(state, GatedDeltaNet):
        return state.v_heads, state.k_dim, state.v_dim
    if isinstance(state, KimiDeltaAttention):
        return state.heads, state.k_dim or state.head_dim, state.head_dim
    if isinstance(state, Mamba2):
        return state.heads, state.state_size, state.head_dim
    return None


def _pool_tensors(known: Known, arch: Architecture, tp: int) -> Iterator[_Tensor]:
    tokens_known = known.kv_tokens is not None and known.page_size is not None
    if known.framework == "sglang" and tokens_known and known.kv_bytes_per_element is not None:
        # One buffer per layer for keys, one for values (mem_cache/memory_pool.py, MHATokenToKVPool).
        tokens = ((known.kv_tokens or 0) + (known.page_size or 0), "token slots (with the padding page)")
        for layer in dict.fromkeys(arch.layers):
            if isinstance(layer.attention, Attention):
                heads = (max(1, layer.attention.kv_heads // tp), f"key-value heads{_share(tp)}")
                width = (known.kv_bytes_per_element, "bytes")
                yield _product("one layer's keys", [tokens, heads, (layer.attention.k_dim, "per head"), width], _POOLS)
    if known.state_slots is None:
        return
    yield from _state_tensors(known.state_slots, arch, tp)


def _state_tensors(known_slots: int, arch: Architecture, tp: int) -> Iterator[_Tensor]:
    layers: dict[State, int] = {}
    for layer in arch.layers:
        if layer.state is not None:
            layers[layer.state] = layers.get(layer.state, 0) + 1
    if len(layers) != 1:
        return
    state, count = next(iter(layers.items()))
    sizes = _linear_sizes(state)
    if sizes is None or sizes[0] % tp:
        return
    heads, k_dim, v_dim = sizes
    for slots, label in ((known_slots, "slots"), (known_slots + 1, "slots (one for padding)")):
        for name, width_ in (("float32", 4), ("16 bits", 2)):
            yield _product(
                f"recurrent state of all request slots and layers in {name}",
                [
                    (slots, label),
                    (count, "layers"),
                    (heads // tp, f"heads{_share(tp)}"),
                    (k_dim, "key size"),
                    (v_dim, "value size"),
                    (width_, "bytes"),
                ],
                _STATE,
            )


def _label(rows: Rows) -> str:
    return f"{rows.kind} ({rows.source})"


def _share(tp: int) -> str:
    return f" / {tp}" if tp > 1 else ""


def _product(what: str, factors: list[tuple[int, str]], frames: frozenset[str]) -> _Tensor:
    size = 1
    for count, _ in factors:
        size *= count
    words = " x ".join(f"{count:,} {label}" for count, label in factors)
    return _Tensor(what, size, f"{words} = {_mib(size)}", frames)


def _mib(size: int) -> str:
    if size >= 10 * GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / MIB:,.2f} MiB" if size >= MIB else f"{size / KIB:.1f} KiB"
