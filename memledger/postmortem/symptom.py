"""The value types of symptoms: what one line of an input says about a failure."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from memledger.events import Prefix
from memledger.ledger import Evidence
from memledger.units import Amount

Role = Literal["cause", "consequence", "context", "not_memory"]

KINDS: Final[dict[str, Role]] = {
    # What ran out, or refused.
    "torch_oom": "cause",
    "torch_limit": "cause",
    "cuda_error": "cause",
    "runtime_oom": "cause",
    "library": "cause",
    "communication": "cause",
    "allocation_failed": "cause",
    "nvml_hides_oom": "cause",
    "wake_up_failed": "cause",
    "startup_check": "cause",
    "engine_refusal": "cause",
    "engine_runtime": "cause",
    "host_alloc": "cause",
    "kernel_oom": "cause",
    "cgroup_oom": "cause",
    "oomd": "cause",
    "container_killed": "cause",
    "evicted": "cause",
    "slurm_oom": "cause",
    "ray_memory_monitor": "cause",
    "shm_full": "cause",
    "pinned_failed": "cause",
    "unit_oom": "cause",
    "exit_code": "cause",
    # What follows from it.
    "consequence": "consequence",
    # What stands beside it.
    "allocator_retry": "context",
    "exception": "context",
    "recovered": "context",
    "imbalance": "context",
    "oom_invoked": "context",
    "shm_warning": "context",
    "xid": "context",
    "container_exit": "context",
    "container_time": "context",
    "container_id": "context",
    "restart_count": "context",
    "kernel_task": "context",
    "kernel_reaped": "context",
    "machine_memory": "context",
    "swap": "context",
    "cgroup_name": "context",
    "cgroup_usage": "context",
    "memory_limit": "context",
    "mps_limit": "context",
    "ray_node": "context",
    "ray_process": "context",
    "ray_worker": "context",
    "smi_device": "context",
    "smi_process": "context",
    "memory_summary": "context",
    "process_list": "context",
    # What looks like device memory running out and is not.
    "on_chip_memory": "not_memory",
    "workspace_overflow": "not_memory",
    "size_bug": "not_memory",
    "unreliable": "not_memory",
    "illegal_access": "not_memory",
}
"""Every kind of symptom and its role.

`exit_code` (137, -9: signal 9; 135, -7: bus error) alone does not say that memory ran out. `library` is cuBLAS, cuDNN or
NCCL; `communication` NVSHMEM and DeepEP. `torch_limit` was refused by a limit on the process. `runtime_oom` is XLA's or
Ascend's runtime. `shm_full` is /dev/shm.
`engine_refusal` is the engine's own arithmetic before it serves, `engine_runtime` a pool that ran out while it serves
(tokens or slots, not bytes), `startup_check` what it says of others on the GPU. `kernel_oom` is the whole machine,
`cgroup_oom` the limit of a container, pod or job. `exception` is the end of any other traceback.
"""


class Frame(msgspec.Struct, frozen=True):
    """One frame of a traceback as printed: file, line and function (None where the line was cut)."""

    file: str
    line: int | None
    function: str | None


class Symptom(msgspec.Struct, frozen=True):
    """One recognised line about a failure.

    `kind` is a key of `KINDS`, `role` its value. `rule` is the rule's full id (`any.oom`). `amounts` are sizes by their
    contract name (`requested_bytes`, `total_bytes`, `free_bytes`, `process_bytes`, `torch_allocated_bytes`,
    `private_pools_bytes`, `reserved_unallocated_bytes`, `limit_bytes`: a limit on the process ...), `counts` whole and other numbers
    (`gpu_index`, `pid`, `exit_code`, `memory_fraction` ...), `words` texts (`device`, `name`, `constraint` ...).
    `not_available` names the sizes that stand as "not available" (all ones of the driver). `other_processes` are
    {pid, bytes} (bytes None: not available), our own process taken out. `notes` say in words what was decided in reading.
    `time` is ISO text as in `Prefix`, also from torch's own stamp. `frames` are those of the traceback that ends with
    this line, outermost first. `phase_hint` is a phase that the line itself names (`graph_capture`, `weights` ...).
    `repeats` counts the lines that said the same again.
    """

    kind: str
    role: Role
    rule: str
    prefix: Prefix
    input: int
    line: int
    message: str
    time: str | None = None
    amounts: dict[str, Amount] = {}
    counts: dict[str, int | float] = {}
    words: dict[str, str] = {}
    not_available: tuple[str, ...] = ()
    other_processes: tuple[dict[str, int | None], ...] = ()
    frames: tuple[Frame, ...] = ()
    phase_hint: str | None = None
    notes: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    repeats: int = 0

    @property
    def numbers(self) -> dict[str, Any]:
        """The figures as they stand in the JSON report: bytes, counts, and the list of other processes."""
        found: dict[str, Any] = {name: amount.bytes for name, amount in self.amounts.items()}
        found.update(self.counts)
        if self.other_processes:
            found["other_processes"] = [dict(other) for other in self.other_processes]
        return found

    @property
    def functions(self) -> frozenset[str]:
        """The names of the functions that the traceback passes."""
        return frozenset(frame.function for frame in self.frames if frame.function is not None)


class Symptoms(msgspec.Struct, frozen=True):
    """Everything that was found, in the order of the inputs; `left_out` counts by kind what there was no room for."""

    found: tuple[Symptom, ...] = ()
    left_out: dict[str, int] = {}

    def of(self, *kinds: str) -> tuple[Symptom, ...]:
        """The symptoms of these kinds, in order."""
        return tuple(symptom for symptom in self.found if symptom.kind in kinds)

    def with_role(self, role: Role) -> tuple[Symptom, ...]:
        """The symptoms of this role, in order."""
        return tuple(symptom for symptom in self.found if symptom.role == role)
