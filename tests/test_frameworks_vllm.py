"""What vLLM's lines mean for the ledger: each trap of its log, version by version."""

import pytest

from memledger.frameworks.vllm import VllmReader
from memledger.grammar import load_rules
from memledger.ledger import Capacity, Concurrency, account_total
from memledger.scan import Scanner
from memledger.units import GIB, MIB

RULES = load_rules()


def read(text, source="server.log"):
    """The servers of a log given as text."""
    reader = VllmReader()
    scanner = Scanner(RULES)
    for event in scanner.events([text.encode()], 0):
        if event.rule.framework in {"vllm", "any"}:
            reader.feed(event)
    return reader.servers()


def only(text):
    servers = read(text)
    assert len(servers) == 1
    return servers[0]


def total(rank, account):
    found = account_total(rank.entries, account)
    return None if found is None else round(found.bytes / GIB, 2)


def row(rank, account):
    return next(e for e in rank.entries if e.account == account)


def accounts(rank):
    return {e.account for e in rank.entries}


def assert_balances(rank):
    """Stage residuals sum to the rank's residual, to the byte."""
    assert rank.stages
    assert sum(s.residual.bytes for s in rank.stages) == rank.residual.bytes


def core(message, second=0, pid=81, level="INFO", file="core.py", name="EngineCore"):
    return f"({name} pid={pid}) {level} 11-02 10:12:{second:02d} [{file}:1] {message}\n"


def worker(rank, message, second=0, base=90):
    return f"(Worker_TP{rank} pid={base + rank}) INFO 11-02 10:12:{second:02d} [gpu_worker.py:1] {message}\n"


def front(message, second=0, pid=80):
    return f"(APIServer pid={pid}) INFO 11-02 10:11:{second:02d} [utils.py:1] {message}\n"


def engine_line(version="0.26.0", tp=1, extra="", **kwargs):
    text = (
        f"Initializing a V1 LLM engine (v{version}) with config: model='org/model-8b', speculative_config=None, "
        f"dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size={tp}, pipeline_parallel_size=1, "
        f"data_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, "
        f"device_config=cuda, enable_prefix_caching=True{extra}, pooler_config=None, "
    )
    return core(text, **kwargs)


ARGS = front("non-default args: {'model': 'org/model-8b', 'max_model_len': 8192, 'gpu_memory_utilization': 0.9}")
WEIGHTS = core("Model loading took 15.0 GiB memory and 8.881709 seconds")
ESTIMATE = core("Estimated CUDA graph memory: 0.74 GiB total")
POOL = core("Available KV cache memory: 50.0 GiB")
TOKENS = core("GPU KV cache size: 400,000 tokens, Maximum concurrency for 8,192 tokens per request: 48.83x")
GRAPHS = core("Graph capturing finished in 6 secs, took 0.50 GiB", second=30)
ENABLED = core(
    "CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.9000 is "
    "equivalent to --gpu-memory-utilization=0.8907 without CUDA graph memory profiling. To maintain the same effective "
    "KV cache size as before, increase --gpu-memory-utilization to 0.9093. To disable, set "
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0."
)


def split_line(activation, kv="50.0 GiB", weights="15.0", graphs="0.5"):
    return core(
        f"Free memory on device (79.0/80.0 GiB) on startup. Desired GPU memory utilization is (0.9, 72.0 GiB). Actual "
        f"usage is {weights} GiB for weight, {activation} GiB for peak activation, 0.26 GiB for non-torch memory, and "
        f"{graphs} GiB for CUDAGraph memory. Replace gpu_memory_utilization config with "
        f"`--kv-cache-memory=53418655744` (49.75 GiB) to fit into requested memory, or "
        f"`--kv-cache-memory=60934848512` (56.75 GiB) to fully utilize gpu memory. Current kv cache memory in use is "
        f"{kv}.",
        second=31,
    )


def consumed_line(activation="6.74", consumed="15.26", kv="50.0"):
    return core(
        f"Free memory on device (79.0/80.0 GiB) on startup. Desired GPU memory utilization is (0.9, 72.0 GiB). Actual "
        f"usage is {consumed} GiB for consumed memory (weights + non-torch), {activation} GiB for peak activation, and "
        f"0.5 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=53418655744` "
        f"(49.75 GiB) to fit into requested memory, or `--kv-cache-memory=60934848512` (56.75 GiB) to fully utilize "
        f"gpu memory. Current kv cache memory in use is {kv} GiB.",
        second=31,
    )


START = ARGS + engine_line() + WEIGHTS


# -- the budget closes against the device ------------------------------------------------------------------------------


def test_the_printed_budget_closes_against_the_device():
    rank = only(START + ESTIMATE + POOL + ENABLED + TOKENS + GRAPHS + split_line("6.0")).ranks[0]
    assert rank.gpu.total_bytes == 80 * GIB
    assert total(rank, "in_use_at_start") == 1.0
    assert total(rank, "weights/model") == 15.0
    assert total(rank, "activations") == 6.0
    assert total(rank, "non_torch") == 0.26
    assert total(rank, "kv_cache") == 50.0
    # 80 - 1 in use - 72 budget - (0.50 graphs - 0.74 in the budget)
    assert total(rank, "reserve") == 7.24
    assert rank.residual.verdict == "closed"
    assert round(rank.residual.bytes / GIB, 2) == 0.0
    assert rank.budget.static_bytes == 72 * GIB
    assert_balances(rank)


def test_the_first_stage_is_what_was_in_use_before_vllm():
    rank = only(START + POOL + GRAPHS + split_line("6.74")).ranks[0]
    first = rank.stages[0]
    assert (first.name, first.free_before_bytes, first.free_after_bytes) == ("init", 80 * GIB, 79 * GIB)
    assert first.residual.bytes == 0
    assert row(rank, "in_use_at_start").basis == "derived"


def test_a_budget_that_does_not_add_up_keeps_its_residual():
    rank = only(START + POOL + GRAPHS + split_line("1.0")).ranks[0]
    assert rank.residual.verdict == "unexplained"
    assert round(rank.residual.bytes / GIB, 2) == 5.74
    assert_balances(rank)


def test_without_the_budget_line_the_ledger_is_open_and_says_what_is_missing():
    rank = only(START + POOL + TOKENS + GRAPHS).ranks[0]
    assert rank.residual.verdict == "open"
    assert rank.residual.bytes is None
    assert "activation peak" in rank.residual.reason
    assert rank.stages == ()
    assert {"weights/model", "kv_cache/pool", "cuda_graphs/total"} == accounts(rank)


def test_v0_three_line_budget():
    text = (
        "INFO 04-05 23:43:14 llm_engine.py:234] Initializing an LLM engine (v0.6.6.post1) with config: model='m', "
        "max_seq_len=4096, tensor_parallel_size=1, pipeline_parallel_size=1\n"
        "INFO 04-05 23:43:20 model_runner.py:1094] Loading model weights took 2.8875 GB\n"
        "INFO 04-05 23:43:24 worker.py:241] Memory profiling takes 1.05 seconds\r\n"
        "INFO 04-05 23:43:24 worker.py:241] the current vLLM instance can use total_gpu_memory (44.52GiB) x "
        "gpu_memory_utilization (0.90) = 40.07GiB\r\n"
        "INFO 04-05 23:43:24 worker.py:241] model weights take 2.89GiB; non_torch_memory takes 0.23GiB; PyTorch "
        "activation peak memory takes 1.40GiB; the rest of the memory reserved for KV Cache is 35.55GiB.\r\n"
        "INFO 04-05 23:43:24 gpu_executor.py:76] # GPU blocks: 83208, # CPU blocks: 9362\n"
        "INFO 04-05 23:43:24 gpu_executor.py:80] Maximum concurrency for 4096 tokens per request: 325.03x\n"
        "INFO 04-05 23:43:40 model_runner.py:1535] Graph capturing finished in 12 secs, took 0.21 GiB\n"
    )
    server = only(text)
    rank = server.ranks[0]
    assert (total(rank, "activations"), total(rank, "non_torch"), total(rank, "kv_cache")) == (1.4, 0.23, 35.55)
    # Nothing says what was in use before: it is inside the reserve, and the entry says so.
    assert "in_use_at_start" not in accounts(rank)
    assert "in use before" in row(rank, "reserve").detail["note"]
    assert rank.residual.verdict == "closed"
    assert server.config["engine"] == "V0"
    assert server.config["memory_fraction"] == 0.9
    assert_balances(rank)


def test_one_line_profile_of_064_contains_the_weights_in_its_peak():
    text = (
        "INFO 11-18 01:15:46 llm_engine.py:249] Initializing an LLM engine (v0.6.4.post1) with config: model='m', "
        "tensor_parallel_size=1\n"
        "INFO 11-18 01:15:50 model_runner.py:1072] Loading model weights took 3.7710 GB\n"
        "INFO 11-18 01:15:58 worker.py:232] Memory profiling results: total_gpu_memory=44.42GiB "
        "initial_memory_usage=4.42GiB peak_torch_memory=4.95GiB memory_usage_post_profile=4.49GiB "
        "non_torch_memory=0.71GiB kv_cache_size=34.32GiB gpu_memory_utilization=0.90\n"
        "INFO 11-18 01:16:20 model_runner.py:1518] Graph capturing finished in 18 secs, took 0.43 GiB\n"
    )
    rank = only(text).ranks[0]
    assert total(rank, "weights/model") == 3.77
    assert total(rank, "activations") == 1.18
    assert row(rank, "activations").basis == "derived"
    assert rank.residual.verdict == "closed"


