"""ML601 to ML605: vLLM's estimate of its CUDA graphs, what lies outside the budget, the activation peak, thin headroom."""

from __future__ import annotations

from typing import Final

from memledger import words as n
from memledger.findings.figures import (
    NO_CONTEXT,
    Context,
    held,
    largest,
    lines,
    of_card,
    on_cpu,
    opening,
    release,
    share,
    where,
    whole,
)
from memledger.ledger import Effect, Finding, Rank, Remedy, Server, Severity
from memledger.units import GIB, MIB

SMALL: Final = 512 * MIB
ESTIMATE_SWITCH: Final = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"
NO_POOL: Final = frozenset({"no_cache_blocks", "kv_too_small", "kv_pool"})


def estimate_too_large(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML601: the budget was charged with more for graphs than they took (or, without a pool, than is plausible)."""
    found = _estimate(server)
    if found is None:
        return None
    rank, estimate = found
    if any(f.kind in NO_POOL for f in server.failures):
        return _estimate_left_no_pool(server, rank, estimate)
    actual = _graphs(rank)
    if actual is None or _charged(server, rank) is not True:
        return None
    idle = estimate - max(actual, 0)
    if idle < SMALL or estimate < 2 * actual:
        return None
    text = (
        f"{n.gib_about(estimate)} of the budget was set aside for CUDA graphs{where(server, rank)}, and they took "
        f"{n.amount(max(actual, 0))}: {n.gib_about(idle)} stay idle outside the KV cache."
    )
    remedies: tuple[Remedy, ...] = ()
    total, fraction = rank.gpu.total_bytes, server.config.get("memory_fraction")
    if total and isinstance(fraction, float) and fraction + idle / total <= 1:
        raised = int((fraction + idle / total) * 1000) / 1000
        gained = int((raised - fraction) * total)
        text += f" --gpu-memory-utilization {raised:g} gives them to it."
        remedies = (
            Remedy(
                ("--gpu-memory-utilization", f"{raised:g}"),
                (Effect(account="kv_cache", bytes=gained), Effect(account="reserve", bytes=-gained)),
                f"derived: (estimate - actual) / card = {n.gib_about(idle)} / {n.gib_about(total)}",
            ),
        )
    severity: Severity = "warning" if idle >= 2 * GIB else "note"
    return Finding("ML601", "graph estimate too large", severity, idle, text, lines(rank, "cuda_graphs"), remedies)


def _estimate_left_no_pool(server: Server, rank: Rank, estimate: int) -> Finding | None:
    """The estimate is charged before anything is captured; without it there would have been a pool."""
    failure = next(f for f in server.failures if f.kind in NO_POOL)
    needed, available = failure.numbers.get("needed_bytes"), failure.numbers.get("available_bytes")
    short = needed - available if isinstance(needed, int) and isinstance(available, int) else None
    whole_card = opening(rank)
    decisive = short is not None and 0 < short <= estimate
    if not decisive and estimate < (whole_card // 4 if whole_card else 8 * GIB):
        return None
    why = f", and {n.amount(short)} were missing" if decisive and short is not None else ""
    text = (
        f"The engine's estimate of its CUDA graphs, {n.gib_about(estimate)}, was taken from the budget before anything was "
        f"captured{why}. {ESTIMATE_SWITCH} leaves it out, fewer or smaller capture sizes lower it."
    )
    return Finding("ML601", "graph estimate too large", "warning", estimate, text, failure.evidence)


def estimate_too_small(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML602: the graphs took more than the estimate that the budget was charged with."""
    found = _estimate(server)
    if found is None:
        return None
    rank, estimate = found
    actual = _graphs(rank)
    if actual is None or _charged(server, rank) is not True or actual - estimate < SMALL:
        return None
    beyond = actual - estimate
    text = (
        f"The CUDA graphs took {n.gib_about(actual)}{where(server, rank)}, and the budget allowed for {n.amount(estimate)}: "
        f"{n.gib_about(beyond)} lie outside it, in what --gpu-memory-utilization leaves free."
    )
    left = held(rank, "reserve")
    if left:
        text += f" {n.gib_about(left)} of that remain."
    severity: Severity = "warning" if left and left < GIB else "note"
    return Finding("ML602", "graph estimate too small", severity, beyond, text, lines(rank, "cuda_graphs"))


def outside_the_budget(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML603: this version keeps graph memory outside the budget, so the server holds more than the utilisation says."""
    if server.framework != "vllm" or on_cpu(server):
        return None
    found = largest(server.ranks, "cuda_graphs")
    if found is None:
        return None
    rank, actual = found
    charged, version = _charged(server, rank), release(server)
    by_version = version is not None and version < (0, 18, 0) and rank.budget.graph_estimate_bytes is None
    if actual < SMALL or not (charged is False or by_version):
        return None
    why = "this version's budget leaves CUDA graphs out" if by_version else "the budget was not charged with them"
    text = (
        f"CUDA graphs take {n.gib_about(actual)}{where(server, rank)} beside the memory budget: {why}, so the server holds "
        "that much more than --gpu-memory-utilization says."
    )
    severity: Severity = "note" if actual >= 2 * GIB or share(rank, actual) >= 0.02 else "info"
    return Finding("ML603", "graphs outside the budget", severity, actual, text, lines(rank, "cuda_graphs"))


def activation_reserve(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML604: the memory kept for the largest batch is a large part of what the KV cache could have."""
    found = largest(server.ranks, "activations")
    tokens = whole(server.config.get("chunked_prefill_tokens"))
    if found is None or tokens is None or tokens <= 2048:
        return None
    rank, peak = found
    pool = held(rank, "kv_cache")
    if peak < GIB or peak < pool // 4:
        return None
    beside = f", beside {n.gib_about(pool)} of KV cache" if pool else ""
    text = (
        f"{n.gib_about(peak)}{where(server, rank)} is kept for the activations of the largest batch, "
        f"{n.count(tokens)} tokens{beside}. A smaller --max-num-batched-tokens gives part of it to the KV cache "
        "(prefill of long prompts takes more steps)."
    )
    return Finding("ML604", "activation reserve", "note", peak, text, lines(rank, "activations"))


def thin_headroom(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML605: next to nothing is left outside the pools for prefill peaks, workspaces and libraries."""
    if on_cpu(server) or server.state == "failed":
        return None
    account = "free" if server.framework == "sglang" else "reserve"
    sizes = [
        (rank, held(rank, account))
        for rank in server.ranks
        if held(rank, "kv_cache") and any(e.account == account for e in rank.entries) and opening(rank)
    ]
    if not sizes:
        return None
    rank, left = min(sizes, key=lambda item: item[1])
    if left >= GIB or share(rank, left) >= 0.03:
        return None
    flag = "--mem-fraction-static" if server.framework == "sglang" else "--gpu-memory-utilization"
    much = f"Only {n.amount(left)}{of_card(rank, left)} is" if left > 0 else "Nothing is"
    text = (
        f"{much} left outside the pools{where(server, rank)}: a prefill peak, a workspace or "
        f"another process may run out of memory. A lower {flag} leaves more."
    )
    return Finding("ML605", "little memory left over", "note", left, text, lines(rank, account))


def _estimate(server: Server) -> tuple[Rank, int] | None:
    sizes = [(r, r.budget.graph_estimate_bytes) for r in server.ranks if r.budget.graph_estimate_bytes is not None]
    return max(sizes, key=lambda item: item[1], default=None)


def _charged(server: Server, rank: Rank) -> bool | None:
    """Whether the budget was charged with the estimate: as printed or tested, else the default of the version.

    Not in 0.18.0 to 0.19.1, from 0.20.0 on (vllm/envs.py, VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS).
    """
    if rank.budget.graph_estimate_charged is not None:
        return rank.budget.graph_estimate_charged
    version = release(server)
    if version is None or version < (0, 18, 0) or "dev" in (server.framework_version or ""):
        return None
    return version >= (0, 20, 0)


def _graphs(rank: Rank) -> int | None:
    entries = [e for e in rank.entries if e.account.startswith("cuda_graphs/")]
    return sum(e.bytes for e in entries) if entries else None
