"""The bundled table: every row is complete, sourced and readable; names find their row and no other size's."""

from __future__ import annotations

import pytest

from memledger.model import kv, state, table
from memledger.model.architecture import Parallel


@pytest.mark.parametrize("name", table.names())
def test_every_row_reads_and_names_its_source(name):
    found = table.look_up(name)
    assert found is not None
    assert found.exact
    assert found.row == name
    model = found.architecture
    assert model.name == name
    assert len(model.source) > len(f"bundled table, {name}: ") + 10
    tokens = kv.model_token_bytes(model, Parallel(), layers="all")
    slot = state.slot_bytes(model, Parallel(), "bfloat16", "float32").total
    assert tokens or slot
    assert bool(slot) == bool(model.state_layers)


def test_at_least_forty_models():
    assert len({table.take_apart(name).key for name in table.names()}) >= 40


def row(name: str) -> str | None:
    found = table.look_up(name)
    return found.row if found else None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B"),
        ("qwen3-32b", "Qwen/Qwen3-32B"),
        ("/models/Qwen3-32B/", "Qwen/Qwen3-32B"),
        ("C:\\models\\Qwen3-32B", "Qwen/Qwen3-32B"),
        ("/cache/hub/models--Qwen--Qwen3.5-9B/snapshots/0123abc", "Qwen/Qwen3.5-9B"),
        ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B-FP8"),
        ("someone/Qwen3-32B-AWQ", "Qwen/Qwen3-32B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
        ("someone/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "meta-llama/Meta-Llama-3.1-8B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B"),
        ("/data/Qwen3-30B-A3B-Thinking-2507-AWQ-4bit", "Qwen/Qwen3-30B-A3B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("gemma-3-12b-it-qat-autoawq", "google/gemma-3-12b-it"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-R1"),
        ("/models/Qwen3.8-27B-INT4", "Qwen/Qwen3.8-27B"),
        ("Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-32B-Instruct"),
        ("/models/GLM-5.2-W4A16-55c92ae", "zai-org/GLM-5.2"),
        ("Nemotron-3-Nano-30B-A3B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    ],
)
def test_a_name_finds_its_row(asked, expected):
    assert row(asked) == expected


@pytest.mark.parametrize(
    "asked",
    [
        "Qwen/Qwen3-7B",
        "Qwen/Qwen3-320B",
        "Qwen3.8-72B",
        "GLM-4.5-Air-REAP-82B-A12B-AWQ-4bit",
        "Qwen3.5-27B-Claude-Distilled",
        "meta-llama/Llama-3.1",
        "EAGLE3-LLaMA3.1-Instruct-8B",
        "Qwen3-VL-Embedding-2B",
        "target",
        "model",
        "",
        "/",
        "Instruct",
        "FP8",
    ],
)
def test_another_size_or_a_changed_model_finds_nothing(asked):
    assert table.look_up(asked) is None


def test_every_size_of_a_family_keeps_its_own_row():
    """No name of one row, with any usual ending, may reach a row with other layers."""
    for name in table.names():
        found = table.look_up(name)
        assert found is not None
        for ending in ("-FP8", "-AWQ", "-GPTQ-Int4", "-NVFP4", "-Instruct-2507"):
            other = table.look_up(name + ending)
            assert other is not None, name + ending
            assert other.architecture.layers == found.architecture.layers, name + ending


def test_an_exact_row_keeps_its_quantisation():
    found = table.look_up("Qwen/Qwen3-30B-A3B-FP8")
    assert found is not None
    assert found.architecture.quantization is not None
    assert not found.architecture.quantization.named_only
    assert found.architecture.quantization.group == 128


def test_a_quantised_copy_is_known_by_its_name_only():
    found = table.look_up("someone/Qwen3-32B-AWQ")
    assert found is not None
    assert not found.exact
    assert found.architecture.quantization is not None
    assert found.architecture.quantization.named_only
    assert "quantisation as the name says" in found.architecture.notes


def test_another_organisations_copy_may_skip_other_modules():
    own, other = table.look_up("nvidia/Qwen3-235B-A22B-NVFP4"), table.look_up("someone/Qwen3-235B-A22B-NVFP4")
    assert own is not None
    assert other is not None
    assert own.exact
    assert not other.exact
    assert other.architecture.quantization is not None
    assert other.architecture.quantization.mixed


def test_a_name_without_endings_does_not_make_a_quantised_row_16_bit():
    found = table.look_up("DeepSeek-V3.1")
    assert found is not None
    assert found.architecture.quantization is not None
    assert found.architecture.quantization.mixed


def test_natively_quantised_models_stay_so():
    found = table.look_up("deepseek-ai/DeepSeek-R1-0528")
    assert found is not None
    assert found.architecture.quantization is not None
    assert found.architecture.quantization.method == "fp8"


def test_a_later_date_may_have_another_context_length():
    dated, tuned = table.look_up("Qwen3-30B-A3B-Instruct-2507"), table.look_up("Llama-3.1-8B-Instruct")
    assert dated is not None
    assert tuned is not None
    assert dated.architecture.max_positions is None
    assert tuned.architecture.max_positions == 131072


def test_by_class_and_dimensions():
    found = table.look_up_class("Qwen3NextForCausalLM", num_hidden_layers=48, hidden_size=2048)
    assert found is not None
    assert found.row == "Qwen/Qwen3-Next-80B-A3B"
    assert found.architecture.quantization is not None
    assert found.architecture.quantization.mixed


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"hidden_size": 4096}),
        ("LlamaForCausalLM", {"hidden_size": 4096, "num_hidden_layers": 33}),
        ("NoSuchClass", {"hidden_size": 4096, "num_hidden_layers": 32}),
    ],
)
def test_a_class_alone_is_not_enough(name, dimensions):
    assert table.look_up_class(name, **dimensions) is None


def test_a_class_that_fits_several_models_is_not_enough():
    """Qwen3-4B and its embedding relative differ in vocabulary only."""
    assert table.look_up_class("Qwen3ForCausalLM", hidden_size=2560, num_hidden_layers=36) is None
    found = table.look_up_class("Qwen3ForCausalLM", hidden_size=2560, num_hidden_layers=36, vocab_size=151936)
    assert found is not None
    assert found.row == "Qwen/Qwen3-4B"


def test_a_hash_is_a_revision_and_a_word_or_a_number_is_not():
    assert table.take_apart("GLM-5.2-55c92ae").key == table.take_apart("GLM-5.2").key
    assert table.take_apart("model-20250731").key != table.take_apart("model").key
    assert table.take_apart("model-defaced").key != table.take_apart("model").key
    assert table.take_apart("model-30b").key != table.take_apart("model").key