def test_debug_lines_alone_close_the_budget():
    text = (
        START
        + core(
            "worker init memory snapshot: torch_peak=0.0GiB, free_memory=79.0GiB, total_memory=80.0GiB, "
            "cuda_memory=1.0GiB, torch_memory=0.0GiB, non_torch_memory=1.0GiB, timestamp=1.0, auto_measure=True",
            level="DEBUG",
            file="v1/worker/gpu_worker.py",
        )
        + core("worker requested memory: 72.0GiB", level="DEBUG", file="v1/worker/gpu_worker.py")
        + core(
            "Memory profiling takes 5.11 seconds. Total non KV cache memory: 21.26GiB; torch peak memory increase: "
            "6.0GiB; non-torch forward increase memory: 0.26GiB; weights memory: 15.0GiB.",
            level="DEBUG",
            file="v1/worker/gpu_worker.py",
        )
        + ESTIMATE
        + ENABLED
        + POOL
        + TOKENS
        + GRAPHS
    )
    rank = only(text).ranks[0]
    assert rank.residual.verdict == "closed"
    assert total(rank, "reserve") == 7.24


# -- CUDA graphs and their estimate ------------------------------------------------------------------------------------


def test_the_profiling_sample_of_the_v2_runner_is_not_the_graph_pool():
    sample = core("Graph capturing finished in 1 secs, took 0.11 GiB", second=5)
    rank = only(START + sample + POOL + TOKENS + GRAPHS).ranks[0]
    assert total(rank, "cuda_graphs") == 0.5


def test_a_sample_alone_is_no_graph_pool():
    sample = core("Graph capturing finished in 1 secs, took 0.11 GiB", second=5)
    rank = only(START + sample + POOL).ranks[0]
    assert total(rank, "cuda_graphs") is None


def test_the_pool_line_repeats_the_captured_bytes():
    pool = core("CUDA graph pool memory: 0.5 GiB (actual), 0.74 GiB (estimated), difference: 0.24 GiB (48.0%).")
    rank = only(START + POOL + TOKENS + GRAPHS + pool).ranks[0]
    assert total(rank, "cuda_graphs") == 0.5


def test_graphs_may_take_a_negative_size():
    rank = only(START + POOL + TOKENS + core("Graph capturing finished in 6 secs, took -0.88 GiB")).ranks[0]
    assert total(rank, "cuda_graphs") == -0.88


def test_consumed_line_contains_the_graph_estimate_in_its_peak():
    rank = only(START + ESTIMATE + ENABLED + POOL + TOKENS + GRAPHS + consumed_line()).ranks[0]
    assert total(rank, "activations") == 6.0
    assert row(rank, "activations").detail["printed_bytes"] == round(6.74 * GIB)
    assert rank.residual.verdict == "closed"


def test_consumed_line_contains_the_weights():
    rank = only(START + ESTIMATE + ENABLED + POOL + TOKENS + GRAPHS + consumed_line()).ranks[0]
    assert total(rank, "weights/model") == 15.0
    assert total(rank, "non_torch") == 0.26
    assert row(rank, "non_torch").basis == "derived"
    assert "weights_and_non_torch" not in accounts(rank)


def test_consumed_without_a_weights_line_stays_one_row():
    rank = only(ARGS + engine_line() + ESTIMATE + ENABLED + POOL + TOKENS + GRAPHS + consumed_line()).ranks[0]
    assert total(rank, "weights_and_non_torch") == 15.26
    assert "weights/model" not in accounts(rank)
    assert rank.residual.verdict == "closed"


def test_a_disabled_estimate_is_not_taken_off_the_peak():
    off = core(
        "CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Without it, CUDA graph "
        "memory is not accounted for. Consider re-enabling it (the default as of v0.21.0) and increasing "
        "--gpu-memory-utilization from 0.9000 to 0.9093."
    )
    rank = only(START + ESTIMATE + off + POOL + TOKENS + GRAPHS + consumed_line()).ranks[0]
    assert total(rank, "activations") == 6.74
    assert total(rank, "reserve") == 6.5
    assert rank.residual.verdict == "closed"


@pytest.mark.parametrize(
    ("version", "activation", "expected"),
    [
        ("0.18.1", "6.74", 6.0),  # contains the estimate
        ("0.22.1", "6.0", 6.0),  # does not
        ("0.11.2.dev280+fork", "6.0", 6.0),  # a fork's version says nothing: the figures decide
        ("0.22.1", "6.74", 6.0),
    ],
)
def test_the_figures_say_whether_the_peak_contains_the_estimate(version, activation, expected):
    text = ARGS + engine_line(version) + WEIGHTS + ESTIMATE + ENABLED + POOL + TOKENS + GRAPHS + split_line(activation)
    rank = only(text).ranks[0]
    assert total(rank, "activations") == expected
    assert rank.residual.verdict == "closed"
    assert total(rank, "reserve") == 7.24


def test_an_estimate_that_was_only_announced_is_not_charged():
    later = core(
        "In v0.19, CUDA graph memory profiling will be enabled by default (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1), "
        "which more accurately accounts for CUDA graph memory during KV cache allocation. To try it now, set "
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1 and increase --gpu-memory-utilization from 0.9000 to 0.9093."
    )
    text = ARGS + engine_line("0.18.0") + WEIGHTS + ESTIMATE + later + POOL + TOKENS + GRAPHS + split_line("6.74")
    rank = only(text).ranks[0]
    assert total(rank, "activations") == 6.74
    assert total(rank, "reserve") == 6.5


def test_the_estimate_follows_from_the_two_utilisations_where_no_line_gives_it():
    text = START + ENABLED + POOL + TOKENS + GRAPHS + consumed_line()
    rank = only(text).ranks[0]
    # (0.9000 - 0.8907) x 80 GiB = 0.744 GiB, known to 1e-4 of the device
    assert total(rank, "activations") == 6.0
    assert row(rank, "activations").tolerance_bytes > 8 * MIB


def test_advice_about_graphs_is_no_measurement():
    advice = "INFO 03-19 06:28:01 model_runner.py:1404] CUDA graphs can take additional 1~3 GiB memory per GPU.\n"
    done = "INFO 03-19 06:28:21 model_runner.py:1530] Graph capturing finished in 20 secs.\n"
    first = (
        "INFO 03-19 06:27:20 llm_engine.py:237] Initializing an LLM engine (v0.6.3.post1) with config: model='m'\n"
        "INFO 03-19 06:27:40 model_runner.py:1071] Loading model weights took 15.3916 GB\n"
    )
    rank = only(first + advice + done).ranks[0]
    assert accounts(rank) == {"weights/model"}


# -- weights -----------------------------------------------------------------------------------------------------------


def test_gb_of_old_versions_is_gib():
    text = (
        "INFO 04-12 18:36:23 [core.py:61] Initializing a V1 LLM engine (v0.8.2) with config: model='m'\n"
        "INFO 04-12 18:36:30 [gpu_model_runner.py:1174] Model loading took 14.9889 GB and 3.1 seconds\n"
    )
    assert row(only(text).ranks[0], "weights/model").bytes == round(14.9889 * GIB)


def test_passing_peaks_and_files_are_not_residency():
    text = (
        START
        + core("Filesystem type for checkpoints: EXT4. Checkpoint size: 23.32 GiB. Available RAM: 92.55 GiB.")
        + core("Peak GPU memory after loading weights: 20.11 GiB", level="DEBUG", file="v1/worker/gpu_worker.py")
        + core("Loading weights took 0.77 seconds")
        + core("Encoder cache will be initialized with a budget of 16384 tokens, and profiled with 1 image items.")
    )
    rank = only(text).ranks[0]
    assert accounts(rank) == {"weights/model"}
    assert total(rank, "weights") == 15.0


def test_state_records_are_inside_the_weights():
    records = core(
        "Allocated the KDA RecoverSSM verify records: 2.50 GiB in total for 256 requests (10.00 MiB per request)."
    )
    rank = only(ARGS + engine_line() + records + WEIGHTS).ranks[0]
    assert total(rank, "weights") == 15.0
    assert row(rank, "weights/model").detail["includes_state_records_bytes"] == round(2.5 * GIB)
    assert "recurrent_state/ssm" not in accounts(rank)


def test_v0_speculation_loads_the_draft_in_a_line_of_its_own():
    text = (
        "INFO 11-18 01:15:46 llm_engine.py:249] Initializing an LLM engine (v0.6.4) with config: model='m', "
        "speculative_config=SpeculativeConfig(draft_model='d', num_spec_tokens=5), tensor_parallel_size=1\n"
        "INFO 11-18 01:15:50 model_runner.py:1072] Loading model weights took 14.9600 GB\n"
        "INFO 11-18 01:15:52 model_runner.py:1072] Loading model weights took 0.2500 GB\n"
        "INFO 11-18 01:15:58 worker.py:232] Memory profiling results: total_gpu_memory=44.42GiB "
        "initial_memory_usage=4.42GiB peak_torch_memory=16.95GiB memory_usage_post_profile=4.49GiB "
        "non_torch_memory=0.71GiB kv_cache_size=22.32GiB gpu_memory_utilization=0.90\n"
    )
    server = only(text)
    rank = server.ranks[0]
    assert (total(rank, "weights/model"), total(rank, "weights/draft")) == (14.96, 0.25)
    assert server.config["speculative_draft_tokens"] == 5


