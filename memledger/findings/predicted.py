"""What another setting would change, by SGLang's own sizing worked on the log's figures (`memledger.model.sglang_plan`)."""

from __future__ import annotations

from typing import Any

from memledger.ledger import Effect, Rank, Server

_PARENTS = ("recurrent_state", "kv_cache")


def effects(server: Server, rank: Rank, settings: dict[str, Any]) -> tuple[tuple[Effect, ...], str] | None:
    """Predicted change of every account (parents of the pools) and capacity, and its basis in words.

    None where the arithmetic is not known for this server, or the version decides and is not certain.
    """
    from memledger.model.architecture import NotModelledError
    from memledger.model.sglang import readings, size
    from memledger.model.sglang_inputs import from_rank
    from memledger.model.sglang_plan import changed, difference

    try:
        source = from_rank(server, rank).server
        before, after = size(source), size(changed(source, settings))
        changes = difference(before, after)
        versions = readings(source)
    except NotModelledError:
        return None
    found = []
    for parent in _PARENTS:
        change = sum(e.bytes or 0 for e in changes if e.account is not None and e.account.startswith(f"{parent}/"))
        if change:
            found.append(Effect(account=parent, bytes=change))
    found += [e for e in changes if e.account is not None and e.account.partition("/")[0] not in _PARENTS]
    found += [e for e in changes if e.capacity is not None]
    low, high = versions[0].versions[0], versions[-1].versions[1]
    span = ".".join(map(str, low)) if low == high else f"{'.'.join(map(str, low))} to {'.'.join(map(str, high))}"
    return tuple(found), f"derived: SGLang's own sizing ({span}) on the sizes in the log"
