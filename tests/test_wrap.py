"""Lines cut by a terminal or a pager."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from memledger.grammar import load_rules
from memledger.scan import Scanner

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOGS = sorted(FIXTURES.glob("*/server.log"))
WIDTHS = [80, 100, 120, 160, 200]


def wrapped(text: str, width: int, *, strip: bool = False) -> str:
    out = []
    for line in text.split("\n"):
        parts = [line[i : i + width] for i in range(0, len(line), width)] or [""]
        out += [part.rstrip(" ") for part in parts] if strip else parts
    return "\n".join(out)


def chopped(text: str, width: int) -> str:
    return "\n".join(line[:width] for line in text.split("\n"))


def read(data: bytes, block: int = 2**19) -> tuple[list[tuple[str, str]], list[int], Scanner]:
    scanner = Scanner(load_rules())
    events = list(scanner.events([data[i : i + block] for i in range(0, len(data), block)], 0))
    return [(e.id, repr(e.fields)) for e in events], [e.line for e in events], scanner


@pytest.fixture(scope="module")
def long_log() -> str:
    """A startup with its arguments, then serving, with a prefix on every line."""
    text = (FIXTURES / "sglang-0.5.20-hybrid-mtp-tp2" / "server.log").read_text()
    rest = [
        f"[2026-05-01 22:{i // 60 % 60:02}:{i % 60:02} TP0] note {i}: {'word ' * (i * 7 % 40)}end" for i in range(900)
    ]
    return text + "\n".join(rest) + "\n"


@pytest.mark.parametrize("log", LOGS, ids=lambda p: p.parent.name)
def test_a_log_that_was_not_wrapped_is_left_alone(log: Path) -> None:
    _, _, scanner = read(log.read_bytes())
    assert scanner.notes == ()


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_wrapped_log_says_what_it_said_before(long_log: str, width: int, strip: bool) -> None:
    expected, _, _ = read(long_log.encode())
    found, _, scanner = read(wrapped(long_log, width, strip=strip).encode())
    assert found == expected
    assert len(scanner.notes) == 1
    assert f"lines wrapped at {width} columns were joined" in scanner.notes[0]


@pytest.mark.parametrize("width", [80, 160])
def test_line_numbers_are_those_of_the_first_physical_line(long_log: str, width: int) -> None:
    text = wrapped(long_log, width)
    starts = []
    number = 1
    for line in long_log.split("\n"):
        starts.append(number)
        number += max(1, -(-len(line) // width))
    _, plain, before = read(long_log.encode())
    _, lines, scanner = read(text.encode())
    assert lines == [starts[line - 1] for line in plain]
    assert scanner.lines == text.count("\n")
    assert scanner.bytes == len(text.encode())
    assert before.lines == long_log.count("\n")


@pytest.mark.parametrize("block", [97, 5000, 65536, 70001])
def test_where_the_blocks_end_does_not_matter(long_log: str, block: int) -> None:
    data = wrapped(long_log * 3, 80).encode()
    expected, numbers, whole = read(data)
    found, lines, scanner = read(data, block)
    assert (found, lines, scanner.lines) == (expected, numbers, whole.lines)


def test_a_wrapped_stretch_in_the_middle_of_a_log(long_log: str) -> None:
    plain, _, _ = read(long_log.encode() * 2)
    text = "x" * 300 + "\n" + long_log + "y" * 300 + "\n" + wrapped(long_log, 100) + "z" * 300 + "\n"
    found, _, scanner = read(text.encode())
    assert found == plain
    assert any("at 100 columns" in note for note in scanner.notes)


def test_bytes_characters_and_columns_all_count_as_width() -> None:
    stamp = "[2026-05-01 22:44:30] "
    records = [f"{stamp}進捗 {'漢字' * (i % 9)} {'word' * (i % 31)} end {i}" for i in range(200)]
    records.insert(50, f"{stamp}{'進' * 12} {'a' * 40}")
    records.append(f"{stamp}KV Cache is allocated. #tokens: 282240, K size: 19.98 GB, V size: 19.98 GB")

    def by_bytes(line: bytes) -> list[bytes]:
        return [line[i : i + 80] for i in range(0, len(line), 80)]

    text = b"\n".join(b"\n".join(by_bytes(record.encode())) for record in records) + b"\n"
    found, _, scanner = read(text)
    assert [name for name, _ in found] == ["kv_pool"]
    assert any("at 80 columns" in note for note in scanner.notes)


@pytest.mark.parametrize("width", [80, 120])
def test_what_was_chopped_is_refused_not_read_half(long_log: str, width: int) -> None:
    lines = [line for line in long_log.split("\n") if "ServerArgs" not in line]
    expected = set(read("\n".join(lines).encode())[0])
    found, _, scanner = read(chopped("\n".join(lines), width).encode())
    # Of arguments what stands before the cut is read; every figure of memory is whole or missing.
    assert {name for name, _ in set(found) - expected} <= {"server_args", "linear_dispatcher"}
    assert {"load_weight_begin", "pool_end"} <= {name for name, _ in found}
    assert scanner.unrecognized.count > 0
    assert any(f"cut off at {width} columns" in note for note in scanner.notes)


def table(rng: random.Random) -> str:
    return "".join(f"{'Metric ' + str(i):<30}{rng.random():<20.3f}\n" for i in range(40))


def box(rng: random.Random) -> str:
    return "".join(f"| {rng.randrange(10**9):<30} | {rng.random():<40.3f} |\n" for _ in range(40))


def runs(rng: random.Random) -> str:
    return "".join(
        f"  run-{i % 9}  wall= {rng.random():.6f}s  ttft= {rng.random():.6f}ms  toks=1000\n" for i in range(40)
    )


def usage(rng: random.Random) -> str:
    return "".join(
        f"[2026-05-01 22:44:30] Decode batch, #running-req: {rng.randrange(1, 9)}, #token: {rng.randrange(1000, 9999)}, "
        f"token usage: 0.{rng.randrange(10, 99)}, cuda graph: True, gen throughput (token/s): 10.00, #queue-req: 0\n"
        for _ in range(200)
    )


@pytest.mark.parametrize("make", [table, box, runs, usage])
def test_equal_lengths_alone_are_no_wrapping(make: Callable[[random.Random], str]) -> None:
    text = make(random.Random(1))
    _, _, scanner = read(text.encode())
    assert scanner.notes == ()
    _, _, scanner = read(("[2026-05-01 22:44:30] Load weight begin. avail mem=78.48 GB\n" + text).encode())
    assert scanner.notes == ()


def test_what_is_wrapped_is_held_back_until_its_end_is_there(long_log: str) -> None:
    data = wrapped(long_log, 80).encode()
    cut = data.index(b"end\n", len(data) // 2) - 30
    scanner = Scanner(load_rules())
    events = list(scanner.events([data[:cut], b"", data[cut:], b""], 0))
    assert [(e.id, repr(e.fields)) for e in events] == read(data)[0]


def test_a_record_of_one_line_among_few_is_completed() -> None:
    text = (
        "Load weight end. type=Qwen3, avail mem=24.12 GB, mem usage=17.17 GB.\n"
        "max_total_num_tokens=268319, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=1, context_len=32\n"
        "768, available_gpu_mem=10.35 GB\n"
    )
    found, _, _ = read(text.encode())
    assert "'context': 32768" in dict(found)["capacity"]
