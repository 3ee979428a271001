"""Shell completion: what the shells are given, and a real bash on a terminal that completes with it."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memledger.cli import app
from memledger.cli.completion import SHELLS, VARIABLE

GENEROUS_S = 60.0


@pytest.fixture
def program(tmp_path):
    """A folder for PATH with a `memledger` in it, whether the package is installed or not."""
    script = tmp_path / "bin" / "memledger"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m memledger "$@"\n')
    script.chmod(0o755)
    return script.parent


def environment(program):
    root = Path(__file__).parent.parent
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MEMLEDGER_", "COMP_"))}
    return {**kept, "PATH": f"{program}:{os.environ['PATH']}", "PYTHONPATH": str(root), "TERM": "dumb"}


def offered(program, *words, shell="bash"):
    """What the program answers a shell, as (type, value) pairs."""
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), VARIABLE: f"{shell}_complete"}
    done = subprocess.run(
        ["memledger"],
        env={**environment(program), **asked},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stderr == ""
    return [tuple(line.split(",", 1)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_that_asks_the_program(shell, capsys):
    assert app.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{VARIABLE}={shell}_complete" in script
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False, timeout=60)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_another_shell_is_wrong_usage(capsys):
    assert app.run(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err


def test_commands_options_and_values(program):
    assert ("plain", "explain") in offered(program, "memledger", "")
    assert offered(program, "memledger", "expl") == [("plain", "explain")]
    assert ("plain", "--all-findings") in offered(program, "memledger", "explain", "--all")
    assert offered(program, "memledger", "explain", "--format", "mark") == [("plain", "markdown")]
    assert ("plain", "ML101") in offered(program, "memledger", "finding", "ML10")
    assert ("plain", "h200") in offered(program, "memledger", "plan", "--gpu", "h2")


@pytest.mark.parametrize(
    "words", [("explain",), ("oom",), ("compare",), ("plan",), ("explain", "--rules"), ("explain", "--html")]
)
def test_where_a_file_is_wanted_the_shell_offers_its_own(program, words):
    assert offered(program, "memledger", *words, "ser") == [("file", "ser")]


class Terminal:
    """An interactive bash with the completion loaded."""

    def __init__(self, program, folder):
        self._seen = b""
        self._pid, self._end = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment(program))
        self.send("PS1='rea''dy> '; bind 'set enable-bracketed-paste off'; source <(memledger completion bash)\n")
        self.see(r"\nready> ")

    def send(self, text):
        os.write(self._end, text.encode())

    def see(self, pattern):
        """Wait until the terminal shows it."""
        ends = time.monotonic() + GENEROUS_S
        while not re.search(pattern, self._seen.decode(errors="replace").replace("\r", "")):
            assert time.monotonic() < ends, self._seen
            if select.select([self._end], [], [], 0.2)[0]:
                self._seen += os.read(self._end, 4096)

    def close(self):
        os.close(self._end)
        os.waitpid(self._pid, 0)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_real_bash_completes_commands_options_and_files(program, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "server-of-monday.log").write_text("")
    terminal = Terminal(program, folder)
    try:
        terminal.send("memledger expl\t")
        terminal.see("memledger explain ")
        terminal.send("--all-f\t")
        terminal.see("memledger explain --all-findings ")
        terminal.send("server-\t")
        terminal.see("--all-findings server-of-monday.log ")
    finally:
        terminal.close()
