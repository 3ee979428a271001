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


def peaks(tmp_path, head, lines):
    path = tmp_path / "busy.log"
    path.write_text("".join(f"{line}\n" for line in [*head, *lines]), encoding="utf-8")
    (server,) = explain([str(path)]).servers
    return server.usage, path.read_text(encoding="utf-8").splitlines()


def test_each_peak_has_the_line_that_reached_it_first(tmp_path):
    head = [
        "[2026-03-01 10:00:00] server_args=ServerArgs(model_path='org/Dense-7B', tp_size=1, mem_fraction_static=0.85)",
        "[2026-03-01 10:00:05] Load weight begin. avail mem=23.50 GB",
    ]
    lines = [
        f"[2026-03-01 10:{n // 60 % 60:02d}:{n % 60:02d}] Decode batch, #running-req: {3 + (n in {700, 900})}, #token: 1920, "
        f"token usage: {0.10 if n != 800 else 0.75:.2f}, cuda graph: True, gen throughput (token/s): 4.00, "
        f"#queue-req: {7 if n == 900 else 0}"
        for n in range(1000)
    ]
    usage, text = peaks(tmp_path, head, lines)
    assert (usage.peak_running_requests, usage.peak_queued_requests, usage.peak_kv_usage) == (4, 7, 0.75)
    assert [e.line for e in usage.evidence] == [len(head) + n + 1 for n in (700, 900, 800)]
    assert all(e.text == text[e.line - 1] for e in usage.evidence)


def test_the_busiest_of_several_schedulers_gives_its_lines(tmp_path):
    lines = [
        f"[2026-03-01 10:00:{n:02d} DP{n % 2} TP{n % 2}] Decode batch, #running-req: {5 if n == 7 else 2}, #token: 1920, "
        f"token usage: {0.9 if n == 8 else 0.1:.2f}, cuda graph: True, gen throughput (token/s): 4.00, #queue-req: 0"
        for n in range(20)
    ]
    usage, _ = peaks(tmp_path, ["[2026-03-01 09:59:59 DP0 TP0] Load weight begin. avail mem=23.50 GB"], lines)
    assert (usage.peak_running_requests, usage.peak_kv_usage) == (5, 0.9)
    assert [usage.evidence[0].line, usage.evidence[-1].line] == [9, 10]


def test_the_peaks_of_vllm_have_their_lines(tmp_path):
    prefix = (
        "(APIServer pid=80) INFO 11-02 10:22:{n:02d} [loggers.py:271] Engine 000: Avg prompt throughput: 2.8 tokens/s, "
    )
    lines = [
        prefix.format(n=n) + f"Avg generation throughput: 12.0 tokens/s, Running: {9 if n == 30 else 1} reqs, "
        f"Waiting: 0 reqs, GPU KV cache usage: {n if n < 41 else 0}.5%, Prefix cache hit rate: 0.0%"
        for n in range(60)
    ]
    usage, _ = peaks(tmp_path, ["INFO 11-02 10:12:30 [api_server.py:1] vLLM API server version 0.11.0"], lines)
    assert (usage.peak_running_requests, usage.peak_kv_usage) == (9, 0.405)
    assert (usage.evidence[0].line, usage.evidence[-1].line) == (32, 42)


def test_the_opening_has_its_line():
    sglang = explain([str(FIXTURES / "demo" / "server.log")]).servers[0].ranks[0].residual
    assert [e.text.split("] ")[1] for e in sglang.evidence] == ["Load weight begin. avail mem=78.48 GB"]
    vllm = explain([str(FIXTURES / "vllm-0.31-tp2" / "server.log")]).servers[0].ranks[0].residual
    assert vllm.base == "device"
    assert "79.1" in vllm.evidence[0].text or "79.2" in vllm.evidence[0].text


def test_the_shells_killed_under_a_vllm_log_is_no_second_server(tmp_path):
    lines = (FIXTURES / "vllm-0.31-tp2" / "server.log").read_text(encoding="utf-8").splitlines(keepends=True)
    (server,) = explain([copy(tmp_path, "killed.log", lambda line: True, [*lines, "Killed\n"])]).servers
    assert server.framework == "vllm"
