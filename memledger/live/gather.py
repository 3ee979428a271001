"""One look at the machine for one server: devices, its processes, its port, the host's memory.

Nothing is written, and nothing is asked but the driver and the server's own loopback port.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable
from datetime import datetime

import msgspec

from memledger.ledger import Source
from memledger.live import attach, meminfo, nvml, titles
from memledger.live import process as proc
from memledger.live.sample import DeviceSample, GpuProcess, HostMemory, LiveServer, Sample
from memledger.sanitize import clean

LONGEST_COMMAND = 120


def server_sample(pid: int, api_key: str | None = None) -> Sample:
    """The machine as far as it concerns the server that a process belongs to.

    Raises:
        AttachError: there is no such process, or it is no server; one sentence.
    """
    scan = proc.table()
    # First of all: a process that is no server costs no driver call.
    attach.tree_of(scan, pid)
    own_namespace = proc.in_pid_namespace()
    devices = named(nvml.sample(), scan, foreign_pids=bool(own_namespace))
    server = attach.attach(pid, devices, api_key)
    return compose(devices, (server,), host_pids=not own_namespace, memory=meminfo.read(pid=server.pid))


def compose(
    devices: DeviceSample | None,
    servers: tuple[LiveServer, ...],
    *,
    host_pids: bool | None,
    memory: HostMemory | None = None,
) -> Sample:
    """A sample from its parts, with what each source answered."""
    sources = [devices.source] if devices is not None else []
    sources += [proc_source(servers), metrics_source(servers)] if servers else []
    return Sample(
        taken_at=now(),
        host=clean(socket.gethostname(), 100),
        system=platform.platform(),
        in_container=None if host_pids is None else not host_pids,
        host_pids=host_pids,
        sources=tuple(sources),
        devices=devices,
        servers=servers,
        memory=memory if memory is not None else HostMemory(),
    )


def now() -> str:
    """The time with its offset, whole seconds."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def proc_source(servers: tuple[LiveServer, ...]) -> Source:
    """Whether `/proc` told everything of every process, and the first thing that it did not."""
    for server in servers:
        for process in server.processes:
            told = {k: v for k, v in process.missing.items() if k not in {"gpu_indices", "arguments"}}
            if told:
                return Source("proc", "partial", next(iter(told.values())))
        if "visible_devices" in server.missing:
            return Source("proc", "partial", server.missing["visible_devices"])
    return Source("proc", "ok")


def metrics_source(servers: tuple[LiveServer, ...]) -> Source:
    """Whether the servers' ports answered with figures of their pools."""
    missing = [s for s in servers if s.metrics is None]
    if not missing:
        return Source("metrics", "ok")
    one = missing[0]
    why = next((one.missing[k] for k in ("metrics", "endpoints", "port") if k in one.missing), "no port was asked")
    answered = len(missing) < len(servers) or any(e.status == 200 for e in one.endpoints)
    return Source("metrics", "partial" if answered else "unavailable", why)


def named(devices: DeviceSample, scan: proc.Table, *, foreign_pids: bool) -> DeviceSample:
    """The devices with user, command and start of every listed process, where the driver's ids are ours."""
    if foreign_pids:
        return devices
    left = {one.pid for tree in attach.trees(scan) if tree.orphans for one, _ in tree.members}

    def tell(seen: GpuProcess) -> GpuProcess:
        one = scan.by_pid.get(seen.pid)
        if one is None:
            return msgspec.structs.replace(
                seen,
                missing={**seen.missing, "command": "no such process is visible here (another namespace, or it ended)"},
            )
        words = " ".join(titles.shown_arguments(one.arguments)) if one.arguments else one.comm
        facts = proc.facts(seen.pid)
        return msgspec.structs.replace(
            seen,
            user=seen.user or (clean(facts.user, 60) if facts.user else None),
            command=clean(words, LONGEST_COMMAND) or seen.command,
            started_at=proc.moment(one.created),
            orphan=seen.pid in left or None,
        )

    return _each(devices, tell)


def _each(devices: DeviceSample, change: Callable[[GpuProcess], GpuProcess]) -> DeviceSample:
    known: dict[int, GpuProcess] = {}

    def once(seen: GpuProcess) -> GpuProcess:
        told = known.setdefault(seen.pid, change(seen))
        return msgspec.structs.replace(
            told, used_bytes=seen.used_bytes, kind=seen.kind, missing={**told.missing, **seen.missing}
        )

    changed = tuple(
        d if d.processes is None else msgspec.structs.replace(d, processes=tuple(once(p) for p in d.processes))
        for d in devices.devices
    )
    return msgspec.structs.replace(devices, devices=changed)
