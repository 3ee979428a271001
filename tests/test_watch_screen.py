"""The screen as text: what a reader sees, at any width, of any number of GPUs."""

import re
from pathlib import Path

import live_cases
import msgspec
import pytest
from watch_cases import CASE, at, fed, moment, start

from memledger.cli import app
from memledger.report.text import Style
from memledger.watch.board import Board
from memledger.watch.moment import Moment, Serving
from memledger.watch.screen import gpu_count, render

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "watch.md"
ESCAPES = "\x1b[31mred\x1b]0;title\x07\u202eabc"


@pytest.fixture(scope="module")
def sample():
    return live_cases.sample(CASE)


@pytest.fixture(scope="module")
def grown(sample):
    looks = (moment(sample, i, own=i, others=600 * (i > 300), running=1 + i % 5) for i in range(600))
    return fed(Board(), [start(), *looks])


def lines(board, width=80, **how):
    return render(board, width, style=Style(width, False, True), **how)


def test_a_growing_server_reads_like_this(grown):
    text = "\n".join(lines(grown))
    assert text.startswith(
        "SGLang 0.5.18 · Qwen3.8-27B-FP8 · 1 GPU (NVIDIA H100 80GB HBM3) · serving ·\n"
        "2026-09-09 11:57:18 · pid 4210\n"
        "10:09:59, watched for 10 min, 600 looks\n\n"
        "GPU 0\n"
    )
    for line in (
        "weights            ███",
        " 28.47   35.7%",
        " 0.59    0.7%  +600 MiB in a step",
        " 3.34    4.2%  +3.52 GiB an hour",
        "requests           5 running (peak 5 10:00:04), 0 queued (peak 0 10:00:00)",
        "10:05:01  + pid 99999 (python train.py) 0.59 GiB on GPU 0",
        "[ML010] memory grows at the same load  since 10:01:00",
    ):
        assert line in text, text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_asked(grown, width):
    assert max(map(len, lines(grown, width))) <= width


def test_in_ascii_nothing_else_is_written(grown):
    text = "\n".join(render(grown, 80, style=Style(80, False, False)))
    assert text.isascii()
    assert "###" in text


def test_colours_only_where_they_are_wanted(grown):
    assert "\x1b[" not in "\n".join(lines(grown))
    assert "\x1b[33m" in "\n".join(render(grown, 80, style=Style(80, True, True)))


def test_of_many_gpus_each_has_a_line_and_one_is_shown_in_full():
    case = "live-vllm-tp2"
    taken = live_cases.sample(case)
    (server,) = live_cases.log_report(case).servers
    ranks = tuple(msgspec.structs.replace(rank, tp=i) for i, rank in enumerate(server.ranks * 4))
    report = msgspec.structs.replace(
        live_cases.log_report(case), servers=(msgspec.structs.replace(server, ranks=ranks),)
    )
    board = Board()
    board.take(msgspec.structs.replace(start(case, report=report), pid=None))
    board.take(Moment(at(0), 0.0, serving=(Serving(running=1, kv=0.5),)))
    assert gpu_count(board) == 8
    shown = lines(board, gpu=3)
    assert sum("wwwwwwwwKKKKKKK" in line for line in shown) == 8
    assert sum(line.startswith("> ") for line in shown) == 1
    assert any(line.startswith("> TP3") for line in shown)
    assert sum(line.startswith("KV cache  ") for line in shown) == 2, "the ledger's row and the pool's use"
    assert max(map(len, shown)) <= 80
    assert taken.servers


def test_text_of_others_does_not_act_on_the_terminal(sample):
    one = moment(sample, 0, others=500)
    devices = tuple(
        msgspec.structs.replace(
            d, processes=tuple(msgspec.structs.replace(p, command=ESCAPES, user=ESCAPES) for p in d.processes)
        )
        for d in one.sample.devices.devices
    )
    changed = msgspec.structs.replace(one.sample.devices, devices=devices)
    hostile = msgspec.structs.replace(one, sample=msgspec.structs.replace(one.sample, devices=changed), clock_s=1.0)
    board = fed(Board(), [start(), moment(sample, 0), hostile])
    text = "\n".join(lines(board))
    assert "red" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_a_log_alone_shows_its_ledger_and_what_runs():
    board = Board()
    board.take(msgspec.structs.replace(start(), pid=None))
    board.take(Moment(at(0), 0.0, serving=(Serving(running=7, queued=1, kv=0.97, state=0.2),)))
    text = "\n".join(lines(board))
    assert "free at the start" in text
    assert "97 % in use" in text
    assert "7 running (peak 7 10:00:00), 1 queued" in text


def test_an_empty_board_says_so():
    assert lines(Board()) == ["nothing of a server was seen yet"]


EXAMPLE = re.compile(r"(?<= --once\n\n)(?:EXAMPLE\n|(?:    .*\n|\n)+)(?=\* \*\*Bars\*\*)")


def test_the_example_of_the_docs_is_the_screen_as_printed(capsysbinary, update_golden, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert (
        app.run(["watch", "--replay", "fixtures/watch-leak/watch.jsonl", "--once", "--no-color", "--width", "80"]) == 0
    )
    text = capsysbinary.readouterr().out.decode("utf-8")
    printed = "".join(f"    {line}\n" if line else "\n" for line in text.rstrip().split("\n")) + "\n"
    page = DOCUMENT.read_text(encoding="utf-8")
    (shown,) = EXAMPLE.findall(page)
    if update_golden:
        DOCUMENT.write_text(page.replace(shown, printed), encoding="utf-8")
        return
    assert shown == printed
