"""Where a running server's log is, from its standard output and error: a path that can be opened now, or how to hand the log over."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from memledger.live import process as proc
from memledger.live.sample import LogPlace
from memledger.live.titles import Framework
from memledger.sanitize import clean

DOCKER: Final = Path("/var/lib/docker/containers")
KUBERNETES: Final = Path("/var/log/containers")

MOST_PIPES: Final = 4
"""Programs of a pipeline that are followed from the server on (`server | ts | tee FILE`)."""

_TEE_WITHOUT_FILE: Final = re.compile(r"-[aip]+$|--(?:append|ignore-interrupts|output-error(?:=\S*)?|help|version)$")


def log_place(framework: Framework, pids: Sequence[int], container: str | None = None) -> LogPlace:
    """The log of a server whose processes are given (the launcher first; children share its descriptors).

    SGLang logs to standard error, vLLM to standard output: the other one is taken where that one leads nowhere.
    """
    order = (1, 2) if framework == "vllm" else (2, 1)
    found: LogPlace | None = None
    for pid in pids[:4]:
        for fd in order:
            place = _of_descriptor(pid, fd, container)
            if place.path is not None:
                return place
            if found is None or (found.kind in {"unknown", "null"} and place.kind != "unknown"):
                found = place
        if found is not None and found.kind not in {"unknown"}:
            break
    return found or LogPlace()


def _of_descriptor(pid: int, fd: int, container: str | None) -> LogPlace:
    link = proc.PROC / str(pid) / "fd" / str(fd)
    try:
        target = os.readlink(link)  # noqa: PTH115 - Path.readlink would normalise `pipe:[1]`
    except OSError as error:
        if not (proc.PROC / str(pid)).exists():
            return LogPlace(advice=f"process {pid} has ended; hand its log over as a file: memledger explain FILE")
        if isinstance(error, FileNotFoundError):
            return LogPlace(
                advice=f"process {pid} closed its standard output; hand the log over as a file: memledger explain FILE"
            )
        return LogPlace(
            advice=f"the open files of process {pid} belong to another user: run memledger as that user, or with sudo"
        )
    if target in {"/dev/null", "/dev/zero"}:
        return LogPlace(
            None,
            "null",
            f"process {pid} throws its log away (/dev/null): restart it with `> server.log 2>&1` to have one",
        )
    if target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
        return LogPlace(
            None,
            "terminal",
            f"the log goes to the terminal {clean(target)}: copy it from there into a file, or restart with `2>&1 | tee server.log`",
        )
    if target.startswith("socket:"):
        return _socket(pid)
    mode = _mode(link)
    if target.startswith("pipe:") or (mode is not None and stat.S_ISFIFO(mode)):
        return _pipe(pid, target, container)
    if mode is not None and stat.S_ISREG(mode):
        return _file(link, target)
    return LogPlace(advice=f"the log goes to {clean(target)}, which can't be read back; hand it over as a file")


def _mode(link: Path) -> int | None:
    try:
        return link.stat().st_mode
    except OSError:
        return None


def _file(link: Path, target: str) -> LogPlace:
    """A regular file: by its name where that leads to it from here, else (deleted, or in a container) through the descriptor."""
    with contextlib.suppress(OSError):
        # A name that is no text can't stand in a report: such a file is opened through the descriptor.
        if target.isprintable() and os.path.samestat(link.stat(), Path(target).stat()):
            if os.access(target, os.R_OK):
                return LogPlace(target, "file")
            return LogPlace(None, "file", f"no permission to read {clean(target)}: run memledger with sudo")
    kind: Literal["deleted", "file"] = "deleted" if target.endswith(" (deleted)") else "file"
    if not os.access(link, os.R_OK):
        return LogPlace(None, kind, f"no permission to read the log through {link}: run memledger with sudo")
    if kind == "deleted":
        name = clean(target.removesuffix(" (deleted)"))
        return LogPlace(str(link), "deleted", f"{name} was deleted and is still open: `cp {link} FILE` keeps it")
    return LogPlace(str(link), "file")


def _socket(pid: int) -> LogPlace:
    unit = proc.unit_of(proc.cgroup(pid))
    to_journal = "JOURNAL_STREAM" in (proc.environment(pid) or {})
    if unit is not None:
        name, users = unit
        user = "--user " if users else ""
        return LogPlace(
            None,
            "journald",
            f"the log is in systemd's journal: journalctl {user}-u {shlex.quote(clean(name))} -o cat > server.log; memledger explain server.log",
        )
    if to_journal:
        return LogPlace(
            None,
            "journald",
            f"the log is in systemd's journal: journalctl _PID={pid} -o cat > server.log; memledger explain server.log",
        )
    return LogPlace(
        advice=f"process {pid} writes its log into a socket; hand it over as a file: memledger explain FILE"
    )


def _pipe(pid: int, target: str, container: str | None) -> LogPlace:
    place = _container_log(container) or _behind_pipe(pid, target)
    if place is not None:
        return place
    if container is not None:
        return LogPlace(
            None,
            "docker",
            f"the log is kept by the container's runtime: docker logs {container[:12]} > server.log 2>&1 "
            "(kubectl logs POD in Kubernetes); memledger explain server.log",
        )
    reader = _reader(target, set())
    who = f" read by {proc.described(reader)} (pid {reader.pid})" if reader else ""
    return LogPlace(
        None,
        "pipe",
        f"the log goes into a pipe{who}: hand the log over as a file, or restart with `2>&1 | tee server.log`",
    )


def _container_log(container: str | None) -> LogPlace | None:
    """Docker's or Kubernetes' own file of a container's output, where it can be read."""
    if container is None or not re.fullmatch(r"[0-9a-f]{64}", container):
        return None
    docker = DOCKER / container / f"{container}-json.log"
    with contextlib.suppress(OSError):
        if os.access(docker, os.R_OK):
            return LogPlace(str(docker), "docker")
        for found in sorted(KUBERNETES.glob(f"*-{container}.log")):
            if os.access(found, os.R_OK):
                return LogPlace(str(found), "docker")
    return None


