"""ML401: memory of the host that the server keeps (pinned caches, offloaded weights)."""

from __future__ import annotations

from typing import Final

from memledger import words as n
from memledger.ledger import Finding, Server
from memledger.units import GIB, MIB

WORTH_SAYING: Final = 256 * MIB
MUCH: Final = 64 * GIB


def host_memory(server: Server) -> Finding | None:
    """ML401: the sum of all host accounts over all ranks. A CPU build keeps everything there: no finding."""
    if any(rank.gpu.kind == "cpu" for rank in server.ranks):
        return None
    entries = [(rank, e) for rank in server.ranks for e in rank.entries if e.account.startswith("host/")]
    size = sum(e.bytes for _, e in entries)
    if size < WORTH_SAYING:
        return None
    names = dict.fromkeys(e.account.removeprefix("host/").replace("_", " ").replace("/", ", ") for _, e in entries)
    over = f" over {n.plural(len({id(rank) for rank, _ in entries}), 'rank')}" if len(server.ranks) > 1 else ""
    text = f"The server also keeps {n.gib_about(size)} in host memory{over} ({', '.join(names)}): no part of the GPU's ledger."
    evidence = tuple(e for _, entry in entries[:4] for e in entry.evidence)
    return Finding("ML401", "host memory", "note" if size >= MUCH else "info", size, text, evidence)
