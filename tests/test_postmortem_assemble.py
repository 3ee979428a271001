"""Incidents from whole inputs: one cause for each failure, its phase, what followed, and what the server did then."""

import json

import pytest

from memledger.cli import app

TIME = "2026-08-01 18:01"
FIGURES = (
    "GPU 0 has a total capacity of 79.11 GiB of which 140.75 MiB is free. Including non-PyTorch memory, this process has "
    "78.96 GiB memory in use. Of the allocated memory 74.20 GiB is allocated by PyTorch, {pools}and {rest} is reserved by "
    "PyTorch but unallocated."
)
VLLM = """\
(APIServer pid=30) INFO 08-01 18:00:00 [api_utils.py:273] non-default args: {{'model': '/models/example-8b', \
'gpu_memory_utilization': 0.94, 'max_num_batched_tokens': 8192{extra}}}
(EngineCore pid=101) INFO 08-01 18:00:09 [core.py:114] Initializing a V1 LLM engine (v0.25.0) with config: \
model='/models/example-8b', speculative_config=None, tokenizer='/models/example-8b', max_seq_len=32768
(EngineCore pid=101) INFO 08-01 18:00:11 [gpu_model_runner.py:5210] Starting to load model /models/example-8b...
(EngineCore pid=101) INFO 08-01 18:00:31 [gpu_model_runner.py:5335] Model loading took 14.82 GiB memory and 18.88 seconds
"""
POOLS = """\
(EngineCore pid=101) INFO 08-01 18:00:58 [gpu_worker.py:560] Available KV cache memory: 50.00 GiB
(EngineCore pid=101) INFO 08-01 18:00:58 [kv_cache_utils.py:2178] GPU KV cache size: 409,600 tokens
(EngineCore pid=101) INFO 08-01 18:01:01 [gpu_model_runner.py:6788] Graph capturing finished in 3 secs, took 0.06 GiB
(APIServer pid=30) INFO:     Application startup complete.
(APIServer pid=30) INFO 08-01 18:01:10 [loggers.py:257] Engine 000: Avg prompt throughput: 812.0 tokens/s, Avg generation \
throughput: 21.0 tokens/s, Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 41.3%, Prefix cache hit rate: 0.0%
"""
DEAD = (
    "(APIServer pid=30) ERROR 08-01 18:01:14 [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause.\n"
)


def core(text):
    return f"(EngineCore pid=101) ERROR 08-01 18:01:14 [core.py:1004] {text}\n"


def frame(file, function):
    return core(f'  File "/opt/venv/lib/python3.12/site-packages/vllm/{file}", line 81, in {function}')


def oom(
    asked="786.00 MiB", *, pools="with 660.00 MiB allocated in private pools (e.g., CUDA Graphs), ", rest="331.08 MiB"
):
    figures = FIGURES.format(pools=pools, rest=rest)
    return f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. {figures}"


def vllm(**extra):
    return VLLM.format(extra="".join(f", {name!r}: {value!r}" for name, value in extra.items()))


@pytest.fixture
def incidents(tmp_path, capsysbinary):
    def read(*texts):
        paths = []
        for index, text in enumerate(texts):
            path = tmp_path / f"{index}.log"
            path.write_text(text)
            paths.append(str(path))
        assert app.run(["oom", *paths, "--format", "json", "--no-live"]) == 0
        return json.loads(capsysbinary.readouterr().out)["incidents"]

    return read


# ------------------------------------------------------------------------------------------------- phases and kinds


@pytest.mark.parametrize(
    ("function", "kind", "phase"),
    [
        ("load_model", "weights", "weights"),
        ("profile_run", "profiling", "profiling"),
        ("initialize_kv_cache", "kv_pool", "pools"),
        ("capture_model", "graph_capture", "graph_capture"),
        ("compile_or_warm_up_model", "graph_capture", "warmup"),
        ("forward_prefill", "prefill", "prefill"),
        ("fused_recurrent_update", "decode", "decode"),
        ("wake_up", "other_process", "wake_up"),
    ],
)
def test_the_traceback_tells_the_phase(incidents, function, kind, phase):
    text = core("Traceback (most recent call last):") + frame("v1/worker/gpu_worker.py", function) + core(oom())
    (one,) = incidents(text)
    assert (one["kind"], one["phase"]) == (kind, phase)
    assert one["confidence"] <= 0.7


def test_a_cache_that_did_not_fit_what_was_measured_leaves_another_process_open(incidents):
    (one,) = incidents(
        frame("worker/cache_engine.py", "_allocate_kv_cache") + core("torch.OutOfMemoryError: CUDA out of memory.")
    )
    assert (one["kind"], one["phase"]) == ("other_process", "pools")
    assert one["confidence"] <= 0.5
    assert "kv_pool" in [c["kind"] for c in one["candidates"]]


