"""One rank's ledger from what vLLM printed about it.

vLLM prints a budget, not free-memory readings (v1/worker/gpu_worker.py, `determine_available_memory`):
`requested = total x utilisation = weights + activations + non-torch (+ graph estimate) + KV`. What was in use before
the worker's first reading (total - free) is outside that budget; CUDA graphs beyond their estimate come on top of it;
the rest of the device is kept free on purpose (`reserve`). Where all of this is printed the ledger closes against the
device, and its residual is the closure error of the printed budget.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from memledger.events import Event
from memledger.ledger import (
    CLOSED_SHARE,
    CONTRADICTION,
    Basis,
    Budget,
    Entry,
    Evidence,
    Reading,
    Residual,
    Stage,
    build_stages,
    close,
    entry,
    held,
)
from memledger.units import GIB, MIB, ZERO, Amount, total

CANDIDATES: Final[dict[str, tuple[str, ...]]] = {
    "init": ("CUDA context", "communication buffers", "other processes"),
    "pools": ("rounding of the printed budget", "kernel workspaces"),
    "final": ("activations", "memory outside torch", "CUDA graphs"),
}

_TOTALS: Final = (
    "init_snapshot",
    "budget_consumed",
    "budget_split",
    "v0_budget",
    "v0_profile",
    "free_memory_too_small",
)
"""Rules that print the device's total, the best first."""


LEAST_TOTAL: Final = 64 * MIB
"""No device is smaller: a total below this is none."""

LEAST_NON_TORCH: Final = -256 * MIB
"""Memory outside torch is a difference of readings and may be slightly negative, by tens of MiB; not by more than this."""


class RankFacts(msgspec.Struct):
    """What was printed about one rank: the latest event of each rule, and the few that need their order."""

    latest: dict[str, Event] = {}
    weights: list[Event] = []
    graphs: Event | None = None
    graphs_before_pool: bool = False
    """Whether the last graph figure was printed before anything about the pool: a sample of the profiling pass."""

    def event(self, rule: str) -> Event | None:
        """The latest event of a rule."""
        return self.latest.get(rule)

    def amount(self, rule: str, field: str) -> Amount | None:
        """One figure of the latest event of a rule."""
        found = self.latest.get(rule)
        return found.amount(field) if found is not None else None


class Context(msgspec.Struct, frozen=True):
    """What the rest of the start says that a rank's ledger depends on."""

    fraction: float | None = None
    kv_bytes: int | None = None
    graphs_off: bool = False
    draft_apart: bool = False
    version: tuple[int, int] | None = None
    smallest_grant: Amount | None = None
    blocks_fit: int | None = None
    blocks_used: int | None = None
    pool_detail: dict[str, Any] = {}
    cpu_blocks: int | None = None
    swap_gib: float | None = None
    failed_total: Amount | None = None
    failed_total_lines: tuple[Evidence, ...] = ()
    pool_failed: bool = False
    """Whether the start failed before the granted pool was allocated."""


class Ledger(msgspec.Struct, frozen=True):
    """One rank's ledger."""

    entries: tuple[Entry, ...]
    stages: tuple[Stage, ...]
    residual: Residual
    budget: Budget
    total: Amount | None
    notes: tuple[str, ...] = ()


class Figure(msgspec.Struct, frozen=True):
    """An amount with the line that says it and how it was obtained."""

    amount: Amount
    evidence: tuple[Evidence, ...]
    basis: Basis = "logged"
    detail: dict[str, Any] = {}


def pool_grant(facts: RankFacts, kv_bytes: int | None) -> Figure | None:
    """What this rank granted to the KV pool, before block rounding: the most exact of the figures printed.

    A pool of given size (`--kv-cache-memory-bytes`, start-up plan) is exact to the byte where the figure printed
    agrees with the bytes asked for.
    """
    for rule, field in (
        ("budget_split", "kv_bytes"),
        ("startup_plan", "kv"),
        ("multimodal_reserve", "kv"),
        ("budget_consumed", "kv"),
        ("budget_split", "kv"),
        ("kv_bytes_given", "kv"),
        ("kv_available", "kv"),
        ("v0_split", "kv"),
        ("v0_profile", "kv"),
    ):
        source = facts.event(rule)
        amount = source.amount(field) if source is not None else None
        if source is None or amount is None:
            continue
        if rule in {"budget_consumed", "budget_split"} and facts.event("multimodal_reserve") is not None:
            continue
        if rule == "kv_bytes_given" and kv_bytes is not None and abs(kv_bytes - amount.bytes) <= amount.tolerance:
            amount = Amount(kv_bytes)
        return Figure(amount, (source.evidence,))
    return None


