"""One self-contained HTML file from the blocks of a page: nothing is loaded from anywhere, text stays text.

The charts are drawn by Plotly's bundle, which stands in the file. Every chart has a table with the same figures beside
it. Importing this module imports no library: they are loaded when a page is rendered (docs/html.md).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from memledger import __version__
from memledger.around import LINES_AROUND, Neighbour
from memledger.extras import install_command
from memledger.ledger import Evidence, Input
from memledger.report.view import Fact
from memledger.sanitize import clean

MOST_BYTES: Final = 6_000_000
"""A page is below this: mail and issue trackers take it."""
MOST_LINES: Final = 400
"""Log lines that a page quotes: the tables name the numbers of the rest."""
LONGEST_TEXT: Final = 4000
_TEMPLATES: Final = Path(__file__).parent / "templates"
_JSON_ESCAPES: Final = {
    ord("<"): "\\u003c",
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


class MissingExtraError(Exception):
    """A library of the extra `html` is not installed; the text is one sentence with the command that installs it."""


class TooLargeError(Exception):
    """The page can't be brought under `MOST_BYTES`."""


# -------------------------------------------------------------------------------------------------------------- values


class Cell(msgspec.Struct, frozen=True):
    """One cell. `lines`: the log lines that it names, each a link where the page quotes the line."""

    text: str = ""
    number: bool = False
    strong: bool = False
    lines: tuple[Evidence, ...] = ()


class Grid(msgspec.Struct, frozen=True):
    """A table: its caption, column heads (the first cell of a row is its head), and remarks below."""

    caption: str
    heads: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    remarks: tuple[str, ...] = ()


class Part(msgspec.Struct, frozen=True):
    """One account over all bars of a `Stack`: sizes (None: not there), the same in words, and what hovering shows."""

    name: str
    colour: str
    values: tuple[float | None, ...]
    hover: tuple[str, ...]
    texts: tuple[str, ...]


class Stack(msgspec.Struct, frozen=True, tag="stack", tag_field="kind"):
    """Bars one under another, each divided into accounts; what is below zero goes to the left of it."""

    bars: tuple[str, ...]
    parts: tuple[Part, ...]
    unit: str = "GiB"


class Node(msgspec.Struct, frozen=True):
    """One rectangle of a `Tree`; `value` is 0 for a parent, which is as wide as its children."""

    id: str
    parent: str
    label: str
    value: float
    colour: str
    hover: str


class Tree(msgspec.Struct, frozen=True, tag="tree", tag_field="kind"):
    """Accounts within accounts, by size."""

    nodes: tuple[Node, ...]


class Fall(msgspec.Struct, frozen=True):
    """One column of a `Waterfall`: a level, or a change from the level before."""

    label: str
    value: float
    hover: str
    level: bool = False
    text: str = ""


class Waterfall(msgspec.Struct, frozen=True, tag="waterfall", tag_field="kind"):
    """Columns from one level to the next."""

    columns: tuple[Fall, ...]
    unit: str = "GiB"


class Use(msgspec.Struct, frozen=True):
    """One pool of `Uses`: its peak as a share of what was reserved (0..1)."""

    label: str
    share: float
    hover: str


class Uses(msgspec.Struct, frozen=True, tag="uses", tag_field="kind"):
    """What was reserved as a whole bar, and how much of it was ever used."""

    pools: tuple[Use, ...]


class Curve(msgspec.Struct, frozen=True):
    """One figure of a `Timeline`, a value for each place (None: the line there does not say it)."""

    name: str
    colour: str
    values: tuple[float | None, ...]


class Timeline(msgspec.Struct, frozen=True, tag="timeline", tag_field="kind"):
    """Shares of pools (0..1) over their whole, and counts (of `counted`; `whole`: integers) below, at the same places.

    `breaks`: the samples before which nothing was printed for long; no line is drawn from the one before to them.
    """

    places: tuple[float, ...]
    breaks: tuple[int, ...]
    unit: str
    shares: tuple[Curve, ...]
    counts: tuple[Curve, ...]
    hover: tuple[str, ...]
    counted: str = "requests"
    whole: bool = True


Chart = Stack | Tree | Waterfall | Uses | Timeline


class Figure(msgspec.Struct, frozen=True):
    """A chart with its title and what it shows in a sentence (for who can't see it), and the table of its figures.

    `table` None: the table stands beside it already.
    """

    title: str
    says: str
    chart: Chart
    table: Grid | None = None


