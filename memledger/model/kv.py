"""KV cache: bytes that one token takes on one GPU.

Sources: SGLang 0.5.23 `model_executor/pool_configurator.py` and `mem_cache/kv_cache_configurator.py`; vLLM 0.33.0
`v1/kv_cache_interface.py` and `layers/attention/mla_attention.py` (docs/arithmetic.md, "KV cache").
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memledger.model.architecture import Architecture, Attention, LatentAttention, Layer, NotModelledError, Parallel
from memledger.model.dtypes import element_bits, is_float8, normal_name
from memledger.model.layers import stage_size

Framework = Literal["sglang", "vllm"]
Which = Literal["full", "sliding", "all"]

DSA_SCALE_GROUP = 128
"""Elements that share one float32 scale in the sparse-attention layouts."""

_FP4 = frozenset({"fp4", "fp4_e2m1", "nvfp4", "fp4_mx_block16", "float4_e2m1fn_x2"})
_FP4_GROUP = 16
_MXFP8_GROUP = 32
_DS_LAYOUT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_DS_LAYOUT_SHAPE = (512, 64)


class LayerTokenBytes(msgspec.Struct, frozen=True):
    """Bytes of one token in one layer on one GPU: keys, values (or the latent alone, as keys), the indexer's keys."""

    keys: int
    values: int
    index: int = 0

    @property
    def total(self) -> int:
        """All parts."""
        return self.keys + self.values + self.index


def kv_heads_per_gpu(kv_heads: int, attention_tp: int) -> int:
    """KV heads on one GPU: `max(1, heads / tp)`; with more GPUs than heads they are replicated (both engines).

    Raises:
        NotModelledError: neither divides the other; such a server does not start.
    """
    if kv_heads % attention_tp == 0:
        return kv_heads // attention_tp
    if attention_tp % kv_heads == 0:
        return 1
    raise NotModelledError(f"{kv_heads} KV heads over tensor parallel size {attention_tp}: neither divides the other")


def resolve_dtype(kv_dtype: str, model_dtype: str) -> str:
    """The KV element type that `auto` stands for (the model's), else the type named."""
    return normal_name(model_dtype) if normal_name(kv_dtype) == "auto" else normal_name(kv_dtype)


def _row_bytes(elements: int, kv_dtype: str) -> int:
    """Bytes of `elements` of one head's K or V, with the block scales that live in the cache."""
    if kv_dtype in _FP4:
        return elements // 2 + elements // _FP4_GROUP
    if kv_dtype == "mxfp8":
        return elements + elements // _MXFP8_GROUP
    for ending, scale in (("_per_token_head", 4),):
        if kv_dtype.endswith(ending):
            return elements * element_bits(kv_dtype.removesuffix(ending)) // 8 + scale
    return elements * element_bits(kv_dtype) // 8


def index_token_bytes(attention: LatentAttention, *, raw_16bit: bool = False) -> int:
    """Bytes of one token in one layer's sparse-attention indexer cache; 0 without an indexer. Replicated on every GPU.

    One 8-bit element per dimension and one float32 scale per 128 (both engines); `raw_16bit`: SGLang on Ascend keeps
    bfloat16 without scales.
    """
    if attention.index_dim is None:
        return 0
    if raw_16bit:
        return attention.index_dim * 2
    return attention.index_dim + attention.index_dim // DSA_SCALE_GROUP * 4


def _latent_bytes(attention: LatentAttention, kv_dtype: str, framework: Framework, *, scaled: bool) -> int:
    """Bytes of one token's latent and rope part. Not divided by tensor parallel size."""
    if kv_dtype in _DS_LAYOUT_BYTES:
        if (attention.latent_dim, attention.rope_dim) != _DS_LAYOUT_SHAPE:
            raise NotModelledError(f"layout {kv_dtype} is known for a latent of 512 and a rope part of 64 only")
        return _DS_LAYOUT_BYTES[kv_dtype]
    if framework == "sglang" and scaled and attention.index_dim is not None and is_float8(kv_dtype):
        scales = attention.latent_dim // DSA_SCALE_GROUP * 4
        return attention.latent_dim + scales + attention.rope_dim * 2
    return _row_bytes(attention.latent_dim + attention.rope_dim, kv_dtype)


