"""Two sweeps side by side as text and JSON, and the JSON Schema of that."""

from __future__ import annotations

import textwrap
from typing import Any, Final

import msgspec
from tabulate import tabulate

from memledger import words as n
from memledger.report.json import SCHEMA_URL, document
from memledger.report.text import Style, paint, shorten, to_ascii
from memledger.sanitize import clean
from memledger.sweep.compare import Change, StepPair, SweepCompareReport, SweepComparison
from memledger.sweep.steps import Step

_NAMES: Final = {
    "ttft_p50": "first token, median, s",
    "ttft_p99": "first token, 99th, s",
    "tpot_p50": "per token, median, s",
    "tpot_p99": "per token, 99th, s",
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "peak_kv_usage": "KV peak",
    "gpu_bytes_peak": "GPU memory peak, GiB",
    "host_bytes_peak": "host memory peak, GiB",
    "cost_per_million_output": "cost of 1M output",
}
_DIFFERS: Final = {"yes": "differs", "not_shown": "within chance", "not_known": "too few requests", None: ""}
NOTE: Final = (
    "differs: the 95 % intervals of the two figures lie apart; within chance: they touch; too few requests: an interval has no end. "
    "Rates and peaks have no interval."
)


def encode(report: SweepCompareReport) -> bytes:
    """The comparison as one JSON document, ending in a newline."""
    return document(report)


def schema() -> dict[str, Any]:
    """The JSON Schema of `memledger compare --format json` of two sweeps."""
    _, components = msgspec.json.schema_components([SweepCompareReport], ref_template="#/$defs/{name}")
    return {
        "$schema": SCHEMA_URL,
        "title": "memledger compare --format json, of two sweeps",
        "$ref": "#/$defs/SweepCompareReport",
        "$defs": components,
    }


def schema_text() -> str:
    """The schema as `docs/schema/sweep-compare.schema.json` holds it."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"


def render(report: SweepCompareReport, style: Style | None = None) -> str:
    """The comparison as text, ending in a newline."""
    style = style or Style()
    found = report.sweep_comparison
    lines = [shorten(f"{label}  {clean(name, 200)}", style.width) for label, name in (("A", found.a), ("B", found.b))]
    lines.append("")
    for sentence in _sentences(found):
        lines += textwrap.wrap(sentence, style.width)
    for pair in found.steps:
        lines += ["", *_table(pair, style)]
    if found.steps:
        lines += ["", *textwrap.wrap(NOTE, style.width)]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return text if style.unicode else to_ascii(text)


def _sentences(found: SweepComparison) -> list[str]:
    told = []
    if not found.steps:
        told.append("The two sweeps have no step in common.")
    a, b = found.answers_a, found.answers_b
    told.append(f"Longest context that held: {_step(a.longest_context)} in A, {_step(b.longest_context)} in B.")
    told.append(f"Most requests at once that held: {_step(a.most_concurrency)} in A, {_step(b.most_concurrency)} in B.")
    changed = [pair for pair in found.steps if pair.verdict_a != pair.verdict_b]
    told += [f"{pair.step.name}: {_word(pair.verdict_a)} in A, {_word(pair.verdict_b)} in B." for pair in changed]
    for label, steps in (("A", found.only_a), ("B", found.only_b)):
        if steps:
            told.append(f"Only in {label}: {', '.join(step.name for step in steps)}.")
    if found.settings:
        rows = "; ".join(f"{name} {clean(x, 80)} and {clean(y, 80)}" for name, (x, y) in found.settings.items())
        told.append(f"Not the same in A and B: {rows}.")
    return told


def _step(step: Step | None) -> str:
    return step.name if step is not None else "none"


def _word(verdict: str) -> str:
    return verdict.replace("_", " ")


def _table(pair: StepPair, style: Style) -> list[str]:
    rows = [
        [_NAMES.get(c.name, c.name), _value(c, c.a), _value(c, c.b), _percent(c), _DIFFERS[c.differs]]
        for c in pair.changes
    ]
    heads = [pair.step.name, "A", "B", "change", ""]
    table = tabulate(
        [heads, *rows], tablefmt="plain", colalign=["left", "right", "right", "right", "left"], disable_numparse=True
    ).splitlines()
    return [paint(shorten(table[0], style.width), "bold", style), *(shorten(row, style.width) for row in table[1:])]


def _value(change: Change, value: float | None) -> str:
    if value is None:
        return "-"
    if change.unit == "bytes":
        return n.gib(round(value))
    if change.unit == "share":
        return n.percent(value, 1)
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _percent(change: Change) -> str:
    return "-" if change.change is None else f"{change.change * 100:+.1f} %"
