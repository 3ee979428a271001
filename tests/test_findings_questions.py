"""Questions that people ask, each with its figures in lines of our own: the log alone has to give the answer that turned out true."""

import re

import pytest

from memledger import findings
from memledger.pipeline import explain
from memledger.report.text import Style, render

ENGINE = "(EngineCore pid=81) INFO 11-02 10:12:40"
API = "(APIServer pid=80) INFO 11-02 10:12:30"


def vllm_start(version, *, length, model="org/model", **arguments):
    given = {"model_tag": model, "max_model_len": length, **arguments}
    return [
        f"{API} [utils.py:233] non-default args: {given!r}",
        f"{ENGINE} [core.py:112] Initializing a V1 LLM engine (v{version}) with config: model='{model}', max_seq_len={length}, "
        "tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1",
    ]


def weights(size):
    return f"{ENGINE} [gpu_model_runner.py:5335] Model loading took {size} GiB memory and 20.1 seconds"


def pool(size, tokens=None, length=None, requests=None):
    lines = [f"{ENGINE} [gpu_worker.py:436] Available KV cache memory: {size} GiB"]
    if tokens is not None:
        lines.append(f"{ENGINE} [kv_cache_utils.py:1710] GPU KV cache size: {tokens:,} tokens")
    if requests is not None:
        lines.append(
            f"{ENGINE} [kv_cache_utils.py:1711] Maximum concurrency for {length:,} tokens per request: {requests:.2f}x"
        )
    return lines


def hybrid_block(tokens, padding=None):
    lines = [
        f"{ENGINE} [interface.py:1096] Setting attention block size to {tokens} tokens to ensure that attention page size is >= "
        "mamba page size."
    ]
    if padding is not None:
        lines.append(
            f"{ENGINE} [interface.py:1120] Padding mamba page size by {padding}% to ensure that mamba page size and attention page "
            "size are exactly equal."
        )
    return lines


def estimate(size):
    return f"{ENGINE} [gpu_model_runner.py:6720] Estimated CUDA graph memory: {size:.2f} GiB total"


def graph_pool(actual, estimated):
    return (
        f"{ENGINE} [gpu_worker.py:793] CUDA graph pool memory: {actual} GiB (actual), {estimated} GiB (estimated), "
        f"difference: {abs(actual - estimated):.2f} GiB (50.0%)."
    )


def served(running, waiting, kv, preemptions=None):
    again = f"Preemptions: {preemptions}, " if preemptions else ""
    return (
        "(APIServer pid=80) INFO 11-02 10:22:30 [loggers.py:271] Engine 000: Avg prompt throughput: 2.8 tokens/s, Avg generation "
        f"throughput: 12.0 tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, {again}GPU KV cache usage: {kv}%, "
        "Prefix cache hit rate: 0.0%"
    )


def oom(asked, total, free, process="78.00 GiB", torch="70.00 GiB", when="11-02 10:25:00"):
    return (
        f"(EngineCore pid=81) ERROR {when} [gpu_model_runner.py:3808] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
        f"{asked}. GPU 0 has a total capacity of {total} of which {free} is free. Including non-PyTorch memory, this process has "
        f"{process} memory in use. Of the allocated memory {torch} is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but "
        "unallocated."
    )


SG = "[2026-03-01 10:00:00 TP0]"


