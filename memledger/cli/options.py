"""The options that every command with a ledger report takes, stated once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

if TYPE_CHECKING:
    from memledger.cards import Total
    from memledger.conditions import Condition


class Asked(msgspec.Struct, frozen=True):
    """What the options of `report_options` came to."""

    format_: str
    evidence: bool
    all_starts: bool
    start: int | None
    rank: str | None
    gpu_total: Any  # Total | None: its module is not imported where nobody asks
    model_config: Path | None
    no_live: bool
    fail_on: list[Any]  # list[Condition], likewise
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    all_findings: bool
    unrecognized: bool
    rule_files: tuple[str, ...]
    width: int | None
    no_color: bool
    html: Path | None = None


def gpu_total_of(ctx: click.Context, param: click.Parameter, value: str | None) -> Total | None:
    """The card's memory that an option names."""
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


MODEL_CONFIG: Final = click.option(
    "--model-config",
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="The model's config.json, or its folder: what its weights, KV and state should take.",
)
"""For `explain` and `plan` alike."""

HTML: Final = click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the report as one HTML file as well, to be opened in a browser.",
)
"""For every command whose report has charts."""

_REPORT_OPTIONS: Final = (
    click.option(
        "--format",
        "format_",
        type=click.Choice(["text", "json", "markdown", "html"]),
        default="text",
        help="How to write the report.",
    ),
    HTML,
    click.option("--evidence", is_flag=True, help="Print the log lines behind the figures."),
    click.option("--all-starts", is_flag=True, help="Print every start of a server in full, not only one."),
    click.option("--start", type=click.IntRange(min=1), metavar="N", help="Print the Nth start."),
    click.option("--rank", metavar="LABEL", help="Print these ranks only: TP3, 'DP1 TP0', 'pid 4242'."),
    click.option(
        "--gpu-total",
        callback=gpu_total_of,
        metavar="SIZE|CARD",
        help="The card's memory, where the log does not print it: 80GiB, 81559MiB, h100, 4090.",
    ),
    MODEL_CONFIG,
    click.option(
        "--no-live",
        is_flag=True,
        help="Look at nothing but the files named: no NVML, /proc or HTTP, no model folder or cache.",
    ),
    click.option(
        "--fail-on",
        callback=_conditions,
        multiple=True,
        metavar="CONDITION",
        help="Exit 1 where it holds: unexplained>2%, code=ML101, severity>=warning. Repeatable.",
    ),
    click.option(
        "--select",
        callback=_codes,
        multiple=True,
        metavar="CODE",
        help="Only these findings: ML101, a group (ML1), a list (ML1,ML501). Repeatable.",
    ),
    click.option(
        "--ignore", callback=_codes, multiple=True, metavar="CODE", help="Without these findings. Repeatable."
    ),
    click.option("--all-findings", is_flag=True, help="Print the findings that are mere information as well."),
    click.option("--unrecognized", is_flag=True, help="Print the memory-like lines that were not understood."),
    click.option(
        "--rules",
        "rule_files",
        multiple=True,
        metavar="FILE",
        help="A rule file of your own, before the bundled ones. Repeatable.",
    ),
    click.option(
        "--width",
        type=click.IntRange(min=40),
        metavar="COLUMNS",
        help="Width of the text (default: the terminal's; 80 when piped).",
    ),
    click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR)."),
)


LIVE_OPTIONS: Final = (
    click.option(
        "--pid",
        type=click.IntRange(min=1),
        metavar="PID",
        help="A running server, by any of its processes: finds log, GPUs and port by itself.",
    ),
    click.option(
        "--smi",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A saved nvidia-smi (table, -q, -x or CSV) to line the log up with.",
    ),
    click.option(
        "--snapshot",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="With --pid or --smi: keep all that was sampled; memledger explain FILE reports it elsewhere.",
    ),
    click.option(
        "--api-key-env",
        metavar="NAME",
        help="With --pid: the environment variable that holds the server's API key.",
    ),
)
"""For `explain`: a machine beside the log."""


class Machine(msgspec.Struct, frozen=True):
    """What the options of `LIVE_OPTIONS` came to."""

    pid: int | None = None
    smi: Path | None = None
    snapshot: Path | None = None
    api_key_env: str | None = None

    @property
    def asked(self) -> bool:
        """Whether anything but the log is looked at."""
        return self.pid is not None or self.smi is not None


def live_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `LIVE_OPTIONS`."""
    for option in reversed(LIVE_OPTIONS):
        command = option(command)
    return command


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a report; it gets them as keywords, for `Asked(**options)`."""
    for option in reversed(_REPORT_OPTIONS):
        command = option(command)
    return command