def test_a_forward_pass_within_the_profile_run_is_the_profile_run(incidents):
    frames = frame("v1/worker/gpu_worker.py", "determine_available_memory") + frame("models/m.py", "forward_prefill")
    (one,) = incidents(vllm() + frames + core(oom(pools="")))
    assert (one["kind"], one["phase"]) == ("profiling", "profiling")


def test_where_the_server_stood_tells_the_phase_without_a_traceback(incidents):
    (one,) = incidents(vllm() + core("EngineCore failed to start.") + core(oom(pools="")))
    assert (one["kind"], one["server"]) == ("profiling", 0)


def test_a_line_that_names_its_phase_is_proof(incidents):
    (one,) = incidents("Exception: Capture cuda graph failed: " + oom().partition(": ")[2])
    assert (one["kind"], one["confidence"]) == ("graph_capture", 0.9)


@pytest.mark.parametrize(("scheduled", "kind"), [(8192, "prefill"), (3, "decode")])
def test_the_crash_dump_counts_the_tokens_of_the_step(incidents, scheduled, kind):
    dump = core(
        "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[], "
        f"num_scheduled_tokens={{'a': 1}}, total_num_scheduled_tokens={scheduled}, finished_req_ids=[])"
    ) + core("Dumping scheduler stats: SchedulerStats(num_running_reqs=3, num_waiting_reqs=7, kv_cache_usage=0.5, x=0)")
    (one,) = incidents(vllm() + POOLS + core(oom()) + dump + DEAD)
    assert one["kind"] == one["phase"] == kind
    state = one["state"]
    assert (state["running"], state["waiting"], state["kv_usage"]) == (3, 7, 0.5)
    assert (state["scheduled_tokens"], state["basis"]) == (scheduled, "vLLM's crash dump")


def test_drafted_tokens_make_no_prefill(incidents):
    args = vllm(speculative_config={"method": "mtp", "num_speculative_tokens": 3})
    dump = core(
        "Dumping scheduler output for model execution: SchedulerOutput(total_num_scheduled_tokens=12, finished_req_ids=[])"
    ) + core("Dumping scheduler stats: SchedulerStats(num_running_reqs=3, num_waiting_reqs=0, kv_cache_usage=0.5, x=0)")
    (one,) = incidents(args + POOLS + core(oom()) + dump + DEAD)
    assert one["phase"] != "prefill" or one["confidence"] < 0.7


def test_the_last_usage_line_is_the_state(incidents):
    later = POOLS.splitlines()[-1].replace("18:01:10", "18:01:12").replace("Running: 3", "Running: 1")
    (one,) = incidents(vllm() + POOLS + later + "\n" + core(oom()) + DEAD)
    assert (one["state"]["running"], one["state"]["waiting"]) == (1, 2)
    assert (one["state"]["basis"], one["state"]["at"]) == ("the last usage line", "--08-01T18:01:12")


def test_the_usage_of_a_start_before_is_not_this_ones(incidents):
    found = incidents(vllm() + POOLS + vllm().replace("18:00", "18:20") + core(oom(pools="")).replace("18:01", "18:21"))
    assert found[0]["server"] == 1
    assert found[0]["state"] is None


def test_sglangs_prefill_line_counts_new_tokens(incidents):
    text = (
        f"[{TIME}:00 TP0] Load weight begin. avail mem=78.48 GB\n"
        f"[{TIME}:10 TP0] Memory pool end. avail mem=4.45 GB\n"
        f"[{TIME}:20] The server is fired up and ready to roll!\n"
        f"[{TIME}:30 TP0] Prefill batch, #new-seq: 1, #new-token: 4096, #cached-token: 0, token usage: 0.31, "
        "#running-req: 4, #queue-req: 2, \n"
        f"[{TIME}:31 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/x/sglang/srt/model_executor/model_runner.py", line 9, in forward_extend\n' + oom() + "\n"
    )
    (one,) = incidents(text)
    assert (one["kind"], one["state"]["running"], one["state"]["new_tokens"]) == ("prefill", 4, 4096)


# ------------------------------------------------------------------------------------------------------ one root cause


def test_what_follows_is_no_cause(incidents):
    text = vllm() + POOLS + core("EngineCore encountered a fatal error.") + core(oom()) + DEAD
    text += "(APIServer pid=30) RuntimeError: Engine core initialization failed. See root cause above.\n"
    (one,) = incidents(text)
    assert one["fatal"] is True
    assert [link["role"] for link in one["chain"]].count("cause") == 1
    assert "Tried to allocate" in one["chain"][0]["what"]
    assert any("EngineDeadError" in link["what"] for link in one["chain"][1:])


