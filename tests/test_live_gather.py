"""One look at the machine: devices named, sources judged, repeated samples that cost little."""

import os
import subprocess

import live_tree
import nvml_fake
import pytest

from memledger.ledger import Source
from memledger.live import gather, nvml
from memledger.live import process as proc
from memledger.live.attach import AttachError
from memledger.live.sample import Device, DeviceSample, GpuProcess, LiveServer, Metrics, Process

HYBRID = [{"title": "sglang::scheduler"}, {"title": "sglang::detokenizer"}]
ARGUMENTS = ["--model-path", "/models/a"]


def devices(*pids):
    listed = tuple(GpuProcess(pid, 2**30) for pid in pids)
    return DeviceSample(Source("nvml", "ok"), devices=(Device(0, "GPU-0", processes=listed),))


def test_listed_processes_get_user_command_and_start():
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        found = gather.named(devices(sleeper.pid), proc.table(), foreign_pids=False)
    finally:
        sleeper.kill()
        sleeper.wait()
    (seen,) = found.devices[0].processes
    assert seen.command == "sleep 60"
    assert seen.user
    assert seen.started_at.startswith("20")
    assert seen.orphan is None


def test_ids_of_another_namespace_get_no_names():
    found = gather.named(devices(os.getpid()), proc.table(), foreign_pids=True)
    assert found.devices[0].processes[0].command is None


def test_a_listed_process_that_is_not_visible_says_so():
    found = gather.named(devices(4_000_000), proc.table(), foreign_pids=False)
    assert "no such process is visible" in found.devices[0].processes[0].missing["command"]


def test_workers_whose_launcher_is_gone_are_orphans(tmp_path):
    children = [
        {"title": "VLLM::EngineCore", "outlives": True, "children": [{"title": "VLLM::Worker", "outlives": True}]}
    ]
    with live_tree.tree(tmp_path, "vllm serve", ["/models/a"], children) as running:
        pid = running.pids["VLLM::Worker"]
        before = gather.named(devices(pid), proc.table(), foreign_pids=False).devices[0].processes[0]
        running.program.kill()
        running.program.wait()
        after = gather.named(devices(pid), proc.table(), foreign_pids=False).devices[0].processes[0]
    assert (before.orphan, after.orphan) == (None, True)


def test_a_process_that_is_no_server_asks_no_driver(tmp_path):
    calls = tmp_path / "calls"
    with nvml_fake.installed(nvml_fake.ONE_H200, calls=calls), pytest.raises(AttachError):
        gather.server_sample(os.getpid())
    assert not calls.exists()


def test_a_sample_has_its_sources_in_order(tmp_path):
    with (
        live_tree.tree(tmp_path, "sglang serve", ARGUMENTS, HYBRID) as running,
        nvml_fake.installed(nvml_fake.ONE_H200),
    ):
        found = gather.server_sample(running.pids["sglang::scheduler"])
    assert [s.name for s in found.sources] == ["nvml", "proc", "metrics"]
    assert [s.status for s in found.sources] == ["ok", "ok", "unavailable"]
    assert found.servers[0].pid == running.root
    assert found.memory.total_bytes > 2**30


def test_what_proc_and_the_port_did_not_tell():
    hidden = Process(1, missing={"user": "process 1 belongs to another user"})
    assert (
        gather.proc_source((LiveServer(1, "vllm", processes=(hidden,)),)).reason == "process 1 belongs to another user"
    )
    titled = Process(1, missing={"arguments": "its title has overwritten its command line"})
    assert gather.proc_source((LiveServer(1, "vllm", processes=(titled,)),)).status == "ok"
    silent = LiveServer(1, "vllm", missing={"metrics": "no answer within 2 s"})
    assert gather.metrics_source((silent,)) == Source("metrics", "unavailable", "no answer within 2 s")
    assert gather.metrics_source((silent, LiveServer(2, "vllm", metrics=Metrics()))).status == "partial"


def test_repeated_samples_show_what_changed(tmp_path):
    port = live_tree.free_port()
    pages = {"/metrics": {"body": "sglang:num_running_reqs 3\nsglang:token_usage 0.5\n"}}
    words = [*ARGUMENTS, "--port", str(port)]
    scenario = tmp_path / "scenario.ini"
    scenario.write_text(nvml_fake.ONE_H200)
    with (
        live_tree.tree(tmp_path / "tree", "sglang serve", words, HYBRID, port=port, pages=pages) as running,
        nvml_fake.installed(scenario),
        gather.Watch(running.root) as watch,
    ):
        first = watch.sample()
        scenario.write_text(nvml_fake.ONE_H200.replace("used = 32362MiB", "used = 42362MiB") + "\n# changed\n")
        second = watch.sample()
        running.program.kill()
        running.program.wait()
        with pytest.raises(AttachError):
            watch.sample()
    assert second.devices.devices[0].used_bytes - first.devices.devices[0].used_bytes == 10_000 * 2**20
    assert second.servers[0].metrics.running_requests == 3
    assert second.servers[0].processes == first.servers[0].processes


def test_the_drivers_stand_in_is_gone_when_its_test_ends():
    """It stays loaded: what comes after must see a machine without a driver, and not end with it."""
    with nvml_fake.installed(nvml_fake.ONE_H200):
        assert nvml.sample().source.status == "ok"
    assert nvml.sample().source.status == "unavailable"
