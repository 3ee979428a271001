"""Plans: what other settings give, equal to the engines' own figures where those are known.

`tests/data` holds figures computed by vLLM 0.33.0's and SGLang 0.5.23's own planning code for full-size shapes.
"""

import json
import re
from pathlib import Path

import msgspec
import pytest

from memledger import pipeline
from memledger.model import table, vllm
from memledger.model.architecture import NotModelledError
from memledger.plan import Facts, Target, choose_server, make_plan
from memledger.plan_settings import count, parse, sglang_flags, vllm_flags
from memledger.plan_sglang import merged
from memledger.plan_values import Side, change, spread
from memledger.report.plan_text import render
from memledger.report.text import Style
from memledger.units import GIB, Amount
from memledger.words import gib_about

DATA = Path(__file__).parent / "data"
FIXTURES = Path(__file__).parent.parent / "fixtures"
MODELS = {
    "qwen3-next-80b-a3b": "Qwen3-Next-80B-A3B",
    "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B",
    "llama-3.1-8b": "Llama-3.1-8B-Instruct",
}


def architecture(name):
    match = table.look_up(name)
    assert match is not None, name
    return match.architecture


def logged(name):
    return pipeline.explain([str(FIXTURES / name / "server.log")]).servers[-1]


def bare(framework, version, model, total=None, target=None, **settings):
    facts = Facts(framework, version, architecture(model), "the table", total)
    return make_plan(None, settings, target or Target(), facts)


# The engines' own planning code

VLLM_ROWS = [
    row for row in json.loads((DATA / "vllm-0.33.0-planned-pools.json").read_text())["rows"] if "expect" in row
]
SGLANG_ROWS = json.loads((DATA / "sglang-0.5.23-state-pools.json").read_text())["rows"]


