"""Architecture facts of models people serve, so that a log can be explained on a machine that has no `config.json`.

`models.json` has one row per model: its name, where the fields were read, and the fields themselves under the names of the
model's own `config.json`. Lists of layer kinds are written as runs (`3*linear_attention full_attention`).

A name is looked up without its organisation, and without the endings that say how a copy was quantised or tuned
(`-FP8`, `-AWQ`, `-Instruct`, `-2507`). Anything else in a name must agree: another size, another generation or a pruned
copy never matches.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from memledger.model.architecture import Architecture, NotModelledError, Quantization
from memledger.model.config import language_part, read_config

_RUNS: Final = frozenset({"layer_types", "indexer_types", "layers_block_type"})
_NUMBER_RUNS: Final = frozenset({"moe_layer_freq", "hybrid_layer_pattern", "attn_type_list"})

_TUNED_WORD: Final = re.compile(r"instruct|chat|it|base|thinking|hf|pt")
_TUNED: Final = re.compile(r"instruct|chat|it|base|thinking|hf|pt|\d{4}")
_QUANTISED: Final[dict[str, Quantization | None]] = {
    "bf16": None,
    "fp16": None,
    "fp8": Quantization("fp8", bits=8, named_only=True),
    "awq": Quantization("awq", bits=4, group=128, zero_points=True, named_only=True),
    "autoawq": Quantization("awq", bits=4, group=128, zero_points=True, named_only=True),
    "gptq": Quantization("gptq", bits=4, group=128, zero_points=True, named_only=True),
    "w4a16": Quantization("compressed-tensors", bits=4, group=128, named_only=True),
    "int4": Quantization("compressed-tensors", bits=4, group=128, named_only=True),
    "w8a8": Quantization("compressed-tensors", bits=8, named_only=True),
    "w8a16": Quantization("compressed-tensors", bits=8, named_only=True),
    "int8": Quantization("compressed-tensors", bits=8, named_only=True),
}
"""What an ending says about the weights; group sizes are the usual ones, hence `named_only`."""

_MIXED: Final = frozenset(
    {"nvfp4", "fp4", "mxfp4", "mxfp8", "exl2", "exl3", "gguf", "4bit", "8bit", "6bit", "w4a8", "w4afp8", "bnb", "mlx"}
)
"""Endings of formats that keep several kinds of modules apart: which, the name does not say."""

_FILLERS: Final = frozenset(
    {"dynamic", "static", "per", "tensor", "block", "quantized", "qat", "quarot", "int", "g128", "sym", "marlin", "g32"}
)
"""Words that only describe a quantised copy."""
_REVISION: Final = re.compile(r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}")
"""A commit's hash at the end of a folder's name: digits and letters both, so that no date and no word is one."""


class Match(msgspec.Struct, frozen=True):
    """A row that fits. `row`: its name. `exact`: the name is the row's own; else a relative's, and `architecture.notes` says so."""

    architecture: Architecture
    row: str
    exact: bool


class _Name(msgspec.Struct, frozen=True):
    """A model name taken apart: `key` what must agree, `full` everything, what the other words say, whose copy it is."""

    key: str
    full: str
    quantised: tuple[str, ...]
    tuned: tuple[str, ...]
    owner: str | None


@functools.cache
def _rows() -> tuple[dict[str, Any], ...]:
    # Beside this file: `importlib.resources` takes longer to import than the table to read.
    return tuple(json.loads(Path(__file__).with_name("models.json").read_bytes()))


@functools.cache
def _index() -> dict[str, list[tuple[_Name, int]]]:
    """Rows by the part of their names that must agree."""
    found: dict[str, list[tuple[_Name, int]]] = {}
    for number, row in enumerate(_rows()):
        for name in (row["name"], *row.get("aliases", ())):
            parsed = take_apart(name)
            found.setdefault(parsed.key, []).append((parsed, number))
    return found


def names() -> tuple[str, ...]:
    """The names of all rows."""
    return tuple(str(row["name"]) for row in _rows())


def base_name(model: str) -> str:
    """The last part of a path or identifier; inside a Hugging Face cache, the model the snapshot belongs to."""
    path = model.strip().replace("\\", "/").rstrip("/")
    cached = re.search(r"models--([^/]+?)--([^/]+?)(?:/|$)", path)
    if cached:
        return cached[2]
    return path.rsplit("/", 1)[-1]


def _owner(model: str) -> str | None:
    """The organisation of an identifier `organisation/name`, in small letters; None for a path or a bare name."""
    found = re.fullmatch(r"([\w.-]+)/[\w.-]+", model.strip())
    cached = re.search(r"models--([^/]+?)--", model)
    return (cached or found)[1].lower() if cached or found else None  # type: ignore[index]


def take_apart(model: str) -> _Name:
    """A model's name without organisation, its tuning and quantisation endings apart. Small letters, `-` between words."""
    full = base_name(model).lower()
    full = re.sub(r"(?<=\d)_(?=\d)", ".", full).replace("_", "-")
    full = re.sub(r"^nvidia-", "", full)
    full = re.sub(r"^meta-llama", "llama", full)
    words = re.split(r"-|\.(?=[a-z])", full)
    quantised: list[str] = []
    tuned: list[str] = []
    while len(words) > 1:
        last = words[-1]
        if last in _QUANTISED or last in _MIXED:
            quantised.append(last)
        elif _TUNED.fullmatch(last):
            tuned.append(last)
        elif last not in _FILLERS and not _REVISION.fullmatch(last):
            break
        words.pop()
    # "Mistral-7B-Instruct-v0.3": the word also stands before a version.
    tuned += [word for word in words[1:] if _TUNED_WORD.fullmatch(word)]
    kept = words[:1] + [word for word in words[1:] if not _TUNED_WORD.fullmatch(word)]
    return _Name("-".join(kept), full, tuple(quantised), tuple(tuned), _owner(model))


