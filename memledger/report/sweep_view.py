"""A sweep in words and table cells, for every form of its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from memledger import words as n
from memledger.sanitize import clean
from memledger.sweep.figures import Quantile
from memledger.sweep.judge import MOST_BLUR
from memledger.sweep.values import GrowthTold, StepResult, Sweep, Trended

UNKNOWN: Final = "-"
LAG_LIMIT_S: Final = 0.005
"""Above this the client's own delay is said: it waits in steps of 20 ms, and a millisecond of that is the timer's."""

STEP_HEADS: Final = ("context", "at once", "done", "TTFT s", "p99", "tok/s", "p99", "out/s", "req/s", "KV", "verdict")
INTERVAL_HEADS: Final = ("step", "time", "median", "99th percentile")
INTERVAL_NOTE: Final = (
    "In brackets the 95 % interval between two of the measured values (order statistics; it assumes nothing of how they are "
    "distributed). An open end: too few requests for it (the 99th percentile needs 368 for an upper one)."
)
STEP_NOTE: Final = (
    "TTFT: seconds to the first token, median and 99th percentile; tok/s: tokens a second of one request while it decodes, "
    "median and what 99 of 100 reach; out/s and req/s: all requests together, from the first sent to the last ended; KV: peak; *: the soak."
)


def header(sweep: Sweep) -> str:
    """The first line: what was measured."""
    target, settings = sweep.target, sweep.settings
    engine = {"vllm": "vLLM", "sglang": "SGLang", None: "a server"}[target.framework]
    parts = [f"{engine} {target.framework_version or ''}".rstrip(), target.model or "", settings.url, sweep.at]
    return " · ".join(clean(part, 120) for part in parts if part)


def conclusions(sweep: Sweep) -> list[str]:
    """What the sweep says, in sentences."""
    found = list(_held(sweep))
    found += _under_limits(sweep)
    answers = sweep.answers
    if answers.concurrency_per_gpu is not None:
        found.append(f"{answers.concurrency_per_gpu:g} requests at once per GPU at the most that held.")
    if answers.cheapest is not None and answers.cost_per_million_output is not None:
        found.append(
            f"A million output tokens cost {answers.cost_per_million_output:,.2f} at the least (at {answers.cheapest.name}, "
            f"{sweep.settings.gpu_hour:g} an hour for each GPU)."
        )
    elif sweep.settings.gpu_hour is not None and not (sweep.settings.gpus or sweep.target.gpus):
        found.append("No cost: how many GPUs the server has is not known (--gpus N).")
    if not sweep.complete and sweep.ended:
        found.append(f"Ended early: {clean(sweep.ended)}.")
    return found


def _held(sweep: Sweep) -> Iterator[str]:
    answers = sweep.answers
    if answers.longest_context is None or answers.most_concurrency is None:
        yield "No step held."
    elif answers.longest_context == answers.most_concurrency:
        yield f"The largest step that held: {_words(answers.longest_context.context, answers.longest_context.concurrency)}."
    else:
        longest, most = answers.longest_context, answers.most_concurrency
        yield f"The longest context that held: {_words(longest.context, longest.concurrency)}."
        yield f"The most requests at once that held: {_words(most.context, most.concurrency)}."
    for one in sweep.steps:
        if one.verdict not in {"stable", "not_run"} and one.reason:
            text = f"{one.step.name} {one.verdict}: {clean(one.reason)}"
            yield text + (f" ({clean(one.error_text)})." if one.error_text else ".")


def _words(context: int, concurrency: int) -> str:
    return f"{concurrency:,} at once with {context:,} tokens each"


def _under_limits(sweep: Sweep) -> list[str]:
    slo = sweep.settings.slo
    if slo is None:
        return []
    limits = " and ".join(
        f"{name} {limit:g} s"
        for name, limit in (("TTFT", slo.ttft_s), ("time per token", slo.tpot_s))
        if limit is not None
    )
    best, rate = sweep.answers.best_at_slo, sweep.answers.requests_per_s_at_slo
    if best is None or rate is None:
        if unknown := [one.step.name for one in sweep.steps if one.meets_slo == "not_known"]:
            if len(unknown) == sum(one.requests > 0 for one in sweep.steps):
                return [f"Whether a step keeps a 99th percentile of {limits} is not known."]
            return [
                f"Whether a 99th percentile of {limits} is kept is not known of {', '.join(unknown)}; no other step kept it."
            ]
        return [f"No step kept a 99th percentile of {limits}."]
    chosen = next(one for one in sweep.steps if one.step == best)
    unsure = [
        found
        for limit, found in ((slo.ttft_s, chosen.ttft_s), (slo.tpot_s, chosen.tpot_s))
        if limit is not None and found is not None and (found.p99.high is None or found.p99.high > limit)
    ]
    text = f"{rate:.3g} requests a second within a 99th percentile of {limits}, at {best.name}"
    return [text + (": measured, not certain (the interval reaches beyond)." if unsure else ".")]


def step_row(one: StepResult) -> list[str]:
    """One step's figures, in the order of `STEP_HEADS`."""
    ttft, rate = one.ttft_s, one.decode_tokens_per_s
    bound = "<" if _is_a_bound(one) else ""
    return [
        f"{one.step.context:,}",
        f"{one.step.concurrency:,}",
        f"{one.requests:,}",
        f"{bound}{_s(ttft.p50.value)}" if ttft else UNKNOWN,
        f"{bound}{_s(ttft.p99.value)}" if ttft else UNKNOWN,
        _rate(rate.p50.value if rate else None),
        _rate(rate.p99.value if rate else None),
        _rate(one.output_tokens_per_s),
        _small(one.requests_per_s),
        UNKNOWN if one.usage.kv is None else n.percent(one.usage.kv),
        one.verdict.replace("_", " ") + (" *" if one.soak else ""),
    ]


