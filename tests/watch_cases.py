"""Watches of the fixtures' servers, as events: what a feed would tell."""

from datetime import datetime, timedelta, timezone

import live_cases
import msgspec

from memledger.live.sample import Metrics
from memledger.units import MIB
from memledger.watch.moment import Moment, Start

BEGIN = datetime(2026, 12, 1, 10, 0, 0, tzinfo=timezone.utc)
CASE = "live-sglang-hybrid"


def at(seconds):
    return (BEGIN + timedelta(seconds=seconds)).isoformat(timespec="seconds")


def start(case=CASE, *, run="run1", seconds=0, pid=None, report="log"):
    found = live_cases.log_report(case) if report == "log" else report
    return Start(run, at(seconds), 1.0, found, pid or live_cases.sample(case).servers[0].pid, True, False)


def moment(sample, seconds, *, running=2, kv=0.3, own=0, others=0):
    """The sample some seconds later: the first process of each device holds `own` MiB more, a stranger `others` MiB."""
    devices = tuple(_device(d, own * MIB, others * MIB) for d in sample.devices.devices)
    servers = tuple(
        msgspec.structs.replace(s, metrics=Metrics(running_requests=running, queued_requests=0, kv_usage=kv))
        for s in sample.servers
    )
    changed = msgspec.structs.replace(
        sample,
        taken_at=at(seconds),
        devices=msgspec.structs.replace(sample.devices, devices=devices),
        servers=servers,
    )
    return Moment(at(seconds), float(seconds), changed)


def _device(device, own, others):
    first, *rest = device.processes
    processes = [msgspec.structs.replace(first, used_bytes=first.used_bytes + own), *rest]
    if others:
        stranger = msgspec.structs.replace(first, pid=99_999, used_bytes=others, command="python train.py", user="erin")
        processes.append(stranger)
    taken = own + others
    return msgspec.structs.replace(
        device,
        used_bytes=device.used_bytes + taken,
        free_bytes=device.free_bytes - taken,
        processes=tuple(processes),
    )


def fed(board, events):
    for event in events:
        board.take(event)
    return board
