"""A serving log of any size, the same each time: start-up, access lines, and usage lines as the engines print them.

    python benchmarks/generate.py FILE MEGABYTES [KIND]

Kinds: `mixed` (both engines, the default), `sglang`, `vllm`: about 2 % of the lines are usage lines, the rest access
lines and a few records of other kinds. `usage`: usage lines only. `requests`: every second line is a logged request whose
prompt is full of words that also stand in the engines' own lines.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

SHARE_OF_USAGE = 0.02
KINDS = ("mixed", "sglang", "vllm", "usage", "requests")
TEXT = (
    "the GPU memory holds 3 GB of KV cache and 12 tokens, so a pool of 24.5 GiB is free for state slots "
    "while Decode batch runs, KV Cache is allocated. mem usage=9 GB, and Load weight end. says 7 GB"
)
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


def _usage(rng: random.Random, engine: str = "mixed", ranks: int = 1) -> str:
    share = {"sglang": 0.6, "vllm": 0.0}.get(engine, 1.0)
    kind = rng.random() * share if share else 1.0
    running, queued = rng.randrange(33), rng.randrange(4)
    rank = "TP0" if ranks == 1 else f"DP{rng.randrange(ranks)} TP0"
    if kind < 0.4:
        return (
            f"[2026-09-09 {_clock(rng)} {rank}] Decode batch, #running-req: {running}, #full token: {rng.randrange(330323)}, "
            f"full token usage: {rng.random():.2f}, mamba num: {rng.randrange(124)}, mamba usage: {rng.random():.2f}, "
            f"cuda graph: True, gen throughput (token/s): {rng.random() * 900:.2f}, #queue-req: {queued}"
        )
    if kind < 0.6:
        return (
            f"[2026-09-09 {_clock(rng)} {rank}] Prefill batch, #new-seq: {rng.randrange(1, 4)}, #new-token: {rng.randrange(8192)}, "
            f"#cached-token: {rng.randrange(20000)}, full token usage: {rng.random():.2f}, mamba usage: {rng.random():.2f}, "
            f"#running-req: {running}, #queue-req: {queued}, #pending-token: {rng.randrange(9000)}, "
            f"cuda graph: False, input throughput (token/s): {rng.random() * 9000:.2f}"
        )
    return (
        f"(APIServer pid=412) INFO 09-09 {_clock(rng)} [loggers.py:259] Engine {rng.randrange(ranks):03d}: Avg prompt throughput: "
        f"{rng.random() * 900:.1f} tokens/s, Avg generation throughput: {rng.random() * 900:.1f} tokens/s, "
        f"Running: {running} reqs, Waiting: {queued} reqs, GPU KV cache usage: {rng.random() * 99:.1f}%, "
        f"Prefix cache hit rate: {rng.random() * 99:.1f}%"
    )


def _request(rng: random.Random) -> str:
    text = " ".join(rng.choices(TEXT.split(), k=rng.randrange(20, 400)))
    if rng.random() < 0.5:
        return (
            f"INFO 09-09 {_clock(rng)} [logger.py:37] Received request chatcmpl-{rng.getrandbits(128):032x}: prompt: '{text}', "
            "params: SamplingParams(n=1, temperature=0.6, top_p=0.95, max_tokens=32), prompt_token_ids: None, lora_request: None."
        )
    return (
        f"[2026-09-09 {_clock(rng)}] Receive: obj=GenerateReqInput(rid='{rng.getrandbits(128):032x}', text='{text}', "
        "sampling_params={'max_new_tokens': 32}, stream=True)"
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


def _line(rng: random.Random, kind: str, ranks: int) -> str:
    if kind == "usage" or rng.random() < SHARE_OF_USAGE:
        return _usage(rng, kind, ranks)
    if kind == "requests" and rng.random() < 0.5:
        return _request(rng)
    line = _other(rng)
    while kind in {"sglang", "vllm"} and line.startswith("(APIServer") != (kind == "vllm"):
        line = _other(rng)
    return line


def _start(kind: str) -> str:
    lines = START.splitlines(keepends=True)
    return "".join(
        line for line in lines if kind not in {"sglang", "vllm"} or line.startswith("[") == (kind == "sglang")
    )


def blocks(megabytes: int, seed: int = 1, kind: str = "mixed", ranks: int = 1) -> Iterator[bytes]:
    """The log in blocks, cut at a line's end; the same for the same arguments."""
    rng = random.Random(seed)
    count = BLOCK_LINES if kind != "requests" else BLOCK_LINES // 10
    made = ["".join(_line(rng, kind, ranks) + "\n" for _ in range(count)).encode() for _ in range(BLOCKS)]
    start = _start(kind)
    yield start.encode()
    size, number = len(start), 0
    while size < megabytes * 10**6:
        block = made[number % BLOCKS]
        yield block
        size += len(block)
        number += 1


def write(path: Path, megabytes: int, kind: str = "mixed", ranks: int = 1) -> None:
    """Write the log of `megabytes` to `path`."""
    with path.open("wb") as stream:
        stream.writelines(blocks(megabytes, kind=kind, ranks=ranks))


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4])
