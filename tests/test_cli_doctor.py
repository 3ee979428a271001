"""`memledger doctor` says of each source whether it answers, why not, and what to do; exit code 0."""

import json
import subprocess
import sys
from types import SimpleNamespace

import jsonschema
import live_tree
import nvml_fake
import pytest
from live_cases import FOLDER
from test_cli_explain_pid import memledger

from memledger.ledger import Source
from memledger.live import doctor
from memledger.live.sample import DeviceSample, Endpoint, LiveServer, Metrics


def checks(*words, **how):
    result = memledger("doctor", "--format", "json", *words, **how)
    assert result.returncode == 0, result.stderr
    return {c["name"]: c for c in json.loads(result.stdout)["checks"]}


def test_a_working_machine():
    found = checks(scenario=nvml_fake.ONE_H200)
    assert list(found) == list(doctor.NAMES)
    assert found["nvml"]["status"] == "ok"
    assert "1 GPU (NVIDIA H200)" in found["nvml"]["found"]
    assert found["hyperscan"]["status"] == "ok"


def test_the_text_has_a_line_for_each_source_with_its_remedy():
    result = memledger("doctor", "--width", "80", scenario="error = nvmlInit* LIB_RM_VERSION_MISMATCH\n")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[2:] if line and line[0] != " "] == list(doctor.NAMES)
    assert "reboot or reload the module" in " ".join(result.stdout.split())
    assert "-> " in result.stdout
    assert max(map(len, lines)) <= 80


def test_the_document_is_valid_against_the_schema_in_docs(update_golden):
    file = FOLDER.parent / "docs" / "schema" / "doctor.schema.json"
    if update_golden:
        file.write_text(doctor.schema_text(), encoding="utf-8")
    assert file.read_text(encoding="utf-8") == doctor.schema_text(), "pytest --update-golden writes it anew"
    document = json.loads(memledger("doctor", "--format", "json", scenario=nvml_fake.ONE_H200).stdout)
    jsonschema.Draft202012Validator(json.loads(file.read_text())).validate(document)


def test_a_server_that_hides_its_metrics(tmp_path):
    port = live_tree.free_port()
    arguments = ["--model-path", "/models/a", "--port", str(port)]
    pages = {path: {"key": "k", "body": "x"} for path in ("/metrics", "/server_info", "/v1/models", "/v1/loads")}
    children = [{"title": "sglang::scheduler"}]
    with live_tree.tree(tmp_path, "sglang serve", arguments, children, port=port, pages=pages) as running:
        found = checks()
        unasked = checks("--no-ask")
    assert f"pid {running.root} port {port}" in found["ports"]["found"]
    assert found["metrics"]["status"] != "ok"
    assert "--api-key-env" in found["metrics"]["remedy"]
    assert unasked["metrics"]["found"] == "nothing was asked"


def test_a_snapshot_of_the_doctor_holds_the_sample_and_no_report(tmp_path):
    file = tmp_path / "d.json"
    assert memledger("doctor", "--snapshot", file, scenario=nvml_fake.ONE_H200).returncode == 0
    document = json.loads(file.read_text())
    assert document["kind"] == "doctor"
    assert document["sample"]["devices"]["devices"][0]["name"] == "NVIDIA H200"
    result = memledger("explain", file)
    assert result.returncode == 3
    assert "memledger doctor" in result.stderr


@pytest.mark.parametrize(
    ("env", "status", "said"),
    [
        ({"MEMLEDGER_CACHE": ""}, "unavailable", "switched off"),
        ({"MEMLEDGER_CACHE": "/etc/passwd/none"}, "unavailable", "can't be written"),
    ],
)
def test_the_cache_that_cant_be_used(env, status, said):
    found = checks(env=env)["catalogue cache"]
    assert (found["status"], said in found["reason"]) == (status, True)


def test_a_cache_that_others_can_write(tmp_path):
    tmp_path.chmod(0o777)
    found = checks(env={"MEMLEDGER_CACHE": str(tmp_path)})["catalogue cache"]
    assert found["status"] == "unavailable"
    assert "chmod 700" in found["remedy"]


def test_the_model_cache_is_found_where_the_hub_keeps_it(tmp_path):
    (tmp_path / "models--org--a").mkdir()
    found = checks(env={"HF_HUB_CACHE": str(tmp_path)})["model cache"]
    assert (found["status"], found["found"]) == ("ok", f"{tmp_path}, 1 models")
    assert checks(env={"HF_HUB_CACHE": str(tmp_path / "none")})["model cache"]["status"] == "unavailable"


def test_without_hyperscan_logs_are_read_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "hyperscan", None)
    found = doctor._hyperscan()
    assert found.status == "partial"
    assert "pip install" in found.remedy


def test_one_broken_check_does_not_hide_the_others():
    def broken():
        raise OSError("no such thing")

    found = doctor._safe("proc", broken)
    assert (found.status, found.reason) == ("unavailable", "OSError: no such thing")


def test_a_container_is_told_with_what_to_do(monkeypatch):
    from memledger.live import process

    monkeypatch.setattr(process, "in_pid_namespace", lambda: True)
    monkeypatch.setattr(process, "processes_are_hidden", lambda: False)
    found = doctor._proc(SimpleNamespace(by_pid={1: SimpleNamespace(unreadable=False)}))
    assert found.status == "partial"
    assert "--pid=host" in found.remedy


def test_servers_that_answer_are_ok():
    good = LiveServer(1, "vllm", port=8000, metrics=Metrics(running_requests=0), endpoints=(Endpoint("/metrics", 200),))
    assert doctor._ports((good,)).status == "ok"
    assert doctor._metrics((good,), ask=True).status == "ok"
    bad = LiveServer(2, "vllm", port=8001, missing={"endpoints": "its network is not ours"})
    assert doctor._ports((good, bad)).status == "partial"
    assert doctor._metrics((good, bad), ask=True).reason == "server 2: its network is not ours"


def test_a_driver_that_is_not_there_leaves_the_paste():
    found = doctor._nvml(DeviceSample(Source("nvml", "unavailable", "no driver")))
    assert found.reason == "no driver"
    assert "--smi FILE" in found.remedy


def test_the_command_changes_nothing(tmp_path):
    subprocess.run([sys.executable, "-m", "memledger", "doctor"], check=True, capture_output=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
