"""Incidents for the tests of their reports, as values."""

from memledger.ledger import Evidence, Finding, Input, Remedy, Server, Source, Span
from memledger.postmortem.incident import (
    Advice,
    Candidate,
    Decoded,
    Holder,
    Incident,
    Link,
    Moment,
    Numbers,
    OomReport,
    OtherProcess,
    ServerState,
)
from memledger.units import GIB, MIB


def gib(value):
    return round(value * GIB)


def at(line, text="a line", source=0):
    return (Evidence(source, line, text),)


def server(**changes):
    fields = {
        "framework": "vllm",
        "framework_version": "0.25.0",
        "model": "/models/example-hybrid-30b",
        "span": (Span(0, 1, 90),),
        "started_at": "2026-09-09T11:50:00",
        "state": "failed",
    }
    return Server(**{**fields, **changes})


def prefill(**changes):
    """2.00 GiB asked for in a prefill with 1.91 GiB free; the rows sum to the total."""
    fields = {
        "kind": "prefill",
        "phase": "prefill",
        "confidence": 0.7,
        "cause": "a prefill of 8,192 tokens asked for 2.00 GiB with 1.91 GiB free",
        "server": 0,
        "at": "2026-09-09T12:03:11",
        "fatal": True,
        "device_memory": True,
        "ranks": ("TP0", "TP1"),
        "numbers": Numbers(
            gpu_index=3,
            requested_bytes=gib(2),
            total_bytes=gib(95),
            free_bytes=gib(1.91),
            process_bytes=gib(92.57),
            torch_allocated_bytes=gib(89.02),
            reserved_unallocated_bytes=gib(1.44),
            other_processes=(OtherProcess(4242, gib(0.3), "python3"),),
        ),
        "request": Decoded("between 1.995 and 2.005 GiB", low_bytes=gib(1.995), high_bytes=gib(2.005)),
        "state": ServerState(1, 0, 0.12, None, 8192, basis="vLLM's crash dump", at="2026-09-09T12:03:11"),
        "holders": (
            Holder("this process", gib(92.57), 5 * MIB, evidence=at(70)),
            Holder("allocated by PyTorch", gib(89.02), 5 * MIB, level=1, evidence=at(70)),
            Holder("reserved, not allocated", gib(1.44), 5 * MIB, level=1, evidence=at(70)),
            Holder("outside PyTorch", gib(92.57) - gib(89.02) - gib(1.44), 15 * MIB, "derived", level=1),
            Holder("process 4242", gib(0.3), 5 * MIB, note="python3", evidence=at(70)),
            Holder("free", gib(1.91), 5 * MIB, kind="free", evidence=at(70)),
            Holder("unaccounted", gib(95) - gib(92.57) - gib(0.3) - gib(1.91), 20 * MIB, "derived", kind="unaccounted"),
            Holder("total", gib(95), 5 * MIB, kind="total", evidence=at(70)),
            Holder("asked for", gib(2), 5 * MIB, kind="asked", evidence=at(70)),
        ),
        "findings": (Finding("ML201", "out of memory", "error", gib(2), "An allocation of 2.00 GiB failed.", at(70)),),
        "evidence": at(70, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        "chain": (
            Link("CUDA out of memory", "cause", "2026-09-09T12:03:11", 1, at(70)),
            Link("EngineDeadError", "consequence", "2026-09-09T12:03:12", 4, at(80)),
        ),
        "timeline": (
            Moment("2026-09-09T11:51:00", "weights loaded", gib(54.82), None, at(4)),
            Moment("2026-09-09T11:55:00", "KV cache allocated", gib(32.32), gib(2.95), at(9)),
            Moment("2026-09-09T12:03:11", "the failure", None, gib(1.91), at(70)),
        ),
        "candidates": (
            Candidate("prefill", "the chunk's transient tensors", "CUDA_LAUNCH_BLOCKING=1 memledger oom server.log"),
            Candidate("fragmentation", "blocks too small for the request"),
        ),
        "advice": (
            Advice(
                "lower",
                "4.7 GiB less for the pools leave room for the transient",
                Remedy(("--gpu-memory-utilization", "0.89"), basis="0.94 - 4.7 / 95"),
            ),
        ),
        "collect": ("nvidia-smi at the moment of the failure",),
        "notes": ("the figures are of rank TP0",),
        "basis": "the figures and the crash dump",
    }
    return Incident(**{**fields, **changes})


def negative(**changes):
    """On-chip memory of a kernel: not the device's."""
    fields = {
        "kind": "not_device_memory",
        "phase": "serving",
        "confidence": 0.9,
        "cause": "a Triton kernel asked for 163,840 bytes of shared memory, on the chip, where the limit is 101,376",
        "device_memory": False,
        "evidence": at(12, "OutOfResources: out of resource: shared memory"),
    }
    return Incident(**{**fields, **changes})


def report(*incidents, servers=None, **changes):
    fields = {
        "version": "0.1.0",
        "inputs": (Input("server.log", 9000, 90),),
        "sources": (Source("log", "ok"),),
        "incidents": tuple(incidents),
        "servers": (server(),) if servers is None else tuple(servers),
    }
    return OomReport(**{**fields, **changes})
