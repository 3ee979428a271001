"""`memledger sweep`: context and concurrency raised on a running server, and what moves with them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from memledger.cli import app, overview
from memledger.cli.options import HTML

if TYPE_CHECKING:
    import httpx

    from memledger.ledger import Input
    from memledger.sweep.machine import Machine
    from memledger.sweep.prompts import IdPrompts, TextPrompts
    from memledger.sweep.runner import Runner
    from memledger.sweep.server import Counters, Place
    from memledger.sweep.values import Event, Settings, Sweep, Target

Value = TypeVar("Value")

MOST_TOKENS: Final = 20_000_000
MOST_TOKENS_SOAK: Final = 1_000_000_000
QUIET_S: Final = 1.0
"""For so long a server must have answered nobody to count as idle."""
LARGEST_DATA: Final = 64 * 2**20
TEXT_OF_TOKENS: Final = 4_000_000
"""Characters of a data file that are turned into tokens."""


class SweepError(click.ClickException):
    """The server can't be measured, or the results can't be read."""

    exit_code = app.UNREADABLE


class SweepUsageError(SweepError):
    """What the user asked for can't be done as it was asked."""

    exit_code = app.WRONG_USAGE


class ResultsError(SweepError):
    """The results can't be written."""

    exit_code = 74


def _read(with_: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback that reads an option's text with a function of `memledger.sweep.steps`."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        from memledger.sanitize import clean
        from memledger.sweep import steps

        try:
            return getattr(steps, with_)(value)
        except ValueError as error:
            raise click.BadParameter(f"{clean(str(error))}.") from error

    return callback


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    from memledger.cards import parse_total

    if value.strip() == "0":
        return 0
    try:
        return parse_total(value).amount.bytes
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no size; give one like 1GiB or 512MiB.") from error


@click.command("sweep", short_help=overview.COMMANDS["sweep"][1])
@click.argument("url", required=False, metavar="URL")
@click.option("--contexts", callback=_read("counts"), default="8k,32k,64k,128k", show_default=True, metavar="TOKENS,...",
              help="Tokens of a prompt, exactly.")  # fmt: skip
@click.option(
    "--concurrency",
    callback=_read("counts"),
    default="1,4",
    show_default=True,
    metavar="N,...",
    help="Requests at once.",
)
@click.option("--duration", callback=_read("seconds"), default="60s", show_default=True, metavar="TIME",
              help="Each step sends requests for so long, at least one in each place.")  # fmt: skip
@click.option(
    "--requests", type=click.IntRange(min=1), metavar="N", help="So many requests in each step, instead of a duration."
)
@click.option(
    "--output-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    metavar="N",
    help="Tokens of an answer.",
)
@click.option("--model", metavar="NAME", help="The model to ask for, where the server has several.")
@click.option(
    "--dataset", type=click.Path(path_type=Path), metavar="FILE", help="Text or JSON lines that prompts are made of."
)
@click.option("--shared-prefix", type=click.FloatRange(0, 0.99), default=0.0, metavar="SHARE",
              help="Share of each prompt that all have in common, to measure the prefix cache: 0.9.")  # fmt: skip
@click.option(
    "--soak", callback=_read("seconds"), metavar="TIME", help="After the steps, the largest one for so long: 4h."
)
@click.option(
    "--slo", callback=_read("slo"), metavar="LIMITS", help="Limits of the 99th percentiles: ttft=2s,tpot=50ms."
)
@click.option(
    "--gpu-hour", type=click.FloatRange(min=0, min_open=True), metavar="PRICE", help="What an hour of one GPU costs."
)
@click.option(
    "--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs of the server, where they are not seen here."
)
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    metavar="PID",
    help="The server's process on this machine (else found by its port).",
)
@click.option("--memory-floor", callback=_size, default="512MiB", show_default=True, metavar="SIZE",
              help="Stop before a device (of a CPU server: the host) has less free.")  # fmt: skip
@click.option("--to-failure", is_flag=True, help="Go on below the floor, until the server fails.")
@click.option(
    "--max-tokens",
    callback=_read("counts"),
    metavar="N",
    help="Hard cap on all tokens, prompts and answers [20,000,000; with --soak 1,000,000,000].",
)
@click.option("--max-time", callback=_read("seconds"), default="2h", show_default=True, metavar="TIME",
              help="Hard cap on the time of all steps; a soak comes on top.")  # fmt: skip
