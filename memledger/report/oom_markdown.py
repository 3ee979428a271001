"""The report on incidents as Markdown, for pasting into an issue thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from memledger.ledger import Report
from memledger.postmortem.incident import OomReport
from memledger.report.markdown import details, escape, fenced, table_text
from memledger.report.oom_view import OomView, Step, build, chief, nothing_failed, short
from memledger.report.snapshot_lines import lines_of
from memledger.report.view import Fact, Table, where
from memledger.sanitize import clean

_VERBATIM: Final = frozenset({"decide", "flags"})
"""Facts that are typed in: shown as code."""


def render(report: OomReport, *, everything: bool = False, evidence: bool = False) -> str:
    """The whole report as GitHub-flavoured Markdown, ending in a newline."""
    blocks: list[str] = []
    if not report.incidents:
        blocks = [escape(nothing_failed(report))] if not report.snapshots else []
    else:
        first = chief(report)
        shown = list(range(len(report.incidents))) if everything else [first]
        blocks = [block for i in shown for block in _incident(build(report, i, evidence=evidence), report)]
        rest = [one for i, one in enumerate(report.incidents) if i not in shown]
        if rest:
            blocks.append("\n".join(["More:", "", *(f"- {escape(short(report, one))}" for one in rest)]))
    for snapshot in report.snapshots:
        head, *rest_of = lines_of(snapshot)
        # Verbatim: the columns matter, and a fence shows text of a file as text.
        blocks += [
            f"### {escape(head)}",
            "```\n" + "\n".join(line.replace("`", "'") for line in rest_of if line) + "\n```",
        ]
    paths = [*(item.path for item in report.inputs), *(snapshot.path for snapshot in report.snapshots)]
    names = ", ".join(clean(path, 80) for path in paths[:4]) + (" ..." if len(paths) > 4 else "")
    blocks.append(f"<sub>memledger {escape(report.version)}, from {escape(names)}</sub>")
    return "\n\n".join(blocks) + "\n"


def _incident(view: OomView, report: OomReport) -> list[str]:
    blocks = [f"### {escape(view.header)}", f"**{escape(view.cause)}** {escape(view.confidence)}"]
    if view.table is not None:
        blocks.append(table_text(_parts_marked(view.table), len(report.inputs) > 1))
    if view.facts:
        blocks.append("\n".join(map(_fact, view.facts)))
    if view.steps:
        blocks.append(_steps(view.steps))
    if view.todo:
        blocks.append("\n".join(map(_fact, view.todo)))
    if view.evidence:
        places = Report(report.version, report.inputs, (), ())
        lines = [f"{where(e, places)}: {clean(e.text)}" for e in view.evidence]
        blocks.append(details("Log lines", fenced(lines)))
    return blocks


def _parts_marked(table: Table) -> Table:
    """The table with a dash before the rows that are parts of another: Markdown drops blanks."""
    rows = tuple(
        msgspec.structs.replace(row, label=f"– {row.label.strip()}") if row.label.startswith(" ") else row
        for row in table.rows
    )
    return msgspec.structs.replace(table, rows=rows)


def _fact(fact: Fact) -> str:
    if fact.name in _VERBATIM:
        return f"- {fact.name}:\n\n  " + fenced([fact.text]).replace("\n", "\n  ")
    code = f" `{fact.code}`" if fact.code else ""
    return f"- {fact.name}: {escape(fact.text)}{code}"


def _steps(steps: Sequence[Step]) -> str:
    from tabulate import tabulate

    rows = [[escape(s.at), s.taken.replace("<", "&lt;"), s.free.replace("<", "&lt;"), escape(s.what)] for s in steps]
    head = ["before it", "GiB", "free", ""]
    return tabulate(
        rows, headers=head, tablefmt="pipe", colalign=("left", "right", "right", "left"), disable_numparse=True
    )
