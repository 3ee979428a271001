"""`memledger doctor`: which sources answer on this machine, and why the others do not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from memledger.cli import app, overview

if TYPE_CHECKING:
    from memledger.live.doctor import DoctorReport
    from memledger.report.text import Style


@click.command("doctor", short_help=overview.COMMANDS["doctor"][1])
@click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", help="How to write the result."
)
@click.option("--no-ask", is_flag=True, help="Send no request to any server.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep everything that was sampled, masked, as JSON.",
)
@click.option("--width", type=click.IntRange(min=40), metavar="COLUMNS", help="Width of the text.")
@click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR).")
def command(format_: str, no_ask: bool, snapshot: Path | None, width: int | None, no_color: bool) -> int:
    """Each source with ok, partial or unavailable, the reason, and the remedy.

    The NVIDIA driver (NVML), /proc, the servers' ports, the model cache, the log scanner and its cache. Changes nothing; exit code 0.
    """
    from memledger.cli import output
    from memledger.live import doctor
    from memledger.report.json import document

    report, sample = doctor.examine(ask=not no_ask)
    if format_ == "json":
        output.write_bytes(document(report))
    else:
        output.write(render(report, output.style(width, no_color)))
    if snapshot is not None:
        from memledger import __version__
        from memledger.live.snapshot import SCHEMA, Snapshot, SnapshotError, write

        try:
            write(snapshot, Snapshot(SCHEMA, __version__, sample, "doctor"))
        except SnapshotError as error:
            app.say(f"memledger: {error}")
            return app.UNREADABLE
    return app.DONE


def render(report: DoctorReport, style: Style) -> str:
    """The result as text: a line for each source, its reason and remedy below."""
    import textwrap

    from memledger.report.text import to_ascii
    from memledger.sanitize import clean

    lines = [f"memledger {report.version} · Python {report.python} · {clean(report.system)}", ""]
    name = max(len(check.name) for check in report.checks)
    status = max(len(check.status) for check in report.checks)
    for check in report.checks:
        head = f"{check.name:<{name}}  {check.status:<{status}}  "
        first = True
        for text in (check.found, check.reason, f"-> {check.remedy}" if check.remedy else None):
            if text is None:
                continue
            lines += textwrap.wrap(
                text,
                style.width,
                initial_indent=head if first else " " * len(head),
                subsequent_indent=" " * len(head),
                break_long_words=False,
                break_on_hyphens=False,
            )
            first = False
        if first:
            lines.append(head.rstrip())
    text = "\n".join(lines) + "\n"
    return text if style.unicode else to_ascii(text)
