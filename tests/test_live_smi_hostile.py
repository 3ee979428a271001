"""Pastes that are long, cut, prefixed or no `nvidia-smi` at all: read in linear time, or refused in one sentence."""

import time

import pytest
from test_cli_explain_smi import TABLE

from memledger.live.smi import read_smi
from memledger.units import MIB

BANNER = TABLE.splitlines()[1]


@pytest.mark.parametrize(
    "text",
    [
        f"{BANNER}\n| 0  a{' ' * 300_000}x\n",
        f"{BANNER}\n| 0 a | 00000000:01:00.0 |\n| | {'1' * 300_000}\n",
        f"{TABLE}|    0   N/A  N/A      10291      C   a{' ' * 300_000}x\n",
        "=" * 1_000_000,
        f"=NVSMI LOG=\nGPU 00000000:01:00.0\n    a{' ' * 1_000_000}x\n",
        "pid,used_memory\n" * 100_000,
        "--query-gpu=a," * 100_000 + "noheader",
        "<nvidia_smi_log>" * 100_000,
        "<nvidia_smi_log>" + "<a/>" * 1_000_000,
        "> " * 500_000,
        "pid,used_memory,process_name\n" + "," * 1_000_000,
    ],
    ids=lambda text: text[:20],
)
def test_hostile_text_takes_no_longer_than_its_length(text):
    begun = time.monotonic()
    try:
        read_smi(text.encode())
    except ValueError as error:
        assert "\n" not in str(error)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n",
            "reboot or reload the module",
        ),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
            "could not reach the driver",
        ),
        ("No devices were found\n", "shows no GPU"),
        ("Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error\n", "a GPU is lost"),
        (
            "# gpu         pid   type     sm    mem\n# Idx           #    C/G      %      %\n    0  12  C  98  60\n",
            "bandwidth",
        ),
        ("", "no nvidia-smi output"),
    ],
)
def test_what_is_no_sample_says_why(text, words):
    with pytest.raises(ValueError, match=words):
        read_smi(text.encode())


@pytest.mark.parametrize("prefix", ["[12:00:01] ", "2026-09-09T18:05:00Z stdout F ", "> > "])
def test_a_table_that_a_log_prefixed_is_whole(prefix):
    plain = read_smi(TABLE.encode())
    marked = read_smi("".join(f"{prefix}{line}\n" for line in TABLE.splitlines()).encode())
    assert marked.devices == plain.devices
    assert marked.source == plain.source


def test_the_command_stands_for_the_header_that_it_left_out():
    text = (
        "$ nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv,noheader,nounits\n"
        "0, 5, 143771\n1, [N/A], 143771\n$ \n"
    )
    first, second = read_smi(text.encode()).devices
    assert (first.index, first.used_bytes, first.total_bytes) == (0, 5 * MIB, 143771 * MIB)
    assert (second.used_bytes, second.total_bytes) == (None, 143771 * MIB)
    assert "[N/A]" in second.missing["used_bytes"]


def test_a_processs_name_with_commas():
    text = (
        "index, uuid, memory.total [MiB], memory.used [MiB]\n0, GPU-1, 143771 MiB, 32362 MiB\n\n"
        "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-1, 10291, python, -c, x, 2566 MiB\n"
    )
    (device,) = read_smi(text.encode()).devices
    assert [(row.pid, row.command, row.used_bytes) for row in device.processes] == [
        (10291, "python, -c, x", 2566 * MIB)
    ]


def test_an_entity_of_a_document_is_never_expanded():
    text = (
        '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
        '<nvidia_smi_log><gpu id="00000000:01:00.0"><product_name>&a;</product_name>'
        "<fb_memory_usage><total>5 MiB</total></fb_memory_usage></gpu></nvidia_smi_log>"
    )
    with pytest.raises(ValueError, match="no nvidia-smi output"):
        read_smi(text.encode())


def test_a_column_with_a_unit_that_is_none_has_no_sizes():
    found = read_smi(b"index, name, memory.total [IiB], memory.used [MiB]\n0, NVIDIA H100, 81559, 100 MiB\n")
    assert found.devices[0].total_bytes is None
    assert found.devices[0].used_bytes == 100 * MIB
