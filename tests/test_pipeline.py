"""One way through: what one log says is never taken for a line of another's server."""

from pathlib import Path

from memledger.pipeline import explain, read

FIXTURES = Path(__file__).parent.parent / "fixtures"


def copy(tmp_path, name, keep, lines):
    path = tmp_path / name
    path.write_text("".join(line for line in lines if keep(line)), encoding="utf-8")
    return str(path)


def test_the_logs_of_two_nodes_of_one_job_are_one_server(tmp_path):
    lines = (FIXTURES / "sglang-0.4.6-dense-tp8" / "server.log").read_text(encoding="utf-8").splitlines(keepends=True)
    second = tuple(f"TP{i}]" for i in range(4, 8))
    one = copy(tmp_path, "node0.log", lambda line: not any(s in line for s in second), lines)
    two = copy(tmp_path, "node1.log", lambda line: any(s in line for s in second) or "server_args" in line, lines)
    (server,) = explain([one, two]).servers
    assert [r.tp for r in server.ranks] == list(range(8))
    assert {s.input for s in server.span} == {0, 1}
    assert "joined from" in server.notes[-1]


def test_an_unfinished_start_in_one_log_does_not_go_on_in_the_next(tmp_path):
    lines = (FIXTURES / "vllm-0.31-tp2" / "server.log").read_text(encoding="utf-8").splitlines(keepends=True)
    cut = copy(tmp_path, "cut.log", lambda line: True, lines[: len(lines) // 3])
    whole = copy(tmp_path, "whole.log", lambda line: True, lines)
    first, second = explain([cut, whole]).servers
    assert {span.input for span in first.span} == {0}
    assert {span.input for span in second.span} == {1}
    (alone,) = explain([whole]).servers
    assert [(e.account, e.bytes) for r in second.ranks for e in r.entries] == [
        (e.account, e.bytes) for r in alone.ranks for e in r.entries
    ]


def test_a_file_that_cannot_be_read_is_said_and_the_others_are_reported(tmp_path):
    log = str(FIXTURES / "vllm-0.31-tp2" / "server.log")
    got = read([str(tmp_path / "none.log"), log])
    assert len(got.problems) == 1
    assert "none.log" in got.problems[0]
    assert [s.framework for s in got.report.servers] == ["vllm"]
    assert [i.path for i in got.report.inputs] == [log]


def test_a_traceback_alone_is_the_engines_whose_frames_it_shows(tmp_path):
    path = tmp_path / "paste.log"
    path.write_text(
        "Traceback (most recent call last):\n"
        '  File "/opt/venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py", line 340, in '
        "determine_available_memory\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 320.00 MiB. GPU 0 has a total capacity of "
        "22.05 GiB of which 113.62 MiB is free.\n",
        encoding="utf-8",
    )
    (server,) = explain([str(path)]).servers
    assert server.framework == "vllm"
    assert [f.kind for f in server.failures] == ["cuda_oom"]


def test_torchs_words_alone_name_no_engine(tmp_path):
    path = tmp_path / "paste.log"
    path.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 320.00 MiB.\n", encoding="utf-8")
    assert explain([str(path)]).servers == ()
