"""Defaults of options: from `MEMLEDGER_*` variables and one file. What the command line says beats both.

Nothing here is imported by a start without such a variable and without the file (`may_be_set` in `memledger.cli.app` looks).
"""

from __future__ import annotations

import difflib
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from memledger.cli.overview import COMMANDS
from memledger.opening import NotAFileError, open_file
from memledger.sanitize import clean

EVERYWHERE: Final = ("format", "width", "no_color", "rules", "gpu_total", "api_key_env", "no_ask")
"""Options that may have a default for every command that takes them."""

OWN: Final[dict[str, tuple[str, ...]]] = {
    "explain": ("evidence", "all_findings", "unrecognized", "select", "ignore", "fail_on"),
    "oom": ("evidence", "all"),
    "compare": ("context", "max_regression"),
    "watch": ("interval", "rotate_size", "keep"),
    "export": ("listen", "interval"),
    "sweep": ("gpu_hour",),
    "fleet": ("workers", "memory_limit"),
}
"""Options that may have a default for one command, in a table of its name."""

_DEMO: Final = ("width", "no_color")
"""The demo is the same for everybody; how wide it is, is the reader's."""

NO_DEFAULTS_FOR: Final = frozenset({"config", "completion"})
OTHER_VARIABLES: Final = {
    "MEMLEDGER_CACHE": "Folder of the cache (compiled patterns); empty: no cache.",
    "MEMLEDGER_CONFIG": "The config file, in place of the usual one; empty: none.",
    "MEMLEDGER_TRACEBACK": "Show where an internal error came from.",
}
"""Variables that are no option's default."""

LARGEST: Final = 2**20
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})
ORIGINS: Final = "memledger.origins"
"""Where a context keeps which default came from where."""


class SettingsError(click.UsageError):
    """A default can't be used; one sentence with where it stands."""


class Default(NamedTuple):
    """A default that was set: the option's parameter, its value, and where it stands."""

    parameter: str
    value: Any
    origin: str


