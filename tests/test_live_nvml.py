"""The unmodified pynvml on a library of our own (`nvml_fake`): what a machine's driver answers, and what is made of it."""

import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import nvml_fake
import pytest

from memledger.live import nvml
from memledger.live.sample import GpuProcess
from memledger.units import GIB, KIB, MIB

MEMORY = ("total_bytes", "reserved_bytes", "used_bytes", "free_bytes")
GPU = "[gpu]\ntotal = 81559MiB\nreserved = 479MiB\nused = 1000MiB\n"
MEMINFO = """\
MemTotal:       127600748 kB
MemFree:         5000000 kB
MemAvailable:   118566368 kB
Buffers:           100000 kB
Cached:         113000000 kB
Shmem:             200000 kB
"""


@pytest.fixture
def root(tmp_path):
    """A machine with nothing in it but its memory."""
    place(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def place(root, name, text=""):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def sample(scenario, root=Path("/"), **options):
    with nvml_fake.installed(scenario):
        return nvml.sample(root=root, **options)


def only(scenario, root=Path("/")):
    (device,) = sample(scenario, root).devices
    return device


def figures(device):
    return tuple(None if value is None else value // MIB for value in (getattr(device, name) for name in MEMORY))


# ---- memory ----


def test_one_card():
    seen = sample(nvml_fake.ONE_H200)
    assert (seen.source.name, seen.source.status, seen.source.reason) == ("nvml", "ok", None)
    assert (seen.driver_version, seen.cuda_version) == ("590.48.01", "13.1")
    (card,) = seen.devices
    assert figures(card) == (143771, 614, 32362, 110795)
    assert card.memory_call == "nvml v2"
    assert (card.name, card.index, card.pci_bus) == ("NVIDIA H200", 0, "00000000:01:00.0")
    assert card.uuid == "GPU-00000000-0000-0000-0000-000000000000"
    assert (card.ecc, card.mig_mode, card.unified_memory) == (True, False, False)
    assert [(row.pid, row.used_bytes, row.kind) for row in card.processes] == [
        (10291, 2566 * MIB, "compute"),
        (10309, 28234 * MIB, "compute"),
    ]


def test_cards_keep_nvmls_order():
    seen = sample(GPU + "bus = 00000000:C1:00.0\n" + GPU + "bus = 00000000:41:00.0\n")
    assert [(card.index, card.pci_bus) for card in seen.devices] == [(0, "00000000:C1:00.0"), (1, "00000000:41:00.0")]


@pytest.mark.parametrize("code", ["FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "NOT_SUPPORTED"])
def test_the_older_memory_call_is_labelled(code):
    card = only(GPU + f"error = nvmlDeviceGetMemoryInfo_v2 {code}\n")
    assert card.memory_call == "nvml v1"
    assert figures(card) == (81559, None, 1479, 80080)
    assert "counted as used" in card.missing["reserved_bytes"]


def test_a_library_without_the_newer_symbols():
    without = [f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute")]
    env = nvml_fake.environment(nvml_fake.ONE_H200, without=["nvmlDeviceGetMemoryInfo_v2", *without])
    program = (
        "from memledger.live import nvml; c = nvml.sample().devices[0];"
        "print(c.memory_call, c.used_bytes >> 20, [p.used_bytes >> 20 for p in c.processes])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **env}, check=False, capture_output=True, text=True
    )
    assert done.stdout == "nvml v1 32976 [2566, 28234]\n", done.stderr


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("used = n/a", (81559, 479, None, None)),
        ("used = n/a\nfree = 500MiB", (81559, 479, None, 500)),
        ("used = 90000MiB\nfree = 5MiB", (81559, 479, None, 5)),
        ("total = n/a\nused = 7MiB\nfree = 5MiB", (None, 479, 7, 5)),
        ("reserved = n/a\nused = 7MiB\nfree = 5MiB", (81559, None, 7, 5)),
    ],
)
def test_figures_that_cannot_be_are_not_available(lines, expected):
    seen = sample(GPU + lines + "\n")
    (card,) = seen.devices
    assert figures(card) == expected
    assert all(card.missing[name] for name in MEMORY if getattr(card, name) is None)


def test_a_card_whose_memory_is_not_told_makes_the_source_partial():
    seen = sample(GPU + GPU + "error = nvmlDeviceGetMemoryInfo* NO_PERMISSION\n")
    assert seen.source.status == "partial"
    assert "GPU 1: no memory: no permission" in seen.source.reason
    assert figures(seen.devices[0])[0] == 81559
    assert figures(seen.devices[1]) == (None,) * 4


# ---- reasons ----


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("LIB_RM_VERSION_MISMATCH", "reboot or reload the module"),
        ("DRIVER_NOT_LOADED", "not loaded"),
        ("NO_PERMISSION", "no permission"),
        ("UNKNOWN", "error 999"),
        ("OPERATING_SYSTEM", "blocks access"),
    ],
)
def test_no_sample_at_all_says_why(code, words, root):
    seen = sample(f"error = nvmlInit* {code}\n{GPU}", root)
    assert (seen.source.status, seen.devices) == ("unavailable", ())
    assert words in seen.source.reason


def test_a_lost_gpu_leaves_the_others():
    seen = sample(GPU + "error = nvmlDeviceGetHandleByIndex* GPU_IS_LOST\n" + GPU)
    lost, other = seen.devices
    assert "fallen off the bus" in lost.missing["total_bytes"]
    assert lost.index == 0
    assert figures(other)[0] == 81559
    assert seen.source.status == "partial"


def test_a_gpu_that_is_lost_between_two_samples(tmp_path):
    path = tmp_path / "scenario"
    path.write_text(GPU)
    with nvml_fake.installed(path), nvml.Sampler() as sampler:
        assert figures(sampler.sample().devices[0])[0] == 81559
        path.write_text(GPU + "error = nvmlDevice* GPU_IS_LOST\n")
        lost = sampler.sample().devices[0]
        path.write_text(GPU)
        back = sampler.sample().devices[0]
    assert "fallen off the bus" in lost.missing["total_bytes"]
    assert figures(back)[0] == 81559


def test_no_gpu_is_shown():
    seen = sample("driver = 590.48.01\n")
    assert seen.source.status == "partial"
    assert "shows no GPU" in seen.source.reason


def test_every_value_that_is_missing_has_its_sentence():
    card = only(GPU)
    assert card.ecc is None
    assert "not supported" in card.missing["ecc"]
    assert card.lost_bytes is None
    assert "not supported" in card.missing["lost_bytes"]


# ---- machines without the library ----


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "NVML library not found: no NVIDIA driver"),
        (("dev/nvidiactl",), "capability `utility`"),
        (("dev/kfd",), "not supported on AMD GPUs yet"),
        (("dev/davinci0",), "not supported on Ascend NPUs yet"),
    ],
)
def test_no_library(files, words, root):
    for name in files:
        place(root, name)
    done = subprocess.run(
        [sys.executable, "-c", PRINT, str(root)], env=_without_library(), check=False, capture_output=True, text=True
    )
    if "ok" in done.stdout:
        pytest.skip("this machine has an NVIDIA driver")
    assert done.stdout.startswith("unavailable"), done.stderr
    assert words in done.stdout


