"""How each model type arranges its layers: one small reader per family.

Field meanings are those of the model's own configuration class (Hugging Face transformers, or the file beside the
weights). A field that a layer's cache needs must be there; one that only the weights need may be absent and is then
recorded, so that the weights refuse and the cache figures still work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from memledger.model.architecture import (
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
    ShortConvolution,
)

Layers = tuple[Layer, ...]
Mlp = DenseMlp | MoeMlp | None


class Fields:
    """A config's fields, read with the errors that a reader of a report needs."""

    def __init__(self, mapping: Mapping[str, Any], source: str) -> None:
        self._mapping = mapping
        self.source = source
        self.absent: list[str] = []
        self.notes: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands; `default` where it is absent or null."""
        found = self._mapping.get(key)
        return default if found is None else found

    def optional(self, key: str) -> int | None:
        """A whole number, None where it is absent or null."""
        found = self._mapping.get(key)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise NotModelledError(f"{self.source}: {key} is no whole number: {found!r}")
        return found

    def integer(self, *keys: str) -> int:
        """The first of the named fields that is a positive whole number."""
        for key in keys:
            found = self.optional(key)
            if found:
                return found
        raise NotModelledError(f"{self.source}: {' or '.join(keys)} is missing")

    def missing(self, key: str) -> int:
        """Records that a field only the weights need is absent; 0 in its place."""
        self.absent.append(key)
        return 0

    def weight_only(self, *keys: str) -> int:
        """A field that only the weights need: recorded when absent.

        Raises:
            NotModelledError: it is there and nothing, or no whole number.
        """
        found = {key: self.optional(key) for key in keys}
        known = next((value for value in found.values() if value), None)
        if known is not None:
            return known
        for key, value in found.items():
            if value == 0:
                raise NotModelledError(f"{self.source}: {key} is 0")
        return self.missing(keys[0])

    def head_dim(self) -> int:
        """`head_dim`, else the hidden size over the heads."""
        given = {key: self.optional(key) for key in ("head_dim", "attention_head_dim")}
        found = next((value for value in given.values() if value), None)
        for key, value in given.items():
            if value == 0 and found is None:
                raise NotModelledError(f"{self.source}: {key} is 0")
        return found or self.integer("hidden_size") // self.integer("num_attention_heads")

    def layers(self) -> int:
        """`num_hidden_layers`; newer Nemotron configs only list the layers' kinds."""
        listed = self.get("layers_block_type")
        if isinstance(listed, list) and listed and self.optional("num_hidden_layers") is None:
            return len(listed)
        return self.integer("num_hidden_layers")

    def kinds(self) -> list[str] | None:
        """`layer_types`, one per layer, where the config lists them."""
        found = self.get("layer_types")
        if found is None:
            return None
        if not isinstance(found, list) or len(found) < self.layers():
            raise NotModelledError(f"{self.source}: layer_types does not name {self.layers()} layers")
        return [str(item) for item in found[: self.layers()]]

    def periodic(self, interval: int, special: str, other: str) -> list[str]:
        """Every `interval`-th layer is `special`, counted from one."""
        return [special if (index + 1) % interval == 0 else other for index in range(self.layers())]


class Family(msgspec.Struct, frozen=True):
    """How to read one model type.

    `rope`: the model has rotary tables. `two_ropes`: two distinct tables. `splits_layers`: `num_hidden_layers` counts
    something else than the layers made. `tied`: default of `tie_word_embeddings`.
    """

    layers: Callable[[Fields], Layers]
    draft: Callable[[Fields], Layers] | None = None
    rope: bool = True
    two_ropes: bool = False
    splits_layers: bool = False
    tied: bool = False


def _attention(
    f: Fields,
    *,
    window: int | None = None,
    gated: bool = False,
    bias: bool | None = None,
    qk_norm: bool = False,
) -> Attention:
    """Plain attention from the usual fields."""
    heads, dim = f.integer("num_attention_heads"), f.head_dim()
    return Attention(
        query_heads=heads,
        kv_heads=f.optional("num_key_value_heads") or heads,
        k_dim=dim,
        v_dim=f.optional("v_head_dim") or dim,
        window=window,
        gated_output=gated,
        bias=bool(f.get("attention_bias", False)) if bias is None else bias,
        qk_norm=qk_norm,
    )


