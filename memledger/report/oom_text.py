"""The report on incidents for a terminal: the cause, who held the memory, what led to it, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from memledger.ledger import Evidence, Report
from memledger.postmortem.incident import OomReport
from memledger.report.oom_view import OomView, Step, build, chief, nothing_failed, same_day, short
from memledger.report.snapshot_lines import lines_of
from memledger.report.text import (
    LEAST_WIDTH,
    Style,
    evidence_lines,
    fact_lines,
    paint,
    table_lines,
    to_ascii,
    wrap,
    wrap_parts,
)
from memledger.report.view import Fact

_COLOURS: Final = {"error": "red", "warning": "yellow"}


def render(report: OomReport, style: Style | None = None, *, everything: bool = False, evidence: bool = False) -> str:
    """The whole report as text, ending in a newline. `everything`: each incident in full, not only the first."""
    style = style or Style()
    style = msgspec.structs.replace(style, width=max(style.width, LEAST_WIDTH))
    if not report.incidents and report.snapshots:
        lines = []
    elif not report.incidents:
        lines = wrap(nothing_failed(report), style.width)
    elif everything:
        blocks = [_incident(build(report, i, evidence=evidence), report, style) for i in range(len(report.incidents))]
        lines = [line for i, block in enumerate(blocks) for line in ([""] * (i > 0) + block)]
    else:
        first = chief(report)
        lines = _incident(build(report, first, evidence=evidence), report, style)
        lines += _others(report, first, style)
    for snapshot in report.snapshots:
        lines += [""] if lines else []
        for line in lines_of(snapshot):
            later = " " * 30 if line.startswith("  ") else ""
            lines += wrap(line, style.width, later=later) if line else [""]
    text = "\n".join(lines) + "\n"
    return text if style.unicode else to_ascii(text)


def _incident(view: OomView, report: OomReport, style: Style) -> list[str]:
    lines = [paint(line, "bold", style) for line in wrap_parts(view.header, style.width)]
    colour = _COLOURS.get(view.severity, "")
    lines += ["", *(paint(line, colour, style) for line in wrap(view.cause, style.width, break_long_words=False))]
    lines += wrap(view.confidence, style.width, break_long_words=False)
    if view.table is not None:
        lines += ["", *table_lines(view.table, style, many=len(report.inputs) > 1)]
    if view.facts:
        lines += ["", *_fact_lines(view.facts, style)]
    if view.steps:
        lines += ["", *_steps(view.steps, style)]
    if view.todo:
        lines += ["", *_fact_lines(view.todo, style)]
    if view.evidence:
        lines += ["", *_evidence(view.evidence, report)]
    return lines


def _fact_lines(facts: Sequence[Fact], style: Style) -> list[str]:
    lines = []
    for i, fact in enumerate(facts):
        lines += fact_lines(fact, style, again=i > 0 and facts[i - 1].name == fact.name)
    return lines


def _evidence(evidence: Sequence[Evidence], report: OomReport) -> list[str]:
    return evidence_lines(evidence, Report(report.version, report.inputs, (), ()))


def _steps(steps: Sequence[Step], style: Style) -> list[str]:
    """The way to the failure: when, what was taken, what was free after it; the words take the rest of the line."""
    day = same_day(steps)
    times = [step.at[len(day) :] if day else step.at for step in steps]
    cells = [("", "GiB", "free"), *zip(times, (s.taken for s in steps), (s.free for s in steps), strict=True)]
    widths = [max(len(cell[i]) for cell in cells) if any(c[i] for c in cells[1:]) else 0 for i in range(3)]
    heads = [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(cell, widths, strict=True))
            if width
        )
        for cell in cells
    ]
    lines = [paint(f"{heads[0]}  before it{f', {day.strip()}' if day else ''}".rstrip(), "bold", style)]
    for head, step in zip(heads[1:], steps, strict=True):
        blank = " " * (len(head) + 2)
        lines += wrap(step.what, style.width, f"{head}  ", blank, max_lines=2, placeholder=" …") or [head]
    return lines


def _others(report: OomReport, shown: int, style: Style) -> list[str]:
    rest = [one for i, one in enumerate(report.incidents) if i != shown]
    if not rest:
        return []
    lines = ["", paint(f"{len(rest)} more (--all shows {'it' if len(rest) == 1 else 'them'} in full)", "bold", style)]
    for one in rest:
        lines += wrap(short(report, one), style.width, "  ", "    ", break_long_words=False)
    return lines
