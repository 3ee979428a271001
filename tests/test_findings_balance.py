import msgspec
from finding_helpers import found, sglang, vllm, worker

from memledger.ledger import Gpu


class TestUnbalanced:
    def test_extra_processes_on_the_first_gpu(self):
        ranks = [worker(79.0, tp=tp, weights__model=57.7, free=free) for tp, free in enumerate((12.1, 21.0, 21.0))]
        finding = found(sglang(*ranks), "ML304")
        assert "Memory left free differs between ranks: 21.0 GiB on TP1, 12.1 GiB on TP0" in finding.text
        assert "other processes on one GPU are a usual cause" in finding.text

    def test_weights_of_unequal_ranks(self):
        ranks = [worker(79.0, tp=tp, weights__model=size) for tp, size in enumerate((20.0, 26.0))]
        assert (
            "The weights' size differs between ranks: 26.0 GiB on TP1, 20.0 GiB on TP0"
            in found(sglang(*ranks), "ML304").text
        )

    def test_silent_where_they_are_alike_other_stages_or_without_a_line(self):
        alike = [worker(79.0, tp=tp, weights__model=20.0 + tp) for tp in (0, 1)]
        assert found(sglang(*alike), "ML304") is None
        stages = [
            msgspec.structs.replace(worker(79.0, weights__model=size), pp=pp) for pp, size in enumerate((20.0, 26.0))
        ]
        assert found(sglang(*stages), "ML304") is None
        assert (
            found(vllm(worker(79.0, kv_cache__pool=40.0), worker(79.0, tp=1, cuda_graphs__total=1.0)), "ML304") is None
        )


class TestOthersCharged:
    def test_another_server_on_the_card(self):
        rank = worker(79.0, weights__model=15.0, non_torch=36.5)
        assert "36.5 GiB is charged to this server" in found(vllm(rank, version="0.8.5"), "ML305").text

    def test_silent_for_later_versions_and_a_workers_own(self):
        rank = worker(79.0, weights__model=15.0, non_torch=36.5)
        assert found(vllm(rank, version="0.10.2"), "ML305") is None
        assert found(vllm(rank, version=None), "ML305") is None
        assert found(vllm(worker(79.0, weights__model=15.0, non_torch=0.7), version="0.8.5"), "ML305") is None


class TestInUseAtStart:
    def test_on_unified_memory_it_is_the_systems_and_no_worker_was_left_behind(self):
        own = worker(100.0, in_use_at_start=60.0, free=40.0)
        shared = worker(100.0, in_use_at_start=60.0, free=40.0, gpu=Gpu(kind="cuda", unified_memory=True))
        assert "workers were left behind" in found(sglang(own), "ML303").text
        text = found(sglang(shared), "ML303").text
        assert "those of the whole system" in text
        assert "left behind" not in text