def test_weights_held_by_a_daemon_shrink_the_budget():
    held = core(
        "Weights are held outside this process: of the 72.0 GiB utilization budget, 14.0 GiB is externally held and "
        "58.0 GiB remains for the engine's own allocations."
    )
    small = core("Model loading took 1.0 GiB memory and 0.1 seconds")
    text = ARGS + engine_line("0.33.0") + held + small + POOL + TOKENS + GRAPHS + consumed_line("6.74", "1.26")
    rank = only(text).ranks[0]
    assert total(rank, "weights/model") == 1.0
    assert total(rank, "other_processes") == 14.0
    assert rank.residual.verdict == "closed"
    assert_balances(rank)


# -- the KV pool -------------------------------------------------------------------------------------------------------


def test_advice_in_the_budget_line_is_not_the_pool():
    rank = only(START + GRAPHS + split_line("6.74", kv="50.0 GiB")).ranks[0]
    assert total(rank, "kv_cache") == 50.0


def test_the_pool_in_bytes_is_exact():
    rank = only(START + POOL + TOKENS + GRAPHS + split_line("6.74", kv="53687091201 bytes")).ranks[0]
    assert row(rank, "kv_cache/pool").bytes == 53687091201
    assert row(rank, "kv_cache/pool").tolerance_bytes == 0


def test_multimodal_reservation_comes_off_the_pool():
    reserve = core(
        "Reserving 1.5 GiB of GPU memory for frontend multimodal decoding (1.0 GiB raw-frame semaphore budget, 0.5 GiB "
        "decoder+CUDA-context across 1 API server(s) @ 0.5 GiB/server); KV cache memory reduced to 48.5 GiB."
    )
    rank = only(START + POOL + reserve + TOKENS + GRAPHS + split_line("6.74")).ranks[0]
    assert total(rank, "kv_cache") == 48.5
    assert total(rank, "other_processes") == 1.5
    assert rank.residual.verdict == "closed"


def test_each_rank_keeps_its_own_grant_and_the_smallest_decides_the_pool():
    text = ARGS.replace("'max_model_len'", "'tensor_parallel_size': 2, 'max_model_len'") + engine_line("0.11.0", tp=2)
    text += worker(0, "Available KV cache memory: 50.0 GiB") + worker(1, "Available KV cache memory: 51.5 GiB")
    first, second = only(text).ranks
    assert total(first, "kv_cache/pool") == 50.0
    assert "kv_cache/unused" not in accounts(first)
    assert (total(second, "kv_cache/pool"), total(second, "kv_cache/unused")) == (50.0, 1.5)
    assert total(second, "kv_cache") == 51.5


def test_pipeline_stages_have_blocks_of_their_own_size():
    config = "tensor_parallel_size=1, pipeline_parallel_size=2"
    text = (
        f"(EngineCore pid=81) INFO 11-02 10:12:00 [core.py:1] Initializing a V1 LLM engine (v0.11.0) with config: {config}\n"
        "(Worker_PP0 pid=90) INFO 11-02 10:12:01 [gpu_worker.py:1] Available KV cache memory: 50.0 GiB\n"
        "(Worker_PP1 pid=91) INFO 11-02 10:12:01 [gpu_worker.py:1] Available KV cache memory: 40.0 GiB\n"
    )
    first, second = only(text).ranks
    assert (first.pp, second.pp) == (0, 1)
    assert (total(first, "kv_cache/pool"), total(second, "kv_cache/pool")) == (50.0, 40.0)


def test_capacity_lines_repeated_per_worker_take_the_smallest():
    text = START
    for tokens, requests in (("335,360", "2.56"), ("335,168", "2.55")):
        text += core(f"GPU KV cache size: {tokens} tokens")
        text += core(f"Maximum concurrency for 131,072 tokens per request: {requests}x")
    capacity = only(text).ranks[0].capacity
    assert capacity.kv_tokens == 335168
    assert capacity.concurrency == Concurrency(131072, 2.55)


def test_one_line_carries_tokens_and_concurrency():
    capacity = only(START + TOKENS).ranks[0].capacity
    assert capacity.kv_tokens == 400000
    assert capacity.concurrency == Concurrency(8192, 48.83)


def test_override_of_the_profiling_pass_is_no_block_count():
    text = START + core("Overriding num_gpu_blocks=0 with num_gpu_blocks_override=512") + POOL + TOKENS
    rank = only(text).ranks[0]
    assert rank.capacity.kv_blocks is None
    assert total(rank, "kv_cache/pool") == 50.0


def test_a_real_override_leaves_the_rest_of_the_grant_unused():
    text = START + POOL + core("Overriding num_gpu_blocks=1000 with num_gpu_blocks_override=250")
    rank = only(text).ranks[0]
    assert rank.capacity.kv_blocks == 250
    assert total(rank, "kv_cache/pool") == 12.5
    assert total(rank, "kv_cache") == 50.0


def test_an_override_above_what_fits_is_taken_as_printed():
    text = START + core("Overriding num_gpu_blocks=3 with num_gpu_blocks_override=129")
    assert only(text).ranks[0].capacity.kv_blocks == 129


def test_blocks_summed_over_engines_are_no_engines_blocks():
    info = "vllm cache_config_info with initialization after num_gpu_blocks is: "
    summed = only(START + front(f"4 Engines: {info}40000", second=50))
    assert summed.ranks[0].capacity.kv_blocks is None
    single = only(START + front(f"Engine 000: {info}5924", second=50))
    assert single.ranks[0].capacity.kv_blocks == 5924


def test_tokens_of_v0_are_blocks_times_the_printed_block_size():
    text = (
        "INFO 03-19 06:27:09 api_server.py:528] vLLM API server version 0.6.3.post1\n"
        "INFO 03-19 06:27:09 api_server.py:529] args: Namespace(host=None, block_size=16, swap_space=4, max_num_seqs=256)\n"
        "INFO 03-19 06:27:20 llm_engine.py:237] Initializing an LLM engine (v0.6.3.post1) with config: model='m'\n"
        "INFO 03-19 06:27:40 model_runner.py:1071] Loading model weights took 15.3916 GB\n"
        "INFO 03-19 06:28:00 gpu_executor.py:122] # GPU blocks: 2987, # CPU blocks: 4096\n"
    )
    rank = only(text).ranks[0]
    assert rank.capacity == Capacity(kv_tokens=2987 * 16, kv_blocks=2987, kv_block_tokens=16, max_running_requests=256)
    # CPU blocks are host memory.
    assert total(rank, "host/swap") == 4.0
    assert "kv_cache/pool" not in accounts(rank)


def test_a_pool_of_given_size_is_exact_and_takes_no_budget():
    text = (
        front("non-default args: {'model': 'm', 'gpu_memory_utilization': 0.8, 'kv_cache_memory_bytes': 20000000000}")
        + engine_line()
        + WEIGHTS
        + core(
            "Initial free memory 78.57 GiB, reserved 18.63 GiB memory for KV Cache as specified by kv_cache_memory_bytes "
            "config and skipped memory profiling. This does not respect the gpu_memory_utilization config."
        )
    )
    rank = only(text).ranks[0]
    assert row(rank, "kv_cache/pool").bytes == 20_000_000_000
    assert rank.residual.base == "first_reading"
    assert rank.residual.verdict == "open"
    assert rank.budget.static_bytes is None
    assert_balances(rank)


def test_a_startup_plan_and_the_line_after_it_are_one_pool():
    text = (
        START
        + core(
            "Applying persisted startup plan (fingerprint ab12): kv_cache_memory_bytes=38270000000 (35.64 GiB), recorded "
            "free-memory baseline 78.00 GiB, current 78.57 GiB. Memory profiling will be skipped."
        )
        + core(
            "Initial free memory 78.57 GiB, reserved 35.64 GiB memory for KV Cache as specified by kv_cache_memory_bytes "
            "config and skipped memory profiling."
        )
    )
    assert account_total(only(text).ranks[0].entries, "kv_cache").bytes == 38270000000


def test_a_negative_grant_is_no_pool():
    text = START + core("Available KV cache memory: -1.3 GiB")
    text += core("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")
    server = only(text)
    assert total(server.ranks[0], "kv_cache") is None
    assert any("not positive" in n for n in server.notes)
    assert [f.kind for f in server.failures] == ["no_cache_blocks"]
    assert server.state == "failed"


def test_a_budget_that_is_used_up_before_the_pool_is_not_judged():
    text = START + core("Available KV cache memory: -1.3 GiB") + GRAPHS
    rank = only(text + split_line("58.04", kv="-1.3 GiB")).ranks[0]
    assert rank.residual.verdict == "open"
    assert "left nothing" in rank.residual.reason
    assert "reserve" not in accounts(rank)
    assert_balances(rank)


