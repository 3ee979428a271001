"""The commands and the help of `memledger` itself, without click: importing click takes twice as long as Python's start."""

from __future__ import annotations

from typing import Final

COMMANDS: Final = {
    "explain": ("memledger.cli.explain", "Where the memory went, from a server's log or the running server."),
    "oom": ("memledger.cli.oom", "What ran out of memory and why, from logs, dmesg, kubectl, nvidia-smi output."),
    "plan": ("memledger.cli.plan", "What other settings would give, and the smallest reservation that serves a load."),
    "ps": ("memledger.cli.ps", "The SGLang and vLLM servers of this machine: GPUs, memory, use now, port and log."),
    "watch": ("memledger.cli.watch", "A running server or growing log, live: ledger, pools, growth; recordings."),
    "compare": ("memledger.cli.compare", "Two runs side by side: why one holds more KV tokens than the other."),
    "sweep": ("memledger.cli.sweep", "A running server at rising context and concurrency: what holds, and what moves."),
    "export": ("memledger.cli.export", "The memory of running servers as Prometheus metrics."),
    "fleet": ("memledger.cli.fleet", "Thousands of logs: a row per rank in Parquet, and the worst of them."),
    "doctor": ("memledger.cli.doctor", "Which sources answer on this machine, and why the others do not."),
    "finding": ("memledger.cli.finding", "What a finding's code means, and what to do about it."),
    "rules": ("memledger.cli.rules", "The log lines that are understood, and whether their samples still are."),
    "demo": ("memledger.cli.demo", "The report of a bundled log."),
    "config": ("memledger.cli.config", "Which default comes from where: a file, a MEMLEDGER_* variable."),
    "completion": ("memledger.cli.completion", "Completion of commands, options and files in bash, zsh and fish."),
}
"""Each command's module (which holds it under the name `command`) and its line in `--help`."""

EXAMPLES: Final = {
    "explain": ("server.log", "where the memory went; or --pid 4242"),
    "oom": ("server.log dmesg.txt", "what ran out, when, why; what to do"),
    "plan": ("server.log --concurrency 4", "the smallest reservation that serves it"),
    "ps": ("", "the servers of this machine"),
    "watch": ("4242", "a server or growing log, live"),
    "compare": ("a.log b.log", "why one holds more KV tokens"),
    "sweep": ("http://127.0.0.1:8000", "a server under rising load"),
    "export": ("--pid 4242", "Prometheus metrics"),
    "fleet": ("logs/", "thousands of logs, a row per rank"),
    "doctor": ("", "which sources answer on this machine"),
    "finding": ("ML101", "what a finding means"),
    "rules": ("--check", "the log lines that are understood"),
    "demo": ("", "what the answer looks like"),
    "config": ("--all", "which default comes from where"),
    "completion": ("bash", "for bash, zsh and fish"),
}
"""An example of each command, and what it gives in a few words: a line of `--help` has 80 columns."""

_HELP: Final = """\
Usage: memledger [OPTIONS] COMMAND [ARGS]...

  Where the GPU memory of an SGLang or vLLM server went, and whether the
  workload needs it there. Begin with: memledger explain server.log

Commands, each with an example (memledger COMMAND --help has more):
{commands}

Options:
  --no-config    Use no defaults: no config file, no MEMLEDGER_* variables.
  -V, --version  Show the version and exit.
  -h, --help     Show this message and exit.

  Exit codes: 0 done; 1 a --fail-on condition holds, or a plan's target can't be
  met; 2 wrong usage; 3 nothing recognised; 4 an input can't be read."""


def help_text() -> str:
    """What `memledger --help` prints: one screen."""
    shown = {name: EXAMPLES.get(name, ("", line)) for name, (_, line) in COMMANDS.items()}
    wide = max(len(f"{name} {example}") for name, (example, _) in shown.items())
    lines = (f"  {f'{name} {example}':<{wide}}  {told}" for name, (example, told) in shown.items())
    return _HELP.format(commands="\n".join(lines))
