"""What `memledger COMMAND --help` says below the options: examples, exit codes, where defaults come from."""

from __future__ import annotations

from typing import Final

import click

from memledger.cli.settings import NO_DEFAULTS_FOR, names_of, option_of

_DONE: Final = "0   done"
_USAGE: Final = "2   wrong usage"
_NOTHING: Final = "3   nothing of SGLang or vLLM was recognised"
_UNREADABLE: Final = "4   an input can't be read"
_WRITE: Final = "74  the output can't be written"
_FAIL_ON: Final = "1   a --fail-on condition holds"
_READS: Final = (_USAGE, _NOTHING, _UNREADABLE, _WRITE)

EXAMPLES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "explain": (
        ("explain server.log", "where the memory of that server went"),
        ("explain --pid 4242", "a running server; its log is found"),
        ("docker logs c1 2>&1 | memledger explain -", "from a pipe"),
        ("explain server.log --html report.html", "with charts, for a browser"),
        ("explain server.log --fail-on 'unexplained>2%'", "in CI"),
    ),
    "oom": (
        ("oom server.log", "what ran out, when and why"),
        ("oom server.log dmesg.txt pod.txt", "with what the kernel and kubectl say"),
        ("oom server.log --collect case.tar.gz", "keep it, masked, for somebody else"),
    ),
    "plan": (
        ("plan server.log --concurrency 4 --context 128k", "the smallest reservation for that"),
        ("plan server.log --set state_dtype=bfloat16", "what a flag would change"),
        ("plan --framework vllm --framework-version 0.31 --model-config DIR --gpu h100-80", "without a log"),
    ),
    "ps": (("ps", "every server of this machine"), ("ps --format json", "for a program")),
    "watch": (
        ("watch 4242", "one server, live"),
        ("watch server.log --plain", "a growing log, as lines of text"),
        ("watch 4242 --record run.jsonl", "and keep every look"),
        ("watch --replay run.jsonl", "play it again"),
    ),
    "compare": (
        ("compare a.log b.log", "why B holds more or fewer tokens than A"),
        ("compare new.log --expect good.json --max-regression kv_tokens=-5%", "in CI"),
    ),
    "sweep": (
        ("sweep http://127.0.0.1:8000 --contexts 8k,32k --concurrency 1,4", "four steps"),
        ("sweep http://127.0.0.1:8000 --slo ttft=2s,tpot=50ms --gpu-hour 2.5", "what holds the limits, and its price"),
        ("sweep http://127.0.0.1:8000 --contexts 64k --concurrency 8 --soak 4h", "and then for long: what grows"),
    ),
    "export": (
        ("export", "http://127.0.0.1:9841/metrics, all servers"),
        ("export --pid 4242 --interval 5", "one server"),
        ("export --textfile /var/lib/node_exporter/memledger.prom", "for node_exporter"),
    ),
    "fleet": (
        ("fleet logs/ --out rows.parquet", "a row per rank"),
        ("fleet logs/ --group-by model", "tables of the worst"),
    ),
    "doctor": (("doctor", "which sources answer here"),),
    "finding": (("finding ML101", "one finding"), ("finding ML1", "a group"), ("finding", "all")),
    "rules": (("rules --framework vllm", "the lines of vLLM"), ("rules --check --rules mine.toml", "test your own")),
    "demo": (("demo --evidence", "with the log lines"),),
    "config": (("config", "what is set"), ("config --all", "all that can be")),
    "completion": (("completion bash > ~/.local/share/bash-completion/completions/memledger", "for bash"),),
}
"""Each command's examples: how it is called (after `memledger`, unless it stands in a pipe), and what for."""

EXIT_CODES: Final[dict[str, tuple[str, ...]]] = {
    "explain": (_DONE, _FAIL_ON, *_READS),
    "demo": (_DONE, _FAIL_ON, _USAGE, _WRITE),
    "oom": (_DONE, *_READS),
    "plan": (_DONE, "1   the target can't be met", _USAGE, "3   nothing could be planned", _UNREADABLE, _WRITE),
    "compare": (_DONE, "1   beyond a --max-regression", *_READS),
    "ps": (_DONE, _USAGE, _UNREADABLE, _WRITE),
    "export": (_DONE, _USAGE, "4   --pid names no server (with --once), or the address can't be bound", _WRITE),
    "watch": (_DONE, _USAGE, "3   the recording holds nothing", "4   no such server, log or recording", _WRITE),
    "sweep": (
        _DONE,
        "1   a step failed, or none kept the limits",
        "2   wrong usage, or nobody to ask",
        "4   the server can't be measured, or nothing was",
        "74  results can't be written",
    ),
    "fleet": (
        _DONE,
        "2   wrong usage, or an extra is missing",
        "3   nothing recognised in any file",
        "4   a source gave no file, or no file could be read",
        _WRITE,
    ),
    "doctor": (_DONE, _USAGE, _WRITE),
    "finding": (_DONE, _USAGE, _WRITE),
    "rules": (_DONE, "1   with --check: a sample is not read as it says", _USAGE, _WRITE),
    "config": (_DONE, "2   wrong usage, or a default that can't be used", _WRITE),
    "completion": (_DONE, _USAGE, _WRITE),
}
"""What each command ends with, and when; all of them with 130 on Ctrl-C."""


def epilog(name: str, command: click.Command) -> str:
    """The text below the options, in paragraphs; click leaves the lines of those that begin with a backspace as they are."""
    parts = [_paragraph("Examples:", [_example(*one) for one in EXAMPLES.get(name, ())])]
    parts.append(_paragraph("Exit codes:", [*EXIT_CODES.get(name, ()), "130 interrupted"]))
    if name not in NO_DEFAULTS_FOR:
        keys = ", ".join(key for key in names_of(name) if option_of(command, key) is not None)
        parts.append(f"Defaults from the config file or MEMLEDGER_* variables: {keys}. memledger config shows them.")
    return "\n\n".join(part for part in parts if part)


def _example(words: str, told: str) -> str:
    return f"{whole(words)}\n      {told}"


def whole(words: str) -> str:
    """An example as it is typed."""
    return f"memledger {words}" if words.split(maxsplit=1)[0] in EXAMPLES else words


def _paragraph(title: str, lines: list[str]) -> str:
    return "\n".join(("\b", title, *(f"  {line}" for line in lines))) if lines else ""
