"""From a sweep's events to its figures and answers; pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from memledger.sweep.figures import Distribution, Quantile, distribution, growth
from memledger.sweep.steps import Slo, Step
from memledger.sweep.values import (
    Answers,
    Begun,
    Counted,
    Ended,
    Event,
    GrowthTold,
    Look,
    Looked,
    MemoryChange,
    NotRun,
    Outcome,
    Rate,
    Sent,
    Settings,
    StepBegun,
    StepEnded,
    StepResult,
    Sweep,
    Target,
    Totals,
    Trended,
    Usage,
    Verdict,
)

QUEUED_SHARE: Final = 0.5
"""Of the looks in a step: a request waits a moment before the scheduler takes it in, which is no queue."""
LEAST_LOOKS: Final = 3
NOISE_BYTES: Final = 32 * 2**20
"""A soak's rise up to this is none: allocators and drivers move by some pages."""
MOST_BLUR: Final = 0.25
"""How late, as a share of the time that a request's tokens take, the client may be for that time to be told."""
_WHOLE_SECONDS: Final = 3600.0


class Run(msgspec.Struct):
    """The events of one step."""

    step: Step
    began_s: float
    soak: bool = False
    sent: list[Outcome] = []
    warm_ups: list[Outcome] = []
    looks: list[Look] = []
    ended: StepEnded | None = None
    not_run: str | None = None


def sweep(events: Sequence[Event], notes: Sequence[str] = ()) -> Sweep:
    """The figures of a run from its events, whole or cut short.

    Raises:
        ValueError: the first event is not the run's begin.
    """
    if not events or not isinstance(events[0], Begun):
        raise ValueError("events without their begin")
    begun = events[0]
    runs, warm_up = runs_of(events)
    end = next((e for e in reversed(events) if isinstance(e, Ended)), None)
    results = tuple(result(run, begun.settings, begun.target) for run in runs)
    spent = sum(_tokens(o) for run in runs for o in (*run.sent, *run.warm_ups)) + sum(map(_tokens, warm_up))
    return Sweep(
        at=begun.at,
        settings=begun.settings,
        target=begun.target,
        steps=results,
        answers=answers(results, begun.settings, begun.target),
        growth=growths(results, begun.settings, begun.target),
        soak=tuple(trend for run in runs if run.soak for trend in trends(run.looks)),
        tokens_spent=spent,
        complete=end is not None and end.reason is None and not end.interrupted,
        interrupted=end is not None and end.interrupted,
        ended=end.reason if end is not None else "the results have no end: the run was ended from outside, or goes on",
        notes=tuple(notes),
    )


def runs_of(events: Iterable[Event]) -> tuple[list[Run], list[Outcome]]:
    """The steps with all that belongs to each, and the requests before the first one."""
    runs: list[Run] = []
    before: list[Outcome] = []
    for event in events:
        if isinstance(event, StepBegun):
            runs.append(Run(event.step, event.clock_s, event.soak))
        elif isinstance(event, NotRun):
            runs.append(Run(event.step, 0.0, not_run=event.reason))
        elif isinstance(event, Sent):
            if not runs:
                before.append(event.outcome)
            elif event.warm_up:
                runs[-1].warm_ups.append(event.outcome)
            else:
                runs[-1].sent.append(event.outcome)
        elif isinstance(event, Looked) and runs:
            runs[-1].looks.append(event.look)
        elif isinstance(event, StepEnded) and runs:
            runs[-1].ended = event
    return runs, before


def _tokens(outcome: Outcome) -> int:
    return (outcome.prompt_tokens or 0) + (outcome.output_tokens or 0)


# -------------------------------------------------------------------------------------------------------------- a step