def _latent(f: Fields) -> LatentAttention:
    """Latent attention (DeepSeek's names)."""
    return LatentAttention(
        query_heads=f.integer("num_attention_heads"),
        latent_dim=f.integer("kv_lora_rank"),
        rope_dim=f.optional("qk_rope_head_dim") or 0,
        nope_dim=f.integer("qk_nope_head_dim"),
        v_dim=f.integer("v_head_dim"),
        q_lora_rank=f.optional("q_lora_rank"),
        index_dim=f.optional("index_head_dim"),
        index_heads=f.optional("index_n_heads"),
        gated_output=bool(f.get("mla_use_output_gate", False)),
    )


def _windowed(f: Fields) -> list[int | None]:
    """The window of each layer of a model that says so with the usual fields; None for a layer that keeps every token."""
    count, window = f.layers(), f.optional("sliding_window")
    kinds = f.kinds()
    if kinds is not None:
        odd = set(kinds) - {"full_attention", "sliding_attention", "attention"}
        if odd:
            raise NotModelledError(
                f"{f.source}: layers of type {', '.join(sorted(odd))} in a model read as plain attention"
            )
        if "sliding_attention" in kinds and not window:
            raise NotModelledError(f"{f.source}: sliding layers without sliding_window")
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if not window or f.get("use_sliding_window") is False:
        return [None] * count
    if f.get("use_sliding_window"):
        first = f.optional("max_window_layers") or 0
        return [window if index >= first else None for index in range(count)]
    positions = f.optional("max_position_embeddings")
    return [None if positions and window >= positions else window] * count


def _shared_width(f: Fields) -> int:
    """All shared experts' intermediate size together."""
    named = f.optional("shared_expert_intermediate_size") or f.optional("moe_shared_expert_intermediate_size")
    count = f.optional("n_shared_experts") or f.optional("num_shared_experts") or 0
    if named:
        return named * max(1, count)
    return count * (f.optional("moe_intermediate_size") or 0)


def _experts(f: Fields, *, shared_gate: bool = False, gated: bool = True, bias: bool = False) -> MoeMlp:
    """Routed experts from the usual fields."""
    return MoeMlp(
        experts=f.weight_only("num_experts", "n_routed_experts", "num_local_experts"),
        intermediate=f.weight_only("moe_intermediate_size", "intermediate_size"),
        shared_intermediate=_shared_width(f),
        shared_gate=shared_gate,
        gated=gated,
        width=f.optional("moe_latent_size") or f.optional("routed_expert_hidden_size"),
        bias=bias,
    )


def _dense(f: Fields, *, gated: bool = True, key: str = "intermediate_size") -> DenseMlp:
    return DenseMlp(f.weight_only(key), gated)


def _after_dense(f: Fields, index: int, *, shared_gate: bool = False) -> Mlp:
    """DeepSeek's rule: the first `first_k_dense_replace` layers dense, then experts every `moe_layer_freq` layers.

    Without a word about experts every layer is dense.
    """
    if not any(
        f.optional(key) for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_intermediate_size")
    ):
        return _dense(f)
    frequency = f.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        sparse = bool(frequency[index])
    else:
        sparse = index >= (f.optional("first_k_dense_replace") or 0) and index % int(frequency) == 0
    return _experts(f, shared_gate=shared_gate) if sparse else _dense(f)


def _qwen_mlp(f: Fields, index: int, *, shared_gate: bool) -> Mlp:
    """Qwen's rule: experts every `decoder_sparse_step` layers except `mlp_only_layers`; dense without experts."""
    step = f.optional("decoder_sparse_step") or 1
    sparse = f.optional("num_experts") and index not in f.get("mlp_only_layers", []) and (index + 1) % step == 0
    return _experts(f, shared_gate=shared_gate) if sparse else _dense(f)


def _plain(*, bias: bool | None = None, qk_norm: bool = False, gated: bool = True) -> Callable[[Fields], Layers]:
    """Attention and a dense block in every layer."""

    def read(f: Fields) -> Layers:
        mlp = _dense(f, gated=gated)
        return tuple(Layer(_attention(f, window=w, bias=bias, qk_norm=qk_norm), mlp=mlp) for w in _windowed(f))

    return read


