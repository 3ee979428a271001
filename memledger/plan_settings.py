"""What `memledger plan --set` takes: the names of the contract, how their values are written, and which flags set them.

Sizes are bytes (`40GiB`; GB and GiB are both 2**30, as the engines print them), counts may end in k or m (`128k` is
131,072), switches are on or off.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

from memledger.model.architecture import NotModelledError
from memledger.model.versions import Release, is_placeholder, release
from memledger.model.vllm_facts import CACHE_MODES_SINCE, KV_CACHE_MEMORY_FLAG_SINCE

Kind = Literal["size", "count", "fraction", "switch", "text"]

_MODELLED: Final[dict[str, Kind]] = {
    "tp_size": "count",
    "pp_size": "count",
    "dp_size": "count",
    "ep_size": "count",
    "dp_attention": "switch",
    "memory_fraction": "fraction",
    "max_running_requests": "count",
    "context_length": "count",
    "max_total_tokens": "count",
    "kv_cache_dtype": "text",
    "page_size": "count",
    "chunked_prefill_tokens": "count",
    "prefix_caching": "switch",
    "state_dtype": "text",
    "state_cache_mode": "text",
    "state_memory_ratio": "fraction",
    "state_slots": "count",
    "state_checkpoint_blocks": "count",
    "kernel_block_tokens": "count",
    "overlap_disabled": "switch",
    "swa_full_tokens_ratio": "fraction",
    "speculative_algorithm": "text",
    "speculative_draft_tokens": "count",
    "speculative_steps": "count",
    "speculative_topk": "count",
    "speculative_draft_model": "text",
    "pool_bytes": "size",
    "gpu_total_bytes": "size",
    "attention_backend_decode": "text",
    "linear_attention_backend_prefill": "text",
    "dcp_size": "count",
}
_OTHERS: Final = frozenset(
    {
        "nnodes",
        "max_prefill_tokens",
        "kv_cache_dtype_requested",
        "quantization",
        "dtype",
        "attention_backend_prefill",
        "linear_attention_backend_decode",
        "linear_attention_backend_verify",
        "state_backend",
        "state_backend_prefill",
        "mla_backend_prefill",
        "mla_backend_decode",
        "attention_backend_verify",
        "attention_backend_draft",
        "sparse_mla_backend_prefill",
        "sparse_mla_backend_decode",
        "sliding_window_backend",
        "prefix_cache",
        "state_checkpoint",
        "state_replay",
        "state_replay_speculative",
        "vision_backend",
        "sampling_backend",
        "moe_backend",
        "moe_communication_backend",
        "kv_layout",
        "allreduce_fusion",
        "disaggregation_mode",
        "unified_pool",
        "cpu_offload_gb",
        "host_cache",
        "host_cache_gb",
        "host_cache_ratio",
        "memory_saver",
        "deterministic",
        "graphs_disabled",
        "graph_mode",
        "graph_max_batch",
        "graph_max_prefill_tokens",
        "graph_backend_decode",
        "graph_backend_prefill",
        "max_loras",
        "max_lora_rank",
        "lora",
        "speculative_model",
        "attn_cp_size",
        "state_track_interval",
        "state_replay_length",
        "num_gpu_blocks_override",
        "kv_cache_memory_bytes",
        "swap_space_gib",
        "kv_offloading_gib",
        "load_format",
        "device",
    }
)
"""Config names that no pool's arithmetic knows: they are taken, and the plan says that their effect is not modelled."""

