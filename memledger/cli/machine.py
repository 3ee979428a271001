"""`memledger explain --pid`, `--smi` and of a snapshot: the log's report with the machine beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from memledger import __version__
from memledger.cli import app, reading
from memledger.cli.explain import finish, shown_options
from memledger.cli.options import Asked, Machine
from memledger.cli.reading import ReadResult
from memledger.findings import live as live_findings
from memledger.findings.selection import Selection
from memledger.ledger import Report, Source
from memledger.live.sample import DeviceSample, LiveServer, Sample
from memledger.live.snapshot import SCHEMA, Snapshot, SnapshotError, read, write
from memledger.reconcile import reconcile
from memledger.sanitize import clean


def report_on(files: Sequence[str], machine: Machine, asked: Asked, shown: str) -> int:
    """Sample, read, line up, write; the exit code."""
    if not machine.asked:
        return _from_snapshot(files[0], asked)
    problems: list[str] = []
    sample = _sample(machine, problems)
    server = _server(sample, machine)
    result, taken = _log(files, machine, asked, sample, server)
    result = msgspec.structs.replace(result, problems=(*problems, *result.problems))
    if machine.snapshot is not None:
        taken = msgspec.structs.replace(taken, command=clean(shown, 2000))
        try:
            write(machine.snapshot, taken)
        except SnapshotError as error:
            result = msgspec.structs.replace(result, problems=(*result.problems, str(error)))
    return _show(result, taken, asked, shown)


def _from_snapshot(name: str, asked: Asked) -> int:
    if asked.gpu_total is not None or asked.model_config is not None:
        raise click.UsageError(
            "A snapshot holds the card's size and the model: --gpu-total and --model-config are not used."
        )
    if _is_recording(name):
        return _from_recording(name, asked)
    try:
        taken = read(name)
    except SnapshotError as error:
        return _unreadable(str(error), asked)
    if taken.kind == "ps":
        return _listed(taken, asked)
    if taken.kind != "explain" or taken.report is None:
        app.say(f"memledger: {clean(name)} is a snapshot of `memledger {taken.kind}`: it holds no report to show.")
        return app.NOTHING_RECOGNISED
    return _show(ReadResult(taken.report), taken, asked, taken.command)


def _unreadable(why: str, asked: Asked) -> int:
    app.say(f"memledger: {why}")
    if asked.format_ == "json":
        from memledger.cli import output
        from memledger.report.json import encode

        output.write_bytes(encode(_empty(Source("log", "unavailable", why))))
    return app.UNREADABLE


def _is_recording(name: str) -> bool:
    from memledger.opening import open_file
    from memledger.watch.recording import is_recording

    try:
        with open_file(name) as file:
            return is_recording(file.read(200))
    except (OSError, ValueError):
        return False


def _from_recording(name: str, asked: Asked) -> int:
    """The ledger of the recording's last look, with what grew while it was made."""
    from memledger.watch.board import Board
    from memledger.watch.over_time import OverTime
    from memledger.watch.recording import Reader, RecordingError

    board, over_time, reader = Board(), OverTime(), Reader(name)
    try:
        for event in reader.events():
            board.take(event)
            over_time.take(event, board)
    except RecordingError as error:
        return _unreadable(str(error), asked)
    result = ReadResult(Selection(asked.select, asked.ignore).apply(board.concluded()), tuple(reader.troubles))
    shown = shown_options(asked, f"memledger explain {clean(name)}")
    return finish(result, shown, asked, over_time.history(result.report, board))


def _listed(taken: Snapshot, asked: Asked) -> int:
    """The list of servers that `memledger ps --snapshot` kept."""
    from memledger.cli import ps
    from memledger.report.ps_json import PsReport

    if asked.format_ in {"markdown", "html"} or asked.html is not None:
        raise click.UsageError("A snapshot of memledger ps is shown as text or JSON.")
    sample = taken.sample
    report = PsReport(
        taken.version,
        sample.sources,
        sample.servers,
        devices=sample.devices,
        unreadable_processes=taken.unreadable_processes,
    )
    ps.show(report, asked.format_, asked.width, asked.no_color)
    return app.DONE if sample.servers else app.NOTHING_RECOGNISED


