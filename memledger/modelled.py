"""The model's arithmetic beside the log: the same servers with what their entries should be, and vLLM's pool split.

`checked` adds `detail.modelled` to entries and changes no figure. `split` comes after the findings, which judge the pool
as it was printed: it divides the block pool of a vLLM hybrid into KV and recurrent state, to the byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from memledger.ledger import Entry, Rank, Report, Residual, Server, Source, close
from memledger.model.architecture import Architecture, NotModelledError
from memledger.model.find import Found, find
from memledger.units import MIB, Amount

POOL: Final = "kv_cache/pool"


def architectures(report: Report, config: Path | None, *, look_here: bool) -> tuple[Found, ...]:
    """What is known of each server's model.

    Raises:
        ModelConfigError: the file that the user named can't be used.
    """
    return tuple(find(server.model, config=config, look_here=look_here) for server in report.servers)


def checked(report: Report, found: tuple[Found, ...]) -> Report:
    """The report with every entry that the model speaks of compared, and the source of the architectures named."""
    servers = tuple(
        server if one.architecture is None else check_server(server, one.architecture)
        for server, one in zip(report.servers, found, strict=True)
    )
    return msgspec.structs.replace(report, servers=servers, sources=(*report.sources, source(found)))


def source(found: tuple[Found, ...]) -> Source:
    """Which architectures were used, and how they were found; or why none was."""
    known = [one.architecture is not None for one in found]
    told = "; ".join(dict.fromkeys(one.how for one in found))
    if not found:
        return Source("model", "unavailable", "no server in the log")
    return Source("model", "ok" if all(known) else "partial" if any(known) else "unavailable", told)


def check_server(server: Server, arch: Architecture) -> Server:
    """A server with `detail.modelled` on its weights, KV and state entries."""
    from memledger.model import check

    pools = _pool_details(server, arch) if server.framework == "vllm" else {}
    known: dict[Any, Entry] = {}
    ranks = []
    for index, rank in enumerate(server.ranks):
        entries = []
        for entry in rank.entries:
            if entry.account == POOL and index in pools:
                entries.append(_with(entry, pools[index]))
                continue
            # Ranks of one stage with the same figures are alike: a job of many GPUs is modelled once.
            key = (
                entry.account,
                entry.bytes,
                entry.tolerance_bytes,
                rank.pp,
                rank.gpu.kind,
                str(entry.detail),
                rank.capacity,
            )
            if key not in known:
                known[key] = check.checked(server, arch, rank, entry)
            entries.append(msgspec.structs.replace(entry, detail=known[key].detail))
        ranks.append(_with_released(server, arch, msgspec.structs.replace(rank, entries=tuple(entries))))
    return msgspec.structs.replace(server, ranks=tuple(ranks))


def _with(entry: Entry, modelled: dict[str, Any]) -> Entry:
    return msgspec.structs.replace(entry, detail={**entry.detail, "modelled": modelled})


RELEASED_SHARE: Final = 0.05
RELEASED_MOVES: Final = 64 * MIB
"""How near a stage's rise of free memory must be to the formula's size, beside the readings' rounding."""


def _with_released(server: Server, arch: Architecture, rank: Rank) -> Rank:
    """The rank with `released`: the embedding and head that a prediction module gave back, where a stage shows that size.

    The draft's load counts them and free memory rises again once the target's are shared with it, in the stage in which
    the allocator returns them: no line says so, and without the entry the ledger counts them twice. Elsewhere the residual stays.
    """
    from memledger.model import check

    if server.framework != "sglang" or any(e.account == "released" for e in rank.entries):
        return rank
    draft = next((e for e in rank.entries if e.account == "weights/draft"), None)
    if draft is None:
        return rank
    try:
        size = check.released_after_draft(server, arch, rank)
    except NotModelledError:
        return rank
    place = _rise(rank, size)
    if place is None:
        return rank
    stage = rank.stages[place]
    back = Entry(
        "released",
        -size,
        0,
        "modelled",
        {"what": "the draft's own embedding and head, given back for the target's", "formula": _RELEASED_FORMULA},
        draft.evidence,
        f"{stage.name}/draft" if stage.name in {"warmup", "graphs"} else stage.name,
    )
    left = stage.residual
    assert left.bytes is not None
    stages = list(rank.stages)
    stages[place] = msgspec.structs.replace(stage, residual=msgspec.structs.replace(left, bytes=left.bytes + size))
    held = tuple(e for e in rank.entries if e.account != "free")
    entries = (*held, back, *(e for e in rank.entries if e.account == "free"))
    return msgspec.structs.replace(rank, entries=entries, stages=tuple(stages), residual=_closed_again(rank, entries))


_RELEASED_FORMULA: Final = "(embedding rows + head rows) x hidden x element, of one GPU"


def _rise(rank: Rank, size: int) -> int | None:
    """The stage, from the draft's load on, in which free memory rose by about `size` more than its entries say."""
    names = [stage.name for stage in rank.stages]
    if "draft_weights" not in names:
        return None
    for place in range(names.index("draft_weights"), len(names)):
        left = rank.stages[place].residual
        if left.bytes is None or left.bytes >= 0:
            continue
        near = (left.tolerance_bytes or 0) + max(RELEASED_MOVES, int(size * RELEASED_SHARE))
        if abs(left.bytes + size) <= near:
            return place
    return None