@pytest.mark.parametrize(
    ("tokens", "block", "length", "requests", "rule"),
    [
        (623040, 1056, 131072, 18.44, "blocks x block size"),  # a hybrid up to 0.20.0
        (3366051, 1072, 262144, 12.84, "concurrency x longest request"),  # later
        (464656, 16, 8192, 56.72, "not determined"),  # dense: both agree
        (464657, None, 8192, 56.72, "not determined"),
    ],
)
def test_tokens_mean_three_things_and_the_figures_say_which(tokens, block, length, requests, rule):
    text = START + POOL
    if block is not None and block > 16:
        text += core(
            f"Setting attention block size to {block} tokens to ensure that attention page size is >= mamba page."
        )
    elif block is not None:
        text += core(f"Setting kv cache block size to {block} for FLASH_ATTN backend.")
    text += core(f"GPU KV cache size: {tokens:,} tokens")
    text += core(f"Maximum concurrency for {length:,} tokens per request: {requests}x")
    rank = only(text).ranks[0]
    assert rank.capacity.kv_tokens == tokens
    assert row(rank, "kv_cache/pool").detail["tokens_rule"] == rule


def test_tokens_never_change_the_bytes_of_the_pool():
    text = START + POOL + core("GPU KV cache size: 1,448 tokens")
    assert total(only(text).ranks[0], "kv_cache") == 50.0


def test_a_hybrids_block_size_is_printed_by_the_front_end_first():
    text = ARGS + front(
        "Setting attention block size to 528 tokens to ensure that attention page size is >= mamba page size."
    )
    text += front("Padding mamba page size by 0.76% to ensure that mamba page size and attention page size are equal.")
    text += engine_line("0.18.0") + WEIGHTS + POOL
    server = only(text)
    assert server.ranks[0].capacity.kv_block_tokens == 528


def test_group_sizes_leave_out_the_states_own_length():
    text = START + POOL + core("kv cache group sizes (640, 640, 8192)")
    assert only(text).ranks[0].capacity.kv_block_tokens == 640


def test_auto_fit_repeats_the_pool_and_changes_the_length():
    text = START + POOL
    text += core(
        "Auto-fit max_model_len: reduced from 8192 to 4096 to fit in available KV cache memory (49.98 GiB GPU)"
    )
    server = only(text)
    assert server.config["context_length"] == 4096
    assert total(server.ranks[0], "kv_cache") == 50.0


# -- host memory, sleep, look-alikes -----------------------------------------------------------------------------------


def test_sleep_mode_is_no_entry():
    text = START + POOL + TOKENS
    text += core("Sleep mode freed 53.45 GiB memory, 20.25 GiB memory is still in use.")
    text += core("CuMemAllocator: sleep freed 53.49 GiB memory in total, of which 15.28 GiB is backed up in CPU.")
    assert accounts(only(text).ranks[0]) == {"weights/model", "kv_cache/pool"}


def test_offloaded_memory_is_the_hosts():
    text = START + core("Total CPU offloaded parameters: 40.33")
    text += core("Created mmap file /dev/shm/vllm_offload_1 (39.73 GB)")
    rank = only(text).ranks[0]
    assert total(rank, "host/weights") == 40.33
    assert row(rank, "host/kv_cache").bytes == 39_730_000_000
    assert total(rank, "weights") == 15.0


def test_a_cpu_build_has_a_host_ledger():
    text = (
        "(APIServer pid=18) INFO 11-30 20:01:28 [utils.py:286] non-default args: {'model': 'm', "
        "'kv_cache_memory_bytes': 268435456}\n"
        "(EngineCore pid=20) INFO 11-30 20:01:44 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
        "model='m', tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, device_config=cpu\n"
        "(Worker pid=21) INFO 11-30 20:01:51 [parallel_state.py:1906] world_size=1 rank=0 local_rank=0 "
        "distributed_init_method=file:///tmp/x backend=gloo\n"
        "(Worker pid=21) INFO 11-30 20:01:52 [cpu_worker.py:260] Explicitly set (0.25/20.21) GiB for KV cache on node 0.\n"
        "(EngineCore pid=20) INFO 11-30 20:01:52 [kv_cache_utils.py:2327] CPU KV cache size: 128,866 tokens, Maximum "
        "concurrency for 4,096 tokens per request: 31.46x\n"
    )
    rank = only(text).ranks[0]
    assert rank.gpu.kind == "cpu"
    assert row(rank, "host/kv_cache").bytes == 268435456
    assert accounts(rank) == {"host/kv_cache"}
    assert "host memory" in rank.residual.reason
    assert rank.capacity.kv_tokens == 128866


def test_no_look_alike_is_left_unread_or_entered():
    text = (
        START
        + core("collected artifacts: 33 entries, 5242880 bytes total")
        + core("Calculated size of cached items: 1.25 GiB")
        + core("max_num_scheduled_tokens is set to 2048 based on the speculative decoding settings.")
        + core("Auto-prefetch is disabled because the filesystem (EXT4) is not a recognized network FS (92.85 GiB).")
    )
    scanner = Scanner(RULES)
    reader = VllmReader()
    for event in scanner.events([text.encode()], 0):
        reader.feed(event)
    assert scanner.unrecognized.count == 0
    assert accounts(reader.servers()[0].ranks[0]) == {"weights/model"}


# -- starts ------------------------------------------------------------------------------------------------------------


def test_a_crash_dump_is_no_second_start():
    dump = core(
        "Dumping input data for V1 LLM engine (v0.26.0) with config: model='org/model-8b', max_seq_len=8192, ",
        level="ERROR",
        second=50,
    )
    assert len(read(START + POOL + dump)) == 1


def test_a_restart_with_the_same_pids_is_a_second_start():
    again = (START + POOL.replace("50.0", "48.0")).replace("11-02 10:1", "11-03 11:1")
    first, second = read(START + POOL + again)
    assert total(first.ranks[0], "kv_cache") == 50.0
    assert total(second.ranks[0], "kv_cache") == 48.0
    assert first.span[0].last_line < second.span[0].first_line
    assert second.started_at == "--11-03T11:11:00"


def test_a_start_that_fails_before_the_engine_and_one_that_works():
    failed = front("vLLM API server version 0.11.0") + ARGS
    good = (front("vLLM API server version 0.11.0", pid=800) + ARGS + START).replace("pid=80)", "pid=800)")
    servers = read(failed + good)
    assert [bool(s.ranks[0].entries) for s in servers] == [False, True]


def test_an_excerpt_quoted_before_the_whole_log_is_the_same_start():
    log = START + POOL + TOKENS
    (server,) = read("## highlights\n" + POOL + TOKENS + "## full log\n" + log)
    assert total(server.ranks[0], "weights") == 15.0
    (twice,) = read(log + log)
    assert total(twice.ranks[0], "kv_cache") == 50.0


def run_of(weights, pool, tokens, graphs, before=""):
    """One run as people paste it: the memory lines only."""
    lines = (
        f"Model loading took {weights} GiB and 8.1 seconds",
        f"Available KV cache memory: {pool} GiB",
        f"GPU KV cache size: {tokens} tokens",
        f"Graph capturing finished in 20 secs, took {graphs} GiB",
    )
    return "".join(f"{before}{line}\n" for line in lines)


@pytest.mark.parametrize("prefix", ["", "INFO 11-02 10:12:50 [gpu_worker.py:1] ", "(EngineCore_DP0 pid={pid}) "])
def test_two_runs_compared_in_one_paste_are_two_servers(prefix):
    runs = run_of(15.0, 50.0, "400,000", 0.5, prefix.format(pid=81)) + "with fp8:\n"
    runs += run_of(8.0, 57.0, "900,000", 0.5, prefix.format(pid=181))
    found = read(runs)
    assert [total(s.ranks[0], "weights") for s in found] == [15.0, 8.0]
    assert [total(s.ranks[0], "kv_cache") for s in found] == [50.0, 57.0]
    assert [s.engines[0].capacity.kv_tokens for s in found] == [400000, 900000]


def test_what_the_next_run_repeats_is_its_own_too():
    found = read(run_of(15.0, 50.0, "400,000", 0.5) + run_of(15.0, 50.0, "480,000", 0.6))
    assert [total(s.ranks[0], "weights") for s in found] == [15.0, 15.0]
    assert [total(s.ranks[0], "cuda_graphs") for s in found] == [0.5, 0.6]
    assert [s.engines[0].capacity.kv_tokens for s in found] == [400000, 480000]


def test_figures_of_several_ranks_without_their_names_are_one_run():
    text = "".join(f"Model loading took {w} GiB and 8.1 seconds\n" for w in (15.0, 15.0, 15.1))
    text += "".join(f"Available KV cache memory: {k} GiB\n" for k in (50.0, 50.1, 50.0))
    text += "".join(
        f"GPU KV cache size: {t} tokens\nMaximum concurrency for 4,096 tokens per request: {c}x\n"
        for t, c in (("400,000", 97.66), ("400,800", 97.85))
    )
    assert only(text).engines[0].capacity.kv_tokens == 400000


def test_no_end_of_repeated_lines_is_kept():
    (server,) = read((run_of(15.0, 50.0, "400,000", 0.5)) * 200)
    assert total(server.ranks[0], "weights") == 15.0


