"""Fixtures of running servers: a log, an NVML scenario, and the rest of the machine (`fixtures/live-*`)."""

import json
import re
from datetime import datetime
from pathlib import Path

import msgspec
import nvml_fake

from memledger import findings
from memledger.findings import live as live_findings
from memledger.ledger import Source
from memledger.live import gather, nvml
from memledger.live.sample import LiveServer, Sample
from memledger.pipeline import explain
from memledger.reconcile import reconcile

FOLDER = Path(__file__).parent.parent / "fixtures"
CASES = sorted(path.parent.name for path in FOLDER.glob("live-*/machine.json"))


def log_report(case):
    machine = json.loads((FOLDER / case / "machine.json").read_text())
    report = findings.attach(explain([str(FOLDER / machine["log"])]))
    (item,) = report.inputs
    return msgspec.structs.replace(report, inputs=(msgspec.structs.replace(item, path="server.log"),))


def sample(case, scenario=None):
    """The case's sample, its devices read from the scenario through the unmodified pynvml."""
    machine = json.loads((FOLDER / case / "machine.json").read_text())
    with nvml_fake.installed(scenario or FOLDER / case / "nvml.ini"):
        devices = nvml.sample()
    named = machine.get("named", {})
    changed = tuple(
        msgspec.structs.replace(
            d, processes=tuple(msgspec.structs.replace(p, **named.get(str(p.pid), {})) for p in d.processes or ())
        )
        for d in devices.devices
    )
    devices = msgspec.structs.replace(devices, devices=changed)
    server = msgspec.convert(machine["server"], LiveServer)
    taken = gather.compose(devices, (server,), host_pids=machine["host_pids"])
    return msgspec.structs.replace(taken, taken_at=machine["taken_at"], host="gpu-host", system="Linux")


def lined_up(case, scenario=None):
    return live_findings.attach(reconcile(log_report(case), sample(case, scenario), own_log=True))


__all__ = ["CASES", "FOLDER", "Sample", "Source", "lined_up", "log_report", "sample"]


def moved(text, to):
    """A log with its clock moved, so that its first line stands at `to` (SGLang's and vLLM's prefixes)."""
    stamp = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)|(?<= )(\d\d-\d\d \d\d:\d\d:\d\d)(?= \[)")

    def parse(found):
        return datetime.fromisoformat(found[1] or f"{to.year}-{found[2]}")

    first = next(stamp.finditer(text))
    by = to - parse(first)

    def put(found):
        then = parse(found) + by
        return f"[{then:%Y-%m-%d %H:%M:%S}" if found[1] else f"{then:%m-%d %H:%M:%S}"

    return stamp.sub(put, text)


def renamed(text, pids):
    """A log with other process ids: `{190: 5601}`."""
    for old, new in pids.items():
        text = re.sub(rf"\bpid={old}\b", f"pid={new}", text)
    return text
