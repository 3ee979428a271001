"""Symptoms and servers to incidents: one root cause for each failure, what followed from it, and where it happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Final

import msgspec

from memledger.frameworks.kernel import is_of_a_server
from memledger.ledger import Report, Server
from memledger.model.architecture import Architecture
from memledger.pipeline import Reading
from memledger.postmortem import causes, decode, figures, host, leftover, phase, remedy
from memledger.postmortem.doing import Doing, phase_of_step
from memledger.postmortem.incident import Candidate, Decoded, Incident, Link, Moment, Numbers, Phase
from memledger.postmortem.symptom import Frame, Symptom, Symptoms
from memledger.prefix import text_after_prefix

ArchitectureOf = Callable[[Server], Architecture | None]

NEAR_LINES: Final = 2000
NEAR_SECONDS: Final = 300.0
"""Failures farther apart than both are incidents of their own."""
FRAME_LINES: Final = 400
"""How far from the failing line a traceback of the same input may stand."""
SAME_DEVICE: Final = 0.02
"""Share of a device's memory by which two messages may print its total differently (GiB of two decimals, ECC, MIG aside)."""
MOST_INCIDENTS: Final = 50
MOST_LINKS: Final = 12
MOST_ALIKE: Final = 60
"""Characters, without digits, by which lines of one rule are told apart."""

_ENGINES: Final = frozenset({"sglang", "vllm"})
_DIGITS: Final = re.compile(r"\d+")
_HOST_KILLS: Final = frozenset(
    {"kernel_oom", "cgroup_oom", "container_killed", "oomd", "slurm_oom", "ray_memory_monitor", "evicted", "unit_oom"}
)
_OF_THE_HOST: Final = _HOST_KILLS | {"host_alloc", "shm_full", "pinned_failed"}
_OF_A_POOL: Final = frozenset({"engine_refusal", "engine_runtime"})
"""A refusal may wrap an allocation that failed before it; it leads to none after it."""
_OF_THE_DEVICE: Final = frozenset({"torch_oom", "torch_limit", "cuda_error", "wake_up_failed", "allocation_failed"})
_OF_A_START: Final = frozenset({"startup_check"})
_WEAK: Final = {
    "exit_code": 3,
    "cuda_error": 1,
    "nvml_hides_oom": 1,
    "container_killed": 1,
    "unit_oom": 2,
    "startup_check": 0,
}
"""Symptoms that others explain: of several in one failure the strongest is the cause, then the first."""
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
) -> tuple[Incident, ...]:
    """Every failure of the inputs, those that ended a server first, then in order.

    Args:
        reading: the report on the same inputs (servers with their ledgers).
        symptoms: what their lines say about failures.
        architecture_of: gives the model of a server where it is known, for telling what was asked for.
        doing: what the servers did right before; fed with the same events as the symptoms.
    """
    groups = _merged(_groups(reading.report, symptoms), reading.report.servers)
    told = [
        group for group in groups if group.first.kind != "allocator_retry" or _is_end(reading.report, group, symptoms)
    ]
    groups = told or groups[:1]
    found = [_incident(reading.report, symptoms, group, architecture_of, doing) for group in groups[:MOST_INCIDENTS]]
    return tuple(sorted(found, key=lambda one: (not one.fatal, one.kind == "not_device_memory")))


class _Group(msgspec.Struct):
    """Root symptoms of one failure; `server` is the index of the start that they belong to."""

    server: int | None
    roots: list[Symptom]

    @property
    def first(self) -> Symptom:
        """The cause: the strongest symptom, of these the first."""
        return min(self.roots, key=lambda s: (s.role != "cause", _WEAK.get(s.kind, 0), s.input, s.line))


def _groups(report: Report, symptoms: Symptoms) -> list[_Group]:
    """The failures in the inputs."""
    found: list[_Group] = []
    for key, members in _by_start(report, symptoms.found).items():
        for root in _roots(members):
            last = found[-1] if found else None
            if (
                last is not None
                and last.server == key[1]
                and last.roots[-1].input == root.input
                and _near(last.roots[-1], root)
                and not any(_apart(known, root) for known in last.roots)
            ):
                last.roots.append(root)
            else:
                found.append(_Group(key[1], [root]))
    return found


