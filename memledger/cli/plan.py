"""`memledger plan`: what other settings would give, and the smallest reservation that serves a load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memledger.cli import app, overview
from memledger.cli.options import HTML, MODEL_CONFIG

if TYPE_CHECKING:
    from memledger.cards import Total
    from memledger.ledger import Input, Server, Source
    from memledger.model.architecture import Architecture
    from memledger.model.find import Found
    from memledger.plan_values import Plan, Target

_VERSION = re.compile(r"v?[0-9]{1,4}(?:\.[0-9]{1,8}){1,3}(?:(?:[.-]?(?:a|b|rc|post|dev)|\+)[0-9A-Za-z.+-]{0,60})?")
"""A version as Python packages and git tags have it; what follows the release is not read."""
_ROUNDING = 2**24
"""Bytes by which a reading printed in GiB with two decimals may be off, and some."""


class ConfigUnreadableError(click.ClickException):
    """The model's config.json can't be used."""

    exit_code = app.UNREADABLE


def _settings(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    if not values:
        return {}
    from memledger.plan_settings import parse

    found: dict[str, Any] = {}
    try:
        for one in values:
            for name, value in parse([one]).items():
                if found.setdefault(name, value) != value:
                    raise click.BadParameter(f"{name} is set twice, to different values.")
    except ValueError as error:
        raise click.BadParameter(_shown(str(error))) from error
    return found


def _count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
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


def _version(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    from memledger.model.versions import release

    if value is None or (_VERSION.fullmatch(value) and release(value) is not None):
        return value
    raise click.BadParameter(f"{_shown(value)!r} is no version, such as 0.5.23.")


def _shown(text: str) -> str:
    from memledger.sanitize import clean

    return clean(text.encode("utf-8", "replace").decode())


@click.command("plan", short_help=overview.COMMANDS["plan"][1])
@click.argument("files", nargs=-1, metavar="[LOG]...")
@click.option("--concurrency", callback=_count, metavar="N", help="Requests that are to run at once (with --context).")
@click.option(
    "--context", callback=_count, metavar="TOKENS", help="Tokens of each request, prompt and answer: 131072, or 128k."
)
@click.option("--keep-prefixes", callback=_count, metavar="N", help="Cached prefixes whose state is to stay (SGLang).")
@click.option(
    "--set",
    "settings",
    callback=_settings,
    multiple=True,
    metavar="NAME=VALUE",
    help="Another setting: state_dtype=bfloat16, memory_fraction=0.9, pool_bytes=40GiB. Repeatable.",
)
@click.option("--framework", type=click.Choice(["sglang", "vllm"]), help="Without a log: the engine.")
@click.option(
    "--framework-version", callback=_version, metavar="VERSION", help="The engine's version, where no log prints it."
)
@MODEL_CONFIG
@click.option(
    "--draft-config",
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="The draft model's config.json, for speculative decoding by another model.",
)
@click.option("--model", metavar="NAME", help="Without a log: a model of the bundled table, or of the local cache.")
@click.option(
    "--gpu",
    callback=_total,
    metavar="CARD|SIZE",
    help="The card or its memory: h100-80, 4090, 80GiB; with a log, the log's own card.",
)
@click.option("--start", type=click.IntRange(min=1), metavar="N", help="Plan for the Nth start in the log.")
@click.option(
    "--format", "format_", type=click.Choice(["text", "json", "html"]), default="text", help="How to write the plan."
)
@HTML
@click.option("--no-live", is_flag=True, help="Look at nothing but the files named: no model folder or cache.")
@click.option(
    "--rules",
    "rule_files",
    multiple=True,
    metavar="FILE",
    help="A rule file of your own, before the bundled ones. Repeatable.",
)
@click.option("--width", type=click.IntRange(min=40), metavar="COLUMNS", help="Width of the text.")
@click.option("--no-color", is_flag=True, help="No colours (there are none; for scripts that pass it everywhere).")
@click.pass_context
def command(ctx: click.Context, /, files: tuple[str, ...], **options: Any) -> None:
    """What other settings would give: memory by account, capacity, the limit that binds, the exact flags.

    With a log: memledger plan server.log --concurrency 4 --context 128k, or --set state_dtype=bfloat16. Without one:
    --framework and --framework-version, --model-config or --model, and --set pool_bytes=40GiB or --gpu h100-80.
    """
    from memledger.plan_values import Target

    target = Target(options["concurrency"], options["context"], options["keep_prefixes"] or 0)
    if target.concurrency is not None and target.context is None:
        raise click.UsageError("--concurrency needs --context: how long is each request?")
    if target.cached_prefixes and target.concurrency is None:
        raise click.UsageError("--keep-prefixes needs --concurrency and --context: it keeps them beside that load.")
    if not files and options["start"] is not None:
        raise click.UsageError("--start is for plans from a log.")
    if files and (options["framework"] or options["model"]):
        raise click.UsageError("--framework and --model are for plans without a log; the log names both.")
    if not files and not options["framework"]:
        raise click.UsageError(
            "Give a log (memledger plan server.log ...), or --framework with --model-config or --model."
        )
    if not files and options["model_config"] is None and options["model"] is None:
        raise click.UsageError("Without a log, --model-config FILE or --model NAME says what is to be served.")
    if files and not options["settings"] and target.context is None:
        raise click.UsageError("Nothing to plan: give --concurrency and --context, or --set NAME=VALUE.")
    _agree(target, options["settings"])
    if options["html"] is not None or options["format_"] == "html":
        from memledger.cli import html_output

        html_output.check(options["format_"], options["html"])
    ctx.exit(_run(files, target, options))


def _agree(target: Target, settings: dict[str, Any], slots_each: int | None = None) -> None:
    """Refuse settings that can't hold the load asked for; `slots_each`: state slots of a running request."""
    running, length, slots = (settings.get(name) for name in ("max_running_requests", "context_length", "state_slots"))
    if target.context is not None and length is not None and length < target.context:
        raise click.UsageError(f"--set context_length={length} contradicts --context {target.context}.")
    if target.concurrency is None:
        return
    if running is not None and running < target.concurrency:
        raise click.UsageError(f"--set max_running_requests={running} contradicts --concurrency {target.concurrency}.")
    needed = target.concurrency * (slots_each or 1)
    if slots is not None and slots < needed:
        raise click.UsageError(
            f"--set state_slots={slots} contradicts --concurrency {target.concurrency}: that takes {needed} slots at least."
        )


