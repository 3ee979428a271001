"""`memledger oom --html`: incidents as one HTML file, from the view that text and Markdown render."""

from __future__ import annotations

import textwrap
from typing import Final

import msgspec

from memledger import words as n
from memledger.postmortem.incident import Advice, Incident, OomReport
from memledger.report import oom_view
from memledger.report.html import fix, quoted
from memledger.report.html_charts import evidence_words, gib, ledger_grid, stack_of
from memledger.report.html_page import (
    Cell,
    Chapter,
    Fall,
    Figure,
    Grid,
    Lead,
    Page,
    Problem,
    Section,
    Waterfall,
    render,
)
from memledger.report.snapshot_lines import lines_of
from memledger.report.view import Table

LONGEST_TITLE: Final = 26
SETTINGS: Final = {
    "fraction": "the memory fraction",
    "chunk": "the tokens of a batch",
    "requests": "the running requests",
    "length": "the context length",
    "capture": "the captured sizes",
    "slots": "the state slots",
}
DIRECTIONS: Final = {
    "lower": "Need less memory",
    "raise": "Give it more memory",
    "free": "Free memory",
    "change": "Change a setting",
    "none": "Nothing to change",
}
"""Which way an advice goes, where it names no setting of its own."""


def document(report: OomReport, *, everything: bool = False) -> str:
    """The whole report as one HTML document; `everything`: every incident in full.

    Raises:
        MissingExtraError: a library of the extra `html` is missing.
        TooLargeError: the page can't be brought under 6 MB.
    """
    return render(page(report, everything=everything))


def page(report: OomReport, *, everything: bool = False) -> Page:
    """What the page shows."""
    snapshots = tuple(
        Section("A PyTorch memory snapshot", raw=tuple(lines_of(snapshot))) for snapshot in report.snapshots
    )
    if not report.incidents:
        title = "A PyTorch memory snapshot" if snapshots else "No failure on memory"
        told = () if snapshots else (Section("The answer", leads=(Lead(oom_view.nothing_failed(report)),)),)
        return Page("memledger oom", title, (Chapter(title, told),), report.inputs, after=snapshots)
    first = oom_view.chief(report)
    shown = [first, *(i for i in range(len(report.incidents)) if i != first)] if everything else [first]
    views = [oom_view.build(report, i, evidence=True) for i in shown]
    chapters = tuple(_chapter(view, report.incidents[view.index]) for view in views)
    rest = tuple(oom_view.short(report, one) for i, one in enumerate(report.incidents) if i not in shown)
    title = chapters[0].title if len(chapters) == 1 else n.plural(len(chapters), "incident")
    after = (Section("Other incidents", items=rest), *snapshots)
    return Page("memledger oom", title, chapters, report.inputs, quoted([view.evidence for view in views]), after)


def _chapter(view: oom_view.OomView, one: Incident) -> Chapter:
    table = view.table
    bars = stack_of("Who held the memory", [table]) if table is not None else None
    way = _way(one)
    advice = tuple(_advice(item) for item in one.advice)
    todo = tuple(fact for fact in view.todo if fact.name not in {"do", "flags"})
    return Chapter(
        view.header,
        (
            Section("The cause", leads=(Lead(view.cause, severity=view.severity),), items=(view.confidence,)),
            Section("What to do", problems=advice, facts=todo),
            Section(
                "Who held the memory",
                figures=(bars,) if bars is not None else (),
                grids=(ledger_grid(_marked(table)),) if table is not None else (),
            ),
            Section("What else is known", facts=view.facts),
            Section(
                "The way to it",
                figures=(way,) if way is not None else (),
                grids=(_steps(view.steps),) if view.steps else (),
            ),
        ),
    )


def _marked(table: Table) -> Table:
    """The table with a dash before the rows that are parts of another: HTML drops blanks."""
    rows = tuple(
        msgspec.structs.replace(row, label=f"– {row.label.strip()}") if row.label.startswith(" ") else row
        for row in table.rows
    )
    return msgspec.structs.replace(table, rows=rows)


def _advice(item: Advice) -> Problem:
    remedies = (fix(item.remedy),) if item.remedy is not None and item.remedy.flags else ()
    return Problem("", _advice_title(item), "info", item.text, fixes=remedies)


def _advice_title(item: Advice) -> str:
    if item.setting in SETTINGS and item.direction in {"lower", "raise", "change"}:
        return f"{item.direction.title()} {SETTINGS[item.setting]}"
    return DIRECTIONS[item.direction]


def _way(one: Incident) -> Figure | None:
    """What was free after each step, where at least two steps say it."""
    columns = []
    for moment in one.timeline:
        if moment.free_bytes is None:
            continue
        title = _shortened(moment.what)
        lines = [moment.what, f"free after it: {n.gib(moment.free_bytes)} GiB", f"{moment.free_bytes:,} bytes"]
        if moment.taken_bytes is not None:
            lines.append(f"took {n.gib(moment.taken_bytes)} GiB")
        hover = "\n".join([*lines, *evidence_words(moment.evidence)])
        columns.append(Fall(title, gib(moment.free_bytes), hover, True, n.gib(moment.free_bytes)))
    if len(columns) < 2:
        return None
    says = f"Free memory goes from {columns[0].text} to {columns[-1].text} GiB"
    return Figure("Free memory after each step", says, Waterfall(tuple(columns)))


def _shortened(text: str) -> str:
    """A text as the name of a column: cut after a word, or in the first one where that is too long itself."""
    cut = textwrap.shorten(text, LONGEST_TITLE, placeholder="…")
    return cut if cut != "…" else text[: LONGEST_TITLE - 1] + "…"


def _steps(steps: tuple[oom_view.Step, ...]) -> Grid:
    heads = (Cell("before it"), Cell("took, GiB", number=True), Cell("free, GiB", number=True), Cell("what"))
    rows = tuple(
        (Cell(step.at or "-"), Cell(step.taken, number=True), Cell(step.free, number=True), Cell(step.what))
        for step in steps
    )
    return Grid("Steps on the way", heads, rows)
