"""The command line: subcommands are imported when they are called, so that `--help` and `--version` start at once."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from memledger import __version__
from memledger.cli.overview import COMMANDS, help_text
from memledger.sanitize import clean, printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

DONE: Final = 0
CONDITION_HOLDS: Final = 1
WRONG_USAGE: Final = 2
NOTHING_RECOGNISED: Final = 3
UNREADABLE: Final = 4
INTERNAL_ERROR: Final = 70
INTERRUPTED: Final = 130

_LOG_ENDINGS: Final = (".log", ".txt", ".out", ".err", ".gz", ".xz", ".zst", ".bz2", ".json", ".jsonl")


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        if ctx.resilient_parsing and "_MEMLEDGER_COMPLETE" in os.environ:
            from memledger.cli.completion import prepare

            return prepare(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands that a shell offers, without importing them."""
        from click.shell_completion import CompletionItem

        named = [CompletionItem(name, help=told) for name, (_, told) in COMMANDS.items() if name.startswith(incomplete)]
        return named + click.Command.shell_complete(self, ctx, incomplete)

    def get_help(self, ctx: click.Context) -> str:
        """The help, as it is printed without click."""
        return help_text()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first argument names; a file or a mistyped name gets the command that was meant."""
        name = args[0]
        if name not in COMMANDS:
            ctx.fail(_not_a_command(name, args))
        _, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            _prepared(ctx, name, command, rest)
        return name, command, rest


def _prepared(ctx: click.Context, name: str, command: click.Command, rest: Sequence[str]) -> None:
    """The command with its long help where that is asked for, else with the defaults that the user set."""
    if {"-h", "--help"} & set(rest):
        from memledger.cli.help_pages import epilog

        command.epilog = epilog(name, command)
    elif name not in {"config", "completion"} and not ctx.params.get("no_config") and _may_be_set():
        from memledger.cli import settings

        settings.apply(ctx, name, command, rest)


def _may_be_set() -> bool:
    """Whether a variable or the config file may hold a default: without, nothing about defaults is imported."""
    if any(name.startswith("MEMLEDGER_") and name not in _NO_DEFAULTS for name in os.environ):
        return True
    if (named := os.environ.get("MEMLEDGER_CONFIG")) is not None:
        return bool(named)
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = base if base.startswith("/") else f"{os.environ.get('HOME', '')}/.config"
    return os.path.lexists(f"{folder}/memledger/config.toml")


_NO_DEFAULTS: Final = frozenset({"MEMLEDGER_CACHE", "MEMLEDGER_CONFIG", "MEMLEDGER_TRACEBACK"})


def _not_a_command(name: str, args: Sequence[str]) -> str:
    import difflib

    from memledger.sanitize import clean

    shown = clean(name.encode("utf-8", "replace").decode())
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    is_log = name == "-" or name.endswith(_LOG_ENDINGS) or os.sep in name or os.path.exists(name)  # noqa: PTH110
    if is_log and not near:
        rest = clean(" ".join(args).encode("utf-8", "replace").decode())
        return f"No command {shown!r}. To read a log: memledger explain {rest}"
    hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(COMMANDS)}."
    return f"No command {shown!r}. {hint}"


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--no-config", is_flag=True, help="Use no defaults: no config file, no MEMLEDGER_* variables.")
@click.version_option(__version__, "-V", "--version", prog_name="memledger", message="%(prog)s %(version)s")
@click.pass_context
def group(ctx: click.Context, no_config: bool) -> None:
    """Where the GPU memory of an SGLang or vLLM server went, and whether the workload needs it there."""
    if ctx.invoked_subcommand is None:
        say(ctx.get_help())
        ctx.exit(WRONG_USAGE)


def say(text: str) -> None:
    """A line on stderr. A stderr that can't be written takes nothing away: the exit code says the same."""
    try:
        click.echo(printable(text), err=True)
    except OSError:
        _give_up_stderr()


def _explained(error: click.ClickException) -> click.ClickException:
    """An error about a default says where that stands; without defaults nothing is imported for it."""
    if "memledger.cli.settings" not in sys.modules:
        return error
    from memledger.cli.settings import explained

    return explained(error)


def _show(error: click.ClickException) -> None:
    """The error as click shows it. A name that a shell's `*` found acts on the terminal no more than a log's text does."""
    shown = io.StringIO()
    error.show(shown)
    say(shown.getvalue().removesuffix("\n"))


def _give_up_stderr() -> None:
    """What is still buffered must not be flushed again at exit: that would change the exit code."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and give the exit code; whatever the user or the input did wrong is one sentence on stderr."""
    try:
        code = group.main(args, prog_name="memledger", standalone_mode=False)
    except click.ClickException as error:
        _show(_explained(error))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "OutputClosedError":  # by name: its module is not imported for --help
            return DONE
        if os.environ.get("MEMLEDGER_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {clean(str(error))}"
        say(f"memledger: internal error: {what}. MEMLEDGER_TRACEBACK=1 shows where; please report it.")
        return INTERNAL_ERROR
    return code if isinstance(code, int) else DONE
