"""Weights: bytes on one GPU, and parameters of the whole model.

The sizes of the matrices are those of the models' own definitions; how they are divided follows both engines'
`layers/linear.py` (docs/arithmetic.md, "Weights"). Small vectors are counted where they are more than noise.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Final, Literal

import msgspec

from memledger.model.architecture import (
    Architecture,
    Attention,
    DenseMlp,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    Lightning,
    Mamba1,
    Mamba2,
    MoeMlp,
    NotModelledError,
    Parallel,
    Quantization,
    ShortConvolution,
    State,
)
from memledger.model.dtypes import element_bytes
from memledger.model.kv import kv_heads_per_gpu
from memledger.model.layers import stage_sizes
from memledger.model.state import mamba2_groups
from memledger.units import MIB, Amount

Framework = Literal["sglang", "vllm"]
Part = Literal[
    "embedding", "attention", "state", "experts", "feed_forward", "norms", "rope", "vision", "draft", "allocator"
]

VOCABULARY_MULTIPLE: Final = 64
"""Both engines pad the vocabulary to a multiple of 64 (`DEFAULT_VOCAB_PADDING_SIZE`) and of the tensor parallel size."""

VLLM_TOLERANCE: Final = Fraction(2, 1000)
"""vLLM prints a difference of allocated bytes: exact but for small tensors."""
SGLANG_ABOVE: Final = Fraction(50, 1000)
SGLANG_BELOW: Final = Fraction(5, 1000)
"""SGLang prints a difference of free memory: allocator segments and library state come on top."""
SGLANG_LIBRARIES: Final = 256 * 2**20
"""Library state that comes up with the first kernels does not grow with the model, so small ones exceed the share above."""
REPACKED_ABOVE: Final = Fraction(15, 1000)
"""4-bit kernels lay weights and scales out anew, padded: public logs show up to 1.2 % more than the stored bytes."""
NAMED_ONLY_TOLERANCE: Final = Fraction(30, 1000)
"""When only the name says how the weights are quantised, group size and skipped modules are assumed."""
VISION_TOLERANCE: Final = Fraction(15, 100)
FINEST_GROUP: Final = 32
"""Weights that share a scale in the finest 4-bit copies; known by name only, anything from that to one scale per channel."""

LARGE_ALLOCATION: Final = 10 * MIB
SEGMENT_MULTIPLE: Final = 2 * MIB
UNSPLIT: Final = MIB
"""torch's caching allocator (`c10/cuda/CUDACachingAllocator.cpp`, 2.1 to 2.9: `kMinLargeAlloc`, `kRoundLarge`, `kSmallSize`)."""

UNKNOWN_POSITIONS: Final = 2**18
"""Rows of a rotary table that the range allows for where the model's context length is not known."""

MARLIN_INTERMEDIATE: Final = 128
MARLIN_HIDDEN: Final = 256
"""The Marlin kernel pads MXFP4 experts to these multiples (vLLM `quantization/mxfp4.py`, 0.13)."""


class Matrix(msgspec.Struct, frozen=True):
    """A weight on one GPU: `elements`, and whether a quantised checkpoint quantises it. `name` as in the checkpoint.

    `tensors`: shares of the tensors in which the engine holds it (experts: gate and up in one, down in another).
    """

    part: Part
    name: str
    elements: int
    linear: bool = True
    float32: bool = False
    tensors: tuple[int, ...] = (1,)


class WeightBytes(msgspec.Struct, frozen=True):
    """Modelled weights of one GPU in bytes; the logged figure should lie between `low` and `high`. `parts` sum to `bytes`."""

    bytes: int
    low: int
    high: int
    parts: dict[Part, int]
    notes: tuple[str, ...] = ()

    @property
    def amount(self) -> Amount:
        """The figure with the larger of its two tolerances."""
        return Amount(self.bytes, max(self.high - self.bytes, self.bytes - self.low))


def _share(count: int, tp: int) -> int:
    if count % tp:
        raise NotModelledError(f"a dimension of {count} does not divide by {tp} GPUs")
    return count // tp


