"""From the command line's file names to a report, with what could not be read said in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from memledger import findings, pipeline
from memledger.grammar import GrammarError, RuleSet, load_rules
from memledger.ledger import Report
from memledger.lookalike import LOOKED_FOR, describe

if TYPE_CHECKING:
    from memledger.cards import Total

HEAD_BYTES = 64 * 1024


class ReadResult(msgspec.Struct, frozen=True):
    """A report, what could not be read (`problems`), and what to say where nothing was recognised (`nothing`)."""

    report: Report
    problems: tuple[str, ...] = ()
    nothing: tuple[str, ...] = ()


def rules(files: Sequence[Path]) -> RuleSet:
    """The rules in force.

    Raises:
        click.UsageError: a rule file can't be used.
    """
    try:
        return load_rules(files)
    except GrammarError as error:
        raise click.UsageError(f"{error}") from error


def read(files: Sequence[str], rule_files: Sequence[Path], gpu_total: Total | None, follow: bool) -> ReadResult:
    """Read every input that can be read, and explain it."""
    in_force = rules(rule_files)
    readable, problems = [], []
    for name in files:
        problem = _problem(name)
        if problem is None:
            readable.append(name)
        else:
            problems.append(problem)
    report = pipeline.explain(readable, in_force)
    return ReadResult(finish(report, gpu_total), tuple(problems), nothing_recognised(report))


def finish(report: Report, gpu_total: Total | None) -> Report:
    """The report closed against the card where one was given, with its findings."""
    if gpu_total is not None:
        from memledger.device import with_device_total

        servers = tuple(
            with_device_total(s, gpu_total.amount, gpu_total.basis, gpu_total.label) for s in report.servers
        )
        report = msgspec.structs.replace(report, servers=servers)
    return findings.attach(report)


def nothing_recognised(report: Report) -> tuple[str, ...]:
    """What to say where no server was found: what each input seems to be, and what was looked for."""
    if report.servers:
        return ()
    sentences = [
        f"{item.path}: nothing of SGLang or vLLM in it; it looks like {describe(_head(item.path), item.bytes)}."
        for item in report.inputs
    ]
    return (*sentences, f"Looked for {'; '.join(LOOKED_FOR)}.")


def _head(name: str) -> bytes:
    try:
        with Path(name).open("rb") as stream:
            return stream.read(HEAD_BYTES)
    except OSError:
        return b""


def _problem(name: str) -> str | None:
    path = Path(name)
    try:
        if path.is_dir():
            return f"{name} is a directory; name the log files in it."
        with path.open("rb"):
            return None
    except FileNotFoundError:
        return f"{name}: there is no such file."
    except PermissionError:
        return f"{name}: no permission to read it."
    except OSError as error:
        return f"{name}: can't be read: {error.strerror}."
