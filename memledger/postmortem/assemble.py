"""Symptoms and servers to incidents: one root cause for each failure, what followed from it, and where it happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from memledger.ledger import Report, Server
from memledger.model.architecture import Architecture
from memledger.pipeline import Reading
from memledger.postmortem import causes, codes, decode, figures, host, leftover, phase, pieces, remedy
from memledger.postmortem.doing import Doing, phase_of_step
from memledger.postmortem.grouping import FRAME_LINES, Group, Grouped
from memledger.postmortem.incident import Candidate, Decoded, Incident, Link, Moment, Numbers, Phase
from memledger.postmortem.symptom import Frame, Symptom, Symptoms
from memledger.postmortem.torch_snapshot import TorchSnapshot
from memledger.prefix import text_after_prefix

ArchitectureOf = Callable[[Server], Architecture | None]

MOST_INCIDENTS: Final = 50
MOST_LINKS: Final = 12
MOST_ALIKE: Final = 60
"""Characters, without digits, by which lines of one rule are told apart."""

_DIGITS: Final = re.compile(r"\d+")
_STAGES: Final = {
    "init": "in use before loading",
    "graphs": "CUDA graphs",
    "warmup": "warm-up",
    "final": "after the start",
}
"""The stages whose names say less to a reader than these words."""
_COLLECT: Final = (
    "the whole log from the start of the server (`memledger oom LOG`), not the last lines only",
    "nvidia-smi at the moment of the failure, or right after, on the host",
    "dmesg -T of the machine, kubectl describe pod of the container",
)


def incidents(
    reading: Reading,
    symptoms: Symptoms,
    architecture_of: ArchitectureOf | None = None,
    doing: Doing | None = None,
    snapshots: Sequence[TorchSnapshot] = (),
) -> tuple[Incident, ...]:
    """Every failure of the inputs, those that ended a server first, then in order.

    Args:
        reading: the report on the same inputs (servers with their ledgers).
        symptoms: what their lines say about failures.
        architecture_of: gives the model of a server where it is known, for telling what was asked for.
        doing: what the servers did right before; fed with the same events as the symptoms.
        snapshots: torch's memory snapshots beside the inputs: evidence for the failure that they are of.
    """
    grouped = Grouped(reading.report, symptoms.found)
    groups = [group for group in grouped.groups if not group.went_on] or grouped.groups[:1]
    found = [
        _incident(reading.report, grouped.beside(group), group, architecture_of, doing, snapshots)
        for group in groups[:MOST_INCIDENTS]
    ]
    return tuple(sorted(found, key=lambda one: (not one.fatal, one.kind == "not_device_memory")))


def _incident(
    report: Report,
    beside: Sequence[Symptom],
    group: Group,
    architecture_of: ArchitectureOf | None,
    doing: Doing | None,
    snapshots: Sequence[TorchSnapshot],
) -> Incident:
    root = group.first
    unused = pieces.of(root, snapshots)
    server = report.servers[group.server] if group.server is not None else None
    frames = _frames(root, beside)
    numbers = figures.numbers_of(root)
    when, told = phase.of(root, frames, server)
    state = doing.at(root, server) if doing is not None else None
    if when in {"serving", "unknown"} and (step := phase_of_step(state, server)) is not None:
        when, told = step, "the crash dump's count of tokens"
    cause = causes.retried(server) if group.went_on else causes.judge(root, numbers, when, frames, server, unused)
    when = _refined(when, cause)
    chain = _chain(group, beside)
    candidates = _candidates(report, group, root, numbers, cause)
    return Incident(
        kind=cause.kind,
        phase=when,
        confidence=cause.confidence,
        cause=cause.text,
        server=group.server,
        at=root.time,
        fatal=_fatal(root, server, beside, chain),
        device_memory=cause.device_memory,
        ranks=_ranks(group.roots),
        numbers=numbers,
        request=_request(root, server, frames, architecture_of),
        state=state,
        holders=figures.holders_of(root, numbers) or host.holders(root, beside),
        findings=tuple(f for f in server.findings if f.code.startswith("ML2")) if server is not None else (),
        evidence=root.evidence,
        chain=chain,
        timeline=_timeline(server, root),
        candidates=candidates,
        advice=remedy.figured(cause, root, numbers, server, state),
        collect=_COLLECT if cause.confidence <= 0.5 else (),
        notes=(
            *root.notes,
            *(host.said(root, beside) if cause.kind == "host_memory" else ()),
            *((unused.sentence,) if unused is not None else ()),
            *((f"Taken as one death: {'; '.join(group.joined)}.",) if group.joined else ()),
            *((group.loose,) if group.loose else ()),
            *figures.notes_of(numbers),
        ),
        basis=cause.basis if not told or cause.basis != "where it happened" else told,
        code=codes.code_of(cause, root, when, candidates),
    )


def _candidates(
    report: Report, group: Group, root: Symptom, numbers: Numbers, cause: causes.Cause
) -> tuple[Candidate, ...]:
    """What the input leaves open; a start before this one, whose workers may be the other process, comes first."""
    several = _several(cause)
    if cause.kind != "other_process":
        return several
    before = leftover.previous_start(report, group.server, root, numbers)
    return (before, *several) if before is not None else several


def _several(cause: causes.Cause) -> tuple[Candidate, ...]:
    """The candidates, the conclusion itself first; none where the input decides."""
    if not cause.candidates:
        return ()
    if any(c.kind == cause.kind for c in cause.candidates):
        return cause.candidates
    return (Candidate(cause.kind, cause.text), *cause.candidates)


def _refined(when: Phase, cause: causes.Cause) -> Phase:
    """A phase that was not told, or only that it was serving, as the cause tells it."""
    if cause.kind in {"prefill", "decode"} and when in {"unknown", "serving"} and cause.confidence >= 0.5:
        return "prefill" if cause.kind == "prefill" else "decode"
    if cause.kind == "host_memory" and when == "unknown":
        return "host"
    return when


def _frames(root: Symptom, beside: Sequence[Symptom]) -> tuple[Frame, ...]:
    """The traceback of the failure: its own, else those of lines near it."""
    if root.frames:
        return root.frames
    near = [s for s in beside if s.frames and s.input == root.input and abs(s.line - root.line) <= FRAME_LINES]
    same = [s for s in near if s.prefix.ranks == root.prefix.ranks] or near
    return same[0].frames if same else ()


def _fatal(root: Symptom, server: Server | None, beside: Sequence[Symptom], chain: Sequence[Link]) -> bool | None:
    if (
        root.role == "consequence"
        or any(link.role == "consequence" for link in chain)
        or (server is not None and server.state == "failed")
    ):
        return True
    if server is not None and (
        root.kind in host.KILLS or (server.state == "serving" and root.kind in {"exit_code", "container_exit"})
    ):
        return True
    if root.kind == "allocator_retry" and server is not None and server.state == "serving":
        return False
    return False if any(s.kind == "recovered" for s in beside) else None


def _chain(group: Group, beside: Sequence[Symptom]) -> tuple[Link, ...]:
    """The failure, then every kind of consequence once, in order."""
    root = group.first
    links = [Link(root.message, "cause", root.time, root.repeats + 1, root.evidence)]
    later: dict[tuple[str, str], Link] = {}
    others = [s for s in group.roots if s is not root and s.kind != root.kind]
    for symptom in [*others, *(s for s in beside if s.role == "consequence" and s is not root)]:
        for link in _steps(symptom):
            key = (symptom.rule, _DIGITS.sub("", link.what)[:MOST_ALIKE])
            known = later.get(key)
            if known is not None:
                later[key] = msgspec.structs.replace(known, times=known.times + link.times)
            elif len(later) < MOST_LINKS:
                later[key] = link
    return (*links, *later.values())


def _steps(symptom: Symptom) -> list[Link]:
    """One step for each line of a symptom that is kept: an engine's end is told by each of its processes in other words."""
    if len(symptom.evidence) < 2:
        return [Link(symptom.message, "consequence", symptom.time, symptom.repeats + 1, symptom.evidence)]
    rest = symptom.repeats + 1 - len(symptom.evidence)
    texts = [text_after_prefix(line.text) for line in symptom.evidence]
    first = Link(texts[0], "consequence", symptom.time, 1 + max(0, rest), symptom.evidence[:1])
    lines = zip(texts[1:], symptom.evidence[1:], strict=True)
    return [first, *(Link(text, "consequence", None, 1, (line,)) for text, line in lines)]


