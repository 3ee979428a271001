"""Metrics pages of both engines over their versions, and the traps in them. The bodies are written in the captured form."""

import time

import pytest

from memledger.live.metrics import kept, parse, read

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/models/a"} 3.0
vllm:num_requests_waiting{engine="0",model_name="/models/a"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="/models/a"} 0.25
vllm:num_preemptions_total{engine="0",model_name="/models/a"} 2.0
vllm:num_preemptions_created{engine="0",model_name="/models/a"} 1.7e+09
vllm:engine_sleep_state{engine="0",model_name="/models/a",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",model_name="/models/a",sleep_state="discard_all"} 1.0
vllm:cache_config_info{block_size="640",cache_dtype="auto",engine="0",kv_cache_size_tokens="128866",mamba_block_size="16",mamba_page_size_padded="None",num_gpu_blocks="409",num_cpu_blocks="None"} 1.0
process_resident_memory_bytes 5.8e+08
"""

VLLM_DP2 = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="65536",num_gpu_blocks="1024"} 1.0
vllm:cache_config_info{block_size="128",engine="1",kv_cache_size_tokens="65536",num_gpu_blocks="1024"} 1.0
"""

LABELS = 'engine_type="unified",model_name="/models/a",moe_ep_rank="0",pp_rank="0",tp_rank="0"'


def sglang(values, labels=LABELS):
    return "".join(f"sglang:{name}{{{labels}}} {value}\n" for name, value in values.items())


HYBRID = {
    "num_running_reqs": 2.0, "num_queue_reqs": 0.0, "token_usage": 0.27, "full_token_usage": 0.1, "swa_token_usage": 0.0,
    "mamba_usage": 0.27, "max_total_num_tokens": 546159.0, "page_size": 1.0, "num_pages": 546159.0,
    "mamba_available_tokens": 36.0, "mamba_evictable_tokens": 11.0, "mamba_used_tokens": 2.0,
    "swa_available_tokens": 0.0, "swa_evictable_tokens": 0.0, "swa_used_tokens": 0.0, "num_retracted_requests_total": 4.0,
    "fwd_occupancy": "NaN",
}  # fmt: skip


def metrics(framework, text, **more):
    return read(framework, kept(text), **more)


def test_vllm_usage_now_and_capacity():
    whole, engines = metrics("vllm", VLLM)
    assert (whole.running_requests, whole.queued_requests, whole.kv_usage, whole.preemptions) == (3, 1, 0.25, 2)
    assert (whole.kv_tokens, whole.kv_blocks, whole.kv_block_tokens) == (128866, 409, 640)
    assert whole.state_usage is None
    assert list(engines) == ["0"]


def test_vllm_labels_that_the_front_end_never_learns_are_left_out():
    whole, _ = metrics("vllm", VLLM)
    assert not {"mamba_block_size", "mamba_page_size_padded"} & set(whole.labels)
    assert whole.labels["cache_dtype"] == "auto"
    assert whole.labels["sleep_state"] == "discard_all"


def test_vllm_blocks_are_the_sum_over_engines_and_tokens_are_not():
    whole, engines = metrics("vllm", VLLM_DP2)
    assert whole.kv_blocks == 1024
    assert [e.kv_blocks for e in engines.values()] == [None, None]
    assert [e.kv_tokens for e in engines.values()] == [65536, 65536]
    assert whole.kv_tokens == 131072
    assert whole.running_requests == 8
    assert whole.kv_usage == 0.75
    assert [e.kv_usage for e in engines.values()] == [0.25, 0.75]


def test_vllm_names_before_0_9_2_and_series_without_an_engine():
    text = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\nvllm:num_preemptions{model_name="m"} 1.0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="27000"} 1.0\n'
    whole, engines = metrics("vllm", text)
    assert (whole.kv_usage, whole.preemptions, whole.kv_blocks, whole.kv_block_tokens) == (0.5, 1, 27000, 16)
    assert engines == {}


def test_vllm_block_size_of_a_hybrid_is_not_believed_where_the_front_end_was_not_told():
    text = 'vllm:cache_config_info{block_size="16",engine="0",mamba_block_size="512",num_gpu_blocks="400"} 1.0\n'
    assert metrics("vllm", text)[0].kv_block_tokens is None


def test_sglang_hybrid_slots_are_no_tokens_and_full_usage_goes_before_the_largest():
    whole, engines = metrics("sglang", sglang(HYBRID))
    assert (whole.kv_usage, whole.state_usage, whole.swa_usage) == (0.1, 0.27, None)
    assert (whole.state_slots, whole.state_slots_used) == (49, 2)
    assert (whole.kv_tokens, whole.kv_blocks, whole.kv_block_tokens, whole.preemptions) == (546159, 546159, 1, 4)
    assert list(engines) == ["0"]


