"""Text from logs is untrusted: nothing of it reaches a terminal, a file or JSON without passing here."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any, Final

SHOWN_LENGTH: Final = 400
"""Evidence is cut to this many characters; the line number leads to the rest."""

MASK: Final = "***"

LONGEST_TEXT: Final = 32_000
"""Characters of one text in a document: what is longer was made to be."""

_ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])|\x9b[0-?]*[ -/]*[@-~]")
# Control characters, bidirectional overrides, zero-width and invisible characters, lone surrogates: they change how text
# looks, or what it says, without showing.
_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

# Words without which nothing is a secret: looked for first, because most lines hold none of them.
_HINTS: Final = (
    "key", "token", "secret", "passw", "passphrase", "credential", "authorization", "bearer", "://", "signature", "sig=",
    "sk-", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github", "glpat", "xox", "nvapi", "akia", "asia", "aiza", "eyj", "private",
    "cookie", "-u ", "--user", "--proxy-user",
)  # fmt: skip

# Counts of tokens, which most lines with a hint are about.
_COUNTS: Final = re.compile(
    r"tokens\b(?:['\"]?[=:] ?-?\d+|(?!['\"\\]{0,2}\s*[=:]))|(?<=#)[a-z -]{0,12}token\b|\btoken(?: usage|/s|\(s\))|\((?:token|tok)/s\)"
)

# Names whose value is a secret. `token` alone is one; of its compounds only those that name whose token it is: engines
# print `#token: 12`, `eos_token='</s>'`, `max_total_num_tokens=9`.
_NAMES: Final = r"""
    (?:[\w-]*[_-])?(?:
        api[_-]?keys? | (?:access|private|encryption|signing|account|shared|master|ssh|secret|service)[_-]?keys? | access[_-]?key[_-]?id
      | passw(?:or)?ds? | passphrase | credentials? | client[_-]?secret | secrets? | secret[_-]?access[_-]?key
      | (?:hf|hugging[_-]?face(?:[_-]?hub)?|hub|auth|access|refresh|id|api|session|git(?:hub|lab)|wandb|modelscope|security|private|secret
          |admin|user|jwt|oauth2?|bot|slack|service|client|personal|deploy|registry|bearer|csrf)[_-]?tokens?
    )
  | (?:proxy-)?authorization | (?:set-)?cookie | x-amz-(?:signature|credential|security-token) | x-api-key | signature | (?<=[?&])sig
"""
_VALUE: Final = r"""
    (?P<value>
        (?:(?:bearer|basic|token)\s+)?(?:
            b?\\*"(?:[^"\\]|\\(?!"))*(?:\\?"|$) | b?\\*'(?:[^'\\]|\\(?!'))*(?:\\?'|$)
          | \[[^\]]*(?:\]|$) | \([^)]*(?:\)|$) | \{[^}]*(?:\}|$) | [^\s,;&)}\]'"\\]+
        )
    )