def sglang_hybrid(*, slots, running, asked=None, per_request=None, conv=0.34, ssm=17.58, tokens=330323, half=10.08):
    lines = [
        f"[2026-03-01 10:00:00] server_args=ServerArgs(model_path='/models/m', mem_fraction_static=0.85, max_running_requests={asked}, "
        "context_length=None, disable_radix_cache=False)",
        f"{SG} Load weight begin. avail mem=78.48 GB",
        f"{SG} Load weight end. elapsed=29.5 s, type=Qwen3_5ForConditionalGeneration, avail mem=50.01 GB, mem usage=28.47 GB.",
        f"{SG} Mamba Cache is allocated. max_mamba_cache_size: {slots}, conv_state size: {conv}GB, ssm_state size: {ssm}GB ",
        f"{SG} KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: {half} GB, V size: {half} GB",
    ]
    if per_request is not None:
        lines.append(
            f"{SG} max_running_requests is capped to {running} by the mamba state cache (max_mamba_cache_size={slots}, {per_request} "
            "state slots per request). To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or halve the state size "
            "with --mamba-ssm-dtype bfloat16."
        )
    lines.append(
        f"{SG} max_total_num_tokens={tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests={running}, "
        "context_len=262144, available_gpu_mem=8.90 GB"
    )
    return lines


def decoded(running, queued, kv, state_number, state_usage):
    return (
        f"{SG} Decode batch, #running-req: {running}, #full token: 1000, full token usage: {kv:.2f}, mamba num: {state_number}, "
        f"mamba usage: {state_usage:.2f}, cuda graph: True, gen throughput (token/s): 862.38, #queue-req: {queued}, "
    )


@pytest.fixture
def ask(tmp_path):
    """The findings of a log by code, and the text of the report."""

    def ask(*lines):
        flat = [line for item in lines for line in (item if isinstance(item, list) else [item])]
        path = tmp_path / "server.log"
        path.write_text("\n".join(flat) + "\n", encoding="utf-8")
        report = findings.attach(explain([str(path)]))
        (server,) = report.servers
        return {f.code: f for f in server.findings}, render(report, None, Style(200))

    return ask


def test_1_tokens_per_pool_and_bytes_per_token_are_two_things(ask):
    """178,880 against 367,404 tokens: the bytes per token agree, the pools do not."""
    _, text = ask(
        f"{SG} Load weight begin. avail mem=78.48 GB",
        f"{SG} KV Cache is allocated. dtype: torch.bfloat16, #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB",
        f"{SG} Memory pool end. avail mem=7.10 GB",
    )
    assert re.search(r"367,404 tokens x 47(\.0)? KiB", text)
    found, text = ask(vllm_start("0.9.2", length=32768), pool(8.11, 178880, 32768, 5.46))
    assert "8.11  logged" in text
    assert "ML701" not in found


def test_2_the_token_figure_of_a_hybrid_is_not_the_pool(ask):
    found, _ = ask(
        vllm_start("0.19.1", length=32768), hybrid_block(1056), weights(61.0), pool(12.0, 290400, 32768, 33.04)
    )
    assert "fit 33.04 times, which is 1.08M tokens" in found["ML701"].text
    assert found["ML701"].severity == "note"


def test_4_states_padded_to_attention_pages(ask):
    found, _ = ask(
        vllm_start("0.17.1", length=8192),
        hybrid_block(528, padding=22.14),
        weights(17.66),
        pool(7.57, 63360, 8192, 25.0),
        f"{ENGINE} [kv_cache_utils.py:1298] Add 3 padding layers, may waste at most 14.29% KV cache memory",
    )
    assert (
        "3 padding layers may waste up to 14.29 % of it (1.08 GiB), by the engine's figure; each recurrent state is padded by 22.14 %"
        in found["ML510"].text
    )


def test_5_more_sequences_than_state_blocks(ask):
    found, _ = ask(
        vllm_start("0.24.0", length=262144),
        "(EngineCore pid=81) ERROR 11-02 10:22:40 [core.py:1231] ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks "
        "(969). Each decode sequence requires one Mamba cache block, so CUDA graph capture cannot proceed.",
    )
    assert "there are 969: --max-num-seqs 969 would fit" in found["ML201"].text


def test_6_accepts_8_and_runs_2(ask):
    found, text = ask(sglang_hybrid(slots=10, running=2, asked=8, per_request=5), decoded(2, 6, 0.10, 8, 0.80))
    assert "cap the running requests at 2 of the 8 asked for: 10 slots at 5 a request" in found["ML103"].text
    assert found["ML103"].severity == "warning"
    assert "The state slots are the ceiling" in found["ML102"].text
    assert text.index("ML102") < text.index("\nGPU 0")


