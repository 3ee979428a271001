"""What inputs say about a failure: every recognised format with its figures, wrapped, cut and repeated."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memledger.grammar import load_rules
from memledger.postmortem.facts import KINDS, MERGE_LINES, MOST_FIRST, MOST_LAST, MOST_TASKS, SymptomLog, read_symptoms
from memledger.postmortem.wordings import KIND_OF_RULE, PHASE_OF_RULE
from memledger.scan import Scanner
from memledger.units import GIB, KIB, MIB

RULES = load_rules()
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 1 has a total capacity of 79.11 GiB of "
    "which 140.75 MiB is free. Process 411 has 2.13 GiB memory in use. Including non-PyTorch memory, this process has 76.83 "
    "GiB memory in use. Of the allocated memory 68.83 GiB is allocated by PyTorch, with 660.00 MiB allocated in private pools "
    "(e.g., CUDA Graphs), and 331.08 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.63 GiB (GPU 0; 44.56 GiB total capacity; 27.91 GiB already "
    "allocated; 565.31 MiB free; 40.00 GiB allowed; 27.93 GiB reserved in total by PyTorch) If reserved memory is >> allocated"
)
LOAD = (
    "(EngineCore pid=81) ERROR 03-10 07:38:43 [gpu_model_runner.py:4219] Failed to load model - not enough GPU memory. Try "
    "lowering --gpu-memory-utilization to free memory for weights. (original error: "
) + OOM.partition(": ")[2]
RETRY = (
    "[rank1]:[W906 07:46:05.008634648 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 1 while "
    "trying to allocate 4334813184 bytes (free: 3779919872, total: 287431131136)."
)
CHECK = (
    "(EngineCore pid=40) ERROR 07-09 21:35:16 [core.py:1231] ValueError: Free memory on device cuda:0 (7.59/79.25 GiB) on "
    "startup is less than desired GPU memory utilization (0.85, 67.36 GiB). Decrease GPU memory utilization."
)
KILL = (
    "Out of memory: Killed process 21394 (cicc) total-vm:10886376kB, anon-rss:7529332kB, file-rss:1024kB, shmem-rss:0kB"
)
POOL = (
    "RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 4096 tokens.\n"
    "Available full tokens: 500128 (full_available_size=128 + full_evictable_size_=500000)\n"
    "Available mamba: 90 (available_size=12 + component_evictable_size_=78)"
)


def symptoms(text):
    log = SymptomLog()
    for event in Scanner(RULES).events([text.encode()], 0):
        log.feed(event)
    return log.symptoms()


def only(text):
    (found,) = symptoms(text).found
    return found


# ------------------------------------------------------------------------------------------------------------- figures


def test_every_figure_of_torchs_message():
    found = only(OOM)
    assert found.kind == "torch_oom"
    assert found.role == "cause"
    assert found.numbers == {
        "requested_bytes": 786 * MIB,
        "total_bytes": int(79.11 * GIB) + 1,
        "free_bytes": int(140.75 * MIB),
        "process_bytes": round(76.83 * GIB),
        "torch_allocated_bytes": round(68.83 * GIB),
        "private_pools_bytes": 660 * MIB,
        "reserved_unallocated_bytes": round(331.08 * MIB),
        "gpu_index": 1,
        "other_processes": [{"pid": 411, "bytes": round(2.13 * GIB)}],
    }
    assert found.amounts["total_bytes"].tolerance == -(-GIB // 200)


def test_the_old_form_has_the_limit_and_what_was_reserved():
    numbers = only(OLD).numbers
    assert numbers["limit_bytes"] == 40 * GIB
    assert numbers["torch_reserved_bytes"] == round(27.93 * GIB)
    assert numbers["free_bytes"] == round(565.31 * MIB)


def test_cached_of_the_oldest_form_is_what_is_reserved_and_not_allocated():
    line = "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached)"
    assert only(line).numbers["reserved_unallocated_bytes"] == round(4.68 * MIB)


def test_not_available_is_no_figure():
    found = only(OOM.replace("76.83", "17179869184.00").replace("2.13", "17179869184.00"))
    assert "process_bytes" not in found.amounts
    assert found.not_available == ("process_bytes",)
    assert found.other_processes == ({"pid": 411, "bytes": None},)


def test_a_process_that_is_ourselves_is_no_other():
    found = only(
        OOM.replace("Including non-PyTorch memory, this process has 76.83 GiB memory in use. ", "").replace(
            "2.13", "78.96"
        )
    )
    assert found.amounts["process_bytes"].bytes == round(78.96 * GIB)
    assert found.other_processes == ()
    assert found.counts["process_pid"] == 411
    assert found.notes


def test_ourselves_is_known_also_where_much_is_free():
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 74.16 GiB. GPU 0 has a total capacity of 44.40 GiB of which 29.89 GiB is free. Process 77 has 14.51 GiB memory in use. Of the allocated memory 13.44 GiB is allocated by PyTorch, and 738.96 MiB is reserved by PyTorch but unallocated."
    found = only(line)
    assert found.amounts["process_bytes"].bytes == round(14.51 * GIB)
    assert found.other_processes == ()


# ------------------------------------------------------------------------------------------------------- kinds of lines


@pytest.mark.parametrize(
    ("line", "kind", "phase", "numbers"),
    [
        (OLD, "torch_oom", None, {"gpu_index": 0}),
        (LOAD, "torch_oom", "weights", {"torch_allocated_bytes": round(68.83 * GIB), "gpu_index": 1}),
        (
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 96.00 MiB.",
            "torch_oom",
            "graph_capture",
            {"requested_bytes": 96 * MIB},
        ),
        ("Exception: Capture cuda graph failed: CUDA error: out of memory", "cuda_error", "graph_capture", {}),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering",
            "torch_oom",
            "warmup",
            {"max_num_seqs": 1024},
        ),
        (
            "RuntimeError: Preemptively rejecting allocation: requested 2.00 GiB but total_allocated_memory (70.00 GiB) + requested size would exceed memory limit (71.00 GiB = 90% of 79.18 GiB).",
            "torch_limit",
            None,
            {"limit_bytes": 71 * GIB, "requested_bytes": 2 * GIB},
        ),
        ("torch.AcceleratorError: CUDA error: out of memory", "cuda_error", None, {}),
        (
            "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/core.cpp func=resume line=120",
            "wake_up_failed",
            "wake_up",
            {},
        ),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "library",
            None,
            {},
        ),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "library",
            None,
            {},
        ),
        (
            "node1:512:733 [3] include/alloc.h:235 NCCL WARN Failed to CUDA calloc async 6291456 bytes",
            "library",
            None,
            {"requested_bytes": 6 * MIB, "gpu_index": 3},
        ),
        ("/nvshmem/src/host/mem/mem_heap.cpp:1509: non-zero status: 2 cuMemCreate failed ", "communication", None, {}),
        (
            "RuntimeError: Failed: CUDA error /opt/DeepEP/csrc/deep_ep.cpp:230 'out of memory'",
            "communication",
            None,
            {},
        ),
        (
            'RuntimeError: torch_call_dispatcher( "aten::new_empty", "", stack.data(), TORCH_ABI_VERSION) API call failed',
            "allocation_failed",
            None,
            {},
        ),
        (
            'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1154',
            "nvml_hides_oom",
            None,
            {},
        ),
        (
            CHECK,
            "startup_check",
            "start",
            {"memory_fraction": 0.85, "free_bytes": round(7.59 * GIB), "desired_bytes": round(67.36 * GIB)},
        ),
        (
            "AssertionError: Error in memory profiling. Initial free memory 82.94 GiB,\ncurrent free memory 90.17 GiB. This happens when",
            "startup_check",
            "profiling",
            {"now_bytes": round(90.17 * GIB)},
        ),
        ("ValueError: No available memory for the cache blocks. Try increasing", "engine_refusal", "pools", {}),
        (
            "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each",
            "engine_refusal",
            "pools",
            {"max_num_seqs": 1024, "state_blocks": 856},
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.7",
            "engine_refusal",
            "pools",
            {"memory_fraction": 0.7},
        ),
        (
            POOL,
            "engine_runtime",
            None,
            {
                "asked_tokens": 4096,
                "free_tokens": 128,
                "evictable_tokens": 500000,
                "free_slots": 12,
                "evictable_slots": 78,
            },
        ),
        (
            "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`. req_to_token_pool.available_size()=0, num_reqs=1,",
            "engine_runtime",
            "serving",
            {"free_slots": 0, "num_reqs": 1},
        ),
        (
            "ValueError: Not enough host memory available. Requesting 120.00 GB but only have 64.00 GB free.",
            "host_alloc",
            None,
            {"requested_bytes": 120 * 10**9},
        ),
        (KILL, "kernel_oom", None, {"pid": 21394, "anon_rss_bytes": 7529332 * KIB}),
        ("Memory cgroup " + KILL[0].lower() + KILL[1:], "cgroup_oom", None, {"pid": 21394}),
        ("vllm-1 exited with code 137", "exit_code", None, {}),
        ('"OOMKilled": true,', "container_killed", None, {}),
        ("      reason: OOMKilled", "container_killed", None, {}),
        (
            "Message:          The node was low on resource: memory. Threshold quantity: 100Mi, available: 51300Ki.",
            "evicted",
            None,
            {},
        ),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.",
            "slurm_oom",
            None,
            {},
        ),
        ("4242.0   vllm   acct   8 OUT_OF_ME+    0:125", "slurm_oom", None, {}),
        (
            "Aug 01 18:01:31 node7 systemd[1]: vllm.service: A process of this unit has been killed by the OOM killer.",
            "unit_oom",
            None,
            {},
        ),
        (
            "Killed /system.slice/a.service due to memory pressure for /system.slice being 72.15% > 50.00% for > 20s with reclaim activity",
            "oomd",
            None,
            {"threshold": 0.5},
        ),
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            "ray_memory_monitor",
            None,
            {},
        ),
        (
            "RuntimeError: unable to write to file </torch_412_3829_0>: No space left on device (28)",
            "shm_full",
            None,
            {},
        ),
        ("RuntimeError: DataLoader worker (pid 733) is killed by signal: Bus error.", "shm_full", None, {"pid": 733}),
        (
            "RuntimeError: Insufficient space in /dev/shm for the message queue: 256 MiB required, 60 MiB free.",
            "shm_full",
            None,
            {"requested_bytes": 256 * MIB, "free_bytes": 60 * MIB},
        ),
        (
            "cudaHostRegister failed (rc=1, invalid argument) for ptr=0x7f0000000000 size=68719476736",
            "pinned_failed",
            None,
            {"requested_bytes": 64 * GIB},
        ),
        ("OSError: [Errno 12] Cannot allocate memory", "host_alloc", None, {}),
        ("MemoryError", "host_alloc", None, {}),
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9",
            "exit_code",
            None,
            {"exit_code": -9},
        ),
        (
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP9': -9}",
            "exit_code",
            None,
            {"exit_code": -9},
        ),
    ],
)
def test_a_cause(line, kind, phase, numbers):
    found = only(line)
    assert (found.kind, found.role, found.phase_hint) == (kind, "cause", phase)
    assert {name: found.numbers.get(name) for name in numbers} == numbers


@pytest.mark.parametrize(
    ("line", "kind", "role"),
    [
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376.",
            "on_chip_memory",
            "not_memory",
        ),
        (
            "RuntimeError: Error in function 'aligned_alloc' at /opt/fi/allocator.h:49: Buffer overflow when allocating memory for batch_prefill_tmp_v with size 536870912 and alignment 16, but only 402653184 bytes available in AlignedAllocator.",
            "workspace_overflow",
            "not_memory",
        ),
        ("RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.", "size_bug", "not_memory"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal_access", "not_memory"),
        (RETRY, "allocator_retry", "context"),
        (
            "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch allocator will free cache and retry)",
            "allocator_retry",
            "context",
        ),
        (
            "[2026-03-01 10:00:00] Multimodal preprocessing ran out of GPU memory on cuda:0; retrying on CPU",
            "recovered",
            "context",
        ),
        (
            "[2026-03-01 10:00:00 TP1] The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
            "imbalance",
            "context",
        ),
        (
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
            "consequence",
            "consequence",
        ),
        (
            "[2026-03-01 10:00:00] Received sigquit from a child process. It usually means the child failed.",
            "consequence",
            "consequence",
        ),
        (
            "Failed to allocate shared memory for multimodal feature transport (No space left); falling back",
            "shm_warning",
            "context",
        ),
        ("[ 9.0] NVRM: Xid (PCI:0000:83:00): 45, pid=42, name=python3, Ch 00000010", "xid", "context"),
        ("ValueError: something else", "exception", "context"),
    ],
)
def test_what_is_no_cause(line, kind, role):
    found = only(line)
    assert (found.kind, found.role) == (kind, role)


def test_a_message_in_no_torchs_form_is_told_apart_with_the_reason():
    found = only(
        "torch.cuda.OutOfMemoryError: CUDA out of memory.\nTried to allocate 23.04 GiB (GPU 0; 23.52 GiB total; 0 bytes free)"
    )
    assert (found.kind, found.role) == ("unreliable", "not_memory")
    assert "retold" in found.notes[0]
    assert found.numbers["total_bytes"] == round(23.52 * GIB)


def test_an_ordinary_serving_log_has_no_symptom():
    text = "[2026-03-01 10:00:00 TP0] Decode batch, #running-req: 3, #token: 900, token usage: 0.10\n" * 5
    assert symptoms(text + 'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n').found == ()


def test_every_kind_of_rule_is_known():
    assert set(KIND_OF_RULE.values()) <= set(KINDS)
    ids = {rule.full_id for rule in RULES.rules}
    assert set(KIND_OF_RULE) <= ids
    assert set(PHASE_OF_RULE) <= ids


# ---------------------------------------------------------------------------------------------------- cut and wrapped


CUT = [OOM, OLD, LOAD, RETRY, CHECK, KILL, POOL.replace("\n", " ")]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CUT), st.floats(0, 1), st.sampled_from(["", "...", "\nINFO 11-02 10:12:52 [a.py:1] hello\n"]))
def test_a_message_cut_anywhere_says_nothing_wrong(message, share, after):
    whole = only(message).numbers
    found = symptoms(message[: int(len(message) * share)] + after).found
    assert len(found) <= 1
    for symptom in found:
        assert symptom.kind != "unreliable"
        numbers = symptom.numbers
        # Cut before "this process", the entry of another may be taken for what it is only with all of the list.
        if numbers.get("other_processes", []) != whole.get("other_processes", []):
            numbers.pop("other_processes", None)
        assert numbers.items() <= whole.items()


def test_all_that_is_whole_is_read():
    found = only(OOM[: OOM.index("located by PyTorch")])
    assert set(found.amounts) == {
        "requested_bytes",
        "total_bytes",
        "free_bytes",
        "process_bytes",
        "torch_allocated_bytes",
    }
    assert only(OOM[: OOM.index("acity of")]).numbers == {"requested_bytes": 786 * MIB, "gpu_index": 1}


WRAPPED = [
    "{}",
    "2026-05-01T22:44:30.255123456Z {}",
    "2026-05-01T22:44:30.255123456Z stderr F {}",
    "sglang-1  | {}",
    "Aug 01 18:01:30 node7 vllm[88]: {}",
    "(EngineCore pid=81) ERROR 11-02 10:12:52 [core.py:900] {}",
    "\x1b[31m(Worker_TP1 pid=82) ERROR 11-02 10:12:52 [multiproc_executor.py:990]\x1b[0m {}",
]


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("message", [OOM, OLD])
def test_prefixes_change_nothing(wrapper, message):
    assert only(wrapper.format(message)).numbers == only(message).numbers


def test_dockers_json_file():
    assert (
        only(json.dumps({"log": OOM + "\n", "stream": "stderr", "time": "2026-05-01T22:44:30Z"})).numbers
        == only(OOM).numbers
    )


def test_a_message_wrapped_over_lines():
    text = OOM.replace(". ", ".\n", 3).replace(" and 331", "\nand 331")
    assert only(text).numbers == only(OOM).numbers


# ------------------------------------------------------------------------------------------------ several lines of one


def test_what_several_processes_print_of_one_failure_is_one():
    text = "\n".join(
        [
            f"(Worker_TP1 pid=82) ERROR 11-02 10:12:52 [w.py:1] {OOM}",
            f"(EngineCore pid=81) ERROR 11-02 10:12:52 [core.py:9] RuntimeError: Worker failed with error '{OOM.partition(': ')[2]}'",
            f"(APIServer pid=80) ERROR 11-02 10:12:53 [api.py:9] {OOM}",
        ]
    )
    found = only(text)
    assert found.repeats == 2
    assert found.prefix.ranks == {"tp": 1}
    assert len(found.evidence) == 3


def test_two_ranks_are_two():
    lines = [f"(Worker_TP{n} pid=8{n}) ERROR 11-02 10:12:52 [w.py:1] {OOM}" for n in (0, 1)]
    assert [s.prefix.ranks["tp"] for s in symptoms("\n".join(lines)).found] == [0, 1]


def test_the_same_failure_of_a_later_start_is_another():
    start = "(EngineCore pid=81) INFO 11-02 10:12:00 [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: model='m', dtype=torch.bfloat16\n"
    error = f"(EngineCore pid=81) ERROR 11-02 10:12:52 [core.py:9] {OOM}\n"
    assert [s.line for s in symptoms(start + error + start + error).found] == [2, 4]
    assert [s.line for s in symptoms(error + "\n" * (MERGE_LINES + 1) + error).found] == [1, MERGE_LINES + 3]


def test_the_frames_of_a_traceback_are_its_exceptions():
    text = (
        "[2026-06-11 05:11:58 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/managers/scheduler.py", line 437, in __init__\n    self.init_model_worker()\n'
        '  File "/opt/sglang/srt/mem_cache/memory_pool.py", line 600, in _create_buffers\n    torch.zeros(\n' + OOM
    )
    (found,) = symptoms(text).of("torch_oom")
    assert [(f.file.rpartition("/")[2], f.line, f.function) for f in found.frames] == [
        ("scheduler.py", 437, "__init__"),
        ("memory_pool.py", 600, "_create_buffers"),
    ]
    assert found.functions == {"__init__", "_create_buffers"}
    # The record's head says whose it is.
    assert found.prefix.ranks == {"tp": 1}
    assert found.time == "2026-06-11T05:11:58"


def test_a_traceback_behind_its_exception_is_its_own():
    lead = "(Worker_TP0 pid=160) ERROR 05-20 20:54:32 [multiproc_executor.py:962] "
    text = (
        f'{lead}{OOM}\n{lead}Traceback (most recent call last):\n{lead}  File "/opt/v.py", line 9, in execute_model\n'
    )
    assert only(text).functions == {"execute_model"}


def test_tracebacks_of_two_processes_that_mix_are_told_apart():
    a, b = (f"(Worker_TP{n} pid=16{n}) ERROR 05-20 20:54:32 [m.py:9] " for n in (0, 1))
    text = "".join(
        [
            f'{a}  File "/opt/v.py", line 1, in first\n',
            f'{b}  File "/opt/v.py", line 2, in second\n',
            f"{a}{OOM}\n",
            f"{b}{OOM}\n",
        ]
    )
    assert [s.functions for s in symptoms(text).found] == [{"first"}, {"second"}]


def test_frames_whose_lines_were_wrapped():
    text = (
        '  File "/opt/fla/ops/chunk.py", line 72,\n       in chunk_gated_delta_rule_fwd\n    o = chunk_fwd_o(\n' + OOM
    )
    assert only(text).functions == {"chunk_gated_delta_rule_fwd"}


# -------------------------------------------------------------------------------------------------- tables and blocks


KERNEL = """[ 9000.000001] python3 invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=983
[ 9000.000010] memory: usage 67108864kB, limit 67108864kB, failcnt 4711
[ 9000.000021] [  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name
[ 9000.000022] [   4242]     0  4242 28273741 {rss} 132861952        0           983 python3
[ 9000.000023] [   4300]     0  4300  1234567   250000   3000000        0           983 VLLM::EngineCor
[ 9000.000030] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=abc,mems_allowed=0-1,oom_memcg=/k/pod1,task_memcg=/k/pod1,task=python3,pid=4242,uid=0
[ 9000.000031] Memory cgroup out of memory: Killed process 4242 (python3) total-vm:113094964kB, anon-rss:64911000kB, file-rss:10240kB, shmem-rss:16764kB, UID:0
"""


@pytest.mark.parametrize(("rss", "page"), [(16234501, 4 * KIB), (1014656, 64 * KIB)])
def test_the_kernels_table_has_bytes_where_the_killed_process_tells_the_page_size(rss, page):
    found = symptoms(KERNEL.format(rss=rss))
    tasks = {s.counts["pid"]: s for s in found.of("kernel_task")}
    assert tasks[4300].amounts["rss_bytes"].bytes == 250000 * page
    assert tasks[4300].words["name"] == "VLLM::EngineCor"
    (kill,) = found.of("cgroup_oom")
    assert kill.repeats == 1
    assert found.of("cgroup_usage")[0].amounts["limit_bytes"].bytes == 64 * GIB


def test_pages_of_unknown_size_stay_pages():
    rows = KERNEL.format(rss=16234501).partition("[ 9000.000030]")[0]
    assert all("rss_bytes" not in s.amounts for s in symptoms(rows).of("kernel_task"))


def test_of_a_long_table_the_largest_rows_are_kept():
    rows = "".join(
        f"[ {n:6d}]     0 {n:5d}   100000 {n:8d}  1234567        0             0 python3\n" for n in range(1, 2001)
    )
    found = symptoms(rows)
    assert [s.counts["rss_pages"] for s in found.of("kernel_task")] == list(range(2001 - MOST_TASKS, 2001))
    assert found.left_out == {"kernel_task": 2000 - MOST_TASKS}


@pytest.mark.parametrize(
    ("lead", "time"),
    [
        ("Aug 01 18:01:30 node7 kernel: ", "--08-01T18:01:30"),
        ("[Fri Aug  1 18:01:30 2026] ", "2026-08-01T18:01:30"),
        ("[ 9000.000001] ", None),
    ],
)
def test_a_kernel_lines_time(lead, time):
    assert only(lead + KILL).time == time


def test_a_described_pod():
    text = (
        "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n    Restart Count:  7\n"
        "    Limits:\n      cpu:             16\n      memory:          64Gi\n      nvidia.com/gpu:  1\n"
        "    Requests:\n      memory:          32Gi\n"
    )
    found = symptoms(text)
    assert [s.kind for s in found.found] == ["container_killed", "container_exit", "restart_count", "memory_limit"]
    limit = found.of("memory_limit")[0].amounts["limit_bytes"]
    assert (limit.bytes, limit.tolerance) == (64 * GIB, 0)


def test_nvidia_smis_table():
    text = (
        "|   1  NVIDIA H200                    On  |   00000000:84:00.0 Off |                    0 |\n"
        "| N/A   52C    P0            628W /  700W |   32362MiB / 143771MiB |    100%      Default |\n"
        "|    1   N/A  N/A           10291      C   python3 -m vllm                         2566MiB |\n"
    )
    found = symptoms(text)
    (device,), (process,) = found.of("smi_device"), found.of("smi_process")
    assert device.numbers == {"gpu_index": 1, "used_bytes": 32362 * MIB, "total_bytes": 143771 * MIB}
    assert process.numbers == {"gpu_index": 1, "pid": 10291, "used_bytes": 2566 * MIB}
    assert process.words == {"name": "python3 -m vllm"}


def test_torchs_memory_summary_is_one():
    text = (
        "|                  PyTorch CUDA memory summary, device ID 2                 |\n"
        "|            CUDA OOMs: 1            |        cudaMalloc retries: 3         |\n"
        "| Allocated memory      |    1062 MB |    4877 MB |   89299 MB |   88237 MB |\n"
        "|       from large pool |    1048 MB |    4865 MB |   89263 MB |   88215 MB |\n"
        "| GPU reserved memory   |   12420 MB |   12420 MB |   16924 MB |    4504 MB |\n"
    )
    numbers = only(text).numbers
    assert numbers["gpu_index"] == 2
    assert numbers["ooms"] == 1
    assert numbers["torch_allocated_bytes"] == 1062 * MIB
    assert numbers["torch_reserved_bytes"] == 12420 * MIB


def test_rays_monitor_and_its_largest_process():
    lead = "ERROR 03-21 17:27:44 [core.py:340] "
    text = (
        f"{lead}ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        f"{lead}Memory on the node (IP: 10.0.0.1, ID: aa) where the task (actor ID: 46, name=W, pid=13378, memory used=3.37GB) was running was 2152.43GB / 2265.25GB (0.950196), which exceeds the memory usage threshold of 0.95.\n"
        f"{lead}13377        2077.83 ray::RayWorkerWrapper.__ray_call__\n"
        f"{lead}4242    11.15   python3 -m something\n"
    )
    found = symptoms(text)
    (monitor,) = found.of("ray_memory_monitor")
    assert monitor.counts == {"used_gb": 2152.43, "limit_gb": 2265.25, "killed_process_gb": 3.37}
    assert [(s.counts["pid"], s.counts["used_gb"]) for s in found.of("ray_process")] == [
        (13377, 2077.83),
        (4242, 11.15),
    ]


# --------------------------------------------------------------------------------------------------------- long inputs


def test_a_bounded_number_is_kept_and_the_rest_counted():
    count = MOST_FIRST + MOST_LAST + 300
    lines = "".join(
        f"(W pid={n}) ERROR 11-02 10:12:52 [w.py:1] {OOM.replace('786.00', f'{n}.00')}\n"
        for n in range(1000, 1000 + count)
    )
    found = symptoms(lines)
    assert len(found.found) == MOST_FIRST + MOST_LAST
    assert found.left_out == {"torch_oom": 300}
    assert found.found[-1].line == count


def test_a_flood_of_one_kind_pushes_nothing_else_out():
    flood = "".join(
        f"[rank1]:[W906 07:46:05.0 A.cpp:1] memory allocation failed with OOM on device 1 while trying to allocate {n} bytes (free: 1, total: 2).\n"
        for n in range(1000)
    )
    found = symptoms(flood + "      Exit Code:    137\n" + flood)
    assert len(found.of("container_exit")) == 1
    assert len(found.of("allocator_retry")) == MOST_FIRST + MOST_LAST


SAMPLES = [sample.line for rule in RULES.rules for sample in rule.sample if rule.kind in {"failure", "marker"}]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(SAMPLES), st.text(max_size=40)), max_size=30))
def test_any_mix_of_lines_is_read(lines):
    found = symptoms("\n".join(lines))
    for symptom in found.found:
        assert symptom.role == KINDS[symptom.kind]
        assert 1 <= symptom.line <= symptom.line + symptom.repeats
        assert symptom.evidence[0].line == symptom.line
        json.dumps(symptom.numbers)


def inside_a_figure(line, at):
    return re.search(r"\d[\d.]*[A-Za-z]?$", line[:at]) is not None and re.match(r"[\w.]\w?", line[at:]) is not None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SAMPLES), st.floats(0, 1))
def test_no_formats_figures_change_where_its_line_is_cut(line, share):
    # Where a line that ends with a number is cut inside it, nobody can tell: such cuts are left out.
    at = int(len(line) * share)
    whole = {s.rule: s.numbers for s in symptoms(line).found}
    for symptom in symptoms(line[:at]).found:
        if symptom.rule in whole and not inside_a_figure(line, at):
            numbers = {n: v for n, v in symptom.numbers.items() if n not in {"other_processes", "process_bytes"}}
            assert numbers.items() <= whole[symptom.rule].items()


def test_symptoms_are_asked_for_while_reading():
    log = SymptomLog()
    events = list(Scanner(RULES).events([f"{KILL}\n{OOM}\n".encode()], 0))
    log.feed(events[0])
    assert [s.kind for s in log.symptoms().found] == ["kernel_oom"]
    log.feed(events[1])
    assert [s.kind for s in log.symptoms().found] == ["kernel_oom", "torch_oom"]


def test_inputs_without_a_server_are_read_as_well(tmp_path):
    files = {
        "dmesg.txt": KERNEL.format(rss=16234501),
        "pod.txt": "      Reason:       OOMKilled\n",
        "bare.log": OOM + "\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    reading, found = read_symptoms([str(tmp_path / name) for name in files])
    assert reading.report.servers == ()
    assert [i.path.rpartition("/")[2] for i in reading.report.inputs] == list(files)
    assert {s.input for s in found.of("cgroup_oom")} == {0}
    assert {s.input for s in found.of("container_killed")} == {1}
    assert {s.input for s in found.of("torch_oom")} == {2}


def test_a_traceback_of_a_request_restarts_no_maxima():
    usage = "[2026-03-01 10:00:00 TP0] Decode batch, #running-req: {}, #token: 900, token usage: 0.10, cuda graph: True, gen throughput (token/s): 9.31, #queue-req: 0\n"
    frame = '  File "/opt/app/handler.py", line 12, in handle\n'
    text = usage.format(5) + frame + usage.format(3) + usage.format(2) + frame
    told = [e.fields["running"] for e in Scanner(RULES).events([text.encode()], 0) if e.rule.kind == "usage"]
    # The largest, and the last before something else.
    assert told == [5, 2]
