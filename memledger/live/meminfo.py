"""The machine's own memory: `/proc/meminfo`, the cgroup that limits us, and `/dev/shm`.

Nothing here fails: what a kernel or a container does not show stays None.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from memledger.live.sample import HostMemory
from memledger.units import KIB

ROOT: Final = Path("/")
_CGROUP_V1_NONE: Final = 2**62
"""cgroup v1 prints "no limit" as the largest multiple of the page size below 2**63."""


def read(*, root: Path = ROOT, pid: int | None = None) -> HostMemory:
    """The machine's memory now, bytes.

    `page_cache_bytes` is file pages that the kernel gives back when memory is short: Cached + Buffers - Shmem (`/dev/shm` and
    tmpfs files are in Cached, but can't be dropped). Most of it is in `available_bytes` (MemAvailable) as well.
    `cgroup_used_bytes` is what the kernel counts against the limit, page cache included.

    Args:
        root: folder that stands for `/`.
        pid: whose cgroup limits count; our own unless given.
    """
    fields = _meminfo(root)
    limit, used = _cgroup(root, pid, fields.get("MemTotal"))
    shared_total, shared_used = _shared_memory(root)
    return HostMemory(
        total_bytes=fields.get("MemTotal"),
        available_bytes=fields.get("MemAvailable"),
        free_bytes=fields.get("MemFree"),
        page_cache_bytes=_page_cache(fields),
        swap_total_bytes=fields.get("SwapTotal"),
        swap_free_bytes=fields.get("SwapFree"),
        cgroup_limit_bytes=limit,
        cgroup_used_bytes=used,
        shared_memory_total_bytes=shared_total,
        shared_memory_used_bytes=shared_used,
    )


def _meminfo(root: Path) -> dict[str, int]:
    """`/proc/meminfo`, bytes; its "kB" is 1024 bytes."""
    found: dict[str, int] = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if len(parts) == 2 and parts[0].isdecimal() and parts[1] == "kB":
            found[name.strip()] = int(parts[0]) * KIB
    return found


def _page_cache(fields: dict[str, int]) -> int | None:
    cached, buffers, shared = (fields.get(name) for name in ("Cached", "Buffers", "Shmem"))
    if cached is None or buffers is None or shared is None:
        return None
    return max(0, cached + buffers - shared)


def _cgroup(root: Path, pid: int | None, machine_total: int | None) -> tuple[int | None, int | None]:
    """The tightest limit on the way from the process's cgroup to the root, and the use counted against it."""
    text = _text(root / f"proc/{'self' if pid is None else pid}/cgroup")
    best: tuple[int, int | None] | None = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            places: tuple[Path, ...] = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
            names = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            places = (root / "sys/fs/cgroup/memory",)
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for place in places:
            for folder in _upwards(place, path):
                limit = _number(folder / names[0])
                if limit is None or limit >= _CGROUP_V1_NONE or (best is not None and limit >= best[0]):
                    continue
                best = (limit, _number(folder / names[1]))
    # A limit above what the machine has limits nothing.
    if best is None or (machine_total is not None and best[0] >= machine_total):
        return None, None
    return best


def _upwards(mount: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it, up to the mount.

    A container may see the host's path in `/proc/self/cgroup`, while its own cgroup is what is mounted: the parts of the
    path that are not there are skipped.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _shared_memory(root: Path) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