class Fix(msgspec.Struct, frozen=True):
    """One way out of a finding: flags to copy, what they would change, how that is known."""

    flags: str
    effects: tuple[str, ...] = ()
    basis: str = ""


class Problem(msgspec.Struct, frozen=True):
    """One finding as a page shows it."""

    code: str
    title: str
    severity: str
    text: str
    lines: tuple[Evidence, ...] = ()
    fixes: tuple[Fix, ...] = ()


class Lead(msgspec.Struct, frozen=True):
    """What comes first: one or two sentences."""

    text: str
    code: str | None = None
    severity: str = "info"
    lines: tuple[Evidence, ...] = ()


class Section(msgspec.Struct, frozen=True):
    """One part of a page under its heading; what is empty is not shown. `raw` is text in a fixed width."""

    title: str
    leads: tuple[Lead, ...] = ()
    figures: tuple[Figure, ...] = ()
    grids: tuple[Grid, ...] = ()
    problems: tuple[Problem, ...] = ()
    facts: tuple[Fact, ...] = ()
    items: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing under the heading."""
        return not any((self.leads, self.figures, self.grids, self.problems, self.facts, self.items, self.raw))


class Chapter(msgspec.Struct, frozen=True):
    """One server, incident or comparison; a page of one chapter shows its title as the page's."""

    title: str
    sections: tuple[Section, ...]


class Page(msgspec.Struct, frozen=True):
    """A whole page. `lines`: the log lines it may quote, `around`: the lines that stand beside them.

    The chapters come in the order of their weight.
    """

    command: str
    title: str
    chapters: tuple[Chapter, ...]
    inputs: tuple[Input, ...] = ()
    lines: tuple[Evidence, ...] = ()
    after: tuple[Section, ...] = ()
    around: tuple[Neighbour, ...] = ()


class Row(msgspec.Struct, frozen=True):
    """One line of the quoted log. `anchor`: of a line that figures rest on; None for its neighbours. `gap`: lines are left out before it."""

    anchor: str | None
    place: str
    text: str
    gap: bool


# ----------------------------------------------------------------------------------------------------------- rendering


def require() -> None:
    """Check that the libraries of a page are there, without importing them.

    Raises:
        MissingExtraError: one is not.
    """
    missing = [name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"An HTML report needs {' and '.join(missing)}: {install_command('html')}")


def render(page: Page) -> str:
    """The page as one HTML document below `MOST_BYTES`: quoted lines, then chapters, give way where it would not fit.

    Raises:
        MissingExtraError: a library is missing.
        TooLargeError: not even one chapter fits.
    """
    require()
    library = _plotly()
    tries: list[tuple[int, int]] = [(MOST_LINES, len(page.chapters)), (40, len(page.chapters))]
    tries += [(40, count) for count in (16, 4, 1) if count < len(page.chapters)]
    for lines, chapters in tries:
        text = _document(page, library, lines, chapters)
        if len(text.encode()) < MOST_BYTES:
            return text
    raise TooLargeError(f"The page would be larger than {MOST_BYTES // 1_000_000} MB; choose a start with --start N.")


def _document(page: Page, library: str, most_lines: int, most_chapters: int) -> str:
    import jinja2
    from markupsafe import Markup

    chapters = page.chapters[:most_chapters]
    quoted = page.lines[:most_lines]
    charts = [f.chart for c in chapters for s in c.sections for f in s.figures]
    charts += [f.chart for s in page.after for f in s.figures]
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["flags"] = _with_flags
    several = len(page.inputs) > 1
    numbers = iter(range(1, len(charts) + 1))
    return environment.get_template("page.html.j2").render(
        page=page,
        chapters=chapters,
        left_out=len(page.chapters) - len(chapters),
        lines=quoted,
        lines_left_out=len(page.lines) - len(quoted),
        links=_links(quoted, several),
        rows=_rows(quoted, page.around, several),
        names=[_path(item.path) for item in page.inputs],
        next_chart=lambda: next(numbers),
        ids=_ids(),
        policy=_policy(library, script),
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        library=Markup(library),
        script=Markup(script),
        charts=Markup(embedded_json(charts)),
        version=__version__,
    )