def _ranks(roots: Sequence[Symptom]) -> tuple[str, ...]:
    """The ranks that failed alike, by their labels, else by the device that the process names."""
    labels = []
    for symptom in roots:
        named = [
            f"rank {value}" if name == "rank" else f"{name.upper()}{value}"
            for name, value in symptom.prefix.ranks.items()
        ]
        index = symptom.counts.get("gpu_index")
        label = " ".join(named) or (f"GPU {int(index)}" if index is not None else "")
        if label and label not in labels:
            labels.append(label)
    return tuple(labels)


def _request(
    root: Symptom, server: Server | None, frames: Sequence[Frame], architecture_of: ArchitectureOf | None
) -> Decoded | None:
    """What was asked for, where the arithmetic is exact."""
    asked = root.amounts.get("requested_bytes")
    if asked is None or root.kind not in {"torch_oom", "torch_limit", "allocator_retry"}:
        return None
    if server is None:
        told = decode.request(asked)
    else:
        architecture = architecture_of(server) if architecture_of is not None else None
        told = decode.decode(asked, decode.known_of(server, architecture), [f.function for f in frames if f.function])
    return Decoded(told.text, len(told.candidates) == 1, told.least_bytes, told.most_bytes)


def _timeline(server: Server | None, root: Symptom) -> tuple[Moment, ...]:
    """The start's stages, each with what it took, then the failure."""
    failed = Moment(root.time, root.message, free_bytes=_bytes(root, "free_bytes"), evidence=root.evidence)
    if server is None or not server.ranks:
        return (failed,)
    ranks = {name: value for name, value in root.prefix.ranks.items() if name in {"dp", "pp", "tp", "ep"}}
    rank = next(
        (r for r in server.ranks if ranks and all(getattr(r, name) == value for name, value in ranks.items())),
        server.ranks[0],
    )
    if server.framework == "vllm":
        # Its stages are the budget's, no readings of free memory: what it took is what it printed.
        moments = [
            Moment(None, entry.account.replace("_", " ").replace("/", ": "), entry.bytes, None, entry.evidence)
            for entry in rank.entries
            if entry.basis == "logged" and entry.account not in {"free", "reserve", "released"}
        ]
        return (*moments, failed)
    moments = [
        Moment(
            None,
            _STAGES.get(stage.name, stage.name.replace("_", " ")),
            stage.free_before_bytes - stage.free_after_bytes
            if stage.free_before_bytes is not None and stage.free_after_bytes is not None
            else None,
            stage.free_after_bytes,
        )
        for stage in rank.stages
    ]
    return (*moments, failed)


def _bytes(symptom: Symptom, name: str) -> int | None:
    amount = symptom.amounts.get(name)
    return amount.bytes if amount is not None else None
