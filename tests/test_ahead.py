"""Scanning ahead gives what scanning alone gives, whoever scans what, and whatever happens to the helpers."""

import os
import random
import signal
import threading

import pytest

from memledger import ahead as ahead_module
from memledger import newlines, pipeline, scan
from memledger.ahead import Ahead, may_fork, usable_cores
from memledger.grammar import load_rules
from memledger.scan import Scanner
from memledger.wrap import GATHERED

BLOCK = GATHERED
"""The smallest block that the scanner does not gather with the next."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture(autouse=True)
def _helpers_from_the_first_block(monkeypatch):
    monkeypatch.setattr(scan, "STARTS_ALONE", 0)


# ---- logs


def _clock(rng):
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}:{rng.randrange(60):02d}"


def decode(rng):
    rank = rng.choice([" TP0"] * 6 + ["", " DP1 TP0", f" DP{rng.randrange(12)} TP{rng.randrange(12)}"])
    return (
        f"[2026-09-09 {_clock(rng)}{rank}] Decode batch, #running-req: {rng.randrange(40)}, #token: {rng.randrange(300000)}, "
        f"token usage: {rng.random():.2f}, cuda graph: True, gen throughput (token/s): {rng.random() * 900:.2f}, "
        f"#queue-req: {rng.randrange(4)}"
    )


def engine(rng):
    pid = rng.choice([412, 413])
    return (
        f"(APIServer pid={pid}) INFO 09-09 {_clock(rng)} [loggers.py:259] Engine {rng.randrange(3):03d}: Avg prompt throughput: "
        f"{rng.random() * 900:.1f} tokens/s, Avg generation throughput: {rng.random() * 900:.1f} tokens/s, "
        f"Running: {rng.randrange(64)} reqs, Waiting: {rng.randrange(9)} reqs, GPU KV cache usage: {rng.random() * 103:.1f}%, "
        f"Prefix cache hit rate: {rng.random() * 99:.1f}%"
    )


def odd_usage(rng):
    return (
        decode(rng)
        .replace(", ", rng.choice([", ", " 7, ", "., ", " \x01, "]), 1)
        .replace("0.5", rng.choice([".", "0.5", "5.5.5"]))
    )


def access(rng):
    return f'[2026-09-09 {_clock(rng)}] INFO:     192.0.2.{rng.randrange(256)}:{rng.randrange(9999)} - "POST /v1/chat/completions HTTP/1.1" 200 OK'


def retraction(rng):
    return (
        f"[2026-09-09 {_clock(rng)} TP0] Decode out of memory happened. #retracted_reqs: {rng.randrange(1, 9)}, "
        f"#new_token_ratio: 0.5 -> {rng.random():.4f}"
    )


def event(rng):
    return rng.choice(
        [
            f"[2026-09-09 {_clock(rng)} TP0] Memory pool end. avail mem={rng.random() * 30:.2f} GB",
            f"[2026-09-09 {_clock(rng)} TP0] KV Cache is allocated. #tokens: {rng.randrange(9999)}, K size: 10.08 GB, V size: 10.08 GB",
            f"(EngineCore pid=413) INFO 09-09 {_clock(rng)} [gpu_model_runner.py:3012] Model loading took {rng.random() * 90:.2f} GiB memory and 25.7 seconds",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 320.00 MiB. GPU 0 has a total capacity of 22.05 GiB of which 113.62 MiB is free.",
            retraction(rng),
        ]
    )


def request(rng):
    """A logged request whose text may hold whole usage lines, with line ends or without, and may never be closed."""
    words = ["a pool of 3 GB", "12 tokens", "KV Cache is allocated", "x", decode(rng), engine(rng), event(rng)]
    text = rng.choice(["\n", "\\n", " "]).join(rng.choice(words) for _ in range(rng.choice([1, 3, 40, 400])))
    close = rng.choice(
        ["', params: SamplingParams(n=1), prompt_token_ids: None.", "', params: SamplingParams(n=1)", ""]
    )
    return f"INFO 09-09 {_clock(rng)} [logger.py:37] Received request chatcmpl-{rng.getrandbits(64):x}: prompt: '{text}{close}"


def unknown(rng):
    return rng.choice(
        [
            f"[2026-09-09 {_clock(rng)} TP0] Scratch arena of {rng.random() * 9:.2f} GiB reserved",
            f"[2026-09-09 {_clock(rng)} TP0] {rng.getrandbits(40):x} holds {rng.randrange(99)} GB",
            "2026-09-09T10:00:00.123456789Z stderr P " + decode(rng)[:80],
            f"  7%|█ | {rng.randrange(9)}/9\r" + decode(rng),
            "memory " * rng.choice([3, 300]) + "5 GiB",
        ]
    )


def log(seed, shares, size):
    """A log of about `size` bytes; `shares` says how often each kind of line comes."""
    rng = random.Random(seed)
    kinds, weights = zip(*shares.items(), strict=True)
    lines, length = [], 0
    while length < size:
        for kind in rng.choices(kinds, weights, k=200):
            lines.append(kind(rng))
            length += len(lines[-1]) + 1
    return ("\n".join(lines) + rng.choice(["", "\n"])).encode()


SERVING = {access: 80, decode: 10, engine: 10}
MIXED = {access: 40, decode: 30, engine: 20, odd_usage: 3, event: 0.3, request: 0.3, unknown: 0.3, retraction: 0.1}
HOSTILE = {access: 1, decode: 4, engine: 2, odd_usage: 1, event: 1, request: 1, unknown: 1}
BURSTS = {decode: 900, engine: 100, request: 1, event: 1}


# ---- reading


class Alone(Ahead):
    """Every block is scanned as a helper would, in this process: what helpers give, whatever the machine's load."""

    taken = 0

    def take(self, block):
        self.taken += 1
        return self._scan(block.number)