def _heard(target: Target, effective: dict[str, Any], settings: dict[str, Any], plan: Plan) -> None:
    """Refuse settings that the smallest reservation for a load replaces.

    With data parallelism the flags are totals and the plan's capacities of one engine, so they are not compared.
    """
    if target.concurrency is None or plan.after is None or plan.feasible is False:
        return
    if (effective.get("dp_size") or 1) > 1:
        return
    for name in ("max_running_requests", "state_slots"):
        wanted, given = settings.get(name), getattr(plan.after.capacity, name)
        if wanted is not None and given is not None and wanted != given:
            raise click.UsageError(
                f"--set {name}={wanted} and --concurrency: the load asked for decides it ({given}); leave one of them out."
            )


def _same_version(given: str | None, server: Server) -> None:
    """Refuse another version than the log's: its figures come from the engine that printed them."""
    from memledger.model.versions import is_placeholder, release

    logged = server.framework_version
    if given is not None and logged is not None and not is_placeholder(logged) and release(logged) != release(given):
        raise click.UsageError(
            f"--framework-version {_shown(given)} contradicts the log, which is of {_shown(logged)};"
            " give it only where the log prints no version."
        )


def _same_card(options: dict[str, Any], server: Server) -> None:
    """Refuse a card for the log that the log shows not to be its card."""
    total = options["gpu"]
    if total is None:
        return
    largest = total.amount.bytes + total.amount.tolerance
    for rank in server.ranks:
        free = max((stage.free_before_bytes or 0 for stage in rank.stages), default=0)
        if free > largest + _ROUNDING:
            raise click.UsageError(
                "--gpu: the log shows more free memory than that card has; --gpu names the log's own card,"
                " --set gpu_total_bytes=SIZE asks for another."
            )
        known = rank.gpu.total_bytes
        if known is not None and abs(known - total.amount.bytes) > max(total.amount.tolerance, known // 50):
            raise click.UsageError(
                "--gpu: the log prints another total for its card; --gpu names the log's own card,"
                " --set gpu_total_bytes=SIZE asks for another."
            )


def _run(files: tuple[str, ...], target: Target, options: dict[str, Any]) -> int:
    """Read, plan, write; the exit code."""
    from memledger.ledger import Source
    from memledger.model.architecture import NotModelledError
    from memledger.plan import Facts, choose_server, make_plan, refused, which_start

    server: Server | None = None
    chosen: str | None = None
    inputs: tuple[Input, ...] = ()
    sources: tuple[Source, ...] = ()
    problems: tuple[str, ...] = ()
    if files:
        from memledger import pipeline
        from memledger.cli import reading

        got = pipeline.read(files, reading.rules([Path(f) for f in options["rule_files"]]))
        inputs, sources, problems = got.report.inputs, got.report.sources, tuple(map(_shown, got.problems))
        for sentence in problems or reading.nothing_recognised(got):
            app.say(f"memledger: {sentence}")
        if not got.report.servers:
            _write(None, inputs, sources, options)
            return app.UNREADABLE if problems else app.NOTHING_RECOGNISED
        try:
            server = choose_server(got.report.servers, options["start"])
        except LookupError as error:
            raise click.UsageError(f"{error.args[0]}.") from error
        chosen = which_start(got.report.servers, server, asked=options["start"] is not None)
        _same_version(options["framework_version"], server)
        _same_card(options, server)
    engine = server.framework if server is not None else options["framework"]
    if engine == "vllm" and target.cached_prefixes:
        raise click.UsageError("--keep-prefixes: SGLang only; vLLM sets nothing aside for cached prefixes.")
    _check(options, engine, server)
    try:
        found = _architecture(server, options)
        draft, draft_how = _draft(server, options)
    except ConfigUnreadableError as error:
        if options["format_"] == "json":
            _write(None, inputs, (*sources, Source("model", "unavailable", error.message.removesuffix("."))), options)
        raise
    model = Source("model", "ok" if found.architecture is not None else "unavailable", found.how)
    gpu = options["gpu"]
    facts = Facts(
        engine,
        options["framework_version"],
        found.architecture,
        found.how,
        gpu.amount if gpu is not None else None,
        gpu.label if gpu is not None else None,
        draft,
        draft_how,
        chosen,
    )
    try:
        plan = make_plan(server, options["settings"], target, facts)
    except NotModelledError as error:
        plan = refused(server, options["settings"], target, facts, error)
    if plan.after is not None:
        _agree(target, options["settings"], plan.after.capacity.slots_per_request)
        _heard(
            target, {**(server.config if server is not None else {}), **options["settings"]}, options["settings"], plan
        )
    _write(plan, inputs, (*sources, model), options)
    if problems:
        return app.UNREADABLE
    if plan.after is None:
        return app.NOTHING_RECOGNISED
    return app.CONDITION_HOLDS if plan.feasible is False else app.DONE


def _check(options: dict[str, Any], engine: str, server: Server | None) -> None:
    """Refuse values that the engine refuses."""
    from memledger.plan_settings import check

    try:
        version = options["framework_version"] or (server.framework_version if server is not None else None)
        check(options["settings"], engine, server.config if server is not None else None, version)
    except ValueError as error:
        raise click.UsageError(f"--set {_shown(str(error))}.") from error


def _architecture(server: Server | None, options: dict[str, Any]) -> Found:
    from memledger.model.find import ModelConfigError, find

    model = options["model"] or (server.model if server is not None else None)
    try:
        found = find(model, config=options["model_config"], look_here=not options["no_live"])
    except ModelConfigError as error:
        raise ConfigUnreadableError(f"--model-config: {_shown(str(error))}.") from error
    return (
        found if found.architecture is not None or options["model"] is None else _with_nearest(found, options["model"])
    )


def _with_nearest(found: Found, name: str) -> Found:
    """A model that the user named and that is not there, with the one of the table whose name is most like it."""
    from memledger.model import table
    from memledger.nearest import nearest

    near = nearest(table.base_name(name), [table.base_name(known) for known in table.names()])
    return found if near is None else type(found)(None, f"did you mean {near}? {found.how}")


def _draft(server: Server | None, options: dict[str, Any]) -> tuple[Architecture | None, str | None]:
    """The draft model's architecture, and where it comes from: --draft-config, or the model that settings or log name."""
    from memledger.model.find import ModelConfigError, find

    settings = options["settings"]
    config = dict(server.config) if server is not None else {}
    asked = {**config, **settings}
    if options["draft_config"] is not None:
        if not any(one.get("speculative_algorithm") for one in (config, settings)):
            raise click.UsageError(
                "--draft-config: neither the log nor a setting has speculative decoding; --set speculative_algorithm=NAME."
            )
        try:
            found = find(None, config=options["draft_config"])
        except ModelConfigError as error:
            raise ConfigUnreadableError(f"--draft-config: {_shown(str(error))}.") from error
        return found.architecture, f"--draft-config {_shown(str(options['draft_config']))}"
    name = asked.get("speculative_draft_model") or asked.get("speculative_model")
    if not isinstance(name, str) or not asked.get("speculative_algorithm"):
        return None, None
    model = options["model"] or (server.model if server is not None else None)
    if name == model:
        return None, None
    found = find(name, look_here=not options["no_live"])
    return found.architecture, found.how if found.architecture is not None else None


def _write(plan: Plan | None, inputs: tuple[Input, ...], sources: tuple[Source, ...], options: dict[str, Any]) -> None:
    from memledger.cli import output

    if options["format_"] == "json":
        from memledger import __version__
        from memledger.plan_values import PlanReport
        from memledger.report.plan_json import encode

        output.write_bytes(encode(PlanReport(__version__, inputs, sources, plan)))
    elif plan is not None and plan.after is None:
        from memledger.report.plan_text import answer

        app.say(f"memledger: {answer(plan)}{f' Planned for {plan.assumptions[0]}.' if plan.assumptions else ''}")
    elif plan is not None and options["format_"] == "text":
        from memledger.report.plan_text import render

        output.write(render(plan, output.style(options["width"], no_color=True)))
    if plan is not None and plan.after is not None and (options["html"] is not None or options["format_"] == "html"):
        from memledger.cli import html_output
        from memledger.report import html_plan

        html_output.write(lambda: html_plan.page(plan, inputs), options["format_"], options["html"])
