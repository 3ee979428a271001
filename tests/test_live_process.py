"""Processes as /proc shows them: titles, vanished, zombie and foreign processes, containers, start times."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_tree import VLLM_TP2, tree

from memledger.live import process as proc

ID = "0123456789abcdef" * 4


def test_a_retitled_process_shows_its_title_alone_and_no_environment(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m"], VLLM_TP2) as running:
        seen = proc.seen(running.pids["VLLM::Worker_TP1"])
        assert seen.arguments == ("VLLM::Worker_TP1",)
        assert seen.comm.startswith("VLLM::Worker_TP")
        assert proc.environment(seen.pid) == {}
        assert proc.environment(running.root)["TREE"] == str(tmp_path / "spec.json")


def test_a_process_that_vanished_gives_reasons_and_no_error():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    facts = proc.facts(child.pid)
    assert facts.user is None
    assert facts.problems["user"] == f"process {child.pid} ended while it was looked at"
    assert proc.seen(child.pid) is None
    assert proc.environment(child.pid) is None
    assert proc.listening(child.pid)[1] == f"process {child.pid} ended while it was looked at"
    assert not proc.is_same(child.pid, 1.0)


def test_a_zombie_keeps_its_name_and_says_what_it_is(tmp_path):
    with tree(tmp_path, "vllm serve", ["/models/m"], [{"title": "VLLM::Worker_TP0", "zombie": True}]) as running:
        pid = running.pids["VLLM::Worker_TP0"]
        seen = _wait_for(lambda: s if (s := proc.seen(pid)).zombie else None)
        assert seen.comm == "VLLM::Worker_TP"
        assert seen.arguments == ()
        assert not seen.unreadable


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_is_partly_read_with_the_remedy(tmp_path):
    """As `nobody`: the command line and the user of root's process are public, its files and environment are not."""
    code = (
        "import json, os, sys; sys.path.insert(0, sys.argv[2]); from memledger.live import process as p, logplace\n"
        "os.setgid(65534); os.setuid(65534); pid = int(sys.argv[1]); seen = p.seen(pid)\n"
        "print(json.dumps([list(seen.arguments), p.facts(pid).user, p.environment(pid), p.listening(pid)[1], logplace.log_place('vllm', [pid]).advice]))"
    )
    with tree(tmp_path, "vllm serve", ["/models/m"]) as running:
        root = str(Path(__file__).parent.parent)
        out = subprocess.run(
            [sys.executable, "-c", code, str(running.root), root], capture_output=True, text=True, check=True
        )
    arguments, user, environment, sockets, advice = json.loads(out.stdout)
    assert "serve" in arguments
    assert user == "root"
    assert environment is None
    assert sockets == f"process {running.root} belongs to another user: run memledger as that user, or with sudo"
    assert (
        advice
        == f"the open files of process {running.root} belong to another user: run memledger as that user, or with sudo"
    )


def test_a_reused_process_id_is_not_the_same_process():
    me = proc.seen(os.getpid())
    assert proc.is_same(me.pid, me.created)
    assert not proc.is_same(me.pid, me.created - 3600)


def test_a_parent_that_is_younger_than_its_child_is_another_process_with_a_reused_id():
    table = proc.Table(
        [
            proc.Seen(10, 1, "bash", created=500.0),
            proc.Seen(20, 10, "VLLM::Worker", created=100.0),
            proc.Seen(30, 10, "tee", created=501.0),
        ]
    )
    assert table.parent(table.by_pid[20]) is None
    assert table.parent(table.by_pid[30]).pid == 10
    assert [one.pid for one in table.children(10)] == [30]


@pytest.mark.parametrize(
    ("text", "container"),
    [
        (f"0::/system.slice/docker-{ID}.scope\n", ID),
        (f"12:memory:/docker/{ID}\n11:cpu:/docker/{ID}\n", ID),
        (f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod1_2.slice/cri-containerd-{ID}.scope\n", ID),
        (f"3:memory:/kubepods/besteffort/pod1-2/{ID}\n", ID),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", ID),
        (f"0::/kubepods.slice/crio-{ID}.scope\n", ID),
        ("0::/lxc.payload.web/init.scope\n", "web"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_containers_by_cgroup_path_v1_and_v2(text, container):
    assert proc.container_of(text) == container


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/vllm.service\n", ("vllm.service", False)),
        ("1:name=systemd:/system.slice/llm@7.service\n", ("llm@7.service", False)),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/sglang.service\n", ("sglang.service", True)),
        ("0::/user.slice/user-1000.slice/user@1000.service/init.scope\n", None),
        ("0::/\n", None),
    ],
)
def test_the_systemd_unit_of_a_cgroup_path(text, unit):
    assert proc.unit_of(text) == unit


def test_a_thread_leads_to_its_process():
    import threading

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert proc.thread_group(thread.native_id) == os.getpid()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("options", "hidden"),
    [("rw,nosuid,hidepid=2", True), ("rw,hidepid=invisible", True), ("rw,hidepid=0", False), ("rw,nosuid", False)],
)
def test_a_proc_that_hides_other_users_processes_is_noticed(tmp_path, monkeypatch, options, hidden):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text(f"/dev/sda1 / ext4 rw 0 0\nproc /proc proc {options} 0 0\n")
    monkeypatch.setattr(proc, "PROC", tmp_path)
    assert proc.processes_are_hidden() is hidden


def test_the_owner_of_a_listening_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert proc.owner_of_port(port) == os.getuid()
        assert [s.port for s in proc.listening(os.getpid())[0] if s.port == port] == [port]
    assert proc.owner_of_port(port) is None


def test_start_times_carry_the_local_offset():
    assert proc.moment(None) is None
    assert proc.moment(0.0).startswith(("1970-01-01T", "1969-12-31T"))
    assert len(proc.moment(0.0)) == len("1970-01-01T00:00:00+00:00")


def _wait_for(what):
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("did not happen")
