"""`memledger explain`: a log in, the ledger out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memledger.cli import app, overview
from memledger.cli.options import Asked, Machine, live_options, report_options

if TYPE_CHECKING:
    from memledger.cli.incidents import FailureTap
    from memledger.cli.reading import ReadResult
    from memledger.conditions import Condition
    from memledger.history import History
    from memledger.ledger import Report
    from memledger.report.view import Options


@click.command("explain", short_help=overview.COMMANDS["explain"][1])
@click.argument("files", nargs=-1, metavar="[FILES]...")
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Keep reading one growing log (or standard input); Ctrl-C ends with the report. Text only.",
)
@live_options
@report_options
@click.pass_context
def command(ctx: click.Context, /, files: tuple[str, ...], follow: bool, **options: Any) -> None:
    """Where the memory of an SGLang or vLLM server went, from its log, or (--pid) from the running server.

    FILES may be several logs of one job, compressed (.gz .xz .zst .bz2), or - for standard input; or a snapshot, or a recording of watch. No GPU is needed.
    """
    machine = Machine(**{name: options.pop(name) for name in Machine.__struct_fields__})
    asked = Asked(**options)
    _check(files, machine, asked, follow=follow)
    shown = " ".join(["memledger explain", *_live_words(machine), *map(_quoted, files)])
    if machine.asked or _is_snapshot(files):
        from memledger.cli import machine as live

        ctx.exit(live.report_on(files, machine, asked, shown))
    ctx.exit(report_on(files, asked, shown, follow=follow))


def _check(files: Sequence[str], machine: Machine, asked: Asked, *, follow: bool) -> None:
    if not files and machine.pid is None:
        raise click.UsageError(
            "Give a log to read: memledger explain server.log (or - for standard input); or a running server: --pid PID."
        )
    if follow and (len(files) > 1 or asked.format_ != "text"):
        raise click.UsageError("--follow reads one log and writes text.")
    if machine.pid is not None and machine.smi is not None:
        raise click.UsageError("--pid and --smi exclude each other: --pid asks the driver itself.")
    if machine.asked and follow:
        raise click.UsageError("--follow reads a log alone, without --pid and --smi.")
    if machine.pid is not None and asked.no_live:
        raise click.UsageError("--no-live and --pid exclude each other.")
    if asked.html is not None or asked.format_ == "html":
        from memledger.cli import html_output

        html_output.check(asked.format_, asked.html)
    for name, value in (("--snapshot", machine.snapshot if not machine.asked else None),):
        if value is not None:
            raise click.UsageError(f"{name} goes with --pid or --smi.")
    if machine.api_key_env is not None and machine.pid is None:
        raise click.UsageError("--api-key-env goes with --pid.")
    if any(_is_snapshot([name]) for name in files) and (len(files) > 1 or machine.asked):
        raise click.UsageError("A snapshot or a recording stands alone: it holds its own log and machine.")


def _is_snapshot(files: Sequence[str]) -> bool:
    """Whether the one input is a snapshot or a recording, by its first bytes. A pipe is left alone: what is read of it is gone."""
    if len(files) != 1 or files[0] == "-":
        return False
    from memledger.opening import open_file

    path = Path(files[0])
    try:
        if not path.is_file():
            return False
        with open_file(path) as file:
            head = file.read(64)
    except (OSError, ValueError):
        return False
    return head.lstrip().startswith(b"{") and (b"memledger-snapshot/" in head or b"memledger-recording/" in head)


def _live_words(machine: Machine) -> list[str]:
    words = ["--pid", str(machine.pid)] if machine.pid is not None else []
    return words + (["--smi", _quoted(str(machine.smi))] if machine.smi is not None else [])


def report_on(files: Sequence[str], asked: Asked, shown: str, *, follow: bool = False) -> int:
    """Read, explain, write; the exit code. `shown` is the command as the report's advice repeats it."""
    import msgspec

    from memledger.cli import output, reading
    from memledger.cli.incidents import FailureTap
    from memledger.findings.selection import Selection

    options = shown_options(asked, shown)
    tap = FailureTap() if asked.format_ != "json" else None
    wanted = Selection(asked.select, asked.ignore)
    redraw = (lambda report: _redraw(wanted.apply(report), options, asked)) if follow else None
    result = reading.read(
        files,
        [Path(f) for f in asked.rule_files],
        asked.gpu_total,
        redraw,
        model_config=asked.model_config,
        look_here=not asked.no_live,
        tap=tap,
    )
    result = msgspec.structs.replace(result, report=wanted.apply(result.report))
    if tap is not None:
        result, options = _with_incidents(result, options, asked, files, tap)
    if follow:
        output.clear_screen()
    return finish(result, options, asked)