def test_8_a_ratio_for_long_context_starves_concurrency(ask):
    found, _ = ask(
        sglang_hybrid(slots=20, running=4, asked=64, per_request=5, conv=0.06, ssm=2.95, tokens=574619, half=17.54)
    )
    assert "20 slots at 5 a request." in found["ML103"].text
    # 320 slots would take more than the KV cache has: no number is advised.
    assert found["ML103"].remedies == ()


def test_10_a_fixed_host_cache_is_taken_twice(ask):
    found, _ = ask(
        sglang_hybrid(slots=124, running=24),
        f"{SG} Allocating 64.00 GB host memory for hierarchical KV cache.",
        f"{SG} Allocating 64.00 GB host memory for hierarchical Mamba cache (440 state slots, layout=layer_first).",
    )
    assert (
        "59.6 GiB of host memory went to the KV cache and 59.6 GiB to the recurrent state: a hybrid takes the size twice"
        in found["ML404"].text
    )


def test_11_and_12_two_to_the_64_bytes_are_no_size(ask):
    found, _ = ask(
        vllm_start("0.16.0", length=2048), oom("260.00 MiB", "6.00 GiB", "0 bytes", process="17179869184.00 GiB")
    )
    assert '"not available"' in found["ML703"].text
    assert "17179869184" not in found["ML201"].text


def test_14_the_check_passes_and_capture_finds_no_room(ask):
    found, text = ask(
        vllm_start("0.27.1", length=32768, gpu_memory_utilization=0.98),
        weights(17.1),
        estimate(0.11),
        pool(2.97, 150745, 32768, 4.6),
        oom("136.00 MiB", "22.36 GiB", "120.88 MiB", when="11-02 10:13:00"),
    )
    assert (
        "only their estimate of 0.11 GiB was kept for them (it is made with a tiny pool) at --gpu-memory-utilization 0.98"
        in found["ML204"].text
    )
    assert text.index("ML204") < text.index("\nGPU 0")


def test_16_the_estimate_costs_a_large_part_of_the_pool(ask):
    found, _ = ask(
        vllm_start("0.22.0", length=32768, gpu_memory_utilization=0.9),
        weights(60.0),
        estimate(16.0),
        pool(7.5, 245840, 32768, 7.5),
        graph_pool(0.5, 16.0),
    )
    assert "16.0 GiB of the budget was set aside for CUDA graphs, and they took 0.50 GiB: 15.5 GiB stay idle" in (
        found["ML601"].text
    )
    assert found["ML601"].severity == "warning"


def test_17_no_estimate_and_graphs_beside_the_budget(ask):
    found, _ = ask(
        vllm_start("0.24.0", length=32768),
        weights(60.0),
        pool(70.0, 245840, 32768, 7.5),
        graph_pool(15.2, 0.0),
    )
    text = (found.get("ML602") or found["ML603"]).text
    assert "15.2 GiB" in text


def test_19_the_same_pool_prints_other_tokens_by_version(ask):
    old, _ = ask(vllm_start("0.20.0", length=131072), hybrid_block(1056), weights(48.0), pool(50.0, 55968, 131072, 4.0))
    new, _ = ask(
        vllm_start("0.21.0", length=131072), hybrid_block(1056), weights(48.0), pool(50.0, 524288, 131072, 4.0)
    )
    assert "which is 524K tokens" in old["ML701"].text
    assert (old["ML701"].severity, new["ML701"].severity) == ("note", "info")


