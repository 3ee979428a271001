"""What `memledger compare` answers: frozen values, the contract of docs/json.md ("A comparison").

Sizes are whole bytes of one GPU, tokens are counts of one data-parallel engine, unknown is None.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from memledger.ledger import Evidence, Input, Source

StepBasis = Literal["logged", "live", "derived", "modelled", "assumed", "unknown"]
Form = Literal["budget", "given", "partial", "none"]

STEPS: Final = (
    "device_total",
    "in_use_at_start",
    "free_before_loading",
    "budget_rule",
    "weights",
    "draft",
    "activations",
    "cuda_graphs",
    "recurrent_state",
    "window_pool",
    "other",
    "left_in_budget",
    "kv_bytes_per_token",
    "rounding_and_groups",
    "not_in_the_logs",
    "unexplained",
)
"""The steps of a waterfall in their fixed order (docs/compare.md says what each is). A step whose figure one side does
not print is left out and named in `Comparison.not_in_logs`; `unexplained` is always there, and last."""


class Pair(msgspec.Struct, frozen=True):
    """One figure of both sides."""

    a: int | None = None
    b: int | None = None


class Difference(msgspec.Struct, frozen=True):
    """One setting of both sides. `status`: `differs`, or `unknown` where a side does not tell it (its value is null)."""

    name: str
    a: Any = None
    b: Any = None
    status: Literal["differs", "unknown"] = "differs"
    note: str | None = None


class Alike(msgspec.Struct, frozen=True):
    """A setting that is the same on both sides."""

    name: str
    value: Any


class Step(msgspec.Struct, frozen=True):
    """One step of the waterfall, b - a: bytes of the KV pool, and KV tokens as printed (null where a side has none).

    `tolerance_bytes` and `tolerance_tokens` are what the printed digits leave open.
    """

    name: str
    bytes: int
    kv_tokens: int | None
    tolerance_bytes: int
    basis: StepBasis
    tolerance_tokens: int = 0
    note: str | None = None


class Missing(msgspec.Struct, frozen=True):
    """A part of the waterfall that `sides` ("A", "B") do not print."""

    name: str
    sides: tuple[str, ...]
    what: str


class Fits(msgspec.Struct, frozen=True):
    """Requests of `context` tokens that fit at once: by the KV pool, by state slots, by the configured limit; the least."""

    context: int
    requests: int | None
    by_kv: float | None
    by_state: int | None
    by_limit: int | None
    bound_by: str | None
    note: str | None = None


class Meaning(msgspec.Struct, frozen=True):
    """What one side's printed token figure counts, and its figures in units that compare.

    `effective_tokens` is the figure by the common measure (`measure` in words); the printed figure differs from it only
    by what it counts. `kv_bytes_per_token` is the pool divided by the effective tokens, `model_bytes_per_token` the
    model's arithmetic, None where the architecture is not known.
    """

    rule: Literal["slots", "blocks", "blocks_per_group", "effective", "not_printed"]
    text: str
    printed_tokens: int | None
    effective_tokens: int | None
    measure: str
    pool_bytes: int | None
    pool_tolerance_bytes: int | None
    kv_bytes_per_token: int | None
    kv_bytes_per_token_tolerance: int | None
    model_bytes_per_token: int | None
    state_bytes_per_request: int | None
    state_bytes_held: int | None
    fits: Fits
    notes: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()


class Backend(msgspec.Struct, frozen=True):
    """What serves one kind of layer in one phase: the normalised name, and the text as printed beside it."""

    layer: str
    phase: str
    a: str | None
    b: str | None
    a_raw: str | None = None
    b_raw: str | None = None


class Checkpoint(msgspec.Struct, frozen=True):
    """Recurrent state of one side: bytes of a running request and of a cached prefix, and slots of a request."""

    mode: str | None
    bytes_per_slot: int | None
    slots_per_request: int | None
    bytes_per_request: int | None
    bytes_per_checkpoint: int | None
    text: str


class Hybrid(msgspec.Struct, frozen=True):
    """What a reader of two hybrid engines asks for; `states` are A's and B's."""

    states: tuple[Checkpoint, Checkpoint]
    backends: tuple[Backend, ...]


class Subject(msgspec.Struct, frozen=True):
    """One side: which input, server and rank it is."""

    label: str
    input: int
    path: str
    start: int
    framework: str
    framework_version: str | None
    model: str | None
    rank: str
    ranks: int
    verdict: str


class Capacity(msgspec.Struct, frozen=True):
    """The figures of both sides in the same units."""

    kv_tokens: Pair = Pair()
    pool_bytes: Pair = Pair()
    kv_bytes_per_token: Pair = Pair()
    state_bytes_per_request: Pair = Pair()
    requests_that_fit: Pair = Pair()
    context: int | None = None


class Comparison(msgspec.Struct, frozen=True):
    """Two sides. `steps` sum to b - a of the pool's bytes and of the printed tokens; empty with a `reason` where a pool is unknown.

    `form` says how the pool came about on both sides: computed from a `budget`, `given` by a flag, or only in part told.
    `interaction_tokens` is the product of the change in bytes and the change in tokens per byte; half of it stands in
    the steps in bytes, half in `kv_bytes_per_token`.
    """

    a: Subject
    b: Subject
    cause: tuple[str, ...]
    capacity: Capacity
    differences: tuple[Difference, ...]
    same: tuple[Alike, ...]
    meanings: tuple[Meaning, Meaning]
    form: Form
    steps: tuple[Step, ...]
    reason: str | None = None
    not_in_logs: tuple[Missing, ...] = ()
    interaction_tokens: int | None = None
    hybrid: Hybrid | None = None
    notes: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True):
    """One row of a table of several inputs; `differs`: the known values are not all the same."""

    name: str
    values: tuple[Any, ...]
    differs: bool


class Sweep(msgspec.Struct, frozen=True):
    """Three or more inputs: one column each."""

    columns: tuple[Subject, ...]
    settings: tuple[Row, ...]
    figures: tuple[Row, ...]


class Regression(msgspec.Struct, frozen=True):
    """One `--max-regression`: the figure, what is allowed, what came (a fraction of the old figure, or in its unit)."""

    text: str
    figure: str
    old: int | None
    new: int | None
    change: float | None
    holds: bool
    note: str | None = None


class CompareReport(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """What `memledger compare --format json` prints; `comparison` is null where a side has no server in it."""

    version: str
    inputs: tuple[Input, ...]
    sources: tuple[Source, ...]
    comparison: Comparison | None = None
    sweep: Sweep | None = None
    regressions: tuple[Regression, ...] = ()
    schema_: str = "memledger/1"
