"""One side of a comparison: the figures of one rank that decide its KV pool, taken from its ledger.

Two engines, one equation, per GPU:

    pool = budget - weights - draft - activations - graph estimate - state - window pool - other - unused - what is left

SGLang's budget is `mem_fraction_static` of the memory free before loading and holds weights, KV and state; activations and
graphs live in the rest. vLLM's is a share of the device's total and holds the profiled activations and (from 0.20) an
estimate of the graphs; recurrent state and window layers live in the pool itself (docs/ledger.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from memledger.ledger import Entry, Rank, Report, Server, stage_base
from memledger.units import GIB, ZERO, Amount, total

HALF_DIGIT: Final = GIB // 200 + 1
"""Half of the last digit of a figure printed in GiB with two decimals, bytes."""

POOL: Final = ("kv_cache/k", "kv_cache/v", "kv_cache/latent", "kv_cache/index", "kv_cache/pool")
WINDOW: Final = ("kv_cache/swa_k", "kv_cache/swa_v")
GROUPS: Final = ("weights", "draft", "activations", "cuda_graphs", "recurrent_state", "window_pool", "other")
"""What is taken off the budget before the pool, in the order of the steps."""

_PLAIN_ALGORITHMS: Final = frozenset({"ngram", "lookahead", "prompt_lookup", "suffix", "uno"})
"""Ways of drafting without a draft model."""

Basis = Literal["logged", "live", "derived", "modelled", "assumed", "unknown"]
_BASES: Final = ("logged", "live", "derived", "modelled", "assumed", "unknown")


class Part(msgspec.Struct, frozen=True):
    """An amount with how it is known and what is to be said of it; `amount` None: the log does not print it."""

    amount: Amount | None
    basis: Basis = "logged"
    note: str | None = None
    what: str = ""


class Side(msgspec.Struct, frozen=True):
    """The figures of one rank. `opening`: what the fraction is a share of; `in_use`: what is taken off the device before that."""

    server: Server
    rank: Rank
    pool: Part
    parts: dict[str, Part]
    unused: Amount
    budget: Amount | None
    fraction_of: Literal["device", "free"] | None
    opening: Amount | None
    device: Amount | None
    in_use: Amount | None
    given: bool
    as_read: bool
    """Whether the budget is not the fraction's but what was left outside the pools at the end, by the ledger's readings."""
    left: Amount | None
    """Budget that did not become pool and is found again in the ledger's later readings."""
    unexplained: Amount | None
    graphs_held: Amount | None
    combined: bool
    """Whether weights and memory outside torch are one figure."""


def weakest(bases: Iterable[str]) -> Basis:
    """The basis of a figure made of others."""
    return _BASES[max((_BASES.index(b) for b in bases), default=0)]


def logged_entries(rank: Rank) -> tuple[Entry, ...]:
    """The rank's entries as they were logged: a vLLM pool that a report divided into KV and state is whole again."""
    return tuple(logged for entry in rank.entries if (logged := _as_logged(entry)) is not None)


def _as_logged(entry: Entry) -> Entry | None:
    """The entry, whole again; None for a part that is inside another one."""
    whole = entry.detail.get("logged_pool_bytes")
    if not isinstance(whole, int) or entry.basis != "modelled":
        return entry
    if entry.account != "kv_cache/pool":
        return None
    detail = {k: v for k, v in entry.detail.items() if k not in {"assumption", "logged_pool_bytes"}}
    return msgspec.structs.replace(entry, bytes=whole, basis="logged", detail=detail)


def whole_pools(rank: Rank) -> tuple[Entry, ...]:
    """`logged_entries`; those of a CPU server's host ledger count as the device's: they are what its pool is made of."""
    entries = logged_entries(rank)
    return tuple(map(_on_device, entries)) if rank.gpu.kind == "cpu" else entries


def _on_device(entry: Entry) -> Entry:
    if not entry.account.startswith("host/"):
        return entry
    account = entry.account.removeprefix("host/")
    return msgspec.structs.replace(entry, account="kv_cache/pool" if account == "kv_cache" else account)


def choose_rank(server: Server, ranks: tuple[Rank, ...]) -> Rank | None:
    """The rank to compare: of those with a pool, the one whose pool is smallest (it decides for all), then the most told."""
    if not ranks:
        return None

    def weight(item: tuple[int, Rank]) -> tuple[bool, int, int, int]:
        place, rank = item
        pool = _sum(whole_pools(rank), POOL)
        return (pool is None, pool.bytes if pool is not None else 0, -len({e.account for e in rank.entries}), place)

    return min(enumerate(ranks), key=weight)[1]