def build_ledger(facts: RankFacts, context: Context) -> Ledger:
    """The entries, stages and verdict of one rank."""
    return _Builder(facts, context).build()


class _Builder:
    def __init__(self, facts: RankFacts, context: Context) -> None:
        self.facts = facts
        self.context = context
        self.entries: list[Entry] = []
        self.notes: list[str] = []
        self.missing: list[str] = []

    def build(self) -> Ledger:
        device = self.device_total()
        free = self.first_free()
        requested = self.requested(device)
        grant = pool_grant(self.facts, self.context.kv_bytes)
        estimate = self.graph_estimate(device)
        actual = self.graph_actual()
        weights = self.weights()
        non_torch = self.non_torch(weights)
        activation, charged = self.activation(requested, weights, non_torch, grant, estimate)

        if device is not None and free is not None and not _below(device - free.amount):
            self.add("in_use_at_start", Figure(device - free.amount, free.evidence, "derived"), "init")
        self.add_weights(weights, non_torch)
        if activation is not None:
            self.add("activations", activation, "pools")
        self.add_pool(grant)
        if actual is not None:
            below = (
                {"note": "printed as negative: more memory was free after capture"} if actual.amount.bytes < 0 else {}
            )
            self.add("cuda_graphs/total", actual, "final", **below)
        self.add_workspaces()
        self.add_host(grant)
        reserve = self.reserve(device, free, requested, grant, weights, non_torch, activation, charged, actual)
        contradiction = self.contradiction(device, free, requested, weights, non_torch, grant, reserve)
        if reserve is not None and contradiction is None:
            self.add("reserve", reserve, "final")
        elif (failed := self.facts.event("free_memory_too_small")) is not None and free is not None:
            self.add("free", Figure(free.amount, (failed.evidence,)), "final")
            self.missing.clear()
        stages, residual = self.balance(device, free, requested, charged, reserve is not None, contradiction)
        budget = Budget(
            requested.amount.bytes if requested is not None else None,
            device.bytes - requested.amount.bytes if requested is not None and device is not None else None,
            self.budget_rule(device, requested),
            estimate.amount.bytes if estimate is not None else None,
            self.estimate_charged(estimate, charged, activation is not None),
        )
        return Ledger(tuple(self.entries), stages, residual, budget, device, tuple(self.notes))

    def add(self, account: str, figure: Figure, stage: str | None, **detail: Any) -> None:
        """One entry."""
        self.entries.append(
            entry(
                account,
                figure.amount,
                figure.basis,
                stage=stage,
                evidence=figure.evidence,
                **{**figure.detail, **detail},
            )
        )

    # -- what the device and the budget are

    def device_total(self) -> Amount | None:
        """The device as CUDA reports it (smaller than NVML's total)."""
        for rule in _TOTALS:
            if _is_total(found := self.facts.amount(rule, "total")):
                return found
        return self.context.failed_total if _is_total(self.context.failed_total) else None

    def total_evidence(self) -> tuple[Evidence, ...]:
        """The line of `device_total`."""
        for rule in _TOTALS:
            source = self.facts.event(rule)
            if source is not None and _is_total(source.amount("total")):
                return (source.evidence,)
        return self.context.failed_total_lines

    def first_free(self) -> Figure | None:
        """Free memory at the worker's first reading."""
        for rule in (
            "init_snapshot",
            "budget_consumed",
            "budget_split",
            "kv_bytes_given",
            "initial_free",
            "free_memory_too_small",
        ):
            source = self.facts.event(rule)
            if source is not None and (amount := source.amount("free")) is not None:
                return Figure(amount, (source.evidence,))
        return None

    def requested(self, device: Amount | None) -> Figure | None:
        """The budget: total times utilisation, as printed or (where both are known) computed."""
        if (outside := self.facts.event("weights_outside")) is not None and (rest := outside.amount("rest")):
            return Figure(rest, (outside.evidence,))
        for rule, field in (
            ("budget_consumed", "requested"),
            ("budget_split", "requested"),
            ("v0_budget", "requested"),
            ("initial_free", "requested"),
            ("initial_free", "old_requested"),
            ("requested_memory", "requested"),
        ):
            source = self.facts.event(rule)
            if source is not None and (amount := source.amount(field)) is not None:
                return Figure(amount, (source.evidence,))
        if self.facts.event("kv_bytes_given") is not None:
            return None
        profile = self.facts.event("v0_profile")
        fraction = profile.number("utilization") if profile is not None else self.context.fraction
        if device is None or fraction is None:
            return None
        scaled = Amount(int(device.bytes * fraction), int(device.tolerance * fraction) + 1)
        return Figure(scaled, (profile.evidence,) if profile is not None else (), "derived")

    def budget_rule(self, device: Amount | None, requested: Figure | None) -> str | None:
        if self.facts.event("kv_bytes_given") is not None:
            return "size of the KV pool given in bytes; no profiling"
        if requested is None or device is None or device.bytes <= 0:
            return None
        fraction = self.context.fraction
        shown = f"{fraction:g}" if fraction is not None else f"{requested.amount.bytes / device.bytes:.3f}"
        return f"device total x utilisation {shown}"

    # -- parts of the budget

    def weights(self) -> Figure | None:
        events = self.facts.weights
        if events:
            amount = events[0].amount("weights") or events[0].amount("old")
            if amount is not None:
                return Figure(amount, (events[0].evidence,))
        for rule in ("budget_split", "v0_split", "profile_debug"):
            source = self.facts.event(rule)
            if source is not None and (found := source.amount("weights")) is not None:
                return Figure(found, (source.evidence,))
        return None

    def non_torch(self, weights: Figure | None) -> Figure | None:
        for rule in ("budget_split", "v0_split", "v0_profile", "profile_debug"):
            source = self.facts.event(rule)
            if source is not None and (found := source.amount("non_torch")) is not None:
                detail = {"note": "everything outside torch, other processes included"} if rule == "v0_profile" else {}
                return Figure(found, (source.evidence,), "logged", detail)
        consumed = self.consumed()
        if consumed is None or weights is None:
            return None
        # Both are printed and measured apart; the split does not change their sum, so it cannot hide a residual.
        return Figure(
            consumed.amount - weights.amount,
            (*consumed.evidence, *weights.evidence),
            "derived",
            {"formula": "consumed - weights", "note": "with persistent torch buffers and fragmentation"},
        )

    def consumed(self) -> Figure | None:
        for rule in ("budget_consumed", "profile_debug"):
            source = self.facts.event(rule)
            if source is not None and (found := source.amount("consumed")) is not None:
                return Figure(found, (source.evidence,))
        return None

    def add_weights(self, weights: Figure | None, non_torch: Figure | None) -> None:
        consumed = self.consumed()
        if weights is None and consumed is not None:
            self.add("weights_and_non_torch", consumed, "weights")
            return
        if weights is not None:
            self.add("weights/model", weights, "weights", **self.weights_detail())
        else:
            self.missing.append("the size of the weights")
        if self.context.draft_apart and len(self.facts.weights) > 1:
            second = self.facts.weights[1]
            if (amount := second.amount("weights") or second.amount("old")) is not None:
                self.add("weights/draft", Figure(amount, (second.evidence,)), "weights")
        if non_torch is not None:
            self.add("non_torch", non_torch, "pools")

    def weights_detail(self) -> dict[str, Any]:
        detail: dict[str, Any] = {}
        records = self.facts.event("state_records")
        if records is not None and (size := records.amount("size")) is not None:
            detail |= {"includes_state_records_bytes": size.bytes, "requests": records.count("requests")}
        if self.facts.event("drafter") is not None and not self.context.draft_apart:
            detail["includes_draft"] = True
        return detail

    def graph_estimate(self, device: Amount | None) -> Figure | None:
        """The engine's estimate of the graphs, whether the budget was charged with it or not."""
        for rule, field in (("graph_estimate", "size"), ("graph_pool", "estimated")):
            source = self.facts.event(rule)
            if source is not None and (found := source.amount(field)) is not None:
                return Figure(found, (source.evidence,))
        source = self.facts.event("graphs_in_budget")
        if source is None or device is None:
            return None
        used, without = source.number("utilization"), source.number("without")
        if used is None or without is None:
            return None
        # Both utilisations are printed with four decimals.
        return Figure(
            Amount(int((used - without) * device.bytes), int(1e-4 * device.bytes) + 1), (source.evidence,), "derived"
        )

    def estimate_charged(self, estimate: Figure | None, charged: Amount, tested: bool) -> bool | None:
        """Whether the budget was charged with the graph estimate: by the printed sum, else as a line says."""
        if estimate is None:
            return None
        if tested:
            return charged.bytes > 0
        return self.charged_by_message()

    def charged_by_message(self) -> bool | None:
        source = self.facts.event("graphs_in_budget")
        if source is None:
            return None
        return source.word("state") == "enabled"

    def activation(
        self,
        requested: Figure | None,
        weights: Figure | None,
        non_torch: Figure | None,
        grant: Figure | None,
        estimate: Figure | None,
    ) -> tuple[Figure | None, Amount]:
        """The activation peak without the graph estimate, and the estimate that the budget was charged with.

        The line of 0.27.1 and later contains the estimate, that of 0.18 too, those between do not
        (v1/worker/gpu_worker.py). The figures are tested; message and version only decide where both readings fit.
        """
        size = estimate.amount if estimate is not None and estimate.amount.bytes > 0 else None
        charged = size if size is not None and self.charged_by_message() is not False else None
        source = self.facts.event("budget_consumed")
        if source is not None and (peak := source.amount("activation")) is not None:
            # A peak smaller than the estimate cannot contain it.
            if charged is None or charged.bytes > peak.bytes + peak.tolerance + charged.tolerance:
                return Figure(peak, (source.evidence,), "logged", self.unknown_estimate(source, estimate)), ZERO
            return _without(peak, charged, source, estimate), charged
        source = self.facts.event("budget_split")
        if source is not None and (peak := source.amount("activation")) is not None:
            includes, charged = self.split_reading(requested, source, weights, non_torch, grant, peak, size)
            if includes and charged is not None:
                return _without(peak, charged, source, estimate), charged
            return Figure(peak, (source.evidence,)), charged if charged is not None else ZERO
        for rule in ("v0_split", "profile_debug"):
            source = self.facts.event(rule)
            if source is not None and (peak := source.amount("activation")) is not None:
                return Figure(peak, (source.evidence,)), charged if charged is not None else ZERO
        source = self.facts.event("v0_profile")
        if source is not None and weights is not None and (peak := source.amount("peak")) is not None:
            figure = Figure(
                peak - weights.amount,
                (source.evidence, *weights.evidence),
                "derived",
                {"formula": "torch peak - weights"},
            )
            return figure, ZERO
        return None, charged if charged is not None else ZERO

    def unknown_estimate(self, source: Event, estimate: Figure | None) -> dict[str, Any]:
        """A word of warning where the peak contains an estimate whose size is not in the log."""
        graphs = source.amount("graphs")
        if estimate is not None or self.charged_by_message() is False or graphs is None or graphs.bytes == 0:
            return {}
        return {"note": "with the estimate of the CUDA graphs, whose size is not in the log"}

    def split_reading(
        self,
        requested: Figure | None,
        source: Event,
        weights: Figure | None,
        non_torch: Figure | None,
        grant: Figure | None,
        peak: Amount,
        size: Amount | None,
    ) -> tuple[bool, Amount | None]:
        """Whether the peak contains the estimate, and the estimate charged, by testing the printed sum."""
        message = self.charged_by_message()
        if size is None:
            return False, None
        held = self.total_grant(grant)
        if requested is None or weights is None or non_torch is None or held is None:
            return False, size if message is not False else None
        rest = requested.amount - total([weights.amount, peak, non_torch.amount, held])
        fits_without = abs(rest.bytes) <= rest.tolerance + 5 * MIB
        fits_with = abs(rest.bytes - size.bytes) <= rest.tolerance + size.tolerance + 5 * MIB
        if fits_with and not fits_without:
            return False, size
        if fits_without and not fits_with:
            return (True, size) if message else (False, None)
        old = self.context.version is not None and (0, 18) <= self.context.version < (0, 19)
        return (old and bool(message)), (size if message is not False else None)

    def graph_actual(self) -> Figure | None:
        """What capture took; the pool line says the same bytes, and a profiling sample does not count."""
        source = self.facts.graphs if not self.facts.graphs_before_pool else None
        if source is not None and (found := source.amount("size")) is not None:
            return Figure(found, (source.evidence,))
        for rule, field in (("graph_pool", "actual"), ("budget_consumed", "graphs"), ("budget_split", "graphs")):
            other = self.facts.event(rule)
            if other is not None and (found := other.amount(field)) is not None:
                return Figure(found, (other.evidence,))
        return None

    # -- the pool

    def total_grant(self, grant: Figure | None) -> Amount | None:
        """The pool's grant before the multimodal reservation."""
        if grant is None:
            return None
        reserved = self.facts.amount("multimodal_reserve", "reserved")
        return grant.amount + reserved if reserved is not None else grant.amount

    def add_pool(self, grant: Figure | None) -> None:
        if grant is None:
            if self.facts.event("cpu_kv") is None:
                self.missing.append("the size of the KV pool")
            return
        reserved = self.facts.event("multimodal_reserve")
        if reserved is not None and (amount := reserved.amount("reserved")) is not None:
            self.add(
                "other_processes",
                Figure(amount, (reserved.evidence,)),
                "pools",
                note="the API servers' multimodal decoding",
            )
        if grant.amount.bytes <= 0:
            self.notes.append("the budget left no memory for the KV pool: the figure printed for it is not positive")
            return
        used, detail = self.used_part(grant.amount)
        other = self.other_grant(grant)
        if self.context.pool_failed:
            other["note"] = "granted; the start failed before it was allocated"
        if used is None:
            self.add("kv_cache/pool", grant, "pools", **self.context.pool_detail, **other)
            return
        detail = {**detail, **other}
        self.add(
            "kv_cache/pool",
            Figure(used, grant.evidence, "derived"),
            "pools",
            **{**self.context.pool_detail, **detail},
        )
        self.add("kv_cache/unused", Figure(grant.amount - used, grant.evidence, "derived"), "pools", **detail)

    def other_grant(self, grant: Figure) -> dict[str, Any]:
        """A second figure for the same grant that the first contradicts: both are rounded, neither is adjusted."""
        if self.facts.event("multimodal_reserve") is not None:
            return {}
        for rule, field in (("budget_consumed", "kv"), ("budget_split", "kv"), ("kv_available", "kv")):
            found = self.facts.amount(rule, field)
            if found is not None and not (found - grant.amount).is_zero():
                return {"contradicted_bytes": found.bytes}
        return {}

    def used_part(self, grant: Amount) -> tuple[Amount | None, dict[str, Any]]:
        """The part of the grant that became blocks, where something says that it is smaller than the grant."""
        smallest = self.context.smallest_grant
        fit, used = self.context.blocks_fit, self.context.blocks_used
        part, why = grant, ""
        # A difference inside the rounding of the two figures is none.
        if smallest is not None and smallest.bytes < grant.bytes and not (grant - smallest).is_zero():
            part, why = smallest, "the smallest rank's grant decides for all"
        if fit and used is not None and used < fit:
            # The grant holds `fit` whole blocks and less than one more.
            block = grant.bytes // fit
            part = Amount(block * used, part.tolerance + block * used // fit + 1)
            why = f"{used} of the {fit} blocks that fit are used"
        if not why:
            return None, {}
        return part, {"note": why}

    def add_workspaces(self) -> None:
        source = self.facts.event("decode_workspace")
        if source is not None and (found := source.amount("size")) is not None and self.consumed() is None:
            self.add("workspace", Figure(found, (source.evidence,)), "final", what="decode workspace")

    # -- host memory

    def add_host(self, grant: Figure | None) -> None:
        """The host's ledger: offloaded weights, swap space, offloaded KV, a CPU build's pool."""
        for rule, field, account, note in (
            ("cpu_offload", "size", "host/weights", "offloaded parameters, pinned"),
            ("prefetch_offload", "saved", "host/weights", "offloaded parameters, fetched ahead"),
            ("engram", "size", "host/weights", "a table in pinned memory"),
            ("simple_offload", "size", "host/kv_cache", "offloaded KV blocks"),
            ("offload_region", "size", "host/kv_cache", "one region shared by all ranks"),
            ("hisparse_pool", "host", "host/kv_cache", "pinned source of the pool"),
            ("cpu_kv", "kv", "host/kv_cache", "the pool of a CPU build"),
        ):
            source = self.facts.event(rule)
            if source is not None and (found := source.amount(field) or source.amount("mib")) is not None:
                if rule == "cpu_kv" and self.context.pool_failed:
                    self.notes.append("the KV cache was granted, but the start failed before it was allocated")
                    continue
                extra = self.context.pool_detail if rule == "cpu_kv" else {}
                given = self.context.kv_bytes
                if rule == "cpu_kv" and given is not None and abs(given - found.bytes) <= found.tolerance:
                    found = Amount(given)
                self.add(account, Figure(found, (source.evidence,)), None, note=note, **extra)
        self.add_swap(grant)

    def add_swap(self, grant: Figure | None) -> None:
        blocks, swapped = self.context.blocks_used or self.context.blocks_fit, self.context.cpu_blocks
        if not swapped:
            return
        if grant is not None and blocks:
            part = self.used_part(grant.amount)[0] or grant.amount
            size = Amount(part.bytes // blocks * swapped, part.tolerance * swapped // blocks + part.bytes // blocks)
            self.add("host/swap", Figure(size, grant.evidence, "derived"), None, blocks=swapped)
        elif self.context.swap_gib is not None:
            size = Amount(int(self.context.swap_gib * GIB), 0)
            self.add(
                "host/swap",
                Figure(size, (), "derived"),
                None,
                blocks=swapped,
                note="--swap-space, rounded down to whole blocks",
            )

    # -- closing

    def reserve(
        self,
        device: Amount | None,
        free: Figure | None,
        requested: Figure | None,
        grant: Figure | None,
        weights: Figure | None,
        non_torch: Figure | None,
        activation: Figure | None,
        charged: Amount,
        actual: Figure | None,
    ) -> Figure | None:
        """Memory kept free on purpose: total - in use at the start - budget - (graphs - the estimate charged).

        None, with what is missing noted, where the budget is not printed in full.
        """
        complete = self.consumed() is not None or (weights is not None and non_torch is not None)
        for known, what in (
            (device, "the device's total"),
            (requested, "the budget"),
            (activation, "the activation peak"),
        ):
            if known is None:
                self.missing.append(what)
        if not complete and weights is not None:
            self.missing.append("memory outside torch")
        if actual is None and not self.context.graphs_off:
            self.missing.append("the size of the CUDA graphs")
        if grant is not None and grant.amount.bytes <= 0:
            # The other parts exceed the budget: what is left of the device does not follow from it.
            self.missing.append("a KV pool (the budget left nothing for it)")
            return None
        if device is None or requested is None or grant is None or activation is None or not complete:
            return None
        beyond = (actual.amount if actual is not None else ZERO) - charged
        rest = device - requested.amount - beyond
        detail: dict[str, Any] = {"formula": "total - in use at the start - budget - (graphs - estimate in the budget)"}
        if free is not None:
            rest = rest - (device - free.amount)
        else:
            detail["formula"] = "total - budget - graphs"
            detail["note"] = "with what was in use before vLLM's first reading (not printed)"
        if outside := self.facts.amount("weights_outside", "held"):
            self.add(
                "other_processes",
                Figure(outside, (self.facts.latest["weights_outside"].evidence,)),
                "final",
                note="weights held by a daemon",
            )
            rest = rest - outside
        # The device's total, the first reading and the budget stand on both sides: their rounding cancels in the sum.
        evidence = (*requested.evidence, *(free.evidence if free is not None else ()))
        return Figure(Amount(rest.bytes, requested.amount.tolerance), evidence, "derived", detail)

    def contradiction(
        self,
        device: Amount | None,
        free: Figure | None,
        requested: Figure | None,
        weights: Figure | None,
        non_torch: Figure | None,
        grant: Figure | None,
        reserve: Figure | None,
    ) -> str | None:
        """Why the printed figures cannot all be true; None where they can. `reserve` would take up any of it."""
        if non_torch is not None and non_torch.amount.bytes < LEAST_NON_TORCH - non_torch.amount.tolerance:
            parts = (
                f" (consumed less weights of {_gib(weights.amount)})"
                if weights and "formula" in non_torch.detail
                else ""
            )
            return f"{CONTRADICTION}{_gib(non_torch.amount)} outside torch{parts}"
        if device is None:
            return None
        whole = f"a device of {_gib(device)}"
        if free is not None and _below(device - free.amount):
            return f"{CONTRADICTION}{_gib(free.amount)} free on {whole}"
        for figure, what in ((weights, "weights"), (grant, "KV cache"), (requested, "a budget")):
            if figure is not None and _exceeds(figure.amount, device):
                return f"{CONTRADICTION}{what} of {_gib(figure.amount)} on {whole}"
        rows = held(self.entries)
        if _exceeds(rows, device):
            return f"{CONTRADICTION}{_gib(rows)} held on {whole}"
        if (
            reserve is None
            or requested is None
            or not _exceeds(Amount(-reserve.amount.bytes, reserve.amount.tolerance))
        ):
            return None
        before = f", {_gib(device - free.amount)} in use before it" if free is not None else ""
        return f"{CONTRADICTION}a budget of {_gib(requested.amount)} and graphs beyond it{before}, on {whole}"

    def balance(
        self,
        device: Amount | None,
        free: Figure | None,
        requested: Figure | None,
        charged: Amount,
        complete: bool,
        contradiction: str | None,
    ) -> tuple[tuple[Stage, ...], Residual]:
        """The chain of stages and the rank's residual.

        After the first reading nothing is read again, so the later levels are the budget's own: what it leaves
        outside (`pools`), and nothing (`final`: every byte has an owner or is in the residual).
        """
        has_rows = any(not e.account.startswith("host/") for e in self.entries)
        if not has_rows:
            reason = "CPU build: host memory only" if self.facts.event("cpu_kv") is not None else None
            return (), close(None, None, (), open_reason=reason or "no memory figure of this rank in the log")
        base: Literal["device", "first_reading"] | None = None
        opening: Amount | None = None
        if device is not None:
            base, opening = "device", Amount(device.bytes)
        elif free is not None:
            base, opening = "first_reading", free.amount
        reason = None
        if not complete and not any(e.account == "free" for e in self.entries):
            missing = list(dict.fromkeys(self.missing))
            reason = "not in the log: " + ", ".join(missing) if missing else "the budget is not printed in full"
        elif self.missing:
            reason = "not in the log: " + ", ".join(dict.fromkeys(self.missing))
        reason = contradiction or reason
        lines = self.total_evidence() if base == "device" else free.evidence if free is not None else ()
        residual = close(base, opening, self.entries, open_reason=reason, evidence=lines)
        if opening is None or contradiction is not None:
            return (), residual
        readings: list[Reading] = []
        if device is not None and free is not None:
            readings.append(Reading("init", Amount(free.amount.bytes), free.evidence))
        if complete and requested is not None and device is not None:
            before = free.amount.bytes if free is not None else device.bytes
            held = requested.amount.bytes - charged.bytes
            readings.append(Reading("pools", Amount(before - held), requested.evidence))
        last = total([e.amount for e in self.entries if e.account == "free"])
        readings.append(Reading("final", last))
        entries = self.entries
        stages = build_stages(Reading("init", opening), readings, entries, CANDIDATES)
        return stages, residual


def _is_total(size: Amount | None) -> bool:
    return size is not None and size.bytes >= LEAST_TOTAL


def _below(rest: Amount) -> bool:
    """Whether a remainder is negative beyond what rounding explains."""
    return rest.bytes < -rest.tolerance


def _exceeds(size: Amount, device: Amount = ZERO) -> bool:
    """Whether a size is more than the device holds, beyond rounding and the share that a closed ledger may miss."""
    return size.bytes - device.bytes > size.tolerance + device.tolerance + CLOSED_SHARE * device.bytes


def _gib(size: Amount) -> str:
    return f"{size.bytes / GIB:.2f} GiB"


def _without(peak: Amount, charged: Amount, source: Event, estimate: Figure | None) -> Figure:
    evidence = (source.evidence, *(estimate.evidence if estimate is not None else ()))
    return Figure(
        peak - charged,
        evidence,
        "derived",
        {"formula": "printed peak - graph estimate in it", "printed_bytes": peak.bytes},
    )
