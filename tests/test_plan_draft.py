"""Drafts of speculative decoding in plans: charged where they are known, refused with a way out where they are not."""

import json
from pathlib import Path

import msgspec
import pytest

from memledger import pipeline, plan_draft
from memledger.cli import app
from memledger.model import table
from memledger.model.architecture import NotModelledError, Parallel
from memledger.model.config import read_config
from memledger.plan import Facts, Target, make_plan
from memledger.units import GIB, Amount

FIXTURES = Path(__file__).parent.parent / "fixtures"
EAGLE = {
    # One layer of the width of an 8B model, as EAGLE drafts of it have.
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 128256,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
DRAFT = read_config(EAGLE, "eagle")


def architecture(name):
    match = table.look_up(name)
    assert match is not None, name
    return match.architecture


def logged(name):
    return pipeline.explain([str(FIXTURES / name / "server.log")]).servers[-1]


def spec(**more):
    return {"speculative_draft_tokens": 3, **more}


# Which drafts are known


@pytest.mark.parametrize(
    ("framework", "algorithm", "model", "draft", "known"),
    [
        ("vllm", "ngram", "Llama-3.1-8B-Instruct", None, True),
        ("vllm", "mtp", "Qwen3.5-27B", None, True),
        ("vllm", "qwen3_next_mtp", "Qwen3-Next-80B-A3B", None, True),
        ("vllm", "mtp", "Llama-3.1-8B-Instruct", None, False),
        ("vllm", "eagle3", "Llama-3.1-8B-Instruct", None, False),
        ("vllm", "eagle3", "Llama-3.1-8B-Instruct", DRAFT, True),
        ("sglang", "NGRAM", "Llama-3.1-8B-Instruct", None, True),
        ("sglang", "EAGLE", "Qwen3.5-27B", None, True),
        ("sglang", "EAGLE", "Llama-3.1-8B-Instruct", None, False),
        ("sglang", "STANDALONE", "Qwen3.5-27B", None, False),
    ],
)
def test_a_draft_is_known_or_its_config_is_asked_for(framework, algorithm, model, draft, known):
    why = plan_draft.missing(spec(speculative_algorithm=algorithm), architecture(model), draft, framework)
    assert (why is None) is known
    if why is not None:
        assert "--draft-config FILE" in why and "not known" in why


def test_a_draft_of_the_targets_embedding_has_a_range_and_a_model_of_its_own_has_not_that():
    shared, own = (
        plan_draft.weights(spec(speculative_algorithm=name), None, DRAFT, Parallel(), "vllm")
        for name in ("eagle3", "draft_model")
    )
    embeddings = 2 * 128256 * 4096 * 2
    assert shared.low < shared.bytes < shared.high
    assert shared.low == own.low - embeddings
    assert shared.high == own.high + 3 * 4096 * 4096 * 2


# vLLM


CARD = Amount(80 * GIB)


def dense_8b(target=None, draft=None, total=CARD, **settings):
    facts = Facts("vllm", "0.24.0", architecture("Llama-3.1-8B-Instruct"), "x", total, draft=draft, draft_how="given")
    return make_plan(None, settings, target or Target(), facts)


def test_eagles_layers_share_the_pool():
    plain = dense_8b(Target(4, 8192), total=None)
    drafted = dense_8b(Target(4, 8192), DRAFT, None, speculative_algorithm="eagle3", speculative_draft_tokens=2)
    # 33 layers' KV instead of 32: memory-math 8, row V9b.
    assert drafted.needed_bytes * 32 == plain.needed_bytes * 33


def test_an_unknown_eagle_is_refused():
    with pytest.raises(NotModelledError, match="eagle3: what the draft's weights and KV take"):
        dense_8b(speculative_algorithm="eagle3", speculative_draft_tokens=2)


def test_draft_weights_come_off_the_budget():
    plain, drafted = dense_8b(), dense_8b(None, DRAFT, speculative_algorithm="eagle3", speculative_draft_tokens=2)
    size = plan_draft.weights(spec(speculative_algorithm="eagle3"), None, DRAFT, Parallel(), "vllm")
    assert plain.available_bytes - drafted.available_bytes == size.bytes
    assert any(text.startswith("the draft's weights take") for text in drafted.assumptions)


def hybrid(name, **settings):
    return make_plan(logged(name), settings, Target(), Facts("vllm", None, architecture("Qwen3.5-27B"), "x"))


def test_a_logged_pool_gives_room_to_a_drafts_weights():
    plan = hybrid("vllm-0.25-hybrid", speculative_algorithm="mtp", speculative_draft_tokens=3)
    come = plan.after.accounts["weights/model"] - plan.before.accounts["weights/model"]
    assert come == plan_draft.weights(spec(), architecture("Qwen3.5-27B"), None, Parallel(), "vllm").bytes > 0
    pool = plan.before.under("kv_cache") + plan.before.under("recurrent_state")
    assert pool - plan.available_bytes == come


def test_a_pool_given_in_bytes_keeps_them():
    plan = hybrid("vllm-0.28-hybrid-mtp-kv-bytes", speculative_algorithm="none", speculative_draft_tokens=0)
    assert plan.after.accounts["weights/model"] < plan.before.accounts["weights/model"]
    assert plan.available_bytes == 40 * GIB


# SGLang


def demo(draft=None, **settings):
    server = pipeline.explain([str(FIXTURES / "demo" / "server.log")]).servers[-1]
    return make_plan(server, settings, Target(), Facts("sglang", draft=draft, draft_how="given"))


def test_a_new_draft_takes_weights_kv_and_budget():
    plan = demo(speculative_algorithm="EAGLE", speculative_draft_tokens=4)
    assert plan.before.accounts["weights/draft"] == 0 < plan.after.accounts["weights/draft"]
    assert plan.after.accounts["kv_cache/draft"] > 0
    before, after = (side.under("kv_cache") + side.under("recurrent_state") for side in (plan.before, plan.after))
    # From 0.5.14 the weights come before the pools; what rounding leaves of a slot aside.
    assert before - after == pytest.approx(plan.after.accounts["weights/draft"], abs=0.3 * GIB)
    low, high = plan.after.ranges["kv_tokens"]
    assert low < plan.after.capacity.kv_tokens < high


def test_a_method_without_a_model_takes_neither():
    plan = demo(speculative_algorithm="NGRAM", speculative_draft_tokens=4)
    assert "kv_cache/draft" not in plan.after.accounts
    assert plan.after.accounts.get("weights/draft", 0) == 0


def test_a_draft_of_another_model_needs_its_config():
    with pytest.raises(NotModelledError, match="standalone: what the draft's weights"):
        demo(speculative_algorithm="STANDALONE", speculative_draft_tokens=4)
    plan = demo(DRAFT, speculative_algorithm="STANDALONE", speculative_draft_tokens=4)
    assert plan.after.accounts["kv_cache/draft"] == (plan.after.capacity.kv_tokens + 1) * 2 * 8 * 128 * 2


def test_drafts_that_go_leave_nothing_behind():
    plan = make_plan(
        logged("sglang-0.5.20-hybrid-mtp-tp2"), {"speculative_algorithm": "none"}, Target(), Facts("sglang")
    )
    for name in ("weights/draft", "kv_cache/draft", "cuda_graphs/draft"):
        assert plan.before.accounts[name] > 0 == plan.after.accounts[name], name


def test_more_draft_tokens_leave_the_draft_as_it_is():
    server = logged("sglang-0.5.20-hybrid-mtp-tp2")
    plan = make_plan(server, {"speculative_draft_tokens": 6, "state_slots": 81}, Target(), Facts("sglang"))
    assert plan.before.accounts["weights/draft"] == plan.after.accounts["weights/draft"]
    assert plan.after.accounts["kv_cache/draft"] > 0


def test_a_release_that_is_not_known_decides_who_pays():
    server = msgspec.structs.replace(logged("demo"), framework_version=None)
    with pytest.raises(NotModelledError, match=r"from 0\.5\.14 the draft's weights"):
        make_plan(server, {"speculative_algorithm": "EAGLE", "speculative_draft_tokens": 4}, Target(), Facts("sglang"))


# On the command line


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft.json").write_text(json.dumps(EAGLE))

    def call(*args):
        code = app.run(["plan", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


BARE = (
    "--framework",
    "vllm",
    "--framework-version",
    "0.24.0",
    "--model",
    "Llama-3.1-8B-Instruct",
    "--set",
    "pool_bytes=20GiB",
)
EAGLE3 = ("--set", "speculative_algorithm=eagle3", "--set", "speculative_draft_tokens=2")


def test_the_drafts_config_on_the_command_line(run):
    code, out, _ = run(*BARE, *EAGLE3, "--draft-config", "draft.json")
    assert code == 0 and "the draft: --draft-config draft.json" in out
    code, _, err = run(*BARE, *EAGLE3)
    assert code == 3 and "--draft-config FILE" in err
    code, _, err = run(*BARE, "--draft-config", "draft.json")
    assert code == 2 and "neither the log nor a setting has speculative decoding" in err
    code, _, err = run(*BARE, *EAGLE3, "--draft-config", "absent.json")
    assert code == 4 and "absent.json" in err


def test_the_drafts_name_is_in_the_flags(run):
    code, out, _ = run(
        *BARE, *EAGLE3, "--draft-config", "draft.json", "--set", "speculative_draft_model=org/draft", "--format", "json"
    )
    assert code == 0
    flags = json.loads(out)["plan"]["flags"]
    assert '{"method":"eagle3","model":"org/draft","num_speculative_tokens":2}' in flags
