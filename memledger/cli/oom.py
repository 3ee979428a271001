"""`memledger oom`: what ran out of memory, when and why, and which remedy fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from memledger.cli import app, incidents, overview
from memledger.cli.options import MODEL_CONFIG, gpu_total_of

if TYPE_CHECKING:
    from memledger.cards import Total
    from memledger.cli.reading import ReadResult
    from memledger.postmortem.incident import OomReport
    from memledger.postmortem.symptom import Symptoms

LOOKED_FOR: Final = (
    "out-of-memory messages of PyTorch, CUDA, cuBLAS, cuDNN, NCCL and NVSHMEM",
    "refusals and failures of SGLang and vLLM",
    "the kernel's OOM killer, cgroup limits, systemd-oomd, exit 137, OOMKilled, Slurm, Ray, /dev/shm",
    "nvidia-smi tables",
)
"""What a failure on memory is known by, in words."""


@click.command("oom", short_help=overview.COMMANDS["oom"][1])
@click.argument("files", nargs=-1, metavar="FILE...")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    help="How to write the report.",
)
@click.option("--all", "everything", is_flag=True, help="Print every incident in full, not only the first.")
@click.option("--evidence", is_flag=True, help="Print the lines behind the figures.")
@click.option(
    "--gpu-total",
    callback=gpu_total_of,
    metavar="SIZE|CARD",
    help="The card's memory, where the log does not print it: 80GiB, 81559MiB, h100, 4090.",
)
@MODEL_CONFIG
@click.option(
    "--no-live", is_flag=True, help="Look at nothing but the files named: no model folder or cache of this machine."
)
@click.option(
    "--rules",
    "rule_files",
    multiple=True,
    metavar="FILE",
    help="A rule file of your own, before the bundled ones. Repeatable.",
)
@click.option(
    "--width",
    type=click.IntRange(min=40),
    metavar="COLUMNS",
    help="Width of the text (default: the terminal's; 80 when piped).",
)
@click.option("--no-color", is_flag=True, help="No colours (also: NO_COLOR).")
def command(
    files: tuple[str, ...],
    format_: str,
    everything: bool,
    evidence: bool,
    gpu_total: Total | None,
    model_config: Path | None,
    no_live: bool,
    rule_files: tuple[str, ...],
    width: int | None,
    no_color: bool,
) -> int:
    """What ran out of memory, in which phase, who held it, and which remedy fits.

    FILES are any mix of server log, dmesg or journal, kubectl describe pod, docker and Slurm output, and nvidia-smi
    output, compressed or not; - is standard input. No GPU is needed.
    """
    if not files:
        raise click.UsageError("Give what the server left behind: memledger oom server.log dmesg.txt (or - for stdin).")
    result, symptoms = _read(files, rule_files, gpu_total, model_config, look_here=not no_live)
    report = incidents.assembled(result, symptoms, model_config, look_here=not no_live)
    known = bool(report.incidents or report.servers or symptoms.found)
    if format_ == "json":
        from memledger.cli import output
        from memledger.report.oom_json import encode

        output.write_bytes(encode(report))
    elif known:
        _show(report, format_, width, no_color, everything=everything, evidence=evidence)
    for problem in result.problems:
        app.say(f"memledger: {problem}")
    if result.problems:
        return app.UNREADABLE
    if known:
        return app.DONE
    for sentence in _nothing(report, result.heads):
        app.say(f"memledger: {sentence}")
    return app.NOTHING_RECOGNISED


def _read(
    files: Sequence[str],
    rule_files: Sequence[str],
    gpu_total: Total | None,
    model_config: Path | None,
    *,
    look_here: bool,
) -> tuple[ReadResult, Symptoms]:
    """All inputs, once: the ledger of every start, and the symptoms of what failed."""
    from memledger.cli import reading
    from memledger.postmortem.facts import SymptomLog

    log = SymptomLog()
    result = reading.read(
        files,
        [Path(name) for name in rule_files],
        gpu_total,
        model_config=model_config,
        look_here=look_here,
        tap=log.feed,
    )
    return result, log.symptoms()


def _show(
    report: OomReport, format_: str, width: int | None, no_color: bool, *, everything: bool, evidence: bool
) -> None:
    from memledger.cli import output

    if format_ == "markdown":
        from memledger.report import oom_markdown

        output.write(oom_markdown.render(report, everything=everything, evidence=evidence))
    else:
        from memledger.report import oom_text

        output.write(oom_text.render(report, output.style(width, no_color), everything=everything, evidence=evidence))


def _nothing(report: OomReport, heads: Sequence[bytes]) -> list[str]:
    """What to say where nothing was recognised: what each input seems to be, and what was looked for."""
    from memledger.lookalike import describe
    from memledger.sanitize import clean

    sentences = []
    for item, head in zip(report.inputs, heads, strict=True):
        name = "standard input" if item.path == "-" else clean(item.path.encode("utf-8", "replace").decode())
        sentences.append(f"{name}: nothing of a failure in it; it looks like {describe(head, item.bytes)}.")
        sentences += [clean(note.encode("utf-8", "replace").decode()) for note in item.notes]
    return [*sentences, f"Looked for {'; '.join(LOOKED_FOR)}."]
