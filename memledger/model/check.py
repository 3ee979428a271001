"""Logged figures against the model's arithmetic: what each entry of a rank should be, and whether it is.

Nothing is adjusted: an entry keeps its figure, and its detail gets what the model says beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from memledger.ledger import Entry, Rank, Server
from memledger.model import kv, sglang_inputs, sglang_state, state, weights
from memledger.model.architecture import Architecture, LatentAttention, NotModelledError, Parallel
from memledger.model.dtypes import is_float8, normal_name
from memledger.model.sglang_rules import version_of
from memledger.units import MIB

SHARE: Final = 0.005
"""KV and state agree within this share of the modelled size, or within the log's own rounding."""
UNIFIED_MEMORY_MOVES: Final = 512 * MIB
"""What SGLang's weights figure, a fall of free memory, may be off by where free memory is the system's."""
_LARGEST_PAGE: Final = 128
_KV_POOLS: Final = frozenset(
    {"kv_cache/k", "kv_cache/v", "kv_cache/latent", "kv_cache/index", "kv_cache/swa_k", "kv_cache/swa_v"}
)
_STATE_POOLS: Final = frozenset({"recurrent_state/conv", "recurrent_state/ssm"})
_OWN_DRAFT: Final = ("mtp", "nextn")
"""Speculation with the model's own prediction layers."""
_ALL_TO_ALL: Final = frozenset({"deepep", "mooncake", "ascend_fuseep"})
"""SGLang's backends with which shared experts are on every rank (`models/deepseek_v2.py`, 0.5.5 to 0.5.23)."""
_PREDICTION_CLASS: Final = re.compile(r"(?:NextN|MTP)$", re.IGNORECASE)
"""SGLang's classes of a model's own prediction module (`DeepseekV3ForCausalLMNextN`, `Qwen3_5ForCausalLMMTP`)."""
_NO_DRAFT_MODEL: Final = frozenset({"ngram", "suffix", "lookahead", "[ngram]"})


class Expected(msgspec.Struct, frozen=True):
    """What the model gives for a logged size: `bytes`, the range in which the logged figure should lie, and on what terms.

    `unit`: what was multiplied (`token`, `slot`), `unit_bytes` its size; `assumed`: what the log does not say.
    """

    bytes: int
    low: int
    high: int
    unit: str | None = None
    unit_bytes: int | None = None
    dtype: str | None = None
    assumed: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    def agrees(self, logged: int, rounding: int) -> bool:
        """Whether a logged size, known to within `rounding`, lies in the range."""
        return self.low - rounding <= logged <= self.high + rounding

    def detail(self, logged: int, rounding: int) -> dict[str, Any]:
        """For an entry's detail: names are part of the JSON contract (docs/json.md)."""
        found: dict[str, Any] = {
            "bytes": self.bytes,
            "low_bytes": self.low,
            "high_bytes": self.high,
            "agrees": self.agrees(logged, rounding),
        }
        if self.unit is not None:
            found |= {f"{self.unit}_bytes": self.unit_bytes}
        if self.dtype is not None:
            found["dtype"] = self.dtype
        if self.assumed:
            found["assumed"] = list(self.assumed)
        if self.causes and not found["agrees"]:
            found["causes"] = list(self.causes)
        return found


def parallel_of(server: Server) -> Parallel:
    """How the server spreads its model.

    Raises:
        NotModelledError: the log does not say, or the way is not modelled.
    """
    config = server.config
    tp = config.get("tp_size")
    if not isinstance(tp, int) or tp < 1:
        raise NotModelledError("the tensor parallel size is not in the log")
    for name, words in (("attn_cp_size", "context parallel attention"),):
        if (config.get(name) or 1) > 1:
            raise NotModelledError(f"{words} is not modelled")
    dense = config.get("moe_dense_tp_size")
    return Parallel(
        tp=tp,
        pp=config.get("pp_size") or 1,
        ep=config.get("ep_size") or 1,
        dp=config.get("dp_size") or 1,
        dp_attention=bool(config.get("dp_attention")),
        moe_dense_tp=dense if isinstance(dense, int) and dense > 0 else None,
        dp_lm_head=bool(config.get("dp_lm_head")),
        whole_shared_experts=config.get("moe_communication_backend") in _ALL_TO_ALL,
    )


