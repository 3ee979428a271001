"""Where an HTML report goes: a file beside the usual report, or stdout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memledger.cli import app, output

if TYPE_CHECKING:
    from memledger.report.html_page import Page


class NoHtmlError(click.ClickException):
    """The page can't be made: a library of the extra is missing, or it would be too large."""

    exit_code = app.WRONG_USAGE


def check(format_: str, file: Path | None) -> None:
    """Refuse before anything is read where a page is asked for and can't be made.

    Raises:
        NoHtmlError: a library of the extra is missing.
    """
    if format_ != "html" and file is None:
        return
    from memledger.report import html_page

    try:
        html_page.require()
    except html_page.MissingExtraError as error:
        raise NoHtmlError(str(error)) from error


def write(made: Callable[[], Page], format_: str, file: Path | None) -> None:
    """Make the page once and write it: to stdout for `--format html`, to the file of `--html` in one step.

    The lines beside those that it quotes are read again from the inputs.

    Raises:
        NoHtmlError: it can't be made.
        output.WriteError: it can't be written.
    """
    import msgspec

    from memledger.around import neighbours
    from memledger.report import html_page

    try:
        page = made()
        around = neighbours(page.inputs, page.lines[: html_page.MOST_LINES])
        data = html_page.render(msgspec.structs.replace(page, around=around)).encode()
    except (html_page.MissingExtraError, html_page.TooLargeError) as error:
        raise NoHtmlError(str(error)) from error
    if file is not None:
        from memledger.atomic import write_bytes

        try:
            write_bytes(file, data)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise output.WriteError(f"--html {click.format_filename(file)}: {why}") from error
    if format_ == "html":
        output.write_bytes(data)
