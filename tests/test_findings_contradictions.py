import msgspec
import pytest
from finding_helpers import concurrency, found, sglang, vllm, worker
from sample_reports import at

from memledger.ledger import Capacity, Evidence, Failure
from memledger.units import GIB

HYBRID = {"kv_cache/pool": {"includes_recurrent_state": True, "block_tokens": 1056}}


class TestTokens:
    def test_blocks_over_groups_are_far_from_what_is_served(self):
        rank = worker(121.0, kv_cache__pool=47.55, capacity=concurrency(623040, 131072, 18.44), details=HYBRID)
        finding = found(vllm(rank, version="0.19.1"), "ML701")
        assert finding.severity == "note"
        assert "fit 18.44 times, which is 2.42M tokens" in finding.text

    def test_sliding_window_models_too(self):
        rank = worker(80.0, kv_cache__pool=12.94, capacity=concurrency(282624, 8192, 54.44))
        assert "which is 446K tokens" in found(vllm(rank, version="0.13.0"), "ML701").text

    def test_the_later_figure_is_information(self):
        rank = worker(121.0, kv_cache__pool=74.22, capacity=concurrency(3366051, 262144, 12.84), details=HYBRID)
        finding = found(vllm(rank), "ML701")
        assert finding.severity == "info"
        assert "are 12.84 requests x 262,144 tokens" in finding.text

    @pytest.mark.parametrize("requests", [8.67, 8.75])
    def test_silent_for_plain_attention(self, requests):
        rank = worker(24.0, kv_cache__pool=13.06, capacity=concurrency(35648, 4096, requests))
        assert found(vllm(rank, version="0.19.1"), "ML701") is None


class TestContradictions:
    def test_two_figures_of_one_pool(self):
        rank = worker(80.0, kv_cache__pool=40.0, details={"kv_cache/pool": {"contradicted_bytes": 42 * GIB}})
        finding = found(vllm(rank), "ML702")
        assert "One line gives the KV cache 40.00 GiB, another 42.00 GiB. No figure was adjusted." in finding.text
        assert finding.bytes == -2 * GIB or finding.bytes == 2 * GIB

    def test_tokens_beyond_concurrency(self):
        rank = worker(80.0, kv_cache__pool=40.0, capacity=concurrency(600000, 8192, 40.0))
        assert (
            "600,000 KV tokens are printed, and 40 requests of 8,192: 327,680 tokens" in found(vllm(rank), "ML702").text
        )

    def test_context_parallelism_multiplies_the_tokens(self):
        rank = worker(80.0, kv_cache__pool=40.0, capacity=concurrency(655360, 8192, 40.0))
        assert found(vllm(rank, dcp_size=2), "ML702") is None
        assert found(vllm(rank, dcp_size=2), "ML701") is None

    def test_ranks_with_the_same_tokens_in_pools_of_other_sizes(self):
        details = {"kv_cache/k": {"tokens": 330323, "dtype": "bf16"}}
        ranks = [worker(80.0, tp=tp, kv_cache__k=size, details=details) for tp, size in enumerate((10.08, 5.04))]
        assert "TP1 and TP0 hold the same 330,323 tokens in 5.04 and 10.08 GiB" in found(sglang(*ranks), "ML702").text

    def test_a_pool_and_the_servers_count_of_its_tokens(self):
        details = {"kv_cache/k": {"tokens": 330323}}
        rank = worker(80.0, kv_cache__k=10.08, details=details, capacity=Capacity(kv_tokens=165161))
        text = found(sglang(rank), "ML702").text
        assert "allocated for 330,323 tokens, and the server counts 165,161" in text
        alike = worker(80.0, kv_cache__k=10.08, details=details, capacity=Capacity(kv_tokens=330240))
        assert found(sglang(alike), "ML702") is None

    def test_silent_where_they_agree(self):
        rank = worker(24.0, kv_cache__pool=13.06, capacity=concurrency(35648, 4096, 8.67, kv_block_tokens=16))
        assert found(vllm(rank), "ML702") is None
        details = {"kv_cache/k": {"tokens": 330323}}
        alike = [worker(80.0, tp=tp, kv_cache__k=10.08, details=details) for tp in (0, 1)]
        assert found(sglang(*alike), "ML702") is None
        other_stage = msgspec.structs.replace(worker(80.0, kv_cache__k=5.04, details=details), pp=1)
        assert found(sglang(alike[0], other_stage), "ML702") is None


def test_a_sentinel_is_no_figure():
    failure = Failure("cuda_oom", "weights", {}, (Evidence(0, 5, "Process 60 has 17179869184.00 GiB memory in use."),))
    finding = found(vllm(failures=(failure,)), "ML703")
    assert [e.line for e in finding.evidence] == [5]
    assert found(vllm(failures=(Failure("cuda_oom", "weights", {}, at(5)),)), "ML703") is None


class TestStateBlocks:
    def rank(self, seqs, blocks, details=HYBRID):
        return worker(
            24.0, kv_cache__pool=4.0, capacity=Capacity(kv_blocks=blocks, max_running_requests=seqs), details=details
        )

    def test_more_requests_than_blocks(self):
        finding = found(vllm(self.rank(256, 129), version="0.19.0"), "ML805")
        assert "256 requests may run (--max-num-seqs)" in finding.text
        assert "the pool has 129 blocks: no more than 128 can run" in finding.text

    def test_silent_where_they_fit_for_plain_models_and_where_the_failure_says_it(self):
        assert found(vllm(self.rank(64, 129)), "ML805") is None
        assert found(vllm(self.rank(256, 129, details={})), "ML805") is None
        failure = Failure("state_blocks_too_few", "pools", {"kv_blocks": 129})
        assert found(vllm(self.rank(256, 129), failures=(failure,)), "ML805") is None
