"""`memledger ps`: the SGLang and vLLM servers of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memledger.cli import app, overview

if TYPE_CHECKING:
    from memledger.ledger import Source
    from memledger.live.sample import DeviceSample, LiveServer
    from memledger.report.ps_json import PsReport


@click.command("ps", short_help=overview.COMMANDS["ps"][1])
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", help="How to write the list.")
@click.option(
    "--api-key-env",
    metavar="NAME",
    help="The environment variable that holds the servers' API key (sent to servers of your own user, on loopback only).",
)
@click.option("--no-ask", is_flag=True, help="Send no request to any server: what /proc and the driver show.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep everything that was sampled, masked, as JSON.",
)
@click.option("--width", type=click.IntRange(min=40), metavar="COLUMNS", help="Width of the text.")
@click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR).")
def command(
    format_: str, api_key_env: str | None, no_ask: bool, snapshot: Path | None, width: int | None, no_color: bool
) -> int:
    """Every SGLang and vLLM server on this machine: GPUs, memory, use of its pools now, port and log.

    Reads /proc, the NVIDIA driver (NVML) and the servers' own ports on loopback; changes nothing.
    """
    report = look(key_from(api_key_env), ask=not no_ask)
    show(report, format_, width, no_color)
    if snapshot is None:
        return app.DONE
    import msgspec

    from memledger.live import gather
    from memledger.live.snapshot import SCHEMA, Snapshot, SnapshotError, write

    sample = gather.compose(report.devices, report.live_servers, host_pids=gather.host_pids())
    sample = msgspec.structs.replace(sample, sources=report.sources)
    taken = Snapshot(SCHEMA, report.version, sample, "ps", unreadable_processes=report.unreadable_processes)
    try:
        write(snapshot, taken)
    except SnapshotError as error:
        app.say(f"memledger: {error}")
        return app.UNREADABLE
    return app.DONE


def show(report: PsReport, format_: str, width: int | None, no_color: bool) -> None:
    """Write the list to stdout."""
    from memledger.cli import output

    if format_ == "json":
        from memledger.report.ps_json import encode

        output.write_bytes(encode(report))
    else:
        from memledger.report.ps_text import render

        output.write(render(report, output.style(width, no_color)))


def key_from(name: str | None) -> str | None:
    """The API key in the environment variable of that name.

    Raises:
        click.UsageError: there is no such variable, or it holds what no header can.
    """
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise click.UsageError(f"--api-key-env: the environment variable {name} is not set, or empty.")
    if not key.isascii() or not key.isprintable():
        raise click.UsageError(f"--api-key-env: what {name} holds can't stand in an HTTP header.")
    return key


def look(api_key: str | None = None, *, ask: bool = True) -> PsReport:
    """All servers of this machine, with how each source answered."""
    from memledger import __version__
    from memledger.ledger import Source
    from memledger.live import attach, process
    from memledger.report.ps_json import PsReport

    devices = sample_devices()
    scan = process.table()
    servers = attach.find_servers(devices, api_key, ask=ask, table=scan)
    unreadable = sum(one.unreadable for one in scan.by_pid.values())
    sources = (
        _proc(unreadable),
        devices.source if devices else Source("nvml", "unavailable"),
        _metrics(servers, ask=ask),
    )
    return PsReport(__version__, sources, servers, devices=devices, unreadable_processes=unreadable)


def sample_devices() -> DeviceSample | None:
    """The GPUs as the driver shows them; the sample's source says why where it does not."""
    from memledger.live import nvml

    return nvml.sample()


def _proc(unreadable: int) -> Source:
    from memledger.ledger import Source
    from memledger.live import process

    if process.processes_are_hidden():
        return Source("proc", "partial", "/proc hides other users' processes (hidepid): sudo shows them")
    if unreadable:
        return Source("proc", "partial", f"{unreadable} processes of other users can't be read: sudo shows them")
    if process.in_pid_namespace():
        return Source(
            "proc",
            "partial",
            "this is a container: processes outside it are not visible, and the driver's process ids are not ours",
        )
    return Source("proc", "ok")


def _metrics(servers: tuple[LiveServer, ...], *, ask: bool) -> Source:
    from memledger.ledger import Source

    if not ask:
        return Source("metrics", "unavailable", "not asked (--no-ask)")
    silent = [s for s in servers if s.metrics is None]
    if not silent:
        return Source("metrics", "ok") if servers else Source("metrics", "unavailable", "no server found")
    reason = silent[0].missing.get("metrics") or silent[0].missing.get("endpoints") or silent[0].missing.get("port")
    sentence = f"server {silent[0].pid}: {reason or 'no answer'}"
    return Source("metrics", "unavailable" if len(silent) == len(servers) else "partial", sentence)
