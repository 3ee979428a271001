"""Which lines tell of one failure: symptoms grouped into failures, and everything else given to the failure it stands beside.

Several logs may stand in one input, one behind the other and cut anywhere, so that being near is not enough. Two lines
are of one failure where something ties them together (the process id, the time, ranks that ask for the same), or where
nothing that they print contradicts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from memledger.frameworks.torch_oom import seconds_between
from memledger.ledger import Report, Server
from memledger.postmortem import causes, deaths, host
from memledger.postmortem.symptom import Symptom

NEAR_LINES: Final = 2000
NEAR_SECONDS: Final = 300.0
"""Failures farther apart than both are incidents of their own."""
FRAME_LINES: Final = 400
"""How far from the failing line a traceback of the same input may stand."""
SAME_DEVICE: Final = 0.02
"""Share of a device's memory by which two messages may print its total differently (GiB of two decimals, ECC, MIG aside)."""
SAME_STATE: Final = 0.05
"""Share by which a table and a message may differ on what torch had allocated."""
ZONES_SECONDS: Final = 15 * 3600.0
"""More than two time zones are apart."""

_ENGINES: Final = frozenset({"sglang", "vllm"})
_OF_THE_HOST: Final = host.END_OF_PROCESS | {"host_alloc", "shm_full", "pinned_failed"}
_OF_A_POOL: Final = frozenset({"engine_refusal", "engine_runtime"})
"""A refusal may wrap an allocation that failed before it; it leads to none after it."""
_OF_THE_DEVICE: Final = frozenset(
    {"torch_oom", "torch_limit", "cuda_error", "runtime_oom", "wake_up_failed", "allocation_failed"}
)
_OF_A_START: Final = frozenset({"startup_check"})
_WEAK: Final = {
    "exit_code": 3,
    "container_exit": 3,
    "cuda_error": 1,
    "nvml_hides_oom": 1,
    "container_killed": 1,
    "unit_oom": 2,
    "startup_check": 0,
}
"""Symptoms that others explain: of several in one failure the strongest is the cause, then the first."""
_LEADS_TO: Final = frozenset(
    {"kernel_task", "cgroup_usage", "cgroup_name", "oom_invoked", "machine_memory", "swap", "memory_limit"}
)
"""What the kernel prints before the line on the process that it kills, and not after it."""
_ENDS: Final = host.END_OF_PROCESS | {"exit_code", "container_exit"}
_STANDS_ALONE: Final = frozenset(
    {"workspace_overflow", "unreliable", "memory_summary", "allocator_retry", "container_exit"}
)
"""What is a failure of its own where no cause beside it explains it."""


class Group(msgspec.Struct):
    """Root symptoms of one failure; `server` is the index of the start that they belong to.

    `went_on`: a try of torch's allocator that failed, with nothing behind it that ended a process. `joined` says why
    lines of several inputs are taken as one death, `loose` that nothing tells whose death it is.
    """

    server: int | None
    roots: list[Symptom]
    went_on: bool = False
    joined: tuple[str, ...] = ()
    loose: str = ""

    @property
    def first(self) -> Symptom:
        """The cause: the strongest symptom, of these the first."""
        return min(self.roots, key=lambda s: (s.role != "cause", _WEAK.get(s.kind, 0), s.input, s.line))