def stage_of(rank: Rank, parallel: Parallel) -> int | None:
    """The rank's pipeline stage; None where there is one only.

    Raises:
        NotModelledError: there are several, and the log does not say which is the rank's.
    """
    if parallel.pp == 1:
        return None
    if rank.pp is None:
        raise NotModelledError("the rank's pipeline stage is not in the log")
    return rank.pp


def model_dtype(server: Server, arch: Architecture) -> str:
    """The 16-bit (or wider) element type: the flag's, else the config's."""
    named = server.config.get("dtype")
    if isinstance(named, str) and normal_name(named) != "auto":
        return normal_name(named)
    return arch.dtype


# ------------------------------------------------------------------------------------------------------------- weights


def expected_weights(server: Server, arch: Architecture, rank: Rank, entry: Entry) -> Expected:
    """The weights of one rank.

    Raises:
        NotModelledError: something is in the figure, or missing from it, that is not modelled.
    """
    config, parallel = server.config, parallel_of(server)
    _refuse_weights(server, arch)
    sglang = server.framework == "sglang"
    # vLLM prints one figure for the model and what drafts for it; SGLang loads and prints the draft apart.
    draft = False if sglang else own_draft(server, arch)
    dtype = model_dtype(server, arch)
    readings = [
        weights.weight_bytes(
            arch,
            parallel,
            "sglang" if sglang else "vllm",
            dtype=dtype,
            draft=draft,
            language_only=language_only,
            stage=stage_of(rank, parallel),
        )
        for language_only in ((False, True) if arch.multimodal else (False,))
    ]
    nearest = min(readings, key=lambda each: abs(each.bytes - entry.bytes))
    assumed = list(nearest.notes)
    if len(readings) > 1:
        assumed = [note for note in assumed if "vision" not in note]
        assumed.append("whether the vision tower is loaded is not in the log")
    causes = ["another quantisation or kernel layout than the model's config says", "modules beside the language model"]
    if config.get("speculative_algorithm"):
        causes.insert(0, "draft layers")
    moving = UNIFIED_MEMORY_MOVES if sglang and rank.gpu.unified_memory else 0
    if moving:
        assumed.append("on unified memory the page cache and other programs move the reading")
    return Expected(
        nearest.bytes,
        min(each.low for each in readings) - moving,
        max(each.high for each in readings) + moving,
        assumed=tuple(assumed),
        causes=tuple(causes),
    )


def _refuse_weights(server: Server, arch: Architecture) -> None:
    config = server.config
    if config.get("enable_lora") or config.get("lora"):
        raise NotModelledError("LoRA slots are in the figure and not modelled")
    if config.get("cpu_offload_gib") or config.get("cpu_offload_gb"):
        raise NotModelledError("a part of the weights is kept on the host")
    named = config.get("quantization")
    if isinstance(named, str) and named.lower() not in {"none", "auto"} and arch.quantization is None:
        raise NotModelledError(f"the weights are quantised ({named}), which the config found does not describe")
    experts = any(type(layer.mlp).__name__ == "MoeMlp" for layer in arch.layers)
    if server.framework == "vllm" and (config.get("dp_size") or 1) > 1 and experts and not config.get("ep_size"):
        raise NotModelledError("how experts are spread over data parallel ranks is not modelled")


def draft_is_own(server: Server, rank: Rank) -> bool:
    """Whether what SGLang loaded as a draft is the model's own prediction module, by the class name it printed."""
    types = [e.detail.get("type") for e in rank.entries if e.account == "weights/draft"]
    return bool(types) and all(isinstance(name, str) and _PREDICTION_CLASS.search(name) for name in types)


def _refuse_other_drafts(server: Server, rank: Rank) -> None:
    if not draft_is_own(server, rank):
        raise NotModelledError("the draft's layers are not known")
    if (server.config.get("pp_size") or 1) > 1:
        raise NotModelledError("a draft over pipeline stages is not modelled")


def expected_draft_weights(server: Server, arch: Architecture, rank: Rank, entry: Entry) -> Expected:
    """SGLang's second load: one prediction module with its own embedding and head.

    Raises:
        NotModelledError: another model drafts, or its layers are not known.
    """
    _refuse_other_drafts(server, rank)
    _refuse_weights(server, arch)
    found = weights.module_bytes(arch, parallel_of(server), "sglang", dtype=model_dtype(server, arch))
    causes = ("the module's own quantisation", "an embedding or head that is shared from the start")
    return Expected(found.bytes, found.low, found.high, assumed=found.notes, causes=causes)


