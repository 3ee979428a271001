"""`memledger finding`: what a finding means; without a code, all of them."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from memledger.cli import overview

if TYPE_CHECKING:
    from memledger.findings.page import Page


@click.command("finding", short_help=overview.COMMANDS["finding"][1])
@click.argument("codes", nargs=-1, metavar="[CODE]...")
@click.option("--width", type=click.IntRange(min=40), metavar="COLUMNS", help="Width of the text.")
def command(codes: tuple[str, ...], width: int | None) -> None:
    """What a finding means, when it holds and what to do: memledger finding ML101, or a group: ML1.

    Without a code: the list of all findings.
    """
    from memledger.cli import output
    from memledger.findings.catalogue import GROUPS, matching
    from memledger.findings.selection import parse_codes

    columns = output.style(width, no_color=True).width
    if not codes:
        lines = []
        for prefix, name in GROUPS.items():
            lines += ["", f"{prefix}xx  {name}"]
            lines += [f"  {page.code}  {page.title}" for page in matching(prefix)]
        output.write("\n".join(lines[1:]) + "\n")
        return
    try:
        wanted = parse_codes(codes)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    pages = {page.code: page for code in wanted for page in matching(code)}
    output.write("\n\n".join(_page(page, columns) for page in pages.values()) + "\n")


def _page(page: Page, columns: int) -> str:
    lines = [f"{page.code}: {page.title}", "", *textwrap.wrap(page.says, columns, break_on_hyphens=False), ""]
    for name, text in (
        ("holds", page.holds),
        ("silent", page.silent),
        ("severity", page.severity),
        ("then", page.then),
    ):
        lines += textwrap.wrap(
            text,
            columns,
            initial_indent=name.ljust(10),
            subsequent_indent=" " * 10,
            break_on_hyphens=False,
            break_long_words=False,
        )
    return "\n".join(lines)