def side_of(server: Server, rank: Rank) -> Side:
    """The figures of one rank."""
    entries = whole_pools(rank)
    vllm = server.framework == "vllm"
    pool = _pool(entries)
    unused = _sum(entries, ("kv_cache/unused",)) or ZERO
    opening, device, in_use = _base(server, rank)
    given = rank.budget.static_bytes is None and "given in bytes" in (rank.budget.rule or "")
    budget = Amount(rank.budget.static_bytes, HALF_DIGIT) if rank.budget.static_bytes is not None else None
    parts = _vllm_parts(server, rank, entries) if vllm else _sglang_parts(server, rank, entries)
    residual = _residual(rank)
    known = residual is not None and budget is not None and pool.amount is not None
    if known and not vllm:
        parts = _tested_draft(parts, entries, budget, pool.amount, unused)
    as_read = budget is None and not given and not vllm
    if as_read and residual is not None and pool.amount is not None:
        budget = _budget_as_read(parts, pool.amount, unused, residual)
        opening, in_use = _opening_as_read(rank)
    as_read = as_read and budget is not None
    left, unexplained = _closure(budget, parts, pool.amount, unused, residual)
    return Side(
        server=server,
        rank=rank,
        pool=pool,
        parts=parts,
        unused=unused,
        budget=budget,
        fraction_of=None if budget is None else "device" if vllm else "free",
        opening=opening,
        device=device,
        in_use=in_use,
        given=given,
        as_read=as_read,
        left=left,
        unexplained=unexplained,
        graphs_held=_sum(entries, ("cuda_graphs",)),
        combined=any(e.account == "weights_and_non_torch" for e in entries),
    )


def _sum(entries: Iterable[Entry], accounts: tuple[str, ...]) -> Amount | None:
    found = [e.amount for e in entries if any(e.account == a or e.account.startswith(a + "/") for a in accounts)]
    return total(found) if found else None


def _part(entries: Iterable[Entry], accounts: tuple[str, ...], where: Callable[[Entry], bool] | None = None) -> Part:
    found = [
        e
        for e in entries
        if any(e.account == a or e.account.startswith(a + "/") for a in accounts) and (where is None or where(e))
    ]
    return Part(total([e.amount for e in found]) if found else None, weakest(e.basis for e in found))


def _pool(entries: tuple[Entry, ...]) -> Part:
    return _part(entries, POOL)


def _residual(rank: Rank) -> Amount | None:
    found = rank.residual
    if found.bytes is None or found.verdict == "open":
        return None
    return Amount(found.bytes, found.tolerance_bytes or 0)


def _budget_as_read(parts: dict[str, Part], pool: Amount, unused: Amount, residual: Amount) -> Amount | None:
    """Where the fraction is not in the log: what was free before loading less all that is outside the pools at the end.

    The ledger closes, so that is the sum of what is inside and the residual; the residual stays unexplained.
    """
    if any(part.amount is None for part in parts.values()):
        return None
    inside = total([part.amount for part in parts.values() if part.amount is not None])
    return Amount((inside + pool + unused + residual).bytes, residual.tolerance)


def _opening_as_read(rank: Rank) -> tuple[Amount | None, Amount | None]:
    """(what was free before loading, what was in use before that) of a ledger that has an opening balance."""
    opening = rank.residual.opening_bytes
    if opening is None:
        return None, None
    if rank.residual.base != "device":
        return Amount(opening, HALF_DIGIT), None
    taken = _sum(rank.entries, ("in_use_at_start",)) or ZERO
    return Amount(opening - taken.bytes, HALF_DIGIT), taken


def _closure(
    budget: Amount | None, parts: dict[str, Part], pool: Amount | None, unused: Amount, residual: Amount | None
) -> tuple[Amount | None, Amount | None]:
    """(budget that did not become pool, what nothing explains); their sum is the budget less everything in it.

    The remainder is left in the budget as far as the ledger finds it again (in free memory or in what was taken later): where
    the ledger's own residual is smaller than the remainder. Otherwise all of it is unexplained.
    """
    if budget is None or pool is None or any(part.amount is None for part in parts.values()):
        return None, None
    taken = total([part.amount for part in parts.values() if part.amount is not None])
    rest = budget - taken - pool - unused
    if residual is None or rest.is_zero() or abs(rest.bytes) <= abs(residual.bytes):
        return ZERO, rest
    return Amount(rest.bytes - residual.bytes, residual.tolerance), residual


