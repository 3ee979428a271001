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
}
"""Each command's module (which holds it under the name `command`) and its line in `--help`."""

_HELP: Final = """\
Usage: memledger [OPTIONS] COMMAND [ARGS]...

  Where the GPU memory of an SGLang or vLLM server went, and whether the
  workload needs it there.

    memledger explain server.log     a finished or growing log; no GPU needed
    memledger explain --pid 4242     a running server: finds log and GPUs itself
    memledger oom server.log dmesg.txt
                                     what ran out, when and why, and what to do
    memledger plan server.log --concurrency 4 --context 128k
                                     the smallest reservation that serves it
    memledger demo                   what the answer looks like

Options:
  -V, --version  Show the version and exit.
  -h, --help     Show this message and exit.

Commands:
{commands}

  Exit codes: 0 done; 1 a --fail-on condition holds, or a plan's target can't be
  met; 2 wrong usage; 3 nothing recognised; 4 an input can't be read."""


def help_text() -> str:
    """What `memledger --help` prints."""
    width = max(map(len, COMMANDS))
    return _HELP.format(commands="\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()))
