import pytest
from finding_helpers import found, sglang, vllm, worker

from memledger.ledger import Budget, Failure, Gpu
from memledger.units import GIB


def card(estimate, actual, *, charged=True, opening=80.0, **sizes):
    budget = Budget(
        graph_estimate_bytes=round(estimate * GIB) if estimate is not None else None,
        graph_estimate_charged=charged if estimate is not None else None,
    )
    graphs = {"cuda_graphs__total": actual} if actual is not None else {}
    return worker(
        opening,
        budget=budget,
        gpu=Gpu(kind="cuda", total_bytes=round(opening * GIB)),
        kv_cache__pool=40.0,
        **graphs,
        **sizes,
    )


class TestEstimate:
    def test_far_too_large(self):
        finding = found(vllm(card(2.44, 0.03), memory_fraction=0.9), "ML601")
        assert finding.severity == "warning"
        assert (
            "2.44 GiB of the budget was set aside for CUDA graphs, and they took 0.03 GiB: 2.41 GiB stay idle"
            in finding.text
        )
        (remedy,) = finding.remedies
        assert remedy.flags == ("--gpu-memory-utilization", "0.93")
        assert remedy.effects[0].bytes == pytest.approx(2.4 * GIB, rel=0.01)

    def test_no_utilization_beyond_the_card(self):
        assert found(vllm(card(2.44, 0.03), memory_fraction=0.98), "ML601").remedies == ()

    def test_graphs_that_took_nothing_or_less(self):
        assert "they took 0 B" in found(vllm(card(1.0, -0.2)), "ML601").text

    @pytest.mark.parametrize(("estimate", "actual"), [(0.74, 0.73), (0.6, 0.2), (3.0, 2.0)])
    def test_silent_where_it_is_about_right(self, estimate, actual):
        assert found(vllm(card(estimate, actual)), "ML601") is None

    def test_silent_where_the_budget_was_not_charged(self):
        assert found(vllm(card(2.44, 0.03, charged=False)), "ML601") is None

    @pytest.mark.parametrize(("version", "fires"), [("0.25.1", True), ("0.19.1", False), ("0.1.dev1", False)])
    def test_without_a_line_the_version_decides(self, version, fires):
        rank = card(2.44, 0.03, charged=None)
        assert (found(vllm(rank, version=version), "ML601") is not None) is fires

    def test_the_estimate_left_no_pool(self):
        failure = Failure("no_cache_blocks", "kv_pool")
        finding = found(vllm(card(118.65, None, opening=140.0), failures=(failure,), state="failed"), "ML601")
        assert "118.7 GiB, was taken from the budget before anything was captured" in finding.text
        assert found(vllm(card(0.5, None), failures=(failure,), state="failed"), "ML601") is None

    def test_the_estimate_is_what_was_missing(self):
        numbers = {"needed_bytes": 9 * GIB, "available_bytes": 8 * GIB}
        finding = found(vllm(card(1.5, None), failures=(Failure("kv_too_small", "kv_pool", numbers),)), "ML601")
        assert (
            "1.50 GiB, was taken from the budget before anything was captured, and 1 GiB were missing" in finding.text
        )

    def test_too_small(self):
        finding = found(vllm(card(0.1, 1.62, reserve=7.0)), "ML602")
        assert finding.severity == "note"
        assert "took 1.62 GiB, and the budget allowed for 0.10 GiB: 1.52 GiB lie outside it" in finding.text
        assert found(vllm(card(0.1, 1.62, reserve=0.4)), "ML602").severity == "warning"
        assert found(vllm(card(0.1, 0.49)), "ML602") is None


class TestOutside:
    def test_by_version(self):
        finding = found(vllm(card(None, 2.37), version="0.10.2"), "ML603")
        assert finding.severity == "note"
        assert "2.37 GiB beside the memory budget: this version's budget leaves CUDA graphs out" in finding.text

    def test_by_the_engines_lines(self):
        assert (
            "the budget was not charged with them"
            in found(vllm(card(1.59, 1.57, charged=False), version="0.19.0"), "ML603").text
        )

    def test_silent_where_they_are_inside_or_nothing_says(self):
        assert found(vllm(card(0.7, 0.73)), "ML603") is None
        assert found(vllm(card(None, 2.37), version="0.25.1"), "ML603") is None
        assert found(vllm(card(None, 2.37), version=None), "ML603") is None
        assert found(sglang(card(None, 2.37)), "ML603") is None


class TestActivations:
    def test_a_quarter_of_the_pool_and_more(self):
        rank = worker(80.0, activations=5.58, kv_cache__pool=8.68)
        assert "5.58 GiB is kept for the activations of the largest batch, 8,192 tokens, beside 8.68 GiB" in (
            found(vllm(rank, chunked_prefill_tokens=8192), "ML604").text
        )

    def test_silent_where_the_batch_is_small_or_the_pool_large(self):
        assert (
            found(vllm(worker(80.0, activations=5.58, kv_cache__pool=8.68), chunked_prefill_tokens=2048), "ML604")
            is None
        )
        assert (
            found(vllm(worker(80.0, activations=5.58, kv_cache__pool=40.0), chunked_prefill_tokens=8192), "ML604")
            is None
        )
        assert found(vllm(worker(80.0, activations=5.58, kv_cache__pool=8.68)), "ML604") is None


class TestHeadroom:
    def test_next_to_nothing_is_left(self):
        assert "Only 0.15 GiB (1 % of the card) is left outside the pools" in (
            found(vllm(worker(23.6, kv_cache__pool=0.8, reserve=0.15)), "ML605").text
        )
        assert "--mem-fraction-static" in found(sglang(worker(23.6, kv_cache__k=4.0, free=0.4)), "ML605").text
        overdrawn = found(vllm(worker(23.6, kv_cache__pool=0.8, reserve=-0.3)), "ML605").text
        assert overdrawn.startswith("Nothing is left outside the pools")

    def test_silent_with_room_and_after_a_failure(self):
        assert found(sglang(worker(23.6, kv_cache__k=4.0, free=1.83)), "ML605") is None
        assert found(vllm(worker(23.6, kv_cache__pool=0.8, reserve=0.15), state="failed"), "ML605") is None
        assert found(vllm(worker(23.6, kv_cache__pool=0.8)), "ML605") is None