def _base(server: Server, rank: Rank) -> tuple[Amount | None, Amount | None, Amount | None]:
    """(what the fraction is a share of, the device's total, what was in use before the start and is off the budget)."""
    whole = rank.gpu.total_bytes
    device = Amount(whole) if whole is not None else None
    budget = rank.budget
    shared = None
    if budget.static_bytes is not None and budget.slack_bytes is not None:
        shared = Amount(budget.static_bytes + budget.slack_bytes, HALF_DIGIT)
    if server.framework == "vllm":
        return shared or device, device, ZERO if device is not None else None
    in_use = Amount(device.bytes - shared.bytes, HALF_DIGIT) if device is not None and shared is not None else None
    return shared, device, in_use


# ------------------------------------------------------------------------------------------------------- vLLM


def _vllm_parts(server: Server, rank: Rank, entries: tuple[Entry, ...]) -> dict[str, Part]:
    weights = _part(entries, ("weights/model", "weights/lora", "weights_and_non_torch"))
    runtime = _part(entries, ("activations",))
    outside = _part(entries, ("non_torch",))
    if runtime.amount is not None and outside.amount is not None:
        runtime = Part(runtime.amount + outside.amount, weakest((runtime.basis, outside.basis)))
    other = _part(entries, ("other_processes",), lambda e: stage_base(e.stage or "") == "pools")
    with_draft = any(e.detail.get("includes_draft") for e in entries if e.account == "weights/model")
    return {
        "weights": msgspec.structs.replace(weights, what="the size of the weights"),
        "draft": _vllm_draft(server, entries, weights, with_draft=with_draft),
        "activations": msgspec.structs.replace(
            runtime, what="the profiled activations and memory outside torch", note=None
        ),
        "cuda_graphs": _vllm_graphs(server, rank, runtime, weights),
        "recurrent_state": Part(ZERO, note=_in_pool(entries, "recurrent state")),
        "window_pool": Part(ZERO),
        "other": other if other.amount is not None else Part(ZERO),
    }


def _in_pool(entries: tuple[Entry, ...], what: str) -> str | None:
    """What is said of a vLLM hybrid: its state is no reservation."""
    if any(e.detail.get("includes_recurrent_state") for e in entries if e.account == "kv_cache/pool"):
        return f"vLLM takes {what} from the pool's blocks as requests run"
    return None


def _vllm_draft(server: Server, entries: tuple[Entry, ...], weights: Part, *, with_draft: bool) -> Part:
    found = _part(entries, ("weights/draft",))
    if found.amount is not None:
        return found
    note = "the draft's weights are in the weights' figure, its KV in the pool" if with_draft else None
    if weights.amount is None and server.config.get("speculative_algorithm"):
        return Part(None, "unknown", what="the draft's size")
    return Part(ZERO, note=note)


def _vllm_graphs(server: Server, rank: Rank, runtime: Part, weights: Part) -> Part:
    """The estimate that the budget was charged with: graphs take memory from the pool only through it."""
    budget = rank.budget
    held = _sum(rank.entries, ("cuda_graphs",))
    after = f"{held.bytes / GIB:.2f} GiB captured" if held is not None else "their size is not in the log"
    if budget.graph_estimate_charged and budget.graph_estimate_bytes is not None:
        size = budget.graph_estimate_bytes
        note = f"an estimate of {size / GIB:.2f} GiB inside the budget; {after}"
        return Part(Amount(size, HALF_DIGIT), note=note)
    if budget.graph_estimate_charged is False or runtime.amount is not None:
        return Part(ZERO, note=f"outside the budget; {after}" if held is not None else None)
    if budget.graph_estimate_bytes is None and (weights.amount is not None or server.config.get("enforce_eager")):
        return Part(ZERO, note=f"no estimate charged; {after}" if held is not None else None)
    return Part(None, "unknown", what="whether the budget was charged with the graph estimate")


# ----------------------------------------------------------------------------------------------------- SGLang


