"""From what one file holds to its rows: one for each rank of each start, and one where there is no rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from memledger.compare.side import logged_entries
from memledger.findings.state import slot_use
from memledger.fleet.columns import TOP_ACCOUNTS, Row
from memledger.ledger import Entry, Rank, Report, Server, Usage, account_total
from memledger.postmortem.incident import Incident
from memledger.sanitize import clean
from memledger.units import total

LONGEST_NAME: Final = 4096
"""Characters of a file's name that are kept (Linux's own limit)."""
LONGEST_ERROR: Final = 1000

_STEP: Final = {"sglang": 0.005, "vllm": 0.0005}
"""Half a step of the printed KV usage: two decimals (SGLang), tenths of a percent (vLLM)."""
_ASKED: Final = ("tp_size", "pp_size", "dp_size", "memory_fraction", "quantization", "kv_cache_dtype")


def shown_name(name: str) -> str:
    """A file's name as rows have it: what is no text comes out as `?`, secrets of a URL masked."""
    return clean(name.encode("utf-8", "replace").decode(), LONGEST_NAME)


def failed(name: str, size: int | None, status: str, error: str) -> list[Row]:
    """The row of a file that gave nothing."""
    row = {"file": shown_name(name), "file_bytes": size, "status": status, "error": _text(error, LONGEST_ERROR)}
    return [_known(row)]


def rows(
    name: str, size: int | None, status: str, error: str | None, report: Report, incidents: Sequence[Incident]
) -> list[Row]:
    """All rows of one file, in the order of its starts and their ranks."""
    file = _file_part(name, size, status, error, report)
    latest = latest_starts(report.servers)
    found = [
        _known({**file, **start, **rank})
        for index, server in enumerate(report.servers)
        for start in [_start_part(index, server, index in latest, [i for i in incidents if i.server == index])]
        for rank in _rank_parts(server)
    ]
    of_none = [i for i in incidents if i.server is None]
    if of_none or not found:
        found.append(_known({**file, **_incident_part(of_none)}))
    return found


def latest_starts(servers: Sequence[Server]) -> set[int]:
    """Of each server (engine and label) its last start that holds pools, else its last: a restart is no second server."""
    last: dict[tuple[str, str | None], int] = {}
    for index, server in enumerate(servers):
        key = (server.framework, server.label)
        if key not in last or _has_pools(server) or not _has_pools(servers[last[key]]):
            last[key] = index
    return set(last.values())


def _has_pools(server: Server) -> bool:
    return any(account_total(rank.entries, "kv_cache") is not None for rank in server.ranks)


def _file_part(name: str, size: int | None, status: str, error: str | None, report: Report) -> Row:
    return {
        "file": shown_name(name),
        "file_bytes": size,
        "status": status,
        "error": _text(error, LONGEST_ERROR),
        "notes": [clean(note) for item in report.inputs for note in item.notes],
        "unrecognized_lines": report.unrecognized.count,
        "starts": len(report.servers),
    }


def _start_part(index: int, server: Server, latest: bool, incidents: Sequence[Incident]) -> Row:
    return {
        "start": index + 1,
        "latest": latest,
        "framework": server.framework,
        "framework_version": _text(server.framework_version),
        "model": _text(server.model),
        "label": _text(server.label),
        "state": server.state,
        "started_at": _text(server.started_at),
        "ended_at": _text(server.ended_at),
        **{name: _asked(server, name) for name in _ASKED},
        "failures": [clean(failure.kind) for failure in server.failures],
        **_incident_part(incidents),
        "findings": [finding.code for finding in server.findings],
    }


def _asked(server: Server, name: str) -> Any:
    """A setting as asked for; None where it is not printed, or not as the column's type."""
    value = server.config.get(name)
    if name in {"quantization", "kv_cache_dtype"}:
        return _text(value) if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if name == "memory_fraction" else value if isinstance(value, int) else None


