"""`memledger watch`: the ledger of a running server, or of a growing log, as it moves."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from memledger.cli import app, output, overview
from memledger.cli.options import MODEL_CONFIG

if TYPE_CHECKING:
    from memledger.watch.board import Board
    from memledger.watch.feed import Feed
    from memledger.watch.moment import Event
    from memledger.watch.recording import Reader, Recorder

POLL_S: Final = 0.2
ONCE_S: Final = 60.0
"""How long `--once` waits for the first look."""
SMALLEST_FILE: Final = 2**20


class Asked(msgspec.Struct, frozen=True):
    """What the options came to."""

    target: str | None
    interval: float
    once: bool
    plain: bool
    duration: float | None
    record: Path | None
    rotate_size: int
    keep: int
    replay: str | None
    speed: float
    model_config: Path | None
    api_key_env: str | None
    no_ask: bool
    width: int | None
    no_color: bool


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    found = re.fullmatch(r"(\d{1,6})\s*([KMG])i?B?", value.strip(), re.IGNORECASE)
    if found is None:
        raise click.BadParameter("give a size such as 64MiB or 1GiB.")
    size = int(found[1]) << {"k": 10, "m": 20, "g": 30}[found[2].lower()]
    if size < SMALLEST_FILE:
        raise click.BadParameter("a file of less than 1MiB would hold a few samples only.")
    return size


@click.command("watch", short_help=overview.COMMANDS["watch"][1])
@click.argument("target", required=False, metavar="[PID|LOG]")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between looks.",
)
@click.option("--once", is_flag=True, help="One look, as text, then end.")
@click.option("--plain", is_flag=True, help="Lines of text instead of the full screen (also: no terminal, TERM=dumb).")
@click.option(
    "--duration", type=click.FloatRange(min=0), metavar="SECONDS", help="End after so long (default: with Ctrl-C or q)."
)
@click.option(
    "--record", type=click.Path(path_type=Path), metavar="FILE", help="Keep every look, masked, as JSON lines."
)
@click.option(
    "--rotate-size",
    default="64MiB",
    callback=_size,
    metavar="SIZE",
    help="With --record: begin another file at this size; the full one becomes FILE.1.  [default: 64MiB]",
)
@click.option(
    "--keep",
    type=click.IntRange(0, 99),
    default=4,
    show_default=True,
    metavar="N",
    help="With --record: how many full files stay.",
)
@click.option("--replay", metavar="FILE", help="Play a recording again instead of watching.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    metavar="TIMES",
    help="With --replay on the full screen: how much faster than it was.",
)
@MODEL_CONFIG
@click.option(
    "--api-key-env",
    metavar="NAME",
    help="The environment variable that holds the server's API key (sent to servers of your own user, on loopback only).",
)
@click.option("--no-ask", is_flag=True, help="Send no request to the server.")
@click.option("--width", type=click.IntRange(min=40), metavar="COLUMNS", help="Width of the text.")
@click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR).")
def command(**options: Any) -> int:
    """The ledger of a running server, or of a growing log, as it moves: accounts, pools, requests, growth.

    PID is any process of a server; without PID and LOG, the only server of this machine is watched. Nothing is changed, and
    nothing is asked but the driver, /proc, and the server's own port on loopback.
    """
    asked = Asked(**options)
    _check(asked)
    if asked.replay is not None:
        return _replay(asked, asked.replay)
    return _watch(asked)


def _check(asked: Asked) -> None:
    if asked.replay is not None and (asked.target is not None or asked.record is not None):
        raise click.UsageError("--replay plays a recording alone, without PID, LOG and --record.")
    if asked.target == "-":
        raise click.UsageError(
            "watch looks at a file's end again and again; for standard input there is memledger explain --follow -."
        )
    if not _is_plain(asked) and importlib.util.find_spec("textual") is None:
        from memledger.extras import install_command

        raise click.UsageError(
            f"the full screen needs textual: {install_command('tui')}; --plain and --once do without it."
        )


def _is_plain(asked: Asked) -> bool:
    # The full screen is drawn on standard error: where that goes to a file, the terminal would stay empty.
    terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return asked.once or asked.plain or not terminal or os.environ.get("TERM") in {None, "", "dumb"}


# -------------------------------------------------------------------------------------------------------------- live


def _watch(asked: Asked) -> int:
    from memledger.watch.board import Board
    from memledger.watch.recording import RecordingError

    try:
        with _recorder(asked) as sink:
            feed = _feed(asked, sink)
            feed.start()
            board = Board()
            try:
                code = _shown(asked, feed, board)
            finally:
                feed.close()
            if feed.failed is not None:
                raise feed.failed
    except RecordingError as error:
        raise output.WriteError(str(error)) from error
    if board.moments == 0:
        why = board.end.reason if board.end is not None else "there was no answer in time"
        app.say(f"memledger: {why}")
        return app.UNREADABLE
    return code


@contextlib.contextmanager
def _recorder(asked: Asked) -> Iterator[Callable[[Event], None] | None]:
    if asked.record is None:
        yield None
        return
    from memledger.watch.recording import Recorder

    recorder: Recorder = Recorder(asked.record, most_bytes=asked.rotate_size, kept=asked.keep)
    try:
        yield recorder.write
    finally:
        recorder.close()


def _feed(asked: Asked, sink: Callable[[Event], None] | None) -> Any:
    """The feed of what was named: a process, a log, or the machine's only server."""
    from memledger.cli.ps import key_from
    from memledger.watch.feed import LogFeed, ServerFeed

    pid = _pid(asked.target)
    if pid is None:
        assert asked.target is not None
        return LogFeed(asked.target, asked.interval, model_config=asked.model_config, sink=sink)
    return ServerFeed(
        pid,
        asked.interval,
        api_key=key_from(asked.api_key_env),
        ask=not asked.no_ask,
        model_config=asked.model_config,
        sink=sink,
    )


