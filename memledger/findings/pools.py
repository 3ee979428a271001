"""ML506 to ML511: what the KV pool is made of, what fits into it, and what is lost to padding."""

from __future__ import annotations

from typing import Any, Final

from memledger import words as n
from memledger.findings.figures import (
    NO_CONTEXT,
    WORTH_SAYING,
    Context,
    each,
    held,
    largest,
    lines,
    on_cpu,
    opening,
    share,
    where,
    whole,
)
from memledger.findings.limits import idle_kv
from memledger.ledger import Finding, Rank, Server, Severity

MUCH_PADDING: Final = 10.0
"""Per cent of padding from which it is worth a note."""
LOST_POOL: Final = 25.0
WEIGHTS_FILL: Final = 0.8


def filled_by_design(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML506: a small model fills a large card, because the KV cache takes whatever the budget leaves."""
    if server.framework != "vllm" or server.config.get("kv_cache_memory_bytes") or on_cpu(server):
        return None
    found = largest(server.ranks, "kv_cache")
    if found is None:
        return None
    rank, pool = found
    weights = held(rank, "weights")
    if not weights or pool < 2 * weights or pool < 8 * WORTH_SAYING:
        return None
    fraction = server.config.get("memory_fraction")
    share_words = f" ({fraction:g} of the card)" if isinstance(fraction, float) else ""
    text = (
        f"The KV cache{each(server)} takes {n.gib_about(pool)}, {pool / weights:.0f} times the weights, because vLLM gives it "
        f"all that its budget{share_words} leaves, whatever the model needs; a smaller --gpu-memory-utilization or "
        "--kv-cache-memory-bytes makes it smaller."
    )
    # ML505 says more, from what ran.
    severity: Severity = "note" if pool >= 8 * weights and idle_kv(server) is None else "info"
    return Finding("ML506", "the pool fills the budget by design", severity, pool, text, lines(rank, "kv_cache"))


def weights_fill_the_card(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML507: the weights take nearly all of the card."""
    found = largest(server.ranks, "weights")
    if found is None or on_cpu(server):
        return None
    rank, weights = found
    if share(rank, weights) < WEIGHTS_FILL:
        return None
    pools = held(rank, "kv_cache") + held(rank, "recurrent_state")
    left = f"; the pools get {n.gib_about(pools)}" if pools else ""
    what = "card" if rank.residual.base == "device" else "memory free at the start"
    text = (
        f"The weights take {n.gib_about(weights)} of the {n.gib_about(opening(rank) or 0)} {what}{where(server, rank)} "
        f"({n.percent(share(rank, weights))}){left}. More GPUs (--tp-size, --pp-size) or smaller weights make room."
    )
    if server.framework == "vllm":
        text = text.replace("--tp-size, --pp-size", "--tensor-parallel-size, --pipeline-parallel-size")
    return Finding("ML507", "weights fill the card", "note", weights, text, lines(rank, "weights"))


def longest_request_does_not_fit(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML508: the pool holds less than one request of the context length."""
    if any(f.kind in {"kv_too_small", "swa_too_small"} for f in server.failures):
        return None  # the failure says it
    length = whole(server.config.get("context_length"))
    for rank in server.ranks:
        capacity = rank.capacity
        requests, tokens = capacity.concurrency.requests, capacity.kv_tokens
        asked = capacity.concurrency.tokens_per_request or length
        if requests is not None and asked:
            short, fits = requests < 1, round(requests * asked)
        elif server.framework == "sglang" and tokens and length:
            short, asked, fits = tokens < length, length, tokens
        else:
            continue
        if short and asked:
            text = (
                f"A request of the full context of {n.count(asked)} tokens does not fit: the KV cache holds "
                f"{n.count(fits)}. Longer ones are refused or cut short."
            )
            severity: Severity = "note" if fits < 0.9 * asked else "info"
            return Finding("ML508", "one long request does not fit", severity, 0, text, lines(rank, "kv_cache"))
    return None


def context_beyond_use(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML509: all requests together never held a quarter of one context length, so none was that long."""
    usage, length = server.usage, whole(server.config.get("context_length"))
    if length is None or usage.peak_kv_usage is None or (usage.peak_running_requests or 0) < 2:
        return None
    rank = next((r for r in server.ranks if r.capacity.kv_tokens), None)
    if rank is None or any(held(r, "kv_cache/swa_k") or held(r, "recurrent_state") for r in server.ranks):
        return None  # usage is then not of one kind of token
    if server.framework == "vllm" and _pool_detail(rank).get("tokens_rule") == "blocks x block size":
        return None
    step = 0.005 if server.framework == "sglang" else 0.0005
    most = round((usage.peak_kv_usage + step) * (rank.capacity.kv_tokens or 0))
    if most >= length // 4:
        return None
    text = (
        f"All running requests together never held more than {n.count(most)} KV tokens, and one may have "
        f"{n.count(length)}: no request of this log was near the context length."
    )
    tables = sum(held(r, "request_tables") for r in server.ranks[:1])
    if tables >= WORTH_SAYING:
        text += f" It sizes the request tables ({n.gib_about(tables)})."
    return Finding("ML509", "context length beyond use", "info", tables, text, lines(rank, "kv_cache"))


def padding(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML510: parts of the pool that are padding, by the engine's own lines."""
    for rank in server.ranks:
        detail = _pool_detail(rank)
        layers, percent = detail.get("padding_layers"), detail.get("padding_layers_percent")
        state, page = detail.get("state_padding_percent"), detail.get("page_waste_percent")
        pool = held(rank, "kv_cache") or held(rank, "host/kv_cache")
        parts = []
        size = 0
        if isinstance(percent, float):
            size = round(pool * percent / 100)
            named = n.plural(layers, "padding layer") if isinstance(layers, int) else "padding layers"
            parts.append(f"{named} may waste up to {percent:g} % of it ({n.gib_about(size)}), by the engine's figure")
        if isinstance(state, float):
            parts.append(f"each recurrent state is padded by {state:g} % to the size of an attention page")
        if isinstance(page, float):
            parts.append(f"page alignment wastes {page:g} % of each block of hidden states")
        if not parts:
            continue
        worst = max(p for p in (percent, state, page) if isinstance(p, float))
        # Only the layers' figure is a share of the pool; how much of it is state is the model's matter.
        lost = isinstance(percent, float) and percent >= LOST_POOL
        severity: Severity = "warning" if lost else "note" if worst >= MUCH_PADDING else "info"
        text = f"Not all of the {n.gib_about(pool)} KV cache is usable: {'; '.join(parts)}."
        return Finding("ML510", "padding in the pool", severity, size, text, lines(rank, "kv_cache", "host/kv_cache"))
    return None


def window_as_full(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML511: sliding-window layers are charged as full attention."""
    rank = next((r for r in server.ranks if _pool_detail(r).get("window_as_full")), None)
    if rank is None:
        return None
    text = (
        "Sliding-window layers are charged as full attention, as the engine says (its hybrid KV cache manager is off): "
        f"of the {n.gib_about(held(rank, 'kv_cache'))} KV cache they take as many blocks as full layers."
    )
    return Finding("ML511", "sliding window charged as full attention", "note", 0, text, lines(rank, "kv_cache"))


def _pool_detail(rank: Rank) -> dict[str, Any]:
    return next((e.detail for e in rank.entries if e.account in {"kv_cache/pool", "host/kv_cache"}), {})
