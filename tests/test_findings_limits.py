import pytest
from finding_helpers import found, serving, sglang, vllm, worker

from memledger.ledger import Capacity, Evidence, Usage


def card(cap=None, free=2.0, **more):
    return worker(
        80.0,
        weights__model=30.0,
        kv_cache__k=20.0,
        kv_cache__v=20.0,
        free=free,
        capacity=Capacity(kv_tokens=300000, max_running_requests=cap, **more),
    )


class TestKvLimit:
    def test_full_kv_and_waiting_requests(self):
        finding = found(sglang(card(), usage=serving(100, 20, 0.99)), "ML501")
        assert finding.severity == "note"
        assert (
            "usage reached 99 % of 300,000 tokens, at most 100 ran at once and up to 20 requests waited" in finding.text
        )

    def test_a_card_that_stays_half_free_is_a_matter_of_settings(self):
        finding = found(sglang(card(free=34.0), usage=serving(1, 1, 0.97)), "ML501")
        assert finding.severity == "warning"
        assert "stayed free after the start: a higher --mem-fraction-static" in finding.text
        assert (
            "--max-total-tokens"
            in found(sglang(card(free=34.0), usage=serving(1, 1, 0.97), max_total_tokens=25000), "ML501").text
        )

    @pytest.mark.parametrize("usage", [serving(100, 0, 0.99), serving(100, 20, 0.9), serving(100, 20), Usage()])
    def test_silent_where_nothing_waits_or_kv_is_left_or_unknown(self, usage):
        assert found(sglang(card(), usage=usage), "ML501") is None


class TestRequestLimit:
    def test_the_cap_is_reached_while_kv_is_idle(self):
        finding = found(vllm(card(cap=64), usage=serving(64, 64, 0.145)), "ML502")
        assert (
            "64 may run and ran, up to 64 requests waited, while KV usage stayed at 14 % (--max-num-seqs)"
            in finding.text
        )

    @pytest.mark.parametrize(
        "usage", [serving(63, 64, 0.1), serving(64, 0, 0.1), serving(64, 64, 0.9), serving(64, 64)]
    )
    def test_silent_where_it_does_not_bind(self, usage):
        assert found(vllm(card(cap=64), usage=usage), "ML502") is None

    def test_silent_where_the_state_slots_set_the_cap(self):
        hybrid = card(cap=24, state_slots=124, slots_per_request=5)
        assert found(sglang(hybrid, usage=serving(24, 9, 0.1)), "ML502") is None

    def test_silent_for_a_sum_over_engines(self):
        usage = Usage(scope="sum_of_engines", peak_running_requests=64, peak_queued_requests=4, peak_kv_usage=0.1)
        assert found(vllm(card(cap=64), usage=usage), "ML502") is None


class TestWaiting:
    def test_waiting_with_memory_left_is_information(self):
        finding = found(vllm(card(cap=32), usage=serving(4, 3, 0.03), chunked_prefill_tokens=8192), "ML503")
        assert finding.severity == "info"
        assert "3 requests waited while 4 of 32 ran" in finding.text
        assert "prefill (8,192 tokens per step)" in finding.text

    def test_an_unknown_cap_is_said(self):
        assert "How many may run is not in the log" in found(vllm(card(), usage=serving(4, 3, 0.03)), "ML503").text

    def test_silent_where_a_limit_was_reached(self):
        assert found(vllm(card(cap=4), usage=serving(4, 3, 0.03)), "ML503") is None


class TestPushedBack:
    def test_many_are_a_warning_a_few_a_note(self):
        many = found(vllm(card(), usage=serving(100, 5, 0.99, preemptions=51)), "ML504")
        assert many.severity == "warning"
        assert "(KV usage up to 99 %): 51 preemptions" in many.text
        few = found(sglang(card(), usage=serving(100, 5, 0.99, retractions=1)), "ML504")
        assert few.severity == "note"
        assert "1 retraction." in few.text

    def test_silent_without_any(self):
        assert found(vllm(card(), usage=serving(100, 5, 0.99, preemptions=0)), "ML504") is None


class TestIdleKv:
    def test_what_was_never_in_use(self):
        finding = found(sglang(card(), usage=serving(16, 0, 0.01)), "ML505")
        assert (
            "At most 1 % of the 40.0 GiB KV cache was in use in this log (16 requests at the peak): 39.4 GiB"
            in finding.text
        )
        assert "they hold cached prefixes at best" in finding.text
        assert found(sglang(card(), usage=serving(16, 0, 0.0)), "ML505").text.startswith("Less than 0.50 % of")

    @pytest.mark.parametrize(
        "usage",
        [serving(1, 0, 0.01), serving(16, 0, 0.3), serving(16), Usage(), serving(16, 0, 0.01, peak_state_usage=0.9)],
    )
    def test_silent_for_a_warm_up_a_used_pool_and_without_serving_lines(self, usage):
        assert found(sglang(card(), usage=usage), "ML505") is None

    def test_silent_for_a_pool_that_is_small_for_its_card(self):
        small = worker(80.0, kv_cache__pool=8.0, free=60.0)
        assert found(vllm(small, usage=serving(16, 0, 0.01)), "ML505") is None


def test_the_lines_of_the_peaks_are_evidence():
    line = Evidence(0, 700, "Decode batch")
    for usage, code in (
        (serving(100, 20, 0.99, evidence=(line,)), "ML501"),
        (serving(16, 0, 0.01, evidence=(line,)), "ML505"),
    ):
        assert line in found(sglang(card(), usage=usage), code).evidence
