"""Text from logs is untrusted: nothing of it reaches a terminal, a file or JSON without passing here."""

from __future__ import annotations

import re
from typing import Final

SHOWN_LENGTH: Final = 400
"""Evidence is cut to this many characters; the line number leads to the rest."""

_ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Control characters, bidirectional overrides, zero-width characters and lone surrogates change how text looks without showing.
_HIDDEN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_SECRET_NAME: Final = r"(?:[\w-]*(?:api[_-]?key|apikey|token|secret|passw(?:or)?d|authorization|credential|access[_-]?key|private[_-]?key)s?)"
_NOT_SECRET_NAME: Final = r"(?![\w-]*(?:tokens\b|max_tokens|num_tokens|tokenizer|token_(?:usage|ids?|type|to)|skip_tokenizer|token[_-]?ratio))"
_SECRETS: Final = (
    re.compile(rf"""(?i)(?P<keep>(?:--|\b|['"])(?:{_NOT_SECRET_NAME}){_SECRET_NAME}['"]?\s*(?:[=:]|\s)\s*['"]?(?:bearer\s+)?)(?P<value>(?!None\b|null\b|True\b|False\b|\*\*\*)[^\s'",;)}}\]]{{6,}})"""),
    re.compile(r"(?i)(?P<keep>\bbearer\s+)(?P<value>[A-Za-z0-9._~+/=-]{8,})"),
    re.compile(r"(?P<keep>\b)(?P<value>(?:sk|hf|ghp|gho|glpat|xox[abp]|nvapi)[-_][A-Za-z0-9_-]{10,}|AKIA[0-9A-Z]{16})"),
    re.compile(r"(?P<keep>\w+://[^/\s:@]+:)(?P<value>[^@\s/]+)(?=@)"),
)


def strip_terminal(text: str) -> str:
    """`text` without terminal escape sequences (kept otherwise as it is)."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def mask_secrets(text: str) -> str:
    """`text` with API keys, tokens and passwords replaced by `***`."""
    for pattern in _SECRETS:
        text = pattern.sub(lambda m: m.group("keep") + "***", text)
    return text


def clean(text: str, length: int = SHOWN_LENGTH) -> str:
    """`text` fit to be shown: no escapes, no hidden characters, secrets masked, at most `length` characters."""
    # Masking looks at more than is shown, so that a secret cut in half is still masked.
    text = mask_secrets(_HIDDEN.sub("\N{REPLACEMENT CHARACTER}", strip_terminal(text[: length * 4])))
    text = text.replace("\t", " ").strip()
    return text if len(text) <= length else text[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"
