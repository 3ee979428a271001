"""Hand-built servers and reports that several tests share."""

from memledger.ledger import (
    Capacity,
    Evidence,
    Input,
    Rank,
    Reading,
    Report,
    Server,
    Source,
    Span,
    Unrecognized,
    Usage,
    build_stages,
    close,
    entry,
)
from memledger.units import GIB, MIB, Amount


def gib(value, tolerance=0.005):
    return Amount(round(value * GIB), round(tolerance * GIB))


def at(line, text=None):
    return (Evidence(0, line, text or f"text of line {line}"),)


def rank(opening, readings, entries, *, candidates=None, base="first_reading", **changes):
    stages = build_stages(
        Reading("init", gib(opening)), [Reading(name, gib(free)) for name, free in readings], entries, candidates
    )
    residual = close(base, gib(opening), entries)
    return Rank(**{"tp": 0, "entries": entries, "stages": stages, "residual": residual, **changes})


NOTHING_UNREAD = Unrecognized()


def report(*servers, unrecognized=NOTHING_UNREAD, paths=("server.log",)):
    inputs = tuple(Input(path, 1000, 100) for path in paths)
    return Report("0.1.0", inputs, (Source("log", "ok"),), servers, unrecognized)


# One 27-billion hybrid on one 80 GB card: 124 state slots at 5 a request, at most 3 requests ever running.
SLOT_BYTES = round(146.8125 * MIB)
HYBRID_ENTRIES = (
    entry("weights/model", gib(28.47), "logged", stage="weights", evidence=at(71)),
    entry("recurrent_state/conv", gib(0.34), "logged", stage="pools", evidence=at(87), rows=125, slots=124),
    entry("recurrent_state/ssm", gib(17.58), "logged", stage="pools", evidence=at(87), rows=125, slots=124),
    entry("kv_cache/k", gib(10.08), "logged", stage="pools", evidence=at(88), dtype="torch.bfloat16"),
    entry("kv_cache/v", gib(10.08), "logged", stage="pools", evidence=at(88), dtype="torch.bfloat16"),
    entry("workspace", gib(0.38), "assumed", stage="warmup", note="FlashInfer"),
    entry("cuda_graphs/prefill", gib(2.00), "logged", stage="graphs", evidence=at(139)),
    entry("cuda_graphs/decode", gib(0.10), "logged", stage="graphs", evidence=at(140)),
    entry("free", gib(8.90), "logged", stage="final", evidence=at(152)),
)
HYBRID_READINGS = [("weights", 50.01), ("pools", 11.93), ("warmup", 11.0), ("graphs", 8.90)]
HYBRID_CAPACITY = Capacity(kv_tokens=330323, state_slots=124, slots_per_request=5, max_running_requests=24)


def hybrid_rank(**changes):
    figures = {"candidates": {"warmup": ("attention workspaces", "cuBLAS handles")}, "capacity": HYBRID_CAPACITY}
    return rank(78.48, HYBRID_READINGS, HYBRID_ENTRIES, **{**figures, **changes})


def hybrid(**changes):
    usage = Usage(
        peak_running_requests=3,
        peak_queued_requests=0,
        peak_kv_usage=0.12,
        peak_state_usage=0.12,
        peak_state_slots=15,
        seen=True,
    )
    given = {
        "framework": "sglang",
        "framework_version": "0.5.18",
        "model": "/models/Qwen3.8-27B-FP8",
        "span": (Span(0, 1, 900),),
        "started_at": "2026-09-09T11:57:18",
        "ended_at": "2026-09-09T17:57:18",
        "state": "serving",
        "config": {"context_length": 262144, "memory_fraction": 0.85, "tp_size": 1},
        "ranks": (hybrid_rank(),),
        "usage": usage,
    }
    return Server(**{**given, **changes})


def dense_rank(tp=0, weights=15.0, opening=23.5, **changes):
    entries = (
        entry("weights/model", gib(weights), "logged", stage="weights", evidence=at(20)),
        entry("kv_cache/k", gib(2.5), "logged", stage="pools", evidence=at(30)),
        entry("kv_cache/v", gib(2.5), "logged", stage="pools", evidence=at(30)),
        entry("free", gib(3.5), "logged", stage="final", evidence=at(50)),
    )
    readings = [("weights", opening - weights), ("pools", opening - weights - 5.0), ("final", 3.5)]
    return rank(opening, readings, entries, **{"tp": tp, "capacity": Capacity(kv_tokens=40960), **changes})


def dense(**changes):
    given = {
        "framework": "sglang",
        "framework_version": "0.4.6",
        "model": "org/Dense-7B",
        "state": "serving",
        "span": (Span(0, 1, 90),),
        "ranks": (dense_rank(),),
    }
    return Server(**{**given, **changes})