def _pid(target: str | None) -> int | None:
    """The process that was named; None for a log.

    Raises:
        click.UsageError: nothing was named, and there is not exactly one server.
    """
    if target is None:
        return _only_server()
    if target.isascii() and target.isdigit() and not Path(target).exists():
        return int(target) if 0 < len(target) < 11 else 2**31
    return None


def _only_server() -> int:
    from memledger.live import attach
    from memledger.live import process as proc

    found = attach.trees(proc.table())
    if len(found) == 1:
        return found[0].root.pid
    if not found:
        raise click.UsageError(
            "No server is visible on this machine. Name a log (memledger watch server.log), or a process id."
        )
    named = ", ".join(f"{tree.root.pid} ({tree.framework})" for tree in found)
    raise click.UsageError(f"There are {len(found)} servers on this machine: name one of {named}.")


def _shown(asked: Asked, feed: Feed, board: Board) -> int:
    if not _is_plain(asked):
        from memledger.watch import tui

        code: int = tui.run(feed, board, interval_s=asked.interval, no_color=asked.no_color)
        return code
    if asked.once:
        return _once(asked, feed, board)
    return _lines(asked, feed, board)


def _once(asked: Asked, feed: Feed, board: Board) -> int:
    ends = time.monotonic() + ONCE_S
    while board.moments == 0 and board.end is None and not feed.done and time.monotonic() < ends:
        for event in feed.events():
            board.take(event)
        time.sleep(0.02)
    for event in feed.events():
        board.take(event)
    if board.moments:
        _write_screen(asked, board)
    return app.DONE


def _lines(asked: Asked, feed: Feed, board: Board) -> int:
    """A line whenever something moved, until the server ends, the time is over, or Ctrl-C; then all of it once."""
    from memledger.cli.reading import interrupted
    from memledger.watch.lines import Lines

    lines = Lines(board)
    ends = time.monotonic() + asked.duration if asked.duration is not None else None
    with interrupted() as asked_to_end:
        while not feed.done and not asked_to_end() and (ends is None or time.monotonic() < ends):
            for event in feed.events():
                _put(lines.take(event))
            time.sleep(POLL_S)
    for event in feed.events():
        _put(lines.take(event))
    if board.moments:
        output.write("\n")
        _write_screen(asked, board)
    return app.DONE


def _put(lines: list[str]) -> None:
    if lines:
        output.write("".join(f"{line}\n" for line in lines))


def _write_screen(asked: Asked, board: Board) -> None:
    from memledger.watch.screen import render

    style = output.style(asked.width, asked.no_color)
    output.write("\n".join(render(board, style.width, style=style)) + "\n")


# ------------------------------------------------------------------------------------------------------------- replay


def _replay(asked: Asked, path: str) -> int:
    from memledger.watch.board import Board
    from memledger.watch.feed import Replay
    from memledger.watch.recording import Reader, RecordingError

    board = Board()
    reader: Reader = Reader(path)
    try:
        if _is_plain(asked):
            _play(asked, reader, board)
        else:
            from memledger.watch import tui

            tui.run(Replay(reader.events(), asked.speed), board, interval_s=0.2, no_color=asked.no_color)
    except RecordingError as error:
        app.say(f"memledger: {error}")
        return app.UNREADABLE
    for trouble in reader.troubles:
        app.say(f"memledger: {trouble}")
    if board.moments == 0:
        app.say("memledger: the recording holds no look at all.")
        return app.NOTHING_RECOGNISED
    return app.DONE


def _play(asked: Asked, reader: Reader, board: Board) -> None:
    """All of it at once: what happened, then the last look."""
    from memledger.watch.lines import Lines

    lines = Lines(board)
    for event in reader.events():
        told = lines.take(event)
        if not asked.once:
            _put(told)
    if board.moments:
        if not asked.once:
            output.write("\n")
        _write_screen(asked, board)
