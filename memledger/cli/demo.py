"""`memledger demo`: the report of the bundled log."""

from __future__ import annotations

import click

from memledger.cli import app


@click.command("demo", short_help=app.COMMANDS["demo"][1])
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    help="How to write the report.",
)
@click.option("--evidence", is_flag=True, help="Print the log lines behind the figures.")
@click.option("--width", type=click.IntRange(min=40), metavar="COLUMNS", help="Width of the text.")
@click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR).")
@click.pass_context
def command(ctx: click.Context, format_: str, evidence: bool, width: int | None, no_color: bool) -> None:
    """The report of a bundled log: a hybrid model with 18 GB of state reserved for slots that were never used."""
    from memledger.cli import explain, reading
    from memledger.report.view import Options
    from memledger.resources import demo_log

    try:
        path = str(demo_log())
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from error
    result = reading.read([path], [], None)
    options = Options(evidence=evidence, command="memledger demo")
    ctx.exit(explain.finish(result, options, format_, [], width, no_color))
