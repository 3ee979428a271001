"""One file to its rows, whatever it is: the work of every engine. Never an exception, always rows."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final, Literal

import msgspec

from memledger import pipeline
from memledger.conclude import complete
from memledger.events import Event
from memledger.fleet import rows as made
from memledger.fleet.columns import Row
from memledger.fleet.limits import TimeLimitError, time_limit
from memledger.grammar import RuleSet, load_rules
from memledger.ledger import Report, Server
from memledger.postmortem.incident import Incident
from memledger.sanitize import clean

Status = Literal[
    "ok", "partial", "nothing_recognised", "unreadable", "time_limit", "memory_limit", "crashed", "internal_error"
]
GOOD: Final = frozenset({"ok", "partial", "nothing_recognised"})
"""Of a file that was read."""


class Settings(msgspec.Struct, frozen=True):
    """What the rows depend on beside the file, and what a file may take (seconds, bytes)."""

    rule_files: tuple[str, ...] = ()
    gpu_total: str | None = None
    model_config: str | None = None
    time_limit_s: float = 300.0
    memory_limit_bytes: int = 2**30


class Outcome(msgspec.Struct, frozen=True):
    """What became of a file. `rows` is JSON as it was written: it is passed on, not read again."""

    status: Status
    rows: msgspec.Raw


class Work(msgspec.Struct, frozen=True):
    """A file to be read; `size` is None where it is not known."""

    name: str
    size: int | None = None


def outcome(status: Status, rows: list[Row]) -> Outcome:
    """An outcome from its rows."""
    return Outcome(status, msgspec.Raw(msgspec.json.encode(rows)))


def failure(work: Work, status: Status, error: str) -> Outcome:
    """The outcome of a file that gave nothing."""
    return outcome(status, made.failed(work.name, work.size, status, error))


def read(work: Work, settings: Settings) -> Outcome:
    """Read one file within its time, and give its rows."""
    try:
        with time_limit(settings.time_limit_s):
            return _read(work, settings)
    except TimeLimitError:
        return failure(work, "time_limit", time_words(settings))
    except MemoryError:
        return failure(work, "memory_limit", memory_words(settings))
    except Exception as error:
        # A fault of ours costs one file, not the fleet; the row says which.
        return failure(
            work, "internal_error", f"internal error: {type(error).__name__}: {clean(str(error))}; please report it."
        )


def time_words(settings: Settings) -> str:
    """What a row says of a file that took too long."""
    return f"reading took longer than {settings.time_limit_s:g} s (--time-limit)."


def memory_words(settings: Settings) -> str:
    """What a row says of a file that took too much memory."""
    return f"reading took more than {settings.memory_limit_bytes / 2**20:,.0f} MiB of memory (--memory-limit)."


def is_remote(name: str) -> bool:
    """Whether a name is a URL (`s3://`, `zip://...::file://...`) and no path of this machine."""
    scheme, found, _ = name.partition("://")
    return bool(found) and scheme[:1].isalpha() and all(c.isalnum() or c in "+.-:" for c in scheme)


@functools.lru_cache(maxsize=4)
def _rules(files: tuple[str, ...]) -> RuleSet:
    return load_rules([Path(name) for name in files])


def prepare(settings: Settings) -> None:
    """Load what every file needs, once per process.

    Raises:
        memledger.grammar.GrammarError: a rule file can't be used.
    """
    from memledger.postmortem import assemble, listed  # noqa: F401 - imported before the memory is limited

    _rules(settings.rule_files)


def _read(work: Work, settings: Settings) -> Outcome:
    from memledger.postmortem.doing import Doing
    from memledger.postmortem.facts import SymptomLog

    log, doing = SymptomLog(), Doing()

    def tap(event: Event) -> None:
        log.feed(event)
        doing.feed(event)

    opens = None
    if is_remote(work.name):
        from memledger.fleet.remote import open_remote

        opens = open_remote
    got = pipeline.read([work.name], _rules(settings.rule_files), tap=tap, opens=opens)
    if not got.report.inputs:
        return failure(work, "unreadable", " ".join(got.problems))
    report = _completed(got.report, settings)
    incidents = _incidents(msgspec.structs.replace(got, report=report), log, doing, settings)
    status, error = _status(got, bool(incidents))
    return outcome(status, made.rows(work.name, work.size, status, error, report, incidents))


def _status(got: pipeline.Reading, incidents: bool) -> tuple[Status, str | None]:
    if not got.report.servers and not incidents:
        from memledger.lookalike import describe

        looks = describe(got.heads[0], got.report.inputs[0].bytes)
        return "nothing_recognised", f"nothing of SGLang or vLLM in it; it looks like {looks}."
    log = got.report.sources[0]
    if log.status == "partial" and got.report.servers:
        return "partial", log.reason
    return "ok", None


def _completed(report: Report, settings: Settings) -> Report:
    total = None
    if settings.gpu_total is not None:
        from memledger.cards import parse_total

        total = parse_total(settings.gpu_total)
    return complete(report, total, Path(settings.model_config) if settings.model_config else None)


def _incidents(got: pipeline.Reading, log: object, doing: object, settings: Settings) -> tuple[Incident, ...]:
    from memledger.model.architecture import Architecture
    from memledger.postmortem.assemble import incidents
    from memledger.postmortem.doing import Doing
    from memledger.postmortem.facts import SymptomLog
    from memledger.postmortem.listed import noted

    assert isinstance(log, SymptomLog)
    assert isinstance(doing, Doing)
    symptoms = log.symptoms()

    def architecture_of(server: Server) -> Architecture | None:
        from memledger.model.find import ModelConfigError, find

        config = Path(settings.model_config) if settings.model_config else None
        if server.model is None and config is None:
            return None
        try:
            return find(server.model, config=config, look_here=False).architecture
        except ModelConfigError:
            return None  # said in the report's sources

    return noted(incidents(got, symptoms, architecture_of, doing), symptoms)
