"""The report as JSON (the contract of docs/json.md), and the JSON Schema generated from its types."""

from __future__ import annotations

from typing import Any

import msgspec

from memledger.ledger import Report, Server
from memledger.sanitize import clean

SCHEMA_URL = "https://json-schema.org/draft/2020-12/schema"


def encode(report: Report) -> bytes:
    """The report as one JSON document, ending in a newline. Text from the log is cleaned and masked."""
    safe = msgspec.structs.replace(report, servers=tuple(_safe(s) for s in report.servers))
    return msgspec.json.format(msgspec.json.encode(safe), indent=1) + b"\n"


def schema() -> dict[str, Any]:
    """The JSON Schema of `memledger explain --format json`, from the types in `memledger.ledger`."""
    _, components = msgspec.json.schema_components([Report], ref_template="#/$defs/{name}")
    return {
        "$schema": SCHEMA_URL,
        "title": "memledger explain --format json",
        "$ref": "#/$defs/Report",
        "$defs": components,
    }


def _safe(server: Server) -> Server:
    config = {name: clean(value) if isinstance(value, str) else value for name, value in server.config.items()}
    model = clean(server.model) if server.model is not None else None
    label = clean(server.label) if server.label is not None else None
    return msgspec.structs.replace(server, config=config, model=model, label=label)
