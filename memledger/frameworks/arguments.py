"""Reading the argument dumps of engines: Python reprs, `key=value` lists and command lines, whole or cut off.

The dumps are Python reprs of dataclasses (`ServerArgs(a=1, b=C(d='x'))`), of dicts and of `Namespace`, and vLLM's
`key=value, key=value` engine line with bare words. They are untrusted and often cut by a terminal or a line limit: what
stands complete is read, a last value without its terminator is dropped (a cut `max_model_len=2621` must not become a
number), nothing is evaluated.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Final

DEEPEST: Final = 40
"""Nesting beyond this is not read (engines nest four or five deep; hostile text nests without end)."""

_NAME: Final = re.compile(r"[A-Za-z_][\w.]*")
_NUMBER: Final = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+|inf|nan)(?=\s*(?:[,)\]}:]|$))")
_BARE: Final = re.compile(r"[^,()\[\]{}'\"=\s][^,()\[\]{}'\"\n]*")
_SPACE: Final = re.compile(r"\s*")
_WORDS: Final[dict[str, Any]] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSERS: Final = {"(": ")", "[": "]", "{": "}"}


class _CutError(Exception):
    """The text ended inside a value."""


class _Reader:
    """A recursive-descent reader over one text. Containers cut off keep their complete items and set `cut`."""

    def __init__(self, text: str, position: int = 0) -> None:
        self.text = text
        self.position = position
        self.cut = False

    def skip(self) -> str:
        """Skip blanks; the next character, or "" at the end."""
        found = _SPACE.match(self.text, self.position)
        self.position = found.end() if found else self.position
        return self.text[self.position : self.position + 1]

    def value(self, depth: int = 0) -> Any:
        """The next value.

        Raises:
            _CutError: the text ends inside it, or it nests too deep.
        """
        character = self.skip()
        if not character or depth > DEEPEST:
            raise _CutError
        if character in "'\"":
            return self.string()
        if character in "([{":
            self.position += 1
            return self.items(_CLOSERS[character], depth)
        return self.word(depth)

    def string(self) -> str:
        """A quoted string, escapes kept simple: a backslash protects the next character."""
        quote = self.text[self.position]
        start = self.position + 1
        end = start
        while end < len(self.text):
            if self.text[end] == "\\":
                end += 2
                continue
            if self.text[end] == quote:
                self.position = end + 1
                return self.text[start:end]
            end += 1
        self.position = len(self.text)
        raise _CutError

    def word(self, depth: int) -> Any:
        """A number, a constant, a call, an enum repr, or a bare word up to the next comma or bracket."""
        if number := _NUMBER.match(self.text, self.position):
            if number.end() == len(self.text):
                raise _CutError
            self.position = number.end()
            return _to_number(number.group())
        name = _NAME.match(self.text, self.position)
        if name and self.text[name.end() : name.end() + 1] == "(":
            self.position = name.end() + 1
            return self.items(")", depth)
        if self.text[self.position] == "<":
            return self.angle()
        bare = _BARE.match(self.text, self.position)
        if bare is None:
            raise _CutError
        self.position = bare.end()
        if self.position == len(self.text):
            raise _CutError
        word = bare.group().strip()
        return _WORDS.get(word, word)

    def angle(self) -> str:
        """`<CUDAGraphMode.FULL: (2, 1)>`: the text inside, with its brackets."""
        end = self.text.find(">", self.position)
        if end < 0:
            self.position = len(self.text)
            raise _CutError
        inside = self.text[self.position + 1 : end]
        self.position = end + 1
        return inside

    def items(self, closer: str, depth: int) -> Any:
        """The items up to `closer`: a dict where keys are given (`a=1`, `'a': 1`), else a list."""
        mapping: dict[str, Any] = {}
        values: list[Any] = []
        while True:
            character = self.skip()
            if not character:
                self.cut = True
                break
            if character == closer:
                self.position += 1
                break
            if character in ",)]}":
                self.position += 1
                continue
            before = self.position
            try:
                self.item(mapping, values, depth)
            except _CutError:
                self.cut = True
                self.position = max(self.position, before + 1)
                if self.position >= len(self.text):
                    break
            if self.cut and self.position >= len(self.text):
                break
        return mapping if mapping else values if closer != "}" else mapping

    def item(self, mapping: dict[str, Any], values: list[Any], depth: int) -> None:
        """One `key=value`, `key: value` or value."""
        if (name := _NAME.match(self.text, self.position)) and self.text[name.end() : name.end() + 1] == "=":
            self.position = name.end() + 1
            mapping[name.group()] = self.value(depth + 1)
            return
        first = self.value(depth + 1)
        if self.skip() == ":" and isinstance(first, (str, int, float)):
            self.position += 1
            mapping[str(first)] = self.value(depth + 1)
        else:
            values.append(first)


def _to_number(text: str) -> int | float | str:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def parse_literal(text: str) -> Any:
    """The value of a Python repr at the start of `text` (dict, list, string, number, call).

    Containers cut off keep their complete items; None where nothing complete stands.
    """
    try:
        return _Reader(text).value()
    except (_CutError, RecursionError):
        return None


def parse_call(text: str) -> dict[str, Any]:
    """The keyword arguments of the first call in `text`: `ServerArgs(a=1, b=C(d=2))` gives {"a": 1, "b": {"d": 2}}."""
    start = text.find("(")
    if start < 0:
        return {}
    try:
        value = _Reader(text, start).value()
    except (_CutError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def parse_pairs(text: str) -> dict[str, Any]:
    """vLLM's engine line: `model='x', dtype=torch.bfloat16, compilation_config={...}` with bare words as strings."""
    reader = _Reader(text)
    try:
        value = reader.items("\n", 0)
    except RecursionError:
        return {}
    return value if isinstance(value, dict) else {}


def parse_command_line(text: str) -> dict[str, str | bool]:
    """The flags of an echoed command line: `--tp 8 --enable-x --a=b` gives {"tp": "8", "enable_x": True, "a": "b"}.

    Names lose their dashes and use underscores; a repeated flag keeps the last value; a flag followed by another flag
    (or by nothing) is True. Ends at a shell operator (`|`, `>`, `&&`, `;`). Broken quoting is split at blanks.
    """
    text = text.replace("\\\n", " ").replace(" \\ ", " ")
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    flags: dict[str, str | bool] = {}
    name: str | None = None
    for word in words:
        if word in {"|", "||", "&", "&&", ";", ">", ">>", "2>&1", "<"} or word.startswith((">", "2>", "&>")):
            break
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            flags[name] = value if equals else True
            name = None if equals else name
        elif name is not None:
            flags[name] = word
            name = None
    return flags


def as_int(value: Any) -> int | None:
    """A whole number given as int, float without a fraction, or digits (with `k`/`K`/`M` of vLLM 0.9+); else None.

    vLLM: lower-case k, m, g are decimal, upper-case K, M, G binary (`human_readable_int`, engine/arg_utils.py).
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and (
        found := re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmgKMG]?)", value.strip().replace("_", ""))
    ):
        factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}[found.group(2)]
        number = float(found.group(1)) * factor
        return int(number) if number.is_integer() else None
    return None


def as_float(value: Any) -> float | None:
    """A number given as number or text; None otherwise."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def as_text(value: Any) -> str | None:
    """A non-empty text that is not the word None; numbers and flags are not text."""
    return value if isinstance(value, str) and value and value != "None" else None


def as_flag(value: Any) -> bool | None:
    """A flag given as bool or as the words True and False; None otherwise."""
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else None