def result(run: Run, settings: Settings, target: Target) -> StepResult:
    """The figures of one step."""
    good = [o for o in run.sent if o.error is None]
    bad = [o for o in run.sent if o.error is not None and o.error != "cancelled"]
    errors = Counter(_error_name(o) for o in bad)
    window = _window(run.sent)
    ttft = [o.first_s for o in good if o.first_s is not None]
    tpot = [value for o in good if (value := o.tpot_s) is not None]
    prompts = [o.prompt_tokens for o in good if o.prompt_tokens is not None]
    usage, counted = usage_of(run.looks), counted_of(run)
    verdict, reason = _verdict(run, bad, usage, counted)
    rate = _rate(len(good), window)
    output = _rate(sum(o.output_tokens or 0 for o in good), window) if _all_known(good) else None
    whole = _rate(sum(map(_tokens, good)), window) if _all_known(good) else None
    lag = run.ended.lag_p99_s if run.ended is not None else None
    blurred = _blurred(good, lag)
    ttft_told, tpot_told = distribution(ttft), None if blurred else distribution(tpot)
    gpus = settings.gpus or target.gpus
    return StepResult(
        step=run.step,
        verdict=verdict,
        reason=reason,
        soak=run.soak,
        requests=len(good),
        failed=len(bad),
        errors=dict(errors),
        error_text=next((o.reason for o in bad if o.reason), None),
        window_s=window,
        requests_per_s=rate,
        output_tokens_per_s=output,
        total_tokens_per_s=whole,
        ttft_s=ttft_told,
        tpot_s=tpot_told,
        decode_tokens_per_s=_decode(tpot_told),
        longest_gap_s=max((o.longest_gap_s for o in good if o.longest_gap_s is not None), default=None),
        prompt_tokens=(min(prompts), max(prompts)) if prompts else None,
        exact=all(p == run.step.context for p in prompts) if prompts and len(prompts) == len(good) else None,
        cached_share=_cached(good),
        doubts=tuple(dict.fromkeys([*(o.doubt for o in good if o.doubt), *((blurred,) if blurred else ())])),
        usage=usage,
        counted=counted,
        memory=memory_of(run.looks),
        lag_p99_s=lag,
        meets_slo=_meets(settings.slo, ttft_told, tpot_told, whole=len(tpot) == len(good)),
        cost_per_million_output=cost(settings.gpu_hour, gpus, output),
        cost_per_million_total=cost(settings.gpu_hour, gpus, whole),
    )


