"""PyTorch memory snapshots: their sums, and pickles that are hostile, damaged or of something else."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from memledger.cli import app
from memledger.postmortem import torch_snapshot
from memledger.postmortem.torch_snapshot import SnapshotPickleError, read

GIB = 2**30
OWN = {"filename": "/home/somebody/site-packages/vllm/v1/worker/gpu_model_runner.py", "line": 9, "name": "load_model"}
TORCH = {"filename": "/opt/site-packages/torch/nn/modules/linear.py", "line": 3, "name": "forward"}


def block(size, state="active_allocated", frames=(TORCH, OWN)):
    return {"address": 1, "size": size, "requested_size": size, "state": state, "frames": list(frames)}


def segment(*blocks, device=0, pool=(0, 0), expandable=False, stream=0, kind="large"):
    size = sum(one["size"] for one in blocks)
    return {
        "device": device,
        "address": 1,
        "total_size": size,
        "stream": stream,
        "segment_type": kind,
        "segment_pool_id": pool,
        "is_expandable": expandable,
        "blocks": list(blocks),
    }


def oom(size, free):
    return {"action": "oom", "size": size, "device_free": free, "stream": 0, "frames": [TORCH, OWN]}


def snapshot(*segments, trace=(), **settings):
    return {"segments": list(segments), "device_traces": [list(trace)], "allocator_settings": settings}


@pytest.fixture
def written(tmp_path):
    def write(data):
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
        return path

    return write


def said(path):
    with pytest.raises(SnapshotPickleError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestSums:
    def test_reserved_is_allocated_waiting_and_inactive(self, written):
        parts = [block(12 * GIB), block(GIB, "active_pending_free"), block(3 * GIB, "inactive")]
        (device,) = read(written(snapshot(segment(*parts)))).devices
        assert (device.allocated_bytes, device.pending_bytes, device.inactive_bytes) == (12 * GIB, GIB, 3 * GIB)
        assert device.reserved_bytes == 16 * GIB

    def test_private_pools_are_told_apart_and_their_rest_serves_nobody(self, written):
        graphs = segment(block(2 * GIB), block(5 * GIB, "inactive"), pool=(0, 1))
        (device,) = read(written(snapshot(segment(block(GIB, "inactive")), graphs))).devices
        assert (device.private_pools_bytes, device.private_unused_bytes) == (7 * GIB, 5 * GIB)
        assert device.largest_inactive_bytes == GIB
        assert [(p.private, p.reserved_bytes) for p in device.pools] == [(True, 7 * GIB), (False, GIB)]

    def test_the_frame_is_the_innermost_outside_torch_without_the_folders_above(self, written):
        (device,) = read(written(snapshot(segment(block(GIB), block(2 * GIB), block(GIB, frames=[]))))).devices
        (share,) = device.largest
        assert share.frame == "v1/worker/gpu_model_runner.py:9 load_model"
        assert (share.bytes, share.blocks, device.without_frames_bytes) == (3 * GIB, 2, GIB)

    def test_the_last_failed_request(self, written):
        trace = [oom(GIB, 9), oom(5 * GIB, 7), {"action": "snapshot", "size": 0}]
        (device,) = read(written(snapshot(segment(block(GIB)), trace=trace))).devices
        assert (device.last_oom.requested_bytes, device.last_oom.free_bytes) == (5 * GIB, 7)

    def test_devices_and_settings(self, written):
        found = read(written(snapshot(segment(block(1), device=1), segment(block(2)), expandable_segments=True)))
        assert [device.device for device in found.devices] == [0, 1]
        assert found.settings == {"expandable_segments": "True"}

    def test_the_older_layout_is_a_list_of_segments_with_histories(self, written):
        old = {"address": 1, "size": GIB, "state": "active_allocated", "history": [{"addr": 1, "frames": [OWN]}]}
        (device,) = read(written([segment(old)])).devices
        assert device.largest[0].bytes == GIB


class TestWhatTheRequestCouldHaveHad:
    """Fragmentation is said only of pieces that torch may place the request in."""

    PIECES = (block(4 * GIB, "inactive"), block(GIB), block(4 * GIB, "inactive"))

    def found(self, written, *segments, **entry):
        (device,) = read(written(snapshot(*segments, trace=[{**oom(5 * GIB, 7), **entry}]))).devices
        return device.last_oom.usable_bytes, device.last_oom.largest_usable_bytes

    def test_pieces_of_its_stream(self, written):
        assert self.found(written, segment(*self.PIECES)) == (8 * GIB, 4 * GIB)

    @pytest.mark.parametrize("other", [{"stream": 7}, {"pool": (0, 1)}, {"kind": "small"}])
    def test_pieces_of_another_stream_pool_or_kind_do_not_count(self, written, other):
        mine = segment(block(GIB, "inactive"))
        assert self.found(written, mine, segment(*self.PIECES, **other)) == (GIB, GIB)

    def test_such_pieces_are_not_called_fragmentation(self, written, capsys):
        both = [segment(block(3 * GIB, "inactive"), stream=at) for at in (0, 7)]
        assert app.run(["oom", str(written(snapshot(*both, trace=[oom(5 * GIB, 7)])))]) == app.DONE
        out = capsys.readouterr().out
        assert "Not fragmentation: 3.00 GiB" in out
        assert "expandable_segments" not in out

    @pytest.mark.parametrize("unknown", [{"stream": None}, {"pool_id": (0, 2)}])
    def test_it_is_unknown_where_the_history_does_not_say(self, written, unknown, capsys):
        assert self.found(written, segment(*self.PIECES), **unknown) == (None, None)
        app.run(["oom", str(written(snapshot(segment(*self.PIECES), trace=[{**oom(5 * GIB, 7), **unknown}])))])
        out = capsys.readouterr().out
        assert "is not known" in out
        assert "ragmentation:" not in out


class Runs:
    """An object whose loading would run a command."""

    def __reduce__(self):
        return (os.system, ("exit 1",))


class TestHostile:
    def test_a_global_is_refused_and_nothing_runs(self, written):
        assert "would run code of posix.system" in said(written(pickle.dumps(Runs())))

    @pytest.mark.parametrize(
        "opcodes", [b"cbuiltins\neval\n.", b"\x8c\x08builtins\x8c\x04eval\x93.", b"(ibuiltins\neval\n."]
    )
    def test_every_opcode_for_globals(self, written, opcodes):
        assert "would run code of builtins.eval" in said(written(b"\x80\x04" + opcodes))

    @pytest.mark.parametrize("opcodes", [b"K\x01Q.", b"Pname\n."])
    def test_persistent_ids(self, written, opcodes):
        assert "refers to objects outside itself" in said(written(b"\x80\x04" + opcodes))

    @pytest.mark.parametrize(
        "opcodes",
        [
            b"K\x01r\xff\xff\xff\x7f.",  # a memo of 2^31 entries
            b"\x8e" + (2**32).to_bytes(8, "little") + b"abc.",  # 4 GiB of bytes that are not there
            b"\x8b" + (2**31 - 1).to_bytes(4, "little") + b"abc.",  # an integer of 2 GiB
        ],
    )
    def test_a_few_bytes_that_ask_for_gigabytes(self, written, opcodes):
        found = said(written(b"\x80\x04" + opcodes))
        assert "asks for more than 512 MiB" in found or "cut off or damaged" in found

    def test_one_list_that_stands_in_the_pickle_a_hundred_thousand_times(self, written, monkeypatch):
        many = [block(1, "inactive", frames=[])] * 100_000
        assert "more than 20,000,000 blocks" in said(written({"segments": [segment(*many)] * 1000}))

    def test_nested_a_million_deep(self, written):
        deep = b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b"."
        assert "a pickle of something else" in said(written(deep))

    def test_extension_codes_and_damage(self, written):
        whole = pickle.dumps(snapshot(segment(block(GIB))))
        for data in (b"\x80\x04\x82\x01.", whole[:40], whole[:-30], b"\x80\x04" + bytes(range(256))):
            assert "cut off or damaged" in said(written(data)) or "refused" in said(written(data))

    @pytest.mark.parametrize(
        "data",
        [
            {"a": 1},
            [1, 2],
            {"segments": {}},
            {"segments": [{"total_size": "x"}]},
            {"segments": [{"total_size": 2**70}]},
            {"segments": [{"total_size": True}]},
            {"segments": [{"total_size": -GIB}]},
            {"segments": [{"total_size": GIB, "device": -1}]},
        ],
    )
    def test_a_pickle_of_something_else(self, written, data):
        assert "a pickle of something else" in said(written(data))

    def test_a_block_of_an_unknown_state_is_counted_as_nothing(self, written):
        assert "has the state lent" in said(written(snapshot(segment(block(GIB, "lent")))))

    @pytest.mark.parametrize(
        ("ended", "sentence"),
        [(-11, "ended with -11"), (1, "ended with 1"), (3, "asks for more"), (-24, "asks for more")],
    )
    def test_a_loading_process_that_crashes_is_not_called_a_limit(self, written, monkeypatch, ended, sentence):
        done = subprocess.CompletedProcess([], ended, b"", b"")
        monkeypatch.setattr(torch_snapshot.subprocess, "run", lambda *_, **__: done)
        assert sentence in said(written(snapshot(segment(block(GIB)))))

    def test_a_key_nested_a_million_deep_is_refused(self, written):
        deep_key = b"})" + b"\x85" * 1_000_000 + b"K\x01s."
        assert "snapshot.pickle: " in said(written(b"\x80\x04" + deep_key))

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
    @pytest.mark.parametrize("opcodes", [b"K\x01r\xff\xff\xff\x7f.", b"\x8e" + (2**32).to_bytes(8, "little") + b"abc."])
    def test_a_few_bytes_take_no_gigabytes_of_this_machine(self, written, opcodes):
        program = (
            "import resource, sys\nfrom pathlib import Path\nfrom memledger.postmortem import torch_snapshot as t\n"
            "try:\n    t.read(Path(sys.argv[1]))\nexcept t.SnapshotPickleError:\n    pass\n"
            # Not this process's `ru_maxrss`: it begins with what the tests' process holds, which it was forked from.
            "own = next(line for line in open('/proc/self/status') if line.startswith('VmHWM:'))\n"
            "print(max(int(own.split()[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))"
        )
        path = written(b"\x80\x04" + opcodes)
        peak = subprocess.run([sys.executable, "-c", program, path], capture_output=True, check=True, text=True).stdout
        assert int(peak) * 1024 < torch_snapshot.LEAST_MEMORY

    def test_files_that_are_no_pickles(self, written, tmp_path):
        assert "a zip archive" in said(written(b"PK\x03\x04rest"))
        assert "no pickle" in said(written(b"INFO 09-09 a log"))
        assert "no such file" in said(tmp_path / "nowhere")
        assert "not a regular file" in said(tmp_path)

    def test_text_in_it_reaches_no_terminal(self, written, capsys):
        frame = {"filename": "/a/\x1b[31mred.py", "line": 1, "name": "\x07bell"}
        path = written(snapshot(segment(block(GIB, frames=[frame])), **{"\x1b[2J": "x"}))
        for form in ("text", "markdown", "json"):
            assert app.run(["oom", str(path), "--format", form]) == app.DONE
            out = capsys.readouterr().out
            assert "\x1b" not in out
            assert "\x07" not in out


class TestCommand:
    def test_a_snapshot_among_the_files_is_recognised(self, written, capsys):
        trace = [oom(5 * GIB, 7)]
        pieces = [block(4 * GIB, "inactive"), block(12 * GIB), block(4 * GIB, "inactive")]
        assert app.run(["oom", str(written(snapshot(segment(*pieces), trace=trace)))]) == app.DONE
        out = capsys.readouterr().out
        assert "Fragmentation: 8.00 GiB lay unused" in out
        assert "in pieces of 4.00 GiB at most" in out
        assert "expandable_segments:True" in out

    def test_what_could_not_have_served_the_request_is_no_fragmentation(self, written, capsys):
        path = written(snapshot(segment(block(12 * GIB), block(GIB, "inactive")), trace=[oom(5 * GIB, 7)]))
        assert app.run(["oom", "--snapshot-pickle", str(path)]) == app.DONE
        assert "Not fragmentation" in capsys.readouterr().out

    def test_one_that_is_refused_is_an_input_that_cant_be_read(self, written, capsys):
        assert app.run(["oom", str(written(pickle.dumps(Runs()))), "--format", "json"]) == app.UNREADABLE
        shown = capsys.readouterr()
        assert '"snapshots": []' in shown.out
        assert "would run code" in shown.err
