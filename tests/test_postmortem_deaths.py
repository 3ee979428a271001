"""One death told by the kernel, the container's description and the server's log: joined where they agree, else said."""

import json

import pytest

from memledger.cli import app

SERVER = """\
(APIServer pid=30) INFO 05-01 09:00:00 [api_utils.py:273] non-default args: {'model': '/models/example-70b'}
(EngineCore pid=101) INFO 05-01 09:00:09 [core.py:114] Initializing a V1 LLM engine (v0.30.0) with config: \
model='/models/example-70b', speculative_config=None, tokenizer='/models/example-70b', max_seq_len=32768
(EngineCore pid=101) INFO 05-01 09:00:11 [gpu_model_runner.py:5210] Starting to load model /models/example-70b...
"""
POD = """\
Name:             llm-0
Containers:
  vllm:
    Container ID:  containerd://{container}
    State:          Running
      Started:      Fri, 01 May 2026 09:05:00 +0000
    Last State:     Terminated
      Reason:       {reason}
      Exit Code:    137
      Started:      Fri, 01 May 2026 {started} +0000
      Finished:     Fri, 01 May 2026 {finished} +0000
    Limits:
      memory:  {limit}
"""
CONTAINER = "6f1c0f2b4d8e" * 5
KERNEL = """\
{at}memory: usage {limit}kB, limit {limit}kB, failcnt 4711
{at}Memory cgroup stats for /kubepods/burstable/pod1/{container}:
{at}Memory cgroup out of memory: Killed process {pid} ({name}) total-vm:113094964kB, anon-rss:64938004kB, file-rss:0kB, \
shmem-rss:0kB, UID:0 pgtables:129748kB oom_score_adj:0
"""


def pod(**changes):
    values = {
        "container": "0" * 64,
        "reason": "OOMKilled",
        "started": "08:59:58",
        "finished": "09:00:41",
        "limit": "64Gi",
    }
    return POD.format(**{**values, **changes})


def kernel(**changes):
    values = {"at": "[ 9000.012700] ", "limit": 64 * 2**20, "container": "abc", "pid": 4242, "name": "VLLM::EngineCor"}
    return KERNEL.format(**{**values, **changes})


@pytest.fixture
def incidents(tmp_path, capsysbinary):
    def read(*texts, log="server.log"):
        paths = []
        for index, text in enumerate(texts):
            path = tmp_path / (log if text.startswith("(APIServer") else f"{index}.txt")
            path.write_text(text)
            paths.append(str(path))
        assert app.run(["oom", *paths, "--format", "json", "--no-live"]) == 0
        return json.loads(capsysbinary.readouterr().out)["incidents"]

    return read


def notes(one):
    return " ".join(one["notes"])


def test_log_pod_and_kernel_are_one_incident_of_the_server(incidents):
    (one,) = incidents(SERVER, pod(), kernel())
    assert (one["kind"], one["server"], one["fatal"], one["confidence"]) == ("host_memory", 0, True, 0.9)
    assert one["cause"].endswith("VLLM::EngineCor, which held 61.93 GiB.")
    assert any("OOMKilled" in link["what"] for link in one["chain"])
    for why in ("both have the limit of 64.0 GiB", "the container started when its log begins"):
        assert why in notes(one)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_order_of_the_inputs_says_nothing(incidents, order):
    texts = (SERVER, pod(), kernel())
    (one,) = incidents(*(texts[i] for i in order))
    assert one["server"] == 0


def test_the_containers_id_in_the_control_groups_path_joins_them(incidents):
    (one,) = incidents(pod(container=CONTAINER, limit="none"), kernel(container=f"cri-containerd-{CONTAINER}.scope"))
    assert "the control group is the container's" in notes(one)


def test_a_process_id_joins_the_kernels_line_with_the_log(incidents):
    loaded = "(EngineCore pid=101) INFO 05-01 09:00:31 [gpu_model_runner.py:5335] Model loading took 14.82 GiB memory and 9.1 seconds\n"
    (one,) = incidents(SERVER + loaded, kernel(pid=101))
    assert one["server"] == 0


def test_the_time_joins_them_in_another_time_zone_too(incidents):
    (one,) = incidents(SERVER, pod(started="06:59:59", finished="07:00:30"))
    assert one["server"] == 0
    assert "of another time zone" in notes(one)


def test_the_kernels_own_clock_alone_joins_nothing_and_that_is_said(incidents):
    (one,) = incidents(SERVER, kernel())
    assert one["server"] is None
    assert "Whether this was the server of" in notes(one)
    assert "dmesg -T" in notes(one)


def test_a_container_that_started_at_another_time_is_not_the_servers(incidents):
    (one,) = incidents(SERVER, pod(started="03:10:07", finished="03:12:44"))
    assert one["server"] is None
    assert "its log begins at another time" in notes(one)


def test_two_limits_are_two_deaths(incidents):
    found = incidents(pod(limit="32Gi"), kernel())
    assert len(found) == 2
    assert not any("Taken as one death" in notes(one) for one in found)


def test_a_killed_stranger_is_not_the_servers_death_at_whatever_time(incidents):
    found = incidents(SERVER, kernel(at="May 01 09:00:40 box kernel: ", name="mysqld"))
    assert [one["server"] for one in found] == [None]


def test_two_servers_that_fit_alike_are_told_so(tmp_path, capsysbinary):
    for name, text in (("a.log", SERVER), ("b.log", SERVER.replace("70b", "8b")), ("pod.txt", pod())):
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("a.log", "b.log", "pod.txt")]
    assert app.run(["oom", *paths, "--format", "json", "--no-live"]) == 0
    (one,) = json.loads(capsysbinary.readouterr().out)["incidents"]
    assert one["server"] is None
    assert "Which of 2 servers this was is not told" in notes(one)


def test_exit_code_137_without_a_reason_is_an_end_with_an_open_cause(incidents):
    (one,) = incidents(pod(reason="Error"))
    assert one["kind"] == "host_memory"
    assert one["confidence"] <= 0.5
    assert all(candidate["command"] for candidate in one["candidates"])


def test_exit_code_137_beside_its_reason_is_no_second_incident(incidents):
    assert len(incidents(pod())) == 1


def test_dockers_inspection_is_read_like_a_pods(incidents):
    text = (
        '        "State": {\n            "Status": "exited",\n            "OOMKilled": true,\n            "ExitCode": 137,\n'
        '            "StartedAt": "2026-05-01T08:59:59.123456789Z",\n            "FinishedAt": "2026-05-01T09:00:40.1Z"\n        },\n'
    )
    (one,) = incidents(SERVER, text)
    assert (one["server"], one["confidence"]) == (0, 0.9)
    assert "its last line is 29 s earlier" in notes(one)
