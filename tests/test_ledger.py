"""The ledger closes by arithmetic: opening = entries + residual, stage by stage and in all, to the byte."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.ledger import (
    ACCOUNTS,
    STAGES,
    Rank,
    Reading,
    account_total,
    build_stages,
    close,
    entry,
    held,
)
from memledger.units import GIB, Amount

sizes = st.integers(-(2**34), 2**37)
amounts = st.builds(Amount, sizes, st.integers(0, 2**24))
stage_names = st.sampled_from(STAGES[1:])
entries_strategy = st.lists(
    st.builds(
        lambda account, amount, stage: entry(account, amount, "logged", stage=stage),
        st.sampled_from([a for a in ACCOUNTS if a != "free"]),
        amounts,
        st.one_of(st.none(), stage_names),
    ),
    max_size=12,
)
readings_strategy = st.lists(st.builds(Reading, stage_names, amounts), min_size=1, max_size=10)


@given(amounts, readings_strategy, entries_strategy)
def test_stage_residuals_sum_to_the_residual_of_the_rank_to_the_byte(opening, readings, entries):
    stages = build_stages(Reading("init", opening), readings, entries)
    free = entry("free", readings[-1].free, "logged", stage="final")
    residual = close("first_reading", opening, [*entries, free])
    assert sum(s.residual.bytes for s in stages) == residual.bytes


@given(amounts, readings_strategy, entries_strategy)
def test_every_pair_of_consecutive_readings_is_in_exactly_one_stage(opening, readings, entries):
    stages = build_stages(Reading("init", opening), readings, entries)
    assert stages[0].free_before_bytes == opening.bytes
    assert stages[-1].free_after_bytes == readings[-1].free.bytes
    for before, after in itertools.pairwise(stages):
        assert before.free_after_bytes == after.free_before_bytes
        assert before.name != after.name


@given(amounts, entries_strategy)
def test_opening_is_entries_plus_residual(opening, entries):
    residual = close("device", opening, entries)
    assert residual.bytes == opening.bytes - held(entries).bytes
    assert residual.opening_bytes == opening.bytes


@given(st.integers(2**30, 2**37), entries_strategy, st.integers(0, 2**24))
def test_a_wider_tolerance_of_an_entry_widens_the_residuals_tolerance(opening, entries, more):
    widened = [entry(e.account, Amount(e.bytes, e.tolerance_bytes + more), "logged") for e in entries]
    plain = close("device", Amount(opening), entries)
    wide = close("device", Amount(opening), widened)
    assert wide.tolerance_bytes == plain.tolerance_bytes + more * len(entries)
    assert wide.bytes == plain.bytes


@pytest.mark.parametrize(
    ("unexplained_gib", "verdict"), [(0.5, "closed"), (-0.5, "closed"), (1.5, "unexplained"), (-1.5, "over_counted")]
)
def test_one_percent_of_the_opening_is_the_line_between_closed_and_not(unexplained_gib, verdict):
    entries = [entry("weights/model", Amount(round((100 - unexplained_gib) * GIB)), "logged")]
    assert close("first_reading", Amount(100 * GIB), entries).verdict == verdict


def test_a_ledger_that_cannot_be_judged_is_open_and_says_why():
    assert close(None, None, []).verdict == "open"
    got = close("device", Amount(100 * GIB), [], open_reason="the budget is not printed")
    assert (got.verdict, got.reason, got.bytes) == ("open", "the budget is not printed", 100 * GIB)


def test_unified_memory_is_given_more_room():
    entries = [entry("weights/model", Amount(98 * GIB), "logged")]
    assert close("device", Amount(100 * GIB), entries).verdict == "unexplained"
    assert close("device", Amount(100 * GIB), entries, unified_memory=True).verdict == "closed"


def test_host_memory_is_never_part_of_the_devices_ledger():
    rows = [entry("host/kv_cache", Amount(500 * GIB), "logged"), entry("weights/model", Amount(10 * GIB), "logged")]
    assert held(rows).bytes == 10 * GIB
    assert close("device", Amount(10 * GIB), rows).bytes == 0


def test_an_account_that_is_not_there_is_unknown_not_zero():
    rows = [entry("kv_cache/k", Amount(3), "logged"), entry("kv_cache/v", Amount(4), "logged")]
    assert account_total(rows, "kv_cache") == Amount(7)
    assert account_total(rows, "recurrent_state") is None


def test_what_comes_back_between_two_readings_shows_as_a_negative_residual():
    stages = build_stages(
        Reading("init", Amount(100)),
        [Reading("weights", Amount(60)), Reading("draft_weights", Amount(62)), Reading("draft_weights", Amount(52))],
        [
            entry("weights/model", Amount(40), "logged", stage="weights"),
            entry("weights/draft", Amount(10), "logged", stage="draft_weights"),
        ],
    )
    assert [(s.name, s.residual.bytes) for s in stages] == [("weights", 0), ("draft_weights", -2)]


@pytest.mark.parametrize("account", ["weights", "kv", "host/", "unknown/x"])
def test_an_account_outside_the_tree_is_refused(account):
    with pytest.raises(ValueError, match="no such account"):
        entry(account, Amount(1), "logged")


def test_a_rank_is_named_by_what_tells_it_apart():
    assert Rank(dp=0, tp=3).label == "DP0 TP3"
    assert Rank(pid=42).label == "pid 42"
    assert Rank(tp=0).label == "TP0"
