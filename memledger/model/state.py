"""Recurrent state: bytes that one slot (one sequence, or one cached prefix) takes on one GPU.

Sources of the shapes: SGLang 0.5.23 `configs/mamba_utils.py`, vLLM 0.33.0 `model_executor/layers/mamba/mamba_utils.py`
(docs/arithmetic.md, "Recurrent state"). `tp` is always the attention tensor parallel size: `Parallel.attention_tp`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memledger.model.architecture import (
    Architecture,
    GatedDeltaNet,
    KimiDeltaAttention,
    Layer,
    Lightning,
    Mamba1,
    Mamba2,
    NotModelledError,
    Parallel,
    ShortConvolution,
    State,
)
from memledger.model.dtypes import element_bytes, normal_name
from memledger.model.layers import stage_size
from memledger.model.versions import release

Framework = Literal["sglang", "vllm"]

SGLANG_READS_CONFIG_SINCE = (0, 5, 9)
"""Before, the flag's default "float32" always won (SGLang 0.5.2 to 0.5.8)."""

VLLM_NEMOTRON_FLOAT32_SINCE = (0, 13, 0)
VLLM_QWEN35_CONFIG_SINCE = (0, 17, 0)


class StateBytes(msgspec.Struct, frozen=True):
    """Bytes of one slot on one GPU: the convolution's window and the temporal (ssm) state, over all layers of the GPU."""

    conv: int
    temporal: int

    @property
    def total(self) -> int:
        """Both parts."""
        return self.conv + self.temporal


def _share(count: int, tp: int, what: str) -> int:
    """`count / tp`, which must be whole: the engines refuse to start otherwise."""
    if count % tp:
        raise NotModelledError(
            f"{count} {what} do not divide by tensor parallel size {tp}: such a server does not start"
        )
    return count // tp


def mamba2_groups(groups: int, tp: int) -> int:
    """Groups over all GPUs once replicated: `groups` where they divide by `tp`, else at least one for each GPU.

    Source: both engines' `extra_groups_for_head_shards`: groups that do not divide are extended to `tp`.
    """
    if groups % tp == 0:
        return groups
    if groups > tp:
        raise NotModelledError(f"{groups} Mamba-2 groups over {tp} GPUs: neither divided nor replicated")
    return tp


def _conv_channels(state: State, tp: int) -> tuple[int, int]:
    """Channels of the convolution on one GPU, and its kernel length; (0, 1) without one."""
    if isinstance(state, GatedDeltaNet):
        _share(state.k_heads, tp, "key heads")
        _share(state.v_heads, tp, "value heads")
        width = 2 * state.k_heads * state.k_dim + state.v_heads * state.v_dim
        return _share(width, tp, "convolution channels"), state.conv_kernel
    if isinstance(state, KimiDeltaAttention):
        keys = (state.k_heads or state.heads) * (state.k_dim or state.head_dim)
        width = 2 * keys + state.heads * state.head_dim
        _share(state.heads, tp, "heads")
        return _share(width, tp, "convolution channels"), state.conv_kernel
    if isinstance(state, Mamba2):
        width = state.heads * state.head_dim + 2 * mamba2_groups(state.groups, tp) * state.state_size
        return _share(width, tp, "convolution channels"), state.conv_kernel
    if isinstance(state, Mamba1):
        return _share(state.intermediate, tp, "channels"), state.conv_kernel
    if isinstance(state, ShortConvolution):
        return _share(state.width, tp, "channels"), state.conv_kernel
    return 0, 1


def conv_elements(state: State, tp: int = 1, draft_tokens: int = 0, framework: Framework = "sglang") -> int:
    """Elements of one layer's convolution window for one slot on one GPU.

    `channels / tp * (kernel - 1)`; vLLM keeps `draft_tokens` (`num_speculative_tokens`) more columns, except for Mamba-1,
    lightning attention and the short convolution. SGLang keeps speculation's windows in a separate scratch.
    """
    channels, kernel = _conv_channels(state, tp)
    extra = 0
    if framework == "vllm" and isinstance(state, GatedDeltaNet | KimiDeltaAttention | Mamba2):
        extra = draft_tokens
    return channels * (kernel - 1 + extra) if channels else 0


def temporal_elements(state: State, tp: int = 1) -> int:
    """Elements of one layer's temporal (ssm) state for one slot on one GPU; 0 for a short convolution."""
    if isinstance(state, GatedDeltaNet):
        return _share(state.v_heads, tp, "value heads") * state.v_dim * state.k_dim
    if isinstance(state, KimiDeltaAttention):
        return _share(state.heads, tp, "heads") * state.head_dim * (state.k_dim or state.head_dim)
    if isinstance(state, Mamba2):
        return _share(state.heads, tp, "heads") * state.head_dim * state.state_size
    if isinstance(state, Mamba1):
        return _share(state.intermediate, tp, "channels") * state.state_size
    if isinstance(state, Lightning):
        return _share(state.heads, tp, "heads") * state.head_dim * state.head_dim
    return 0


def layer_state_bytes(
    state: State,
    tp: int,
    conv_dtype: str,
    ssm_dtype: str,
    framework: Framework = "sglang",
    draft_tokens: int = 0,
) -> tuple[int, int]:
    """(convolution, temporal) bytes of one layer for one slot on one GPU."""
    conv = conv_elements(state, tp, draft_tokens, framework)
    return conv * element_bytes(conv_dtype), temporal_elements(state, tp) * element_bytes(ssm_dtype)


def slot_bytes(
    arch: Architecture,
    parallel: Parallel,
    conv_dtype: str,
    ssm_dtype: str,
    framework: Framework = "sglang",
    draft_tokens: int = 0,
    stage: int | None = None,
) -> StateBytes:
    """Bytes of one slot on one GPU over all its layers with state: memory-math's `s`.

    `stage`: the pipeline stage; None for the one with the most layers with state.
    """

    def of(layers: tuple[Layer, ...]) -> StateBytes:
        conv = temporal = 0
        for layer in layers:
            if layer.state is not None:
                c, t = layer_state_bytes(
                    layer.state, parallel.attention_tp, conv_dtype, ssm_dtype, framework, draft_tokens
                )
                conv += c
                temporal += t
        return StateBytes(conv, temporal)

    return stage_size(arch.layers, parallel.pp, stage, framework, of, lambda each: each.total)


def default_dtypes(arch: Architecture, framework: Framework, version: str | None) -> tuple[str, str]:
    """(convolution, temporal) element types when no flag names them, by framework and version.

    Sources: SGLang `configs/mamba_utils.py` and `server_args.py` (0.5.2 to 0.5.23); vLLM `mamba_utils.py` and
    `model_executor/models/config.py` (0.10 to 0.33). Where versions differ and the version is unknown, nothing is
    guessed.

    Raises:
        NotModelledError: the versions differ for this model and `version` is not known.
    """
    return _sglang_dtypes(arch, version) if framework == "sglang" else _vllm_dtypes(arch, version)


def _sglang_dtypes(arch: Architecture, version: str | None) -> tuple[str, str]:
    """Convolution bfloat16; temporal float32, or from 0.5.9 what the config's `mamba_ssm_dtype` says for some families."""
    reads = arch.model_type.startswith(("qwen3_next", "qwen3_5", "nemotron_h", "falcon_h1", "jet_nemotron"))
    named = arch.state_dtype if reads and arch.state_dtype_key == "mamba_ssm_dtype" else None
    if named is None or normal_name(named) == "float32":
        return "bfloat16", "float32"
    at = release(version)
    if at is None:
        raise NotModelledError(
            f"SGLang's state type for {arch.name} is {named} from 0.5.9 and float32 before; the version is not known"
        )
    return "bfloat16", normal_name(named) if at >= SGLANG_READS_CONFIG_SINCE else "float32"


def _vllm_dtypes(arch: Architecture, version: str | None) -> tuple[str, str]:
    """Both the model's type, except KDA (float32), Nemotron-H (0.13.0+) and Qwen3.5 (0.17.0+), whose configs name one."""
    model = normal_name(arch.dtype)
    if any(isinstance(layer.state, KimiDeltaAttention) for layer in arch.layers):
        return model, "float32"
    if arch.model_type.startswith("nemotron_h"):
        since, named = VLLM_NEMOTRON_FLOAT32_SINCE, arch.state_dtype or "float32"
    elif arch.model_type.startswith("qwen3_5"):
        since, named = VLLM_QWEN35_CONFIG_SINCE, arch.state_dtype or model
    else:
        return model, model
    named = normal_name(named)
    if named == model:
        return model, model
    at = release(version)
    if at is None:
        wording = ".".join(map(str, since))
        raise NotModelledError(
            f"vLLM's state type for {arch.name} is {named} from {wording} and {model} before; the version is not known"
        )
    return model, named if at >= since else model