def _incident_part(incidents: Sequence[Incident]) -> Row:
    return {
        "oom_kinds": sorted(incident.kind for incident in incidents),
        "fatal_incidents": sum(incident.fatal is True for incident in incidents),
    }


def _rank_parts(server: Server) -> Iterable[Row]:
    if not server.ranks:
        yield {}
    for rank in server.ranks:
        yield {**_identity(rank), **_balance(rank), **_accounts(rank.entries), **_use(server, rank)}


def _identity(rank: Rank) -> Row:
    return {
        "rank": _text(rank.label),
        **{name: getattr(rank, name) for name in ("dp", "pp", "tp", "ep", "pid")},
        "host": _text(rank.host),
        "gpu_kind": rank.gpu.kind,
        "gpu": _text(rank.gpu.name),
        "gpu_index": rank.gpu.index,
        "gpu_total_bytes": rank.gpu.total_bytes,
        "unified_memory": rank.gpu.unified_memory,
    }


def _balance(rank: Rank) -> Row:
    residual = rank.residual
    judged = residual.verdict != "open" and residual.bytes is not None
    return {
        "opening_bytes": residual.opening_bytes,
        "residual_bytes": residual.bytes,
        "residual_tolerance_bytes": residual.tolerance_bytes,
        "verdict": residual.verdict,
        "verdict_reason": _text(residual.reason),
        "unexplained_bytes": (residual.bytes if residual.verdict == "unexplained" else 0) if judged else None,
    }


def _accounts(entries: Sequence[Entry]) -> Row:
    found: Row = {}
    for name in TOP_ACCOUNTS:
        amount = account_total(entries, name)
        if amount is not None:
            found[f"{name}_bytes"], found[f"{name}_tolerance_bytes"] = amount.bytes, amount.tolerance
    host = [entry.amount for entry in entries if entry.account.startswith("host/")]
    found["host_bytes"] = total(host).bytes if host else None
    return found


def _use(server: Server, rank: Rank) -> Row:
    usage = engine_usage(server, rank)
    slots = slot_use(server, rank, usage)
    pool = account_total(logged_entries(rank), "kv_cache")
    return {
        "kv_tokens": rank.capacity.kv_tokens,
        "kv_peak_usage": usage.peak_kv_usage,
        "kv_pool_bytes": pool.bytes if pool is not None else None,
        "kv_never_used_bytes": _never_used(server, usage, pool.bytes) if pool is not None else None,
        "state_slots": rank.capacity.state_slots,
        "state_slots_needed": slots.needed if slots is not None else None,
        "state_peak_usage": usage.peak_state_usage,
        "idle_state_bytes": slots.idle_bytes if slots is not None else None,
        "max_running_requests": rank.capacity.max_running_requests,
        "peak_running_requests": usage.peak_running_requests,
        "peak_queued_requests": usage.peak_queued_requests,
        "preemptions": usage.preemptions,
        "retractions": usage.retractions,
    }


def engine_usage(server: Server, rank: Rank) -> Usage:
    """The peaks of the rank's own engine; those of the server (its fullest engine) where the log does not tell them apart."""
    own = [e.usage for e in server.engines if e.dp == rank.dp and e.usage.seen] if rank.dp is not None else []
    return own[0] if len(own) == 1 else server.usage


def _never_used(server: Server, usage: Usage, pool: int) -> int | None:
    """Bytes of the pool above the peak; the printed peak is rounded, so half a step is added to it (as ML505 does)."""
    if usage.peak_kv_usage is None:
        return None
    return round(pool * (1 - min(1.0, usage.peak_kv_usage + _STEP[server.framework])))


def _text(value: str | None, length: int = 400) -> str | None:
    return clean(value.encode("utf-8", "replace").decode(), length) if value is not None else None


def _known(row: Row) -> Row:
    """Without what is unknown; a whole number that 64 bits can't hold (a log may print anything) is no figure."""
    return {name: value for name, value in row.items() if value is not None and not _too_large(value)}


def _too_large(value: Any) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**63
