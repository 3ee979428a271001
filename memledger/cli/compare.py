"""`memledger compare`: runs side by side, and a waterfall from one's capacity to the other's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from memledger.cli import app, overview
from memledger.cli.options import HTML, MODEL_CONFIG

if TYPE_CHECKING:
    from memledger.cards import Total
    from memledger.compare.expect import Limit
    from memledger.compare.load import Loaded
    from memledger.compare.pair import Entrant
    from memledger.compare.values import CompareReport, Comparison, Regression
    from memledger.ledger import Input, Report, Source

LABELS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST: Final = len(LABELS)


def _context(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    from memledger.plan_settings import count

    try:
        found = count(value)
    except ValueError as error:
        raise click.BadParameter(_shown(str(error))) from error
    if found < 1:
        raise click.BadParameter("at least 1.")
    return found


def _total(ctx: click.Context, param: click.Parameter, value: str | None) -> Total | None:
    if value is None:
        return None
    from memledger.cards import parse_total

    try:
        return parse_total(value)
    except ValueError as error:
        raise click.BadParameter(_shown(str(error))) from error


def _limits(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Limit]:
    if not values:
        return []
    from memledger.compare.expect import parse

    try:
        return [parse(value) for value in values]
    except ValueError as error:
        raise click.BadParameter(f"{_shown(str(error))}.") from error


@click.command("compare", short_help=overview.COMMANDS["compare"][1])
@click.argument("files", nargs=-1, metavar="A B [MORE]...")
@click.option(
    "--context",
    callback=_context,
    metavar="TOKENS",
    help="Tokens of a request, for the requests that fit: 131072, or 128k (default: the smaller maximum).",
)
@click.option("--start", type=click.IntRange(min=1), metavar="N", help="Compare the Nth start of each input.")
@click.option("--start-a", type=click.IntRange(min=1), metavar="N", help="The Nth start of A.")
@click.option("--start-b", type=click.IntRange(min=1), metavar="N", help="The Nth start of B.")
@click.option("--rank", metavar="LABEL", help="Compare this rank: TP3, 'DP1 TP0' (default: the smallest pool).")
@click.option("--expect", metavar="OLD", help="A report or log to compare the one input with; it is A.")
@click.option(
    "--max-regression",
    "limits",
    callback=_limits,
    multiple=True,
    metavar="LIMIT",
    help="Exit 1 where B is beyond it: kv_tokens=-5%, pool_bytes=-2GiB, kv_bytes_per_token=+1%. Repeatable.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json", "markdown", "html"]),
    default="text",
    help="How to write it.",
)
@HTML
@click.option(
    "--gpu-total",
    callback=_total,
    metavar="SIZE|CARD",
    help="The memory of the card of all inputs, where their logs do not print it: 80GiB, h100.",
)
@MODEL_CONFIG
@click.option("--no-live", is_flag=True, help="Look at nothing but the files named: no model folder or cache.")
@click.option(
    "--rules", "rule_files", multiple=True, metavar="FILE", help="A rule file of your own, before the bundled ones."
)
@click.option("--width", type=click.IntRange(min=40), metavar="COLUMNS", help="Width of the text.")
@click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR).")
@click.pass_context
def command(ctx: click.Context, /, files: tuple[str, ...], **options: Any) -> None:
    """Why B holds more or fewer KV tokens than A: a waterfall that sums, what the figures mean, what differs.

    A and B are logs, or JSON reports of memledger explain, of the same engine or of both. More than two inputs give a table
    with one column each. Two results files of memledger sweep are compared step by step.
    """
    if options["expect"] is not None:
        files = (options["expect"], *files)
        if len(files) != 2:
            raise click.UsageError("--expect OLD takes one input to compare with it.")
    if len(files) < 2:
        raise click.UsageError("Give two inputs to compare: memledger compare a.log b.log.")
    if len(files) > MOST:
        raise click.UsageError(f"At most {MOST} inputs.")
    if files.count("-") > 1:
        raise click.UsageError("Standard input can be read once only.")
    if options["limits"] and len(files) > 2:
        raise click.UsageError("--max-regression compares two inputs.")
    if options["start"] is not None and (options["start_a"] is not None or options["start_b"] is not None):
        raise click.UsageError("--start and --start-a or --start-b exclude each other.")
    from memledger.sweep import journal

    if any(map(journal.is_file_of_results, files)):
        from memledger.cli import sweep

        ctx.exit(sweep.compared(files, options))
    if options["html"] is not None or options["format_"] == "html":
        from memledger.cli import html_output

        html_output.check(options["format_"], options["html"])
    ctx.exit(_run(files, options))


def _run(files: Sequence[str], options: dict[str, Any]) -> int:
    """Read, compare, write; the exit code."""
    from memledger import __version__
    from memledger.cli import reading
    from memledger.compare.load import NotAReportError, load_input
    from memledger.compare.values import CompareReport

    if (refused := _config_refused(options["model_config"])) is not None:
        app.say(f"memledger: --model-config: {refused}")
        _write(CompareReport(__version__, _envelope(files, [None] * len(files))[0], ()), options)
        return app.UNREADABLE
    rules = reading.rules([Path(f) for f in options["rule_files"]])
    reports: list[Report | None] = []
    decoded: list[bool] = []
    code = app.DONE
    for path in files:
        try:
            loaded = load_input(path, rules)
        except NotAReportError as error:
            app.say(f"memledger: {_shown(path)}: {_shown(str(error))}.")
            reports.append(None)
            decoded.append(True)
            code = app.UNREADABLE
            continue
        report, found = _completed(path, loaded, options)
        reports.append(report)
        decoded.append(loaded.decoded)
        code = max(code, found)
    inputs, sources = _envelope(files, reports)
    if code != app.DONE:
        _write(CompareReport(__version__, inputs, sources), options)
        return code
    try:
        return _compared(files, [report for report in reports if report is not None], inputs, sources, options)
    except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError, OverflowError) as error:
        # Only a log's own report is sure to hold figures of the right kind; one that somebody wrote or changed is not.
        if not any(decoded):
            raise
        names = ", ".join(_shown(path) for path, was in zip(files, decoded, strict=True) if was)
        app.say(f"memledger: {names}: its figures can't be compared ({type(error).__name__}: {_shown(str(error))}).")
        _write(CompareReport(__version__, inputs, sources), options)
        return app.UNREADABLE


def _config_refused(model_config: Path | None) -> str | None:
    """Why the model's config that the user named can't be used; None where it can, or none was named."""
    if model_config is None:
        return None
    from memledger.model.find import ModelConfigError, find

    try:
        find(None, config=model_config)
    except ModelConfigError as error:
        return f"{_shown(str(error))}."
    return None


def _compared(
    files: Sequence[str],
    reports: Sequence[Report],
    inputs: tuple[Input, ...],
    sources: tuple[Source, ...],
    options: dict[str, Any],
) -> int:
    """Compare what was read, and write it; the exit code."""
    from memledger import __version__
    from memledger.compare import pair
    from memledger.compare.values import CompareReport

    entrants = _entrants(files, reports, options)
    if len(entrants) > 2:
        found_sweep = pair.sweep(entrants, options["context"])
        _write(CompareReport(__version__, inputs, sources, sweep=found_sweep), options)
        return app.DONE
    comparison = pair.compare(entrants[0], entrants[1], options["context"])
    regressions = _regressions(options["limits"], comparison)
    _write(CompareReport(__version__, inputs, sources, comparison, regressions=regressions), options)
    return app.CONDITION_HOLDS if any(one.holds for one in regressions) else app.DONE


def _completed(path: str, loaded: Loaded, options: dict[str, Any]) -> tuple[Report, int]:
    """The report with the card and the model's figures, and 3 or 4 where there is nothing to compare in it."""
    from memledger.cli import reading
    from memledger.conclude import complete

    got = loaded.reading
    for problem in got.problems:
        app.say(f"memledger: {_shown(problem)}")
    if got.problems:
        return got.report, app.UNREADABLE
    if not got.report.servers:
        sentences = (
            (f"{_shown(path)}: a report without a server in it.",)
            if loaded.decoded
            else reading.nothing_recognised(got)
        )
        for sentence in sentences:
            app.say(f"memledger: {sentence}")
        return got.report, app.NOTHING_RECOGNISED
    if loaded.decoded and options["model_config"] is None and options["gpu_total"] is None:
        return got.report, app.DONE
    report = got.report
    if loaded.decoded:
        report = _whole(report)
    return (
        complete(report, options["gpu_total"], options["model_config"], look_here=not options["no_live"]),
        app.DONE,
    )