NAMES: Final[dict[str, Kind]] = {**_MODELLED, **dict.fromkeys(sorted(_OTHERS), "text")}
FREE_TO_BE_ZERO: Final = frozenset({"state_checkpoint_blocks", "speculative_draft_tokens"})
_DIVIDERS: Final = frozenset({"tp_size", "pp_size", "dp_size", "ep_size", "dcp_size"})
MOST_RANKS: Final = 4096
_EVER: Final = (0, 0, 0)
_KV_TYPES: Final[dict[str, dict[str, Release]]] = {
    "sglang": {
        "auto": _EVER,
        "fp8_e5m2": _EVER,
        "fp8_e4m3": _EVER,
        "bf16": (0, 5, 4),
        "bfloat16": (0, 5, 4),
        "fp4_e2m1": (0, 5, 5),
        "mxfp8": (0, 5, 16),
        "nvfp4": (0, 5, 16),
        "fp4_mx_block16": (0, 5, 16),
    },
    "vllm": {
        "auto": _EVER,
        "bfloat16": _EVER,
        "float16": _EVER,
        "fp8": _EVER,
        "fp8_e4m3": _EVER,
        "fp8_e5m2": _EVER,
        "fp8_ds_mla": _EVER,
        "nvfp4": (0, 17, 0),
    },
}
"""`--kv-cache-dtype` as the engines spell it, and the first release that takes it.

SGLang: the choices in `server_args.py` of 0.5.2 to 0.5.5, 0.5.9, 0.5.13 to 0.5.18. vLLM: `config/cache.py` has no nvfp4 in
0.16 and has it in 0.25; 16-bit names and the layout of DeepSeek's came before 0.12 and their first release was not read.
"""
_STATE_TYPES: Final = ("float32", "bfloat16", "float16")

_NUMBER: Final = re.compile(r"(?i)([0-9]+(?:\.[0-9]+)?|[0-9]{1,3}(?:,[0-9]{3})+) ?(?:([kmgt])(i?b)?|b|bytes)?")
_COUNT: Final = re.compile(r"(?i)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)([km]?)")
_DECIMAL: Final = re.compile(r"(?i)[0-9]+(?:\.[0-9]*)?(?:e-?[0-9]{1,3})?|\.[0-9]+")
_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_ON: Final = frozenset({"on", "true", "yes", "1", "enabled"})
_OFF: Final = frozenset({"off", "false", "no", "0", "disabled"})
LARGEST: Final = 2**53


def parse(assignments: Iterable[str]) -> dict[str, Any]:
    """`name=value` words as settings; the last of a name wins.

    Raises:
        ValueError: no such name, or a value that it can't have; the message says what would do.
    """
    found: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not value.strip():
            raise ValueError(f"{text!r} is not name=value, such as state_dtype=bfloat16")
        kind = NAMES.get(name)
        if kind is None:
            near = difflib.get_close_matches(name, NAMES, n=3, cutoff=0.5)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"no setting {name!r}{hint}")
        try:
            found[name] = _READERS[kind](value.strip())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if kind in {"count", "size"} and found[name] == 0 and name not in FREE_TO_BE_ZERO:
            raise ValueError(f"{name}: 0 is not possible")
        if name == "memory_fraction" and found[name] > 1:
            raise ValueError(f"{name}: {value.strip()!r} is more than all of the memory; at most 1")
        if name in _DIVIDERS and found[name] > MOST_RANKS:
            raise ValueError(f"{name}: at most {MOST_RANKS:,}")
    return found


