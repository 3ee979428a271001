"""`memledger compare --html`: two runs or more as one HTML file, from the view that text and Markdown render."""

from __future__ import annotations

from typing import Any

from memledger import words as n
from memledger.compare import words
from memledger.compare.values import CompareReport, Comparison, Step, Sweep
from memledger.report import compare_view as view
from memledger.report.html import quoted
from memledger.report.html_charts import gib
from memledger.report.html_page import (
    Cell,
    Chapter,
    Fall,
    Figure,
    Grid,
    Lead,
    Page,
    Part,
    Section,
    Stack,
    Waterfall,
    render,
)


def document(report: CompareReport) -> str:
    """The whole comparison as one HTML document.

    Raises:
        MissingExtraError: a library of the extra `html` is missing.
        TooLargeError: the page can't be brought under 6 MB.
    """
    return render(page(report))


def page(report: CompareReport) -> Page:
    """What the page shows."""
    limits = Section("Limits", items=tuple(view.regressions(report.regressions)))
    if report.comparison is not None:
        found = report.comparison
        lines = quoted([one.evidence for one in found.meanings])
        chapter = Chapter("A against B", (*_pair(found), limits))
        title = f"{_engine(found.a)} against {_engine(found.b)}"
        return Page("memledger compare", title, (chapter,), report.inputs, lines)
    sections = _sweep(report.sweep) if report.sweep is not None else ()
    return Page(
        "memledger compare", f"{len(report.inputs)} runs side by side", (Chapter("Runs", sections),), report.inputs
    )


def _engine(subject: Any) -> str:
    model = subject.model.rstrip("/").rpartition("/")[2] if subject.model else "a model not in the log"
    name = "SGLang" if subject.framework == "sglang" else "vLLM"
    return f"{name} {subject.framework_version or ''}".strip() + f" with {model}"


def _pair(found: Comparison) -> tuple[Section, ...]:
    grids = [view.differences(found), view.meanings(found), view.hybrid(found)]
    figure = _waterfall(found)
    return (
        Section(
            "The cause",
            leads=tuple(Lead(text) for text in view.cause(found)),
            items=(view.title(found.a), view.title(found.b)),
        ),
        Section(
            "From A to B, per GPU",
            figures=(figure,) if figure is not None else (),
            grids=(_steps(found),) if found.steps else (),
            items=(found.reason,) if found.reason and not found.steps else (),
        ),
        *(Section(_headed(grid.title), grids=(_grid(grid),)) for grid in grids if grid is not None and grid.rows),
    )


def _headed(title: str) -> str:
    return title[:1].upper() + title[1:]


def _grid(grid: view.Grid) -> Grid:
    heads = tuple(Cell(head) for head in grid.heads)
    rows = tuple(tuple(Cell(text, strong=i in grid.marked) for text in row) for i, row in enumerate(grid.rows))
    return Grid(grid.title, heads, rows, grid.remarks)


# ---------------------------------------------------------------------------------------------------------- the waterfall


def _waterfall(found: Comparison) -> Figure | None:
    """From A's pool to B's: in tokens where every step has them, else in GiB; None where a pool is not known."""
    steps = [s for s in found.steps if s.bytes or s.kv_tokens]
    by_tokens = all(s.kv_tokens is not None for s in found.steps)
    ends = found.capacity.kv_tokens if by_tokens else found.capacity.pool_bytes
    if not found.steps or ends.a is None or ends.b is None:
        return None
    unit = "KV tokens" if by_tokens else "GiB of KV pool"
    columns = [_end("A", ends.a, by_tokens), *(_column(s, by_tokens) for s in steps), _end("B", ends.b, by_tokens)]
    says = f"From {columns[0].text} to {columns[-1].text} {unit}; " + ", ".join(
        f"{c.label} {c.text}" for c in columns[1:-1]
    )
    return Figure(f"From A to B in {unit}", says, Waterfall(tuple(columns), unit))


def _end(label: str, size: int, by_tokens: bool) -> Fall:
    text = f"{size:,}" if by_tokens else n.gib(size)
    return Fall(
        label, size if by_tokens else gib(size), f"{label}: {text} {'KV tokens' if by_tokens else 'GiB'}", True, text
    )


def _column(step: Step, by_tokens: bool) -> Fall:
    label = words.STEP_LABELS[step.name]
    change = step.kv_tokens if by_tokens and step.kv_tokens is not None else step.bytes
    spread = n.tolerance(step.tolerance_bytes)
    lines = [f"{label}: {n.signed_gib(step.bytes)} GiB {spread}".rstrip(), f"{step.bytes:+,} bytes"]
    if step.kv_tokens is not None:
        lines.append(
            f"{step.kv_tokens:+,} KV tokens" + (f" ±{step.tolerance_tokens:,}" if step.tolerance_tokens else "")
        )
    lines += [f"basis: {step.basis}", *([step.note] if step.note else [])]
    text = f"{change:+,}" if by_tokens else n.signed_gib(step.bytes)
    return Fall(label, change if by_tokens else gib(step.bytes), "\n".join(lines), text=text)


def _steps(found: Comparison) -> Grid:
    heads = (Cell("step"), Cell("GiB", number=True), Cell("±", number=True), Cell("tokens", number=True), Cell("basis"))
    rows = tuple(
        (
            Cell(bar.label, strong=bar.share is None),
            Cell(bar.gib, number=True),
            Cell(bar.tolerance, number=True),
            Cell(bar.tokens, number=True),
            Cell(bar.basis),
        )
        for bar in view.bars(found)
    )
    return Grid("Steps from A to B, per GPU", heads, rows, view.remarks(found))


# --------------------------------------------------------------------------------------------------------------- several


def _sweep(found: Sweep) -> tuple[Section, ...]:
    figures = tuple(
        figure
        for name, unit in (("kv_tokens", "KV tokens"), ("pool_bytes", "GiB of KV pool"))
        if (figure := _columns(found, name, unit)) is not None
    )
    grids = tuple(_grid(grid) for grid in view.sweep(found))
    runs = tuple(view.title(subject) for subject in found.columns)
    return (Section("Runs", items=runs), Section("Capacity and settings", figures=figures, grids=grids))


def _columns(found: Sweep, name: str, unit: str) -> Figure | None:
    row = next((row for row in found.figures if row.name == name), None)
    if row is None or not any(isinstance(value, int) and value for value in row.values):
        return None
    sizes = [value if isinstance(value, int) else None for value in row.values]
    texts = tuple("" if s is None else n.gib(s) if name.endswith("_bytes") else f"{s:,}" for s in sizes)
    values = tuple(None if s is None else gib(s) if name.endswith("_bytes") else float(s) for s in sizes)
    labels = tuple(subject.label for subject in found.columns)
    hover = tuple(f"{label}: {text} {unit}" for label, text in zip(labels, texts, strict=True))
    says = ", ".join(f"{label} {text or 'not in the log'}" for label, text in zip(labels, texts, strict=True))
    return Figure(unit, says, Stack(labels, (Part(unit, "weights", values, hover, texts),), unit))
