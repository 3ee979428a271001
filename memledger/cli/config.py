"""`memledger config`: which default comes from where."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from memledger.cli import app, output, overview, settings


class Row(NamedTuple):
    """One key of one command with the value in force and where it stands."""

    command: str
    key: str
    value: Any
    origin: str


@click.command("config", short_help=overview.COMMANDS["config"][1])
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", help="How to write the list.")
@click.option("--all", "everything", is_flag=True, help="Also the keys that nothing was set for.")
def command(format_: str, everything: bool) -> int:
    """Which option has which default, and where that stands: the config file or a MEMLEDGER_* variable.

    Checks the file and the variables as well. What the command line says beats a variable, and a variable the file.
    """
    path = settings.place()
    rows = [row for row in _rows() if everything or row.origin != "built in"]
    unknown = settings.unknown_variables()
    if format_ == "json":
        document = {
            "file": None if path is None else str(path),
            "file_exists": path is not None and path.exists(),
            "defaults": [row._asdict() for row in rows],
            "unknown_variables": unknown,
        }
        output.write(json.dumps(document, indent=2) + "\n")
        return app.DONE
    there = "not used" if path is None else f"{path}{'' if path.exists() else ' (there is none)'}"
    output.write(f"config file  {there}\n\n{_table(rows)}")
    for sentence in unknown:
        app.say(f"memledger: {sentence}.")
    return app.DONE


def _rows() -> Iterator[Row]:
    content = settings.read()
    for name in overview.COMMANDS:
        if name in settings.NO_DEFAULTS_FOR:
            continue
        other = importlib.import_module(overview.COMMANDS[name][0]).command
        found = settings.defaults(name, other, content)
        _check(name, other, found)
        for key in settings.names_of(name):
            if (option := settings.option_of(other, key)) is None:
                continue
            if key in found:
                yield Row(name, key, found[key].value, found[key].origin)
            else:
                yield Row(name, key, _built_in(option), "built in")


def _built_in(option: click.Option) -> Any:
    value = option.default
    return value if isinstance(value, (str, int, float, bool)) else None


def _check(name: str, other: click.Command, found: dict[str, settings.Default]) -> None:
    """Each value by its option's own rules.

    Raises:
        click.BadParameter: one is none that the option takes.
    """
    ctx = click.Context(other, info_name=name)
    for one in found.values():
        option = next(p for p in other.params if p.name == one.parameter)
        try:
            option.process_value(ctx, one.value)
        except click.BadParameter as error:
            raise settings.SettingsError(f"{one.origin}: {error.message}") from error


def _table(rows: list[Row]) -> str:
    if not rows:
        return "No default is set: `memledger config --all` lists what can be.\n"
    from tabulate import tabulate

    shown = [(row.command, row.key, _shown(row.value), row.origin) for row in rows]
    return (
        tabulate(shown, headers=("command", "key", "default", "from"), tablefmt="plain", disable_numparse=True) + "\n"
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
