"""`memledger plan --html`: a plan as one HTML file, with the words of the text report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from memledger import words as n
from memledger.ledger import Input
from memledger.plan_values import Plan, Side
from memledger.report import plan_text
from memledger.report.html_charts import gib
from memledger.report.html_page import Cell, Chapter, Figure, Grid, Lead, Page, Part, Section, Stack, render
from memledger.report.view import ACCOUNT_LABELS, Fact, top_account

_LAST = ("reserve", "free")


def document(plan: Plan, inputs: Sequence[Input] = ()) -> str:
    """The plan as one HTML document.

    Raises:
        MissingExtraError: a library of the extra `html` is missing.
        TooLargeError: the page can't be brought under 6 MB.
    """
    return render(page(plan, inputs))


def page(plan: Plan, inputs: Sequence[Input] = ()) -> Page:
    """What the page shows."""
    severity = "error" if plan.feasible is False else "info"
    heads, rows = plan_text.table_rows(plan)
    table = Grid(
        heads[0] if heads else "",
        tuple(Cell("account or capacity" if i == 0 else head, number=i > 0) for i, head in enumerate(heads)),
        tuple(tuple(Cell(text, number=i > 0) for i, text in enumerate(row)) for row in rows),
    )
    figure = _bars(plan)
    flags = " ".join(map(shlex.quote, plan.flags))
    sections = (
        Section("The answer", leads=(Lead(plan_text.answer(plan), severity=severity),)),
        Section("The flags", raw=(flags,) if flags else ()),
        Section(
            "Memory and capacity of one GPU",
            figures=(figure,) if figure is not None else (),
            grids=(table,) if rows else (),
        ),
        Section("What it rests on", facts=tuple(Fact(name, text) for name, text in plan_text.fact_pairs(plan))),
    )
    title = f"A plan for {plan_text.header(plan)}"
    return Page("memledger plan", title, (Chapter(title, sections),), tuple(inputs))


def _bars(plan: Plan) -> Figure | None:
    """Accounts before and after; None where no account is known."""
    sides = [(name, side) for name, side in (("before", plan.before), ("after", plan.after)) if side and side.accounts]
    if not sides:
        return None
    sums = [_sums(side) for _, side in sides]
    names = list(dict.fromkeys(name for one in sums for name in one))
    names.sort(key=lambda name: _LAST.index(name) + 1 if name in _LAST else 0)
    parts = []
    for name in names:
        sizes = [one.get(name) for one in sums]
        label = ACCOUNT_LABELS.get(name, name.replace("_", " "))
        texts = tuple("" if size is None else n.gib(size) for size in sizes)
        hover = tuple(
            "" if size is None else f"{label} {which}: {n.gib(size)} GiB\n{size:,} bytes{_range(side, name)}"
            for size, (which, side) in zip(sizes, sides, strict=True)
        )
        parts.append(Part(label, name, tuple(None if size is None else gib(size) for size in sizes), hover, texts))
    says = "; ".join(
        f"{which}: " + ", ".join(f"{ACCOUNT_LABELS.get(a, a)} {n.gib_about(s)}" for a, s in one.items())
        for (which, _), one in zip(sides, sums, strict=True)
    )
    return Figure("Memory by account", says, Stack(tuple(which for which, _ in sides), tuple(parts)))


def _sums(side: Side) -> dict[str, int]:
    sums: dict[str, int] = {}
    for account, size in side.accounts.items():
        if size and not account.startswith("host/"):
            name = top_account(account)
            sums[name] = sums.get(name, 0) + size
    return sums


def _range(side: Side, account: str) -> str:
    """That a figure of the account is a range: the table says which."""
    return "\na range: see the table" if any(top_account(name) == account for name in side.ranges) else ""
