"""ML101 to ML103: recurrent state slots, judged from both sides (too many for the workload, or the ceiling of it).

A slot holds one sequence's recurrent state. SGLang gives each running request `slots_per_request` of them (1 to 5, by
version and settings); the number is used only where the log prints it. The pool has one slot more than it can give
(a padding row), so bytes per slot are the pool's bytes over `state_slots + 1` (SGLang, mem_cache/memory_pool.py).
"""

from __future__ import annotations

import math
from typing import Final

from memledger import words as n
from memledger.ledger import Effect, Entry, Evidence, Finding, Rank, Remedy, Server, Severity, account_total
from memledger.units import MIB

FULL: Final = 0.95
"""State usage from which the slots count as used up."""
KV_LOW: Final = 0.7
"""KV usage below which KV tokens are not what holds the workload back."""
WORTH_SAYING: Final = 256 * MIB
FLAG: Final = "--max-mamba-cache-size"
_PER_SLOT: Final = ("recurrent_state/conv", "recurrent_state/ssm")
_FLAG_WORKS_FROM: Final = (0, 5, 7)
"""SGLang 0.5.4 to 0.5.6 ignore the flag unless the radix cache is off (formats by version: model_runner.py of those releases)."""


def idle_slots(server: Server) -> Finding | None:
    """ML101: more state slots reserved than the workload ever needed. Silent without serving lines: there is no peak then."""
    rank = _rank_with_slots(server)
    running = server.usage.peak_running_requests
    if rank is None or running is None or not running:
        return None
    capacity = rank.capacity
    slots, per_request = capacity.state_slots or 0, capacity.slots_per_request
    slot_bytes = _bytes_per_slot(rank)
    held = _most_slots_held(server, slots)
    if per_request is None:
        return _idle_unknown_share(server, rank, slots, slot_bytes, held)
    needed = max(per_request * running, held or 0)
    idle = slots - needed
    if idle < per_request or idle * slot_bytes < WORTH_SAYING:
        return None
    state = _state_bytes(rank)
    requests = slots // per_request
    each = " on each GPU" if len(server.ranks) > 1 else ""
    text = (
        f"{n.gib_about(state)}{each} is recurrent state for {n.count(slots)} slots, room for {n.plural(requests, 'request')} at {per_request} each. "
        f"At most {n.count(running)} ever ran{_held_words(held, per_request * running)}: {n.gib_about(idle * slot_bytes)} were never needed."
    )
    remedy = _smaller_pool(server, rank, per_request, running, slots, slot_bytes, held)
    if remedy is not None:
        text += f" {_remedy_words(server, rank, remedy, per_request)}"
    # One request may be the server's own warm-up: a log that shows no more tells little about the workload.
    much = idle * slot_bytes >= 0.05 * (rank.residual.opening_bytes or 0)
    severity: Severity = "warning" if much and running > 1 else "note"
    remedies = () if remedy is None else (remedy,)
    return Finding("ML101", "state slots idle", severity, idle * slot_bytes, text, _state_evidence(rank), remedies)


def _idle_unknown_share(server: Server, rank: Rank, slots: int, slot_bytes: int, held: int | None) -> Finding | None:
    """The finding where the log does not print how many slots one request takes: only what usage lines count is judged."""
    running = server.usage.peak_running_requests or 0
    if held is None or (slots - held) * slot_bytes < WORTH_SAYING:
        return None
    each = " on each GPU" if len(server.ranks) > 1 else ""
    text = (
        f"{n.gib_about(_state_bytes(rank))}{each} is recurrent state for {n.count(slots)} slots. At most {n.count(held)} were ever held "
        f"({n.plural(running, 'running request')} at the peak): {n.gib_about((slots - held) * slot_bytes)} were never held. "
        "How many slots one request takes is not in the log, so no smaller number is named here."
    )
    return Finding("ML101", "state slots idle", "note", (slots - held) * slot_bytes, text, _state_evidence(rank))


def slots_are_the_ceiling(server: Server) -> Finding | None:
    """ML102: the workload fills the state slots while KV tokens are left."""
    rank = _rank_with_slots(server)
    usage = server.usage
    if rank is None or usage.peak_kv_usage is None or usage.peak_kv_usage >= KV_LOW:
        return None
    slots, per_request = rank.capacity.state_slots or 0, rank.capacity.slots_per_request
    full = usage.peak_state_usage is not None and usage.peak_state_usage >= FULL
    cap = slots // per_request if per_request else None
    at_cap = cap is not None and usage.peak_running_requests is not None and usage.peak_running_requests >= cap > 0
    if not full and not at_cap:
        return None
    reached = []
    if usage.peak_state_usage is not None:
        reached.append(f"state usage reached {n.percent(usage.peak_state_usage)} of {n.count(slots)} slots")
    if usage.peak_running_requests is not None:
        of = f" of the {n.count(cap)} that they allow" if cap is not None else ""
        reached.append(f"{n.plural(usage.peak_running_requests, 'request')}{of} ran at once")
    asked = server.config.get("max_running_requests")
    together = cap is not None and asked == cap
    what = (
        "The state slots and the running requests asked for bind together"
        if together
        else "The state slots are the ceiling"
    )
    text = f"{what}: {', '.join(reached)}, while KV usage stayed at {n.percent(usage.peak_kv_usage)}."
    queued = usage.peak_queued_requests or 0
    if queued:
        text += f" Up to {n.plural(queued, 'request')} waited."
    both = "with --max-running-requests" if together else "--mamba-full-memory-ratio"
    text += f" More slots ({FLAG}, {both}) cost KV tokens that were not used."
    return Finding(
        "ML102", "state slots are the ceiling", "warning" if queued else "note", 0, text, _state_evidence(rank)
    )


