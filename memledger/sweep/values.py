"""What a sweep measures, as frozen values: the lines of its results file, and the report that is made of them.

Seconds are floats, sizes are bytes, tokens are the server's own counts, unknown is None.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from memledger.ledger import Input, Source
from memledger.live.sample import Metrics
from memledger.sweep.figures import Distribution, Growth, Quantile
from memledger.sweep.steps import Slo, Step

SCHEMA: Final = "memledger-sweep/1"

Phase = Literal["before", "during", "after"]
Verdict = Literal["stable", "queued", "preempted", "failed", "stopped", "not_run"]
"""`queued`: requests waited for room most of the time; `preempted`: the server took some back; `stopped`: ended before it was done."""

ErrorKind = Literal[
    "refused", "broken_off", "timeout", "redirect", "http_4xx", "http_5xx", "not_a_stream", "bad_stream", "error_in_stream",
    "too_many_tokens", "no_tokens", "cancelled", "other",
]  # fmt: skip


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. `sent_s` is seconds since the run's begin, the other times are since it was sent.

    `chunks` counts the pieces with tokens in them; a piece may hold several. `prompt_tokens`, `output_tokens`, `cached_tokens` are
    the server's figures; `doubt` says why one of them was not believed (it is None then).
    """

    sent_s: float
    ended_s: float
    first_s: float | None = None
    last_s: float | None = None
    longest_gap_s: float | None = None
    chunks: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    status: int | None = None
    error: ErrorKind | None = None
    reason: str | None = None
    doubt: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first."""
        if self.first_s is None or self.last_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


class Totals(msgspec.Struct, frozen=True, omit_defaults=True):
    """The server's own counters since its start, summed over engines; None: it does not serve that one."""

    requests: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    preemptions: int | None = None
    first_tokens: int | None = None
    first_token_sum_s: float | None = None
    """Sum of all times to the first token as the server measured them; `first_tokens` of them."""

    def since(self, before: Totals) -> Totals:
        """What was counted after `before`; a counter that went back (the server restarted) is unknown."""
        changes: dict[str, Any] = {}
        for name in self.__struct_fields__:
            now, then = getattr(self, name), getattr(before, name)
            changes[name] = None if now is None or then is None or now < then else now - then
        return Totals(**changes)


class Memory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The machine at one moment, of a server on this machine.

    `accounts`: the ledger with the machine's rows, summed over the server's GPUs. `server_bytes`: what its processes hold on the
    devices, `free_bytes`: of its device with the least free memory. `host_bytes`: resident memory of its processes.
    """

    accounts: dict[str, int] = {}
    server_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    host_bytes: int | None = None
    host_available_bytes: int | None = None
    gpus: int = 0


class Look(msgspec.Struct, frozen=True, omit_defaults=True):
    """The server's metrics and the machine's memory at one moment; `clock_s` as `Outcome.sent_s`."""

    phase: Phase
    clock_s: float
    at: str
    metrics: Metrics | None = None
    totals: Totals | None = None
    memory: Memory | None = None


class Settings(msgspec.Struct, frozen=True):
    """What was asked for; `seed` keeps the prompts of this run apart from those of others."""

    url: str
    contexts: tuple[int, ...]
    concurrency: tuple[int, ...]
    output_tokens: int
    duration_s: float
    requests: int | None = None
    shared_prefix: float = 0.0
    to_failure: bool = False
    memory_floor_bytes: int = 0
    most_tokens: int = 0
    most_seconds: float = 0.0
    slo: Slo | None = None
    gpu_hour: float | None = None
    gpus: int | None = None
    soak_s: float | None = None
    seed: int = 0


class Target(msgspec.Struct, frozen=True):
    """The server as it was found.

    `tokens_by`: how prompts get their length. `bytes_per_token` and `state_bytes_per_request`: the model's arithmetic, of one GPU; `pool_bytes`: the KV pool of one GPU.
    """

    framework: Literal["sglang", "vllm"] | None = None
    framework_version: str | None = None
    model: str | None = None
    longest: int | None = None
    tokens_by: Literal["token ids", "usage"] = "usage"
    pid: int | None = None
    gpus: int | None = None
    gpu_name: str | None = None
    pool_bytes: int | None = None
    bytes_per_token: float | None = None
    state_bytes_per_request: int | None = None
    notes: tuple[str, ...] = ()


class Begun(msgspec.Struct, frozen=True, tag="begin", tag_field="kind"):
    """The first line of a results file."""

    version: str
    at: str
    settings: Settings
    target: Target
    schema: str = SCHEMA


class StepBegun(msgspec.Struct, frozen=True, tag="step", tag_field="kind"):
    """What follows is of this step; `soak`: the long one at the end."""

    step: Step
    clock_s: float
    soak: bool = False


class Sent(msgspec.Struct, frozen=True, tag="request", tag_field="kind", omit_defaults=True):
    """A request has ended. `warm_up`: it is no part of the step's figures."""

    outcome: Outcome
    warm_up: bool = False


