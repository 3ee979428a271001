"""`memledger oom`: what ran out of memory, when and why, and which remedy fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from memledger.cli import app, incidents, overview
from memledger.cli.options import HTML, MODEL_CONFIG, gpu_total_of

if TYPE_CHECKING:
    from memledger.cards import Total
    from memledger.cli.reading import ReadResult
    from memledger.events import Event
    from memledger.live.snapshot import Snapshot
    from memledger.postmortem.doing import Doing
    from memledger.postmortem.incident import OomReport
    from memledger.postmortem.symptom import Symptoms
    from memledger.postmortem.torch_snapshot import TorchSnapshot

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
    type=click.Choice(["text", "json", "markdown", "html"]),
    default="text",
    help="How to write the report.",
)
@HTML
@click.option(
    "--snapshot-pickle",
    "pickles",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A PyTorch memory snapshot; one among FILES is recognised as well. Repeatable.",
)
@click.option(
    "--collect",
    type=click.Path(path_type=Path),
    metavar="FILE|FOLDER",
    help="Report nothing; keep FILES and what this machine shows, masked, in one archive (.tar.gz) for somebody else.",
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
    html: Path | None,
    pickles: tuple[Path, ...],
    collect: Path | None,
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
    if html is not None or format_ == "html":
        from memledger.cli import html_output

        html_output.check(format_, html)
    if collect is not None:
        if html is not None:
            raise click.UsageError("--collect reports nothing: it takes no --html.")
        return _collect(collect, files, format_, look_here=not no_live)
    if not files and not pickles:
        raise click.UsageError("Give what the server left behind: memledger oom server.log dmesg.txt (or - for stdin).")
    files, pickles, machine_files = _told_apart(files, pickles)
    snapshots, problems = _snapshots(pickles)
    machines, unread = _machines(machine_files)
    result, symptoms, doing = _read(files, rule_files, gpu_total, model_config, look_here=not no_live)
    if machines:
        result, symptoms = _beside(result, symptoms, machines)
    report = incidents.assembled(
        result, symptoms, model_config, look_here=not no_live, doing=doing, snapshots=snapshots
    )
    problems += unread + result.problems
    known = bool(report.incidents or report.servers or symptoms.found or snapshots)
    if format_ == "json":
        from memledger.cli import output
        from memledger.report.oom_json import encode

        output.write_bytes(encode(report))
    elif known:
        _show(report, format_, width, no_color, everything=everything, evidence=evidence)
    if known and (html is not None or format_ == "html"):
        from memledger.cli import html_output
        from memledger.report import html_oom

        html_output.write(lambda: html_oom.page(report, everything=everything), format_, html)
    for problem in problems:
        app.say(f"memledger: {problem}")
    if problems:
        return app.UNREADABLE
    if known:
        return app.DONE
    for sentence in _nothing(report, result.heads):
        app.say(f"memledger: {sentence}")
    return app.NOTHING_RECOGNISED


def _collect(target: Path, files: Sequence[str], format_: str, *, look_here: bool) -> int:
    """Write the archive and say what is in it."""
    from memledger.cli import output
    from memledger.postmortem.collect import CollectError, collect

    if format_ != "text" or "-" in files:
        raise click.UsageError("--collect keeps files (not standard input) and says so in text.")
    try:
        path, kept = collect(target, files, look_here=look_here)
    except CollectError as error:
        app.say(f"memledger: {error}.")
        return app.UNREADABLE
    lines = [f"{path}", ""]
    for one in kept:
        lines.append(f"  {one.source}: {one.file or 'not kept'}{f' ({one.reason})' if one.reason else ''}")
    output.write("\n".join([*lines, "", "Secrets are masked line by line; look through it before you pass it on.", ""]))
    missing = [name for name, one in zip(files, kept, strict=False) if one.file is None]
    return app.UNREADABLE if missing else app.DONE


def _told_apart(
    files: Sequence[str], pickles: Sequence[Path]
) -> tuple[tuple[str, ...], tuple[Path, ...], tuple[str, ...]]:
    """The logs, the files that begin as a pickle does, and those that are a machine's snapshot."""
    from memledger.opening import open_file
    from memledger.postmortem.machine import HEAD_BYTES, looks_like_one
    from memledger.postmortem.torch_snapshot import looks_like_pickle

    def head_of(name: str) -> bytes:
        path = Path(name)
        try:
            if name == "-" or not path.is_file():
                return b""
            with open_file(path) as file:
                return file.read(HEAD_BYTES)
        except (OSError, ValueError):
            return b""  # what can't be opened is said where it is read

    heads = {name: head_of(name) for name in files}
    found = [name for name in files if looks_like_pickle(heads[name])]
    machines = [name for name in files if looks_like_one(heads[name])]
    logs = tuple(name for name in files if name not in found and name not in machines)
    return logs, (*pickles, *(Path(name) for name in found)), tuple(dict.fromkeys(machines))