PRINT = (
    "import sys, pathlib; from memledger.live import nvml; s = nvml.sample(root=pathlib.Path(sys.argv[1])).source;"
    "print(s.status, s.reason)"
)


def _without_library():
    return {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}


def test_an_intel_card(root):
    place(root, "sys/class/drm/card0/device/vendor", "0x8086\n")
    place(root, "dev/dri/renderD128")
    assert "not supported on Intel GPUs yet" in (nvml.no_library(root) or "")


def test_the_library_of_wsl_is_found_where_the_loader_does_not_look(root):
    built = nvml_fake.build() / nvml_fake.NAME
    place(root, "usr/lib/wsl/lib/other")
    (root / "usr/lib/wsl/lib" / nvml_fake.NAME).symlink_to(built)
    env = {**_without_library(), "NVML_FAKE_SCENARIO": str(nvml_fake.write(GPU))}
    done = subprocess.run(
        [sys.executable, "-c", PRINT, str(root)], env=env, check=False, capture_output=True, text=True
    )
    assert done.stdout == "ok None\n", done.stderr


def test_wsl_tells_no_memory_by_process(root):
    place(root, "proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2\n")
    card = only(GPU + "process = compute 77 n/a\n", root)
    assert card.processes[0].used_bytes is None
    assert "WSL" in card.processes[0].missing["used_bytes"]


# ---- the package ----