def _is_a_bound(one: StepResult) -> bool:
    """Whether the client was late by so much that its times to the first token only say that the server's were no longer."""
    return one.ttft_s is not None and (one.lag_p99_s or 0.0) > one.ttft_s.p50.value * MOST_BLUR


def _bounds(sweep: Sweep) -> Iterator[str]:
    for one in sweep.steps:
        if _is_a_bound(one):
            mean = one.counted.ttft_mean_s
            own = f"; the server's own mean is {_s(mean)} s" if mean is not None else ""
            yield f"{one.step.name}: TTFT is an upper bound, as memledger itself was up to {(one.lag_p99_s or 0) * 1000:,.0f} ms late{own}"


def interval_rows(one: StepResult) -> list[list[str]]:
    """One step's quantiles with their intervals, in the order of `INTERVAL_HEADS`."""
    told = (("first token, s", one.ttft_s, 1), ("per token, ms", one.tpot_s, 1000))
    return [
        [one.step.name, name, _interval(found.p50, scale), _interval(found.p99, scale)]
        for name, found, scale in told
        if found is not None
    ]


def _interval(found: Quantile, scale: float) -> str:
    low, high = ("" if end is None else _s(end * scale) for end in (found.low, found.high))
    return f"{_s(found.value * scale)} [{low}..{high}]"


