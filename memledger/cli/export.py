"""`memledger export`: the ledger of running servers for Prometheus."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memledger.cli import app, overview

if TYPE_CHECKING:
    from memledger.export.sampler import Sampler

INSTALL = "pip install 'gpu-memledger[prometheus]'"


@click.command(
    "export",
    short_help=overview.COMMANDS["export"][1],
    epilog="Example: memledger export --textfile /var/lib/node_exporter/memledger.prom --once",
)
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
    help="The environment variable that holds the servers' API key (sent on loopback only).",
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

    Samples are taken in the background; a scrape gets the last one. docs/metrics.md lists every metric.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise click.UsageError(f"memledger export needs prometheus_client: {INSTALL}")
    host, port = _address(listen)
    from memledger.cli.ps import key_from
    from memledger.export.sampler import Sampler

    sampler = Sampler(pid, interval, key_from(api_key_env), ask=not no_ask)
    if once or textfile is not None:
        return _files(sampler, textfile, interval, once=once)
    return _serve(sampler, host, port)


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 <= int(port) <= 65535:
        raise click.BadParameter("give HOST:PORT, such as 127.0.0.1:9841.", param_hint="--listen")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _files(sampler: Sampler, textfile: Path | None, interval: float, *, once: bool) -> int:
    from memledger import atomic
    from memledger.cli import output

    while True:
        begun = time.monotonic()
        taken = sampler.once()
        if taken.failed:
            app.say(f"memledger: {taken.failed}")
        if textfile is None:
            output.write_bytes(sampler.page())
        else:
            try:
                atomic.write_bytes(textfile, sampler.page())
            except OSError as error:
                app.say(f"memledger: --textfile {click.format_filename(textfile)}: {error.strerror or error}")
                return app.UNREADABLE
        if once:
            return app.UNREADABLE if taken.failed else app.DONE
        time.sleep(max(0.1, interval - (time.monotonic() - begun)))


def _serve(sampler: Sampler, host: str, port: int) -> int:
    from memledger.export import http

    try:
        server = http.server(host, port, sampler.page)
    except OSError as error:
        app.say(f"memledger: --listen {host}:{port}: {error.strerror or error}")
        return app.UNREADABLE
    sampler.start()
    app.say(f"memledger: serving http://{'[' + host + ']' if ':' in host else host}:{server.server_port}/metrics")
    with server:
        try:
            server.serve_forever()
        finally:
            sampler.stop()
    return app.DONE
