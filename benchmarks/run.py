"""Every ratio of `docs/performance.md` in one run, with the machine that they hold for.

    python benchmarks/run.py [--largest MEGABYTES] [--rounds N] [--folder FOLDER]

`memledger explain` (the whole program, JSON) against what the machine's own tools need for the same bytes: `grep -cF` and
`ripgrep` with a dozen anchors, decompressors, one process. What is compared runs in turn within each round; medians count.
Memory is that of all processes of the program together (proportional set size: shared pages count once).
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import generate
import psutil
import zstandard
from scan import ANCHORS

MEMORY_SAMPLE_SECONDS = 0.02
MOST_MIB = 120


def program() -> list[str]:
    script = Path(sys.executable).with_name("memledger")
    return [str(script)] if script.exists() else [sys.executable, "-m", "memledger"]


def explain(paths: Sequence[Path]) -> list[str]:
    return [*program(), "explain", "--no-live", "--format", "json", *map(str, paths)]


def one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def seconds(arguments: list[str], alone: bool = False) -> float:
    """How long a program takes; `alone`: on one core only."""
    start = time.perf_counter()
    # Not to /dev/null: `grep` stops at the first match there.
    environment = {**os.environ, "LC_ALL": "C"}
    subprocess.run(arguments, capture_output=True, check=True, env=environment, preexec_fn=one_core if alone else None)
    return time.perf_counter() - start


def medians(rounds: int, **what: Callable[[], float]) -> dict[str, float]:
    """The median of each over some rounds, in each of which all run in turn."""
    times: dict[str, list[float]] = {name: [] for name in what}
    for _ in range(rounds):
        for name, run in what.items():
            times[name].append(run())
    return {name: statistics.median(found) for name, found in times.items()}


def peak_mib(arguments: list[str]) -> float:
    """The most memory that a program and its children held at once."""
    most = 0
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        process = psutil.Process(running.pid)
        while running.poll() is None:
            most = max(most, sum(map(_pss, [process, *_children(process)])))
            time.sleep(MEMORY_SAMPLE_SECONDS)
    return most / 2**20


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _pss(process: psutil.Process) -> int:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def describe() -> None:
    model = next(
        (x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), platform.processor()
    )
    versions = ", ".join(
        f"{name} {_version(name)}" for name in ("gpu-memledger", "hyperscan", "zstandard", "stringzilla")
    )
    cores = len(os.sched_getaffinity(0))
    print(
        f"{model}, {cores} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB; {platform.system()} {platform.release()}"
    )
    print(f"Python {platform.python_version()}, {versions}")
    print(
        f"load average before the run: {os.getloadavg()[0]:.1f} (others' work makes every figure but the ratios worse)\n"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def against_grep(folder: Path, rounds: int, largest: int) -> None:
    """Sizes and engines against grep and ripgrep; and the memory."""
    ripgrep = shutil.which("rg")
    print(f"{'explain':<22} {'s':>7} {'MB/s':>6} {'x grep':>7} {'x rg':>6} {'x grep, 1 core':>15} {'peak MiB':>9}")
    sizes = [size for size in (30, 300, 3000) if size <= largest]
    cases = [("mixed", size) for size in sizes] + [
        (k, min(300, largest)) for k in ("sglang", "vllm", "usage", "requests")
    ]
    patterns = [part for anchor in ANCHORS for part in ("-e", anchor)]
    for kind, size in cases:
        path = folder / f"{kind}-{size}.log"
        generate.write(path, size, kind)
        real = path.stat().st_size / 1e6
        what = {
            "grep": lambda path=path: seconds(["grep", "-cF", *patterns, str(path)]),
            "explain": lambda path=path: seconds(explain([path])),
            "alone": lambda path=path: seconds(explain([path]), alone=True),
        }
        if ripgrep:
            what["rg"] = lambda path=path: seconds([ripgrep, "-cF", *patterns, str(path)])
        took = medians(rounds if size < 1000 else max(1, rounds // 2), **what)
        rg = f"{took['rg'] / took['explain']:6.2f}" if ripgrep else "     -"
        print(
            f"{kind + f', {size} MB':<22} {took['explain']:7.2f} {real / took['explain']:6.0f} {took['grep'] / took['explain']:7.2f} {rg} "
            f"{took['grep'] / took['alone']:15.2f} {peak_mib(explain([path])):9.0f}   (wanted for 3 GB: 1.00, 0.33; under {MOST_MIB} MiB)"
        )
        path.unlink()


def hits(folder: Path, rounds: int, largest: int) -> None:
    """Usage lines a second on one core, with few and many ranks."""
    print(f"\n{'usage lines only':<22} {'lines':>9} {'lines/s on one core':>20}")
    for ranks in (1, 8, 64):
        path = folder / "usage.log"
        size = min(200, largest)
        generate.write(path, size, "usage", ranks)
        lines = sum(block.count(b"\n") for block in generate.blocks(size, kind="usage", ranks=ranks))
        small = folder / "small.log"
        generate.write(small, 1, "usage", ranks)
        took = medians(
            rounds,
            large=lambda path=path: seconds(explain([path]), alone=True),
            start=lambda small=small: seconds(explain([small]), alone=True),
        )
        rate = lines / max(took["large"] - took["start"], 1e-3)
        print(f"{ranks:>3} ranks{'':<13} {lines:>9,} {rate:>20,.0f}   (wanted: 100,000)")
        path.unlink()


def compressed(folder: Path, rounds: int, largest: int) -> None:
    """Compressed logs against their decompressors alone."""
    path = folder / "plain.log"
    generate.write(path, min(300, largest))
    print(f"\n{'compressed':<22} {'decompressor s':>14} {'explain s':>10} {'ratio':>6}")
    zst, gz = folder / "a.log.zst", folder / "a.log.gz"
    with path.open("rb") as source, zst.open("wb") as target:
        zstandard.ZstdCompressor(level=3).copy_stream(source, target)
    with path.open("rb") as source, gzip.open(gz, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target, 2**20)
    code = {
        zst: "import sys,zstandard; r=zstandard.ZstdDecompressor().stream_reader(open(sys.argv[1],'rb'))\nwhile r.read(262144): pass",
        gz: "import sys,zlib; d=zlib.decompressobj(31); f=open(sys.argv[1],'rb')\nwhile b:=f.read(262144): d.decompress(b)",
    }
    for packed, alone in code.items():
        took = medians(
            rounds,
            alone=lambda packed=packed, alone=alone: seconds([sys.executable, "-c", alone, str(packed)]),
            explain=lambda packed=packed: seconds(explain([packed])),
        )
        print(
            f"{packed.suffix:<22} {took['alone']:>14.2f} {took['explain']:>10.2f} {took['alone'] / took['explain']:>6.2f}"
        )
        packed.unlink()
    path.unlink()


def files(folder: Path, rounds: int, largest: int) -> None:
    """The same bytes in one file, in several, and on one core."""
    size = min(240, largest)
    print(f"\n{size} MB in{'':<14} {'s':>7} {'s on one core':>14} {'ratio':>6}")
    for count in (1, 8, 80):
        paths = [folder / f"node{n}.log" for n in range(count)]
        for path in paths:
            generate.write(path, size // count)
        took = medians(
            rounds,
            all=lambda paths=paths: seconds(explain(paths)),
            alone=lambda paths=paths: seconds(explain(paths), alone=True),
        )
        print(f"{count:>3} files{'':<13} {took['all']:7.2f} {took['alone']:>14.2f} {took['alone'] / took['all']:>6.2f}")
        for path in paths:
            path.unlink()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--largest", type=int, default=3000, help="megabytes of the largest log")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--folder", type=Path, help="where the logs go (they are deleted)")
    chosen = options.parse_args()
    parts: list[Callable[[Path, int, int], Any]] = [against_grep, hits, compressed, files]
    describe()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for part in parts:
            part(Path(folder), chosen.rounds, chosen.largest)


if __name__ == "__main__":
    main()
