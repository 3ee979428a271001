"""The log's ledger lined up with a sample: every byte of the device has an owner or is called unattributed."""

import msgspec
import pytest
from live_cases import CASES, FOLDER, lined_up, log_report, sample

from memledger import findings
from memledger.findings import live as live_findings
from memledger.ledger import (
    Capacity,
    Gpu,
    Input,
    Rank,
    Report,
    Server,
    Source,
    Span,
    close,
    entry,
)
from memledger.live.sample import Device, DeviceSample, GpuProcess, LiveServer, Metrics, Process, Sample
from memledger.reconcile import reconcile
from memledger.report.text import Style, render
from memledger.report.view import Options
from memledger.units import GIB, MIB, Amount


def gib(value):
    return Amount(round(value * GIB), GIB // 200)


def size(value):
    return round(value * GIB)


def log(*, first=78.5, total=None, free=10.0, pids=(4243,), framework="sglang", activations=None, **accounts):
    """A server from a log, one rank a pid: weights 30, KV 30 unless told."""
    sizes = {"weights/model": 30.0, "kv_cache/pool": 30.0, **{k.replace("__", "/"): v for k, v in accounts.items()}}
    rows = [
        entry(account, gib(value), "logged", stage="pools") for account, value in sizes.items() if value is not None
    ]
    if activations is not None:
        rows.append(entry("activations", gib(activations), "logged", stage="pools"))
    if free is not None:
        rows.append(entry("free", gib(free), "logged", stage="final"))
    base = "device" if total is not None else "first_reading"
    opening = gib(total if total is not None else first)
    ranks = tuple(
        Rank(
            tp=i,
            pid=pid,
            entries=tuple(rows),
            residual=close(base, opening, rows),
            gpu=Gpu(kind="cuda", total_bytes=size(total) if total is not None else None),
            capacity=Capacity(kv_tokens=100_000),
        )
        for i, pid in enumerate(pids)
    )
    return Server(
        framework, "0.5.18", "/models/a", span=(Span(0, 1, 99),), started_at="2026-12-01T10:00:05", state="serving", ranks=ranks
    )  # fmt: skip


def report(*servers):
    return findings.attach(Report("0", (Input("server.log", 9, 9),), (Source("log", "ok"),), servers))


def gpu(*processes, total=80.0, reserved=0.5, free=None, index=0, **more):
    used = sum(p.used_bytes or 0 for p in processes)
    left = size(free) if free is not None else size(total) - size(reserved or 0) - used
    return Device(
        index=index,
        uuid=f"GPU-{index}",
        name="H100",
        total_bytes=size(total),
        reserved_bytes=size(reserved) if reserved is not None else None,
        used_bytes=used,
        free_bytes=left,
        memory_call="nvml v2",
        processes=processes,
        **more,
    )


def seen(pid, used, **more):
    return GpuProcess(pid, size(used) if used is not None else None, **more)


def scheduler(pid=4243, **more):
    return Process(pid, role="scheduler", title="sglang::scheduler", **more)


def server(*processes, **more):
    given = {"pid": 4210, "framework": "sglang", "model": "/models/a", "started_at": "2026-12-01T10:00:00+00:00"}
    return LiveServer(**{**given, "processes": processes or (Process(4210, role="launcher"), scheduler()), **more})


def machine(*devices, live=None, **more):
    given = {"host_pids": True, "devices": DeviceSample(Source("nvml", "ok"), devices=devices)}
    return Sample("2026-12-01T12:00:00+00:00", servers=(live if live is not None else server(),), **{**given, **more})


def run(source, taken, **how):
    return live_findings.attach(reconcile(report(source), taken, **how))


def rows(rank):
    return {e.account: e for e in rank.entries}


# ------------------------------------------------------------------------------------------------------ the fixtures


@pytest.mark.parametrize("case", CASES)
def test_a_fixtures_gpus_close_within_one_percent(case):
    live = lined_up(case).live
    assert live.log.verdict == "yes"
    assert live.gpus
    for device in live.gpus:
        assert device.residual.verdict == "closed", device
        assert device.total_bytes == sum(r.bytes for r in device.rows) + device.residual.bytes


@pytest.mark.parametrize("case", CASES)
def test_a_fixtures_ranks_have_every_byte_of_the_card(case):
    found = lined_up(case)
    for rank in found.servers[found.live.server].ranks:
        own = [e for e in rank.entries if not e.account.startswith("host/")]
        assert rank.residual.opening_bytes == 81559 * MIB
        assert rank.residual.opening_bytes == sum(e.bytes for e in own) + rank.residual.bytes
        assert sum(s.residual.bytes for s in rank.stages) == rank.residual.bytes
        assert rank.stages[-1].name == "serving"


@pytest.mark.parametrize("case", CASES)
def test_a_fixtures_processes_are_their_ledger_a_context_and_growth(case):
    for process in lined_up(case).live.processes:
        assert process.matched == "pid"
        assert process.used_bytes == sum(r.bytes for r in process.rows) + process.growth_bytes


@pytest.mark.parametrize("case", CASES)
def test_the_golden_report_of_a_fixture(case, update_golden):
    text = render(lined_up(case))
    file = FOLDER / case / "report.txt"
    if update_golden:
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, "pytest --update-golden writes it anew"


# ---------------------------------------------------------------------------------------------------------- the rows


def test_live_rows_take_the_place_of_what_was_in_use_at_the_start():
    source = log(total=79.5, first=None, free=None, in_use_at_start=1.0, reserve=8.0, activations=2.0)
    found = run(source, machine(gpu(seen(4243, 61.5), seen(77, 3.0, user="erin", command="python x.py"))))
    (rank,) = found.servers[0].ranks
    have = rows(rank)
    assert {"in_use_at_start", "reserve", "activations"} & set(have) == set()
    assert have["driver_reserved"].bytes == size(0.5)
    assert have["cuda_context"].basis == "assumed"
    assert have["cuda_context"].tolerance_bytes > 100 * MIB
    assert have["other_processes"].detail["command"] == "python x.py"
    assert have["free"].basis == "live"
    assert have["free"].bytes == size(80.0) - size(0.5) - size(61.5) - size(3.0)
    assert rank.gpu.index == 0
    assert rank.residual.base == "device"


def test_growth_is_signed_and_not_an_entry():
    for used, sign in ((63.0, 1), (58.0, -1)):
        (process,) = run(log(), machine(gpu(seen(4243, used)))).live.processes
        assert process.growth_bytes * sign > 0
        assert process.growth_bytes == size(used) - sum(r.bytes for r in process.rows)
    (rank,) = run(log(), machine(gpu(seen(4243, 63.0)))).servers[0].ranks
    assert rank.residual.since_start_bytes == rank.residual.bytes
    assert rank.residual.verdict == "unexplained"


def test_what_was_taken_before_the_first_reading_is_told_from_growth():
    """80 - 0.5 - 77 = 2.5 GiB before the log's first reading: 0.44 context, the rest communication."""
    found = run(log(first=77.0), machine(gpu(seen(4243, 62.5))))
    (rank,) = found.servers[0].ranks
    assert rows(rank)["in_use_at_start"].basis == "derived"
    assert abs(found.live.processes[0].growth_bytes) <= 2


def test_others_that_came_later_were_not_there_before_the_first_reading():
    early = seen(77, 2.0, started_at="2026-12-01T09:00:00+00:00")
    late = seen(77, 2.0, started_at="2026-12-01T11:00:00+00:00")
    assert "in_use_at_start" not in rows(run(log(first=77.0), machine(gpu(seen(4243, 62), early))).servers[0].ranks[0])
    assert "in_use_at_start" in rows(run(log(first=77.0), machine(gpu(seen(4243, 62), late))).servers[0].ranks[0])


def test_unattributed_memory_is_signed_and_judged():
    device = run(log(), machine(gpu(seen(4243, 61.0), free=10.0))).live.gpus[0]
    assert device.residual.bytes == size(80.0) - size(0.5) - size(61.0) - size(10.0)
    assert device.residual.verdict == "unexplained"
    over = run(log(), machine(gpu(seen(4243, 61.0), free=30.0))).live.gpus[0]
    assert over.residual.verdict == "over_counted"
    assert over.residual.bytes < 0


def test_the_older_call_has_no_row_of_the_driver():
    device = gpu(seen(4243, 61.0), reserved=None, free=18.5, total=80.0)
    found = run(log(), machine(device)).live.gpus[0]
    assert "driver_reserved" not in {r.account for r in found.rows}
    assert found.residual.bytes == size(0.5)
    assert found.residual.verdict == "closed"


# ------------------------------------------------------------------------------------------------- which process it is


def test_ranks_go_to_processes_by_id_then_by_title():
    devices = (gpu(seen(11, 61.0)), gpu(seen(12, 62.0), index=1))
    live = server(
        Process(10, role="launcher"), Process(12, role="scheduler", tp=1), Process(11, role="scheduler", tp=0)
    )
    by_title = run(log(pids=(None, None)), machine(*devices, live=live)).live.processes
    assert [(p.rank, p.pid, p.gpu_index) for p in by_title] == [(0, 11, 0), (1, 12, 1)]
    inner = server(Process(10), scheduler(11, namespace_pids=(11, 191)), scheduler(12, namespace_pids=(12, 190)))
    by_id = run(log(pids=(190, 191)), machine(*devices, live=inner)).live.processes
    assert [(p.rank, p.pid, p.gpu_index) for p in by_id] == [(0, 12, 1), (1, 11, 0)]


def test_in_a_container_an_equal_id_means_nothing_and_size_decides():
    device = gpu(seen(4243, 3.0), seen(990, 61.2))
    found = run(log(), machine(device, host_pids=False, in_container=True))
    (process,) = found.live.processes
    assert (process.matched, process.used_bytes) == ("size", size(61.2))
    assert "host pid 990" in process.notes[0]
    assert any("host PIDs seen, matched by size" in note for note in found.live.notes)
    assert [e.detail["pid"] for e in found.servers[0].ranks[0].entries if e.account == "other_processes"] == [4243]


def test_two_processes_of_one_size_are_not_told_apart():
    device = gpu(seen(990, 61.2), seen(991, 61.4), total=140.0)
    found = run(log(), machine(device, host_pids=False))
    assert found.live.processes[0].used_bytes is None
    assert any("host PIDs seen, not mapped" in note for note in found.live.notes)
    assert found.servers[0].ranks[0].residual.verdict == "open"


def test_a_container_that_shows_no_process_is_open_and_says_why():
    device = gpu(total=80.0, free=18.0)
    found = run(log(), machine(device, host_pids=False))
    assert found.live.gpus[0].residual.verdict == "open"
    assert "not even the server's own" in found.live.gpus[0].residual.reason


def test_visible_devices_say_which_gpu_where_no_process_is_listed():
    devices = tuple(gpu(index=i, total=80.0, free=18.0) for i in range(4))
    live = server(visible_devices="2")
    assert run(log(), machine(*devices, live=live, host_pids=False)).live.processes[0].gpu_index == 2
    unknown = run(log(), machine(*devices, live=server(), host_pids=False)).live.processes[0]
    assert unknown.gpu_index is None


def test_the_launchers_context_is_the_servers_own():
    device = gpu(seen(4243, 61.0), seen(4210, 0.6))
    found = run(log(), machine(device)).live
    assert [r.account for r in found.gpus[0].rows if "pid" in r.detail] == ["server_processes", "server_processes"]
    assert [(p.pid, p.rank) for p in found.processes] == [(4243, 0), (4210, None)]


# ------------------------------------------------------------------------------------------------ what can't be judged


def test_a_figure_the_driver_does_not_give_leaves_the_gpu_open():
    hidden = GpuProcess(4243, None, missing={"used_bytes": "under WSL the driver does not tell memory by process"})
    found = run(log(), machine(gpu(hidden, free=18.0)))
    assert found.live.gpus[0].residual.verdict == "open"
    assert "WSL" in found.live.gpus[0].residual.reason
    assert found.live.processes[0].growth_bytes is None
    assert "under WSL" in render(found)


def test_unified_memory_has_a_page_cache_and_no_verdict():
    device = gpu(
        seen(4243, 61.0), total=120.0, reserved=None, free=40.0, unified_memory=True, page_cache_bytes=size(25.0)
    )
    found = run(log(first=110.0), machine(device))
    accounts = {r.account: r.bytes for r in found.live.gpus[0].rows}
    assert accounts["page_cache"] == size(25.0)
    assert accounts["free"] == size(15.0)
    assert found.live.gpus[0].residual.verdict == "open"
    assert "shares the host's memory" in found.servers[0].ranks[0].residual.reason


def test_a_device_that_is_lost_keeps_the_log():
    lost = Device(index=0, missing={"total_bytes": "the GPU has fallen off the bus"})
    found = run(log(), machine(lost))
    (rank,) = found.servers[0].ranks
    assert rows(rank)["free"].basis == "logged"
    assert found.live.gpus[0].residual.reason == "the GPU has fallen off the bus"


def test_a_card_of_another_size_is_not_lined_up():
    found = run(log(total=23.5, first=None, weights__model=10.0, kv_cache__pool=8.0), machine(gpu(seen(4243, 61.0))))
    assert rows(found.servers[0].ranks[0])["free"].basis == "logged"
    assert "23.5 GiB in the log" in found.live.processes[0].notes[0]


def test_a_ledger_without_weights_stays_open():
    found = run(log(weights__model=None), machine(gpu(seen(4243, 61.0))))
    assert found.servers[0].ranks[0].residual.reason == "not in the log: the weights"


def test_no_driver_keeps_the_log_and_says_why():
    nothing = DeviceSample(Source("nvml", "unavailable", "NVML library not found: no NVIDIA driver is installed here"))
    found = run(log(), machine(devices=nothing))
    assert found.live.gpus == ()
    assert rows(found.servers[0].ranks[0])["free"].basis == "logged"
    text = render(found)
    assert "NVML library not found" in text
    assert "KV cache" in text


def test_a_mig_instance_is_its_own_device():
    parent = gpu(total=80.0, free=79.0, mig_mode=True)
    instance = msgspec.structs.replace(gpu(seen(4243, 61.2), total=70.0), uuid="MIG-abcdefgh-1", parent_uuid="GPU-0")
    found = run(log(first=68.0), machine(parent, instance))
    assert [g.uuid for g in found.live.gpus] == ["MIG-abcdefgh-1"]
    assert found.servers[0].ranks[0].gpu.total_bytes == size(70.0)


# ------------------------------------------------------------------------------------------------------ the log's right


def test_the_log_of_an_older_start_is_not_lined_up():
    old = msgspec.structs.replace(log(), started_at="2026-11-20T10:00:00")
    found = run(old, machine(gpu(seen(4243, 61.0))))
    assert found.live.server is None
    assert found.live.log.verdict == "no"
    assert rows(found.servers[0].ranks[0])["free"].basis == "logged"
    assert "ML006" in [f.code for f in found.servers[0].findings]
    assert "GPU 0 now" in render(found)


def test_the_start_of_the_process_is_chosen_among_several():
    old = msgspec.structs.replace(log(), started_at="2026-11-20T10:00:00")
    found = live_findings.attach(reconcile(report(old, log()), machine(gpu(seen(4243, 61.0)))))
    assert found.live.server == 1
    assert rows(found.servers[0].ranks[0])["free"].basis == "logged"
    assert rows(found.servers[1].ranks[0])["free"].basis == "live"


def test_sources_are_named_with_the_log_first():
    taken = machine(
        gpu(seen(4243, 61.0)),
        sources=(Source("nvml", "ok"), Source("proc", "ok"), Source("metrics", "unavailable", "x")),
    )
    assert [s.name for s in run(log(), taken).sources] == ["log", "nvml", "proc", "metrics"]


def test_metrics_say_what_is_used_now():
    live = server(metrics=Metrics(running_requests=2, queued_requests=0, kv_usage=0.05))
    found = run(log(), machine(gpu(seen(4243, 61.0)), live=live))
    assert found.live.usage.kv_usage == 0.05
    assert "2 running, 0 queued, KV 5 %" in render(found)


def test_a_pasted_sample_names_processes_by_title():
    paste = DeviceSample(
        Source("smi", "ok"),
        devices=(gpu(seen(7001, 61.2, command="sglang::scheduler_TP0"), seen(7002, 1.0, command="python")),),
    )
    found = live_findings.attach(reconcile(report(log(pids=(None,))), Sample("", devices=paste)))
    (process,) = found.live.processes
    assert (process.matched, process.pid) == ("title", 7001)
    assert found.live.log is None
    assert found.servers[0].ranks[0].residual.since_start_bytes is not None


def test_the_scenario_decides_what_is_sampled():
    """The fixture's devices come through pynvml from the scenario, not from the JSON file."""
    text = (FOLDER / "live-sglang-hybrid" / "nvml.ini").read_text().replace("compute 4243 74236MiB", "compute 4243 n/a")
    (device,) = sample("live-sglang-hybrid", text).devices.devices
    assert device.processes[0].used_bytes is None
    assert log_report("live-sglang-hybrid").live is None


def test_what_remains_of_an_incomplete_ledger_is_no_growth():
    """Without the weights, 30 GiB of the process would read as growth."""
    found = run(log(weights__model=None), machine(gpu(seen(4243, 61.0))))
    (process,) = found.live.processes
    assert process.growth_bytes is None
    assert found.servers[0].ranks[0].residual.since_start_bytes is None
    assert "ML004" not in [f.code for f in found.servers[0].findings]
    assert "not told apart: not in the log: the weights" in process.notes[0]


def test_a_server_on_the_cpu_has_no_device_and_says_what_it_holds_of_the_host():
    source = log()
    rank = msgspec.structs.replace(source.ranks[0], gpu=Gpu(kind="cpu"))
    live = server(Process(4210, role="launcher"), scheduler(resident_bytes=size(1.5)))
    found = run(msgspec.structs.replace(source, ranks=(rank,)), machine(gpu(seen(77, 1.0)), live=live))
    (process,) = found.live.processes
    assert (process.gpu_index, process.resident_bytes) == (None, size(1.5))
    assert found.live.gpus == ()
    assert "1.50 GiB of host memory" in render(found)
    assert rows(found.servers[0].ranks[0])["free"].basis == "logged"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [50, 80, 120])
