"""`memledger fleet`: thousands of logs to one row per rank, and the worst of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from memledger.cli import app, overview
from memledger.cli.options import MODEL_CONFIG

if TYPE_CHECKING:
    from memledger.fleet.engine import Engine
    from memledger.fleet.journal import Journal
    from memledger.fleet.one import Settings
    from memledger.fleet.output import Places
    from memledger.fleet.sources import File, Found
    from memledger.fleet.summary import Summarizer
    from memledger.report.fleet_json import FleetReport

OUT: Final = "memledger-fleet"


class FleetError(click.ClickException):
    """The fleet can't be read with what is installed, or with what was asked for."""

    exit_code = app.WRONG_USAGE


def _group_by(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    from memledger.fleet.columns import GROUPABLE

    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    short = {"version": "framework_version", "engine": "framework_version"}
    names = () if names == ("none",) else tuple(short.get(name, name) for name in names)
    wrong = [name for name in names if name not in GROUPABLE]
    if wrong:
        from memledger.sanitize import clean

        raise click.BadParameter(f"no such column: {clean(wrong[0])}. There are: none, {', '.join(GROUPABLE)}.")
    return names


def _memory(ctx: click.Context, param: click.Parameter, value: str) -> int:
    from memledger.cards import parse_total

    try:
        return parse_total(value).amount.bytes
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no size; give one like 1GiB or 512MiB.") from error


def _card(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    from memledger.cli.options import gpu_total_of

    gpu_total_of(ctx, param, value)  # refused here, once, and not by every worker
    return value


@click.command("fleet", short_help=overview.COMMANDS["fleet"][1])
@click.argument("sources", nargs=-1, metavar="SOURCE...")
@click.option(
    "--files-from",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="A list of sources, one a line; - is standard input.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Only files of folders and URLs whose name matches: '*.log*'. Repeatable.",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Not the files whose name matches. Repeatable.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=OUT,
    show_default=True,
    metavar="DIR|FILE.parquet",
    help="Where the rows go: ranks.parquet, ranks.jsonl and the journal of what is done.",
)
@click.option(
    "--resume/--restart", default=True, help="Keep what is done and has not changed (the default), or do all again."
)
@click.option("--retry-failed", is_flag=True, help="Do the files again that could not be read.")
@click.option(
    "--group-by",
    callback=_group_by,
    default="model,version,gpu",
    show_default=True,
    metavar="COLUMNS",
    help="What the table is grouped by; none: the fleet as one.",
)
@click.option(
    "--top", type=click.IntRange(min=1), default=10, show_default=True, metavar="N", help="Rows of each table."
)
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", help="How to write the tables."
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    help="Processes of this machine, or tasks on a Ray cluster.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Files that are read at once (default: one a core)."
)
@click.option(
    "--ray-address",
    metavar="ADDRESS",
    help="The Ray cluster: auto, or ray://head:10001 (default: RAY_ADDRESS, else one of this machine).",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0.1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="For each file.",
)
@click.option(
    "--memory-limit", callback=_memory, default="1GiB", show_default=True, metavar="SIZE", help="For each file."
)
@click.option(
    "--gpu-total", callback=_card, metavar="SIZE|CARD", help="The card of all logs, where they do not print it."
)
@MODEL_CONFIG
@click.option(
    "--rules",
    "rule_files",
    multiple=True,
    metavar="FILE",
    help="A rule file of your own, before the bundled ones. Repeatable.",
)
@click.option(
    "--width",
    type=click.IntRange(min=60),
    metavar="COLUMNS",
    help="Width of the text (default: the terminal's; 80 when piped).",
)
@click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR).")
def command(sources: tuple[str, ...], files_from: Path | None, **options: Any) -> int:
    """Many logs: one row per rank in a Parquet file and in JSON lines, and a table of the worst.

    SOURCE is a log, a folder, a pattern, or a URL that fsspec knows (s3://, gs://, hdfs://); compressed or not. What is done is kept:
    the same command goes on where it ended, and reads only files that are new or changed. A file that can't be read is a row that says so.
    """
    from memledger.cli import reading
    from memledger.fleet import output

    if not sources and files_from is None:
        raise click.UsageError(
            "Give logs, folders, patterns or URLs: memledger fleet /var/log/llm 's3://bucket/logs/*.log.zst'."
        )
    try:
        output.require("ray" if options["engine"] == "ray" else "fleet")
    except output.MissingExtraError as error:
        raise FleetError(str(error)) from error
    settings = _settings(options)
    reading.rules(
        [Path(name) for name in settings.rule_files]
    )  # a rule file that can't be used is said before anything is read
    places = _places(options["out"])
    found = _find([*sources, *_list(files_from)], options, places)
    for problem in found.problems:
        app.say(f"memledger: {_shown(problem)}")
    if not found.files:
        return app.UNREADABLE
    report, interrupted = _run(found, places, settings, options)
    _show(report, options)
    return _exit_code(report, interrupted)


def _exit_code(report: FleetReport, interrupted: bool) -> int:
    if interrupted:
        return app.INTERRUPTED
    if report.problems or set(report.fleet.statuses) <= {"unreadable"}:
        return app.UNREADABLE
    if set(report.fleet.statuses) <= {"unreadable", "nothing_recognised"}:
        return app.NOTHING_RECOGNISED
    return app.DONE


