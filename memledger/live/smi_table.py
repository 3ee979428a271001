"""The tables that `nvidia-smi` prints by default, of all ages, and the list of `nvidia-smi -L`."""

from __future__ import annotations

import re
from typing import Final

from memledger.live.smi_seen import MOST_DEVICES, Seen, known, number, process, size

BANNER: Final = re.compile(r"\bNVIDIA-SMI\s+v?(?P<smi>\d[\w.]*)")
_DRIVER: Final = re.compile(r"\b(?:Driver|KMD) Version:\s*(?P<version>\d[\w.]*)")
_CUDA: Final = re.compile(r"\bCUDA (?:UMD )?Version:\s*(?P<version>\d[\d.]*)")
_HEAD: Final = re.compile(
    r"\|\s*(?P<index>\d{1,3})\s+(?P<name>[^|]+?)\s*\|"
    r"\s*(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\b[^|]*(?:\|(?P<ecc>[^|]*))?"
)
_MODE: Final = re.compile(r"\s+(?:On|Off|N/A|WDDM|TCC|MCDM)$")
_MEMORY: Final = re.compile(r"(?P<used>\d+)\s*MiB\s*/\s*(?P<total>\d+)\s*MiB")
_MIG: Final = re.compile(r"\|\s*(?P<index>\d+)\s+(?P<gi>\d+)\s+(?P<ci>\d+)\s+(?P<device>\d+)\s*\|\s*(?P<memory>[^|]*)")
_PROCESS: Final = re.compile(
    r"\|\s*(?P<index>\d{1,3})\s+(?:(?P<gi>N/A|\d+)\s+(?P<ci>N/A|\d+)\s+)?(?P<pid>\d+)\s+(?P<kind>[CGM](?:\+[CGM])*)\s+(?P<rest>.*)"
)
_PROCESS_MEMORY: Final = re.compile(r"\s(?P<memory>\d+\s*MiB|N/A)\s*$")
_NO_LIST: Final = re.compile(r"\|\s*(?P<index>\d{1,3})\s+Not Supported\s*\|")
_LISTED: Final = re.compile(r"\bGPU (?P<index>\d{1,3}): (?P<name>.{1,100}?) \(UUID: (?P<uuid>GPU-[0-9A-Fa-f-]{8,40})\)")
_LISTED_MIG: Final = re.compile(
    r"\bMIG (?P<profile>\S{1,30})\s+Device\s+(?P<device>\d+): \(UUID: (?P<uuid>MIG-[\w/-]{8,80})\)"
)
_BORDER: Final = re.compile(r"[+|][-=+|]{10,}\s*$")

_WIDEST: Final = 400
"""No table is wider: what stands further right in a line is not looked at, so that no line takes long."""

_FREE_FROM_TOTAL: Final = 470
"""Up to this driver the table's total leaves out what the driver reserves; from 510 on it holds it."""


def tables(lines: list[str]) -> list[list[str]]:
    """The lines of each table, from one banner to the next."""
    starts = [at for at, line in enumerate(lines) if BANNER.search(line[:_WIDEST])]
    return [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=False)]


def versions(lines: list[str]) -> tuple[str | None, str | None]:
    """Driver and CUDA version of the banner."""
    text = "\n".join(line[:_WIDEST] for line in lines[:3])
    driver, cuda = _DRIVER.search(text), _CUDA.search(text)
    return (None if driver is None else driver["version"], None if cuda is None else cuda["version"])


def read_table(lines: list[str]) -> list[Seen]:
    """The devices of one table, MIG instances behind their GPU."""
    driver, _ = versions(lines)
    devices: list[Seen] = []
    section, after_head, list_ends = "gpus", 0, False
    for whole_line in lines:
        line = whole_line[:_WIDEST]
        if "Processes:" in line:
            section = "processes"
            _expect_processes(devices)
        elif "MIG devices:" in line:
            section = "mig"
        elif _BORDER.search(line):
            # The border under the last row (a log may print its own words before it): the list is whole.
            list_ends = section == "processes" and "=" not in line
        elif section == "processes":
            if list_ends:
                break
            if not line.strip():
                continue
            if "|" not in line and not line.strip().startswith("+"):
                break
            _process(line, devices)
        elif section == "mig":
            _instance(line, devices)
        elif len(devices) < MOST_DEVICES and (head := _HEAD.search(line)) is not None:
            devices.append(_head(head))
            after_head = 0
        elif devices and line.count("|") > 1:
            after_head += 1
            _body(line, devices[-1], after_head)
    if section == "processes" and not list_ends and devices:
        _say_cut(devices)
    for device in devices:
        _free(device, driver)
        if (
            not device.processes
            and device.processes is not None
            and (device.used or 0) >= 2**30
            and device.parent is None
            and not device.mig_mode  # its processes stand with its instances
        ):
            device.notes.append(
                "no process is listed although memory is used: they are in another container or belong to another user"
            )
    return devices