def opened(path, scanner, kind=Ahead, helpers=2):
    descriptor = os.open(path, os.O_RDONLY)
    size = os.fstat(descriptor).st_size
    return descriptor, kind(
        descriptor, size, BLOCK, scanner.matcher, scanner.thinner, newlines.counter(), helpers=helpers,
        longest=scanner.longest_literal, applies=lambda: True,
    )  # fmt: skip


def events_of(path, kind=None, helpers=2, rules=load_rules()):  # noqa: B008 - the same rules each time
    """What is read of a file: events, counts, examples, notes; and the `Ahead` that helped."""
    scanner = Scanner(rules)
    descriptor, helping = opened(path, scanner, kind or Ahead, helpers)
    with path.open("rb") as stream, helping:
        blocks = iter(lambda: stream.read(BLOCK), b"")
        events = list(scanner.events(blocks, 0, helping if kind else None))
    os.close(descriptor)
    shown = [(e.rule.full_id, e.fields, e.prefix, e.line, e.message, e.text) for e in events]
    return (shown, scanner.bytes, scanner.lines, scanner.unrecognized, scanner.notes), helping


@pytest.mark.parametrize("shares", [SERVING, MIXED, HOSTILE, BURSTS], ids=["serving", "mixed", "hostile", "bursts"])
@pytest.mark.parametrize("seed", range(3))
def test_what_helpers_leave_out_the_reader_would_not_have_read(tmp_path, shares, seed):
    path = tmp_path / "server.log"
    path.write_bytes(log(seed, shares, 10 * BLOCK))
    alone, _ = events_of(path)
    helped, by = events_of(path, Alone)
    assert helped == alone
    assert by.taken


@pytest.mark.parametrize("shares", [SERVING, MIXED], ids=["serving", "mixed"])
@pytest.mark.parametrize("helpers", [1, 3])
def test_helper_processes_change_nothing(tmp_path, shares, helpers):
    path = tmp_path / "server.log"
    path.write_bytes(log(7, shares, 24 * BLOCK))
    alone, _ = events_of(path)
    helped, by = events_of(path, Ahead, helpers)
    assert helped == alone
    assert by._children == []


