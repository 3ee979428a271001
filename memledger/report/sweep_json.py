"""A sweep as JSON: the envelope of every command with `sweep`, and its JSON Schema; and its steps as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

import msgspec

from memledger.report.json import SCHEMA_URL, document
from memledger.sanitize import clean
from memledger.sweep.figures import Distribution
from memledger.sweep.values import StepResult, Sweep, SweepReport


def encode(report: SweepReport) -> bytes:
    """The report as one JSON document, ending in a newline."""
    return document(report)


def schema() -> dict[str, Any]:
    """The JSON Schema of `memledger sweep --format json`."""
    _, components = msgspec.json.schema_components([SweepReport], ref_template="#/$defs/{name}")
    return {
        "$schema": SCHEMA_URL,
        "title": "memledger sweep --format json",
        "$ref": "#/$defs/SweepReport",
        "$defs": components,
    }


def schema_text() -> str:
    """The schema as `docs/schema/sweep.schema.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"


def to_csv(sweep: Sweep) -> str:
    """One row for each step; times in seconds, sizes in bytes, empty where a figure is not known."""
    out = io.StringIO()
    rows = [_row(one) for one in sweep.steps]
    if rows:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def _row(one: StepResult) -> dict[str, Any]:
    prompt = one.prompt_tokens or (None, None)
    row: dict[str, Any] = {
        "context": one.step.context,
        "concurrency": one.step.concurrency,
        "soak": int(one.soak),
        "verdict": one.verdict,
        "reason": _cell(one.reason),
        "requests": one.requests,
        "failed": one.failed,
        "errors": " ".join(f"{kind}={number}" for kind, number in one.errors.items()),
        "window_s": one.window_s,
        "requests_per_s": one.requests_per_s,
        "output_tokens_per_s": one.output_tokens_per_s,
        "total_tokens_per_s": one.total_tokens_per_s,
        **_distribution("ttft", one.ttft_s),
        **_distribution("tpot", one.tpot_s),
        "prompt_tokens_min": prompt[0],
        "prompt_tokens_max": prompt[1],
        "cached_share": one.cached_share,
        "peak_running": one.usage.running,
        "peak_queued": one.usage.queued,
        "peak_kv_usage": one.usage.kv,
        "peak_state_usage": one.usage.state,
        "preemptions": one.counted.preemptions,
        "requests_of_others": one.counted.others,
        "gpu_bytes_before": one.memory.before,
        "gpu_bytes_peak": one.memory.peak,
        "gpu_bytes_after": one.memory.after,
        "gpu_free_least": one.memory.least_free,
        "host_bytes_before": one.memory.host_before,
        "host_bytes_peak": one.memory.host_peak,
        "client_lag_p99_s": one.lag_p99_s,
        "meets_slo": one.meets_slo,
        "cost_per_million_output": one.cost_per_million_output,
        "cost_per_million_total": one.cost_per_million_total,
    }
    return {name: "" if value is None else value for name, value in row.items()}


def _cell(text: str | None) -> str | None:
    """Text for a spreadsheet: what a program there would compute is kept from being a formula."""
    if text is None:
        return None
    shown = clean(text)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


def _distribution(name: str, found: Distribution | None) -> dict[str, float | None]:
    names = ("mean", "p50", "p50_low", "p50_high", "p99", "p99_low", "p99_high")
    if found is None:
        return {f"{name}_{part}_s": None for part in names}
    values = (
        found.mean,
        found.p50.value,
        found.p50.low,
        found.p50.high,
        found.p99.value,
        found.p99.low,
        found.p99.high,
    )
    return {f"{name}_{part}_s": value for part, value in zip(names, values, strict=True)}
