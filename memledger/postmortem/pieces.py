"""What a PyTorch memory snapshot says of the failure that it was taken of: whether unused memory lay in pieces too small.

The message counts everything reserved and unallocated; torch may place a request only in segments of its own stream and kind,
outside private pools. A snapshot tells these apart. It belongs to a failure where its last failed request is the one that the
message prints, after the allocator's rounding (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memledger import words as n
from memledger.postmortem.decode import LARGE_BLOCK, LARGE_LIMIT, ROUNDING, SMALL_BLOCK, SMALL_LIMIT
from memledger.postmortem.symptom import Symptom
from memledger.postmortem.torch_snapshot import DeviceMemory, TorchSnapshot


class Pieces(msgspec.Struct, frozen=True):
    """What lay unused where torch could place the request; None where the history does not say who asked."""

    path: str
    asked_bytes: int
    usable_bytes: int | None
    largest_bytes: int | None
    expandable: bool

    @property
    def fragmented(self) -> bool | None:
        """Whether it would together have served the request, and no piece of it was large enough."""
        if self.usable_bytes is None or self.largest_bytes is None:
            return None
        return self.largest_bytes < self.asked_bytes <= self.usable_bytes

    @property
    def sentence(self) -> str:
        """The same in words."""
        lead = f"The memory snapshot {self.path} is of this failure: "
        if self.usable_bytes is None or self.largest_bytes is None:
            return lead + "whose request it was is not recorded, so what it could have had is not known."
        had = f"{n.amount(self.usable_bytes)} lay unused where the request of {n.amount(self.asked_bytes)} could be placed"
        if self.fragmented:
            return f"{lead}{had}, in pieces of {n.amount(self.largest_bytes)} at most."
        if self.usable_bytes < self.asked_bytes:
            return f"{lead}only {had}: no fragmentation, whatever else is reserved and unallocated."
        return f"{lead}{had}, in a piece that is large enough: it was freed after the failure."


def of(root: Symptom, snapshots: Iterable[TorchSnapshot]) -> Pieces | None:
    """What the snapshot of this failure says; None where none of them is of it."""
    asked = root.amounts.get("requested_bytes")
    if asked is None or root.kind != "torch_oom":
        return None
    for snapshot in snapshots:
        for device in snapshot.devices:
            oom = device.last_oom
            if oom is None or oom.requested_bytes is None or not _is_of(root, device):
                continue
            if abs(_asked_of_the_driver(oom.requested_bytes) - asked.bytes) <= asked.tolerance:
                return Pieces(
                    snapshot.path, oom.requested_bytes, oom.usable_bytes, oom.largest_usable_bytes, device.expandable
                )
    return None


def _is_of(root: Symptom, device: DeviceMemory) -> bool:
    """Whether a device's record may be of the failure: the same index, and as much free."""
    index = root.counts.get("gpu_index")
    if index is not None and int(index) != device.device:
        return False
    printed = root.amounts.get("free_bytes")
    recorded = device.last_oom.free_bytes if device.last_oom is not None else None
    return printed is None or recorded is None or abs(printed.bytes - recorded) <= printed.tolerance


def _asked_of_the_driver(size: int) -> int:
    """What torch's message prints for a request of `size` bytes."""
    if size <= SMALL_LIMIT:
        return SMALL_BLOCK
    if size < LARGE_LIMIT:
        return LARGE_BLOCK
    return -(-size // ROUNDING) * ROUNDING