def _shown(value: Any) -> Any:
    """Whatever a template prints: text of any source without hidden characters and secrets, before it is escaped."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return clean(value, LONGEST_TEXT)
    return value


_FLAG: Final = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")


def _with_flags(value: str) -> Any:
    """A text in which no flag is broken at one of its dashes. Everything in it is escaped."""
    from markupsafe import Markup, escape

    text = clean(value, LONGEST_TEXT)
    ends = [0, *(at for found in _FLAG.finditer(text) for at in found.span()), len(text)]
    pieces = [escape(text[start:end]) for start, end in itertools.pairwise(ends)]
    return Markup("").join(
        Markup('<span class="flag">{}</span>').format(piece) if i % 2 else piece for i, piece in enumerate(pieces)
    )


def _path(path: str) -> str:
    return "standard input" if path == "-" else path.encode("utf-8", "replace").decode()


def _ids() -> Callable[[str], str]:
    """Makes ids from titles: letters, digits and dashes only, and none twice."""
    used: dict[str, int] = {}

    def make(title: str) -> str:
        name = "".join(ch if ch.isascii() and ch.isalnum() else "-" for ch in title.lower()).strip("-")[:40] or "part"
        used[name] = used.get(name, 0) + 1
        return f"s-{name}" if used[name] == 1 else f"s-{name}-{used[name]}"

    return make


def _anchor(evidence: Evidence) -> str:
    return f"line-{evidence.input + 1}-{evidence.line}"


def _place(evidence: Evidence | Neighbour, several: bool) -> str:
    return f"{evidence.input + 1}:{evidence.line}" if several else str(evidence.line)


def _rows(quoted: Sequence[Evidence], around: Sequence[Neighbour], several: bool) -> list[Row]:
    """The quoted lines with those beside them, in the order of the inputs."""
    mine = {(e.input, e.line): e for e in quoted}
    near = {(i, line + d) for i, line in mine for d in range(-LINES_AROUND, LINES_AROUND + 1)}
    beside = {(a.input, a.line): a for a in around if (a.input, a.line) in near}
    rows: list[Row] = []
    before: tuple[int, int] | None = None
    for key in sorted({*mine, *beside}):
        one = mine.get(key) or beside[key]
        gap = before is not None and bool(around) and key != (before[0], before[1] + 1)
        rows.append(Row(_anchor(mine[key]) if key in mine else None, _place(one, several), one.text, gap))
        before = key
    return rows


def _links(quoted: Sequence[Evidence], several: bool) -> Callable[[Sequence[Evidence]], list[tuple[str, str | None]]]:
    """Of log lines: the number as it is shown, and the anchor where the page quotes the line. At most four are named."""
    there = {(e.input, e.line) for e in quoted}

    def links(lines: Sequence[Evidence]) -> list[tuple[str, str | None]]:
        places = list({(e.input, e.line): e for e in lines}.values())
        found = [(_place(e, several), _anchor(e) if (e.input, e.line) in there else None) for e in places[:4]]
        return found + ([("...", None)] if len(places) > 4 else [])

    return links


def embedded_json(charts: Sequence[Chart]) -> str:
    """The charts as JSON that can stand in a script element: no character of it ends the element or a string."""
    values = _cleaned(msgspec.to_builtins(charts))
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_JSON_ESCAPES)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        # A hover text has lines; each is cleaned for itself.
        return "\n".join(clean(line, LONGEST_TEXT) for line in value.split("\n"))
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item) for item in value]
    return value


def _plotly() -> str:
    """Plotly's bundle as its wheel brings it.

    Raises:
        MissingExtraError: the wheel holds none.
    """
    found = importlib.util.find_spec("plotly")
    place = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
    if place is None or not place.is_file():
        raise MissingExtraError(f"An HTML report needs the bundle of plotly: {install_command('html')}")
    # A browser reads a carriage return as a line's end before it takes the hash.
    text = place.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")
    lower = text.lower()
    if any(mark in lower for mark in ("</script", "<!--", "<script", "\0")):
        raise MissingExtraError(
            f"This version of plotly can't stand in a page; another one may: {install_command('html')}"
        )
    return text


def _policy(*scripts: str) -> str:
    """The page's Content-Security-Policy: these scripts by their hashes, styles in the page, and nothing else at all."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "connect-src 'none'; img-src 'none'; object-src 'none'"
    )
