"""`memledger ps` for a terminal: one row for each server, with its model, log and what could not be had below it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from tabulate import tabulate

from memledger import words as n
from memledger.live.sample import DeviceSample, GpuProcess, LiveServer, Process
from memledger.report.ps_json import PsReport
from memledger.report.text import Style, to_ascii
from memledger.sanitize import clean

HEADERS: Final = ("pid", "server", "ranks", "GPUs", "GPU GiB", "KV", "state", "running", "port")
LOOKED_FOR: Final = "processes titled sglang::* or VLLM::*, and command lines of sglang serve, sglang.launch_server, vllm serve and vLLM's api_server"
_ALIGN: Final = ("right", "left", "right", "left", "right", "right", "right", "right", "right")
_NAMES: Final = {"sglang": "SGLang", "vllm": "vLLM"}
_LABEL: Final = 8
_UNKNOWN: Final = "-"
_NOT_SHOWN: Final = frozenset({"model", "visible_devices"})


def render(report: PsReport, style: Style | None = None) -> str:
    """All servers as text, ending in a newline."""
    style = style or Style()
    lines = _servers(report, style) if report.live_servers else [nothing_found(report)]
    remarks = _remarks(report)
    if remarks:
        lines += ["", *(line for remark in remarks for line in _wrapped("note", remark, style.width, indent=0))]
    text = "\n".join(lines) + "\n"
    return text if style.unicode else to_ascii(text)


def nothing_found(report: PsReport) -> str:
    """The sentence for a machine without a server: what was looked for, and what could not be looked at."""
    sentence = f"No server found: looked for {LOOKED_FOR}."
    if report.unreadable_processes:
        sentence += f" {n.plural(report.unreadable_processes, 'process', 'processes')} of other users could not be read (sudo shows them)."
    return textwrap.fill(sentence, 80, break_on_hyphens=False)


def _servers(report: PsReport, style: Style) -> list[str]:
    rows = [_row(server, report.devices) for server in report.live_servers]
    table = tabulate(rows, HEADERS, tablefmt="plain", colalign=_ALIGN, disable_numparse=True).splitlines()
    lines = [table[0].rstrip()]
    for line, server in zip(table[1:], report.live_servers, strict=True):
        lines.append(line.rstrip())
        for label, text in _below(server, report.devices):
            lines += _wrapped(label, text, style.width)
    return lines


def _row(server: LiveServer, devices: DeviceSample | None) -> tuple[str, ...]:
    usage = server.metrics
    ranks = [p for p in server.processes if _is_rank(p, server)]
    running = usage.running_requests if usage else None
    queued = usage.queued_requests if usage else None
    return (
        str(server.pid),
        " ".join(filter(None, (_NAMES[server.framework], server.framework_version))),
        str(len(ranks)) if ranks else _UNKNOWN,
        gpu_numbers(server.processes),
        _memory(server, devices),
        _share(usage.kv_usage if usage else None),
        _share(usage.state_usage if usage else None),
        _UNKNOWN if running is None else f"{running}+{queued}" if queued else str(running),
        str(server.port) if server.port else _UNKNOWN,
    )


def _is_rank(one: Process, server: LiveServer) -> bool:
    if one.role == "engine":
        return not any(p.role == "worker" for p in server.processes)
    return one.role in {"worker", "scheduler"}


def gpu_numbers(processes: Sequence[Process]) -> str:
    """The GPUs of a server's processes, runs of them shortened: `0-3,6`; a dash where none is known."""
    numbers = sorted({index for p in processes for index in p.gpu_indices or ()})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) or _UNKNOWN


def _memory(server: LiveServer, devices: DeviceSample | None) -> str:
    """What the driver lists for the server's processes, all GPUs together; unknown as soon as one of them is."""
    own = gpu_processes(server, devices)
    if not own or any(p.used_bytes is None for p in own):
        return _UNKNOWN
    return n.gib(sum(p.used_bytes or 0 for p in own))


def gpu_processes(server: LiveServer, devices: DeviceSample | None) -> list[GpuProcess]:
    """The driver's entries for a server's processes, where its process ids are ours."""
    pids = {p.pid for p in server.processes if p.gpu_basis == "nvml"}
    return [p for d in (devices.devices if devices else ()) for p in d.processes or () if p.pid in pids]


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else n.percent(value)


def _below(server: LiveServer, devices: DeviceSample | None) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = [("model", server.model or f"not known: {server.missing.get('model', 'not named')}")]
    if server.container:
        lines.append(("inside", f"container {server.container[:12]}"))
    log = server.log
    lines.append(("log", log.path if log.path and log.kind != "deleted" else log.advice or log.path or "not known"))
    lines += [("note", text) for text in dict.fromkeys(t for k, t in server.missing.items() if k not in _NOT_SHOWN)]
    unplaced = [p.missing["gpu_indices"] for p in server.processes if "gpu_indices" in p.missing and _has_gpus(devices)]
    lines += [("note", f"GPUs: {text}") for text in dict.fromkeys(unplaced)]
    zombies = [str(p.pid) for p in server.processes if p.zombie]
    if zombies:
        lines.append(("note", f"zombies, ended and not taken note of: pid {', '.join(zombies[:8])}"))
    return lines + [("note", text) for text in server.notes]


def _has_gpus(devices: DeviceSample | None) -> bool:
    """Whether the driver was asked at all: where it was not, one remark says so for all servers."""
    return devices is not None and devices.source.status != "unavailable"


def _remarks(report: PsReport) -> list[str]:
    remarks = [f"{s.name}: {s.reason}" for s in report.sources if s.status != "ok" and s.reason and s.name != "metrics"]
    if report.live_servers and report.unreadable_processes:
        count = n.plural(report.unreadable_processes, "process", "processes")
        remarks.append(f"{count} of other users could not be read (sudo shows them)")
    return remarks


def _wrapped(label: str, text: str, width: int, indent: int = 2) -> list[str]:
    first = " " * indent + f"{label:<{_LABEL - 2}}"
    later = " " * (indent + _LABEL - 2)
    return textwrap.wrap(
        clean(text, 600), max(width, 40), initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )
