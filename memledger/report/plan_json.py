"""A plan as JSON (the contract of docs/json.md, "A plan"), and its JSON Schema, generated from the types."""

from __future__ import annotations

from typing import Any

import msgspec

from memledger.plan_values import PlanReport
from memledger.report.json import SCHEMA_URL, document


def encode(report: PlanReport) -> bytes:
    """The plan as one JSON document, ending in a newline."""
    return document(report)


def schema() -> dict[str, Any]:
    """The JSON Schema of `memledger plan --format json`, from the types in `memledger.plan_values`."""
    _, components = msgspec.json.schema_components([PlanReport], ref_template="#/$defs/{name}")
    return {
        "$schema": SCHEMA_URL,
        "title": "memledger plan --format json",
        "$ref": "#/$defs/PlanReport",
        "$defs": components,
    }


def schema_text() -> str:
    """The schema as `docs/schema/plan.schema.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"
