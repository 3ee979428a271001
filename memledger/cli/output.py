"""How to write to this terminal, file or pipe."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from memledger.report.text import Style

PIPED_WIDTH: Final = 80


def style(width: int | None, no_color: bool) -> Style:
    """What stdout can show: the terminal's width (80 when piped), colour only where it is wanted, ASCII where it must be."""
    from memledger.report.text import Style

    terminal = sys.stdout.isatty()
    columns = width or (shutil.get_terminal_size().columns if terminal else PIPED_WIDTH)
    return Style(columns, _colour(terminal, no_color), is_unicode(sys.stdout.encoding))


def _colour(terminal: bool, no_color: bool) -> bool:
    if no_color or os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return os.environ["FORCE_COLOR"] != "0"
    return terminal and os.environ.get("TERM") != "dumb"


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
    if not sys.stdout.isatty():
        return False
    write("\x1b[H\x1b[2J")
    return True


class OutputClosedError(Exception):
    """Whoever read stdout has enough (`| head`)."""


def write(text: str) -> None:
    """Text to stdout; what its encoding can't show becomes `?`, never an error.

    Raises:
        OutputClosedError: nobody reads stdout any more.
    """
    encoding = sys.stdout.encoding or "ascii"
    write_bytes(text.encode(encoding, "replace"))


def write_bytes(data: bytes) -> None:
    """Bytes to stdout.

    Raises:
        OutputClosedError: nobody reads stdout any more.
    """
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError as error:
        # What is still buffered must not be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputClosedError from error