class Grouped:
    """The failures of the inputs, and for each what else the inputs say beside it."""

    def __init__(self, report: Report, found: Sequence[Symptom]) -> None:
        self._starts = {id(s): server_of(report, s) for s in found}
        self.groups: list[Group] = []
        self._roots: list[tuple[Symptom, Group]] = []
        members = _by_start(found, self._starts)
        for (_, start), same in members.items():
            found_here = _roots(same)
            if not found_here:
                found_here = _silent_end(same, report.servers[start] if start is not None else None)
            for root in found_here or _went_on(same):
                self._add(root, start, went_on=not found_here)
        if not self.groups:
            # Nothing else failed: a fault of a program on the device is the answer then.
            for fault in (s for s in found if s.kind == "xid" and int(s.counts.get("xid", 0)) in causes.PROGRAM_XIDS):
                self._add(fault, self._starts[id(fault)], went_on=False)
        self.groups = _merged(self.groups, report, found)
        self._beside = self._shared(found)
        self._leave_the_dead(report)

    def beside(self, group: Group) -> tuple[Symptom, ...]:
        """Every symptom that stands beside a failure and beside no other one, in order; its own roots included."""
        return tuple(self._beside.get(id(group), ()))

    def _add(self, root: Symptom, start: int | None, *, went_on: bool) -> None:
        for group in reversed(self.groups):
            last = group.roots[-1]
            if group.server != start or last.input != root.input:
                continue
            if any(one_failure(known, root) for known in group.roots) and not any(
                _apart(known, root) for known in group.roots
            ):
                group.roots.append(root)
                return
        self.groups.append(Group(start, [root], went_on))

    def _leave_the_dead(self, report: Report) -> None:
        """A start that has ended fails no more: what stands behind its end, and is of none of its processes, is of none."""
        ended: set[tuple[int, int | None]] = set()
        for group in sorted(self.groups, key=lambda g: (g.roots[0].input, g.roots[0].line)):
            key = (group.roots[0].input, group.server)
            if group.server is not None and key in ended:
                pids = host.pids_of(report.servers[group.server])
                if group.first.prefix.pid not in pids and group.first.counts.get("pid") not in pids:
                    group.server = None
            elif any(s.role == "consequence" for s in self.beside(group)):
                ended.add(key)

    def _shared(self, found: Sequence[Symptom]) -> dict[int, list[Symptom]]:
        """Which symptoms each group is given."""
        roots: dict[tuple[int, int | None], list[tuple[Symptom, Group]]] = {}
        for group in self.groups:
            for root in group.roots:
                roots.setdefault((root.input, self._starts[id(root)]), []).append((root, group))
        for known in roots.values():
            known.sort(key=lambda pair: pair[0].line)
        given: dict[int, list[Symptom]] = {}
        for symptom in found:
            known = roots.get((symptom.input, self._starts[id(symptom)]), [])
            before = next((pair for pair in reversed(known) if pair[0].line <= symptom.line), None)
            after = next((pair for pair in known if pair[0].line > symptom.line), None)
            owner = _owner(symptom, before, after)
            if owner is not None:
                given.setdefault(id(owner), []).append(symptom)
        return given


def _owner(symptom: Symptom, before: tuple[Symptom, Group] | None, after: tuple[Symptom, Group] | None) -> Group | None:
    """Of the failures before and after a line the one that it belongs to: what follows from a failure stands behind it."""
    if before is None or after is None:
        pair = before or after
        return pair[1] if pair is not None else None
    if before[1] is after[1]:
        return before[1]
    if symptom.kind in _LEADS_TO and after[0].kind in host.KILLS:
        return after[1]
    leads = _tied(symptom, after[0]) and not (_tied(before[0], symptom) and not _other_process(before[0], symptom))
    return after[1] if leads or _other_process(before[0], symptom) else before[1]


def _by_start(found: Iterable[Symptom], starts: dict[int, int | None]) -> dict[tuple[int, int | None], list[Symptom]]:
    members: dict[tuple[int, int | None], list[Symptom]] = {}
    for symptom in found:
        members.setdefault((symptom.input, starts[id(symptom)]), []).append(symptom)
    return members


def server_of(report: Report, symptom: Symptom) -> int | None:
    """The start that a line belongs to: the last one of its input that begins before it.

    Where several servers write into one input, it is one of the engine, and of the container or host, that the line names.
    """
    before = [
        index
        for index, server in enumerate(report.servers)
        if any(span.input == symptom.input and span.first_line <= symptom.line for span in server.span)
        and not _foreign(server, symptom)
    ]
    engine = symptom.rule.partition(".")[0]
    engine = engine if engine in _ENGINES else symptom.prefix.style or ""
    same = [i for i in before if report.servers[i].framework == engine] if engine in _ENGINES else before
    source = symptom.prefix.source
    labelled = [i for i in same or before if source is not None and report.servers[i].label == source]
    found = labelled or same or before
    return found[-1] if found else None


def _foreign(server: Server, symptom: Symptom) -> bool:
    """Whether a line can't be of a start: printed long before it, or by a process that has another id there."""
    earlier = seconds_between(symptom.time, server.started_at)
    if earlier is not None and earlier > ZONES_SECONDS:
        return True
    prefix = symptom.prefix
    if prefix.pid is None:
        return False
    named = {name: prefix.ranks[name] for name in ("dp", "pp", "tp", "ep") if name in prefix.ranks}
    if (prefix.process or "").startswith("EngineCore"):
        ids = {engine.pid for engine in server.engines if engine.dp == named.get("dp", 0)}
    elif named:
        # A process that printed no figure of the start may be the failing one itself.
        ledgers = [rank for rank in server.ranks if rank.entries or rank.stages]
        ids = {rank.pid for rank in ledgers if all(getattr(rank, name) == value for name, value in named.items())}
    else:
        return False
    ids.discard(None)
    return bool(ids) and prefix.pid not in ids


# --------------------------------------------------------------------------------------------------------------------
# Roots.


