"""A comparison as JSON (the contract of docs/json.md, "A comparison"), and its JSON Schema, generated from the types."""

from __future__ import annotations

from typing import Any

import msgspec

from memledger.compare.values import CompareReport
from memledger.report.json import SCHEMA_URL
from memledger.sanitize import clean


def encode(report: CompareReport) -> bytes:
    """The comparison as one JSON document, ending in a newline. Text from logs is cleaned and masked."""
    document = msgspec.to_builtins(report)
    return msgspec.json.format(msgspec.json.encode(_clean(document)), indent=1) + b"\n"


def schema() -> dict[str, Any]:
    """The JSON Schema of `memledger compare --format json`, from the types in `memledger.compare.values`."""
    _, components = msgspec.json.schema_components([CompareReport], ref_template="#/$defs/{name}")
    return {
        "$schema": SCHEMA_URL,
        "title": "memledger compare --format json",
        "$ref": "#/$defs/CompareReport",
        "$defs": components,
    }


def schema_text() -> str:
    """The schema as `docs/schema/compare.schema.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"


def _clean(value: Any) -> Any:
    """Every text of the document as it may be shown; a file name need not be text: what is not comes out as `?`."""
    if isinstance(value, str):
        return clean(value.encode("utf-8", "replace").decode(), 2000)
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
