"""Modelled against logged weights, KV and recurrent state, for every log of a folder whose model the bundled table holds.

python benchmarks/modelled.py FOLDER

One row for each server, then the differences that stay, with both figures and what the program says of them. `error` is the modelled size against the logged one; `=` means equal within the digits that the
log prints, `in` within the stated tolerance (0.5 % for KV and state; for weights the range that the arithmetic gives).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memledger import modelled, pipeline
from memledger.ledger import Entry, Rank, Server
from memledger.model.find import find
from memledger.sources import InputError
from memledger.units import GIB

KINDS = {
    "weights": ("weights/model",),
    "kv": ("kv_cache/k", "kv_cache/v", "kv_cache/latent", "kv_cache/swa_k", "kv_cache/swa_v", "kv_cache/pool"),
    "state": ("recurrent_state/conv", "recurrent_state/ssm"),
    "draft": ("weights/draft", "kv_cache/draft"),
    "speculative states": ("recurrent_state/speculative_conv", "recurrent_state/speculative_ssm"),
}


def servers(folder: Path) -> Iterator[tuple[str, Server]]:
    """Every server of the folder's logs, with the log's name."""
    for path in sorted(folder.rglob("*.log")):
        try:
            report = pipeline.explain([str(path)])
        except InputError as error:
            print(f"{path}: {error}", file=sys.stderr)
            continue
        for number, server in enumerate(report.servers, 1):
            name = str(path.relative_to(folder).with_suffix(""))
            yield (f"{name}#{number}" if len(report.servers) > 1 else name), server


def judged(rank: Rank, accounts: tuple[str, ...]) -> list[tuple[Entry, dict[str, Any]]]:
    """Entries of these accounts with what the model says."""
    return [(e, e.detail["modelled"]) for e in rank.entries if e.account in accounts and "modelled" in e.detail]


def word(entry: Entry, said: dict[str, Any]) -> str:
    """One entry's result: `=`, `in`, `DIFFERS`, or why it is not modelled."""
    size = said.get("bytes")
    if size is None:
        return f"- {said.get('reason', 'blocks agree' if said.get('agrees') else 'differs')}"
    error = size / entry.bytes - 1 if entry.bytes else 0.0
    equal = abs(size - entry.bytes) <= entry.tolerance_bytes
    mark = "=" if equal else "in" if said["agrees"] else "DIFFERS"
    return f"{entry.bytes / GIB:.2f} | {size / GIB:.3f} {error:+.2%} {mark}"


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python benchmarks/modelled.py FOLDER", file=sys.stderr)
        return 2
    tally: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    pools: set[str] = set()
    differences: list[str] = []
    given_back = 0
    for name, server in servers(Path(sys.argv[1])):
        found = find(server.model, look_here=False)
        if found.architecture is None or not server.ranks:
            continue
        rank = modelled.check_server(server, found.architecture).ranks[0]
        rows = [(kind, e, said) for kind, accounts in KINDS.items() for e, said in judged(rank, accounts)]
        if not rows:
            continue
        print(f"{name}  ({server.framework} {server.framework_version or '?'}, {found.how})")
        outcomes: dict[str, list[bool | None]] = {}
        for kind, entry, said in rows:
            print(f"    {entry.account:<22}{word(entry, said)}")
            outcomes.setdefault(kind, []).append(said.get("agrees"))
            if found.architecture.state_layers and entry.account == "kv_cache/pool" and "block_tokens" in entry.detail:
                # vLLM prints no state: its bytes show in the block size, which is the smallest that holds one.
                outcomes.setdefault("state in blocks", []).append(said.get("agrees"))
            if said.get("agrees") is False:
                causes = " or ".join(said.get("causes", ())) or "no cause known"
                differences.append(f"{name} {entry.account}: {word(entry, said)}: {causes}")
        given_back += any(entry.account == "released" for entry in rank.entries)
        for kind, each in outcomes.items():
            what = "DIFFERS" if False in each else "agrees" if True in each else "not modelled"
            counts = tally.setdefault(kind, {})
            counts[what] = counts.get(what, 0) + 1
            if kind in {"kv", "state"} and what == "agrees":
                pools.add(name.partition("#")[0])
    print("\ndifferences that stay")
    for line in differences:
        print(f"    {line}")
    print()
    for kind, counts in tally.items():
        print(f"{kind:<19}" + (", ".join(f"{what} {count}" for what, count in sorted(counts.items())) or "none"))
    print(f"servers whose draft's embedding and head are seen to come back: {given_back}")
    print(f"logs whose KV or state is compared and agrees: {len(pools)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
