"""Where a model's architecture comes from: a file the user names, the model's own folder, the Hugging Face cache, the table.

In that order, and never the network. What is read here comes from others: files are limited in size, and whatever is wrong
with one becomes a sentence.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from memledger import opening
from memledger.ledger import NO_MODEL
from memledger.model.architecture import Architecture, NotModelledError
from memledger.model.config import language_part, read_config
from memledger.sanitize import clean

LARGEST_CONFIG: Final = 4 * 2**20
"""Bytes of a `config.json` that are read; real ones have some kilobytes."""
MOST_LAYERS: Final = 2048
LARGEST_NUMBER: Final = 2**40
"""Whole numbers above it are no field of a model."""
_SIZES: Final = frozenset(
    {
        "hidden_size",
        "head_dim",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "max_position_embeddings",
    }
)
"""Fields that are a positive whole number wherever they are given."""
_TYPES: Final = frozenset({"torch_dtype", "dtype"})
_CONFIG: Final = "config.json"
_WEIGHT_FORMAT: Final = "hf_quant_config.json"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_IDENTIFIER: Final = re.compile(r"(?:([\w.-]+)/)?([\w.-]+)")
_CACHED: Final = re.compile(r"models--([^/]+?)(?:--([^/]+?))?/snapshots/([^/]+)")


class ModelConfigError(ValueError):
    """A `config.json` that can't be used; the message is one sentence that names it."""


class Found(msgspec.Struct, frozen=True):
    """An architecture and `how` it was found; or None, and `how` says what was looked at."""

    architecture: Architecture | None
    how: str