def test_no_line_is_wider_than_the_terminal(case, width):
    found = lined_up(case)
    text = render(found, None, Style(width=width))
    assert max(map(len, text.splitlines())) <= width


def test_a_rank_alone_shows_its_own_rows():
    found = lined_up("live-vllm-tp2")
    text = render(found, Options(rank="TP1"))
    assert "GPU 0" not in text.split("process")[0]
    assert "pid 70211" in text
    with pytest.raises(LookupError):
        render(found, Options(rank="TP7"))


def test_a_table_of_nvidia_smi_tells_what_is_used_and_no_more():
    """81559 MiB of which 62,500 are used: the driver's part stands with what is free, and the rest still closes."""
    device = msgspec.structs.replace(
        gpu(seen(7001, 61.2, command="sglang::scheduler_TP0")),
        reserved_bytes=None,
        free_bytes=None,
        used_bytes=size(61.25),
    )
    paste = DeviceSample(Source("smi", "ok"), devices=(device,))
    found = live_findings.attach(reconcile(report(log(pids=(None,))), Sample("", devices=paste)))
    free = next(r for r in found.live.gpus[0].rows if r.account == "free")
    assert free.bytes == size(80.0) - size(61.25)
    assert "driver keeps" in free.detail["note"]
    assert found.live.gpus[0].residual.verdict == "closed"
    assert found.live.gpus[0].residual.bytes == size(61.25) - size(61.2)
    assert rows(found.servers[0].ranks[0])["free"].bytes == free.bytes


def test_a_second_server_in_a_paste_is_not_called_this_ones():
    listed = (seen(7001, 61.2, command="sglang::scheduler"), seen(7003, 12.0, command="sglang::scheduler"))
    paste = DeviceSample(Source("smi", "ok"), devices=(gpu(*listed),))
    found = live_findings.attach(reconcile(report(log(pids=(None,))), Sample("", devices=paste)))
    (process,) = found.live.processes
    assert (process.matched, process.used_bytes) == ("size", size(61.2))
    assert [r.account for r in found.live.gpus[0].rows if "pid" in r.detail] == ["server_processes", "other_processes"]
