"""What `memledger fleet` does with many logs: one process, all cores, and Ray, in one run.

    python benchmarks/fleet.py FOLDER [--files 2000] [--megabytes 5] [--rounds 1] [--engines 1,2,ray]
        [--distinct 200] [--compressed zst]

Writes the logs to FOLDER unless they are there (half of SGLang, half of vLLM; --distinct of them with figures of their own, the others hard links to
those, so that the page cache holds them and not the disk is measured), reads them with each engine in turn, --rounds times, and prints seconds, MB/s,
ratios to one process, and whether the Parquet files are the same to the byte. The machine's load is printed with each figure: on a busy machine the
ratio of a round counts, not its seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import generate
import zstandard

BODIES = 8
SGLANG = """\
[2026-09-09 11:50:01] server_args=ServerArgs(model_path='/models/example-{model}', tp_size=1, mem_fraction_static=0.85, max_running_requests=32)
[2026-09-09 11:50:20] Load weight begin. avail mem=78.50 GB
[2026-09-09 11:51:20] Load weight end. elapsed=60.1 s, type=ExampleForCausalLM, avail mem={loaded:.2f} GB, mem usage={weights:.2f} GB.
[2026-09-09 11:51:24] KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: {half:.2f} GB, V size: {half:.2f} GB
[2026-09-09 11:51:24] Memory pool end. avail mem={pooled:.2f} GB
[2026-09-09 11:51:40] max_total_num_tokens={tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=32, context_len=262144, available_gpu_mem={pooled:.2f} GB
[2026-09-09 11:51:50] The server is fired up and ready to roll!
"""
VLLM = """\
(APIServer pid=412) INFO 09-09 11:50:01 [api_server.py:1837] vLLM API server version 0.24.0
(APIServer pid=412) INFO 09-09 11:50:01 [utils.py:233] non-default args: {{'model': '/models/example-{model}', 'gpu_memory_utilization': 0.85}}
(EngineCore pid=413) INFO 09-09 11:50:20 [gpu_model_runner.py:3012] Model loading took {weights:.2f} GiB memory and 25.774743 seconds
(EngineCore pid=413) INFO 09-09 11:51:20 [gpu_worker.py:298] Available KV cache memory: {pool:.2f} GiB
(EngineCore pid=413) INFO 09-09 11:51:24 [kv_cache_utils.py:1305] GPU KV cache size: {tokens:,} tokens
"""


def body(rng: random.Random, megabytes: float, vllm: bool) -> bytes:
    """Serving lines of one engine."""
    start = b"(" if vllm else b"["
    lines: list[bytes] = []
    size = 0
    while size < megabytes * 10**6:
        made = generate._usage(rng) if rng.random() < generate.SHARE_OF_USAGE else generate._other(rng)
        line = made.replace(" TP0]", "]").encode() + b"\n"
        if line.startswith(start):
            lines.append(line)
            size += len(line)
    return b"".join(lines)


def head(number: int, vllm: bool) -> bytes:
    """Start-up lines of log `number`."""
    weights, half = 10 + number % 37 / 2, 5 + number % 101 / 10
    figures = {
        "model": f"{number % 12 + 1}b",
        "weights": weights,
        "loaded": 78.5 - weights,
        "half": half,
        "pool": 2 * half,
        "pooled": 78.5 - weights - 2 * half,
        "tokens": round(half * 2**30 / 32768),
    }
    return (VLLM if vllm else SGLANG).format(**figures).encode()


def write_logs(folder: Path, files: int, megabytes: float, how: str, distinct: int) -> None:
    """The logs, those that are not there yet; those beyond the first `distinct` are hard links to them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    bodies = [[body(rng, megabytes, vllm) for _ in range(BODIES)] for vllm in (False, True)]
    for number in range(files):
        name = folder / f"{number:05d}.log{'.' + how if how else ''}"
        if name.exists():
            continue
        if number >= distinct:
            name.hardlink_to(folder / name.name.replace(f"{number:05d}", f"{number % distinct:05d}"))
        else:
            data = head(number, bool(number % 2)) + bodies[number % 2][number // 2 % BODIES]
            name.write_bytes(zstandard.ZstdCompressor(level=3).compress(data) if how == "zst" else data)


def run(logs: Path, out: Path, engine: str) -> tuple[float, float]:
    """Seconds, and seconds of CPU, for all logs by one engine ("ray", or a number of processes)."""
    how = ["--engine", "ray"] if engine == "ray" else ["--workers", engine]
    before = os.times()
    started = time.perf_counter()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "memledger",
            "fleet",
            str(logs),
            "--restart",
            "--out",
            str(out),
            "--format",
            "json",
            *how,
        ],
        check=True,
        stdout=subprocess.PIPE,
    )
    seconds = time.perf_counter() - started
    after = os.times()
    report = json.loads(done.stdout)
    if report["left"] or set(report["fleet"]["statuses"]) != {"ok"}:
        sys.exit(f"not all logs were read: {report['fleet']['statuses']}")
    return seconds, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--megabytes", type=float, default=5)
    parser.add_argument("--distinct", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--engines", default=f"1,{len(os.sched_getaffinity(0))},ray")
    parser.add_argument("--compressed", choices=["zst"], default="")
    asked = parser.parse_args()
    logs = asked.folder / f"logs{asked.compressed}-{asked.files}-{asked.distinct}-{asked.megabytes:g}"
    write_logs(logs, asked.files, asked.megabytes, asked.compressed, asked.distinct)
    stored = sum(file.stat().st_size for file in logs.iterdir()) / 1e6
    print(
        f"{asked.files} logs, {stored:,.0f} MB stored; {platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    )
    engines = asked.engines.split(",")
    ratios: dict[str, list[float]] = {engine: [] for engine in engines}
    for number in range(asked.rounds):
        first = 0.0
        for engine in engines:
            out = asked.folder / f"out-{engine}"
            load = os.getloadavg()[0]
            seconds, cpu = run(logs, out, engine)
            first = first or seconds
            ratios[engine].append(first / seconds)
            name = "Ray" if engine == "ray" else f"{engine} processes"
            print(
                f"round {number + 1}  {name:<12} {seconds:7.1f} s  {stored / seconds:6.0f} MB/s  {asked.files / seconds:6.1f} logs/s  "
                f"CPU {cpu:6.1f} s  ratio {first / seconds:.2f}  load before {load:.1f}",
                flush=True,
            )
    for engine in engines:
        print(f"{engine}: ratio {statistics.median(ratios[engine]):.2f} (median of {asked.rounds})")
    same = {hashlib.sha256((asked.folder / f"out-{e}" / "ranks.parquet").read_bytes()).hexdigest() for e in engines}
    print("Parquet files are the same to the byte" if len(same) == 1 else "Parquet files DIFFER")


if __name__ == "__main__":
    main()
