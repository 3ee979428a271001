"""Torch's own message: which of the listed processes is the one that prints, and when it printed."""

import pytest

from memledger.frameworks.torch_oom import own_process, printed_time, seconds_between
from memledger.grammar import load_rules
from memledger.scan import Scanner

RULES = load_rules()


def oom(processes, allocated="68.83 GiB", total="79.11 GiB", lead=""):
    line = (
        f"{lead}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of "
        f"{total} of which 140.75 MiB is free. {processes}Of the allocated memory {allocated} is allocated by PyTorch, "
        "and 331.08 MiB is reserved by PyTorch but unallocated.\n"
    )
    (found,) = Scanner(RULES).events(iter([line.encode()]), 0)
    return found


def test_a_process_beside_which_torch_has_no_room_is_this_one():
    assert own_process(oom("Process 3270336 has 78.96 GiB memory in use. ")) == 0


def test_the_largest_of_several_is_this_one():
    listed = "Process 60 has 184.00 MiB memory in use. Process 198 has 78.50 GiB memory in use. "
    assert own_process(oom(listed)) == 1


@pytest.mark.parametrize(
    ("processes", "allocated"),
    [
        ("Including non-PyTorch memory, this process has 40.00 GiB memory in use. ", "38.00 GiB"),
        # Both fit on the GPU: another process.
        ("Process 7 has 40.00 GiB memory in use. ", "38.00 GiB"),
        # Smaller than what torch holds: not this one, whatever the sum is.
        ("Process 7 has 20.00 GiB memory in use. ", "68.83 GiB"),
        ("", "68.83 GiB"),
    ],
)
def test_anothers_process_stays_anothers(processes, allocated):
    assert own_process(oom(processes, allocated)) is None


def test_a_size_that_stands_for_not_available_proves_nothing():
    hidden = "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Process 7 has 78.00 GiB memory in use. "
    assert own_process(oom(hidden)) is None


def test_torchs_own_stamp_tells_the_time_without_a_year():
    line = "[rank3]:[E716 19:47:26.324588983 shim_common.cpp:523] Exception in aoti_torch: "
    assert printed_time(oom("", lead=line)) == "--07-16T19:47:26"
    assert printed_time(oom("")) is None


def test_times_compare_with_and_without_a_year():
    assert seconds_between("--07-16T19:45:14", "--07-16T19:47:26") == 132
    assert seconds_between("2026-07-16T19:45:14", "--07-16T19:47:26") == 132
    assert seconds_between(None, "--07-16T19:47:26") is None
    assert seconds_between("yesterday", "--07-16T19:47:26") is None
