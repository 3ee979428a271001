"""`memledger sweep` against a small server that streams, counts, and misbehaves as told."""

import asyncio
import csv
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import msgspec
import pytest
from sweep_server import Behaviour, Server, hash_of

pytest.importorskip("httpx")

from memledger.cli import app
from memledger.report import html_page, sweep_compare, sweep_json, sweep_page, sweep_text
from memledger.sweep import journal, judge
from memledger.sweep import server as asking
from memledger.sweep.prompts import IdPrompts
from memledger.sweep.runner import Plan, Runner
from memledger.sweep.values import Begun, Memory, Settings, SweepReport, Target

SMALL = ["--contexts", "32,64", "--concurrency", "1,3", "--requests", "6", "--output-tokens", "5"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Sweeps a server; gives (exit code, the report as JSON or None, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memledger.cli.sweep.QUIET_S", 0.05)
    monkeypatch.setattr("memledger.sweep.runner.SETTLES_WITHIN_S", 0.3)
    # These servers give their tokens all at once: any client is late against that.
    monkeypatch.setattr("memledger.sweep.judge.MOST_BLUR", float("inf"))

    def sweep(server, *arguments, small=SMALL, format_="json"):
        code = app.run(["sweep", server.url, *small, "--results", "r.jsonl", "--format", format_, *arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, json.loads(out) if out and format_ == "json" else out, err

    return sweep


def test_requests_and_tokens_are_those_the_server_counted(run):
    with Server(Behaviour(first_delay=0.01)) as server:
        code, report, _ = run(server, "--slo", "ttft=30s,tpot=30s", "--gpu-hour", "2", "--gpus", "2")
    assert code == 0
    sweep = report["sweep"]
    assert [(s["step"]["context"], s["step"]["concurrency"]) for s in sweep["steps"]] == [
        (32, 1),
        (32, 3),
        (64, 1),
        (64, 3),
    ]
    for step in sweep["steps"]:
        context = step["step"]["context"]
        assert (step["verdict"], step["requests"], step["exact"]) == ("stable", 6, True)
        assert step["prompt_tokens"] == [context, context]
        # Counted by the server over the step: ours and nothing else.
        assert step["counted"] == {"requests": 6, "prompt_tokens": 6 * context, "output_tokens": 30, "preemptions": 0,
                                   "others": 0, "ttft_mean_s": pytest.approx(0.01)}  # fmt: skip
        assert step["ttft_s"]["count"] == step["tpot_s"]["count"] == 6
        assert step["ttft_s"]["p50"]["value"] >= 0.01
        assert step["meets_slo"] == "yes"
    assert sweep["tokens_spent"] == server.prompt_tokens + server.output_tokens
    assert (
        sweep["answers"]["longest_context"] == sweep["answers"]["most_concurrency"] == {"context": 64, "concurrency": 3}
    )
    assert sweep["answers"]["concurrency_per_gpu"] == 1.5
    assert server.most_running == 3
    assert sweep["complete"]
    jsonschema.Draft202012Validator(sweep_json.schema()).validate(report)


def test_no_two_prompts_begin_alike_and_a_shared_prefix_is_shared(run, tmp_path):
    with Server() as server:
        assert run(server)[0] == 0
        long = [tuple(p) for p in server.prompts if len(p) == 64]
        assert len({p[:16] for p in long}) == len(long) == 12
        server.prompts.clear()
        (tmp_path / "r.jsonl").unlink()
        code, report, _ = run(server, "--shared-prefix", "0.75")
        long = [tuple(p) for p in server.prompts if len(p) == 64]
        # Each of the two steps fills the cache with one request first, which is no part of its figures.
        assert (code, len(long), len({p[:48] for p in long}), len(set(long))) == (0, 14, 1, 14)
    assert [s["requests"] for s in report["sweep"]["steps"]] == [6] * 4


def test_without_a_tokenizer_the_usage_figures_size_the_prompts(run):
    with Server(Behaviour(tokenizer=False)) as server:
        code, report, _ = run(server)
    assert code == 0
    assert report["sweep"]["target"]["tokens_by"] == "usage"
    assert [s["prompt_tokens"] for s in report["sweep"]["steps"]] == [[32, 32], [32, 32], [64, 64], [64, 64]]
    assert "no /tokenize" in report["sweep"]["target"]["notes"][0]


def test_a_crash_at_a_context_stops_there_and_keeps_what_held(run):
    with Server(Behaviour(crash_at=64)) as server:
        code, report, _ = run(server)
    steps = report["sweep"]["steps"]
    assert (code, [s["verdict"] for s in steps]) == (1, ["stable", "stable", "failed"])
    assert steps[-1]["errors"] == {"broken_off": 1}
    assert report["sweep"]["answers"]["longest_context"] == {"context": 32, "concurrency": 3}
    assert "64 x 1 failed" in report["sweep"]["ended"]


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("redirect", "not followed"),
        ("busy", "too many requests"),
        ("page", "text/html"),
        ("hostile", "no piece of a completion"),
        ("error", "out of"),
        ("endless", "more than the 5 tokens"),
        ("break", "broke off"),
    ],
)
def test_a_server_that_does_not_stream_is_refused_in_a_sentence(run, mode, said):
    with Server(Behaviour(mode=mode)) as server:
        code, report, err = run(server)
        assert len([p for p in server.paths if p == "/v1/completions"]) == 1
    assert (code, report["sweep"]["steps"]) == (4, [])
    assert said in report["sweep"]["ended"]
    assert "\x1b" not in err + json.dumps(report, ensure_ascii=False)
    assert "sk-abc" not in json.dumps(report)


def test_where_nothing_listens_it_says_what_to_check(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert app.run(["sweep", f"http://127.0.0.1:{taken.getsockname()[1]}", "--yes"]) == 4
    assert "check that the server is up and that this is its address and port." in capsys.readouterr().err


def test_wrong_usage_gives_no_rate(run):
    with Server(Behaviour(usage={"prompt_tokens": 32, "completion_tokens": 4000})) as server:
        code, report, _ = run(
            server, small=["--contexts", "32", "--concurrency", "1", "--requests", "2", "--output-tokens", "5"]
        )
    step = report["sweep"]["steps"][0]
    assert (code, step["requests"], step["output_tokens_per_s"], step["tpot_s"]) == (0, 2, None, None)
    assert "4,000 output tokens of at most 5" in step["doubts"][0]


def test_a_server_that_counts_prompts_otherwise_is_refused(run):
    with Server(Behaviour(usage={"prompt_tokens": 33, "completion_tokens": 5})) as server:
        code, report, _ = run(server)
    assert (code, report["sweep"]["steps"]) == (4, [])
    assert "counts 33 tokens in a prompt of 32" in report["sweep"]["ended"]


def test_a_context_beyond_the_servers_limit_is_not_sent(run):
    with Server(Behaviour(longest=64)) as server:
        code, report, _ = run(server)
        assert max(len(p) for p in server.prompts) == 32
    steps = report["sweep"]["steps"]
    assert (code, [s["verdict"] for s in steps]) == (0, ["stable", "stable", "not_run", "not_run"])
    assert "64 tokens at most" in steps[-1]["reason"]


def test_the_cap_on_tokens_is_never_passed(run):
    with Server() as server:
        code, report, _ = run(server, "--max-tokens", "300")
        assert 200 < server.prompt_tokens + server.output_tokens <= 300
    assert "--max-tokens" in report["sweep"]["ended"]
    assert (code, report["sweep"]["steps"][-1]["verdict"]) == (0, "stopped")


def test_the_cap_on_time_ends_what_runs(run):
    with Server(Behaviour(delay=0.02)) as server:
        arguments = ["--contexts", "32", "--concurrency", "2", "--duration", "1h", "--output-tokens", "100000"]
        server.behaviour.longest = None
        code, report, _ = run(server, "--max-time", "1s", small=arguments)
    step = report["sweep"]["steps"][0]
    assert (code, step["verdict"], step["requests"], step["failed"]) == (4, "stopped", 0, 0)
    assert "--max-time" in step["reason"]


def test_a_soak_follows_the_steps_and_is_judged(run, capsys):
    small = ["--contexts", "32", "--concurrency", "1", "--requests", "2", "--output-tokens", "5"]
    with Server(Behaviour(first_delay=0.01)) as server:
        code, report, _ = run(server, "--soak", "1.5s", small=small)
    steps = report["sweep"]["steps"]
    assert (code, [s["soak"] for s in steps], steps[0]["requests"]) == (0, [False, True], 2)
    assert steps[1]["requests"] > 2
    assert [t["verdict"] for t in report["sweep"]["soak"]] == [
        "not_enough"
    ]  # of the pool's use; a second tells no trend
    assert report["sweep"]["answers"]["longest_context"] == {"context": 32, "concurrency": 1}


class Falling:
    """A machine whose free memory falls at every look."""

    def __init__(self, *free):
        self.free = list(free)

    def memory(self, *, accounts):
        left = self.free.pop(0) if len(self.free) > 1 else self.free[0]
        return Memory({"free": left} if accounts else {}, 2**40 - left, left, 2**40)


def swept_with(server, machine, **changes):
    """The figures of a run with a machine of our own beside the server."""
    settings = Settings(
        server.url, (32, 64), (1,), 5, 60.0, 3, memory_floor_bytes=100, most_tokens=10**6, most_seconds=60.0
    )
    settings = msgspec.structs.replace(settings, **changes)
    target, events = Target("vllm", model="tiny"), []
    events.append(Begun("1", "2026-01-01T00:00:00+00:00", settings, target))

    async def run():
        async with asking.client(asking.place(server.url), None, connections=4) as client:
            prompts = IdPrompts(range(100), 7)
            plan = Plan(settings, target, look_every_s=0.02)
            await Runner(plan, client, prompts, tell=events.append, say=lambda _: None, machine=machine).run()

    asyncio.run(run())
    return judge.sweep(events)


class TestMemoryFloor:
    def test_it_stops_as_soon_as_a_device_has_less_free(self):
        with Server(Behaviour(delay=0.05)) as server:
            sweep = swept_with(server, Falling(1000, 500, 50), output_tokens=2000, requests=10**6)
            assert server.requests <= 2  # the first is the warm-up
        assert [s.verdict for s in sweep.steps] == ["stopped"]
        assert "below the floor" in sweep.steps[0].reason
        assert "below the floor" in sweep.ended
        assert sweep.steps[0].memory.least_free == 50

    def test_to_failure_goes_on(self):
        with Server(Behaviour(delay=0.01)) as server:
            sweep = swept_with(server, Falling(1000, 500, 50), to_failure=True)
        assert [s.verdict for s in sweep.steps] == ["stable", "stable"]

    def test_a_step_that_is_expected_to_fall_below_it_is_not_begun(self):
        with Server(Behaviour(delay=0.01)) as server:
            # Least free 600 after the step of 32 tokens, 300 after that of 64: -300 for 32 more.
            machine = Stepwise(server, {32: 600, 64: 300, 256: 0})
            sweep = swept_with(server, machine, contexts=(32, 64, 256))
            assert max(len(p) for p in server.prompts) == 64
        assert [s.verdict for s in sweep.steps] == ["stable", "stable", "not_run"]
        assert "--to-failure" in sweep.steps[2].reason


class Stepwise:
    """A machine whose free memory depends on the longest prompt that the server has seen."""

    def __init__(self, server, free):
        self.server, self.free = server, free

    def memory(self, *, accounts):
        left = self.free[max(len(p) for p in self.server.prompts)]
        return Memory({"weights/model": 2**30, "free": left}, 2**40 - left, left, 2**40)


class TestOthers:
    def test_nobody_to_ask_means_no(self, run, tmp_path):
        with Server(Behaviour(others=2)) as server:
            code, _, err = run(server)
            assert "/v1/completions" not in server.paths
        assert code == 2
        assert "serving 2 requests of others" in err
        assert "--yes" in err
        assert not (tmp_path / "r.jsonl").exists()

    def test_yes_means_yes(self, run):
        with Server(Behaviour(others=2)) as server:
            assert (
                run(
                    server,
                    "--yes",
                    small=["--contexts", "32", "--concurrency", "1", "--requests", "1", "--output-tokens", "5"],
                )[0]
                == 0
            )

    @pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 130)])
    def test_at_a_terminal_the_user_is_asked(self, run, monkeypatch, tmp_path, answer, code):
        questions = []
        monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
        monkeypatch.setattr("click.confirm", lambda text, **_: questions.append(text) or answer)
        small = ["--contexts", "32", "--concurrency", "1", "--requests", "1", "--output-tokens", "5"]
        with Server(Behaviour(others=1)) as server:
            assert run(server, small=small)[0] == code
            assert ("/v1/completions" in server.paths) == answer
        assert "serving 1 request of others" in questions[0]
        assert (tmp_path / "r.jsonl").exists() == answer

    def test_without_metrics_it_can_t_be_told(self, run):
        with Server(Behaviour(metrics=False)) as server:
            code, _, err = run(server)
        assert (code, "no metrics" in err) == (2, True)