def place(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The config file's path, whether it is there or not; None: none is wanted, or there is no home."""
    named = environment.get("MEMLEDGER_CONFIG")
    if named is not None:
        return Path(named) if named else None
    base = environment.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if base.startswith("/") else Path(environment.get("HOME", "")) / ".config"
    return folder / "memledger" / "config.toml" if folder.is_absolute() else None


def read(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The file's content, its names checked; empty where there is no file.

    Raises:
        SettingsError: it can't be read, is somebody else's, is no TOML, or holds a name that there is not.
    """
    path = place(environment)
    if path is None:
        return {}
    shown = clean(str(path))
    try:
        data = _bytes(path, shown)
    except FileNotFoundError as error:
        if "MEMLEDGER_CONFIG" in environment:
            raise _bad(shown, "MEMLEDGER_CONFIG names it, and there is no such file") from error
        return {}
    except NotADirectoryError:
        return {}
    except (OSError, ValueError) as error:
        raise _bad(shown, f"it can't be read: {getattr(error, 'strerror', None) or error}") from error
    content = _parsed(data, shown)
    _check_names(content, shown)
    return content


def _bytes(path: Path, shown: str) -> bytes:
    try:
        with open_file(path) as stream:
            status = os.fstat(stream.fileno())
            if status.st_uid not in _owners():
                raise _bad(shown, f"it belongs to another user (uid {status.st_uid}), so that it is not used")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise _bad(shown, f"other users may write it (chmod go-w {shown}), so that it is not used")
            data = stream.read(LARGEST + 1)
    except NotAFileError as error:
        raise _bad(shown, "it is no regular file") from error
    if len(data) > LARGEST:
        raise _bad(shown, "it is larger than 1 MiB")
    return data


def _owners() -> set[int]:
    """Whose file is trusted: our own, root's, and under sudo that of whoever called it."""
    owners = {os.geteuid(), 0}
    called_by = os.environ.get("SUDO_UID", "")
    return owners | {int(called_by)} if os.geteuid() == 0 and called_by.isdecimal() else owners


def _parsed(data: bytes, shown: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content: dict[str, Any] = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _bad(shown, "it is not UTF-8") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _bad(shown, f"it is no TOML: {error}") from error
    return content


def _bad(where: str, what: str) -> SettingsError:
    return SettingsError(f"{where}: {clean(what, 300)}. (memledger --no-config runs without defaults.)")


def _check_names(content: Mapping[str, Any], shown: str) -> None:
    for name, value in content.items():
        if name in COMMANDS and name not in NO_DEFAULTS_FOR and isinstance(value, dict):
            for key in value:
                if key not in names_of(name):
                    raise _bad(shown, f"[{name}] has no key {_quoted(key)}{_meant(key, names_of(name))}")
        elif name in COMMANDS and name not in EVERYWHERE:
            raise _bad(shown, f"{name} is a command: write a table, [{name}]")
        elif isinstance(value, dict):
            raise _bad(shown, f"{clean(name, 60)}: there is no command of that name{_meant(name, list(COMMANDS))}")
        elif name not in EVERYWHERE:
            raise _bad(shown, f"there is no key {_quoted(name)}{_meant(name, (*EVERYWHERE, *COMMANDS))}")


def names_of(command: str) -> tuple[str, ...]:
    """The keys that a command's table may hold."""
    return _DEMO if command == "demo" else (*EVERYWHERE, *OWN.get(command, ()))


def _meant(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def _quoted(name: str) -> str:
    return repr(clean(name, 60))


def defaults(
    name: str, command: click.Command, content: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, Default]:
    """The defaults that hold for one command, by key: a variable before the file, the command's own before the general one.

    Raises:
        SettingsError: a value is of the wrong type, or the command's table names an option that it does not have.
    """
    shown = clean(str(place(environment)))
    found: dict[str, Default] = {}
    # `rules` is a command and an option: a table is the command's.
    own = one if isinstance(one := content.get(name), dict) else {}
    general_keys = {key: value for key, value in content.items() if key in EVERYWHERE and not isinstance(value, dict)}
    for key in names_of(name):
        option = option_of(command, key)
        if option is None:
            if key in own:
                raise _bad(shown, f"[{name}] {key}: memledger {name} has no such option")
            continue
        assert option.name is not None
        for variable in (f"MEMLEDGER_{name.upper()}_{key.upper()}", f"MEMLEDGER_{key.upper()}"):
            general = variable == f"MEMLEDGER_{key.upper()}"
            text = environment.get(variable)
            if key in found or not text or (general and key not in EVERYWHERE):
                continue
            value = _from_text(option, text, variable)
            if not (general and _is_no_choice(option, value)):
                found[key] = Default(option.name, value, variable)
        for table, where in ((own, f"{shown}, [{name}] {key}"), (general_keys, f"{shown}, {key}")):
            if key in found or key not in table:
                continue
            value = _typed(option, table[key], where)
            if not (table is general_keys and _is_no_choice(option, value)):
                found[key] = Default(option.name, value, where)
    return found


def option_of(command: click.Command, key: str) -> click.Option | None:
    """The option of a command that a key is the default of."""
    flag = f"--{key.replace('_', '-')}"
    return next((p for p in command.params if isinstance(p, click.Option) and flag in p.opts), None)


def _is_no_choice(option: click.Option, value: object) -> bool:
    """A general default that this command does not know (`markdown` for a list of servers) is not meant for it."""
    return isinstance(option.type, click.Choice) and value not in option.type.choices


def kind_of(option: click.Option) -> str:
    """What the file must hold for an option, in words."""
    if option.is_flag:
        return "true or false"
    if option.multiple:
        return "a list of texts"
    if isinstance(option.type, click.types.IntParamType):
        return "a whole number"
    if isinstance(option.type, click.types.FloatParamType):
        return "a number"
    if isinstance(option.type, click.Choice):
        return " or ".join(f'"{choice}"' for choice in option.type.choices)
    return "a text"


def _typed(option: click.Option, value: object, where: str) -> object:
    kind = kind_of(option)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    right = {
        "true or false": isinstance(value, bool),
        "a list of texts": isinstance(value, list) and all(isinstance(one, str) for one in value),
        "a whole number": is_number and isinstance(value, int),
        "a number": is_number,
    }.get(kind, isinstance(value, str))
    if not right:
        raise _bad(where, f"give {kind}, not {clean(repr(value), 60)}")
    return value


def _from_text(option: click.Option, text: str, variable: str) -> object:
    if option.is_flag:
        if text.lower() not in _YES | _NO:
            raise _bad(variable, f"give 1 or 0, not {_quoted(text)}")
        return text.lower() in _YES
    if option.multiple:
        separator = os.pathsep if "--rules" in option.opts else ","
        return [part.strip() for part in text.split(separator) if part.strip()]
    return text


def apply(ctx: click.Context, name: str, command: click.Command, arguments: Sequence[str]) -> None:
    """Give the command that is about to run its defaults.

    Raises:
        SettingsError: one can't be used.
    """
    found = defaults(name, command, read())
    if name == "explain" and not any(word == "--pid" or word.startswith("--pid=") for word in arguments):
        found.pop("api_key_env", None)  # a log is sent no key
    ctx.default_map = {name: {one.parameter: one.value for one in found.values()}}
    ctx.meta[ORIGINS] = {one.parameter: one.origin for one in found.values()}


def explained(error: click.ClickException) -> click.ClickException:
    """The error, with where the value stands that it is about, if that is not the command line."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return error
    name = error.param.name
    source = error.ctx.get_parameter_source(name) if name is not None else None
    origin = error.ctx.meta.get(ORIGINS, {}).get(name)
    if source is not click.core.ParameterSource.DEFAULT_MAP or origin is None:
        return error
    return click.BadParameter(f"{error.message} (From {origin}.)", error.ctx, error.param)


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """`MEMLEDGER_*` variables that nothing reads, each with the name that may have been meant."""
    known = [f"MEMLEDGER_{key.upper()}" for key in EVERYWHERE] + list(OTHER_VARIABLES)
    for command in COMMANDS:
        if command not in NO_DEFAULTS_FOR:
            known += [f"MEMLEDGER_{command.upper()}_{key.upper()}" for key in names_of(command)]
    told = []
    for name in sorted(environment):
        if name.startswith("MEMLEDGER_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            told.append(f"{clean(name, 80)}: nothing reads this variable{f'; {near[0]} may be meant' if near else ''}")
    return told
