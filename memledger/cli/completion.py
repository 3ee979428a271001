"""`memledger completion`: what a shell needs to complete commands, options, files and values."""

from __future__ import annotations

import sys
from typing import Final

import click

from memledger.cli import overview

SHELLS: Final = ("bash", "zsh", "fish")
VARIABLE: Final = "_MEMLEDGER_COMPLETE"
"""Set by the shell when it asks the program for completions."""

_PATHS: Final = frozenset({"files", "rule_files", "html", "textfile", "expect"})


@click.command("completion", short_help=overview.COMMANDS["completion"][1])
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    r"""The script that completes memledger's commands, options, files and values in a shell.

    \b
    bash   memledger completion bash > ~/.local/share/bash-completion/completions/memledger
    zsh    memledger completion zsh > ~/.zfunc/_memledger     (with ~/.zfunc in fpath)
    fish   memledger completion fish > ~/.config/fish/completions/memledger.fish
    """
    from click.shell_completion import get_completion_class

    from memledger.cli import app, output

    made = get_completion_class(shell)
    assert made is not None
    if shell == "bash":  # click's own asks the installed bash for its version; the script itself needs no bash
        source = made.source_template % made(app.group, {}, "memledger", VARIABLE).source_vars()
    else:
        source = made(app.group, {}, "memledger", VARIABLE).source()
    output.write(source.rstrip("\n") + "\n")


def prepare(target: click.Command) -> click.Command:
    """The command with types that tell a shell what stands where: files, ranks, codes, cards. For completion only."""
    for parameter in target.params:
        if parameter.name in _PATHS or (parameter.metavar or "").startswith(("FILE", "[LOG", "[FILE", "A B")):
            parameter.type = click.Path()
        elif parameter.name in {"select", "ignore", "codes"}:
            from memledger.findings.catalogue import PAGES

            parameter.type = click.Choice([page.code for page in PAGES])
        elif parameter.name == "rank":
            parameter.type = click.Choice([f"TP{number}" for number in range(8)])
        elif parameter.name in {"gpu_total", "gpu"}:
            from memledger.cards import CARDS

            parameter.type = click.Choice([card.name.lower().replace(" ", "-") for card in CARDS])
        elif parameter.name == "pid":
            parameter.type = click.Choice(_servers())
    return target


def _servers() -> list[str]:
    """Process ids of the servers that run now. A machine that can't be looked at has none to offer."""
    if not sys.platform.startswith("linux"):
        return []
    from memledger.live import attach, process

    return [str(tree.root.pid) for tree in attach.trees(process.table())]