class TestUsage:
    def test_the_key_is_sent_and_not_shown(self, run, monkeypatch, tmp_path):
        monkeypatch.setenv("SWEEP_KEY", "sk-abcdefghijklmnop1234")
        with Server() as server:
            code, report, err = run(server, "--api-key-env", "SWEEP_KEY")
            assert all("sk-abcdefghijklmnop1234" in head for head in server.heads)
        assert code == 0
        assert "sk-abc" not in err + json.dumps(report) + (tmp_path / "r.jsonl").read_text()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "Give the server to measure"),
            (["localhost:8000"], "http://127.0.0.1:8000"),
            (["http://x", "--contexts", "0"], "at least 1"),
            (["http://x", "--slo", "fast"], "ttft=2s,tpot=50ms"),
            (["http://x", "--duration", "soon"], "60s"),
            (["http://x", "--memory-floor", "much"], "1GiB"),
            (["http://x", "--read", "r.jsonl"], "takes no URL"),
        ],
    )
    def test_wrong_usage_is_a_sentence(self, capsys, arguments, said, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert app.run(["sweep", *arguments]) == 2
        assert said in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_nothing_there(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with Server() as server:
            url = server.url
        assert app.run(["sweep", url]) == 4
        assert "/v1/models" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_without_the_extra_the_command_that_installs_it_is_named(self, capsys, monkeypatch):
        import importlib.util

        there = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "httpx" else there(name))
        assert app.run(["sweep", "http://127.0.0.1:1"]) == 2
        assert "-m pip install 'httpx>=0.27'" in capsys.readouterr().err

    def test_httpx_is_loaded_only_when_it_is_used(self):
        code = "import sys, memledger.cli.sweep, memledger.sweep.runner, memledger.sweep.server; sys.exit('httpx' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_prompts_may_be_made_of_the_users_own_text(self, run, tmp_path):
        (tmp_path / "data.jsonl").write_text(
            "".join(f'{{"id": {i}, "prompt": "alpha{i} beta{i} gamma{i}"}}\n' for i in range(30))
        )
        with Server() as server:
            assert run(server, "--dataset", "data.jsonl")[0] == 0
            own = {3 + hash_of(f"{word}{i}") for word in ("alpha", "beta", "gamma") for i in range(30)}
            assert {token for prompt in server.prompts for token in prompt} <= own

    def test_data_that_can_t_be_read_or_is_too_short(self, run, tmp_path):
        (tmp_path / "short.txt").write_text("one two three")
        with Server() as server:
            for name, said in (("missing.txt", "missing.txt"), ("short.txt", "3 distinct tokens only")):
                code, _, err = run(server, "--dataset", name)
                assert (code, said in err) == (4, True)
            assert "/v1/completions" not in server.paths
        assert not (tmp_path / "r.jsonl").exists()

    @pytest.mark.parametrize("name", ["taken.jsonl", "nowhere/r.jsonl", "."])
    def test_results_that_can_t_be_written_end_it_before_a_request_is_sent(self, tmp_path, monkeypatch, capsys, name):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "taken.jsonl").write_text("mine")
        with Server() as server:
            assert app.run(["sweep", server.url, "--results", name]) == 74
            assert server.paths == []
        assert name in capsys.readouterr().err
        assert (tmp_path / "taken.jsonl").read_text() == "mine"