def layer_token_bytes(
    attention: Attention | LatentAttention,
    attention_tp: int,
    kv_dtype: str,
    framework: Framework = "sglang",
    *,
    dsa_scaled: bool = True,
    index_16bit: bool = False,
) -> LayerTokenBytes:
    """Bytes of one token in one layer on one GPU.

    * Heads: `max(1, kv_heads / attention_tp) * (k_dim + v_dim) * element`.
    * Latent (MLA): `(latent + rope) * element`, the same on every GPU.
    * Sliding-window layers cost the same per token; how many tokens they keep is the pool's business.

    `kv_dtype` is a resolved type (see `resolve_dtype`) or a layout name of vLLM (`fp8_ds_mla`, `nvfp4_ds_mla`).
    `dsa_scaled`: SGLang's scaled 8-bit layout for sparse attention (656 bytes); False for TensorRT-LLM, TileLang and HIP
    layouts (576). `index_16bit`: SGLang on Ascend.
    """
    dtype = normal_name(kv_dtype)
    if isinstance(attention, LatentAttention):
        latent = _latent_bytes(attention, dtype, framework, scaled=dsa_scaled)
        return LayerTokenBytes(latent, 0, index_token_bytes(attention, raw_16bit=index_16bit))
    heads = kv_heads_per_gpu(attention.kv_heads, attention_tp)
    return LayerTokenBytes(heads * _row_bytes(attention.k_dim, dtype), heads * _row_bytes(attention.v_dim, dtype))


def _wanted(layer: Layer, layers: Which) -> bool:
    if layer.attention is None:
        return False
    sliding = isinstance(layer.attention, Attention) and layer.attention.window is not None
    return layers == "all" or (layers == "sliding") == sliding


def model_token_parts(
    arch: Architecture,
    parallel: Parallel,
    kv_dtype: str = "auto",
    *,
    framework: Framework = "sglang",
    layers: Which = "full",
    draft: bool = False,
    stage: int | None = None,
    dsa_scaled: bool = True,
    index_16bit: bool = False,
) -> LayerTokenBytes:
    """Bytes of one token on one GPU, summed over its layers, keys, values and indexer keys apart.

    `layers`: those that keep every token (default), those with a sliding window, or all. `draft`: the draft (MTP) layers
    instead of the model's own. `stage`: the pipeline stage; None for the one that takes most.
    """
    dtype = resolve_dtype(kv_dtype, arch.dtype)

    def of(some: tuple[Layer, ...]) -> LayerTokenBytes:
        keys = values = index = 0
        for layer in some:
            if layer.attention is not None and _wanted(layer, layers):
                one = layer_token_bytes(
                    layer.attention,
                    parallel.attention_tp,
                    dtype,
                    framework,
                    dsa_scaled=dsa_scaled,
                    index_16bit=index_16bit,
                )
                keys, values, index = keys + one.keys, values + one.values, index + one.index
        return LayerTokenBytes(keys, values, index)

    if draft:
        return of(arch.draft_layers)
    return stage_size(arch.layers, parallel.pp, stage, framework, of, lambda each: each.total)


def model_token_bytes(
    arch: Architecture,
    parallel: Parallel,
    kv_dtype: str = "auto",
    *,
    framework: Framework = "sglang",
    layers: Which = "full",
    draft: bool = False,
    stage: int | None = None,
    dsa_scaled: bool = True,
    index_16bit: bool = False,
) -> int:
    """Bytes of one token on one GPU over all its layers of the wanted kind: memory-math's `k`. See `model_token_parts`."""
    return model_token_parts(
        arch,
        parallel,
        kv_dtype,
        framework=framework,
        layers=layers,
        draft=draft,
        stage=stage,
        dsa_scaled=dsa_scaled,
        index_16bit=index_16bit,
    ).total
