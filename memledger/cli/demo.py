"""`memledger demo`: the report of the bundled log."""

from __future__ import annotations

from typing import Any

import click

from memledger.cli import overview
from memledger.cli.options import Asked, report_options


@click.command("demo", short_help=overview.COMMANDS["demo"][1])
@report_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """The report of a bundled log: a hybrid model with 18 GB of state reserved for slots that were never used."""
    from memledger.cli import explain
    from memledger.resources import demo_log

    asked = Asked(**options)
    if asked.html is not None or asked.format_ == "html":
        from memledger.cli import html_output

        html_output.check(asked.format_, asked.html)
    try:
        path = str(demo_log())
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from error
    ctx.exit(explain.report_on([path], asked, "memledger demo"))
