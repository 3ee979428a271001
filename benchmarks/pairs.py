"""Every pair of logs of one model, compared: `python benchmarks/pairs.py FOLDER...` over all *.log files in the folders.

A pair is two logs that name the same model, or a log and its `.pair-*.log` twin. For each: the change of the pool and of
the printed tokens, whether the steps sum to them exactly and change sign with the sides, the largest step, what is not in
the logs, and the unexplained step against what is allowed: its tolerance and 1 % of the device.

--all compares every log with every other one, whatever its model, and counts (the sums and signs must hold there too).
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from pathlib import Path, PurePosixPath

from memledger import modelled, pipeline
from memledger.compare.pair import Entrant, compare
from memledger.compare.side import choose_server
from memledger.compare.values import Comparison
from memledger.ledger import Report, gib
from memledger.sources import InputError

MOST_OF_A_MODEL = 6
"""Logs of one model from which pairs are made: all pairs of six are fifteen."""


def entrant(path: Path) -> Entrant | None:
    """The log as one side; None where there is no server in it."""
    try:
        report = pipeline.explain([str(path)])
    except InputError:
        return None
    if not report.servers:
        return None
    report = completed(report)
    start, server = choose_server(report, None)
    return Entrant("A", 0, str(path), start + 1, server)


def completed(report: Report) -> Report:
    """With the model's figures, from the bundled table only."""
    return modelled.split(modelled.checked(report, modelled.architectures(report, None, look_here=False)))


def holds(found: Comparison, back: Comparison) -> bool:
    """Whether the steps sum to the byte and to the token, and change sign with the sides."""
    pools, tokens = found.capacity.pool_bytes, found.capacity.kv_tokens
    if not found.steps:
        return found.reason is not None and not back.steps
    counted = all(step.kv_tokens is not None for step in found.steps)
    if pools.a is None or pools.b is None or sum(s.bytes for s in found.steps) != pools.b - pools.a:
        return False
    if counted and (tokens.a is None or tokens.b is None):
        return False
    if counted and sum(s.kv_tokens or 0 for s in found.steps) != (tokens.b or 0) - (tokens.a or 0):
        return False
    signs = [(s.name, -s.bytes, -(s.kv_tokens or 0)) for s in found.steps]
    return signs == [(s.name, s.bytes, s.kv_tokens or 0) for s in back.steps]


def within(found: Comparison, first: Entrant, second: Entrant) -> tuple[bool, int]:
    """Whether the unexplained step is within its tolerance and 1 % of the device (the larger opening), and what is allowed."""
    last = found.steps[-1]
    openings = [r.residual.opening_bytes or 0 for one in (first, second) for r in one.server.ranks]
    allowed = last.tolerance_bytes + max(openings, default=0) // 100
    return abs(last.bytes) <= allowed, allowed


def row(first: Entrant, second: Entrant, tally: Counter[str]) -> str:
    """One pair's line."""
    found, back = compare(first, second), compare(second, first)
    name = f"{Path(first.path).stem[:30]:30s} {Path(second.path).stem[:30]:30s}"
    exact = holds(found, back)
    tally["exact" if exact else "NOT EXACT"] += 1
    if not found.steps:
        tally["no pool in a log"] += 1
        return f"{name} {found.reason}"
    pools, tokens = found.capacity.pool_bytes, found.capacity.kv_tokens
    top = max(found.steps, key=lambda s: (abs(s.kv_tokens or 0), abs(s.bytes)))
    last = found.steps[-1]
    good, _ = within(found, first, second)
    closed = found.a.verdict == found.b.verdict == "closed"
    kind = f"{'both close' if closed else 'open'}, {found.form}"
    tally[kind] += 1
    if closed:
        tally["closed pairs within" if good else "closed pairs BEYOND"] += 1
    moved = gib((pools.b or 0) - (pools.a or 0))
    counted = "?" if tokens.a is None or tokens.b is None else f"{tokens.b - tokens.a:+,}"
    missing = ",".join(item.name for item in found.not_in_logs)
    return (
        f"{name} {moved:+8.2f} {counted:>12s} {'exact' if exact else 'NOT EXACT':9s} {top.name:20s} "
        f"{gib(last.bytes):+7.3f} {'within' if good else 'BEYOND':7s} {kind}{'; not told: ' + missing if missing else ''}"
    )


def pairs(entrants: list[Entrant]) -> list[tuple[Entrant, Entrant]]:
    """Logs of one model, two by two."""
    models: dict[str, list[Entrant]] = {}
    for one in entrants:
        name = PurePosixPath((one.server.model or "").rstrip("/")).name.lower()
        if name:
            models.setdefault(name, []).append(one)
    found = [p for group in models.values() for p in itertools.combinations(group[:MOST_OF_A_MODEL], 2)]
    twins = {Path(one.path).name.partition(".pair-")[0]: one for one in entrants if ".pair-" in one.path}
    known = {(a.path, b.path) for a, b in found}
    for one in entrants:
        twin = twins.get(Path(one.path).stem)
        if twin is not None and (one.path, twin.path) not in known and (twin.path, one.path) not in known:
            found.append((one, twin))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="every log with every other one: counts only")
    options = parser.parse_args()
    paths = [path for folder in options.folders for path in sorted(folder.rglob("*.log"))]
    entrants = [one for path in paths if (one := entrant(path)) is not None]
    tally: Counter[str] = Counter()
    if options.all:
        for first, second in itertools.combinations_with_replacement(entrants, 2):
            line = row(first, second, tally)
            if "NOT EXACT" in line:
                print(line)
    else:
        print(f"{'A':30s} {'B':30s} {'pool GiB':>8s} {'tokens':>12s} {'sums':9s} {'largest step':20s} {'unexpl.':>7s}")
        for first, second in pairs(entrants):
            print(row(first, second, tally))
    print(f"\n{len(entrants)} logs; " + ", ".join(f"{name}: {count}" for name, count in sorted(tally.items())))


if __name__ == "__main__":
    main()
