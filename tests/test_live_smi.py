"""A pasted or saved nvidia-smi: every layout gives the same figures; what is cut off or absent is missing, never a guess."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli_explain_smi import TABLE

from memledger.live.smi import LARGEST_BYTES, read, read_smi

MIB = 2**20
QUERY = """\
==============NVSMI LOG==============

Timestamp                                 : Wed Sep  9 18:05:00 2026
Driver Version                            : 570.172.08
CUDA Version                              : 12.8

Attached GPUs                             : 1
GPU 00000000:83:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU UUID                              : GPU-00000000-0000-0000-0000-000000000001
    MIG Mode
        Current                           : Disabled
    FB Memory Usage
        Total                             : 81559 MiB
        Reserved                          : 479 MiB
        Used                              : 74250 MiB
        Free                              : 6830 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
        Used                              : 4 MiB
    ECC Mode
        Current                           : Enabled
    Processes
        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : 4243
            Type                          : C
            Name                          : sglang::scheduler
            Used GPU Memory               : 72136 MiB
        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : 7711
            Type                          : C
            Name                          : python
            Used GPU Memory               : 2100 MiB
"""
XML = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
<timestamp>Wed Sep  9 18:05:00 2026</timestamp>
<driver_version>570.172.08</driver_version><cuda_version>12.8</cuda_version>
<gpu id="00000000:83:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>
<uuid>GPU-00000000-0000-0000-0000-000000000001</uuid>
<fb_memory_usage><total>81559 MiB</total><reserved>479 MiB</reserved><used>74250 MiB</used><free>6830 MiB</free></fb_memory_usage>
<processes>
<process_info><pid>4243</pid><type>C</type><process_name>sglang::scheduler</process_name><used_memory>72136 MiB</used_memory></process_info>
<process_info><pid>7711</pid><type>C</type><process_name>python</process_name><used_memory>2100 MiB</used_memory></process_info>
</processes></gpu>
</nvidia_smi_log>
"""
CSV = """\
index, name, driver_version, memory.total [MiB], memory.reserved [MiB], memory.used [MiB], memory.free [MiB]
0, NVIDIA H100 80GB HBM3, 570.172.08, 81559 MiB, 479 MiB, 74250 MiB, 6830 MiB
"""
APPS = "pid, process_name, used_gpu_memory [MiB]\n4243, sglang::scheduler, 72136 MiB\n7711, python, 2100 MiB\n"
LAYOUTS = {"table": TABLE, "query": QUERY, "xml": XML, "csv": CSV + "\n" + APPS}