def test_two_servers_at_once_are_told_apart_by_pid():
    text = ARGS + front("non-default args: {'model': 'org/other', 'gpu_memory_utilization': 0.4}", pid=180)
    text += engine_line() + engine_line(pid=181).replace("org/model-8b", "org/other")
    text += core("Model loading took 15.0 GiB memory and 8 seconds")
    text += core("Model loading took 7.5 GiB memory and 8 seconds", pid=181)
    text += core("Available KV cache memory: 50.0 GiB")
    text += core("Available KV cache memory: 20.0 GiB", pid=181)
    first, second = read(text)
    assert (first.model, total(first.ranks[0], "weights"), total(first.ranks[0], "kv_cache")) == (
        "org/model-8b",
        15,
        50,
    )
    assert (second.model, total(second.ranks[0], "weights"), total(second.ranks[0], "kv_cache")) == (
        "org/other",
        7.5,
        20,
    )
    assert second.config["memory_fraction"] == 0.4


def test_compose_services_are_two_servers():
    lines = (START + POOL).splitlines(keepends=True)
    text = "".join(f"chat-1   | {line}" for line in lines) + "".join(f"embed-1  | {line}" for line in lines)
    assert [s.label for s in read(text)] == ["chat-1", "embed-1"]


def test_data_parallel_engines_are_one_server():
    text = front("non-default args: {'model': 'org/model-8b', 'data_parallel_size': 2}")
    for dp, tokens in ((0, "100,000"), (1, "101,000")):
        name, pid = f"EngineCore_DP{dp}", 81 + dp
        text += engine_line(name=name, pid=pid)
        text += core("Model loading took 15.0 GiB memory and 8 seconds", name=name, pid=pid)
        text += core(f"GPU KV cache size: {tokens} tokens", name=name, pid=pid)
    text += front(
        "Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 3 "
        "reqs, Waiting: 1 reqs, GPU KV cache usage: 2.0%, Prefix cache hit rate: 0.0%",
        second=58,
    )
    text += front(
        "Engine 001: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 5 "
        "reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%, Prefix cache hit rate: 0.0%",
        second=58,
    )
    server = only(text)
    # The engine's own line says 1: each is an engine of its own; the argument knows better.
    assert server.config["dp_size"] == 2
    assert [e.dp for e in server.engines] == [0, 1]
    assert [r.capacity.kv_tokens for r in server.ranks] == [100000, 101000]
    assert [r.label for r in server.ranks] == ["DP0 TP0", "DP1 TP0"]
    # Peaks of one scheduler, not sums.
    assert server.usage.peak_running_requests == 5
    assert server.engines[0].usage.peak_queued_requests == 1


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_a_suppressed_rank_is_kept_without_a_copied_figure():
    text = engine_line("0.21.0", tp=2)
    for rank in (0, 1):
        text += worker(
            rank, f"world_size=2 rank={rank} local_rank={rank} distributed_init_method=tcp://h:1 backend=nccl"
        )
    text += worker(0, "Model loading took 15.0 GiB memory and 8 seconds") + worker(
        0, "Available KV cache memory: 50.0 GiB"
    )
    server = only(text)
    first, second = server.ranks
    assert (first.tp, second.tp) == (0, 1)
    assert second.entries == ()
    assert any("TP1" in n and "local rank 0" in n and "weights" in n for n in server.notes)


def test_the_world_line_maps_pids_to_ranks():
    text = engine_line("0.26.0", tp=2)
    text += "(Worker pid=92) INFO 11-02 10:12:01 [parallel_state.py:1] world_size=2 rank=1 local_rank=1 "
    text += "distributed_init_method=tcp://h:1 backend=nccl\n"
    text += "(Worker pid=91) INFO 11-02 10:12:01 [parallel_state.py:1] world_size=2 rank=0 local_rank=0 "
    text += "distributed_init_method=tcp://h:1 backend=nccl\n"
    text += "(Worker_TP0 pid=91) INFO 11-02 10:12:09 [x.py:1] Model loading took 15.0 GiB memory and 8 seconds\n"
    ranks = only(text).ranks
    assert [(r.tp, r.pid, r.gpu.index) for r in ranks] == [(0, 91, 0), (1, 92, 1)]


def test_v0_driver_comes_first_and_workers_differ_by_pid():
    text = (
        "INFO 11-18 01:15:46 llm_engine.py:249] Initializing an LLM engine (v0.6.3) with config: model='m', "
        "tensor_parallel_size=2, pipeline_parallel_size=1\n"
        "(VllmWorkerProcess pid=722) INFO 11-18 01:15:47 multiproc_worker_utils.py:215] Worker ready; awaiting tasks\n"
        "(VllmWorkerProcess pid=722) INFO 11-18 01:15:50 model_runner.py:1072] Loading model weights took 3.2814 GB\n"
        "INFO 11-18 01:15:50 model_runner.py:1072] Loading model weights took 4.2599 GB\n"
    )
    first, second = only(text).ranks
    assert (first.pid, total(first, "weights")) == (None, 4.26)
    assert (second.pid, total(second, "weights")) == (722, 3.28)


def test_old_worker_names_carry_the_rank_in_the_engine():
    text = engine_line("0.8.4", tp=2, name="EngineCore_0")
    for rank in (1, 0):
        text += f"(VllmWorker rank={rank} pid={50 + rank}) INFO 07-09 09:18:50 [gpu_model_runner.py:1] "
        text += f"Model loading took {4 + rank}.8120 GiB and 3.0 seconds\n"
    first, second = only(text).ranks
    assert [(r.tp, total(r, "weights")) for r in (first, second)] == [(0, 4.81), (1, 5.81)]


def test_ray_workers_are_told_apart_by_host_and_pid():
    text = engine_line("0.11.0", tp=2)
    for host in ("10.0.0.2", "10.0.0.3"):
        text += f"(RayWorkerWrapper pid=347, ip={host}) INFO 11-02 10:12:09 [x.py:1] "
        text += "Model loading took 15.0 GiB and 8.0 seconds\n"
    assert {(r.host, r.pid) for r in only(text).ranks} == {("10.0.0.2", 347), ("10.0.0.3", 347)}


def test_a_single_gpu_is_tp_0():
    (rank,) = only(START).ranks
    assert (rank.label, rank.dp, rank.pp) == ("TP0", None, None)


def test_one_of_several_workers_alone_in_an_excerpt_is_no_rank_0():
    line = "(RayWorkerWrapper pid=1243, ip=192.0.2.3) INFO 11-02 10:12:50 [worker.py:267] model weights take 22.5GiB; "
    line += "non_torch_memory takes 0.25GiB; PyTorch activation peak memory takes 0.5GiB; the rest of the memory "
    line += "reserved for KV Cache is 23.0GiB. [repeated 7x across cluster]\n"
    (rank,) = only(line).ranks
    assert (rank.label, total(rank, "weights")) == ("pid 1243", 22.5)


@pytest.mark.parametrize("order", [1, -1])
def test_a_line_whose_process_was_cut_off_is_the_engine_cores(order):
    lines = ["10:12:50 [model_runner.py:1] Model loading took 15.0 GiB and 8.1 seconds\n", POOL]
    (rank,) = only("".join(lines[::order])).ranks
    assert (total(rank, "weights"), total(rank, "kv_cache"), rank.pid) == (15.0, 50.0, 81)


def test_ranks_that_printed_nothing_are_said_to_be_missing():
    text = engine_line("0.13.0", tp=4) + worker(0, "Model loading took 23.2619 GiB memory and 8 seconds")
    server = only(text)
    assert len(server.ranks) == 1
    assert any("3 of 4 ranks" in n for n in server.notes)


# -- configuration -----------------------------------------------------------------------------------------------------


def test_config_is_what_was_asked_for_and_defaults_are_not_filled_in():
    config = only(START).config
    assert (config["memory_fraction"], config["context_length"], config["tp_size"]) == (0.9, 8192, 1)
    assert config["max_running_requests"] is None
    assert config["chunked_prefill_tokens"] is None
    assert config["kv_cache_dtype"] == "auto"
    assert config["kv_cache_dtype_requested"] is None


def test_the_engine_says_whether_prefixes_are_cached():
    text = front("non-default args: {'model': 'm', 'enable_prefix_caching': True}")
    text += engine_line().replace("enable_prefix_caching=True", "enable_prefix_caching=False")
    assert only(text).config["prefix_caching"] is False


def test_a_default_configurations_2048_is_not_the_servers():
    lines = [front(f"Chunked prefill is enabled with max_num_batched_tokens={n}.") for n in (2048, 8192, 2048)]
    assert only(ARGS + "".join(lines) + engine_line()).config["chunked_prefill_tokens"] == 8192
    assert only(ARGS + lines[0] + engine_line()).config["chunked_prefill_tokens"] == 2048


def test_an_echoed_command_is_used_only_where_the_server_does_not_say():
    command = "+ vllm serve org/model-8b --max-num-seqs 8 --max-model-len 4096 --tensor-parallel-size 4\n"
    server = only(command + START)
    assert server.config["max_running_requests"] == 8
    assert server.config["context_length"] == 8192
    assert server.config["tp_size"] == 1


def test_a_prompt_that_quotes_a_command_is_no_configuration():
    prompt = front("Received request chat-1: prompt: '# how do I ``` vllm serve m --max-num-seqs 8 ``` run'", second=59)
    assert only(START + prompt).config["max_running_requests"] is None


