"""What SGLang's sizing needs, from an architecture or from the figures of a log alone."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from memledger.ledger import Entry, Rank, Server
from memledger.model import kv, state
from memledger.model.architecture import (
    Architecture,
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    NotModelledError,
    Parallel,
    State,
)
from memledger.model.sglang import ANY_VERSION, KvToken, SglangServer
from memledger.model.sglang_rules import version_of
from memledger.model.sglang_state import Speculation, StateSlot

STAGE_CHARGE_SINCE: Final = (0, 5, 17)
"""From here a pipeline stage is charged for the largest stage's share of a slot; before, for all layers with state."""
_LARGEST_PAGE: Final = 128


def state_slot(
    arch: Architecture,
    parallel: Parallel,
    *,
    version: str | None = None,
    state_dtype: str | None = None,
    conv_dtype: str | None = None,
) -> StateSlot | None:
    """Bytes of one state slot on one rank; None for a model without recurrent state.

    `state_dtype`: `--mamba-ssm-dtype`, None for the release's default; `conv_dtype`: `SGLANG_MAMBA_CONV_DTYPE`.
    """
    kinds = [layer.state for layer in arch.layers if layer.state is not None]
    if not kinds:
        return None
    if state_dtype is None or conv_dtype is None:
        defaults = ("bfloat16", state_dtype) if state_dtype else state.default_dtypes(arch, "sglang", version)
        conv_dtype, state_dtype = conv_dtype or defaults[0], state_dtype or defaults[1]
    own = state.slot_bytes(arch, parallel, conv_dtype, state_dtype, "sglang")
    charged = None
    if parallel.pp > 1:
        span = version_of(version)
        if span is None or (span[0] < STAGE_CHARGE_SINCE <= span[1]):
            raise NotModelledError(
                "what a pipeline stage is charged for a state slot changed in 0.5.17; the version is not known"
            )
        if span[1] < STAGE_CHARGE_SINCE:
            charged = sum(
                state.slot_bytes(arch, parallel, conv_dtype, state_dtype, "sglang", stage=number).total
                for number in range(parallel.pp)
            )
    return StateSlot(
        conv=own.conv,
        ssm=own.temporal,
        charged=charged,
        conv_kernel=_kernel(kinds),
        dense_windows=any(isinstance(kind, KimiDeltaAttention) for kind in kinds),
        gated_delta=all(isinstance(kind, GatedDeltaNet) for kind in kinds),
    )


def _kernel(kinds: list[State]) -> int | None:
    widths = {getattr(kind, "conv_kernel", None) for kind in kinds}
    return widths.pop() if len(widths) == 1 else None


def kv_token(
    arch: Architecture, parallel: Parallel, kv_dtype: str = "auto", *, draft: bool = False, **layout: Any
) -> KvToken:
    """KV bytes of one token on one rank, by account. `draft`: count the draft layers too; `layout`: see `kv.model_token_parts`."""
    full = kv.model_token_parts(arch, parallel, kv_dtype, framework="sglang", layers="full", **layout)
    sliding = kv.model_token_parts(arch, parallel, kv_dtype, framework="sglang", layers="sliding", **layout)
    latent = any(isinstance(layer.attention, LatentAttention) for layer in arch.layers)
    drafted = 0
    if draft and arch.draft_layers:
        drafted = kv.model_token_bytes(arch, parallel, kv_dtype, framework="sglang", layers="all", draft=True, **layout)
    return KvToken(
        keys=0 if latent else full.keys,
        values=full.values,
        latent=full.keys if latent else 0,
        index=full.index,
        draft=drafted,
        swa_keys=sliding.keys,
        swa_values=sliding.values,
    )


def from_architecture(
    arch: Architecture,
    parallel: Parallel,
    *,
    version: str | None = None,
    kv_dtype: str = "auto",
    state_dtype: str | None = None,
    layout: dict[str, Any] | None = None,
    **fields: Any,
) -> SglangServer:
    """A server of this architecture. `fields`: any other field of `SglangServer` (budget, flags, page size ...).

    Raises:
        NotModelledError: the state's type or the layout is not known for this version.
    """
    span = version_of(version)
    speculation = fields.get("speculation")
    window = _window(arch.layers)
    made = {
        "versions": ANY_VERSION if span is None else span,
        "slot": state_slot(arch, parallel, version=version, state_dtype=state_dtype),
        "kv": kv_token(arch, parallel, kv_dtype, draft=speculation is not None, **(layout or {})),
        "model_class": arch.class_name,
        "context_length": arch.max_positions,
        "attention_dp": parallel.dp if parallel.dp_attention else 1,
        "window": window,
    }
    return SglangServer(**(made | fields))


def _window(layers: tuple[Layer, ...]) -> int | None:
    windows = {layer.attention.window for layer in layers if isinstance(layer.attention, Attention)} - {None}
    return max(w for w in windows if w is not None) if windows else None


# ------------------------------------------------------------------------------------------------------------ from a log


