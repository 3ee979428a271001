import json
import os
from pathlib import Path

import pytest

from memledger.model.find import LARGEST_CONFIG, ModelConfigError, cache_folder, find, read_file

NAME = "some-org/Tiny-Model"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    """No test sees the user's cache."""
    find.cache_clear()
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    yield
    find.cache_clear()


def write(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({**CONFIG, **changes}))
    return file


def snapshot(tmp_path, commit, **changes):
    return write(tmp_path / "hf" / "hub" / "models--some-org--Tiny-Model" / "snapshots" / commit, **changes)


def test_the_file_that_the_user_names_comes_before_everything(tmp_path):
    snapshot(tmp_path, "a" * 40, num_hidden_layers=3)
    file = write(tmp_path / "own", num_hidden_layers=5)
    for given in (file, file.parent):
        found = find(NAME, config=given)
        assert len(found.architecture.layers) == 5
        assert found.how == f"--model-config {given}"


def test_the_models_own_folder_comes_before_the_table(tmp_path):
    file = write(tmp_path / "Qwen3-4B")
    found = find(str(file.parent))
    assert len(found.architecture.layers) == 2
    assert found.how.startswith("the model's folder: ")


def test_the_snapshot_of_main_is_read_from_the_cache(tmp_path):
    snapshot(tmp_path, "a" * 40, num_hidden_layers=3)
    snapshot(tmp_path, "b" * 40, num_hidden_layers=4)
    refs = tmp_path / "hf" / "hub" / "models--some-org--Tiny-Model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    assert len(find(NAME).architecture.layers) == 3


def test_without_a_main_the_newest_snapshot_is_read(tmp_path):
    old = snapshot(tmp_path, "a" * 40, num_hidden_layers=3)
    snapshot(tmp_path, "b" * 40, num_hidden_layers=4)
    os.utime(old, (1, 1))
    found = find(NAME)
    assert len(found.architecture.layers) == 4
    assert found.how.startswith("Hugging Face cache: ")


def test_a_path_inside_another_cache_finds_the_snapshot_here(tmp_path):
    snapshot(tmp_path, "a" * 40, num_hidden_layers=3)
    there = f"/elsewhere/hub/models--some-org--Tiny-Model/snapshots/{'a' * 40}"
    assert len(find(there).architecture.layers) == 3


def test_no_live_looks_at_no_file_but_the_one_named(tmp_path):
    snapshot(tmp_path, "a" * 40)
    found = find(NAME, look_here=False)
    assert found.architecture is None
    assert "bundled table" in found.how
    assert "--model-config" in found.how
    assert find(NAME, config=write(tmp_path / "own"), look_here=False).architecture is not None


def test_the_table_is_last():
    found = find("Qwen/Qwen3-4B", look_here=False)
    assert len(found.architecture.layers) == 36
    assert found.how == "bundled table: Qwen/Qwen3-4B"


def test_without_a_model_the_reason_says_what_would_help():
    assert "names no model" in find(None).how


@pytest.mark.parametrize("name", ["../../etc", "..", "a/../b", "/no/such\0path", "~nobody-here/x", "x" * 5000])
def test_hostile_names_find_nothing(name):
    assert find(name).architecture is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "not modelled"),
        (b" " * (LARGEST_CONFIG + 1), "larger than"),
        (json.dumps({**CONFIG, "num_hidden_layers": 10**12}).encode(), "which no model has"),
        (json.dumps({**CONFIG, "num_attention_heads": 0, "head_dim": None}).encode(), "num_attention_heads"),
        (json.dumps({**CONFIG, "hidden_size": "large"}).encode(), "config.json"),
    ],
    ids=("cut", "deep", "list", "empty", "large", "layers", "zero", "words"),
)
def test_a_file_that_is_no_models_config_is_one_sentence(tmp_path, content, says):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelConfigError, match=says) as error:
        read_file(file)
    assert "\n" not in str(error.value)


def test_missing_files_devices_and_folders_without_a_config_are_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ModelConfigError, match="no such file"):
            read_file(path)


def test_a_format_of_weights_in_its_own_file_is_read(tmp_path):
    file = write(tmp_path / "own")
    (tmp_path / "own" / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_file(file).quantization is not None


def test_the_cache_is_where_its_own_library_looks(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other"


# Fields that no model has


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("intermediate_size", -1),
        ("vocab_size", 0),
        ("head_dim", 0),
        ("head_dim", float("nan")),
        ("hidden_size", float("inf")),
        ("num_key_value_heads", "8"),
        ("num_attention_heads", True),
        ("max_position_embeddings", 1.5),
        ("intermediate_size", 10**30),
        ("rope_theta", 10**400),
        ("torch_dtype", 16),
        ("quantization_config", "fp8"),
    ],
)
def test_nonsense_is_refused_by_the_fields_name(tmp_path, field, value):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, field: value}))
    with pytest.raises(ModelConfigError, match=field):
        read_file(file)


def test_pipes_and_devices_are_told_from_missing_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ModelConfigError, match="a pipe or device, not a file"):
            read_file(path)
