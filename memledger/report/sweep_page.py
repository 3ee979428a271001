"""`memledger sweep --html`: a sweep as one HTML file, with the words of the text report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memledger import words as n
from memledger.report import sweep_view as v
from memledger.report.html_charts import gib
from memledger.report.html_page import Cell, Chapter, Figure, Grid, Lead, Page, Part, Section, Stack, Use, Uses
from memledger.report.view import ACCOUNT_LABELS, top_account
from memledger.sweep.figures import Distribution
from memledger.sweep.values import StepResult, Sweep, SweepReport


def page(report: SweepReport) -> Page:
    """What the page shows."""
    sweep = report.sweep
    measured = [one for one in sweep.steps if one.requests]
    severity = "info" if sweep.complete else "warning"
    title = v.header(sweep)
    sections = (
        Section("What it says", leads=tuple(Lead(text, severity=severity) for text in v.conclusions(sweep))),
        Section("Steps", grids=(_grid("Steps", v.STEP_HEADS, [v.step_row(s) for s in sweep.steps], v.STEP_NOTE),)),
        Section("Times and rates", figures=_figures(measured)),
        Section("Intervals", grids=_intervals(measured)),
        Section(
            "Memory", figures=(*_pools(measured), *_accounts(measured)), grids=_memory(sweep), items=_growth(sweep)
        ),
        Section("To know", items=tuple(v.remarks(sweep))),
    )
    return Page("memledger sweep", title, (Chapter(title, sections),), report.inputs)


def _grid(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *remarks: str) -> Grid:
    return Grid(
        caption,
        tuple(Cell(head, number=i > 0) for i, head in enumerate(heads)),
        tuple(tuple(Cell(text, number=i > 0) for i, text in enumerate(row)) for row in rows),
        remarks,
    )


def _figures(steps: Sequence[StepResult]) -> tuple[Figure, ...]:
    found = (
        _spread("Time to the first token", "s", steps, lambda s: _pair(s.ttft_s, 1)),
        _spread(
            "Time per output token",
            "ms",
            steps,
            lambda s: _pair(s.tpot_s, 1000),
        ),
        _bars("Output tokens a second, all requests", "tokens/s", steps, lambda s: s.output_tokens_per_s),
        _bars("Requests a second", "requests/s", steps, lambda s: s.requests_per_s),
    )
    return tuple(figure for figure in found if figure is not None)


def _pair(found: Distribution | None, scale: int) -> tuple[float, float] | None:
    """Median and 99th percentile."""
    return (found.p50.value * scale, found.p99.value * scale) if found is not None else None


def _spread(
    title: str, unit: str, steps: Sequence[StepResult], of: Callable[[StepResult], tuple[float, float] | None]
) -> Figure | None:
    """Bars from nothing to the median, and from there to the 99th percentile."""
    told = [(s, pair) for s in steps if (pair := of(s))]
    if not told:
        return None
    names = tuple(s.step.name for s, _ in told)
    hover = tuple(f"{s.step.name}: median {a:.4g} {unit}, 99th percentile {b:.4g} {unit}" for s, (a, b) in told)
    parts = (
        Part("median", "weights", tuple(a for _, (a, _) in told), hover, tuple(f"{a:.3g}" for _, (a, _) in told)),
        Part(
            "up to the 99th percentile",
            "kv_cache",
            tuple(max(0.0, b - a) for _, (a, b) in told),
            hover,
            tuple(f"{b:.3g}" for _, (_, b) in told),
        ),
    )
    return Figure(title, "; ".join(hover), Stack(names, parts, unit))


def _bars(
    title: str, unit: str, steps: Sequence[StepResult], of: Callable[[StepResult], float | None]
) -> Figure | None:
    told = [(s, value) for s in steps if (value := of(s)) is not None]
    if not told:
        return None
    hover = tuple(f"{s.step.name}: {value:.4g} {unit}" for s, value in told)
    part = Part(unit, "weights", tuple(value for _, value in told), hover, tuple(f"{value:.3g}" for _, value in told))
    return Figure(title, "; ".join(hover), Stack(tuple(s.step.name for s, _ in told), (part,), unit))


def _pools(steps: Sequence[StepResult]) -> tuple[Figure, ...]:
    pools = tuple(
        Use(f"{name}, {s.step.name}", share, f"{name} at {s.step.name}: {n.percent(share, 1)}")
        for s in steps
        for name, share in (("KV", s.usage.kv), ("state", s.usage.state), ("window", s.usage.swa))
        if share is not None
    )
    if not pools:
        return ()
    return (Figure("Peak use of the pools", "; ".join(pool.hover for pool in pools), Uses(pools)),)


def _accounts(steps: Sequence[StepResult]) -> tuple[Figure, ...]:
    """The ledger with the machine's rows before the first step and after each, all GPUs of the server together."""
    told = [s for s in steps if s.memory.accounts_before and s.memory.accounts_after]
    if not any(_sums(s.memory.accounts_after) for s in told):
        return ()
    states = [("before", told[0].memory.accounts_before), *((s.step.name, s.memory.accounts_after) for s in told)]
    sums = [_sums(accounts) for _, accounts in states]
    names = list(dict.fromkeys(name for one in sums for name in one))
    parts = []
    for name in names:
        label = ACCOUNT_LABELS.get(name, name.replace("_", " "))
        sizes = [one.get(name) for one in sums]
        hover = tuple(
            "" if size is None else f"{label}, {state}: {n.gib(size)} GiB\n{size:,} bytes"
            for size, (state, _) in zip(sizes, states, strict=True)
        )
        texts = tuple("" if size is None else n.gib(size) for size in sizes)
        parts.append(Part(label, name, tuple(None if size is None else gib(size) for size in sizes), hover, texts))
    says = "; ".join(
        f"{state}: " + ", ".join(f"{ACCOUNT_LABELS.get(a, a)} {n.gib_about(size)}" for a, size in one.items())
        for (state, _), one in zip(states, sums, strict=True)
    )
    bars = tuple(f"after {state}" if i else state for i, (state, _) in enumerate(states))
    return (Figure("Memory by account", says, Stack(bars, tuple(parts))),)


def _sums(accounts: dict[str, int]) -> dict[str, int]:
    """The device's accounts by their first part; those of the host are a ledger of their own."""
    sums: dict[str, int] = {}
    for account, size in accounts.items():
        if size and not account.startswith("host/"):
            sums[top_account(account)] = sums.get(top_account(account), 0) + size
    return sums


def _intervals(steps: Sequence[StepResult]) -> tuple[Grid, ...]:
    if not steps:
        return ()
    return (_grid("Intervals", v.INTERVAL_HEADS, [row for s in steps for row in v.interval_rows(s)], v.INTERVAL_NOTE),)


def _memory(sweep: Sweep) -> tuple[Grid, ...]:
    rows = v.memory_rows(sweep)
    moved = [[name, n.signed_gib(size)] for name, size in v.account_changes(sweep)]
    grids = [_grid("Memory of the server's processes, GiB", v.MEMORY_HEADS, rows)] if rows else []
    return (*grids, *([_grid("Accounts that moved", ("account", "GiB"), moved)] if moved else []))


def _growth(sweep: Sweep) -> tuple[str, ...]:
    return (*map(v.growth_words, sweep.growth), *map(v.trend_words, sweep.soak))
