"""A server that speaks the streaming interface as SGLang and vLLM do, and misbehaves as told; standard library only.

It counts exactly what it answers, and serves these counts in vLLM's metric names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass, field

END = b"0\r\n\r\n"


@dataclass
class Behaviour:
    """What the server does. `crash_at`: it breaks off every connection from prompts of so many tokens on."""

    model: str = "tiny"
    longest: int | None = 100_000
    first_delay: float = 0.0
    delay: float = 0.0
    mode: str = "good"
    crash_at: int | None = None
    tokenizer: bool = True
    metrics: bool = True
    others: int = 0
    usage: dict | None = None
    keys: list = field(default_factory=list)


class Server:
    """Runs in a thread of its own, on a free port."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.requests = self.prompt_tokens = self.output_tokens = self.running = self.most_running = 0
        self.ttft_sum = 0.0
        self.prompts: list = []
        self.paths: list[str] = []
        self.heads: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._stop.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(x[15:]) for x in head.lower().splitlines() if x.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                self.heads.append(head)
                path = head.split()[1]
                self.paths.append(path)
                if not await self._answer(path, json.loads(body) if body else None, writer):
                    break
        writer.close()

    async def _answer(self, path: str, said: dict | None, writer: asyncio.StreamWriter) -> bool:
        b = self.behaviour
        if path == "/v1/models":
            return self._plain(writer, {"data": [{"id": b.model, "max_model_len": b.longest}]})
        if path == "/metrics" and b.metrics:
            return self._plain(writer, self._metrics(), "text/plain; version=0.0.4")
        if path == "/tokenize" and b.tokenizer:
            tokens = [3 + hash_of(word) for word in said["prompt"].split()]
            return self._plain(writer, {"tokens": tokens, "count": len(tokens), "max_model_len": b.longest})
        if path == "/version":
            return self._plain(writer, {"version": "0.32.0"})
        if path == "/v1/completions":
            return await self._complete(said, writer)
        return self._plain(writer, {"detail": "Not Found"}, status=404)

    def _plain(self, writer, body, kind="application/json", status=200) -> bool:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        return True

    def _metrics(self) -> str:
        rows = {
            'vllm:num_requests_running{engine="0"}': self.running + self.behaviour.others,
            'vllm:num_requests_waiting{engine="0"}': 0,
            'vllm:kv_cache_usage_perc{engine="0"}': 0.25 if self.running else 0.0,
            'vllm:num_preemptions_total{engine="0"}': 0,
            'vllm:request_success_total{engine="0",finished_reason="length"}': self.requests,
            'vllm:prompt_tokens_total{engine="0"}': self.prompt_tokens,
            'vllm:generation_tokens_total{engine="0"}': self.output_tokens,
            'vllm:time_to_first_token_seconds_count{engine="0"}': self.requests,
            'vllm:time_to_first_token_seconds_sum{engine="0"}': self.ttft_sum,
        }
        return "".join(f"{name} {value}\n" for name, value in rows.items())

    async def _complete(self, said: dict, writer: asyncio.StreamWriter) -> bool:
        b = self.behaviour
        prompt = said["prompt"]
        tokens = len(prompt.split()) + 2 if isinstance(prompt, str) else len(prompt)
        self.prompts.append(prompt)
        if b.crash_at is not None and tokens >= b.crash_at:
            return False
        if b.mode == "redirect":
            writer.write(b"HTTP/1.1 307 X\r\nLocation: http://192.0.2.1/steal\r\nContent-Length: 0\r\n\r\n")
            return True
        if b.mode == "busy":
            return self._plain(writer, {"error": {"message": "too many requests \x1b[31m"}}, status=429)
        if b.mode == "page":
            return self._plain(writer, "<html>hello</html>", "text/html")
        writer.write(
            b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(said, tokens, writer)
        finally:
            self.running -= 1

    async def _stream(self, said: dict, tokens: int, writer: asyncio.StreamWriter) -> bool:
        b, most = self.behaviour, said["max_tokens"]
        await asyncio.sleep(b.first_delay)
        if b.mode == "hostile":
            writer.write(chunk(b"data: \x1b]0;owned\x07{" + b"[" * 5000 + b"\n\n"))
        if b.mode == "error":
            writer.write(chunk(event({"error": {"message": "out of \x1b[2Jmemory, api_key=sk-abcdefghijklmnop1234"}})))
        number = 0
        while number < most or b.mode == "endless":
            if number and b.delay:
                await asyncio.sleep(b.delay)
            writer.write(chunk(event({"choices": [{"text": "x", "finish_reason": None}]})))
            await writer.drain()
            number += 1
            if b.mode == "break" and number == 2:
                return False
        usage = b.usage or {"prompt_tokens": tokens, "completion_tokens": number}
        self.requests += 1
        self.prompt_tokens += tokens
        self.output_tokens += number
        self.ttft_sum += b.first_delay
        if b.mode != "no_usage":
            writer.write(chunk(event({"choices": [], "usage": usage})))
        writer.write(chunk(b"data: [DONE]\n\n") + END)
        await writer.drain()
        return True


def hash_of(word: str) -> int:
    """The same number for a word in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(word)) % 997


def event(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"
