"""Trees of real processes that look like a server's: the true titles over the true command lines, a log, and an HTTP port.

Run as a program it is one such server (the launcher of the specification named in TREE); imported it starts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

STARTS_WITHIN = 20.0


def _retitle(title: str) -> None:
    """What setproctitle does: the title over the command line and the environment, and the name cut to 15 characters."""
    import ctypes

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[48])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title.encode(), len(title))
    ctypes.CDLL(None).prctl(15, title.encode()[:15], 0, 0, 0)


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _child(node: dict, server: socket.socket | None, pages: dict, ready: str) -> None:
    pid = os.fork()
    if pid:
        return
    if not node.get("outlives"):
        _die_with_parent()
    if node.get("title"):
        _retitle(node["title"])
    for below in node.get("children", ()):
        _child(below, server, pages, ready)
    with Path(ready).open("a") as out:
        out.write(f"{node.get('name') or node.get('title')}\t{os.getpid()}\n")
    if node.get("zombie"):
        os._exit(0)
    if not node.get("serves"):
        if server is not None:
            server.close()
        while True:
            signal.pause()
    _serve(server, pages)


class _Handler(BaseHTTPRequestHandler):
    pages: ClassVar[dict] = {}

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        page = self.pages.get(self.path)
        if page is None:
            self.send_error(404)
            return
        if page.get("key") and self.headers.get("Authorization") != f"Bearer {page['key']}":
            self.send_error(401)
            return
        how = page.get("how")
        if how == "hang":
            time.sleep(60)
        self.send_response(page.get("status", 200))
        if how == "redirect":
            self.send_header("Location", page["to"])
        if how == "announced":
            self.send_header("Content-Length", str(50 * 10**6))
        self.end_headers()
        with contextlib.suppress(OSError):
            self._body(page, how)

    def _body(self, page: dict, how: str | None) -> None:
        if how in {"huge", "announced"}:
            for _ in range(50):
                self.wfile.write(b"x 1\n" * 250_000)
        elif how == "drip":
            while True:
                self.wfile.write(b"x")
                time.sleep(0.2)
        elif how == "binary":
            self.wfile.write(bytes(range(256)) * 40)
        else:
            body = page.get("body", "")
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())


def _serve(server: socket.socket | None, pages: dict) -> None:
    if server is None:
        return
    http = ThreadingHTTPServer(
        server.getsockname()[:2], type("H", (_Handler,), {"pages": pages}), bind_and_activate=False
    )
    http.socket = server
    http.serve_forever()


def _main() -> None:
    spec = json.loads(Path(os.environ["TREE"]).read_text())
    server = None
    if spec.get("port") is not None:
        server = socket.create_server((spec.get("bind", "127.0.0.1"), spec["port"]))
    if spec.get("tracker"):
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()
    if spec.get("title"):
        _retitle(spec["title"])
    for node in spec.get("children", ()):
        _child(node, server, spec.get("pages", {}), spec["ready"])
    sys.stdout.write("started\n")
    sys.stdout.flush()
    with Path(spec["ready"]).open("a") as out:
        out.write(f"root\t{os.getpid()}\n")
    if server is not None:
        threading.Thread(target=_serve, args=(server, spec.get("pages", {})), daemon=True).start()
    while True:
        signal.pause()


# ------------------------------------------------------------------------------------------------------------- starting


class Running:
    """A started tree: the pids by title (`root`: the launcher), and the started program itself."""

    def __init__(self, program: subprocess.Popen, pids: dict[str, int]) -> None:
        self.program = program
        self.pids = pids

    @property
    def root(self) -> int:
        return self.pids["root"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def _program(folder: Path) -> dict[str, list[str]]:
    """The beginnings of command lines that start a tree, as a user would type them."""
    run = "import os, runpy; runpy.run_path(os.environ['TREE_PROGRAM'], run_name='__main__')\n"
    for name in (
        "bin/vllm",
        "bin/sglang",
        "lib/vllm/entrypoints/openai/api_server.py",
        "lib/sglang/launch_server.py",
        "lib/app.py",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run)
    return {
        "vllm serve": [sys.executable, str(folder / "bin/vllm"), "serve"],
        "sglang serve": [sys.executable, str(folder / "bin/sglang"), "serve"],
        "vllm module": [sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        "sglang module": [sys.executable, "-m", "sglang.launch_server"],
        "own program": [sys.executable, str(folder / "lib/app.py")],
    }


@contextlib.contextmanager
def tree(
    folder: Path,
    start: str,
    arguments: Sequence[str] = (),
    children: Sequence[dict] = (),
    *,
    title: str | None = None,
    port: int | None = None,
    pages: dict | None = None,
    bind: str = "127.0.0.1",
    tracker: bool = False,
    env: dict[str, str] | None = None,
    before: Sequence[str] = (),
    shell: str | None = None,
    own_ids: bool = True,
    stdout: object = None,
    stderr: object = None,
    **how: object,
) -> Iterator[Running]:
    """A running tree.

    `start` names the launcher's command line, `before` words in front of it, `shell` a shell line with {command}; without `own_ids`
    the processes count themselves in a namespace of their own, and end with the program that was started.
    """
    import shlex

    folder.mkdir(parents=True, exist_ok=True)
    ready, spec = folder / "ready", folder / "spec.json"
    ready.write_text("")
    spec.write_text(
        json.dumps(
            {
                "title": title,
                "children": list(children),
                "port": port,
                "pages": pages or {},
                "bind": bind,
                "tracker": tracker,
                "ready": str(ready),
            }
        )
    )
    words = [*before, *_program(folder)[start], *arguments]
    if shell is not None:
        words = ["bash", "-c", shell.format(command=shlex.join(words))]
    log = (folder / "server.log").open("ab") if stdout is None else None
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "NVIDIA_"))},
        "TREE": str(spec),
        "TREE_PROGRAM": str(Path(__file__)),
        "PYTHONPATH": str(folder / "lib"),
        **(env or {}),
    }
    program = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=log or stdout,
        stderr=(log or stdout) if stderr is None else stderr,
        env=environment,
        start_new_session=True,
        cwd=folder,
        **how,
    )
    count = _count(children) + 1
    pids: dict[str, int] = {}
    try:
        ends = time.monotonic() + STARTS_WITHIN
        while len(pids) < count:
            assert time.monotonic() < ends, f"the tree did not start: {pids}"
            assert program.poll() is None or before, f"the tree ended: {program.returncode}"
            pids = {
                name: int(pid) for name, _, pid in (line.partition("\t") for line in ready.read_text().splitlines())
            }
            time.sleep(0.02)
        yield Running(program, pids)
    finally:
        for pid in (*(pids.values() if own_ids else ()), program.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        program.wait()
        if log is not None:
            log.close()


def _count(children: Sequence[dict]) -> int:
    return sum(1 + _count(child.get("children", ())) for child in children)


VLLM_ONE = [{"title": "VLLM::EngineCore", "children": [{"title": "VLLM::Worker"}]}]
VLLM_TP2 = [{"title": "VLLM::EngineCore", "children": [{"title": "VLLM::Worker_TP0"}, {"title": "VLLM::Worker_TP1"}]}]
VLLM_DP2 = [
    {"title": "VLLM::DPCoordinator"},
    {"title": "VLLM::EngineCore_DP0", "children": [{"title": "VLLM::Worker", "name": "worker 0"}]},
    {"title": "VLLM::EngineCore_DP1", "children": [{"title": "VLLM::Worker", "name": "worker 1"}]},
    {"title": "VLLM::APIServer_0", "serves": True},
    {"title": "VLLM::APIServer_1", "serves": True},
]
SGLANG_TP2 = [
    {"title": "sglang::scheduler_TP0"},
    {"title": "sglang::scheduler_TP1"},
    {"title": "sglang::detokenizer"},
]


if __name__ == "__main__":
    _main()