class LogServer(msgspec.Struct, frozen=True):
    """A server from a log's own figures: `server`, and the two ends of what the printed roundings allow.

    `more`: small slots and large tokens, so that giving up slots gains the fewest tokens; `less`: the other end.
    """

    server: SglangServer
    more: SglangServer
    less: SglangServer


_KV_PARTS: Final = {
    "kv_cache/k": "keys",
    "kv_cache/v": "values",
    "kv_cache/latent": "latent",
    "kv_cache/index": "index",
    "kv_cache/draft": "draft",
    "kv_cache/swa_k": "swa_keys",
    "kv_cache/swa_v": "swa_values",
}


def from_rank(server: Server, rank: Rank, versions: tuple[tuple[int, ...], tuple[int, ...]] | None = None) -> LogServer:
    """One rank of a log: bytes per slot are printed conv + ssm over `slots + 1`, bytes per token K + V over `tokens + page`.

    Args:
        server: a start read from a log.
        rank: one of its ranks with pools.
        versions: oldest and newest release that it may be; None: as printed, else any.

    Raises:
        NotModelledError: the log lacks what the arithmetic needs.
    """
    if server.framework != "sglang":
        raise NotModelledError("not an SGLang server")
    config, capacity = server.config, rank.capacity
    if rank.gpu.kind == "cpu":
        # On a CPU the pools are host memory; they are sized alike.
        entries = tuple(msgspec.structs.replace(e, account=e.account.removeprefix("host/")) for e in rank.entries)
        rank = msgspec.structs.replace(rank, entries=entries)
    radix = config.get("prefix_caching")
    if radix is None and capacity.state_slots and capacity.state_slots == capacity.max_running_requests:
        radix = False  # as many requests as slots: one each, which only a server without a radix cache allows
    page = config.get("page_size")
    slot, slot_error = _logged_slot(rank)
    token, token_error = _logged_token(rank, page if isinstance(page, int) else None)
    if slot is None and token is None:
        raise NotModelledError("the log gives the size of no pool")
    backend = config.get("linear_attention_backend_decode")
    fields: dict[str, Any] = {
        "versions": versions or version_of(server.framework_version) or _worded(rank),
        "slot": slot,
        "kv": token,
        "page_size": page if isinstance(page, int) else 1,
        "radix_cache": radix,
        "strategy": None if config.get("state_cache_mode") == "none" else config.get("state_cache_mode"),
        "overlap": None if config.get("overlap_disabled") is None else not config["overlap_disabled"],
        "linear_backend": backend if isinstance(backend, str) else None,
        "per_request": capacity.slots_per_request,
        "state_ratio": config.get("state_memory_ratio"),
        "state_slots_requested": config.get("state_slots_requested"),
        "max_running_requests": config.get("max_running_requests"),
        "max_total_tokens": config.get("max_total_tokens"),
        "context_length": config.get("context_length"),
        "attention_dp": (config.get("dp_size") or 1) if config.get("dp_attention") else 1,
        "speculation": _logged_speculation(server, rank),
        "cuda": rank.gpu.kind not in {"cpu", "npu", "xpu"},
        "disaggregation": config.get("disaggregation_mode"),
        "unified_pool": bool(config.get("unified_pool")),
        "replay": bool(config.get("state_replay") or config.get("state_replay_speculative")),
        "checkpoint_pool": bool(config.get("state_checkpoint")),
        "state_slots": capacity.state_slots,
        "kv_tokens": capacity.kv_tokens,
        "kv_swa_tokens": capacity.kv_swa_tokens,
        "running_requests": capacity.max_running_requests,
        "pre": next((s.free_before_bytes for s in rank.stages if s.name == "weights"), None),
        "fraction": config.get("memory_fraction"),
        "tolerance": slot_error + token_error,
        "flags_known": config.get("memory_fraction") is not None,
    }
    ratio = config.get("swa_full_tokens_ratio")
    if ratio is None and capacity.kv_swa_tokens and capacity.kv_tokens:
        ratio = capacity.kv_swa_tokens / capacity.kv_tokens
    if ratio is not None:
        fields["swa_ratio"] = ratio
    made = SglangServer(**fields)
    return LogServer(
        made,
        msgspec.structs.replace(made, slot=_scaled_slot(slot, -slot_error), kv=_scaled_token(token, token_error)),
        msgspec.structs.replace(made, slot=_scaled_slot(slot, slot_error), kv=_scaled_token(token, -token_error)),
    )


