from finding_helpers import found, serving, sglang, vllm, worker

from memledger.ledger import Capacity
from memledger.units import GIB


def test_speculative_decoding_by_its_parts():
    rank = worker(
        50.0, weights__model=20.0, weights__draft=0.41, kv_cache__draft=0.72, recurrent_state__speculative_ssm=4.78
    )
    finding = found(sglang(rank, speculative_draft_tokens=4), "ML801")
    assert finding.severity == "note"
    assert (
        "(4 draft tokens) takes 5.91 GiB (12 % of the card): speculative ssm states 4.78 GiB, the draft's KV cache 0.72 GiB"
        in finding.text
    )
    assert "running requests x draft tokens" in finding.text


def test_a_small_share_is_information_and_none_is_silent():
    assert found(sglang(worker(120.0, weights__draft=2.0)), "ML801").severity == "info"
    assert found(sglang(worker(120.0, weights__draft=0.1)), "ML801") is None
    assert found(sglang(worker(120.0, weights__model=50.0)), "ML801") is None


def test_a_draft_inside_the_weights():
    details = {"weights/model": {"includes_draft": True}}
    finding = found(
        vllm(worker(120.0, weights__model=22.84, details=details), draft_checkpoint_bytes=round(0.88 * GIB)), "ML802"
    )
    assert (
        "The 22.8 GiB of weights contain a draft model, which the engine does not print apart; its files are 0.88 GiB"
        in finding.text
    )
    assert finding.severity == "info"
    large = vllm(worker(120.0, weights__model=22.84, details=details), draft_checkpoint_bytes=4 * GIB)
    assert found(large, "ML802").severity == "note"
    assert found(vllm(worker(120.0, weights__model=22.84)), "ML802") is None


def test_lora_apart_and_inside():
    assert (
        "LoRA adapters take 3.00 GiB"
        in found(sglang(worker(40.0, weights__model=15.0, weights__lora=3.0)), "ML803").text
    )
    inside = found(vllm(worker(40.0, weights__model=15.0), enable_lora=True, max_loras=4, max_lora_rank=32), "ML803")
    assert "(4 slots, rank 32) are inside the 15.0 GiB of weights" in inside.text
    assert found(vllm(worker(40.0, weights__model=15.0), enable_lora=False), "ML803") is None


class TestRequestTable:
    def rank(self, size=2.0, cap=2048):
        return worker(31.5, weights__model=20.0, request_tables=size, capacity=Capacity(max_running_requests=cap))

    def test_gibs_of_positions_and_what_the_peak_would_need(self):
        finding = found(sglang(self.rank(), usage=serving(1, 0, 0.05), context_length=262144), "ML804")
        assert "2.00 GiB is the table of 2,048 requests x 262,144 tokens of context" in finding.text
        (remedy,) = finding.remedies
        assert remedy.flags == ("--max-running-requests", "16")
        assert remedy.effects[0].bytes == -remedy.effects[1].bytes
        assert -remedy.effects[0].bytes == round(2 * GIB * (1 - 17 / 2049))

    def test_without_a_peak_nothing_is_advised(self):
        assert found(sglang(self.rank(), context_length=262144), "ML804").remedies == ()

    def test_silent_for_small_tables(self):
        assert found(sglang(self.rank(0.5), context_length=32768), "ML804") is None
        assert found(sglang(self.rank(2.0, None), context_length=32768), "ML804") is None
