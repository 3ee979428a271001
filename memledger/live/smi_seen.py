"""What an `nvidia-smi` output says of one device, while it is read; shared by the readers of its layouts."""

from __future__ import annotations

import re
from typing import Final, Literal

from memledger.live.machine import is_integrated
from memledger.live.sample import Device, GpuProcess
from memledger.sanitize import clean
from memledger.units import GIB, KIB, MIB, NOT_AVAILABLE_FROM

ROUNDING_BYTES: Final = MIB
"""`nvidia-smi` prints whole MiB: each figure may be off by this much at most."""

_SIZE: Final = re.compile(r"(\d{1,15})\s*(B|KiB|MiB|GiB|KB|MB|GB)?\s*$")
_UNITS: Final = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": KIB, "MB": MIB, "GB": GIB}
_MEMORY_FIELDS: Final = ("total_bytes", "reserved_bytes", "used_bytes", "free_bytes")

MOST_DEVICES: Final = 512
"""More in one output are not read: no machine has as many, and a hostile file must not take long."""

Kind = Literal["compute", "graphics", "mps"]


class SmiError(ValueError):
    """The input is no `nvidia-smi` output that can be read; the message is one sentence."""


def size(text: str | None, default_unit: str = "MiB") -> int | None:
    """Bytes of a printed size; None for N/A and everything else that is no figure or has a unit that is none. nvidia-smi's old "MB" is MiB."""
    found = _SIZE.match(text.strip()) if text is not None else None
    unit = _UNITS.get(found.group(2) or default_unit) if found is not None else None
    if found is None or unit is None:
        return None
    value = int(found.group(1)) * unit
    return value if value < NOT_AVAILABLE_FROM else None


def number(text: str | None) -> int | None:
    """A plain count, or None."""
    shown = (text or "").strip()
    return int(shown) if shown.isdecimal() and len(shown) < 10 else None


def process_kind(text: str) -> Kind:
    """The kind of a process by the letters of its column: C, G, C+G; M for clients of MPS."""
    letters = text.upper()
    return "mps" if "M" in letters else "compute" if "C" in letters else "graphics"


def known(text: str | None) -> str | None:
    """The text, or None for one of the spellings of "not available"."""
    shown = (text or "").strip().strip("[]").strip()
    lowered = shown.lower()
    absent = (
        "",
        "n/a",
        "not supported",
        "insufficient permissions",
        "unknown error",
        "gpu requires reset",
        "none",
        "err!",
    )
    return None if lowered in absent or lowered.startswith("requested functionality") else shown


class Seen:
    """One device or MIG instance; fields as in `Device`, None until read."""

    def __init__(self, index: int | None = None, *, parent: Seen | None = None) -> None:
        self.index = index
        self.parent = parent
        self.uuid: str | None = None
        self.name: str | None = None
        self.bus: str | None = None
        self.total: int | None = None
        self.reserved: int | None = None
        self.used: int | None = None
        self.free: int | None = None
        self.lost: int | None = None
        self.ecc: bool | None = None
        self.mig_mode: bool | None = None
        self.mig_device: int | None = None
        self.gpu_instance: int | None = None
        self.compute_instance: int | None = None
        self.addressing: str | None = None
        self.why_no_memory: str | None = None
        self.processes: list[GpuProcess] | None = None
        self.why_no_processes: str | None = None
        self.notes: list[str] = []

    @property
    def parent_index(self) -> int | None:
        """The index of the GPU that a MIG instance is part of."""
        return self.parent.index if self.parent is not None else None

    def is_same(self, other: Seen) -> bool:
        """Whether both are the same device; only what both have is compared, and something has to be."""
        if (self.parent is None) != (other.parent is None):
            return False
        if self.parent is not None and other.parent is not None:
            if self.uuid and other.uuid:
                return self.uuid == other.uuid
            return self.parent.is_same(other.parent) and (
                self.mig_device is not None and self.mig_device == other.mig_device
            )
        for mine, theirs in ((self.uuid, other.uuid), (_bus(self.bus), _bus(other.bus)), (self.index, other.index)):
            if mine is not None and theirs is not None:
                return mine == theirs
        return False

    def fill_from(self, other: Seen) -> None:
        """Take what is not known yet."""
        for field, value in vars(other).items():
            if field not in {"parent", "notes"} and getattr(self, field) is None and value is not None:
                setattr(self, field, value)
        self.notes += [note for note in other.notes if note not in self.notes]

    def device(self) -> Device:
        """The frozen value; figures that can't be are left out."""
        missing: dict[str, str] = {}
        unified = is_integrated(self.name) or (self.total is None and (self.addressing or "").upper() == "ATS")
        total = self.total or None
        values = {
            "total_bytes": total,
            "reserved_bytes": self.reserved,
            "used_bytes": self.used,
            "free_bytes": self.free,
        }
        for field, value in values.items():
            if value is not None and total is not None and value > total:
                values[field] = None
                missing[field] = "the printed figure is larger than the device"
        why = self.why_no_memory or "not in this nvidia-smi output"
        if total is None and unified:
            why = "the GPU uses the machine's memory, which nvidia-smi does not print"
        for field in _MEMORY_FIELDS:
            if values[field] is None:
                missing.setdefault(field, why)
        if self.processes is None:
            missing["processes"] = self.why_no_processes or "no process list in this nvidia-smi output"
        return Device(
            index=self.index if self.parent is None else self.parent.index,
            uuid=_shown(self.uuid),
            name=_shown(self.name),
            parent_uuid=None if self.parent is None else _shown(self.parent.uuid),
            pci_bus=_shown(self.bus if self.parent is None else self.parent.bus),
            memory_call="nvidia-smi" if total is not None or values["used_bytes"] is not None else None,
            unified_memory=True if unified else False if total is not None else None,
            lost_bytes=self.lost,
            ecc=self.ecc,
            mig_mode=self.mig_mode,
            gpu_instance=self.gpu_instance,
            compute_instance=self.compute_instance,
            notes=tuple(self.notes),
            processes=None if self.processes is None else _merged(self.processes, total),
            missing=missing,
            total_bytes=values["total_bytes"],
            reserved_bytes=values["reserved_bytes"],
            used_bytes=values["used_bytes"],
            free_bytes=values["free_bytes"],
        )


def process(pid: int, kind: str, name: str | None, used: int | None) -> GpuProcess:
    """An entry of a process list; a memory cell without a figure is said to be so."""
    missing = {} if used is not None else {"used_bytes": "nvidia-smi prints no memory for this process"}
    return GpuProcess(pid, used, process_kind(kind), None, _shown(known(name)), missing)


def _merged(rows: list[GpuProcess], total: int | None) -> tuple[GpuProcess, ...]:
    """One entry a process, in the order of the output; what is larger than the device is no figure."""
    found: dict[int, GpuProcess] = {}
    for row in rows:
        if row.used_bytes is not None and total is not None and row.used_bytes > total:
            why = {"used_bytes": "the printed figure is larger than the device"}
            entry = GpuProcess(row.pid, None, row.kind, row.user, row.command, why)
        else:
            entry = row
        before = found.get(entry.pid)
        if before is None or (before.used_bytes or 0) < (entry.used_bytes or 0):
            found[entry.pid] = entry
    return tuple(found.values())


def _shown(text: str | None) -> str | None:
    return None if text is None else clean(text)


def _bus(text: str | None) -> str | None:
    """A PCI address as it compares: old drivers print four digits of domain, new ones eight."""
    if text is None:
        return None
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0')}:{rest}"