BUDGET = (
    f"{ENGINE} [gpu_worker.py:857] Free memory on device (78.5/79.2 GiB) on startup. Desired GPU memory utilization is (0.92, 72.86 GiB). "
    "Actual usage is 40.0 GiB for consumed memory (weights + non-torch), 1.5 GiB for peak activation, and 0.0 GiB for CUDAGraph memory. "
    "Replace gpu_memory_utilization config with `--kv-cache-memory=33000000000` (30.73 GiB) to fit into requested memory, or "
    "`--kv-cache-memory=38000000000` (35.39 GiB) to fully utilize gpu memory. Current kv cache memory in use is 31.36 GiB."
)


@pytest.mark.parametrize("question", [20, 21])
def test_20_and_21_a_prompt_needs_more_than_the_profile_measured(ask, question):
    found, text = ask(
        vllm_start("0.28.0", length=32768),
        weights(39.0),
        pool(31.36, 500000, 32768, 15.26),
        BUDGET,
        f"{ENGINE} [core.py:200] init engine (profile, create kv cache, warmup model) took 50.1 seconds",
        served(1, 0, 1.2),
        oom("4.60 GiB", "79.20 GiB", "3.10 GiB"),
    )
    assert "measured an activation peak of 1.50 GiB" in found["ML203"].text
    assert "asked for 4.60 GiB by itself" in found["ML203"].text
    assert "ML203" in text or "ML202" in text


def test_25_memory_runs_out_with_most_kv_free(ask):
    found, _ = ask(
        vllm_start("0.28.0", length=32768),
        weights(60.0),
        pool(31.36, 500000, 32768, 15.26),
        served(12, 0, 35.0),
        oom("73.65 GiB", "183.0 GiB", "50.40 GiB"),
    )
    assert "KV usage never exceeded 35 %" in found["ML202"].text
    assert "one allocation of 73.65 GiB with 50.40 GiB free failed" in found["ML202"].text


def free_too_small(free, total, fraction, asked):
    return (
        f"(EngineCore pid=81) ERROR 11-02 10:12:55 [core.py:1231] ValueError: Free memory on device cuda:0 ({free}/{total} GiB) on startup "
        f"is less than desired GPU memory utilization ({fraction}, {asked} GiB). Decrease GPU memory utilization or reduce GPU memory used by "
        "other processes."
    )


def test_28_the_page_cache_counts_as_used_on_unified_memory(ask):
    found, _ = ask(
        vllm_start("0.24.0", length=8192),
        f"{ENGINE} [fused_moe.py:813] Using default MoE config. Performance might be sub-optimal! Config file not found at "
        "/opt/vllm/configs/E=128,N=768,device_name=NVIDIA_GB10.json",
        free_too_small("60.1", "119.7", "0.85", "101.7"),
    )
    assert "NVIDIA GB10 shares the host's memory" in found["ML403"].text
    assert found["ML403"].severity == "note"


@pytest.mark.parametrize(
    ("question", "free", "total", "fraction", "asked", "others"),
    [
        (30, "74.9", "142.5", "0.9", "128.25", "67.60"),
        (34, "1.33", "23.98", "0.9", "21.58", "22.65"),
        (36, "6.1", "79.2", "0.9", "71.28", "73.10"),
    ],
)
def test_30_34_36_what_others_hold_at_the_start(ask, question, free, total, fraction, asked, others):
    found, _ = ask(vllm_start("0.15.0", length=8192), free_too_small(free, total, fraction, asked))
    assert f"{others} GiB were in use by others" in found["ML201"].text
    assert found["ML303"].severity == "warning"
    assert "workers were left behind or run outside the container's view" in found["ML303"].text


