"""The ledger: what a server holds on each rank, what is left unexplained, and what it can serve.

All types are frozen values; their field names are the JSON contract (docs/json.md). Sizes are whole bytes, fractions
are 0..1, unknown is None. Text quoted from logs is already cleaned and masked (`memledger.sanitize`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from memledger.units import GIB, Amount, total

Basis = Literal["logged", "live", "derived", "modelled", "assumed"]
Verdict = Literal["closed", "unexplained", "over_counted", "open"]
Severity = Literal["info", "note", "warning", "error"]
State = Literal["starting", "serving", "failed", "stopped", "unknown"]

ACCOUNTS: Final = (
    "in_use_at_start",
    "cuda_context",
    "other_processes",
    "driver_reserved",
    "weights/model",
    "weights/draft",
    "weights/lora",
    "weights_and_non_torch",
    "kv_cache/k",
    "kv_cache/v",
    "kv_cache/latent",
    "kv_cache/index",
    "kv_cache/swa_k",
    "kv_cache/swa_v",
    "kv_cache/draft",
    "kv_cache/pool",
    "kv_cache/unused",
    "recurrent_state/conv",
    "recurrent_state/ssm",
    "recurrent_state/speculative_conv",
    "recurrent_state/speculative_ssm",
    "cuda_graphs/decode",
    "cuda_graphs/prefill",
    "cuda_graphs/draft",
    "cuda_graphs/total",
    "activations",
    "non_torch",
    "workspace",
    "communication",
    "request_tables",
    "allocator_slack",
    "released",
    "reserve",
    "free",
)
"""Every account of the device's ledger, in the order of a report. `host/...` accounts form a ledger of their own."""

STAGES: Final = ("init", "weights", "draft_weights", "pools", "draft_pools", "warmup", "graphs", "final", "serving")
"""`serving` is the interval from the log's last reading to a live one; a log alone never has it."""

CLOSED_SHARE: Final = 0.01
"""A ledger is closed when its residual lies within its tolerance plus this share of the opening balance."""

CONTRADICTION: Final = "the figures contradict each other: "
"""Beginning of the reason of a ledger whose printed figures cannot all be true."""


def is_account(name: str) -> bool:
    """Whether `name` is an account of the tree (or a host account)."""
    return name in ACCOUNTS or (name.startswith("host/") and len(name) > len("host/"))


class Evidence(msgspec.Struct, frozen=True):
    """One line of one input: `input` is the index in `Report.inputs`, `line` counts from 1, `text` is cleaned and masked."""

    input: int
    line: int
    text: str


class Entry(msgspec.Struct, frozen=True):
    """One row of a rank's ledger. `stage` names the interval between two readings in which the bytes were taken."""

    account: str
    bytes: int
    tolerance_bytes: int
    basis: Basis
    detail: dict[str, Any] = {}
    evidence: tuple[Evidence, ...] = ()
    stage: str | None = None

    @property
    def amount(self) -> Amount:
        """Size with its tolerance."""
        return Amount(self.bytes, self.tolerance_bytes)


def stage_base(stage: str) -> str:
    """The stage's name without the part that tells a second interval of that name apart (`graphs/draft`)."""
    return stage.partition("/")[0]


def entry(
    account: str,
    amount: Amount,
    basis: Basis,
    *,
    stage: str | None = None,
    evidence: Iterable[Evidence] = (),
    **detail: Any,
) -> Entry:
    """An `Entry` from an `Amount`.

    Raises:
        ValueError: `account` is not in the tree, or `stage` is not a stage.
    """
    if not is_account(account):
        raise ValueError(f"no such account: {account}")
    if stage is not None and stage_base(stage) not in STAGES:
        raise ValueError(f"no such stage: {stage}")
    return Entry(account, amount.bytes, amount.tolerance, basis, detail, tuple(evidence), stage)


class StageResidual(msgspec.Struct, frozen=True):
    """What remains of a stage when its entries are taken off; negative: more was entered than memory fell.

    None where the reading at the stage's start, or at its end, is not in the log.
    """

    bytes: int | None
    tolerance_bytes: int | None


class Stage(msgspec.Struct, frozen=True):
    """The interval between two consecutive free-memory readings of one rank.

    `free_before_bytes` is the reading that closed the stage before (or the opening balance), so that every pair of
    consecutive readings belongs to exactly one stage; None where the log starts later, or ends before. `candidates` names what is known
    to move memory in this stage without a line of its own.
    """

    name: str
    free_before_bytes: int | None
    free_after_bytes: int | None
    residual: StageResidual
    candidates: tuple[str, ...] = ()