def _blurred(good: Sequence[Outcome], lag_s: float | None) -> str | None:
    """Why the time per token is not told; None: it is.

    Being late at the first token and not at the last makes a request's decoding look shorter by as much, up to no time at all: what
    came one by one is then found all at once. The time to the first token only gets longer.
    """
    spans = sorted(
        o.last_s - o.first_s for o in good if o.tpot_s is not None and o.last_s is not None and o.first_s is not None
    )
    if not spans or lag_s is None or lag_s <= spans[len(spans) // 2] * MOST_BLUR:
        return None
    return (
        f"the time per token is not told, since memledger itself was up to {lag_s * 1000:,.0f} ms late, and from a request's first token to its last "
        f"{spans[len(spans) // 2] * 1000:,.0f} ms were seen"
    )


def _decode(tpot: Distribution | None) -> Rate | None:
    """The rate is the inverse of the time per token: the 99th percentile of the time is the rate that 99 of 100 reach."""
    return None if tpot is None else Rate(_inverse(tpot.p50), _inverse(tpot.p99)) if tpot.p50.value > 0 else None


def _inverse(time: Quantile) -> Quantile:
    low, high = (1 / end if end else None for end in (time.high, time.low))
    return Quantile(1 / time.value, low, high)


def _error_name(outcome: Outcome) -> str:
    """The kind of an error; of an HTTP error its status."""
    if outcome.error in {"http_4xx", "http_5xx"} and outcome.status is not None:
        return f"http_{outcome.status}"
    return outcome.error or "other"


def _window(sent: Sequence[Outcome]) -> float | None:
    """Seconds from the first request sent to the last one ended."""
    done = [o for o in sent if o.error != "cancelled"]
    return max(o.sent_s + o.ended_s for o in done) - min(o.sent_s for o in done) if done else None


def _rate(number: float, window: float | None) -> float | None:
    return number / window if window and number else None


def _all_known(good: Sequence[Outcome]) -> bool:
    return all(o.output_tokens is not None and o.prompt_tokens is not None for o in good)


def _cached(good: Sequence[Outcome]) -> float | None:
    """Share of the prompts' tokens that the prefix cache answered; None where the server does not say it of every request."""
    told = [(o.cached_tokens, o.prompt_tokens) for o in good]
    if not told or any(cached is None or not prompt for cached, prompt in told):
        return None
    return sum(cached or 0 for cached, _ in told) / sum(prompt or 0 for _, prompt in told)


def _verdict(run: Run, bad: Sequence[Outcome], usage: Usage, counted: Counted) -> tuple[Verdict, str | None]:
    if run.not_run is not None:
        return "not_run", run.not_run
    if bad:
        return "failed", f"{len(bad)} of {len(run.sent)} requests failed"
    if run.ended is None:
        return "stopped", "the step has no end"
    if run.ended.stopped is not None:
        return "stopped", run.ended.stopped
    if not run.sent:
        return "stopped", "no request was sent"
    if counted.preemptions:
        return "preempted", f"the server took {counted.preemptions} running requests back for want of room"
    waiting = [q for look in run.looks if look.phase == "during" and (q := _queued(look)) is not None]
    if len(waiting) >= LEAST_LOOKS and sum(q > 0 for q in waiting) > QUEUED_SHARE * len(waiting):
        return "queued", f"at most {usage.running} ran at once, {usage.queued} waited"
    return "stable", None


def _queued(look: Look) -> int | None:
    return look.metrics.queued_requests if look.metrics is not None else None


def usage_of(looks: Sequence[Look]) -> Usage:
    """The peaks of the server's gauges."""
    seen = [look.metrics for look in looks if look.phase == "during" and look.metrics is not None]

    def peak(name: str) -> Any:
        return max((v for m in seen if (v := getattr(m, name)) is not None), default=None)

    return Usage(
        len(seen),
        peak("running_requests"),
        peak("queued_requests"),
        peak("kv_usage"),
        peak("state_usage"),
        peak("swa_usage"),
    )


def counted_of(run: Run) -> Counted:
    """What the server counted over the step, and how much of that was not ours."""
    first = next((look.totals for look in run.looks if look.phase == "before"), None)
    last = next((look.totals for look in reversed(run.looks) if look.phase == "after"), None)
    if first is None or last is None:
        return Counted()
    change: Totals = last.since(first)
    ours = sum(o.error in {None, "cancelled"} for o in (*run.sent, *run.warm_ups))
    others = max(0, change.requests - ours) if change.requests is not None else None
    mean = None
    if change.first_tokens and change.first_token_sum_s is not None:
        mean = change.first_token_sum_s / change.first_tokens
    return Counted(change.requests, change.prompt_tokens, change.output_tokens, change.preemptions, others, mean)


def memory_of(looks: Sequence[Look]) -> MemoryChange:
    """Memory before, in and after the step."""
    seen = [(look.phase, look.memory) for look in looks if look.memory is not None]
    before = next((m for phase, m in seen if phase == "before"), None)
    after = next((m for phase, m in reversed(seen) if phase == "after"), None)

    def peak(name: str) -> int | None:
        return max((v for _, m in seen if (v := getattr(m, name)) is not None), default=None)

    return MemoryChange(
        before.server_bytes if before else None,
        peak("server_bytes"),
        after.server_bytes if after else None,
        min((m.free_bytes for _, m in seen if m.free_bytes is not None), default=None),
        before.host_bytes if before else None,
        peak("host_bytes"),
        after.host_bytes if after else None,
        before.accounts if before else {},
        after.accounts if after else {},
    )


def _meets(slo: Slo | None, ttft: Any, tpot: Any, *, whole: bool) -> Literal["yes", "no", "not_known"] | None:
    """Whether the 99th percentiles stand within the limits; not known where a time is not known of every request."""
    if slo is None:
        return None
    told = [(slo.ttft_s, ttft), (slo.tpot_s, tpot)]
    if any(limit is not None and found is not None and found.p99.value > limit for limit, found in told):
        return "no"
    if any(limit is not None and found is None for limit, found in told) or (slo.tpot_s is not None and not whole):
        return "not_known"
    return "yes"


def cost(gpu_hour: float | None, gpus: int | None, tokens_per_s: float | None) -> float | None:
    """Money per million tokens: GPUs x price of an hour over the tokens of an hour."""
    if gpu_hour is None or not gpus or not tokens_per_s:
        return None
    return gpu_hour * gpus / (tokens_per_s * _WHOLE_SECONDS) * 1e6


# ------------------------------------------------------------------------------------------------------------- the whole


def answers(results: Sequence[StepResult], settings: Settings, target: Target) -> Answers:
    """The largest that holds, and the best under the limits and by cost."""
    held = [r for r in results if r.verdict == "stable" and not r.soak]
    if not held:
        return Answers()
    longest = max(held, key=lambda r: (r.step.context, r.step.concurrency)).step
    most = max(held, key=lambda r: (r.step.concurrency, r.step.context)).step
    good = [r for r in held if r.meets_slo == "yes" and r.requests_per_s is not None]
    best = max(good, key=lambda r: r.requests_per_s or 0.0, default=None)
    priced = [r for r in held if r.cost_per_million_output is not None]
    cheapest = min(priced, key=lambda r: r.cost_per_million_output or math.inf, default=None)
    gpus = settings.gpus or target.gpus
    return Answers(
        longest,
        most,
        best.step if best is not None else None,
        best.requests_per_s if best is not None else None,
        most.concurrency / gpus if gpus else None,
        cheapest.step if cheapest is not None else None,
        cheapest.cost_per_million_output if cheapest is not None else None,
    )


def growths(results: Sequence[StepResult], settings: Settings, target: Target) -> tuple[GrowthTold, ...]:
    """Peak use of the pools by token and request, and of the processes' memory.

    A step counts where its requests ran all at once (the gauge saw as many), none waited, and nothing was cached: then use is
    that of `concurrency` requests at their full length, or less where no look fell on the fullest moment.
    """
    whole = [r for r in results if r.verdict == "stable" and r.usage.running == r.step.concurrency and not r.soak]
    alone = [r for r in whole if not r.cached_share]
    found = []
    if pool := _told("KV pool in use", alone, settings.output_tokens, target):
        found.append(pool)
    for name, values in (
        ("GPU memory of the server's processes", [(r.memory.peak, r.memory.before, r) for r in alone]),
        ("host memory of the server's processes", [(r.memory.host_peak, r.memory.host_before, r) for r in alone]),
    ):
        rises = [
            (r.step.concurrency, r.step.context + settings.output_tokens, float(peak - before))
            for peak, before, r in values
            if peak is not None and before is not None
        ]
        if any(rise for _, _, rise in rises) and (told := growth(rises)) is not None:
            found.append(GrowthTold(name, "bytes", told))
    return tuple(found)


def _told(name: str, results: Sequence[StepResult], output_tokens: int, target: Target) -> GrowthTold | None:
    size, unit = (target.pool_bytes, "bytes") if target.pool_bytes else (1, "share")
    points = [(r.step.concurrency, r.step.context + output_tokens, r.usage.kv * size) for r in results if r.usage.kv]
    told = growth(points)
    if told is None:
        return None
    if unit == "share":
        return GrowthTold(name, "share", told)
    # SGLang keeps recurrent state in a pool of its own; vLLM takes it from the KV pool's blocks.
    state = target.state_bytes_per_request if target.framework == "vllm" else None
    return GrowthTold(name, "bytes", told, target.bytes_per_token, state)


def trends(looks: Sequence[Look]) -> tuple[Trended, ...]:
    """How memory and use moved over a soak."""
    from memledger.watch.growth import judge

    found = []
    for name, noise, points in (
        ("GPU memory of the server's processes", NOISE_BYTES, _series(looks, "server_bytes")),
        ("host memory of the server's processes", NOISE_BYTES, _series(looks, "host_bytes")),
        ("use of the KV pool", 0.02, _gauge(looks, "kv_usage")),
    ):
        if points:
            trend = judge(points, noise)
            hour = _WHOLE_SECONDS
            found.append(
                Trended(
                    name,
                    trend.verdict,
                    trend.points,
                    trend.seconds,
                    trend.rise,
                    trend.slope * hour,
                    trend.low * hour,
                    trend.high * hour,
                )
            )
    return tuple(found)


def _series(looks: Sequence[Look], name: str) -> list[tuple[float, float]]:
    seen = [(look.clock_s, getattr(look.memory, name)) for look in looks if look.phase == "during" and look.memory]
    return [(clock, float(value)) for clock, value in seen if value is not None]


def _gauge(looks: Sequence[Look], name: str) -> list[tuple[float, float]]:
    seen = [(look.clock_s, getattr(look.metrics, name)) for look in looks if look.phase == "during" and look.metrics]
    return [(clock, float(value)) for clock, value in seen if value is not None]
