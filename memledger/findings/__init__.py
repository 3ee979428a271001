"""Conclusions from a ledger: each finding is a pure function of one `Server`, with a stable code.

ML0xx the running machine, ML1xx recurrent state, ML2xx failures, ML3xx the balance, ML4xx host memory, ML5xx KV cache and capacity, ML6xx CUDA graphs
and budget, ML7xx comparability and contradictions, ML8xx configuration, ML9xx the model's arithmetic. `memledger.findings.catalogue` has a page for each.

A new finding is a function `(server, context) -> Finding | None` in `_FAMILIES` and a page in the catalogue. `context` holds
what is known beside the log (the model's architecture); a finding that needs it returns None where it is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from memledger.findings import (
    balance,
    configuration,
    contradictions,
    failures,
    graphs,
    host,
    limits,
    live,
    modelled,
    pools,
    state,
)
from memledger.findings.figures import NO_CONTEXT, Context
from memledger.ledger import Finding, Report, Server

Family = Callable[[Server, Context], Finding | None]

_FAMILIES: Final[tuple[Family, ...]] = (
    state.idle_slots,
    state.slots_are_the_ceiling,
    state.capped_by_slots,
    state.beyond_the_cap,
    state.need_unknown,
    failures.failure_summary,
    failures.not_the_kv_cache,
    failures.beyond_the_profile,
    failures.capture_ran_out,
    failures.state_needs_blocks,
    balance.unexplained,
    balance.over_counted,
    balance.in_use_at_start,
    balance.unbalanced,
    balance.others_charged,
    host.host_memory,
    host.host_nearly_full,
    host.unified_memory,
    host.host_cache_doubled,
    limits.kv_is_the_limit,
    limits.requests_are_the_limit,
    limits.waiting_without_limit,
    limits.pushed_back,
    limits.idle_kv,
    pools.filled_by_design,
    pools.weights_fill_the_card,
    pools.longest_request_does_not_fit,
    pools.context_beyond_use,
    pools.padding,
    pools.window_as_full,
    graphs.estimate_too_large,
    graphs.estimate_too_small,
    graphs.outside_the_budget,
    graphs.activation_reserve,
    graphs.thin_headroom,
    contradictions.tokens_not_comparable,
    contradictions.contradiction,
    contradictions.sentinel,
    configuration.speculation,
    configuration.draft_inside,
    configuration.lora,
    configuration.request_table,
    contradictions.state_blocks,
    modelled.weights_differ,
    modelled.kv_differs,
    modelled.state_differs,
    modelled.state_in_the_pool,
    modelled.state_twice_as_wide,
    *live.FAMILIES,
)


def find(server: Server, context: Context = NO_CONTEXT) -> tuple[Finding, ...]:
    """Every finding that holds for a server, in order of code."""
    found = [finding for family in _FAMILIES if (finding := family(server, context)) is not None]
    return tuple(sorted(found, key=lambda f: f.code))


def attach(report: Report, context_of: Callable[[Server], Context] | None = None) -> Report:
    """The report with the findings of each of its servers (in place of any it had).

    `context_of` gives what is known of a server beside its log.
    """
    servers = tuple(
        msgspec.structs.replace(s, findings=find(s, NO_CONTEXT if context_of is None else context_of(s)))
        for s in report.servers
    )
    return msgspec.structs.replace(report, servers=servers)
