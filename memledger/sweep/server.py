"""The server that a sweep measures, over HTTP: which it is, its model, its tokenizer, its counters.

Requests go to the address that the user named and nowhere else: no redirect is followed, no proxy of the environment is used
unless that was asked for.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from memledger.live import metrics as pages
from memledger.live.sample import Metrics
from memledger.sanitize import clean
from memledger.sweep import stream
from memledger.sweep.values import Totals

if TYPE_CHECKING:
    import httpx

ASK_WITHIN_S: Final = 10.0
TOKENIZE_WITHIN_S: Final = 60.0
LARGEST_ANSWER: Final = 64 * 2**20

_TOTALS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "vllm": {
        "requests": ("vllm:request_success_total", "vllm:request_success"),
        "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
        "output_tokens": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
        "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
        "first_tokens": ("vllm:time_to_first_token_seconds_count",),
        "first_token_sum_s": ("vllm:time_to_first_token_seconds_sum",),
    },
    "sglang": {
        "requests": ("sglang:num_requests_total",),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "output_tokens": ("sglang:generation_tokens_total",),
        "preemptions": ("sglang:num_retracted_requests_total",),
        "first_tokens": ("sglang:time_to_first_token_seconds_count",),
        "first_token_sum_s": ("sglang:time_to_first_token_seconds_sum",),
    },
}
"""The counters' names; vLLM counts a request when it ends, SGLang too."""

Framework = Literal["sglang", "vllm"]


class ServerError(Exception):
    """The server can't be measured; one sentence."""


class Place(msgspec.Struct, frozen=True):
    """Where the server is: the base of all requests, and whether that is this machine's loopback."""

    base: str
    host: str
    port: int
    loopback: bool


