"""`memledger oom` as JSON: the envelope of every command with `incidents` and `servers`, and its JSON Schema."""

from __future__ import annotations

from typing import Any

import msgspec

from memledger.ledger import Report
from memledger.postmortem.incident import Incident, OomReport
from memledger.report.json import SCHEMA_URL, cleaned, document, safe


def encode(report: OomReport) -> bytes:
    """The report as one JSON document, ending in a newline. Text from the inputs is cleaned and masked."""
    rest = safe(Report(report.version, report.inputs, report.sources, report.servers))
    # Cleaned again, whatever wrote it: an incident quotes every kind of input.
    incidents = msgspec.convert(cleaned(msgspec.to_builtins(report.incidents)), tuple[Incident, ...])
    whole = msgspec.structs.replace(
        report, inputs=rest.inputs, sources=rest.sources, servers=rest.servers, incidents=incidents
    )
    return document(whole)


def schema() -> dict[str, Any]:
    """The JSON Schema of `memledger oom --format json`, from `memledger/postmortem/incident.py`."""
    _, components = msgspec.json.schema_components([OomReport], ref_template="#/$defs/{name}")
    return {
        "$schema": SCHEMA_URL,
        "title": "memledger oom --format json",
        "$ref": "#/$defs/OomReport",
        "$defs": components,
    }


def schema_text() -> str:
    """The schema as `docs/schema/oom.schema.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"