def sizes(device):
    return tuple(
        None if value is None else value // MIB
        for value in (device.total_bytes, device.reserved_bytes, device.used_bytes, device.free_bytes)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_figures(layout):
    sample = read_smi(LAYOUTS[layout].encode())
    (device,) = sample.devices
    total, _, used, _ = sizes(device)
    assert (total, used) == (81559, 74250)
    assert [(p.pid, (p.used_bytes or 0) // MIB) for p in device.processes] == [(4243, 72136), (7711, 2100)]
    assert (sample.source.name, sample.source.status, sample.driver_version) == ("smi", "ok", "570.172.08")


@pytest.mark.parametrize("layout", ["query", "xml", "csv"])
def test_what_the_driver_reserves_is_read_where_it_is_printed(layout):
    assert sizes(read_smi(LAYOUTS[layout].encode()).devices[0]) == (81559, 479, 74250, 6830)


def test_the_table_does_not_tell_what_is_reserved():
    (device,) = read_smi(TABLE.encode()).devices
    assert device.reserved_bytes is None
    assert "nvidia-smi -q" in device.missing["reserved_bytes"]


@pytest.mark.parametrize("shown", ["N/A", "18446744073709551615 MiB", "17592186044415 MiB", "99999999 MiB"])
def test_no_figure_is_missing_with_a_reason(shown):
    (device,) = read_smi(QUERY.replace("74250 MiB", shown).encode()).devices
    assert device.used_bytes is None
    assert device.missing["used_bytes"]


def test_the_last_complete_output_counts():
    later = TABLE.replace("74250MiB", "70000MiB")
    cut = TABLE[: TABLE.index("|   74250MiB")]
    sample = read_smi((TABLE + later + cut).encode())
    assert sizes(sample.devices[0])[2] == 70000
    assert "3 nvidia-smi outputs" in sample.source.reason


def test_no_entity_is_expanded():
    declared = XML.replace('"nvsmi_device_v12.dtd">', '"x" [<!ENTITY a SYSTEM "file:///etc/passwd">]>')
    assert sizes(read_smi(declared.encode()).devices[0])[0] == 81559
    used = declared.replace("NVIDIA H100 80GB HBM3", "&a;")
    try:
        devices = read_smi(used.encode()).devices
    except ValueError:
        devices = ()
    assert all("root:" not in (device.name or "") for device in devices)


@pytest.mark.parametrize("text", ["", "hello\n", CSV.split("\n", 1)[1], "NVIDIA-SMI has failed because\n"])
def test_what_can_not_be_read_is_one_sentence(text):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        read_smi(text.encode())


def test_a_file_that_is_too_large_is_refused(tmp_path):
    file = tmp_path / "smi.txt"
    file.write_bytes(b" " * (LARGEST_BYTES + 1))
    with pytest.raises(ValueError, match="larger than"):
        read(file)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 6000))
def test_a_cut_never_makes_up_a_figure(layout, at):
    text = LAYOUTS[layout][:at]
    printed = {int(figure) for figure in re.findall(r"\d+", LAYOUTS[layout])}
    try:
        devices = read_smi(text.encode()).devices
    except ValueError:
        return
    for device in devices:
        for value in (
            device.total_bytes,
            device.reserved_bytes,
            device.used_bytes,
            *(p.used_bytes for p in device.processes or ()),
        ):
            assert value is None or value // MIB in printed


# ----------------------------------------------------------------------------------------------- whole outputs, by layout

DATA = Path(__file__).parent / "data" / "smi"


def figures(device):
    sizes = (device.total_bytes, device.reserved_bytes, device.used_bytes, device.free_bytes)
    return tuple(None if size is None else size // 2**20 for size in sizes)


def held(device):
    return [(p.pid, None if p.used_bytes is None else p.used_bytes // 2**20) for p in device.processes or ()]


@pytest.mark.parametrize("quote", ["", "> ", "    "])
def test_a_table_with_mig_keeps_instances_and_gpu_apart(quote):
    text = "".join(quote + line for line in (DATA / "mig.txt").read_text().splitlines(keepends=True))
    gpu, first, second = read_smi(text.encode()).devices
    assert figures(gpu) == (81559, None, 20000, None)
    assert figures(first) == (40448, None, 19950, None)
    assert figures(second) == (40448, None, 50, None)
    assert (held(gpu), held(first), held(second)) == ([], [(4242, 19900)], [])
    assert not any("no process is listed" in note for note in gpu.notes)


def test_unified_memory_has_no_figures_but_its_processes():
    (gpu,) = read_smi((DATA / "gb10.txt").read_bytes()).devices
    assert gpu.unified_memory is True
    assert figures(gpu) == (None, None, None, None)
    assert held(gpu) == [(3157, 43), (90001, 90123)]
    assert "the machine's memory" in gpu.missing["total_bytes"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le"])
def test_the_full_listing_adds_up(encoding):
    found = read_smi((DATA / "full.txt").read_text().encode(encoding))
    (gpu,) = found.devices
    assert figures(gpu) == (81559, 551, 70000, 11008)
    assert held(gpu) == [(4242, 69900)]
    assert found.driver_version == "570.86.15"


def test_of_several_outputs_the_last_counts_and_it_is_said():
    both = (DATA / "full.txt").read_bytes() + (DATA / "mig.txt").read_bytes()
    found = read_smi(both)
    assert len(found.devices) == 3
    assert "the last complete one is used" in found.source.reason


def test_csv_by_its_header_with_and_without_units():
    first, second = read_smi((DATA / "devices.csv").read_bytes()).devices
    assert figures(first) == (81559, None, 70000, 11008)
    assert figures(second) == (81559, None, 10, 81000)
    (bare,) = read_smi((DATA / "nounits.csv").read_bytes()).devices
    assert figures(bare) == (81559, None, 70000, None)


def test_csv_without_a_header_is_not_guessed_at():
    with pytest.raises(ValueError, match="without a header"):
        read_smi((DATA / "noheader.csv").read_bytes())


def test_csv_of_processes_alone_gives_no_device_figures():
    found = read_smi((DATA / "processes.csv").read_bytes())
    assert found.source.status == "partial"
    assert held(found.devices[0]) == [(4242, 69900)]