def _attention(a: Attention, hidden: int, tp: int) -> Iterator[Matrix]:
    queries = _share(a.query_heads, tp)
    kv = kv_heads_per_gpu(a.kv_heads, tp)
    wide = queries * a.k_dim * (2 if a.gated_output else 1)
    yield Matrix("attention", "self_attn.q_proj", hidden * wide)
    yield Matrix("attention", "self_attn.k_proj", hidden * kv * a.k_dim)
    if not a.shared_kv_projection:
        yield Matrix("attention", "self_attn.v_proj", hidden * kv * a.v_dim)
    yield Matrix("attention", "self_attn.o_proj", queries * a.v_dim * hidden)
    if a.head_gate:
        yield Matrix("attention", "self_attn.g_proj", hidden * queries)
    small = (wide + kv * (a.k_dim + a.v_dim) if a.bias else 0) + (2 * a.k_dim if a.qk_norm else 0)
    yield Matrix("norms", "self_attn.norm", small, linear=False)


def _latent(a: LatentAttention, hidden: int, tp: int) -> Iterator[Matrix]:
    """Down projections are on every GPU, the rest is divided by heads."""
    heads = _share(a.query_heads, tp)
    query = heads * (a.nope_dim + a.rope_dim)
    if a.q_lora_rank:
        yield Matrix("attention", "self_attn.q_a_proj", hidden * a.q_lora_rank)
        yield Matrix("attention", "self_attn.q_b_proj", a.q_lora_rank * query)
    else:
        yield Matrix("attention", "self_attn.q_proj", hidden * query)
    yield Matrix("attention", "self_attn.kv_a_proj_with_mqa", hidden * (a.latent_dim + a.rope_dim))
    yield Matrix("attention", "self_attn.kv_b_proj", a.latent_dim * heads * (a.nope_dim + a.v_dim))
    yield Matrix("attention", "self_attn.o_proj", heads * a.v_dim * hidden)
    if a.gated_output:
        yield Matrix("attention", "self_attn.g_proj", hidden * heads * a.v_dim)
    yield Matrix("norms", "self_attn.norm", (a.q_lora_rank or 0) + a.latent_dim, linear=False)
    if a.index_dim and a.index_heads:
        source = a.q_lora_rank or hidden
        yield Matrix("attention", "self_attn.indexer.wq_b", source * a.index_heads * a.index_dim)
        yield Matrix("attention", "self_attn.indexer.wk", hidden * a.index_dim)
        yield Matrix("attention", "self_attn.indexer.weights_proj", hidden * a.index_heads, linear=False)


