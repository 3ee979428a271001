"""The unmodified `pynvml` on a machine without a GPU: a `libnvidia-ml.so.1` of our own, answering from a scenario file.

Two ways to use it (`import nvml_fake`; the tests' folder is on the path):

* In a process of its own (command line tests)::

      env = {**os.environ, **nvml_fake.environment(scenario)}
      subprocess.run([sys.executable, "-m", "memledger", ...], env=env)

  `pynvml` opens `libnvidia-ml.so.1` by that name, and `LD_LIBRARY_PATH` comes before the system's folders.

* In the test's own process::

      with nvml_fake.installed(scenario):
          sample = memledger.live.nvml.sample()

  The library is opened once by its path; the loader then answers its name with it for the rest of the process. A machine
  that has a real library loses nothing: it is only found by name after ours.

`scenario` is the text of a scenario or the path of one; the format stands at the top of `nvml_fake.c`. Writing another text
to the path while the library is in use changes what it answers from then on (a GPU that is lost, processes that end).

Without a C compiler or without `nvml.h` (PyPI: nvidia-nvml-dev) `build()` skips the test that called it, with that reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

NAME = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("nvml_fake.c")

ONE_H200 = """
[gpu]
name = NVIDIA H200
total = 143771MiB
reserved = 614MiB
used = 32362MiB
ecc = on
mig = off
remapped = 0 0 0 0
process = compute 10291 2566MiB
process = compute 10309 28234MiB
"""
"""One idle machine's worth: 143771 = 614 reserved + 32362 used + 110795 free (MiB), two processes."""


def header() -> Path | None:
    """The folder of NVIDIA's `nvml.h`: the one of `nvidia-nvml-dev`, or a CUDA toolkit's."""
    places = [Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")]
    found = [path.parent for place in places for path in place.glob("nvidia/*/include/nvml.h")]
    toolkit = Path("/usr/local/cuda/include")
    return found[0] if found else toolkit if (toolkit / "nvml.h").is_file() else None


def unavailable() -> str | None:
    """Why the library can't be built here, or None."""
    if sys.platform != "linux":
        return "the NVML library of the tests is built on Linux only"
    if _compiler() is None:
        return "no C compiler (cc, gcc or clang) to build the NVML library of the tests"
    if header() is None:
        return "no nvml.h to build the NVML library of the tests (pip install nvidia-nvml-dev)"
    return None


def _compiler() -> str | None:
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def build(without: Sequence[str] = ()) -> Path:
    """The folder that holds `libnvidia-ml.so.1`, built once for all tests of a run.

    Args:
        without: functions that the library lacks, as an old driver's does: `pynvml` then raises FunctionNotFound.
    """
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    return _build(tuple(sorted(without)))


@functools.cache
def _build(without: tuple[str, ...]) -> Path:
    include = header()
    compiler = _compiler()
    assert include is not None
    assert compiler is not None
    key = hashlib.sha256(SOURCE.read_bytes() + repr((without, str(include), sys.maxsize)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"memledger-nvml-fake-{os.getuid()}-{key}"
    if (folder / NAME).is_file():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        hidden = "".join(f" {name};" for name in without)
        exported = f"{{ global: nvml*;{f' local:{hidden}' if hidden else ''} }};"
        # A version script takes the first pattern that fits best: a whole name wins over the `nvml*` of all others.
        (work / "exports").write_text(exported)
        command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-O1", "-fPIC", "-shared", "-pthread"]
        command += [f"-I{include}", f"-Wl,-soname,{NAME}", f"-Wl,--version-script={work / 'exports'}"]
        subprocess.run([*command, "-o", str(work / NAME), str(SOURCE)], check=True, capture_output=True, text=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / f"{NAME}.{os.getpid()}"
        shutil.copy(work / NAME, part)
        part.replace(folder / NAME)
    return folder


def write(scenario: str | Path) -> Path:
    """The path of a scenario given as text or as a path; a text is written to a temporary file."""
    if isinstance(scenario, Path):
        return scenario
    handle, name = tempfile.mkstemp(prefix="nvml-scenario-", suffix=".ini")
    with os.fdopen(handle, "w") as file:
        file.write(scenario)
    return Path(name)


def environment(scenario: str | Path, *, calls: Path | None = None, without: Sequence[str] = ()) -> dict[str, str]:
    """The variables of a process whose `libnvidia-ml.so.1` is ours. Add them to `os.environ`.

    Args:
        scenario: text or path.
        calls: a file that gets the name of each NVML call, one a line.
        without: see `build`.
    """
    folder = build(without)
    before = os.environ.get("LD_LIBRARY_PATH")
    variables = {
        "LD_LIBRARY_PATH": f"{folder}:{before}" if before else str(folder),
        "NVML_FAKE_SCENARIO": str(write(scenario)),
    }
    if calls is not None:
        variables["NVML_FAKE_CALLS"] = str(calls)
    return variables


@contextlib.contextmanager
def installed(scenario: str | Path, *, calls: Path | None = None) -> Iterator[Path]:
    """This process's `pynvml` answers from `scenario`; gives the scenario's path."""
    _open(build())
    path = write(scenario)
    variables = {"NVML_FAKE_SCENARIO": str(path), "NVML_FAKE_CALLS": None if calls is None else str(calls)}
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield path
    finally:
        _set(before)
        if not isinstance(scenario, Path):
            path.unlink()


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@functools.lru_cache(maxsize=1)
def _open(folder: Path) -> ctypes.CDLL:
    """The loader knows our library from now on by its SONAME, which is the name that `pynvml` asks for."""
    return ctypes.CDLL(str(folder / NAME))
