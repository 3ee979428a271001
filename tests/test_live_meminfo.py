"""The machine's memory, from folders that stand for its `/proc` and `/sys`."""

import os
from pathlib import Path

import pytest

from memledger.live import meminfo
from memledger.live.sample import HostMemory
from memledger.units import GIB, KIB, MIB

MEMINFO = """\
MemTotal:       125508304 kB
MemFree:         3211264 kB
MemAvailable:   99614720 kB
Buffers:          131072 kB
Cached:         98304000 kB
SwapCached:            0 kB
Shmem:           1048576 kB
HugePages_Total:       0
SwapTotal:      16777212 kB
SwapFree:       16777200 kB
"""


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return meminfo.read(root=root)


def test_meminfo_in_bytes(tmp_path):
    seen = machine(tmp_path, {"proc/meminfo": MEMINFO})
    assert seen.total_bytes == 125508304 * KIB
    assert seen.available_bytes == 99614720 * KIB
    assert seen.free_bytes == 3211264 * KIB
    assert seen.swap_total_bytes == 16777212 * KIB
    assert seen.swap_free_bytes == 16777200 * KIB


def test_page_cache_leaves_out_shared_memory(tmp_path):
    seen = machine(tmp_path, {"proc/meminfo": MEMINFO})
    assert seen.page_cache_bytes == (98304000 + 131072 - 1048576) * KIB


def test_page_cache_is_unknown_when_a_part_is(tmp_path):
    seen = machine(tmp_path, {"proc/meminfo": MEMINFO.replace("Shmem:", "Other:")})
    assert seen.page_cache_bytes is None


def test_no_proc_at_all(tmp_path):
    assert meminfo.read(root=tmp_path) == HostMemory()


def test_lines_that_are_no_figures_are_left_out(tmp_path):
    seen = machine(tmp_path, {"proc/meminfo": "MemTotal: lots kB\nMemFree 7\nMemAvailable: 8 kB\n\xff:\n"})
    assert (seen.total_bytes, seen.free_bytes, seen.available_bytes) == (None, None, 8 * KIB)


def test_cgroup_v2_limit_and_use(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/kubepods/pod7/server\n",
        "sys/fs/cgroup/kubepods/pod7/server/memory.max": f"{32 * GIB}\n",
        "sys/fs/cgroup/kubepods/pod7/server/memory.current": f"{5 * GIB}\n",
    }
    seen = machine(tmp_path, files)
    assert (seen.cgroup_limit_bytes, seen.cgroup_used_bytes) == (32 * GIB, 5 * GIB)


def test_the_tightest_limit_of_the_way_up_counts_with_its_own_use(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/server\n",
        "sys/fs/cgroup/pod/server/memory.max": "max\n",
        "sys/fs/cgroup/pod/server/memory.current": f"{5 * GIB}\n",
        "sys/fs/cgroup/pod/memory.max": f"{16 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{9 * GIB}\n",
    }
    seen = machine(tmp_path, files)
    assert (seen.cgroup_limit_bytes, seen.cgroup_used_bytes) == (16 * GIB, 9 * GIB)


def test_cgroup_v1_in_a_container_whose_path_is_the_hosts(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{64 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{700 * MIB}\n",
    }
    seen = machine(tmp_path, files)
    assert (seen.cgroup_limit_bytes, seen.cgroup_used_bytes) == (64 * GIB, 700 * MIB)


@pytest.mark.parametrize("limit", ["9223372036854771712", str(500 * GIB), "max", ""])
def test_no_limit(tmp_path, limit):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
    }
    seen = machine(tmp_path, files)
    assert (seen.cgroup_limit_bytes, seen.cgroup_used_bytes) == (None, None)


def test_the_cgroup_of_another_process(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/\n",
        "proc/4242/cgroup": "0::/server\n",
        "sys/fs/cgroup/server/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/server/memory.current": f"{1 * GIB}\n",
    }
    machine(tmp_path, files)
    assert meminfo.read(root=tmp_path).cgroup_limit_bytes is None
    assert meminfo.read(root=tmp_path, pid=4242).cgroup_limit_bytes == 8 * GIB


def test_a_cgroup_path_cannot_lead_out_of_the_mount(tmp_path):
    (tmp_path / "memory.max").write_text("1\n")
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/../../..\n"}
    assert machine(tmp_path, files).cgroup_limit_bytes is None


def test_shared_memory_is_the_file_systems(tmp_path):
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = os.statvfs(tmp_path / "dev/shm")
    assert meminfo.read(root=tmp_path).shared_memory_total_bytes == found.f_blocks * found.f_frsize


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc here")
def test_this_machine():
    seen = meminfo.read()
    assert seen.total_bytes is not None
    assert seen.available_bytes is not None
    assert 0 < seen.available_bytes <= seen.total_bytes
