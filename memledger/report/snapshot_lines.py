"""A PyTorch memory snapshot in lines: what the allocator held, in which pieces, and by whom."""

from __future__ import annotations

from memledger.postmortem.torch_snapshot import DeviceMemory, LastOom, TorchSnapshot
from memledger.units import GIB, MIB

MOST_SHOWN = 6


def lines_of(snapshot: TorchSnapshot) -> list[str]:
    """The snapshot as plain lines; texts are cleaned already."""
    lines = [f"PyTorch memory snapshot {snapshot.path}"]
    if not snapshot.devices:
        return [*lines, "It holds no segment: torch had reserved nothing."]
    for device in snapshot.devices:
        lines += ["", *_device(device)]
    if snapshot.settings:
        lines += ["", "settings: " + ", ".join(f"{key} {value}" for key, value in sorted(snapshot.settings.items()))]
    return lines


def _device(device: DeviceMemory) -> list[str]:
    lines = [
        f"GPU {device.device}: torch reserved {_size(device.reserved_bytes)} in {device.segments} segments: "
        f"{_size(device.allocated_bytes)} allocated, {_size(device.pending_bytes)} waiting for a stream, "
        f"{_size(device.inactive_bytes)} inactive."
    ]
    if device.private_pools_bytes:
        lines.append(
            f"Private pools (CUDA graphs) hold {_size(device.private_pools_bytes)}, {_size(device.private_unused_bytes)} of it unused: "
            f"no other allocation can have it.{_each_pool(device)}"
        )
    lines.append(_pieces(device))
    if device.last_oom is not None:
        oom = device.last_oom
        free = f"; the device had {_size(oom.free_bytes)} free" if oom.free_bytes is not None else ""
        where = f" at {oom.frame}" if oom.frame else ""
        lines.append(f"The last failed request was of {_size(oom.requested_bytes or 0)}{where}{free}.")
        lines += _verdict(device, oom)
    lines += ["largest, by the frame that allocated:"] if device.largest else []
    lines += [
        f"  {share.bytes / GIB:8.2f} GiB  {share.blocks:6} blocks  {share.frame}"
        for share in device.largest[:MOST_SHOWN]
    ]
    if device.without_frames_bytes:
        lines.append(f"  {device.without_frames_bytes / GIB:8.2f} GiB  without a frame (history was not recorded)")
    return lines


def _each_pool(device: DeviceMemory) -> str:
    """The private pools one by one, where there are several."""
    sizes: dict[tuple[int, ...], int] = {}
    for pool in device.pools:
        if pool.private:
            sizes[pool.pool_id] = sizes.get(pool.pool_id, 0) + pool.reserved_bytes
    if len(sizes) < 2:
        return ""
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:MOST_SHOWN]
    told = [f"{_size(size)} (pool {'/'.join(map(str, name))})" for name, size in largest]
    return f" {len(sizes)} pools: {', '.join(told)}."


def _pieces(device: DeviceMemory) -> str:
    usable = device.inactive_bytes - device.private_unused_bytes
    if usable <= 0:
        return "Nothing lies unused outside private pools: there is no fragmentation to speak of."
    return f"Of the {_size(usable)} unused outside private pools, the largest piece is {_size(device.largest_inactive_bytes)}."


def _verdict(device: DeviceMemory, oom: LastOom) -> list[str]:
    """Fragmentation is named only where pieces that torch may use for the request would together have served it."""
    asked, usable, largest = oom.requested_bytes, oom.usable_bytes, oom.largest_usable_bytes
    if asked is None or usable is None or largest is None:
        return [
            "Whether unused memory could have served it is not known: its stream is not recorded, or a private pool asked."
        ]
    had = f"{_size(usable)} lay unused where it could be placed (same stream, no private pool)"
    if usable < asked:
        return [f"Not fragmentation: {had}, less than it asked for."]
    if largest >= asked:
        return [f"{had}, in a piece that is large enough: it was freed after the failure."]
    pieces = f"{had}, in pieces of {_size(largest)} at most"
    if device.expandable:
        return [f"Fragmentation: {pieces}, although segments are expandable."]
    return [f"Fragmentation: {pieces}; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes such pieces rarer."]


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / MIB:.1f} MiB"
