"""The figures of a failure: what the message prints, and what follows from it by arithmetic."""

from __future__ import annotations

from typing import Any, Final

from memledger.ledger import Basis
from memledger.postmortem.incident import Holder, Numbers, OtherProcess
from memledger.postmortem.symptom import Symptom
from memledger.units import GIB, Amount

_PRINTED: Final = (
    "requested_bytes",
    "total_bytes",
    "free_bytes",
    "process_bytes",
    "torch_allocated_bytes",
    "private_pools_bytes",
    "reserved_unallocated_bytes",
    "limit_bytes",
)


def numbers_of(symptom: Symptom) -> Numbers:
    """Everything that the line prints, and the sums that it allows."""
    printed = {name: amount.bytes for name, amount in symptom.amounts.items() if name in _PRINTED}
    others = tuple(OtherProcess(other.get("pid"), other.get("bytes")) for other in symptom.other_processes)
    reserved = _reserved(symptom)
    process = symptom.amounts.get("process_bytes")
    outside = process - reserved if process is not None and reserved is not None else None
    rest = _unaccounted(symptom, process if process is not None else reserved, others)
    more: dict[str, Any] = {name: amount.bytes for name, amount in symptom.amounts.items() if name not in _PRINTED}
    more.pop("torch_reserved_bytes", None)
    more |= {name: count for name, count in symptom.counts.items() if name != "gpu_index"}
    index = symptom.counts.get("gpu_index")
    return Numbers(
        gpu_index=int(index) if index is not None else None,
        other_processes=others,
        torch_reserved_bytes=reserved.bytes if reserved is not None else None,
        outside_torch_bytes=outside.bytes if outside is not None else None,
        unaccounted_bytes=rest.bytes if rest is not None else None,
        tolerance_bytes=max((amount.tolerance for amount in symptom.amounts.values()), default=None),
        more=more,
        not_available=symptom.not_available,
        **printed,
    )


def _reserved(symptom: Symptom) -> Amount | None:
    printed = symptom.amounts.get("torch_reserved_bytes")
    allocated = symptom.amounts.get("torch_allocated_bytes")
    rest = symptom.amounts.get("reserved_unallocated_bytes")
    if printed is not None:
        return printed
    return allocated + rest if allocated is not None and rest is not None else None


def _unaccounted(symptom: Symptom, mine: Amount | None, others: tuple[OtherProcess, ...]) -> Amount | None:
    total, free = symptom.amounts.get("total_bytes"), symptom.amounts.get("free_bytes")
    if total is None or free is None or mine is None:
        return None
    rest = total - free - mine
    for other in others:
        if other.bytes is not None:
            rest = rest - Amount(other.bytes, 0)
    return rest


def notes_of(numbers: Numbers) -> tuple[str, ...]:
    """What is odd about the figures: it is said, not smoothed over."""
    found = []
    asked, free, total = numbers.requested_bytes, numbers.free_bytes, numbers.total_bytes
    if asked is not None and free is not None and asked <= free:
        found.append(
            f"More was free ({free / GIB:.2f} GiB) than was asked for ({asked / GIB:.2f} GiB): free memory was read after the failure, "
            "or the driver could not map it (WSL, a limit on the process, fragmentation of the address space)."
        )
    if numbers.torch_allocated_bytes is not None and total is not None and numbers.torch_allocated_bytes > total:
        found.append(
            "torch had allocated more than the device has: the driver moves memory to the host (WSL, unified memory), "
            "so the device's figures do not add up."
        )
    if numbers.not_available:
        found.append(
            "The driver gave no figure for "
            + ", ".join(name.removesuffix("_bytes") for name in numbers.not_available)
            + "."
        )
    if numbers.unaccounted_bytes is not None and numbers.unaccounted_bytes < -(numbers.tolerance_bytes or 0) * 4:
        found.append(
            "The figures of the message add up to more than the device: some of them were read at another moment."
        )
    return tuple(found)


def holders_of(symptom: Symptom, numbers: Numbers) -> tuple[Holder, ...]:
    """Who held the memory: this process and its parts, other processes, what no figure accounts for, and what was free."""
    total = symptom.amounts.get("total_bytes")
    if total is None:
        return ()
    rows: list[Holder] = []

    def row(label: str, name: str, level: int, note: str = "") -> None:
        amount = symptom.amounts.get(name)
        if amount is not None:
            rows.append(
                Holder(label, amount.bytes, amount.tolerance, level=level, note=note, evidence=symptom.evidence)
            )

    inside = 0
    derived: Basis = "derived"
    if numbers.process_bytes is not None:
        row("this process", "process_bytes", 0)
        inside = 1
        if numbers.outside_torch_bytes is not None:
            rows.append(
                Holder(
                    "outside torch",
                    numbers.outside_torch_bytes,
                    basis=derived,
                    level=1,
                    note="context, libraries, communication",
                )
            )
    row("allocated by torch", "torch_allocated_bytes", inside, _pools_note(numbers))
    row("reserved, not allocated", "reserved_unallocated_bytes", inside)
    for other in numbers.other_processes:
        rows.append(Holder(other.name or f"process {other.pid}", other.bytes, level=0, evidence=symptom.evidence))
    if numbers.unaccounted_bytes is not None:
        what = "not accounted for" if numbers.process_bytes is not None else "outside torch, and others"
        rows.append(Holder(what, numbers.unaccounted_bytes, basis=derived, kind="unaccounted"))
    free = symptom.amounts.get("free_bytes")
    if free is not None and not rows:
        # The check before anything is loaded prints these two only.
        taken, spread = total.bytes - free.bytes, total.tolerance + free.tolerance
        rows.append(Holder("in use by then", taken, spread, derived, evidence=symptom.evidence))
    if free is not None:
        rows.append(Holder("free", free.bytes, free.tolerance, kind="free", evidence=symptom.evidence))
    rows.append(Holder("the device", total.bytes, total.tolerance, kind="total", evidence=symptom.evidence))
    asked = symptom.amounts.get("requested_bytes")
    if asked is not None:
        rows.append(Holder("asked for", asked.bytes, asked.tolerance, kind="asked", evidence=symptom.evidence))
    return tuple(rows)


def _pools_note(numbers: Numbers) -> str:
    size = numbers.private_pools_bytes
    return f"{size / GIB:.2f} GiB of it in private pools (CUDA graphs)" if size else ""