def _mixtral(f: Fields) -> Layers:
    mlp = MoeMlp(f.integer("num_local_experts"), f.weight_only("intermediate_size"))
    return tuple(Layer(_attention(f, window=w), mlp=mlp) for w in _windowed(f))


def _qwen3_moe(f: Fields) -> Layers:
    return tuple(
        Layer(_attention(f, window=w, qk_norm=True), mlp=_qwen_mlp(f, i, shared_gate=False))
        for i, w in enumerate(_windowed(f))
    )


def _delta_net(f: Fields) -> GatedDeltaNet:
    return GatedDeltaNet(
        k_heads=f.integer("linear_num_key_heads"),
        v_heads=f.integer("linear_num_value_heads"),
        k_dim=f.integer("linear_key_head_dim"),
        v_dim=f.integer("linear_value_head_dim"),
        conv_kernel=f.integer("linear_conv_kernel_dim"),
    )


def _qwen_gated_attention(f: Fields) -> Attention:
    return _attention(f, gated=bool(f.get("attn_output_gate", True)), qk_norm=True)


def _qwen_hybrid(f: Fields) -> Layers:
    """Qwen3-Next, Qwen3.5: a gated delta net, and gated attention every `full_attention_interval` layers."""
    kinds = f.kinds() or f.periodic(f.optional("full_attention_interval") or 4, "full_attention", "linear_attention")
    state, attention = _delta_net(f), _qwen_gated_attention(f)
    made = []
    for index, kind in enumerate(kinds):
        mlp = _qwen_mlp(f, index, shared_gate=True)
        if kind == "full_attention":
            made.append(Layer(attention, mlp=mlp))
        elif kind == "linear_attention":
            made.append(Layer(state=state, mlp=mlp))
        else:
            raise NotModelledError(f"{f.source}: layer type {kind!r} in a Qwen hybrid")
    return tuple(made)


def _qwen_hybrid_draft(f: Fields) -> Layers:
    """The prediction module is a full-attention layer; Qwen3-Next's config does not count it (one, by its class)."""
    count = f.get("mtp_num_hidden_layers", f.get("num_nextn_predict_layers"))
    if count is None:
        count = 1 if f.get("model_type", "").startswith("qwen3_next") else 0
    mlp = _qwen_mlp(f, f.layers() - 1, shared_gate=True)
    return (Layer(_qwen_gated_attention(f), mlp=mlp),) * int(count)


def _deepseek(f: Fields) -> Layers:
    """DeepSeek and its heirs. `indexer_types` "shared": the layer reuses a leader's choice and stores no index keys."""
    attention, kinds = _latent(f), f.get("indexer_types")
    follower = msgspec.structs.replace(attention, index_dim=None, index_heads=None)
    made = []
    for index in range(f.layers()):
        shares = isinstance(kinds, list) and index < len(kinds) and kinds[index] == "shared"
        made.append(Layer(follower if shares else attention, mlp=_after_dense(f, index)))
    return tuple(made)


def _deepseek_draft(f: Fields) -> Layers:
    count = f.optional("num_nextn_predict_layers") or 0
    return (Layer(_latent(f), mlp=_experts(f)),) * count if count else ()


def _glm4_moe(f: Fields) -> Layers:
    attention = _attention(f, qk_norm=bool(f.get("use_qk_norm", False)))
    return tuple(Layer(attention, mlp=_after_dense(f, index)) for index in range(f.layers()))


def _glm4_moe_draft(f: Fields) -> Layers:
    count = f.optional("num_nextn_predict_layers") or 0
    return (Layer(_attention(f, qk_norm=bool(f.get("use_qk_norm", False))), mlp=_experts(f)),) * count


