"""The command line: exit codes, what goes to stdout and what to stderr, and one clear sentence for every bad input."""

import fcntl
import gzip
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from memledger import __version__
from memledger.cli import app, output, reading
from memledger.cli.reading import ProgressBar
from memledger.resources import demo_log

LOG = """\
[2026-03-01 10:00:00] server_args=ServerArgs(model_path='org/Dense-7B', tp_size=1, mem_fraction_static=0.85, context_length=32768)
[2026-03-01 10:00:05] Load weight begin. avail mem=23.50 GB
[2026-03-01 10:00:15] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=8.50 GB, mem usage=15.00 GB.
[2026-03-01 10:00:16] KV Cache is allocated. #tokens: 40960, K size: 2.50 GB, V size: 2.50 GB
[2026-03-01 10:00:16] Memory pool end. avail mem=3.50 GB
[2026-03-01 10:00:20] max_total_num_tokens=40960, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=32768, available_gpu_mem=3.50 GB
[2026-03-01 10:00:21] The server is fired up and ready to roll!
"""
LEAK = LOG.replace("available_gpu_mem=3.50", "available_gpu_mem=1.50")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "MEMLEDGER_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "server.log").write_text(LOG)
    (tmp_path / "leak.log").write_text(LEAK)
    return tmp_path


@pytest.fixture
def run(folder, capsys):
    def call(*args):
        code = app.run(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def shell(command, **changes):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **changes}
    return subprocess.run(["bash", "-c", command], capture_output=True, env=environment, timeout=60, check=False)