def check(
    settings: Mapping[str, Any],
    framework: str,
    config: Mapping[str, Any] | None = None,
    version: str | None = None,
) -> None:
    """Whether an engine takes the values; `config`: what the log says, for settings that need another beside them.

    `version`: the release, where it is known: some values came later.

    Raises:
        ValueError: it would refuse one; the message names what it takes.
    """
    taken = {"kv_cache_dtype": tuple(_KV_TYPES[framework]), "state_dtype": _STATE_TYPES}
    taken |= {"state_cache_mode": ("none", "align", "all")} if framework == "vllm" else {}
    for name, accepted in taken.items():
        if name in settings and settings[name] not in accepted:
            raise ValueError(f"{name}: {settings[name]!r} is none of {', '.join(accepted)}")
    since, at = _KV_TYPES[framework].get(settings.get("kv_cache_dtype", "auto"), _EVER), release(version)
    if at is not None and not is_placeholder(version) and at < since:
        raise ValueError(
            f"kv_cache_dtype: {settings['kv_cache_dtype']} came with {'.'.join(map(str, since))}; this is {version}"
        )
    given = {**(config or {}), **settings}
    drafts, algorithm = settings.get("speculative_draft_tokens"), given.get("speculative_algorithm")
    off = algorithm is None or str(algorithm).lower() in {"none", "off"}
    if "speculative_algorithm" in settings and not off and drafts is None:
        raise ValueError("speculative_algorithm: needs --set speculative_draft_tokens=N beside it")
    if drafts and off:
        raise ValueError("speculative_draft_tokens: needs --set speculative_algorithm=NAME beside it")


def count(text: str) -> int:
    """A whole number: `131072`, `131,072`, `128k` (131,072), `1m` (1,048,576).

    Raises:
        ValueError: not such a number.
    """
    found = _COUNT.fullmatch(text)
    if found is None or len(found[1]) > 20:
        raise ValueError(f"{text!r} is not a count, such as 131072 or 128k")
    value = int(found[1].replace(",", "")) * _UNITS[found[2].lower()]
    if value > LARGEST:
        raise ValueError(f"{text!r} is not a count, such as 131072 or 128k")
    return value


def _size(text: str) -> int:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a size, such as 40GiB or 42949672960")
    value = float(found[1].replace(",", "")) * _UNITS[(found[2] or "").lower()]
    if value > LARGEST:
        raise ValueError(f"{text!r} is larger than any memory")
    return int(value)


def _fraction(text: str) -> float:
    value = float(text) if _DECIMAL.fullmatch(text) else math.nan
    if not 0 < value < 1e6:
        raise ValueError(f"{text!r} is not a positive number, such as 0.85")
    return value


def _switch(text: str) -> bool:
    if text.lower() in _ON:
        return True
    if text.lower() in _OFF:
        return False
    raise ValueError(f"{text!r} is neither on nor off")


def _text(text: str) -> str:
    if not re.fullmatch(r"[\w.+:/-]{1,80}", text):
        raise ValueError("letters, digits and . + : / - only")
    return text


_READERS: Final[dict[Kind, Callable[[str], Any]]] = {
    "size": _size,
    "count": count,
    "fraction": _fraction,
    "switch": _switch,
    "text": _text,
}