class TestReports:
    def test_every_form_tells_the_same(self, run, tmp_path, capsys):
        with Server() as server:
            code, report, _ = run(server)
        assert code == 0
        assert app.run(["sweep", "--read", "r.jsonl", "--format", "json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["sweep"] == report["sweep"]
        assert app.run(["sweep", "--read", "r.jsonl", "--format", "csv"]) == 0
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert [(int(r["context"]), int(r["requests"]), r["verdict"]) for r in rows] == [
            (s["step"]["context"], s["requests"], s["verdict"]) for s in report["sweep"]["steps"]
        ]
        assert app.run(["sweep", "--read", "r.jsonl"]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        assert "The largest step that held: 3 at once with 64 tokens each." in text

    def test_html(self, run, tmp_path):
        pytest.importorskip("plotly")
        with Server() as server:
            assert run(server, "--html", "r.html")[0] == 0
        page = (tmp_path / "r.html").read_text()
        assert "Time to the first token" in page
        assert "64 x 3" in page

    def test_accounts_of_a_gpu_by_step_in_text_and_html(self):
        pytest.importorskip("plotly")
        gib = 2**30
        with Server() as server:
            machine = Stepwise(server, {32: 60 * gib, 64: 50 * gib})
            sweep = swept_with(server, machine)
        report = SweepReport("1", sweep)
        text = sweep_text.render(report)
        # Twice the context took 10 GiB that were free before.
        assert "free -10.00" in text
        assert "weights" not in text
        figures = {
            figure.title: figure
            for section in sweep_page.page(report).chapters[0].sections
            for figure in section.figures
        }
        accounts = figures["Memory by account"].chart
        assert accounts.bars == ("before", "after 32 x 1", "after 64 x 1")
        free = next(part for part in accounts.parts if part.colour == "free")
        assert free.values == (60.0, 60.0, 50.0)
        assert "Memory by account" in html_page.render(sweep_page.page(report))

    def test_results_that_end_in_a_line_are_read(self, run, tmp_path, capsys):
        with Server() as server:
            run(server)
        file = tmp_path / "r.jsonl"
        file.write_bytes(file.read_bytes()[:-40])
        assert app.run(["sweep", "--read", "r.jsonl", "--format", "json"]) == 0
        sweep = json.loads(capsys.readouterr().out)["sweep"]
        assert (len(sweep["steps"]), sweep["complete"]) == (4, False)
        assert "middle of a line" in sweep["notes"][0]

    def test_another_file_is_refused(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("x.jsonl").write_text("{}")
        assert app.run(["sweep", "--read", "x.jsonl"]) == 4
        assert "no results file" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "made"), [("sweep", sweep_json.schema_text), ("sweep-compare", sweep_compare.schema_text)]
    )
    def test_the_schemas_in_the_docs_are_those_of_the_types(self, name, made):
        file = Path(__file__).parents[1] / f"docs/schema/{name}.schema.json"
        assert file.read_text() == made()


class TestCompare:
    @pytest.fixture
    def two(self, run, tmp_path):
        """Results of a quick server, and of one whose first token takes longer than any of the quick one's by much."""
        for name, delay in (("a", 0.0), ("b", 1.0)):
            with Server(Behaviour(first_delay=delay)) as server:
                small = ["--contexts", "32", "--concurrency", "12", "--requests", "12", "--output-tokens", "2"]
                assert run(server, small=small)[0] == 0
            (tmp_path / "r.jsonl").rename(tmp_path / f"{name}.jsonl")
        return "a.jsonl", "b.jsonl"

    def test_steps_side_by_side(self, two, tmp_path, capsys):
        assert app.run(["compare", *two, "--format", "json"]) == 0
        report = json.loads(capsys.readouterr().out)
        jsonschema.Draft202012Validator(sweep_compare.schema()).validate(report)
        pair = report["sweep_comparison"]["steps"][0]
        changes = {c["name"]: c for c in pair["changes"]}
        assert pair["step"] == {"context": 32, "concurrency": 12}
        assert changes["ttft_p50"]["differs"] == "yes"
        assert changes["ttft_p99"]["differs"] == "not_known"
        assert changes["ttft_p50"]["b"] >= 1.0
        assert app.run(["compare", *two]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        assert "differs" in text
        self.refused(two, tmp_path, capsys)

    def refused(self, two, tmp_path, capsys):
        """Sweeps compare with sweeps, two at a time."""
        (tmp_path / "server.log").write_text("hello")
        assert app.run(["compare", two[0], "server.log"]) == 2
        assert app.run(["compare", two[0], two[1], "--max-regression", "kv_tokens=-5%"]) == 2
        assert app.run(["compare", *two, two[0]]) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_measured(tmp_path, number):
    """While requests run: the results have an end, the report is written, the exit code is 130."""
    with Server(Behaviour(delay=0.005, longest=None)) as server:
        arguments = ["--contexts", "32", "--concurrency", "2", "--duration", "1h", "--output-tokens", "40"]
        program = subprocess.Popen(
            [sys.executable, "-m", "memledger", "sweep", server.url, *arguments, "--results", "r.jsonl", "--format", "json"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "80"},
        )  # fmt: skip
        wait_until(lambda: server.requests > 4)
        program.send_signal(number)
        out, err = program.communicate(timeout=60)
        wait_until(lambda: server.running == 0)
    assert program.returncode == 130, err
    assert b"Traceback" not in err
    sweep = json.loads(out)["sweep"]
    step = sweep["steps"][0]
    assert (sweep["interrupted"], step["verdict"], step["failed"]) == (True, "stopped", 0)
    assert step["requests"] >= 3
    events, notes = journal.read(tmp_path / "r.jsonl")
    assert (type(events[-1]).__name__, notes) == ("Ended", ())


def wait_until(holds, within=60):
    ends = time.monotonic() + within
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)