class Residual(msgspec.Struct, frozen=True):
    """Opening balance minus all entries (free memory included). Signed, never hidden, spread or clamped.

    `evidence`: the lines of the opening balance; none where the log does not print it. `since_start_bytes`: the part of a live
    residual that the rank's own process holds beyond its entries (its growth since the start, signed); the rest is nobody's.
    """

    base: Literal["device", "first_reading"] | None
    bytes: int | None
    tolerance_bytes: int | None
    verdict: Verdict
    opening_bytes: int | None = None
    reason: str | None = None
    evidence: tuple[Evidence, ...] = ()
    since_start_bytes: int | None = None


class Gpu(msgspec.Struct, frozen=True):
    """The device of a rank, as far as the inputs tell."""

    kind: Literal["cuda", "rocm", "npu", "xpu", "musa", "cpu"] | None = None
    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    unified_memory: bool | None = None


class Budget(msgspec.Struct, frozen=True):
    """What the engine allowed itself: `static_bytes` for weights and pools, `slack_bytes` outside it; `rule` in words.

    `graph_estimate_bytes` is the engine's own estimate of its CUDA graphs (vLLM), `graph_estimate_charged` whether the
    budget was charged with it; None where no line says it.
    """

    static_bytes: int | None = None
    slack_bytes: int | None = None
    rule: str | None = None
    graph_estimate_bytes: int | None = None
    graph_estimate_charged: bool | None = None


class Concurrency(msgspec.Struct, frozen=True):
    """Requests of `tokens_per_request` tokens that fit at once, as the engine printed it."""

    tokens_per_request: int | None = None
    requests: float | None = None


class Capacity(msgspec.Struct, frozen=True):
    """What the pools hold; in effect, per data-parallel engine (not what was asked for)."""

    kv_tokens: int | None = None
    kv_swa_tokens: int | None = None
    kv_blocks: int | None = None
    kv_block_tokens: int | None = None
    state_slots: int | None = None
    slots_per_request: int | None = None
    max_running_requests: int | None = None
    concurrency: Concurrency = Concurrency()


class Usage(msgspec.Struct, frozen=True):
    """Peaks over all usage lines of one start; None where no line says it. Counts are requests, usages fractions.

    `seen`: whether the log holds usage lines at all; without any there is no peak, and nothing can be called idle.
    `ran_between_samples`: whether some line shows that tokens were computed, whatever its count of running requests: a
    line is printed at intervals and counts what runs at that moment.
    `evidence`: the lines that reached the peaks, in the order of the fields (requests first).
    """

    scope: Literal["engine", "sum_of_engines"] = "engine"
    peak_running_requests: int | None = None
    peak_queued_requests: int | None = None
    peak_kv_usage: float | None = None
    peak_state_usage: float | None = None
    peak_swa_usage: float | None = None
    preemptions: int | None = None
    retractions: int | None = None
    peak_state_slots: int | None = None
    seen: bool = False
    ran_between_samples: bool = False
    evidence: tuple[Evidence, ...] = ()


class Rank(msgspec.Struct, frozen=True):
    """One worker process on one GPU with its ledger."""

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    ep: int | None = None
    pid: int | None = None
    host: str | None = None
    gpu: Gpu = Gpu()
    budget: Budget = Budget()
    entries: tuple[Entry, ...] = ()
    stages: tuple[Stage, ...] = ()
    residual: Residual = Residual(None, None, None, "open")
    capacity: Capacity = Capacity()

    @property
    def label(self) -> str:
        """`DP0 PP1 TP3`, `TP0`, or `pid 4242` where nothing else tells the rank."""
        named = (("DP", self.dp), ("PP", self.pp), ("TP", self.tp), ("EP", self.ep))
        parts = [f"{name}{value}" for name, value in named if value is not None]
        return " ".join(parts) or (f"pid {self.pid}" if self.pid is not None else "rank 0")


class Engine(msgspec.Struct, frozen=True):
    """One data-parallel engine: what it can serve and what it served."""

    dp: int = 0
    pid: int | None = None
    capacity: Capacity = Capacity()
    usage: Usage = Usage()


class Failure(msgspec.Struct, frozen=True):
    """A line that says something failed, with its numbers (bytes as int, counts as int)."""

    kind: str
    phase: str
    numbers: dict[str, Any] = {}
    evidence: tuple[Evidence, ...] = ()


class Effect(msgspec.Struct, frozen=True, omit_defaults=True):
    """Predicted change of one account (`bytes`) or of one capacity (`change`, in its own unit)."""

    account: str | None = None
    bytes: int | None = None
    capacity: str | None = None
    change: int | None = None


class Remedy(msgspec.Struct, frozen=True):
    """Flags to pass, what they would change, and how that is known."""

    flags: tuple[str, ...]
    effects: tuple[Effect, ...] = ()
    basis: str = ""


class Finding(msgspec.Struct, frozen=True):
    """A conclusion with a stable code; `text` is one or two sentences that carry the arithmetic."""

    code: str
    title: str
    severity: Severity
    bytes: int
    text: str
    evidence: tuple[Evidence, ...] = ()
    remedies: tuple[Remedy, ...] = ()