class Looked(msgspec.Struct, frozen=True, tag="look", tag_field="kind"):
    """The server was looked at."""

    look: Look


class StepEnded(msgspec.Struct, frozen=True, tag="step_end", tag_field="kind", omit_defaults=True):
    """The step is done, or (with a reason) was broken off. `lag_p99_s`: how late the client itself was, 99th percentile."""

    clock_s: float
    stopped: str | None = None
    lag_p99_s: float | None = None


class NotRun(msgspec.Struct, frozen=True, tag="not_run", tag_field="kind"):
    """A step that was not begun, and why."""

    step: Step
    reason: str


class Ended(msgspec.Struct, frozen=True, tag="end", tag_field="kind", omit_defaults=True):
    """The run is over. `reason`: why before its time."""

    at: str
    reason: str | None = None
    interrupted: bool = False


Event = Begun | StepBegun | Sent | Looked | StepEnded | NotRun | Ended
"""A line of a results file."""


# -------------------------------------------------------------------------------------------------------------- report


class Usage(msgspec.Struct, frozen=True):
    """Peaks of the server's own gauges while a step ran, as far as the looks saw them."""

    looks: int = 0
    running: int | None = None
    queued: int | None = None
    kv: float | None = None
    state: float | None = None
    swa: float | None = None


class Counted(msgspec.Struct, frozen=True):
    """The server's counters over a step beside ours. `others`: requests that were not ours."""

    requests: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    preemptions: int | None = None
    others: int | None = None
    ttft_mean_s: float | None = None


class MemoryChange(msgspec.Struct, frozen=True):
    """Memory before a step, its peak in it, and after it, bytes; `least_free` of the device with the least."""

    before: int | None = None
    peak: int | None = None
    after: int | None = None
    least_free: int | None = None
    host_before: int | None = None
    host_peak: int | None = None
    host_after: int | None = None
    accounts_before: dict[str, int] = {}
    accounts_after: dict[str, int] = {}


class Rate(msgspec.Struct, frozen=True):
    """Tokens per second of one request while it decodes: the median, and what 99 of 100 requests reach at least."""

    p50: Quantile
    p99: Quantile


class StepResult(msgspec.Struct, frozen=True):
    """One step. Rates are over the window from the first request sent to the last one ended, ramp and tail included."""

    step: Step
    verdict: Verdict
    reason: str | None
    soak: bool
    requests: int
    failed: int
    errors: dict[str, int]
    error_text: str | None
    window_s: float | None
    requests_per_s: float | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    decode_tokens_per_s: Rate | None
    longest_gap_s: float | None
    prompt_tokens: tuple[int, int] | None
    """The least and the most that the server counted of one prompt; both are the step's context where it is exact."""
    exact: bool | None
    cached_share: float | None
    doubts: tuple[str, ...]
    usage: Usage
    counted: Counted
    memory: MemoryChange
    lag_p99_s: float | None
    meets_slo: Literal["yes", "no", "not_known"] | None
    cost_per_million_output: float | None
    cost_per_million_total: float | None


class GrowthTold(msgspec.Struct, frozen=True):
    """Memory in use by token and request, measured by the server's gauges, against the model's arithmetic.

    `unit`: bytes of one GPU where the pool's size is known, else shares of the pool or its tokens.
    """

    name: str
    unit: Literal["bytes", "tokens", "share"]
    measured: Growth
    model_per_token: float | None = None
    model_per_request: float | None = None


class Trended(msgspec.Struct, frozen=True):
    """How a figure moved over the soak: its verdict, bytes per hour with the interval, and the rise."""

    name: str
    verdict: str
    points: int
    seconds: float
    rise: float
    per_hour: float
    low_per_hour: float
    high_per_hour: float


class Answers(msgspec.Struct, frozen=True):
    """What the whole sweep says; a step holds where it is stable."""

    longest_context: Step | None = None
    most_concurrency: Step | None = None
    best_at_slo: Step | None = None
    requests_per_s_at_slo: float | None = None
    concurrency_per_gpu: float | None = None
    cheapest: Step | None = None
    cost_per_million_output: float | None = None


class Sweep(msgspec.Struct, frozen=True):
    """The figures of one run. `complete` False: it was ended before its time, and `ended` says why."""

    at: str
    settings: Settings
    target: Target
    steps: tuple[StepResult, ...]
    answers: Answers
    growth: tuple[GrowthTold, ...] = ()
    soak: tuple[Trended, ...] = ()
    tokens_spent: int = 0
    complete: bool = True
    interrupted: bool = False
    ended: str | None = None
    notes: tuple[str, ...] = ()


class SweepReport(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """What `memledger sweep --format json` prints."""

    version: str
    sweep: Sweep
    sources: tuple[Source, ...] = ()
    inputs: tuple[Input, ...] = ()
    schema_: str = "memledger/1"
