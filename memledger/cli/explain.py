"""`memledger explain`: a log in, the ledger out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from memledger.cli import app

if TYPE_CHECKING:
    from memledger.cards import Total
    from memledger.conditions import Condition
    from memledger.ledger import Report
    from memledger.report.view import Options


def _total(ctx: click.Context, param: click.Parameter, value: str | None) -> Total | None:
    if value is None:
        return None
    from memledger.cards import parse_total

    try:
        return parse_total(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _conditions(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Condition]:
    if not values:
        return []
    from memledger.conditions import parse_condition

    try:
        return [parse_condition(value) for value in values]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _codes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        return ()
    from memledger.findings.selection import parse_codes

    try:
        return parse_codes(values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("explain", short_help=app.COMMANDS["explain"][1])
@click.argument("files", nargs=-1, metavar="[FILES]...")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    help="How to write the report.",
)
@click.option("--evidence", is_flag=True, help="Print the log lines behind the figures.")
@click.option("--all-starts", is_flag=True, help="Print every start of a server in full, not only one.")
@click.option("--start", type=click.IntRange(min=1), metavar="N", help="Print the Nth start.")
@click.option("--rank", metavar="LABEL", help="Print these ranks only: TP3, 'DP1 TP0', 'pid 4242'.")
@click.option(
    "--gpu-total",
    callback=_total,
    metavar="SIZE|CARD",
    help="The card's memory, where the log does not print it: 80GiB, 81559MiB, h100, 4090.",
)
@click.option("--no-live", is_flag=True, help="Look at nothing but the log: no NVML, /proc or HTTP.")
@click.option(
    "--fail-on",
    callback=_conditions,
    multiple=True,
    metavar="CONDITION",
    help="Exit 1 where it holds: unexplained>2%, code=ML101, severity>=warning. Repeatable.",
)
@click.option(
    "--select",
    callback=_codes,
    multiple=True,
    metavar="CODE",
    help="Only these findings: ML101, a group (ML1), a list (ML1,ML501). Repeatable.",
)
@click.option("--ignore", callback=_codes, multiple=True, metavar="CODE", help="Without these findings. Repeatable.")
@click.option("--all-findings", is_flag=True, help="Print the findings that are mere information as well.")
@click.option("--unrecognized", is_flag=True, help="Print the memory-like lines that were not understood.")
@click.option("--follow", "-f", is_flag=True, help="Keep reading a growing log; Ctrl-C ends with the report.")
@click.option(
    "--rules",
    "rule_files",
    multiple=True,
    metavar="FILE",
    help="A rule file of your own, before the bundled ones. Repeatable.",
)
@click.option(
    "--width",
    type=click.IntRange(min=40),
    metavar="COLUMNS",
    help="Width of the text (default: the terminal's; 80 when piped).",
)
@click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR).")
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[str, ...],
    format_: str,
    evidence: bool,
    all_starts: bool,
    start: int | None,
    rank: str | None,
    gpu_total: Total | None,
    no_live: bool,
    fail_on: list[Condition],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    all_findings: bool,
    unrecognized: bool,
    follow: bool,
    rule_files: tuple[str, ...],
    width: int | None,
    no_color: bool,
) -> None:
    """Where the memory of an SGLang or vLLM server went, from its log.

    FILES may be several logs of one job, compressed (.gz .xz .zst .bz2), or - for standard input. No GPU is needed.
    """
    import msgspec

    from memledger.cli import reading
    from memledger.findings.selection import Selection
    from memledger.report.view import Options

    if not files:
        raise click.UsageError("Give a log to read: memledger explain server.log (or - for standard input).")
    if start is not None and all_starts:
        raise click.UsageError("--start and --all-starts exclude each other.")
    if follow and (len(files) > 1 or format_ != "text"):
        raise click.UsageError("--follow reads one log and writes text.")
    shown = " ".join(["memledger explain", *map(_quoted, files)])
    options = Options(
        rank=rank,
        all_starts=all_starts,
        start=start,
        evidence=evidence,
        unrecognized=unrecognized,
        command=shown,
        all_findings=all_findings,
    )
    wanted = Selection(select, ignore)
    redraw = (lambda report: _redraw(wanted.apply(report), options, width, no_color)) if follow else None
    result = reading.read(files, [Path(f) for f in rule_files], gpu_total, redraw)
    result = msgspec.structs.replace(result, report=wanted.apply(result.report))
    ctx.exit(finish(result, options, format_, fail_on, width, no_color))


def _redraw(report: Report, options: Options, width: int | None, no_color: bool) -> None:
    """The report so far, in place of the one before; on a terminal only (a file or pipe gets the last one)."""
    from memledger.cli import output

    if output.clear_screen():
        show(report, options, "text", width, no_color)


def finish(
    result: ReadResult, options: Options, format_: str, fail_on: list[Condition], width: int | None, no_color: bool
) -> int:
    """Write the report and say how it went, as an exit code."""
    report = result.report
    try:
        shown = show(report, options, format_, width, no_color)
    except LookupError as error:
        raise click.UsageError(f"{error.args[0]}.") from error
    for problem in result.problems:
        click.echo(f"memledger: {problem}", err=True)
    if not report.servers:
        if not result.problems:
            for sentence in result.nothing:
                click.echo(f"memledger: {sentence}", err=True)
            return app.NOTHING_RECOGNISED
        return app.UNREADABLE
    if result.problems:
        return app.UNREADABLE
    return _judge(report, shown, fail_on)


def _judge(report: Report, shown: list[int], fail_on: list[Condition]) -> int:
    if not fail_on:
        return app.DONE
    from memledger.conditions import not_judged, reasons

    servers = [report.servers[i] for i in shown]
    code = app.DONE
    for condition in fail_on:
        why = reasons(condition, servers)
        if why:
            click.echo(
                f"memledger: --fail-on {condition.text}: {'; '.join(why[:4])}{' ...' if len(why) > 4 else ''}", err=True
            )
            code = app.CONDITION_HOLDS
        elif missing := not_judged(condition, servers):
            click.echo(f"memledger: --fail-on {condition.text}: not judged for {missing[0]}", err=True)
    return code


def show(report: Report, options: Options, format_: str, width: int | None, no_color: bool) -> list[int]:
    """Write the report to stdout; the indices of the servers that it shows in full."""
    from memledger.cli import output
    from memledger.report.view import choose_ranks, choose_servers

    shown = choose_servers(report, options)
    for index in shown:
        choose_ranks(report.servers[index], options.rank)
    if format_ == "json":
        from memledger.report.json import encode

        output.write_bytes(encode(report))
    elif format_ == "markdown":
        from memledger.report import markdown

        output.write(markdown.render(report, options))
    elif report.servers or (options.unrecognized and report.unrecognized.count):
        from memledger.report import text

        output.write(text.render(report, options, output.style(width, no_color)))
    return shown


def _quoted(name: str) -> str:
    import shlex

    from memledger.sanitize import clean

    return shlex.quote(clean(name.encode("utf-8", "replace").decode()))


if TYPE_CHECKING:
    from memledger.cli.reading import ReadResult