def _show(result: ReadResult, taken: Snapshot, asked: Asked, shown: str) -> int:
    report = reconcile(result.report, taken.sample, pid=taken.pid, own_log=taken.own_log, built=taken.built)
    report = Selection(asked.select, asked.ignore).apply(live_findings.attach(report))
    return finish(msgspec.structs.replace(result, report=report), shown_options(asked, shown), asked)


def _empty(*sources: Source) -> Report:
    return Report(__version__, (), sources, ())


def _sample(machine: Machine, problems: list[str]) -> Sample:
    """What the machine shows; a process that is no server, or a file that can't be read, is a problem in words."""
    if machine.smi is not None:
        return _pasted(machine.smi, problems)
    from memledger.cli.ps import key_from
    from memledger.live import gather
    from memledger.live.attach import AttachError

    assert machine.pid is not None
    try:
        return gather.server_sample(machine.pid, key_from(machine.api_key_env))
    except AttachError as error:
        problems.append(str(error))
        return Sample(taken_at=gather.now(), sources=(Source("proc", "unavailable", str(error)),))


def _pasted(path: Path, problems: list[str]) -> Sample:
    """A saved nvidia-smi; the moment is the paste's own, so that a report on saved files is the same whenever it is made."""
    shown = clean(str(path))
    try:
        devices = _read_smi(path)
    except OSError as error:
        return _no_paste(f"--smi {shown}: {error.strerror or error}", problems)
    except (ValueError, ImportError) as error:
        return _no_paste(f"--smi {shown}: {clean(str(error), 300)}", problems)
    if not devices.devices:
        problems.append(f"--smi {shown}: {devices.source.reason or 'no GPU in it'}")
    return Sample(taken_at=devices.taken_at or "", sources=(devices.source,), devices=devices, host_pids=True)


def _read_smi(path: Path) -> DeviceSample:
    import importlib

    found = importlib.import_module("memledger.live.smi").read(path)
    assert isinstance(found, DeviceSample)
    return found


def _no_paste(why: str, problems: list[str]) -> Sample:
    problems.append(why)
    return Sample(taken_at="", sources=(Source("smi", "unavailable", why),))


def _server(sample: Sample, machine: Machine) -> LiveServer | None:
    return sample.servers[0] if machine.pid is not None and sample.servers else None


def _log(
    files: Sequence[str], machine: Machine, asked: Asked, sample: Sample, server: LiveServer | None
) -> tuple[ReadResult, Snapshot]:
    """The log's report: of the files that were given, else of the log that the server writes, else rebuilt from the server itself."""
    own = not files and server is not None and server.log.path is not None
    names = list(files) if files else [server.log.path] if server is not None and server.log.path is not None else []
    # The process that was asked for may be a thread of the server or the shell that started it.
    pid = server.pid if server is not None else machine.pid
    taken = Snapshot(SCHEMA, __version__, sample, pid=pid, own_log=own)
    if names:
        result = reading.read(
            names,
            [Path(f) for f in asked.rule_files],
            asked.gpu_total,
            model_config=asked.model_config,
            look_here=not asked.no_live,
        )
        started = any(rank.entries for one in result.report.servers for rank in one.ranks)
        if files or started or server is None:
            return result, msgspec.structs.replace(taken, report=result.report)
        read = result.report
        why = f"its log ({clean(names[0])}) holds nothing of a start"
    else:
        read, why = None, ""
    if server is None:
        report = _empty(Source("log", "unavailable", "no log was given"))
        return ReadResult(report), msgspec.structs.replace(taken, report=report)
    from memledger.live import rebuild

    report = rebuild.report(server, sample, model_config=asked.model_config, read=read, why=why)
    # What an unreadable log leaves unknown is said in the report: the server itself was found.
    return ReadResult(report), msgspec.structs.replace(taken, report=report, built=True)