def test_helpers_leave_out_most_usage_lines(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(log(1, SERVING, 8 * BLOCK))
    scanner = Scanner(load_rules())
    descriptor, helping = opened(path, scanner, Alone)
    with path.open("rb") as stream:
        list(scanner.events([stream.read(2 * BLOCK)], 0))
        data = os.pread(descriptor, BLOCK, 4 * BLOCK)
        every = scanner.matcher.scan(data)
        left = helping._scan(4).hits
    os.close(descriptor)
    assert len(left) < len(every) / 2


def test_a_peak_inside_a_users_text_hides_no_peak_after_it(tmp_path):
    def line(running, usage):
        return (
            f"[2026-09-09 10:00:00 TP0] Decode batch, #running-req: {running}, #token: {running}, token usage: {usage}, "
            f"cuda graph: True, gen throughput (token/s): {running * 10 ** (running % 4)}, #queue-req: 0"
        )

    low = [line(n % 7, 0.12) for n in range(2000)]
    request = [
        "INFO 09-09 10:00:00 [logger.py:37] Received request c-1: prompt: 'a",
        line(99, 0.99),
        "b', params: SamplingParams(n=1)",
    ]
    text = [*low, *request, line(80, 0.88), *low]
    path = tmp_path / "server.log"
    path.write_text("\n".join(text) + "\n")
    alone, _ = events_of(path)
    helped, by = events_of(path, Alone)
    assert helped == alone
    assert by.taken
    assert max(e[1]["running"] for e in helped[0] if "running" in e[1]) == 80


def test_requests_that_end_on_their_line_are_left_out_with_all_their_words(tmp_path):
    asked = "INFO 09-09 10:00:00 [logger.py:37] Received request c-%d: prompt: '%s', params: SamplingParams(n=1)\n"
    path = tmp_path / "server.log"
    path.write_text("".join(asked % (n, "3 GB, 12 tokens " * (n % 9)) for n in range(2 * BLOCK // 100)))
    descriptor, helping = opened(path, Scanner(load_rules()), Alone)
    whole_lines = os.pread(descriptor, BLOCK, BLOCK).count(b"\n") - 1
    left = helping._scan(1)
    os.close(descriptor)
    assert left.newlines == whole_lines + 1
    assert len(left.hits) < 60  # the first line and the last are cut by the block's ends
    assert events_of(path, Alone)[0] == events_of(path)[0]


# ---- what may happen to helpers


class Killed(Ahead):
    """The helpers are killed after some blocks."""

    def take(self, block):
        if block.number == 9:
            os.kill(self._children[0], signal.SIGKILL)
        return super().take(block)


def test_a_helper_that_is_killed_loses_nothing(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(log(5, SERVING, 24 * BLOCK))
    alone, _ = events_of(path)
    helped, by = events_of(path, Killed)
    assert helped == alone
    assert by._children == []


def test_where_no_process_can_be_started_the_reader_reads_alone(tmp_path, monkeypatch):
    def refused():
        raise BlockingIOError("Resource temporarily unavailable")

    path = tmp_path / "server.log"
    path.write_bytes(log(5, SERVING, 10 * BLOCK))
    alone, _ = events_of(path)
    monkeypatch.setattr(os, "fork", refused)
    helped, _ = events_of(path, Ahead)
    assert helped == alone


def test_a_program_with_threads_is_not_forked():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not may_fork()
    finally:
        done.set()
        thread.join()


def test_a_file_that_grew_since_it_was_opened_is_read_whole(tmp_path):
    path = tmp_path / "server.log"
    data = log(6, SERVING, 12 * BLOCK)
    path.write_bytes(data[: 7 * BLOCK + 1000])
    scanner = Scanner(load_rules())
    descriptor, helping = opened(path, scanner)
    with path.open("ab") as more:
        more.write(data[7 * BLOCK + 1000 :])
    with path.open("rb") as stream, helping:
        events = list(scanner.events(iter(lambda: stream.read(BLOCK), b""), 0, helping))
    os.close(descriptor)
    alone, _ = events_of(path)
    assert [e.line for e in events] == [e[3] for e in alone[0]]
    assert scanner.lines == alone[2]


def test_helpers_are_renewed_when_lines_of_a_new_shape_come(tmp_path, monkeypatch):
    # Whatever threads other tests left in this process.
    monkeypatch.setattr(ahead_module, "may_fork", lambda: True)
    monkeypatch.setattr(ahead_module, "RENEWED_AFTER", 4)
    starts = []

    class Counted(Ahead):
        def _start(self, first):
            starts.append(first)
            return super()._start(first)

    path = tmp_path / "server.log"
    path.write_bytes(log(1, {decode: 1}, 8 * BLOCK) + log(2, {engine: 1}, 20 * BLOCK))
    alone, _ = events_of(path)
    helped, _ = events_of(path, Counted)
    assert helped == alone
    assert len(starts) > 1


def test_shapes_that_are_forgotten_end_the_leaving_out(tmp_path, monkeypatch):
    # Whatever threads other tests left in this process.
    monkeypatch.setattr(ahead_module, "may_fork", lambda: True)
    monkeypatch.setattr("memledger.usage.MOST_SHAPES", 20)
    rng = random.Random(1)
    lines = [
        decode(rng) if n % 3 else f"{rng.getrandbits(64):x} of {chr(97 + n % 26) * (n % 40)} 3 GiB"
        for n in range(20000)
    ]
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines))
    alone, _ = events_of(path)
    helped, by = events_of(path, Ahead)
    assert helped == alone
    assert by._thinner is None


# ---- in the pipeline


def test_a_report_is_the_same_with_any_number_of_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "AHEAD_FROM", 0)
    path = tmp_path / "server.log"
    path.write_bytes(log(8, MIXED, 2 * 2**20))
    one, two, many = (pipeline.read([str(path)], cores=cores) for cores in (1, 2, None))
    assert one == two == many


def test_utf16_and_marked_files_are_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "AHEAD_FROM", 0)
    text = log(8, SERVING, 2**20).decode()
    for name, encoding in (("a", "utf-16"), ("b", "utf-8-sig")):
        (tmp_path / name).write_bytes(text.encode(encoding))
        one, two = (pipeline.read([str(tmp_path / name)], cores=cores) for cores in (1, 3))
        assert one == two


def test_cores_are_at_least_one():
    assert usable_cores() >= 1
