"""What to keep after a failure, in one archive: log tails, the kernel's messages, nvidia-smi, processes and limits, all masked.

The archive is a `.tar.gz` with a `manifest.json` that says of every source whether it could be had, and why not. Every text is
cleaned and its secrets are masked (`memledger.sanitize`), line by line. Nothing is asked over a network.
"""

from __future__ import annotations

import gzip
import io
import json
import platform
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from memledger import __version__
from memledger.atomic import write_bytes
from memledger.sanitize import clean
from memledger.sources.inputs import InputError, open_input

TAIL_BYTES: Final = 32 * 2**20
"""Bytes of the end of a log that are kept, and of its beginning (a start's ledger stands there)."""
HEAD_BYTES: Final = 4 * 2**20
MOST_OUTPUT: Final = 16 * 2**20
SECONDS: Final = 10
LONGEST_LINE: Final = 20_000


class CollectError(Exception):
    """The archive can't be written; one sentence."""


class Kept(msgspec.Struct, frozen=True):
    """One source: the name in the archive (None: nothing kept), and why it is missing or not whole."""

    source: str
    file: str | None = None
    reason: str | None = None


def collect(target: Path, logs: Sequence[str], *, look_here: bool = True) -> tuple[Path, tuple[Kept, ...]]:
    """Write the archive; gives its path and what is in it.

    Args:
        target: the archive, or a folder in which it gets a name with the time. What is there is never overwritten.
        logs: files whose beginning and end are kept.
        look_here: also what this machine shows (kernel messages, nvidia-smi, processes, memory, limits).

    Raises:
        CollectError: it can't be written, or is there already.
    """
    path = target / f"memledger-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz" if target.is_dir() else target
    shown = clean(str(path))
    if path.exists() or path.is_symlink():
        raise CollectError(f"{shown} is there already; name another file")
    kept: list[Kept] = []
    texts: dict[str, str] = {}
    for number, name in enumerate(logs, 1):
        _add(kept, texts, clean(name), f"logs/{number}-{_plain(Path(name).name)}", lambda name=name: _log(Path(name)))  # type: ignore[misc]
    if look_here:
        for source, file, how in _MACHINE:
            _add(kept, texts, source, file, how)
    manifest = {
        "memledger": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "sources": msgspec.to_builtins(kept),
    }
    texts["manifest.json"] = json.dumps(manifest, indent=1) + "\n"
    try:
        write_bytes(path, _archive(texts), mode=0o600)
    except OSError as error:
        raise CollectError(f"{shown} can't be written: {error.strerror or error}") from error
    return path, tuple(kept)


def _add(
    kept: list[Kept], texts: dict[str, str], source: str, file: str, how: Callable[[], tuple[str, str | None]]
) -> None:
    try:
        text, remark = how()
    except OSError as error:
        kept.append(Kept(source, None, clean(str(error.strerror or error))))
        return
    except subprocess.TimeoutExpired:
        kept.append(Kept(source, None, f"no answer within {SECONDS} s"))
        return
    texts[file] = masked(text)
    kept.append(Kept(source, file, clean(remark) if remark else None))


def masked(text: str) -> str:
    """Every line without terminal codes and secrets; its indentation stays, which a traceback is read by."""
    lines = []
    for line in text.splitlines():
        rest = line.lstrip(" ")
        lines.append(" " * min(len(line) - len(rest), 200) + clean(rest, LONGEST_LINE))
    return "\n".join(lines) + "\n"


def _plain(name: str) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)[:80]
    return kept.strip(".") or "log"


def _log(path: Path) -> tuple[str, str | None]:
    """The beginning and the end of a log as text: unpacked and decoded first, or the masking would not see its secrets."""
    if not path.is_file():
        raise OSError(None, "not a regular file" if path.exists() else "there is no such file")
    head, tail, size = bytearray(), bytearray(), 0
    try:
        with open_input(str(path)) as source:
            for block in source.blocks():
                if source.kind == "binary":
                    raise OSError(None, "it is no text, and masking could not see what is in it")
                size += len(block)
                free = HEAD_BYTES - len(head)
                head += block[:free]
                tail += block[free:]
                if len(tail) > 2 * TAIL_BYTES:
                    del tail[:-TAIL_BYTES]
    except InputError as error:
        raise OSError(None, error.problem) from error
    remarks = [note.removeprefix(f"{path}: ") for note in source.notes]
    left_out = size - len(head) - min(len(tail), TAIL_BYTES)
    if left_out <= 0:
        return (head + tail).decode("utf-8", "replace"), " ".join(remarks) or None
    first = head.decode("utf-8", "replace").rpartition("\n")[0]
    last = tail[-TAIL_BYTES:].decode("utf-8", "replace").partition("\n")[2]
    remarks.append(f"{left_out:,} bytes in the middle are left out")
    return f"{first}\n# ---- {remarks[-1]} ----\n{last}", " ".join(remarks)


def _run(*command: str) -> tuple[str, str | None]:
    """What a program of this machine prints."""
    if shutil.which(command[0]) is None:
        raise OSError(None, f"there is no {command[0]} here")
    done = subprocess.run(command, capture_output=True, check=False, timeout=SECONDS, stdin=subprocess.DEVNULL)
    text = done.stdout[-MOST_OUTPUT:].decode("utf-8", "replace")
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OSError(None, said[-1] if said else f"{command[0]} ended with {done.returncode}")
    return text, None


def _processes() -> tuple[str, str | None]:
    import psutil

    rows = []
    for one in psutil.process_iter(["pid", "ppid", "username", "memory_info", "cmdline", "name", "status"]):
        facts = one.info
        memory = facts["memory_info"]
        words = " ".join(facts["cmdline"] or [facts["name"] or "?"])
        size = f"{memory.rss / 2**20:.0f} MiB" if memory is not None else "?"
        rows.append(f"{facts['pid']}\t{facts['ppid']}\t{facts['username']}\t{size}\t{facts['status']}\t{words}")
    return "pid\tparent\tuser\tresident\tstatus\tcommand\n" + "\n".join(rows), None


def _files(*names: str) -> tuple[str, str | None]:
    found = []
    for name in names:
        path = Path(name)
        if path.is_file():
            found.append(f"== {name}\n{path.read_text(errors='replace')}")
    if not found:
        raise OSError(None, f"there is no {names[0]} here")
    return "\n".join(found), None


_CGROUP: Final = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory.current",
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes",
)
_MACHINE: Final[tuple[tuple[str, str, Callable[[], tuple[str, str | None]]], ...]] = (
    ("kernel messages", "dmesg.txt", lambda: _run("dmesg", "-T")),
    ("nvidia-smi", "nvidia-smi.txt", lambda: _run("nvidia-smi")),
    ("nvidia-smi -q -x", "nvidia-smi.xml", lambda: _run("nvidia-smi", "-q", "-x")),
    ("processes", "processes.txt", _processes),
    ("memory", "meminfo.txt", lambda: _files("/proc/meminfo", "/proc/pressure/memory")),
    ("memory limits", "cgroup.txt", lambda: _files(*_CGROUP)),
    ("shared memory", "shm.txt", lambda: _run("df", "-h", "/dev/shm")),
)
"""What is asked of this machine: its name for people, its file in the archive, and how it is had."""


def _archive(texts: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for name, text in texts.items():
            data = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"memledger/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