def _state(s: State, hidden: int, tp: int) -> Iterator[Matrix]:
    if isinstance(s, GatedDeltaNet):
        _share(s.k_heads, tp)
        keys, values = s.k_heads * s.k_dim // tp, _share(s.v_heads, tp) * s.v_dim
        yield Matrix("state", "linear_attn.in_proj_qkvz", hidden * (2 * keys + 2 * values))
        yield Matrix("state", "linear_attn.in_proj_ba", hidden * 2 * s.v_heads // tp)
        yield Matrix("state", "linear_attn.conv1d", (2 * keys + values) * s.conv_kernel, linear=False)
        yield Matrix("state", "linear_attn.A_log", 2 * s.v_heads // tp, linear=False, float32=True)
        yield Matrix("state", "linear_attn.norm", s.v_dim, linear=False)
        yield Matrix("state", "linear_attn.out_proj", values * hidden)
    elif isinstance(s, KimiDeltaAttention):
        if s.full_rank_gate:
            raise NotModelledError("weights of Kimi delta attention with a full-rank gate are not modelled")
        heads, width = _share(s.heads, tp), _share(s.heads, tp) * s.head_dim
        yield Matrix("state", "self_attn.qkv_proj", 3 * hidden * width)
        yield Matrix("state", "self_attn.conv1d", 3 * width * s.conv_kernel, linear=False)
        yield Matrix("state", "self_attn.f_a_proj", 2 * hidden * s.head_dim)
        yield Matrix("state", "self_attn.f_b_proj", 2 * s.head_dim * width)
        yield Matrix("state", "self_attn.b_proj", hidden * heads)
        yield Matrix("state", "self_attn.A_log", width + heads + s.head_dim, linear=False, float32=True)
        yield Matrix("state", "self_attn.o_proj", width * hidden)
    elif isinstance(s, Mamba2):
        groups, heads = mamba2_groups(s.groups, tp) // tp, _share(s.heads, tp)
        inner, shared = heads * s.head_dim, 2 * groups * s.state_size
        yield Matrix("state", "mixer.in_proj", hidden * (2 * inner + shared + heads))
        yield Matrix("state", "mixer.conv1d", (inner + shared) * (s.conv_kernel + 1), linear=False)
        yield Matrix("state", "mixer.A_log", 3 * heads, linear=False, float32=True)
        yield Matrix("state", "mixer.norm", inner, linear=False)
        yield Matrix("state", "mixer.out_proj", inner * hidden)
    elif isinstance(s, Mamba1):
        inner, rank = _share(s.intermediate, tp), s.time_step_rank or 0
        if not rank:
            raise NotModelledError("the rank of Mamba-1's time step is not known")
        yield Matrix("state", "mamba.in_proj", hidden * 2 * inner)
        yield Matrix("state", "mamba.conv1d", inner * (s.conv_kernel + 1), linear=False)
        yield Matrix("state", "mamba.x_proj", inner * (rank + 2 * s.state_size))
        yield Matrix("state", "mamba.dt_proj", rank * inner + inner)
        yield Matrix("state", "mamba.A_log", inner * (s.state_size + 1), linear=False, float32=True)
        yield Matrix("state", "mamba.out_proj", inner * hidden)
    elif isinstance(s, Lightning):
        width = _share(s.heads, tp) * s.head_dim
        yield Matrix("state", "self_attn.qkv_proj", hidden * 3 * width)
        yield Matrix("state", "self_attn.output_gate", hidden * width)
        yield Matrix("state", "self_attn.out_proj", width * hidden)
        yield Matrix("state", "self_attn.norm", width, linear=False)
    elif isinstance(s, ShortConvolution):
        width = _share(s.width, tp)
        yield Matrix("state", "conv.in_proj", hidden * 3 * width)
        yield Matrix("state", "conv.conv", width * s.conv_kernel, linear=False)
        yield Matrix("state", "conv.out_proj", width * hidden)


def _dense(width: int, gated: bool, hidden: int, tp: int, name: str) -> Iterator[Matrix]:
    inner = _share(width, tp)
    if gated:
        yield Matrix("feed_forward", f"{name}.gate_proj", hidden * inner)
    yield Matrix("feed_forward", f"{name}.up_proj", hidden * inner)
    yield Matrix("feed_forward", f"{name}.down_proj", inner * hidden)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _experts(m: MoeMlp, hidden: int, parallel: Parallel, *, marlin: bool) -> Iterator[Matrix]:
    """Experts whole on `ep` groups of GPUs, each cut over the `tp / ep` GPUs of its group; router on every GPU.

    Shared experts are cut over all GPUs, but whole on each where an all-to-all backend exchanges tokens: SGLang
    `models/deepseek_v2.py` and its heirs (`tp_size=1` of `shared_experts` with DeepEP and Mooncake).
    """
    count = _share(m.experts, parallel.ep)
    inner = _share(m.intermediate, max(1, parallel.tp // parallel.ep))
    width = m.width or hidden
    size = (3 if m.gated else 2) * width * inner
    if marlin:
        size = (3 if m.gated else 2) * _up(width, MARLIN_HIDDEN) * _up(inner, MARLIN_INTERMEDIATE)
    tensors = (2, 1) if m.gated else (1, 1)
    yield Matrix("experts", "experts" if m.beside_dense else "mlp.experts", count * size, tensors=tensors)
    if m.bias:
        yield Matrix("experts", "mlp.experts.bias", count * (2 * inner + width), linear=False)
    if m.width:
        yield Matrix("experts", "mlp.latent_proj", 2 * hidden * m.width)
    yield Matrix("experts", "mlp.gate", hidden * m.experts + m.experts, linear=False)
    if m.shared_intermediate:
        name, cut = ("mlp", parallel.tp) if m.beside_dense else ("mlp.shared_experts", parallel.tp)
        if parallel.whole_shared_experts and not m.beside_dense:
            cut = 1
        yield from _dense(m.shared_intermediate, m.gated, hidden, cut, name)
    if m.shared_gate:
        yield Matrix("feed_forward", "mlp.shared_expert_gate", hidden, linear=False)


def layer_matrices(
    layer: Layer, hidden: int, parallel: Parallel, *, marlin: bool = False, dense_tp: int | None = None
) -> Iterator[Matrix]:
    """The weights of one layer on one GPU. `dense_tp`: GPUs that share a dense block, where not all of them do."""
    tp, norms = parallel.attention_tp, 0
    if isinstance(layer.attention, Attention):
        yield from _attention(layer.attention, hidden, tp)
    elif layer.attention is not None:
        yield from _latent(layer.attention, hidden, tp)
    if layer.state is not None:
        yield from _state(layer.state, hidden, tp)
    norms += layer.attention is not None or layer.state is not None
    if isinstance(layer.mlp, DenseMlp):
        yield from _dense(layer.mlp.intermediate, layer.mlp.gated, hidden, dense_tp or parallel.tp, "mlp")
    elif layer.mlp is not None:
        yield from _experts(layer.mlp, hidden, parallel, marlin=marlin)
    norms += layer.mlp is not None
    yield Matrix("norms", "norm", norms * hidden * (2 if layer.post_norms else 1), linear=False)


def _need_all_fields(arch: Architecture) -> None:
    if arch.unknown:
        raise NotModelledError(f"{arch.name}: {', '.join(arch.unknown)} not known, so its weights are not modelled")


def parameter_count(arch: Architecture, *, draft: bool = False) -> int:
    """Parameters of the language model (vocabulary not padded), with its draft layers where wanted.

    Raises:
        NotModelledError: a size is not known.
    """
    _need_all_fields(arch)
    whole = Parallel()
    layers = arch.layers + (arch.draft_layers if draft else ())
    total = sum(matrix.elements for layer in layers for matrix in layer_matrices(layer, arch.hidden, whole))
    total += arch.hidden + arch.vocabulary * arch.hidden * (1 if arch.tied_embeddings else 2)
    return total + (_draft_extra(arch) if draft else 0)


def _draft_extra(arch: Architecture) -> int:
    """The projection that joins embedding and hidden state in front of a prediction module, and its norms."""
    modules = sum(1 for layer in arch.draft_layers if layer.attention is not None)
    return modules * (2 * arch.hidden * arch.hidden + 3 * arch.hidden)


def module_bytes(
    arch: Architecture, parallel: Parallel, framework: Framework, *, dtype: str | None = None
) -> WeightBytes:
    """One prediction module loaded on its own (SGLang's draft worker), with the embedding and head it brings along.

    Source: SGLang `models/deepseek_nextn.py`: embedding, `eh_proj` over both hidden states, one layer, head.

    Raises:
        NotModelledError: the config has no prediction layers, or a size is not known.
    """
    if not arch.draft_layers:
        raise NotModelledError("the model's prediction (MTP) layers are not in the config found")
    modules = max(1, sum(1 for layer in arch.draft_layers if layer.attention is not None))
    layers = arch.draft_layers[: len(arch.draft_layers) // modules]
    alone = msgspec.structs.replace(arch, layers=layers, draft_layers=(), multimodal=False, tied_embeddings=False)
    own = weight_bytes(alone, msgspec.structs.replace(parallel, pp=1), framework, dtype=dtype)
    joined = _draft_extra(arch) // modules * element_bytes(dtype or arch.dtype)
    parts: dict[Part, int] = {**own.parts, "draft": joined}
    return WeightBytes(own.bytes + joined, own.low + joined, own.high + joined, parts, own.notes)


def quantized_bits(quantization: Quantization) -> Fraction:
    """Bits of one quantised weight with its share of scales and zero points.

    fp8: 8, plus one float32 scale per square block. GPTQ/AWQ and other integers: the bits, plus a 16-bit scale and where
    stored a zero of the same bits per group. MXFP4: 4 + 8/32. NVFP4: 4 + 8/16.

    Raises:
        NotModelledError: the format, or its group size, is not known.
    """
    bits, group = quantization.bits, quantization.group
    if quantization.mixed or not bits:
        raise NotModelledError(f"weights quantised with {quantization.method or 'an unnamed method'} are not modelled")
    if quantization.method == "fp8":
        return Fraction(8) + (Fraction(32, group * group) if group else 0)
    if quantization.method == "mxfp4":
        return Fraction(4) + Fraction(8, 32)
    if quantization.method == "nvfp4":
        return Fraction(4) + Fraction(8, 16)
    if quantization.method in {"gptq", "awq", "compressed-tensors"}:
        if not group or group < 0:
            return Fraction(bits)
        return Fraction(bits) + Fraction(16 + (bits if quantization.zero_points else 0), group)
    raise NotModelledError(f"weights quantised with {quantization.method} are not modelled")


_PREFIX: Final = re.compile(r"^(?:model\.|language_model\.|backbone\.|text_model\.)+")
_ALIASES: Final = {
    "shared_expert.": "shared_experts.",
    "block_sparse_moe.": "mlp.",
    "mlp.router": "mlp.gate",
    "in_proj_qkv": "in_proj_qkvz",
    "mixer.experts": "mlp.experts",
    "mixer.shared_experts": "mlp.shared_experts",
    "mixer.up_proj": "mlp.up_proj",
    "mixer.down_proj": "mlp.down_proj",
    "mixer.q_proj": "self_attn.q_proj",
    "mixer.k_proj": "self_attn.k_proj",
    "mixer.v_proj": "self_attn.v_proj",
    "mixer.o_proj": "self_attn.o_proj",
}
"""Names that model families give the same module; the right-hand side is ours."""


class _Skips:
    """Which matrices a checkpoint leaves in 16 bits: exact names, `*` globs, `re:` expressions, or a part of the name."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._names: set[str] = set()
        self._expressions: list[re.Pattern[str]] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                self._expressions.append(re.compile(pattern[3:]))
                continue
            plain = _PREFIX.sub("", pattern)
            for old, new in _ALIASES.items():
                if old in plain and new not in plain:
                    plain = plain.replace(old, new)
            if "*" in plain:
                self._expressions.append(re.compile(fnmatch.translate(plain)))
                self._expressions.append(re.compile(fnmatch.translate(f"{plain}.*")))
            else:
                self._names.add(plain)

    def __contains__(self, name: str) -> bool:
        pieces = name.split(".")
        starts = (".".join(pieces[:end]) for end in range(1, len(pieces) + 1))
        if any(start in self._names for start in starts):
            return True
        # An entry without a layer number names a kind of module, in every layer.
        tail = pieces[2:] if pieces[0] == "layers" else pieces
        if any(".".join(tail[a:b]) in self._names for a in range(len(tail)) for b in range(a + 1, len(tail) + 1)):
            return True
        return any(expression.match(name) or expression.match(f"model.{name}") for expression in self._expressions)


def weight_bytes(
    arch: Architecture,
    parallel: Parallel,
    framework: Framework,
    *,
    dtype: str | None = None,
    draft: bool = False,
    language_only: bool = False,
    expert_kernel: Literal["marlin", "other"] | None = None,
    stage: int | None = None,
) -> WeightBytes:
    """Bytes of weights on one GPU, with the range in which the engine's own figure should lie.

    `dtype`: the 16-bit type where a flag overrides the config's. `draft`: prediction layers are loaded too.
    `language_only`: no vision tower. `expert_kernel`: what runs MXFP4 experts; Marlin pads them; None (unknown) widens the
    range to hold both. `stage`: the pipeline stage; None for the largest.

    Not counted: LoRA slots, and for 8-bit latent attention a second copy of `kv_b_proj` (in `high`).

    Raises:
        NotModelledError: a field or a format is not known.
    """
    _need_all_fields(arch)
    if stage is not None:
        return _stage_bytes(arch, parallel, framework, stage, dtype, draft, language_only, expert_kernel)
    stages = [
        _stage_bytes(arch, parallel, framework, number, dtype, draft, language_only, expert_kernel)
        for number in range(parallel.pp)
    ]
    return max(stages, key=lambda each: each.bytes)


def _stage_matrices(
    arch: Architecture, parallel: Parallel, framework: Framework, stage: int, *, draft: bool, marlin: bool
) -> Iterator[Matrix]:
    """Every weight of one GPU of a stage, names as in a checkpoint without `model.`."""
    sizes = stage_sizes(len(arch.layers), parallel.pp, framework)
    if not 0 <= stage < len(sizes):
        raise NotModelledError(f"there is no pipeline stage {stage} of {len(sizes)}")
    first = sum(sizes[:stage])
    sparse = any(isinstance(layer.mlp, MoeMlp) for layer in arch.layers)
    dense_tp = parallel.moe_dense_tp if sparse else None
    for index in range(first, first + sizes[stage]):
        for matrix in layer_matrices(arch.layers[index], arch.hidden, parallel, marlin=marlin, dense_tp=dense_tp):
            yield msgspec.structs.replace(matrix, name=f"layers.{index}.{matrix.name}")
    last = stage == parallel.pp - 1
    if stage == 0 or (last and arch.tied_embeddings):
        yield Matrix("embedding", "embed_tokens", _embedding_elements(arch, parallel), linear=False)
    if last:
        yield Matrix("norms", "norm", arch.hidden, linear=False)
        if not arch.tied_embeddings:
            yield Matrix("embedding", "lm_head", _head_elements(arch, parallel), linear=False)
        if draft:
            for index, layer in enumerate(arch.draft_layers):
                for matrix in layer_matrices(layer, arch.hidden, parallel, marlin=marlin):
                    name = f"layers.{len(arch.layers) + index}.{matrix.name}"
                    yield msgspec.structs.replace(matrix, part="draft", name=name)
            yield Matrix("draft", "mtp.fc", _draft_extra(arch), linear=False)


def _embedding_elements(arch: Architecture, parallel: Parallel) -> int:
    """The embedding on one GPU: rows over the GPUs; whole on each under DP attention.

    Source: SGLang `models/deepseek_v2.py`, `qwen3_moe.py` (`enable_tp=not is_dp_attention_enabled()`). Some later models
    divide it over the attention ranks instead (`use_attn_tp_group`), which the range allows for.
    """
    cut = 1 if parallel.dp_attention else parallel.tp
    return _up(_up(arch.vocabulary, VOCABULARY_MULTIPLE), cut) // cut * arch.hidden


def _head_elements(arch: Architecture, parallel: Parallel) -> int:
    """The output head on one GPU: over all of them, or (`--enable-dp-lm-head`) over the attention ranks."""
    cut = parallel.attention_tp if parallel.dp_lm_head else parallel.tp
    return _up(_up(arch.vocabulary, VOCABULARY_MULTIPLE), cut) // cut * arch.hidden


def shared_with_target(arch: Architecture, parallel: Parallel, dtype: str | None = None) -> int:
    """Bytes of the embedding and head that a prediction module brings along and gives back for the target's, on one GPU.

    Source: SGLang `speculative/eagle_worker.py` (`set_embed_and_head`): the module is loaded whole, then its own are dropped.
    """
    return (_embedding_elements(arch, parallel) + _head_elements(arch, parallel)) * element_bytes(dtype or arch.dtype)


def _tensor_key(matrix: Matrix) -> str:
    """Weights that the engine holds in one tensor have the same key: queries with keys and values, gate with up."""
    layer, _, rest = matrix.name.partition(".self_attn.")
    if rest in {"q_proj", "k_proj", "v_proj"}:
        return f"{layer}.qkv"
    for ending in (".gate_proj", ".up_proj"):
        if matrix.name.endswith(ending):
            return f"{matrix.name.removesuffix(ending)}.gate_up"
    return matrix.name


def allocator_rounding(sizes: Iterable[int]) -> int:
    """Bytes by which torch's blocks exceed tensors of these sizes: what vLLM's figure, allocated bytes, counts beside them.

    An allocation of 10 MiB and more gets a segment of whole 2 MiB; what is left of it is split off only above 1 MiB, else
    it belongs to the block. Smaller ones come from shared segments and are exact but for the last.

    Source: torch `c10/cuda/CUDACachingAllocator.cpp`: `get_allocation_size`, `should_split` (without expandable segments).
    """
    extra = 0
    for size in sizes:
        left = -size % SEGMENT_MULTIPLE
        if size >= LARGE_ALLOCATION and left <= UNSPLIT:
            extra += left
    return extra


class _Sum:
    """Bytes of one stage by part, and what makes its engine's figure differ from them."""

    def __init__(self, quantization: Quantization | None, width: int) -> None:
        self.quantization = quantization
        self.width = width
        self.bits = quantized_bits(quantization) if quantization else Fraction(8 * width)
        self.parts: dict[Part, Fraction] = {}
        self.above = Fraction(0)
        self.below = Fraction(0)
        self.tensors: dict[str, Fraction] = {}
        self.repacked: dict[str, Fraction] = {}

    def add(self, matrix: Matrix, *, skipped: bool) -> None:
        """One weight."""
        if self.quantization and matrix.linear and not skipped:
            taken, held = self._quantized(matrix, self.quantization), self.repacked
        else:
            taken, held = Fraction(matrix.elements * (4 if matrix.float32 else self.width)), self.tensors
        for number, share in enumerate(matrix.tensors):
            key = f"{_tensor_key(matrix)}.{number}"
            held[key] = held.get(key, Fraction(0)) + taken * share / sum(matrix.tensors)
        self.parts[matrix.part] = self.parts.get(matrix.part, Fraction(0)) + taken

    def _quantized(self, matrix: Matrix, quantization: Quantization) -> Fraction:
        taken = matrix.elements * self.bits / 8
        if quantization.named_only and matrix.part in {"attention", "state"}:
            # Copies by other hands often leave these modules in 16 bits; the name does not say.
            self.above += matrix.elements * self.width - taken
        elif matrix.name.endswith("kv_b_proj"):
            self.above += 2 * matrix.elements
        if quantization.named_only and quantization.bits == 4 and quantization.group:
            finest = Fraction(16 + quantization.bits, FINEST_GROUP) + quantization.bits
            self.above += matrix.elements * (finest - self.bits) / 8
            self.below += matrix.elements * (self.bits - quantization.bits) / 8
        return taken

    def add_allocator(self) -> None:
        """torch's block rounding: known for tensors as they stand, a possibility for those that a kernel lays out anew."""
        self.parts["allocator"] = Fraction(allocator_rounding(int(size) for size in self.tensors.values()))
        self.below += self.parts["allocator"]
        self.above += allocator_rounding(int(size) for size in self.repacked.values())

    @property
    def total(self) -> Fraction:
        """All parts."""
        return sum(self.parts.values(), Fraction(0))


def _stage_bytes(
    arch: Architecture,
    parallel: Parallel,
    framework: Framework,
    stage: int,
    dtype: str | None,
    draft: bool,
    language_only: bool,
    expert_kernel: str | None,
) -> WeightBytes:
    quantization = arch.quantization
    mxfp4 = quantization is not None and quantization.method == "mxfp4"
    width = element_bytes(dtype or arch.dtype)
    found = _Sum(quantization, width)
    skips = _Skips(quantization.skipped if quantization else ())
    marlin = mxfp4 and expert_kernel == "marlin"
    for matrix in _stage_matrices(arch, parallel, framework, stage, draft=draft, marlin=marlin):
        found.add(matrix, skipped=matrix.name in skips)
    found.parts["rope"] = Fraction(_rope_bytes(arch, framework, width))
    notes: list[str] = []
    if arch.rope_dim and not found.parts["rope"]:
        found.above += UNKNOWN_POSITIONS * arch.rope_dim * width * arch.rope_factor
        notes.append("rotary table not counted: the context length is not known")
    if mxfp4 and expert_kernel is None:
        padded = _stage_matrices(arch, parallel, framework, stage, draft=draft, marlin=True)
        plain = _stage_matrices(arch, parallel, framework, stage, draft=draft, marlin=False)
        found.above += (_expert_elements(padded) - _expert_elements(plain)) * found.bits / 8
        notes.append("experts may be padded by their kernel")
    vision = Fraction(0)
    if arch.multimodal and not language_only:
        vision = Fraction((arch.vision_parameters or 0) * width)
        found.parts["vision"] = vision
        notes.append("vision tower estimated" if vision else "vision tower not counted: its size is not known")
    if framework == "vllm":
        found.add_allocator()
    if parallel.dp_attention and stage == 0:
        found.below += found.parts["embedding"] * (parallel.attention_tp - 1) / parallel.attention_tp
    if quantization and quantization.named_only:
        notes.append("quantisation known from the model's name only")
    return _ranged(found, framework, vision, notes)


def _ranged(found: _Sum, framework: Framework, vision: Fraction, notes: list[str]) -> WeightBytes:
    """The sum with the range that the engine's way of measuring gives (docs/arithmetic.md, "Tolerances")."""
    quantization, total = found.quantization, found.total
    above = VLLM_TOLERANCE if framework == "vllm" else SGLANG_ABOVE
    below = VLLM_TOLERANCE if framework == "vllm" else SGLANG_BELOW
    if quantization and framework == "vllm" and quantization.bits == 4:
        above = max(above, REPACKED_ABOVE)
    if quantization and quantization.named_only:
        above, below = above + NAMED_ONLY_TOLERANCE, below + NAMED_ONLY_TOLERANCE
    more = total * above if framework == "vllm" else max(total * above, Fraction(SGLANG_LIBRARIES))
    size = round(total)
    whole_parts = {name: round(value) for name, value in found.parts.items() if value}
    return WeightBytes(
        bytes=size,
        low=int(total * (1 - below) - vision * VISION_TOLERANCE - found.below),
        high=int(total + more + vision * VISION_TOLERANCE + found.above) + 1,
        parts=_summing_to(whole_parts, size),
        notes=tuple(notes),
    )


def _expert_elements(matrices: Iterator[Matrix]) -> int:
    return sum(matrix.elements for matrix in matrices if matrix.name.endswith("experts"))


def _summing_to(parts: dict[Part, int], total: int) -> dict[Part, int]:
    """`parts` with the rounding's remainder added to the largest."""
    if parts:
        largest = max(parts, key=lambda name: parts[name])
        parts[largest] += total - sum(parts.values())
    return parts


def _rope_bytes(arch: Architecture, framework: Framework, width: int) -> int:
    """The rotary table counts as weights: rows x dimensions x element, on every GPU, once for each distinct table.

    Source: vLLM `rotary_embedding/` (M-RoPE models multiply the rows by 4: `mrope.py`; yarn by its factor).
    """
    rows = arch.rope_rows or arch.max_positions
    if not arch.rope_dim or not rows:
        return 0
    copies = arch.rope_factor if framework == "vllm" else 1
    return rows * copies * arch.rope_dim * width * arch.rope_tables
