"""`memledger fleet` as JSON: the envelope of every command with `fleet`, and its JSON Schema."""

from __future__ import annotations

from typing import Any

import msgspec

from memledger.fleet.summary import Summary
from memledger.ledger import Input, Source
from memledger.report.json import SCHEMA_URL, document


class Outputs(msgspec.Struct, frozen=True):
    """Where the rows are, and how many."""

    parquet: str
    json_lines: str
    rows: int


class FleetReport(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """What `memledger fleet --format json` prints.

    `problems`: sources that gave no file, one sentence each. `left`: files that are not done (it was interrupted); `read` were read
    by this run, `kept` were done before.
    """

    version: str
    fleet: Summary
    outputs: Outputs
    read: int
    kept: int
    left: int
    problems: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    inputs: tuple[Input, ...] = ()
    schema_: str = "memledger/1"


def encode(report: FleetReport) -> bytes:
    """The report as one JSON document, ending in a newline."""
    return document(report)


def schema() -> dict[str, Any]:
    """The JSON Schema of `memledger fleet --format json`."""
    _, components = msgspec.json.schema_components([FleetReport], ref_template="#/$defs/{name}")
    return {
        "$schema": SCHEMA_URL,
        "title": "memledger fleet --format json",
        "$ref": "#/$defs/FleetReport",
        "$defs": components,
    }


def schema_text() -> str:
    """The schema as `docs/schema/fleet.schema.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"
