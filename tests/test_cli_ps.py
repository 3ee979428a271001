"""`memledger ps`: the servers of this machine as text and as JSON, on trees of real processes."""

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from live_tree import SGLANG_TP2, VLLM_ONE, VLLM_TP2, free_port, tree

from memledger.cli import app, ps
from memledger.ledger import Source
from memledger.live import attach, process
from memledger.live.sample import Device, DeviceSample, GpuProcess, LiveServer, Process
from memledger.report.ps_json import PsReport, schema, schema_text
from memledger.report.ps_text import gpu_numbers, render
from memledger.report.text import Style

SCHEMA_FILE = Path(__file__).parent.parent / "docs" / "schema" / "ps.schema.json"
METRICS = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 3.0\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
PAGES = {"/version": {"body": {"version": "0.32.0"}}, "/metrics": {"body": METRICS}}
NO_DEVICES = DeviceSample(Source("nvml", "unavailable", "NVML library not found"))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(ps, "sample_devices", lambda: NO_DEVICES)


@pytest.fixture
def only(monkeypatch, tmp_path):
    """Only servers that this test started: others may run on the machine."""
    trees = attach.trees
    monkeypatch.setattr(
        attach, "trees", lambda scan: [t for t in trees(scan) if str(tmp_path) in " ".join(t.root.arguments)]
    )


def run(*arguments):
    return app.run(["ps", *arguments])


def two_servers(tmp_path, port):
    return (
        tree(tmp_path / "a", "vllm serve", ["/models/m", "--port", str(port), "--api-key", "very-secret-1"], VLLM_ONE, port=port, pages=PAGES),
        tree(tmp_path / "b", "sglang serve", ["--model-path", "/models/s", "--tp", "2"], SGLANG_TP2),
    )  # fmt: skip


def test_a_row_for_each_server_with_its_model_log_and_what_is_missing(tmp_path, capsys, no_gpu, only):
    port = free_port()
    one, two = two_servers(tmp_path, port)
    with one as vllm, two as sglang:
        assert run() == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.split()[0] == str(vllm.root)).split()
    assert row == [str(vllm.root), "vLLM", "0.32.0", "1", "-", "-", "50", "%", "-", "2+3", str(port)]
    assert any(line.split()[:2] == [str(sglang.root), "SGLang"] for line in out.splitlines())
    assert "model /models/m" in out
    assert "".join(str(tmp_path / "a" / "server.log").split()) in "".join(out.split())
    assert "no process of the server listens on a port yet" in " ".join(out.split())
    assert out.count("NVML library not found") == 1
    assert max(map(len, out.splitlines())) <= 80
    assert "very-secret-1" not in out


def test_json_is_one_document_in_the_schema_without_secrets(tmp_path, capsys, no_gpu, only):
    port = free_port()
    one, two = two_servers(tmp_path, port)
    with one as vllm, two:
        assert run("--format", "json") == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    jsonschema.validate(report, schema())
    assert report["schema"] == "memledger/1"
    assert report["inputs"] == []
    assert {s["name"]: s["status"] for s in report["sources"]}["nvml"] == "unavailable"
    first = next(s for s in report["live_servers"] if s["pid"] == vllm.root)
    assert (first["port"], first["metrics"]["kv_usage"], first["log"]["kind"]) == (port, 0.5, "file")
    assert "very-secret-1" not in out


def test_gpu_memory_is_what_the_driver_lists_for_the_servers_processes(tmp_path, capsys, monkeypatch, only):
    monkeypatch.setattr(process, "in_pid_namespace", lambda: False)
    with tree(tmp_path, "vllm serve", ["m", "-tp", "2"], VLLM_TP2) as running:
        workers = [running.pids["VLLM::Worker_TP0"], running.pids["VLLM::Worker_TP1"]]
        devices = DeviceSample(
            Source("nvml", "ok"),
            devices=tuple(
                Device(index=i, uuid=f"GPU-{i}", processes=(GpuProcess(pid, 10 * 2**30), GpuProcess(1, 2**40)))
                for i, pid in enumerate(workers)
            ),
        )
        monkeypatch.setattr(ps, "sample_devices", lambda: devices)
        assert run() == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[0] == str(running.root)).split()
    assert row[2:5] == ["2", "0-1", "20.00"]


def test_a_process_without_a_figure_makes_the_sum_unknown():
    server = LiveServer(
        1, "vllm", model="m", processes=(Process(5, role="worker", gpu_indices=(0,), gpu_basis="nvml"),)
    )
    devices = DeviceSample(Source("nvml", "ok"), devices=(Device(index=0, processes=(GpuProcess(5, None),)),))
    assert render(PsReport("0", (), (server,), devices=devices)).splitlines()[1].split() == [
        "1",
        "vLLM",
        "1",
        "0",
        "-",
        "-",
        "-",
        "-",
        "-",
    ]


def test_no_server_says_what_was_looked_for_and_what_could_not_be_read(capsys, no_gpu, monkeypatch):
    monkeypatch.setattr(attach, "trees", lambda scan: [])
    monkeypatch.setattr(process, "table", lambda: process.Table([process.Seen(9, 1, "python3", unreadable=True)]))
    assert run() == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("No server found: looked for processes titled sglang::* or VLLM::*, and command lines of")
    assert "1 process of other users could not be read (sudo shows them)." in out


def test_without_asking_no_request_is_sent(tmp_path, capsys, no_gpu, only):
    port = free_port()
    with tree(tmp_path, "vllm serve", ["m", "--port", str(port)], VLLM_ONE, port=port, pages=PAGES):
        assert run("--no-ask", "--format", "json") == 0
    server = json.loads(capsys.readouterr().out)["live_servers"][0]
    assert (server["endpoints"], server["metrics"], server["port"]) == ([], None, port)


@pytest.mark.parametrize("value", ["", "two\nlines", "sch\u00fcssel"])
def test_a_key_that_is_not_there_or_no_header_is_wrong_usage(value, monkeypatch, capsys):
    monkeypatch.setenv("SERVER_KEY", value)
    assert run("--api-key-env", "SERVER_KEY") == 2
    error = capsys.readouterr().err
    assert "--api-key-env" in error
    assert not value or value not in error


def test_gpu_numbers_in_runs():
    assert (
        gpu_numbers([Process(1, gpu_indices=(0, 1)), Process(2, gpu_indices=(2,)), Process(3, gpu_indices=(6,))])
        == "0-2,6"
    )
    assert gpu_numbers([Process(1)]) == "-"


def test_hostile_text_of_a_server_does_not_reach_the_terminal():
    server = LiveServer(1, "sglang", framework_version="0.5", model="a\x1b[31mb\u202ec" + "x" * 500)
    out = render(PsReport("0", (), (server,)), Style(80))
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_ascii_where_the_output_can_show_no_more():
    out = render(PsReport("0", (), (LiveServer(1, "vllm", model="m\u00e9"),)), Style(80, unicode=False))
    assert out.isascii()


def test_the_schema_file_is_that_of_the_types():
    assert SCHEMA_FILE.read_text() == schema_text()


def test_a_report_reads_back_as_it_was_written():
    report = PsReport("0", (Source("proc", "ok"),), (LiveServer(1, "vllm", model="m"),), devices=NO_DEVICES)
    assert msgspec.json.decode(msgspec.json.encode(report), type=PsReport) == report
