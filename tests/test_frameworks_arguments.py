"""Argument dumps are read whole or cut, never evaluated, and a cut value is never half a number."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.frameworks.arguments import (
    as_flag,
    as_int,
    as_text,
    parse_call,
    parse_command_line,
    parse_literal,
    parse_pairs,
)


def test_a_dataclass_repr_gives_its_fields_nested_calls_included():
    text = (
        "server_args=ServerArgs(model_path='/models/a', tp_size=8, mem_fraction_static=0.85, disable_radix_cache=False, "
        "kv=None, cuda_graph_config=CudaGraphConfig(decode=PhaseConfig(backend='full', max_bs=8, bs=[1, 2, 4])), last='x')"
    )
    got = parse_call(text)
    assert got["model_path"] == "/models/a"
    assert got["tp_size"] == 8
    assert got["mem_fraction_static"] == 0.85
    assert got["disable_radix_cache"] is False
    assert got["kv"] is None
    assert got["cuda_graph_config"] == {"decode": {"backend": "full", "max_bs": 8, "bs": [1, 2, 4]}}
    assert got["last"] == "x"


def test_a_dict_repr_gives_the_same():
    got = parse_literal(
        "{'model_tag': 'a/b', 'max_model_len': 262144, 'speculative_config': {'method': 'mtp', 'n': 3}, 'x': True}"
    )
    assert got == {
        "model_tag": "a/b",
        "max_model_len": 262144,
        "speculative_config": {"method": "mtp", "n": 3},
        "x": True,
    }


def test_the_engine_line_has_bare_words_calls_and_enum_reprs():
    got = parse_pairs(
        "model='a', speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=3), tokenizer_mode=auto, dtype=torch.bfloat16, "
        "max_seq_len=262144, quantization=None, device_config=cuda, compilation_config={'mode': <CompilationMode.VLLM_COMPILE: 3>, "
        "'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, 'sizes': [1, 2]}, last=auto,"
    )
    assert got["dtype"] == "torch.bfloat16"
    assert got["max_seq_len"] == 262144
    assert got["quantization"] is None
    assert got["speculative_config"] == {"method": "mtp", "num_spec_tokens": 3}
    assert got["compilation_config"]["cudagraph_mode"] == "CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)"
    assert got["compilation_config"]["sizes"] == [1, 2]


@pytest.mark.parametrize(
    "cut",
    [
        "ServerArgs(tp_size=8, context_length=2621",
        "ServerArgs(tp_size=8, model_path='/mod",
        "ServerArgs(tp_size=8, dtype=bfl",
        "ServerArgs(tp_size=8, context_length=",
        "ServerArgs(tp_size=8, a=C(b=1, context_length=26",
    ],
)
def test_a_value_cut_by_the_end_of_the_line_is_dropped_and_the_rest_kept(cut):
    got = parse_call(cut)
    assert got["tp_size"] == 8
    assert "context_length" not in got
    assert "model_path" not in got
    assert "dtype" not in got


def test_commas_brackets_and_quotes_inside_strings_do_not_end_a_value():
    got = parse_call(r"Namespace(a='x, y) z', b=\"it's\", c='q\'uote', d=3)".replace('\\"', '"'))
    assert got == {"a": "x, y) z", "b": "it's", "c": r"q\'uote", "d": 3}


def test_a_command_line_gives_flags_in_either_form_and_ends_at_a_pipe():
    got = parse_command_line(
        "python3 -m sglang.launch_server --model-path /m --tp=8 --enable-metrics --mem-fraction-static 0.85 2>&1 | tee log --tp 9"
    )
    assert got["model_path"] == "/m"
    assert got["tp"] == "8"
    assert got["enable_metrics"] is True
    assert got["mem_fraction_static"] == "0.85"


@pytest.mark.parametrize("number", ["9" * 200_000, "9_" * 100_000, "1." + "9" * 200_000, "9" * 200_000 + "e"])
def test_a_number_without_end_takes_no_longer_than_its_digits(number):
    started = time.perf_counter()
    assert parse_call(f"f(a={number} x, b=1)")["b"] == 1
    assert time.perf_counter() - started < 1


def test_nesting_without_end_is_refused_quickly():
    assert isinstance(parse_literal("(" * 100_000), list)
    assert parse_call("f(" * 100_000 + "a=1").get("a") is None


@given(st.text(alphabet="ab=,()[]{}'\"<>:1.5 \\", max_size=200))
def test_no_text_raises(text):
    parse_literal(text)
    parse_call(text)
    parse_pairs(text)
    parse_command_line(text)


def test_human_readable_sizes_follow_vllm():
    assert as_int("128k") == 128_000
    assert as_int("128K") == 131_072
    assert as_int("2.5") is None
    assert as_int(True) is None
    assert as_text("None") is None
    assert as_flag("True") is True
