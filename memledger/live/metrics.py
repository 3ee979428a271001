"""Usage now and capacities from a server's Prometheus page, in the names of all versions of SGLang and vLLM.

Traps that are dealt with here: vLLM's `num_gpu_blocks` is the sum over data-parallel engines on every engine's series, while its
tokens are per engine; labels that the front end never learns (`mamba_block_size`, ...) are left out; `..._perc` is a fraction; SGLang's
`token_usage` is the largest of all pools from 0.5.11 on, so that `full_token_usage` goes before it; `mamba_*_tokens` are slots; a model
without recurrent state, or without a window, has these gauges as well, at zero, which is no usage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from memledger.live.sample import Metrics
from memledger.live.titles import Framework
from memledger.sanitize import clean

LONGEST_LABEL: Final = 400

_LINE: Final = re.compile(
    r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>[^\n]*)\})?[ \t]+(?P<value>[^\s{}]+)(?:[ \t]+-?\d+)?[ \t]*(?:#[^\n]*)?",
    re.ASCII,
)
_LABEL: Final = re.compile(r'[ \t]*([A-Za-z_]\w*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\.)*)"[ \t]*(?:,|$)', re.ASCII)
_ESCAPES: Final = {"n": "\n", "\\": "\\", '"': '"'}

STALE_LABELS: Final = frozenset({"mamba_block_size", "mamba_page_size_padded", "hash_block_size", "kv_cache_layout"})
"""Labels of `vllm:cache_config_info` that are set in engine and worker only: the front end's copy is what it was before."""

_VLLM: Final = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:num_preemptions",
        "vllm:num_preemptions_total",
        "vllm:cache_config_info",
        "vllm:engine_sleep_state",
    }
)
_SGLANG: Final = frozenset(
    f"sglang:{name}"
    for name in (
        "num_running_reqs", "num_queue_reqs", "num_retracted_requests_total", "token_usage", "full_token_usage", "swa_token_usage",
        "mamba_usage", "num_used_tokens", "max_total_num_tokens", "max_total_num_tokens_swa", "page_size", "num_pages", "context_len",
        "kv_available_tokens", "kv_evictable_tokens", "kv_used_tokens", "mamba_available_tokens", "mamba_evictable_tokens",
        "mamba_used_tokens", "swa_available_tokens", "swa_evictable_tokens", "swa_used_tokens", "weight_memory_usage_gb",
        "kv_cache_memory_usage_gb", "graph_memory_usage_gb", "startup_available_gpu_memory_gb", "cache_config_info",
    )
)  # fmt: skip


_KEPT: Final = _VLLM | _SGLANG
_NAME: Final = re.compile(r"[\w:]*", re.ASCII)


class Point(msgspec.Struct, frozen=True):
    """One line of a metrics page; `value` is None where it is NaN or infinite."""

    name: str
    labels: dict[str, str]
    value: float | None


def parse(text: str) -> list[Point]:
    """The lines of a page in Prometheus' text format that are in order; others are passed over."""
    found = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if match := _LINE.fullmatch(line.strip()):
            labels, value = _labels(match.group("labels")), _number(match.group("value"))
            if labels is not None and value is not None:
                found.append(Point(match.group("name"), labels, value if math.isfinite(value) else None))
    return found


def _labels(text: str | None) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    position = 0
    text = (text or "").strip()
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            return None
        labels[match.group(1)] = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m.group(1), m.group(0)), match.group(2))
        position = match.end()
    return labels


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def kept(text: str) -> list[dict[str, Any]] | None:
    """The series of a page that concern memory and load, as plain values; None where the page is no metrics page at all."""
    # A page has some 700 lines, of which these matter: only they are taken apart.
    wanted = "\n".join(line for line in text.splitlines() if (name := _NAME.match(line)) and name.group() in _KEPT)
    points = parse(wanted)
    if not points and text.strip() and not text.lstrip().startswith("#") and not parse(text):
        return None
    return [
        {
            "name": point.name,
            "labels": {name: clean(value, LONGEST_LABEL) for name, value in point.labels.items()},
            "value": point.value,
        }
        for point in points
    ]


def read(
    framework: Framework, series: Iterable[Mapping[str, Any]], server_info: Any = None, loads: Any = None
) -> tuple[Metrics | None, dict[str, Metrics]]:
    """What the kept series say, for the server and for each data-parallel engine.

    `server_info` and `loads` are SGLang's answers of these names: they fill what the metrics leave open.
    """
    points = [Point(str(s.get("name")), dict(s.get("labels") or {}), s.get("value")) for s in series]
    if framework == "vllm":
        return _vllm(points)
    return _sglang(points, server_info, loads)


