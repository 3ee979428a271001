"""What nvidia-smi lists beside an incident: said as a remark, for the table may be of another moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from memledger.postmortem.incident import Incident
from memledger.postmortem.symptom import Symptom, Symptoms
from memledger.units import GIB

MOST: Final = 4


def noted(incidents: Iterable[Incident], symptoms: Symptoms) -> tuple[Incident, ...]:
    """The incidents on device memory with the processes that nvidia-smi lists on the GPU, the largest first."""
    processes = [s for s in symptoms.of("smi_process") if "used_bytes" in s.amounts and "pid" in s.counts]
    processes.sort(key=lambda s: -s.amounts["used_bytes"].bytes)
    if not processes:
        return tuple(incidents)
    return tuple(_noted(one, processes) for one in incidents)


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
    note = f"nvidia-smi lists, at its own moment: {', '.join(told)}{more}."
    evidence = tuple(item for s in processes[:MOST] for item in s.evidence[:1])
    return msgspec.structs.replace(one, notes=(*one.notes, note), evidence=(*one.evidence, *evidence))
