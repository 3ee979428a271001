"""`memledger explain --pid` against real processes, a fake driver and a real port; each refusal names its remedy."""

import json
import os
import stat
import subprocess
import sys
from datetime import datetime

import live_tree
import nvml_fake
import pytest
from live_cases import FOLDER, moved, renamed

ROOT = FOLDER.parent
VLLM_LOG = (FOLDER / "vllm-0.31-tp2" / "server.log").read_text()
SGLANG_LOG = (FOLDER / "demo" / "server.log").read_text()


def memledger(*words, scenario=None, env=None):
    environment = {**os.environ, **(env or {})}
    if scenario is not None:
        environment |= nvml_fake.environment(scenario)
    return subprocess.run(
        [sys.executable, "-m", "memledger", *map(str, words)],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )


def write_log(folder, text):
    with (folder / "server.log").open("a") as file:
        file.write(text)


@pytest.fixture
def vllm(tmp_path):
    """A running server of two ranks with its log and a driver that lists its workers."""
    arguments = ["/models/example-70b-fp8", "--port", "8123"]
    with live_tree.tree(tmp_path, "vllm serve", arguments, live_tree.VLLM_TP2) as running:
        pids = running.pids
        ids = {190: pids["VLLM::Worker_TP0"], 191: pids["VLLM::Worker_TP1"], 171: pids["VLLM::EngineCore"]}
        write_log(tmp_path, renamed(moved(VLLM_LOG, datetime.now().replace(microsecond=0)), ids))
        scenario = (FOLDER / "live-vllm-tp2" / "nvml.ini").read_text()
        for old, new in (*ids.items(), (70211, os.getpid())):
            scenario = scenario.replace(f"compute {old} ", f"compute {new} ")
        running.folder, running.scenario = tmp_path, scenario
        yield running


HYBRID = [{"title": "sglang::scheduler"}, {"title": "sglang::detokenizer"}]


@pytest.fixture
def sglang(tmp_path):
    """A running server of one GPU that answers on its port."""
    port = live_tree.free_port()
    pages = {"/v1/models": {"body": {"data": [{"id": "a", "root": "/models/Qwen3.8-27B-FP8"}]}}}
    arguments = ["--model-path", "/models/Qwen3.8-27B-FP8", "--port", str(port)]
    with live_tree.tree(tmp_path, "sglang serve", arguments, HYBRID, port=port, pages=pages) as running:
        write_log(tmp_path, moved(SGLANG_LOG, datetime.now().replace(microsecond=0)))
        scenario = (FOLDER / "live-sglang-hybrid" / "nvml.ini").read_text()
        running.scenario = scenario.replace("compute 4243 ", f"compute {running.pids['sglang::scheduler']} ")
        running.folder, running.port = tmp_path, port
        yield running


