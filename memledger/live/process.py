"""Processes as `/proc` shows them, read without ptrace: what can't be read is left out with its reason, and nothing raises.

A process may vanish, be a zombie, or belong to another user at any moment: then the facts that were had stay, and `problems` says
what is missing. A process id is only an identity together with its start time (ids are reused).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import psutil

from memledger.live import titles

PROC: Final = Path("/proc")

INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""The inode of the first PID namespace, the same on every Linux (PROC_PID_INIT_INO, include/linux/proc_ns.h)."""

CLOCK_SLACK: Final = 2.0
"""Seconds by which start times may be off: psutil derives them from the boot time, which clocks correct."""

_CONTAINER: Final = re.compile(r"(?:^|[/:_-])([0-9a-f]{64})(?:\.scope)?(?:/|$)")
_LXC: Final = re.compile(r"/(?:lxc\.payload|lxc|machine\.slice/machine)[./-]([\w.-]+)")
_UNIT: Final = re.compile(r"/([^/]+\.service)(?=/|$)")

_T = TypeVar("_T")


class Seen(msgspec.Struct, frozen=True):
    """One process at the moment of the scan. `arguments` ends where the process's own words end (retitled: the title alone)."""

    pid: int
    parent: int | None
    comm: str
    arguments: tuple[str, ...] = ()
    created: float | None = None
    zombie: bool = False
    unreadable: bool = False

    @property
    def title(self) -> str:
        """The first word of the command line; the name where there is none."""
        return self.arguments[0] if self.arguments else self.comm


class Table:
    """All processes of the machine at one moment."""

    def __init__(self, seen: Iterable[Seen]) -> None:
        self.by_pid: dict[int, Seen] = {one.pid: one for one in seen}
        self._children: dict[int, list[Seen]] = {}
        for one in self.by_pid.values():
            if (parent := self.parent(one)) is not None:
                self._children.setdefault(parent.pid, []).append(one)

    def parent(self, one: Seen) -> Seen | None:
        """The process that started this one. One that is younger than its child only carries the id of the true one."""
        above = self.by_pid.get(one.parent) if one.parent else None
        if above is None or above.pid == one.pid:
            return None
        if above.created is not None and one.created is not None and above.created > one.created + CLOCK_SLACK:
            return None
        return above

    def children(self, pid: int) -> list[Seen]:
        """The processes that one started, by id."""
        return sorted(self._children.get(pid, ()), key=lambda one: one.pid)

    def tree(self, pid: int) -> list[Seen]:
        """A process and all below it, each before its children."""
        found: list[Seen] = []
        waiting = [self.by_pid[pid]] if pid in self.by_pid else []
        known: set[int] = set()
        while waiting:
            one = waiting.pop(0)
            if one.pid not in known:
                known.add(one.pid)
                found.append(one)
                waiting = self.children(one.pid) + waiting
        return found


_ATTRIBUTES: Final = ["pid", "ppid", "name", "cmdline", "create_time", "status"]


def table() -> Table:
    """A scan of all processes. Those that vanish meanwhile are not in it."""
    return Table(_seen(process.info) for process in psutil.process_iter(_ATTRIBUTES))


def seen(pid: int) -> Seen | None:
    """One process; None where there is none of that id."""
    try:
        return _seen(psutil.Process(pid).as_dict(_ATTRIBUTES))
    except psutil.Error:
        return None


def _seen(info: dict[str, Any]) -> Seen:
    arguments = info.get("cmdline")
    zombie = info.get("status") == psutil.STATUS_ZOMBIE
    words = list(arguments or ())
    while words and not words[-1].strip():  # a title overwrites the command line and leaves empty words behind it
        words.pop()
    return Seen(
        pid=info["pid"],
        parent=info.get("ppid"),
        comm=info.get("name") or "",
        arguments=tuple(words),
        created=info.get("create_time"),
        zombie=zombie,
        unreadable=arguments is None and not zombie,
    )


def thread_group(pid: int) -> int | None:
    """The process that a thread belongs to (the process itself for its own id); None where there is no such thread."""
    found = status_field(pid, "Tgid")
    return int(found) if found and found.isdigit() else None


def status_field(pid: int, name: str) -> str | None:
    """One line of `/proc/PID/status`; None where it can't be read."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return None


def namespace_pids(pid: int) -> tuple[int, ...]:
    """A process's ids from our PID namespace inwards (NSpid); the last one is what the process calls itself."""
    found = status_field(pid, "NSpid")
    return tuple(int(word) for word in found.split() if word.isdigit()) if found else ()


def in_pid_namespace() -> bool | None:
    """Whether we run in a PID namespace of our own (a container): the host's process ids are then not ours."""
    try:
        return (PROC / "self/ns/pid").stat().st_ino != INITIAL_PID_NAMESPACE
    except OSError:
        return None


def shares_network(pid: int) -> bool | None:
    """Whether our loopback is that process's loopback; None where it can't be read."""
    try:
        return (PROC / str(pid) / "ns/net").stat().st_ino == (PROC / "self/ns/net").stat().st_ino
    except OSError:
        return None