def released_after_draft(server: Server, arch: Architecture, rank: Rank) -> int:
    """Bytes that a prediction module gives back once the target's embedding and head are shared with it.

    Raises:
        NotModelledError: another model drafts, or it shares nothing.
    """
    _refuse_other_drafts(server, rank)
    if not arch.draft_layers:
        raise NotModelledError("the model's prediction (MTP) layers are not in the config found")
    return weights.shared_with_target(arch, parallel_of(server), model_dtype(server, arch))


def own_draft(server: Server, arch: Architecture) -> bool:
    """Whether the model's own prediction layers are loaded for speculation.

    Raises:
        NotModelledError: another model drafts, or the layers are not known.
    """
    method = str(server.config.get("speculative_algorithm") or "").lower()
    if not method or method in _NO_DRAFT_MODEL:
        return False
    if not any(method == name or method.endswith(f"_{name}") or method.startswith(name) for name in _OWN_DRAFT):
        raise NotModelledError(f"speculation with {method}: the draft model's layers are not known")
    if not arch.draft_layers:
        raise NotModelledError("the model's prediction (MTP) layers are not in the config found")
    return True


# ------------------------------------------------------------------------------------------------------ SGLang's pools


def expected_kv(server: Server, arch: Architecture, rank: Rank, entry: Entry) -> Expected:
    """One of SGLang's KV pools: bytes of a token times the pool's rows (its tokens and one page).

    Source: `mem_cache/memory_pool.py`: every buffer has `tokens + page_size` rows.
    """
    parallel = parallel_of(server)
    if (server.config.get("dcp_size") or 1) > 1:
        raise NotModelledError("decode context parallelism is not modelled")
    sliding = entry.account.startswith("kv_cache/swa_")
    tokens = entry.detail.get("tokens")
    if not isinstance(tokens, int):
        tokens = rank.capacity.kv_swa_tokens if sliding else rank.capacity.kv_tokens
    if not tokens:
        raise NotModelledError("the pool's tokens are not in the log")
    dtype, assumed = _kv_dtype(server, arch, entry)
    windows = any(e.account.startswith("kv_cache/swa_") for e in rank.entries)
    sizes = _token_sizes(server, arch, rank, parallel, dtype, "sliding" if sliding else "full" if windows else "all")
    page = server.config.get("page_size")
    pages = (page, page) if isinstance(page, int) else (1, _LARGEST_PAGE)
    # Where the log does not name a sparse cache's layout, the reading that its figure fits is taken.
    unit = min((u for size in sizes for u in _parts(rank, entry, size)), key=lambda u: abs(u * tokens - entry.bytes))
    if not unit:
        raise NotModelledError(f"the model keeps nothing in {entry.account}")
    low, high = unit * (tokens + pages[0]), unit * (tokens + pages[1])
    middle = low
    return Expected(
        middle,
        int(low * (1 - SHARE)),
        int(high * (1 + SHARE)),
        "token",
        unit,
        dtype,
        tuple(assumed),
        _kv_causes(entry.bytes / middle, arch, parallel),
    )


def _parts(rank: Rank, entry: Entry, size: kv.LayerTokenBytes) -> tuple[int, ...]:
    """Bytes of a token in this pool: with and without the index keys where the log does not say whether they are in it."""
    name = entry.account.removeprefix("kv_cache/").removeprefix("swa_")
    if name != "latent":
        return ({"k": size.keys, "v": size.values, "index": size.index}[name],)
    if entry.detail.get("includes_index"):
        return (size.keys + size.index,)
    if not size.index or any(e.account == "kv_cache/index" for e in rank.entries):
        return (size.keys,)
    return (size.keys, size.keys + size.index)


def _kv_dtype(server: Server, arch: Architecture, entry: Entry) -> tuple[str, list[str]]:
    """The pool's element type, and what had to be assumed for it."""
    for named in (
        entry.detail.get("dtype"),
        server.config.get("kv_cache_dtype"),
        server.config.get("kv_cache_dtype_requested"),
    ):
        if isinstance(named, str) and named:
            name = normal_name(named)
            return (model_dtype(server, arch) if name == "auto" else name), []
    return model_dtype(server, arch), ["the KV cache has the model's type"]


