"""How fast a log is read, against `LC_ALL=C grep -cF` with a dozen anchors on the same file; and how much memory it takes.

    python benchmarks/scan.py [MEGABYTES] [--memory] [--fallback]

Ratios of one run: both read the same file from the page cache, alternately, and the best of each counts. `--memory`
reads 30 MB, 300 MB and 3 GB, each in a process of its own, and prints the maximum resident set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import generate

ANCHORS = (
    "Load weight end.",
    "KV Cache is allocated",
    "Mamba Cache is allocated",
    "Memory pool end",
    "max_total_num_tokens=",
    "Prefill batch",
    "Decode batch",
    "Model loading took",
    "Available KV cache memory",
    "GPU KV cache size",
    "Graph capturing finished",
    "GPU KV cache usage",
)
ROUNDS = 5

READ = """
import resource, sys, time
from memledger.grammar import load_rules
from memledger.scan import Scanner
from memledger.sources import open_input
scanner = Scanner(load_rules(), fallback=sys.argv[2] == "fallback")
start = time.perf_counter()
with open_input(sys.argv[1]) as source:
    count = sum(1 for _ in scanner.events(source.blocks(), 0))
took = time.perf_counter() - start
print(took, scanner.bytes, scanner.lines, count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def read(path: Path, how: str, times: int = 1) -> tuple[float, int, int, int, float]:
    """(seconds, bytes, lines, events, MiB resident) of a process that reads `path` (`times` over, through a pipe)."""
    if times == 1:
        done = subprocess.run(
            [sys.executable, "-c", READ, str(path), how], capture_output=True, text=True, check=True
        ).stdout
    else:
        with subprocess.Popen(["cat", *[str(path)] * times], stdout=subprocess.PIPE) as cat:
            done = subprocess.run(
                [sys.executable, "-c", READ, "-", how], stdin=cat.stdout, capture_output=True, text=True, check=True
            ).stdout
    took, size, lines, events, resident = done.split()
    return float(took), int(size), int(lines), int(events), int(resident) / 1024


def grep(path: Path) -> tuple[float, int]:
    """(seconds, lines counted) of grep."""
    arguments = ["grep", "-cF", *(part for anchor in ANCHORS for part in ("-e", anchor)), str(path)]
    start = time.perf_counter()
    done = subprocess.run(arguments, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, int(done.stdout)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("megabytes", nargs="?", type=int, default=300)
    options.add_argument("--memory", action="store_true")
    options.add_argument("--fallback", action="store_true", help="the pure-Python pre-filter")
    chosen = options.parse_args()
    how = "fallback" if chosen.fallback else "hyperscan"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.log"
        generate.write(path, chosen.megabytes)
        rounds = [(grep(path), read(path, how)) for _ in range(ROUNDS)]
        (grep_seconds, counted) = min(r[0] for r in rounds)
        seconds, size, lines, events, resident = min(r[1] for r in rounds)
        print(
            f"{size / 1e6:.0f} MB, {lines:,} lines, {counted:,} with an anchor ({counted / lines:.1%}), {events} events"
        )
        print(f"grep -cF   {grep_seconds:.3f} s  {size / 1e6 / grep_seconds:6.0f} MB/s")
        print(
            f"memledger  {seconds:.3f} s  {size / 1e6 / seconds:6.0f} MB/s   {grep_seconds / seconds:.2f} x grep   (one core)"
        )
        print(f"maximum resident set {resident:.0f} MiB   (wanted: under 120)")
        if chosen.memory:
            generate.write(path, 30)
            for label, times in (("30 MB", 1), ("300 MB", 10), ("3 GB", 100)):
                took, size, _, _, resident = read(path, how, times)
                print(f"{label:>7}: {resident:.0f} MiB resident, {size / 1e6 / took:.0f} MB/s")


if __name__ == "__main__":
    main()
