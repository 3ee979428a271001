"""Where a request that the server logs ends: what stands in it was written by a user, however it looks."""

from __future__ import annotations

import re
from typing import Final

from memledger.prefix import is_users_text, text_after_prefix
from memledger.sanitize import strip_terminal

MARKS: Final = (b"Received request ", b"Receive: obj=", b"Finish: obj=", b"GenerateReqInput(")
"""One of these stands in each line that shows a request."""
LONGEST_REQUEST: Final = 256 * 2**10
"""How far a request that was logged raw, with line ends, is followed."""
LONGEST_LINE: Final = 2**20
"""Longer lines are cut for parsing (nothing that the engines print about memory comes near)."""

_LOOKED_AT: Final = 2000
_TAIL: Final = 64
_OPENS: Final = re.compile(rb"Received request [^\n]{0,200}?: prompt: |Receive: obj=|Finish: obj=")
_CLOSING: Final = (b"', params: ", b'", params: ', b"', prompt_token_ids: ", b'", prompt_token_ids: ')
_CLOSES: Final = re.compile(
    rb"['\"], (?:params|prompt_token_ids): |(?:, |\b)(?:sampling_params|input_ids|input_embeds|stream|return_logprob|log_metrics)=[^\n]*\)[ \t\r]*(?:\n|\Z)"
)


def shows_request(line: bytes) -> bool:
    """Whether the line's message shows a request, whose text is the user's."""
    return is_users_text(text_after_prefix(strip_terminal(line[:_LOOKED_AT].decode("utf-8", "replace"))))


def end_of_request(data: bytes, left: int, right: int, more: bool) -> int | None:
    """Where the request that is logged on the line ends: the line's end, or further down if its text has line ends.

    A prompt that was logged raw goes on to the line that closes it; None: that line may still come. Where no line closes
    it, it was cut, and what follows counts.
    """
    if right - left >= LONGEST_LINE:
        return right
    opened = _OPENS.search(data, left, right)
    if opened is None or _closes_on_its_line(data, opened.end(), left, right):
        return right
    limit = right + LONGEST_REQUEST
    closed = _CLOSES.search(data, right, limit)
    if closed is None or (closed.end() == len(data) and more):
        return None if more and len(data) < limit else right
    again = _OPENS.search(data, right, closed.start())
    if again is not None:
        return right
    end = data.find(b"\n", closed.end() - 1)
    return len(data) if end < 0 else end


def _closes_on_its_line(data: bytes, start: int, left: int, right: int) -> bool:
    """Whether the line closes the request that begins at `start`.

    What `_CLOSES` finds there ends the line with a bracket, or is one of the literals: these are found much faster.
    """
    tail = data[max(left, right - _TAIL) : right].rstrip() or data[left:right].rstrip()
    return tail.endswith(b")") or any(data.find(literal, start, right) >= 0 for literal in _CLOSING)
