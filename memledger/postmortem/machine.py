"""A machine's snapshot (`memledger explain --snapshot FILE`) beside logs: which processes held its GPUs at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from memledger.events import Prefix
from memledger.ledger import Evidence
from memledger.postmortem.symptom import KINDS, Symptom
from memledger.units import GIB, Amount

if TYPE_CHECKING:
    from memledger.live.snapshot import Snapshot

HEAD_BYTES: Final = 256
MARK: Final = b'"memledger-snapshot/'
"""The schema's name without its version: another version is told from a log, and refused by its reader."""
RULE: Final = "system.machine_snapshot"


def looks_like_one(head: bytes) -> bool:
    """Whether a file begins as such a snapshot does (the schema stands first)."""
    return head.lstrip().startswith(b"{") and MARK in head


def symptoms_of(path: str, snapshot: Snapshot, number: int) -> Iterator[Symptom]:
    """What the driver listed: a symptom for each device and each process on it, as of an nvidia-smi table.

    Args:
        path: the file's name, for the evidence.
        snapshot: what it holds.
        number: the index of the input that the evidence names.
    """
    devices = snapshot.sample.devices.devices if snapshot.sample.devices is not None else ()
    for device in devices:
        index = {"gpu_index": device.index} if device.index is not None else {}
        for process in device.processes or ():
            if process.used_bytes is None:
                continue
            name = process.command or "no name"
            text = (
                f"{path}, {snapshot.sample.taken_at}: process {process.pid} ({name}) {process.used_bytes / GIB:.2f} GiB"
            )
            yield Symptom(
                "smi_process",
                KINDS["smi_process"],
                RULE,
                Prefix(),
                number,
                1,
                text,
                snapshot.sample.taken_at,
                {"used_bytes": Amount(process.used_bytes)},
                {**index, "pid": process.pid},
                {"name": name[:80]},
                evidence=(Evidence(number, 1, text),),
            )
