"""One look at the machine for one server: devices, its processes, its port, the host's memory.

Nothing is written, and nothing is asked but the driver and the server's own loopback port.
"""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec
import psutil

from memledger.ledger import Source
from memledger.live import attach, endpoints, meminfo, metrics, nvml, titles
from memledger.live import process as proc
from memledger.live.sample import DeviceSample, GpuProcess, HostMemory, LiveServer, Sample
from memledger.sanitize import clean

LONGEST_COMMAND: Final = 120


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


def host_pids() -> bool | None:
    """Whether the process ids that we see are the host's; None where it can't be told."""
    own_namespace = proc.in_pid_namespace()
    return None if own_namespace is None else not own_namespace


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


def _asked_again(server: LiveServer, key: str | None) -> LiveServer:
    """The server with its load as its metrics page says it now; what else it answered stays."""
    page = next((e for e in server.endpoints if e.path == "/metrics"), None)
    if page is None or page.status != 200 or server.port is None or server.host is None:
        return server
    fresh = endpoints.ask(endpoints.Address(server.port, server.host, key=key), "/metrics")
    answers = tuple(fresh if e.path == "/metrics" else e for e in server.endpoints)
    info = next(
        (e.body for e in answers if e.path in {"/server_info", "/get_server_info"} and e.body is not None), None
    )
    series = fresh.body if isinstance(fresh.body, list) else []
    whole, each = metrics.read(server.framework, series, info)
    return msgspec.structs.replace(server, endpoints=answers, metrics=whole, metrics_by_engine=each)


def _has_ended(server: LiveServer) -> bool:
    """Whether a process of the server is gone since it was looked at, or the server waits to be collected."""
    if not all(psutil.pid_exists(process.pid) for process in server.processes):
        return True
    try:
        return psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


class Watch:
    """Repeated samples of one server: the driver stays open, and the process tree is scanned anew only now and then.

    Between scans the devices (memory and process lists) and, with `ask`, the server's load are what is new. Close it, or use it in a
    `with` statement.
    """

    RESCAN_S: Final = 30.0
    """Seconds between scans of all processes: one costs more than everything else in a sample."""

    def __init__(self, pid: int, api_key: str | None = None, *, ask: bool = True) -> None:
        self._pid, self._key, self._ask = pid, api_key, ask
        self._driver = nvml.Sampler()
        self._names: dict[int, GpuProcess] = {}
        self._server: LiveServer | None = None
        self._scanned = 0.0
        self._foreign = bool(proc.in_pid_namespace())

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the driver."""
        self._driver.close()

    def sample(self) -> Sample:
        """One sample now.

        Raises:
            AttachError: the process is no server, or it ended.
        """
        devices = self._driver.sample()
        now_s = time.monotonic()
        unknown = {p.pid for d in devices.devices for p in d.processes or ()} - set(self._names)
        ended = self._server is not None and _has_ended(self._server)
        if self._server is None or ended or unknown or now_s - self._scanned > self.RESCAN_S:
            scan = proc.table()
            devices = named(devices, scan, foreign_pids=self._foreign)
            self._names = {p.pid: p for d in devices.devices for p in d.processes or ()}
            self._server = attach.attach(self._pid, devices, self._key, ask=self._ask)
            self._scanned = now_s
        else:
            devices = _each(devices, lambda seen: self._names[seen.pid])
            if self._ask:
                self._server = _asked_again(self._server, self._key)
        return compose(devices, (self._server,), host_pids=not self._foreign, memory=meminfo.read(pid=self._server.pid))
