"""From any process of a server to the whole server, its GPUs, log and port, on trees of real processes."""

import contextlib
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from live_tree import SGLANG_TP2, VLLM_DP2, VLLM_ONE, VLLM_TP2, free_port, tree

from memledger.ledger import Source
from memledger.live import gpus, logplace, process
from memledger.live.attach import AttachError, attach, find_servers
from memledger.live.sample import Device, DeviceSample, GpuProcess, LiveServer, Process

METRICS = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
PAGES = {"/version": {"body": {"version": "0.32.0"}}, "/metrics": {"body": METRICS}}
GPU = [f"GPU-{n}aaaaaaa-0000-0000-0000-000000000000" for n in range(4)]


def cards(*processes, names=("H100",) * 4):
    """Four GPUs; `processes`: (GPU, pid)."""
    return DeviceSample(
        Source("nvml", "ok"),
        devices=tuple(
            Device(
                index=i,
                uuid=GPU[i],
                name=names[i],
                processes=tuple(GpuProcess(p, 10**9) for g, p in processes if g == i),
            )
            for i in range(4)
        ),
    )


def by_title(server):
    return {p.title: p for p in server.processes}


# --------------------------------------------------------------------------------------------------------------- trees


def test_every_process_of_a_server_leads_to_the_whole_of_it(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m"], VLLM_TP2, tracker=True) as running:
        for pid in running.pids.values():
            server = attach(pid)
            assert server.pid == running.root
            assert {p.pid for p in server.processes} >= set(running.pids.values())
        roles = [p.role for p in server.processes]
        assert sorted(roles) == ["engine", "helper", "launcher", "worker", "worker"]
        assert (server.framework, server.model) == ("vllm", "/models/m")
        assert [by_title(server)[f"VLLM::Worker_TP{n}"].tp for n in (0, 1)] == [0, 1]


def test_workers_of_data_parallel_engines_take_their_rank_from_the_engine_above(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m", "-dp", "2"], VLLM_DP2) as running:
        server = attach(running.pids["worker 1"])
        workers = {p.pid: p for p in server.processes if p.role == "worker"}
        assert (workers[running.pids["worker 0"]].dp, workers[running.pids["worker 1"]].dp) == (0, 1)
        assert workers[running.pids["worker 1"]].tp == 0


def test_a_sglang_server(tmp_path):
    with tree(tmp_path, "sglang module", ["--model-path", "/models/s", "--tp", "2"], SGLANG_TP2) as running:
        server = attach(running.pids["sglang::detokenizer"])
        assert (server.framework, server.pid, server.model) == ("sglang", running.root, "/models/s")
        assert [p.tp for p in server.processes if p.role == "scheduler"] == [0, 1]
        assert server.started_at == process.moment(process.seen(running.root).created)


def test_a_prefix_of_ones_own_is_known_below_the_launcher(tmp_path):
    with tree(tmp_path, "vllm module", ["--model", "m"], [{"title": "PROD::Worker_TP0"}]) as running:
        assert by_title(attach(running.root))["PROD::Worker_TP0"].role == "worker"


def test_a_program_that_runs_the_engine_itself_is_the_launcher(tmp_path):
    with tree(tmp_path, "own program", [], SGLANG_TP2) as running:
        server = attach(running.pids["sglang::scheduler_TP1"])
        assert (server.pid, server.framework) == (running.root, "sglang")


def test_children_without_a_title_belong_to_the_server(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m"], [{"name": "engine", "children": [{"name": "worker"}]}]) as running:
        server = attach(running.pids["worker"])
        assert server.pid == running.root
        assert [p.role for p in server.processes] == ["launcher", "engine", "worker"]


def test_the_shell_that_started_a_server_leads_to_it(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m"], VLLM_ONE, shell="{command}; true") as running:
        assert running.program.pid != running.root
        assert attach(running.program.pid).pid == running.root


def test_a_shell_that_started_two_servers_names_both(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m"], VLLM_ONE, shell="{command} & {command}; true") as running:
        _wait(lambda: len([s for s in find_servers(ask=False) if str(tmp_path) in str(s.processes)]) == 2)
        with pytest.raises(AttachError, match=r"started 2 servers: name one of \d+ \(vLLM\), \d+ \(vLLM\)") as error:
            attach(running.program.pid)
        for name in str(error.value).rpartition(" of ")[2].split(", "):
            os.kill(int(name.split()[0]), signal.SIGKILL)


def test_a_thread_of_a_server_leads_to_it(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m"], port=free_port()) as running:
        threads = _wait(
            lambda: t if len(t := [p.name for p in Path(f"/proc/{running.root}/task").iterdir()]) > 1 else None
        )
        assert all(attach(int(thread), ask=False).pid == running.root for thread in threads)


def test_another_program_is_named_with_the_remedy():
    with subprocess.Popen(["sleep", "60"]) as other:
        with pytest.raises(AttachError) as error:
            attach(other.pid)
        other.kill()
    assert str(error.value).startswith(f"process {other.pid} is `sleep 60`")
    assert str(error.value).endswith("no SGLang or vLLM server; `memledger ps` lists the servers of this machine")


def test_a_process_that_is_gone():
    with subprocess.Popen(["true"]) as other:
        other.wait()
    with pytest.raises(
        AttachError, match=rf"^there is no process {other.pid}.*; `memledger ps` lists the servers of this machine$"
    ):
        attach(other.pid)


def test_a_zombie_worker_is_marked(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m"], [{"title": "VLLM::Worker_TP0", "zombie": True}]) as running:
        pid = running.pids["VLLM::Worker_TP0"]
        _wait(lambda: process.seen(pid).zombie)
        worker = next(p for p in attach(running.root).processes if p.pid == pid)
        assert (worker.zombie, worker.role) == (True, "worker")
        assert "zombie" in worker.missing["arguments"]


def test_workers_whose_launcher_died_are_still_found_and_called_so(tmp_path):
    left = [{"title": "VLLM::Worker_TP0", "outlives": True}, {"title": "VLLM::Worker_TP1", "outlives": True}]
    with tree(tmp_path, "vllm serve", ["/models/m"], left) as running:
        os.kill(running.root, signal.SIGKILL)
        running.program.wait()
        pids = sorted(pid for name, pid in running.pids.items() if name != "root")
        server = attach(pids[1])
        assert [p.pid for p in server.processes] == pids
        assert "the launcher of these processes is gone" in server.notes[0]
        assert server.log.path == str(tmp_path / "server.log")


def test_secrets_of_the_command_line_do_not_get_into_the_value(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m", "--api-key", "very-secret-1"], VLLM_ONE) as running:
        assert "very-secret-1" not in str(attach(running.root))


def test_all_servers_of_the_machine_are_found(tmp_path):
    with (
        tree(tmp_path / "a", "vllm serve", ["/models/m"], VLLM_ONE) as one,
        tree(tmp_path / "b", "sglang serve", ["--model-path", "/models/s"], SGLANG_TP2) as two,
    ):
        found = {s.pid: s.framework for s in find_servers(ask=False)}
    assert found[one.root] == "vllm"
    assert found[two.root] == "sglang"


def test_64_processes_are_attached_to_in_time(tmp_path):
    ranks = [{"title": f"sglang::scheduler_TP{n}"} for n in range(62)]
    with tree(
        tmp_path, "sglang serve", ["--model-path", "m", "--tp", "62"], [*ranks, {"title": "sglang::detokenizer"}]
    ) as running:
        started = time.perf_counter()
        server = attach(running.root)
        took = time.perf_counter() - started
    assert len(server.processes) == 64
    assert took < 1.5


def test_a_server_that_vanishes_while_it_is_looked_at_keeps_what_is_known(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m"], VLLM_ONE) as running:
        scan = process.table()
    server = next(s for s in find_servers(table=scan) if s.pid == running.root)
    assert (server.model, len(server.processes)) == ("/models/m", 3)
    assert f"process {running.root} ended while it was looked at" in server.notes[0]
    assert server.processes[0].missing["resident_bytes"] == f"process {running.root} ended while it was looked at"
    assert server.log.path is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look as another user")
def test_another_users_server_is_listed_with_what_is_public(tmp_path):
    port = free_port()
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from memledger.live.attach import attach; from memledger.live import process, nvml\n"
        "import msgspec, http.client, encodings.idna; os.setgid(65534); os.setuid(65534)\n"
        "sys.stdout.buffer.write(msgspec.json.encode(attach(int(sys.argv[1]))))"
    )
    with tree(tmp_path, "vllm serve", ["/models/m", "--port", str(port)], VLLM_ONE, port=port, pages=PAGES) as running:
        words = [sys.executable, "-c", code, str(running.root), str(Path(__file__).parent.parent)]
        out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    server = msgspec.json.decode(out, type=LiveServer)
    assert (server.model, len(server.processes), server.processes[0].user) == ("/models/m", 3, "root")
    assert server.missing["visible_devices"] == f"the environment of process {running.root} can't be read"
    assert "run memledger as that user, or with sudo" in server.log.advice
    # Its sockets are not readable; the command line's port is its own user's, so that it may be asked.
    assert (server.port, server.metrics.kv_usage) == (port, 0.5)


# ---------------------------------------------------------------------------------------------------------------- GPUs


def test_the_drivers_list_tells_the_gpus_first(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "in_pid_namespace", lambda: False)
    with tree(tmp_path, "vllm serve", ["m", "-tp", "2"], VLLM_TP2, env={"CUDA_VISIBLE_DEVICES": "0,1"}) as running:
        listed = cards((3, running.pids["VLLM::Worker_TP0"]), (2, running.pids["VLLM::Worker_TP1"]), (3, running.root))
        server = attach(running.root, listed)
    ranks = by_title(server)
    assert (ranks["VLLM::Worker_TP0"].gpu_indices, ranks["VLLM::Worker_TP1"].gpu_indices) == ((3,), (2,))
    assert ranks["VLLM::Worker_TP0"].gpu_basis == "nvml"
    assert server.processes[0].gpu_indices == (3,)
    assert ranks["VLLM::EngineCore"].gpu_indices is None


def test_in_a_container_the_drivers_process_ids_are_not_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "in_pid_namespace", lambda: True)
    with tree(tmp_path, "vllm serve", ["m", "-tp", "2"], VLLM_TP2, env={"CUDA_VISIBLE_DEVICES": "2,3"}) as running:
        ranks = by_title(attach(running.root, cards((0, running.pids["VLLM::Worker_TP0"]))))
    assert [ranks[f"VLLM::Worker_TP{n}"].gpu_indices for n in (0, 1)] == [(2,), (3,)]
    assert ranks["VLLM::Worker_TP0"].gpu_basis == "visible_devices"


@pytest.mark.parametrize(
    ("environment", "indices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, (2, 0)),
        ({"CUDA_VISIBLE_DEVICES": f"{GPU[3]},{GPU[1]}"}, (3, 1)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1aaa"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "1,7,2"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({}, (0, 1, 2, 3)),
    ],
)
def test_visible_devices_by_index_and_uuid_up_to_the_first_that_is_none(environment, indices):
    assert gpus.visible(cards(), environment).indices == indices


def test_on_gpus_of_two_kinds_numbers_mean_something_only_in_pci_order():
    mixed = cards(names=("H100", "A10", "H100", "H100"))
    assert gpus.visible(mixed, {"CUDA_VISIBLE_DEVICES": "1"}).indices is None
    assert "CUDA_DEVICE_ORDER" in gpus.visible(mixed, {"CUDA_VISIBLE_DEVICES": "1"}).reason
    assert gpus.visible(mixed, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).indices == (1,)
    assert gpus.visible(mixed, {"CUDA_VISIBLE_DEVICES": GPU[1]}).indices == (1,)


def test_a_mig_instance_by_its_uuid_and_by_the_older_name():
    parts = (
        Device(index=0, uuid=GPU[0], name="H100"),
        Device(index=0, uuid="MIG-11111111-2222", parent_uuid=GPU[0], gpu_instance=3, compute_instance=0),
        Device(index=0, uuid="MIG-33333333-4444", parent_uuid=GPU[0], gpu_instance=5, compute_instance=0),
    )
    sample = DeviceSample(Source("nvml", "ok"), devices=parts)
    for name in ("MIG-33333333-4444", f"MIG-{GPU[0]}/5/0"):
        assert [d.uuid for d in gpus.visible(sample, {"CUDA_VISIBLE_DEVICES": name}).devices] == ["MIG-33333333-4444"]


def test_gpus_that_the_container_runtime_handed_in_are_counted_anew():
    given = {"NVIDIA_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "1"}
    assert gpus.visible(cards(), given, in_container=True).indices == (3,)
    assert gpus.visible(cards(), {"NVIDIA_VISIBLE_DEVICES": "void"}, in_container=True).indices is None


def test_without_the_drivers_list_numbers_stand_for_themselves():
    assert gpus.visible(None, {"CUDA_VISIBLE_DEVICES": "4,5"}).indices == (4, 5)
    assert gpus.visible(None, {"CUDA_VISIBLE_DEVICES": GPU[0]}).indices is None
    assert (
        gpus.visible(None, {}).reason
        == "CUDA_VISIBLE_DEVICES is not set and the driver's list of GPUs is not available"
    )
    assert gpus.visible(None, None).reason == "the server's environment can't be read"


@pytest.mark.parametrize(
    ("framework", "flags", "rank", "position"),
    [
        ("vllm", {"tp": "2", "pp": "2"}, {"pp": 1, "tp": 0}, 2),
        ("vllm", {"tensor_parallel_size": "2", "dp": "2"}, {"dp": 1, "tp": 1}, 3),
        ("vllm", {"tp": "2", "data_parallel_start_rank": "4"}, {"dp": 5, "tp": 0}, 2),
        ("sglang", {"tp_size": "4", "dp": "2"}, {"dp": 1, "tp": 0}, 4),
        ("sglang", {"tp": "4", "dp": "4", "enable_dp_attention": True}, {"dp": 3, "tp": 3}, 3),
        ("sglang", {"tp": "2", "base_gpu_id": "4", "gpu_id_step": "2"}, {"tp": 1}, 6),
        ("sglang", {"tp": "16", "nnodes": "2"}, {"tp": 11}, 3),
    ],
)
def test_which_visible_gpu_a_rank_takes(framework, flags, rank, position):
    one = Process(1, role="worker", **rank)
    assert gpus.layout(framework, flags, [one]).position(one) == position


# ----------------------------------------------------------------------------------------------------------------- log


def test_the_log_is_the_file_on_its_standard_output(tmp_path):
    with tree(tmp_path, "vllm serve", ["m"], VLLM_ONE) as running:
        assert attach(running.pids["VLLM::Worker"]).log == logplace.LogPlace(str(tmp_path / "server.log"), "file")


def test_a_deleted_log_is_opened_through_the_descriptor(tmp_path):
    with tree(tmp_path, "vllm serve", ["m"]) as running:
        (tmp_path / "server.log").unlink()
        log = attach(running.root).log
        assert (log.kind, log.path) == ("deleted", f"/proc/{running.root}/fd/1")
        assert Path(log.path).read_text() == "started\n"
        assert "was deleted and is still open" in log.advice


def test_a_log_whose_name_is_no_text_is_opened_through_the_descriptor(tmp_path):
    with (
        (tmp_path / os.fsdecode(b"caf\xe9\x1b.log")).open("w") as out,
        tree(tmp_path, "vllm serve", ["m"], stdout=out) as running,
    ):
        server = attach(running.root)
    assert server.log == logplace.LogPlace(f"/proc/{running.root}/fd/1", "file")
    assert msgspec.json.encode(server)


def test_a_command_line_that_is_no_text_does_no_harm(tmp_path):
    with tree(tmp_path, "vllm serve", [os.fsdecode(b"/models/caf\xe9\x1b[31m")], VLLM_ONE) as running:
        server = attach(running.root)
    assert msgspec.json.encode(server)
    assert "\x1b" not in str(server)


@pytest.mark.parametrize("pipeline", ["tee", "cat | tee -a", "cat | cat >"])
def test_a_pipeline_is_followed_to_its_file(tmp_path, pipeline):
    with tree(
        tmp_path,
        "vllm serve",
        ["m"],
        shell="{command} 2>&1 | " + pipeline + " out.log >/dev/null"
        if ">" not in pipeline
        else "{command} 2>&1 | " + pipeline + " out.log",
    ) as running:
        assert _wait(lambda: attach(running.root).log.path) == str(tmp_path / "out.log")


def test_a_pipe_to_nowhere_says_who_reads_and_how_to_hand_it_over(tmp_path):
    with tree(tmp_path, "vllm serve", ["m"], shell="{command} 2>&1 | grep nothing | cat >/dev/null") as running:
        log = attach(running.root).log
        assert (log.path, log.kind) == (None, "pipe")
        assert "read by `grep nothing`" in log.advice
        assert "2>&1 | tee server.log" in log.advice


def test_a_thrown_away_log(tmp_path):
    with tree(tmp_path, "vllm serve", ["m"], stdout=subprocess.DEVNULL) as running:
        log = attach(running.root).log
    assert (log.path, log.kind) == (None, "null")
    assert "restart it with `> server.log 2>&1`" in log.advice


def test_the_other_stream_is_taken_where_the_engines_own_leads_nowhere(tmp_path):
    with (
        (tmp_path / "err.log").open("w") as err,
        tree(tmp_path, "vllm serve", ["m"], stdout=subprocess.DEVNULL, stderr=err) as running,
    ):
        assert attach(running.root).log.path == str(tmp_path / "err.log")


def test_a_terminal(tmp_path):
    master, slave = pty.openpty()
    try:
        with tree(tmp_path, "vllm serve", ["m"], stdout=slave) as running:
            log = attach(running.root).log
    finally:
        os.close(master)
        os.close(slave)
    assert (log.path, log.kind) == (None, "terminal")
    assert "2>&1 | tee server.log" in log.advice


@pytest.mark.parametrize(
    ("cgroup", "advice"),
    [
        ("0::/system.slice/vllm.service\n", "journalctl -u vllm.service -o cat > server.log"),
        (
            "0::/user.slice/user@7.service/app.slice/llm.service\n",
            "journalctl --user -u llm.service -o cat > server.log",
        ),
        ("0::/\n", "journalctl _PID="),
    ],
)
def test_the_journal(tmp_path, monkeypatch, cgroup, advice):
    monkeypatch.setattr(process, "cgroup", lambda pid: cgroup)
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        tree(tmp_path, "vllm serve", ["m"], stdout=theirs.fileno(), env={"JOURNAL_STREAM": "9:1"}) as running,
    ):
        log = attach(running.root).log
    assert (log.path, log.kind) == (None, "journald")
    assert advice in log.advice


def test_dockers_file_by_the_containers_id_and_what_to_do_where_it_cant_be_read(tmp_path, monkeypatch):
    container = "ab" * 32
    monkeypatch.setattr(logplace, "DOCKER", tmp_path / "containers")
    with tree(tmp_path, "vllm serve", ["m"], shell="{command} 2>&1 | cat >/dev/null") as running:
        pids = [running.root]
        unread = logplace.log_place("vllm", pids, container)
        file = tmp_path / "containers" / container / f"{container}-json.log"
        file.parent.mkdir(parents=True)
        file.write_text("")
        read = logplace.log_place("vllm", pids, container)
    assert (unread.path, unread.kind) == (None, "docker")
    assert f"docker logs {container[:12]} > server.log" in unread.advice
    assert (read.path, read.kind) == (str(file), "docker")


# ---------------------------------------------------------------------------------------------------------------- port


def test_the_port_answers_through_any_process(tmp_path):
    port = free_port()
    with tree(tmp_path, "vllm serve", ["m", "--port", str(port)], VLLM_ONE, port=port, pages=PAGES) as running:
        server = attach(running.pids["VLLM::Worker"])
    assert (server.host, server.port, server.framework_version) == ("127.0.0.1", port, "0.32.0")
    assert (server.metrics.running_requests, server.metrics.kv_usage) == (2, 0.5)
    assert "metrics" not in server.missing


def test_a_sglang_servers_answers_fill_what_its_command_line_leaves_out(tmp_path):
    port = free_port()
    info = {"model_path": "/models/s", "version": "0.5.23", "page_size": 1, "max_total_num_tokens": 546159, "admin_api_key": "very-secret-2",
            "internal_states": [{"max_mamba_cache_size": 49, "memory_usage": {"weight": 0.018, "kvcache": 0.521}}]}  # fmt: skip
    labels = 'engine_type="unified",model_name="/models/s",pp_rank="0",tp_rank="0"'
    series = {"num_running_reqs": 2, "full_token_usage": 0.1, "mamba_usage": 0.27, "max_total_num_tokens": 546159,
              "mamba_available_tokens": 36, "mamba_evictable_tokens": 11, "mamba_used_tokens": 2}  # fmt: skip
    pages = {
        "/server_info": {"body": info},
        "/metrics": {
            "body": "".join(
                f"sglang:{name}{{{labels}}} {value}.0\n" if value > 1 else f"sglang:{name}{{{labels}}} {value}\n"
                for name, value in series.items()
            )
        },
    }
    with tree(
        tmp_path, "sglang serve", ["--config", "c.yaml", "--port", str(port)], SGLANG_TP2, port=port, pages=pages
    ) as running:
        server = attach(running.pids["sglang::scheduler_TP1"])
    assert (server.model, server.framework_version) == ("/models/s", "0.5.23")
    now = server.metrics
    assert (now.kv_usage, now.state_usage, now.state_slots, now.state_slots_used, now.kv_tokens) == (
        0.1,
        0.27,
        49,
        2,
        546159,
    )
    assert "very-secret-2" not in str(server)


def test_a_port_that_the_command_line_does_not_name_is_found_by_its_socket(tmp_path):
    port = free_port()
    with tree(tmp_path, "vllm serve", ["m", "--config", "c.yaml"], port=port, pages=PAGES) as running:
        assert attach(running.root).port == port


def test_a_port_other_than_the_command_lines_is_said(tmp_path):
    port, other = free_port(), free_port()
    with tree(tmp_path, "vllm serve", ["m", "--port", str(other)], port=port, pages=PAGES) as running:
        server = attach(running.root)
    assert server.port == port
    assert server.notes == (f"the server listens on port {port}, not on {other} as its command line says",)


def test_a_server_that_does_not_listen_yet(tmp_path):
    with tree(tmp_path, "sglang serve", ["--model-path", "m"], SGLANG_TP2) as running:
        server = attach(running.root)
    assert server.endpoints == ()
    assert server.missing["port"].startswith("no process of the server listens on a port yet")


def test_a_server_that_hangs_leaves_everything_else(tmp_path):
    port = free_port()
    pages = {
        path: {"how": "hang"} for path in ("/version", "/metrics", "/v1/models", "/server_info?config_format=json")
    }
    with tree(tmp_path, "vllm serve", ["/models/m", "--port", str(port)], VLLM_ONE, port=port, pages=pages) as running:
        started = time.perf_counter()
        server = attach(running.root)
        took = time.perf_counter() - started
    assert took < 3.5
    assert (server.model, len(server.processes), server.metrics) == ("/models/m", 3, None)
    assert server.missing["metrics"] == "no answer within 2 s: the server is busy or hangs"


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="a network of its own needs root and unshare"
)
def test_a_server_in_a_network_of_its_own_is_not_asked_under_our_loopback(tmp_path):
    """Our own port of that number may be anybody's."""
    with tree(tmp_path, "vllm serve", ["m"], VLLM_ONE, before=["unshare", "--net"]) as running:
        server = attach(running.root)
    assert server.endpoints == ()
    assert server.missing["endpoints"].endswith("can't be asked from here: run memledger inside the container")


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="a PID namespace of its own needs root and unshare"
)
def test_a_process_id_from_inside_a_container_names_the_one_out_here(tmp_path):
    with tree(
        tmp_path, "vllm serve", ["m"], before=["unshare", "--pid", "--fork", "--kill-child"], own_ids=False
    ) as running:
        assert running.root == 1
        launcher = _wait(lambda: next((s for s in find_servers(ask=False) if str(tmp_path) in str(s.processes)), None))
        assert launcher.processes[0].namespace_pids == (launcher.pid, 1)


def test_listening_on_another_address_only_is_said(tmp_path, monkeypatch):
    port = free_port()
    elsewhere = (process.Listening("10.1.2.3", port, 1),)
    monkeypatch.setattr(process, "listening", lambda pid: (elsewhere, None))
    with tree(tmp_path, "vllm serve", ["m", "--port", str(port)]) as running:
        server = attach(running.root)
    assert server.endpoints == ()
    assert "listens on 10.1.2.3 only" in server.missing["endpoints"]


def test_the_api_key_goes_to_servers_of_our_own_user_only(tmp_path, monkeypatch):
    port = free_port()
    pages = {**PAGES, "/v1/models": {"key": "k", "body": {"data": [{"id": "m"}]}}}
    with tree(tmp_path, "vllm serve", ["m", "--port", str(port)], port=port, pages=pages):
        mine = next(s for s in find_servers(api_key="k") if s.port == port)
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        other = next(s for s in find_servers(api_key="k") if s.port == port)
    assert {e.path: e.status for e in mine.endpoints}["/v1/models"] == 200
    assert {e.path: e.status for e in other.endpoints}["/v1/models"] == 401
    assert "the API key was not sent" in other.notes[-1]


def _wait(what):
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        with contextlib.suppress(AttributeError):
            if found := what():
                return found
        time.sleep(0.05)
    raise AssertionError("did not happen")
