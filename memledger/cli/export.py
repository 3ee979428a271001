"""`memledger export`: the ledger of running servers for Prometheus."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from memledger.cli import app, output, overview

if TYPE_CHECKING:
    from memledger.export.sampler import Sampler

ONCE_S: Final = 300.0
"""How long `--once` waits for servers that answer late and for logs to be read."""


@click.command("export", short_help=overview.COMMANDS["export"][1])
@click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="Only the server that this process belongs to.")
@click.option(
    "--listen", default="127.0.0.1:9841", show_default=True, metavar="HOST:PORT", help="The address to serve on."
)
@click.option(
    "--interval",
    type=click.FloatRange(min=1, max=3600),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between samples.",
)
@click.option(
    "--textfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write FILE at every sample (for node_exporter) and serve nothing.",
)
@click.option("--once", is_flag=True, help="One sample to stdout (or to --textfile), then end.")
@click.option(
    "--api-key-env",
    metavar="NAME",
    help="The environment variable that holds the servers' API key (sent to servers of your own user, on loopback only).",
)
@click.option("--no-ask", is_flag=True, help="Send no request to any server.")
def command(
    pid: int | None,
    listen: str,
    interval: float,
    textfile: Path | None,
    once: bool,
    api_key_env: str | None,
    no_ask: bool,
) -> int:
    """The memory of running SGLang and vLLM servers as Prometheus metrics, on http://127.0.0.1:9841/metrics.

    Samples are taken in the background; a scrape gets the last ones. docs/metrics.md lists every metric.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        from memledger.extras import install_command

        raise click.UsageError(f"memledger export needs prometheus_client: {install_command('prometheus')}")
    host, port = _address(listen)
    from memledger.cli.ps import key_from
    from memledger.export.sampler import Sampler

    sampler = Sampler(pid, interval, key_from(api_key_env), ask=not no_ask, say=_say)
    if once:
        return _once(sampler, textfile)
    if textfile is not None:
        return _files(sampler, textfile, interval)
    return _serve(sampler, host, port)


def _say(sentence: str) -> None:
    app.say(f"memledger: {sentence}")


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
        raise click.BadParameter("give HOST:PORT, such as 127.0.0.1:9841.", param_hint="--listen")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _once(sampler: Sampler, textfile: Path | None) -> int:
    page = sampler.once(ONCE_S)
    sampler.stop()
    if textfile is None:
        output.write_bytes(page)
    else:
        _write(textfile, page)
    return app.UNREADABLE if sampler.failed else app.DONE


def _write(textfile: Path, page: bytes) -> None:
    from memledger import atomic

    try:
        atomic.write_bytes(textfile, page)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise output.WriteError(f"--textfile {click.format_filename(textfile)}: {why}") from error


def _files(sampler: Sampler, textfile: Path, interval: float) -> int:
    """Write the page at every interval. A file that can't be written at first ends it; later (a full disk) it is tried again."""
    _write(textfile, sampler.once(interval))
    sampler.start()
    said: str | None = None
    while True:
        time.sleep(interval)
        try:
            _write(textfile, sampler.page())
            said = None
        except output.WriteError as error:
            if error.message != said:
                said = error.message
                _say(error.message)


def _serve(sampler: Sampler, host: str, port: int) -> int:
    from memledger.export import http

    try:
        server = http.server(host, port, sampler.page)
    except OSError as error:
        _say(f"--listen {host}:{port}: {error.strerror or error}")
        return app.UNREADABLE
    sampler.start()
    _say(f"serving http://{'[' + host + ']' if ':' in host else host}:{server.server_port}/metrics")
    with server:
        try:
            server.serve_forever()
        finally:
            sampler.stop()
    return app.DONE
