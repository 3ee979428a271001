"""A comparison as JSON (the contract of docs/json.md, "A comparison"), and its JSON Schema, generated from the types."""

from __future__ import annotations

from typing import Any

import msgspec

from memledger.compare.values import CompareReport
from memledger.report.json import SCHEMA_URL, document


def encode(report: CompareReport) -> bytes:
    """The comparison as one JSON document, ending in a newline. Text from logs is cleaned and masked."""
    return document(report)


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
