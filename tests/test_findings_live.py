"""Findings on a running machine: each fires on its case and is silent on the one beside it."""

import msgspec
import pytest
from finding_helpers import sglang, vllm, worker

from memledger import findings
from memledger.findings import live as families
from memledger.findings.figures import Context
from memledger.ledger import Live, LiveGpu, LiveProcess, LiveRow, LiveUsage, LogCheck, Residual
from memledger.units import GIB, MIB

TOTAL = 80 * GIB


def size(value):
    return round(value * GIB)


def row(account, value, **detail):
    return LiveRow(account, size(value), 0, "live", detail)


def gpu(*rows, verdict="closed", rest=0.0, lost=None, free=10.0, index=0):
    residual = Residual("device", size(rest), 0, verdict, TOTAL)
    everything = (*rows, row("free", free))
    return LiveGpu(index, f"GPU-{index}", "H100", TOTAL, "nvml v2", None, lost, everything, residual)


def process(used=60.0, growth=None, expected=None, tolerance=0.2, **more):
    given = {"pid": 4243, "role": "scheduler", "label": "TP0", "rank": 0, "gpu_index": 0, "gpu_uuid": "GPU-0"}
    grown = size(growth) if growth is not None else None
    room = size(expected) if expected is not None else None
    return LiveProcess(
        used_bytes=size(used), growth_bytes=grown, growth_tolerance_bytes=size(tolerance), expected_bytes=room, **{**given, **more}
    )  # fmt: skip


def live(*gpus, processes=(), **more):
    return Live("2026-12-01T12:00:00+00:00", 0, 4210, gpus=gpus, processes=processes, **more)


def one(code, machine, server=None):
    server = server or sglang(worker(80.0, weights__model=30.0, kv_cache__pool=30.0))
    found = [f for family in families.FAMILIES if (f := family(server, Context(live=machine))) is not None]
    return next((f for f in found if f.code == code), None)


def test_without_a_machine_all_are_silent():
    assert [f.code for f in findings.find(sglang(worker(80.0, weights__model=30.0))) if f.code.startswith("ML0")] == []


def test_other_processes_are_named():
    others = (
        row("other_processes", 5.0, pid=7, user="erin", command="python train.py"),
        row("other_processes", 1.0, pid=8),
    )
    found = one("ML001", live(gpu(*others)))
    assert found.severity == "note"
    assert found.bytes == size(6.0)
    assert "pid 7 (erin, python train.py) 5.00 GiB" in found.text
    assert one("ML001", live(gpu(row("other_processes", 9.0, pid=7)))).severity == "warning"


def test_small_and_orphaned_others_are_not_this_finding():
    assert one("ML001", live(gpu(row("other_processes", 0.1, pid=7)))) is None
    assert one("ML001", live(gpu(row("other_processes", 9.0, pid=7, orphan=True)))) is None
    assert one("ML001", live(gpu(row("server_processes", 60.0, pid=4243)))) is None


def test_workers_of_a_dead_server_are_to_be_ended():
    found = one("ML002", live(gpu(row("other_processes", 60.0, pid=991, command="VLLM::Worker_TP0", orphan=True))))
    assert found.severity == "warning"
    assert "kill 991" in found.text
    assert one("ML002", live(gpu(row("other_processes", 60.0, pid=991, command="VLLM::Worker_TP0")))) is None


def test_a_zombie_of_this_server_is_told():
    found = one("ML002", live(gpu(), processes=(process(zombie=True),)))
    assert "pid 4243 (scheduler)" in found.text
    assert one("ML002", live(gpu(), processes=(process(),))) is None


def test_contexts_of_the_launcher_and_of_neighbours():
    """Four extra processes on GPU 0: 2.62 + 3 x 2.09 GiB."""
    extra = (
        row("server_processes", 57.7, pid=100, rank=0, role="scheduler"),
        row("server_processes", 2.62, pid=90, role="launcher"),
        *(row("server_processes", 2.09, pid=101 + i, role="scheduler") for i in range(3)),
    )
    neighbours = [
        process(pid=101 + i, label=f"TP{i + 1}", rank=i + 1, gpu_index=i + 1, matched="pid") for i in range(3)
    ]
    own = process(pid=100, matched="pid")
    found = one("ML003", live(gpu(*extra), processes=(own, *neighbours)))
    assert found.bytes == size(2.62) + 3 * size(2.09)
    assert found.severity == "warning"
    assert one("ML003", live(gpu(*extra[:2]), processes=(own,))).severity == "note"
    assert "4 processes of this server that compute elsewhere" in found.text
    assert one("ML003", live(gpu(extra[0]), processes=(own,))) is None
    # A scheduler that could not be told to be a rank may hold its whole ledger here.
    lost = process(pid=0, label="TP1", rank=1)
    assert (
        one(
            "ML003",
            live(gpu(extra[0], row("server_processes", 58.0, pid=101, role="scheduler")), processes=(own, lost)),
        )
        is None
    )
    # Where no process could be told to be a rank, the rank's own memory must not be called a context.
    assert one("ML003", live(gpu(*extra[1:]), processes=())) is None


