"""An incident: one failure with its cause, the memory at that moment, what followed from it, and what to do.

All types are frozen values; their field names are the JSON contract of `memledger oom`. Sizes are whole bytes, fractions
0..1, unknown is None. Text quoted from logs is already cleaned and masked (`memledger.sanitize`).
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import msgspec

from memledger.ledger import Basis, Evidence, Finding, Input, Remedy, Server, Source, Unrecognized
from memledger.postmortem.torch_snapshot import TorchSnapshot

Kind = Literal[
    "other_process",
    "weights",
    "profiling",
    "kv_pool",
    "state_pool",
    "graph_capture",
    "warmup",
    "prefill",
    "decode",
    "workspace",
    "communication",
    "fragmentation",
    "host_memory",
    "library",
    "not_device_memory",
    "unknown",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

Phase = Literal[
    "start",
    "weights",
    "profiling",
    "pools",
    "graph_capture",
    "warmup",
    "serving",
    "prefill",
    "decode",
    "wake_up",
    "host",
    "unknown",
]
"""When it happened. `start`: the check of free memory before anything is loaded. `serving`: prefill or decode, not known which."""

PROVEN: Final = 0.9
"""Confidence of what the failing line itself says."""
MOST_WITHOUT_PROOF: Final = 0.7
"""No conclusion that the input does not state is given a higher confidence."""


class OtherProcess(msgspec.Struct, frozen=True):
    """A process beside the one that failed: as torch, nvidia-smi or the kernel lists it. `bytes` None: not available."""

    pid: int | None
    bytes: int | None
    name: str | None = None


class Numbers(msgspec.Struct, frozen=True):
    """The figures of the failure.

    From the line itself: `requested_bytes` (what the allocator asked the driver for, after rounding), `total_bytes` and
    `free_bytes` of the device, `process_bytes` (all of this process, NVML), `torch_allocated_bytes` (contains
    `private_pools_bytes`, the free part of graph pools), `reserved_unallocated_bytes`, `limit_bytes` (a limit on the
    process), `other_processes`.

    By arithmetic: `torch_reserved_bytes` = allocated + unallocated, `outside_torch_bytes` = process - reserved,
    `unaccounted_bytes` = total - free - this process - the other processes listed (may be negative; then figures of one
    message contradict each other, which is said).

    `more`: what only some failures have (`memory_fraction`, `desired_bytes`, `needed_bytes`, `requested_tokens` ...).
    `not_available`: figures that the driver printed as all ones.
    """

    gpu_index: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    torch_allocated_bytes: int | None = None
    private_pools_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    limit_bytes: int | None = None
    other_processes: tuple[OtherProcess, ...] = ()
    torch_reserved_bytes: int | None = None
    outside_torch_bytes: int | None = None
    unaccounted_bytes: int | None = None
    tolerance_bytes: int | None = None
    more: dict[str, Any] = {}
    not_available: tuple[str, ...] = ()


class Holder(msgspec.Struct, frozen=True):
    """Who held memory at that moment: one row. Rows of `level` 1 are parts of the row of level 0 above them.

    `kind`: `free`, `total` and `asked` are no holders; rows of level 0 that are holders, and `free`, sum to `total`.
    """

    label: str
    bytes: int | None
    tolerance_bytes: int = 0
    basis: Basis = "logged"
    kind: Literal["holder", "free", "total", "asked", "unaccounted"] = "holder"
    level: int = 0
    note: str = ""
    evidence: tuple[Evidence, ...] = ()


class ServerState(msgspec.Struct, frozen=True):
    """What the server was doing: from the crash dump, or from the last usage line before the failure (`basis`)."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    state_usage: float | None = None
    scheduled_tokens: int | None = None
    new_tokens: int | None = None
    basis: str | None = None
    at: str | None = None
    evidence: tuple[Evidence, ...] = ()


class Moment(msgspec.Struct, frozen=True):
    """One step on the way to the failure. `taken_bytes`: what it took; `free_bytes`: what was free after it."""

    at: str | None
    what: str
    taken_bytes: int | None = None
    free_bytes: int | None = None
    evidence: tuple[Evidence, ...] = ()


class Link(msgspec.Struct, frozen=True):
    """One step of the chain: the failure itself (`cause`), then what followed from it."""

    what: str
    role: Literal["cause", "consequence"]
    at: str | None = None
    times: int = 1
    evidence: tuple[Evidence, ...] = ()


class Candidate(msgspec.Struct, frozen=True):
    """One of the possible causes, where the input does not decide: `command` would.

    `previous_start`: the start before this one in the same log.
    """

    kind: Kind
    cause: str
    command: str | None = None
    previous_start: bool = False


class Advice(msgspec.Struct, frozen=True):
    """What to do: `direction` says which way a setting goes, `text` carries the arithmetic, `remedy` the flags.

    `setting`: which setting, where it is one (`fraction`, `chunk`, `requests` ...).
    """

    direction: Literal["lower", "raise", "free", "change", "none"]
    text: str
    remedy: Remedy | None = None
    setting: str | None = None


class Decoded(msgspec.Struct, frozen=True):
    """What the request may have been. `exact`: the product comes out at the printed figure."""

    text: str
    exact: bool = False
    low_bytes: int | None = None
    high_bytes: int | None = None


class Incident(msgspec.Struct, frozen=True):
    """One failure. `server` is the index in `servers`, None where the input holds no start that it belongs to.

    `code`: the stable code of the cause (docs/findings.md, ML211 to ML249); of one kind several have opposite remedies.

    `fatal`: whether the server, or a process of it, ended by it (None: the input does not say). `device_memory`: whether
    device memory ran out at all (None: not known). `ranks`: labels of the ranks that failed alike.
    """

    kind: Kind
    phase: Phase
    confidence: float
    cause: str
    server: int | None = None
    at: str | None = None
    fatal: bool | None = None
    device_memory: bool | None = None
    ranks: tuple[str, ...] = ()
    numbers: Numbers = Numbers()
    request: Decoded | None = None
    state: ServerState | None = None
    holders: tuple[Holder, ...] = ()
    findings: tuple[Finding, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    chain: tuple[Link, ...] = ()
    timeline: tuple[Moment, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    advice: tuple[Advice, ...] = ()
    collect: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    basis: str = ""
    code: str = ""


class OomReport(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """What `memledger oom --format json` prints."""

    version: str
    inputs: tuple[Input, ...]
    sources: tuple[Source, ...]
    incidents: tuple[Incident, ...]
    servers: tuple[Server, ...]
    unrecognized: Unrecognized = Unrecognized()
    snapshots: tuple[TorchSnapshot, ...] = ()
    schema_: str = "memledger/1"
