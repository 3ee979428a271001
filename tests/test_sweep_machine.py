"""What the machine shows of a swept server: its own devices, its own processes, its log's pool and arithmetic."""

from pathlib import Path

import pytest

from memledger.ledger import Source
from memledger.live.sample import Device, DeviceSample, GpuProcess, HostMemory, LiveServer, Process, Sample
from memledger.sweep import machine

GIB = 2**30
FIXTURES = Path(__file__).parents[1] / "fixtures"


def gpu(index, free, *processes):
    seen = tuple(GpuProcess(pid, used) for pid, used in processes)
    return Device(index, f"GPU-{index}", total_bytes=80 * GIB, free_bytes=free, processes=seen)


TWO = (Process(10, resident_bytes=3 * GIB), Process(11, resident_bytes=GIB))


def sample(*devices, processes=TWO, **more):
    server = LiveServer(10, "vllm", processes=tuple(processes))
    more.setdefault("host_pids", True)
    return Sample(
        "2026-01-01T00:00:00+00:00",
        devices=DeviceSample(Source("nvml", "ok"), devices=devices),
        servers=(server,),
        **more,
    )


def test_only_the_servers_own_processes_and_devices_count():
    found = machine.memory_of(
        sample(
            gpu(0, 9 * GIB, (11, 60 * GIB), (99, 5 * GIB)),
            gpu(1, 4 * GIB, (11, 70 * GIB)),
            gpu(2, GIB, (99, 79 * GIB)),
        ),
        {},
    )
    assert (found.server_bytes, found.gpus) == (130 * GIB, 2)
    assert (found.free_bytes, found.total_bytes) == (4 * GIB, 80 * GIB)
    assert found.host_bytes == 4 * GIB


def test_a_process_whose_memory_the_driver_does_not_tell_makes_the_sum_unknown():
    assert machine.memory_of(sample(gpu(0, 9, (10, 5), (11, None))), {}).server_bytes is None


def test_in_a_container_the_devices_are_those_of_the_ranks():
    """The driver's process ids are not ours there: free memory is known, whose the rest is, is not."""
    processes = [Process(10), Process(11, gpu_indices=(1,))]
    found = machine.memory_of(sample(gpu(0, 9, (10, 5)), gpu(1, 4, (77, 5)), processes=processes, host_pids=False), {})
    assert (found.gpus, found.free_bytes, found.server_bytes, found.host_bytes) == (1, 4, None, None)


@pytest.mark.parametrize(("limit", "used", "left"), [(None, None, 100), (150, 120, 30), (1000, 10, 100), (10, 20, 0)])
def test_the_host_has_what_the_machine_or_the_container_has_left(limit, used, left):
    memory = HostMemory(available_bytes=100, cgroup_limit_bytes=limit, cgroup_used_bytes=used)
    assert machine.memory_of(sample(memory=memory), {}).host_available_bytes == left


@pytest.mark.parametrize(
    ("log", "pool", "per_token", "per_request"),
    [
        # 20.16 GiB as printed in two parts, 64 KiB a token, 5 slots of 146.8 MiB a request.
        ("demo", 2 * round(10.08 * GIB), 65536.0, 769658135),
        ("compare-weights", None, 131072.0, None),
    ],
)
def test_the_pool_and_the_models_arithmetic_come_from_the_log(log, pool, per_token, per_request):
    report, reason = machine._from_log(str(sorted((FIXTURES / log).glob("*.log"))[0]))
    assert reason is None
    found = machine._figures(report, sample())
    assert pool is None or abs(found.pool_bytes - pool) <= 2
    assert (found.bytes_per_token, found.state_bytes_per_request) == (per_token, per_request)


def test_a_log_without_a_start_says_so(tmp_path):
    (tmp_path / "x.log").write_text("nothing of the kind\n")
    assert machine._from_log(str(tmp_path / "x.log")) == (None, "its log holds nothing of a start")
    assert machine._from_log(str(tmp_path / "y.log"))[0] is None


def test_a_process_that_is_no_server_is_refused():
    import os

    with pytest.raises(machine.MachineError):
        machine.Machine(os.getpid())


def test_no_server_answers_on_a_port_of_nobody():
    assert machine.pid_of_port(1) is None
