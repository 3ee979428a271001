"""What was asked for: rounding undone, and tensors named only where the arithmetic is exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.ledger import Server
from memledger.model.architecture import Architecture, Attention, DenseMlp, GatedDeltaNet, Layer
from memledger.postmortem.decode import MOST_CANDIDATES, Known, Rows, decode, known_of, request
from memledger.units import GIB, MIB, Amount, parse_amount

DENSE = Layer(Attention(32, 8, 128, 128), None, DenseMlp(14336))
LINEAR = Layer(None, GatedDeltaNet(16, 48, 128, 128, 4), DenseMlp(17408))
HYBRID = Architecture("m", "qwen3_5", "M", 5120, 248320, (LINEAR,) * 3 + (DENSE,))


def printed(text):
    number, _, unit = text.partition(" ")
    return parse_amount(number, unit)


def known(rows=(), tp=1, **more):
    return Known(HYBRID, "bfloat16", "vllm", tp, tuple(rows), **more)


def as_torch_rounds(size):
    if size <= MIB:
        return 2 * MIB
    if size < 10 * MIB:
        return 20 * MIB
    return -(-size // (2 * MIB)) * 2 * MIB


def as_torch_prints(size):
    """`format_size` of the allocator: two decimals in the largest unit that is exceeded."""
    return f"{size / GIB:.2f} GiB" if size > GIB else f"{size / MIB:.2f} MiB"


@given(st.integers(1, 200 * GIB))
def test_the_request_lies_within_what_its_printed_figure_stands_for(size):
    found = request(printed(as_torch_prints(as_torch_rounds(size))))
    assert found.least_bytes <= size <= found.most_bytes


def test_small_figures_stand_for_many_requests_and_name_none():
    small, medium = request(printed("2.00 MiB")), request(printed("20.00 MiB"))
    assert (small.least_bytes, small.most_bytes) == (1, MIB)
    assert medium.least_bytes == MIB + 1
    assert decode(printed("20.00 MiB"), known([Rows("tokens", 2048, "the chunk")])).candidates == ()


def test_a_figure_in_mib_is_an_exact_multiple():
    found = request(printed("786.00 MiB"))
    assert (found.least_bytes, found.most_bytes) == (784 * MIB + 1, 786 * MIB)


def test_a_figure_that_no_rounding_made_is_taken_as_it_is():
    found = request(printed("12.50 MiB"))
    assert found.least_bytes <= int(12.5 * MIB) <= found.most_bytes
    assert found.most_bytes - found.least_bytes < MIB


def test_logits_of_all_dummy_requests():
    found = decode(printed("244.00 MiB"), known([Rows("sequences", 256, "dummy requests")]))
    (candidate,) = found.candidates
    assert candidate.bytes == 256 * 248320 * 4
    assert candidate.what == "logits in float32"
    assert "256 sequences (dummy requests) x 248,320 words x 4 bytes = 242.50 MiB" in candidate.arithmetic


def test_logits_of_another_number_of_requests_are_not_named():
    assert decode(printed("244.00 MiB"), known([Rows("sequences", 250, "dummy requests")])).candidates == ()


def test_a_frame_that_makes_the_tensor_decides_between_equal_sizes():
    rows = [Rows("tokens", 4128, "the prefill chunk")]
    named = decode(printed("50.00 MiB"), known(rows), ["forward", "chunk_fwd_o"]).candidates
    assert named
    assert all(c.in_traceback for c in named)
    assert "linear-attention output" in [c.what for c in named]


@pytest.mark.parametrize(("tp", "size"), [(1, 96), (2, 48)])
def test_activations_are_divided_over_the_ranks(tp, size):
    found = decode(Amount(size * MIB), known([Rows("tokens", 8192, "the chunk")], tp=tp), ["chunk_fwd_o"])
    assert {1: "x 48 value heads x", 2: "x 24 value heads / 2 x"}[tp] in found.candidates[0].arithmetic


def test_states_of_every_chunk():
    found = decode(Amount(192 * MIB), known([Rows("tokens", 8192, "the chunk")]), ["chunk_gated_delta_rule_fwd_h"])
    assert "linear-attention states of every chunk" in [c.what for c in found.candidates]


def test_one_tensor_with_the_state_of_all_slots():
    size = 100 * 3 * 48 * 128 * 128 * 4
    found = decode(Amount(as_torch_rounds(size)), known(state_slots=100))
    assert [c.bytes for c in found.candidates] == [size]
    assert "100 slots x 3 layers x 48 heads" in found.candidates[0].arithmetic


def test_more_than_three_tensors_of_the_size_name_none():
    square = Architecture("m", "llama", "M", 4096, 4096, (Layer(Attention(32, 32, 128, 128), None, DenseMlp(4096)),))
    rows = (Rows("tokens", 8192, "the chunk"),)
    assert decode(Amount(64 * MIB), Known(square, "bfloat16", "vllm", 1, rows)).candidates == ()


@given(st.integers(10 * MIB, 64 * GIB), st.lists(st.integers(1, 65536), max_size=4))
def test_every_named_tensor_rounds_to_the_printed_figure(size, counts):
    rows = [Rows("tokens", n, "x") for n in counts]
    asked = printed(as_torch_prints(as_torch_rounds(size)))
    found = decode(asked, known(rows, state_slots=37))
    assert len(found.candidates) <= MOST_CANDIDATES
    for candidate in found.candidates:
        assert as_torch_prints(as_torch_rounds(candidate.bytes)) == as_torch_prints(as_torch_rounds(size))


def test_flashinfers_workspace_is_the_engines_default():
    found = decode(printed("384.00 MiB"), Known(framework="sglang"), ["create_flashinfer_backend"])
    assert [c.what for c in found.candidates] == ["FlashInfer's workspace"]
    assert decode(printed("384.00 MiB"), Known(framework="vllm")).candidates == ()


def test_without_a_model_nothing_is_named():
    assert decode(printed("786.00 MiB"), Known(rows=(Rows("sequences", 1024, "x"),))).candidates == ()


def test_what_a_server_says_of_itself():
    server = Server(
        framework="sglang",
        config={
            "tp_size": 2,
            "max_running_requests": 48,
            "chunked_prefill_tokens": 8192,
            "dtype": "auto",
            "kv_cache_dtype": "auto",
        },
    )
    found = known_of(server, HYBRID, [Rows("tokens", 77, "the last prefill batch")])
    assert found.tp == 2
    assert found.dtype == "bfloat16"
    assert found.kv_bytes_per_element == 2
    assert [(r.kind, r.count) for r in found.rows] == [("tokens", 77), ("sequences", 48), ("tokens", 8192)]


def test_under_data_parallel_attention_the_ranks_share_is_not_known():
    server = Server(framework="sglang", config={"tp_size": 8, "dp_attention": True})
    assert known_of(server, HYBRID).tp is None
