"""What a watched server shows at one moment, and how a recording says it in few bytes.

Sizes are bytes, usages fractions of a pool, clocks seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from memledger.ledger import Report
from memledger.live.sample import Device, GpuProcess, HostMemory, LiveServer, Metrics, Process, Sample


class Serving(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last serving line of one scheduler; `scheduler` is empty where there is only one."""

    scheduler: str = ""
    time: str | None = None
    running: int | None = None
    queued: int | None = None
    kv: float | None = None
    state: float | None = None
    swa: float | None = None


class Start(msgspec.Struct, frozen=True):
    """A server (or a log) as it was when it was first seen; what follows is of it until the next one.

    `run` tells recordings of one call apart from another's. `pid` is None where a log alone is watched. The rest is what
    `memledger.reconcile` needs.
    """

    run: str
    at: str
    interval_s: float
    report: Report | None = None
    pid: int | None = None
    own_log: bool = False
    built: bool = False


class Moment(msgspec.Struct, frozen=True):
    """One look. `at` is ISO time, for people; `clock_s` counts on whatever the machine's date does, from the run's begin."""

    at: str
    clock_s: float
    sample: Sample | None = None
    serving: tuple[Serving, ...] = ()


class End(msgspec.Struct, frozen=True):
    """The server that was watched is gone, or its log can't be read any more; one sentence."""

    at: str
    reason: str


class Grown(msgspec.Struct, frozen=True):
    """The log says more of the start than before: its report."""

    report: Report


Event = Start | Moment | Grown | End
"""What a watch tells, in order; a recording holds the same."""


# What changes from one look to the next while nothing comes or goes: a tick. The rest is said once.


class DeviceTick(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device's memory; `processes` in the order of the device's list."""

    reserved_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    page_cache_bytes: int | None = None
    processes: tuple[int | None, ...] | None = None


class ServerTick(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server's load and the host memory of its processes, in the order of its list."""

    metrics: Metrics | None = None
    metrics_by_engine: dict[str, Metrics] = {}
    resident: tuple[int | None, ...] = ()


class Tick(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that changes in a sample."""

    taken_at: str
    devices_at: str | None = None
    devices: tuple[DeviceTick, ...] = ()
    servers: tuple[ServerTick, ...] = ()
    memory: HostMemory = HostMemory()


_CHANGING_PAGES: Final = frozenset({"/metrics", "/v1/loads"})


def tick_of(sample: Sample) -> Tick:
    """What changes in a sample."""
    seen = sample.devices
    return Tick(
        sample.taken_at,
        seen.taken_at if seen is not None else None,
        tuple(_device_tick(d) for d in seen.devices) if seen is not None else (),
        tuple(
            ServerTick(s.metrics, s.metrics_by_engine, tuple(p.resident_bytes for p in s.processes))
            for s in sample.servers
        ),
        sample.memory,
    )


def still_of(sample: Sample) -> Sample:
    """The sample without what changes: equal for two looks between which nothing came or went."""
    emptied = Tick(
        "",
        None,
        tuple(
            DeviceTick(processes=None if d.processes is None else (None,) * len(d.processes))
            for d in (sample.devices.devices if sample.devices is not None else ())
        ),
        tuple(ServerTick(resident=(None,) * len(s.processes)) for s in sample.servers),
    )
    return restored(without_pages(sample), emptied)


def without_pages(sample: Sample) -> Sample:
    """The sample without the answers that are another at every look (they are in the metrics already)."""
    servers = tuple(
        msgspec.structs.replace(
            one,
            endpoints=tuple(
                msgspec.structs.replace(e, body=None) if e.path.partition("?")[0] in _CHANGING_PAGES else e
                for e in one.endpoints
            ),
        )
        for one in sample.servers
    )
    return msgspec.structs.replace(sample, servers=servers)


def restored(still: Sample, tick: Tick) -> Sample:
    """The sample that a tick was made of.

    Raises:
        ValueError: the tick is of another list of devices, processes or servers.
    """
    devices = still.devices
    if devices is not None:
        changed = tuple(_device(d, t) for d, t in zip(devices.devices, tick.devices, strict=True))
        devices = msgspec.structs.replace(devices, devices=changed, taken_at=tick.devices_at)
    elif tick.devices:
        raise ValueError("devices in a tick of a machine that has none")
    servers = tuple(_server(s, t) for s, t in zip(still.servers, tick.servers, strict=True))
    return msgspec.structs.replace(still, taken_at=tick.taken_at, devices=devices, servers=servers, memory=tick.memory)


def _device_tick(device: Device) -> DeviceTick:
    processes = device.processes
    return DeviceTick(
        device.reserved_bytes,
        device.used_bytes,
        device.free_bytes,
        device.page_cache_bytes,
        None if processes is None else tuple(p.used_bytes for p in processes),
    )


def _device(device: Device, tick: DeviceTick) -> Device:
    if (device.processes is None) != (tick.processes is None):
        raise ValueError("a list of processes where the device has none")
    processes: tuple[GpuProcess, ...] | None = None
    if device.processes is not None and tick.processes is not None:
        processes = tuple(
            msgspec.structs.replace(p, used_bytes=used)
            for p, used in zip(device.processes, tick.processes, strict=True)
        )
    return msgspec.structs.replace(
        device,
        reserved_bytes=tick.reserved_bytes,
        used_bytes=tick.used_bytes,
        free_bytes=tick.free_bytes,
        page_cache_bytes=tick.page_cache_bytes,
        processes=processes,
    )


def _server(server: LiveServer, tick: ServerTick) -> LiveServer:
    processes: Iterable[Process] = (
        msgspec.structs.replace(p, resident_bytes=resident)
        for p, resident in zip(server.processes, tick.resident, strict=True)
    )
    changes: dict[str, Any] = {"metrics": tick.metrics, "metrics_by_engine": tick.metrics_by_engine}
    return msgspec.structs.replace(server, processes=tuple(processes), **changes)
