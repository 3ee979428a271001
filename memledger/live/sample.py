"""What was seen of a machine at one moment: frozen values that travel as JSON (`--snapshot`).

Sizes are bytes, times are ISO 8601 with the local offset, unknown is None. A value that could not be had stands in `missing`
of the same object: field name to one sentence that says why. Texts from processes and servers are cleaned and masked
(`memledger.sanitize`) before they come here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from memledger.ledger import Source

MemoryCall = Literal["nvml v2", "nvml v1", "meminfo", "nvidia-smi"]
"""Where a device's memory figures come from. v1's `used` contains what the driver reserves; `meminfo` is host memory."""

Role = Literal[
    "launcher", "api_server", "coordinator", "engine", "worker", "scheduler", "detokenizer", "helper", "shell", "other"
]


class GpuProcess(msgspec.Struct, frozen=True):
    """A process as the driver lists it on one device. `pid` is the host's process id, which inside a container is not ours.

    `orphan`: it bears the title of an engine's worker and no launcher is above it any more.
    """

    pid: int
    used_bytes: int | None = None
    kind: Literal["compute", "graphics", "mps"] = "compute"
    user: str | None = None
    command: str | None = None
    missing: dict[str, str] = {}
    started_at: str | None = None
    orphan: bool | None = None


class Device(msgspec.Struct, frozen=True):
    """One GPU or one MIG instance at one moment.

    total = reserved + used + free with the v2 call. `index` is NVML's (PCI order); a MIG instance has its own `uuid`, the `index` of
    its parent and `parent_uuid`. `lost_bytes`: capacity retired because of memory faults, where the driver tells it. `mig_mode`: this GPU
    is divided into MIG instances, which stand in the list on their own; `gpu_instance` and `compute_instance` are an instance's ids.
    """

    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    kind: Literal["cuda", "rocm", "npu", "xpu", "musa", "cpu"] = "cuda"
    parent_uuid: str | None = None
    pci_bus: str | None = None
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    memory_call: MemoryCall | None = None
    unified_memory: bool | None = None
    page_cache_bytes: int | None = None
    lost_bytes: int | None = None
    ecc: bool | None = None
    mig_mode: bool | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    notes: tuple[str, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None
    missing: dict[str, str] = {}


class DeviceSample(msgspec.Struct, frozen=True):
    """All devices of the machine, from one source (`nvml` or `smi`), with how the source answered."""

    source: Source
    driver_version: str | None = None
    cuda_version: str | None = None
    taken_at: str | None = None
    devices: tuple[Device, ...] = ()


class Process(msgspec.Struct, frozen=True):
    """One process of a server. `namespace_pids` are its ids from the outermost namespace visible to us inwards."""

    pid: int
    parent_pid: int | None = None
    role: Role = "other"
    title: str | None = None
    arguments: tuple[str, ...] = ()
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    ep: int | None = None
    user: str | None = None
    started_at: str | None = None
    zombie: bool = False
    resident_bytes: int | None = None
    namespace_pids: tuple[int, ...] = ()
    container: str | None = None
    gpu_indices: tuple[int, ...] | None = None
    missing: dict[str, str] = {}
    gpu_uuids: tuple[str, ...] | None = None
    gpu_basis: Literal["nvml", "visible_devices"] | None = None
    """How `gpu_indices` is known: the driver lists the process, or its rank and CUDA_VISIBLE_DEVICES say it."""


class LogPlace(msgspec.Struct, frozen=True):
    """Where the server's log is. `path` can be opened now; where there is none, `advice` says how to hand the log over."""

    path: str | None = None
    kind: Literal["file", "deleted", "docker", "journald", "pipe", "terminal", "null", "unknown"] = "unknown"
    advice: str | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """One request to the server's own port: what it answered (`body` decoded), or why not."""

    path: str
    status: int | None = None
    body: Any = None
    problem: str | None = None


class Metrics(msgspec.Struct, frozen=True):
    """Usage now and capacity, as the server's own metrics say it; per engine where it labels them (key: its label).

    Of several engines together: requests and capacities are sums, usages those of the fullest engine.
    """

    running_requests: int | None = None
    queued_requests: int | None = None
    kv_usage: float | None = None
    state_usage: float | None = None
    swa_usage: float | None = None
    kv_tokens: int | None = None
    kv_blocks: int | None = None
    kv_block_tokens: int | None = None
    preemptions: int | None = None
    labels: dict[str, str] = {}
    state_slots: int | None = None
    state_slots_used: int | None = None


class LiveServer(msgspec.Struct, frozen=True):
    """One running server: its processes, its devices, its log, and what its port answers."""

    pid: int
    framework: Literal["sglang", "vllm"]
    framework_version: str | None = None
    model: str | None = None
    started_at: str | None = None
    processes: tuple[Process, ...] = ()
    container: str | None = None
    log: LogPlace = LogPlace()
    host: str | None = None
    port: int | None = None
    visible_devices: str | None = None
    device_order: str | None = None
    endpoints: tuple[Endpoint, ...] = ()
    metrics: Metrics | None = None
    metrics_by_engine: dict[str, Metrics] = {}
    notes: tuple[str, ...] = ()
    missing: dict[str, str] = {}


class HostMemory(msgspec.Struct, frozen=True):
    """The machine's memory (`/proc/meminfo`); `cgroup_limit_bytes` is the limit on us, where there is one."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    free_bytes: int | None = None
    page_cache_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    shared_memory_total_bytes: int | None = None
    shared_memory_used_bytes: int | None = None


class Sample(msgspec.Struct, frozen=True):
    """Everything that was sampled of a machine at one moment; the input of `reconcile` and the `live` part of a snapshot."""

    taken_at: str
    host: str | None = None
    system: str | None = None
    in_container: bool | None = None
    host_pids: bool | None = None
    """Whether the process ids that we see are the host's, which are those that the driver lists."""
    sources: tuple[Source, ...] = ()
    devices: DeviceSample | None = None
    servers: tuple[LiveServer, ...] = ()
    memory: HostMemory = HostMemory()
