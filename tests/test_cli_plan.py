"""`memledger plan` on the command line: exit codes, the text, the JSON document and its schema."""

import json
from pathlib import Path

import jsonschema
import pytest

from memledger.cli import app
from memledger.plan_values import Plan
from memledger.report.plan_json import schema, schema_text
from memledger.report.plan_text import render
from memledger.report.text import Style
from memledger.resources import demo_log

ROOT = Path(__file__).parent.parent
SCHEMA_FILE = ROOT / "docs" / "schema" / "plan.schema.json"
DEMO = str(demo_log())
BARE = ("--framework", "vllm", "--framework-version", "0.33.0")
NEXT = {
    # Fields of Qwen3-Next-80B-A3B's config.json that layer sizes need.
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))

    def call(*args):
        code = app.run(["plan", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def config(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(NEXT))
    return str(tmp_path / "model")


def document(out):
    found = json.loads(out)
    jsonschema.validate(found, schema())
    return found


def test_the_schema_in_docs_is_current(request):
    if request.config.getoption("--update-golden", default=False):
        SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "pytest --update-golden writes it anew"


def test_the_demo_in_words(run):
    code, out, err = run(DEMO, "--concurrency", "4", "--context", "128k", "--no-live")
    assert (code, err) == (0, "")
    head = " ".join(out.split("\n\n")[1].split())
    assert head.startswith("4 requests of 131,072 tokens at once can be served: --max-mamba-cache-size 20")
    table = {" ".join(line.split()[:-3]): line.split()[-3:] for line in out.splitlines() if "  " in line}
    assert table["KV tokens"] == ["330,323", "574,619", "+244,296"]
    assert table["state slots"] == ["124", "20", "-104"]
    assert table["recurrent_state/ssm"] == ["17.58", "2.95", "-14.62"]
    assert "not modelled CUDA graphs" in out


def test_lines_keep_the_width(run):
    out = run(DEMO, "--concurrency", "5", "--context", "128k", "--width", "60")[1]
    assert max(map(len, out.splitlines())) <= 60


def test_a_target_out_of_reach_exits_1(run):
    code, out, _ = run(DEMO, "--concurrency", "5", "--context", "128k")
    assert code == 1
    assert "can't be served: it takes 43.7 GiB of pools; there are 38.1 GiB" in " ".join(out.split())
    code, out, _ = run(DEMO, "--concurrency", "5", "--context", "128k", "--format", "json")
    assert code == 1
    plan = document(out)["plan"]
    assert plan["feasible"] is False and plan["needed_bytes"] > plan["available_bytes"] and plan["instead"]


def test_the_json_document(run):
    code, out, _ = run(DEMO, "--concurrency", "4", "--context", "131072", "--format", "json")
    found = document(out)
    assert code == 0 and found["schema"] == "memledger/1"
    assert [source["name"] for source in found["sources"]] == ["log", "model"]
    plan = found["plan"]
    assert plan["inputs"] == {"concurrency": 4, "context": 131072}
    assert plan["flags"] == ["--max-mamba-cache-size", "20", "--max-running-requests", "4"]
    for name in ("before", "after"):
        assert {"accounts", "capacity"} <= set(plan[name])


def test_without_a_log_vllm(run, config):
    code, out, _ = run(
        *BARE, "--model-config", config, "--set", "pool_bytes=40GiB", "--set", "context_length=262144",
        "--set", "state_dtype=float32", "--format", "json",
    )  # fmt: skip
    assert code == 0
    after = document(out)["plan"]["after"]["capacity"]
    assert (after["kv_blocks"], after["kv_block_tokens"], after["kv_tokens"]) == (1654, 1056, 1700337)
    assert after["concurrency"] == {"tokens_per_request": 262144, "requests": 6.486274509803922}


def test_without_a_log_sglang(run, config):
    code, out, _ = run(
        "--framework", "sglang", "--set", "state_slots=256", "--set", "tp_size=4", "--model-config", config,
        "--format", "json",
    )  # fmt: skip
    assert code == 0
    accounts = document(out)["plan"]["after"]["accounts"]
    assert accounts["recurrent_state/conv"] + accounts["recurrent_state/ssm"] == 4964401152


def test_a_model_of_the_table_and_a_card(run):
    code, out, err = run(
        *BARE, "--model", "Qwen/Qwen3.5-27B", "--gpu", "h200", "--concurrency", "4", "--context", "128k"
    )
    assert (code, err) == (0, "")
    assert "bundled table: Qwen/Qwen3.5-27B" in out
    assert "(least and most in public logs)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((), "Give a log"),
        ((DEMO,), "Nothing to plan"),
        ((DEMO, "--concurrency", "4"), "--concurrency needs --context"),
        ((DEMO, "--framework", "vllm", "--context", "1k"), "without a log"),
        (BARE, "--model-config FILE or --model NAME"),
        ((DEMO, "--set", "state_dtpe=x"), "did you mean state_dtype"),
        ((DEMO, "--concurrency", "0", "--context", "1k"), "at least 1"),
        ((DEMO, "--context", "long"), "not a count"),
        ((*BARE, "--model", "Qwen3.5-27B", "--gpu", "h1000"), "no card"),
        ((DEMO, "--context", "1k", "--start", "9"), "there is no start 9"),
        ((DEMO, "--set", "state_slots=20", "--set", "state_slots=30"), "state_slots is set twice"),
        ((DEMO, "--set", "context_length=4k", "--context", "8k"), "context_length=4096 contradicts --context 8192"),
        (
            (DEMO, "--set", "max_running_requests=2", "--concurrency", "4", "--context", "8k"),
            "max_running_requests=2 contradicts --concurrency 4",
        ),
        (
            (DEMO, "--set", "state_slots=5", "--concurrency", "4", "--context", "8k"),
            "state_slots=5 contradicts --concurrency 4: that takes 20 slots",
        ),
        (
            (DEMO, "--set", "state_slots=40", "--concurrency", "4", "--context", "8k"),
            "state_slots=40 and --concurrency: the load asked for decides it (20)",
        ),
        ((DEMO, "--context", "8k", "--framework-version", "0.5.9"), "contradicts the log, which is of 0.5.18"),
        ((DEMO, "--context", "8k", "--framework-version", "newest"), "'newest' is no version"),
        ((DEMO, "--context", "8k", "--framework-version", "0.5zzz"), "'0.5zzz' is no version"),
        ((DEMO, "--context", "8k", "--gpu", "a100-40"), "more free memory than that card has"),
        ((DEMO, "--set", "kv_cache_dtype=int4"), "none of auto, fp8_e5m2, fp8_e4m3, bf16, bfloat16"),
        ((*BARE, "--model", "Qwen3.5-27B", "--set", "kv_cache_dtype=int4"), "none of auto, bfloat16, float16, fp8"),
        ((*BARE, "--model", "Qwen3.5-27B", "--set", "state_cache_mode=some"), "none of none, align, all"),
        ((DEMO, "--set", "state_dtype=int8"), "none of float32, bfloat16, float16"),
        ((DEMO, "--set", "memory_fraction=1.5"), "at most 1"),
        ((DEMO, "--set", "memory_fraction=٠.٩"), "positive number"),
        ((DEMO, "--set", "state_slots=1_000"), "not a count"),
        ((DEMO, "--set", "state_slots=٢٠"), "not a count"),
        ((DEMO, "--set", "state_slots=2 0"), "not a count"),
        ((DEMO, "--context", " 1k"), "not a count"),
        ((DEMO, "--set", "tp_size=4097"), "at most 4,096"),
        ((DEMO, "--set", "speculative_algorithm=EAGLE"), "needs --set speculative_draft_tokens=N"),
        ((DEMO, "--set", "speculative_draft_tokens=4"), "needs --set speculative_algorithm=NAME"),
    ],
)
def test_wrong_usage(run, args, why):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert why in " ".join(err.split())


