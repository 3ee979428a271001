import pytest
from finding_helpers import found, serving, sglang, vllm, worker

from memledger.ledger import Budget, Failure
from memledger.units import GIB, MIB


def oom(phase, asked=4 * GIB, kind="cuda_oom", **numbers):
    return Failure(kind, phase, {"requested_bytes": asked, "free_bytes": 3 * GIB, **numbers})


class TestNotTheKvCache:
    def test_the_usage_at_the_crash_counts_first(self):
        server = vllm(failures=(oom("serving", kv_usage=0.24),), usage=serving(18, 0, 0.9))
        assert (
            "KV usage was 24 %, so a larger KV cache would not have helped: one allocation of 4 GiB with 3 GiB free"
            in found(server, "ML202").text
        )

    def test_else_the_peak(self):
        assert (
            "KV usage never exceeded 35 %"
            in found(sglang(failures=(oom("prefill"),), usage=serving(3, 0, 0.35)), "ML202").text
        )

    @pytest.mark.parametrize(
        "server",
        [
            vllm(failures=(oom("serving", kv_usage=0.86),)),
            vllm(failures=(oom("serving"),)),
            vllm(failures=(oom("weights"),), usage=serving(3, 0, 0.1)),
            vllm(usage=serving(3, 0, 0.1)),
        ],
    )
    def test_silent_where_kv_was_used_unknown_or_nothing_failed(self, server):
        assert found(server, "ML202") is None


class TestBeyondTheProfile:
    RANK = worker(95.0, activations=1.47, reserve=3.68, kv_cache__pool=30.0)

    def test_one_allocation_as_large_as_the_measured_peak(self):
        text = found(vllm(self.RANK, failures=(oom("warmup", 2 * GIB),)), "ML203").text
        assert "measured an activation peak of 1.47 GiB and 3.68 GiB were kept outside the budget" in text
        assert "asked for 2 GiB by itself" in text

    def test_silent_for_small_ones_without_a_peak_and_for_sglang(self):
        assert found(vllm(self.RANK, failures=(oom("serving", 126 * MIB),)), "ML203") is None
        assert found(vllm(worker(95.0, kv_cache__pool=30.0), failures=(oom("serving"),)), "ML203") is None
        assert found(sglang(self.RANK, failures=(oom("serving"),)), "ML203") is None


class TestCapture:
    def test_without_an_estimate(self):
        text = found(vllm(failures=(oom("graph_capture"),), memory_fraction=0.95), "ML204").text
        assert "must fit into what the memory budget leaves at --gpu-memory-utilization 0.95" in text

    def test_with_an_estimate_of_nothing(self):
        rank = worker(80.0, kv_cache__pool=40.0, budget=Budget(graph_estimate_bytes=0))
        assert (
            "the estimate of the graphs was nothing"
            in found(vllm(rank, failures=(oom("graph_capture"),)), "ML204").text
        )

    def test_silent_once_graphs_were_captured(self):
        rank = worker(80.0, kv_cache__pool=40.0, cuda_graphs__total=0.8)
        assert found(vllm(rank, failures=(oom("graph_capture"),)), "ML204") is None
        assert found(vllm(failures=(oom("serving"),)), "ML204") is None


class TestStateBlocks:
    FAILURE = Failure("kv_too_small", "kv_pool", {"max_model_len": 262144})

    def test_a_hybrid_with_prefix_caching(self):
        text = found(vllm(failures=(self.FAILURE,), prefix_caching=True, state_cache_mode="align"), "ML205").text
        assert "(mode align): a request keeps further states" in text
        assert (
            "every block keeps a state"
            in found(vllm(failures=(self.FAILURE,), prefix_caching=True, state_cache_mode="all"), "ML205").text
        )

    def test_silent_without_prefix_caching_and_for_plain_models(self):
        assert found(vllm(failures=(self.FAILURE,), prefix_caching=False, state_cache_mode="none"), "ML205") is None
        assert found(vllm(failures=(self.FAILURE,), prefix_caching=True), "ML205") is None
        assert found(vllm(prefix_caching=True, state_cache_mode="align"), "ML205") is None


def test_what_the_log_gives_as_the_cause_is_cleaned():
    failure = Failure(
        "graph_capture_failed",
        "graphs",
        {"cause": "T\x00ried with \u202e--api-key=abcdefgh12345678", "exception": "E\x1b[2J"},
    )
    text = found(sglang(failures=(failure,)), "ML201").text
    assert text == "Graph capture failed: E: T\ufffdried with \ufffd--api-key=***."
