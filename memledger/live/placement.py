"""Which process is which rank, and which of the driver's processes on which device it is; pure.

By process id where the driver's ids are ours (on the host), else by the title, else by size: inside a container the driver lists
the host's ids, and an id that happens to be equal means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from memledger.ledger import Rank, Server, held
from memledger.live import titles
from memledger.live.sample import Device, GpuProcess, LiveServer, Process, Sample
from memledger.units import GIB, MIB

WORKERS: Final = ("worker", "scheduler")
LEAST_CONTEXT: Final = 200 * MIB
LARGEST_GROWTH: Final = 0.15
"""Share of the device by which a process may have grown beyond its ledger and still be recognised by its size."""
_UUID: Final = re.compile(r"^(?:GPU|MIG)-", re.IGNORECASE)
_NOT_HELD: Final = frozenset({"in_use_at_start", "reserve", "free", "activations"})


class Placed(msgspec.Struct, frozen=True):
    """One process of the server on one device: places in `Server.ranks` and in the sample's devices."""

    rank: int | None = None
    process: Process | None = None
    device: int | None = None
    driver: GpuProcess | None = None
    matched: Literal["pid", "size", "title"] | None = None
    notes: tuple[str, ...] = ()


def host_pids_seen(sample: Sample) -> bool:
    """Whether the ids in the driver's list are those that we see."""
    if sample.devices is not None and sample.devices.source.name == "smi":
        return True
    return sample.host_pids if sample.host_pids is not None else not sample.in_container


def own_processes(server: Server | None, live: LiveServer | None, sample: Sample) -> tuple[Process, ...]:
    """The server's processes: the sampled tree, or (a pasted nvidia-smi) those whose name or id says so."""
    if live is not None:
        return live.processes
    if server is None or sample.devices is None:
        return ()
    logged = {r.pid for r in server.ranks} | {e.pid for e in server.engines}
    found: dict[int, Process] = {}
    for device in sample.devices.devices:
        for seen in device.processes or ():
            told = _told(seen)
            if seen.pid in logged:
                role = told.role if told is not None else "worker"
                found[seen.pid] = Process(seen.pid, role=role)
            elif told is not None and told.framework == server.framework:
                found[seen.pid] = Process(
                    seen.pid, None, told.role, seen.command, (), told.dp, told.pp, told.tp, told.ep
                )
    return tuple(found.values())


def _told(seen: GpuProcess) -> titles.Title | None:
    if not seen.command:
        return None
    return titles.read_title(seen.command) or titles.read_comm(seen.command)


def place(server: Server | None, live: LiveServer | None, sample: Sample) -> tuple[Placed, ...]:
    """Every rank, then every other process of the server that holds memory on a device."""
    own = own_processes(server, live, sample)
    devices = sample.devices.devices if sample.devices is not None else ()
    holding = _holding(own, devices) if host_pids_seen(sample) else {}
    ranks = server.ranks if server is not None else ()
    pairs = _pair(server, own, holding)
    visible = _visible(live, devices)
    placed: list[Placed] = []
    taken: set[int] = set()
    for at, rank in enumerate(ranks):
        process = pairs.get(at)
        if process is not None:
            taken.add(process.pid)
        placed.append(_placed(at, rank, process, holding, devices, visible, len(ranks), by_pid=host_pids_seen(sample)))
    how: Literal["pid", "title"] = "pid" if live is not None else "title"
    placed = [msgspec.structs.replace(p, matched=how) if p.matched == "pid" else p for p in placed]
    if live is None:
        return tuple(
            placed
        )  # a paste may show a second server of the same engine: what is no rank is not called its own
    main = {(p.driver.pid, p.device) for p in placed if p.driver is not None}
    for process in own:
        for device, seen in holding.get(process.pid, ()):
            if (seen.pid, device) not in main:
                placed.append(Placed(None, process, device, seen, how))
        if process.zombie and process.pid not in taken and process.pid not in holding:
            placed.append(Placed(None, process))
    return tuple(placed)


def _holding(own: Sequence[Process], devices: Sequence[Device]) -> dict[int, list[tuple[int, GpuProcess]]]:
    """Per process the devices on which the driver lists it, the one where it holds most first."""
    known = {p.pid for p in own}
    found: dict[int, list[tuple[int, GpuProcess]]] = {}
    for at, device in enumerate(devices):
        for seen in device.processes or ():
            if seen.pid in known:
                found.setdefault(seen.pid, []).append((at, seen))
    for places in found.values():
        places.sort(key=lambda item: -(item[1].used_bytes or 0))
    return found


def _pair(
    server: Server | None, own: Sequence[Process], holding: dict[int, list[tuple[int, GpuProcess]]]
) -> dict[int, Process]:
    """Per rank its process: by id, then by label, then where one of each is left."""
    if server is None:
        return {}
    pairs: dict[int, Process] = {}
    left = _workers(own, holding)
    by_id = {pid: p for p in own for pid in (p.pid, *p.namespace_pids)}
    engines = {e.dp: e.pid for e in server.engines}
    for at, rank in enumerate(server.ranks):
        process = by_id.get(rank.pid) if rank.pid is not None else None
        # A single GPU's engine is its own worker; its id stands at the engine.
        if process is None and rank.pid is None and len(server.ranks) == len(engines):
            pid = engines.get(rank.dp if rank.dp is not None else 0)
            process = by_id.get(pid) if pid is not None else None
        if process is not None and process.pid not in {p.pid for p in pairs.values()}:
            pairs[at] = process
    left = [p for p in left if p.pid not in {q.pid for q in pairs.values()}]
    for at, rank in enumerate(server.ranks):
        fitting = [p for p in left if _same_label(rank, p)] if at not in pairs else []
        if len(fitting) == 1:
            pairs[at] = fitting[0]
            left.remove(fitting[0])
    missing = [at for at in range(len(server.ranks)) if at not in pairs]
    if len(missing) == 1 and len(left) == 1:
        pairs[missing[0]] = left[0]
    return pairs


