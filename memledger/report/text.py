"""The report for a terminal: the cause, one table per GPU, then capacity, use, failures and what was not read."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from memledger import words as n
from memledger.ledger import Evidence, Report
from memledger.report.view import Cause, Fact, Options, Row, Table, View, build, choose_servers, other_starts, where
from memledger.sanitize import clean

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_ASCII: Final = str.maketrans(
    {"·": "-", "±": "+-", "…": "...", "×": "x", "–": "-", "—": "-", "→": "->", "\N{REPLACEMENT CHARACTER}": "?"}
)
_BAR: Final = re.compile(r"(?<=  )[▏▎▍▌▋▊▉█]+(?=  )|(?<=  )#+(?=  )")
_FACT_WIDTH: Final = 9
MOST_FAILURE_LINES: Final = 3
LEAST_NOTE: Final = 18
"""Where a note would get fewer columns than this it stands below its row."""
LEAST_WIDTH: Final = 40


class Style(msgspec.Struct, frozen=True):
    """How to write: `width` in columns, colour or not, and whether the output can show more than ASCII."""

    width: int = 80
    colour: bool = False
    unicode: bool = True


def render(report: Report, options: Options | None = None, style: Style | None = None) -> str:
    """The whole report as text, ending in a newline.

    Raises:
        LookupError: `options` name a start or a rank that is not there.
    """
    options, style = options or Options(), style or Style()
    style = msgspec.structs.replace(style, width=max(style.width, LEAST_WIDTH))
    shown = choose_servers(report, options)
    blocks = ["\n".join(_server(build(report, index, options), report, style)) for index in shown]
    others = other_starts(report, shown)
    if others:
        lines = [shorten(line, style.width) for line in others]
        blocks.append("\n".join([paint("other starts (--all-starts, --start N)", "bold", style), *lines]))
    if options.unrecognized and report.unrecognized.count:
        blocks.append("\n".join(_unrecognized(report, style)))
    text = "\n\n".join(blocks) + "\n"
    return text if style.unicode else to_ascii(text)


def to_ascii(text: str) -> str:
    """`text` in ASCII: our own signs by their nearest words, everything else as `?`."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def _server(view: View, report: Report, style: Style) -> list[str]:
    lines = [paint(line, "bold", style) for line in wrap_parts(view.header, style.width)]
    for cause in view.cause:
        lines += ["", *_cause(cause, style)]
    for table in view.tables:
        lines += ["", *table_lines(table, style, many=len(report.inputs) > 1)]
    if view.more_ranks:
        lines += ["", *(shorten(line, style.width) for line in view.more_ranks)]
    if view.facts:
        lines.append("")
        for i, fact in enumerate(view.facts):
            again = i > 0 and view.facts[i - 1].name == fact.name
            lines += fact_lines(fact, style, again=again)
    if view.evidence:
        lines += ["", *evidence_lines(view.evidence, report)]
    return lines


def wrap_parts(header: str, width: int) -> list[str]:
    """The header in lines that break between its parts (and within one only where it is wider than the line)."""
    return wrap(" · ".join(part.replace(" ", "\xa0") for part in header.split(" · ")), width)


def wrap(text: str, width: int, first: str = "", later: str = "", **how: Any) -> list[str]:
    """`text` in lines of at most `width`, after `first` and `later`; a number keeps its unit."""
    lines = textwrap.wrap(
        n.glued(text), width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, **how
    )
    return [line.replace("\xa0", " ") for line in lines]


def _cause(cause: Cause, style: Style) -> list[str]:
    colour = {"error": "red", "warning": "yellow"}.get(cause.severity, "")
    code = f"[{cause.code}]" if cause.code else ""
    lines = wrap(cause.text, style.width, break_long_words=False) or [""]
    if code:
        if len(lines[-1]) + 2 + len(code) <= style.width:
            lines[-1] += " " * (style.width - len(lines[-1]) - len(code)) + code
        else:
            lines.append(code.rjust(style.width))
    return [paint(line, colour, style) for line in lines]


def fact_lines(fact: Fact, style: Style, *, again: bool) -> list[str]:
    """One fact under its name, or under blanks where the one before has the same name (`again`)."""
    text = f"{fact.text} [{fact.code}]" if fact.code else fact.text
    # A failing line may go on for ever; what it says is at its beginning.
    limits = {"max_lines": MOST_FAILURE_LINES, "placeholder": " …"} if fact.name == "failed" else {}
    head = ("" if again else fact.name).ljust(_FACT_WIDTH) + "  "
    return wrap(text, style.width, head, " " * (_FACT_WIDTH + 2), break_long_words=False, **limits)


# -------------------------------------------------------------------------------------------------------------- tables