@click.option(
    "--request-timeout",
    callback=_read("seconds"),
    default="10min",
    show_default=True,
    metavar="TIME",
    help="Of one request.",
)
@click.option("--yes", is_flag=True, help="Do not ask, even where the server is serving others.")
@click.option("--api-key-env", metavar="NAME", help="The environment variable that holds the server's API key.")
@click.option("--proxy", is_flag=True, help="Use the proxy that the environment names (never otherwise).")
@click.option("--results", type=click.Path(path_type=Path), metavar="FILE",
              help="Where results are written as they come [memledger-sweep-TIME.jsonl].")  # fmt: skip
@click.option(
    "--read",
    "read_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="No sweep: the report of a results file.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json", "csv", "html"]),
    default="text",
    help="How to write the report.",
)
@HTML
@click.option("--width", type=click.IntRange(min=40), metavar="COLUMNS", help="Width of the text.")
@click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR).")
def command(**options: Any) -> int:
    """Raise context and concurrency on a running server, all else held still, and see which account moves.

    URL is an OpenAI-compatible server: http://127.0.0.1:8000. It is sent requests, and nothing else is changed. Ctrl-C keeps what
    was measured.
    """
    if options["html"] is not None or options["format_"] == "html":
        from memledger.cli import html_output

        html_output.check(options["format_"], options["html"])
    if options["read_file"] is not None:
        if options["url"] is not None:
            raise click.UsageError("--read shows a results file: it takes no URL.")
        return _from_file(options["read_file"], options)
    if options["url"] is None:
        raise click.UsageError("Give the server to measure: memledger sweep http://127.0.0.1:8000.")
    if importlib.util.find_spec("httpx") is None:
        from memledger.extras import install_command

        raise click.UsageError(f"memledger sweep needs httpx: {install_command('sweep')}")
    return _sweep(options)


def _from_file(path: Path, options: dict[str, Any]) -> int:
    from memledger.ledger import Input
    from memledger.sweep import journal, judge

    try:
        events, notes = journal.read(path)
    except journal.JournalError as error:
        raise SweepError(f"{error}.") from error
    inputs = (Input(str(path), path.stat().st_size, len(events)),)
    return _finish(judge.sweep(events, notes), options, inputs)


def _sweep(options: dict[str, Any]) -> int:
    import asyncio

    from memledger.sweep import journal, judge
    from memledger.sweep.server import ServerError, place

    try:
        where = place(options["url"])
        name = options["results"] or Path(_default_name())
        writer = journal.Writer(name)
    except ServerError as error:
        raise SweepUsageError(f"{error}.") from error
    except journal.JournalError as error:
        raise ResultsError(f"{error}.") from error
    events: list[Event] = []

    def tell(event: Event) -> None:
        events.append(event)
        writer.write(event)

    try:
        asyncio.run(_measured(where, options, tell, name))
    except ServerError as error:
        raise SweepError(f"{error}.") from error
    except journal.JournalError as error:
        app.say(f"memledger: {error}; the report is of what was measured until then.")
    finally:
        writer.close()
        if not events:
            name.unlink(missing_ok=True)  # nothing was measured
    return _finish(judge.sweep(events), options, ())


def _default_name() -> str:
    from datetime import datetime

    return f"memledger-sweep-{datetime.now().astimezone():%Y%m%d-%H%M%S}.jsonl"


async def _measured(where: Place, options: dict[str, Any], tell: Callable[[Event], None], name: Path) -> None:
    """Find out about the server, ask the user where that is due, and run."""
    import asyncio

    from memledger import __version__
    from memledger.cli.ps import key_from
    from memledger.sweep import server
    from memledger.sweep.runner import Plan, Runner
    from memledger.sweep.values import Begun

    key = key_from(options["api_key_env"])
    most = max(options["concurrency"])
    async with server.client(where, key, connections=most + 4, proxy=options["proxy"]) as client:
        model = await server.model(client, options["model"])
        counters = await server.counters(client)
        await _ask_first(client, counters, options)
        machine = await asyncio.to_thread(_machine, where, options["pid"], key)
        try:
            prompts, seed = await _prompts(client, model.name, options)
            settings = _settings(where, options, seed)
            version = await server.version(client, counters.framework)
            target = await asyncio.to_thread(_target, model, counters, version, prompts, machine)
            plan = Plan(settings, target, within_s=options["request_timeout"])
            tell(Begun(__version__, _now(), settings, target))
            app.say(f"memledger: results go to {click.format_filename(name)} as they come; Ctrl-C ends and keeps them")
            runner = Runner(plan, client, prompts, tell=tell, say=_progress, machine=machine)
            with _interruptible(runner):
                await runner.run()
        finally:
            if machine is not None:
                machine.close()