def unmodelled(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence for each setting whose effect on memory no formula here knows."""
    return tuple(f"{name}: its effect on memory is not modelled" for name in settings if name not in _MODELLED)


def modelled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that some pool's arithmetic knows."""
    return {name: value for name, value in settings.items() if name in _MODELLED}


_ARGS_SINCE: Final[Release] = (0, 6, 3)
"""The oldest release whose own list of arguments was seen (`args: Namespace(...)` in logs of 0.6.3); they may be older."""
_VLLM_FLAGS: Final[dict[str, tuple[str, Release]]] = {
    "memory_fraction": ("--gpu-memory-utilization", _ARGS_SINCE),
    "max_running_requests": ("--max-num-seqs", _ARGS_SINCE),
    "context_length": ("--max-model-len", _ARGS_SINCE),
    "kv_cache_dtype": ("--kv-cache-dtype", _ARGS_SINCE),
    "page_size": ("--block-size", _ARGS_SINCE),
    "chunked_prefill_tokens": ("--max-num-batched-tokens", _ARGS_SINCE),
    "tp_size": ("--tensor-parallel-size", _ARGS_SINCE),
    "pp_size": ("--pipeline-parallel-size", _ARGS_SINCE),
    "dp_size": ("--data-parallel-size", (0, 8, 3)),
    "dcp_size": ("--decode-context-parallel-size", (0, 10, 2)),
    "state_dtype": ("--mamba-ssm-cache-dtype", (0, 10, 2)),
    "state_cache_mode": ("--mamba-cache-mode", CACHE_MODES_SINCE),
    "pool_bytes": ("--kv-cache-memory-bytes", KV_CACHE_MEMORY_FLAG_SINCE),
}
_INPUTS: Final = frozenset({"gpu_total_bytes", "kernel_block_tokens", "state_checkpoint_blocks"})
"""Facts, not settings: no flag sets them."""


def vllm_flags(settings: Mapping[str, Any], at: Release) -> tuple[list[str], list[str]]:
    """(words of the command line, sentences on what has no flag) for settings of a vLLM release."""
    words: list[str] = []
    missing: list[str] = []
    for name, value in settings.items():
        if name in _INPUTS or name not in _MODELLED or name.startswith("speculative_"):
            continue
        if name == "prefix_caching":
            words.append("--enable-prefix-caching" if value else "--no-enable-prefix-caching")
            continue
        flag = _VLLM_FLAGS.get(name)
        if flag is None or at < flag[1]:
            missing.append(f"{name}: vLLM {'.'.join(map(str, at))} has no flag for it that is known here")
        else:
            words += [flag[0], str(value)]
    drafts = settings.get("speculative_draft_tokens")
    if drafts:
        asked = {"method": str(settings.get("speculative_algorithm") or "mtp").lower()}
        if settings.get("speculative_draft_model"):
            asked["model"] = settings["speculative_draft_model"]
        words += [
            "--speculative-config",
            json.dumps({**asked, "num_speculative_tokens": drafts}, separators=(",", ":")),
        ]
    elif drafts == 0:
        missing.append("speculative decoding off: leave --speculative-config out")
    return words, missing


_SGLANG_SPEC: Final = {
    "speculative_algorithm": "--speculative-algorithm",
    "speculative_steps": "--speculative-num-steps",
    "speculative_topk": "--speculative-eagle-topk",
    "speculative_draft_model": "--speculative-draft-model-path",
}
_SGLANG_OTHERS: Final = {
    "pp_size": "--pp-size",
    "ep_size": "--ep-size",
    "chunked_prefill_tokens": "--chunked-prefill-size",
    "attention_backend_decode": "--decode-attention-backend",
}


_SGLANG_DEFAULTS: Final = {
    "prefix_caching": (True, "--disable-radix-cache"),
    "overlap_disabled": (False, "--disable-overlap-schedule"),
    "dp_attention": (False, "--enable-dp-attention"),
}
"""Switches whose one position no flag asks for: (that position, the flag for the other)."""


def sglang_flags(
    settings: Mapping[str, Any], versions: tuple[tuple[int, int, int], tuple[int, int, int]]
) -> tuple[list[str], list[str]]:
    """(words of the command line, sentences on what has no flag) for settings of these SGLang releases."""
    from memledger.model import sglang_rules

    words: list[str] = []
    missing: list[str] = []
    for name, value in settings.items():
        if name in _INPUTS or name not in _MODELLED:
            continue
        if name == "pool_bytes":
            missing.append(f"{name}: SGLang has no flag for it; --mem-fraction-static moves the budget")
        elif (default := _SGLANG_DEFAULTS.get(name)) is not None and bool(value) is default[0]:
            missing.append(f"{name} {'on' if value else 'off'} is the default: leave {default[1]} out")
        elif name == "dp_attention":
            words.append("--enable-dp-attention")
        elif name == "speculative_draft_tokens" and not value:
            missing.append("speculative decoding off: leave --speculative-algorithm out")
        elif name in _SGLANG_SPEC or name in _SGLANG_OTHERS:
            words += [_SGLANG_SPEC.get(name) or _SGLANG_OTHERS[name], str(value)]
        else:
            try:
                words += sglang_rules.flags(name, value, *versions)
            except NotModelledError as error:
                missing.append(str(error))
    return words, missing
