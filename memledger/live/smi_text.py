"""`nvidia-smi -q`: "name : value" under headings; and the CSV of its `--query-gpu` and `--query-compute-apps`."""

from __future__ import annotations

import re
from typing import Final

from memledger.live.smi_seen import MOST_DEVICES, Seen, SmiError, known, number, process, size

LOG_BANNER: Final = re.compile(r"=\s*NVSMI LOG\s*=")
_GPU: Final = re.compile(r"^\s*GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$")
_PAIR: Final = re.compile(r"^(?P<indent>[ \t]*)(?P<key>\S[^:]{0,60}?)\s*:\s+(?P<value>\S.*)$")
_VERSION: Final = re.compile(r"\d[\w.]*")
_MODES: Final = {"Enabled": True, "Disabled": False}
_UNIT: Final = re.compile(r"^(?P<name>[\w.]+)\s*(?:\[(?P<unit>\w+)\])?$")
_GPU_FIELDS: Final = frozenset({"memory.total", "memory.reserved", "memory.used", "memory.free"})
_MOST_COMMAS: Final = 50
_APP_MEMORY: Final = ("used_gpu_memory", "used_memory")
_BARE_APP: Final = re.compile(r"^\s*(?P<pid>\d{1,7}),\s*(?P<name>[^,]{1,400}),\s*(?P<memory>\d+ MiB|\[N/A\])\s*$")


class QueryReader:
    """The devices of one `nvidia-smi -q`; fed line by line."""

    def __init__(self) -> None:
        self.devices: list[Seen] = []
        self.driver: str | None = None
        self.cuda: str | None = None
        self.taken_at: str | None = None
        self._gpus = 0
        self._gpu: Seen | None = None
        self._instance: tuple[Seen, int] | None = None
        self._heading = ""
        self._row: dict[str, str] = {}

    def feed(self, line: str) -> None:
        """One more line."""
        found = _GPU.match(line)
        if found is not None and len(self.devices) < MOST_DEVICES:
            self._end_process()
            self._gpu = Seen(self._gpus)
            self._gpu.bus = found["bus"]
            self._gpus += 1
            self._instance, self._heading = None, ""
            self.devices.append(self._gpu)
            return
        pair = _PAIR.match(line)
        if pair is None:
            self._head(line)
            return
        key, value = pair["key"].strip(), pair["value"].strip()
        if self._gpu is None:
            self._global(key, value)
            return
        if self._instance is not None and len(pair["indent"].expandtabs()) <= self._instance[1]:
            self._instance = None
        self._value(self._gpu, key, value)

    def end(self) -> None:
        """No further line comes."""
        self._end_process()

    def _global(self, key: str, value: str) -> None:
        if key in {"Driver Version", "KMD Version"} and (found := _VERSION.match(value)):
            self.driver = found[0]
        elif key in {"CUDA Version", "CUDA UMD Version"} and (found := _VERSION.match(value)):
            self.cuda = found[0]
        elif key == "Timestamp":
            self.taken_at = value

    def _head(self, line: str) -> None:
        heading, indent = line.strip(), len(line.expandtabs()) - len(line.expandtabs().lstrip())
        if not heading or self._gpu is None:
            return
        self._end_process()
        if self._instance is not None and indent <= self._instance[1]:
            self._instance = None
        if heading == "MIG Device" and len(self.devices) < MOST_DEVICES:
            instance = Seen(parent=self._gpu)
            self._instance = (instance, indent)
            self.devices.append(instance)
        elif heading == "Processes":
            self._instance = None
            self._gpu.processes = []
        self._heading = heading

    def _value(self, gpu: Seen, key: str, value: str) -> None:
        if key == "Processes":
            self._heading = ""
            if value == "None":
                gpu.processes = []
            else:
                gpu.why_no_processes = f"nvidia-smi prints {value!r} for this GPU's processes"
        elif self._heading in {"FB Memory Usage", "Shared FB Memory Usage"}:
            self._memory(self._instance[0] if self._instance is not None else gpu, key, value)
        elif self._heading == "Processes":
            if key in self._row or (key == "GPU instance ID" and "Process ID" in self._row):
                self._end_process()
            self._row[key] = value
        elif self._instance is not None:
            self._of_instance(self._instance[0], key, value)
        elif self._heading == "MIG Mode" and key == "Current":
            gpu.mig_mode = _MODES.get(value)
        elif self._heading == "ECC Mode" and key == "Current":
            gpu.ecc = _MODES.get(value)
        elif key == "Product Name":
            gpu.name = known(value)
        elif key == "GPU UUID":
            gpu.uuid = known(value)
        elif key == "Addressing Mode":
            gpu.addressing = known(value)

    @staticmethod
    def _of_instance(instance: Seen, key: str, value: str) -> None:
        if key == "Index":
            instance.mig_device = number(value)
        elif key == "GPU Instance ID":
            instance.gpu_instance = number(value)
        elif key == "Compute Instance ID":
            instance.compute_instance = number(value)

    @staticmethod
    def _memory(device: Seen, key: str, value: str) -> None:
        field = key.lower()
        if field not in {"total", "reserved", "used", "free"}:
            return
        # Without its unit the figure may be cut off.
        figure = size(value) if value.endswith("B") else None
        setattr(device, field, figure)
        if figure is None:
            device.why_no_memory = f"nvidia-smi prints {value[:60]!r} for it"

    def _end_process(self) -> None:
        row, self._row = self._row, {}
        pid = number(row.get("Process ID"))
        if self._gpu is None or pid is None:
            return
        owner = self._gpu
        ids = (number(row.get("GPU instance ID")), number(row.get("Compute instance ID")))
        for device in self.devices:
            if device.parent is self._gpu and (device.gpu_instance, device.compute_instance) == ids:
                owner = device
        memory = row.get("Used GPU Memory", "")
        if owner.processes is None:
            owner.processes = []
        used = size(memory) if memory.endswith("B") else None
        owner.processes.append(process(pid, row.get("Type", "C"), row.get("Name"), used))