def test_slots_that_serve_no_request_do_not_do(run):
    code, out, _ = run(DEMO, "--set", "state_slots=2")
    assert code == 1 and "What fits: 5 state slots or more" in " ".join(out.split())
    assert run(DEMO, "--set", "state_slots=8")[0] == 0


def test_requests_longer_than_the_model_do_not_do(run, config):
    args = (*BARE, "--model-config", config, "--set", "pool_bytes=400GiB", "--concurrency", "1", "--context")
    assert run(*args, "256k")[0] == 0
    code, out, _ = run(*args, "512k")
    assert code == 1
    said = " ".join(out.split())
    assert "1 request of 524,288 tokens at once can't be served." in said
    assert said.count("longer than the model's 262,144 positions: the engines refuse it unless overridden") == 2
    assert run(*args[:-3], "--set", "context_length=512k")[0] == 1


def test_lengths_past_the_log_with_an_unknown_model_are_assumed(run):
    out = run(str(ROOT / "fixtures" / "sglang-0.5.20-hybrid-mtp-tp2" / "server.log"), "--context", "512k")[1]
    assert "assumed that the model takes 524,288 tokens; the log's longest is 262,144" in " ".join(out.split())


def test_with_data_parallelism_the_flags_are_totals(run):
    args = ("--framework", "sglang", "--framework-version", "0.5.23.post1", "--model", "Qwen3.5-27B", "--gpu", "h200")
    load = ("--concurrency", "4", "--context", "16k", "--set", "max_running_requests=8", "--set", "tp_size=2")
    assert run(*args, *load)[0] == 2
    assert run(*args, *load, "--set", "dp_size=2", "--set", "dp_attention=on")[0] == 0


