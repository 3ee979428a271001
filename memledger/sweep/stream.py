"""A streamed answer taken apart: server-sent events, and what a completion's piece says; pure, and bounded whatever comes.

The format is that of https://html.spec.whatwg.org/multipage/server-sent-events.html as far as servers of the OpenAI interface
use it: lines of `data: JSON`, a blank line after each event, `data: [DONE]` last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from memledger.sanitize import clean

LONGEST_LINE: Final = 2**20
"""Bytes of one line; a piece of text has some hundred."""
DONE: Final = b"[DONE]"


class StreamError(Exception):
    """What comes is no stream of a completion; one sentence."""


class Events:
    """Bytes as they come to the data of whole events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, block: bytes) -> Iterator[bytes]:
        """The events that these bytes complete.

        Raises:
            StreamError: a line or an event is longer than any piece of text.
        """
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise StreamError(f"a line of the stream is longer than {LONGEST_LINE // 2**20} MiB")
        for line in (one.removesuffix(b"\r") for one in lines):
            if not line:
                if self._data:
                    yield b"\n".join(self._data)
                self._data, self._size = [], 0
            elif line.startswith(b"data:"):
                self._size += len(line)
                if self._size > LONGEST_LINE:
                    raise StreamError(f"an event of the stream is longer than {LONGEST_LINE // 2**20} MiB")
                self._data.append(line[5:].removeprefix(b" "))
            # Comments (keep-alive), `event:`, `id:` and `retry:` say nothing of a completion.


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Counts(msgspec.Struct, frozen=True):
    """The server's count of a request's tokens."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Piece(msgspec.Struct, frozen=True):
    choices: list[dict[str, Any]] = []
    usage: Counts | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(_Piece)


class Piece(msgspec.Struct, frozen=True):
    """One event: whether it holds tokens, and the usage where it says it."""

    has_tokens: bool
    usage: Counts | None = None


class ServerSaysError(StreamError):
    """The server sent an error in the stream; its text."""


def piece(data: bytes) -> Piece:
    """What one event says.

    Raises:
        ServerSaysError: an error of the server.
        StreamError: it is no piece of a completion.
    """
    try:
        found = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StreamError(f"an event is no piece of a completion: {clean(str(error), 120)}") from None
    if found.error is not None:
        raise ServerSaysError(error_text(found.error))
    # A piece may have tokens and no text: the first bytes of a character.
    return Piece(bool(found.choices), found.usage)


def error_text(value: Any) -> str:
    """A server's error in words, however it wraps it."""
    for name in ("error", "detail", "message"):
        if isinstance(value, dict) and value.get(name):
            return error_text(value[name])
    return clean(str(value), 300)