def read_file(path: Path, name: str | None = None) -> Architecture:
    """The architecture in a `config.json`, or in the one of a folder. `name`: the model's, where it is known.

    Raises:
        ModelConfigError: missing, too large, not JSON, or not a model that is known here.
    """
    file = path / _CONFIG if path.is_dir() else path
    shown = clean(str(file), 200)
    mapping = _read_json(file, shown)
    beside = file.with_name(_WEIGHT_FORMAT)
    if not mapping.get("quantization_config") and beside.is_file():
        # ModelOpt writes the weights' format to a file of its own.
        mapping = {**mapping, "quantization_config": _read_json(beside, clean(str(beside), 200))}
    _check_counts(mapping, shown)
    try:
        return read_config(mapping, shown, name)
    except NotModelledError as error:
        raise ModelConfigError(clean(str(error), 300)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{shown}: not a model's config.json ({type(error).__name__})") from error


def _read_json(file: Path, shown: str) -> Mapping[str, Any]:
    try:
        if not file.is_file():
            raise ModelConfigError(f"{shown}: {_why_no_file(file)}")
        data = opening.read_file(file, LARGEST_CONFIG)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise error if isinstance(error, ModelConfigError) else ModelConfigError(f"{shown}: {reason}") from error
    if data is None:
        raise ModelConfigError(f"{shown}: larger than {LARGEST_CONFIG // 2**20} MiB, so not a model's config.json")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{shown}: not JSON") from error
    if not isinstance(found, dict):
        raise ModelConfigError(f"{shown}: not a JSON object")
    return found


def _why_no_file(file: Path) -> str:
    if file.is_fifo() or file.is_char_device() or file.is_block_device() or file.is_socket():
        return "a pipe or device, not a file: save the config.json first"
    return "no such file" if not file.exists() else "not a file"


def _check_sizes(part: Mapping[str, Any], shown: str) -> None:
    """Refuse sizes that no model has, by name: a layer of nothing would come out as no bytes."""
    for key, value in part.items():
        if value is None:
            continue
        named = f"{shown}: {clean(str(key), 60)}"
        if key in _SIZES and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelConfigError(f"{named} is no whole number: {clean(repr(value), 40)}")
        if key in _SIZES and value < 1:
            raise ModelConfigError(f"{named} is {value}, which no model has")
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise ModelConfigError(f"{named} is larger than any model's")
        if key in _TYPES and not isinstance(value, str):
            raise ModelConfigError(f"{named} is no type's name: {clean(repr(value), 40)}")
        if key == "quantization_config" and not isinstance(value, dict):
            raise ModelConfigError(f"{named} is no JSON object")


def _check_counts(mapping: Mapping[str, Any], shown: str) -> None:
    """Refuse a number of layers that no model has: lists of that length are made of it."""
    for part in (mapping, language_part(mapping)):
        _check_sizes(part, shown)
        for key, value in part.items():
            layers = "layer" in key or "period" in key or "interval" in key
            if isinstance(value, int | float) and not isinstance(value, bool) and layers and abs(value) > MOST_LAYERS:
                raise ModelConfigError(f"{shown}: {clean(str(key), 60)} is {value:.3g}, which no model has")
            if isinstance(value, list) and len(value) > 100 * MOST_LAYERS:
                raise ModelConfigError(f"{shown}: {clean(str(key), 60)} is a list of {len(value)} items")


@functools.lru_cache(maxsize=64)
def find(model: str | None, *, config: Path | None = None, look_here: bool = True) -> Found:
    """The architecture of a server's model.

    Args:
        model: name, identifier or path as the log has it; None where it has none.
        config: `--model-config`: a file, or a folder that holds a `config.json`.
        look_here: whether this machine's files may be looked at (the model's path, the Hugging Face cache).

    Raises:
        ModelConfigError: the file that the user named can't be used.
    """
    if config is not None:
        return Found(read_file(config, model), f"--model-config {clean(str(config), 200)}")
    if not model:
        return Found(None, NO_MODEL)
    reasons = []
    for place, file in _files(model) if look_here else ():
        try:
            found = read_file(file, model)
        except ModelConfigError as error:
            reasons.append(str(error))
            continue
        return Found(found, f"{place}: {found.source}")
    from memledger.model import table

    try:
        match = table.look_up(model)
    except NotModelledError as error:
        return Found(None, clean(str(error), 300))
    if match is not None:
        relation = "" if match.exact else f", for {clean(table.base_name(model), 80)}"
        return Found(match.architecture, f"bundled table: {match.row}{relation}")
    shown = clean(table.base_name(model), 80)
    looked = "here, nor in the bundled table" if look_here else "in the bundled table"
    reasons.append(
        f"no architecture of {shown} found {looked}; --model-config FILE would add what its weights, KV cache and recurrent state should take"
    )
    return Found(None, "; ".join(reasons))


def _files(model: str) -> Iterator[tuple[str, Path]]:
    """Files on this machine that may be the model's `config.json`, the likeliest first."""
    with_path = model.startswith(("/", "~/", "./", "../"))
    if with_path:
        try:
            folder = Path(model).expanduser()
            # A path of a log that leads to a single file is a GGUF file or the like: its folder may hold another model's config.
            if folder.is_dir() and (folder / _CONFIG).is_file():
                yield "the model's folder", folder / _CONFIG
        except (OSError, ValueError, RuntimeError):
            pass
    for file in _cached(model, with_path=with_path):
        yield "Hugging Face cache", file


def _cached(model: str, *, with_path: bool) -> Iterator[Path]:
    """The `config.json` in the local Hugging Face cache: of the snapshot named, of `main`, else of the newest snapshot."""
    commit = None
    if (inside := _CACHED.search(model)) is not None:
        parts, commit = [part for part in inside.group(1, 2) if part], inside[3]
    elif with_path or (plain := _IDENTIFIER.fullmatch(model)) is None:
        return
    else:
        parts = [part for part in plain.group(1, 2) if part]
    if any(set(part) <= {"."} for part in parts):
        return
    try:
        folder = cache_folder() / "--".join(("models", *parts))
        if not folder.is_dir():
            return
        named = commit or _main(folder)
        if (
            named is not None
            and _COMMIT.fullmatch(named)
            and (file := folder / "snapshots" / named / _CONFIG).is_file()
        ):
            yield file
            return
        if commit is None:
            every = [file for file in folder.glob(f"snapshots/*/{_CONFIG}") if file.is_file()]
            yield from sorted(every, key=lambda file: file.stat().st_mtime, reverse=True)[:1]
    except (OSError, ValueError, RuntimeError):
        return


def _main(folder: Path) -> str | None:
    file = folder / "refs" / "main"
    if not file.is_file():
        return None
    with opening.open_file(file) as stream:
        return stream.read(100).decode("ascii", "replace").strip()


def cache_folder() -> Path:
    """The Hugging Face hub's cache, as its own library finds it: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, ~/.cache."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface" / "hub"
