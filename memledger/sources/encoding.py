"""Any Unicode encoding to UTF-8: PowerShell writes logs as UTF-16, with or without a byte order mark."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import Final

_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LOOKED_AT: Final = 4096


def to_utf8(blocks: Iterator[bytes], note: Callable[[str], None]) -> Iterator[bytes]:
    """The blocks as UTF-8. Bytes that are no UTF-8 stay as they are; broken UTF-16 becomes replacement characters."""
    first = next(blocks, b"")
    encoding, skip = encoding_of(first)
    if encoding == "utf-8":
        if first[skip:]:
            yield first[skip:]
        yield from blocks
        return
    note(f"it is {encoding.upper()}; read as such.")
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(first[skip:]).encode("utf-8", "replace")
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "replace")
    if rest := decoder.decode(b"", final=True):
        yield rest.encode("utf-8", "replace")


def encoding_of(head: bytes) -> tuple[str, int]:
    """(encoding, length of its byte order mark). Without a mark, the places of NUL bytes tell."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding, len(mark)
    sample = head[: min(len(head), _LOOKED_AT) & ~3]
    if len(sample) >= 8 and b"\x00" in sample:
        nuls = [sample[i::4].count(0) * 4 / len(sample) for i in range(4)]
        often = tuple(share > 0.7 for share in nuls)
        never = [share < 0.1 for share in nuls]
        if often == (False, True, True, True) and never[0]:
            return "utf-32-le", 0
        if often == (True, True, True, False) and never[3]:
            return "utf-32-be", 0
        if often == (False, True, False, True) and never[0] and never[2]:
            return "utf-16-le", 0
        if often == (True, False, True, False) and never[1] and never[3]:
            return "utf-16-be", 0
    return "utf-8", 0
