"""What nvidia-smi lists is said beside an incident on device memory, and only there."""

from pathlib import Path

from memledger.postmortem.facts import read_symptoms
from memledger.postmortem.incident import Incident, Numbers
from memledger.postmortem.listed import noted
from memledger.units import GIB

CASE = Path(__file__).parent.parent / "fixtures" / "oom-vllm-leftover"


def one(**changes):
    return Incident("other_process", "start", 0.7, "the GPU was in use", **changes)


def test_the_processes_of_the_table_are_named_with_their_sizes_and_lines():
    _, symptoms = read_symptoms([str(CASE / "nvidia-smi.txt")])
    (got,) = noted([one()], symptoms)
    assert got.notes == ("nvidia-smi lists, at its own moment: process 3901 (VLLM::EngineCore) 70.03 GiB.",)
    assert [e.line for e in got.evidence] == [19]


def test_host_memory_is_none_of_the_gpus_processes():
    _, symptoms = read_symptoms([str(CASE / "nvidia-smi.txt")])
    assert noted([one(device_memory=False)], symptoms)[0].notes == ()


def test_without_a_table_nothing_is_said():
    _, symptoms = read_symptoms([str(CASE / "server.log")])
    assert noted([one()], symptoms) == (one(),)


def test_the_process_that_holds_what_was_in_use_is_the_first_candidate():
    _, symptoms = read_symptoms([str(CASE / "nvidia-smi.txt")])
    held = Numbers(total_bytes=79 * GIB, free_bytes=9 * GIB)
    (got,) = noted([one(numbers=held)], symptoms)
    assert got.candidates[0].command == "ps -o pid,ppid,lstart,args -p 3901"
    assert "70.03 GiB when nvidia-smi was run: that is the 70.00 GiB in use" in got.candidates[0].cause


def test_a_process_of_another_size_is_not_called_the_holder():
    _, symptoms = read_symptoms([str(CASE / "nvidia-smi.txt")])
    for free in (1, 40):
        (got,) = noted([one(numbers=Numbers(total_bytes=79 * GIB, free_bytes=free * GIB))], symptoms)
        assert got.candidates == ()


def test_a_limit_of_mps_is_said_of_device_memory_only(tmp_path):
    log = tmp_path / "mps.log"
    log.write_text(
        "[2025-01-07 12:57:36.457 Server    82] Device pinned memory limit for device 0 set to 0x140000000 bytes\n"
        "[2025-01-07 12:57:36.458 Control    69] Cmd:set_default_device_pinned_mem_limit 1 8G\n"
    )
    _, symptoms = read_symptoms([str(log)])
    assert [s.amounts["limit_bytes"].bytes for s in symptoms.of("mps_limit")] == [5 * GIB, 8 * GIB]
    (got,) = noted([one()], symptoms)
    assert got.notes[0].startswith("MPS limits the device memory of each client to 5.00 GiB, 8.00 GiB")
    assert noted([one(device_memory=False)], symptoms)[0].notes == ()
