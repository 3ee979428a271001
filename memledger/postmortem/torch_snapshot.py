"""PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot`), read without torch and without trust.

A pickle can run any code while it is loaded, and a few bytes of one can ask for gigabytes. So it is loaded in a process of its
own, with a limit on its memory and its time, by an unpickler that admits no globals at all: a snapshot needs none, it is made of
dictionaries, lists, tuples, numbers and texts. That process answers with the sums below as JSON; nothing else of the pickle
comes back. Layout: torch/csrc/cuda/memory_snapshot.cpp and torch/cuda/_memory_viz.py (torch 2.0 to 2.13).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

import memledger
from memledger.opening import open_file
from memledger.sanitize import clean

LARGEST_FILE: Final = 2 * 2**30
"""Bytes of a snapshot at most: those of real servers are a few hundred MB."""
MEMORY_PER_BYTE: Final = 30
"""Memory that the loading process may take for each byte of the file: small objects are that much larger when loaded."""
MOST_MEMORY: Final = 16 * 2**30
LEAST_MEMORY: Final = 512 * 2**20
SECONDS: Final = 120
"""Processor time of the loading process at most."""

LIMITS_MET: Final = (3, -9, -24)
"""How the loading process ends at a limit: refused memory, SIGKILL, SIGXCPU."""

_PROGRAM: Final = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from memledger.postmortem.unpickle import main; sys.exit(main())"
)


class SnapshotPickleError(ValueError):
    """The file is no snapshot that can be read; one sentence."""


class FrameShare(msgspec.Struct, frozen=True):
    """Allocated blocks whose innermost frame outside torch is the same."""

    frame: str
    bytes: int
    blocks: int


class Pool(msgspec.Struct, frozen=True):
    """Segments of one stream and pool. `private`: a pool of CUDA graphs (or of the user), which others cannot use.

    `pool_id`: the pair of numbers by which torch tells private pools apart, empty for the common pool.
    """

    stream: int
    private: bool
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    pool_id: tuple[int, ...] = ()


class LastOom(msgspec.Struct, frozen=True):
    """The last failed allocation of the recorded history.

    `usable_bytes`: what lay inactive where torch may place that request: in segments of its stream and kind (small up to
    1 MiB, else large), outside private pools. None where the history does not say which stream asked, or a private pool did.
    """

    requested_bytes: int | None
    free_bytes: int | None
    frame: str | None = None
    usable_bytes: int | None = None
    largest_usable_bytes: int | None = None


class DeviceMemory(msgspec.Struct, frozen=True):
    """What torch's allocator held on one device. Reserved = allocated + inactive + pending.

    `inactive_bytes` are free pieces inside segments, `largest_inactive_bytes` the largest of them outside private pools,
    of whichever stream: no larger request is served without new memory of the device. `pending_bytes` wait for a stream.
    """

    device: int
    segments: int
    expandable: bool
    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int
    inactive_bytes: int
    largest_inactive_bytes: int
    private_pools_bytes: int
    private_unused_bytes: int
    pools: tuple[Pool, ...] = ()
    largest: tuple[FrameShare, ...] = ()
    without_frames_bytes: int = 0
    last_oom: LastOom | None = None


class TorchSnapshot(msgspec.Struct, frozen=True):
    """One snapshot: every device, and how the allocator was set."""

    path: str
    devices: tuple[DeviceMemory, ...]
    settings: dict[str, str] = {}


def looks_like_pickle(head: bytes) -> bool:
    """Whether a file begins as a pickle of protocol 2 to 5."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def read(path: Path) -> TorchSnapshot:
    """The sums of a snapshot.

    Raises:
        SnapshotPickleError: it can't be opened, or is no snapshot, or asks for what a snapshot does not need.
    """
    shown = clean(str(path))
    try:
        if not path.is_file():
            raise SnapshotPickleError(f"{shown}: {'not a regular file' if path.exists() else 'there is no such file'}")
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
    except OSError as error:
        raise SnapshotPickleError(f"{shown}: {error.strerror or error}") from error
    if size > LARGEST_FILE:
        raise SnapshotPickleError(f"{shown}: larger than {LARGEST_FILE >> 30} GiB, which no snapshot is read beyond")
    if head.startswith(b"PK"):
        raise SnapshotPickleError(
            f"{shown}: a zip archive (torch.save?), no snapshot; torch.cuda.memory._dump_snapshot writes a bare pickle"
        )
    if not looks_like_pickle(head):
        raise SnapshotPickleError(f"{shown}: no pickle; torch.cuda.memory._dump_snapshot(FILE) writes one")
    return msgspec.structs.replace(_answer(path, shown, size), path=shown)


def _answer(path: Path, shown: str, size: int) -> TorchSnapshot:
    memory = min(MOST_MEMORY, max(LEAST_MEMORY, size * MEMORY_PER_BYTE))
    # Isolated: nothing of the environment or the working folder is imported beside this package.
    command = [
        sys.executable,
        "-I",
        "-c",
        _PROGRAM,
        str(Path(memledger.__file__).parents[1]),
        str(memory),
        str(SECONDS),
    ]
    try:
        with open_file(path) as file:
            done = subprocess.run(command, stdin=file, capture_output=True, check=False, timeout=SECONDS * 3)
    except subprocess.TimeoutExpired:
        raise SnapshotPickleError(f"{shown}: it takes longer to load than a snapshot of its size should") from None
    except OSError as error:
        raise SnapshotPickleError(f"{shown}: {error.strerror or error}") from error
    if done.returncode == 0:
        try:
            return msgspec.json.decode(done.stdout, type=TorchSnapshot)
        except msgspec.MsgspecError:
            raise SnapshotPickleError(f"{shown}: its figures are none that a snapshot can have") from None
    if done.returncode == 2 and done.stdout:
        raise SnapshotPickleError(f"{shown}: {clean(done.stdout.decode('utf-8', 'replace'), 300)}")
    if done.returncode not in LIMITS_MET:
        raise SnapshotPickleError(
            f"{shown}: the process that loads it ended with {done.returncode}; nothing of it is known"
        )
    raise SnapshotPickleError(
        f"{shown}: it asks for more than {memory >> 20} MiB of memory or {SECONDS} s to load; a snapshot of its size needs less"
    )
