"""A card's total turns the opening balance from the first reading into the whole device, and nothing else changes."""

import msgspec

from memledger.device import with_device_total
from memledger.ledger import Gpu, Rank, Reading, Residual, Server, build_stages, close, entry
from memledger.units import GIB, Amount


def rank(**changes):
    entries = (
        entry("weights/model", Amount(28 * GIB), "logged", stage="weights"),
        entry("free", Amount(50 * GIB), "logged", stage="final"),
    )
    opening = Amount(79 * GIB)
    stages = build_stages(Reading("init", opening), [Reading("weights", Amount(50 * GIB))], entries)
    return Rank(tp=0, entries=entries, stages=stages, residual=close("first_reading", opening, entries), **changes)


def test_what_was_taken_before_the_first_reading_becomes_an_entry():
    server = with_device_total(Server("sglang", ranks=(rank(),)), Amount(80 * GIB), "derived")
    (got,) = server.ranks
    assert got.entries[0].account == "in_use_at_start"
    assert got.entries[0].bytes == 1 * GIB
    assert got.entries[0].basis == "derived"
    assert got.residual.base == "device"
    assert got.residual.opening_bytes == 80 * GIB
    assert got.residual.bytes == rank().residual.bytes
    assert got.stages[0].name == "init"
    assert sum(s.residual.bytes for s in got.stages) == got.residual.bytes


def test_a_card_looked_up_by_name_brings_its_tolerance():
    server = with_device_total(Server("sglang", ranks=(rank(),)), Amount(80 * GIB, GIB), "assumed", "H100 80GB")
    assert server.ranks[0].entries[0].tolerance_bytes == GIB
    assert server.ranks[0].gpu.name == "H100 80GB"
    # The total stands in the opening and in the entry: it cancels.
    assert server.ranks[0].residual.tolerance_bytes == rank().residual.tolerance_bytes


def test_a_total_printed_in_the_log_wins():
    logged = rank(gpu=Gpu(total_bytes=81 * GIB))
    server = with_device_total(Server("vllm", ranks=(logged,)), Amount(80 * GIB), "derived")
    assert server.ranks == (logged,)
    assert "prints the device's total" in server.notes[0]


def test_a_total_below_the_first_reading_is_refused_not_clamped():
    server = with_device_total(Server("sglang", ranks=(rank(),)), Amount(24 * GIB), "derived")
    assert server.ranks == (rank(),)
    assert "smaller than the first free-memory reading" in server.notes[0]


def test_an_open_ledger_stays_open():
    bare = Rank(tp=0, entries=(entry("weights/model", Amount(28 * GIB), "logged"),))
    (got,) = with_device_total(Server("vllm", ranks=(bare,)), Amount(80 * GIB), "derived").ranks
    assert (got.residual.verdict, got.residual.bytes) == ("open", 52 * GIB)
    assert got.gpu.total_bytes == 80 * GIB


def vllm_server(missing="the device's total, the budget, the activation peak"):
    bare = Rank(
        tp=0,
        entries=(entry("weights/model", Amount(28 * GIB), "logged"),),
        residual=Residual(None, None, None, "open", None, f"not in the log: {missing}"),
    )
    return Server("vllm", ranks=(bare,), config={"memory_fraction": 0.9})


def test_vllms_budget_is_a_share_of_the_total():
    (got,) = with_device_total(vllm_server(), Amount(80 * GIB), "derived").ranks
    assert (got.budget.static_bytes, got.budget.slack_bytes) == (72 * GIB, 80 * GIB - 72 * GIB)
    assert got.residual.verdict == "open"


def test_what_the_option_tells_is_not_missing_any_more():
    server = vllm_server()
    (got,) = with_device_total(server, Amount(80 * GIB), "derived").ranks
    assert got.residual.reason == "not in the log: the activation peak"


def test_sglangs_fraction_is_not_of_the_total():
    server = msgspec.structs.replace(vllm_server(), framework="sglang")
    (got,) = with_device_total(server, Amount(80 * GIB), "derived").ranks
    assert got.budget.static_bytes is None