def _by_start(report: Report, found: Iterable[Symptom]) -> dict[tuple[int, int | None], list[Symptom]]:
    members: dict[tuple[int, int | None], list[Symptom]] = {}
    for symptom in found:
        members.setdefault((symptom.input, _server_of(report, symptom)), []).append(symptom)
    return members


def _server_of(report: Report, symptom: Symptom) -> int | None:
    """The start that a line belongs to: the last one of its input that begins before it.

    Where several servers write into one input, it is one of the engine, and of the container or host, that the line names.
    """
    before = [
        index
        for index, server in enumerate(report.servers)
        if any(span.input == symptom.input and span.first_line <= symptom.line for span in server.span)
    ]
    engine = symptom.rule.partition(".")[0]
    engine = engine if engine in _ENGINES else symptom.prefix.style or ""
    same = [i for i in before if report.servers[i].framework == engine] if engine in _ENGINES else before
    source = symptom.prefix.source
    labelled = [i for i in same or before if source is not None and report.servers[i].label == source]
    found = labelled or same or before
    return found[-1] if found else None


def _roots(members: Sequence[Symptom]) -> list[Symptom]:
    """The symptoms that may be causes; where no line names one, what stands beside a failure, then what only looks like one."""
    named = [s for s in members if s.role == "cause"]
    faults = [s for s in members if s.kind == "illegal_access"]
    if faults and all(s.kind == "exit_code" for s in named):
        # A kernel's fault before the end explains the end.
        named = [s for s in named if not any(0 < s.line - fault.line <= FRAME_LINES for fault in faults)]
    if named:
        return named
    ended = any(s.role == "consequence" or s.kind == "exception" for s in members)
    if ended and not any(s.kind == "recovered" for s in members):
        tried = [s for s in members if s.kind == "allocator_retry"]
        if tried:
            return tried[:1]
    summaries = [s for s in members if s.kind == "memory_summary" and s.counts.get("ooms")]
    if summaries:
        return summaries[:1]
    alike = [s for s in members if s.role == "not_memory"] or [s for s in members if _ends_processes(s)]
    # A try that failed and went on is worth a word where nothing else is said.
    return alike or [s for s in members if s.kind == "allocator_retry"][:1]


def _ends_processes(symptom: Symptom) -> bool:
    return symptom.kind == "xid" and int(symptom.counts.get("xid", 0)) in causes.XIDS


def _near(before: Symptom, after: Symptom) -> bool:
    """Whether two lines belong to one failure: close in the log, or in time."""
    apart = _seconds(before.time, after.time)
    if apart is not None:
        return apart <= NEAR_SECONDS
    return after.line - before.line <= NEAR_LINES


def _apart(one: Symptom, other: Symptom) -> bool:
    """Whether a line and a later one can't be of one failure, however close they stand: logs that were joined have no start between them."""
    engines = {s.rule.partition(".")[0] for s in (one, other)} & _ENGINES
    if len(engines) > 1:
        return True
    if "exit_code" in (one.kind, other.kind):
        return False
    # Neither leads to the other: the kernel ends no process for the GPU's memory, a refused start allocates nothing later.
    for alone in (_OF_THE_HOST, _OF_A_START):
        if (one.kind in alone) != (other.kind in alone):
            return True
    if one.kind in _OF_A_POOL and other.kind in _OF_THE_DEVICE:
        return True
    totals = [amount.bytes for s in (one, other) if (amount := s.amounts.get("total_bytes")) is not None]
    return len(totals) == 2 and abs(totals[0] - totals[1]) > SAME_DEVICE * max(totals)