def _sglang_parts(server: Server, rank: Rank, entries: tuple[Entry, ...]) -> dict[str, Part]:
    weights = _part(entries, ("weights/model", "weights/lora"))
    state = _part(entries, ("recurrent_state",))
    if state.amount is None and rank.capacity.state_slots is None:
        state = Part(ZERO)
    window = _part(entries, WINDOW)
    if window.amount is None and rank.capacity.kv_swa_tokens is None:
        window = Part(ZERO)
    other = _part(
        entries,
        ("communication", "released", "non_torch"),
        lambda e: stage_base(e.stage or "final") in {"weights", "draft_weights", "pools", "draft_pools"},
    )
    held = _sum(entries, ("cuda_graphs",))
    graphs = f"outside the budget; {held.bytes / GIB:.2f} GiB captured" if held is not None else None
    return {
        "weights": msgspec.structs.replace(weights, what="the size of the weights"),
        "draft": _sglang_draft(server, rank, entries, weights),
        "activations": Part(ZERO, note="SGLang keeps room for activations outside the budget"),
        "cuda_graphs": Part(ZERO, note=graphs),
        "recurrent_state": msgspec.structs.replace(state, what="the size of the recurrent state"),
        "window_pool": msgspec.structs.replace(window, what="the size of the sliding-window pool"),
        "other": other if other.amount is not None else Part(ZERO),
    }


def _sglang_draft(server: Server, rank: Rank, entries: tuple[Entry, ...], weights: Part) -> Part:
    """The draft's weights where they were loaded before the pools, and its KV pool; releases differ, the readings tell."""
    early = _before_pools(rank, "draft_weights")
    found = _part(entries, ("weights/draft", "kv_cache/draft"), lambda e: e.account != "weights/draft" or early)
    note = None if early else "loaded after the pools: outside the budget"
    if found.amount is not None:
        return msgspec.structs.replace(found, note=note)
    algorithm = str(server.config.get("speculative_algorithm") or "none").lower()
    without = algorithm == "none" or algorithm in _PLAIN_ALGORITHMS
    if without or any(e.account == "weights/draft" for e in entries):
        return Part(ZERO, note=None if without else note)
    return Part(None, "unknown", what="the draft's size") if weights.amount is not None else Part(ZERO)


def _before_pools(rank: Rank, stage: str) -> bool:
    """Whether a stage comes before the pools in the readings; in a log without either, it is taken to."""
    names = [one.name for one in rank.stages]
    return stage not in names or "pools" not in names or names.index(stage) < names.index("pools")


def _tested_draft(
    parts: dict[str, Part], entries: tuple[Entry, ...], budget: Amount | None, pool: Amount | None, unused: Amount
) -> dict[str, Part]:
    """Whether the draft's KV pool came out of the budget or of the rest: releases differ, the figures tell.

    The reading that leaves less of the budget over is taken.
    """
    kv = _sum(entries, ("kv_cache/draft",))
    draft = parts["draft"].amount
    others = [part.amount for name, part in parts.items() if name != "draft"]
    if kv is None or draft is None or budget is None or pool is None or any(amount is None for amount in others):
        return parts
    rest = budget - total([amount for amount in others if amount is not None]) - pool - unused - draft
    if abs((rest + kv).bytes) >= abs(rest.bytes):
        return parts
    early = parts["draft"].note is None
    note = f"the draft's KV pool of {kv.bytes / GIB:.2f} GiB came out of the rest, not of the budget"
    note = note if early else f"{parts['draft'].note}, and so its KV pool of {kv.bytes / GIB:.2f} GiB"
    outside = msgspec.structs.replace(parts["draft"], amount=Amount((draft - kv).bytes, draft.tolerance), note=note)
    return {**parts, "draft": outside}


# ---------------------------------------------------------------------------------------------------- choosing


def choose_server(report: Report, start: int | None) -> tuple[int, Server]:
    """The server to compare: the one asked for, else the last whose pools are known, else the last.

    Raises:
        LookupError: there is no such start, or no server at all.
    """
    servers = report.servers
    if not servers:
        raise LookupError("no server in it")
    if start is not None:
        if start > len(servers):
            raise LookupError(f"there is no start {start}: it holds {len(servers)}")
        return start - 1, servers[start - 1]
    sized = [i for i, s in enumerate(servers) if any(_pool(whole_pools(r)).amount is not None for r in s.ranks)]
    counted = [i for i, s in enumerate(servers) if any(r.capacity.kv_tokens or r.capacity.kv_blocks for r in s.ranks)]
    index = (sized or counted or list(range(len(servers))))[-1]
    return index, servers[index]
