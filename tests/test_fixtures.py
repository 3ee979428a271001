"""Every fixture log gives the ledger that a person reads in it (`fixtures/README.md` explains `expected.json`)."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from memledger.ledger import Rank, Report, Server
from memledger.pipeline import explain
from memledger.report.json import encode
from memledger.units import parse_amount

FOLDER = Path(__file__).parent.parent / "fixtures"
CASES = sorted(path.parent for path in FOLDER.rglob("expected.json"))
COMPUTED = ("derived", "modelled", "assumed")


def name_of(case: Path) -> str:
    return case.relative_to(FOLDER).as_posix()


# --------------------------------------------------------------------------------------------------------------------
# Figures: "28.47" is GiB as printed, "43.12 GB10", "877.25 MiB", "9832039134 B"; a list is the sum of its figures.


def figure(text: str | list[str]) -> tuple[int, int]:
    """Bytes and half of the last printed digit, in bytes."""
    if isinstance(text, list):
        parts = [figure(item) for item in text]
        return sum(size for size, _ in parts), sum(half for _, half in parts)
    number, _, unit = text.partition(" ")
    # Python's round() drops zeros ("57.5 GiB"): two decimals are the least that the engines round to.
    amount = parse_amount(number, unit or "GiB.2")
    assert amount is not None
    return amount.bytes, amount.tolerance


def shown(size: int) -> str:
    return f"{Decimal(size) / 2**30:.4f} GiB"


def differs(expected: str | list[str] | None, got: int | None) -> str | None:
    """What is wrong with `got` bytes where a line says `expected`; None: nothing."""
    if expected is None:
        return None if got is None else f"expected nothing (the log does not say it), got {shown(got)}"
    if got is None:
        return f"expected {expected}, got nothing"
    size, half = figure(expected)
    return None if abs(size - got) <= half else f"expected {expected} GiB, got {shown(got)}"


def held(rank: Rank, accounts: str, bases: tuple[str, ...]) -> int | None:
    """Sum of the entries at or under the accounts (`a + b`), of these bases; None where there is none."""
    names = [part.strip() for part in accounts.split("+")]
    found = [
        e.bytes
        for e in rank.entries
        if e.basis in bases and any(e.account == n or e.account.startswith(n + "/") for n in names)
    ]
    return sum(found) if found else None


# --------------------------------------------------------------------------------------------------------------------
# One part of the report against one part of the expectation: each yields readable differences.


def plain(where: str, expected: dict[str, Any], got: dict[str, Any]) -> Iterator[str]:
    """Counts, words and fractions, key by key; null must be null (or absent)."""
    for key, value in expected.items():
        have = got.get(key)
        if isinstance(value, float) and isinstance(have, (int, float)):
            if abs(value - have) > 0.0051:
                yield f"{where}.{key}: expected {value}, got {have}"
        elif isinstance(value, dict):
            yield from plain(f"{where}.{key}", value, fields(have))
        elif isinstance(value, str) and isinstance(have, str):
            if value.removeprefix("torch.") != have.removeprefix("torch."):
                yield f"{where}.{key}: expected {value!r}, got {have!r}"
        elif value != have or isinstance(value, bool) != isinstance(have, bool):
            yield f"{where}.{key}: expected {value!r}, got {have!r}"


def fields(value: Any) -> dict[str, Any]:
    """A value type (or a dict, or nothing) as a dict."""
    if value is None or isinstance(value, dict):
        return value or {}
    return {name: getattr(value, name) for name in value.__struct_fields__}


def find_rank(server: Server, label: str) -> Rank | None:
    """The rank of a label: `DP0 TP0 EP0`, `pid 5021`, or `#0` for the first in order."""
    if label.startswith("#"):
        index = int(label[1:])
        return server.ranks[index] if index < len(server.ranks) else None
    wanted = {k.lower(): int(v) for k, v in re.findall(r"(DP|PP|TP|EP|pid) ?(\d+)", label)}
    found = [r for r in server.ranks if all(getattr(r, k) == v for k, v in wanted.items())]
    return found[0] if len(found) == 1 else None


def rank_differences(where: str, expected: dict[str, Any], rank: Rank) -> Iterator[str]:
    for bases, key in ((("logged",), "entries"), (COMPUTED, "computed"), (("logged", *COMPUTED), "held")):
        for accounts, text in expected.get(key, {}).items():
            if problem := differs(text, held(rank, accounts, bases)):
                yield f"{where} {accounts} ({' or '.join(bases)}): {problem}"
    for account in expected.get("absent", []):
        if (size := held(rank, account, ("logged", *COMPUTED))) is not None:
            yield f"{where} {account}: the log does not say it, got {shown(size)}"
    if "stages" in expected:
        yield from stage_differences(where, expected["stages"], rank)
    if "total" in expected and (problem := differs(expected["total"], rank.gpu.total_bytes)):
        yield f"{where} device: {problem}"
    if "opening" in expected and (problem := differs(expected["opening"], rank.residual.opening_bytes)):
        yield f"{where} opening balance: {problem}"
    verdicts = expected.get("verdict", rank.residual.verdict)
    if rank.residual.verdict not in (verdicts if isinstance(verdicts, list) else [verdicts]):
        got = rank.residual
        left = "unknown" if got.bytes is None else shown(got.bytes)
        yield f"{where} verdict: expected {verdicts}, got {got.verdict} (residual {left}; {got.reason})"
    yield from plain(f"{where} gpu", expected.get("gpu", {}), fields(rank.gpu))
    yield from plain(f"{where} capacity", expected.get("capacity", {}), fields(rank.capacity))


def stage_differences(where: str, expected: list[list[str]], rank: Rank) -> Iterator[str]:
    names = {row[0] for row in expected}
    got = [s for s in rank.stages if s.name in names]
    if [s.name for s in got] != [row[0] for row in expected]:
        yield f"{where} stages: expected {[row[0] for row in expected]}, got {[s.name for s in rank.stages]}"
        return
    for (name, before, after), stage in zip(expected, got, strict=True):
        if problem := differs(before, stage.free_before_bytes):
            yield f"{where} free before {name}: {problem}"
        if problem := differs(after, stage.free_after_bytes):
            yield f"{where} free after {name}: {problem}"


def server_differences(where: str, expected: dict[str, Any], server: Server) -> Iterator[str]:
    top: dict[str, Any] = {
        k: expected[k] for k in ("framework", "framework_version", "model", "started_at") if k in expected
    }
    yield from plain(where, top, fields(server))
    states = expected.get("state", server.state)
    if server.state not in (states if isinstance(states, list) else [states]):
        yield f"{where}.state: expected {states}, got {server.state}"
    yield from plain(f"{where}.config", expected.get("config", {}), server.config)
    yield from plain(f"{where}.usage", expected.get("usage", {}), fields(server.usage))
    if "number_of_ranks" in expected and expected["number_of_ranks"] != len(server.ranks):
        yield f"{where}: expected {expected['number_of_ranks']} ranks, got {[r.label for r in server.ranks]}"
    for block in expected.get("ranks", []):
        for label in block["labels"]:
            rank = find_rank(server, label)
            if rank is None:
                yield f"{where}: no rank {label} among {[r.label for r in server.ranks]}"
            else:
                yield from rank_differences(f"{where} {label}", block, rank)
    for block in expected.get("engines", []):
        engine = next((e for e in server.engines if e.dp == block["dp"]), None)
        if engine is None:
            yield f"{where}: no engine {block['dp']} among {[e.dp for e in server.engines]}"
            continue
        yield from plain(f"{where} engine {block['dp']} usage", block.get("usage", {}), fields(engine.usage))
        yield from plain(f"{where} engine {block['dp']} capacity", block.get("capacity", {}), fields(engine.capacity))
    if "failures" in expected:
        yield from failure_differences(where, expected["failures"], server)


def failure_differences(where: str, expected: list[dict[str, Any]], server: Server) -> Iterator[str]:
    if not expected and server.failures:
        yield f"{where}: no failure in the log, got {[f.kind for f in server.failures]}"
    for wanted in expected:
        found = [f for f in server.failures if any(wanted["says"] in e.text for e in f.evidence)]
        if not found:
            yield f"{where}: no failure from the line {wanted['says']!r}; got {[f.kind for f in server.failures]}"
            continue
        if "kind" in wanted and wanted["kind"] not in [f.kind for f in found]:
            yield f"{where}: {wanted['says']!r}: expected kind {wanted['kind']}, got {[f.kind for f in found]}"
        numbers = [
            v for f in found for v in f.numbers.values() if isinstance(v, (int, float)) and not isinstance(v, bool)
        ]
        for text in wanted.get("figures", []):
            size, half = figure(text)
            if not any(abs(size - n) <= half for n in numbers):
                yield f"{where}: {wanted['says']!r}: expected the figure {text}, got {[f.numbers for f in found]}"


def report_differences(expected: dict[str, Any], report: Report) -> Iterator[str]:
    if len(report.servers) != len(expected["servers"]):
        yield f"expected {len(expected['servers'])} servers, got {len(report.servers)}"
    for index, (wanted, server) in enumerate(zip(expected["servers"], report.servers, strict=False)):
        yield from server_differences(f"server {index}", wanted, server)
    if "unread" in expected and expected["unread"] != report.unrecognized.count:
        texts = "".join(f"\n        {e.line}: {e.text}" for e in report.unrecognized.examples)
        yield f"expected {expected['unread']} unread memory-like lines, got {report.unrecognized.count}{texts}"
    document = encode(report).decode()
    for text in expected.get("must_not_appear", []):
        if text in document:
            yield f"{text!r} appears in the JSON report"


# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_report_says_what_the_log_says(case: Path) -> None:
    expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))
    problems = list(report_differences(expected, explain([str(case / "server.log")])))
    assert not problems, f"{name_of(case)}: {expected['shows']}\n  " + "\n  ".join(problems)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_stage_residuals_sum_to_the_residual_of_the_rank(case: Path) -> None:
    for server in explain([str(case / "server.log")]).servers:
        for rank in server.ranks:
            known = [s.residual.bytes for s in rank.stages]
            if rank.residual.bytes is not None and known and None not in known:
                assert sum(b for b in known if b is not None) == rank.residual.bytes, rank.label


def test_there_are_fixtures_of_both_engines_and_each_has_its_log() -> None:
    names = [name_of(case) for case in CASES]
    assert len([n for n in names if n.startswith("sglang-")]) >= 8
    assert len([n for n in names if n.startswith("vllm-")]) >= 8
    assert [n for n in names if not (FOLDER / n / "server.log").is_file()] == []


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_log_holds_only_documentation_addresses(case: Path) -> None:
    """RFC 5737 blocks, loopback and "any": nobody's address stands in a fixture."""
    text = (case / "server.log").read_text(encoding="utf-8", errors="replace")
    allowed = [
        ipaddress.ip_network(n)
        for n in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "127.0.0.0/8", "0.0.0.0/32")
    ]
    found = set(re.findall(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])", text))
    assert [a for a in found if not any(ipaddress.ip_address(a) in n for n in allowed)] == []


def test_differences_are_found() -> None:
    """The comparison itself can fail: figures beyond the printed rounding, null against a value, and the reverse."""
    assert differs("28.47", int(28.474 * 2**30)) is None
    assert differs("28.47", int(28.48 * 2**30)) is not None
    assert differs(None, 0) is not None
    assert differs("0.00", None) is not None
    assert differs(["0.10", "0.20"], int(0.3 * 2**30)) is None
    assert list(plain("x", {"a": None, "b": 0.12, "c": 1}, {"a": 1, "b": 0.13, "c": True})) == [
        "x.a: expected None, got 1",
        "x.b: expected 0.12, got 0.13",
        "x.c: expected 1, got True",
    ]
