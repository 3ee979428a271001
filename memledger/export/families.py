"""From a sample and the ledgers of its servers to Prometheus metric families. Needs `prometheus_client`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from memledger import __version__
from memledger.findings.catalogue import PAGES
from memledger.ledger import Rank, Report, Server, Source, Usage
from memledger.live.sample import Device, DeviceSample, LiveServer
from memledger.sanitize import clean

MOST_SERIES: Final = 5000
"""Series of one family; what is beyond is left out and counted in `memledger_series_left_out`."""
LONGEST_LABEL: Final = 120

_RANK: Final = ("server", "gpu", "rank")
_GPU: Final = ("gpu", "uuid")
NAMES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "memledger_sample_timestamp_seconds": ("When the machine was last looked at (Unix time).", ()),
    "memledger_sample_duration_seconds": ("How long that look took.", ()),
    "memledger_sample_success": ("1: the last look gave what was asked for; 0: it failed, or is too old to show.", ()),
    "memledger_source_success": ("1: this source of the machine answered in full; 0: in part, or not.", ("source",)),
    "memledger_build_info": ("The version of memledger.", ("version",)),
    "memledger_gpu_total_bytes": ("Memory of the GPU.", _GPU),
    "memledger_gpu_reserved_bytes": ("Memory that the driver keeps for itself on the GPU.", _GPU),
    "memledger_gpu_used_bytes": ("Memory in use on the GPU, by all processes.", _GPU),
    "memledger_gpu_free_bytes": ("Free memory of the GPU.", _GPU),
    "memledger_server_info": ("A running server.", ("server", "framework", "version", "model")),
    "memledger_server_source_success": (
        "1: this source of the server answered in full; 0: in part, or not. `ledger` is the reckoning itself.",
        ("server", "source"),
    ),
    "memledger_account_bytes": ("Bytes of one account of a rank's ledger.", (*_RANK, "account", "basis")),
    "memledger_residual_bytes": ("Opening balance minus all accounts and free memory; signed.", _RANK),
    "memledger_residual_tolerance_bytes": ("What the rounding of the figures alone may leave.", _RANK),
    "memledger_residual_verdict_info": ("Whether the ledger closes.", (*_RANK, "verdict")),
    "memledger_kv_capacity_tokens": ("Tokens that the KV cache holds.", ("server", "engine")),
    "memledger_state_capacity_slots": ("Slots of recurrent state.", ("server", "engine")),
    "memledger_max_running_requests": ("Requests that may run at once.", ("server", "engine")),
    "memledger_running_requests": ("Requests running now.", ("server",)),
    "memledger_queued_requests": ("Requests waiting now.", ("server",)),
    "memledger_kv_usage_ratio": ("Used part of the KV cache now, 0 to 1; of the fullest engine.", ("server",)),
    "memledger_state_usage_ratio": (
        "Used part of the recurrent state now, 0 to 1; of the fullest engine.",
        ("server",),
    ),
    "memledger_peak_running_requests": ("Most requests that ran at once, by the log.", ("server",)),
    "memledger_peak_queued_requests": ("Most requests that waited at once, by the log.", ("server",)),
    "memledger_peak_kv_usage_ratio": ("Most of the KV cache that was used, 0 to 1, by the log.", ("server",)),
    "memledger_peak_state_usage_ratio": ("Most of the recurrent state that was used, 0 to 1, by the log.", ("server",)),
    "memledger_preemptions_total": ("Requests that vLLM put back for want of KV cache, by its metrics.", ("server",)),
    "memledger_retractions_total": ("Requests that SGLang put back for want of memory, by its log.", ("server",)),
    "memledger_finding_info": ("A finding that holds.", ("server", "code", "severity", "title")),
    "memledger_finding_bytes": ("Bytes that findings of this code speak of.", ("server", "code", "severity")),
    "memledger_series_left_out": ("Series beyond the limit of a family.", ()),
}
"""Every metric: its help and its labels. Those that end in `_total` are counters, all others gauges. An unknown figure is no series."""

_TITLES: Final = {page.code: page.title for page in PAGES}
"""A finding's title by its code: a report's own may hold figures, and each figure would be a series."""


AnswerName = Literal["log", "proc", "metrics", "model", "ledger"]


class Answer(msgspec.Struct, frozen=True):
    """Whether a source of one server answered in full, and if not, why."""

    source: AnswerName
    ok: bool
    reason: str | None = None


class Ledger(msgspec.Struct, frozen=True):
    """One running server as it was at `at` (monotonic seconds); no report where none could be made."""

    pid: int
    at: float
    server: LiveServer | None = None
    report: Report | None = None
    answers: tuple[Answer, ...] = ()


class Page(msgspec.Struct, frozen=True):
    """What is known at one moment: the machine as looked at, and the ledger of each server; `failed`: why a look gave no server.

    `at` is Unix time, `took` seconds, `looked_at` the same moment by the monotonic clock.
    """

    at: float
    took: float
    looked_at: float
    devices: DeviceSample | None = None
    sources: tuple[Source, ...] = ()
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
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, told, labels=labels)
            for key, value in list(rows.items())[:MOST_SERIES]:
                family.add_metric(key, value)
            yield family


def render(page: Page) -> bytes:
    """The page in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_families(page))
    return generate_latest(registry)