def capped_by_slots(server: Server) -> Finding | None:
    """ML103: fewer requests may run than asked for, or than the KV pool would hold, because of the state slots."""
    rank = _rank_with_slots(server)
    if rank is None:
        return None
    slots, per_request, running = (
        rank.capacity.state_slots or 0,
        rank.capacity.slots_per_request,
        rank.capacity.max_running_requests,
    )
    if not per_request or running is None or slots // per_request != running:
        return None
    asked = server.config.get("max_running_requests")
    before = f" of the {n.count(asked)} asked for" if isinstance(asked, int) and asked > running else ""
    text = f"The state slots cap the running requests at {n.count(running)}{before}: {n.count(slots)} slots at {per_request} a request."
    return Finding(
        "ML103", "running requests capped by state slots", "note" if before else "info", 0, text, _state_evidence(rank)
    )


# ------------------------------------------------------------------------------------------------------------- figures


def _rank_with_slots(server: Server) -> Rank | None:
    """The first rank whose slots and state bytes the log gives (the engines of one server are configured alike)."""
    if server.framework != "sglang":
        return None  # vLLM keeps state in blocks of its one pool: nothing is reserved by slot
    return next((r for r in server.ranks if r.capacity.state_slots and _slot_entries(r)), None)


def _slot_entries(rank: Rank) -> list[Entry]:
    """The entries that are so many bytes per slot; speculative states and replay rings go by request, not by slot."""
    return [e for e in rank.entries if e.account in _PER_SLOT and isinstance(e.detail.get("rows"), int)]


def _bytes_per_slot(rank: Rank) -> int:
    """Bytes of one slot: each tensor's bytes over its rows (the padding row included)."""
    return sum(e.bytes // e.detail["rows"] for e in _slot_entries(rank))


def _state_bytes(rank: Rank) -> int:
    amount = account_total(rank.entries, "recurrent_state")
    return amount.bytes if amount is not None else 0


def _most_slots_held(server: Server, slots: int) -> int | None:
    """Most slots held at once (by running requests and locked cached states), from usage lines."""
    if server.usage.peak_state_slots is not None:
        return server.usage.peak_state_slots
    if server.usage.peak_state_usage is not None:
        # Printed with two decimals: the largest count that rounds to it.
        return min(slots, math.ceil((server.usage.peak_state_usage + 0.005) * slots))
    return None


def _held_words(held: int | None, needed: int) -> str:
    return f" and {n.count(held)} slots were held" if held is not None and held > needed else ""


def _state_evidence(rank: Rank) -> tuple[Evidence, ...]:
    return tuple(dict.fromkeys(e for entry in _slot_entries(rank) for e in entry.evidence))


def _smaller_pool(
    server: Server, rank: Rank, per_request: int, running: int, slots: int, slot_bytes: int, held: int | None
) -> Remedy | None:
    """The smallest pool that serves whole requests and leaves room for one more than ever ran."""
    requests = max(running, math.ceil((held or 0) / per_request)) + 1
    wanted = requests * per_request
    dp = server.config.get("dp_size")
    if wanted >= slots or (isinstance(dp, int) and dp > 1) or not _flag_works(server):
        return None
    freed = (slots - wanted) * slot_bytes
    effects = [Effect(account="recurrent_state", bytes=-freed)]
    per_token = _bytes_per_token(rank)
    if per_token:
        effects += [Effect(account="kv_cache", bytes=freed), Effect(capacity="kv_tokens", change=freed // per_token)]
    effects += [Effect(capacity="state_slots", change=wanted - slots)]
    basis = f"derived: {slots - wanted} slots x {n.amount(slot_bytes)}"
    if per_token:
        basis += f", over {n.amount(per_token)} per KV token, both from the sizes in the log"
    if any(e.account.startswith("recurrent_state/speculative") for e in rank.entries):
        basis += "; speculative states go by running requests and shrink as well"
    return Remedy((FLAG, str(wanted)), tuple(effects), basis)


def _flag_works(server: Server) -> bool:
    version = server.framework_version
    if version is None or server.config.get("prefix_caching") is False:
        return True
    numbers = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers) >= _FLAG_WORKS_FROM or tuple(numbers) < (0, 5, 4)


def _bytes_per_token(rank: Rank) -> int | None:
    """KV bytes per token from the logged pool; None where more than one kind of pool makes it a model's matter."""
    tokens = rank.capacity.kv_tokens
    entries = [e for e in rank.entries if e.account.startswith("kv_cache/") and e.account != "kv_cache/unused"]
    if not tokens or not entries or any(e.account in {"kv_cache/swa_k", "kv_cache/swa_v"} for e in entries):
        return None
    return round(sum(e.bytes for e in entries) / tokens)


def _remedy_words(server: Server, rank: Rank, remedy: Remedy, per_request: int) -> str:
    slots = int(remedy.flags[1])
    text = f"{' '.join(remedy.flags)} serves {n.plural(slots // per_request, 'request')}"
    change = next((e.change for e in remedy.effects if e.capacity == "kv_tokens"), None)
    tokens = rank.capacity.kv_tokens
    if change is not None and tokens:
        text += f" and gives {n.count_short(tokens + change)} KV tokens instead of {n.count_short(tokens)}"
    if server.config.get("prefix_caching") is not False:
        text += "; fewer prefixes stay cached"
    return text + "."
