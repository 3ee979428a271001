"""What a model is made of, as far as memory is concerned: frozen values, read from a `config.json` or a bundled table.

Dimensions are whole-model (not yet divided by tensor parallel size) and counted in elements, heads or tokens; bytes come
from the functions of this package, which take the element sizes as arguments.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class NotModelledError(ValueError):
    """A formula is not known for this architecture, framework or version; the message says which and why."""


class Attention(msgspec.Struct, frozen=True, tag="attention"):
    """Attention with keys and values per head (MHA, GQA). `window`: tokens kept by a sliding-window layer, None for full.

    `bias`: the query, key and value projections have one; `qk_norm`: norms over queries and keys; `shared_kv_projection`:
    one weight makes keys and values (Gemma 4's full layers); both are still cached. `gated_output`: a gate for every output
    element, `head_gate`: one for each head.
    """

    query_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    gated_output: bool = False
    bias: bool = False
    qk_norm: bool = False
    shared_kv_projection: bool = False
    head_gate: bool = False


class LatentAttention(msgspec.Struct, frozen=True, tag="latent"):
    """Multi-head latent attention: one latent and one rope part per token, shared by all heads, not divided by TP.

    `index_dim`: head dimension of a sparse-attention indexer's key cache (DSA), None without one. `index_heads` its heads.
    """

    query_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_lora_rank: int | None = None
    index_dim: int | None = None
    index_heads: int | None = None
    gated_output: bool = False


class GatedDeltaNet(msgspec.Struct, frozen=True, tag="gdn"):
    """Gated delta net (Qwen3-Next, Qwen3.5 and later)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int


class KimiDeltaAttention(msgspec.Struct, frozen=True, tag="kda"):
    """Kimi delta attention (Kimi-Linear, Kimi-K3, Ling 3)."""

    heads: int
    head_dim: int
    conv_kernel: int
    k_heads: int | None = None
    k_dim: int | None = None
    full_rank_gate: bool = False


class Mamba2(msgspec.Struct, frozen=True, tag="mamba2"):
    """Mamba-2 (Nemotron-H, Granite-H, Falcon-H1)."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_kernel: int


class Mamba1(msgspec.Struct, frozen=True, tag="mamba1"):
    """Mamba-1 (Jamba, Falcon-Mamba)."""

    intermediate: int
    state_size: int
    conv_kernel: int
    time_step_rank: int | None = None


class Lightning(msgspec.Struct, frozen=True, tag="lightning"):
    """Linear attention without a convolution (MiniMax-Text-01, Ring/Ling linear 2.x)."""

    heads: int
    head_dim: int


class ShortConvolution(msgspec.Struct, frozen=True, tag="short_conv"):
    """A short convolution's window only (LFM2)."""

    width: int
    conv_kernel: int


State = GatedDeltaNet | KimiDeltaAttention | Mamba2 | Mamba1 | Lightning | ShortConvolution
StateKind = Literal["gdn", "kda", "mamba2", "mamba1", "lightning", "short_conv"]


class DenseMlp(msgspec.Struct, frozen=True, tag="dense"):
    """A feed-forward block; `gated`: three matrices instead of two."""

    intermediate: int
    gated: bool = True


class MoeMlp(msgspec.Struct, frozen=True, tag="moe"):
    """Routed experts with optional shared experts; `width`: input size of an expert where it is not the hidden size.

    `bias`: experts have biases (gpt-oss). `beside_dense`: the "shared" part is the layer's own dense block (Gemma 4). `intermediate` is one expert's; `shared_intermediate` all shared experts' together.
    """

    experts: int
    intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    gated: bool = True
    width: int | None = None
    bias: bool = False
    beside_dense: bool = False


class Layer(msgspec.Struct, frozen=True):
    """One layer. A hybrid layer may have attention, state, or both (Falcon-H1); `mlp` is None where it has none.

    `post_norms`: a norm behind each block as well as before it (Gemma).
    """

    attention: Attention | LatentAttention | None = None
    state: State | None = None
    mlp: DenseMlp | MoeMlp | None = None
    post_norms: bool = False


class Quantization(msgspec.Struct, frozen=True):
    """How weights are stored: `method` as in the config (fp8, awq, gptq, mxfp4, modelopt ...), `bits`, `group`.

    `group`: weights that share a scale (for `fp8` the side of a square block, None for one scale per tensor or channel).
    `skipped` modules stay 16-bit. `zero_points`: a zero per group is stored. `named_only`: known from the model's name, so
    details are assumptions. `mixed`: several formats in one model, sizes not modelled.
    """

    method: str
    bits: int | None = None
    group: int | None = None
    skipped: tuple[str, ...] = ()
    zero_points: bool = False
    named_only: bool = False
    mixed: bool = False


class Architecture(msgspec.Struct, frozen=True):
    """A model's fields that decide memory. `source` says where they come from (a file, or a table row with its source).

    `model_type` is the text model's, without `_text`. `state_dtype`: the temporal state's type that the config names,
    under the key `state_dtype_key`. `rope_rows`: rows of one rotary table (None: `max_positions`), times `rope_factor`
    where the engine stores several (M-RoPE under vLLM), for each of `rope_tables` distinct tables. `unknown`: config keys that the source lacks; formulas that need them refuse.
    """

    name: str
    model_type: str
    class_name: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    max_positions: int | None = None
    tied_embeddings: bool = False
    dtype: str = "bfloat16"
    state_dtype: str | None = None
    state_dtype_key: str | None = None
    draft_layers: tuple[Layer, ...] = ()
    quantization: Quantization | None = None
    vision_parameters: int | None = None
    rope_dim: int | None = None
    rope_factor: int = 1
    rope_rows: int | None = None
    rope_tables: int = 1
    multimodal: bool = False
    unknown: tuple[str, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def full_attention_layers(self) -> tuple[Layer, ...]:
        """Layers that keep every token (latent attention included)."""
        return tuple(
            layer
            for layer in self.layers
            if isinstance(layer.attention, LatentAttention)
            or (isinstance(layer.attention, Attention) and layer.attention.window is None)
        )

    @property
    def sliding_layers(self) -> tuple[Layer, ...]:
        """Layers that keep a window of tokens."""
        return tuple(
            layer
            for layer in self.layers
            if isinstance(layer.attention, Attention) and layer.attention.window is not None
        )

    @property
    def state_layers(self) -> tuple[Layer, ...]:
        """Layers with recurrent state."""
        return tuple(layer for layer in self.layers if layer.state is not None)


class Parallel(msgspec.Struct, frozen=True):
    """How the model is spread: sizes as the engines name them; `attention_tp` differs from `tp` under DP attention.

    SGLang only: `moe_dense_tp`: ranks that share a dense block of a model with experts (None: all); `dp_lm_head`: the head
    is divided over the attention ranks; `whole_shared_experts`: shared experts are on every rank (all-to-all backends).
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    dp_attention: bool = False
    moe_dense_tp: int | None = None
    dp_lm_head: bool = False
    whole_shared_experts: bool = False

    @property
    def attention_tp(self) -> int:
        """Ranks that share one request's heads: `tp / dp` under SGLang's DP attention, else `tp`."""
        return max(1, self.tp // self.dp) if self.dp_attention else self.tp
