"""One death told by several inputs: the kernel's line, what the container says, the log that ends, joined where they agree.

A process id is another inside a container, clocks stand in different time zones, and the kernel may count from boot. So
each pair is joined by what both print: a process id, the memory limit, the container's id in the control group's path,
or the time. Where one input tells of one death and so does the other, and nothing contradicts it, they are taken as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from memledger import words as n
from memledger.frameworks.kernel import is_of_a_server
from memledger.frameworks.torch_oom import seconds_between
from memledger.ledger import Server
from memledger.postmortem import host
from memledger.postmortem.symptom import Symptom
from memledger.sanitize import clean

NEAR_SECONDS: Final = 300.0
SAME_SECONDS: Final = 60.0
"""Two clocks of one machine tell one moment so closely."""
LAST_LINE_SECONDS: Final = 180.0
"""A server that works prints a line at least so often (usage every 10 to 40 s; loading and capture take longer between lines)."""
ZONE_SECONDS: Final = 1800
MOST_ZONES: Final = 14 * 3600
"""Time zones are half hours apart, at most so many seconds from UTC."""
ZONE_SPREAD: Final = 20.0
BLOCK_LINES: Final = 12
"""Of a container's description the start, end and limit stand so near to how it ended."""
BEHIND_LINES: Final = 6
LIMIT_SPREAD: Final = 4096
"""A limit is set in whole pages."""


_MEMCG: Final = re.compile(r"memcg=([^,\s]{2,300})")


class Told(msgspec.Struct, frozen=True):
    """What one input tells of a death, besides that it happened."""

    pids: frozenset[int] = frozenset()
    at: str | None = None
    started: str | None = None
    limit: int | None = None
    containers: frozenset[str] = frozenset()
    """Ids of containers, or the path of a control group that holds one."""


def told_of(roots: Sequence[Symptom], found: Sequence[Symptom]) -> Told:
    """What the lines of a death, and those around it, say: who, when, and under which limit."""
    pids = {int(s.counts["pid"]) for s in roots if "pid" in s.counts}
    times = [s.time for s in roots if s.time is not None]
    told = Told(frozenset(pids), times[0] if times else None)
    for root in roots:
        around = [s for s in found if s.input == root.input]
        if root.kind in host.KILLS:
            told = _of_the_kernel(told, root, around)
        elif root.kind in host.OF_A_CONTAINER:
            told = _of_a_container(told, root, around)
    return told


def _of_the_kernel(told: Told, kill: Symptom, around: Sequence[Symptom]) -> Told:
    """The limit and the path of the control group, from the table before the kill (none for the whole machine)."""
    if kill.kind != "cgroup_oom":
        return told
    before = [s for s in around if s.line <= kill.line]
    usages = [s for s in before if s.kind == "cgroup_usage" and "limit_bytes" in s.amounts]
    paths = [s.words["name"] for s in before if s.kind == "cgroup_name" and "name" in s.words]
    paths += _MEMCG.findall("\n".join(line.text for line in kill.evidence))
    return msgspec.structs.replace(
        told,
        limit=usages[-1].amounts["limit_bytes"].bytes if usages else told.limit,
        containers=told.containers | set(paths[-2:]),
    )


def _of_a_container(told: Told, end: Symptom, around: Sequence[Symptom]) -> Told:
    near = [s for s in around if abs(s.line - end.line) <= BLOCK_LINES]
    limits = [s for s in around if s.kind == "memory_limit" and "limit_bytes" in s.amounts]
    # In a description the limit stands behind the state, in a manifest in front of it.
    limits.sort(key=lambda s: (s.line < end.line, abs(s.line - end.line)))
    ids = {s.words["container"] for s in (*near, end) if "container" in s.words}
    return msgspec.structs.replace(
        told,
        at=told.at or _nearest(near, end, "finished"),
        started=told.started or _nearest(near, end, "started"),
        limit=limits[0].amounts["limit_bytes"].bytes if limits else told.limit,
        containers=told.containers | ids,
    )


def _nearest(near: Sequence[Symptom], end: Symptom, what: str) -> str | None:
    """The time of a container's start or end: rather the one behind how it ended than one in front, which may be of its next life."""
    times = [s for s in near if s.kind == "container_time" and s.words.get("what", "").lower().startswith(what)]
    times.sort(key=lambda s: (not 0 < s.line - end.line <= BEHIND_LINES, abs(s.line - end.line)))
    return times[0].time if times else None