"""
_NO_SECRET: Final = r"""(?!\\*["']?(?:None|null|true|false|\*\*\*|\[\]|<redacted>|xxxx+)(?![\w-]))"""
# Not behind a dash: a name is tried once, where it starts (a line of dashes would else be tried from each of them).
_WORDS: Final = r"""(?<![\w#-])"""


# A line of a private key's body stands alone in a log, without the words around the key: base64 in the lengths that keys are
# wrapped at (64 by OpenSSL, 70 by OpenSSH, 76 by MIME). Digests are of other letters, paths of words.
_KEY_BODY: Final = re.compile(
    r"(?<![\w+/=-])(?=[a-zA-Z0-9+/]{0,75}[G-Z])(?=[a-zA-Z0-9+/]{0,75}[g-z])(?=[a-zA-Z0-9+/]{0,75}[0-9])"
    r"(?:[a-zA-Z0-9+/]{64}|[a-zA-Z0-9+/]{70}|[a-zA-Z0-9+/]{76})(?![\w+/=-])"
)

_FEWEST_SWITCHES: Final = 12
"""Between upper and lower case, in a line of a key: random letters have about 25, words next to none."""
_FEWEST_SWITCHES_OF_A_PATH: Final = 20
_SLASHES_OF_A_PATH: Final = 5
"""A line of a key has one slash, as a rule."""


# What our own output may hold beside text: line ends, and colours.
_OWN: Final = re.compile(r"(\n|\x1b\[[0-9;]{0,20}m)")


@functools.lru_cache(maxsize=1)
def _secrets() -> tuple[re.Pattern[str], ...]:
    flags = re.IGNORECASE | re.VERBOSE
    return (
        # --api-key VALUE, --api-key=VALUE, ['--api-key', 'VALUE']; vLLM takes several keys
        re.compile(
            rf"""(?P<keep>(?<![\w-])--?(?:{_NAMES}|token)(?:=|\s+|\\*["']\s*,\s*(?=\\*["'])))(?!\\*["']?--){_NO_SECRET}{_VALUE}
            (?:\s+[\w.~+/-]{{16,}}(?!\S))*""",
            flags,
        ),
        # NAME=VALUE, NAME: VALUE, "name": "value", 'name': ['value']
        re.compile(rf"""(?P<keep>{_WORDS}(?:{_NAMES})\\*["']?\s*[=:]\s*){_NO_SECRET}{_VALUE}""", flags),
        # token=VALUE: a number is a count
        re.compile(
            rf"""(?P<keep>(?<![\w#-])(?<!full[ ])(?<!swa[ ])(?<!gpu[ ])(?<!cpu[ ])token\\*["']?\s*[=:]\s*){_NO_SECRET}(?!-?[\d.,]+(?:[^\w-]|$)|<){_VALUE}""",
            flags,
        ),
        re.compile(r"(?P<keep>\b(?:bearer|basic)\s+)(?P<value>(?=\S*[\d._~+/=-])[A-Za-z0-9._~+/=-]{8,})", flags),
        # curl -u user:password
        re.compile(r"(?P<keep>(?<!\S)(?:-u|--user|--proxy-user)[ =]['\"]?[^\s:'\"]{1,100}:)(?P<value>[^\s'\"]+)"),
        # A URL's token: token@host
        re.compile(r"(?P<keep>://)(?P<value>[^@\s/:'\"]{16,200})(?=@)"),
        # A URL's password: user:password@host
        re.compile(r"(?P<keep>\b[a-z][\w+.-]{0,30}://[^/\s:@'\"]{0,100}:)(?P<value>[^@\s/'\"]{1,200})(?=@)", flags),
        # Keys known by their look
        re.compile(
            r"""(?P<keep>(?<![A-Za-z0-9]))(?P<value>
                (?:sk|hf|gh[pousr]|github_pat|glpat|xox[abeprs]|nvapi|npm|pypi|dop_v1|lin_api|pk|rk)[-_][A-Za-z0-9_-]{16,}
              | (?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Z]) | AIza[0-9A-Za-z_-]{30,}
              | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?
              | -----BEGIN[ A-Z]*PRIVATE[ ]KEY-----.*
            )""",
            re.VERBOSE | re.DOTALL,
        ),
    )


def strip_terminal(text: str) -> str:
    """`text` without terminal escape sequences (kept otherwise as it is)."""
    return _ANSI.sub("", text) if "\x1b" in text or "\x9b" in text else text


def mask_secrets(text: str) -> str:
    """`text` with API keys, tokens and passwords replaced by `***`."""
    text = _KEY_BODY.sub(_masked_key_line, text)
    lower = _COUNTS.sub("", text.lower())
    if not any(hint in lower for hint in _HINTS):
        return text
    for pattern in _secrets():
        text = pattern.sub(_masked, text)
    return text


def _masked_key_line(found: re.Match[str]) -> str:
    letters = [c.isupper() for c in found.group() if c.isalpha()]
    switches = sum(a != b for a, b in itertools.pairwise(letters))
    like_a_path = found.group().count("/") >= _SLASHES_OF_A_PATH
    fewest = _FEWEST_SWITCHES_OF_A_PATH if like_a_path else _FEWEST_SWITCHES
    return MASK if switches >= fewest else found.group()


def _masked(found: re.Match[str]) -> str:
    return f"{found.group('keep')}{MASK}"


def clean(text: str, length: int = SHOWN_LENGTH) -> str:
    """`text` fit to be shown on one line: no escapes, no hidden characters, secrets masked, at most `length` characters."""
    # Masking looks at more than is shown, so that a secret cut in half is still masked.
    shown = strip_terminal(text[: length * 4]).replace("\t", " ").replace("\r\n", " ").replace("\n", " ")
    shown = mask_secrets(_HIDDEN.sub("\N{REPLACEMENT CHARACTER}", shown)).strip()
    return shown if len(shown) <= length else shown[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def clean_tree(value: Any, length: int = LONGEST_TEXT) -> Any:
    """A JSON value with every text in it clean, the names too; the text of a name that is a secret's is masked."""
    if isinstance(value, str):
        # A file name need not be text: what is not comes out as `?`.
        return clean(value.encode("utf-8", "replace").decode(), length)
    if isinstance(value, Mapping):
        return {
            clean_tree(name, length): MASK
            if item and isinstance(item, str) and is_secret(name)
            else clean_tree(item, length)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [clean_tree(item, length) for item in value]
    return value


@functools.lru_cache(maxsize=4096)
def is_secret(name: object) -> bool:
    """Whether what a name stands for is a secret, by the name."""
    return isinstance(name, str) and mask_secrets(f"{name}=x0x0x0x0") != f"{name}=x0x0x0x0"


def printable(text: str) -> str:
    """Text that is made up for a terminal: what acts on it or hides in it becomes a replacement character, colours and line ends stay.

    The last of several: what comes from outside is cleaned where it is taken in.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        part if number % 2 else _HIDDEN.sub("\N{REPLACEMENT CHARACTER}", part)
        for number, part in enumerate(_OWN.split(text))
    )