def test_sglang_slots_of_the_configuration_go_before_the_counted_ones():
    info = {"internal_states": [{"max_mamba_cache_size": 50}]}
    assert metrics("sglang", sglang(HYBRID), server_info=info)[0].state_slots == 50


def test_sglang_gauges_of_pools_that_a_model_does_not_have_are_no_usage():
    dense = {
        **HYBRID,
        "mamba_usage": 0.0,
        "mamba_available_tokens": 0.0,
        "mamba_evictable_tokens": 0.0,
        "mamba_used_tokens": 0.0,
    }
    whole, _ = metrics("sglang", sglang(dense))
    assert whole.state_usage is None
    assert whole.state_slots is None


def test_sglang_before_0_5_10_has_one_usage():
    whole, _ = metrics(
        "sglang", 'sglang:token_usage{model_name="m"} 0.4\nsglang:num_running_reqs{model_name="m"} 7.0\n'
    )
    assert (whole.kv_usage, whole.running_requests, whole.kv_tokens) == (0.4, 7, None)


def test_sglang_ranks_that_all_report_are_counted_once_and_engines_each():
    text = "".join(
        sglang({"num_running_reqs": 4.0 + dp, "max_total_num_tokens": 1000.0, "full_token_usage": 0.1 * (dp + 1)},
               f'dp_rank="{dp}",pp_rank="0",tp_rank="{tp}",moe_ep_rank="0"')
        for dp in (0, 1) for tp in (0, 1)
    )  # fmt: skip
    whole, engines = metrics("sglang", text)
    assert whole.running_requests == 9
    assert whole.kv_tokens == 2000
    assert [e.running_requests for e in engines.values()] == [4, 5]
    assert whole.kv_usage == pytest.approx(0.2)


def test_sglang_series_by_priority_add_up_only_where_there_is_no_total():
    both = 'sglang:num_running_reqs{priority=""} 5.0\nsglang:num_running_reqs{priority="1"} 2.0\n'
    split = 'sglang:num_running_reqs{priority="0"} 3.0\nsglang:num_running_reqs{priority="1"} 2.0\n'
    assert metrics("sglang", both)[0].running_requests == 5
    assert metrics("sglang", split)[0].running_requests == 5


def test_sglang_without_metrics_takes_load_and_capacity_from_its_other_answers():
    info = {"max_total_num_tokens": 9000, "page_size": 1, "internal_states": [{"max_mamba_cache_size": None}]}
    loads = {
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": 1,
                "num_waiting_reqs": 2,
                "token_usage": 0.3,
                "max_total_num_tokens": 9000,
            }
        ]
    }
    whole, _ = read("sglang", [], info, loads)
    assert (whole.running_requests, whole.queued_requests, whole.kv_usage, whole.kv_tokens) == (1, 2, 0.3, 9000)
    whole, engines = read("sglang", [], info)
    assert (whole.kv_tokens, whole.running_requests, engines) == (9000, None, {})


def test_the_largest_of_all_pools_is_not_taken_for_a_hybrids_kv_usage():
    info = {"internal_states": [{"max_mamba_cache_size": 49}]}
    loads = {"loads": [{"dp_rank": 0, "token_usage": 0.9, "num_running_reqs": 1}]}
    whole, _ = read("sglang", [], info, loads)
    assert whole.kv_usage is None
    assert whole.state_slots == 49


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-0.5", "1.7e19"])
def test_figures_that_can_be_no_share_are_unknown(value):
    assert metrics("vllm", f'vllm:kv_cache_usage_perc{{engine="0"}} {value}\n')[0].kv_usage is None


def test_lines_out_of_order_are_passed_over():
    text = 'vllm:a{b="1} 1\nvllm:a{b=1} 1\n{} 1\nvllm:a\nvllm:a x\n\x01\nvllm:a{b="x\\"y,z}"} 2 1700000000\nvllm:a{b="1",} 3\n'
    assert [(p.labels, p.value) for p in parse(text)] == [({"b": 'x"y,z}'}, 2.0), ({"b": "1"}, 3.0)]


def test_a_page_of_something_else_is_no_metrics_page():
    assert kept("<html><body>hello</body></html>") is None
    assert kept("") == []
    assert read("vllm", []) == (None, {})
    assert read("sglang", []) == (None, {})


def test_a_hostile_page_is_read_in_linear_time():
    started = time.perf_counter()
    parse("vllm:a{" + 'b="1",' * 200_000 + "\n" + 'x{a="' + "\\" * 500_000 + "\n" + "y" * 500_000 + "{" * 500_000)
    assert time.perf_counter() - started < 5


def test_secrets_in_labels_are_masked():
    found = kept('vllm:num_requests_running{engine="0",model_name="m --api-key abcd1234abcd"} 1\n')
    assert "abcd1234abcd" not in str(found)