def test_a_module_that_is_not_nvidia_ml_py(monkeypatch):
    other = types.ModuleType("pynvml")
    other.__file__ = "/somewhere/pynvml/__init__.py"
    monkeypatch.setitem(sys.modules, "pynvml", other)
    seen = nvml.sample()
    assert seen.source.status == "unavailable"
    assert "not that of nvidia-ml-py" in seen.source.reason
    assert "pip install nvidia-ml-py" in seen.source.reason


def test_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in nvml.sample().source.reason


def test_the_deprecated_package_is_named_and_the_sample_goes_on(monkeypatch):
    from importlib import metadata

    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "13.0.1" if name == "pynvml" else real(name))
    nvml._deprecated_package.cache_clear()
    try:
        seen = sample(GPU)
    finally:
        nvml._deprecated_package.cache_clear()
    assert seen.source.status == "ok"
    assert "deprecated package pynvml 13.0.1" in seen.source.reason


# ---- processes ----


def test_a_process_in_two_lists_is_one():
    card = only(GPU + "process = graphics 9 300MiB\nprocess = compute 9 300MiB\nprocess = graphics 4 20MiB\n")
    assert [(row.pid, row.used_bytes // MIB, row.kind) for row in card.processes] == [
        (4, 20, "graphics"),
        (9, 300, "compute"),
    ]


def test_mps_clients():
    card = only(GPU + "process = mps 9 300MiB\nprocess = compute 9 300MiB\nprocess = compute 3 30MiB\n")
    assert [(row.pid, row.kind) for row in card.processes] == [(3, "compute"), (9, "mps")]


def test_no_process():
    assert only(GPU).processes == ()


@pytest.mark.parametrize(("size", "words"), [("n/a", "does not tell"), ("90000MiB", "larger than the device")])
def test_a_processs_memory_that_cannot_be(size, words):
    card = only(GPU + f"process = compute 9 {size}\n")
    assert card.processes[0].used_bytes is None
    assert words in card.processes[0].missing["used_bytes"]


def test_process_lists_need_permission():
    card = only(GPU + "error = nvmlDeviceGetComputeRunningProcesses* NO_PERMISSION\n")
    assert card.processes is None
    assert "no permission" in card.missing["processes"]
    assert figures(card)[0] == 81559


def test_process_ids_that_cannot_be_make_no_list():
    card = only(GPU + "process = compute 0 10MiB\nprocess = compute 4294967295 3MiB\n")
    assert card.processes is None
    assert "process ids that can't be" in card.missing["processes"]


def test_processes_that_were_not_asked_for():
    (card,) = sample(nvml_fake.ONE_H200, processes=False).devices
    assert card.processes is None
    assert card.missing["processes"] == "not asked for"


def test_process_lists_at_most_once_a_second_and_memory_always(tmp_path):
    path, calls = tmp_path / "scenario", tmp_path / "calls"
    path.write_text(nvml_fake.ONE_H200)
    with nvml_fake.installed(path, calls=calls), nvml.Sampler(process_interval_s=0.4) as sampler:
        first = sampler.sample().devices[0]
        path.write_text(nvml_fake.ONE_H200.replace("used = 32362MiB", "used = 40000MiB") + "process = compute 7 1MiB\n")
        second = sampler.sample().devices[0]
        asked = calls.read_text().split().count("nvmlDeviceGetComputeRunningProcesses_v3")
        time.sleep(0.45)
        third = sampler.sample().devices[0]
    assert asked == 2  # pynvml asks for the size, then for the list
    assert second.processes == first.processes
    assert (first.used_bytes // MIB, second.used_bytes // MIB) == (32362, 40000)
    assert GpuProcess(7, 1 * MIB) in third.processes


# ---- MIG ----

MIG = """
[gpu]
name = NVIDIA H100 80GB HBM3
total = 81559MiB
reserved = 479MiB
used = 11150MiB
mig = on
process = graphics 50 5MiB
[mig]
gi = 2
total = 40448MiB
used = 11091MiB
process = compute 21180 2296MiB
[mig]
gi = 3
total = 20096MiB
used = 12MiB
"""


def test_mig_instances_have_their_own_figures():
    parent, large, small = sample(MIG).devices
    assert figures(parent)[0] == 81559
    assert (parent.mig_mode, parent.parent_uuid) == (True, None)
    assert [row.pid for row in parent.processes] == [50]
    assert figures(large) == (40448, 0, 11091, 29357)
    assert figures(small) == (20096, 0, 12, 20084)
    assert (large.uuid, large.parent_uuid, large.index) == (
        "MIG-00000000-0000-0000-0000-000000000000",
        parent.uuid,
        parent.index,
    )
    assert (large.gpu_instance, large.compute_instance, small.gpu_instance) == (2, 0, 3)
    assert [(row.pid, row.used_bytes // MIB) for row in large.processes] == [(21180, 2296)]
    assert small.processes == ()


def test_an_instance_without_figures_does_not_get_the_parents():
    parent, instance = sample(
        MIG.partition("[mig]\ngi = 3")[0] + "error = nvmlDeviceGetMemoryInfo* NO_PERMISSION\n"
    ).devices
    assert figures(parent)[0] == 81559
    assert figures(instance) == (None,) * 4
    assert "no permission" in instance.missing["total_bytes"]


@pytest.mark.parametrize("extra", ["attribute = 40448\n", "error = nvmlDeviceGetAttributes_v2 NOT_SUPPORTED\n"])
def test_a_driver_that_gives_the_parents_figures_for_an_instance(extra):
    scenario = MIG.partition("[mig]\ngi = 3")[0].replace("total = 40448MiB", "total = 81559MiB") + extra
    _, instance = sample(scenario).devices
    assert figures(instance) == (None,) * 4
    assert "whole GPU's figures" in instance.missing["used_bytes"]
    assert instance.processes is not None


def test_an_instances_processes_from_the_gpus_list_by_their_ids():
    scenario = MIG.replace(
        "used = 11091MiB\n", "used = 11091MiB\nerror = nvmlDeviceGet*RunningProcesses* NOT_SUPPORTED\n"
    )
    scenario = scenario.replace("nvmlDeviceGet*RunningProcesses*", "nvmlDeviceGetComputeRunningProcesses*")
    _, large, _ = sample(scenario).devices
    assert [row.pid for row in large.processes] == [21180]


def test_a_gpu_whose_figures_are_kept_from_us_still_lists_its_instances():
    scenario = MIG.replace("mig = on\n", "mig = on\nerror = nvmlDeviceGetMemoryInfo* NO_PERMISSION\n", 1)
    parent, large, _ = sample(scenario).devices
    assert figures(parent) == (None,) * 4
    assert figures(large)[0] == 40448


# ---- unified memory ----


@pytest.mark.parametrize(
    ("name", "extra"),
    [("NVIDIA GB10", ""), ("Orin (nvgpu)", ""), ("NVIDIA Thor", ""), ("NVIDIA GH200 480GB", "addressing = ats\n")],
)
def test_unified_memory_is_the_machines(root, name, extra):
    card = only(f"[gpu]\nname = {name}\nmemory = unsupported\n{extra}process = compute 9 63931MiB\n", root)
    assert card.memory_call == "meminfo"
    assert card.unified_memory is True
    assert card.total_bytes == 127600748 * KIB
    assert card.free_bytes == 118566368 * KIB
    assert card.used_bytes == (127600748 - 118566368) * KIB
    assert card.page_cache_bytes == (113000000 + 100000 - 200000) * KIB
    assert card.reserved_bytes is None
    assert card.processes[0].used_bytes == 63931 * MIB


def test_a_driver_that_gives_the_machines_total_for_unified_memory(root):
    card = only("[gpu]\nname = NVIDIA GB10\ntotal = 124610MiB\nused = 119000MiB\n", root)
    assert card.memory_call == "meminfo"
    assert card.free_bytes == 118566368 * KIB


def test_the_machines_memory_never_stands_for_a_card_of_its_own(root):
    card = only("[gpu]\nname = NVIDIA GB100\nmemory = unsupported\n", root)
    assert figures(card) == (None,) * 4
    assert card.unified_memory is None
    assert "not supported" in card.missing["total_bytes"]


def test_a_card_as_large_as_the_machines_memory_is_a_card(root):
    card = only("[gpu]\nname = NVIDIA RTX\ntotal = 124610MiB\nused = 100MiB\n", root)
    assert (card.memory_call, card.unified_memory) == ("nvml v2", False)


def test_unified_memory_without_meminfo(tmp_path):
    card = only("[gpu]\nname = NVIDIA GB10\nmemory = unsupported\n", tmp_path)
    assert figures(card) == (None,) * 4
    assert card.unified_memory is True
    assert "not supported" in card.missing["total_bytes"]


# ---- faults ----


def test_retired_pages_cost_capacity():
    card = only(GPU + "retired = 3 2\n")
    assert card.lost_bytes == 5 * 64 * KIB
    assert "5 pages" in card.notes[0]


def test_remapped_rows_cost_none_and_pending_ones_are_said():
    card = only(GPU + "remapped = 1 1 1 0\n")
    assert card.lost_bytes == 0
    assert "costs no capacity" in card.notes[0]
    assert "reset the GPU" in card.notes[1]


# ---- a driver that hangs ----


def test_a_call_that_never_returns_is_given_up():
    begun = time.monotonic()
    with nvml_fake.installed(GPU + "sleep = nvmlDeviceGetMemoryInfo_v2 3\n" + GPU):
        with nvml.Sampler(deadline_s=0.2) as sampler:
            seen = sampler.sample()
            again = sampler.sample()
        assert time.monotonic() - begun < 2
        hung, other = seen.devices
        assert "did not answer nvmlDeviceGetMemoryInfo within 0.2 s" in hung.missing["total_bytes"]
        assert hung.name == "NVIDIA Example"
        assert figures(other)[0] == 81559
        assert again.source.status == "unavailable"
        assert "still no answer" in again.source.reason
        _wait_for_calls()


def test_many_cards_that_hang_cost_two_deadlines():
    with nvml_fake.installed("sleep = nvmlDeviceGetMemoryInfo_v2 2\n" + GPU * 8):
        begun = time.monotonic()
        with nvml.Sampler(deadline_s=0.2) as sampler:
            seen = sampler.sample()
        assert time.monotonic() - begun < 1
        assert len(seen.devices) == 8
        assert all(device.missing["total_bytes"] for device in seen.devices)
        _wait_for_calls()


def test_a_start_that_hangs():
    with nvml_fake.installed("sleep = nvmlInit* 1\n" + GPU):
        with nvml.Sampler(init_deadline_s=0.1) as sampler:
            seen = sampler.sample()
            assert seen.source.status == "unavailable"
            assert "did not answer nvmlInit" in seen.source.reason
            _wait_for_calls()
        assert nvml.sample().source.status == "ok"


def test_a_program_ends_although_a_call_has_not_returned():
    env = nvml_fake.environment("sleep = nvmlInit* 30\n" + GPU)
    program = "from memledger.live import nvml; s = nvml.Sampler(init_deadline_s=0.1); print(s.sample().source.status); s.close()"
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **env}, check=False, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("unavailable\n", 0)
    assert time.monotonic() - begun < 10


def _wait_for_calls():
    """The library is this process's: the next test must not meet a call that still sleeps."""
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join(5)


# ---- the sampler ----


def test_opened_once_and_shut_down(tmp_path):
    calls = tmp_path / "calls"
    with nvml_fake.installed(GPU, calls=calls), nvml.Sampler() as sampler:
        for _ in range(3):
            sampler.sample()
        sampler.close()
        names = calls.read_text().split()
        assert (names.count("nvmlInitWithFlags"), names.count("nvmlShutdown")) == (1, 1)
        assert sampler.sample().source.status == "ok"


def test_a_child_opens_nvml_for_itself():
    with nvml_fake.installed(GPU), nvml.Sampler() as sampler:
        sampler.sample()
        child = os.fork()
        if child == 0:
            os._exit(0 if sampler.sample().source.status == "ok" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sampler.sample().source.status == "ok"


def test_threads_take_turns():
    found = []
    with nvml_fake.installed(GPU * 4), nvml.Sampler() as sampler:
        threads = [threading.Thread(target=lambda: found.append(sampler.sample())) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(seen.devices) for seen in found] == [4] * 6


def test_eight_cards_and_64_processes_are_quick():
    card = GPU + "".join(f"process = compute {pid} 100MiB\n" for pid in range(100, 108))
    with nvml_fake.installed(card * 8):
        begun = time.monotonic()
        seen = nvml.sample()
    assert time.monotonic() - begun < 1
    assert sum(len(device.processes) for device in seen.devices) == 64
    assert sum(device.total_bytes for device in seen.devices) < 8 * 80 * GIB


def test_importing_the_module_imports_no_library():
    program = "import sys; import memledger.live.nvml; print('pynvml' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True).stdout == "False\n"
    )