# --------------------------------------------------------------------------------------------------------------------
# Whether two tell of one death.


def ties(one: Told, other: Told) -> tuple[str, ...]:
    """What shows that two inputs tell of one death, in words; empty where nothing does."""
    found = []
    if same := sorted(one.pids & other.pids):
        found.append(f"both name process {same[0]}")
    if one.limit is not None and other.limit is not None and abs(one.limit - other.limit) <= LIMIT_SPREAD:
        found.append(f"both have the limit of {n.gib_about(one.limit)}")
    if any(_holds(a, b) or _holds(b, a) for a in one.containers for b in other.containers):
        found.append("the control group is the container's")
    agreed = _agree(one.at, other.at, SAME_SECONDS)
    if agreed is not None:
        found.append(f"both tell the same time{agreed}")
    return tuple(found)


def _holds(path: str, container: str) -> bool:
    return len(container) >= 12 and container in path


def contradict(one: Told, other: Told) -> bool:
    """Whether two can't be one death: another limit, or times that no time zone brings together."""
    if one.limit is not None and other.limit is not None and abs(one.limit - other.limit) > LIMIT_SPREAD:
        return True
    apart = seconds_between(one.at, other.at)
    return apart is not None and abs(apart) > NEAR_SECONDS and _agree(one.at, other.at, NEAR_SECONDS) is None


def ties_to_server(told: Told, server: Server) -> tuple[str, ...]:
    """What shows that a death is a server's, in words; empty where nothing does."""
    found = []
    if same := sorted(told.pids & host.pids_of(server)):
        found.append(f"its log names process {same[0]}")
    began = _agree(server.started_at, told.started, SAME_SECONDS)
    if began is not None:
        found.append(f"the container started when its log begins{began}")
    after = seconds_between(server.ended_at, told.at)
    if after is not None and (ended := _since(after, LAST_LINE_SECONDS)) is not None:
        found.append(f"its last line is {ended[0]:.0f} s earlier{ended[1]}")
    return tuple(found)


def apart_from_server(told: Told, server: Server) -> bool:
    """Whether a death can't be a server's: it was before the server's first line, or the container started at another time."""
    began = seconds_between(server.started_at, told.started)
    if began is not None and _agree(server.started_at, told.started, NEAR_SECONDS) is None:
        return True
    before = seconds_between(told.at, server.started_at)
    return before is not None and before > MOST_ZONES + NEAR_SECONDS


def _agree(one: str | None, other: str | None, within: float) -> str | None:
    """How two times agree, as a remark (empty where they just do); None where they do not."""
    apart = seconds_between(one, other)
    if apart is None:
        return None
    if abs(apart) <= within:
        return ""
    zones = round(apart / ZONE_SECONDS) * ZONE_SECONDS
    if zones and abs(zones) <= MOST_ZONES and abs(apart - zones) <= min(within, ZONE_SPREAD):
        return ", of another time zone"
    return None


def _since(after: float, within: float) -> tuple[float, str] | None:
    """Seconds from one time to a later one near it, the time zone aside; None where the two are no neighbours."""
    if 0 <= after <= within:
        return after, ""
    zones = round(after / ZONE_SECONDS) * ZONE_SECONDS
    rest = after - zones
    if zones and abs(zones) <= MOST_ZONES and 0 <= rest <= ZONE_SPREAD:
        return rest, ", of another time zone"
    return None


# --------------------------------------------------------------------------------------------------------------------
# Deaths joined.


