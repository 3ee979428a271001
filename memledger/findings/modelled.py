"""ML901 to ML905: the log against the model's arithmetic (`detail.modelled` of entries, set by `memledger.modelled`).

Silent where the model's architecture was not found, or where its arithmetic is not known for this server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from memledger import words as n
from memledger.findings.figures import NO_CONTEXT, WORTH_SAYING, Context, each, where
from memledger.ledger import Entry, Finding, Rank, Server, Severity

MUCH: Final = 0.02
"""A difference of this share and more is a note; below it is mere information."""
_WIDE: Final = {"float32", "fp32"}
_HALF: Final = {"bfloat16", "float16", "bf16", "fp16"}


def weights_differ(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML901: the logged weights lie outside the range that the architecture gives."""
    found = _differing(server, lambda account: account == "weights/model")
    if found is None:
        return None
    rank, entry, said = found
    text = _sentence(server, rank, "Weights", entry, said)
    return Finding(
        "ML901", "weights differ from the model", _severity(entry, said), _gap(entry, said), text, entry.evidence
    )


def kv_differs(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML902: the logged KV pool is not what its tokens take by the architecture."""
    found = _differing(server, lambda account: account.startswith("kv_cache/"))
    if found is None:
        return None
    rank, entry, said = found
    if said.get("bytes") is None or said.get("tokens"):
        low, high = said.get("tokens") or (0, 0)
        printed = rank.capacity.kv_tokens or 0
        text = (
            f"The {n.gib_about(entry.bytes)} KV pool{where(server, rank)} prints {n.count(printed)} tokens; the model's "
            f"arithmetic gives {n.count(low)} to {n.count(high)} with blocks of {n.count(said['block_tokens'])} tokens"
            f"{_causes(said)}."
        )
        size = abs(entry.bytes - (said.get("bytes") or entry.bytes))
        return Finding("ML902", "KV cache differs from the model", "note", size, text, entry.evidence)
    text = _sentence(server, rank, f"The KV pool ({entry.account})", entry, said)
    return Finding(
        "ML902", "KV cache differs from the model", _severity(entry, said), _gap(entry, said), text, entry.evidence
    )


def state_differs(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML903: the logged state is not what its slots take by the architecture."""
    found = _differing(server, lambda account: account.startswith("recurrent_state/"))
    if found is None:
        return None
    rank, entry, said = found
    text = _sentence(server, rank, f"Recurrent state ({entry.account.rpartition('/')[2]})", entry, said)
    return Finding(
        "ML903", "state differs from the model", _severity(entry, said), _gap(entry, said), text, entry.evidence
    )


def state_in_the_pool(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML904: what recurrent state takes of a vLLM hybrid's block pool, and what the token figure means."""
    for rank in server.ranks:
        for entry, said in _said(rank):
            state = said.get("state")
            if state is None:
                continue
            padding = state["padding_bytes"]
            wasted = f", {n.amount(padding)} of it padding" if padding else ""
            text = (
                f"Recurrent state has no pool of its own: it takes blocks of the {n.gib_about(entry.bytes)} KV pool, "
                f"{n.amount(state['request_bytes'])} for each running request ({n.plural(state['request_blocks'], 'block')} of "
                f"{n.amount(said['block_bytes'])}, prefix caching mode {state['mode']}{wasted}), which is "
                f"{n.percent(state['full_share'])} of a request of {n.count(state['full_request_tokens'])} tokens. "
                f"The printed token figure: {said['tokens_mean']}."
            )
            return Finding(
                "ML904", "recurrent state in the block pool", "info", state["request_bytes"], text, entry.evidence
            )
    return None


def state_twice_as_wide(server: Server, context: Context = NO_CONTEXT) -> Finding | None:
    """ML905: the temporal state is float32 where the other engine keeps this model's in 16 bits by default."""
    if context.architecture is None:
        return None
    wide = _wide_state(server)
    if wide is None:
        return None
    entry, saved, what = wide
    other = _other_default(server, context)
    if other not in _HALF or saved < WORTH_SAYING:
        return None
    sglang = server.framework == "sglang"
    flag = "--mamba-ssm-dtype bfloat16" if sglang else "--mamba-ssm-cache-dtype bfloat16"
    engine = "vLLM" if sglang else "SGLang"
    text = (
        f"The temporal state is float32; {engine}'s default for this model is {n.dtype(other or '')}, half as wide. "
        f"{flag} would take {n.gib_about(saved)} less{each(server)} {what}; whether answers stay as good is not in the log."
    )
    return Finding("ML905", "state twice as wide as the other engine's", "note", saved, text, entry.evidence)


def _wide_state(server: Server) -> tuple[Entry, int, str] | None:
    """The entry with float32 state that agrees with the model, what half of it is, and for what."""
    for rank in server.ranks:
        for entry, said in _said(rank):
            if entry.account == "recurrent_state/ssm" and said.get("agrees") and said.get("dtype") in _WIDE:
                return entry, entry.bytes // 2, f"for the same {n.count(rank.capacity.state_slots or 0)} slots"
            state = said.get("state")
            if state is not None and state["dtype"] in _WIDE and server.usage.peak_running_requests:
                running = server.usage.peak_running_requests
                return entry, state["ssm_bytes"] // 2 * running, f"for {n.plural(running, 'request')} as at the peak"
    return None


def _other_default(server: Server, context: Context) -> str | None:
    from memledger.model.architecture import NotModelledError
    from memledger.model.state import default_dtypes
    from memledger.model.vllm_facts import NEWEST

    assert context.architecture is not None
    try:
        if server.framework == "sglang":
            return default_dtypes(context.architecture, "vllm", ".".join(map(str, NEWEST)))[1]
        return default_dtypes(context.architecture, "sglang", "0.5.23")[1]
    except NotModelledError:
        return None


def _said(rank: Rank) -> list[tuple[Entry, dict[str, Any]]]:
    return [(e, e.detail["modelled"]) for e in rank.entries if isinstance(e.detail.get("modelled"), dict)]


def _differing(server: Server, wanted: Callable[[str], bool]) -> tuple[Rank, Entry, dict[str, Any]] | None:
    """The entry that lies farthest from what the model gives."""
    found = [
        (rank, entry, said)
        for rank in server.ranks
        for entry, said in _said(rank)
        if said.get("agrees") is False and wanted(entry.account)
    ]
    return max(found, key=lambda item: _gap(item[1], item[2]), default=None)


def _gap(entry: Entry, said: dict[str, Any]) -> int:
    return abs(entry.bytes - int(said.get("bytes") or entry.bytes))


def _severity(entry: Entry, said: dict[str, Any]) -> Severity:
    named = any("name only" in text or "name says" in text for text in said.get("assumed", ()))
    gap = _gap(entry, said)
    return "note" if gap >= MUCH * entry.bytes and gap >= WORTH_SAYING and not named else "info"


def _sentence(server: Server, rank: Rank, what: str, entry: Entry, said: dict[str, Any]) -> str:
    """Both numbers, and what would explain the difference."""
    low, high, size = said["low_bytes"], said["high_bytes"], said["bytes"]
    unit = next((name for name in ("token", "slot") if said.get(f"{name}_bytes")), None)
    per = (
        f", {n.amount(said[f'{unit}_bytes'])} a {unit}"
        if unit
        else f", {n.gib(low)} to {n.gib(high)} with its tolerance"
    )
    return (
        f"{what}{where(server, rank)}: {n.gib_about(entry.bytes)} in the log, {n.gib_about(size)} by the model's arithmetic"
        f"{per}{_causes(said)}. Nothing was adjusted."
    )


def _causes(said: dict[str, Any]) -> str:
    causes = said.get("causes") or ()
    return f"; likely {' or '.join(causes)}" if causes else ""
