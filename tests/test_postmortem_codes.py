"""Every cause has a stable code with a page, and of one kind the code tells opposite remedies apart."""

import json
import re
from pathlib import Path

import pytest

from memledger.cli import app
from memledger.findings.incident_pages import INCIDENTS
from memledger.postmortem import codes

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 140.75 MiB is free. Including non-PyTorch memory, this process has 78.96 GiB memory in use. Of the allocated "
    "memory 74.20 GiB is allocated by PyTorch, and 331.08 MiB is reserved by PyTorch but unallocated."
)
KILLED = (
    "[ 9.1] {scope}: Killed process 101 (VLLM::EngineCor) total-vm:110886376kB, anon-rss:117440512kB, file-rss:0kB, "
    "shmem-rss:0kB, UID:0 pgtables:300000kB oom_score_adj:0"
)


def frame(function):
    return f'  File "/opt/venv/lib/python3.12/site-packages/vllm/v1/x.py", line 81, in {function}\n'


CASES = {
    "ML211": "ValueError: Free memory on device cuda:0 (7.59/79.25 GiB) on startup is less than desired GPU memory "
    "utilization (0.85, 67.36 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    "ML213": "AssertionError: Error in memory profiling. Initial free memory 82.94 GiB, current free memory 90.17 GiB. "
    "This happens when other processes sharing the same container release GPU memory while vLLM is profiling during "
    "initialization.",
    "ML214": frame("wake_up") + OOM,
    "ML215": frame("load_model") + OOM,
    "ML216": frame("profile_run") + OOM,
    "ML217": frame("initialize_kv_cache") + OOM,
    "ML218": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
    "initializing the engine.",
    "ML219": "RuntimeError: Prefill out of memory. Try to lower your batch size.",
    "ML220": 'File "/opt/sglang/srt/mem_cache/memory_pool.py", line 499, in _init_mamba_pool\n' + OOM,
    "ML221": "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each decode sequence requires one "
    "Mamba cache block, so CUDA graph capture cannot proceed.",
    "ML222": frame("capture_model") + OOM,
    "ML224": frame("chunk_gated_delta_rule_fwd") + OOM,
    "ML225": frame("fused_recurrent_update") + OOM,
    "ML226": '  File "/opt/sglang/srt/layers/attention/flashinfer_backend.py", line 202, in init_attention_backend\n'
    + OOM,
    "ML227": "RuntimeError: Failed to allocate memory for batch_prefill_tmp_v with size 435814400 and alignment 16 in "
    "AlignedAllocator",
    "ML228": "/nvshmem/src/host/mem/mem_heap.cpp:1509: non-zero status: 2 cuMemCreate failed",
    "ML229": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "ML230": OOM.replace("331.08 MiB", "9.10 GiB").replace("74.20", "64.20"),
    "ML231": KILLED.format(scope="Out of memory"),
    "ML232": KILLED.format(scope="Memory cgroup out of memory"),
    "ML233": "RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)",
    "ML234": "cudaHostRegister failed (rc=1, invalid argument) for ptr=0x7f0000000000 size=68719476736",
    "ML235": "web-1 exited with code 137",
    "ML240": "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.",
    "ML241": "[rank0]:[W906 07:46:05.008634648 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 0 "
    "while trying to allocate 4334813184 bytes (free: 3779919872, total: 287431131136).",
    "ML248": "(APIServer pid=30) ERROR 08-01 18:01:14 [core_client.py:610] Engine core proc EngineCore died unexpectedly, "
    "shutting down client.",
    "ML249": "torch.OutOfMemoryError: CUDA out of memory.",
}
"""A text for each code; of a server's start need ML212 (tests of the leftover) and ML223 (a warm-up without graphs)."""


@pytest.fixture
def incident(tmp_path, capsysbinary):
    def read(text):
        path = tmp_path / "server.log"
        path.write_text(text + "\n")
        assert app.run(["oom", str(path), "--format", "json", "--no-live"]) == 0
        (one,) = json.loads(capsysbinary.readouterr().out)["incidents"]
        return one

    return read


@pytest.mark.parametrize("code", CASES)
def test_a_cause_has_its_code(incident, code):
    assert incident(CASES[code])["code"] == code