def _token_sizes(
    server: Server,
    arch: Architecture,
    rank: Rank,
    parallel: Parallel,
    dtype: str,
    layers: kv.Which,
    *,
    draft: bool = False,
) -> list[kv.LayerTokenBytes]:
    """The sizes that a token may have: several where the layout of an 8-bit sparse cache is not known."""
    sparse = any(isinstance(a, LatentAttention) and a.index_dim for a in (layer.attention for layer in arch.layers))
    layouts = (True, False) if sparse and is_float8(normal_name(dtype)) else (True,)
    return [
        kv.model_token_parts(
            arch,
            parallel,
            dtype,
            framework="sglang",
            layers=layers,
            draft=draft,
            stage=None if draft else stage_of(rank, parallel),
            dsa_scaled=scaled,
            index_16bit=rank.gpu.kind == "npu" or server.config.get("device") == "npu",
        )
        for scaled in layouts
    ]


def _kv_causes(ratio: float, arch: Architecture, parallel: Parallel) -> tuple[str, ...]:
    """What would give `ratio` times the modelled size, the likeliest first."""
    keeping = len(arch.full_attention_layers)
    found = []
    if keeping and _near(ratio, len(arch.layers) / keeping) and keeping < len(arch.layers):
        found.append(f"all {len(arch.layers)} layers were given KV, the model needs {keeping}")
    if arch.draft_layers and keeping and _near(ratio, (keeping + len(arch.draft_layers)) / keeping):
        found.append("draft layers are in the pool")
    for factor, words in ((2.0, "an element type of twice the width"), (0.5, "an element type of half the width")):
        if _near(ratio, factor):
            found.append(words)
    if parallel.attention_tp > 1 and (_near(ratio, parallel.attention_tp) or _near(ratio, 1 / parallel.attention_tp)):
        found.append("heads are divided over the GPUs in another way")
    return tuple(found) or ("another element type", "padded or additional layers", "another model than the name says")


def _near(ratio: float, wanted: float) -> bool:
    return abs(ratio / wanted - 1) < 2 * SHARE


def expected_state(server: Server, arch: Architecture, rank: Rank, entry: Entry) -> Expected:
    """SGLang's pool of recurrent state, conv or ssm: bytes of a slot times the pool's rows (slots and a padding row)."""
    rows = entry.detail.get("rows")
    if not isinstance(rows, int):
        raise NotModelledError("the number of slots is not in the log")
    parallel = parallel_of(server)
    named = server.config.get("state_dtype")
    conv, ssm = state.default_dtypes(arch, "sglang", server.framework_version) if not named else ("bfloat16", named)
    size = state.slot_bytes(arch, parallel, conv, ssm, "sglang", stage=stage_of(rank, parallel))
    which = entry.account.rpartition("/")[2]
    unit, dtype = (size.conv, conv) if which == "conv" else (size.temporal, ssm)
    if not unit:
        raise NotModelledError(f"the model keeps nothing in {entry.account}")
    middle = unit * rows
    ratio, over = entry.bytes / middle, parallel.attention_tp
    causes = []
    if over > 1 and abs(entry.bytes - middle * over) <= max(2 * SHARE * entry.bytes, entry.tolerance_bytes):
        causes.append(f"the state is not divided over the {over} GPUs: each holds all of it")
    causes += [
        words
        for factor, words in ((2.0, "an element type of twice the width"), (0.5, "an element type of half the width"))
        if _near(ratio, factor)
    ]
    return Expected(
        middle,
        int(middle * (1 - SHARE)),
        int(middle * (1 + SHARE)),
        "slot",
        unit,
        normal_name(dtype),
        (),
        tuple(causes) or ("another element type", "another model than the name says"),
    )


