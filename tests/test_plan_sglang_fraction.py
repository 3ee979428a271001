"""`--mem-fraction-static` as SGLang works it out itself, by release and card."""

from pathlib import Path

import msgspec
import pytest

from memledger import pipeline
from memledger.model import table
from memledger.model.architecture import NotModelledError
from memledger.plan import Facts, Target, make_plan
from memledger.plan_sglang_fraction import Card, default_fraction, prefill_graph_sizes
from memledger.units import GIB, MIB, Amount

H100 = 81559 * MIB
H200 = 143771 * MIB
L4 = 23034 * MIB


def at(*version):
    return version, version


def test_prefill_graphs_are_captured_for_so_many_sizes():
    # 4..32 by 4, 48..256 by 16, 288..512 by 32, 576..1024 by 64, 1280..4096 by 256, then by 512.
    assert prefill_graph_sizes(512) == 8 + 14 + 8
    assert prefill_graph_sizes(8192) == 8 + 14 + 8 + 8 + 12 + 8


def test_a_dense_model_on_80_gib():
    # 512 + 8192 * 1.5 + 1024 / 8 + 256 * 2 + 58 * 8 = 13,904 MiB.
    assert default_fraction(at(0, 5, 23), Card(H100)) == (0.83, 0.83)
    assert round((81559 - 13904) / 81559, 3) == 0.83


def test_latent_attention_reserves_more_for_prefill_graphs():
    share = round((81559 - 512 - 12288 - 128 - 512 - 1536) / 81559, 3)
    assert default_fraction(at(0, 5, 23), Card(H100, latent=True)) == (share, share)


def test_large_cards_keep_10_gib_at_least():
    small = Card(H200, chunked_prefill_tokens=2048, max_running_requests=8)
    low, high = default_fraction(at(0, 5, 23), small)
    assert low <= high == round((143771 - 10240) / 143771, 3)


def test_draft_models_reserve_memory_up_to_0_5_13_only():
    eagle, plain = Card(H100, speculation="eagle"), Card(H100)
    assert default_fraction(at(0, 5, 23), eagle) == default_fraction(at(0, 5, 23), plain)
    (low, _), (without, _) = default_fraction(at(0, 5, 13), eagle), default_fraction(at(0, 5, 13), plain)
    assert without - low == pytest.approx(4096 / 81559, abs=0.002)
    assert default_fraction(at(0, 5, 13), Card(H100, speculation="ngram")) == default_fraction(at(0, 5, 13), plain)


def test_small_cards_take_larger_chunks_later():
    old, new = default_fraction(at(0, 5, 18), Card(L4)), default_fraction(at(0, 5, 20), Card(L4))
    assert old[0] > new[0]
    assert default_fraction(at(0, 5, 19), Card(L4)) == (new[0], old[1])


def test_vision_towers_cut_the_share():
    low, high = default_fraction(at(0, 5, 23), Card(H100, multimodal=True))
    assert (low, high) == (round(0.83 * 0.76, 3), round(0.83 * 0.9975, 3))


@pytest.mark.parametrize(("tp", "share"), [(1, 0.88), (2, 0.87), (4, 0.85), (8, 0.81), (16, 0.79), (32, 0.79)])
def test_the_oldest_go_by_tensor_parallel_size(tp, share):
    assert default_fraction(at(0, 4, 7), Card(H100, tp=tp)) == (share, share)


def test_an_unknown_release_spans_all_of_them():
    low, high = default_fraction(((0,), (99,)), Card(H100))
    for version in ((0, 4, 7), (0, 5, 2), (0, 5, 9), (0, 5, 13), (0, 5, 23)):
        one = default_fraction(at(*version), Card(H100))
        assert low <= one[0] <= one[1] <= high


def test_a_card_too_small_for_any_share_is_refused():
    with pytest.raises(NotModelledError, match="--set memory_fraction=F"):
        default_fraction(at(0, 5, 23), Card(2 * GIB))


def test_plans_say_what_share_they_take():
    model = table.look_up("Llama-3.1-8B-Instruct").architecture
    facts = Facts("sglang", "0.5.23", model, "the table", Amount(H100))
    plan = make_plan(None, {}, Target(4, 8192), facts)
    assert "memory_fraction 0.83, as SGLang works it out for the card" in plan.assumptions
    given = make_plan(None, {"memory_fraction": 0.7}, Target(4, 8192), facts)
    assert not any("works it out" in text for text in given.assumptions)


def test_a_build_without_a_release_takes_the_version_that_is_given():
    log = Path(__file__).parent.parent / "fixtures" / "demo" / "server.log"
    server = msgspec.structs.replace(pipeline.explain([str(log)]).servers[-1], framework_version="0.1.dev3+g1")
    plan = make_plan(server, {"state_slots": 20}, Target(), Facts("sglang", "0.5.18"))
    assert plan.framework_version == "0.5.18"
    assert (plan.after.capacity.state_slots, plan.after.capacity.kv_tokens) == (20, 574_619)
