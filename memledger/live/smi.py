"""A pasted or saved `nvidia-smi` as an offline sample: tables, `-L`, `-q`, `-q -x` and the CSV of its queries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from memledger.ledger import Source
from memledger.live import smi_table, smi_text, smi_xml
from memledger.live.sample import DeviceSample
from memledger.live.smi_seen import Seen, SmiError
from memledger.sanitize import clean

LARGEST_BYTES: Final = 16 * 2**20
"""A larger file is no saved `nvidia-smi`: the longest outputs have some 100 kB a GPU."""

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COMMAND: Final = re.compile(r"--query-(?:gpu|compute-apps)=(?P<fields>[\w.,]+)")
_FAILURES: Final = (
    ("Driver/library version mismatch", "driver and library are of different versions: reboot or reload the module"),
    ("NVIDIA-SMI has failed", "it could not reach the driver"),
    ("No devices were found", "the driver shows no GPU"),
    ("Unable to determine the device handle", "a GPU is lost: see `dmesg` for Xid lines, then reset it or reboot"),
)
_MONITOR: Final = re.compile(r"^# ?gpu\s+(?:pid|pwr)\b")
_QUOTED: Final = re.compile(r"^(?:> ?)+")


class _Found(msgspec.Struct):
    """One output in the file: where it starts, its layout, its devices."""

    line: int
    layout: str
    devices: list[Seen]
    driver: str | None = None
    cuda: str | None = None
    taken_at: str | None = None
    complete: bool = True


def read(path: Path) -> DeviceSample:
    """The sample of a file.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no `nvidia-smi` output that can be read; one sentence.
    """
    with path.open("rb") as file:
        return read_smi(file.read(LARGEST_BYTES + 1))


def read_smi(data: bytes) -> DeviceSample:
    """The sample of an output; of several, the last complete one, which `source.reason` says.

    Raises:
        ValueError: it is no `nvidia-smi` output that can be read; one sentence.
    """
    if len(data) > LARGEST_BYTES:
        raise SmiError(f"larger than {LARGEST_BYTES // 2**20} MiB: this is no nvidia-smi output")
    text = _decoded(data)
    lines = [_plain(line) for line in text.split("\n")]
    found = [*_tables(lines), *_queries(lines), *_csv(lines), *_xml("\n".join(lines))]
    found.sort(key=lambda one: one.line)
    lists = smi_table.read_list(lines)
    apps = [one for one in found if one.layout == "apps"]
    whole = [one for one in found if one.layout != "apps" and one.devices]
    if not whole and not apps and not lists:
        raise _nothing(lines)
    complete = [one for one in whole if one.complete]
    chosen = (complete or whole or [_Found(0, "list", lists) if lists else apps[-1]])[-1]
    _add(chosen, apps[-1] if apps else None, lists)
    return _sample(chosen, len(whole))


def _sample(chosen: _Found, count: int) -> DeviceSample:
    remarks = []
    if count > 1:
        remarks.append(f"{count} nvidia-smi outputs in the file: the last complete one is used")
    if not chosen.complete:
        remarks.append("the nvidia-smi output is cut off: GPUs, figures or processes may be missing")
    devices = tuple(seen.device() for seen in chosen.devices)
    if devices and all(device.total_bytes is None for device in devices):
        remarks.append(f"no GPU's memory is known: {devices[0].missing.get('total_bytes')}")
    reason = "; ".join(remarks) or None
    if remarks:
        devices = tuple(
            msgspec.structs.replace(device, notes=(*device.notes, *(r for r in remarks if r not in device.notes)))
            for device in devices
        )
    partial = not chosen.complete or any(device.total_bytes is None for device in devices)
    source = Source("smi", "partial" if partial else "ok", reason)
    shown = None if chosen.taken_at is None else clean(chosen.taken_at, 60)
    return DeviceSample(source, chosen.driver, chosen.cuda, shown, devices)


def _plain(line: str) -> str:
    """Without colours and the marks of a quotation."""
    return _QUOTED.sub("", _ESCAPES.sub("", line))


def _decoded(data: bytes) -> str:
    # PowerShell's ">" writes UTF-16.
    encoding = "utf-16" if data[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig"
    return data.decode(encoding, "replace").replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "")


def _tables(lines: list[str]) -> list[_Found]:
    found, at = [], 0
    for table in smi_table.tables(lines):
        at = next((n for n in range(at, len(lines)) if lines[n] is table[0]), at)
        driver, cuda = smi_table.versions(table)
        devices = smi_table.read_table(table)
        cut = any("cut off" in text for device in devices for text in (*device.notes, device.why_no_memory or ""))
        found.append(_Found(at, "table", devices, driver, cuda, complete=not cut))
    return found


def _queries(lines: list[str]) -> list[_Found]:
    starts = [n for n, line in enumerate(lines) if smi_text.LOG_BANNER.search(line)]
    found = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        stop = next((n for n in range(start, end) if smi_table.BANNER.search(lines[n])), end)
        read = smi_text.read_query(lines[start:stop])
        gpus = [device for device in read.devices if device.parent is None]
        complete = all(device.used is not None or device.why_no_memory for device in gpus)
        found.append(_Found(start, "query", read.devices, read.driver, read.cuda, read.taken_at, complete))
    return found


def _csv(lines: list[str]) -> list[_Found]:
    found = []
    for at, line in enumerate(lines):
        columns = _columns(line)
        if columns is not None:
            devices, driver = smi_text.read_rows(columns, lines, at + 1)
            found.append(_Found(at, "apps" if "pid" in columns else "csv", devices, driver))
    return found


def _columns(line: str) -> dict[str, tuple[int, str]] | None:
    """The columns of the CSV that begins below this line: it is a header, or the command that printed none."""
    if "," not in line:
        return None
    if "noheader" in line and (command := _COMMAND.search(line[:2000])) is not None:
        return smi_text.header(command["fields"])
    return smi_text.header(line)


def _xml(text: str) -> list[_Found]:
    starts = [match.start() for match in smi_xml.ROOT_OPENS.finditer(text)]
    found, at, before = [], 0, 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=False):
        one = smi_xml.read_xml(text[start:end])
        at, before = at + text.count("\n", before, start), start
        found.append(_Found(at, "xml", one.devices, one.driver, one.cuda, one.taken_at, one.complete))
    return found


def _add(chosen: _Found, apps: _Found | None, lists: list[Seen]) -> None:
    """What other outputs in the same file say of the same devices: names and UUIDs, and the list of processes."""
    for other in lists:
        same = next((one for one in chosen.devices if one is not other and one.is_same(other)), None)
        if same is not None:
            same.fill_from(other)
    if apps is None or apps is chosen:
        return
    for other in apps.devices:
        same = next((one for one in chosen.devices if one.is_same(other)), None)
        if same is None and len(chosen.devices) == 1 and other.uuid is None and other.bus is None:
            same = chosen.devices[0]
        if same is not None and same.processes is None:
            same.processes = other.processes


def _nothing(lines: list[str]) -> SmiError:
    for line in lines[:200]:
        for words, why in _FAILURES:
            if words in line:
                return SmiError(f"nvidia-smi itself failed: {why}")
        if _MONITOR.match(line):
            return SmiError(
                "this is `nvidia-smi pmon` or `dmon`, whose `mem` is bandwidth and no size: use `nvidia-smi -q`"
            )
        refused = smi_text.no_header(line)
        if refused is not None:
            return refused
    if any(smi_table.BANNER.search(line) for line in lines):
        return SmiError("the nvidia-smi table is cut off before its first GPU")
    return SmiError("no nvidia-smi output in it: its table, `-q`, `-q -x`, `-L` or CSV with a header is read")