def report(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# ------------------------------------------------------------------------------------------------------- finding it all


@pytest.mark.parametrize("which", ["root", "VLLM::EngineCore", "VLLM::Worker_TP1", "the process that started it"])
def test_any_process_of_the_server_will_do(vllm, which):
    pid = vllm.pids.get(which, os.getpid())
    found = report(memledger("explain", "--pid", pid, "--format", "json", scenario=vllm.scenario))
    live = found["live"]
    assert live["pid"] == vllm.root
    assert live["log"]["verdict"] == "yes"
    assert [g["residual"]["verdict"] for g in live["gpus"]] == ["closed", "closed"]
    assert [p["matched"] for p in live["processes"]] == ["pid", "pid"]
    accounts = {e["account"] for r in found["servers"][live["server"]]["ranks"] for e in r["entries"]}
    assert {"driver_reserved", "cuda_context", "other_processes", "free"} <= accounts
    assert found["inputs"][0]["path"].endswith("server.log")
    assert [s["name"] for s in found["sources"]][:3] == ["log", "nvml", "proc"]


def test_the_text_begins_with_the_cause_and_names_the_others(vllm):
    text = memledger("explain", "--pid", vllm.root, scenario=vllm.scenario).stdout
    assert text.index("Of the card's 79.6 GiB") < text.index("TP0 on GPU 0") < text.index("process  ")
    assert f"pid {os.getpid()} (" in text
    assert "[ML001]" in text
    assert "closed: within 1 %" in text


def test_a_hybrid_of_one_gpu(sglang):
    found = report(memledger("explain", "--pid", sglang.root, "--format", "json", scenario=sglang.scenario))
    assert found["live"]["log"]["verdict"] == "yes"
    assert found["live"]["gpus"][0]["residual"]["verdict"] == "closed"
    assert "ML101" in [f["code"] for f in found["servers"][0]["findings"]]


def test_a_log_may_be_given_as_well(vllm, tmp_path):
    other = tmp_path / "copy.log"
    other.write_text((vllm.folder / "server.log").read_text())
    found = report(memledger("explain", other, "--pid", vllm.root, "--format", "json", scenario=vllm.scenario))
    assert found["inputs"][0]["path"] == str(other)
    assert found["live"]["log"]["verdict"] == "yes"


def test_a_log_of_another_start_is_read_but_not_lined_up(vllm, tmp_path):
    result = memledger("explain", FOLDER / "vllm-0.31-tp2" / "server.log", "--pid", vllm.root, scenario=vllm.scenario)
    assert result.returncode == 0
    assert "[ML006]" in result.stdout
    assert "GPU 0 now" in result.stdout
    assert "KV cache" in result.stdout


# ------------------------------------------------------------------------------------------------------------ snapshots


def test_a_snapshot_gives_the_same_report_byte_for_byte(vllm, tmp_path):
    file = tmp_path / "taken.json"
    first = memledger("explain", "--pid", vllm.root, "--snapshot", file, scenario=vllm.scenario)
    again = memledger("explain", file)
    assert first.returncode == again.returncode == 0
    assert first.stdout == again.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["schema"] == "memledger-snapshot/1"
    assert sorted(p.name for p in tmp_path.iterdir() if "taken" in p.name) == ["taken.json"]


def test_a_snapshot_takes_the_options_of_a_report(vllm, tmp_path):
    file = tmp_path / "taken.json"
    first = memledger("explain", "--pid", vllm.root, "--snapshot", file, "--format", "json", scenario=vllm.scenario)
    assert memledger("explain", file, "--format", "json").stdout == first.stdout
    assert "TP1 on GPU 1" not in memledger("explain", file, "--rank", "TP0").stdout
    assert memledger("explain", file, "--fail-on", "code=ML001").returncode == 1


def test_a_snapshot_of_the_list_of_servers(vllm, tmp_path):
    file = tmp_path / "listed.json"
    first = memledger("ps", "--snapshot", file, scenario=vllm.scenario)
    assert first.returncode == 0
    assert str(vllm.root) in first.stdout
    assert memledger("explain", file).stdout == first.stdout


def test_secrets_of_the_command_line_are_not_in_a_snapshot(tmp_path):
    arguments = ["/models/a", "--api-key", "sk-verysecretvalue123456"]
    with live_tree.tree(tmp_path, "vllm serve", arguments, live_tree.VLLM_ONE) as running:
        file = tmp_path / "taken.json"
        memledger("explain", "--pid", running.root, "--snapshot", file, scenario=nvml_fake.ONE_H200)
        assert "verysecret" not in file.read_text()
        assert "--api-key" in file.read_text()


def test_a_log_from_a_pipe_is_read_whole(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(
        [sys.executable, "-c", f"open({str(pipe)!r}, 'w').write(open({str(FOLDER / 'demo' / 'server.log')!r}).read())"]
    )
    result = memledger("explain", pipe, "--format", "json")
    writer.wait()
    (item,) = json.loads(result.stdout)["inputs"]
    assert item["bytes"] == (FOLDER / "demo" / "server.log").stat().st_size


def test_a_snapshot_that_is_cut_off_is_an_input_that_cant_be_read(vllm, tmp_path):
    file = tmp_path / "taken.json"
    memledger("explain", "--pid", vllm.root, "--snapshot", file, scenario=vllm.scenario)
    file.write_text(file.read_text()[:5000])
    result = memledger("explain", file)
    assert result.returncode == 4
    assert "cut off" in result.stderr


def test_a_snapshot_that_cant_be_written_costs_nothing_but_itself(vllm):
    result = memledger("explain", "--pid", vllm.root, "--snapshot", "/proc/none/x.json", scenario=vllm.scenario)
    assert result.returncode == 4
    assert "the snapshot can't be written" in result.stderr
    assert "TP0 on GPU 0" in result.stdout


# --------------------------------------------------------------------------------------------------------- without a log


def test_without_a_log_the_server_itself_is_asked(tmp_path):
    port = live_tree.free_port()
    usage = {"weight": 15.0, "kvcache": 20.5, "graph": {"decode": 0.5}, "token_capacity": 160000}
    info = {
        "model_path": "/models/a",
        "version": "0.5.23",
        "tp_size": 1,
        "mem_fraction_static": 0.85,
        "internal_states": [{"memory_usage": usage, "effective_max_running_requests_per_dp": 48}],
    }
    metrics = 'sglang:num_running_reqs{model_name="a"} 2\nsglang:token_usage{model_name="a"} 0.25\nsglang:max_total_num_tokens{model_name="a"} 160000\n'
    pages = {"/server_info": {"body": info}, "/metrics": {"body": metrics}}
    arguments = ["--model-path", "/models/a", "--port", str(port)]
    with live_tree.tree(
        tmp_path, "sglang serve", arguments, HYBRID, port=port, pages=pages, stdout=subprocess.DEVNULL
    ) as running:
        scenario = f"[gpu]\nname = H100\ntotal = 80GiB\nreserved = 512MiB\nused = 38GiB\nprocess = compute {running.pids['sglang::scheduler']} 37GiB\n"
        result = memledger("explain", "--pid", running.root, scenario=scenario)
        found = report(memledger("explain", "--pid", running.root, "--format", "json", scenario=scenario))
    assert "no log" in result.stdout
    assert "/dev/null" in result.stdout
    (server,) = found["servers"]
    sizes = {e["account"]: (e["bytes"], e["basis"]) for e in server["ranks"][0]["entries"]}
    assert sizes["weights/model"] == (15 * 2**30, "live")
    assert sizes["kv_cache/pool"] == (20.5 * 2**30, "live")
    assert server["config"]["memory_fraction"] == 0.85
    assert server["ranks"][0]["capacity"]["kv_tokens"] == 160000
    assert server["ranks"][0]["residual"]["verdict"] == "open"
    assert found["live"]["usage"]["running_requests"] == 2
    assert found["sources"][0] == {"name": "log", "status": "unavailable", "reason": found["sources"][0]["reason"]}


def test_what_is_missing_without_a_log_is_said(tmp_path):
    arguments = ["/models/none-such", "--port", "8199"]
    with live_tree.tree(tmp_path, "vllm serve", arguments, live_tree.VLLM_ONE, stdout=subprocess.DEVNULL) as running:
        result = memledger("explain", "--pid", running.root, scenario=nvml_fake.ONE_H200)
    assert result.returncode == 0
    assert "weights not known: the model's architecture is not known" in " ".join(result.stdout.split())
    assert "CUDA graphs are not known without the log" in " ".join(result.stdout.split())


# -------------------------------------------------------------------------------------------------------------- refusals


def test_a_process_that_does_not_exist():
    result = memledger("explain", "--pid", 4_000_000, "--format", "json")
    assert result.returncode in {3, 4}
    assert "there is no process 4000000" in result.stderr
    assert "memledger ps" in result.stderr
    assert json.loads(result.stdout)["servers"] == []


def test_a_process_that_is_no_server():
    result = memledger("explain", "--pid", os.getpid())
    assert "no SGLang or vLLM server" in result.stderr
    assert result.returncode in {3, 4}


def test_a_log_that_was_given_is_reported_where_the_process_is_gone():
    result = memledger("explain", FOLDER / "demo" / "server.log", "--pid", 4_000_000)
    assert result.returncode == 4
    assert "there is no process" in result.stderr
    assert "recurrent state" in result.stdout


def test_no_driver_keeps_the_log(vllm):
    result = memledger("explain", "--pid", vllm.root)
    assert result.returncode == 0
    if "nvml v2" in result.stdout:
        pytest.skip("this machine has a driver")
    assert "NVML library not found" in " ".join(result.stdout.split())
    assert "weights" in result.stdout


def test_a_driver_that_does_not_match_its_library(vllm):
    scenario = "error = nvmlInit* LIB_RM_VERSION_MISMATCH\n" + vllm.scenario
    result = memledger("explain", "--pid", vllm.root, scenario=scenario)
    assert result.returncode == 0
    assert "reboot or reload the module" in " ".join(result.stdout.split())
    assert "weights" in result.stdout


def test_a_process_without_a_figure(vllm):
    scenario = vllm.scenario.replace("74660MiB", "n/a").replace("74650MiB", "n/a")
    result = memledger("explain", "--pid", vllm.root, scenario=scenario)
    assert result.returncode == 0
    assert "the driver does not tell this process's memory" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ({"how": "hang"}, "no answer within 2 s"),
        ({"how": "huge"}, "longer than 8 MiB"),
        ({"how": "binary"}, "is not text"),
    ],
)
def test_a_port_that_misbehaves_costs_the_metrics_only(tmp_path, page, said):
    port = live_tree.free_port()
    pages = dict.fromkeys(("/metrics", "/server_info", "/v1/models"), page)
    arguments = ["--model-path", "/models/Qwen3.8-27B-FP8", "--port", str(port)]
    with live_tree.tree(tmp_path, "sglang serve", arguments, HYBRID, port=port, pages=pages) as running:
        write_log(tmp_path, moved(SGLANG_LOG, datetime.now().replace(microsecond=0)))
        found = report(memledger("explain", "--pid", running.root, "--format", "json", scenario=nvml_fake.ONE_H200))
    metrics = next(s for s in found["sources"] if s["name"] == "metrics")
    assert metrics["status"] != "ok"
    assert said in metrics["reason"]
    assert found["servers"][0]["ranks"][0]["entries"]