def table_lines(table: Table, style: Style, *, many: bool) -> list[str]:
    """A table; `many`: whether there are several inputs, whose number then stands before a line's."""
    title_apart = len(table.title) > max(16, *(len(row.label) for row in table.rows))
    lines = [paint(line, "bold", style) for line in indented(table.title, style, 0)] if title_apart else []
    cells = [
        ["" if title_apart else table.title, "GiB", "share", "basis", "line"],
        *(_cells(row, style, many) for row in table.rows),
    ]
    widths = [
        max(len(cell[i]) for cell in cells) if i < 2 or any(cell[i] for cell in cells[1:]) else 0 for i in range(5)
    ]
    # Two blanks stand between columns; what the figures leave is shared by the bar and the note.
    rest = style.width - sum(width + 2 for width in widths if width)
    top = max((abs(row.share) for row in table.rows if row.share is not None and row.kind != "opening"), default=0.0)
    bar = _bar_width(rest, max(len(row.note) for row in table.rows)) if top and len(table.rows) > 1 else 0
    note = rest - (bar + 2 if bar else 0)
    bars = ["", *(_draw(row, top, bar, style) if bar else "" for row in table.rows)]
    left = [_aligned(cell, drawing, widths, bar) for cell, drawing in zip(cells, bars, strict=True)]
    lines.append(paint(left[0].rstrip(), "bold", style))
    for row, text in zip(table.rows, left[1:], strict=True):
        first, *more = _fit_note(row.note, note) if note >= LEAST_NOTE else [""]
        lines.append(_paint_row(f"{text}  {first}".rstrip(), style))
        lines += [" " * (len(text) + 2) + words for words in more]
        if note < LEAST_NOTE:
            lines += indented(row.note, style, 4)
    return [*lines, *(line for remark in table.remarks for line in indented(remark, style, 2))]


def _aligned(cell: Sequence[str], drawing: str, widths: Sequence[int], bar: int) -> str:
    """One line of a table, without its note: figures to the right, words to the left."""
    words = [cell[0].ljust(widths[0]), *([drawing.ljust(bar)] if bar else []), cell[1].rjust(widths[1])]
    words += [cell[2].rjust(widths[2])] if widths[2] else []
    words += [cell[3].ljust(widths[3])] if widths[3] else []
    words += [cell[4].rjust(widths[4])] if widths[4] else []
    return "  ".join(words)


def indented(text: str, style: Style, depth: int) -> list[str]:
    """`text` in lines, `depth` blanks before each."""
    blank = " " * depth
    return wrap(text, style.width, blank, blank)


def _bar_width(rest: int, longest_note: int) -> int:
    """Columns for the bar: what a one-line note leaves, between 6 and 24; none where it would leave a note no room."""
    if rest < LEAST_NOTE:
        return min(24, rest - 2) if rest >= 8 else 0
    if rest - 8 < min(longest_note, LEAST_NOTE):
        return 0
    return max(6, min(24, rest - 2 - longest_note))


def _cells(row: Row, style: Style, many: bool) -> list[str]:
    basis = n.tolerance(row.tolerance) if row.kind == "unexplained" else row.basis
    share = "" if row.share is None else n.share(row.share, "%")
    size = "?" if row.bytes is None else n.signed_or_zero(row.bytes) if row.kind == "unexplained" else n.gib(row.bytes)
    return [row.label, size, share, basis if style.unicode else basis.translate(_ASCII), line_numbers(row.lines, many)]


def line_numbers(evidence: Sequence[Evidence], many: bool) -> str:
    """`71`, `71,74`, or `71..88` for more: where the figures stand; with several inputs `2:71`, the input's number first."""
    places = sorted({(e.input, e.line) for e in evidence})
    words = [f"{at + 1}:{line}" if many else str(line) for at, line in places]
    if len(words) <= 2:
        return ",".join(words)
    last = str(places[-1][1]) if places[0][0] == places[-1][0] else words[-1]
    return f"{words[0]}..{last}"


def _draw(row: Row, top: float, width: int, style: Style) -> str:
    if row.share is None or row.share <= 0 or top <= 0 or row.kind in {"opening", "total"}:
        return ""
    if not style.unicode:
        return "#" * max(1, round(row.share / top * width))
    eighths = max(1, round(row.share / top * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _fit_note(note: str, width: int) -> list[str]:
    return wrap(note, width) or [""]


# ------------------------------------------------------------------------------------------------------------- colours

_CODES: Final = {"bold": "1", "red": "31", "yellow": "33", "cyan": "36", "green": "32", "dim": "2"}


def paint(text: str, colour: str, style: Style) -> str:
    """`text` in a colour, where colours are wanted."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if style.colour and colour and text else text


def _paint_row(line: str, style: Style) -> str:
    if not style.colour:
        return line
    colour = (
        "yellow"
        if line.startswith(("unexplained", "over-counted"))
        else "green"
        if line.startswith("free ")
        else "cyan"
    )
    return _BAR.sub(lambda m: paint(m.group(), colour, style), line, count=1)


# ------------------------------------------------------------------------------------------------- evidence and unread


def evidence_lines(evidence: Iterable[Evidence], report: Report) -> list[str]:
    """Log lines with where they stand."""
    return [f"{where(e, report)}: {clean(e.text)}" for e in evidence]


def _unrecognized(report: Report, style: Style) -> list[str]:
    rest = report.unrecognized.count - len(report.unrecognized.examples)
    lines = [paint(f"{n.plural(report.unrecognized.count, 'memory-like line')} not understood", "bold", style)]
    lines += evidence_lines(report.unrecognized.examples, report)
    return lines + ([f"... and {rest:,} more"] if rest > 0 else [])


def shorten(text: str, width: int) -> str:
    """`text`, cut to the width."""
    return text if len(text) <= width else text[: width - 1] + "…"
