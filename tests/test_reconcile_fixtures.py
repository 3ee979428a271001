"""Every fixture log can be lined up with a machine, and survives a snapshot."""

import msgspec
import pytest
from live_cases import FOLDER

from memledger import findings
from memledger.findings import live as live_findings
from memledger.ledger import Source, held
from memledger.live import snapshot
from memledger.live.sample import Device, DeviceSample, GpuProcess, LiveServer, Process, Sample
from memledger.live.snapshot import SCHEMA, Snapshot
from memledger.pipeline import explain
from memledger.reconcile import CONTEXT, reconcile
from memledger.report.markdown import render as markdown
from memledger.report.text import render
from memledger.units import GIB, MIB

LOGS = sorted(path for path in FOLDER.rglob("server.log") if "hostile" not in path.parts)
KEPT_FREE = {"in_use_at_start", "reserve", "free", "activations"}


def machine(server):
    """One card for each rank: the ledger, a context, 300 MiB of growth, 2 GiB of a program that was there before."""
    devices, processes = [], [Process(9000, role="launcher")]
    for at, rank in enumerate(server.ranks):
        own = held([e for e in rank.entries if e.account not in KEPT_FREE])
        used = max(own.bytes, 0) + CONTEXT.bytes + 300 * MIB
        total = (rank.gpu.total_bytes or used + 20 * GIB) + GIB // 2
        pid = rank.pid if rank.pid is not None and rank.pid not in {p.pid for p in processes} else 9100 + at
        listed = (GpuProcess(pid, used), GpuProcess(7, 2 * GIB, command="other"))
        left = total - GIB // 2 - used - 2 * GIB
        devices.append(
            Device(
                at, f"GPU-{at}", "card", total_bytes=total, reserved_bytes=GIB // 2, free_bytes=left, processes=listed
            )
        )
        processes.append(Process(pid, role="worker", dp=rank.dp, pp=rank.pp, tp=rank.tp))
    live = LiveServer(9000, server.framework, processes=tuple(processes))
    source = DeviceSample(Source("nvml", "ok"), devices=tuple(devices))
    return Sample("2026-12-01T12:00:00+00:00", host_pids=True, devices=source, servers=(live,))


@pytest.mark.parametrize("log", LOGS, ids=lambda p: p.parent.name)
def test_every_log_can_be_lined_up(log):
    base = findings.attach(explain([str(log)]))
    server = base.servers[-1]
    found = live_findings.attach(reconcile(base, machine(server), own_log=True))
    if found.live.server is None:
        # Logs whose last start has other process ids than its ranks print.
        assert found.live.log.verdict == "no"
        return
    assert [g.residual.bytes for g in found.live.gpus] == [0] * len(found.live.gpus)
    for process in found.live.processes:
        if process.growth_bytes is not None:
            rest = sum(r.bytes for r in process.rows if r.account == "in_use_at_start")
            assert process.growth_bytes == 300 * MIB - rest
    for rank in found.servers[found.live.server].ranks:
        left = [s.residual.bytes for s in rank.stages]
        if left and None not in left:
            assert sum(left) == rank.residual.bytes
    assert render(found)
    assert markdown(found)


@pytest.mark.parametrize("log", LOGS, ids=lambda p: p.parent.name)
def test_every_report_survives_a_snapshot(log, tmp_path):
    base = findings.attach(explain([str(log)]))
    taken = Snapshot(SCHEMA, "0", machine(base.servers[-1]), report=base)
    snapshot.write(tmp_path / "s.json", taken)
    again = snapshot.read(str(tmp_path / "s.json"))
    assert render(again.report) == render(base)
    before, after = (live_findings.attach(reconcile(one.report, one.sample, own_log=True)) for one in (taken, again))
    assert render(after) == render(before)
    assert msgspec.json.encode(after) == msgspec.json.encode(before)
