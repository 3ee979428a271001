"""Compressed inputs, told by their first bytes: gzip, xz, zstd, bzip2; bounded memory however far they expand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import IO, TYPE_CHECKING, Any, Final, Literal, cast

if TYPE_CHECKING:
    import bz2
    import lzma

Compression = Literal["gzip", "xz", "zstd", "bzip2"]

STEP_BYTES: Final = 2**20
"""No step gives more decompressed bytes than this."""
PIECE_BYTES: Final = 64 * 2**10
MEMORY_BYTES: Final = 96 * 2**20
"""A decompressor's own memory (xz -9 needs 65 MiB)."""
WINDOW_BYTES: Final = 2**26
_END: Final = b"memledger: the end of this input"

_MAGIC: Final[tuple[tuple[bytes, Compression], ...]] = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
)


class DamagedError(Exception):
    """Bytes that can't be decompressed."""


def compression_of(head: bytes) -> Compression | None:
    """How bytes that start like `head` are compressed; None where they are not."""
    return next((how for magic, how in _MAGIC if head.startswith(magic)), None)


def decompressed(
    how: Compression, blocks: Iterator[bytes], note: Callable[[str], None]
) -> Generator[bytes, None, None]:
    """The bytes inside. A cut or damaged archive gives what could be read, and a note."""
    steps = _zstd(blocks) if how == "zstd" else _streams(how, blocks)
    done = 0
    try:
        for block in steps:
            done += len(block)
            yield block
    except EOFError:
        note(f"the {how} data ends too early; what could be read of it ({done:,} bytes) is reported.")
    except DamagedError as error:
        note(f"the {how} data is damaged after {done:,} bytes ({error}); what could be read of it is reported.")


def _streams(how: Compression, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """One compressed stream after the other (archives may be appended to each other)."""
    current = _new(how)
    started = False
    for block in _in_pieces(blocks):
        data = block
        while data or not current.needs_input:
            if current.eof:
                # What follows the end of a stream: another one, or padding.
                data = data.lstrip(b"\x00")
                if not data:
                    break
                current = _new(how)
                started = False
            out = _step(current, data)
            started = True
            data = current.unused_data if current.eof else b""
            if out:
                yield out
            elif not current.eof and current.needs_input:
                break
    if started and not current.eof:
        raise EOFError


def _in_pieces(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Small pieces: what a step leaves of its input is copied for the next one."""
    for block in blocks:
        for at in range(0, len(block), PIECE_BYTES):
            yield block[at : at + PIECE_BYTES]


def _step(current: _Zlib | lzma.LZMADecompressor | bz2.BZ2Decompressor, data: bytes) -> bytes:
    try:
        return current.decompress(data, STEP_BYTES)
    except Exception as error:
        # zlib.error, lzma.LZMAError, OSError (bz2), MemoryError: all say that these bytes can't be decompressed.
        raise DamagedError(str(error)) from error


def _new(how: Compression) -> _Zlib | lzma.LZMADecompressor | bz2.BZ2Decompressor:
    if how == "gzip":
        return _Zlib()
    if how == "xz":
        import lzma

        return lzma.LZMADecompressor(memlimit=MEMORY_BYTES)
    import bz2

    return bz2.BZ2Decompressor()


class _Zlib:
    """zlib's decompressor with the interface of the other two."""

    def __init__(self) -> None:
        import zlib

        self._inner: Any = zlib.decompressobj(wbits=31)
        self.eof = False
        self.needs_input = True
        self.unused_data = b""

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        out: bytes = self._inner.decompress(self._inner.unconsumed_tail + data, max(max_length, 0))
        self.eof = self._inner.eof
        self.unused_data = self._inner.unused_data
        self.needs_input = not self._inner.unconsumed_tail and len(out) < max_length
        return out


def _zstd(blocks: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    # A frame that was cut reads as if it had ended; a last frame of our own comes out only if all before it was whole.
    last = zstandard.ZstdCompressor(level=1).compress(_END)
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    held = b""
    try:
        with decompressor.stream_reader(
            cast("IO[bytes]", _Reader(blocks, last)), read_size=STEP_BYTES, read_across_frames=True
        ) as reader:
            while block := reader.read(STEP_BYTES):
                # What is held may end with the mark, or with a part of it where the block is shorter than that.
                if held and len(block) >= len(_END):
                    yield held
                    held = block
                else:
                    held += block
    except zstandard.ZstdError as error:
        if held:
            yield held
        raise DamagedError(str(error)) from error
    whole = held.endswith(_END)
    if held := held.removesuffix(_END):
        yield held
    if not whole:
        raise EOFError


class _Reader:
    """A file-like object over blocks, with some bytes after the last."""

    def __init__(self, blocks: Iterator[bytes], last: bytes) -> None:
        self._blocks = itertools.chain(blocks, (last,))
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        block = self._rest or next(self._blocks, b"")
        self._rest = block[size:] if size >= 0 else b""
        return block[:size] if size >= 0 else block