def read_list(lines: list[str]) -> list[Seen]:
    """The GPUs and MIG devices of `nvidia-smi -L`: names and UUIDs only."""
    devices: list[Seen] = []
    gpu: Seen | None = None
    for whole_line in lines:
        line = whole_line[:_WIDEST]
        if (found := _LISTED.search(line)) is not None:
            gpu = Seen(int(found["index"]))
            gpu.name, gpu.uuid = found["name"], found["uuid"]
            devices.append(gpu)
        elif gpu is not None and (found := _LISTED_MIG.search(line)) is not None:
            instance = Seen(parent=gpu)
            instance.name = f"{gpu.name} MIG {found['profile']}"
            instance.uuid, instance.mig_device = found["uuid"], int(found["device"])
            devices.append(instance)
    return devices


def _head(found: re.Match[str]) -> Seen:
    device = Seen(int(found["index"]))
    device.name = known(_MODE.sub("", found["name"]))
    device.bus = found["bus"]
    ecc = (found["ecc"] or "").strip()
    device.ecc = True if ecc.isdecimal() else False if ecc == "Off" else None
    device.why_no_memory = "the table is cut off before this GPU's memory"
    return device


def _body(line: str, device: Seen, row: int) -> None:
    """The second row of a GPU has its memory, the third its MIG mode."""
    cells = line.split("|")
    if row == 1:
        memory = cells[2].strip() if len(cells) > 2 else ""
        found = _MEMORY.search(memory)
        if found is not None:
            device.used, device.total = size(found["used"]), size(found["total"])
            device.why_no_memory = None
        elif len(cells) > 3:
            device.why_no_memory = f"nvidia-smi prints {known(memory) or memory or 'nothing'!r} for this GPU's memory"
    elif row == 2 and len(cells) > 3:
        mode = cells[3].strip()
        device.mig_mode = {"Enabled": True, "Enabled*": True, "Disabled": False, "Disabled*": False}.get(mode)


def _free(device: Seen, driver: str | None) -> None:
    """Old tables print a total without the driver's share, so what is not used is free."""
    if device.total is None or device.used is None:
        return
    major = number((driver or "").partition(".")[0])
    if device.parent is None and major is not None and major <= _FREE_FROM_TOTAL and device.used <= device.total:
        device.free = device.total - device.used
    device.why_no_memory = "the table does not print it (`nvidia-smi -q` does)"


def _instance(line: str, devices: list[Seen]) -> None:
    found = _MIG.search(line)
    parent = None if found is None else _gpu(devices, int(found["index"]))
    if found is None or parent is None or len(devices) >= MOST_DEVICES:
        return
    instance = Seen(parent=parent)
    instance.gpu_instance, instance.compute_instance = int(found["gi"]), int(found["ci"])
    instance.mig_device = int(found["device"])
    memory = _MEMORY.search(found["memory"])
    if memory is not None:
        instance.used, instance.total = size(memory["used"]), size(memory["total"])
    parent.mig_mode = True
    devices.append(instance)


def _gpu(devices: list[Seen], index: int) -> Seen | None:
    return next((device for device in devices if device.parent is None and device.index == index), None)


def _expect_processes(devices: list[Seen]) -> None:
    for device in devices:
        device.processes = []


def _process(line: str, devices: list[Seen]) -> None:
    refused = _NO_LIST.search(line)
    if refused is not None:
        device = _gpu(devices, int(refused["index"]))
        if device is not None:
            device.processes, device.why_no_processes = (
                None,
                'nvidia-smi prints "Not Supported" for this GPU\'s processes',
            )
        return
    found = _PROCESS.search(line)
    if found is None:
        return
    owner = _owner(devices, int(found["index"]), number(found["gi"]), number(found["ci"]))
    if owner is None:
        return
    rest = found["rest"].rstrip().removesuffix("|").rstrip()
    memory = _PROCESS_MEMORY.search(f" {rest}")
    # A row that is cut off may end in the middle of its figure: without the unit there is none.
    name = rest[: memory.start()] if memory is not None else re.sub(r"\s{2,}\d*$", "", rest)
    used = size(memory["memory"]) if memory is not None else None
    if owner.processes is None:
        owner.processes = []
    owner.processes.append(process(int(found["pid"]), found["kind"], name.strip(), used))


def _owner(devices: list[Seen], index: int, gi: int | None, ci: int | None) -> Seen | None:
    """The MIG instance of a row with ids, else the GPU."""
    if gi is not None:
        for device in devices:
            if device.parent_index == index and (device.gpu_instance, device.compute_instance) == (gi, ci):
                return device
    return _gpu(devices, index)


def _say_cut(devices: list[Seen]) -> None:
    for device in devices:
        device.notes.append("the process list is cut off: there may be more processes")