def cgroup(pid: int) -> str:
    """The text of `/proc/PID/cgroup` (v1: one line a controller, v2: one line); "" where it can't be read."""
    try:
        return (PROC / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return ""


def container_of(cgroup_text: str) -> str | None:
    """The container that a cgroup path names: the runtime's id (64 hexadecimal digits), or LXC's name.

    Docker, containerd, CRI-O, Podman and Kubernetes write the id into the path, under cgroup v1 and v2, with and without systemd.
    """
    for line in cgroup_text.splitlines():
        if found := _CONTAINER.findall(line):
            return str(found[-1])
    found_name = _LXC.search(cgroup_text)
    return found_name.group(1) if found_name else None


def unit_of(cgroup_text: str) -> tuple[str, bool] | None:
    """The systemd service that a cgroup path names, and whether it is a user's own; None where it names none."""
    for line in cgroup_text.splitlines():
        path = line.rpartition(":")[2]
        units = [unit for unit in _UNIT.findall(path) if not unit.startswith("user@")]
        if units:
            return units[-1], "/user@" in path
    return None


def environment(pid: int) -> dict[str, str] | None:
    """A process's environment as it was when it started; None where it can't be read. Empty for retitled processes."""
    try:
        text = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (word.decode("utf-8", "replace").partition("=") for word in text.split(b"\0") if b"=" in word)
    return {name: value for name, _, value in pairs}


class Facts(msgspec.Struct, frozen=True):
    """What `psutil` tells of one process; each None has its reason in `problems`."""

    user: str | None = None
    uid: int | None = None
    resident: int | None = None
    problems: dict[str, str] = {}


def facts(pid: int) -> Facts:
    """User and resident memory of a process."""
    try:
        process = psutil.Process(pid)
    except psutil.Error as error:
        return Facts(problems={"user": reason(error, pid), "resident_bytes": reason(error, pid)})
    problems: dict[str, str] = {}
    user = _get(process.username, problems, "user", pid)
    uids = _get(process.uids, problems, "user", pid)
    memory = _get(process.memory_info, problems, "resident_bytes", pid)
    return Facts(user, uids.real if uids else None, memory.rss if memory else None, problems)


def _get(call: Callable[[], _T], problems: dict[str, str], name: str, pid: int) -> _T | None:
    try:
        return call()
    except (psutil.Error, OSError) as error:
        problems[name] = reason(error, pid)
    except (KeyError, ValueError):  # a user id without a name, a line of /proc of another form
        problems[name] = f"/proc/{pid} has it in a form that is not known"
    return None


def reason(error: Exception, pid: int) -> str:
    """One sentence for why something of a process could not be read."""
    if isinstance(error, psutil.ZombieProcess):
        return f"process {pid} is a zombie: it has ended and its parent has not taken note of it"
    if isinstance(error, (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError)):
        return f"process {pid} ended while it was looked at"
    if isinstance(error, (psutil.AccessDenied, PermissionError)):
        return f"process {pid} belongs to another user: run memledger as that user, or with sudo"
    return f"/proc/{pid} can't be read: {error}"


def is_same(pid: int, created: float | None) -> bool:
    """Whether the process of that id is still the one that started then."""
    try:
        now = psutil.Process(pid)
        return created is None or abs(now.create_time() - created) <= CLOCK_SLACK
    except psutil.Error:
        return False


def moment(created: float | None) -> str | None:
    """A start time as ISO 8601 with the local offset, whole seconds."""
    if created is None:
        return None
    return datetime.fromtimestamp(created).astimezone().isoformat(timespec="seconds")


def session(pid: int) -> int | None:
    """The session of a process; None where it can't be read."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


def described(one: Seen, length: int = 60) -> str:
    """What a process is, in a few words, for a sentence: its command line cleaned and cut."""
    words = " ".join(titles.shown_arguments(one.arguments)) if one.arguments else one.comm
    shown = words if len(words) <= length else words[: length - 3] + "..."
    return f"`{shown or '?'}`"


class Listening(msgspec.Struct, frozen=True):
    """One TCP socket that a process listens on."""

    host: str
    port: int
    pid: int


def listening(pid: int) -> tuple[tuple[Listening, ...], str | None]:
    """The TCP sockets that a process listens on, and why they are not known."""
    try:
        process = psutil.Process(pid)
        ask = getattr(process, "net_connections", None) or process.connections
        found = ask(kind="tcp")
    except (psutil.Error, OSError) as error:
        return (), reason(error, pid)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return (), f"the sockets of process {pid} can't be read: {error}"
    return tuple(
        Listening(c.laddr[0], c.laddr[1], pid) for c in found if c.status == psutil.CONN_LISTEN and c.laddr
    ), None


def owner_of_port(port: int) -> int | None:
    """The user id of who listens on a port of this network (`/proc/net/tcp`); None where nobody does, or it can't be read."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (PROC / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    return int(words[7])
    return None


def processes_are_hidden() -> bool:
    """Whether `/proc` is mounted so that other users' processes don't show (hidepid)."""
    try:
        mounts = (PROC / "self/mounts").read_text(errors="replace")
    except OSError:
        return False
    return any(
        words[1] == "/proc" and re.search(r"hidepid=(?:[124]|invisible|noaccess|ptraceable)", words[3])
        for line in mounts.splitlines()
        if len(words := line.split()) > 3
    )