def _with_incidents(
    result: ReadResult, options: Options, asked: Asked, files: Sequence[str], tap: FailureTap
) -> tuple[ReadResult, Options]:
    """What the report says of a failure in its log, and of one in an input without a server."""
    import msgspec

    from memledger.cli import incidents

    found = tap.report(result, asked.model_config, look_here=not asked.no_live)
    if found is None:
        return result, options
    command = " ".join(["memledger oom", *map(_quoted, files)])
    if not result.report.servers:
        told = (*result.nothing, f"It holds a failure on memory, though: {command}")
        return msgspec.structs.replace(result, nothing=told), options
    return result, msgspec.structs.replace(options, incidents=incidents.sentences(found), oom_command=command)


def shown_options(asked: Asked, command: str) -> Options:
    """What the report shows of what was asked for.

    Raises:
        click.UsageError: the options exclude each other.
    """
    from memledger.report.view import Options

    if asked.start is not None and asked.all_starts:
        raise click.UsageError("--start and --all-starts exclude each other.")
    return Options(
        rank=asked.rank,
        all_starts=asked.all_starts,
        start=asked.start,
        evidence=asked.evidence,
        unrecognized=asked.unrecognized,
        command=command,
        gpu_total=asked.gpu_total is not None,
        all_findings=asked.all_findings,
    )


def _redraw(report: Report, options: Options, asked: Asked) -> None:
    """The report so far, in place of the one before; on a terminal only (a file or pipe gets the last one)."""
    from memledger.cli import output

    if output.clear_screen():
        show(report, options, asked)


def finish(result: ReadResult, options: Options, asked: Asked, history: History | None = None) -> int:
    """Write the report and say how it went, as an exit code; `history`: its pools over time, where that is known already."""
    report = result.report
    try:
        shown = show(report, options, asked)
        if report.servers and (asked.html is not None or asked.format_ == "html"):
            _write_html(report, options, asked, history)
    except LookupError as error:
        raise click.UsageError(f"{error.args[0]}.") from error
    for problem in result.problems:
        app.say(f"memledger: {problem}")
    if not report.servers:
        if not result.problems:
            for sentence in result.nothing:
                app.say(f"memledger: {sentence}")
            return app.NOTHING_RECOGNISED
        return app.UNREADABLE
    if result.problems:
        return app.UNREADABLE
    return _judge(report, shown, asked.fail_on)


def _judge(report: Report, shown: list[int], fail_on: list[Condition]) -> int:
    if not fail_on:
        return app.DONE
    from memledger.conditions import not_judged, reasons

    servers = [report.servers[i] for i in shown]
    code = app.DONE
    for condition in fail_on:
        why = reasons(condition, servers)
        if why:
            app.say(f"memledger: --fail-on {condition.text}: {'; '.join(why[:4])}{' ...' if len(why) > 4 else ''}")
            code = app.CONDITION_HOLDS
        elif missing := not_judged(condition, servers):
            app.say(f"memledger: --fail-on {condition.text}: not judged for {missing[0]}")
    return code


def show(report: Report, options: Options, asked: Asked) -> list[int]:
    """Write the report to stdout; the indices of the servers that it shows in full."""
    from memledger.cli import output
    from memledger.report.view import choose_ranks, choose_servers

    shown = choose_servers(report, options)
    for index in shown:
        choose_ranks(report.servers[index], options.rank)
    if asked.format_ == "json":
        from memledger.report.json import encode

        output.write_bytes(encode(report))
    elif asked.format_ == "markdown":
        from memledger.report import markdown

        output.write(markdown.render(report, options))
    elif asked.format_ == "text" and (report.servers or (options.unrecognized and report.unrecognized.count)):
        from memledger.report import text

        output.write(text.render(report, options, output.style(asked.width, asked.no_color)))
    return shown


def _write_html(report: Report, options: Options, asked: Asked, history: History | None) -> None:
    from memledger.cli import html_output, reading
    from memledger.history import look_again
    from memledger.report import html

    rules = reading.rules([Path(f) for f in asked.rule_files])
    html_output.write(
        lambda: html.page(report, options, history or look_again(report, rules)), asked.format_, asked.html
    )


def _quoted(name: str) -> str:
    import shlex

    from memledger.sanitize import clean

    return shlex.quote(clean(name.encode("utf-8", "replace").decode()))
