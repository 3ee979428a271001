"""`memledger watch` against real processes, a fake driver, growing logs, and a real terminal."""

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import live_tree
import nvml_fake
import pytest
from live_cases import FOLDER, moved
from test_cli_explain_pid import HYBRID, SGLANG_LOG, write_log

ROOT = FOLDER.parent
PATIENCE = 60.0
DECODE = (
    "[2026-12-01 10:00:0{n}] Decode batch, #running-req: {n}, #full token: {tokens}, full token usage: 0.0{n}, mamba num: 3, "
    "mamba usage: 0.04, cuda graph: True, gen throughput (token/s): 75.12, #queue-req: 0\n"
)


def started(*words, scenario=None, env=None, **how):
    environment = {**os.environ, "COLUMNS": "100", **(env or {})}
    if scenario is not None:
        environment |= nvml_fake.environment(scenario)
    return subprocess.Popen(
        [sys.executable, "-m", "memledger", "watch", *map(str, words)],
        env=environment,
        cwd=ROOT,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how},
    )


def watch(*words, **how):
    with started(*words, **how) as process:
        out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def until(condition, process=None, shown=None):
    """Wait until something holds; fails with what the program said where it never does."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        if found := condition():
            return found
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.05)
    said = process.communicate() if process is not None and process.poll() is not None else ""
    raise AssertionError(f"it never came: {said or (shown() if shown else '')}")


@pytest.fixture
def server(tmp_path):
    """A running server of one GPU."""
    (tmp_path / "server").mkdir()
    with live_tree.tree(
        tmp_path / "server", "sglang serve", ["--model-path", "/models/Qwen3.8-27B-FP8", "--port", "1"], HYBRID
    ) as running:
        from datetime import datetime

        write_log(tmp_path / "server", moved(SGLANG_LOG, datetime.now().replace(microsecond=0)))
        scenario = (FOLDER / "live-sglang-hybrid" / "nvml.ini").read_text()
        running.scenario = scenario.replace("compute 4243 ", f"compute {running.pids['sglang::scheduler']} ")
        yield running


def kinds(path):
    if not path.exists():
        return []
    return [json.loads(line)["kind"] for line in path.read_text().splitlines() if line.endswith("}")]


# --------------------------------------------------------------------------------------------------------------- a server


def test_one_look_at_a_server_prints_its_ledger(server):
    code, out, err = watch(server.root, "--once", scenario=server.scenario)
    assert (code, err) == (0, "")
    assert f"pid {server.root}" in out
    assert "recurrent state" in out
    assert "100.0%" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_recording_of_a_server_gives_its_report_elsewhere(server, tmp_path):
    file = tmp_path / "watch.jsonl"
    with started(server.root, "--plain", "--interval", "0.2", "--record", file, scenario=server.scenario) as process:
        until(lambda: len(kinds(file)) >= 5, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert kinds(file)[:3] == ["start", "sample", "tick"]
    assert "GiB free" in out
    text = subprocess.run(
        [sys.executable, "-m", "memledger", "explain", file], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    assert "recurrent state" in text
    assert "a recording of" in text
    code, again, _ = watch("--replay", file, "--once")
    assert code == 0
    assert again.splitlines()[0] == out.rpartition("\n\nSGLang")[2].join(["SGLang", ""]).splitlines()[0]


def test_a_server_that_dies_ends_the_watch_and_the_recording(server, tmp_path):
    file = tmp_path / "watch.jsonl"
    with started(server.root, "--plain", "--interval", "0.2", "--record", file, scenario=server.scenario) as process:
        until(lambda: len(kinds(file)) >= 3, process)
        for pid in server.pids.values():
            os.kill(pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert kinds(file)[-1] == "end"
    assert "ended" in out


def test_a_process_that_is_no_server_is_said_in_a_sentence(server):
    code, out, err = watch(2**30, "--once", scenario=server.scenario)
    assert code == 4
    assert out == ""
    assert err.startswith("memledger: ")
    assert len(err.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------------ a log


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(SGLANG_LOG)
    return path


def test_a_log_alone_shows_its_ledger_and_what_runs(log):
    with log.open("a") as file:
        file.write(DECODE.format(n=7, tokens=900))
    code, out, err = watch(log, "--once")
    assert (code, err) == (0, "")
    assert "recurrent state" in out
    assert "7 running" in out


def test_serving_lines_come_as_they_are_written_through_a_rotation(log):
    with started(log, "--plain", "--interval", "0.2", stdout=subprocess.PIPE) as process:
        seen = []

        def shows(word):
            while word not in (line := process.stdout.readline()):
                assert line, seen
                seen.append(line)
            return True

        assert shows("running")
        with log.open("a") as file:
            file.write(DECODE.format(n=8, tokens=900))
        assert shows("8 running")
        log.rename(log.with_suffix(".1"))
        log.write_text(DECODE.format(n=9, tokens=900))
        assert shows("9 running")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "recurrent state" in rest


def test_a_missing_log_is_said_in_a_sentence(tmp_path):
    code, out, err = watch(tmp_path / "missing.log", "--once")
    assert (code, out) == (4, "")
    assert "no such file" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-"], "explain --follow -"),
        (["--replay", "x", "1"], "--replay plays a recording alone"),
        (["1", "--rotate-size", "12"], "such as 64MiB"),
        (["1", "--rotate-size", "12KiB"], "less than 1MiB"),
        (["1", "--interval", "0"], "--interval"),
    ],
)
def test_wrong_usage_is_said(words, told):
    code, _, err = watch(*words)
    assert code == 2
    assert told in err


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01\x02" * 1000, b'{"kind":"start","schema":"memledger-recording/9"}\n']
)
def test_what_is_no_recording_is_said(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    code, out, err = watch("--replay", path)
    assert code in {3, 4}
    assert out == ""
    assert err.startswith("memledger: ")
    assert "Traceback" not in err


def test_a_file_that_is_no_recording_is_not_written_to(log, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    code, _, err = watch(log, "--once", "--record", path)
    assert code == 74
    assert "name another" in err
    assert path.read_text() == "mine\n"


def test_without_a_terminal_textual_is_not_needed_and_not_loaded(log):
    code = (
        "import sys\nsys.modules['textual'] = None\nsys.modules['rich'] = None\n"
        f"from memledger.cli.app import run\nsys.exit(run(['watch', {str(log)!r}, '--once']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_without_textual_the_full_screen_says_how_to_install_it(log):
    code = (
        "import sys, importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'textual' else find(name, *a)\n"
        f"from memledger.cli.app import run\nsys.exit(run(['watch', {str(log)!r}]))"
    )
    leader, follower = pty.openpty()
    # Wide enough that no line of the message is broken.
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 400, 0, 0))
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            check=False,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm"},
            timeout=PATIENCE,
        )
        said = os.read(leader, 1 << 16).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == 2
    assert "-m pip install 'textual>=1.0'" in said


def test_where_errors_go_to_a_file_lines_of_text_are_written(log, tmp_path):
    """The full screen is drawn on standard error."""
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    said = b""

    def written():
        nonlocal said
        with contextlib.suppress(BlockingIOError):
            said += os.read(leader, 1 << 16)
        return said

    try:
        with (tmp_path / "errors").open("wb") as errors:
            running = subprocess.Popen(
                [sys.executable, "-m", "memledger", "watch", str(log)],
                stdin=follower,
                stdout=follower,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "TERM": "xterm"},
            )
        try:
            until(lambda: b"recurrent state" in written(), shown=written)
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(PATIENCE)
    finally:
        os.close(leader)
        os.close(follower)
    assert b"\x1b[?1049h" not in said + (tmp_path / "errors").read_bytes()


# --------------------------------------------------------------------------------------------------------- a real terminal


class Terminal:
    """A pane of tmux, on a server of its own."""

    def __init__(self, folder):
        self._socket = str(folder / "tmux")

    def __call__(self, *words):
        # readline puts COLUMNS into the process's own environment, beside os.environ: it would fix the width.
        environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words], capture_output=True, text=True, check=False, env=environment
        )
        return done.stdout

    def text(self):
        return self("capture-pane", "-p", "-t", "w")

    def shows(self, *words):
        return until(lambda: all(word in (text := self.text()) for word in words) and text, shown=self.text)


@pytest.fixture
def terminal(tmp_path):
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed here: the full screen is driven by Textual's pilot only")
    folder = tmp_path / "t"
    folder.mkdir()
    pane = Terminal(folder)
    yield pane
    pane("kill-server")


def test_the_full_screen_in_a_real_terminal(terminal, log, tmp_path):
    command = f"cd {ROOT}; {sys.executable} -m memledger watch {log} --interval 0.3; echo code $?; sleep 60"
    terminal("new-session", "-d", "-s", "w", "-x", "80", "-y", "24", f"bash -c '{command}'")
    text = terminal.shows("recurrent state", "Quit")
    assert max(map(len, text.splitlines())) <= 80
    terminal("resize-window", "-t", "w", "-x", "200", "-y", "60")
    until(lambda: max(map(len, terminal.text().splitlines())) > 100, shown=terminal.text)
    with log.open("a") as file:
        file.write(DECODE.format(n=8, tokens=900))
    terminal.shows("8 running")
    log.rename(log.with_suffix(".1"))
    log.write_text(DECODE.format(n=9, tokens=900))
    terminal.shows("9 running")
    terminal("send-keys", "-t", "w", "?")
    terminal.shows("hold the picture")
    terminal("send-keys", "-t", "w", "q")
    terminal.shows("code 0")