def test_32_a_first_server_is_charged_to_the_second(ask):
    found, _ = ask(
        "INFO 11-18 01:15:20 [core.py:58] Initializing a V0 LLM engine (v0.8.5) with config: model='org/model', max_seq_len=8192",
        "INFO 11-18 01:15:58 [worker.py:267] Memory profiling takes 2.10 seconds",
        "INFO 11-18 01:15:58 [worker.py:267] the current vLLM instance can use total_gpu_memory (79.25GiB) x gpu_memory_utilization (0.50) = "
        "39.62GiB",
        "INFO 11-18 01:15:58 [worker.py:267] model weights take 14.99GiB; non_torch_memory takes 36.50GiB; PyTorch activation peak memory "
        "takes 1.23GiB; the rest of the memory reserved for KV Cache is -13.10GiB.",
    )
    assert "36.5 GiB is charged to this server as memory outside torch" in found["ML305"].text


def test_35_a_small_model_fills_a_large_card(ask):
    found, _ = ask(
        vllm_start("0.15.0", length=2048, gpu_memory_utilization=0.9), weights(0.24), pool(18.9, 550000, 2048, 268.6)
    )
    assert "takes 18.9 GiB, 79 times the weights" in found["ML506"].text
    assert found["ML506"].severity == "note"


def test_37_the_largest_batch_takes_what_the_pool_could_have(ask):
    split = (
        "(Worker pid=82) INFO 11-02 10:13:20 [gpu_worker.py:600] Free memory on device (23.3/23.6 GiB) on startup. Desired GPU memory "
        "utilization is (0.95, 22.42 GiB). Actual usage is 14.25 GiB for weight, 5.6 GiB for peak activation, 0.27 GiB for non-torch memory, "
        "and 0.0 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=2300000000` (2.14 GiB) to fit into "
        "requested memory, or `--kv-cache-memory=3200000000` (2.98 GiB) to fully utilize gpu memory. Current kv cache memory in use is 2.30 GiB."
    )
    found, _ = ask(
        vllm_start("0.26.0", length=120000, max_num_batched_tokens=64000, enforce_eager=True), weights(14.25), split
    )
    assert (
        "5.60 GiB is kept for the activations of the largest batch, 64,000 tokens, beside 2.30 GiB of KV cache"
        in found["ML604"].text
    )


def test_39_prefix_caching_enlarges_what_a_hybrid_request_needs(ask):
    found, text = ask(
        vllm_start("0.30.0", length=262144, enable_prefix_caching=True),
        f"{API} [config.py:688] Mamba cache mode is set to 'align' for Qwen3NextForCausalLM by default when prefix caching is enabled",
        hybrid_block(1056),
        pool(78.89),
        "(EngineCore pid=81) ERROR 11-02 10:22:43 [core.py:1231] ValueError: To serve at least one request with the model's max seq len "
        "(262144), (116.73 GiB KV cache is needed, which is larger than the available KV cache memory (78.89 GiB). Based on the available "
        "memory, the estimated maximum model length is 81600. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
        "initializing the engine.",
    )
    assert "needs 116.7 GiB of KV cache, and 78.9 GiB are there" in found["ML201"].text
    assert "--no-enable-prefix-caching" in found["ML205"].text
    assert text.index("ML205") < text.index("\nGPU 0")


def test_six_lines_of_a_hybrid_call_nothing_idle(ask):
    found, text = ask(sglang_hybrid(slots=124, running=24)[1:-1])
    assert "ML101" not in found
    assert (
        "17.9 GiB is recurrent state for 124 slots (146.8 MiB each; 3 or 5 a request: room for 41 or 24 requests). Not in the log: the "
        "version, the request cap and how many requests ran; so nothing is called idle." in found["ML105"].text
    )
    assert text.index("ML105") < text.index("\nGPU 0")


@pytest.mark.parametrize(("printed", "fires"), [("28.93", False), ("31.50", True)])
def test_a_sum_line_that_its_parts_contradict(ask, printed, fires):
    found, _ = ask(
        f"{SG} Load weight begin. avail mem=100.00 GB",
        f"{SG} KV Cache is allocated. dtype: torch.bfloat16, #tokens: 148717, K size: 7.78 GB, V size: 7.78 GB",
        f"{SG} KV Cache is allocated. dtype: torch.bfloat16, #tokens: 185897, K size: 6.69 GB, V size: 6.68 GB",
        f"{SG} SWAKVPool mem usage: {printed} GB, swa size: 148717, full size: 185897",
        f"{SG} Memory pool end. avail mem=20.00 GB",
    )
    assert ("ML702" in found) is fires
    if fires:
        assert "One line gives the KV cache 28.93 GiB, another 31.50 GiB." in found["ML702"].text


