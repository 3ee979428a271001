"""Several logs joined in one input: every failure keeps its own figures, traceback and consequences."""

import json
from pathlib import Path

import pytest

from memledger.cli import app

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOGS = sorted(FIXTURES.glob("oom-*/server.log"))
GPU_0 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 23.56 GiB of "
    "which {free} is free. Including non-PyTorch memory, this process has {process} memory in use. Of the allocated "
    "memory {torch} is allocated by PyTorch, and 210.78 MiB is reserved by PyTorch but unallocated."
)
FIRST = GPU_0.format(asked="384.00 MiB", free="338.75 MiB", process="23.06 GiB", torch="22.33 GiB")
SECOND = GPU_0.format(asked="96.00 MiB", free="41.00 MiB", process="23.51 GiB", torch="20.10 GiB")
NCCL = (
    "node01:306:615 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
    "node01:306:615 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\n"
)
CAPTURE = "".join(
    f"(VllmWorker rank=3 pid=1090) ERROR 06-05 06:18:13 [multiproc_executor.py:470] {text}\n"
    for text in (
        '  File "/opt/venv/lib/python3.10/site-packages/torch/cuda/graphs.py", line 84, in capture_end',
        "RuntimeError: CUDA error: out of memory",
    )
)
REFUSED = (
    "(EngineCore_DP0 pid=3584) ERROR 08-19 05:56:57 [core.py:1346] ValueError: No available memory for the cache blocks. "
    "Try increasing `gpu_memory_utilization` when initializing the engine.\n"
)
TOO_FEW = (
    "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each decode sequence requires one Mamba "
    "cache block, so CUDA graph capture cannot proceed.\n"
)
CHUNK = 'File "/opt/venv/lib/python3.12/site-packages/vllm/model_executor/layers/fla/ops/chunk.py", line 72, in chunk_fwd_o\n'


@pytest.fixture
def incidents(tmp_path, capsysbinary):
    def read(*texts):
        path = tmp_path / "joined.log"
        path.write_text("".join(text if text.endswith("\n") else text + "\n" for text in texts))
        assert app.run(["oom", str(path), "--format", "json", "--no-live"]) == 0
        return json.loads(capsysbinary.readouterr().out)["incidents"]

    return read


def asked(found):
    return [round(one["numbers"]["requested_bytes"] / 2**20) for one in found]


def in_order(found):
    return sorted(found, key=lambda one: one["evidence"][0]["line"])


def said(one):
    return one["kind"], one["phase"], one["cause"], json.dumps(one["numbers"], sort_keys=True)


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("first", range(len(LOGS)))
def test_two_logs_in_one_give_each_incident_as_alone(incidents, first, step):
    texts = [LOGS[first].read_text(), LOGS[(first + step) % len(LOGS)].read_text()]
    alone = [said(one) for text in texts for one in incidents(text)]
    assert sorted(said(one) for one in incidents(*texts)) == sorted(alone)


# ------------------------------------------------------------------------------------- excerpts, with no start between


def test_two_messages_of_one_card_with_other_figures_are_two_failures(incidents):
    found = in_order(incidents(FIRST, SECOND))
    assert asked(found) == [384, 96]
    assert [round(one["numbers"]["free_bytes"] / 2**20) for one in found] == [339, 41]


def test_a_retry_of_the_same_moment_with_another_size_is_the_same_failure(incidents):
    assert len(incidents(FIRST, FIRST.replace("384.00 MiB", "386.00 MiB"))) == 1


def test_another_rank_that_asks_for_the_same_is_the_same_failure(incidents):
    other = FIRST.replace("GPU 0", "GPU 1").replace("338.75", "322.75").replace("23.06", "23.08")
    (one,) = incidents(FIRST, other)
    assert one["ranks"] == ["GPU 0", "GPU 1"]


def test_a_process_id_ties_two_messages_together(incidents):
    head = "(EngineCore pid=101) ERROR 08-01 18:01:14 [core.py:1004] "
    assert len(incidents(head + FIRST, head + SECOND)) == 1
    assert len(incidents(head + FIRST, head.replace("101", "202") + SECOND)) == 2


@pytest.mark.parametrize("texts", [(NCCL, CAPTURE), (CAPTURE, NCCL)])
def test_a_library_and_a_capture_of_two_logs_are_told_apart(incidents, texts):
    found = {one["kind"]: one for one in incidents(*texts)}
    assert sorted(found) == ["graph_capture", "library"]
    assert found["graph_capture"]["phase"] == "graph_capture"
    assert found["library"]["phase"] == "unknown"
    assert found["library"]["numbers"]["requested_bytes"] == 6291456


