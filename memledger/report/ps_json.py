"""`memledger ps` as JSON: the envelope of every command (schema, version, inputs, sources) with `live_servers`, and its JSON Schema."""

from __future__ import annotations

from typing import Any

import msgspec

from memledger.ledger import Input, Source
from memledger.live.sample import DeviceSample, LiveServer
from memledger.report.json import SCHEMA_URL, document


class PsReport(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """What `memledger ps --format json` prints. `unreadable_processes`: processes of other users that could not be looked at."""

    version: str
    sources: tuple[Source, ...]
    live_servers: tuple[LiveServer, ...]
    inputs: tuple[Input, ...] = ()
    devices: DeviceSample | None = None
    unreadable_processes: int = 0
    schema_: str = "memledger/1"


def encode(report: PsReport) -> bytes:
    """The report as one JSON document, ending in a newline. Its texts were cleaned and masked where they were taken, too."""
    return document(report)


def schema() -> dict[str, Any]:
    """The JSON Schema of `memledger ps --format json`."""
    _, components = msgspec.json.schema_components([PsReport], ref_template="#/$defs/{name}")
    return {
        "$schema": SCHEMA_URL,
        "title": "memledger ps --format json",
        "$ref": "#/$defs/PsReport",
        "$defs": components,
    }


def schema_text() -> str:
    """The schema as `docs/schema/ps.schema.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"
