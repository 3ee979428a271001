"""What readers of two hybrid engines ask: state per running request, the cost of a cached prefix, and which backend serves what.

Backends are the normalised names of the ledger's configuration; the text as printed stands beside them. What is not in
the log is not filled in from an engine's defaults.
"""

from __future__ import annotations

from typing import Any, Final

from memledger import words
from memledger.compare.meaning import slot_bytes, state_bytes_per_request
from memledger.compare.side import Side, whole_pools
from memledger.compare.values import Backend, Checkpoint, Hybrid

PHASES: Final = (
    ("full attention", "prefill", "attention_backend_prefill"),
    ("full attention", "decode", "attention_backend_decode"),
    ("full attention", "verify", "attention_backend_verify"),
    ("latent attention", "prefill", "mla_backend_prefill"),
    ("latent attention", "decode", "mla_backend_decode"),
    ("sparse latent attention", "prefill", "sparse_mla_backend_prefill"),
    ("sparse latent attention", "decode", "sparse_mla_backend_decode"),
    ("linear attention", "prefill", "linear_attention_backend_prefill"),
    ("linear attention", "decode", "linear_attention_backend_decode"),
    ("linear attention", "verify", "linear_attention_backend_verify"),
    ("Mamba state", "decode", "state_backend"),
    ("draft model", "all", "attention_backend_draft"),
)
_ALWAYS: Final = ("attention_backend_prefill", "attention_backend_decode")
_LINEAR: Final = ("linear_attention_backend_prefill", "linear_attention_backend_decode")
_RAW: Final = {"attention_backend_prefill": "attention", "attention_backend_decode": "attention"}
"""Under which key vLLM's printed text stands, where it is not the setting's own name."""


def is_hybrid(side: Side) -> bool:
    """Whether the log shows recurrent state at all."""
    entries = whole_pools(side.rank)
    return (
        side.rank.capacity.state_slots is not None
        or any(e.account.startswith("recurrent_state/") for e in entries)
        or any(e.detail.get("includes_recurrent_state") for e in entries)
        or any((e.detail.get("modelled") or {}).get("state") for e in entries)
    )


def hybrid(a: Side, b: Side) -> Hybrid | None:
    """The three figures; None where neither log shows recurrent state."""
    if not is_hybrid(a) and not is_hybrid(b):
        return None
    return Hybrid((_state(a), _state(b)), backends(a, b, linear=True))


def backends(a: Side, b: Side, *, linear: bool) -> tuple[Backend, ...]:
    """What serves each kind of layer in each phase, where a side tells it; the main rows stand there in any case."""
    rows = []
    for layer, phase, name in PHASES:
        first, second = _value(a, name), _value(b, name)
        if first is None and second is None and name not in _ALWAYS and not (linear and name in _LINEAR):
            continue
        rows.append(Backend(layer, phase, first, second, _raw(a, name, first), _raw(b, name, second)))
    return tuple(rows)


def _value(side: Side, name: str) -> str | None:
    found = side.server.config.get(name)
    return str(found) if found is not None else None


def _raw(side: Side, name: str, value: str | None) -> str | None:
    """The text as printed, where it is another than the normalised name."""
    if value is None:
        return None
    printed: Any = side.server.config.get("backends_as_printed") or {}
    raw = printed.get(name) or printed.get(_RAW.get(name, name))
    requested = side.server.config.get(f"{name}_requested")
    told = raw if raw is not None else requested
    return str(told) if told is not None and str(told) != value else None


def _state(side: Side) -> Checkpoint:
    return _vllm_state(side) if side.server.framework == "vllm" else _sglang_state(side)


def _sglang_state(side: Side) -> Checkpoint:
    """SGLang: slots of one pool serve running requests and cached prefixes alike."""
    slot, each = slot_bytes(side), side.rank.capacity.slots_per_request
    config = side.server.config
    caching = config.get("prefix_caching")
    mode = config.get("state_cache_mode")
    size = slot.bytes if slot is not None else None
    if not is_hybrid(side):
        return Checkpoint(None, None, None, None, None, "no recurrent state in the log")
    if caching is False:
        kept, text = 0, "prefix caching is off: no state is kept for a prefix, a request takes one slot"
        each = each if each is not None else 1
    elif size is None:
        kept, text = None, "the size of a slot is not in the log"
    else:
        kept = size
        text = f"a cached prefix keeps one slot of {words.amount(size)}, in the same pool as running requests"
    request = size * each if size is not None and each is not None else state_bytes_per_request(side)
    if each is None and caching is not False:
        text += "; slots per request are not in the log"
    return Checkpoint(str(mode) if mode else None, size, each, request, kept, text)


def _vllm_state(side: Side) -> Checkpoint:
    """vLLM: state takes blocks of the common pool; a kept prefix one block in each group of state layers."""
    if not is_hybrid(side):
        return Checkpoint(None, None, None, None, None, "no recurrent state in the log")
    entries = whole_pools(side.rank)
    modelled = next((e.detail.get("modelled") or {} for e in entries if e.account == "kv_cache/pool"), {})
    state = modelled.get("state") or {}
    config = side.server.config
    mode = (
        config.get("state_cache_mode")
        or state.get("mode")
        or ("none" if config.get("prefix_caching") is False else None)
    )
    request = state.get("request_bytes")
    if mode == "none" or config.get("prefix_caching") is False:
        text = (
            "prefix caching is off for state: nothing is kept for a prefix, blocks are taken only by running requests"
        )
        return Checkpoint("none", None, None, request, 0, text)
    kept = _checkpoint(state, modelled, config)
    if kept is None:
        text = "a cached prefix keeps one block in each group of state layers; the groups are not in the log"
    else:
        text = f"a cached prefix keeps one block in each group of state layers, {words.amount(kept)} (modelled)"
    if mode == "all":
        text = "a state is kept in every block of the sequence"
        kept = None
    return Checkpoint(mode, None, None, request, kept, text)


def _checkpoint(state: dict[str, Any], modelled: dict[str, Any], config: dict[str, Any]) -> int | None:
    """Blocks of one state in all groups: those of a request over the blocks that each group keeps for it."""
    blocks, size = state.get("request_blocks"), modelled.get("block_bytes")
    if not blocks or not size or state.get("mode") != "align":
        return None
    drafted = config.get("speculative_draft_tokens") or 0
    for each in (2 + drafted, 3 + drafted):
        # A third block where the layer exports checkpoints in prefill (0.29 and later).
        live, stored = state.get("live_bytes"), blocks // each if blocks % each == 0 else None
        if stored and live and (stored - 1) * size < live <= stored * size:
            return int(stored * size)
    return None