def _progress(text: str) -> None:
    app.say(f"memledger: {text}")


def _now() -> str:
    from memledger.live.gather import now

    return now()


def _settings(where: Place, options: dict[str, Any], seed: int) -> Settings:
    from memledger.sweep.values import Settings

    soak = options["soak"]
    most_tokens = options["max_tokens"][0] if options["max_tokens"] else MOST_TOKENS_SOAK if soak else MOST_TOKENS
    return Settings(
        url=where.base.rstrip("/"),
        contexts=options["contexts"],
        concurrency=options["concurrency"],
        output_tokens=options["output_tokens"],
        duration_s=options["duration"],
        requests=options["requests"],
        shared_prefix=options["shared_prefix"],
        to_failure=options["to_failure"],
        memory_floor_bytes=options["memory_floor"],
        most_tokens=most_tokens,
        most_seconds=options["max_time"] + (soak or 0.0),
        slo=options["slo"],
        gpu_hour=options["gpu_hour"],
        gpus=options["gpus"],
        soak_s=soak,
        seed=seed,
    )


# --------------------------------------------------------------------------------------------------- before it begins


async def _ask_first(client: httpx.AsyncClient, counters: Counters, options: dict[str, Any]) -> None:
    """Where others are served, or it can't be told, the user decides.

    Raises:
        SweepError: nobody is there to be asked.
        click.Abort: the user said no.
    """
    if options["yes"]:
        return
    why = await _others(client, counters)
    if why is None:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise SweepUsageError(f"{why}: a sweep would slow its users down; --yes says that it may.")
    if not click.confirm(f"memledger: {why}. A sweep would slow its users down. Go on?", err=True):
        raise click.Abort


async def _others(client: httpx.AsyncClient, counters: Counters) -> str | None:
    """Why the server may be serving others; None where it is idle: nothing runs, and nothing was counted for a moment."""
    import asyncio

    from memledger.sweep import server
    from memledger.words import plural

    if counters.metrics is None or counters.metrics.running_requests is None:
        return "the server serves no metrics, so it can't be told whether others use it"
    await asyncio.sleep(QUIET_S)
    again = await server.counters(client)
    for seen in (counters, again):
        if seen.metrics is None:
            return "the server's metrics come and go, so it can't be told whether others use it"
        busy = (seen.metrics.running_requests or 0) + (seen.metrics.queued_requests or 0)
        if busy:
            return f"the server is serving {plural(busy, 'request')} of others"
    if counters.totals is not None and again.totals is not None and again.totals.since(counters.totals).requests:
        return "the server is serving others: it answered requests just now"
    return None


def _machine(where: Place, pid: int | None, key: str | None) -> Machine | None:
    """The machine beside the server, where it runs here."""
    from memledger.sweep import machine

    found = pid if pid is not None else machine.pid_of_port(where.port) if where.loopback else None
    if found is None:
        return None
    try:
        return machine.Machine(found, key)
    except machine.MachineError as error:
        if pid is not None:
            raise SweepError(f"--pid {pid}: {error}") from error
        return None


async def _prompts(
    client: httpx.AsyncClient, model: str, options: dict[str, Any]
) -> tuple[IdPrompts | TextPrompts, int]:
    """What makes the prompts, and the seed that keeps them apart from those of other runs."""
    import secrets

    from memledger.sweep import prompts, server

    seed = secrets.randbits(31) | 1
    text = _text(options["dataset"])
    ids = await server.token_ids(client, model, text[:TEXT_OF_TOKENS])
    try:
        if ids is not None:
            return prompts.IdPrompts(ids, seed, options["shared_prefix"]), seed
        return prompts.TextPrompts(text, seed, options["shared_prefix"]), seed
    except prompts.PromptError as error:
        raise SweepError(f"{error}.") from error


def _text(path: Path | None) -> str:
    from memledger.sweep import prompts

    if path is None:
        return prompts.TEXT
    try:
        if path.stat().st_size > LARGEST_DATA:
            raise SweepError(f"--dataset: larger than {LARGEST_DATA // 2**20} MiB.")
        data = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise SweepError(f"--dataset {click.format_filename(path)}: {error.strerror or error}.") from error
    import json

    return prompts.texts_of(data, json.loads)