@pytest.mark.parametrize("row", VLLM_ROWS, ids=range(len(VLLM_ROWS)))
def test_vllm_pools_come_out_to_the_digit(row):
    settings = {
        "pool_bytes": row["available"],
        "context_length": row["max_model_len"],
        "kernel_block_tokens": row["kernel_block"],
        "prefix_caching": row["mode"] == "align" or not row["state_layers"],
    }
    if row["state_layers"]:
        settings["state_dtype"] = {4: "float32", 2: "bfloat16"}[row["temporal_bytes"] // (32 * 128 * 128)]
    if row["token_bytes"] == 1024:
        settings["kv_cache_dtype"] = "fp8"
    after, expect = bare("vllm", "0.33.0", MODELS[row["model"]], **settings).after, row["expect"]
    assert after.capacity.kv_blocks == expect["num_blocks"]
    assert after.capacity.kv_block_tokens == expect["block_size"]
    assert after.capacity.kv_tokens == expect["tokens"]
    assert after.capacity.concurrency.requests == expect["concurrency"]
    assert after.capacity.concurrency.tokens_per_request == row["max_model_len"]
    unused = after.accounts.get("kv_cache/unused", 0)
    assert after.under("kv_cache") + after.under("recurrent_state") == row["available"]
    assert row["available"] - unused == expect["num_blocks"] * expect["bytes_per_block"]


@pytest.mark.parametrize("row", SGLANG_ROWS, ids=range(len(SGLANG_ROWS)))
def test_sglang_state_comes_out_to_the_byte(row):
    settings = {"state_slots": row["slots"], "tp_size": row["tp"]}
    version = None
    if row["ssm_env"]:
        settings["state_dtype"] = row["ssm_env"]
    if row["spec_draft_tokens"]:
        # Without a radix cache, so that the slots allow all of the requests.
        version = "0.5.23"
        settings |= {
            "speculative_draft_tokens": row["spec_draft_tokens"],
            "max_running_requests": row["spec_state_size"],
            "prefix_caching": False,
        }
    after = bare("sglang", version, MODELS[row["model"]], **settings).after
    assert after.under("recurrent_state") == row["mem_usage_bytes"]
    assert after.capacity.state_slots == row["slots"]


# From a log


def demo(target=None, **settings):
    server = logged("demo")
    return make_plan(server, settings, target or Target(), Facts("sglang"))


def test_the_worked_example_comes_out_to_the_digit():
    plan = demo(Target(4, 131072))
    assert plan.before.capacity.kv_tokens == 330_323 and plan.before.capacity.state_slots == 124
    assert (plan.after.capacity.state_slots, plan.after.capacity.kv_tokens) == (20, 574_619)
    assert round(plan.before.under("recurrent_state") / GIB, 2) == 17.92
    assert round(plan.after.under("recurrent_state") / GIB, 2) == 3.01
    assert plan.flags[:2] == ("--max-mamba-cache-size", "20")
    assert plan.feasible is True
    assert round(plan.needed_bytes / GIB, 2) == 35.01
    assert plan.smallest.capacity.kv_tokens == 524_288
    assert plan.change.capacity["kv_tokens"] == 244_296


def test_state_in_16_bits_besides():
    plan = demo(Target(4, 131072), state_dtype="bfloat16")
    assert (round(plan.after.under("recurrent_state") / GIB, 2), plan.after.capacity.kv_tokens) == (1.53, 598_811)
    assert plan.flags[:2] == ("--mamba-ssm-dtype", "bfloat16")


def test_a_target_that_does_not_fit_says_what_would():
    plan = demo(Target(5, 131072))
    assert plan.feasible is False and plan.binding_limit == "kv_tokens"
    assert plan.needed_bytes > plan.available_bytes
    assert plan.instead[0] == "4 requests of 131,072 tokens"
    assert "--mem-fraction-static 0.922" in plan.instead[2]


def test_what_fits_instead_does_fit_and_one_token_more_does_not():
    longest = int(demo(Target(5, 131072)).instead[1].split()[-2].replace(",", ""))
    assert demo(Target(5, longest)).feasible is True
    assert demo(Target(5, longest + 1)).feasible is False


def test_a_longer_context_than_the_server_has_needs_its_flag():
    plan = demo(Target(1, 300_000))
    assert "--context-length" in plan.flags and "300000" in plan.flags
    assert "--context-length" not in demo(Target(1, 200_000)).flags


def test_pools_stay_within_the_budget_whatever_the_dtype():
    before = demo(Target(4, 131072)).before
    for settings in ({"kv_cache_dtype": "fp8_e4m3"}, {"state_dtype": "bfloat16"}, {"state_slots": 40}):
        plan = demo(**settings)
        pools = plan.after.under("kv_cache") + plan.after.under("recurrent_state")
        assert abs(pools - before.under("kv_cache") - before.under("recurrent_state")) < GIB // 10
        total = sum(plan.after.accounts.values())
        assert total == sum(plan.before.accounts.values()), "what the pools give up is free"


def test_other_shardings_take_weights_and_shapes_along():
    plan = demo(tp_size=2)
    assert plan.flags == ("--tp-size", "2")
    assert 0.49 < plan.after.accounts["weights/model"] / plan.before.accounts["weights/model"] < 0.52
    assert plan.after.capacity.kv_tokens > 2 * plan.before.capacity.kv_tokens


def test_a_setting_that_no_pool_depends_on_is_named_as_not_modelled():
    plan = demo(sampling_backend="pytorch")
    assert plan.change.accounts == {}
    assert "sampling_backend: its effect on memory is not modelled" in plan.not_modelled


def test_without_a_release_every_one_is_in_the_range():
    plan = make_plan(logged("sglang-0.5.10-swa-eagle"), {"memory_fraction": 0.8}, Target(), Facts("sglang"))
    low, high = plan.after.ranges["kv_tokens"]
    assert low <= plan.after.capacity.kv_tokens <= high and low < high
    assert plan.after.accounts["kv_cache/k"] > plan.before.accounts["kv_cache/k"]
    assert any("not certain" in text for text in plan.not_modelled)


def test_pools_larger_than_what_is_free_do_not_start():
    plan = demo(memory_fraction=0.99)
    assert plan.feasible is False
    assert "free" not in plan.after.accounts and "free" not in plan.change.accounts
    pools = sum(plan.after.under(name) for name in ("kv_cache", "recurrent_state", "request_tables"))
    assert plan.needed_bytes == pools > plan.available_bytes > plan.before.accounts["free"]
    text = render(plan)
    assert "would not start: the pools would take more than there is" in text.replace("\n", " ")
    assert re.search(r"free +\S+ +none\n", text)
    loaded = render(demo(Target(4, 8192), memory_fraction=0.99))
    assert "would not start: the pools would take more than there is" in loaded.replace("\n", " ")
    assert "\nsmallest" not in loaded, "what the load needs is not what the pools take"


def test_another_card_changes_the_budget_by_its_fraction_and_the_rest_is_free():
    server = logged("demo")
    plan = make_plan(server, {"gpu_total_bytes": 94 * GIB}, Target(), Facts("sglang", total=Amount(80 * GIB)))
    assert sum(plan.after.accounts.values()) - sum(plan.before.accounts.values()) == 14 * GIB
    pools = [side.under("kv_cache") + side.under("recurrent_state") for side in (plan.before, plan.after)]
    assert abs(pools[1] - pools[0] - 0.85 * 14 * GIB) < GIB // 100


def test_a_target_out_of_reach_shows_what_the_flags_give_not_what_it_needs():
    plan = make_plan(logged("sglang-0.5.10-swa-eagle"), {}, Target(40, 32768), Facts("sglang"))
    assert plan.feasible is False
    assert plan.after.capacity.kv_tokens < plan.smallest.capacity.kv_tokens
    assert plan.after.accounts["free"] > 0


def test_figures_of_the_log_alone_are_ranges():
    plan = make_plan(logged("sglang-0.5.20-hybrid-mtp-tp2"), {}, Target(4, 131072), Facts("sglang"))
    low, high = plan.after.ranges["kv_tokens"]
    assert low < plan.after.capacity.kv_tokens < high
    assert any("rounded" in text for text in plan.assumptions)
    less, more = plan.change.ranges["kv_tokens"]
    assert less < plan.change.capacity["kv_tokens"] < more
    assert f"{less:+,} to {more:+,}" in render(plan, Style(width=100))
    assert "state_slots" not in plan.change.ranges, "exact"


def cut_short(name, **config):
    """A fixture's server whose KV pool a flag cut short: what its budget would have held is in no line."""
    server = logged(name)
    tokens = min(rank.capacity.kv_tokens for rank in server.ranks)
    return msgspec.structs.replace(server, config={**server.config, "max_total_tokens": tokens, **config})


def test_pools_of_an_unknown_budget_are_not_known_after_rather_than_nothing():
    plan = make_plan(cut_short("demo"), {"max_running_requests": 4}, Target(), Facts("sglang"))
    assert plan.before.under("kv_cache") > 0 and plan.before.accounts["free"] > 0
    assert plan.after.capacity.state_slots is not None and plan.after.capacity.kv_tokens is None
    assert not [name for name in plan.after.accounts if name.startswith("kv_cache/") or name == "free"]
    assert not [name for name in plan.change.accounts if name.startswith("kv_cache/") or name == "free"]
    assert plan.feasible is None
    assert plan.not_modelled[0].startswith("not known with these settings: kv_cache/k, kv_cache/v, free, kv_tokens (")
    text = render(plan)
    assert "KV tokens not known" in text and "no capacity changes" not in text
    assert re.search(r"kv_cache/k +\S+ +not known\n", text) and re.search(r"free +\S+ +not known\n", text)


def test_a_plan_of_which_nothing_is_known_is_refused():
    with pytest.raises(NotModelledError, match="not known with these settings: kv_cache/k"):
        make_plan(cut_short("demo"), {"kv_cache_dtype": "fp8_e4m3"}, Target(), Facts("sglang"))


def test_a_load_on_an_unknown_budget_is_served_by_the_smallest_pools():
    plan = make_plan(cut_short("demo"), {}, Target(2, 8192), Facts("sglang"))
    assert "free" not in plan.after.accounts and plan.feasible is None
    assert "served by the smallest pools (below)" in render(plan).replace("\n", " ")


def test_pools_that_are_gone_are_nothing_and_free_holds_them():
    plan = make_plan(
        logged("sglang-0.5.20-hybrid-mtp-tp2"), {"speculative_algorithm": "none"}, Target(), Facts("sglang")
    )
    assert plan.before.accounts["recurrent_state/speculative_ssm"] > 0
    assert plan.after.accounts["recurrent_state/speculative_ssm"] == 0


def hybrid_27b(name, target=None, **settings):
    return make_plan(
        logged(name), settings, target or Target(), Facts("vllm", None, architecture("Qwen3.5-27B"), "the table")
    )


def test_a_vllm_log_gives_its_own_figures_before():
    plan = hybrid_27b("vllm-0.25-hybrid", context_length=32768)
    assert plan.before.capacity.kv_tokens == 794_863 and plan.before.capacity.kv_block_tokens == 784
    assert round(plan.before.capacity.concurrency.requests, 2) == 6.06
    assert plan.after.capacity.kv_blocks == plan.before.capacity.kv_blocks, "the bytes stay"
    assert plan.after.capacity.kv_tokens < plan.before.capacity.kv_tokens, "the printed figure follows the length"
    assert plan.flags == ("--max-model-len", "32768")


def test_the_smallest_vllm_pool_serves_and_one_block_less_does_not():
    plan = hybrid_27b("vllm-0.25-hybrid", Target(4, 65536))
    assert plan.feasible is True
    assert plan.flags[:2] == ("--kv-cache-memory-bytes", str(plan.needed_bytes))
    block = plan.needed_bytes // plan.smallest.capacity.kv_blocks
    assert hybrid_27b("vllm-0.25-hybrid", Target(4, 65536), pool_bytes=plan.needed_bytes).feasible is True
    assert hybrid_27b("vllm-0.25-hybrid", Target(4, 65536), pool_bytes=plan.needed_bytes - block).feasible is False


def test_settings_that_leave_nothing_for_the_pool_are_refused():
    server = logged("vllm-0.25-hybrid")
    server = msgspec.structs.replace(server, config={**server.config, "memory_fraction": 0.9})
    facts = Facts("vllm", None, architecture("Qwen3.5-27B"), "the table", Amount(96 * GIB))
    with pytest.raises(
        NotModelledError, match=r"would not start: these settings leave nothing .* short by [0-9.]+ GiB"
    ):
        make_plan(server, {"memory_fraction": 0.01}, Target(), facts)


def test_what_the_log_prints_as_negative_is_carried_with_a_remark():
    server = logged("vllm-0.25-hybrid")
    (rank,) = server.ranks
    entries = tuple(
        msgspec.structs.replace(e, bytes=-e.bytes) if e.account.startswith("cuda_graphs") else e for e in rank.entries
    )
    server = msgspec.structs.replace(server, ranks=(msgspec.structs.replace(rank, entries=entries),))
    facts = Facts("vllm", None, architecture("Qwen3.5-27B"), "the table")
    plan = make_plan(server, {"context_length": 32768}, Target(), facts)
    (name,) = [name for name, size in plan.after.accounts.items() if size < 0]
    assert f"{name} is printed as negative in the log, and carried as it is" in plan.assumptions


def test_vllm_needs_the_layers():
    with pytest.raises(NotModelledError, match="follows from the model's layers"):
        make_plan(logged("vllm-0.25-hybrid"), {"context_length": 32768}, Target(), Facts("vllm"))


def test_another_models_layers_are_refused():
    with pytest.raises(NotModelledError, match="do not give the log's pool"):
        make_plan(
            logged("vllm-0.25-hybrid"), {"context_length": 32768}, Target(),
            Facts("vllm", None, architecture("Qwen3-Next-80B-A3B"), "x"),
        )  # fmt: skip


# Without a log


def test_a_pool_too_small_for_one_request_would_not_start():
    plan = bare(
        "vllm", "0.33.0", "Qwen3-Next-80B-A3B", pool_bytes=round(1.98 * GIB), context_length=262144,
        state_dtype="float32", prefix_caching=True,
    )  # fmt: skip
    assert plan.feasible is False
    assert plan.instead[0].startswith("--max-model-len ")


@pytest.mark.parametrize(("framework", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_a_card_gives_ranges_and_names_what_was_assumed(framework, version):
    plan = bare(framework, version, "Qwen3.5-27B", Amount(round(139.8 * GIB), round(0.3 * GIB)), Target(4, 131072))
    assert plan.feasible is True
    assert plan.after.ranges["weights/model"][0] < plan.after.ranges["weights/model"][1]
    assert any("weights" in text and "modelled" in text for text in plan.assumptions)
    assert plan.inputs["gpu_total_bytes"] == round(139.8 * GIB)


@pytest.mark.parametrize(("framework", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_what_an_assumed_budget_holds_is_said_as_a_range_and_what_fits_fits_its_least(framework, version):
    card = Amount(140 * GIB)
    plan = bare(framework, version, "Qwen3.5-27B", card, Target(400, 131072))
    low, high = plan.ranges["available_bytes"]
    assert low < plan.available_bytes < high and plan.feasible is False
    ends = (gib_about(int(low)).removesuffix(" GiB"), gib_about(int(high)))
    assert f"there are {ends[0]} to {ends[1]}" in render(plan).replace("\n", " ")
    requests = int(plan.instead[0].split()[0])
    least = {"pool_bytes": int(low)}
    assert bare(framework, version, "Qwen3.5-27B", None, Target(requests, 131072), **least).feasible is True
    assert bare(framework, version, "Qwen3.5-27B", None, Target(requests + 1, 131072), **least).feasible is False


def test_weights_larger_than_the_card_are_refused():
    for framework, version in (("sglang", "0.5.23"), ("vllm", "0.33.0")):
        with pytest.raises(NotModelledError, match="weights leave nothing"):
            bare(framework, version, "Qwen3.5-27B", Amount(40 * GIB))


def test_the_smallest_pools_without_a_budget_leave_feasibility_open():
    for framework, version in (("sglang", "0.5.23"), ("vllm", "0.33.0")):
        plan = bare(framework, version, "Qwen3.5-27B", target=Target(4, 131072))
        assert plan.feasible is None and plan.after is not None
    # The worked example: 697 blocks, 33.35 GiB.
    assert (plan.smallest.capacity.kv_blocks, round(plan.needed_bytes / GIB, 2)) == (697, 33.35)


def test_nothing_to_size_is_refused():
    for framework, version in (("sglang", "0.5.23"), ("vllm", "0.33.0")):
        with pytest.raises(NotModelledError, match=r"nothing to size|not known"):
            bare(framework, version, "Qwen3.5-27B")


def test_vllm_without_a_version_is_refused():
    with pytest.raises(NotModelledError, match="--framework-version"):
        bare("vllm", None, "Qwen3.5-27B", pool_bytes=40 * GIB)


# Settings


def test_settings_are_read_by_kind():
    assert parse(["pool_bytes=40GiB", "context_length=128k", "prefix_caching=off", "memory_fraction=0.9"]) == {
        "pool_bytes": 40 * GIB,
        "context_length": 131072,
        "prefix_caching": False,
        "memory_fraction": 0.9,
    }
    assert parse(["state_slots=20", "state_slots=30"]) == {"state_slots": 30}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("state_dtpe=bfloat16", "did you mean state_dtype"),
        ("state_dtype", "is not name=value"),
        ("state_dtype=", "is not name=value"),
        ("tp_size=two", "not a count"),
        ("tp_size=0", "0 is not possible"),
        ("tp_size=1.5", "not a count"),
        ("pool_bytes=-1GiB", "not a size"),
        ("pool_bytes=9999999TiB", "larger than any memory"),
        ("memory_fraction=nan", "positive number"),
        ("prefix_caching=maybe", "neither on nor off"),
        ("kv_cache_dtype=a b", "letters, digits"),
    ],
)
def test_wrong_settings_say_what_would_do(text, why):
    with pytest.raises(ValueError, match=why):
        parse([text])


@pytest.mark.parametrize(("text", "number"), [("131072", 131072), ("128k", 131072), ("131,072", 131072), ("1m", 2**20)])
def test_counts(text, number):
    assert count(text) == number


def test_flags_by_engine_and_version():
    assert (
        sglang_flags({"state_cache_mode": "extra_buffer"}, ((0, 5, 9), (0, 5, 9)))[0][0] == "--mamba-scheduler-strategy"
    )
    assert sglang_flags({"state_cache_mode": "extra_buffer"}, ((0, 5, 18),) * 2)[0][0] == "--mamba-radix-cache-strategy"
    assert sglang_flags({"prefix_caching": False}, ((0, 5, 18),) * 2)[0] == ["--disable-radix-cache"]
    assert vllm_flags({"prefix_caching": False}, (0, 33, 0))[0] == ["--no-enable-prefix-caching"]
    words, missing = vllm_flags({"pool_bytes": GIB}, (0, 9, 1))
    assert words == [] and "no flag" in missing[0]
    assert vllm_flags({"state_cache_mode": "align"}, (0, 14, 0))[1]


def test_a_flag_given_twice_keeps_its_last_value():
    assert merged(["--a", "1", "--b"], ("--a", "2")) == ("--a", "2", "--b")


def test_changes_and_ranges():
    one, two = Side({"kv_cache/k": 1}), Side({"kv_cache/k": 3})
    assert change(one, two).accounts == {"kv_cache/k": 2}
    assert change(None, two).accounts == {}
    assert spread([one, two, one]) == {"kv_cache/k": (1, 3)}
    assert spread([one, one]) == {}


def test_the_start_with_pools_is_chosen():
    full, empty = logged("demo"), msgspec.structs.replace(logged("demo"), ranks=())
    assert choose_server([full, empty]) is full
    assert choose_server([full, empty], 2) is empty
    with pytest.raises(LookupError, match="no start 3"):
        choose_server([full, empty], 3)


def test_concurrency_is_counted_at_the_length_asked_for():
    plan = hybrid_27b("vllm-0.25-hybrid", Target(None, 65536), kv_cache_dtype="fp8")
    assert plan.after.capacity.concurrency.tokens_per_request == 65536
    assert plan.after.capacity.concurrency.requests > plan.before.capacity.concurrency.requests
    assert vllm.modelled_release(plan.framework_version) == (0, 25, 1)


def test_a_vllm_pool_past_what_the_card_has_does_not_start():
    server = logged("vllm-0.10.2-actual-usage")
    plan = make_plan(server, {"memory_fraction": 0.99}, Target(), Facts("vllm", None, None, "not known"))
    assert plan.feasible is False
    assert "reserve" in plan.before.accounts and "reserve" not in plan.after.accounts
    assert plan.needed_bytes > plan.available_bytes
    assert "would not start: the pools would take more than there is" in render(plan).replace("\n", " ")


def test_switches_in_their_default_position_have_no_flag():
    words_, missing = sglang_flags({"prefix_caching": True, "overlap_disabled": False}, ((0, 5, 23), (0, 5, 23)))
    assert words_ == []
    assert missing[0] == "prefix_caching on is the default: leave --disable-radix-cache out"


def test_a_fact_that_changes_nothing_is_said():
    facts = Facts("vllm", None, architecture("Qwen3.5-27B"), "x")
    plan = make_plan(logged("vllm-0.25-hybrid"), {"kernel_block_tokens": 16}, Target(), facts)
    assert plan.change == change(plan.before, plan.before)
    assert "kernel_block_tokens: nothing here changes with it" in plan.assumptions
