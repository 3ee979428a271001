"""The help of every command as Markdown, for the page `commands.md`: made anew with each build, so it is never out of date."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click

from memledger.cli.overview import COMMANDS, help_text

WIDTH = 92


def markdown(folder: Path) -> str:
    """A section for each command, with the page of its name in `folder` where there is one."""
    parts = ["## memledger\n\n", _block(help_text())]
    for name, (module, _) in COMMANDS.items():
        command: click.Command = importlib.import_module(module).command
        context = click.Context(command, info_name=f"memledger {name}", max_content_width=WIDTH, terminal_width=WIDTH)
        parts.append(f"\n## memledger {name}\n\n")
        page = next((page for page in (name, *_OTHER_PAGES.get(name, ())) if (folder / f"{page}.md").is_file()), None)
        if page is not None:
            parts.append(f"More: [{page}]({page}.md)\n\n")
        parts.append(_block(command.get_help(context)))
    return "".join(parts)


_OTHER_PAGES = {
    "explain": ("tutorial",),
    "ps": ("live",),
    "doctor": ("live",),
    "finding": ("findings",),
    "export": ("metrics",),
    "demo": ("tutorial",),
    "completion": ("configuration",),
}


def _block(text: str) -> str:
    # click marks a paragraph that it must not wrap with a backspace.
    plain = re.sub(r"[ \t]+$", "", text.replace("\b", ""), flags=re.MULTILINE)
    return f"```text\n{plain}\n```\n"