def test_an_allocation_behind_a_refusal_keeps_its_figures(incidents):
    found = in_order(incidents(REFUSED, FIRST))
    assert found[0]["kind"] == "kv_pool"
    assert asked(found[1:]) == [384]


@pytest.mark.parametrize("texts", [(REFUSED, TOO_FEW), (TOO_FEW, REFUSED)])
def test_two_refusals_are_two_failures(incidents, texts):
    assert sorted(one["kind"] for one in incidents(*texts)) == ["kv_pool", "state_pool"]


def test_a_workspace_that_overflows_is_not_lost_beside_another_failure(incidents):
    overflow = (
        "RuntimeError: Failed to allocate memory for batch_prefill_tmp_v with size 435814400 and alignment 16 in "
        "AlignedAllocator\n"
    )
    for texts in ((overflow, FIRST), (FIRST, overflow)):
        kinds = [one["kind"] for one in incidents(*texts)]
        assert len(kinds) == 2
        assert "workspace" in kinds


# --------------------------------------------------------------------------------------- what stands beside a failure


def test_a_traceback_belongs_to_the_exception_that_ends_it(incidents):
    found = in_order(incidents(FIRST, CHUNK + SECOND))
    assert [one["phase"] for one in found] == ["unknown", "prefill"]


def test_a_traceback_under_another_prefix_belongs_to_the_failure_before_it(incidents):
    frames = "(EngineCore pid=104)   " + CHUNK
    found = in_order(incidents(FIRST + "\n" + frames, SECOND))
    assert [one["phase"] for one in found] == ["prefill", "unknown"]


def test_what_follows_a_failure_is_not_in_the_chain_of_the_next(incidents):
    dead = (
        "(APIServer pid=30) ERROR 08-01 18:01:14 [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
        "encountered an issue. See stack trace (above) for the root cause.\n"
    )
    found = in_order(incidents(FIRST + "\n" + dead, SECOND))
    assert [len(one["chain"]) for one in found] == [2, 1]


def test_a_failure_in_front_of_a_servers_first_line_is_not_that_servers(incidents):
    start = (
        "(APIServer pid=30) INFO 08-01 18:00:00 [api_utils.py:273] non-default args: {'model': '/models/example-8b'}\n"
        "(EngineCore pid=101) INFO 08-01 18:00:11 [gpu_model_runner.py:5210] Starting to load model /models/example-8b...\n"
    )
    head = "(EngineCore pid=101) ERROR 08-01 18:01:14 [core.py:1004] "
    found = in_order(incidents(FIRST, start + head + SECOND))
    assert [one["server"] for one in found] == [None, 0]


def test_a_line_of_a_process_that_has_another_id_in_this_start_is_not_of_it(incidents):
    start = (
        "(APIServer pid=30) INFO 08-01 18:00:00 [api_utils.py:273] non-default args: {'model': '/models/example-8b'}\n"
        "(Worker_TP0 pid=200) INFO 08-01 18:00:31 [gpu_model_runner.py:5335] Model loading took 14.82 GiB memory and 9.1 seconds\n"
    )
    line = "(Worker_TP0 pid={pid}) ERROR 08-01 18:01:14 [multiproc_executor.py:962] " + FIRST
    assert [one["server"] for one in incidents(start, line.format(pid=200))] == [0]
    assert [one["server"] for one in incidents(start, line.format(pid=900))] == [None]


# -------------------------------------------------------------------------------------------------------- as containers keep it


@pytest.mark.parametrize("lead", ["", "[vllm] "])
def test_a_line_inside_a_containers_json_is_read_like_a_plain_one(incidents, lead):
    line = f"{lead}(Worker_DP6_EP6 pid=3853) ERROR 05-18 14:27:49 [multiproc_executor.py:962] {FIRST}"
    wrapped = json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-05-18T14:27:49.000000001Z"})
    (plain,), (one,) = incidents(line), incidents(wrapped)
    assert one["numbers"] == plain["numbers"]
    assert one["ranks"] == plain["ranks"] == ["DP6 EP6"]


FAULT = "[12345.678901] NVRM: Xid (PCI:0000:3b:00): {}, pid=4242, name=python3, Ch 00000008"


@pytest.mark.parametrize("number", [13, 31])
def test_a_fault_of_a_program_is_the_answer_where_nothing_else_failed(incidents, number):
    (alone,) = incidents(FAULT.format(number))
    assert (alone["kind"], alone["confidence"]) == ("not_device_memory", 0.7)
    assert f"Xid {number}" in alone["cause"]
    (beside,) = incidents(REFUSED, FAULT.format(number))
    assert beside["kind"] == "kv_pool"


@pytest.mark.parametrize("number", [43, 45])
def test_what_the_driver_does_when_a_process_ends_is_no_failure(incidents, number):
    assert incidents(FAULT.format(number)) == []