def test_two_figures_of_one_vllm_pool(ask):
    split = (
        f"{ENGINE} [gpu_worker.py:600] Free memory on device (78.0/79.2 GiB) on startup. Desired GPU memory utilization is (0.9, 71.28 GiB). "
        "Actual usage is 14.25 GiB for weight, 1.6 GiB for peak activation, 0.27 GiB for non-torch memory, and 0.0 GiB for CUDAGraph memory. "
        "Replace gpu_memory_utilization config with `--kv-cache-memory=50000000000` (46.57 GiB) to fit into requested memory, or "
        "`--kv-cache-memory=56000000000` (52.15 GiB) to fully utilize gpu memory. Current kv cache memory in use is 52.16 GiB."
    )
    found, _ = ask(vllm_start("0.26.0", length=8192), weights(14.25), pool(55.16), split)
    assert "One line gives the KV cache 52.16 GiB, another 55.16 GiB" in found["ML702"].text
    found, _ = ask(vllm_start("0.26.0", length=8192), weights(14.25), pool(55.16))
    assert "ML702" not in found


def test_a_draft_model_inside_the_weights_with_the_size_of_its_files(ask):
    files = "Filesystem type for checkpoints: EXT4. Checkpoint size: {} GiB. Available RAM: 85.60 GiB."
    found, _ = ask(
        vllm_start("0.25.1", length=262144, speculative_config={"method": "dflash", "num_speculative_tokens": 15}),
        f"{ENGINE} [weight_utils.py:1108] {files.format('21.84')}",
        f"{ENGINE} [gpu_model_runner.py:3012] Loading drafter model...",
        f"{ENGINE} [weight_utils.py:1108] {files.format('3.88')}",
        weights(25.8),
    )
    assert "contain a draft model, which the engine does not print apart; its files are 3.88 GiB" in found["ML802"].text
    assert found["ML802"].severity == "note"


def test_offloaded_weights_beside_the_memory_that_the_host_had(ask):
    found, _ = ask(
        vllm_start("0.25.1", length=8192, cpu_offload_gb=40),
        f"{ENGINE} [weight_utils.py:1108] Filesystem type for checkpoints: EXT4. Checkpoint size: 61.00 GiB. Available RAM: 45.00 GiB.",
        f"{ENGINE} [uva.py:58] Total CPU offloaded parameters: 40.33",
        weights(20.1),
    )
    assert "keeps 40.3 GiB in host memory of the 45.0 GiB that were available" in found["ML402"].text


def test_lines_about_layers_and_pages_reach_the_pool(ask):
    found, text = ask(
        vllm_start("0.33.0", length=8192),
        f"{ENGINE} [gpu_worker.py:700] GDN prefill kernel warmup (T=64) failed for layer model.layers.0. First inference may OOM due to "
        "autotuner.",
        "(EngineCore pid=81) WARNING 11-02 10:12:57 [kv_cache_utils.py:900] Hybrid KV cache manager is disabled for this hybrid model, This "
        "means we do not enable any optimizations for saving KV cache memory",
        f"{ENGINE} [x.py:300] Using block size 16 for hidden-state cache layer model.layers.3; page alignment wastes 512 bytes (1.25%) per "
        "block",
        pool(20.0, 500000, 8192, 61.0),
    )
    assert "Sliding-window layers are charged as full attention" in found["ML511"].text
    assert "page alignment wastes 1.25 % of each block" in found["ML510"].text
    assert "the first request may run out of memory in the autotuner" in text
