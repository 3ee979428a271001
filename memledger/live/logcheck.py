"""Whether a log is of a running process: by process ids, model, start time and port; pure.

A log of another start must not be lined up with this process's memory, however alike the two are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import PurePosixPath
from typing import Final

import msgspec

from memledger import words as n
from memledger.ledger import LogCheck, Server
from memledger.live.sample import LiveServer

_FRAMEWORKS: Final = {"sglang": "SGLang", "vllm": "vLLM"}
EARLIEST: Final = -5.0
"""Seconds before the process's start at which its first line may stand (clocks are printed in whole seconds)."""
LATEST: Final = 900.0
"""Seconds after it: an engine imports for up to minutes before its first line, over a network file system for longer."""
_ZONE_STEP: Final = 900
_WIDEST_ZONE: Final = 14 * 3600
_MONTH_FIRST: Final = re.compile(r"--(\d\d)-(\d\d)T(\d\d:\d\d:\d\d)")


class _Points(msgspec.Struct):
    """What speaks for and against one start."""

    agree: list[str]
    differ: list[str]
    strong: bool = False
    """Whether a point for it is one that no other start could have."""


def check(servers: Sequence[Server], live: LiveServer) -> LogCheck:
    """Which start of a log, if any, is the running server's.

    The latest start for which something speaks and against which nothing does. With nothing to compare the answer is
    `unknown`: the log may be this server's, and nothing says so.
    """
    if not servers:
        return LogCheck("unknown", ("nothing of SGLang or vLLM is in the log",))
    judged = [_compare(server, live) for server in servers]
    for index in reversed(range(len(servers))):
        points = judged[index]
        if points.strong and not points.differ:
            return LogCheck("yes", tuple(points.agree), index)
    last = judged[-1]
    if last.differ:
        return LogCheck("no", tuple(last.differ), len(servers) - 1)
    return LogCheck("unknown", (*last.agree, "no process id or start time to compare"), len(servers) - 1)


def _compare(server: Server, live: LiveServer) -> _Points:
    points = _Points([], [])
    if server.framework != live.framework:
        points.differ.append(
            f"the log is {_FRAMEWORKS[server.framework]}'s, the process is {_FRAMEWORKS[live.framework]}"
        )
        return points
    same_process = _pids(server, live, points)
    _model(server, live, points)
    _port(server, live, points)
    _time(server, live, points, same_process=same_process)
    return points


def _pids(server: Server, live: LiveServer, points: _Points) -> bool:
    """Process ids in the log against those of the tree, in every namespace in which they have one."""
    logged = {r.pid for r in server.ranks if r.pid is not None} | {e.pid for e in server.engines if e.pid is not None}
    if not logged or not live.processes:
        return False
    known = {pid for p in live.processes for pid in (p.pid, *p.namespace_pids)}
    common = sorted(logged & known)
    if common:
        points.agree.append(
            f"process {common[0]} is in both" if len(common) == 1 else f"{len(common)} process ids are in both"
        )
        points.strong = True
        return True
    if live.container is not None and all(len(p.namespace_pids) < 2 for p in live.processes):
        # In a container's log stand its own ids, and they are not known here.
        return False
    shown = ", ".join(map(str, sorted(logged)[:4]))
    points.differ.append(f"the log's processes ({shown}) are not among those running")
    return False


def _model(server: Server, live: LiveServer, points: _Points) -> None:
    ours, theirs = _name(server.model), _name(live.model)
    if ours is None or theirs is None:
        return
    if ours == theirs:
        points.agree.append(f"the model is the same ({ours})")
    elif not ({ours, theirs} & {"snapshots"}) and not _served(server, live):
        points.differ.append(f"the log is of {ours}, the process serves {theirs}")


def _served(server: Server, live: LiveServer) -> bool:
    """Whether one of the two is a name under which the other's model is served."""
    names = {_name(str(v)) for k, v in server.config.items() if k.startswith("served_model_name") and v}
    return _name(live.model) in names


def _name(model: str | None) -> str | None:
    if not model:
        return None
    parts = PurePosixPath(model.rstrip("/")).parts
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.split("--")[-1].lower()
    return parts[-1].lower() if parts else None


def _port(server: Server, live: LiveServer, points: _Points) -> None:
    ours = server.config.get("port")
    if not isinstance(ours, int) or live.port is None or live.container is not None:
        return
    if ours == live.port:
        points.agree.append(f"port {ours}")
    else:
        points.differ.append(f"the log's server listens on port {ours}, the process on {live.port}")


def _time(server: Server, live: LiveServer, points: _Points, *, same_process: bool) -> None:
    """The log's first line stands shortly after the process's start; a clock in another time zone is off by whole quarter hours."""
    started = _moment(live.started_at)
    first = _moment(server.started_at, started)
    if started is None or first is None:
        return
    apart = (first - started).total_seconds()
    if EARLIEST <= apart <= LATEST:
        points.agree.append(f"its first line is {n.duration(max(apart, 0.0))} after the process's start")
        points.strong = True
        return
    # The same ids are no proof: in a container every start has the same small ones.
    off = apart % _ZONE_STEP
    if abs(apart) <= _WIDEST_ZONE and off <= LATEST / 3 and (same_process or live.container is not None):
        points.agree.append("its first line fits the process's start if its clock is in another time zone")
        return
    if apart > LATEST and not any(rank.entries for rank in server.ranks):
        points.agree.append("its lines are later than the process's start, and none is of a start")
        return
    last = _moment(server.ended_at, started)
    if last is not None and (last - started).total_seconds() < EARLIEST:
        points.differ.append(
            f"the log ends {n.duration((started - last).total_seconds())} before the process started ({_clock(live.started_at)})"
        )
    else:
        when = "before" if apart < 0 else "after"
        points.differ.append(
            f"the log's first line ({_clock(server.started_at)}) is {n.duration(abs(apart))} {when} the process's start"
            f" ({_clock(live.started_at)})"
        )


def _clock(text: str | None) -> str:
    return (text or "").replace("T", " ").removeprefix("--")[:19]


def _moment(text: str | None, near: datetime | None = None) -> datetime | None:
    """A time without its zone (engines print local time); one without a year gets that of `near`, the nearest."""
    if text is None:
        return None
    if (found := _MONTH_FIRST.match(text)) is not None:
        if near is None:
            return None
        candidates = []
        for year in (near.year - 1, near.year, near.year + 1):
            try:
                candidates.append(datetime.fromisoformat(f"{year}-{found[1]}-{found[2]}T{found[3]}"))
            except ValueError:
                continue
        return min(candidates, key=lambda c: abs(c - near), default=None)
    try:
        parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return parsed.replace(tzinfo=None) - timedelta(microseconds=parsed.microsecond)
