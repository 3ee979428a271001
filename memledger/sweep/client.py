"""One streamed completion, timed: from just before it is sent to its end, whatever the server does.

Nothing is followed, nothing is sent elsewhere, and every request ends: by its deadline, by the tokens it was to have, by the bytes
that such an answer may have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from memledger.sanitize import clean
from memledger.sweep import stream
from memledger.sweep.values import ErrorKind, Outcome

if TYPE_CHECKING:
    import httpx

Clock = Callable[[], float]

LONGEST_ERROR: Final = 64 * 1024
"""Bytes of an error's page that are read."""
BYTES_PER_TOKEN: Final = 16 * 1024
"""Bytes of a stream for each token asked for: a piece has some hundred."""
EXTRA_CHUNKS: Final = 2
"""Pieces beyond the tokens asked for: a last one that only says why it ended."""


class RequestError(Exception):
    """A request that failed, with its kind and a sentence."""

    def __init__(self, kind: ErrorKind, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.status = kind, reason, status


class Seen:
    """What has come of an answer so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.chunks = 0
        self.first: float | None = None
        self.last: float | None = None
        self.longest_gap: float | None = None
        self.usage: stream.Counts | None = None

    def tokens_at(self, now: float) -> None:
        """A piece with tokens has come."""
        self.chunks += 1
        if self.first is None or self.last is None:
            self.first = now
        else:
            self.longest_gap = max(self.longest_gap or 0.0, now - self.last)
        self.last = now


def body(model: str | None, prompt: str | list[int], output_tokens: int, *, engine: bool) -> dict[str, Any]:
    """What a request says. `engine`: it is SGLang or vLLM, which can be told to ignore the end-of-sequence token."""
    said: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model is not None:
        said["model"] = model
    if engine:
        said["ignore_eos"] = True
    return said


async def complete(
    client: httpx.AsyncClient,
    said: dict[str, Any],
    *,
    within_s: float,
    began: float = 0.0,
    clock: Clock = time.perf_counter,
    on_event: Callable[[float, bytes], None] | None = None,
) -> Outcome:
    """Send one completion and time what comes. It never raises but when it is cancelled.

    Args:
        client: with the server's address as its base.
        said: the request, from `body`.
        within_s: the deadline for all of it.
        began: the run's begin on `clock`.
        clock: seconds.
        on_event: called with the time and the data of every event (for measurements of the client itself).
    """
    seen = Seen()
    data = msgspec.json.encode(said)
    sent = clock()
    failed: RequestError | None = None
    try:
        async with _deadline(within_s):
            await _receive(client, data, said, seen, clock, on_event)
    except asyncio.TimeoutError:
        failed = RequestError("timeout", f"not done within {within_s:g} s")
    except RequestError as error:
        failed = error
    ended = clock()
    return _outcome(seen, said, sent - began, sent, ended, failed)


class _deadline:  # noqa: N801
    """`asyncio.timeout` of Python 3.11, for 3.10: cancels the task at the end, and tells that from being cancelled by others."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._late = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._end, task)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._late = True
        task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handle.cancel()
        if self._late and kind is not None and issubclass(kind, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and hasattr(task, "uncancel") and task.uncancel() > 0:
                return
            raise asyncio.TimeoutError


async def _receive(
    client: httpx.AsyncClient,
    data: bytes,
    said: dict[str, Any],
    seen: Seen,
    clock: Clock,
    on_event: Callable[[float, bytes], None] | None,
) -> None:
    import httpx

    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    try:
        async with client.stream("POST", "v1/completions", content=data, headers=headers) as answer:
            seen.status = answer.status_code
            await _check(answer)
            await _pieces(answer.aiter_raw(), said["max_tokens"], seen, clock, on_event)
    except httpx.ConnectError as error:
        raise RequestError("refused", f"no connection: {clean(str(error), 120)}") from error
    except httpx.TimeoutException as error:
        raise RequestError("timeout", f"no connection in time: {type(error).__name__}") from error
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError) as error:
        what = clean(str(error), 120) or type(error).__name__
        raise RequestError("broken_off", f"the connection broke off: {what}", seen.status) from error
    except httpx.HTTPError as error:
        raise RequestError("other", f"{type(error).__name__}: {clean(str(error), 120)}", seen.status) from error


async def _check(answer: httpx.Response) -> None:
    """Refuse what is no stream, with what the server said instead."""
    status = answer.status_code
    if 300 <= status < 400:
        target = clean(answer.headers.get("location", "elsewhere"), 120)
        raise RequestError("redirect", f"redirects to {target}, which is not followed", status)
    if status != 200:
        said = await _beginning(answer)
        kind: ErrorKind = "http_5xx" if status >= 500 else "http_4xx"
        raise RequestError(kind, f"status {status}: {said}" if said else f"status {status}", status)
    what = answer.headers.get("content-type", "")
    if what.partition(";")[0].strip().lower() != "text/event-stream":
        raise RequestError(
            "not_a_stream", f"answers with {clean(what, 60) or 'no content type'}, not with a stream", 200
        )
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("not_a_stream", "the stream is compressed, which it was not asked to be", 200)


async def _beginning(answer: httpx.Response) -> str:
    data = b""
    async for block in answer.aiter_raw():
        data += block
        if len(data) > LONGEST_ERROR:
            break
    try:
        return stream.error_text(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return clean(data[:LONGEST_ERROR].decode("utf-8", "replace"), 200)


async def _pieces(
    blocks: AsyncIterator[bytes],
    most: int,
    seen: Seen,
    clock: Clock,
    on_event: Callable[[float, bytes], None] | None,
) -> None:
    """Read to the end of the stream; what it says goes into `seen`."""
    events = stream.Events()
    left = (most + EXTRA_CHUNKS) * BYTES_PER_TOKEN
    done = False
    try:
        async for block in blocks:
            now = clock()
            left -= len(block)
            if left < 0:
                raise RequestError("too_many_tokens", "the stream has far more bytes than the tokens asked for", 200)
            for data in events.feed(block):
                if data == stream.DONE:
                    done = True
                    continue
                if on_event is not None:
                    on_event(now, data)
                _take(stream.piece(data), seen, now, most)
    except stream.ServerSaysError as error:
        raise RequestError("error_in_stream", str(error), 200) from error
    except stream.StreamError as error:
        raise RequestError("bad_stream", str(error), 200) from error
    if not done:
        raise RequestError("broken_off", "the stream ended without its end mark", 200)
    if seen.chunks == 0:
        raise RequestError("no_tokens", "the stream held no token", 200)


def _take(piece: stream.Piece, seen: Seen, now: float, most: int) -> None:
    if piece.has_tokens:
        seen.tokens_at(now)
    if piece.usage is not None:
        seen.usage = piece.usage
    if seen.chunks > most + EXTRA_CHUNKS:
        raise RequestError("too_many_tokens", f"more than the {most} tokens asked for", 200)


def _outcome(
    seen: Seen, said: dict[str, Any], sent_s: float, sent: float, ended: float, failed: RequestError | None
) -> Outcome:
    usage = seen.usage or stream.Counts()
    details = usage.prompt_tokens_details
    output, doubt = _believed(usage.completion_tokens, seen.chunks, said["max_tokens"])
    if failed is None and usage.prompt_tokens is None:
        doubt = doubt or "the stream says no usage"
    return Outcome(
        sent_s=round(sent_s, 6),
        ended_s=round(ended - sent, 6),
        first_s=round(seen.first - sent, 6) if seen.first is not None else None,
        last_s=round(seen.last - sent, 6) if seen.last is not None else None,
        longest_gap_s=round(seen.longest_gap, 6) if seen.longest_gap is not None else None,
        chunks=seen.chunks,
        prompt_tokens=_count(usage.prompt_tokens),
        output_tokens=output if failed is None else None,
        cached_tokens=_count(details.cached_tokens) if details is not None else None,
        status=failed.status if failed is not None and failed.status is not None else seen.status,
        error=failed.kind if failed is not None else None,
        reason=failed.reason if failed is not None else None,
        doubt=doubt if failed is None else None,
    )


def _believed(told: int | None, chunks: int, most: int) -> tuple[int | None, str | None]:
    """The server's count of output tokens, and why not where it contradicts what came."""
    if told is None:
        return None, None
    if told > most:
        return None, f"the usage says {told:,} output tokens of at most {most:,}"
    if told < chunks - 1:
        return None, f"the usage says {told:,} output tokens, in {chunks:,} pieces"
    return (told, None) if told > 0 else (None, "the usage says no output tokens")


def _count(value: int | None) -> int | None:
    return value if value is not None and value >= 0 else None
