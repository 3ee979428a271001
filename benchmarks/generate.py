"""A serving log of any size, the same each time: start-up, access lines, and usage lines as both engines print them.

    python benchmarks/generate.py FILE MEGABYTES

About 2 % of the lines are usage lines; the rest are access lines and a few records of other kinds.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

SHARE_OF_USAGE = 0.02
BLOCK_LINES = 4000
BLOCKS = 64

START = """\
[2026-09-09 11:50:01] server_args=ServerArgs(model_path='some/model', tp_size=2, mem_fraction_static=0.85, max_running_requests=32)
[2026-09-09 11:50:20 TP0] Load weight begin. avail mem=78.50 GB
[2026-09-09 11:51:20 TP0] Load weight end. elapsed=60.1 s, type=SomeForCausalLM, avail mem=50.00 GB, mem usage=28.50 GB.
[2026-09-09 11:51:24 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 330323, K size: 10.08 GB, V size: 10.08 GB
[2026-09-09 11:51:24 TP0] Memory pool end. avail mem=29.00 GB
[2026-09-09 11:51:40 TP0] max_total_num_tokens=330323, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=32, context_len=262144, available_gpu_mem=26.90 GB
[2026-09-09 11:51:50] The server is fired up and ready to roll!
(EngineCore pid=413) INFO 09-09 11:50:20 [gpu_model_runner.py:3012] Model loading took 14.25 GiB memory and 25.774743 seconds
(EngineCore pid=413) INFO 09-09 11:51:20 [gpu_worker.py:298] Available KV cache memory: 56.12 GiB
(EngineCore pid=413) INFO 09-09 11:51:24 [kv_cache_utils.py:1305] GPU KV cache size: 1,214,464 tokens
"""


def _clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d}"


def _usage(rng: random.Random) -> str:
    kind = rng.random()
    running, queued = rng.randrange(33), rng.randrange(4)
    if kind < 0.4:
        return (
            f"[2026-09-09 {_clock(rng)} TP0] Decode batch, #running-req: {running}, #full token: {rng.randrange(330323)}, "
            f"full token usage: {rng.random():.2f}, mamba num: {rng.randrange(124)}, mamba usage: {rng.random():.2f}, "
            f"cuda graph: True, gen throughput (token/s): {rng.random() * 900:.2f}, #queue-req: {queued}"
        )
    if kind < 0.6:
        return (
            f"[2026-09-09 {_clock(rng)} TP0] Prefill batch, #new-seq: {rng.randrange(1, 4)}, #new-token: {rng.randrange(8192)}, "
            f"#cached-token: {rng.randrange(20000)}, full token usage: {rng.random():.2f}, mamba usage: {rng.random():.2f}, "
            f"#running-req: {running}, #queue-req: {queued}, #pending-token: {rng.randrange(9000)}, "
            f"cuda graph: False, input throughput (token/s): {rng.random() * 9000:.2f}"
        )
    return (
        f"(APIServer pid=412) INFO 09-09 {_clock(rng)} [loggers.py:259] Engine 000: Avg prompt throughput: "
        f"{rng.random() * 900:.1f} tokens/s, Avg generation throughput: {rng.random() * 900:.1f} tokens/s, "
        f"Running: {running} reqs, Waiting: {queued} reqs, GPU KV cache usage: {rng.random() * 99:.1f}%, "
        f"Prefix cache hit rate: {rng.random() * 99:.1f}%"
    )


def _other(rng: random.Random) -> str:
    client = f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}:{rng.randrange(1024, 65536)}"
    kind = rng.random()
    if kind < 0.45:
        return f'(APIServer pid=412) INFO:     {client} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    if kind < 0.55:
        return f'(APIServer pid=412) INFO:     {client} - "GET /metrics HTTP/1.1" 200 OK'
    if kind < 0.9:
        return f'[2026-09-09 {_clock(rng)}] INFO:     {client} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    if kind < 0.98:
        return f'[2026-09-09 {_clock(rng)}] INFO:     {client} - "GET /health HTTP/1.1" 200 OK'
    return (
        f"[2026-09-09 {_clock(rng)}] Finished request chatcmpl-{rng.getrandbits(128):032x} after "
        f"{rng.random() * 30:.3f} s, {rng.randrange(4000)} in, {rng.randrange(900)} out, finish_reason=stop"
    )


def blocks(megabytes: int, seed: int = 1) -> Iterator[bytes]:
    """The log in blocks, cut at a line's end; the same for the same arguments."""
    rng = random.Random(seed)
    made = [
        "".join(
            (_usage(rng) if rng.random() < SHARE_OF_USAGE else _other(rng)) + "\n" for _ in range(BLOCK_LINES)
        ).encode()
        for _ in range(BLOCKS)
    ]
    yield START.encode()
    size, number = len(START), 0
    while size < megabytes * 10**6:
        block = made[number % BLOCKS]
        yield block
        size += len(block)
        number += 1


def write(path: Path, megabytes: int) -> None:
    """Write the log of `megabytes` to `path`."""
    with path.open("wb") as stream:
        stream.writelines(blocks(megabytes))


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
