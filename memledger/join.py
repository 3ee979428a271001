"""Several logs of one job: joined into one server where they agree, kept apart where they do not, and said either way."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from memledger.ledger import Input, Rank, Server, Usage

STARTS_APART_SECONDS: Final = 15 * 60
"""Nodes of one job start within minutes of each other (image pulls, rendezvous); a restart comes later."""

_SIZES: Final = ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes", "context_length", "memory_fraction")


def join_servers(servers: Sequence[Server], inputs: Sequence[Input]) -> list[Server]:
    """The servers with those of one job joined, each joined or kept apart with a note that says so.

    Two servers from different inputs are one when framework, model, sizes and start time agree (what only one log
    tells does not count against it, but something must agree: the model or the sizes, and the start time) and no rank
    is in both. Servers of one input are never joined.
    """
    if len(_all_inputs(servers)) < 2:
        return list(servers)
    joined: list[Server] = []
    for server in servers:
        for index, other in enumerate(joined):
            if _inputs(server) & _inputs(other):
                continue
            if why_apart(other, server) is None:
                joined[index] = _join(other, server)
                break
        else:
            joined.append(server)
    return [_with_note(server, joined, inputs) for server in joined]


def why_apart(a: Server, b: Server) -> str | None:
    """Why two servers are not one job; None when they are."""
    if a.framework != b.framework:
        return f"one is {a.framework}, the other {b.framework}"
    if a.model and b.model and a.model != b.model:
        return f"the models differ ({a.model}, {b.model})"
    agreed = bool(a.model and b.model)
    for name in _SIZES:
        left, right = a.config.get(name), b.config.get(name)
        if left is not None and right is not None:
            if left != right:
                return f"{name} differs ({left}, {right})"
            agreed = True
    if not agreed:
        return "nothing in the logs says that they belong together"
    apart = _seconds_apart(a.started_at, b.started_at)
    if apart is None:
        return "the start time is not in both logs"
    if apart > STARTS_APART_SECONDS:
        return f"they started {round(apart / 60)} minutes apart"
    there = {_key(r) for r in b.ranks}
    if both := [r for r in a.ranks if _key(r) in there]:
        return f"both hold the same rank ({both[0].label}{f' on {both[0].host}' if both[0].host else ''})"
    return None


def _seconds_apart(a: str | None, b: str | None) -> float | None:
    if a is None or b is None:
        return None
    try:
        left, right = (datetime.fromisoformat(t.replace("--", "2000-", 1) if t.startswith("--") else t) for t in (a, b))
    except ValueError:
        return None
    return abs((left.replace(tzinfo=None) - right.replace(tzinfo=None)).total_seconds())


def _key(rank: Rank) -> tuple[Any, ...]:
    """What tells ranks of one job apart; a host tells nodes apart where labels repeat."""
    return (rank.host, rank.dp, rank.pp, rank.tp, rank.ep)


def _inputs(server: Server) -> set[int]:
    return {span.input for span in server.span}


def _all_inputs(servers: Sequence[Server]) -> set[int]:
    return {i for server in servers for i in _inputs(server)}


def _join(a: Server, b: Server) -> Server:
    config = {
        **{k: v for k, v in b.config.items() if v is not None},
        **{k: v for k, v in a.config.items() if v is not None},
    }
    order = {"failed": 0, "stopped": 1, "serving": 2, "starting": 3, "unknown": 4}
    return msgspec.structs.replace(
        a,
        framework_version=a.framework_version or b.framework_version,
        model=a.model or b.model,
        span=(*a.span, *b.span),
        started_at=min(filter(None, (a.started_at, b.started_at)), default=None),
        ended_at=max(filter(None, (a.ended_at, b.ended_at)), default=None),
        state=min(a.state, b.state, key=order.__getitem__),
        config={**a.config, **config},
        ranks=tuple(sorted((*a.ranks, *b.ranks), key=_rank_order)),
        engines=(*a.engines, *b.engines),
        usage=_largest(a.usage, b.usage),
        failures=(*a.failures, *b.failures),
        notes=tuple(dict.fromkeys((*a.notes, *b.notes))),
    )


def _rank_order(rank: Rank) -> tuple[int, ...]:
    return tuple(-1 if v is None else v for v in (rank.dp, rank.pp, rank.tp, rank.ep, rank.pid))


def _largest(a: Usage, b: Usage) -> Usage:
    """Peaks are those of one scheduler, so the larger one of two logs; counts of events add."""
    if not a.seen or not b.seen:
        return a if a.seen else b

    def larger(name: str) -> Any:
        return max((v for v in (getattr(a, name), getattr(b, name)) if v is not None), default=None)

    def added(name: str) -> int | None:
        values = [v for v in (getattr(a, name), getattr(b, name)) if v is not None]
        return sum(values) if values else None

    peaks = {name: larger(name) for name in Usage.__struct_fields__ if name.startswith("peak_")}
    return Usage(
        scope=a.scope,
        preemptions=added("preemptions"),
        retractions=added("retractions"),
        seen=True,
        ran_between_samples=a.ran_between_samples or b.ran_between_samples,
        evidence=tuple(dict.fromkeys((*a.evidence, *b.evidence))),
        **peaks,
    )


def _with_note(server: Server, all_servers: Sequence[Server], inputs: Sequence[Input]) -> Server:
    """The server with a note on joining: which inputs it was joined from, or why it stands alone."""
    mine = sorted(_inputs(server))
    names = [inputs[i].path for i in mine]
    if len(mine) > 1:
        note = f"joined from {', '.join(names)}: framework, model, sizes and start time agree"
        return msgspec.structs.replace(server, notes=(*server.notes, note))
    others = [(s, why_apart(s, server)) for s in all_servers if s is not server and not _inputs(s) & _inputs(server)]
    reasons = [f"{inputs[min(_inputs(s))].path}: {why}" for s, why in others if why]
    if not reasons:
        return server
    note = f"kept apart from {reasons[0]}" + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")
    return msgspec.structs.replace(server, notes=(*server.notes, note))
