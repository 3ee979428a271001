"""`nvidia-smi -q -x`: XML, read without its document type, so that no entity can be declared or loaded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from memledger.live.smi_seen import MOST_DEVICES, Seen, known, number, process, size

ROOT_OPENS: Final = re.compile(r"<nvidia_smi_log\b")
_ENDS: Final = "</nvidia_smi_log>"
_PIECE: Final = 2**16
MOST_ELEMENTS: Final = 500_000
"""A GPU has some 400 elements: a document with more than this is none of nvidia-smi's, and is not read to its end."""
_MODES: Final = {"Enabled": True, "Disabled": False}


class Document:
    """One `nvidia_smi_log`; `complete`: it has its end."""

    def __init__(self) -> None:
        self.devices: list[Seen] = []
        self.driver: str | None = None
        self.cuda: str | None = None
        self.taken_at: str | None = None
        self.complete = False


def read_xml(text: str) -> Document:
    """The devices of one document that begins at its root element; of a cut one, the GPUs that are whole."""
    end = text.find(_ENDS)
    found = Document()
    stop = len(text) if end < 0 else end + len(_ENDS)
    parser: XMLPullParser[Any] = XMLPullParser(["end"])
    elements = 0
    for at in range(0, stop, _PIECE):
        whole = True
        try:
            parser.feed(text[at : min(at + _PIECE, stop)])
        except ParseError:
            # What ended before the fault is read all the same.
            whole = False
        with contextlib.suppress(ParseError):
            events: Iterator[Any] = parser.read_events()
            for _, element in events:
                elements += 1
                _take(found, element)
        if not whole or elements > MOST_ELEMENTS:
            return found
    found.complete = end >= 0
    return found


def _take(found: Document, element: Any) -> None:
    if element.tag == "gpu" and len(found.devices) < MOST_DEVICES:
        _gpu(found.devices, element)
        element.clear()
    elif element.tag in {"driver_version", "kmd_version"}:
        found.driver = _version(element.text) or found.driver
    elif element.tag in {"cuda_version", "cuda_umd_version"}:
        found.cuda = _version(element.text) or found.cuda
    elif element.tag == "timestamp" and found.taken_at is None:
        found.taken_at = known(element.text)


def _version(text: str | None) -> str | None:
    match = re.match(r"\s*(\d[\w.]*)", text or "")
    return None if match is None else match[1]


def _gpu(devices: list[Seen], element: Element) -> None:
    device = Seen(sum(1 for one in devices if one.parent is None))
    device.bus = known(element.get("id"))
    device.name, device.uuid = known(element.findtext("product_name")), known(element.findtext("uuid"))
    device.addressing = known(element.findtext("addressing_mode"))
    device.ecc = _MODES.get((element.findtext("ecc_mode/current_ecc") or "").strip())
    device.mig_mode = _MODES.get((element.findtext("mig_mode/current_mig") or "").strip())
    _memory(device, element)
    devices.append(device)
    for one in element.iterfind("mig_devices/mig_device"):
        instance = Seen(parent=device)
        instance.mig_device = number(one.findtext("index"))
        instance.gpu_instance = number(one.findtext("gpu_instance_id"))
        instance.compute_instance = number(one.findtext("compute_instance_id"))
        instance.uuid = known(one.findtext("uuid"))
        _memory(instance, one)
        devices.append(instance)
    listed = element.find("processes")
    if listed is None:
        return
    if not len(listed) and (shown := (listed.text or "").strip()):
        device.why_no_processes = f"nvidia-smi prints {shown[:60]!r} for this GPU's processes"
        return
    device.processes = []
    for row in listed.iterfind("process_info"):
        _process(device, devices, row)


def _memory(device: Seen, element: Element) -> None:
    for field in ("total", "reserved", "used", "free"):
        text = element.findtext(f"fb_memory_usage/{field}")
        figure = size(text)
        setattr(device, field, figure)
        if figure is None and text is not None:
            device.why_no_memory = f"nvidia-smi prints {text.strip()[:60]!r} for it"


def _process(device: Seen, devices: list[Seen], row: Element) -> None:
    pid = number(row.findtext("pid"))
    if pid is None:
        return
    ids = (number(row.findtext("gpu_instance_id")), number(row.findtext("compute_instance_id")))
    owner = next(
        (d for d in devices if d.parent is device and (d.gpu_instance, d.compute_instance) == ids and None not in ids),
        device,
    )
    if owner.processes is None:
        owner.processes = []
    kind, name = (row.findtext("type") or "C").strip(), row.findtext("process_name")
    owner.processes.append(process(pid, kind, name, size(row.findtext("used_memory"))))