def _whole(report: Report) -> Report:
    """A decoded report with its pools whole again, so that the model's figures can be made anew."""
    import msgspec

    from memledger.compare.side import logged_entries

    def rank(one: Any) -> Any:
        return msgspec.structs.replace(one, entries=logged_entries(one))

    servers = tuple(msgspec.structs.replace(s, ranks=tuple(map(rank, s.ranks)), findings=()) for s in report.servers)
    return msgspec.structs.replace(report, servers=servers)


def _entrants(files: Sequence[str], reports: Sequence[Report], options: dict[str, Any]) -> list[Entrant]:
    from memledger.compare.pair import Entrant
    from memledger.compare.side import choose_server
    from memledger.report.view import choose_ranks

    found = []
    for place, (path, report) in enumerate(zip(files, reports, strict=True)):
        label = LABELS[place]
        start = options["start"] or (options["start_a"], options["start_b"], *[None] * MOST)[place]
        try:
            index, server = choose_server(report, start)
            ranks = tuple(choose_ranks(server, options["rank"]))
        except LookupError as error:
            raise click.UsageError(f"{label} ({_shown(path)}): {error.args[0]}.") from error
        found.append(Entrant(label, place, path, index + 1, server, ranks))
    return found


def _envelope(files: Sequence[str], reports: Sequence[Report | None]) -> tuple[tuple[Input, ...], tuple[Source, ...]]:
    """One input for each file named, and the sources that answered."""
    from memledger.ledger import Input

    inputs = []
    sources: list[Source] = []
    for path, report in zip(files, reports, strict=True):
        first = report.inputs[0] if report is not None and report.inputs else Input(path, 0, 0)
        inputs.append(Input(path, first.bytes, first.lines, first.notes))
        sources += [s for s in (report.sources if report is not None else ()) if s not in sources]
    return tuple(inputs), tuple(sources)


def _regressions(limits: Sequence[Limit], comparison: Comparison) -> tuple[Regression, ...]:
    if not limits:
        return ()
    from memledger.compare.expect import judge

    return tuple(judge(limit, comparison) for limit in limits)


def _write(report: CompareReport, options: dict[str, Any]) -> None:
    from memledger.cli import output

    if options["format_"] == "json":
        from memledger.report.compare_json import encode

        output.write_bytes(encode(report))
    elif report.comparison is None and report.sweep is None:
        return
    elif options["format_"] == "markdown":
        from memledger.report.compare_markdown import render as render_markdown

        output.write(render_markdown(report))
    elif options["format_"] == "text":
        from memledger.report.compare_text import render

        output.write(render(report, output.style(options["width"], options["no_color"])))
    if (report.comparison or report.sweep) and (options["html"] is not None or options["format_"] == "html"):
        from memledger.cli import html_output
        from memledger.report import html_compare

        html_output.write(lambda: html_compare.page(report), options["format_"], options["html"])


def _shown(text: str) -> str:
    from memledger.sanitize import clean

    return clean(text.encode("utf-8", "replace").decode(), 400)
