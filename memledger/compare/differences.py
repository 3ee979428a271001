"""Whether two runs are comparable at all: every setting that decides memory, of both sides, in words that compare.

Engines name one thing differently and count one thing differently; both are converted here. What only one side tells is
unknown for the other: a default is never filled in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, Final

from memledger import words
from memledger.compare.side import Side
from memledger.compare.values import Alike, Difference
from memledger.units import GIB

Getter = Callable[[Side], Any]

_FAMILIES: Final = {"nextn": "mtp", "eagle-3": "eagle3"}
"""Names of one way of speculative decoding in the two engines (SGLang's NEXTN is the model's own MTP layer)."""


def _config(name: str) -> Getter:
    return lambda side: side.server.config.get(name)


def _model(side: Side) -> str | None:
    """The model's own name: engines are given the same model by a repository's name or a path."""
    model = side.server.model
    return PurePosixPath(model.rstrip("/")).name or None if model else None


def same_model(a: Side, b: Side) -> bool:
    """Whether both logs name the same model."""
    first, second = _model(a), _model(b)
    return first is not None and second is not None and _equal("model", first, second)


def _dtype(name: str) -> Getter:
    def get(side: Side) -> str | None:
        value = side.server.config.get(name)
        return words.dtype(value) if isinstance(value, str) else None

    return get


def _kv_dtype(side: Side) -> str | None:
    value = side.server.config.get("kv_cache_dtype") or side.server.config.get("kv_cache_dtype_requested")
    if not isinstance(value, str):
        return None
    short = words.dtype(value)
    return "fp8 e4m3" if short in {"fp8", "fp8_e4m3"} else "fp8 e5m2" if short == "fp8_e5m2" else short


def _quantization(side: Side) -> str | None:
    told = side.server.config.get("quantization")
    if told is None:
        told = next((e.detail["quantization"] for e in side.rank.entries if e.detail.get("quantization")), None)
    return str(told).lower() if told is not None else None


def _device(side: Side) -> str | None:
    gpu = side.rank.gpu
    parts = [gpu.name or (gpu.kind.upper() if gpu.kind else None)]
    if gpu.total_bytes is not None:
        parts.append(f"{gpu.total_bytes / GIB:.2f} GiB")
    known = [part for part in parts if part]
    return ", ".join(known) or None


def _running(side: Side) -> int | None:
    found = side.rank.capacity.max_running_requests
    return found if found is not None else side.server.config.get("max_running_requests")


def _context(side: Side) -> int | None:
    return side.server.config.get("context_length") or side.rank.capacity.concurrency.tokens_per_request


def _fraction(side: Side) -> str | None:
    """The fraction with what it is a fraction of: the same number means another budget in the other engine."""
    value = side.server.config.get("memory_fraction")
    if not isinstance(value, (int, float)):
        return None
    if side.server.framework == "sglang":
        return f"{value:g} of the memory free before loading"
    return f"{value:g} of the device's total"


def _algorithm(side: Side) -> str | None:
    told = side.server.config.get("speculative_algorithm")
    if told is None:
        # Only a log that prints its arguments says that there is none.
        return "none" if "speculative_algorithm" in side.server.config else None
    name = str(told).lower()
    return _FAMILIES.get(name, name)


def verified_tokens(side: Side) -> int | None:
    """Tokens that one step verifies: SGLang's own figure; vLLM's drafted tokens and the one after them."""
    value = side.server.config.get("speculative_draft_tokens")
    if not isinstance(value, int):
        return None
    return value if side.server.framework == "sglang" else value + 1


def _block(side: Side) -> int | None:
    return side.rank.capacity.kv_block_tokens or side.server.config.get("page_size")


def _chunk(side: Side) -> Any:
    value = side.server.config.get("chunked_prefill_tokens")
    return "off" if value == -1 else value


def _version(side: Side) -> str | None:
    version = side.server.framework_version
    return version if version is None else f"{'SGLang' if side.server.framework == 'sglang' else 'vLLM'} {version}"


SETTINGS: Final[tuple[tuple[str, Getter], ...]] = (
    ("framework", lambda side: "SGLang" if side.server.framework == "sglang" else "vLLM"),
    ("version", _version),
    ("model", _model),
    ("quantization", _quantization),
    ("dtype", _dtype("dtype")),
    ("device", _device),
    ("tp_size", _config("tp_size")),
    ("pp_size", _config("pp_size")),
    ("dp_size", _config("dp_size")),
    ("ep_size", _config("ep_size")),
    ("context_length", _context),
    ("max_running_requests", _running),
    ("memory_fraction", _fraction),
    ("kv_cache_dtype", _kv_dtype),
    ("state_dtype", _dtype("state_dtype")),
    ("state_cache_mode", _config("state_cache_mode")),
    ("speculative_algorithm", _algorithm),
    ("speculative_tokens_verified", verified_tokens),
    ("prefix_caching", _config("prefix_caching")),
    ("chunked_prefill_tokens", _chunk),
    ("attention_backend_prefill", _config("attention_backend_prefill")),
    ("attention_backend_decode", _config("attention_backend_decode")),
    ("mla_backend_prefill", _config("mla_backend_prefill")),
    ("mla_backend_decode", _config("mla_backend_decode")),
    ("linear_attention_backend_prefill", _config("linear_attention_backend_prefill")),
    ("linear_attention_backend_decode", _config("linear_attention_backend_decode")),
    ("state_backend", _config("state_backend")),
    ("block_tokens", _block),
    ("swa_full_tokens_ratio", _config("swa_full_tokens_ratio")),
    ("state_slots", lambda side: side.rank.capacity.state_slots),
    ("max_total_tokens", _config("max_total_tokens")),
    ("enforce_eager", _config("enforce_eager")),
)
"""Every setting of the first table, in its order."""

ENGINE_ONLY: Final = frozenset({"swa_full_tokens_ratio", "state_slots", "max_total_tokens", "enforce_eager", "ep_size"})
"""Settings that one engine has alone: compared within that engine only."""

_AUTO: Final = frozenset({"dtype", "kv_cache_dtype"})
"""Settings whose value `auto` leaves open what the engine took."""

NOTES: Final = {
    "dtype": "auto is the type that the model's config names",
    "speculative_tokens_verified": "SGLang's draft tokens are what a step verifies; vLLM's are drafted, one less",
    "block_tokens": "SGLang's page, vLLM's block (raised in hybrids until an attention page holds a state)",
    "kv_cache_dtype": "auto is the model's own type, or the checkpoint's KV scales: bytes per token tell",
}


def compare(a: Side, b: Side) -> tuple[tuple[Difference, ...], tuple[Alike, ...]]:
    """What differs or is told by one side only, and what is the same."""
    differ: list[Difference] = []
    same: list[Alike] = []
    for name, get in SETTINGS:
        if name in ENGINE_ONLY and a.server.framework != b.server.framework:
            continue
        first, second = get(a), get(b)
        if first is None and second is None:
            continue
        if first is None or second is None:
            differ.append(Difference(name, first, second, "unknown"))
        elif _equal(name, first, second):
            same.append(Alike(name, first))
        elif name in _AUTO and "auto" in {first, second}:
            differ.append(Difference(name, first, second, "unknown", NOTES[name]))
        else:
            note = NOTES.get(name) if a.server.framework != b.server.framework or name == "kv_cache_dtype" else None
            differ.append(Difference(name, first, second, "differs", note))
    return tuple(differ), tuple(same)


def _equal(name: str, first: Any, second: Any) -> bool:
    if name == "model":
        return str(first).lower() == str(second).lower()
    return bool(first == second) and isinstance(first, bool) == isinstance(second, bool)