def _behind_pipe(pid: int, target: str) -> LogPlace | None:
    """The file at the end of a pipeline: what `tee` writes, or where the last program's output goes."""
    known = {pid}
    for _ in range(MOST_PIPES):
        reader = _reader(target, known)
        if reader is None:
            return None
        known.add(reader.pid)
        if Path(reader.title).name == "tee":
            for file in _tee_files(reader):
                if str(file).isprintable() and os.access(file, os.R_OK):
                    return LogPlace(str(file), "file")
        link = proc.PROC / str(reader.pid) / "fd/1"
        try:
            target = os.readlink(link)  # noqa: PTH115
        except OSError:
            return None
        mode = _mode(link)
        if mode is not None and stat.S_ISREG(mode):
            return _file(link, target)
        if not target.startswith("pipe:"):
            return None
    return None


def _tee_files(tee: proc.Seen) -> list[Path]:
    words = list(tee.arguments[1:])
    if "--" in words:
        words = words[words.index("--") + 1 :]
    names = [word for word in words if not _TEE_WITHOUT_FILE.match(word)]
    here = proc.PROC / str(tee.pid) / "cwd"
    root = proc.PROC / str(tee.pid) / "root"
    files = []
    for name in names:
        with contextlib.suppress(OSError):
            if not name.startswith("/"):
                name = f"{os.readlink(here)}/{name}"  # noqa: PLW2901, PTH115
        direct = Path(name)
        files.append(direct if direct.exists() else root / name.lstrip("/"))
    return files


def _reader(target: str, known: set[int]) -> proc.Seen | None:
    """The process whose standard input is the other end of a pipe."""
    if not target.startswith("pipe:"):
        return None
    for entry in proc.PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) in known:
            continue
        with contextlib.suppress(OSError):
            if os.readlink(entry / "fd/0") == target:  # noqa: PTH115
                return proc.seen(int(entry.name))
    return None