@pytest.mark.parametrize(
    "version", ["0.33.0", "v0.33.0", "0.33.0rc1", "0.33.0.dev12+gabc123.cu129", "0.33.0+cu130", "0.33.0+abc1"]
)
def test_versions_as_engines_print_them(run, config, version):
    args = ("--framework", "vllm", "--framework-version", version, "--model-config", config)
    assert run(*args, "--set", "pool_bytes=40GiB")[0] == 0


def test_the_cards_of_a_log_are_named(run):
    code, out, _ = run(DEMO, "--gpu", "h100", "--set", "gpu_total_bytes=140GiB")
    assert code == 0
    said = " ".join(out.split())
    assert "the log's card: H100, 79.20 GiB (--gpu) another card: 140.00 GiB (gpu_total_bytes)" in said
    assert run(DEMO, "--context", "8k", "--framework-version", "0.5.18", "--gpu", "80GiB")[0] == 0


def test_what_could_not_be_planned_is_one_sentence_and_exit_3(run, config):
    args = ("--framework", "vllm", "--model-config", config, "--set", "pool_bytes=40GiB")
    code, out, err = run(*args)
    assert (code, out) == (3, "")
    assert err == "memledger: Nothing could be planned: vLLM's pool differs by version: --framework-version N.\n"
    code, out, _ = run(*args, "--format", "json")
    plan = document(out)["plan"]
    assert code == 3 and plan["after"] is None and "--framework-version" in plan["not_modelled"][0]


def test_nothing_recognised_exits_3_with_a_document(run, tmp_path):
    (tmp_path / "other.log").write_text("hello\n")
    code, out, err = run("other.log", "--context", "1k", "--format", "json")
    assert code == 3 and document(out)["plan"] is None
    assert "nothing of SGLang or vLLM" in err


def test_what_can_not_be_read_exits_4(run, tmp_path):
    assert run("missing.log", "--context", "1k")[0] == 4
    (tmp_path / "config.json").write_text("{")
    code, _, err = run(*BARE, "--model-config", "config.json", "--set", "pool_bytes=1GiB")
    assert code == 4 and "not JSON" in err


def test_a_config_that_can_not_be_read_leaves_a_document_without_a_plan(run, tmp_path):
    (tmp_path / "config.json").write_text("{")
    for args in ((*BARE, "--set", "pool_bytes=1GiB"), (DEMO, "--context", "1k")):
        code, out, err = run(*args, "--model-config", "config.json", "--format", "json")
        found = document(out)
        assert code == 4 and found["plan"] is None and "not JSON" in err
        assert found["sources"][-1] == {
            "name": "model",
            "status": "unavailable",
            "reason": "--model-config: config.json: not JSON",
        }


def test_ranges_stand_in_the_table_and_ascii_does():
    out = render(Plan("vllm", "0.33.0", not_modelled=("because",)), Style(unicode=False))
    assert "Nothing could be planned: because." in out and out.isascii()


