"""The endpoint: `/metrics` gives the page that is there, at once."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MOST_CONNECTIONS: Final = 32
"""At once; what is beyond is closed unanswered, so that nobody can fill the process with threads."""


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
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            found = self.path.partition("?")[0] in {"/metrics", "/"}
            body = page() if found else b"memledger serves /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not logged."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        places = threading.BoundedSemaphore(MOST_CONNECTIONS)

        def process_request(self, request: Any, client_address: Any) -> None:
            if not self.places.acquire(blocking=False):
                self.shutdown_request(request)
                return
            try:
                super().process_request(request, client_address)
            except BaseException:
                self.places.release()
                raise

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self.places.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that went away is nothing to speak of; everything else is shown as usual."""
            if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
                super().handle_error(request, client_address)

    return Server((host, port), Handler)
