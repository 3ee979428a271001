"""The report as Markdown, for pasting into an issue thread."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Final

from memledger import words as n
from memledger.ledger import Report
from memledger.report.text import line_numbers
from memledger.report.view import Fact, Options, Row, Table, View, build, choose_servers, other_starts, where
from memledger.sanitize import clean

_SPECIAL: Final = re.compile(r"([\\`*_\[\]|~])")
_REFERENCE: Final = re.compile(r"@(?=\w)|#(?=\d)")


def render(report: Report, options: Options | None = None) -> str:
    """The whole report as GitHub-flavoured Markdown, ending in a newline.

    Raises:
        LookupError: `options` name a start or a rank that is not there.
    """
    options = options or Options()
    shown = choose_servers(report, options)
    blocks = [block for index in shown for block in _server(build(report, index, options), report)]
    others = other_starts(report, shown)
    if others:
        blocks.append(details("Other starts", fenced(others)))
    if report.unrecognized.count and options.unrecognized:
        lines = [f"{where(e, report)}: {clean(e.text)}" for e in report.unrecognized.examples]
        blocks.append(
            details(f"{n.plural(report.unrecognized.count, 'memory-like line')} not understood", fenced(lines))
        )
    blocks.append(f"<sub>memledger {escape(report.version)}, from {escape(_inputs(report))}</sub>")
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """`text` so that Markdown shows it as it is: no markup, no HTML, no table cells of its own, nobody mentioned."""
    flat = html.escape(" ".join(text.split()), quote=False)
    return _REFERENCE.sub(lambda m: m.group() + "<!-- -->", _SPECIAL.sub(r"\\\1", flat))


def _server(view: View, report: Report) -> list[str]:
    blocks = [f"### {escape(view.header)}"]
    for cause in view.cause:
        code = f" `{cause.code}`" if cause.code else ""
        blocks.append(f"**{escape(cause.text)}**{code}")
    blocks += [table_text(table, len(report.inputs) > 1) for table in view.tables]
    if view.more_ranks:
        blocks.append(details("More ranks", fenced(view.more_ranks)))
    if view.facts:
        blocks.append("\n".join(map(_fact, view.facts)))
    if view.evidence:
        blocks.append(details("Log lines", fenced([f"{where(e, report)}: {clean(e.text)}" for e in view.evidence])))
    return blocks


def _fact(fact: Fact) -> str:
    code = f" `{fact.code}`" if fact.code else ""
    return f"- {fact.name}: {escape(fact.text)}{code}"


def _inputs(report: Report) -> str:
    return ", ".join(clean(item.path, 80) for item in report.inputs[:4]) + (" ..." if len(report.inputs) > 4 else "")


def table_text(table: Table, many: bool) -> str:
    """A table; `many`: whether there are several inputs, whose number then stands before a line's."""
    from tabulate import tabulate

    head = [escape(table.title), "GiB", "share", "basis", "line", "note"]
    rows = [_cells(row, many) for row in table.rows]
    align = ["left", "right", "right", "left", "right", "left"]
    text = tabulate(rows, headers=head, tablefmt="pipe", colalign=align, disable_numparse=True)
    return "\n".join([text, *(f"\n{escape(remark)}" for remark in table.remarks)])


def _cells(row: Row, many: bool) -> Sequence[str]:
    strong = row.kind in {"opening", "total"} or row.kind == "unexplained"
    label = f"**{escape(row.label)}**" if strong else escape(row.label)
    basis = n.tolerance(row.tolerance) if row.kind == "unexplained" else row.basis
    share = "" if row.share is None else n.share(row.share, " %")
    size = "?" if row.bytes is None else n.signed_or_zero(row.bytes) if row.kind == "unexplained" else n.gib(row.bytes)
    return (
        label,
        size.replace("<", "&lt;").replace(">", "&gt;"),
        share,
        basis.replace("<", "&lt;"),
        line_numbers(row.lines, many),
        escape(row.note),
    )


def fenced(lines: Sequence[str]) -> str:
    """Lines as they are, in a block that none of them can end."""
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}text", *lines, fence])


def details(title: str, body: str) -> str:
    """A block that is folded away under its title."""
    return f"<details><summary>{html.escape(title)}</summary>\n\n{body}\n\n</details>"