def test_speculation_by_version():
    newer = engine_line().replace(
        "speculative_config=None",
        "speculative_config=SpeculativeConfig(method='mtp', model='org/model-8b', num_spec_tokens=3)",
    )
    config = only(ARGS + newer).config
    assert (config["speculative_algorithm"], config["speculative_draft_tokens"]) == ("mtp", 3)
    args = front(
        "non-default args: {'model': 'm', 'speculative_config': {'method': 'eagle3', 'num_speculative_tokens': 5}}"
    )
    assert only(args).config["speculative_draft_tokens"] == 5


def test_backends_by_phase():
    text = START
    text += core("Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].")
    text += core("Using FlashAttention version 3")
    text += core("Using Triton/FLA GDN prefill kernel (requested=auto, head_k_dim=128).")
    text += core("Using triton Mamba SSU backend.")
    config = only(text).config
    assert config["attention_backend_prefill"] == config["attention_backend_decode"] == "fa3"
    assert config["linear_attention_backend_prefill"] == "triton"
    assert "linear_attention_backend_decode" not in config
    assert config["state_backend"] == "triton"
    assert config["backends_as_printed"]["attention"] == "FLASH_ATTN"


def test_an_mla_models_attention_line_is_its_decode():
    text = START + core("Using FLASH_ATTN_MLA attention backend out of potential backends: ['FLASH_ATTN_MLA'].")
    text += core("Using FLASH_ATTN MLA prefill backend.")
    config = only(text).config
    assert config["mla_backend_decode"] == "fa_mla"
    assert config["mla_backend_prefill"] == "flash_attn"
    assert "attention_backend_prefill" not in config


# -- usage -------------------------------------------------------------------------------------------------------------


def usage(tail, engine="Engine 000: "):
    return front(
        f"{engine}Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s, {tail}", second=59
    )


def test_peaks_over_the_whole_log():
    text = START
    text += usage("Running: 3 reqs, Waiting: 9 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 0.0%")
    text += usage(
        "Running: 7 reqs, Waiting: 0 reqs, Preemptions: 2, GPU KV cache usage: 2.9%, Prefix cache hit rate: 0.0%"
    )
    text += usage("Running: 1 reqs, Waiting: 4 reqs, Deferred: 2 reqs, Preemptions: 1, GPU KV cache usage: 1.0%")
    found = only(text).usage
    assert (found.peak_running_requests, found.peak_queued_requests, found.peak_kv_usage) == (7, 9, 0.125)
    assert found.preemptions == 3
    assert found.scope == "engine"


def test_aggregated_lines_are_sums_and_say_so():
    text = START + usage(
        "Running: 40 reqs, Waiting: 0 reqs, GPU KV cache usage: 22.9%, Prefix cache hit rate: 0.0%",
        "4 Engines Aggregated: ",
    )
    found = only(text).usage
    assert (found.scope, found.peak_running_requests, found.peak_kv_usage) == ("sum_of_engines", 40, 0.229)


def test_v0_usage_and_cumulative_preemptions():
    text = (
        "INFO 03-19 06:27:20 llm_engine.py:237] Initializing an LLM engine (v0.6.3.post1) with config: model='m'\n"
        "INFO 03-19 06:30:09 metrics.py:351] Avg prompt throughput: 0.5 tokens/s, Avg generation throughput: 10.0 "
        "tokens/s, Running: 2 reqs, Swapped: 0 reqs, Pending: 1 reqs, GPU KV cache usage: 0.4%, CPU KV cache usage: 0.0%.\n"
        "WARNING 03-19 06:30:09 scheduler.py:1242] Sequence group 12 is preempted by PreemptionMode.RECOMPUTE mode because "
        "there is not enough KV cache space. total_num_cumulative_preemption=1\n"
        "WARNING 03-19 06:31:09 scheduler.py:1242] Sequence group 99 is preempted by PreemptionMode.RECOMPUTE mode because "
        "there is not enough KV cache space. total_num_cumulative_preemption=51\n"
    )
    server = only(text)
    assert (server.usage.peak_running_requests, server.usage.peak_queued_requests) == (2, 1)
    assert server.usage.preemptions == 51
    assert server.state == "serving"


# -- failures ----------------------------------------------------------------------------------------------------------


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 62.00 MiB. GPU 0 has a total capacity of 31.40 GiB of "
    "which 34.56 MiB is free. Including non-PyTorch memory, this process has 31.35 GiB memory in use. Of the allocated "
    "memory 30.33 GiB is allocated by PyTorch, with 22.00 MiB allocated in private pools (e.g., CUDA Graphs), and 269.34 "
    "MiB is reserved by PyTorch but unallocated."
)


def test_an_oom_printed_twice_is_one_failure_with_its_numbers():
    text = START + POOL + core(OOM, level="ERROR", second=50) + core(OOM, level="ERROR", second=51)
    server = only(text)
    (found,) = server.failures
    assert found.kind == "cuda_oom"
    assert found.numbers["requested_bytes"] == 62 * MIB
    assert found.numbers["private_pools_bytes"] == 22 * MIB
    assert found.numbers["gpu_index"] == 0
    assert len(found.evidence) == 2
    assert server.state == "failed"
    assert server.ranks[0].gpu.total_bytes == round(31.40 * GIB)


def test_a_size_that_means_not_available_is_no_number():
    text = START + core(OOM.replace("31.35 GiB memory in use", "17179869184.00 GiB memory in use"), level="ERROR")
    (found,) = only(text).failures
    assert "process_bytes" not in found.numbers


def test_a_loading_failure_and_torchs_own_message_are_one():
    wrapped = "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for weights. "
    text = (
        ARGS + engine_line() + core(wrapped + f"(original error: {OOM[25:]})", level="ERROR") + core(OOM, level="ERROR")
    )
    (found,) = only(text).failures
    assert (found.kind, found.phase) == ("cuda_oom", "weights")
    assert found.numbers["torch_allocated_bytes"] == round(30.33 * GIB)


def test_free_memory_too_small_tells_who_holds_the_device():
    text = (
        ARGS
        + engine_line()
        + core(
            "ValueError: Free memory on device cuda:0 (7.59/79.25 GiB) on startup is less than desired GPU memory utilization "
            "(0.9, 71.33 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
            level="ERROR",
        )
    )
    server = only(text)
    rank = server.ranks[0]
    assert (total(rank, "in_use_at_start"), total(rank, "free")) == (71.66, 7.59)
    assert rank.residual.verdict == "closed"
    assert server.failures[0].kind == "free_memory_too_small"
    assert server.failures[0].numbers["requested_bytes"] == round(71.33 * GIB)
    assert_balances(rank)


def test_kv_too_small_keeps_the_grant_and_the_estimate():
    text = (
        START
        + core("Available KV cache memory: 3.27 GiB")
        + core(
            "ValueError: To serve at least one request with the model's max seq len (262144), (9.13 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (3.27 GiB). Based on the available memory, the estimated "
            "maximum model length is 81600. Try increasing `gpu_memory_utilization`.",
            level="ERROR",
        )
    )
    server = only(text)
    (found,) = server.failures
    assert found.kind == "kv_too_small"
    assert found.numbers["estimated_max_model_len"] == 81600
    assert found.numbers["needed_bytes"] == round(9.13 * GIB)
    assert total(server.ranks[0], "kv_cache") == 3.27


def test_too_few_state_blocks_tell_the_pools_blocks():
    text = (
        START
        + POOL
        + core(
            "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each decode sequence requires one "
            "Mamba cache block, so CUDA graph capture cannot proceed.",
            level="ERROR",
        )
    )
    server = only(text)
    assert server.failures[0].kind == "state_blocks_too_few"
    assert server.ranks[0].capacity.kv_blocks == 856


def test_a_request_that_is_too_long_is_no_failure():
    text = (
        START
        + POOL
        + core("ValueError: This model's maximum context length is 2048 tokens. However, you requested 5418")
    )
    assert only(text).failures == ()


def test_a_killed_engine_is_said_to_be_killed():
    text = START + core(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}",
        level="ERROR",
    )
    server = only(text)
    assert server.failures[0].numbers == {"exit_code": -9}
    assert server.state == "failed"


def test_the_kernels_words_belong_to_the_server_in_hand():
    text = (
        START + "Out of memory: Killed process 81 (VLLM::EngineCor) total-vm:9kB, anon-rss:33554432kB, file-rss:0kB\n"
    )
    (found,) = only(text).failures
    assert (found.kind, found.numbers["anon_rss_bytes"]) == ("host_memory", 32 * GIB)


# -- states and times --------------------------------------------------------------------------------------------------


def test_states():
    assert only(START).state == "starting"
    ready = core("init engine (profile, create kv cache, warmup model) took 53.22 s", second=40)
    up = "(APIServer pid=80) INFO:     Application startup complete.\n"
    down = "(APIServer pid=80) INFO:     Application shutdown complete.\n"
    # Behind an API server the engine's own readiness is not the server's.
    assert only(START + ready).state == "starting"
    assert only(START + ready + up).state == "serving"
    assert only(START + ready + up + down).state == "stopped"


def test_a_yearless_stamp_takes_the_year_of_the_containers():
    lines = START.splitlines(keepends=True)
    text = "".join(f"2026-11-02T10:11:00.000000000Z {line}" for line in lines)
    assert only(text).started_at == "2026-11-02T10:11:00"
    assert only(START).started_at == "--11-02T10:11:00"


