"""Which GPUs a process of a server uses: as the driver lists it, else by its rank and what was visible to the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from memledger.frameworks.arguments import as_int
from memledger.live.sample import Device, DeviceSample, Process, Role
from memledger.live.titles import Framework

RANK_ROLES: Final[frozenset[Role]] = frozenset({"worker", "scheduler", "engine"})

_ALL: Final = frozenset({"all", "void", "none", ""})


class Layout(msgspec.Struct, frozen=True):
    """How a server spreads its ranks over the GPUs that it sees (from its command line; an engine's own defaults else)."""

    framework: Framework
    tp: int = 1
    pp: int = 1
    nodes: int = 1
    dp_attention: bool = False
    base: int = 0
    step: int = 1
    first_dp: int = 0

    def position(self, rank: Process) -> int:
        """Which of the visible GPUs a rank takes, counted from 0.

        SGLang: base + (pp, tp within this node) x step, data-parallel copies one after the other unless they share the
        tensor-parallel ranks (managers/data_parallel_controller.py). vLLM: the local rank, engines one after the other
        (v1/engine/utils.py, CoreEngineProcManager).
        """
        dp, pp, tp = max(0, (rank.dp or 0) - self.first_dp), rank.pp or 0, rank.tp or 0
        tp_here = max(1, self.tp // self.nodes) if self.pp < self.nodes or self.pp == 1 else self.tp
        pp_here = max(1, self.pp // max(1, self.nodes // max(1, self.tp // tp_here)))
        local = (pp % pp_here) * tp_here + tp % tp_here
        if not self.dp_attention:
            local += dp * pp_here * tp_here
        return self.base + local * self.step


def layout(framework: Framework, flags: Mapping[str, str | bool], ranks: Sequence[Process]) -> Layout:
    """The layout that the command line asks for; a size it leaves out is at least what the ranks' own numbers show."""

    def size(names: Sequence[str], seen: Sequence[int | None]) -> int:
        given = next((n for name in names if (n := as_int(flags.get(name))) is not None), 1)
        return max(given, 1, *(n + 1 for n in seen if n is not None), 1)

    tp = size(("tensor_parallel_size", "tp_size", "tp"), [r.tp for r in ranks])
    pp = size(("pipeline_parallel_size", "pp_size", "pp"), [r.pp for r in ranks])
    nodes = size(("nnodes", "n"), []) if framework == "sglang" else size(("nnodes",), [])
    return Layout(
        framework,
        tp,
        pp,
        nodes,
        bool(flags.get("enable_dp_attention")),
        as_int(flags.get("base_gpu_id")) or 0 if framework == "sglang" else 0,
        as_int(flags.get("gpu_id_step")) or 1 if framework == "sglang" else 1,
        as_int(flags.get("data_parallel_start_rank")) or 0,
    )


def listed(sample: DeviceSample | None, pid: int) -> tuple[Device, ...]:
    """The devices on whose process list a process stands (host process ids)."""
    devices = sample.devices if sample else ()
    return tuple(d for d in devices if any(p.pid == pid for p in d.processes or ()))


class Visible(msgspec.Struct, frozen=True):
    """The GPUs that a server sees, in its own order; None where that can't be told, with the reason."""

    devices: tuple[Device, ...] | None
    indices: tuple[int, ...] | None
    reason: str | None = None


def visible(
    sample: DeviceSample | None, environment: Mapping[str, str] | None, *, in_container: bool = False
) -> Visible:
    """The visible GPUs from CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER (in a container after NVIDIA_VISIBLE_DEVICES).

    CUDA reads the list up to the first entry that names no device. Without CUDA_DEVICE_ORDER=PCI_BUS_ID it counts the fastest GPU
    first, which is NVML's order where all are of one kind.
    """
    if environment is None:
        return Visible(None, None, "the server's environment can't be read")
    known = _countable(sample)
    if in_container:
        known = _given_to_container(known, environment)
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    if not known:
        return _without_devices(asked, in_container=in_container)
    if asked is None:
        return _ordered(known, environment, known)
    chosen: list[Device] = []
    by_number = False
    for word in asked.split(","):
        name = word.strip()
        device = _named(known, sample, name)
        if device is None:
            break
        by_number |= name.isdecimal()
        chosen.append(device)
    if by_number:
        return _ordered(tuple(chosen), environment, known)
    return _found(tuple(chosen))


def _found(devices: tuple[Device, ...]) -> Visible:
    if any(d.index is None for d in devices):
        return Visible(devices, None, "the driver gives these GPUs no index")
    return Visible(devices, tuple(d.index for d in devices if d.index is not None))


def _ordered(chosen: tuple[Device, ...], environment: Mapping[str, str], known: Sequence[Device]) -> Visible:
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({d.name for d in known}) > 1:
        return Visible(
            None,
            None,
            "the GPUs differ and CUDA_DEVICE_ORDER=PCI_BUS_ID is not set, so that CUDA counts them in an order of its own",
        )
    return _found(chosen)


def _without_devices(asked: str | None, *, in_container: bool) -> Visible:
    """No list of GPUs to look up in: numbers stand for themselves, on the host."""
    words = [word.strip() for word in (asked or "").split(",") if word.strip()]
    if words and all(word.isdecimal() for word in words) and not in_container:
        return Visible(None, tuple(int(word) for word in words))
    if asked is None:
        return Visible(None, None, "CUDA_VISIBLE_DEVICES is not set and the driver's list of GPUs is not available")
    return Visible(None, None, "CUDA_VISIBLE_DEVICES can't be resolved without the driver's list of GPUs")


def _countable(sample: DeviceSample | None) -> tuple[Device, ...]:
    """Whole GPUs in NVML's order; MIG instances are named by UUID only."""
    whole = [d for d in (sample.devices if sample else ()) if d.parent_uuid is None and d.kind == "cuda"]
    return tuple(sorted(whole, key=lambda d: (d.index is None, d.index or 0)))


def _given_to_container(known: tuple[Device, ...], environment: Mapping[str, str]) -> tuple[Device, ...]:
    """Those GPUs of the host that the container's runtime handed in, in the order in which CUDA counts them there."""
    asked = environment.get("NVIDIA_VISIBLE_DEVICES", "all").strip()
    if asked in _ALL:
        return known if asked == "all" else ()
    words = [word.strip() for word in asked.split(",")]
    return tuple(d for d in known if any(_is_named(d, word) for word in words))


def _is_named(device: Device, word: str) -> bool:
    if word.isdecimal():
        return device.index == int(word)
    return bool(device.uuid and len(word) > 4 and device.uuid.startswith(word))


def _named(known: Sequence[Device], sample: DeviceSample | None, word: str) -> Device | None:
    """The device of one entry: a position among the known ones, a UUID or its beginning, a MIG instance's UUID."""
    if word.isdecimal():
        return known[int(word)] if int(word) < len(known) else None
    if word.startswith("MIG-GPU-"):  # up to R450: MIG-GPU-<uuid>/<gpu instance>/<compute instance>
        parent, _, ids = word[len("MIG-") :].partition("/")
        gpu, _, compute = ids.partition("/")
        fitting = [
            d
            for d in (sample.devices if sample else ())
            if d.parent_uuid == parent and str(d.gpu_instance) == gpu and str(d.compute_instance) == compute
        ]
    else:
        pool = (sample.devices if sample else ()) if word.startswith("MIG-") else known
        fitting = [d for d in pool if _is_named(d, word)]
    return fitting[0] if len(fitting) == 1 else None


def placed(
    processes: Sequence[Process],
    sample: DeviceSample | None,
    shape: Layout,
    seen: Visible,
    *,
    foreign_pids: bool,
) -> tuple[Process, ...]:
    """The processes with their GPUs.

    `foreign_pids`: the driver's process ids are not ours (we run in a container), so that equal numbers mean nothing.
    """
    has_workers = any(p.role == "worker" for p in processes)
    return tuple(_place(p, sample, shape, seen, foreign_pids=foreign_pids, has_workers=has_workers) for p in processes)


def _place(
    one: Process, sample: DeviceSample | None, shape: Layout, seen: Visible, *, foreign_pids: bool, has_workers: bool
) -> Process:
    if not foreign_pids and (devices := listed(sample, one.pid)):
        return _with(one, devices, tuple(d.index for d in devices if d.index is not None), "nvml")
    is_rank = one.role in RANK_ROLES and not (one.role == "engine" and has_workers)
    if not is_rank or one.zombie:
        return one
    if one.tp is None and one.role == "worker" and shape.tp > 1:
        return _missing(one, "its rank is not in its title, so that its GPU is not known")
    position = shape.position(one)
    if seen.indices is None and seen.devices is None:
        return _missing(one, seen.reason or "its GPU is not known")
    count = len(seen.devices if seen.devices is not None else seen.indices or ())
    if position >= count:
        return _missing(one, f"its rank would take GPU {position} of {count} visible ones")
    devices = (seen.devices[position],) if seen.devices is not None else ()
    indices = (seen.indices[position],) if seen.indices is not None else ()
    return _with(one, devices, indices, "visible_devices")


def _with(
    one: Process, devices: Sequence[Device], indices: tuple[int, ...], basis: Literal["nvml", "visible_devices"]
) -> Process:
    uuids = tuple(d.uuid for d in devices if d.uuid) or None
    return msgspec.structs.replace(one, gpu_indices=tuple(dict.fromkeys(indices)), gpu_uuids=uuids, gpu_basis=basis)


def _missing(one: Process, reason: str) -> Process:
    return msgspec.structs.replace(one, missing={**one.missing, "gpu_indices": reason})