# ---------------------------------------------------------------------------------------------------------------- vLLM


def _vllm(points: Sequence[Point]) -> tuple[Metrics | None, dict[str, Metrics]]:
    names = sorted({p.labels.get("engine", "") for p in points if p.name in _VLLM}, key=_numbered)
    if not names:
        return None, {}
    info = next((p.labels for p in points if p.name == "vllm:cache_config_info"), {})
    engines = {
        name: _vllm_engine([p for p in points if p.labels.get("engine", "") == name], len(names)) for name in names
    }
    whole = _whole(list(engines.values()))
    # On every engine's series stands the sum over the engines.
    whole = msgspec.structs.replace(whole, kv_blocks=_count(info.get("num_gpu_blocks")))
    return whole, {name: engine for name, engine in engines.items() if name}


def _numbered(name: str) -> tuple[int, str]:
    return (int(name) if name.isdecimal() else -1, name)


def _vllm_engine(points: Sequence[Point], engines: int) -> Metrics:
    info = next((p.labels for p in points if p.name == "vllm:cache_config_info"), {})
    labels = {name: value for name, value in info.items() if name not in STALE_LABELS}
    state = next((p.labels.get("sleep_state") for p in points if p.name == "vllm:engine_sleep_state" and p.value), None)
    if state:
        labels["sleep_state"] = state
    return Metrics(
        running_requests=_sum(points, "vllm:num_requests_running"),
        queued_requests=_sum(points, "vllm:num_requests_waiting"),
        kv_usage=_share(_largest(points, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
        kv_tokens=_count(info.get("kv_cache_size_tokens")),
        kv_blocks=_count(info.get("num_gpu_blocks")) if engines == 1 else None,
        kv_block_tokens=_count(info.get("block_size")) if _block_size_is_resolved(info) else None,
        preemptions=_sum(points, "vllm:num_preemptions_total", "vllm:num_preemptions"),
        labels=labels,
    )


def _block_size_is_resolved(info: Mapping[str, str]) -> bool:
    """Whether the front end's block size is the engine's. Before 0.24 it was not told when a hybrid's blocks were enlarged."""
    return "kv_cache_size_tokens" in info or info.get("mamba_block_size", "None") == "None"


# -------------------------------------------------------------------------------------------------------------- SGLang


def _sglang(points: Sequence[Point], server_info: Any, loads: Any) -> tuple[Metrics | None, dict[str, Metrics]]:
    states = _internal_states(server_info)
    names = sorted({p.labels.get("dp_rank", "0") for p in points if p.name in _SGLANG}, key=_numbered)
    if not names:
        return _sglang_without_metrics(server_info, states, loads)
    engines = {}
    for name in names:
        state = states[int(name)] if name.isdecimal() and int(name) < len(states) else {}
        engines[name] = _sglang_engine(_one_rank([p for p in points if p.labels.get("dp_rank", "0") == name]), state)
    return _whole(list(engines.values())), engines


def _one_rank(points: Sequence[Point]) -> list[Point]:
    """One rank's series: with metrics for all schedulers each rank repeats what all of them share."""

    def rank(point: Point) -> tuple[int, ...]:
        return tuple(_numbered(point.labels.get(name, "0"))[0] for name in ("pp_rank", "tp_rank", "moe_ep_rank"))

    lowest = min((rank(p) for p in points), default=())
    return [p for p in points if rank(p) == lowest]


def _sglang_engine(points: Sequence[Point], state: Mapping[str, Any]) -> Metrics:
    slots = [_value(points, f"sglang:mamba_{kind}_tokens") for kind in ("available", "evictable", "used")]
    window = [_value(points, f"sglang:swa_{kind}_tokens") for kind in ("available", "evictable", "used")]
    configured = _count(state.get("max_mamba_cache_size"))
    seen_slots = _count(sum(v for v in slots if v is not None)) if None not in slots else None
    return Metrics(
        running_requests=_count(_total_or_plain(points, "sglang:num_running_reqs")),
        queued_requests=_count(_total_or_plain(points, "sglang:num_queue_reqs")),
        kv_usage=_share(_first(points, "sglang:full_token_usage", "sglang:token_usage")),
        state_usage=_pool_usage(_value(points, "sglang:mamba_usage"), slots),
        swa_usage=_pool_usage(_value(points, "sglang:swa_token_usage"), window),
        kv_tokens=_count(_value(points, "sglang:max_total_num_tokens")),
        kv_blocks=_count(_value(points, "sglang:num_pages")),
        kv_block_tokens=_count(_value(points, "sglang:page_size")),
        preemptions=_count(_total_or_plain(points, "sglang:num_retracted_requests_total")),
        state_slots=(configured if seen_slots != 0 else None) or seen_slots or None,
        state_slots_used=_count(slots[2]) if seen_slots else None,
    )


def _pool_usage(usage: float | None, parts: Sequence[float | None]) -> float | None:
    """The usage of a pool that the model may not have: a gauge at zero says nothing unless the pool has a size."""
    if None not in parts:
        return _share(usage) if sum(v for v in parts if v is not None) > 0 else None
    return _share(usage) if usage else None


def _sglang_without_metrics(
    server_info: Any, states: Sequence[Mapping[str, Any]], loads: Any
) -> tuple[Metrics | None, dict[str, Metrics]]:
    """Capacities from `/server_info` and load from `/v1/loads`, where the server serves no metrics."""
    rows = loads.get("loads") if isinstance(loads, dict) else None
    engines: dict[str, Metrics] = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict):
            number = _count(row.get("dp_rank")) or 0
            state = states[number] if number < len(states) else {}
            engines[str(number)] = Metrics(
                running_requests=_count(row.get("num_running_reqs")),
                queued_requests=_count(row.get("num_waiting_reqs")),
                kv_usage=None if _count(state.get("max_mamba_cache_size")) else _share(row.get("token_usage")),
                kv_tokens=_count(row.get("max_total_num_tokens")),
                state_slots=_count(state.get("max_mamba_cache_size")),
            )
    if engines:
        return _whole(list(engines.values())), engines
    if not isinstance(server_info, dict) or "max_total_num_tokens" not in server_info:
        return None, {}
    state = states[0] if states else {}
    one = Metrics(
        kv_tokens=_count(server_info.get("max_total_num_tokens")),
        kv_block_tokens=_count(server_info.get("page_size")),
        state_slots=_count(state.get("max_mamba_cache_size")),
    )
    return one, {}


def _internal_states(server_info: Any) -> list[Mapping[str, Any]]:
    states = server_info.get("internal_states") if isinstance(server_info, dict) else None
    return [s if isinstance(s, dict) else {} for s in states] if isinstance(states, list) else []


# ------------------------------------------------------------------------------------------------------------- figures


_COUNTS: Final = (
    "running_requests", "queued_requests", "kv_tokens", "kv_blocks", "preemptions", "state_slots", "state_slots_used",
)  # fmt: skip


def _whole(engines: Sequence[Metrics]) -> Metrics:
    """All engines as one: requests and capacities add up where each says them; of usages the fullest engine's."""
    if len(engines) == 1:
        return engines[0]

    def added(name: str) -> int | None:
        values = [getattr(engine, name) for engine in engines]
        return sum(values) if values and None not in values else None

    def fullest(name: str) -> float | None:
        return max((v for engine in engines if (v := getattr(engine, name)) is not None), default=None)

    counts: dict[str, Any] = {name: added(name) for name in _COUNTS}
    usages: dict[str, Any] = {name: fullest(name) for name in ("kv_usage", "state_usage", "swa_usage")}
    first = engines[0]
    return Metrics(
        **counts,
        **usages,
        kv_block_tokens=first.kv_block_tokens if len({e.kv_block_tokens for e in engines}) == 1 else None,
        labels={n: v for n, v in first.labels.items() if n != "engine" and all(e.labels.get(n) == v for e in engines)},
    )


def _values(points: Sequence[Point], name: str) -> list[float]:
    return [p.value for p in points if p.name == name and p.value is not None]


def _value(points: Sequence[Point], name: str) -> float | None:
    return next(iter(_values(points, name)), None)


def _first(points: Sequence[Point], *names: str) -> float | None:
    return next((v for name in names if (v := _value(points, name)) is not None), None)


def _largest(points: Sequence[Point], *names: str) -> float | None:
    return next((max(values) for name in names if (values := _values(points, name))), None)


def _sum(points: Sequence[Point], *names: str) -> int | None:
    return next((_count(sum(values)) for name in names if (values := _values(points, name))), None)


def _total_or_plain(points: Sequence[Point], name: str) -> float | None:
    """The series without a priority; where there are only series by priority, their sum."""
    plain = [p for p in points if p.name == name and not p.labels.get("priority") and p.value is not None]
    if plain:
        return plain[0].value
    values = _values(points, name)
    return sum(values) if values else None


def _share(value: Any) -> float | None:
    """A fraction; what does not lie between 0 and 1 is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1.0005:
        return None
    return min(float(value), 1.0)


def _count(value: Any) -> int | None:
    """A whole number that is not negative, given as number or text."""
    if isinstance(value, str):
        value = _number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        return None
    return round(value)