class Span(msgspec.Struct, frozen=True):
    """The lines of one input that belong to a server."""

    input: int
    first_line: int
    last_line: int


class Server(msgspec.Struct, frozen=True):
    """One start of one server. `config` holds what was asked for (contract names; None or absent: not printed)."""

    framework: Literal["sglang", "vllm"]
    framework_version: str | None = None
    model: str | None = None
    label: str | None = None
    span: tuple[Span, ...] = ()
    started_at: str | None = None
    ended_at: str | None = None
    state: State = "unknown"
    config: dict[str, Any] = {}
    ranks: tuple[Rank, ...] = ()
    engines: tuple[Engine, ...] = ()
    usage: Usage = Usage()
    failures: tuple[Failure, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


class Input(msgspec.Struct, frozen=True):
    """One input as read: size after decompression, and what was odd about reading it."""

    path: str
    bytes: int
    lines: int
    notes: tuple[str, ...] = ()


NO_MODEL: Final = (
    "the log names no model; --model-config FILE would add what its weights, KV cache and recurrent state should take"
)
"""The reason of the source `model` where there is nothing to look up."""


class Source(msgspec.Struct, frozen=True):
    """A source of facts and whether it answered."""

    name: Literal["log", "nvml", "smi", "proc", "metrics", "model"]
    status: Literal["ok", "partial", "unavailable"]
    reason: str | None = None


class Unrecognized(msgspec.Struct, frozen=True):
    """Lines that look like memory and that no rule took."""

    count: int = 0
    examples: tuple[Evidence, ...] = ()


class LiveRow(msgspec.Struct, frozen=True):
    """One row of what a machine shows. `account` is one of the tree, `server_processes`, `page_cache` or `ledger` (a rank's entries).

    `detail` says whose it is: `pid`, `user`, `command`, `role`, `rank`, `started_at`, `note`.
    """

    account: str
    bytes: int | None
    tolerance_bytes: int
    basis: Basis
    detail: dict[str, Any] = {}


class LiveGpu(msgspec.Struct, frozen=True):
    """One device now: total = rows (free memory included) + residual."""

    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    memory_call: str | None = None
    unified_memory: bool | None = None
    lost_bytes: int | None = None
    rows: tuple[LiveRow, ...] = ()
    residual: Residual = Residual(None, None, None, "open")
    notes: tuple[str, ...] = ()


class LiveProcess(msgspec.Struct, frozen=True):
    """One process of the server on one device: used = ledger + CUDA context + growth since the start.

    `rank` is the place in `ranks`; `matched` how the driver's process was told to be this one (`pid`, `size`, `title`).
    `growth_bytes` is signed, `expected_bytes` what the log leaves room for (a profiled peak), where it says it;
    `resident_bytes` is its host memory.
    """

    pid: int
    role: str = "other"
    label: str | None = None
    rank: int | None = None
    gpu_index: int | None = None
    gpu_uuid: str | None = None
    matched: Literal["pid", "size", "title"] | None = None
    used_bytes: int | None = None
    rows: tuple[LiveRow, ...] = ()
    growth_bytes: int | None = None
    growth_tolerance_bytes: int | None = None
    expected_bytes: int | None = None
    resident_bytes: int | None = None
    zombie: bool = False
    notes: tuple[str, ...] = ()


class LiveUsage(msgspec.Struct, frozen=True):
    """What the server's own metrics say now (requests, fractions)."""

    running_requests: int | None = None
    queued_requests: int | None = None
    kv_usage: float | None = None
    state_usage: float | None = None
    swa_usage: float | None = None
    preemptions: int | None = None


class LogCheck(msgspec.Struct, frozen=True):
    """Whether the log is of the running process: `yes`, `no`, or `unknown`, with what was compared, in words."""

    verdict: Literal["yes", "no", "unknown"]
    reasons: tuple[str, ...] = ()
    start: int | None = None
    """The start of `servers` that is lined up (or, with `no`, the last one in the log)."""


class Live(msgspec.Struct, frozen=True):
    """A running server, or a machine's devices, lined up with the log's ledger at one moment."""

    taken_at: str
    server: int | None = None
    """The place in `servers` of the start that was lined up; None: none was."""
    pid: int | None = None
    started_at: str | None = None
    host: str | None = None
    port: int | None = None
    container: str | None = None
    driver_version: str | None = None
    log: LogCheck | None = None
    gpus: tuple[LiveGpu, ...] = ()
    processes: tuple[LiveProcess, ...] = ()
    usage: LiveUsage | None = None
    notes: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """What `memledger explain --format json` prints."""

    version: str
    inputs: tuple[Input, ...]
    sources: tuple[Source, ...]
    servers: tuple[Server, ...]
    unrecognized: Unrecognized = Unrecognized()
    live: Live | None = None
    schema_: str = "memledger/1"


# --------------------------------------------------------------------------------------------------------------------
# Balancing: pure functions from readings and entries to stages and a residual.


class Reading(msgspec.Struct, frozen=True):
    """Free memory of one rank at one moment; `stage` names the interval that this reading closes.

    A second interval of a name later in time is told apart by a word after a slash (`graphs/draft`, where an engine
    captures the draft's graphs after the target's are long done); the stage itself keeps the plain name.
    """

    stage: str
    free: Amount
    evidence: tuple[Evidence, ...] = ()


def held(entries: Iterable[Entry]) -> Amount:
    """The sum of all entries of the device ledger except `free` (host accounts are not the device's)."""
    return total([e.amount for e in entries if e.account != "free" and not e.account.startswith("host/")])


def account_total(entries: Iterable[Entry], prefix: str) -> Amount | None:
    """The sum at or under an account; None where there is no such entry (unknown is not zero)."""
    found = [e.amount for e in entries if e.account == prefix or e.account.startswith(prefix + "/")]
    return total(found) if found else None


def build_stages(
    opening: Reading,
    readings: Sequence[Reading],
    entries: Iterable[Entry],
    candidates: dict[str, tuple[str, ...]] | None = None,
) -> tuple[Stage, ...]:
    """The chain of stages from the opening balance to the last reading.

    Consecutive readings that close the same stage are one stage. An entry counts in the first stage of its name; one
    whose stage has no reading of its own counts in the stage that covers it: the next one in time (or the last), so
    that every entry but `free` is in exactly one stage and the stage residuals sum to the rank's residual.

    Args:
        opening: the first reading (or the device total, under the name of the stage before the first reading).
        readings: the later readings in time order.
        entries: all entries of the rank, `free` and host entries are passed over.
        candidates: per stage name, what may have moved memory there without a line.
    """
    merged: list[list[Reading]] = []
    for reading in readings:
        if merged and merged[-1][-1].stage == reading.stage:
            merged[-1].append(reading)
        else:
            merged.append([reading])
    names = [group[-1].stage for group in merged]
    amounts: list[list[Amount]] = [[] for _ in merged]
    for item in entries:
        if item.account == "free" or item.account.startswith("host/") or not merged:
            continue
        amounts[_stage_index(names, item.stage)].append(item.amount)
    stages = []
    before = opening.free
    for group, name, taken in zip(merged, names, amounts, strict=True):
        after = group[-1].free
        rest = before - after - total(taken)
        known = (candidates or {}).get(name, ())
        stages.append(
            Stage(stage_base(name), before.bytes, after.bytes, StageResidual(rest.bytes, rest.tolerance), known)
        )
        before = after
    return tuple(stages)


def _stage_index(names: list[str], wanted: str | None) -> int:
    """Index of the stage in which an entry counts (see `build_stages`)."""
    if wanted is None:
        return len(names) - 1
    if wanted in names:
        return names.index(wanted)
    base = stage_base(wanted)
    bases = [stage_base(name) for name in names]
    if base in bases:
        return len(bases) - 1 - bases[::-1].index(base)
    position = STAGES.index(base)
    later = [i for i, name in enumerate(bases) if STAGES.index(name) > position]
    return later[0] if later else len(names) - 1


def close(
    base: Literal["device", "first_reading"] | None,
    opening: Amount | None,
    entries: Iterable[Entry],
    *,
    open_reason: str | None = None,
    unified_memory: bool = False,
    evidence: tuple[Evidence, ...] = (),
) -> Residual:
    """The rank's residual and verdict: opening minus all entries, `free` included.

    `open_reason` says why the ledger cannot be judged (no free-memory reading, budget not printed, an entry obtained
    by subtraction); the verdict is then `open`, with the residual still given where an opening balance is known.
    On unified memory the page cache moves with the readings, so the allowed share is three times as wide.
    """
    if base is None or opening is None:
        return Residual(None, None, None, "open", None, open_reason or "no free-memory reading in the log")
    rows = [e.amount for e in entries if not e.account.startswith("host/")]
    rest = opening - total(rows)
    if open_reason is not None:
        return Residual(base, rest.bytes, rest.tolerance, "open", opening.bytes, open_reason, evidence)
    allowed = rest.tolerance + CLOSED_SHARE * opening.bytes * (3 if unified_memory else 1)
    verdict: Verdict = "closed" if abs(rest.bytes) <= allowed else "over_counted" if rest.bytes < 0 else "unexplained"
    return Residual(base, rest.bytes, rest.tolerance, verdict, opening.bytes, None, evidence)


def gib(size: int) -> float:
    """Bytes in GiB (2**30 bytes), for showing."""
    return size / GIB
