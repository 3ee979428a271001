"""What `explain` says of a failure in its log: one sentence, and that `memledger oom` says more.

The postmortem is imported only where a line of a failure was met.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from memledger.cli.reading import ReadResult
    from memledger.events import Event
    from memledger.ledger import Server
    from memledger.model.architecture import Architecture
    from memledger.postmortem.doing import Doing
    from memledger.postmortem.facts import SymptomLog
    from memledger.postmortem.incident import Incident, OomReport
    from memledger.postmortem.symptom import Symptoms
    from memledger.postmortem.torch_snapshot import TorchSnapshot

_BEFORE_A_FAILURE: Final = frozenset({"frame", "frame_code", "vllm_frame", "traceback", "traceback_begin", "exception"})
"""Rules whose lines lead to a failure, and are none themselves: the frames say where it happened."""


class FailureTap:
    """Takes the events of a reading from the first on that belongs to a failure; what is before it costs a look."""

    def __init__(self) -> None:
        self._log: SymptomLog | None = None

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if self._log is None:
            if event.rule.kind != "failure" and event.rule.id not in _BEFORE_A_FAILURE:
                return
            from memledger.postmortem.facts import SymptomLog

            self._log = SymptomLog()
        self._log.feed(event)

    def report(self, result: ReadResult, model_config: Path | None, *, look_here: bool) -> OomReport | None:
        """The incidents of what was read; None where no line speaks of a failure on memory."""
        if self._log is None:
            return None
        symptoms = self._log.symptoms()
        if not symptoms.with_role("cause") and not symptoms.with_role("not_memory"):
            return None
        found = assembled(result, symptoms, model_config, look_here=look_here)
        return found if found.incidents else None


def assembled(
    result: ReadResult,
    symptoms: Symptoms,
    model_config: Path | None,
    *,
    look_here: bool,
    doing: Doing | None = None,
    snapshots: tuple[TorchSnapshot, ...] = (),
) -> OomReport:
    """The report on incidents. `snapshots`: torch's memory snapshots, evidence for the failures that they are of."""
    from memledger.pipeline import Reading
    from memledger.postmortem.assemble import incidents
    from memledger.postmortem.incident import OomReport
    from memledger.postmortem.listed import noted

    read = Reading(result.report, result.problems, result.heads)
    architecture_of = _architecture_of(model_config, look_here=look_here)
    found = noted(incidents(read, symptoms, architecture_of, doing, snapshots), symptoms)
    whole = result.report
    return OomReport(whole.version, whole.inputs, whole.sources, found, whole.servers, whole.unrecognized, snapshots)


def _architecture_of(model_config: Path | None, *, look_here: bool) -> Callable[[Server], Architecture | None]:
    def find_of(server: Server) -> Architecture | None:
        # Imported only where an incident asks for a model.
        from memledger.model.find import ModelConfigError, find

        if server.model is None and model_config is None:
            return None
        try:
            return find(server.model, config=model_config, look_here=look_here).architecture
        except ModelConfigError:
            # Said already where the report was completed.
            return None

    return find_of


def sentences(report: OomReport) -> dict[int, str]:
    """For each start with an incident its cause, by the start's place in `servers`: of several the one that ended it."""
    from memledger.report.oom_view import headline

    chosen: dict[int, Incident] = {}
    for one in report.incidents:
        if one.server is None:
            continue
        before = chosen.get(one.server)
        if before is None or (one.fatal and not before.fatal):
            chosen[one.server] = one
    return {server: headline(one) for server, one in chosen.items()}
