"""What the fuzzer found once, and mutations of it, in every run; coverage-guided where atheris is installed."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import targets

HERE = Path(__file__).parent / "fuzz"
MUTATED = 40
"""Mutations of each target's inputs, the same in every run."""


def kept(name):
    return [path.read_bytes() for path in sorted((HERE / "corpus" / name).iterdir())]


def mutated(inputs, draw):
    """Some inputs with bytes turned over, taken out, doubled, or put into each other."""
    data = bytearray(draw.choice(inputs))
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(data) + 1), draw.randint(1, 16)
        piece = draw.choice(inputs)
        start = draw.randrange(len(piece) + 1)
        data[at : at + draw.choice((0, length))] = draw.choice(
            (
                b"",
                bytes(draw.randrange(256) for _ in range(length)),
                piece[start : start + 40],
                data[at : at + length] * 2,
            )
        )
    return bytes(data)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_the_kept_corpus(name):
    inputs = kept(name)
    assert inputs
    for data in inputs:
        targets.TARGETS[name](data)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_mutations_of_what_is_understood(name):
    draw = random.Random(name)
    inputs = [*kept(name), *(data for data in targets.seeds(name) if len(data) < 8192)]
    for _ in range(MUTATED):
        change = targets.mutated_json if name in targets.JSON_TARGETS else None
        data = draw.choice(inputs)
        targets.TARGETS[name](change(data, draw) if change else mutated(inputs, draw))


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed (pip install 'gpu-memledger[fuzz]')"
)
@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_short_coverage_guided_run(name):
    done = subprocess.run(
        [sys.executable, str(HERE / "run.py"), name, "-runs=300", "-seed=1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