def _target(model: Any, counters: Counters, version: str | None, prompts: Any, machine: Machine | None) -> Target:
    from memledger.sweep.prompts import IdPrompts
    from memledger.sweep.values import Target

    by_ids = isinstance(prompts, IdPrompts)
    notes = []
    if not by_ids:
        notes.append("the server has no /tokenize: prompts were sized by its usage figures")
    if counters.metrics is None:
        notes.append("the server serves no metrics: nothing is known of its queue, pools and counters")
    found = machine.read() if machine is not None else None
    if found is not None and found.reason:
        notes.append(f"the server's log: {found.reason}")
    return Target(
        framework=counters.framework,
        framework_version=version,
        model=model.name,
        longest=model.longest,
        tokens_by="token ids" if by_ids else "usage",
        pid=found.pid if found else None,
        gpus=(found.gpus or None) if found else None,
        gpu_name=found.gpu_name if found else None,
        pool_bytes=found.pool_bytes if found else None,
        bytes_per_token=found.bytes_per_token if found else None,
        state_bytes_per_request=found.state_bytes_per_request if found else None,
        notes=tuple(notes),
    )


class _interruptible:  # noqa: N801
    """While it holds, Ctrl-C and a request to end stop the run and keep its results; a second one ends the program."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __enter__(self) -> None:
        import asyncio
        import contextlib
        import signal

        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                self._loop.add_signal_handler(number, self._end)

    def _end(self) -> None:
        app.say("memledger: ending; what was measured is kept")
        self._runner.interrupt()
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        import signal

        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


# -------------------------------------------------------------------------------------------------------- the report


def _finish(sweep: Sweep, options: dict[str, Any], inputs: Sequence[Input]) -> int:
    from memledger import __version__
    from memledger.cli import output
    from memledger.report import sweep_json
    from memledger.sweep.values import SweepReport

    report = SweepReport(__version__, sweep, inputs=tuple(inputs))
    if options["format_"] == "json":
        output.write_bytes(sweep_json.encode(report))
    elif options["format_"] == "csv":
        output.write_bytes(sweep_json.to_csv(sweep).encode())
    elif options["format_"] == "text":
        from memledger.report.sweep_text import render

        output.write(render(report, output.style(options["width"], options["no_color"])))
    if options["html"] is not None or options["format_"] == "html":
        from memledger.cli import html_output
        from memledger.report import sweep_page

        html_output.write(lambda: sweep_page.page(report), options["format_"], options["html"])
    return _code(sweep)


def compared(files: Sequence[str], options: dict[str, Any]) -> int:
    """`memledger compare` of two results files; the exit code."""
    from memledger import __version__
    from memledger.cli import output
    from memledger.ledger import Input
    from memledger.report import sweep_compare
    from memledger.sweep import compare, journal, judge

    if len(files) != 2 or not all(map(journal.is_file_of_results, files)):
        raise click.UsageError("Results of memledger sweep are compared two at a time, and with each other only.")
    if options["format_"] not in {"text", "json"} or options["html"] is not None or options["limits"]:
        raise click.UsageError("Two sweeps are compared as text or JSON, without --max-regression.")
    try:
        read = [journal.read(Path(file)) for file in files]
    except journal.JournalError as error:
        raise SweepError(f"{error}.") from error
    first, second = (judge.sweep(events, notes) for events, notes in read)
    inputs = tuple(
        Input(file, Path(file).stat().st_size, len(events)) for file, (events, _) in zip(files, read, strict=True)
    )
    found = compare.compare(first, second, (files[0], files[1]))
    report = compare.SweepCompareReport(__version__, found, inputs)
    if options["format_"] == "json":
        output.write_bytes(sweep_compare.encode(report))
    else:
        output.write(sweep_compare.render(report, output.style(options["width"], options["no_color"])))
    return app.DONE


def _code(sweep: Sweep) -> int:
    """130 where it was interrupted, 1 where a step failed or no step kept the limits, 4 where nothing was measured."""
    if sweep.interrupted:
        return app.INTERRUPTED
    if not any(one.requests or one.failed for one in sweep.steps):
        return app.UNREADABLE
    if any(one.verdict == "failed" for one in sweep.steps):
        return app.CONDITION_HOLDS
    if sweep.settings.slo is not None and sweep.answers.best_at_slo is None:
        return app.CONDITION_HOLDS
    return app.DONE