def expected_draft_kv(server: Server, arch: Architecture, rank: Rank, entry: Entry) -> Expected:
    """The pool of a draft that is the model's own prediction module: one module's layer, the target's layout.

    Raises:
        NotModelledError: another model drafts, or the log lacks the pool's tokens.
    """
    _refuse_other_drafts(server, rank)
    tokens = entry.detail.get("tokens")
    if not isinstance(tokens, int) or tokens < 1:
        raise NotModelledError("the draft pool's tokens are not in the log")
    if not arch.draft_layers:
        raise NotModelledError("the model's prediction (MTP) layers are not in the config found")
    parallel = parallel_of(server)
    dtype, assumed = _kv_dtype(server, arch, entry)
    sizes = _token_sizes(server, arch, rank, parallel, dtype, "all", draft=True)
    modules = max(1, sum(1 for layer in arch.draft_layers if layer.attention is not None))
    wanted = {"k": "keys", "v": "values", "index": "index"}.get(str(entry.detail.get("part")))
    units = [getattr(size, wanted) if wanted else size.total for size in sizes]
    unit = min({unit // by for unit in units for by in (1, modules)}, key=lambda u: abs(u * tokens - entry.bytes))
    page = server.config.get("page_size")
    pages = (page, page) if isinstance(page, int) else (1, _LARGEST_PAGE)
    low, high = unit * (tokens + pages[0]), unit * (tokens + pages[1])
    causes = ("another element type", "more prediction layers than counted")
    return Expected(low, int(low * (1 - SHARE)), int(high * (1 + SHARE)), "token", unit, dtype, tuple(assumed), causes)


def expected_speculative_state(server: Server, arch: Architecture, rank: Rank, entry: Entry) -> Expected:
    """SGLang's states kept while drafts are verified: `(R + 1) * D` temporal ones, and the convolution's windows.

    Source: `mem_cache/memory_pool.py: MambaPool` (see `sglang_state.state_pool`).

    Raises:
        NotModelledError: the draft tokens or the requests are not in the log, or replay rings take their place.
    """
    if entry.detail.get("replay_ring"):
        raise NotModelledError("replay rings are not modelled")
    config, slots = server.config, entry.detail.get("slots")
    tokens, requests = config.get("speculative_draft_tokens"), rank.capacity.max_running_requests
    span = version_of(server.framework_version)
    if not isinstance(tokens, int) or not isinstance(slots, int):
        raise NotModelledError("the draft tokens of speculation are not in the log")
    if span is None:
        raise NotModelledError("speculative states differ by version, which is not known")
    slot = sglang_inputs.state_slot(
        arch, parallel_of(server), version=server.framework_version, state_dtype=config.get("state_dtype")
    )
    if slot is None:
        raise NotModelledError(f"the model keeps nothing in {entry.account}")
    pool = sglang_state.state_pool(
        slot,
        slots,
        version=span[0],
        requests=requests,
        speculation=sglang_state.Speculation(tokens, topk=config.get("speculative_topk")),
        cuda=rank.gpu.kind != "npu",
        prefill_worker=config.get("disaggregation_mode") == "prefill",
    )
    size = pool.speculative_conv if entry.account.endswith("conv") else pool.speculative_ssm
    if not size:
        raise NotModelledError(f"the model keeps nothing in {entry.account}")
    causes = ("another number of running requests", "another element type")
    return Expected(size, int(size * (1 - SHARE)), int(size * (1 + SHARE)), causes=causes)


# ---------------------------------------------------------------------------------------------------------- all of them

Check = Callable[[Server, Architecture, Rank, Entry], Expected]
_SGLANG_ONLY: Final[dict[str, Check]] = {
    "weights/draft": expected_draft_weights,
    "kv_cache/draft": expected_draft_kv,
    "recurrent_state/speculative_conv": expected_speculative_state,
    "recurrent_state/speculative_ssm": expected_speculative_state,
}


def check_for(server: Server, entry: Entry) -> Check | None:
    """What an entry is compared with; None where the model says nothing about it (vLLM's pool: see `check_vllm`)."""
    if entry.basis == "modelled":
        return None
    if entry.account == "weights/model":
        return expected_weights
    if server.framework == "sglang" and entry.account in _KV_POOLS:
        return expected_kv
    if server.framework == "sglang" and entry.account in _STATE_POOLS:
        return expected_state
    if server.framework == "sglang":
        return _SGLANG_ONLY.get(entry.account)
    return None


def checked(server: Server, arch: Architecture, rank: Rank, entry: Entry) -> Entry:
    """The entry with `detail.modelled`; with the reason there where the model gives no figure."""
    check = check_for(server, entry)
    if check is None:
        return entry
    try:
        found = check(server, arch, rank, entry).detail(entry.bytes, entry.tolerance_bytes)
    except NotModelledError as error:
        found = {"bytes": None, "reason": str(error)}
    return msgspec.structs.replace(entry, detail={**entry.detail, "modelled": found})
