"""A sweep for a terminal: what it says, a table of its steps, intervals, memory; within the width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tabulate import tabulate

from memledger import words as n
from memledger.report import sweep_view as v
from memledger.report.text import Style, paint, shorten, to_ascii
from memledger.sweep.values import Sweep, SweepReport


def render(report: SweepReport, style: Style | None = None) -> str:
    """The whole report as text, ending in a newline."""
    style = style or Style()
    sweep = report.sweep
    lines = [*textwrap.wrap(v.header(sweep), style.width), ""]
    for sentence in v.conclusions(sweep):
        lines += textwrap.wrap(sentence, style.width)
    measured = [one for one in sweep.steps if one.requests or one.failed]
    if sweep.steps:
        lines += ["", *_table(v.STEP_HEADS, [v.step_row(one) for one in sweep.steps], style, left=(10,))]
        lines += _reasons(sweep, style)
        lines += textwrap.wrap(v.STEP_NOTE, style.width)
    if any(one.requests for one in measured):
        rows = [row for one in measured for row in v.interval_rows(one)]
        lines += ["", *_table(v.INTERVAL_HEADS, rows, style, left=(0, 1)), *textwrap.wrap(v.INTERVAL_NOTE, style.width)]
    lines += _memory(sweep, style)
    for trend in sweep.soak:
        lines += textwrap.wrap(f"soak: {v.trend_words(trend)}.", style.width)
    if remarks := v.remarks(sweep):
        lines += ["", paint("to know", "bold", style)]
        for remark in remarks:
            lines += textwrap.wrap(remark, style.width, initial_indent="  ", subsequent_indent="    ")
    spent = f"{sweep.tokens_spent:,} tokens in all, by the server's count."
    text = "\n".join(line.rstrip() for line in [*lines, "", spent]) + "\n"
    return text if style.unicode else to_ascii(text)


def _reasons(sweep: Sweep, style: Style) -> list[str]:
    lines: list[str] = []
    for one in sweep.steps:
        if one.verdict == "not_run" and one.reason:
            text = f"{one.step.name}: not run: {one.reason}"
            lines += textwrap.wrap(text, style.width, initial_indent="  ", subsequent_indent="    ")
    return lines


def _memory(sweep: Sweep, style: Style) -> list[str]:
    lines: list[str] = []
    if rows := v.memory_rows(sweep):
        lines += ["", *_table(v.MEMORY_HEADS, rows, style, left=(0,)), "GiB; of the server's own processes."]
    if changes := v.account_changes(sweep):
        moved = ", ".join(f"{name} {n.signed_gib(size)}" for name, size in changes)
        lines += ["", *textwrap.wrap(f"Accounts that moved, GiB: {moved}.", style.width)]
    if sweep.growth:
        lines.append("")
    for told in sweep.growth:
        lines += textwrap.wrap(f"{v.growth_words(told)}.", style.width)
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: Style, *, left: tuple[int, ...]) -> list[str]:
    """A table without the columns that say nothing."""
    kept = v.columns_with_figures(heads, rows)
    table = tabulate(
        [[heads[i] for i in kept], *([row[i] for i in kept] for row in rows)],
        tablefmt="plain",
        colalign=["left" if i in left else "right" for i in kept],
        disable_numparse=True,
    ).splitlines()
    return [paint(shorten(table[0], style.width), "bold", style), *(shorten(row, style.width) for row in table[1:])]
