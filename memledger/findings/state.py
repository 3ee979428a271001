"""ML101 to ML105: recurrent state slots, judged from both sides (too many for the workload, or the ceiling of it).

A slot holds one sequence's recurrent state. SGLang gives each running request `slots_per_request` of them (1 to 5, by
version and settings). The pool has one slot more than it can give (a padding row), so bytes per slot are the pool's
bytes over `state_slots + 1` (SGLang, mem_cache/memory_pool.py).
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from memledger import words as n
from memledger.findings import predicted
from memledger.findings.figures import (
    NO_CONTEXT,
    WORTH_SAYING,
    Context,
    each,
    held,
    opening,
    release,
    several_engines,
    share,
    whole,
)
from memledger.findings.slots import PerRequest, slots_per_request
from memledger.ledger import Effect, Entry, Evidence, Finding, Rank, Remedy, Server, Severity, Usage

FULL: Final = 0.95
"""State usage from which the slots count as used up."""
KV_LOW: Final = 0.7
"""KV usage below which KV tokens are not what holds the workload back."""
LARGE_SHARE: Final = 0.05
FLAG: Final = "--max-mamba-cache-size"
_PER_SLOT: Final = ("recurrent_state/conv", "recurrent_state/ssm")
_FLAG_WORKS_FROM: Final = (0, 5, 7)
"""SGLang 0.5.4 to 0.5.6 ignore the flag unless the radix cache is off (formats by version: model_runner.py of those releases)."""


def idle_slots(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML101: more state slots reserved than the workload ever needed. Silent without serving lines: there is no peak then."""
    rank = _rank_with_slots(server)
    running = server.usage.peak_running_requests
    if rank is None or running is None or not running:
        return None
    slots = rank.capacity.state_slots or 0
    known = slots_per_request(server, rank.capacity)
    per_request = known.certain
    slot_bytes = _bytes_per_slot(rank)
    most_held = _most_slots_held(server.usage, slots)
    if per_request is None:
        return _idle_unknown_share(server, rank, known, slots, slot_bytes, most_held)
    needed = max(per_request * running, most_held or 0)
    idle = slots - needed
    if idle < per_request or idle * slot_bytes < WORTH_SAYING:
        return None
    requests = slots // per_request
    how = "" if known.how == "printed" else f" ({known.how})"
    text = (
        f"{n.gib_about(held(rank, 'recurrent_state'))}{each(server)} is recurrent state for {n.count(slots)} slots, "
        f"room for {n.plural(requests, 'request')} at {per_request} each{how}. "
        f"At most {n.count(running)} ever ran{_held_words(most_held, per_request * running)}: "
        f"{n.gib_about(idle * slot_bytes)} were never needed."
    )
    cap = rank.capacity.max_running_requests
    if cap is not None and running < cap < requests:
        text += f" No more than {n.count(cap)} may run: {n.count(per_request * cap)} slots."
    remedy = _smaller_pool(server, rank, per_request, running, slots, slot_bytes, most_held)
    if remedy is not None:
        text += f" {_remedy_words(server, rank, remedy, per_request)}"
    # One request may be the server's own warm-up: a log that shows no more tells little about the workload.
    much = idle * slot_bytes >= LARGE_SHARE * (opening(rank) or 0)
    severity: Severity = "warning" if much and running > 1 else "note"
    remedies = () if remedy is None else (remedy,)
    # The first line of the peaks is that of the running requests, which the text speaks of.
    evidence = (*_state_evidence(rank), *server.usage.evidence[:1])
    return Finding("ML101", "state slots idle", severity, idle * slot_bytes, text, evidence, remedies)


def _idle_unknown_share(
    server: Server, rank: Rank, known: PerRequest, slots: int, slot_bytes: int, most_held: int | None
) -> Finding | None:
    """The finding where the slots of one request are not certain: only what usage lines count is judged."""
    running = server.usage.peak_running_requests or 0
    if most_held is None or (slots - most_held) * slot_bytes < WORTH_SAYING:
        return None
    text = (
        f"{n.gib_about(held(rank, 'recurrent_state'))}{each(server)} is recurrent state for {n.count(slots)} slots. "
        f"At most {n.count(most_held)} were ever held ({n.plural(running, 'running request')} at the peak): "
        f"{n.gib_about((slots - most_held) * slot_bytes)} were never held. "
        f"How many slots one request takes ({known.words}) is not in the log, so no smaller number is named here."
    )
    size = (slots - most_held) * slot_bytes
    evidence = (*_state_evidence(rank), *server.usage.evidence)
    return Finding("ML101", "state slots idle", "note", size, text, tuple(dict.fromkeys(evidence)))


