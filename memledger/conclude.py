"""From a report as read to one that concludes: closed against the card, compared with the model's arithmetic, with its findings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memledger import findings
from memledger.ledger import NO_MODEL, Report, Source

if TYPE_CHECKING:
    from memledger.cards import Total


def complete(
    report: Report,
    gpu_total: Total | None,
    model_config: Path | None = None,
    *,
    look_here: bool = False,
    refused: str | None = None,
) -> Report:
    """The report closed against the card where one was given, compared with the model's arithmetic, with its findings.

    `refused`: why the model's config that the user named can't be used; the report is then without the model.
    """
    if gpu_total is not None:
        from memledger.device import with_device_total

        servers = tuple(
            with_device_total(s, gpu_total.amount, gpu_total.basis, gpu_total.label) for s in report.servers
        )
        report = msgspec.structs.replace(report, servers=servers)
    if refused is not None:
        return findings.attach(
            msgspec.structs.replace(report, sources=(*report.sources, Source("model", "unavailable", refused)))
        )
    if model_config is None and not any(server.model for server in report.servers):
        # The model's arithmetic is not imported where there is no model.
        nothing = Source("model", "unavailable", NO_MODEL if report.servers else "no server in the input")
        return findings.attach(msgspec.structs.replace(report, sources=(*report.sources, nothing)))
    return _with_model(report, model_config, look_here=look_here)


def _with_model(report: Report, model_config: Path | None, *, look_here: bool) -> Report:
    from memledger import modelled
    from memledger.findings.figures import Context

    found = modelled.architectures(report, model_config, look_here=look_here)
    report = modelled.checked(report, found)
    known = {id(server): Context(one.architecture) for server, one in zip(report.servers, found, strict=True)}
    # Findings judge the pool as it was printed; only then is it divided.
    return modelled.split(findings.attach(report, lambda server: known[id(server)]))
