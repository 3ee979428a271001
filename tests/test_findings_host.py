import pytest
from finding_helpers import found, sglang, vllm, worker

from memledger.ledger import Failure, Gpu
from memledger.units import GIB

GB10 = Gpu(kind="cuda", name="NVIDIA GB10", unified_memory=True)


class TestNearlyFull:
    def test_offloaded_weights_beside_what_the_host_had(self):
        rank = worker(95.0, weights__model=50.0, host__weights=40.0)
        finding = found(vllm(rank, host_available_bytes=45 * GIB), "ML402")
        assert "keeps 40.0 GiB in host memory of the 45.0 GiB that were available" in finding.text
        assert found(vllm(rank, host_available_bytes=200 * GIB), "ML402") is None
        assert found(vllm(rank), "ML402") is None

    @pytest.mark.parametrize("kind", ["killed", "host_memory", "exit_137"])
    def test_a_kill_while_memory_is_offloaded(self, kind):
        rank = worker(95.0, weights__model=50.0, host__weights=40.0)
        assert "the process was killed" in found(vllm(rank, failures=(Failure(kind, "serving"),)), "ML402").text
        assert found(vllm(worker(95.0, weights__model=50.0), failures=(Failure(kind, "serving"),)), "ML402") is None

    def test_unified_memory_gains_nothing_by_offloading(self):
        rank = worker(119.7, weights__model=50.0, host__kv_cache=20.0, gpu=GB10)
        assert "the 20.0 GiB kept for the host come out of the same memory" in found(sglang(rank), "ML402").text

    def test_unified_memory_with_little_left(self):
        assert (
            "only 3.00 GiB of it is left"
            in found(sglang(worker(119.7, weights__model=95.0, free=3.0, gpu=GB10)), "ML402").text
        )
        assert found(sglang(worker(119.7, weights__model=95.0, free=12.0, gpu=GB10)), "ML402") is None

    def test_silent_for_a_cpu_build(self):
        cpu = worker(None, host__kv_cache=20.0, gpu=Gpu(kind="cpu"))
        assert found(vllm(cpu, host_available_bytes=21 * GIB), "ML402") is None


def test_unified_memory_is_information_until_the_check_fails():
    rank = worker(119.7, weights__model=50.0, gpu=GB10)
    assert found(vllm(rank), "ML403").severity == "info"
    assert found(vllm(rank, failures=(Failure("free_memory_too_small", "startup"),)), "ML403").severity == "note"
    assert found(vllm(worker(119.7, weights__model=50.0)), "ML403") is None


class TestTakenTwice:
    def test_the_same_size_for_kv_and_state(self):
        rank = worker(80.0, host__kv_cache=59.6, host__recurrent_state=59.6)
        finding = found(sglang(rank, host_cache_gb=64), "ML404")
        assert (
            "--hicache-size 64 was asked for, and 59.6 GiB of host memory went to the KV cache and 59.6 GiB to the recurrent state"
            in finding.text
        )

    def test_silent_for_pools_by_ratio_and_for_plain_models(self):
        assert (
            found(sglang(worker(80.0, host__kv_cache=59.6, host__recurrent_state=59.6), host_cache_gb=0), "ML404")
            is None
        )
        assert found(sglang(worker(80.0, host__kv_cache=59.6, host__recurrent_state=20.0)), "ML404") is None
        assert found(sglang(worker(80.0, host__kv_cache=59.6)), "ML404") is None
