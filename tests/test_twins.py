"""A log whose logger writes every line twice is read as if it wrote it once; a line that only repeats is not."""

from pathlib import Path

import pytest

from memledger.pipeline import explain
from memledger.twins import stands_twice

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOGS = sorted(FIXTURES.glob("*/server.log"))


def figures(report):
    return [
        (
            s.state,
            s.usage.peak_running_requests,
            s.usage.retractions,
            [(r.label, [(e.account, e.bytes) for e in r.entries]) for r in s.ranks],
        )
        for s in report.servers
    ]


@pytest.mark.parametrize("log", LOGS, ids=lambda p: p.parent.name)
def test_every_line_twice_gives_the_same_ledger(log, tmp_path):
    lines = log.read_bytes().split(b"\n")[:-1]
    doubled = tmp_path / "doubled.log"
    doubled.write_bytes(b"".join(line + b"\n" + line + b"\n" for line in lines))
    assert figures(explain([str(doubled)])) == figures(explain([str(log)]))


def test_it_is_said(tmp_path):
    lines = (FIXTURES / "demo" / "server.log").read_text(encoding="utf-8").splitlines(keepends=True)
    doubled = tmp_path / "doubled.log"
    doubled.write_text("".join(line * 2 for line in lines), encoding="utf-8")
    assert any("stands twice" in note for note in explain([str(doubled)]).inputs[0].notes)


def test_lines_that_only_repeat_now_and_then_are_not_left_out():
    head = b"".join(b"[2026-01-01 00:00:%02d] line %d\n" % (i, i // 2 if i < 6 else i) for i in range(60))
    assert not stands_twice(head)


def test_a_log_named_twice_is_one_log(tmp_path):
    log = FIXTURES / "demo" / "server.log"
    link = tmp_path / "link.log"
    link.symlink_to(log)
    report = explain([str(log), str(link), str(log)])
    assert len(report.servers) == 1
    assert len(report.inputs) == 1
