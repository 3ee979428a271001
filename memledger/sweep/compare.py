"""Two sweeps side by side: the steps that both have, and which of their figures differ by more than chance; pure.

Medians and 99th percentiles count as different where their 95 % intervals (order statistics) do not touch. That is a cautious test:
figures whose intervals touch may differ as well, and are called `not_shown`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import msgspec

from memledger.ledger import Input, Source
from memledger.sweep.figures import Quantile
from memledger.sweep.steps import Step
from memledger.sweep.values import Answers, StepResult, Sweep, Verdict

Differs = Literal["yes", "not_shown", "not_known"]


class Change(msgspec.Struct, frozen=True):
    """One figure of a step in both. `change`: (b - a) / a. `differs` None: of a figure that has no interval."""

    name: str
    unit: str
    a: float | None
    b: float | None
    change: float | None
    differs: Differs | None = None


class StepPair(msgspec.Struct, frozen=True):
    """One step that both sweeps have."""

    step: Step
    verdict_a: Verdict
    verdict_b: Verdict
    changes: tuple[Change, ...]


class SweepComparison(msgspec.Struct, frozen=True):
    """What two sweeps have in common and where they differ. `settings`: names of what was asked for that is not the same."""

    a: str
    b: str
    settings: dict[str, tuple[str, str]]
    steps: tuple[StepPair, ...]
    only_a: tuple[Step, ...]
    only_b: tuple[Step, ...]
    answers_a: Answers
    answers_b: Answers


class SweepCompareReport(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """What `memledger compare --format json` prints of two sweeps."""

    version: str
    sweep_comparison: SweepComparison
    inputs: tuple[Input, ...] = ()
    sources: tuple[Source, ...] = ()
    schema_: str = "memledger/1"


_COMPARED: Final = ("output_tokens", "shared_prefix", "duration_s", "requests", "gpus")
"""Settings that change what a step measures."""
_QUANTILES: Final[tuple[tuple[str, str, Callable[[StepResult], Quantile | None]], ...]] = (
    ("ttft_p50", "s", lambda s: s.ttft_s.p50 if s.ttft_s else None),
    ("ttft_p99", "s", lambda s: s.ttft_s.p99 if s.ttft_s else None),
    ("tpot_p50", "s", lambda s: s.tpot_s.p50 if s.tpot_s else None),
    ("tpot_p99", "s", lambda s: s.tpot_s.p99 if s.tpot_s else None),
)
_PLAIN: Final[tuple[tuple[str, str, Callable[[StepResult], float | None]], ...]] = (
    ("output_tokens_per_s", "tokens/s", lambda s: s.output_tokens_per_s),
    ("requests_per_s", "requests/s", lambda s: s.requests_per_s),
    ("peak_kv_usage", "share", lambda s: s.usage.kv),
    ("gpu_bytes_peak", "bytes", lambda s: s.memory.peak),
    ("host_bytes_peak", "bytes", lambda s: s.memory.host_peak),
    ("cost_per_million_output", "money", lambda s: s.cost_per_million_output),
)


def compare(a: Sweep, b: Sweep, names: tuple[str, str]) -> SweepComparison:
    """The comparison of two sweeps, whose soaks are left out."""
    first, second = ({one.step: one for one in sweep.steps if not one.soak} for sweep in (a, b))
    both = sorted(first.keys() & second.keys())
    return SweepComparison(
        *names,
        _settings(a, b),
        tuple(_pair(first[step], second[step]) for step in both),
        tuple(sorted(first.keys() - second.keys())),
        tuple(sorted(second.keys() - first.keys())),
        a.answers,
        b.answers,
    )


def _settings(a: Sweep, b: Sweep) -> dict[str, tuple[str, str]]:
    told = {name: (getattr(a.settings, name), getattr(b.settings, name)) for name in _COMPARED}
    for name in ("model", "framework", "framework_version", "gpu_name", "tokens_by"):
        told[name] = (getattr(a.target, name), getattr(b.target, name))
    return {name: (_text(x), _text(y)) for name, (x, y) in told.items() if x != y}


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _pair(a: StepResult, b: StepResult) -> StepPair:
    changes = [_of_quantiles(name, unit, of(a), of(b)) for name, unit, of in _QUANTILES]
    changes += [_change(name, unit, of(a), of(b)) for name, unit, of in _PLAIN]
    return StepPair(a.step, a.verdict, b.verdict, tuple(c for c in changes if c.a is not None or c.b is not None))


def _of_quantiles(name: str, unit: str, a: Quantile | None, b: Quantile | None) -> Change:
    found = _change(name, unit, a.value if a else None, b.value if b else None)
    return msgspec.structs.replace(found, differs=_differs(a, b))


def _change(name: str, unit: str, a: float | None, b: float | None) -> Change:
    return Change(name, unit, a, b, (b - a) / a if a and b is not None else None)


def _differs(a: Quantile | None, b: Quantile | None) -> Differs:
    """Whether the intervals lie apart; an end that is not known may be anywhere."""
    if a is None or b is None:
        return "not_known"
    lower, upper = (a, b) if a.value <= b.value else (b, a)
    if lower.high is None or upper.low is None:
        return "not_known"
    return "yes" if lower.high < upper.low else "not_shown"