def test_every_code_has_a_page_and_every_page_a_code():
    source = Path(codes.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r'"(ML\d{3})"', source)) == {page.code for page in INCIDENTS}


def test_every_code_is_tried():
    assert {page.code for page in INCIDENTS} - set(CASES) == {"ML212", "ML223"}


def test_a_warm_up_without_graphs_is_not_the_graphs(incident):
    text = "[2026-06-11 05:11:58 TP0] Load weight end. avail mem=4.49 GB\n" + frame("_dummy_sampler_run") + OOM
    assert incident(text)["code"] == "ML223"


def test_the_previous_start_has_a_code_of_its_own(capsysbinary):
    log = Path(__file__).parent.parent / "fixtures" / "oom-vllm-previous-start" / "server.log"
    assert app.run(["oom", str(log), "--format", "json", "--no-live"]) == 0
    found = json.loads(capsysbinary.readouterr().out)["incidents"]
    assert [one["code"] for one in found] == ["ML212"]
    assert any(candidate["previous_start"] for candidate in found[0]["candidates"])


def test_the_code_stands_in_the_text(tmp_path, capsys):
    path = tmp_path / "server.log"
    path.write_text(CASES["ML218"] + "\n")
    assert app.run(["oom", str(path), "--no-live"]) == 0
    assert "(ML218)" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ a death without a word


def test_a_silent_death_names_what_would_decide(incident):
    one = incident(CASES["ML248"])
    assert (one["kind"], one["fatal"], one["device_memory"]) == ("unknown", True, None)
    assert one["confidence"] <= 0.3
    assert {candidate["kind"] for candidate in one["candidates"]} == {"unknown", "host_memory", "not_device_memory"}
    assert all(candidate["command"] for candidate in one["candidates"])
    assert len(one["chain"]) == 1


@pytest.mark.parametrize(
    "reason",
    [
        "(EngineCore pid=101) ERROR 08-01 18:01:13 [core.py:1004] TypeError: iterator() takes 1 positional argument but 2 were given\n",
        "(APIServer pid=30) INFO 08-01 18:01:13 [launcher.py:254] [shutdown] API server: shutdown triggered\n",
    ],
)
def test_a_death_with_a_reason_is_none_of_memory(tmp_path, capsysbinary, reason):
    start = (
        "(APIServer pid=30) INFO 08-01 18:00:00 [api_utils.py:273] non-default args: {'model': '/models/example-8b'}\n"
    )
    ready = "(APIServer pid=30) INFO:     Application startup complete.\n"
    path = tmp_path / "server.log"
    path.write_text(start + ready + reason + CASES["ML248"] + "\n")
    assert app.run(["oom", str(path), "--format", "json", "--no-live"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["incidents"] == []


# ----------------------------------------------------------------------------------- other runtimes, other quotations


@pytest.mark.parametrize(
    ("line", "code", "asked"),
    [
        (f"ERROR 10-11 12:27:29 engine.py:157] OutOfMemoryError('{OOM.partition(': ')[2]}')", "ML216", 786 * 2**20),
        (
            "vllm.engine.multiprocessing.MQEngineDeadError: Engine loop is not running. Inspect the stacktrace to find the "
            f"original error: OutOfMemoryError('{OOM.partition(': ')[2]}').",
            "ML216",
            786 * 2**20,
        ),
        (
            "RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 6.00G at the bottom of memory. "
            "That was not possible. There are 5.50G free, 0B reserved, and 5.50G reservable.",
            "ML249",
            6 * 2**30,
        ),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 49807360 bytes", "ML249", 49807360),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 32.42M of "
            "16.00M vmem. Exceeded vmem capacity by 16.42M",
            "ML240",
            None,
        ),
        (
            "Call rtMalloc fail, purpose: page caching, type = 2, size:4110811136, device_id:0[FUNC:Alloc]",
            "ML249",
            4110811136,
        ),
        ("rtsMallocHost execution failed, reason=driver error:out of memory", "ML234", None),
        (
            "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`. "
            "req_to_token_pool.available_size()=1, num_reqs=2, ",
            "ML219",
            None,
        ),
    ],
)
def test_wordings_of_other_runtimes_and_quotations(incident, line, code, asked):
    one = incident(line)
    assert one["code"] == code
    assert one["numbers"]["requested_bytes"] == asked