def _worded(rank: Rank) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Releases by the wording of lines: slots are printed from 0.5.4, loading's `elapsed` from 0.5.9, the pool's type from 0.5.13."""
    low: tuple[int, ...] = (0, 5, 4) if any(e.detail.get("slots") for e in rank.entries) else ANY_VERSION[0]
    high: tuple[int, ...] = ANY_VERSION[1]
    loads = [line.text for e in rank.entries if e.account == "weights/model" for line in e.evidence]
    loads = [text for text in loads if "Load weight end" in text]
    if any("elapsed=" in text for text in loads):
        old = any(" dtype=" in text for text in loads)
        low, high = max(low, (0, 5, 9) if old else (0, 5, 10)), (0, 5, 9) if old else high
    pools = [e for e in rank.entries if e.account in {"kv_cache/k", "kv_cache/latent"} and "tokens" in e.detail]
    if pools and all("dtype" in e.detail for e in pools):
        low = max(low, (0, 5, 13))
    elif pools and not any("dtype" in e.detail for e in pools):
        high = min(high, (0, 5, 12))
    if low > high:
        return ANY_VERSION  # a fork: its wordings say nothing
    return low, high


def _logged_slot(rank: Rank) -> tuple[StateSlot | None, float]:
    """Bytes per slot from the pool's line, and their relative error."""
    parts: dict[str, Entry] = {}
    for entry in rank.entries:
        if entry.account in {"recurrent_state/conv", "recurrent_state/ssm"} and isinstance(
            entry.detail.get("rows"), int
        ):
            parts.setdefault(entry.account, entry)
    if not parts:
        return None, 0.0
    conv, ssm = (
        0 if (e := parts.get(f"recurrent_state/{name}")) is None else round(e.bytes / e.detail["rows"])
        for name in ("conv", "ssm")
    )
    total = sum(e.bytes for e in parts.values())
    error = sum(e.tolerance_bytes for e in parts.values()) / total if total else 0.0
    return StateSlot(conv, ssm), error


def _logged_token(rank: Rank, page: int | None) -> tuple[KvToken | None, float]:
    """Bytes per token from the pool lines, and their relative error. An unknown page size is between 1 and 128."""
    tokens, swa_tokens = rank.capacity.kv_tokens, rank.capacity.kv_swa_tokens
    found: dict[str, int] = {}
    error = total = 0
    for entry in rank.entries:
        name = _KV_PARTS.get(entry.account)
        if name is None:
            continue
        count = swa_tokens if name.startswith("swa_") else tokens
        if not count:
            return None, 0.0
        found[name] = found.get(name, 0) + round(entry.bytes / (count + (page or 1)))
        error, total = error + entry.tolerance_bytes, total + entry.bytes
    if not found or not total:
        return None, 0.0
    relative = error / total + (0.0 if page is not None or not tokens else _LARGEST_PAGE / tokens)
    return KvToken(**found), relative


def _logged_speculation(server: Server, rank: Rank) -> Speculation | None:
    config = server.config
    spec = {
        e.account.rpartition("_")[2]: e for e in rank.entries if e.account.startswith("recurrent_state/speculative_")
    }
    algorithm, draft = config.get("speculative_algorithm"), config.get("speculative_draft_tokens")
    if algorithm is None and not spec:
        return None
    if not isinstance(draft, int):
        draft = draft_tokens_of(rank)
    running = rank.capacity.max_running_requests
    window = None
    if "conv" in spec and running:
        window = round(spec["conv"].bytes / (running + 1))
    steps, topk = config.get("speculative_steps"), config.get("speculative_topk")
    return Speculation(
        draft_tokens=draft,
        steps=steps if isinstance(steps, int) else None,
        topk=topk if isinstance(topk, int) else None,
        reserves_tokens=str(algorithm).upper() not in {"NGRAM", "LOOKAHEAD"},
        logged_conv_request=window,
    )


def draft_tokens_of(rank: Rank) -> int:
    """Draft tokens from the pool's figures: `intermediate_ssm / ssm = D * (R + 1) / (K + 1)` (0.5.7+).

    Raises:
        NotModelledError: the figures do not allow exactly one whole number.
    """
    sizes = {e.account: e for e in rank.entries}
    ssm, made = sizes.get("recurrent_state/ssm"), sizes.get("recurrent_state/speculative_ssm")
    slots, running = rank.capacity.state_slots, rank.capacity.max_running_requests
    if ssm is None or made is None or slots is None or running is None or ssm.bytes <= ssm.tolerance_bytes:
        raise NotModelledError("speculation is on, and neither the log nor its figures tell the draft tokens")
    scale = (slots + 1) / (running + 1)
    low = (made.bytes - made.tolerance_bytes) / (ssm.bytes + ssm.tolerance_bytes) * scale
    high = (made.bytes + made.tolerance_bytes) / (ssm.bytes - ssm.tolerance_bytes) * scale
    whole = [n for n in range(max(1, int(low)), int(high) + 2) if low <= n <= high]
    if len(whole) != 1:
        raise NotModelledError("the figures do not tell the number of draft tokens")
    return whole[0]


def _scaled_slot(slot: StateSlot | None, by: float) -> StateSlot | None:
    return None if slot is None else StateSlot(round(slot.conv * (1 + by)), round(slot.ssm * (1 + by)))


def _scaled_token(token: KvToken | None, by: float) -> KvToken | None:
    if token is None:
        return None
    return KvToken(*(round(getattr(token, name) * (1 + by)) for name in KvToken.__struct_fields__))