def place(url: str) -> Place:
    """A server's address as the user wrote it: `http://127.0.0.1:8000`, with or without `/v1`.

    Raises:
        ServerError: it is no such address.
    """
    shown = clean(url, 200)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ServerError(f"{shown!r} is no address: {clean(str(error), 100)}") from error
    if parts.scheme not in {"http", "https"} or not host:
        raise ServerError(f"{shown!r} is no address of a server: write http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise ServerError("an address with a user name or password in it: give a key with --api-key-env")
    if parts.query or parts.fragment:
        raise ServerError(f"{shown!r}: the server's address without what follows a ? or #")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    port = port or (443 if parts.scheme == "https" else 80)
    named = f"[{host}]" if ":" in host else host
    return Place(f"{parts.scheme}://{named}:{port}{path}/", host, port, _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def client(where: Place, key: str | None, *, connections: int, proxy: bool = False) -> httpx.AsyncClient:
    """The client of all requests: one connection for each request at a time, no redirects, no environment."""
    import httpx

    headers = {"Accept-Encoding": "identity", "User-Agent": "memledger"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=4.0)
    timeout = httpx.Timeout(None, connect=ASK_WITHIN_S)
    # Making a TLS context reads the certificates of the machine: only where TLS is spoken.
    verify: ssl.SSLContext | bool = ssl.create_default_context() if where.base.startswith("https") else False
    return httpx.AsyncClient(
        base_url=where.base,
        headers=headers,
        limits=limits,
        timeout=timeout,
        verify=verify,
        trust_env=proxy,
        follow_redirects=False,
    )


class Answer(msgspec.Struct, frozen=True):
    """What a path answered: its status and decoded JSON (or text), or why not."""

    status: int | None = None
    body: Any = None
    text: str = ""
    problem: str | None = None


async def ask(
    asked: httpx.AsyncClient, path: str, said: Any = None, *, within_s: float = ASK_WITHIN_S, json: bool = True
) -> Answer:
    """GET a path, or POST what is said to it."""
    import asyncio

    import httpx

    try:
        return await asyncio.wait_for(_ask(asked, path, said, json=json), within_s)
    except asyncio.TimeoutError:
        return Answer(problem=f"no answer within {within_s:g} s")
    except httpx.ConnectError:
        return Answer(
            problem=f"nothing answers at {clean(str(asked.base_url), 120)}; check that the server is up and that this is its address and port"
        )
    except httpx.HTTPError as error:
        return Answer(problem=clean(str(error), 160) or type(error).__name__)


async def _ask(asked: httpx.AsyncClient, path: str, said: Any, *, json: bool) -> Answer:
    content = None if said is None else msgspec.json.encode(said)
    headers = {} if said is None else {"Content-Type": "application/json"}
    async with asked.stream("GET" if said is None else "POST", path, content=content, headers=headers) as answer:
        data = b""
        async for block in answer.aiter_raw():
            data += block
            if len(data) > LARGEST_ANSWER:
                return Answer(answer.status_code, problem="the answer is too long")
        return _read(answer.status_code, answer.headers.get("location", ""), data, json=json)


def _read(status: int, location: str, data: bytes, *, json: bool) -> Answer:
    if 300 <= status < 400:
        return Answer(status, problem=f"redirects to {clean(location, 120) or 'elsewhere'}, which is not followed")
    text = data.decode("utf-8", "replace")
    body = None
    if json:
        try:
            body = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return Answer(status, None, text, "the answer is not JSON" if status == 200 else None)
    if status != 200:
        why = stream.error_text(body) if body is not None else clean(text, 160)
        return Answer(status, body, text, f"status {status}: {why}" if why else f"status {status}")
    return Answer(status, body, text)


# ---------------------------------------------------------------------------------------------------------- the figures


class Counters(msgspec.Struct, frozen=True):
    """A metrics page: gauges and counters; None and empty where the server serves none."""

    framework: Framework | None = None
    metrics: Metrics | None = None
    totals: Totals | None = None


async def counters(asked: httpx.AsyncClient) -> Counters:
    """The server's metrics now."""
    answer = await ask(asked, "metrics", json=False)
    return read_counters(answer.text) if answer.status == 200 else Counters()


def read_counters(text: str) -> Counters:
    """What a metrics page says."""
    framework: Framework | None = next((name for name in ("vllm", "sglang") if f"\n{name}:" in "\n" + text), None)
    if framework is None:
        return Counters()
    kept = pages.kept(text)
    found = pages.read(framework, kept)[0] if kept else None
    return Counters(framework, found, _totals(framework, text))


def _totals(framework: Framework, text: str) -> Totals:
    names = _TOTALS[framework]
    wanted = tuple(name for group in names.values() for name in group)
    points = pages.parse("\n".join(line for line in text.splitlines() if line.startswith(wanted)))

    def total(group: Sequence[str]) -> float | None:
        for name in group:
            values = [p.value for p in points if p.name == name]
            if values:
                return None if None in values else sum(v for v in values if v is not None)
        return None

    sums = {field: total(group) for field, group in names.items()}
    counts = {
        field: round(value) for field, value in sums.items() if value is not None and field != "first_token_sum_s"
    }
    return Totals(**counts, first_token_sum_s=sums["first_token_sum_s"])


class Model(msgspec.Struct, frozen=True):
    """The model that is asked for, and the longest prompt and answer together that the server takes."""

    name: str
    longest: int | None = None


async def model(asked: httpx.AsyncClient, wanted: str | None) -> Model:
    """The model to ask for: the one named, else the only one that is served.

    Raises:
        ServerError: nothing answers, or there are several, or not that one.
    """
    answer = await ask(asked, "v1/models")
    if answer.status in {401, 403}:
        raise ServerError("the server asks for its API key: name the variable that holds it with --api-key-env")
    listed = answer.body.get("data") if isinstance(answer.body, dict) else None
    if answer.status != 200 or not isinstance(listed, list):
        raise ServerError(f"/v1/models: {answer.problem or 'not a list of models'}")
    found = [one for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)]
    if wanted is not None:
        chosen = [one for one in found if one["id"] == wanted]
    else:
        chosen = [one for one in found if not one.get("parent")]  # an adapter has one
    if len(chosen) != 1:
        names = ", ".join(clean(one["id"], 80) for one in found[:8]) or "none"
        why = "no such model" if wanted is not None else "name one with --model"
        raise ServerError(f"the server has these models: {names}; {why}")
    longest = chosen[0].get("max_model_len")
    return Model(chosen[0]["id"], longest if isinstance(longest, int) and longest > 0 else None)


async def version(asked: httpx.AsyncClient, framework: Framework | None) -> str | None:
    """The engine's version, where it tells it."""
    if framework is None:
        return None
    answer = await ask(asked, "version" if framework == "vllm" else "server_info")
    found = answer.body.get("version") if answer.status == 200 and isinstance(answer.body, dict) else None
    return clean(found, 40) if isinstance(found, str) else None


async def token_ids(asked: httpx.AsyncClient, name: str, text: str) -> list[int] | None:
    """The text as the server's tokens; None where it has no tokenizer endpoint.

    vLLM and SGLang have `POST /tokenize` with `prompt` and answer with `tokens` and `count`.
    """
    said = {"model": name, "prompt": text, "add_special_tokens": False}
    answer = await ask(asked, "tokenize", said, within_s=TOKENIZE_WITHIN_S)
    found = answer.body.get("tokens") if answer.status == 200 and isinstance(answer.body, dict) else None
    if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
        return None
    count = answer.body.get("count")
    return found if found and count in {None, len(found)} else None