def _closed_again(rank: Rank, entries: tuple[Entry, ...]) -> Residual:
    """The rank's residual with one entry more; what was open stays open, for the same reason."""
    old = rank.residual
    if old.opening_bytes is None:
        return old
    counted = [e for e in entries if not e.account.startswith("host/")]
    known = sum(e.tolerance_bytes for e in counted)
    opening = Amount(old.opening_bytes, max(0, (old.tolerance_bytes or 0) - known))
    unified = bool(rank.gpu.unified_memory)
    return close(old.base, opening, entries, open_reason=old.reason, unified_memory=unified, evidence=old.evidence)


def _pool_details(server: Server, arch: Architecture) -> dict[int, dict[str, Any]]:
    """`detail.modelled` of vLLM's pool, by the rank's place in the server."""
    from memledger.model import check_vllm

    found: dict[int, dict[str, Any]] = {}
    engines: dict[int | None, list[int]] = {}
    for index, rank in enumerate(server.ranks):
        if check_vllm.granted(rank) is not None:
            engines.setdefault(rank.dp, []).append(index)
    for places in engines.values():
        ranks = tuple(server.ranks[place] for place in places)
        try:
            pool = check_vllm.check_pool(server, arch, ranks)
        except NotModelledError as error:
            for place, rank in zip(places, ranks, strict=True):
                found[place] = _dense(server, arch, rank, str(error))
            continue
        for place, rank in zip(places, ranks, strict=True):
            own = next(e for e in rank.entries if e.account == POOL)
            found[place] = check_vllm.pool_detail(pool, own, rank.pp)
    return found


def _dense(server: Server, arch: Architecture, rank: Rank, reason: str) -> dict[str, Any]:
    """The pool of a model of full attention only, where its blocks are not modelled; else the reason."""
    from memledger.model import check_vllm

    try:
        size, low, high, each = check_vllm.expected_dense(server, arch, rank)
    except NotModelledError as error:
        shown = reason if "full attention only" in str(error) else str(error)
        return {"bytes": None, "reason": shown}
    grant = check_vllm.granted(rank)
    assert grant is not None
    fits = low - grant.tolerance <= grant.bytes <= high + grant.tolerance
    causes = {} if fits else {"causes": ["another element type", "layers of a draft model", "more layers than counted"]}
    return {"bytes": size, "low_bytes": low, "high_bytes": high, "agrees": fits, "token_bytes": each, **causes}


# ---------------------------------------------------------------------------------------------------------------- split


def split(report: Report) -> Report:
    """The report with the pools of vLLM hybrids divided into KV and recurrent state, where the model's figures agree."""
    return msgspec.structs.replace(report, servers=tuple(split_server(server) for server in report.servers))


def split_server(server: Server) -> Server:
    """A server whose pool entries are divided; the sum of the parts is the logged pool, to the byte.

    Blocks belong to no one until a request takes them. Counted are the states of the most requests that the log shows
    running at once; without serving lines, those of the requests of maximum length that fill the pool.
    """
    ranks = tuple(
        msgspec.structs.replace(rank, entries=tuple(part for e in rank.entries for part in _parts(server, rank, e)))
        for rank in server.ranks
    )
    return server if ranks == server.ranks else msgspec.structs.replace(server, ranks=ranks)


def _parts(server: Server, rank: Rank, entry: Entry) -> tuple[Entry, ...]:
    state = (entry.detail.get("modelled") or {}).get("state") if entry.account == POOL else None
    if state is None:
        return (entry,)
    requests, words = _requests(server, rank, state)
    taken = min(entry.bytes, int(requests * state["request_bytes"]))
    live = state["conv_bytes"] + state["ssm_bytes"]
    if not taken or not live:
        return (entry,)
    # Padding goes with the part it pads; where there is both, with the larger one.
    conv = (
        taken * state["conv_bytes"] // live
        if not state["ssm_bytes"]
        else int(requests * state["conv_bytes"] * _copies(state))
    )
    conv = min(conv, taken)
    terms = {"assumption": words, "logged_pool_bytes": entry.bytes}
    kv = msgspec.structs.replace(entry, bytes=entry.bytes - taken, basis="modelled", detail={**entry.detail, **terms})
    padding = int(requests * state["padding_bytes"])
    parts = [kv]
    for account, size, dtype in (
        ("recurrent_state/conv", conv, state["conv_dtype"]),
        ("recurrent_state/ssm", taken - conv, state["dtype"]),
    ):
        if size:
            detail = {**terms, "dtype": dtype, "what": words, "request_bytes": state["request_bytes"]}
            if account == ("recurrent_state/ssm" if state["ssm_bytes"] else "recurrent_state/conv"):
                detail["padding_bytes"] = padding
            parts.append(Entry(account, size, 0, "modelled", detail, entry.evidence, entry.stage))
    return tuple(parts)


def _copies(state: dict[str, Any]) -> int:
    """States that one request keeps at most."""
    return (
        max(1, round((state["request_bytes"] - state["padding_bytes"]) / state["live_bytes"]))
        if state["live_bytes"]
        else 1
    )


def _requests(server: Server, rank: Rank, state: dict[str, Any]) -> tuple[float, str]:
    """Requests whose state is counted, and the assumption in words."""
    usage = next((engine.usage for engine in server.engines if engine.dp == rank.dp), server.usage)
    running = usage.peak_running_requests if usage.seen else None
    if running:
        what = "request" if running == 1 else "requests"
        return float(running), f"state of {running} running {what}, the most in the log"
    tokens = state["full_request_tokens"]
    return state["full_requests"], f"if filled by {state['full_requests']:g} requests of {tokens:,} tokens"