def test_ranks_that_fail_alike_are_one_incident(incidents):
    text = "".join(
        f"(Worker_TP{rank} pid={200 + rank}) ERROR 08-01 18:01:14 [multiproc_executor.py:962] "
        + oom().replace("GPU 0", f"GPU {rank}")
        + "\n"
        for rank in range(4)
    )
    (one,) = incidents(text)
    assert one["ranks"] == ["TP0", "TP1", "TP2", "TP3"]


def test_failures_of_two_starts_are_two_incidents(incidents):
    first = (
        vllm()
        + frame("v1/worker/gpu_worker.py", "profile_run")
        + core("EngineCore failed to start.")
        + core(oom(pools=""))
    )
    second = first.replace("08-01 18:", "08-01 19:")
    found = incidents(first + second)
    assert [one["server"] for one in found] == [0, 1]
    assert [one["at"] for one in found] == ["--08-01T18:01:14", "--08-01T19:01:14"]


def test_a_failure_of_another_device_is_its_own(incidents):
    other = oom().replace("79.11 GiB", "23.56 GiB")
    assert len(incidents(oom() + "\n" + other + "\n")) == 2
    assert len(incidents(oom() + "\n" + oom("788.00 MiB") + "\n")) == 1


def test_host_memory_and_device_memory_are_two_failures(incidents):
    shm = "RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)\n"
    found = incidents(oom() + "\n" + shm)
    assert sorted(one["device_memory"] for one in found) == [False, True]


def test_an_allocation_after_a_refused_start_is_another_failure(incidents):
    refused = core(
        "ValueError: Free memory on device (5.92/79.11 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.20 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    assert len(incidents(refused + core(oom()))) == 2


def test_a_library_that_fails_after_torch_is_no_cause_of_its_own(incidents):
    after = core("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    (one,) = incidents(vllm() + POOLS + core(oom()) + after + DEAD)
    assert one["numbers"]["requested_bytes"] == 786 * 2**20


def test_of_two_servers_in_one_log_it_is_the_one_whose_line_it_is(incidents):
    other = (
        f"[{TIME}:00 TP0] Load weight begin. avail mem=78.48 GB\n[{TIME}:10 TP0] Load weight end. avail mem=8.48 GB\n"
    )
    failure = vllm() + other + core("EngineCore failed to start.") + core(oom(pools=""))
    (one,) = incidents(failure)
    assert (one["server"], one["kind"]) == (0, "profiling")


# ------------------------------------------------------------------------------------------------------------ the host

KERNEL = (
    "Aug 01 18:01:30 box kernel: Out of memory: Killed process {pid} ({name}) total-vm:110886376kB, "
    "anon-rss:117440512kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:300000kB oom_score_adj:0\n"
)
ENDED = (
    "(APIServer pid=30) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
    "{'EngineCore': -9}\n"
)


def test_the_kernels_kill_explains_the_servers_end(incidents):
    (one,) = incidents(vllm() + ENDED, KERNEL.format(pid=101, name="VLLM::EngineCor"))
    assert (one["kind"], one["server"], one["confidence"]) == ("host_memory", 0, 0.9)
    assert one["device_memory"] is False
    assert any("-9" in link["what"] for link in one["chain"][1:])
    assert one["holders"][0]["bytes"] == 112 * 2**30


def test_a_killed_process_that_the_log_names_is_the_servers_without_another_line(incidents):
    (one,) = incidents(vllm() + POOLS, KERNEL.format(pid=101, name="VLLM::EngineCor"))
    assert (one["server"], one["fatal"]) == (0, True)


def test_a_killed_stranger_is_not_the_servers_end(incidents):
    found = incidents(vllm() + ENDED, KERNEL.format(pid=999, name="mysqld"))
    assert {one["server"] for one in found} == {0, None}
    kill = next(one for one in found if one["server"] is None)
    assert "mysqld is none of a server's own processes." in kill["notes"]


def test_pod_and_kernel_tell_of_one_death(incidents):
    pod = "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"
    (one,) = incidents(vllm() + ENDED, KERNEL.format(pid=101, name="VLLM::EngineCor"), pod)
    assert one["kind"] == "host_memory"
    assert any("OOMKilled" in link["what"] for link in one["chain"])


def test_exit_137_alone_is_no_proof(incidents):
    (one,) = incidents("web-1 exited with code 137\n")
    assert one["confidence"] <= 0.5
    assert [c["kind"] for c in one["candidates"]] == ["host_memory", "unknown"]
    assert all(c["command"] for c in one["candidates"])


def test_a_kernels_fault_explains_the_end_of_its_process(incidents):
    text = (
        f"[{TIME}:00 TP0] Load weight begin. avail mem=78.48 GB\n[{TIME}:20] The server is fired up and ready to roll!\n"
        f"[{TIME}:31 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n\nKilled\n"
    )
    (one,) = incidents(text)
    assert (one["kind"], one["confidence"]) == ("not_device_memory", 0.7)


def test_rays_killed_worker_is_not_the_culprit(incidents):
    text = (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 192.0.2.1, ID: aa) where the task (actor ID: bb, name=W.__init__, pid=8, memory "
        "used=3.40GB) was running was 300.00GB / 315.00GB (0.952381), which exceeds the memory usage threshold of 0.95. "
        "Ray killed this worker (ID: cc) because it was the most recently scheduled task\n"
        "PID  MEM(GB) COMMAND\n7\t280.10\tray::W.run\n8\t3.40\tray::W.run\n"
    )
    (one,) = incidents(text)
    assert any("process 7 held 280.10 GB and is the one that grew" in note for note in one["notes"])


# ------------------------------------------------------------------------------------------------------- no shortage

RETRY = (
    "[rank0]:[W906 07:46:05.008634648 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 0 while "
    "trying to allocate 4334813184 bytes (free: 3779919872, total: 287431131136).\n"
)


def test_a_retry_in_a_healthy_server_is_no_shortage(incidents):
    (one,) = incidents(vllm() + RETRY + POOLS)
    assert (one["kind"], one["fatal"], one["device_memory"]) == ("not_device_memory", False, False)
    assert one["cause"].startswith("Not a device out-of-memory: ")


def test_a_retry_alone_leaves_open_what_followed(incidents):
    (one,) = incidents(RETRY)
    assert one["confidence"] <= 0.5
    assert one["candidates"]


def test_a_retry_before_a_death_is_the_failure(incidents):
    (one,) = incidents(vllm() + RETRY + core("EngineCore failed to start."))
    assert one["kind"] == "profiling"
    assert one["numbers"]["requested_bytes"] == 4334813184


def test_a_retry_beside_a_real_failure_is_not_listed(incidents):
    found = incidents(vllm() + RETRY + POOLS, KERNEL.format(pid=101, name="VLLM::EngineCor"))
    assert [one["kind"] for one in found] == ["host_memory"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 262144, Hardware limit: 101376. "
            "Reducing block sizes or `num_stages` may help.",
            "shared memory",
        ),
        ("RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.", "overflowed"),
        (
            "[ 9.000000] NVRM: Xid (PCI:0000:83:00): 79, pid=42, name=python3, GPU has fallen off the bus.",
            "off the bus",
        ),
    ],
)
def test_what_only_looks_like_it_is_called_so(incidents, text, reason):
    (one,) = incidents(text + "\n")
    assert (one["kind"], one["device_memory"]) == ("not_device_memory", False)
    assert one["cause"].startswith("Not a device out-of-memory: ")
    assert reason in one["cause"]


