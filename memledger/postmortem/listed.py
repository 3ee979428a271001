"""What nvidia-smi lists beside an incident: said as a remark, for the table may be of another moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from memledger import words as n
from memledger.postmortem import machine
from memledger.postmortem.incident import Candidate, Incident
from memledger.postmortem.leftover import held_by_others
from memledger.postmortem.symptom import Symptom, Symptoms
from memledger.units import GIB

MOST: Final = 4
SHARE: Final = 0.9
"""Of what others held, the largest listed process must hold this much to be called its holder."""


def noted(incidents: Iterable[Incident], symptoms: Symptoms) -> tuple[Incident, ...]:
    """The incidents on device memory with the processes listed on the GPU, the largest first, and a limit of MPS."""
    processes = [s for s in symptoms.of("smi_process") if "used_bytes" in s.amounts and "pid" in s.counts]
    processes.sort(key=lambda s: -s.amounts["used_bytes"].bytes)
    limits = {s.amounts["limit_bytes"].bytes for s in symptoms.of("mps_limit") if "limit_bytes" in s.amounts}
    found = tuple(_limited(one, limits) for one in incidents) if limits else tuple(incidents)
    return tuple(_noted(one, processes) for one in found) if processes else found


def _limited(one: Incident, limits: set[int]) -> Incident:
    """A failure under NVIDIA's MPS: each client has a limit of its own, whatever the device has left."""
    if one.device_memory is False:
        return one
    sizes = ", ".join(n.gib_about(size) for size in sorted(limits))
    note = f"MPS limits the device memory of each client to {sizes}: a client runs out at that, whatever the device has left."
    return msgspec.structs.replace(one, notes=(*one.notes, note))


def _noted(one: Incident, processes: list[Symptom]) -> Incident:
    if one.device_memory is False:
        return one
    # A process numbers its GPUs by what it may see: with one GPU in the table there is no question which.
    gpus = {s.counts.get("gpu_index") for s in processes}
    told = [
        f"process {int(s.counts['pid'])} ({s.words.get('name', 'no name')}) {s.amounts['used_bytes'].bytes / GIB:.2f} GiB"
        + (f" on GPU {s.counts.get('gpu_index')}" if len(gpus) > 1 else "")
        for s in processes[:MOST]
    ]
    more = f" and {len(processes) - MOST} more" if len(processes) > MOST else ""
    who = "The machine's snapshot" if processes[0].rule == machine.RULE else "nvidia-smi"
    note = f"{who} lists, at its own moment: {', '.join(told)}{more}."
    evidence = tuple(item for s in processes[:MOST] for item in s.evidence[:1])
    holder = _holder(one, processes) if len(gpus) == 1 else None
    candidates = (holder, *one.candidates) if holder is not None else one.candidates
    return msgspec.structs.replace(
        one, notes=(*one.notes, note), evidence=(*one.evidence, *evidence), candidates=candidates
    )


def _holder(one: Incident, processes: list[Symptom]) -> Candidate | None:
    """The listed process that holds what others held at the failure; none where the sizes do not agree."""
    taken = held_by_others(one.numbers) if one.kind == "other_process" else None
    largest = processes[0]
    size, pid = largest.amounts["used_bytes"].bytes, int(largest.counts["pid"])
    if taken is None or not SHARE * taken <= size <= taken + GIB // 2:
        return None
    name = largest.words.get("name", "no name")
    when = "the machine's snapshot was taken" if largest.rule == machine.RULE else "nvidia-smi was run"
    text = (
        f"Process {pid} ({name}) held {size / GIB:.2f} GiB when {when}: that is the {taken / GIB:.2f} GiB in use here."
    )
    return Candidate("other_process", text, f"ps -o pid,ppid,lstart,args -p {pid}")
