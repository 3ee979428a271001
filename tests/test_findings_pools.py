import pytest
from finding_helpers import concurrency, found, serving, sglang, vllm, worker

from memledger.ledger import Capacity, Failure, Gpu


class TestFilledByDesign:
    def test_a_small_model_on_a_large_card(self):
        finding = found(vllm(worker(80.0, weights__model=2.89, kv_cache__pool=60.0), memory_fraction=0.9), "ML506")
        assert finding.severity == "note"
        assert (
            "takes 60.0 GiB, 21 times the weights, because vLLM gives it all that its budget (0.9 of the card)"
            in finding.text
        )

    def test_a_few_times_the_weights_is_information(self):
        assert found(vllm(worker(80.0, weights__model=20.0, kv_cache__pool=50.0)), "ML506").severity == "info"

    def test_silent_for_a_pool_of_given_size_and_for_large_models(self):
        rank = worker(80.0, weights__model=2.89, kv_cache__pool=60.0)
        assert found(vllm(rank, kv_cache_memory_bytes=60 << 30), "ML506") is None
        assert found(vllm(worker(80.0, weights__model=50.0, kv_cache__pool=20.0)), "ML506") is None
        assert found(sglang(rank), "ML506") is None


class TestWeights:
    def test_weights_that_fill_the_card(self):
        finding = found(sglang(worker(30.1, base="first_reading", weights__model=27.0, kv_cache__k=0.5)), "ML507")
        assert "27.0 GiB of the 30.1 GiB memory free at the start (90 %); the pools get 0.50 GiB" in finding.text

    def test_silent_below(self):
        assert found(sglang(worker(80.0, weights__model=60.0)), "ML507") is None
        assert found(sglang(worker(None, weights__model=60.0)), "ML507") is None


class TestLongRequest:
    def test_vllm_by_its_concurrency(self):
        finding = found(vllm(worker(48.0, kv_cache__pool=9.0, capacity=concurrency(69920, 131072, 0.53))), "ML508")
        assert "A request of the full context of 131,072 tokens does not fit: the KV cache holds 69,468" in finding.text

    def test_sglang_by_its_tokens(self):
        rank = worker(23.0, kv_cache__k=4.0, capacity=Capacity(kv_tokens=24248))
        assert found(sglang(rank, context_length=262144), "ML508").severity == "note"
        nearly = worker(23.0, kv_cache__k=4.0, capacity=Capacity(kv_tokens=260289))
        assert found(sglang(nearly, context_length=262144), "ML508").severity == "info"

    def test_silent_where_it_fits_or_the_failure_says_it(self):
        assert found(vllm(worker(48.0, kv_cache__pool=9.0, capacity=concurrency(69920, 8192, 8.5))), "ML508") is None
        rank = worker(48.0, kv_cache__pool=9.0, capacity=concurrency(69920, 131072, 0.53))
        assert found(vllm(rank, failures=(Failure("kv_too_small", "kv_pool"),)), "ML508") is None


class TestContext:
    def rank(self, **more):
        return worker(80.0, kv_cache__k=20.0, request_tables=0.5, capacity=Capacity(kv_tokens=300000), **more)

    def test_no_request_was_near_the_context_length(self):
        finding = found(sglang(self.rank(), usage=serving(8, 0, 0.02), context_length=131072), "ML509")
        assert finding.severity == "info"
        assert "never held more than 7,500 KV tokens, and one may have 131,072" in finding.text
        assert "It sizes the request tables (0.50 GiB)" in finding.text

    @pytest.mark.parametrize("usage", [serving(1, 0, 0.02), serving(8, 0, 0.4), serving(8)])
    def test_silent_without_enough_to_tell(self, usage):
        assert found(sglang(self.rank(), usage=usage, context_length=131072), "ML509") is None

    def test_silent_for_several_kinds_of_tokens(self):
        rank = self.rank(recurrent_state__ssm=4.0)
        assert found(sglang(rank, usage=serving(8, 0, 0.02), context_length=131072), "ML509") is None


class TestPadding:
    def hybrid(self, **detail):
        return vllm(worker(80.0, kv_cache__pool=62.31, details={"kv_cache/pool": detail}))

    @pytest.mark.parametrize(("percent", "severity"), [(60.0, "warning"), (14.29, "note"), (6.25, "info")])
    def test_padding_layers_by_what_they_may_waste(self, percent, severity):
        finding = found(self.hybrid(padding_layers=6, padding_layers_percent=percent), "ML510")
        assert finding.severity == severity
        assert f"6 padding layers may waste up to {percent:g} % of it" in finding.text

    def test_padded_states_and_pages(self):
        text = found(self.hybrid(state_padding_percent=43.28, page_waste_percent=1.25), "ML510").text
        assert "each recurrent state is padded by 43.28 %" in text
        assert "page alignment wastes 1.25 % of each block of hidden states" in text

    def test_silent_without_padding(self):
        assert found(self.hybrid(includes_recurrent_state=True), "ML510") is None


def test_sliding_window_charged_as_full():
    rank = worker(48.0, kv_cache__pool=20.0, details={"kv_cache/pool": {"window_as_full": True}})
    assert "of the 20.0 GiB KV cache" in found(vllm(rank), "ML511").text
    assert found(vllm(worker(48.0, kv_cache__pool=20.0)), "ML511") is None


def test_a_cpu_worker_is_not_judged_by_its_card():
    cpu = worker(None, weights__model=1.0, kv_cache__pool=60.0, gpu=Gpu(kind="cpu"))
    assert found(vllm(cpu), "ML506") is None
    assert found(vllm(cpu), "ML507") is None
