"""Host memory: what the kernel's task table, a cgroup's counters, a pod's limit and Ray's table say beside a kill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from memledger import words as n
from memledger.frameworks.kernel import is_of_a_server
from memledger.ledger import Evidence, Server
from memledger.postmortem.incident import Holder
from memledger.postmortem.symptom import Symptom

KILLS: Final = frozenset({"kernel_oom", "cgroup_oom"})
"""Kills by the kernel: the line names the process."""
END_OF_PROCESS: Final = KILLS | {
    "container_killed",
    "oomd",
    "slurm_oom",
    "ray_memory_monitor",
    "evicted",
    "unit_oom",
}
"""What says that a process was ended because the host's memory, or a limit on it, ran out."""
OF_A_CONTAINER: Final = frozenset({"container_killed", "container_exit", "evicted"})
"""What a container's description says of its end."""
KILLED_CODES: Final = frozenset({137, -9, 135, -7})
"""Exit codes of a process that a signal ended from outside: 9 (killed), 7 (bus error)."""
MOST_ROWS: Final = 8
_CULPRIT: Final = 2.0
"""A process that holds this many times what the killed one held is the one that grew."""


def victim_of(symptom: Symptom, servers: Sequence[Server]) -> int | None:
    """The start whose process the kernel killed: by its process id, the last one with it; None where no log names it."""
    pid = symptom.counts.get("pid")
    if symptom.kind not in KILLS or pid is None or not is_of_a_server(symptom.words.get("name")):
        return None
    found = [i for i, server in enumerate(servers) if int(pid) in pids_of(server)]
    return found[-1] if found else None


def pids_of(server: Server) -> set[int]:
    """The process ids that a start's lines name."""
    return {pid for pid in (*(r.pid for r in server.ranks), *(e.pid for e in server.engines)) if pid is not None}


def said(root: Symptom, beside: Iterable[Symptom]) -> tuple[str, ...]:
    """Sentences on who held the host's memory, and on the limit."""
    found: list[str] = []
    everything = list(beside)
    if root.kind == "ray_memory_monitor":
        found += _ray(root, everything)
    limits = [s for s in everything if s.kind in {"cgroup_usage", "memory_limit"} and "limit_bytes" in s.amounts]
    if limits and root.kind != "kernel_oom":
        sizes = {s.amounts["limit_bytes"].bytes for s in limits}
        if len(sizes) == 1:
            found.append(f"The limit was {n.gib_about(sizes.pop())}.")
    if root.kind in KILLS and not is_of_a_server(root.words.get("name")):
        found.append(f"{root.words.get('name', 'The process')} is none of a server's own processes.")
    return tuple(found)


def _ray(root: Symptom, beside: Sequence[Symptom]) -> list[str]:
    used, limit = root.counts.get("used_gb"), root.counts.get("limit_gb")
    killed = root.counts.get("killed_process_gb")
    rows = [s for s in beside if s.kind == "ray_process" and "used_gb" in s.counts]
    found = []
    if used is not None and limit is not None:
        found.append(f"The node used {used:,.2f} of {limit:,.2f} GB (Ray's own unit).")
    largest = max(rows, key=lambda s: s.counts["used_gb"], default=None)
    if largest is not None and killed is not None and largest.counts["used_gb"] > _CULPRIT * killed:
        pid = largest.counts.get("pid")
        found.append(
            f"The killed worker held {killed:,.2f} GB only; process {int(pid) if pid is not None else '?'} held "
            f"{largest.counts['used_gb']:,.2f} GB and is the one that grew."
        )
    elif killed is not None:
        found.append(f"The killed worker held {killed:,.2f} GB.")
    return found


def holders(root: Symptom, beside: Iterable[Symptom]) -> tuple[Holder, ...]:
    """The largest processes of the kernel's table, else the parts of the killed one (kernel, mm/oom_kill.c)."""
    if root.kind not in KILLS:
        return ()
    rows = [s for s in beside if s.kind == "kernel_task" and "rss_bytes" in s.amounts]
    rows.sort(key=lambda s: -s.amounts["rss_bytes"].bytes)
    if rows:
        return tuple(
            _row(f"{s.words.get('name', 'process')} ({int(s.counts['pid'])})", s, "rss_bytes") for s in rows[:MOST_ROWS]
        )
    parts = (("anonymous", "anon_rss_bytes"), ("files", "file_rss_bytes"), ("shared", "shmem_rss_bytes"))
    name = root.words.get("name", "the killed process")
    return tuple(_row(f"{name}, {label}", root, field) for label, field in parts if root.amounts.get(field) is not None)


def _row(label: str, symptom: Symptom, field: str) -> Holder:
    amount = symptom.amounts[field]
    evidence: tuple[Evidence, ...] = symptom.evidence[:1]
    return Holder(label, amount.bytes, amount.tolerance, evidence=evidence)