def test_kv_types_that_came_later_are_refused_for_older_releases(run):
    bare = ("--framework", "sglang", "--model", "Llama-3.1-8B-Instruct", "--set", "pool_bytes=20GiB")
    for version, dtype, since in (
        ("0.5.4", "fp4_e2m1", "0.5.5"),
        ("0.5.15", "nvfp4", "0.5.16"),
        ("0.5.3", "bf16", "0.5.4"),
    ):
        code, _, err = run(*bare, "--framework-version", version, "--set", f"kv_cache_dtype={dtype}")
        assert code == 2 and f"{dtype} came with {since}; this is {version}" in err
        code, _, err = run(*bare, "--framework-version", since, "--set", f"kv_cache_dtype={dtype}")
        assert code == 0, err
    bare = ("--framework", "vllm", "--model", "Llama-3.1-8B-Instruct", "--set", "pool_bytes=20GiB")
    code, _, err = run(*bare, "--framework-version", "0.16.0", "--set", "kv_cache_dtype=nvfp4")
    assert code == 2 and "nvfp4 came with" in err


def test_options_that_nothing_would_hear_are_refused(run):
    code, _, err = run(DEMO, "--keep-prefixes", "3", "--set", "state_slots=20")
    assert code == 2 and "--keep-prefixes needs --concurrency" in err
    code, _, err = run(*BARE, "--model", "Qwen3.5-27B", "--keep-prefixes", "3", "--concurrency", "2", "--context", "4k")
    assert code == 2 and "SGLang only" in err
    code, _, err = run(*BARE, "--model", "Qwen3.5-27B", "--set", "pool_bytes=40GiB", "--start", "2")
    assert code == 2 and "--start is for plans from a log" in err


def test_one_of_anything_is_singular(run):
    code, out, _ = run(DEMO, "--set", "max_running_requests=1")
    assert code == 0 and "1 running request instead of 24" in " ".join(out.split())
    assert "1 running requests" not in out


@pytest.mark.parametrize("width", [40, 50, 60, 80, 100])
def test_ranged_tables_keep_the_width(run, width):
    log = str(ROOT / "fixtures" / "sglang-0.5.20-hybrid-mtp-tp2" / "server.log")
    code, out, _ = run(log, "--set", "speculative_algorithm=none", "--width", str(width))
    assert code == 0
    words = {word for line in out.splitlines() if len(line) > width for word in line.split()}
    assert not {line for line in out.splitlines() if len(line) > width}, words
    assert " to " in out or "to " in out


def test_pages_say_what_they_lose(run):
    out = " ".join(run(DEMO, "--concurrency", "2", "--context", "1000", "--set", "page_size=64")[1].split())
    assert (
        "pages of 64 tokens: requests take whole pages; one of 1,000 tokens leaves 24 tokens of its last unused" in out
    )


def test_several_servers_say_which_is_planned(run):
    other = str(ROOT / "fixtures" / "vllm-0.10.2-actual-usage" / "server.log")
    load = ("--concurrency", "2", "--context", "4k")
    code, out, _ = run(DEMO, other, *load)
    said = " ".join(out.split())
    assert (
        code == 0
        and "start 2 of 2 in the input (/models/example-moe-30b), the last; --start N plans for another" in said
    )
    code, out, _ = run(DEMO, other, *load, "--start", "1")
    assert code == 0 and out.startswith("SGLang 0.5.18") and "in the input" not in out
    found = document(run(DEMO, other, *load, "--format", "json")[1])
    assert found["plan"]["assumptions"][0].startswith("start 2 of 2")


@pytest.mark.parametrize(
    ("log", "helps"),
    [
        ("vllm-0.25-hybrid", "--model-config FILE"),
        ("vllm-0.21-free-memory-fail", "'Available KV cache memory'"),
        ("vllm-0.8.5-v1-tp4", "'Available KV cache memory'"),
    ],
)
def test_refusals_name_what_would_help(run, log, helps):
    code, _, err = run(str(ROOT / "fixtures" / log / "server.log"), "--concurrency", "2", "--context", "1k")
    assert code == 3 and helps in err


def test_a_mistyped_model_is_answered_with_the_nearest_of_the_table(capsys):
    asked = ["plan", "--framework", "vllm", "--framework-version", "0.33.0", "--gpu", "h100-80", "--no-live", "--model"]
    assert app.run([*asked, "Qwen3-Next-80B"]) == app.NOTHING_RECOGNISED
    assert "did you mean Qwen3-Next-80B-A3B?" in capsys.readouterr().err
    assert app.run([*asked, "zzzzzz"]) == app.NOTHING_RECOGNISED
    assert "did you mean" not in capsys.readouterr().err
