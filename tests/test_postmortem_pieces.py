"""Memory snapshots of torch, and of the machine, as evidence for the incident that they are of."""

import json
import pickle

import pytest

from memledger.cli import app
from memledger.ledger import Source
from memledger.live.sample import Device, DeviceSample, GpuProcess, Sample
from memledger.live.snapshot import SCHEMA, Snapshot, encode

GIB = 2**30
FREE = int(0.5 * GIB)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 80.00 GiB of which "
    "512.00 MiB is free. Including non-PyTorch memory, this process has 79.40 GiB memory in use. Of the allocated memory "
    "{torch} is allocated by PyTorch, and {rest} is reserved by PyTorch but unallocated."
)


def block(size, state="active_allocated"):
    return {"address": 1, "size": size, "requested_size": size, "state": state, "frames": []}


def segment(*blocks, pool=(0, 0), stream=0, expandable=False):
    return {
        "device": 0,
        "address": 1,
        "total_size": sum(one["size"] for one in blocks),
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": pool,
        "is_expandable": expandable,
        "blocks": list(blocks),
    }


def snapshot(*segments, asked=5 * GIB, free=FREE):
    trace = [{"action": "oom", "size": asked, "device_free": free, "stream": 0, "frames": []}]
    return {"segments": list(segments), "device_traces": [trace], "allocator_settings": {}}


@pytest.fixture
def incident(tmp_path, capsysbinary):
    def read(text, *files):
        log = tmp_path / "server.log"
        log.write_text(text + "\n")
        paths = []
        for index, data in enumerate(files):
            path = tmp_path / f"beside{index}"
            path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
            paths.append(str(path))
        assert app.run(["oom", str(log), *paths, "--format", "json", "--no-live"]) == 0
        document = json.loads(capsysbinary.readouterr().out)
        (one,) = document["incidents"]
        assert all(evidence["input"] < len(document["inputs"]) for evidence in one["evidence"])
        return one

    return read


WIDE = OOM.format(asked="5.00 GiB", torch="68.00 GiB", rest="10.00 GiB")
"""More lies unallocated than was asked for."""
IN_PIECES = segment(block(4 * GIB, "inactive"), block(60 * GIB), block(4 * GIB, "inactive"))
ELSEWHERE = (
    segment(block(60 * GIB)),
    segment(block(8 * GIB, "inactive"), pool=(0, 1)),
    segment(block(2 * GIB, "inactive"), stream=7),
)


def flags(one):
    return [flag for advice in one["advice"] if advice["remedy"] for flag in advice["remedy"]["flags"]]


def test_pieces_that_would_have_served_it_are_fragmentation_for_certain(incident):
    one = incident(WIDE, snapshot(IN_PIECES))
    assert (one["kind"], one["code"], one["confidence"]) == ("fragmentation", "ML230", 0.9)
    assert "8.00 GiB lay unused" in one["cause"]
    assert any("expandable_segments" in flag for flag in flags(one))


def test_unused_memory_of_other_streams_and_private_pools_is_none(incident):
    """The message alone looks like fragmentation: 10 GiB unallocated for a request of 5."""
    assert incident(WIDE)["kind"] == "fragmentation"
    one = incident(WIDE, snapshot(*ELSEWHERE))
    assert one["kind"] != "fragmentation"
    assert not any("expandable_segments" in flag for flag in flags(one))
    assert any("no fragmentation" in note for note in one["notes"])


def test_expandable_segments_are_not_advised_where_they_are_on(incident):
    pieces = segment(*IN_PIECES["blocks"], expandable=True)
    one = incident(WIDE, snapshot(pieces))
    assert one["kind"] == "fragmentation"
    assert not any("expandable_segments" in flag for flag in flags(one))


@pytest.mark.parametrize("changes", [{"asked": 3 * GIB}, {"free": 9 * GIB}])
def test_a_snapshot_of_another_failure_says_nothing_of_this_one(incident, changes):
    one = incident(WIDE, snapshot(*ELSEWHERE, **changes))
    assert one["kind"] == "fragmentation"
    assert not any("memory snapshot" in note for note in one["notes"])


def test_a_request_is_compared_as_the_allocator_rounds_it(incident):
    text = OOM.format(asked="20.00 MiB", torch="78.00 GiB", rest="300.00 MiB")
    one = incident(text, snapshot(segment(block(60 * GIB)), asked=3 * 2**20))
    assert any("is of this failure" in note for note in one["notes"])


def test_private_pools_are_told_apart_by_their_ids(tmp_path, capsysbinary):
    path = tmp_path / "snapshot.pickle"
    graphs = [segment(block((n + 1) * GIB), pool=(0, n + 1)) for n in range(2)]
    path.write_bytes(pickle.dumps(snapshot(*graphs, segment(block(GIB)))))
    assert app.run(["oom", str(path), "--format", "json"]) == 0
    (device,) = json.loads(capsysbinary.readouterr().out)["snapshots"][0]["devices"]
    assert [(p["pool_id"], p["private"], p["reserved_bytes"]) for p in device["pools"]] == [
        ([0, 2], True, 2 * GIB),
        ([0, 1], True, GIB),
        ([], False, GIB),
    ]


# ---------------------------------------------------------------------------------------------------- the machine's snapshot

REFUSED = (
    "ValueError: Free memory on device cuda:0 (7.59/79.25 GiB) on startup is less than desired GPU memory utilization (0.85, "
    "67.36 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


def machine(*processes):
    devices = DeviceSample(Source("nvml", "ok"), devices=(Device(index=0, processes=processes),))
    return encode(Snapshot(SCHEMA, "0", Sample("2026-05-01T10:00:00+00:00", devices=devices)))


def test_a_machines_snapshot_names_the_holder(incident):
    one = incident(
        REFUSED, machine(GpuProcess(4711, int(71.4 * GIB), command="VLLM::EngineCore"), GpuProcess(9, GIB // 4))
    )
    assert any("process 4711 (VLLM::EngineCore) 71.40 GiB" in note for note in one["notes"])
    assert "Process 4711" in one["candidates"][0]["cause"]


def test_a_damaged_snapshot_is_one_sentence(tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_text(REFUSED + "\n")
    broken = tmp_path / "machine.json"
    broken.write_bytes(machine()[:200])
    assert app.run(["oom", str(log), str(broken), "--no-live"]) == app.UNREADABLE
    captured = capsys.readouterr()
    assert "other_process" in captured.out
    assert len(captured.err.strip().splitlines()) == 1