def _s(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _small(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"


MEMORY_HEADS: Final = ("step", "GPU before", "peak", "after", "least free", "host before", "peak")


def memory_rows(sweep: Sweep) -> list[list[str]]:
    """Memory before, at the peak of and after each step, GiB; none where no step knows any."""
    rows = []
    for one in sweep.steps:
        m = one.memory
        sizes = (m.before, m.peak, m.after, m.least_free, m.host_before, m.host_peak)
        if any(size is not None for size in sizes):
            rows.append([one.step.name, *(UNKNOWN if size is None else n.gib(size) for size in sizes)])
    return rows


def account_changes(sweep: Sweep) -> list[tuple[str, int]]:
    """How each account of the ledger moved from before the first step to after the last, bytes; those that moved."""
    told = [one.memory for one in sweep.steps if one.memory.accounts_before and one.memory.accounts_after]
    if not told:
        return []
    first, last = told[0].accounts_before, told[-1].accounts_after
    names = list(dict.fromkeys([*first, *last]))
    return [(name, last.get(name, 0) - first.get(name, 0)) for name in names if last.get(name, 0) != first.get(name, 0)]


def growth_words(told: GrowthTold) -> str:
    """Growth by token and request against the model's arithmetic, in a sentence."""
    if told.unit == "share":
        each = f"{told.measured.per_token * 1e6:.3g} millionths of the pool a token"
        more = f"{told.measured.per_request * 1e6:.3g} a request"
        return f"{told.name}: {each}, {more}; the pool's size is not known"
    text = f"{told.name}: {_bytes(told.measured.per_token)} a token"
    if told.model_per_token is not None:
        text += f" (the model's arithmetic: {_bytes(told.model_per_token)})"
    text += f", {_bytes(told.measured.per_request)} a request"
    if told.model_per_request is not None:
        text += f" (recurrent state by the model: {_bytes(told.model_per_request)})"
    return text + f"; {n.plural(told.measured.steps, 'step')}, at most {_bytes(told.measured.misfit)} beside the line"


def _bytes(size: float) -> str:
    return ("-" if size < 0 else "") + n.amount(round(abs(size)))


_TRENDS: Final = {
    "not_enough": "too short to tell",
    "flat": "does not grow",
    "step": "rose once and stayed",
    "settled": "rose, and has settled",
    "uneven": "rose unevenly: no steady growth is shown",
    "growing": "grows steadily",
    "shrinking": "fell",
}


def trend_words(trend: Trended) -> str:
    """A soak's verdict on one figure."""
    text = f"{trend.name} {_TRENDS.get(trend.verdict, clean(trend.verdict, 40))}"
    share = trend.name.startswith("use of")
    if trend.verdict == "growing":
        ends = [
            n.percent(v, 2) if share else _bytes(v) for v in (trend.per_hour, trend.low_per_hour, trend.high_per_hour)
        ]
        text += f": {ends[0]} an hour (between {ends[1]} and {ends[2]})"
    return text + f", over {n.duration(trend.seconds)}"


def remarks(sweep: Sweep) -> list[str]:
    """What a reader must know of the figures."""
    found = [clean(note) for note in (*sweep.target.notes, *sweep.notes)]
    inexact = [one for one in sweep.steps if one.exact is False]
    found += [
        f"{one.step.name}: prompts had {one.prompt_tokens[0]:,} to {one.prompt_tokens[1]:,} tokens by the server's count"
        for one in inexact
        if one.prompt_tokens
    ]
    found += [f"{one.step.name}: {clean(doubt)}" for one in sweep.steps for doubt in one.doubts]
    found += _bounds(sweep)
    others = [one for one in sweep.steps if one.counted.others]
    found += [
        f"{one.step.name}: {n.plural(one.counted.others or 0, 'request')} of others came between" for one in others
    ]
    late = max((one.lag_p99_s for one in sweep.steps if one.lag_p99_s is not None), default=0.0)
    if late > LAG_LIMIT_S:
        found.append(
            f"memledger itself came up to {late * 1000:.1f} ms late (99th percentile): times contain as much of its own"
        )
    if sweep.settings.shared_prefix:
        share = n.percent(sweep.settings.shared_prefix)
        found.append(f"{share} of each prompt is shared: the prefix cache is part of these figures")
    else:
        cached = [one for one in sweep.steps if one.cached_share]
        found += [f"{one.step.name}: {n.percent(one.cached_share or 0, 1)} of the prompts' tokens came from the prefix cache"
                  for one in cached]  # fmt: skip
    return list(dict.fromkeys(found))


def columns_with_figures(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns that say something in at least one row."""
    return [i for i in range(len(heads)) if any(row[i] != UNKNOWN for row in rows)]
