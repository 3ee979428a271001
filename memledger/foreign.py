"""Whether a report that was read back from a file is one that memledger can have written.

A snapshot or a JSON report may be somebody else's file: the types are checked where it is decoded, and here what the types do
not say, so that nothing that reads a report has to expect an account, a stage or an input that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from memledger.ledger import STAGES, Entry, Evidence, Rank, Report, Server, is_account, stage_base

LARGEST_FIGURE: Final = 2**63
"""Bytes, tokens or anything else: no figure of a report comes near."""
DEEPEST: Final = 30

_POSITIVE: Final = frozenset({"rows", "slots", "block_tokens"})
"""Details that are divided by, or counted with."""
_PLAIN: Final = frozenset({"dtype", "type", "part", "tokens", "tokens_rule", "what", "source", "quantization", "note"})
"""Details that are compared with others: texts or numbers."""
_NUMBERS: Final = (
    "_size",
    "_tokens",
    "_bytes",
    "_requests",
    "_slots",
    "_length",
    "_fraction",
    "_ratio",
    "_steps",
    "_topk",
)
"""How the names of settings end that are numbers."""


def problem(document: Any, report: Report | None) -> str | None:
    """What in a decoded document, and in the report that it holds, no memledger wrote, in words; None: nothing of the kind."""
    if not _is_plain(document):
        return "a figure in it is larger than any machine's memory: it was changed or damaged"
    if report is None:
        return None
    return next((told for server in report.servers for told in _of_server(server, len(report.inputs))), None)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if depth > DEEPEST:
        return False
    if isinstance(value, dict):
        return all(_is_plain(one, depth + 1) for one in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one, depth + 1) for one in value)
    return not isinstance(value, (int, float)) or abs(value) < LARGEST_FIGURE


def _of_server(server: Server, inputs: int) -> Iterator[str]:
    for name, value in server.config.items():
        if not _is_setting(name, value):
            yield "a setting in it is of another kind than its name says"
    for rank in server.ranks:
        yield from _of_rank(rank)
    places = [e.input for e in _evidence(server)] + [span.input for span in server.span]
    if any(not 0 <= place < inputs for place in places):
        yield "it quotes an input that it does not name"


def _of_rank(rank: Rank) -> Iterator[str]:
    if rank.gpu.index is not None and rank.gpu.index < 0:
        yield "a GPU in it has a number that none has"
    for stage in rank.stages:
        if stage_base(stage.name) not in STAGES:
            yield "it has a stage that memledger does not know"
    for entry in rank.entries:
        if not is_account(entry.account) or (entry.stage is not None and stage_base(entry.stage) not in STAGES):
            yield "it has an account or a stage that memledger does not know"
        if any(name in entry.detail and not _is_count(entry.detail[name]) for name in _POSITIVE):
            yield "a count in it is none"
        if any(isinstance(entry.detail.get(name), (dict, list)) for name in _PLAIN):
            yield "a detail in it is of another kind than its name says"
        if not isinstance(entry.detail.get("modelled") or {}, dict):
            yield "the model's figures in it are none"


def _is_setting(name: str, value: Any) -> bool:
    if value is None or not name.endswith(_NUMBERS):
        return True
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (value > 0 or not name.endswith("_size"))


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


def _evidence(server: Server) -> Iterator[Evidence]:
    entries: list[Entry] = [entry for rank in server.ranks for entry in rank.entries]
    for quoted in (
        *(entry.evidence for entry in entries),
        *(rank.residual.evidence for rank in server.ranks),
        *(failure.evidence for failure in server.failures),
        *(finding.evidence for finding in server.findings),
        *(engine.usage.evidence for engine in server.engines),
        server.usage.evidence,
    ):
        yield from quoted