def _seconds(before: str | None, after: str | None) -> float | None:
    if before is None or after is None:
        return None
    try:
        return abs((datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds())
    except (ValueError, TypeError):
        return None


def _merged(groups: list[_Group], servers: Sequence[Server]) -> list[_Group]:
    """A server that was killed and the kernel's (or container's) line that says by whom are one failure."""
    for kill in groups:
        if kill.server is None:
            kill.server = host.victim_of(kill.first, servers)
    kills = [g for g in groups if g.first.kind in _HOST_KILLS and all(s.kind in _HOST_KILLS for s in g.roots)]
    ends = [g for g in groups if all(s.kind == "exit_code" for s in g.roots)]
    gone: list[_Group] = []
    for end in ends:
        fitting = [k for k in kills if k is not end and _killed(k, end)]
        named = [k for k in fitting if k.server is not None and k.server == end.server]
        if not named and len(fitting) != 1:
            # One kernel line and what the container says of the same death; more are deaths of their own.
            named = [k for k in fitting if k.first.kind in host.KILLS]
            if len(named) != 1 or len(fitting) > 2:
                continue
        kill = (named or fitting)[0]
        kill.server = kill.server if kill.server is not None else end.server
        kill.roots.extend(end.roots)
        gone.append(end)
        for other in fitting:
            if other is not kill and other not in gone and other.first.kind == "container_killed" and len(ends) == 1:
                kill.roots.extend(other.roots)
                gone.append(other)
    return [g for g in groups if not any(g is other for other in gone)]


def _killed(kill: _Group, end: _Group) -> bool:
    """Whether a kill may be the end that a server's log speaks of: of one of its processes, and near in time where both tell it."""
    if kill.first.kind in host.KILLS and not is_of_a_server(kill.first.words.get("name")):
        return False
    if kill.server is not None and end.server is not None and kill.server != end.server:
        return False
    apart = _seconds(kill.first.time, end.first.time)
    return apart is None or apart <= NEAR_SECONDS


def _incident(
    report: Report,
    symptoms: Symptoms,
    group: _Group,
    architecture_of: ArchitectureOf | None,
    doing: Doing | None,
) -> Incident:
    root = group.first
    server = report.servers[group.server] if group.server is not None else None
    beside = [s for s in symptoms.found if s.input == root.input and _server_of(report, s) == _server_of(report, root)]
    frames = _frames(root, beside)
    numbers = figures.numbers_of(root)
    when, told = phase.of(root, frames, server)
    state = doing.at(root, server) if doing is not None else None
    if when in {"serving", "unknown"} and (step := phase_of_step(state, server)) is not None:
        when, told = step, "the crash dump's count of tokens"
    cause = (
        causes.retried(server)
        if root.kind == "allocator_retry" and not _ended(beside, server)
        else causes.judge(root, numbers, when, frames, server)
    )
    when = _refined(when, cause)
    chain = _chain(group, beside)
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
        candidates=_candidates(report, group, root, numbers, cause),
        advice=remedy.figured(cause, root, numbers, server, state),
        collect=_COLLECT if cause.confidence <= 0.5 else (),
        notes=(
            *root.notes,
            *(host.said(root, beside) if cause.kind == "host_memory" else ()),
            *figures.notes_of(numbers),
        ),
        basis=cause.basis if not told or cause.basis != "where it happened" else told,
    )


def _candidates(
    report: Report, group: _Group, root: Symptom, numbers: Numbers, cause: causes.Cause
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
    near = [s for s in beside if s.frames and abs(s.line - root.line) <= FRAME_LINES]
    same = [s for s in near if s.prefix.ranks == root.prefix.ranks] or near
    return same[0].frames if same else ()


def _fatal(root: Symptom, server: Server | None, beside: Sequence[Symptom], chain: Sequence[Link]) -> bool | None:
    if any(link.role == "consequence" for link in chain) or (server is not None and server.state == "failed"):
        return True
    if server is not None and (root.kind in host.KILLS or (server.state == "serving" and root.kind == "exit_code")):
        return True
    if root.kind == "allocator_retry" and server is not None and server.state == "serving":
        return False
    return False if any(s.kind == "recovered" for s in beside) else None


def _is_end(report: Report, group: _Group, symptoms: Symptoms) -> bool:
    root = group.first
    beside = [s for s in symptoms.found if s.input == root.input and _server_of(report, s) == _server_of(report, root)]
    return _ended(beside, report.servers[group.server] if group.server is not None else None)


def _ended(beside: Sequence[Symptom], server: Server | None) -> bool:
    """Whether a process ended by what was said here."""
    told = any(s.role == "consequence" or s.kind == "exception" for s in beside)
    return (told and not any(s.kind == "recovered" for s in beside)) or (
        server is not None and server.state == "failed"
    )


def _chain(group: _Group, beside: Sequence[Symptom]) -> tuple[Link, ...]:
    """The failure, then every kind of consequence once, in order."""
    root = group.first
    links = [Link(root.message, "cause", root.time, root.repeats + 1, root.evidence)]
    later: dict[tuple[str, str], Link] = {}
    others = [s for s in group.roots if s is not root and s.kind != root.kind]
    for symptom in [*others, *(s for s in beside if s.role == "consequence")]:
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