def test_usage_without_a_start_is_still_a_server():
    (server,) = read(usage("Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 0.0%"))
    assert server.usage.peak_running_requests == 3
    assert server.ranks[0].residual.verdict == "open"


def test_reading_goes_on_after_asking():
    reader, scanner = VllmReader(), Scanner(RULES)
    for event in scanner.events([START.encode()], 0):
        reader.feed(event)
    assert total(reader.servers()[0].ranks[0], "kv_cache") is None
    for event in scanner.events([POOL.encode()], 0):
        reader.feed(event)
    assert total(reader.servers()[0].ranks[0], "kv_cache") == 50.0


@pytest.mark.parametrize("value", ["inf", "nan", "9" * 30, "[1]", "{}", "'eight'"])
def test_figures_that_cannot_be_are_unknown(value):
    names = ("gpu_memory_utilization", "swap_space", "max_num_seqs", "max_model_len", "kv_cache_memory_bytes")
    text = front("non-default args: {'model': 'm', " + ", ".join(f"'{n}': {value}" for n in names) + ", 'x': 1}")
    text += "INFO 03-19 06:28:00 gpu_executor.py:122] # GPU blocks: 2987, # CPU blocks: 4096\n"
    config = only(text).config
    assert config["memory_fraction"] is None
    assert config["max_running_requests"] is None
    assert config["context_length"] is None


def test_a_peak_with_an_estimate_of_unknown_size_says_so():
    rank = only(START + POOL + TOKENS + GRAPHS + consumed_line()).ranks[0]
    assert total(rank, "activations") == 6.74
    assert "size is not in the log" in row(rank, "activations").detail["note"]
    assert rank.residual.verdict == "closed"


def test_several_http_servers_belong_to_one_start():
    text = START + POOL
    text += "(ApiServer_0 pid=180) INFO 11-02 10:12:40 [api_server.py:1] vLLM API server version 0.11.0\n"
    text += "(ApiServer_1 pid=181) INFO 11-02 10:12:40 [api_server.py:1] vLLM API server version 0.11.0\n"
    assert len(read(text)) == 1


def test_data_parallel_workers_without_a_number_are_ranks_by_pid():
    text = front("non-default args: {'model': 'm', 'tensor_parallel_size': 2, 'data_parallel_size': 2}")
    for dp in (0, 1):
        text += engine_line(tp=2, name=f"EngineCore_DP{dp}", pid=81 + dp)
    for pid in (91, 92, 93, 94):
        text += f"(Worker_TP{pid % 2} pid={pid}) INFO 11-02 10:12:09 [x.py:1] "
        text += "Model loading took 15.0 GiB memory and 8 seconds\n"
    server = only(text)
    assert [(r.tp, r.pid) for r in server.ranks] == [(0, 92), (0, 94), (1, 91), (1, 93)]


def test_a_parallel_size_of_nothing_is_unknown():
    text = (
        engine_line(tp=0)
        + "(VllmWorker rank=1 pid=51) INFO 07-09 09:18:50 [x.py:1] Model loading took 4.8120 GiB and 3 s"
    )
    server = only(text)
    assert server.config["tp_size"] is None
    assert server.ranks[0].tp == 1


def test_the_scheduler_at_a_crash_goes_with_the_failure():
    text = START + POOL + TOKENS + "INFO:     Application startup complete.\n"
    text += core(
        "Dumping scheduler stats: SchedulerStats(num_running_reqs=7, num_waiting_reqs=2, step_counter=0, kv_cache_usage=0.5, "
    )
    text += core(OOM, level="ERROR", second=50)
    (found,) = only(text).failures
    assert found.phase == "serving"
    assert (found.numbers["running_requests"], found.numbers["kv_usage"]) == (7, 0.5)


def test_each_engine_keeps_its_own_peaks():
    text = START
    for engine, running in ((0, 3), (1, 7), (0, 5), (1, 2), (0, 4)):
        text += usage(f"Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%", f"Engine {engine:03d}: ")
    server = only(text)
    assert [e.usage.peak_running_requests for e in server.engines] == [5, 7]
    assert server.usage.peak_running_requests == 7


def test_an_iteration_runs_its_prefills_and_its_decodes():
    text = START
    for context, generation in ((1, 6), (4, 4), (6, 1)):
        text += front(
            f"Engine 000: Iteration(12): {context} context requests, 512 context tokens, {generation} generation requests, "
            f"{generation} generation tokens, iteration elapsed time: 21.50 ms, GPU KV cache usage: 3.1%",
            second=59,
        )
    assert only(text).usage.peak_running_requests == 8


def frame(function, **kwargs):
    return core(f'  File "/opt/venv/lib/site-packages/vllm/v1/worker/gpu_worker.py", line 340, in {function}', **kwargs)


@pytest.mark.parametrize(
    ("functions", "phase"),
    [
        (("load_model",), "weights"),
        (("determine_available_memory", "profile_run", "execute_model"), "profiling"),
        (("initialize_from_config", "initialize_kv_cache"), "kv_pool"),
        (("compile_or_warm_up_model", "capture_model", "execute_model"), "graph_capture"),
        (("compile_or_warm_up_model",), "warmup"),
        (("execute_model",), "serving"),
        ((), "profiling"),  # no traceback: after the weights, before the pool
    ],
)
def test_a_traceback_says_in_which_phase_memory_ran_out(functions, phase):
    text = START + "".join(frame(f, level="ERROR") for f in functions) + core(OOM, level="ERROR")
    (found,) = only(text).failures
    assert found.phase == phase


def test_anothers_traceback_is_not_this_failures():
    text = START + frame("load_model", level="ERROR", pid=999) + core(OOM, level="ERROR")
    assert only(text).failures[0].phase == "profiling"


def dies(*lines, after=""):
    return only(ARGS + engine_line() + "".join(lines) + core("EngineCore failed to start.", 20, level="ERROR") + after)


def error(message, second=20, **kwargs):
    return core(message, second, level="ERROR", **kwargs)


FRAME = 'File "/opt/venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py", line 340, in {}'
NO_ROOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {} has a total capacity of {} of which "
    "1.00 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory "
    "70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)