def _workers(own: Sequence[Process], holding: dict[int, list[tuple[int, GpuProcess]]]) -> list[Process]:
    """The processes that may be ranks: workers and schedulers; an engine without workers is one itself."""
    alive = [p for p in own if not p.zombie]
    workers = [p for p in alive if p.role in WORKERS]
    if workers:
        return workers
    engines = [p for p in alive if p.role == "engine"]
    if engines:
        return engines
    holders = [p for p in alive if p.pid in holding]
    return sorted(holders, key=lambda p: -(holding[p.pid][0][1].used_bytes or 0))[:1]


def _same_label(rank: Rank, process: Process) -> bool:
    for name in ("dp", "pp", "tp"):
        ours, theirs = getattr(rank, name), getattr(process, name)
        if ours is not None and theirs is not None and ours != theirs:
            return False
        # A part of the title that only one of the two has is 0 where there is one such rank: TP0 of one GPU has no title part.
        if (ours or 0) != (theirs or 0) and (ours is None) != (theirs is None):
            return False
    return True


def _visible(live: LiveServer | None, devices: Sequence[Device]) -> list[int]:
    """The devices that the server may use, in its own order."""
    whole = [i for i, d in enumerate(devices) if d.parent_uuid is None and not d.mig_mode]
    told = live.visible_devices if live is not None else None
    if told is None or not told.strip():
        return whole or list(range(len(devices)))
    found: list[int] = []
    for word in (w.strip() for w in told.split(",")):
        match = [
            i
            for i, d in enumerate(devices)
            if (_UUID.match(word) and d.uuid is not None and d.uuid.lower().startswith(word.lower()))
            or (word.isdecimal() and d.parent_uuid is None and d.index == int(word))
        ]
        if not match:
            break  # as CUDA does: what follows a device that is not there is not seen
        found.append(match[0])
    return found


def _placed(
    at: int,
    rank: Rank,
    process: Process | None,
    holding: dict[int, list[tuple[int, GpuProcess]]],
    devices: Sequence[Device],
    visible: Sequence[int],
    count: int,
    *,
    by_pid: bool,
) -> Placed:
    places = holding.get(process.pid, []) if process is not None else []
    if places:
        return Placed(at, process, places[0][0], places[0][1], "pid")
    if rank.gpu.kind == "cpu":
        return Placed(at, process)
    device, notes = _device_of(at, rank, process, devices, visible, count)
    if device is None:
        return Placed(at, process, None, None, None, notes)
    unknown = [p for p in devices[device].processes or () if p.used_bytes is not None]
    if by_pid and process is not None and devices[device].processes is not None:
        # Its id would be in the list if it held memory here.
        return Placed(at, process, device, None, None, (*notes, "the driver lists no memory of this process"))
    fitting = [p for p in unknown if _fits(rank, p.used_bytes or 0, devices[device])]
    if len(fitting) == 1:
        return Placed(at, process, device, fitting[0], "size", (*notes, f"host pid {fitting[0].pid}, matched by size"))
    if len(fitting) > 1:
        notes = (*notes, f"{len(fitting)} processes on the device are of its size: not told apart")
    elif unknown:
        notes = (*notes, "no process on the device is of its size")
    return Placed(at, process, device, None, None, notes)


def _device_of(
    at: int, rank: Rank, process: Process | None, devices: Sequence[Device], visible: Sequence[int], count: int
) -> tuple[int | None, tuple[str, ...]]:
    """The device by what the process says, by the only one there is, or by the order of ranks."""
    if rank.gpu.uuid is not None:
        named = [i for i, d in enumerate(devices) if d.uuid == rank.gpu.uuid]
        if named:
            return named[0], ()
    if process is not None and process.gpu_uuids is not None and len(process.gpu_uuids) == 1:
        named = [i for i, d in enumerate(devices) if d.uuid == process.gpu_uuids[0]]
        if named:
            return named[0], ()
    if process is not None and process.gpu_indices is not None and len(process.gpu_indices) == 1:
        wanted = process.gpu_indices[0]
        named = [i for i, d in enumerate(devices) if d.index == wanted and i in visible]
        if len(named) == 1:
            return named[0], ()
    if len(visible) == 1:
        return visible[0], ()
    if rank.gpu.index is not None and count == 1 and rank.gpu.index < len(visible):
        return visible[rank.gpu.index], ()
    if count == len(visible):
        return visible[at], ("GPU by the order of ranks",)
    fitting = [
        i for i in visible if any(_fits(rank, p.used_bytes or 0, devices[i]) for p in devices[i].processes or ())
    ]
    return (fitting[0], ("GPU by size",)) if count == 1 and len(fitting) == 1 else (None, ("its GPU is not known",))


def _fits(rank: Rank, used: int, device: Device) -> bool:
    """Whether a process of this size may be the rank: its entries, a context, and what it may have grown by."""
    own = [e for e in rank.entries if e.account not in _NOT_HELD and not e.account.startswith("host/")]
    if not own:
        return False
    least = held(own)
    room = sum(e.bytes for e in rank.entries if e.account == "activations")
    whole = device.total_bytes or used
    low = least.bytes - least.tolerance + LEAST_CONTEXT - int(0.01 * whole)
    high = least.bytes + least.tolerance + GIB + max(room, int(LARGEST_GROWTH * whole))
    return low <= used <= high


def without_prefix(name: str) -> str:
    """A field's name in words."""
    return name.replace("_", " ")