def _settings(options: dict[str, Any]) -> Settings:
    from memledger.fleet.one import Settings

    config: Path | None = options["model_config"]
    if config is not None:
        from memledger.model.find import ModelConfigError, find

        try:
            find(None, config=config)
        except ModelConfigError as error:
            raise click.UsageError(f"--model-config: {_shown(str(error))}") from error
    return Settings(
        rule_files=tuple(os.path.abspath(name) for name in options["rule_files"]),  # noqa: PTH100
        gpu_total=options["gpu_total"],
        model_config=os.path.abspath(config) if config is not None else None,  # noqa: PTH100
        time_limit_s=options["time_limit"],
        memory_limit_bytes=options["memory_limit"],
    )


def _places(out: Path) -> Places:
    from memledger.cli.output import WriteError
    from memledger.fleet import output

    if out.parts and out.parts[0].endswith(":"):  # a path has lost one of the slashes
        raise click.UsageError("--out is a folder or file of this machine; copy its files to the store afterwards.")
    places = output.places(out)
    try:
        output.prepare(places)
    except OSError as error:
        raise WriteError(f"--out {click.format_filename(out)}: {error.strerror}") from error
    return places


def _list(file: Path | None) -> list[str]:
    if file is None:
        return []
    from memledger.fleet.sources import listed

    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise click.UsageError(f"--files-from {click.format_filename(file)}: {error.strerror}.") from error
    return listed(os.fsdecode(data))


def _find(sources: Sequence[str], options: dict[str, Any], places: Places) -> Found:
    from memledger.fleet.sources import Choice, find

    return find(sources, Choice(options["include"], options["exclude"]), places.all)


def _run(found: Found, places: Places, settings: Settings, options: dict[str, Any]) -> tuple[FleetReport, bool]:
    """Read what is not done, write all rows; whether it was interrupted."""
    from memledger import __version__
    from memledger.cli.output import WriteError
    from memledger.fleet.journal import Journal, JournalError
    from memledger.fleet.run import write
    from memledger.fleet.summary import Summarizer
    from memledger.report.fleet_json import FleetReport, Outputs

    summarizer: Summarizer = Summarizer(options["group_by"], options["top"])
    try:
        with Journal(places.journal, settings) as journal:
            if not options["resume"]:
                journal.restart()
            read, kept, interrupted = _read(found.files, journal, settings, options)
            summary, rows, left = write(found.files, journal, places, summarizer)
    except (JournalError, OSError) as error:
        raise WriteError(_shown(getattr(error, "strerror", None) or str(error)).removesuffix(".")) from error
    outputs = Outputs(_shown(str(places.parquet)), _shown(str(places.lines)), rows)
    problems = tuple(map(_shown, found.problems))
    return FleetReport(__version__, summary, outputs, read, kept, left, problems), interrupted


def _read(
    files: Sequence[File], journal: Journal, settings: Settings, options: dict[str, Any]
) -> tuple[int, int, bool]:
    """Read what is not done: files read, files done before, whether it was interrupted."""
    from memledger.cli.reading import interrupted
    from memledger.fleet.engine import EngineError
    from memledger.fleet.run import not_done, read

    todo = not_done(files, journal, retry_failed=options["retry_failed"])
    kept = len(files) - len(todo)
    if not todo:
        return 0, kept, False
    progress, finish = _progress(len(todo))
    try:
        # Ray takes SIGTERM for itself as it starts: the engine first.
        with _engine(settings, options, len(todo)) as engine, interrupted() as ended:
            count = read(todo, engine, journal, ended=ended, progress=progress)
            return count, kept, ended()
    except EngineError as error:
        raise FleetError(_shown(str(error))) from error
    finally:
        finish()


def _engine(settings: Settings, options: dict[str, Any], files: int) -> Engine:
    if options["engine"] == "ray":
        from memledger.fleet.ray_engine import RayEngine

        return RayEngine(settings, address=options["ray_address"], workers=options["workers"])
    if options["ray_address"] is not None:
        raise click.UsageError("--ray-address goes with --engine ray.")
    from memledger.ahead import usable_cores
    from memledger.fleet.local import LocalEngine

    return LocalEngine(min(files, options["workers"] or usable_cores()), settings)


def _progress(total: int) -> tuple[Callable[[File, str], None] | None, Callable[[], None]]:
    """A bar on a terminal's stderr, and what ends its line."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None, lambda: None
    bar: Any = click.progressbar(length=total, label="reading", file=sys.stderr, show_pos=True)
    bar.render_progress()
    return lambda file, status: bar.update(1), bar.render_finish


def _show(report: FleetReport, options: dict[str, Any]) -> None:
    from memledger.cli import output

    if options["format_"] == "json":
        from memledger.report.fleet_json import encode

        output.write_bytes(encode(report))
    else:
        from memledger.report.fleet_text import render

        output.write(render(report, output.style(options["width"], options["no_color"])))


def _shown(text: str) -> str:
    from memledger.sanitize import clean

    return clean(text.encode("utf-8", "replace").decode(), 4096)