def _families(page: Page) -> _Families:
    out = _Families()
    out.put("memledger_build_info", 1, __version__)
    out.put("memledger_sample_success", 0 if page.failed else 1)
    out.put("memledger_sample_timestamp_seconds", page.at)
    out.put("memledger_sample_duration_seconds", page.took)
    for source in page.sources:
        out.put("memledger_source_success", source.status == "ok", source.name)
    for device in page.devices.devices if page.devices is not None else ():
        _gpu(out, device)
    for ledger in page.ledgers:
        _server(out, ledger)
    return out


def _gpu(out: _Families, device: Device) -> None:
    for name in ("total", "reserved", "used", "free"):
        out.put(f"memledger_gpu_{name}_bytes", getattr(device, f"{name}_bytes"), device.index, device.uuid)


def _server(out: _Families, ledger: Ledger) -> None:
    for answer in ledger.answers:
        out.put("memledger_server_source_success", answer.ok, ledger.pid, answer.source)
    if ledger.server is not None:
        _now(out, ledger.server)
    report = ledger.report
    if report is None or report.live is None or report.live.server is None:
        return
    server = report.servers[report.live.server]
    for rank in server.ranks:
        _rank(out, ledger.pid, rank, _names(server.ranks)[rank.label] > 1)
    _capacity(out, ledger.pid, server)
    _peaks(out, ledger.pid, server.usage)
    for finding in server.findings:
        title = _TITLES.get(finding.code)
        out.put("memledger_finding_info", 1, ledger.pid, finding.code, finding.severity, title)
        out.add("memledger_finding_bytes", finding.bytes, ledger.pid, finding.code, finding.severity)


def _now(out: _Families, live: LiveServer) -> None:
    out.put("memledger_server_info", 1, live.pid, live.framework, live.framework_version, live.model)
    if (now := live.metrics) is None:
        return
    out.put("memledger_running_requests", now.running_requests, live.pid)
    out.put("memledger_queued_requests", now.queued_requests, live.pid)
    out.put("memledger_kv_usage_ratio", now.kv_usage, live.pid)
    out.put("memledger_state_usage_ratio", now.state_usage, live.pid)
    out.put("memledger_preemptions_total", now.preemptions, live.pid)


def _peaks(out: _Families, pid: int, usage: Usage) -> None:
    out.put("memledger_peak_running_requests", usage.peak_running_requests, pid)
    out.put("memledger_peak_queued_requests", usage.peak_queued_requests, pid)
    out.put("memledger_peak_kv_usage_ratio", usage.peak_kv_usage, pid)
    out.put("memledger_peak_state_usage_ratio", usage.peak_state_usage, pid)
    out.put("memledger_retractions_total", usage.retractions, pid)


def _names(ranks: Sequence[Rank]) -> Counter[str]:
    return Counter(rank.label for rank in ranks)


def _rank(out: _Families, pid: int, rank: Rank, shared: bool) -> None:
    # Two ranks of one name (several hosts, no rank printed) must not be summed into one.
    label = f"{rank.label} {rank.host or rank.pid or ''}".strip() if shared else rank.label
    for entry in rank.entries:
        out.add("memledger_account_bytes", entry.bytes, pid, rank.gpu.index, label, entry.account, entry.basis)
    rest = rank.residual
    out.put("memledger_residual_bytes", rest.bytes, pid, rank.gpu.index, label)
    out.put("memledger_residual_tolerance_bytes", rest.tolerance_bytes, pid, rank.gpu.index, label)
    out.put("memledger_residual_verdict_info", 1, pid, rank.gpu.index, label, rest.verdict)


def _capacity(out: _Families, pid: int, server: Server) -> None:
    for engine in server.engines:
        has = engine.capacity
        out.put("memledger_kv_capacity_tokens", has.kv_tokens, pid, engine.dp)
        out.put("memledger_state_capacity_slots", has.state_slots, pid, engine.dp)
        out.put("memledger_max_running_requests", has.max_running_requests, pid, engine.dp)
