"""ML501 to ML505: what holds back how many requests run at once, from the peaks of the usage lines; pressure; idle KV."""

from __future__ import annotations

from typing import Final

from memledger import words as n
from memledger.findings.figures import (
    NO_CONTEXT,
    Context,
    each,
    held,
    lines,
    of_card,
    on_cpu,
    share,
    whole,
)
from memledger.findings.slots import slots_per_request
from memledger.ledger import Evidence, Finding, Rank, Server, Severity
from memledger.units import GIB

FULL: Final = 0.95
LOW: Final = 0.7
IDLE_KV: Final = 0.1
"""Peak KV usage up to which the pool counts as never used."""
IDLE_SHARE: Final = 0.25
"""Share of the card from which idle KV is worth a word."""
OFTEN: Final = 10
"""Preemptions and retractions from which they are more than an engine at its limit."""
FREE_SHARE: Final = 0.15
"""Free share of the card from which a full KV cache is a matter of settings."""


def kv_is_the_limit(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML501: KV tokens were used up while requests waited."""
    usage = server.usage
    queued = usage.peak_queued_requests or 0
    kv, window = usage.peak_kv_usage or 0.0, usage.peak_swa_usage or 0.0
    if not queued or max(kv, window) < FULL:
        return None
    rank = _pool_rank(server)
    tokens = server.engines[0].capacity.kv_tokens if server.engines else None
    if tokens is None and rank is not None:
        tokens = rank.capacity.kv_tokens
    what = "The sliding-window KV cache" if window > kv else "The KV cache"
    of = f" of {n.count(tokens)} tokens" if tokens is not None and window <= kv else ""
    text = f"{what} is what limits: usage reached {n.percent(max(kv, window))}{of}"
    if usage.peak_running_requests:
        text += f", at most {n.count(usage.peak_running_requests)} ran at once"
    text += f" and up to {n.plural(queued, 'request')} waited."
    cap = _cap(server)
    if cap is not None and (usage.peak_running_requests or 0) >= cap:
        text += f" No more than {n.count(cap)} may run either."
    severity: Severity = "note"
    size = 0
    if rank is not None and not on_cpu(server):
        size = held(rank, "free")
        if server.framework == "sglang" and share(rank, size) >= FREE_SHARE and size >= 4 * GIB:
            severity = "warning"
            flag = "--max-total-tokens" if whole(server.config.get("max_total_tokens")) else "--mem-fraction-static"
            text += f" {n.gib_about(size)}{of_card(rank, size)} stayed free after the start: a higher {flag} gives it to the KV cache."
        else:
            size = 0
    return Finding("ML501", "the KV cache is the limit", severity, size, text, _behind(server, rank))


def requests_are_the_limit(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML502: as many requests ran as may run, and others waited, while memory was left."""
    usage, cap = server.usage, _cap(server)
    queued, running = usage.peak_queued_requests or 0, usage.peak_running_requests
    if cap is None or not queued or running is None or running < cap or usage.scope != "engine":
        return None
    kv = usage.peak_kv_usage
    if kv is None or kv >= LOW or _slots_bind(server, cap):
        return None
    flag = "--max-num-seqs" if server.framework == "vllm" else "--max-running-requests"
    text = (
        f"The number of running requests is what limits: {n.count(cap)} may run and ran, up to "
        f"{n.plural(queued, 'request')} waited, while KV usage stayed at {n.percent(kv)} ({flag})."
    )
    rank = _pool_rank(server)
    return Finding("ML502", "running requests are the limit", "note", 0, text, _behind(server, rank))


def waiting_without_limit(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML503: requests waited although no memory limit was reached: tokens per step, or a burst of arrivals."""
    usage, cap = server.usage, _cap(server)
    queued, running = usage.peak_queued_requests or 0, usage.peak_running_requests
    if not queued or running is None or usage.peak_kv_usage is None:
        return None
    if max(usage.peak_kv_usage, usage.peak_swa_usage or 0.0) >= LOW or (usage.peak_state_usage or 0.0) >= FULL:
        return None
    if cap is not None and running >= cap:
        return None
    of = f" of {n.count(cap)}" if cap is not None else ""
    unknown = "" if cap is not None else " How many may run is not in the log."
    step = whole(server.config.get("chunked_prefill_tokens"))
    tokens = f" ({n.count(step)} tokens per step)" if step is not None else ""
    text = (
        f"Up to {n.plural(queued, 'request')} waited while {n.count(running)}{of} ran and KV usage stayed at "
        f"{n.percent(usage.peak_kv_usage)}: no memory limit was reached; prefill{tokens} or a burst of arrivals "
        f"held them.{unknown}"
    )
    return Finding("ML503", "requests waited, memory was left", "info", 0, text, _behind(server, None))


def pushed_back(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML504: running requests were put back for want of KV tokens; their work is done twice."""
    usage = server.usage
    parts = []
    if usage.preemptions:
        parts.append(n.plural(usage.preemptions, "preemption"))
    if usage.retractions:
        parts.append(n.plural(usage.retractions, "retraction"))
    if not parts:
        return None
    kv = f" (KV usage up to {n.percent(usage.peak_kv_usage)})" if usage.peak_kv_usage is not None else ""
    flag = "--max-num-seqs" if server.framework == "vllm" else "--max-running-requests"
    text = (
        f"The KV cache ran out under load{kv}: {' and '.join(parts)}. What they had computed is computed again; "
        f"fewer requests at once ({flag}) or more KV tokens avoid it."
    )
    rank = _pool_rank(server)
    # A few of them are how an engine uses its last tokens.
    often = (usage.preemptions or 0) + (usage.retractions or 0) >= OFTEN
    severity: Severity = "warning" if often else "note"
    return Finding("ML504", "requests pushed back", severity, 0, text, _behind(server, rank))


def idle_kv(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML505: most of the KV pool was never in use. Silent without serving lines and for a single request (a warm-up)."""
    usage = server.usage
    peak, running = usage.peak_kv_usage, usage.peak_running_requests or 0
    rank = _pool_rank(server)
    if rank is None or peak is None or running < 2 or peak > IDLE_KV or on_cpu(server):
        return None
    if max(usage.peak_swa_usage or 0.0, usage.peak_state_usage or 0.0) > IDLE_KV:
        return None
    pool = held(rank, "kv_cache")
    # The printed usage is rounded: 0.00 may be anything below half a step.
    step = 0.005 if server.framework == "sglang" else 0.0005
    idle = round(pool * (1 - min(1.0, peak + step)))
    if share(rank, idle) < IDLE_SHARE:
        return None
    used = (
        f"At most {n.percent(peak, 0 if server.framework == 'sglang' else 1)}"
        if peak
        else f"Less than {n.percent(step, 2)}"
    )
    text = (
        f"{used} of the {n.gib_about(pool)} KV cache{each(server)} was in use in this log "
        f"({n.count(running)} requests at the peak): {n.gib_about(idle)} were never needed by running requests"
    )
    text += "." if server.config.get("prefix_caching") is False else "; they hold cached prefixes at best."
    return Finding("ML505", "KV cache never used", "note", idle, text, _behind(server, rank))


def _behind(server: Server, rank: Rank | None) -> tuple[Evidence, ...]:
    """The pool's own lines, then those of the peaks."""
    pool = lines(rank, "kv_cache") if rank is not None else ()
    return tuple(dict.fromkeys((*pool, *server.usage.evidence)))


def _pool_rank(server: Server) -> Rank | None:
    return next((r for r in server.ranks if held(r, "kv_cache") > 0), None)


def _cap(server: Server) -> int | None:
    """How many requests may run in one engine."""
    capacities = [e.capacity for e in server.engines] + [r.capacity for r in server.ranks]
    found = {c.max_running_requests for c in capacities if c.max_running_requests}
    return found.pop() if len(found) == 1 else None


def _slots_bind(server: Server, cap: int) -> bool:
    for rank in server.ranks:
        slots = rank.capacity.state_slots
        if slots and any(slots // r <= cap for r in slots_per_request(server, rank.capacity).options):
            return True
    return (server.usage.peak_state_usage or 0.0) >= FULL