def _roots(members: Sequence[Symptom]) -> list[Symptom]:
    """The symptoms that may be causes; where no line names one, what stands beside a failure, then what only looks like one."""
    named = [s for s in members if s.role == "cause"]
    faults = [s for s in members if s.kind == "illegal_access"]
    if faults and all(s.kind == "exit_code" for s in named):
        # A kernel's fault before the end explains the end.
        named = [s for s in named if not any(0 < s.line - fault.line <= FRAME_LINES for fault in faults)]
    alone = _unexplained(members, named)
    if named or alone:
        return sorted([*named, *alone], key=lambda s: s.line)
    return [s for s in members if s.role == "not_memory"] or [s for s in members if _ends_processes(s)]


def _silent_end(members: Sequence[Symptom], server: Server | None) -> list[Symptom]:
    """The first line on a process that died, where no line says of what, and nothing that it was told to stop."""
    ends = [s for s in members if s.role == "consequence"]
    if any(s.kind in {"exception", "recovered"} for s in members):
        return []
    if server is not None and (server.state != "failed" or any(f.kind != "process_died" for f in server.failures)):
        return []
    return ends[:1]


def _went_on(members: Sequence[Symptom]) -> list[Symptom]:
    """A try that failed and went on: worth a word where nothing else is said."""
    return [s for s in members if s.kind == "allocator_retry"][:1]


def _unexplained(members: Sequence[Symptom], named: Sequence[Symptom]) -> list[Symptom]:
    """What is no cause by its words alone, and what no cause near it explains."""
    found: list[Symptom] = []
    for symptom in members:
        if symptom.kind not in _STANDS_ALONE or any(_explains(cause, symptom) for cause in named):
            continue
        if symptom.kind == "memory_summary" and not symptom.counts.get("ooms"):
            continue
        if symptom.kind == "container_exit" and not _exit_unexplained(symptom, members):
            continue
        if symptom.kind == "allocator_retry":
            if any(s.kind == "allocator_retry" and not _contradict(s, symptom) for s in found):
                continue
            if not _ended_after(symptom, members, named):
                continue
        found.append(symptom)
    return found


def _exit_unexplained(symptom: Symptom, members: Sequence[Symptom]) -> bool:
    """Whether a container was ended by a signal, and its description does not say why."""
    if symptom.counts.get("exit_code") not in host.KILLED_CODES:
        return False
    said = (s for s in members if s.kind in {"container_killed", "evicted"})
    return not any(s.input == symptom.input and abs(s.line - symptom.line) <= deaths.BLOCK_LINES for s in said)


def _ended_after(symptom: Symptom, members: Sequence[Symptom], named: Sequence[Symptom]) -> bool:
    """Whether a process ended behind a failed try, and before any named cause."""
    until = min((s.line for s in named if s.line > symptom.line), default=None)
    later = [s for s in members if s.line > symptom.line and (until is None or s.line < until)]
    following = next((s for s in named if s.line == until), None)
    # "The engine failed", then the traceback: such a head is of the cause that it stands before.
    ended = any(
        (s.role == "consequence" or s.kind == "exception")
        and not (following and _same_total(symptom, following) is not False and _tied(s, following))
        for s in later
    )
    return ended and not any(s.kind == "recovered" for s in members)


def _explains(cause: Symptom, symptom: Symptom) -> bool:
    """Whether a named cause is what a line beside it, which names none, is about."""
    if not _near(*sorted((cause, symptom), key=lambda s: s.line)):
        return symptom.kind == "allocator_retry" and _same_total(cause, symptom) is True
    if _tied(cause, symptom):
        return True
    if symptom.kind == "allocator_retry":
        return cause.kind in _OF_THE_DEVICE and _same_total(cause, symptom) is True and _asked_alike(cause, symptom)
    if symptom.kind == "memory_summary" and cause.kind in _OF_THE_DEVICE:
        mine, its = (s.amounts.get("torch_allocated_bytes") for s in (symptom, cause))
        return mine is None or its is None or abs(mine.bytes - its.bytes) <= SAME_STATE * max(mine.bytes, its.bytes)
    return False


def _asked_alike(one: Symptom, other: Symptom) -> bool:
    mine, its = (s.amounts.get("requested_bytes") for s in (one, other))
    return mine is None or its is None or abs(mine.bytes - its.bytes) <= mine.tolerance + its.tolerance


def _ends_processes(symptom: Symptom) -> bool:
    return symptom.kind == "xid" and int(symptom.counts.get("xid", 0)) in causes.XIDS


# --------------------------------------------------------------------------------------------------------------------
# Whether two lines are of one failure.


def one_failure(known: Symptom, later: Symptom) -> bool:
    """Whether a cause and one that stands behind it in the same input are of one failure."""
    if not _near(known, later) or _apart(known, later):
        return False
    if _tied(known, later):
        return True
    if known.kind != later.kind:
        return {known.kind, later.kind} <= host.END_OF_PROCESS | {"exit_code"}
    return not _contradict(known, later)