def test_the_key_comes_from_the_environment(tmp_path):
    port = live_tree.free_port()
    pages = {"/metrics": {"key": "k-123", "body": "sglang:num_running_reqs 3\nsglang:token_usage 0.5\n"}}
    arguments = ["--model-path", "/models/Qwen3.8-27B-FP8", "--port", str(port)]
    with live_tree.tree(tmp_path, "sglang serve", arguments, HYBRID, port=port, pages=pages) as running:
        words = ("explain", "--pid", running.root, "--format", "json")
        bare = memledger(*words, scenario=nvml_fake.ONE_H200)
        keyed = memledger(
            *words, "--api-key-env", "SERVER_KEY", scenario=nvml_fake.ONE_H200, env={"SERVER_KEY": "k-123"}
        )
    assert json.loads(bare.stdout)["live"]["usage"] is None
    assert json.loads(keyed.stdout)["live"]["usage"]["running_requests"] == 3
    assert "k-123" not in keyed.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pid", "1", "--no-live"), "exclude each other"),
        (("--pid", "1", "--smi", "x"), "exclude each other"),
        (("--snapshot", "x.json", "server.log"), "goes with --pid"),
        (("--api-key-env", "X", "server.log"), "goes with --pid"),
        (("--pid", "1", "--follow"), "reads a log alone"),
        ((), "Give a log to read"),
        (("--pid", "1", "--api-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE"),
    ],
)
def test_wrong_usage_is_one_sentence(words, said):
    result = memledger("explain", *words)
    assert result.returncode == 2
    assert said in result.stderr