class Death(msgspec.Struct):
    """One death: the lines of it, the start that it ended (its index), and in words what joins them, or that nothing does."""

    roots: list[Symptom]
    told: Told
    server: int | None = None
    joined: tuple[str, ...] = ()
    loose: str = ""

    @property
    def is_kill(self) -> bool:
        """Whether a line says by whom the process was ended, and not only that it was."""
        return all(root.kind in host.END_OF_PROCESS for root in self.roots)

    @property
    def is_of_a_server(self) -> bool:
        """Whether the killed process may be a server's, by its name."""
        return not any(r.kind in host.KILLS and not is_of_a_server(r.words.get("name")) for r in self.roots)

    def take(self, other: Death, because: Iterable[str]) -> None:
        """Become one with another."""
        mine, its = self.told, other.told
        self.roots.extend(other.roots)
        self.server = self.server if self.server is not None else other.server
        self.joined = tuple(dict.fromkeys((*self.joined, *other.joined, *because)))
        self.told = Told(
            mine.pids | its.pids,
            mine.at or its.at,
            mine.started or its.started,
            mine.limit if mine.limit is not None else its.limit,
            mine.containers | its.containers,
        )


def join(deaths: Sequence[Death], servers: Sequence[Server], paths: Sequence[str]) -> list[Death]:
    """The deaths of all inputs, those that are one joined, each with the start that it ended where that is told.

    Args:
        deaths: one for each input that tells of it.
        servers: every start of the inputs.
        paths: the names of the inputs.
    """
    for death in deaths:
        if death.server is None and death.is_of_a_server:
            named = [i for i, server in enumerate(servers) if death.told.pids & host.pids_of(server)]
            death.server = named[-1] if named else None
    left = _tied(list(deaths))
    left = _only_ones(left)
    for death in left:
        if death.server is None and death.is_of_a_server:
            _find_server(death, left, servers, paths)
    return left


def _tied(deaths: list[Death]) -> list[Death]:
    """Those that something ties together become one; a kill takes what only tells of an end."""
    left: list[Death] = []
    for death in sorted(deaths, key=lambda d: not d.is_kill):
        for known in left:
            if not _may_be_one(known, death):
                continue
            because = ties(known.told, death.told)
            if because or (known.server is not None and known.server == death.server and not death.is_kill):
                known.take(death, because)
                break
        else:
            left.append(death)
    return left


def _only_ones(deaths: list[Death]) -> list[Death]:
    """One kill of a server's process, one description of a container, one end in a log: nothing else can be meant."""
    left = list(deaths)
    kernel = [d for d in left if any(r.kind in host.KILLS for r in d.roots) and d.is_of_a_server]
    others = [d for d in left if not any(r.kind in host.KILLS for r in d.roots)]
    groups = (
        [d for d in others if any(r.kind in host.OF_A_CONTAINER for r in d.roots)],
        [d for d in others if not d.is_kill and not any(r.kind in host.OF_A_CONTAINER for r in d.roots)],
    )
    first = kernel[0] if len(kernel) == 1 else None
    for group in groups:
        if len(group) != 1:
            continue
        if first is None and not kernel:
            first = group[0]
        elif first is not None and _may_be_one(first, group[0]):
            first.take(group[0], ("each of them tells of one death only",))
            left = [d for d in left if d is not group[0]]
    return left


def _may_be_one(one: Death, other: Death) -> bool:
    if not (one.is_of_a_server and other.is_of_a_server) or contradict(one.told, other.told):
        return False
    return one.server is None or other.server is None or one.server == other.server


def _find_server(death: Death, deaths: Sequence[Death], servers: Sequence[Server], paths: Sequence[str]) -> None:
    """The start that a kill ended, by its times; else a sentence that the inputs do not tell."""
    taken = {d.server for d in deaths}
    free = [i for i, s in enumerate(servers) if s.state in {"starting", "serving", "unknown"} and i not in taken]
    open_ = [i for i in free if not apart_from_server(death.told, servers[i])]
    tied = {i: because for i in open_ if (because := ties_to_server(death.told, servers[i]))}
    if len(tied) == 1:
        ((death.server, because),) = tied.items()
        death.joined = (*death.joined, *because)
        return
    names = {clean(paths[span.input]) for i in open_ or free for span in servers[i].span[:1]}
    which = f"the server of {names.pop()}" if len(names) == 1 else "one of the servers"
    if tied:
        death.loose = f"Which of {len(tied)} servers this was is not told: their times fit alike."
    elif open_:
        death.loose = (
            f"Whether this was {which} is not told: no process id, start time or time of the end agrees "
            "(dmesg -T gives the kernel's times, kubectl describe pod the container's)."
        )
    elif free:
        death.loose = f"This was not {which}: its log begins at another time."
