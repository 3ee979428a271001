"""Files that are not of this machine: whatever fsspec reaches (`s3://`, `gs://`, `hdfs://`, `zip://...::s3://...`), listed and streamed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from memledger.extras import install_command
from memledger.fleet.columns import Row
from memledger.sources import InputError, OpenInput

BLOCK_BYTES: Final = 4 * 2**20
"""Bytes of one request to a store."""

_PACKAGES: Final = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "hdfs": "pyarrow", "http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko",
    "oci": "ocifs", "oss": "ossfs", "hf": "huggingface_hub",
}  # fmt: skip
_STAMPS: Final = ("etag", "md5Hash", "crc32c", "generation", "VersionId", "mtime", "modified", "LastModified", "last_modified", "updated", "CRC", "date_time")  # fmt: skip
"""What stores say of a file that changes with its content, under fsspec's names for it."""


class RemoteError(Exception):
    """A URL that can't be reached; the text is one sentence."""


class Listed:
    """A file as a store lists it."""

    def __init__(self, name: str, info: Row) -> None:
        self.name = name
        size = info.get("size")
        self.size = size if isinstance(size, int) else None
        lowered = {key.lower(): value for key, value in info.items()}
        self.stamp = "|".join(str(lowered[key.lower()]) for key in _STAMPS if lowered.get(key.lower()) is not None)


def _system(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it.

    Raises:
        RemoteError: fsspec, or the package for this kind of URL, is not installed, or it refuses the URL.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise RemoteError(f"reading URLs takes fsspec: {install_command('fleet')}") from error
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        kind = url.partition("::")[0].partition("://")[0]
        package = _PACKAGES.get(kind)
        how = f"pip install {package}" if package else str(error)
        raise RemoteError(f"{kind}:// takes a package of its own: {how}") from error
    except Exception as error:  # each store has its own
        raise RemoteError(f"it can't be reached: {_words(error)}") from error
    return system, path


def listing(url: str) -> list[Listed]:
    """The files at a URL: itself, all in a folder, or those that a pattern matches.

    Raises:
        RemoteError: it can't be listed.
    """
    system, path = _system(url)
    rest = url.partition("::")[2]

    def name(found: str) -> str:
        whole = str(system.unstrip_protocol(found))
        return f"{whole}::{rest}" if rest else whole

    try:
        if any(c in path for c in "*?["):
            found = system.glob(path, detail=True)
        else:
            info = system.info(path)
            found = system.find(path, detail=True) if info.get("type") == "directory" else {path: info}
    except FileNotFoundError as error:
        raise RemoteError("there is no such file or folder; check the name.") from error
    except Exception as error:
        raise RemoteError(f"it can't be listed: {_words(error)}") from error
    return [Listed(name(key), info) for key, info in found.items() if info.get("type") != "directory"]


def open_remote(url: str) -> OpenInput:
    """Open a file at a URL, to be read once as it comes; nothing is kept on disk.

    Raises:
        InputError: it can't be opened.
    """
    try:
        system, path = _system(url)
        stream = system.open(path, "rb", block_size=BLOCK_BYTES)
    except RemoteError as error:
        raise InputError(url, str(error)) from error
    except FileNotFoundError as error:
        raise InputError(url, "there is no such file; check the name.") from error
    except Exception as error:  # each store has its own
        raise InputError(url, f"it can't be opened: {_words(error)}") from error
    return RemoteInput(url, stream, system)


class RemoteInput(OpenInput):
    """An input that a thread fetches: the next block is on its way while this one is read."""

    def __init__(self, url: str, stream: BinaryIO, system: Any) -> None:
        reading, writing = os.pipe()
        super().__init__(url, os.fdopen(reading, "rb", buffering=0), None, follow=False, progress=None)
        self._error: str | None = None
        self._system = system  # an archive closes its streams when nobody holds it any more
        self._thread = threading.Thread(target=self._fetch, args=(stream, writing), daemon=True)
        self._thread.start()

    def blocks(self) -> Iterator[bytes]:
        """As for every input; where the store broke off, that is said at the end."""
        yield from super().blocks()
        if self._error is not None:
            self._cut(f"reading stopped: {self._error}")

    def close(self) -> None:
        """Close the input, and let the thread end: nobody reads what it writes."""
        super().close()
        self._thread.join()

    def _fetch(self, stream: BinaryIO, writing: int) -> None:
        try:
            with os.fdopen(writing, "wb", buffering=0) as pipe, stream:
                while block := stream.read(BLOCK_BYTES):
                    view = memoryview(block)
                    while view:
                        view = view[pipe.write(view) :]
        except BrokenPipeError:
            pass  # the reader has ended before the file
        except Exception as error:  # each store has its own; the reader says it
            self._error = _words(error)


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