def slots_are_the_ceiling(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML102: the workload fills the state slots while KV tokens are left."""
    rank = _rank_with_slots(server)
    usage = server.usage
    if rank is None:
        return None
    slots, per_request = rank.capacity.state_slots or 0, slots_per_request(server, rank.capacity).certain
    full = usage.peak_state_usage is not None and usage.peak_state_usage >= FULL
    cap = slots // per_request if per_request else None
    at_cap = cap is not None and usage.peak_running_requests is not None and usage.peak_running_requests >= cap > 0
    if not full and not at_cap:
        return None
    kv = usage.peak_kv_usage
    together = cap is not None and whole(server.config.get("max_running_requests")) == cap
    if not together and (kv is None or kv >= KV_LOW):
        return None
    reached = []
    if usage.peak_state_usage is not None:
        reached.append(f"state usage reached {n.percent(usage.peak_state_usage)} of {n.count(slots)} slots")
    if usage.peak_running_requests is not None:
        of = f" of the {n.count(cap)} that they allow" if cap is not None else ""
        reached.append(f"{n.plural(usage.peak_running_requests, 'request')}{of} ran at once")
    what = (
        "The state slots and the running requests asked for bind together"
        if together
        else "The state slots are the ceiling"
    )
    low = kv is not None and kv < KV_LOW
    if kv is None:
        rest = ""
    elif low:
        rest = f", while KV usage stayed at {n.percent(kv)}"
    else:
        rest = f"; KV usage reached {n.percent(kv)}"
    text = f"{what}: {', '.join(reached)}{rest}."
    queued = usage.peak_queued_requests or 0
    if queued:
        text += f" Up to {n.plural(queued, 'request')} waited."
    both = "with --max-running-requests" if together else "--mamba-full-memory-ratio"
    if low:
        text += f" More slots ({FLAG}, {both}) cost KV tokens that were not used."
    elif kv is not None:
        text += f" More slots ({FLAG}, {both}) would cost KV tokens that are needed as well."
    severity: Severity = "warning" if queued and low else "note"
    evidence = (*_state_evidence(rank), *usage.evidence)
    return Finding("ML102", "state slots are the ceiling", severity, 0, text, tuple(dict.fromkeys(evidence)))


def capped_by_slots(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML103: fewer requests may run than asked for, or than the KV pool would hold, because of the state slots."""
    rank = _rank_with_slots(server)
    if rank is None:
        return None
    slots, running = rank.capacity.state_slots or 0, rank.capacity.max_running_requests
    per_request = slots_per_request(server, rank.capacity).certain
    if not per_request or running is None or slots // per_request != running:
        return None
    asked = whole(server.config.get("max_running_requests"))
    if asked == running:
        return None
    capped = asked is not None and asked > running
    before = f" of the {n.count(asked)} asked for" if capped and asked is not None else ""
    text = (
        f"The state slots cap the running requests at {n.count(running)}{before}: "
        f"{n.count(slots)} slots at {per_request} a request."
    )
    severity: Severity = "info"
    remedies: tuple[Remedy, ...] = ()
    if capped and asked is not None:
        peak = server.usage.peak_running_requests
        if peak is not None and peak < running:
            severity = "note"
            text += f" At most {n.count(peak)} ran, so the cap was not reached."
        else:
            severity = "warning" if running <= asked // 2 else "note"
            remedy = _larger_pool(server, rank, asked * per_request - slots, asked * per_request)
            if remedy is not None:
                remedies = (remedy,)
                text += f" {_larger_words(rank, remedy, asked)}"
    return Finding(
        "ML103", "running requests capped by state slots", severity, 0, text, _state_evidence(rank), remedies
    )


def beyond_the_cap(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML104: slots that no running request can take, because fewer requests may run: room for cached prefixes only."""
    rank = _rank_with_slots(server)
    cap = rank.capacity.max_running_requests if rank is not None else None
    if rank is None or not cap:
        return None
    slots, known = rank.capacity.state_slots or 0, slots_per_request(server, rank.capacity)
    most = max(known.options) * cap
    beyond = slots - most
    size = beyond * _bytes_per_slot(rank)
    # Fewer slots than one request takes are the remainder of a division.
    if beyond < max(known.options) or size < WORTH_SAYING:
        return None
    at = f"{known.words} each" if known.certain else f"{known.words} each (not in the log which)"
    cached = server.config.get("prefix_caching")
    use = "serve nothing" if cached is False else "can only hold the states of cached prefixes"
    text = (
        f"At most {n.plural(cap, 'request')} may run, at {at}: {n.count(most)} of the {n.count(slots)} state slots"
        f"{each(server)}. The other {n.count(beyond)} ({n.gib_about(size)}) {use}."
    )
    severity: Severity = "note" if share(rank, size) >= 0.02 else "info"
    if idle_slots(server) is not None:
        severity = "info"  # ML101 says more, from what ran
    return Finding("ML104", "state slots beyond the request cap", severity, size, text, _state_evidence(rank))


def need_unknown(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML105: how much state is reserved, where the log can't say whether it is needed."""
    rank = _rank_with_slots(server)
    if rank is None or server.state == "failed":
        return None
    known = slots_per_request(server, rank.capacity)
    judged = server.usage.peak_running_requests is not None
    if judged and known.certain is not None:
        return None
    if judged and (server.usage.peak_state_slots is not None or server.usage.peak_state_usage is not None):
        return None
    state = held(rank, "recurrent_state")
    slots = rank.capacity.state_slots or 0
    if state < WORTH_SAYING:
        return None
    missing = []
    if release(server) is None and known.certain is None:
        missing.append("the version")
    if rank.capacity.max_running_requests is None:
        missing.append("the request cap")
    if not judged:
        missing.append("how many requests ran")
    if known.certain is not None:
        serves = f"{known.certain} a request: room for {n.count(slots // known.certain)}"
    else:
        rooms = " or ".join(n.count(slots // r) for r in sorted(known.options))
        serves = f"{known.words} a request: room for {rooms} requests"
    text = (
        f"{n.gib_about(state)}{each(server)} is recurrent state for {n.count(slots)} slots "
        f"({_slot_words(rank)} each; {serves}). Not in the log: {_and(missing)}; "
        "so nothing is called idle."
    )
    severity: Severity = "note" if share(rank, state) >= LARGE_SHARE or opening(rank) is None else "info"
    return Finding("ML105", "state reserved, need not known", severity, 0, text, _state_evidence(rank))


def _and(items: list[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


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


def _slot_words(rank: Rank) -> str:
    """The size of one slot, with no more digits than the printed sizes let stand."""
    tolerance = sum(e.tolerance_bytes // e.detail["rows"] for e in _slot_entries(rank))
    return n.quotient(_bytes_per_slot(rank), tolerance, 1)


def _most_slots_held(usage: Usage, slots: int) -> int | None:
    """Most slots held at once (by running requests and locked cached states), from usage lines."""
    if usage.peak_state_slots is not None:
        return usage.peak_state_slots
    if usage.peak_state_usage is not None:
        # Printed with two decimals: the largest count that rounds to it.
        return min(slots, math.ceil((usage.peak_state_usage + 0.005) * slots))
    return None


class SlotUse(msgspec.Struct, frozen=True):
    """Slots of one rank, and the most that its workload needed at once, by usage lines; a slot's size in bytes."""

    slots: int
    needed: int
    slot_bytes: int

    @property
    def idle_bytes(self) -> int:
        """Bytes of the slots that were never needed."""
        return max(0, self.slots - self.needed) * self.slot_bytes


def slot_use(server: Server, rank: Rank, usage: Usage) -> SlotUse | None:
    """What ML101 judges, for any rank and the usage of its engine; None where a figure of it is not in the log."""
    slots = rank.capacity.state_slots
    if server.framework != "sglang" or not slots or not _slot_entries(rank) or not usage.peak_running_requests:
        return None
    most_held = _most_slots_held(usage, slots)
    per_request = slots_per_request(server, rank.capacity).certain
    by_requests = per_request * usage.peak_running_requests if per_request is not None else None
    known = [figure for figure in (most_held, by_requests) if figure is not None]
    return SlotUse(slots, min(slots, max(known)), _bytes_per_slot(rank)) if known else None


def _held_words(most_held: int | None, needed: int) -> str:
    return f" and {n.count(most_held)} slots were held" if most_held is not None and most_held > needed else ""


def _state_evidence(rank: Rank) -> tuple[Evidence, ...]:
    return tuple(dict.fromkeys(e for entry in _slot_entries(rank) for e in entry.evidence))


def _smaller_pool(
    server: Server, rank: Rank, per_request: int, running: int, slots: int, slot_bytes: int, most_held: int | None
) -> Remedy | None:
    """The smallest pool that serves whole requests and leaves room for one more than ever ran."""
    requests = max(running, math.ceil((most_held or 0) / per_request)) + 1
    wanted = requests * per_request
    if wanted >= slots or several_engines(server) or not _flag_works(server):
        return None
    exact = predicted.effects(server, rank, {"state_slots": wanted})
    if exact is not None:
        return Remedy((FLAG, str(wanted)), *exact)
    freed = (slots - wanted) * slot_bytes
    effects = [Effect(account="recurrent_state", bytes=-freed)]
    per_token = _bytes_per_token(rank)
    if per_token:
        effects += [Effect(account="kv_cache", bytes=freed), Effect(capacity="kv_tokens", change=freed // per_token)]
    effects += [Effect(capacity="state_slots", change=wanted - slots)]
    basis = f"derived: {slots - wanted} slots x {_slot_words(rank)}"
    if per_token:
        basis += f", over {n.amount(per_token)} per KV token, both from the sizes in the log"
    if any(e.account.startswith("recurrent_state/speculative") for e in rank.entries):
        basis += "; speculative states go by running requests and shrink as well"
    return Remedy((FLAG, str(wanted)), tuple(effects), basis)


def _larger_pool(server: Server, rank: Rank, more: int, wanted: int) -> Remedy | None:
    """A pool for all requests asked for, paid with KV tokens; None where that is not known or leaves no KV cache."""
    if more <= 0 or several_engines(server) or not _flag_works(server):
        return None
    exact = predicted.effects(server, rank, {"state_slots": wanted})
    if exact is not None and any(e.capacity == "kv_tokens" for e in exact[0]):
        return Remedy((FLAG, str(wanted)), *exact)
    if any(e.account.startswith("recurrent_state/speculative") for e in rank.entries):
        return None
    cost, per_token, tokens = more * _bytes_per_slot(rank), _bytes_per_token(rank), rank.capacity.kv_tokens
    if not per_token or not tokens or cost // per_token >= tokens:
        return None
    effects = (
        Effect(account="recurrent_state", bytes=cost),
        Effect(account="kv_cache", bytes=-cost),
        Effect(capacity="kv_tokens", change=-(cost // per_token)),
        Effect(capacity="state_slots", change=more),
    )
    basis = (
        f"derived: {more} slots x {_slot_words(rank)}, over {n.amount(per_token)} per KV token, "
        "both from the sizes in the log"
    )
    return Remedy((FLAG, str(wanted)), effects, basis)


def _larger_words(rank: Rank, remedy: Remedy, requests: int) -> str:
    change = next(e.change or 0 for e in remedy.effects if e.capacity == "kv_tokens")
    tokens = rank.capacity.kv_tokens or 0
    return (
        f"{' '.join(remedy.flags)} serves all {n.count(requests)}, at {n.count_short(tokens + change)} KV tokens instead of "
        f"{n.count_short(tokens)}."
    )


def _flag_works(server: Server) -> bool:
    version = release(server)
    if version is None or server.config.get("prefix_caching") is False:
        return True
    return version >= _FLAG_WORKS_FROM or version < (0, 5, 4)


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