def _machines(files: Sequence[str]) -> tuple[tuple[tuple[str, Snapshot], ...], tuple[str, ...]]:
    """The machines' snapshots that can be read, and one sentence on each that can't."""
    if not files:
        return (), ()
    from memledger.live import snapshot

    read = []
    problems = []
    for name in files:
        try:
            read.append((name, snapshot.read(name)))
        except snapshot.SnapshotError as error:
            problems.append(str(error))
    return tuple(read), tuple(problems)


def _beside(
    result: ReadResult, symptoms: Symptoms, machines: Sequence[tuple[str, Snapshot]]
) -> tuple[ReadResult, Symptoms]:
    """The inputs with the machines' snapshots among them, and the symptoms with what the driver listed there."""
    from memledger.ledger import Input
    from memledger.postmortem.machine import MARK, symptoms_of
    from memledger.sanitize import clean

    first = len(result.report.inputs)
    inputs = tuple(Input(name, Path(name).stat().st_size, 0) for name, _ in machines)
    more = [
        one for number, (name, seen) in enumerate(machines, first) for one in symptoms_of(clean(name), seen, number)
    ]
    report = msgspec.structs.replace(result.report, inputs=(*result.report.inputs, *inputs))
    heads = (*result.heads, *(MARK for _ in machines))
    return msgspec.structs.replace(result, report=report, heads=heads), msgspec.structs.replace(
        symptoms, found=(*symptoms.found, *more)
    )


def _snapshots(pickles: Sequence[Path]) -> tuple[tuple[TorchSnapshot, ...], tuple[str, ...]]:
    """The memory snapshots that can be read, and one sentence on each that can't."""
    if not pickles:
        return (), ()
    from memledger.postmortem import torch_snapshot

    read: list[TorchSnapshot] = []
    problems = []
    for path in dict.fromkeys(pickles):
        try:
            read.append(torch_snapshot.read(path))
        except torch_snapshot.SnapshotPickleError as error:
            problems.append(str(error))
    return tuple(read), tuple(problems)


def _read(
    files: Sequence[str],
    rule_files: Sequence[str],
    gpu_total: Total | None,
    model_config: Path | None,
    *,
    look_here: bool,
) -> tuple[ReadResult, Symptoms, Doing]:
    """All inputs, once: the ledger of every start, the symptoms of what failed, and what the servers did then."""
    from memledger.cli import reading
    from memledger.postmortem.doing import Doing
    from memledger.postmortem.facts import SymptomLog

    log, doing = SymptomLog(), Doing()

    def take(event: Event) -> None:
        log.feed(event)
        doing.feed(event)

    result = reading.read(
        files,
        [Path(name) for name in rule_files],
        gpu_total,
        model_config=model_config,
        look_here=look_here,
        tap=take,
    )
    return result, log.symptoms(), doing


def _show(
    report: OomReport, format_: str, width: int | None, no_color: bool, *, everything: bool, evidence: bool
) -> None:
    from memledger.cli import output

    if format_ == "markdown":
        from memledger.report import oom_markdown

        output.write(oom_markdown.render(report, everything=everything, evidence=evidence))
    elif format_ == "text":
        from memledger.report import oom_text

        output.write(oom_text.render(report, output.style(width, no_color), everything=everything, evidence=evidence))


def _nothing(report: OomReport, heads: Sequence[bytes]) -> list[str]:
    """What to say where nothing was recognised: what each input seems to be, and what was looked for."""
    from memledger.lookalike import describe, spoken_of
    from memledger.sanitize import clean

    unread = spoken_of(report.unrecognized.examples, [item.path for item in report.inputs])
    sentences = [] if unread is None else [unread]
    for item, head in zip(report.inputs, heads, strict=True):
        name = "standard input" if item.path == "-" else clean(item.path.encode("utf-8", "replace").decode())
        sentences.append(f"{name}: nothing of a failure in it; it looks like {describe(head, item.bytes)}.")
        sentences += [clean(note.encode("utf-8", "replace").decode()) for note in item.notes]
    return [*sentences, f"Looked for {'; '.join(LOOKED_FOR)}."]