def look_up(model: str) -> Match | None:
    """The row for a model's name, path or Hugging Face identifier; None where no row fits.

    A copy that is quantised otherwise than the row gets the quantisation its name gives (`named_only`, or `mixed` where
    the name is not enough); a relative (instruct for base, a later date) keeps the layers; a later date loses
    `max_positions`, which such releases change.
    """
    wanted = take_apart(model)
    candidates = _index().get(wanted.key, [])
    if not candidates:
        return None
    for parsed, number in candidates:
        if parsed.full == wanted.full and not _other_copy(parsed, wanted):
            return Match(_architecture(number), _rows()[number]["name"], True)

    def closeness(candidate: tuple[_Name, int]) -> tuple[bool, bool, bool, int]:
        parsed, number = candidate
        return (
            set(parsed.quantised) != set(wanted.quantised),
            set(parsed.tuned) != set(wanted.tuned),
            bool(parsed.quantised),
            number,
        )

    parsed, number = min(candidates, key=closeness)
    return Match(_relative(_architecture(number), parsed, wanted), _rows()[number]["name"], False)


def _other_copy(row: _Name, wanted: _Name) -> bool:
    """Whether a quantised row is another organisation's copy: the same name, but perhaps other modules quantised."""
    return bool(row.quantised) and None not in (row.owner, wanted.owner) and row.owner != wanted.owner


def look_up_class(class_name: str, **dimensions: int) -> Match | None:
    """The one architecture with this class and these `config.json` fields; None where none or several fit.

    At least `num_hidden_layers` and `hidden_size` must be given: a class alone says nothing about the size.
    """
    if not {"num_hidden_layers", "hidden_size"} <= set(dimensions):
        return None
    fitting: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(_rows()):
        config = row["config"]
        text = language_part(config)
        if class_name not in (config.get("architectures") or text.get("architectures") or []):
            continue
        if any(text.get(key) != value for key, value in dimensions.items()):
            continue
        architecture = _architecture(number)
        fitting.setdefault((architecture.layers, architecture.hidden, architecture.vocabulary), number)
    if len(fitting) != 1:
        return None
    (number,) = fitting.values()
    name = _rows()[number]["name"]
    found = _architecture(number)
    note = f"recognised by class {class_name} and its dimensions; whether its weights are quantised is not known"
    quantization = Quantization("not known", mixed=True)
    return Match(msgspec.structs.replace(found, quantization=quantization, notes=(*found.notes, note)), name, False)


def _relative(found: Architecture, row: _Name, wanted: _Name) -> Architecture:
    """`found` adapted to the copy that was asked for."""
    notes = list(found.notes)
    changes: dict[str, Any] = {}
    if set(row.tuned) != set(wanted.tuned):
        notes.append(f"layers of {found.name}, a relative; its context length and rotary table may differ")
    if {word for word in row.tuned if word.isdigit()} != {word for word in wanted.tuned if word.isdigit()}:
        changes["max_positions"] = None
        changes["rope_rows"] = None
    if set(row.quantised) != set(wanted.quantised) or _other_copy(row, wanted):
        native = found.quantization if not row.quantised else Quantization("not known", mixed=True)
        changes["quantization"] = _named(wanted.quantised, native)
        notes.append("quantisation as the name says")
    return msgspec.structs.replace(found, notes=tuple(notes), **changes)


def _named(endings: tuple[str, ...], native: Quantization | None) -> Quantization | None:
    """What the endings of a name say; without any, what the row itself has."""
    if not endings:
        return native
    if any(ending in _MIXED for ending in endings) and not any(_QUANTISED.get(ending) for ending in endings):
        return Quantization(endings[-1], mixed=True)
    for ending in reversed(endings):
        named = _QUANTISED.get(ending)
        if named is not None:
            if native is not None and native.method == named.method:
                return native
            return named
    return None


@functools.lru_cache(maxsize=32)
def _architecture(number: int) -> Architecture:
    row = _rows()[number]
    source = f"bundled table, {row['name']}: {row['source']}"
    try:
        found = read_config(_expand(row["config"]), source, row["name"])
    except NotModelledError as error:
        raise NotModelledError(f"bundled table, {row['name']}: {error}") from error
    if "note" in row:
        found = msgspec.structs.replace(found, notes=(*found.notes, row["note"]))
    return found


def _expand(config: dict[str, Any]) -> dict[str, Any]:
    """The config with its runs written out."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            made[key] = _expand(value)
        elif isinstance(value, str) and key in _RUNS:
            made[key] = _unroll(value)
        elif isinstance(value, str) and key in _NUMBER_RUNS:
            made[key] = [int(item) for item in _unroll(value)]
        else:
            made[key] = value
    return made


def _unroll(runs: str) -> list[str]:
    """`3*a b` gives `[a, a, a, b]`."""
    items: list[str] = []
    for run in runs.split():
        count, star, kind = run.partition("*")
        items += [kind] * int(count) if star else [run]
    return items