def _near(before: Symptom, after: Symptom) -> bool:
    """Whether two lines belong to one failure: close in the log, or in time."""
    apart = _seconds(before, after)
    if apart is not None:
        return abs(apart) <= NEAR_SECONDS
    return after.line - before.line <= NEAR_LINES


def _tied(one: Symptom, other: Symptom) -> bool:
    """Whether something that both print ties them together: the process, or the moment."""
    if _other_process(one, other):
        return False
    if one.prefix.pid is not None and one.prefix.pid == other.prefix.pid:
        return True
    apart = _seconds(one, other)
    return apart is not None and abs(apart) <= NEAR_SECONDS


def _seconds(before: Symptom, after: Symptom) -> float | None:
    """Seconds between two lines; of two clocks, which may be of two time zones, only what no time zone explains."""
    apart = seconds_between(before.time, after.time)
    if apart is not None and (before.prefix.time is None) != (after.prefix.time is None):
        return apart if abs(apart) > ZONES_SECONDS else None
    return apart


def _other_process(one: Symptom, other: Symptom) -> bool:
    """Whether two lines are of different servers by who printed them: the same part with another id, or another container."""
    mine, its = one.prefix, other.prefix
    if mine.source is not None and its.source is not None and mine.source != its.source and mine.ranks == its.ranks:
        return True
    if mine.pid is None or its.pid is None or mine.pid == its.pid:
        return False
    return mine.process == its.process and mine.ranks == its.ranks and bool(mine.ranks or mine.process == "EngineCore")


def _apart(one: Symptom, other: Symptom) -> bool:
    """Whether a line and a later one can't be of one failure, however close they stand: logs that were joined have no start between them."""
    engines = {s.rule.partition(".")[0] for s in (one, other)} & _ENGINES
    if len(engines) > 1 or _other_process(one, other):
        return True
    apart = _seconds(one, other)
    if apart is not None and abs(apart) > NEAR_SECONDS:
        return True
    if "exit_code" in (one.kind, other.kind):
        return False
    # Neither leads to the other: the kernel ends no process for the GPU's memory, a refused start allocates nothing later.
    for alone in (_OF_THE_HOST, _OF_A_START):
        if (one.kind in alone) != (other.kind in alone):
            return True
    if one.kind in _OF_A_POOL and other.kind in _OF_THE_DEVICE:
        return True
    return _same_total(one, other) is False


def _same_total(one: Symptom, other: Symptom) -> bool | None:
    """Whether two messages may be of one device, or of two that are alike; None where one prints no size."""
    totals = [amount.bytes for s in (one, other) if (amount := s.amounts.get("total_bytes")) is not None]
    return None if len(totals) < 2 else abs(totals[0] - totals[1]) <= SAME_DEVICE * max(totals)


def _contradict(one: Symptom, other: Symptom) -> bool:
    """Whether two messages of one kind, with nothing that ties them together, print figures of two failures."""
    if one.kind in _OF_A_POOL | _OF_A_START and one.rule != other.rule:
        return True
    names = one.amounts.keys() & other.amounts.keys()
    differing = {
        name
        for name in names
        if abs(one.amounts[name].bytes - other.amounts[name].bytes)
        > one.amounts[name].tolerance + other.amounts[name].tolerance
    }
    if _labels(one) != _labels(other) and _labels(one) and _labels(other):
        return bool(differing & {"total_bytes", "requested_bytes"}) or "requested_bytes" not in names
    if any(one.counts[name] != other.counts[name] for name in one.counts.keys() & other.counts.keys()):
        return True
    # The same moment of a process that tried again with another size.
    return bool(differing - {"requested_bytes"}) or (bool(differing) and len(names) < 4)


def _labels(symptom: Symptom) -> dict[str, int]:
    """Which rank or device a line names."""
    if symptom.prefix.ranks:
        return symptom.prefix.ranks
    index = symptom.counts.get("gpu_index")
    return {"gpu": int(index)} if index is not None else {}


# --------------------------------------------------------------------------------------------------------------------
# Deaths that several inputs tell of.


def _merged(groups: list[Group], report: Report, found: Sequence[Symptom]) -> list[Group]:
    """A server that was killed and the kernel's (or container's) line that says by whom are one failure."""
    ends = [g for g in groups if all(s.kind in _ENDS for s in g.roots)]
    if not ends:
        return groups
    died = [deaths.Death(g.roots, deaths.told_of(g.roots, found), g.server) for g in ends]
    left = deaths.join(died, report.servers, [item.path for item in report.inputs])
    ended = {id(group) for group in ends}
    kept: list[Group] = []
    for group in groups:
        if id(group) not in ended:
            kept.append(group)
            continue
        death = next((d for d in left if d.roots is group.roots), None)
        if death is not None:
            group.server, group.joined, group.loose = death.server, death.joined, death.loose
            kept.append(group)
    return kept
