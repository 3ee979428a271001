"""Whatever a driver, /proc and a server answer: nothing raises, and every sum holds to the byte."""

from hypothesis import given, settings
from hypothesis import strategies as st
from test_reconcile import log, report

from memledger.findings import live as live_findings
from memledger.ledger import Source
from memledger.live.sample import Device, DeviceSample, GpuProcess, LiveServer, LogPlace, Metrics, Process, Sample
from memledger.reconcile import reconcile
from memledger.report.json import encode
from memledger.report.markdown import render as markdown
from memledger.report.text import render

PIDS = st.sampled_from([0, 1, 4210, 4243, 4244, 77, 4_000_000])
SIZES = st.one_of(st.none(), st.integers(0, 2**38), st.just(61 * 2**30))
TIMES = st.sampled_from([None, "2026-12-01T10:00:00+00:00", "2026-11-01T10:00:00", "--12-01T10:00:05", "nonsense", ""])
TEXTS = st.one_of(
    st.none(), st.sampled_from(["VLLM::Worker_TP1", "sglang::scheduler", "a\x1b[31m|`*_<b>", "", "x" * 500])
)
ROLES = st.sampled_from(["launcher", "scheduler", "worker", "engine", "helper", "other"])
RANKS = st.one_of(st.none(), st.integers(0, 3))

driver_processes = st.builds(
    GpuProcess, PIDS, SIZES, user=TEXTS, command=TEXTS, started_at=TIMES, orphan=st.sampled_from([None, True])
)
devices = st.builds(
    Device,
    index=st.one_of(st.none(), st.integers(0, 3)),
    uuid=st.sampled_from([None, "GPU-0", "GPU-1", "MIG-1"]),
    name=TEXTS,
    parent_uuid=st.sampled_from([None, "GPU-0"]),
    total_bytes=SIZES,
    reserved_bytes=SIZES,
    used_bytes=SIZES,
    free_bytes=SIZES,
    memory_call=st.sampled_from([None, "nvml v2", "nvml v1", "meminfo", "nvidia-smi"]),
    unified_memory=st.sampled_from([None, False, True]),
    page_cache_bytes=SIZES,
    lost_bytes=SIZES,
    mig_mode=st.sampled_from([None, True]),
    processes=st.one_of(st.none(), st.lists(driver_processes, max_size=4).map(tuple)),
)
processes = st.builds(
    Process, PIDS, role=ROLES, title=TEXTS, dp=RANKS, pp=RANKS, tp=RANKS, zombie=st.booleans(),
    namespace_pids=st.lists(PIDS, max_size=2).map(tuple),
    gpu_indices=st.one_of(st.none(), st.lists(st.integers(0, 3), max_size=2).map(tuple)),
)  # fmt: skip
metrics = st.builds(Metrics, RANKS, RANKS, st.one_of(st.none(), st.floats(0, 1)), st.one_of(st.none(), st.floats(0, 1)))
servers = st.builds(
    LiveServer, PIDS, st.sampled_from(["sglang", "vllm"]), model=st.sampled_from([None, "/models/a", "/models/b"]), started_at=TIMES,
    processes=st.lists(processes, max_size=4).map(tuple), container=st.sampled_from([None, "ab12"]),
    log=st.just(LogPlace()), port=st.sampled_from([None, 8000]), visible_devices=st.sampled_from([None, "", "0", "1,0", "GPU-1", "x"]),
    metrics=st.one_of(st.none(), metrics),
)  # fmt: skip
samples = st.builds(
    Sample,
    st.just("2026-12-01T12:00:00+00:00"),
    host_pids=st.sampled_from([None, True, False]),
    in_container=st.sampled_from([None, True, False]),
    devices=st.one_of(
        st.none(),
        st.builds(
            DeviceSample, st.builds(Source, st.sampled_from(["nvml", "smi"]), st.sampled_from(["ok", "partial"])),
            devices=st.lists(devices, max_size=3).map(tuple),
        ),
    ),
    servers=st.lists(servers, max_size=1).map(tuple),
)  # fmt: skip
logs = st.sampled_from(
    [
        log(),
        log(pids=(4243, 4244)),
        log(pids=(None,), weights__model=None),
        log(total=79.5, first=None, free=None, in_use_at_start=1.0, reserve=8.0, activations=2.0, framework="vllm"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(samples, st.lists(logs, max_size=2), st.booleans())
def test_sums_hold_and_nothing_raises(taken, found, own_log):
    result = live_findings.attach(reconcile(report(*found), taken, own_log=own_log))
    live = result.live
    for gpu in live.gpus:
        if gpu.residual.bytes is not None:
            assert gpu.total_bytes == sum(r.bytes or 0 for r in gpu.rows) + gpu.residual.bytes
    for process in live.processes:
        if process.growth_bytes is not None:
            assert process.used_bytes == sum(r.bytes for r in process.rows) + process.growth_bytes
    for server in result.servers:
        for rank in server.ranks:
            own = [e for e in rank.entries if not e.account.startswith("host/")]
            if rank.residual.bytes is not None:
                assert rank.residual.opening_bytes == sum(e.bytes for e in own) + rank.residual.bytes
            left = [s.residual.bytes for s in rank.stages]
            if left and None not in left:
                assert sum(left) == rank.residual.bytes
    for text in (render(result), markdown(result), encode(result).decode()):
        assert "\x1b" not in text
        assert "\\u001b" not in text
