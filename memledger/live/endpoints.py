"""What a server's own HTTP port answers: GET requests to the loopback address only, read-only paths only.

Each request has one deadline for everything (connecting, the head, the body), a size limit, no proxy, and follows no redirect.
Whatever goes wrong is one sentence in `Endpoint.problem`.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from memledger.live import metrics
from memledger.live.sample import Endpoint
from memledger.live.titles import Framework
from memledger.sanitize import MASK, clean, mask_secrets

DEADLINE: Final = 2.0
"""Seconds for one request, all in all."""

LIMIT: Final = 8 * 2**20
"""Bytes of an answer that are read at most; the largest metrics pages seen have 0.1 MB."""

LONGEST_TEXT: Final = 32_000
"""Characters kept of one text in an answer: vLLM gives its whole configuration as one."""

DEEPEST: Final = 30

_BLOCK: Final = 65536

PATHS: Final[dict[Framework, tuple[str, ...]]] = {
    "sglang": ("/server_info", "/metrics", "/v1/models"),
    "vllm": ("/version", "/server_info?config_format=json", "/metrics", "/v1/models"),
}
BRIEF: Final[dict[Framework, tuple[str, ...]]] = {
    "sglang": PATHS["sglang"],
    "vllm": ("/version", "/metrics", "/v1/models"),
}
"""Enough for a list of servers: vLLM's `/server_info` looks its whole machine over when it is first asked (1.5 s)."""

INSTEAD: Final = {"/server_info": "/get_server_info", "/metrics": "/v1/loads"}
"""SGLang: the path's name before 0.5.8, and what tells the load where metrics are off (0.5.8 on)."""

_REMEDIES: Final = {
    ("sglang", "/metrics"): "the server serves no metrics: start it with --enable-metrics to have them",
    ("vllm", "/server_info?config_format=json"): "not served: vLLM has it with VLLM_SERVER_DEV_MODE=1 only",
}


class Address(msgspec.Struct, frozen=True):
    """Where a server answers on this machine. `key` is sent as `Authorization: Bearer`."""

    port: int
    host: str = "127.0.0.1"
    tls: bool = False
    key: str | None = None


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def ask_all(
    framework: Framework, address: Address, deadline: float = DEADLINE, *, brief: bool = False
) -> tuple[Endpoint, ...]:
    """All read-only endpoints of a server, at the same time, so that one that hangs costs no more than the deadline."""
    answers = _together(address, (BRIEF if brief else PATHS)[framework], deadline)
    if framework == "sglang":
        older = [INSTEAD[e.path] for e in answers if e.status == 404 and e.path in INSTEAD]
        answers += _together(address, older, deadline)
    return tuple(_with_remedy(framework, answer) for answer in answers)


def _together(address: Address, paths: Sequence[str], deadline: float) -> list[Endpoint]:
    if not paths:
        return []
    with ThreadPoolExecutor(len(paths), thread_name_prefix="ask") as pool:
        return list(pool.map(lambda path: ask(address, path, deadline), paths))


def _with_remedy(framework: Framework, answer: Endpoint) -> Endpoint:
    remedy = _REMEDIES.get((framework, answer.path)) if answer.status == 404 else None
    return msgspec.structs.replace(answer, problem=remedy) if remedy else answer


def ask(address: Address, path: str, deadline: float = DEADLINE, limit: int = LIMIT) -> Endpoint:
    """GET one path of a loopback port.

    Raises:
        ValueError: the address is not loopback.
    """
    if not is_loopback(address.host):
        raise ValueError(f"{address.host} is not a loopback address")
    request = _Request(address, deadline)
    try:
        status, head, body = request.get(path, limit)
    except _AnswerError as error:
        return Endpoint(path, error.status, None, str(error))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Endpoint(path, None, None, _why(error, address, request.late, deadline))
    if request.late:
        return Endpoint(path, status, None, _late(deadline))
    return _answer(path, status, head, body)


class _AnswerError(Exception):
    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class _Request:
    """One request. A timer shuts the socket down at the deadline, so that a trickle of bytes ends as well."""

    def __init__(self, address: Address, deadline: float) -> None:
        self.address = address
        self.ends = time.monotonic() + deadline
        self.late = False
        self.sock: socket.socket | None = None
        self.connection = _connection(address, deadline)

    def get(self, path: str, limit: int) -> tuple[int, http.client.HTTPMessage, bytes]:
        timer = threading.Timer(max(0.0, self.ends - time.monotonic()), self._end)
        timer.daemon = True
        timer.start()
        try:
            self.connection.connect()
            # Kept here: http.client lets go of it once the answer has begun.
            self.sock = self.connection.sock
            self.connection.request("GET", path, headers=_headers(self.address))
            answer = self.connection.getresponse()
            return answer.status, answer.headers, _read(answer, limit, self.ends)
        finally:
            timer.cancel()
            self.connection.close()

    def _end(self) -> None:
        self.late = True
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


