"""A comparison for a terminal: the cause, the waterfall, what the figures mean, what differs; within the width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

import msgspec

from memledger import words as n
from memledger.compare.values import CompareReport, Comparison, Sweep
from memledger.report import compare_view as view
from memledger.report.text import LEAST_WIDTH, Style, to_ascii

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_CODES: Final = {"bold": "1", "green": "32", "red": "31", "yellow": "33"}
_LABEL: Final = 16
_WIDE: Final = 72
"""From this width on a waterfall has its bars, tolerances and bases."""
_LEAST_CELL: Final = 12


def render(report: CompareReport, style: Style | None = None) -> str:
    """The whole comparison as text, ending in a newline; empty where there is none."""
    style = style or Style()
    style = msgspec.structs.replace(style, width=max(style.width, LEAST_WIDTH))
    lines: list[str] = []
    if report.regressions:
        lines += [line for text in view.regressions(report.regressions) for line in _wrapped(text, style)]
        lines.append("")
    if report.comparison is not None:
        lines += _comparison(report.comparison, style)
    elif report.sweep is not None:
        lines += _sweep(report.sweep, style)
    text = "\n".join(line.rstrip() for line in lines).rstrip("\n")
    if not text:
        return ""
    return (text if style.unicode else to_ascii(text.replace("░", "-"))) + "\n"


def _comparison(found: Comparison, style: Style) -> list[str]:
    lines = [_paint(line, "bold", style) for one in (found.a, found.b) for line in _wrapped(view.title(one), style, 3)]
    for sentence in view.cause(found):
        lines += ["", *_wrapped(sentence, style)]
    if found.steps:
        lines += ["", *_waterfall(found, style)]
    grids = [view.meanings(found), view.differences(found), view.hybrid(found)]
    for grid in grids:
        if grid is not None and (grid.rows or grid.remarks):
            lines += ["", *_grid(grid, style)]
    return lines


# ----------------------------------------------------------------------------------------------------------- waterfall


def _waterfall(found: Comparison, style: Style) -> list[str]:
    rows = view.bars(found)
    wide = style.width >= _WIDE
    widths = [
        max(len(cell) for cell in column)
        for column in zip(*((r.gib, r.tolerance, r.tokens) for r in rows), strict=True)
    ]
    widths = [max(widths[0], 3), widths[1], max(widths[2], 6)]
    basis = max(len(row.basis) for row in rows)
    rest = style.width - _LABEL - 2 - widths[0] - 2 - widths[1] - 2 - widths[2] - 2 - basis - 2
    bar = max(0, min(24, rest)) if wide else 0
    head = _line(
        "per rank" if "per rank" in found.cause[0] else "per GPU", "", "GiB", "", "tokens", "", widths, bar, wide=wide
    )
    lines = [_paint(head, "bold", style)]
    for row in rows:
        drawing = _bar(row.share, bar, style) if row.share is not None else ""
        text = _line(row.label, drawing, row.gib, row.tolerance, row.tokens, row.basis, widths, bar, wide=wide)
        colour = "bold" if row.share is None else "yellow" if row.label == "unexplained" else ""
        lines.append(_paint(text, colour, style))
    for remark in view.remarks(found):
        lines += _wrapped(remark, style, 2, indent=2)
    return lines


def _line(
    label: str,
    bar: str,
    gib: str,
    spread: str,
    tokens: str,
    basis: str,
    widths: Sequence[int],
    width: int,
    *,
    wide: bool,
) -> str:
    cells = [label.ljust(_LABEL)]
    if width:
        cells.append(bar.ljust(width))
    cells.append(gib.rjust(widths[0]))
    if wide:
        cells.append(spread.ljust(widths[1]))
    cells.append(tokens.rjust(widths[2]))
    if wide:
        cells.append(basis)
    return "  ".join(cells).rstrip()


def _bar(share: float, width: int, style: Style) -> str:
    """Full blocks for what B has more, light ones for what it has less."""
    if not width or not share:
        return ""
    if share < 0:
        return "░" * max(1, round(-share * width))
    if not style.unicode:
        return "#" * max(1, round(share * width))
    eighths = max(1, round(share * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


# -------------------------------------------------------------------------------------------------------------- tables


def _grid(grid: view.Grid, style: Style) -> list[str]:
    """A table whose cells are wrapped in their columns; too many columns come in several pieces."""
    mark = 2 if grid.marked else 0
    label = min(max([len(row[0]) + mark for row in grid.rows] + [8]), 27, style.width // 3)
    fitting = max(1, (style.width - label) // (_LEAST_CELL + 2))
    lines: list[str] = []
    columns = range(1, len(grid.heads))
    for start in range(0, len(columns), fitting):
        chosen = columns[start : start + fitting]
        width = (style.width - label) // len(chosen) - 2
        if start:
            lines.append("")
        lines += _piece(grid, chosen, label, width, style, first=start == 0)
    for remark in grid.remarks:
        lines += _wrapped(remark, style, 2, indent=2)
    return lines


def _piece(grid: view.Grid, columns: Sequence[int], label: int, width: int, style: Style, *, first: bool) -> list[str]:
    title = grid.title if first else f"{grid.title}, continued"
    head = " ".join([title.ljust(label), *(f" {grid.heads[c]:<{width}}" for c in columns)])
    if len(title) > label:
        head = " ".join([" " * label, *(f" {grid.heads[c]:<{width}}" for c in columns)])
    lines = [_paint(title, "bold", style)] if len(title) > label else []
    lines.append(_paint(head.rstrip(), "bold", style))
    for i, row in enumerate(grid.rows):
        cells = [_fold(f"* {row[0]}" if i in grid.marked else row[0], label), *(_fold(row[c], width) for c in columns)]
        for k in range(max(map(len, cells))):
            texts = [cell[k] if k < len(cell) else "" for cell in cells]
            lines.append(" ".join([texts[0].ljust(label), *(f" {text:<{width}}" for text in texts[1:])]).rstrip())
    return lines


def _fold(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(n.glued(text), width, break_on_hyphens=False) or [""]
    return [line.replace("\xa0", " ") for line in lines]


def _sweep(found: Sweep, style: Style) -> list[str]:
    lines = [line for subject in found.columns for line in _wrapped(view.title(subject), style, 3)]
    for grid in view.sweep(found):
        lines += ["", *_grid(grid, style)]
    return [*lines, "", "* differs"]


def _wrapped(text: str, style: Style, later: int = 0, indent: int = 0) -> list[str]:
    lines = textwrap.wrap(
        n.glued(text),
        style.width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + later),
        break_on_hyphens=False,
    )
    return [line.replace("\xa0", " ") for line in lines]


def _paint(text: str, colour: str, style: Style) -> str:
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if style.colour and colour and text else text
