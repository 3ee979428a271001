"""The endpoint: `/metrics` gives the page that is there, at once."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def server(host: str, port: int, page: Callable[[], bytes]) -> ThreadingHTTPServer:
    """A server bound to that address; `serve_forever` runs it.

    Raises:
        OSError: the address can't be bound.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # seconds: a client that sends nothing lets go of its thread
        server_version = "memledger"
        sys_version = ""

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] in {"/metrics", "/"}
            body = page() if found else b"memledger serves /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not logged."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return Server((host, port), Handler)