def _connection(address: Address, timeout: float) -> http.client.HTTPConnection:
    if not address.tls:
        return http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    import ssl

    # The certificate is made out to the server's public name; whom we speak to is known by the port's owner.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(address.host, address.port, timeout=timeout, context=context)


def _headers(address: Address) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity", "Connection": "close", "User-Agent": "memledger"}
    if address.key:
        headers["Authorization"] = f"Bearer {address.key}"
    return headers


def _read(answer: http.client.HTTPResponse, limit: int, ends: float) -> bytes:
    length = answer.headers.get("Content-Length", "")
    if length.isdigit() and int(length) > limit:
        raise _AnswerError(_too_long(limit), answer.status)
    parts: list[bytes] = []
    size = 0
    while block := answer.read1(_BLOCK):
        size += len(block)
        if size > limit:
            raise _AnswerError(_too_long(limit), answer.status)
        if time.monotonic() > ends:
            raise TimeoutError
        parts.append(block)
    return b"".join(parts)


def _too_long(limit: int) -> str:
    return f"the answer is longer than {limit // 2**20} MiB and was not read: this is no page of a server of this kind"


def _late(deadline: float) -> str:
    return f"no answer within {deadline:g} s: the server is busy or hangs"


def _why(error: Exception, address: Address, late: bool, deadline: float) -> str:
    where = f"{address.host}:{address.port}"
    if late or isinstance(error, TimeoutError):
        return _late(deadline)
    if isinstance(error, ConnectionRefusedError):
        return f"nothing answers on {where}: the server is still starting, or it listens elsewhere"
    if isinstance(error, ConnectionError):
        return f"what listens on {where} broke the connection off without an answer"
    if isinstance(error, (http.client.BadStatusLine, http.client.LineTooLong, http.client.UnknownProtocol)):
        return f"what listens on {where} does not answer in HTTP"
    if isinstance(error, http.client.HTTPException):
        return f"the answer of {where} breaks off: {type(error).__name__}"
    return f"{where} can't be asked: {clean(str(error), 120)}"


def _answer(path: str, status: int, head: http.client.HTTPMessage, body: bytes) -> Endpoint:
    if 300 <= status < 400:
        target = clean(head.get("Location", "elsewhere"), 120)
        return Endpoint(path, status, None, f"redirects to {target}, which is not followed")
    if status in {401, 403}:
        return Endpoint(
            path, status, None, "the server asks for its API key: name the variable that holds it with --api-key-env"
        )
    if status == 404:
        return Endpoint(path, status, None, "not served")
    if status != 200:
        return Endpoint(path, status, None, f"answered with status {status}")
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return Endpoint(path, status, None, _not_text(len(body)))
    if "\0" in text:
        return Endpoint(path, status, None, _not_text(len(body)))
    reader = _READERS.get(path, _json)
    return reader(path, status, text)


def _not_text(size: int) -> str:
    return f"the answer is not text ({size:,} bytes): this is no page of a server of this kind"


def _json(path: str, status: int, text: str) -> Endpoint:
    try:
        return Endpoint(path, status, masked(msgspec.json.decode(text.encode())))
    except (msgspec.DecodeError, RecursionError, ValueError):
        return Endpoint(path, status, None, "the answer is not JSON")


def _metrics(path: str, status: int, text: str) -> Endpoint:
    kept = metrics.kept(text)
    if kept is None:
        return Endpoint(path, status, None, "the answer is not a page of Prometheus metrics")
    return Endpoint(path, status, kept)


_READERS: Final[dict[str, Callable[[str, int, str], Endpoint]]] = {"/metrics": _metrics}


def masked(value: Any, depth: int = 0) -> Any:
    """A decoded answer with its texts cleaned and the values of secret names (API keys, tokens, passwords) masked."""
    if depth > DEEPEST:
        return None
    if isinstance(value, str):
        return clean(value, LONGEST_TEXT)
    if isinstance(value, list):
        return [masked(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {
            clean(str(name), 200): MASK if _is_secret(str(name), item) else masked(item, depth + 1)
            for name, item in value.items()
        }
    return value


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool) or value in ("", "None", [], {}):
        return False
    return mask_secrets(f"{name}=x0x0x0x0") != f"{name}=x0x0x0x0"
