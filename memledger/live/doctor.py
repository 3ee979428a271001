"""Each source that memledger reads, with how it answers on this machine, the reason, and what to do. Nothing is changed."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from memledger import cache
from memledger.ledger import Source
from memledger.live.sample import DeviceSample, LiveServer, Sample
from memledger.sanitize import clean

CheckName = Literal["nvml", "smi", "proc", "ports", "metrics", "model cache", "hyperscan", "catalogue cache"]


class Check(msgspec.Struct, frozen=True):
    """One source: `found` says what it gave, `reason` why not all of it, `remedy` what would change that."""

    name: CheckName
    status: Literal["ok", "partial", "unavailable"]
    found: str | None = None
    reason: str | None = None
    remedy: str | None = None


class DoctorReport(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """What `memledger doctor --format json` prints."""

    version: str
    system: str
    python: str
    sources: tuple[Source, ...]
    checks: tuple[Check, ...]
    inputs: tuple[str, ...] = ()
    schema_: str = "memledger/1"


def examine(*, ask: bool = True) -> tuple[DoctorReport, Sample]:
    """Every check, and the sample that they were made from."""
    from memledger import __version__
    from memledger.live import attach, gather, meminfo, nvml, process

    scan = process.table()
    own_namespace = process.in_pid_namespace()
    devices = gather.named(nvml.sample(), scan, foreign_pids=bool(own_namespace))
    servers = attach.find_servers(devices, None, ask=ask, table=scan)
    sample = gather.compose(
        devices, servers, host_pids=None if own_namespace is None else not own_namespace, memory=meminfo.read()
    )
    makers: tuple[tuple[CheckName, Callable[[], Check]], ...] = (
        ("nvml", lambda: _nvml(devices)),
        ("smi", _smi),
        ("proc", lambda: _proc(scan)),
        ("ports", lambda: _ports(servers)),
        ("metrics", lambda: _metrics(servers, ask=ask)),
        ("model cache", _model_cache),
        ("hyperscan", _hyperscan),
        ("catalogue cache", _catalogue_cache),
    )
    checks = tuple(_safe(name, make) for name, make in makers)
    return DoctorReport(__version__, platform.platform(), sys.version.split()[0], sample.sources, checks), sample


def _safe(name: CheckName, make: Callable[[], Check]) -> Check:
    """One broken part of a machine must not hide the others."""
    try:
        return make()
    except Exception as error:
        why = clean(f"{type(error).__name__}: {error}", 200)
        return Check(
            name, "unavailable", None, why, "please report it with the output of memledger doctor --format json"
        )


# ------------------------------------------------------------------------------------------------------------ the GPUs


def _nvml(devices: DeviceSample) -> Check:
    source = devices.source
    whole = [d for d in devices.devices if d.parent_uuid is None]
    names = ", ".join(dict.fromkeys(d.name for d in whole if d.name))
    found = None
    if whole:
        found = f"{len(whole)} GPU{'s' if len(whole) != 1 else ''} ({names})" + (
            f", driver {devices.driver_version}" if devices.driver_version else ""
        )
        instances = len(devices.devices) - len(whole)
        found += f", {instances} MIG instances" if instances else ""
    remedy = None
    if source.status == "unavailable":
        remedy = "logs are read without it; `memledger explain LOG --smi FILE` takes a saved nvidia-smi instead"
    return Check("nvml", source.status, found, source.reason, remedy)


def _smi() -> Check:
    """nvidia-smi is never run: what it printed is read."""
    place = shutil.which("nvidia-smi")
    if place is None:
        return Check(
            "smi",
            "unavailable",
            None,
            "no nvidia-smi on the PATH",
            "not needed here: save `nvidia-smi -q -x` on the server's machine and pass it with --smi FILE",
        )
    return Check("smi", "ok", f"{clean(place)} (never run by memledger; its saved output is read with --smi FILE)")


# ----------------------------------------------------------------------------------------------- processes and ports


def _proc(scan: Any) -> Check:
    from memledger.live import process

    seen = scan.by_pid.values()
    unreadable = sum(one.unreadable for one in seen)
    found = f"{len(scan.by_pid)} processes"
    if not Path("/proc/self/status").exists():
        return Check("proc", "unavailable", None, "there is no /proc here", "logs are read without it")
    if process.processes_are_hidden():
        return Check("proc", "partial", found, "/proc hides other users' processes (hidepid)", "sudo shows them")
    if process.in_pid_namespace():
        reason = "this is a container: the driver's process ids are the host's, not ours"
        remedy = "run memledger on the host, or the container with --pid=host; else processes are matched by size"
        return Check("proc", "partial", found, reason, remedy)
    if unreadable:
        reason = f"{unreadable} processes of other users can't be read"
        return Check("proc", "partial", found, reason, "run memledger as the server's user, or with sudo")
    return Check("proc", "ok", found)


def _ports(servers: tuple[LiveServer, ...]) -> Check:
    if not servers:
        return Check("ports", "ok", "no SGLang or vLLM server is running here: no port to ask")
    known = [s for s in servers if s.port is not None and "port" not in s.missing]
    found = ", ".join(f"pid {s.pid} port {s.port}" for s in known[:8]) or None
    silent = [s for s in servers if s not in known or "endpoints" in s.missing]
    if not silent:
        return Check("ports", "ok", found)
    why = silent[0].missing.get("endpoints") or silent[0].missing.get("port")
    return Check("ports", "partial" if known else "unavailable", found, f"server {silent[0].pid}: {why}")


def _metrics(servers: tuple[LiveServer, ...], *, ask: bool) -> Check:
    if not servers or not ask:
        return Check("metrics", "ok", "nothing was asked")
    silent = [s for s in servers if s.metrics is None]
    if not silent:
        return Check("metrics", "ok", f"{len(servers)} servers answer")
    one = silent[0]
    why = next((one.missing[k] for k in ("metrics", "endpoints", "port") if k in one.missing), "no answer")
    protected = any(e.status in {401, 403} for e in one.endpoints)
    remedy = "memledger explain --pid PID --api-key-env NAME passes the server's key" if protected else None
    status: Literal["partial", "unavailable"] = "partial" if len(silent) < len(servers) else "unavailable"
    return Check("metrics", status, None, f"server {one.pid}: {why}", remedy)


# ---------------------------------------------------------------------------------------------------- on this machine


def _model_cache() -> Check:
    from memledger.model.find import cache_folder

    folder = cache_folder()
    shown = clean(str(folder))
    remedy = "--model-config FILE names a model's config.json; many models are in the bundled table"
    if not folder.is_dir():
        return Check("model cache", "unavailable", None, f"there is no folder {shown}", remedy)
    if not os.access(folder, os.R_OK | os.X_OK):
        return Check("model cache", "unavailable", None, f"no permission to read {shown}", remedy)
    count = sum(1 for _ in folder.glob("models--*"))
    return Check("model cache", "ok", f"{shown}, {count} models")


def _hyperscan() -> Check:
    try:
        import hyperscan
    except ImportError as error:
        return Check(
            "hyperscan",
            "partial",
            "Python's re reads logs instead, more slowly",
            clean(str(error), 200),
            "pip install --force-reinstall hyperscan (wheels for x86-64 and aarch64)",
        )
    return Check("hyperscan", "ok", f"hyperscan {clean(str(getattr(hyperscan, '__version__', '')), 40)}".strip())


def _catalogue_cache() -> Check:
    """Where compiled rules are kept; without it every start compiles them anew."""
    folder = cache.folder()
    if folder is None:
        return Check(
            "catalogue cache", "unavailable", None, "switched off (MEMLEDGER_CACHE is empty, or there is no home)", None
        )
    shown = clean(str(folder))
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if folder.exists() and not cache.is_trusted(folder):
        return Check(
            "catalogue cache",
            "unavailable",
            None,
            f"others may write to {shown}, or it is another user's: it is not used",
            f"chmod 700 {shown}, or name another folder with MEMLEDGER_CACHE",
        )
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Check(
            "catalogue cache",
            "unavailable",
            None,
            f"{shown} can't be written",
            "name another folder with MEMLEDGER_CACHE",
        )
    return Check("catalogue cache", "ok", shown)


NAMES: Final = CheckName.__args__  # type: ignore[attr-defined]
"""The checks, in the order in which they are printed."""


def schema_text() -> str:
    """The JSON Schema of `memledger doctor --format json`, as `docs/schema/doctor.schema.json` holds it."""
    _, components = msgspec.json.schema_components([DoctorReport], ref_template="#/$defs/{name}")
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "memledger doctor --format json",
        "$ref": "#/$defs/DoctorReport",
        "$defs": components,
    }
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2).decode() + "\n"