# ------------------------------------------------------------------------------------------------- odd figures are said


@pytest.mark.parametrize(("asked", "is_other"), [("20.00 GiB", True), ("120.00 GiB", False)])
def test_other_processes_are_no_cause_of_a_request_that_their_memory_could_not_serve(incidents, asked, is_other):
    (found,) = incidents(
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.11 GiB of which 10.00 GiB is "
        "free. Process 812 has 38.00 GiB memory in use. Process 4711 has 31.11 GiB memory in use. Of the allocated memory "
        "28.00 GiB is allocated by PyTorch, and 2.60 GiB is reserved by PyTorch but unallocated.\n"
    )
    assert (found["kind"] == "other_process") is is_other
    assert is_other or found["confidence"] <= 0.7


def test_more_free_than_asked_is_reported(incidents):
    (one,) = incidents(oom("50.00 MiB") + "\n")
    assert any("More was free" in note for note in one["notes"])


def test_not_available_enters_no_sum(incidents):
    text = oom().replace("78.96 GiB", "17179869184.00 GiB")
    (one,) = incidents(text + "\n")
    numbers = one["numbers"]
    assert (numbers["process_bytes"], numbers["outside_torch_bytes"]) == (None, None)
    assert "process_bytes" in numbers["not_available"]
    assert all(row["bytes"] is None or row["bytes"] < 80 * 2**30 for row in one["holders"])


def test_escapes_in_a_log_reach_no_report(incidents):
    text = KERNEL.format(pid=7, name="\x1b[31mpython3\x1b[0m")
    for one in incidents(text):
        assert "\x1b" not in json.dumps(one, ensure_ascii=False)