def _kimi_linear(f: Fields) -> Layers:
    """Kimi-Linear and Kimi-K3: `linear_attn_config` numbers its layers from one."""
    linear = f.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise NotModelledError(f"{f.source}: linear_attn_config is missing")
    inner = Fields(linear, f"{f.source}, linear_attn_config")
    full, recurrent = set(inner.get("full_attn_layers", [])), set(inner.get("kda_layers", []))
    state = KimiDeltaAttention(
        heads=inner.integer("num_heads"),
        head_dim=inner.integer("head_dim"),
        conv_kernel=inner.integer("short_conv_kernel_size"),
        full_rank_gate=bool(inner.get("use_full_rank_gate", False)),
    )
    attention, made = _latent(f), []
    for index in range(f.layers()):
        if (index + 1 in full) == (index + 1 in recurrent):
            raise NotModelledError(f"{f.source}: layer {index + 1} is not in exactly one list of linear_attn_config")
        mlp = _after_dense(f, index)
        made.append(Layer(attention, mlp=mlp) if index + 1 in full else Layer(state=state, mlp=mlp))
    return tuple(made)


def _bailing_kinds(f: Fields) -> list[bool]:
    """Which layers have full attention: the last of each group, and what is left over after whole groups."""
    group, count = f.integer("layer_group_size"), f.layers()
    return [(index + 1) % group == 0 or index >= count // group * group for index in range(count)]


def _bailing_hybrid(f: Fields) -> Layers:
    """Ling 3: Kimi delta attention and latent attention."""
    if f.get("linear_attention", "kda") != "kda":
        raise NotModelledError(f"{f.source}: linear_attention {f.get('linear_attention')!r}")
    state = KimiDeltaAttention(f.integer("num_attention_heads"), f.head_dim(), f.integer("short_conv_kernel_size"))
    attention = _latent(f)
    return tuple(
        Layer(attention, mlp=_after_dense(f, i)) if full else Layer(state=state, mlp=_after_dense(f, i))
        for i, full in enumerate(_bailing_kinds(f))
    )


def _bailing_linear(f: Fields) -> Layers:
    """Ring and Ling linear 2.x: lightning attention and plain attention."""
    state = Lightning(f.integer("num_attention_heads"), f.head_dim())
    attention = _attention(f, qk_norm=True)
    return tuple(
        Layer(attention, mlp=_after_dense(f, i)) if full else Layer(state=state, mlp=_after_dense(f, i))
        for i, full in enumerate(_bailing_kinds(f))
    )


def _bailing_moe(f: Fields) -> Layers:
    attention = _attention(f, bias=bool(f.get("use_qkv_bias", False)), qk_norm=bool(f.get("use_qk_norm", False)))
    return tuple(Layer(attention, mlp=_after_dense(f, index)) for index in range(f.layers()))


_NEMOTRON_KINDS: Final = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def _nemotron_pattern(f: Fields) -> str:
    pattern = f.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern
    kinds = f.get("layers_block_type")
    if isinstance(kinds, list) and all(kind in _NEMOTRON_KINDS for kind in kinds):
        return "".join(_NEMOTRON_KINDS[kind] for kind in kinds)
    raise NotModelledError(f"{f.source}: hybrid_override_pattern is missing")


def _nemotron_layer(f: Fields, kind: str) -> Layer:
    if kind == "M":
        return Layer(
            state=Mamba2(
                heads=f.integer("mamba_num_heads"),
                head_dim=f.integer("mamba_head_dim"),
                groups=f.integer("n_groups"),
                state_size=f.integer("ssm_state_size"),
                conv_kernel=f.integer("conv_kernel"),
            )
        )
    if kind == "*":
        return Layer(_attention(f))
    if kind == "E":
        return Layer(mlp=_experts(f, gated=False))
    if kind == "-":
        return Layer(mlp=_dense(f, gated=False))
    raise NotModelledError(f"{f.source}: layer kind {kind!r} in the hybrid pattern")


def _nemotron_h(f: Fields) -> Layers:
    return tuple(_nemotron_layer(f, kind) for kind in _nemotron_pattern(f))


def _nemotron_draft(f: Fields) -> Layers:
    """Prediction layers follow `mtp_hybrid_override_pattern`; attention and experts where it is not given."""
    count = f.optional("num_nextn_predict_layers") or 0
    if not count:
        return ()
    return tuple(_nemotron_layer(f, kind) for kind in f.get("mtp_hybrid_override_pattern", "*E")) * count


def _mamba2(f: Fields) -> Mamba2:
    """Mamba-2 under the `mamba_` names; a head size of "auto" is the inner width over the heads."""
    heads, head_dim = f.integer("mamba_n_heads"), f.get("mamba_d_head", "auto")
    if head_dim == "auto":
        inner = f.optional("mamba_d_ssm") or f.integer("mamba_expand") * f.integer("hidden_size")
        if inner % heads:
            raise NotModelledError(f"{f.source}: an inner width of {inner} for {heads} Mamba heads")
        head_dim = inner // heads
    else:
        head_dim = f.integer("mamba_d_head")
    groups, state, conv = f.integer("mamba_n_groups"), f.integer("mamba_d_state"), f.integer("mamba_d_conv")
    return Mamba2(heads, head_dim, groups, state, conv)


def _granite_hybrid(f: Fields) -> Layers:
    state = _mamba2(f)
    attention = _attention(f)
    shared = f.weight_only("shared_intermediate_size")
    experts = f.optional("num_local_experts") or 0
    mlp: Mlp = MoeMlp(experts, f.weight_only("intermediate_size"), shared) if experts else DenseMlp(shared)
    kinds = f.kinds()
    if kinds is None:
        counts = f.get("_layer_counts")
        if not isinstance(counts, Mapping):
            raise NotModelledError(f"{f.source}: layer_types is missing")
        kinds = ["mamba"] * int(counts["mamba"]) + ["attention"] * int(counts["attention"])
        f.notes.append("the order of the layers is not in the source, only their counts")
    odd = set(kinds) - {"mamba", "attention"}
    if odd:
        raise NotModelledError(f"{f.source}: layers of type {', '.join(sorted(odd))}")
    return tuple(Layer(attention, mlp=mlp) if kind == "attention" else Layer(state=state, mlp=mlp) for kind in kinds)


def _falcon_h1(f: Fields) -> Layers:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    state = _mamba2(f)
    return (Layer(_attention(f), state, _dense(f)),) * f.layers()


def _bamba(f: Fields) -> Layers:
    """Bamba: Mamba-2, attention at `attn_layer_indices`."""
    full = f.get("attn_layer_indices") or []
    state, attention, mlp = _mamba2(f), _attention(f), _dense(f)
    return tuple(
        Layer(attention, mlp=mlp) if index in full else Layer(state=state, mlp=mlp) for index in range(f.layers())
    )


def _pure_mamba2(f: Fields) -> Layers:
    state = Mamba2(
        heads=f.integer("num_heads"),
        head_dim=f.integer("head_dim"),
        groups=f.integer("n_groups"),
        state_size=f.integer("state_size"),
        conv_kernel=f.integer("conv_kernel"),
    )
    return (Layer(state=state),) * f.layers()


def _mamba1(f: Fields, expand: str, state: str, conv: str, rank: str) -> Mamba1:
    hidden, given = f.integer("hidden_size"), f.get(rank, "auto")
    return Mamba1(
        intermediate=f.integer(expand) * hidden,
        state_size=f.integer(state),
        conv_kernel=f.integer(conv),
        time_step_rank=-(-hidden // 16) if given == "auto" else int(given),
    )


def _jamba(f: Fields) -> Layers:
    state = _mamba1(f, "mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank")
    attention = _attention(f)
    period, offset = f.integer("attn_layer_period"), f.get("attn_layer_offset", 0)
    expert_period, expert_offset = f.optional("expert_layer_period") or 0, f.get("expert_layer_offset", 0)
    experts = f.optional("num_experts") or 1
    made = []
    for index in range(f.layers()):
        sparse = experts > 1 and expert_period and index % expert_period == expert_offset
        mlp: Mlp = MoeMlp(experts, f.weight_only("intermediate_size")) if sparse else _dense(f)
        full = index % period == offset
        made.append(Layer(attention if full else None, None if full else state, mlp))
    return tuple(made)


def _falcon_mamba(f: Fields) -> Layers:
    state = Mamba1(
        intermediate=f.optional("intermediate_size") or f.integer("expand") * f.integer("hidden_size"),
        state_size=f.integer("state_size"),
        conv_kernel=f.integer("conv_kernel"),
        time_step_rank=f.optional("time_step_rank"),
    )
    return (Layer(state=state),) * f.layers()


def _minimax(f: Fields) -> Layers:
    """MiniMax-Text-01 and M1: lightning attention, full attention where `attn_type_list` is 1."""
    types = f.get("attn_type_list")
    kinds = f.kinds()
    if kinds is None and isinstance(types, list) and len(types) >= f.layers():
        kinds = ["full_attention" if kind == 1 else "linear_attention" for kind in types[: f.layers()]]
    if kinds is None:
        raise NotModelledError(f"{f.source}: attn_type_list is missing")
    state, attention = Lightning(f.integer("num_attention_heads"), f.head_dim()), _attention(f)
    shared = f.get("shared_intermediate_size", 0)
    mlp = MoeMlp(f.integer("num_local_experts"), f.weight_only("intermediate_size"), int(shared))
    return tuple(
        Layer(attention, mlp=mlp) if kind == "full_attention" else Layer(state=state, mlp=mlp) for kind in kinds
    )


def _minimax_m2(f: Fields) -> Layers:
    attention = _attention(f, qk_norm=bool(f.get("use_qk_norm", False)))
    mlp = MoeMlp(f.integer("num_local_experts"), f.weight_only("intermediate_size"))
    return (Layer(attention, mlp=mlp),) * f.layers()


def _gpt_oss(f: Fields) -> Layers:
    """Alternate sliding and full layers, the first sliding."""
    windows = _windowed(f) if f.kinds() else _every(f, 2)
    mlp = MoeMlp(f.integer("num_local_experts"), f.weight_only("intermediate_size"), bias=True)
    return tuple(Layer(_attention(f, window=w, bias=True), mlp=mlp) for w in windows)


def _every(f: Fields, interval: int) -> list[int | None]:
    """Full attention in every `interval`-th layer (counted from one), a window in the others."""
    window = f.integer("sliding_window")
    return [None if (index + 1) % interval == 0 else window for index in range(f.layers())]


def _laguna(f: Fields) -> Layers:
    """Laguna: each layer has its own number of query heads, and a gate per head (`gating` "per-head" or true) or per element."""
    heads = f.get("num_attention_heads_per_layer")
    if heads is None:
        heads = [f.integer("num_attention_heads")] * f.layers()
    whole = all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in heads)
    if not isinstance(heads, list) or len(heads) != f.layers() or not whole:
        raise NotModelledError(f"{f.source}: num_attention_heads_per_layer does not name {f.layers()} layers")
    gating = f.get("gating", True)
    made = []
    for index, window in enumerate(_windowed(f)):
        attention = msgspec.structs.replace(
            _attention(f, window=window, qk_norm=True),
            query_heads=heads[index],
            gated_output=bool(gating) and gating is not True and gating != "per-head",
            head_gate=gating is True or gating == "per-head",
        )
        made.append(Layer(attention, mlp=_qwen_mlp(f, index, shared_gate=False)))
    return tuple(made)


def _gemma2(f: Fields) -> Layers:
    windows = _windowed(f) if f.kinds() else _every(f, 2)
    return tuple(Layer(_attention(f, window=w), mlp=_dense(f), post_norms=True) for w in windows)


def _gemma3(f: Fields) -> Layers:
    windows = _windowed(f) if f.kinds() else _every(f, f.optional("sliding_window_pattern") or 6)
    return tuple(Layer(_attention(f, window=w, qk_norm=True), mlp=_dense(f), post_norms=True) for w in windows)


def _gemma4(f: Fields) -> Layers:
    """Gemma 4: full layers have their own head size and KV heads; experts stand beside the dense block."""
    if f.optional("num_kv_shared_layers") or f.optional("hidden_size_per_layer_input"):
        raise NotModelledError(f"{f.source}: layers that share KV, or per-layer inputs")
    if f.kinds() is None:
        raise NotModelledError(f"{f.source}: layer_types is missing")
    sliding = _attention(f, window=f.integer("sliding_window"), qk_norm=True)
    dim = f.optional("global_head_dim") or f.head_dim()
    full = Attention(
        query_heads=sliding.query_heads,
        kv_heads=f.optional("num_global_key_value_heads") or sliding.kv_heads,
        k_dim=dim,
        v_dim=dim,
        qk_norm=True,
        shared_kv_projection=bool(f.get("attention_k_eq_v", False)),
    )
    mlp: Mlp = _dense(f)
    if f.get("enable_moe_block"):
        mlp = MoeMlp(
            f.integer("num_experts"),
            f.weight_only("moe_intermediate_size"),
            shared_intermediate=f.weight_only("intermediate_size"),
            beside_dense=True,
        )
    return tuple(Layer(sliding if window else full, mlp=mlp, post_norms=True) for window in _windowed(f))


def _llama4(f: Fields) -> Layers:
    """Llama 4: three chunked layers, then one full; experts every `interleave_moe_layer_step` layers."""
    chunk, step = f.optional("attention_chunk_size"), f.integer("interleave_moe_layer_step")
    nope = f.get("no_rope_layers")
    width = f.weight_only("intermediate_size")
    experts = MoeMlp(f.integer("num_local_experts"), width, shared_intermediate=width)
    dense = _dense(f, key="intermediate_size_mlp")
    f.notes.append("chunked attention is read as a sliding window of the chunk's size")
    made = []
    for index in range(f.layers()):
        full = not nope[index] if isinstance(nope, list) and len(nope) > index else (index + 1) % 4 == 0
        mlp: Mlp = experts if (index + 1) % step == 0 else dense
        made.append(Layer(_attention(f, window=None if full else chunk), mlp=mlp))
    return tuple(made)


def _lfm2(f: Fields) -> Layers:
    """LFM2: short convolutions, attention at `full_attn_idxs` or as `layer_types` says."""
    kinds = f.kinds()
    if kinds is None:
        full = f.get("full_attn_idxs")
        if not isinstance(full, list):
            raise NotModelledError(f"{f.source}: full_attn_idxs or layer_types is missing")
        kinds = ["full_attention" if index in full else "conv" for index in range(f.layers())]
    state = ShortConvolution(f.optional("conv_dim") or f.integer("hidden_size"), f.integer("conv_L_cache"))
    attention, made = _attention(f, qk_norm=True), []
    first = f.optional("num_dense_layers") or 0
    for index, kind in enumerate(kinds):
        sparse = f.optional("num_experts") and index >= first
        mlp: Mlp = _experts(f) if sparse else _dense(f)
        made.append(Layer(attention, mlp=mlp) if kind == "full_attention" else Layer(state=state, mlp=mlp))
    return tuple(made)


def _mimo_v2(f: Fields) -> Layers:
    """MiMo-V2: sliding layers (1 in `hybrid_layer_pattern`) have head counts and sizes of their own."""
    pattern = f.get("hybrid_layer_pattern")
    if not isinstance(pattern, list) or len(pattern) < f.layers():
        raise NotModelledError(f"{f.source}: hybrid_layer_pattern is missing")
    sliding = Attention(
        query_heads=f.integer("swa_num_attention_heads"),
        kv_heads=f.integer("swa_num_key_value_heads"),
        k_dim=f.integer("swa_head_dim"),
        v_dim=f.integer("swa_v_head_dim"),
        window=f.integer("sliding_window", "sliding_window_size"),
    )
    full = _attention(f)
    return tuple(Layer(sliding if pattern[i] else full, mlp=_after_dense(f, i)) for i in range(f.layers()))


def _nemotron_nas(f: Fields) -> Layers:
    """Llama-Nemotron found by search: each block says its attention and its feed-forward width, or none."""
    blocks = f.get("block_configs")
    if not isinstance(blocks, list):
        raise NotModelledError(f"{f.source}: block_configs is missing")
    heads, hidden, made = f.integer("num_attention_heads"), f.integer("hidden_size"), []
    dim = f.head_dim()
    for block in blocks:
        attention, ffn = block["attention"], block["ffn"]
        if any(part.get("replace_with_linear") for part in (attention, ffn)) or attention.get("window_length"):
            raise NotModelledError(f"{f.source}: blocks with linear layers or windows")
        kept = (
            None if attention.get("no_op") else Attention(heads, heads // int(attention["n_heads_in_group"]), dim, dim)
        )
        mlp = None
        if not ffn.get("no_op"):
            width = int(2 * float(ffn["ffn_mult"]) * hidden / 3)
            mlp = DenseMlp(-(-width // 256) * 256)
        made.append(Layer(kept, mlp=mlp))
    return tuple(made)


_BIASED: Final = Family(_plain(bias=True))
FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(_plain()),
    "mistral": Family(_plain()),
    "ministral3": Family(_plain()),
    "mistral3": Family(_plain()),
    "smollm3": Family(_plain()),
    "seed_oss": Family(_plain()),
    "ernie4_5": Family(_plain(bias=False)),
    "phi3": Family(_plain()),
    "olmo2": Family(_plain(qk_norm=True)),
    "olmo3": Family(_plain(qk_norm=True)),
    "granite": Family(_plain()),
    "internlm3": Family(_plain(bias=False)),
    "qwen2": _BIASED,
    "qwen2_vl": _BIASED,
    "qwen2_5_vl": _BIASED,
    "mimo": _BIASED,
    "qwen3": Family(_plain(qk_norm=True)),
    "qwen3_vl": Family(_plain(qk_norm=True)),
    "qwen3_moe": Family(_qwen3_moe),
    "qwen3_vl_moe": Family(_qwen3_moe),
    "qwen3_next": Family(_qwen_hybrid, _qwen_hybrid_draft),
    "qwen3_5": Family(_qwen_hybrid, _qwen_hybrid_draft),
    "qwen3_5_moe": Family(_qwen_hybrid, _qwen_hybrid_draft),
    "mixtral": Family(_mixtral),
    "deepseek_v2": Family(_deepseek, _deepseek_draft),
    "deepseek_v3": Family(_deepseek, _deepseek_draft),
    "deepseek_v32": Family(_deepseek, _deepseek_draft),
    "kimi_k2": Family(_deepseek, _deepseek_draft),
    "glm_moe_dsa": Family(_deepseek, _deepseek_draft),
    "glm4_moe_lite": Family(_deepseek, _deepseek_draft),
    "glm4_moe": Family(_glm4_moe, _glm4_moe_draft),
    "kimi_linear": Family(_kimi_linear, rope=False),
    "bailing_hybrid": Family(_bailing_hybrid, _deepseek_draft),
    "bailing_moe_linear": Family(_bailing_linear),
    "bailing_moe_v2": Family(_bailing_moe),
    "nemotron_h": Family(_nemotron_h, _nemotron_draft, rope=False),
    "nemotron-nas": Family(_nemotron_nas),
    "granitemoehybrid": Family(_granite_hybrid, rope=False, tied=True),
    "falcon_h1": Family(_falcon_h1),
    "jamba": Family(_jamba, rope=False),
    "falcon_mamba": Family(_falcon_mamba, rope=False),
    "mamba": Family(_falcon_mamba, rope=False, tied=True),
    "mamba2": Family(_pure_mamba2, rope=False),
    "bamba": Family(_bamba),
    "minimax": Family(_minimax),
    "minimax_text_01": Family(_minimax),
    "minimax_m1": Family(_minimax),
    "minimax_m2": Family(_minimax_m2),
    "gpt_oss": Family(_gpt_oss),
    "gemma2": Family(_gemma2, tied=True),
    "gemma3": Family(_gemma3, two_ropes=True, tied=True),
    "gemma4": Family(_gemma4, two_ropes=True, tied=True),
    "gemma4_unified": Family(_gemma4, two_ropes=True, tied=True),
    "laguna": Family(_laguna, two_ropes=True),
    "llama4": Family(_llama4),
    "lfm2": Family(_lfm2, tied=True),
    "lfm2_moe": Family(_lfm2, tied=True),
    "mimo_v2_flash": Family(_mimo_v2),
}


REFUSED: Final[dict[str, str]] = {
    "deepseek_v4": "its attention keeps several compressed caches with states of their own, whose layouts differ by release",
    "minimax_m3": "its sparse attention keeps index keys, whose layout was not read",
    "minimax_m3_vl": "its sparse attention keeps index keys, whose layout was not read",
    "step3p7": "its sliding layers have their own number of query heads, which its published configs lack",
    "gemma3n": "its layers share KV caches and embed each token once more in every layer",
    "zamba2": "its attention blocks are shared between layers, with weights but a cache each",
    "opt": "learned positions and projected embeddings are not modelled",
}
"""Model types that are known and not read, and why."""


def known_types() -> list[str]:
    """The model types that can be read, sorted."""
    return sorted(FAMILIES)