def read_query(lines: list[str]) -> QueryReader:
    """The devices of one `nvidia-smi -q`."""
    reader = QueryReader()
    for line in lines:
        reader.feed(line)
    reader.end()
    return reader


def header(line: str) -> dict[str, tuple[int, str]] | None:
    """The columns of a CSV header: name to place and unit; None where the line is none."""
    found: dict[str, tuple[int, str]] = {}
    for at, cell in enumerate(line.strip().split(",")):
        match = _UNIT.match(cell.strip())
        if match is None:
            return None
        found[match["name"]] = (at, match["unit"] or "MiB")
    gpus = "memory.total" in found or "memory.used" in found
    return found if gpus or ("pid" in found and any(name in found for name in _APP_MEMORY)) else None


def read_rows(columns: dict[str, tuple[int, str]], lines: list[str], start: int = 0) -> tuple[list[Seen], str | None]:
    """The devices of the rows below a CSV header (from line `start` on), and the driver's version where it is a column."""
    devices: list[Seen] = []
    driver: str | None = None
    width = max(at for at, _ in columns.values()) + 1
    for at_line in range(start, len(lines)):
        line = lines[at_line]
        cells = _cells(line, columns, width)
        if len(cells) != width or len(devices) >= MOST_DEVICES or header(line) is not None:
            break
        if at_line + 1 == len(lines) and cells[-1].isdecimal():
            # The file ends without a line's end: without its unit the last figure may be cut off.
            cells[-1] = ""
        row = {name: cells[at] for name, (at, _) in columns.items()}
        driver = driver or known(row.get("driver_version"))
        device = _row_device(row, columns)
        if "pid" in columns:
            _app(device, row, columns, devices)
        else:
            device.index = device.index if device.index is not None or device.uuid or device.bus else len(devices)
            devices.append(device)
    return devices, driver


def _cells(line: str, columns: dict[str, tuple[int, str]], width: int) -> list[str]:
    """The cells of a row; a process's name may hold commas, which `nvidia-smi` does not quote."""
    cells = [cell.strip() for cell in line.split(",", width + _MOST_COMMAS)]
    surplus = len(cells) - width
    if surplus > 0 and "process_name" in columns:
        at = columns["process_name"][0]
        cells[at : at + surplus + 1] = [", ".join(cells[at : at + surplus + 1])]
    return cells


def _row_device(row: dict[str, str], columns: dict[str, tuple[int, str]]) -> Seen:
    device = Seen(number(row.get("index")))
    device.uuid = known(row.get("uuid") or row.get("gpu_uuid"))
    device.name = known(row.get("name") or row.get("gpu_name"))
    device.bus = known(row.get("pci.bus_id") or row.get("gpu_bus_id"))
    device.ecc = _MODES.get(row.get("ecc.mode.current", ""))
    device.mig_mode = _MODES.get(row.get("mig.mode.current", ""))
    device.addressing = known(row.get("addressing_mode"))
    for field in _GPU_FIELDS & row.keys():
        figure = size(row[field], columns[field][1])
        setattr(device, field.removeprefix("memory."), figure)
        if figure is None:
            device.why_no_memory = f"nvidia-smi prints {row[field][:60]!r} for it"
    return device


def _app(device: Seen, row: dict[str, str], columns: dict[str, tuple[int, str]], devices: list[Seen]) -> None:
    pid = number(row["pid"])
    if pid is None:
        return
    same = next((one for one in devices if one.is_same(device)), None)
    nameless = device.uuid is None and device.bus is None
    if same is None and nameless and devices:
        same = devices[0]
    if same is None:
        same = device
        same.processes = []
        devices.append(same)
    field = next(name for name in _APP_MEMORY if name in row)
    name = row.get("process_name") or row.get("name")
    if same.processes is not None:
        same.processes.append(process(pid, "C", name, size(row[field], columns[field][1])))


def no_header(line: str) -> SmiError | None:
    """The refusal of CSV without a header: what each figure means can't be told."""
    cells = line.split(",")
    sized = sum(1 for cell in cells if re.fullmatch(r"\s*\d+ MiB\s*", cell))
    if _BARE_APP.match(line) or (len(cells) > 1 and sized):
        return SmiError("CSV without a header does not say which figure is which: leave out `noheader`")
    if len(cells) > 2 and sum(cell.strip().isdecimal() for cell in cells) >= 3:
        return SmiError(
            "this looks like CSV without a header, which does not say which figure is which: leave out `noheader`"
        )
    return None
