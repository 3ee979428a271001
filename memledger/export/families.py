"""From a sample and the ledgers of its servers to Prometheus metric families. Needs `prometheus_client`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from memledger import __version__
from memledger.ledger import Rank, Report, Server
from memledger.live.sample import Device, LiveServer, Sample
from memledger.sanitize import clean

MOST_SERIES: Final = 5000
"""Series of one family; what is beyond is left out and counted in `memledger_series_left_out`."""
LONGEST_LABEL: Final = 120

_RANK: Final = ("server", "gpu", "rank")
NAMES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "memledger_sample_timestamp_seconds": ("When the sample was taken (Unix time).", ()),
    "memledger_sample_duration_seconds": ("How long taking the sample took.", ()),
    "memledger_sample_success": ("1: the last attempt gave a sample; 0: it failed, or is too old to show.", ()),
    "memledger_source_success": ("1: the source answered in full; 0: in part, or not at all.", ("source",)),
    "memledger_build_info": ("The version of memledger.", ("version",)),
    "memledger_server_info": ("A running server.", ("server", "framework", "version", "model")),
    "memledger_account_bytes": ("Bytes of one account of a rank's ledger.", (*_RANK, "account", "basis")),
    "memledger_residual_bytes": ("Opening balance minus all accounts; signed.", (*_RANK, "verdict")),
    "memledger_gpu_total_bytes": ("Memory of the GPU.", ("gpu", "uuid")),
    "memledger_gpu_used_bytes": ("Memory in use on the GPU, by all processes.", ("gpu", "uuid")),
    "memledger_gpu_free_bytes": ("Free memory of the GPU.", ("gpu", "uuid")),
    "memledger_kv_capacity_tokens": ("Tokens that the KV cache holds.", ("server", "engine")),
    "memledger_state_capacity_slots": ("Slots of recurrent state.", ("server", "engine")),
    "memledger_max_running_requests": ("Requests that may run at once.", ("server", "engine")),
    "memledger_running_requests": ("Requests running now.", ("server",)),
    "memledger_queued_requests": ("Requests waiting now.", ("server",)),
    "memledger_kv_usage_ratio": ("Used part of the KV cache now, 0 to 1; of the fullest engine.", ("server",)),
    "memledger_state_usage_ratio": ("Used part of the recurrent state now, 0 to 1.", ("server",)),
    "memledger_finding_info": ("A finding that holds.", ("server", "code", "severity")),
    "memledger_finding_bytes": ("Bytes that findings of this code speak of.", ("server", "code", "severity")),
    "memledger_series_left_out": ("Series beyond the limit of a family.", ()),
}
"""Every metric: its help and its labels. All are gauges."""


class Ledger(msgspec.Struct, frozen=True):
    """One running server with its report, lined up with the sample; no report where none could be made."""

    server: LiveServer
    report: Report | None = None


class Taken(msgspec.Struct, frozen=True):
    """One attempt: a sample with its ledgers, or why there is none. Times in seconds."""

    at: float
    took: float
    sample: Sample | None = None
    ledgers: tuple[Ledger, ...] = ()
    failed: str | None = None


class _Families:
    """Gauges under construction; equal labels are one series."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[tuple[str, ...], float]] = {}

    def add(self, name: str, value: float | None, *labels: object) -> None:
        """Add to a series; unknown (None) makes no series."""
        if value is None:
            return
        rows = self._rows.setdefault(name, {})
        key = tuple("" if label is None else clean(str(label), LONGEST_LABEL) for label in labels)
        rows[key] = rows.get(key, 0) + value

    def put(self, name: str, value: float | None, *labels: object) -> None:
        """Like `add`, but a series that is there already keeps its value."""
        key = tuple("" if label is None else clean(str(label), LONGEST_LABEL) for label in labels)
        if key not in self._rows.get(name, {}):
            self.add(name, value, *labels)

    def collect(self) -> Iterable[Metric]:
        left_out = sum(max(0, len(rows) - MOST_SERIES) for rows in self._rows.values())
        self._rows["memledger_series_left_out"] = {(): float(left_out)}
        for name, rows in self._rows.items():
            told, labels = NAMES[name]
            family = GaugeMetricFamily(name, told, labels=labels)
            for key, value in list(rows.items())[:MOST_SERIES]:
                family.add_metric(key, value)
            yield family


def render(taken: Taken) -> bytes:
    """The page of one attempt, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_families(taken))
    return generate_latest(registry)


def stale(taken: Taken) -> Taken:
    """What is left to say when the last sample is too old to be called the present."""
    return Taken(taken.at, taken.took, failed="the last sample is too old")


def _families(taken: Taken) -> _Families:
    out = _Families()
    out.put("memledger_build_info", 1, __version__)
    out.put("memledger_sample_success", 0 if taken.failed else 1)
    out.put("memledger_sample_timestamp_seconds", taken.at)
    out.put("memledger_sample_duration_seconds", taken.took)
    if taken.sample is None:
        return out
    for source in taken.sample.sources:
        out.put("memledger_source_success", source.status == "ok", source.name)
    for device in taken.sample.devices.devices if taken.sample.devices is not None else ():
        _gpu(out, device)
    for ledger in taken.ledgers:
        _server(out, ledger)
    return out


def _gpu(out: _Families, device: Device) -> None:
    for name in ("total", "used", "free"):
        out.put(f"memledger_gpu_{name}_bytes", getattr(device, f"{name}_bytes"), device.index, device.uuid)


def _server(out: _Families, ledger: Ledger) -> None:
    live = ledger.server
    out.put("memledger_server_info", 1, live.pid, live.framework, live.framework_version, live.model)
    if (now := live.metrics) is not None:
        out.put("memledger_running_requests", now.running_requests, live.pid)
        out.put("memledger_queued_requests", now.queued_requests, live.pid)
        out.put("memledger_kv_usage_ratio", now.kv_usage, live.pid)
        out.put("memledger_state_usage_ratio", now.state_usage, live.pid)
    report = ledger.report
    if report is None or report.live is None or report.live.server is None:
        return
    server = report.servers[report.live.server]
    for rank in server.ranks:
        _rank(out, live.pid, rank, _names(server.ranks)[rank.label] > 1)
    _capacity(out, live.pid, server)
    for finding in server.findings:
        out.put("memledger_finding_info", 1, live.pid, finding.code, finding.severity)
        out.add("memledger_finding_bytes", finding.bytes, live.pid, finding.code, finding.severity)


def _names(ranks: Sequence[Rank]) -> Counter[str]:
    return Counter(rank.label for rank in ranks)


def _rank(out: _Families, pid: int, rank: Rank, shared: bool) -> None:
    # Two ranks of one name (several hosts, no rank printed) must not be summed into one.
    label = f"{rank.label} {rank.host or rank.pid or ''}".strip() if shared else rank.label
    for entry in rank.entries:
        out.add("memledger_account_bytes", entry.bytes, pid, rank.gpu.index, label, entry.account, entry.basis)
    rest = rank.residual
    out.put("memledger_residual_bytes", rest.bytes, pid, rank.gpu.index, label, rest.verdict)


def _capacity(out: _Families, pid: int, server: Server) -> None:
    for engine in server.engines:
        has = engine.capacity
        out.put("memledger_kv_capacity_tokens", has.kv_tokens, pid, engine.dp)
        out.put("memledger_state_capacity_slots", has.state_slots, pid, engine.dp)
        out.put("memledger_max_running_requests", has.max_running_requests, pid, engine.dp)
