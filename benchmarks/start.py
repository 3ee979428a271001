"""How long the program takes to start, as multiples of `python -c pass` in the same run.

python benchmarks/start.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import generate

ROUNDS = 15
# An installed program has its modules compiled; a checkout compiles them at the first run, unless it is told not to.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
WANTED = {"--version": 4.0, "--help": 4.0, "explain of a 1 MB log": 10.0}


def best(arguments: list[str], folder: str) -> float:
    """The shortest of some runs, in seconds (the first, which fills caches, does not count)."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        subprocess.run(arguments, cwd=folder, capture_output=True, check=True, env=ENVIRONMENT)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    script = Path(sys.executable).with_name("memledger")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "memledger"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.log"
        generate.write(path, 1)
        nothing = best([sys.executable, "-c", "pass"], folder)
        print(f"python -c pass          {nothing * 1000:6.1f} ms")
        for name, arguments in (
            ("--version", ["--version"]),
            ("--help", ["--help"]),
            ("explain of a 1 MB log", ["explain", str(path)]),
        ):
            took = best([*program, *arguments], folder)
            print(f"{name:<23} {took * 1000:6.1f} ms   {took / nothing:5.2f} x   (wanted: {WANTED[name]:.0f})")


if __name__ == "__main__":
    main()