def test_a_server_that_dies_of_something_else_names_it():
    raised = error("torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device")
    wrapper = front("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    server = dies(WEIGHTS, error(FRAME.format("profile_run")), raised, after=wrapper)
    (failure,) = server.failures
    assert (server.state, failure.kind, failure.phase) == ("failed", "cuda_error", "profiling")
    assert failure.numbers["cause"].startswith("CUDA error: no kernel image")


def test_a_death_without_its_exception_in_the_log_is_said():
    (failure,) = dies(WEIGHTS).failures
    assert (failure.kind, failure.numbers) == ("process_died", {})


def test_memory_is_the_cause_where_a_line_says_so():
    server = dies(error(NO_ROOM.format(0, "80.00 GiB")), error("ValueError: while it was closing", 21))
    assert [f.kind for f in server.failures] == ["cuda_oom"]


def test_a_configuration_that_is_refused_is_a_failure_without_any_engine():
    server = only(
        ARGS
        + "(APIServer pid=80) pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        + "(APIServer pid=80)   Value error, Cannot find the file for a kernel [type=value_error, input_value=x]\n"
    )
    (failure,) = server.failures
    assert (server.state, failure.kind) == ("failed", "config_error")
    assert failure.numbers["cause"] == "Cannot find the file for a kernel"


def test_an_exception_that_the_process_survives_is_no_failure():
    server = only(ARGS + engine_line() + error("ImportError: libx.so: cannot open shared object file", 1) + WEIGHTS)
    assert (server.state, server.failures) == ("starting", ())


def test_what_a_request_raises_is_no_failure_of_the_server():
    usage = front(
        "Engine 000: Avg prompt throughput: 2.8 tokens/s, Avg generation throughput: 12.0 tokens/s, Running: 3 reqs, Waiting: 1 reqs, GPU KV cache usage: 2.9%, Prefix cache hit rate: 0.0%"
    )
    server = only(START + usage + front("vllm.exceptions.VLLMValidationError: the prompt is too long"))
    assert (server.state, server.failures) == ("serving", ())


def test_a_warning_of_the_allocator_counts_only_where_the_process_dies():
    warning = "[rank0]:[W906 07:46:05.008634648 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 0 while trying to allocate 4334813184 bytes (free: 3779919872, total: 287431131136).\n"
    assert only(START + warning + POOL).failures == ()
    (failure,) = dies(WEIGHTS, warning).failures
    assert (failure.kind, failure.numbers["requested_bytes"], failure.numbers["free_bytes"]) == (
        "cuda_oom",
        4334813184,
        3779919872,
    )


def tp2(*lines):
    return only(
        ARGS.replace("'max_model_len'", "'tensor_parallel_size': 2, 'max_model_len'")
        + engine_line(tp=2)
        + "".join(lines)
    )


def test_a_failed_allocation_is_the_ranks_that_printed_it():
    shown = worker(0, "Model loading took 15.0 GiB memory and 8.881709 seconds")
    server = tp2(
        shown,
        "[rank1]:[E716 19:47:26.324588983 shim.cpp:523] Exception in aoti_torch: "
        + NO_ROOM.format(3, "95.00 GiB")
        + "\n",
    )
    (rank,) = server.ranks
    assert (rank.tp, rank.gpu.index, rank.gpu.total_bytes) == (0, None, None)
    again = tp2(shown, worker(0, NO_ROOM.format(2, "95.00 GiB")))
    assert (again.ranks[0].gpu.index, again.ranks[0].gpu.total_bytes) == (2, 95 * GIB)


def test_the_engines_copy_of_a_workers_words_tells_nothing_of_another_worker():
    copy = error(
        "RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 95.00 GiB of which 1.00 GiB is free."
    )
    server = tp2(worker(1, "Model loading took 15.0 GiB memory and 8.881709 seconds"), copy)
    assert (server.ranks[0].tp, server.ranks[0].gpu.index) == (1, None)


@pytest.mark.parametrize(("seconds", "phase"), [(3, "warmup"), (25, "serving")])
def test_long_after_capture_a_server_serves(seconds, phase):
    pool = core("CUDA graph pool memory: 0.84 GiB (actual), 0.81 GiB (estimated), difference: 0.03 GiB (3.2%).", 31)
    minute = core(NO_ROOM.format(0, "80.00 GiB"), 31 + seconds, level="ERROR")
    late = minute if phase == "warmup" else minute.replace("10:12:", "10:13:")
    (failure,) = only(START + POOL + TOKENS + GRAPHS + pool + late).failures
    assert failure.phase == phase


def test_a_capture_in_the_traceback_is_the_phase():
    frame = 'File "/opt/venv/lib/python3.10/site-packages/torch/cuda/graphs.py", line 84, in capture_end'
    (failure,) = only(error(frame) + error("RuntimeError: CUDA error: out of memory")).failures
    assert failure.phase == "graph_capture"


def test_a_process_in_a_container_is_not_another():
    line = NO_ROOM.format(0, "79.11 GiB").replace("Including non-PyTorch memory, this process has", "Process 77 has")
    (failure,) = only(START + error(line)).failures
    assert failure.numbers["process_bytes"] == 78 * GIB
    assert "other_processes" not in failure.numbers


def test_a_server_that_ran_out_and_never_served_again_failed():
    up = "(APIServer pid=80) INFO:     Application startup complete.\n"
    out = "CUDA Error: out of memory at /opt/csrc/cumem_allocator.cpp:139\n"
    down = "(APIServer pid=80) INFO:     Application shutdown complete.\n"
    assert only(START + POOL + TOKENS + up + down).state == "stopped"
    assert only(START + POOL + TOKENS + up + out + down).state == "failed"


def test_a_pool_that_was_granted_and_never_allocated_says_so():
    pool = core("Available KV cache memory: 0.50 GiB")
    short = error(
        "ValueError: To serve at least one request with the model's max seq len (32768), (0.75 GiB KV cache is needed, which is larger than the available KV cache memory (0.50 GiB). Try increasing `gpu_memory_utilization`."
    )
    (rank,) = only(START + pool + short).ranks
    assert row(rank, "kv_cache/pool").detail["note"] == "granted; the start failed before it was allocated"


def test_a_pool_of_the_host_that_was_never_allocated_is_not_held():
    pool = core("Explicitly set (0.25/20.21) GiB for KV cache on node 0.")
    short = error("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")
    assert "host/kv_cache" in accounts(only(START + pool).ranks[0])
    server = only(START + pool + short)
    assert "host/kv_cache" not in accounts(server.ranks[0])
    assert any("failed before it was allocated" in note for note in server.notes)


def test_blocks_that_cannot_hold_the_tokens_have_no_known_size():
    lines = core("Overriding num_gpu_blocks=3 with num_gpu_blocks_override=129") + core(
        "GPU KV cache size: 132,096 tokens"
    )
    args = ARGS.replace("'max_model_len'", "'block_size': 16, 'max_model_len'")
    (rank,) = only(args + engine_line() + WEIGHTS + lines).ranks
    assert (rank.capacity.kv_tokens, rank.capacity.kv_blocks, rank.capacity.kv_block_tokens) == (132096, 129, None)


def test_graphs_printed_as_negative_say_so():
    (rank,) = only(START + POOL + core("Graph capturing finished in 6 secs, took -0.88 GiB", 30)).ranks
    assert row(rank, "cuda_graphs/total").detail["note"].startswith("printed as negative")


def test_a_missing_line_is_not_explained_by_a_filter_that_did_not_hold():
    each = ("Model loading took 15.0 GiB memory and 8.881709 seconds", "Available KV cache memory: 50.0 GiB")
    text = "".join(worker(r, line) for line in each for r in (0, 1))
    took = "Graph capturing finished in 6 secs, took 0.50 GiB"
    assert "for local rank 0 only" in tp2(text, worker(0, took, 30)).notes[0]
    assert tp2(text, worker(1, took, 30)).notes[0].startswith("no CUDA graphs line of TP0 in the log;")


def test_work_between_two_samples_is_not_nothing():
    idle = "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {} tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
    quiet, busy = only(START + front(idle.format("0.0"))).usage, only(START + front(idle.format("13.4"))).usage
    assert (quiet.peak_running_requests, quiet.ran_between_samples) == (0, False)
    assert (busy.peak_running_requests, busy.ran_between_samples) == (0, True)


def test_rays_monitor_gives_its_figures():
    text = (
        "ERROR 03-21 17:27:44 [core.py:340] ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "ERROR 03-21 17:27:44 [core.py:340] Memory on the node (IP: 10.0.0.1, ID: aaaa) where the task (actor ID: 46c8, name=RayWorkerWrapper.__init__, pid=13378, memory used=3.37GB) was running was 2152.43GB / 2265.25GB (0.950196), which exceeds the memory usage threshold of 0.95.\n"
        "ERROR 03-21 17:27:44 [core.py:340] 13377        2077.83 ray::RayWorkerWrapper.__ray_call__\n"
        "ERROR 03-21 17:27:44 [core.py:340] 13375        3.38    ray::RayWorkerWrapper.__ray_call__\n"
    )
    (failure,) = only(text).failures
    assert failure.numbers == {
        "node_used_gb": 2152.43,
        "node_limit_gb": 2265.25,
        "killed_process_gb": 3.37,
        "largest_process_gb": 2077.83,
        "largest_process_pid": 13377,
    }


def test_a_killed_process_that_is_not_the_servers_does_not_fail_it():
    server = only(START + "Aug 01 18:01:30 host1 kernel: Out of memory: Killed process 21394 (cicc)\n" + POOL)
    assert server.failures[0].kind == "other_process_killed"
    assert server.state != "failed"


BUDGET = (
    "Free memory on device ({free}/{total} GiB) on startup. Desired GPU memory utilization is (0.9, {budget} GiB). "
    "Actual usage is {weights} GiB for weight, 5.58 GiB for peak activation, {outside} GiB for non-torch memory, "
    "and 0.69 GiB for CUDAGraph memory. Current kv cache memory in use is 8.68 GiB."
)
POSSIBLE = {"free": "78.57", "total": "79.18", "budget": "71.26", "weights": "56.93", "outside": "0.07"}


def budget_rank(**changes):
    return only(core(BUDGET.format(**{**POSSIBLE, **changes}))).ranks[0]


def test_the_budget_without_contradictions_closes():
    assert budget_rank().residual.verdict == "closed"
    assert budget_rank(outside="-0.05").residual.verdict == "closed"


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ({"free": "4294967296"}, ("4294967296.00 GiB free", "79.18 GiB")),
        ({"free": "85.00"}, ("85.00 GiB free", "79.18 GiB")),
        ({"weights": "156.93"}, ("weights of 156.93 GiB", "79.18 GiB")),
        ({"outside": "-9.00"}, ("-9.00 GiB outside torch",)),
        ({"budget": "99.00"}, ("a budget of 99.00 GiB", "79.18 GiB")),
    ],
)
def test_figures_that_contradict_each_other_leave_the_rank_open(changes, figures):
    rank = budget_rank(**changes)
    assert rank.residual.verdict == "open"
    assert rank.residual.reason.startswith("the figures contradict each other: ")
    assert all(figure in rank.residual.reason for figure in figures)
    assert total(rank, "reserve") is None


def test_a_device_of_nothing_is_no_total():
    rank = budget_rank(total="0.00")
    assert rank.gpu.total_bytes is None
    assert rank.residual.verdict == "open"
    assert rank.residual.base != "device"


def test_a_usage_far_above_one_is_no_fraction():
    line = "Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 1 reqs, "
    shares = [
        f"{line}Waiting: 0 reqs, GPU KV cache usage: {share}%, Prefix cache hit rate: 0.0%" for share in (924.0, 41.0)
    ]
    assert only("".join(core(s, i) for i, s in enumerate(shares))).usage.peak_kv_usage == pytest.approx(0.41)


def test_a_restart_loop_keeps_every_start_and_the_first_and_last_in_full():
    starts = read(
        "".join(
            engine_line(pid=1000 + i) + core("Model loading took 15.0 GiB and 3 seconds", pid=1000 + i)
            for i in range(2100)
        )
    )
    assert len(starts) == 2100
    assert [bool(s.ranks[0].entries[0].evidence) for s in (starts[0], starts[1050], starts[-1])] == [True, False, True]
    assert "one of more than 2000 starts" in starts[1050].notes[0]
    assert total(starts[1050].ranks[0], "weights") == total(starts[0].ranks[0], "weights")
