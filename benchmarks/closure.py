"""How many ledgers close: `python benchmarks/closure.py FOLDER...` over all *.log files in the folders.

A rank counts where its log prints what a ledger needs: for SGLang free memory before the weights, after the pools and
at the end; for vLLM the whole budget. For each such log the rank with the largest residual is judged. `printed
figures alone` leaves out every entry that is derived, modelled or assumed, which is what adding up the log by hand
gives; `with all entries` is memledger's ledger. An `open` ledger never counts as closed.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from pathlib import Path

from memledger.ledger import Rank, Residual, Server, close, gib
from memledger.pipeline import read
from memledger.units import Amount


def has_what_it_needs(server: Server, rank: Rank) -> bool:
    """Whether the log prints what a ledger of this rank needs."""
    if rank.residual.opening_bytes is None or rank.gpu.kind == "cpu":
        return False
    accounts = {e.account for e in rank.entries}
    if server.framework == "vllm":
        return bool(accounts & {"activations"}) and "reserve" in accounts
    read_at = {s.name: s for s in rank.stages}
    began = "weights" in read_at and read_at["weights"].free_before_bytes is not None
    pooled = "pools" in read_at and read_at["pools"].free_after_bytes is not None
    return began and pooled and "final" in read_at


def printed_alone(server: Server, rank: Rank) -> Residual:
    """The residual of the printed figures alone; vLLM's `in_use_at_start` and `reserve` are its budget's own terms."""
    terms = {"in_use_at_start", "reserve"} if server.framework == "vllm" else {"in_use_at_start"}
    rows = [e for e in rank.entries if e.basis == "logged" or e.account in terms]
    opening = rank.residual.opening_bytes
    assert opening is not None
    return close(
        rank.residual.base, Amount(opening), rows, open_reason=None, unified_memory=bool(rank.gpu.unified_memory)
    )


def judged(path: Path) -> list[tuple[str, Server, Rank]]:
    """The rank to judge of each server in a log: of those that qualify, the one with the largest residual."""
    found = []
    for number, server in enumerate(read([str(path)]).report.servers, start=1):
        ranks = [r for r in server.ranks if has_what_it_needs(server, r)]
        if ranks:
            worst = max(ranks, key=lambda r: abs(r.residual.bytes or 0))
            found.append((f"{path.stem}#{number}", server, worst))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="print every ledger, not only those that do not close")
    options = parser.parse_args()
    rows = [row for folder in options.folders for path in sorted(folder.rglob("*.log")) for row in judged(path)]
    plain, full = Counter[str](), Counter[str]()
    residuals, shares = [], []
    for name, server, rank in rows:
        residual, opening = rank.residual, rank.residual.opening_bytes or 1
        alone = printed_alone(server, rank)
        plain[alone.verdict] += 1
        full[residual.verdict] += 1
        residuals.append(gib(residual.bytes or 0))
        shares.append(100 * abs(residual.bytes or 0) / opening)
        if options.all or residual.verdict != "closed":
            worst = max(rank.stages, key=lambda s: abs(s.residual.bytes or 0))
            print(
                f"{name[:52]:52s} {rank.label:14s} {residual.verdict:12s} {gib(residual.bytes or 0):+7.2f} GiB "
                f"({100 * (residual.bytes or 0) / opening:+5.1f} %), printed alone {gib(alone.bytes or 0):+7.2f}; "
                f"most in {worst.name}"
            )
    print(f"\n{len(rows)} ledgers whose log prints what it takes")
    for title, counts in (("printed figures alone", plain), ("with all entries", full)):
        share = 100 * counts["closed"] / max(1, len(rows))
        names = ("closed", "unexplained", "over_counted", "open")
        print(f"{title:22s} " + "  ".join(f"{n} {counts[n]:3d}" for n in names) + f"   {share:.0f} % closed")
    if len(shares) > 1:
        tenths = statistics.quantiles(shares, n=10)
        print(
            f"residual in % of the opening balance: median {statistics.median(shares):.2f}, "
            f"90 % within {tenths[-1]:.2f}, largest {max(shares):.2f}"
        )
        print(f"residual in GiB: from {min(residuals):+.2f} to {max(residuals):+.2f}")


if __name__ == "__main__":
    main()
