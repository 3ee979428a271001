"""The report as JSON (the contract of docs/json.md), and the JSON Schema generated from its types."""

from __future__ import annotations

from typing import Any

import msgspec

from memledger.ledger import Live, Rank, Report, Server
from memledger.sanitize import clean, clean_tree

SCHEMA_URL = "https://json-schema.org/draft/2020-12/schema"


def encode(report: Report) -> bytes:
    """The report as one JSON document, ending in a newline. Text from the log is cleaned and masked."""
    return document(safe(report))


def document(value: Any) -> bytes:
    """A value as one JSON document that ends in a newline: every text in it clean, whoever wrote it, and secrets masked."""
    return msgspec.json.format(msgspec.json.encode(clean_tree(msgspec.to_builtins(value))), indent=1) + b"\n"


def safe(report: Report) -> Report:
    """The report with its text cleaned and masked."""
    # A file name need not be text: what is not comes out as `?`.
    inputs = tuple(
        msgspec.structs.replace(i, path=_text(i.path), notes=tuple(clean(_text(note)) for note in i.notes))
        for i in report.inputs
    )
    sources = tuple(
        msgspec.structs.replace(s, reason=clean(_text(s.reason), 2000) if s.reason is not None else None)
        for s in report.sources
    )
    return msgspec.structs.replace(
        report,
        inputs=inputs,
        sources=sources,
        servers=tuple(_safe(s) for s in report.servers),
        live=_safe_live(report.live) if report.live is not None else None,
    )


def schema() -> dict[str, Any]:
    """The JSON Schema of `memledger explain --format json`, from the types in `memledger.ledger`."""
    _, components = msgspec.json.schema_components([Report], ref_template="#/$defs/{name}")
    return {
        "$schema": SCHEMA_URL,
        "title": "memledger explain --format json",
        "$ref": "#/$defs/Report",
        "$defs": components,
    }


def schema_text() -> str:
    """The schema as `docs/schema/explain.schema.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"


def _safe(server: Server) -> Server:
    return msgspec.structs.replace(
        server,
        model=_clean(server.model),
        label=_clean(server.label),
        framework_version=_clean(server.framework_version),
        config={name: _clean(value) for name, value in server.config.items()},
        ranks=tuple(_safe_rank(rank) for rank in server.ranks),
        failures=tuple(
            msgspec.structs.replace(f, numbers={k: _clean(v) for k, v in f.numbers.items()}) for f in server.failures
        ),
        notes=tuple(clean(note) for note in server.notes),
    )


def _safe_live(live: Live) -> Live:
    """Whatever a snapshot holds: it may be somebody else's file."""
    return msgspec.convert(cleaned(msgspec.to_builtins(live)), Live)


def cleaned(value: Any) -> Any:
    """Values of JSON with every text cleaned and masked."""
    if isinstance(value, str):
        return clean(_text(value), 2000)
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(item) for item in value]
    return value


def _safe_rank(rank: Rank) -> Rank:
    gpu = msgspec.structs.replace(rank.gpu, name=_clean(rank.gpu.name), uuid=_clean(rank.gpu.uuid))
    entries = tuple(
        msgspec.structs.replace(e, detail=cleaned(e.detail)) if e.account == "other_processes" else e
        for e in rank.entries
    )
    return msgspec.structs.replace(rank, gpu=gpu, host=_clean(rank.host), entries=entries)


def _text(name: str) -> str:
    return name.encode("utf-8", "replace").decode()


def _clean(value: Any) -> Any:
    return clean(value) if isinstance(value, str) else value