def on_terminal(args, *, columns, interrupt_after=None, program=None, **changes):
    """What a terminal of some width gets to see."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1", **changes}
    environment.pop("COLUMNS", None)
    command = [program] if program else [sys.executable, "-m", "memledger"]
    process = subprocess.Popen([*command, *args], stdout=slave, stderr=slave, stdin=slave, env=environment)
    os.close(slave)
    if interrupt_after is not None:
        time.sleep(interrupt_after)
        process.send_signal(signal.SIGINT)
    seen = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        seen += block
    process.wait(timeout=20)
    os.close(master)
    return seen.decode()


MEMLEDGER = f"{sys.executable} -m memledger"


class TestUsage:
    def test_version_and_help(self, run):
        assert run("--version") == (0, f"memledger {__version__}\n", "")
        code, out, _ = run("--help")
        assert code == 0
        for name in app.COMMANDS:
            assert f"  {name} " in out
        assert "Exit codes: 0 done" in out

    def test_no_command_is_wrong_usage_with_the_help(self, run):
        code, out, err = run()
        assert (code, out) == (2, "")
        assert "memledger explain server.log" in err

    @pytest.mark.parametrize("name", list(app.COMMANDS))
    def test_every_command_has_help(self, run, name):
        code, out, _ = run(name, "--help")
        assert code == 0
        assert f"Usage: memledger {name}" in out

    def test_a_file_in_place_of_a_command_gets_the_command(self, run):
        code, _, err = run("server.log")
        assert code == 2
        assert "To read a log: memledger explain server.log" in err

    def test_a_mistyped_command_or_option_gets_a_suggestion(self, run):
        assert "Did you mean 'explain'?" in run("explian", "x")[2]
        assert "--evidence" in run("explain", "--evidense", "server.log")[2]
        assert run("nonsense")[0] == 2

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["explain"], "Give a log to read"),
            (["explain", "server.log", "--start", "1", "--all-starts"], "exclude each other"),
            (["explain", "server.log", "--start", "2"], "there is no start 2: the input holds 1 start"),
            (["explain", "server.log", "--rank", "TP7"], "no rank 'TP7'"),
            (["explain", "server.log", "--fail-on", "unexplained>lots"], "write unexplained>2%"),
            (["explain", "server.log", "--fail-on", "memory>2%"], "nothing is called 'memory'"),
            (["explain", "server.log", "--gpu-total", "h1000"], "no card 'h1000'"),
            (["explain", "server.log", "--rules", "missing.toml"], "missing.toml"),
            (["explain", "server.log", "--format", "yaml"], "yaml"),
        ],
    )
    def test_wrong_usage_is_exit_code_2_and_one_sentence(self, run, args, said):
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert said in err
        assert "Traceback" not in err

    def test_a_broken_rule_file_is_named_with_what_is_wrong(self, run, folder):
        (folder / "mine.toml").write_text('framework = "sglang"\n[[rule]]\nid = "x"\npattern = "y"\nmeans = "z"\n')
        code, _, err = run("explain", "server.log", "--rules", "mine.toml")
        assert code == 2
        assert "rule x: every rule needs an anchor" in err


class TestExplain:
    def test_text_is_the_default(self, run):
        code, out, err = run("explain", "server.log")
        assert (code, err) == (0, "")
        assert out.startswith("SGLang")
        assert "Dense-7B" in out
        assert "15.00" in out

    def test_piped_text_is_80_columns_without_colour(self, run):
        out = run("explain", "server.log")[1]
        assert max(map(len, out.splitlines())) <= 80
        assert "\x1b" not in out

    def test_width_and_colour_can_be_asked_for(self, run, monkeypatch):
        assert max(map(len, run("explain", "server.log", "--width", "140")[1].splitlines())) > 80
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert "\x1b[1m" in run("explain", "server.log")[1]
        assert "\x1b" not in run("explain", "server.log", "--no-color")[1]
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b" not in run("explain", "server.log")[1]

    def test_json_is_one_valid_document(self, run):
        code, out, err = run("explain", "server.log", "--format", "json", "--no-live")
        assert (code, err) == (0, "")
        assert json.loads(out)["schema"] == "memledger/1"

    def test_markdown(self, run):
        assert run("explain", "server.log", "--format", "markdown")[1].startswith("### SGLang")

    def test_evidence_shows_the_lines(self, run):
        assert "KV Cache is allocated. #tokens: 40960" in run("explain", "server.log", "--evidence")[1]

    def test_gpu_total_closes_against_the_card(self, run):
        out = run("explain", "server.log", "--gpu-total", "24GiB", "--width", "120")[1]
        assert "card total" in out
        assert "in use at start" in out
        by_name = json.loads(run("explain", "server.log", "--gpu-total", "4090", "--format", "json")[1])
        rank = by_name["servers"][0]["ranks"][0]
        assert rank["gpu"]["name"] == "RTX 4090"
        assert next(e for e in rank["entries"] if e["account"] == "in_use_at_start")["basis"] == "assumed"

    def test_standard_input(self, folder):
        done = shell(f"cat server.log | {MEMLEDGER} explain -")
        assert done.returncode == 0
        assert done.stdout.startswith(b"SGLang")

    def test_rules_of_ones_own(self, run, folder):
        (folder / "fork.toml").write_text(
            'framework = "sglang"\n[[rule]]\nid = "fork_line"\nanchor = "Fork scratch"\npattern = \'Fork scratch: (?P<size>[\\d.]+) GB\'\n'
            'fields = { size = "GiB" }\nkind = "not_memory"\nmeans = "a fork\'s line"\n[[rule.sample]]\nline = "Fork scratch: 1.50 GB"\nexpect = { size = 1.5 }\n'
        )
        (folder / "fork.log").write_text(LOG + "[2026-03-01 10:00:22] Fork scratch: 1.50 GB\n")
        plain = json.loads(run("explain", "fork.log", "--format", "json")[1])
        taught = json.loads(run("explain", "fork.log", "--format", "json", "--rules", "fork.toml")[1])
        assert plain["unrecognized"]["count"] == taught["unrecognized"]["count"] + 1


class TestFailOn:
    @pytest.mark.parametrize(
        ("log", "condition", "code"),
        [
            ("leak.log", "unexplained>2%", 1),
            ("leak.log", "unexplained>1GiB", 1),
            ("leak.log", "unexplained > 3 GiB", 0),
            ("leak.log", "code=ML301", 1),
            ("leak.log", "severity>=warning", 1),
            ("leak.log", "severity>=error", 0),
            ("leak.log", "verdict=closed", 0),
            ("server.log", "unexplained>2%", 0),
            ("server.log", "code=ML101", 0),
            ("server.log", "code!=ML101", 1),
            ("server.log", "verdict=closed", 1),
        ],
    )
    def test_a_condition_that_holds_is_exit_code_1(self, run, log, condition, code):
        got, out, err = run("explain", log, "--fail-on", condition)
        assert got == code
        assert out.startswith("SGLang")
        assert (condition in err) is (code == 1)

    def test_any_of_several_is_enough(self, run):
        assert run("explain", "leak.log", "--fail-on", "code=ML101", "--fail-on", "unexplained>1GiB")[0] == 1

    def test_json_stays_one_valid_document(self, run):
        code, out, _ = run("explain", "leak.log", "--fail-on", "unexplained>2%", "--format", "json")
        assert code == 1
        json.loads(out)

    def test_what_cannot_be_judged_is_said(self, run, folder):
        (folder / "open.log").write_text("".join(LOG.splitlines(keepends=True)[2:4]))
        code, _, err = run("explain", "open.log", "--fail-on", "unexplained>2%")
        assert code == 0
        assert "not judged" in err


class TestBadInput:
    def sentence(self, run, *args, code):
        got, out, err = run("explain", *args)
        assert got == code
        assert "Traceback" not in err
        return out, err

    def test_a_missing_file(self, run):
        out, err = self.sentence(run, "no.log", code=4)
        assert out == ""
        assert "no.log" in err

    def test_a_directory(self, run, folder):
        (folder / "logs").mkdir()
        assert "directory" in self.sentence(run, "logs", code=4)[1]

    def test_a_report_needs_no_standard_error(self, run, monkeypatch):
        monkeypatch.setattr(sys, "stderr", None)
        code, out, _ = run("explain", "server.log")
        assert code == 0
        assert out.startswith("SGLang")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
    def test_a_file_that_must_not_be_read(self, run, folder):
        (folder / "server.log").chmod(0)
        assert "permission" in self.sentence(run, "server.log", code=4)[1].lower()

    def test_json_names_what_could_not_be_read(self, run):
        document = json.loads(run("explain", "server.log", "no.log", "--format", "json")[1])
        assert document["sources"][0] == {
            "name": "log",
            "status": "partial",
            "reason": "no.log: there is no such file; check the name.",
        }
        code, out, _ = run("explain", "no.log", "--format", "json")
        assert code == 4
        assert json.loads(out)["sources"][0]["status"] == "unavailable"
        assert "no.log" in json.loads(out)["sources"][0]["reason"]

    def test_a_cut_archive_is_a_partial_source(self, run, folder):
        (folder / "cut.log.gz").write_bytes(gzip.compress(LOG.encode() * 50)[:-40])
        code, out, err = run("explain", "cut.log.gz", "--format", "json")
        assert (code, err) == (0, "")
        source = json.loads(out)["sources"][0]
        assert source["status"] == "partial"
        assert "cut.log.gz: the gzip data ends too early" in source["reason"]
        assert "the gzip data ends too early" in " ".join(run("explain", "cut.log.gz")[1].split())

    def test_a_name_that_is_no_text_is_still_a_document(self, run, folder):
        name = os.fsdecode(b"caf\xe9.log.gz")
        (folder / name).write_bytes(gzip.compress(LOG.encode())[:-4])
        document = json.loads(run("explain", name, "no-\udce9.log", "--format", "json")[1])
        assert document["sources"][0]["status"] == "partial"

    def test_what_can_be_read_is_still_reported(self, run):
        out, err = self.sentence(run, "server.log", "no.log", code=4)
        assert out.startswith("SGLang")
        assert "no.log" in err

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "empty"),
            (b"\n\n  \n", "blank"),
            (bytes(range(256)) * 40, "binary"),
            (b"\x7fELF\x02\x01\x01" + bytes(64), "ELF"),
            (b"Loading shards:  10%|#    | 1/10\rLoading shards:  20%|##   | 2/10\r", "progress bars"),
            (b"llama_model_loader: loaded meta data\nllm_load_tensors: offloaded 33/33 layers to GPU\n", "llama.cpp"),
            (b"hello\nworld\n", "another program"),
        ],
        ids=["empty", "blank", "binary", "elf", "bars", "llama.cpp", "other"],
    )
    def test_nothing_recognised_says_what_it_is_and_what_was_looked_for(self, run, folder, content, said):
        (folder / "odd.log").write_bytes(content)
        out, err = self.sentence(run, "odd.log", code=3)
        assert out == ""
        assert said in err
        assert "Looked for" in err

    def test_nothing_recognised_is_still_a_document(self, run, folder):
        (folder / "odd.log").write_text("hello\n")
        code, out, _ = run("explain", "odd.log", "--format", "json")
        assert code == 3
        assert json.loads(out)["servers"] == []

    def test_a_log_cut_in_the_middle_of_a_line(self, run, folder):
        (folder / "cut.log").write_text(LOG[: LOG.index("V size")])
        code, out, _ = run("explain", "cut.log")
        assert code == 0
        assert "15.00" in out

    def test_a_file_name_is_no_way_into_the_terminal(self, run, folder):
        name = "a\x1b]0;x\x07 b.log"
        (folder / name).write_text(LOG)
        _, out, _ = run("explain", name)
        assert "\x1b" not in out
        assert "\x1b" not in run("explain", "no\x1b[31m.log")[2]

    def test_an_error_of_our_own_is_one_line(self, run, monkeypatch):
        def broken(*_, **__):
            raise RuntimeError("boom")

        monkeypatch.setattr(reading, "read", broken)
        code, _, err = run("explain", "server.log")
        assert code == app.INTERNAL_ERROR
        assert err.count("\n") == 1
        assert "RuntimeError: boom" in err


class TestTerminal:
    def test_a_reader_that_has_enough_is_no_error(self, folder):
        done = shell(f"set -o pipefail; {MEMLEDGER} rules | head -n 1")
        assert done.stderr == b""
        assert done.returncode == 0

    def test_a_full_disk_is_said_in_one_line(self, folder):
        done = shell(f"{MEMLEDGER} explain server.log > /dev/full")
        assert done.returncode == 74
        assert done.stderr == b"Error: the report can't be written: No space left on device.\n"

    @pytest.mark.parametrize(
        ("arguments", "code"),
        [("explain nothing.txt", 3), ("explain absent.log", 4), ("explain --no-such-option", 2), ("", 2)],
    )
    def test_an_unwritable_standard_error_leaves_the_exit_code(self, folder, arguments, code):
        (folder / "nothing.txt").write_text("a line of something else\n")
        assert shell(f"{MEMLEDGER} {arguments} 2> /dev/full").returncode == code

    def test_no_standard_output_at_all(self, folder):
        done = shell(f"{MEMLEDGER} explain server.log >&-")
        assert b"Traceback" not in done.stderr
        assert done.returncode == 74

    def test_a_terminal_gets_colour_and_its_own_width(self, folder):
        out = on_terminal(["explain", "server.log"], columns=132)
        assert "\x1b[1mSGLang" in out
        assert 80 < max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in out.splitlines()) <= 132
        assert "\x1b" not in on_terminal(["explain", "server.log"], columns=132, NO_COLOR="1")

    def test_a_followed_log_is_redrawn_on_a_terminal(self, folder):
        out = on_terminal(["explain", "--follow", "server.log"], columns=100, interrupt_after=1.5)
        assert out.startswith("\x1b[H\x1b[2J")
        assert "40,960 KV tokens" in out

    def test_output_that_cannot_show_utf_8_is_ascii(self, folder):
        done = shell(f"{MEMLEDGER} explain server.log", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert done.returncode == 0
        assert done.stdout.isascii()
        assert b"#" in done.stdout

    def test_the_c_locale_is_ascii(self, folder):
        done = shell(f"env -u PYTHONUTF8 -u PYTHONIOENCODING LC_ALL=C {MEMLEDGER} explain server.log")
        assert done.returncode == 0
        assert done.stdout.isascii()
        assert b"#" in done.stdout
        told = shell(f"{MEMLEDGER} explain server.log", LC_ALL="C", PYTHONIOENCODING="utf-8")
        assert not told.stdout.isascii()

    @pytest.mark.parametrize(
        ("encoding", "shows"), [("utf-8", True), ("UTF8", True), ("latin-1", False), ("ascii", False), (None, False)]
    )
    def test_which_encodings_show_everything(self, encoding, shows):
        assert output.is_unicode(encoding) is shows

    def test_ctrl_c_is_quiet(self, folder):
        process = subprocess.Popen(
            [sys.executable, "-m", "memledger", "explain", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert b"Traceback" not in err
        assert process.returncode in {130, 0, 3}


class TestFollow:
    def test_a_growing_log_ends_in_its_report(self, folder):
        half = LOG.index("[2026-03-01 10:00:16] Memory")
        (folder / "grow.log").write_text(LOG[:half])
        process = subprocess.Popen(
            [sys.executable, "-m", "memledger", "explain", "--follow", "grow.log"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        time.sleep(1.0)
        with (folder / "grow.log").open("a") as log:
            log.write(LOG[half:])
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, b"")
        assert b"40,960 KV tokens" in out
        assert b"serving" in out

    def test_standard_input_is_followed_to_its_end(self, folder):
        done = shell(f"(cat server.log; sleep 0.6) | {MEMLEDGER} explain - --follow")
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.count(b"40,960 KV tokens") == 1

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_standard_input_with_the_report(self, folder, number):
        process = subprocess.Popen(
            [sys.executable, "-m", "memledger", "explain", "-", "--follow"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process.stdin.write(LOG.encode())
        process.stdin.flush()
        time.sleep(1.5)
        process.send_signal(number)
        time.sleep(0.6)
        assert process.poll() == 0
        out, err = process.communicate(timeout=20)
        assert err == b""
        assert b"40,960 KV tokens" in out

    def test_standard_input_is_redrawn_on_a_terminal(self, folder):
        (folder / "head.log").write_text(LOG[:300])
        (folder / "tail.log").write_text(LOG[300:])
        command = f"(cat head.log; sleep 1.2; cat tail.log; sleep 1.2) | {MEMLEDGER} explain - --follow"
        out = on_terminal(["-c", command], columns=100, program="bash")
        assert out.count("\x1b[H\x1b[2J") >= 3
        first, *_, last = out.split("\x1b[H\x1b[2J")[1:]
        assert "KV tokens" not in first
        assert "40,960 KV tokens" in last

    def test_a_signal_before_anything_came_ends_it_too(self, folder):
        process = subprocess.Popen(
            [sys.executable, "-m", "memledger", "explain", "-", "--follow"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.communicate(timeout=60)[1]

    def test_it_reads_one_log_and_writes_text(self, run):
        assert run("explain", "--follow", "server.log", "leak.log")[0] == 2
        assert run("explain", "--follow", "server.log", "--format", "json")[0] == 2


class TestProgress:
    def test_a_bar_for_large_inputs_only(self, monkeypatch):
        shown = io.StringIO()
        shown.isatty = lambda: True
        monkeypatch.setattr(sys, "stderr", shown)
        bar = ProgressBar()
        bar(10**6, 10**7)
        bar(10**6, None)
        bar.finish()
        assert shown.getvalue() == ""
        size = 10**8
        for done in range(0, size + 1, size // 10):
            bar(done, size)
        bar.finish()
        assert "reading" in shown.getvalue()
        assert "100%" in shown.getvalue()

    def test_none_where_stderr_is_no_terminal(self, folder, monkeypatch, run):
        monkeypatch.setattr(reading, "SHOWS_PROGRESS_FROM", 1)
        assert run("explain", "server.log")[2] == ""


class TestDemo:
    def test_it_takes_the_options_of_explain(self):
        from memledger.cli import demo, explain

        def options(command):
            return {p.name: (p.opts, p.help, p.multiple) for p in command.params if p.param_type_name == "option"}

        without = options(explain.command)
        for name in ("follow", "pid", "smi", "snapshot", "api_key_env"):  # of a log or a machine of one's own
            del without[name]
        assert options(demo.command) == without
        assert "files" not in {p.name for p in demo.command.params}

    def test_what_it_advises_can_be_run(self, run):
        advice = re.search(r"^next +memledger (.*?) \(", run("demo", "--width", "200")[1], re.MULTILINE)[1]
        code, out, err = run(*advice.replace("SIZE", "h100").split())
        assert (code, err) == (0, "")
        assert "card total" in out
        assert "\nnext" not in out


class TestGivenTotal:
    def test_what_follows_from_it_is_called_the_users_figure(self, run):
        out = run("explain", "server.log", "--gpu-total", "80GiB", "--width", "200")[1]
        assert "If the card has the 80.0 GiB of --gpu-total, 56.5 GiB was in use before" in out
        assert re.search(r"^in use at start .* --gpu-total less the first reading$", out, re.MULTILINE)
        assert out.splitlines()[2].startswith(
            "Of the card's 80.0 GiB (--gpu-total), memory in use before the start takes"
        )
        assert "\nnext" not in out

    def test_the_figure_of_the_first_reading_has_its_line(self, run):
        document = json.loads(run("explain", "server.log", "--gpu-total", "24GiB", "--format", "json")[1])
        row = document["servers"][0]["ranks"][0]["entries"][0]
        assert row["account"] == "in_use_at_start"
        assert [e["line"] for e in row["evidence"]] == [2]


class TestOtherCommands:
    def test_rules_lists_them(self, run):
        code, out, _ = run("rules", "--framework", "sglang")
        assert code == 0
        assert "sglang.server_args" in out
        assert "vllm." not in out

    def test_rules_as_json(self, run):
        document = json.loads(run("rules", "--format", "json")[1])
        assert {"id", "framework", "kind", "versions", "means", "anchors", "fields"} == set(document["rules"][0])

    def test_check_runs_every_sample(self, run, folder):
        (folder / "wrong.toml").write_text(
            'framework = "any"\n[[rule]]\nid = "w"\nanchor = "zebra"\npattern = \'zebra (?P<size>\\d+) GB\'\nfields = { size = "GiB" }\nmeans = "m"\n'
            '[[rule.sample]]\nline = "zebra 5 GB"\nexpect = { size = 6 }\n'
        )
        code, _, err = run("rules", "--check", "--rules", "wrong.toml")
        assert code == 1
        assert "any.w: size: expected 6" in err

    def test_demo_is_the_report_of_the_bundled_log(self, run):
        assert demo_log().is_file()
        code, out, err = run("demo")
        assert (code, err) == (0, "")
        assert "recurrent state for 124 slots" in out

    def test_demo_says_it_all_in_its_first_sentences(self, run):
        first = " ".join(run("demo", "--width", "120")[1].split("\n\n")[1].split())
        for part in (
            "17.9 GiB",
            "124 slots",
            "5 each",
            "At most 3 ever ran",
            "15.6 GiB were never needed",
            "--max-mamba-cache-size 20",
            "[ML101]",
        ):
            assert part in first


def test_help_and_version_import_nothing_heavy():
    code = "import sys; from memledger.cli.app import run; run(['--help']); print(sorted({'msgspec', 'regex', 'hyperscan', 'tabulate', 'psutil', 'pynvml'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_model_config_that_can_not_be_read_leaves_the_report_without_the_model(tmp_path, capsysbinary):
    from memledger.cli import app as program
    from memledger.resources import demo_log

    given = ("--model-config", str(tmp_path / "none.json"))
    assert program.run(["explain", str(demo_log()), *given, "--format", "json"]) == 4
    written = capsysbinary.readouterr()
    assert b"none.json: no such file" in written.err
    document = json.loads(written.out)
    assert len(document["servers"]) == 1
    (source,) = (s for s in document["sources"] if s["name"] == "model")
    assert source["status"] == "unavailable"
    assert "none.json: no such file" in source["reason"]


def test_the_report_says_what_a_models_config_would_add(capsysbinary):
    from memledger.cli import app as program

    log = Path(__file__).parent.parent / "fixtures" / "vllm-0.25-hybrid" / "server.log"
    assert program.run(["explain", str(log), "--no-live", "--format", "json"]) == 0
    (source,) = (s for s in json.loads(capsysbinary.readouterr().out)["sources"] if s["name"] == "model")
    assert source["status"] == "unavailable"
    assert "--model-config" in source["reason"]