def test_growth_beyond_what_was_profiled():
    found = one("ML004", live(gpu(free=6.0), processes=(process(growth=4.0),)))
    assert found.severity == "note"
    assert "TP0 holds 4.00 GiB more" in found.text
    assert "6.00 GiB are free" in found.text
    assert one("ML004", live(gpu(free=1.0), processes=(process(growth=4.0),))).severity == "warning"
    assert one("ML004", live(gpu(), processes=(process(growth=12.0),))).severity == "warning"


@pytest.mark.parametrize(("growth", "expected"), [(0.9, None), (5.0, 4.8), (-3.0, None), (None, None)])
def test_growth_within_tolerance_or_profile_is_none(growth, expected):
    assert one("ML004", live(gpu(), processes=(process(growth=growth, expected=expected),))) is None


def test_pools_in_use_now():
    hybrid = sglang(worker(80.0, kv_cache__pool=20.0, recurrent_state__ssm=18.0))
    found = one("ML005", live(gpu(), usage=LiveUsage(2, 0, 0.05, 0.08)), hybrid)
    assert found.severity == "info"
    assert (
        "5 % of the 20.0 GiB of KV cache and 8 % of the 18.0 GiB of recurrent state by 2 running requests" in found.text
    )
    full = one("ML005", live(gpu(), usage=LiveUsage(8, 5, 0.3, 0.97)), hybrid)
    assert full.severity == "note"
    assert "5 requests wait" in full.text
    assert one("ML005", live(gpu()), hybrid) is None
    assert one("ML005", live(gpu(), usage=LiveUsage(2, 0)), hybrid) is None


def test_a_log_of_another_start():
    no = LogCheck("no", ("the log ends 3 h before the process started",), 0)
    found = one("ML006", live(gpu(), log=no))
    assert found.severity == "warning"
    assert "process 4210: the log ends 3 h before" in found.text
    for verdict in ("yes", "unknown"):
        assert one("ML006", live(gpu(), log=LogCheck(verdict, ("x",), 0))) is None


def test_the_memory_fraction_exceeded_and_met():
    server = vllm(worker(80.0, weights__model=30.0), memory_fraction=0.9)
    driver = row("driver_reserved", 0.5)
    over = one("ML007", live(gpu(driver), processes=(process(used=75.0),)), server)
    assert over.severity == "note"
    assert over.bytes == size(75.0) - int((TOTAL - size(0.5)) * 0.9)
    assert "3.45 GiB more than --gpu-memory-utilization 0.9" in over.text
    assert one("ML007", live(gpu(driver), processes=(process(used=70.0),)), server).severity == "info"
    assert one("ML007", live(gpu(driver), processes=(process(used=75.0),))) is None


def test_memory_that_no_process_holds():
    found = one("ML008", live(gpu(verdict="unexplained", rest=7.0)))
    assert found.severity == "warning"
    assert "7.00 GiB on GPU 0 (9 %)" in found.text
    assert one("ML008", live(gpu(verdict="open", rest=70.0))) is None
    assert one("ML008", live(gpu(rest=0.5))) is None


def test_capacity_lost_to_faults():
    assert "0.50 GiB" in one("ML009", live(gpu(lost=512 * MIB))).text
    assert one("ML009", live(gpu(lost=64 * 1024))) is None
    assert one("ML009", live(gpu())) is None


def test_findings_on_the_logs_balance_give_way_to_the_live_rows():
    from test_reconcile import gpu as device
    from test_reconcile import log, machine, report, seen

    from memledger.reconcile import reconcile

    source = report(log(first=79.0, free=1.0))
    assert "ML301" in [f.code for f in source.servers[0].findings]
    lined_up = families.attach(reconcile(source, machine(device(seen(4243, 61.0)))))
    assert "ML301" not in [f.code for f in lined_up.servers[0].findings]
    kept = families.attach(reconcile(source, machine()))
    assert "ML301" in [f.code for f in kept.servers[0].findings]


def test_a_report_without_servers_stays_as_it_is():
    from test_reconcile import report

    nothing = msgspec.structs.replace(report(), live=live(gpu()))
    assert families.attach(nothing) == nothing
