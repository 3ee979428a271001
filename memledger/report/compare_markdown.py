"""A comparison as Markdown, for pasting into an issue thread."""

from __future__ import annotations

from memledger.compare.values import CompareReport, Comparison
from memledger.report import compare_view as view
from memledger.report.markdown import escape


def render(report: CompareReport) -> str:
    """The whole comparison as GitHub-flavoured Markdown, ending in a newline; empty where there is none."""
    blocks = [f"- {escape(text)}" for text in view.regressions(report.regressions)]
    blocks = ["\n".join(blocks)] if blocks else []
    if report.comparison is not None:
        blocks += _comparison(report.comparison)
    elif report.sweep is not None:
        blocks.append("\n".join(f"- {escape(view.title(subject))}" for subject in report.sweep.columns))
        blocks += [_grid(grid) for grid in view.sweep(report.sweep)]
    if not blocks:
        return ""
    return "\n\n".join([*blocks, f"<sub>memledger {escape(report.version)}</sub>"]) + "\n"


def _comparison(found: Comparison) -> list[str]:
    blocks = ["\n".join(f"- {escape(view.title(one))}" for one in (found.a, found.b))]
    first, *rest = view.cause(found)
    blocks.append(" ".join([f"**{escape(first)}**", *map(escape, rest)]))
    if found.steps:
        blocks.append(_waterfall(found))
    grids = [view.meanings(found), view.differences(found), view.hybrid(found)]
    return blocks + [_grid(grid) for grid in grids if grid is not None and (grid.rows or grid.remarks)]


def _waterfall(found: Comparison) -> str:
    from tabulate import tabulate

    rows = [
        [
            f"**{row.label}**" if row.share is None else escape(row.label),
            row.gib,
            row.tolerance.replace("<", "&lt;"),
            row.tokens,
            row.basis,
        ]
        for row in view.bars(found)
    ]
    text = tabulate(
        rows,
        headers=["per GPU", "GiB", "", "tokens", "basis"],
        tablefmt="pipe",
        colalign=["left", "right", "left", "right", "left"],
        disable_numparse=True,
    )
    return "\n".join([text, "", *(f"- {escape(remark)}" for remark in view.remarks(found))])


def _grid(grid: view.Grid) -> str:
    from tabulate import tabulate

    rows = [
        [f"**{escape(row[0])}**" if i in grid.marked else escape(row[0]), *map(escape, row[1:])]
        for i, row in enumerate(grid.rows)
    ]
    heads = [escape(grid.title), *grid.heads[1:]]
    text = tabulate(rows, headers=heads, tablefmt="pipe", colalign=["left"] * len(heads), disable_numparse=True)
    return "\n".join([text, "", *(f"- {escape(remark)}" for remark in grid.remarks)]).rstrip()