def test_nothing_is_written_and_no_context_is_made(vllm, tmp_path):
    calls = tmp_path / "calls"
    environment = nvml_fake.environment(vllm.scenario, calls=calls)
    before = sorted(p.name for p in vllm.folder.iterdir() if p.name != "calls")
    subprocess.run(
        [sys.executable, "-m", "memledger", "explain", "--pid", str(vllm.root)],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    assert sorted(p.name for p in vllm.folder.iterdir() if p.name != "calls") == before
    made = set(calls.read_text().split())
    assert made
    assert not [name for name in made if "Set" in name or "Reset" in name or "Create" in name]
    listed = [n for n in calls.read_text().split() if n.startswith("nvmlDeviceGetComputeRunningProcesses")]
    assert len(listed) <= 4  # pynvml asks twice for one list: how many, then which


MIG = """
[gpu]
name = NVIDIA H100 80GB HBM3
total = 81559MiB
reserved = 479MiB
used = 74300MiB
mig = on

[mig]
uuid = MIG-11111111-2222-3333-4444-555555555555
gi = 1
total = 81000MiB
reserved = 400MiB
used = 74250MiB
process = compute {pid} 74236MiB 1 0
"""


def test_an_instance_is_reported_and_never_its_parent(sglang):
    scenario = MIG.format(pid=sglang.pids["sglang::scheduler"])
    found = report(memledger("explain", "--pid", sglang.root, "--format", "json", scenario=scenario))
    (gpu,) = found["live"]["gpus"]
    assert gpu["uuid"].startswith("MIG-1111")
    assert gpu["total_bytes"] == 81000 * 2**20
    assert found["servers"][0]["ranks"][0]["gpu"]["uuid"] == gpu["uuid"]


def test_unified_memory_is_the_systems(sglang):
    pid = sglang.pids["sglang::scheduler"]
    scenario = f"[gpu]\nname = NVIDIA GB10\nmemory = unsupported\naddressing = ats\nprocess = compute {pid} 1GiB\n"
    result = memledger("explain", "--pid", sglang.root, "--format", "json", scenario=scenario)
    (gpu,) = report(result)["live"]["gpus"]
    assert gpu["memory_call"] == "meminfo"
    assert gpu["unified_memory"] is True
    assert gpu["residual"]["verdict"] == "open"
    assert "page_cache" in {row["account"] for row in gpu["rows"]}


def test_a_driver_that_hangs_costs_seconds_and_the_live_rows_only(sglang):
    scenario = "sleep = nvmlDeviceGetMemoryInfo* 30\n" + sglang.scenario
    result = memledger("explain", "--pid", sglang.root, scenario=scenario)
    assert result.returncode == 0
    assert "weights" in result.stdout
    assert "nvml  " in result.stdout


def test_a_worker_that_died_is_told(tmp_path):
    children = [{"title": "VLLM::EngineCore", "children": [{"title": "VLLM::Worker", "zombie": True}]}]
    with live_tree.tree(tmp_path, "vllm serve", ["/models/a"], children) as running:
        result = memledger("explain", "--pid", running.root, scenario=nvml_fake.ONE_H200)
    assert "a zombie, it has ended" in " ".join(result.stdout.split())
    assert "[ML002]" in result.stdout


def test_workers_of_a_dead_server_are_named_on_the_gpu_they_hold(sglang, tmp_path):
    """A vLLM server died on the same card and left its worker behind."""
    children = [
        {"title": "VLLM::EngineCore", "outlives": True, "children": [{"title": "VLLM::Worker", "outlives": True}]}
    ]
    with live_tree.tree(tmp_path / "dead", "vllm serve", ["/models/b"], children) as dead:
        dead.program.kill()
        dead.program.wait()
        left = dead.pids["VLLM::Worker"]
        scenario = sglang.scenario.replace("used = 74250MiB", "used = 76250MiB") + f"process = compute {left} 2000MiB\n"
        result = memledger("explain", "--pid", sglang.root, scenario=scenario)
    assert "[ML002]" in result.stdout
    assert f"`kill {left}`" in " ".join(result.stdout.split())


def test_a_rotated_log_gives_its_peaks_and_the_server_the_rest(tmp_path):
    arguments = ["--model-path", "/models/Qwen3.8-27B-FP8", "--port", "8198"]
    with live_tree.tree(tmp_path, "sglang serve", arguments, HYBRID) as running:
        text = moved(SGLANG_LOG, datetime.now().replace(microsecond=0))
        write_log(tmp_path, "".join(line for line in text.splitlines(keepends=True) if "Decode batch" in line))
        result = memledger("explain", "--pid", running.root, "--format", "json", scenario=nvml_fake.ONE_H200)
    found = report(result)
    assert found["servers"][0]["usage"]["peak_running_requests"] == 3
    assert found["sources"][0]["status"] == "partial"
    assert "holds nothing of a start" in found["sources"][0]["reason"]
