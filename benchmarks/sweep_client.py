"""How much time the sweep's own client adds: 64 streams of 50 tokens a second each from a server in a process of its own.

    python benchmarks/sweep_client.py [--streams 64] [--rate 50] [--seconds 20] [--runs 3] [--realtime]

The server writes the moment at which it hands each piece to the kernel into the piece (CLOCK_MONOTONIC, which all processes of a
machine share); the client's delay is the time at which `memledger.sweep.client` has the piece in hand, less that. It is what a
measured time to the first token holds too much. Loopback's own time is part of it. The machine's load is printed beside: on a busy
machine the figure is the scheduler's, unless `--realtime` (root) lets both processes go before all others.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import msgspec

from memledger.sweep import client as sending
from memledger.sweep import server
from memledger.sweep.figures import quantile

LIMIT_S = 0.002


def serve(ready: Connection, rate: float, tokens: int) -> None:
    """A null server: every stream has a piece each 1/rate seconds, with the streams evenly apart."""
    asyncio.run(_serve(ready, rate, tokens))


async def _serve(ready: Connection, rate: float, tokens: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(x[15:]) for x in head.lower().splitlines() if x.startswith(b"content-length:"))
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        due = time.monotonic()
        for _ in range(tokens):
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            data = b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":"%.9f"}]}\n\n'
            data %= time.monotonic()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        end = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % tokens
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(end), end))
        await writer.drain()
        writer.close()

    started = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    ready.send(started.sockets[0].getsockname()[1])
    async with started:
        await started.serve_forever()


async def measure(port: int, streams: int, rate: float, tokens: int) -> list[float]:
    delays: list[float] = []

    def seen(now: float, data: bytes) -> None:
        choices = msgspec.json.decode(data)["choices"]
        if choices:
            delays.append(now - float(choices[0]["text"]))

    where = server.place(f"http://127.0.0.1:{port}")
    async with server.client(where, None, connections=streams + 4) as client:

        async def one(number: int) -> None:
            await asyncio.sleep(number / streams / rate)
            said = sending.body("m", "x", tokens, engine=False)
            found = await sending.complete(client, said, within_s=600, clock=time.monotonic, on_event=seen)
            assert found.error is None, found.reason
            assert found.output_tokens == tokens

        await asyncio.gather(*(one(number) for number in range(streams)))
    return delays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--realtime", action="store_true")
    asked = parser.parse_args()
    if asked.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # the server's process inherits it
    tokens = round(asked.seconds * asked.rate)
    here, there = multiprocessing.Pipe()
    null = multiprocessing.get_context("spawn").Process(target=serve, args=(there, asked.rate, tokens), daemon=True)
    null.start()
    port = here.recv()
    best = float("inf")
    try:
        for number in range(asked.runs):
            began, used = time.monotonic(), time.process_time()
            delays = sorted(asyncio.run(measure(port, asked.streams, asked.rate, tokens)))
            cpu = (time.process_time() - used) / (time.monotonic() - began)
            p50, p99 = quantile(delays, 0.5), quantile(delays, 0.99)
            best = min(best, p99.value)
            print(
                f"run {number + 1}: {len(delays):,} pieces, {asked.streams} streams x {asked.rate:g}/s: delay p50 {p50.value * 1e3:.3f} ms, "
                f"p99 {p99.value * 1e3:.3f} ms, largest {delays[-1] * 1e3:.2f} ms; client {cpu:.0%} of a core; load {os.getloadavg()[0]:.1f} "
                f"of {os.cpu_count()} cores",
                flush=True,
            )
    finally:
        null.kill()
    print(
        f"best p99 {best * 1e3:.3f} ms; the limit is {LIMIT_S * 1e3:g} ms: {'kept' if best < LIMIT_S else 'NOT KEPT'}"
    )


if __name__ == "__main__":
    main()
