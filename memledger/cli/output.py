"""How to write to this terminal, file or pipe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import click

from memledger.sanitize import printable

if TYPE_CHECKING:
    from memledger.report.text import Style

PIPED_WIDTH: Final = 80


def style(width: int | None, no_color: bool) -> Style:
    """What stdout can show: the terminal's width (80 when piped), colour only where it is wanted, ASCII where it must be."""
    from memledger.report.text import Style

    terminal = sys.stdout is not None and sys.stdout.isatty()
    columns = width or (shutil.get_terminal_size().columns if terminal else PIPED_WIDTH)
    unicode = is_unicode(getattr(sys.stdout, "encoding", None)) and not _asks_for_ascii(os.environ)
    return Style(columns, _colour(terminal, no_color), unicode)


def _colour(terminal: bool, no_color: bool) -> bool:
    if no_color or os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return os.environ["FORCE_COLOR"] != "0"
    return terminal and os.environ.get("TERM") != "dumb"


def _asks_for_ascii(environment: Mapping[str, str]) -> bool:
    """Whether the user set the C locale by hand; Python writes UTF-8 under it unless it is told what to write."""
    told = environment.get("PYTHONIOENCODING") or environment.get("PYTHONUTF8")
    return environment.get("LC_ALL") in {"C", "POSIX"} and not told


def is_unicode(encoding: str | None) -> bool:
    """Whether an output encoding can show everything."""
    return (encoding or "").lower().replace("-", "").replace("_", "") in {
        "utf8",
        "utf8sig",
        "utf16",
        "utf32",
        "cp65001",
    }


def clear_screen() -> bool:
    """Clear the terminal; False where stdout is none."""
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    write_bytes(b"\x1b[H\x1b[2J")
    return True


class OutputClosedError(Exception):
    """Whoever read stdout has enough (`| head`)."""


class WriteError(click.ClickException):
    """The report can't be written (a full disk, a closed descriptor)."""

    exit_code = 74

    def __init__(self, why: str) -> None:
        super().__init__(f"the report can't be written: {why}.")


def write(text: str) -> None:
    """Text to stdout; what its encoding can't show becomes `?`, never an error.

    Raises:
        OutputClosedError: nobody reads stdout any more.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    write_bytes(printable(text).encode(encoding, "replace"))


def write_bytes(data: bytes) -> None:
    """Bytes to stdout.

    Raises:
        OutputClosedError: nobody reads stdout any more.
        WriteError: it can't be written.
    """
    if sys.stdout is None:
        raise WriteError("there is no standard output")
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError as error:
        # What is still buffered must not be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputClosedError from error
    except OSError as error:
        raise WriteError(error.strerror or str(error)) from error
