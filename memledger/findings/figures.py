"""Figures that several findings use, and the context a finding may ask for beside the server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from memledger import words as n
from memledger.ledger import Evidence, Live, Rank, Server, account_total
from memledger.units import MIB

if TYPE_CHECKING:
    from memledger.model.architecture import Architecture

Version = tuple[int, int, int]
WORTH_SAYING: Final = 256 * MIB
"""Below this no finding about idle or wasted memory is made."""


class Context(msgspec.Struct, frozen=True):
    """What a finding may know beside the server: the model's architecture, and the running machine, where they are known."""

    architecture: Architecture | None = None
    live: Live | None = None


NO_CONTEXT: Final = Context()


def release(server: Server) -> Version | None:
    """The printed release as three numbers; None for builds whose version says nothing (0.1.dev1, 0.0.0+fork)."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", server.framework_version or "")
    if found is None:
        return None
    version = (int(found[1]), int(found[2]), int(found[3] or 0))
    least = (0, 4, 0) if server.framework == "vllm" else (0, 2, 0)
    return version if version >= least else None


def held(rank: Rank, account: str) -> int:
    """Bytes at or under an account; 0 where the log names none."""
    amount = account_total(rank.entries, account)
    return amount.bytes if amount is not None else 0


def opening(rank: Rank) -> int | None:
    """What shares are of: the opening balance, else the card where its size is known."""
    return rank.residual.opening_bytes or rank.gpu.total_bytes


def share(rank: Rank, size: int) -> float:
    """`size` as a part of the opening balance; 0 where there is none."""
    whole = opening(rank)
    return size / whole if whole else 0.0


def of_card(rank: Rank, size: int) -> str:
    """` (12 % of the card)`, in the words of what is known; empty where nothing is."""
    whole = opening(rank)
    if not whole:
        return ""
    what = "the card" if rank.residual.base == "device" else "what was free at the start"
    return f" ({n.percent(size / whole)} of {what})"


def lines(rank: Rank, *accounts: str) -> tuple[Evidence, ...]:
    """The lines behind all entries at or under the accounts."""
    found = [e for e in rank.entries if any(e.account == a or e.account.startswith(a + "/") for a in accounts)]
    return tuple(dict.fromkeys(e for entry in found for e in entry.evidence))[:6]


def largest(ranks: Iterable[Rank], account: str) -> tuple[Rank, int] | None:
    """The rank that holds most of an account, with the bytes; None where no rank holds any."""
    sizes = [(rank, held(rank, account)) for rank in ranks]
    best = max(sizes, key=lambda item: item[1], default=None)
    return best if best is not None and best[1] > 0 else None


def each(server: Server) -> str:
    """` on each GPU` where there are several."""
    return " on each GPU" if len(server.ranks) > 1 else ""


def where(server: Server, rank: Rank) -> str:
    """` on TP1` where there are several ranks."""
    return f" on {rank.label}" if len(server.ranks) > 1 else ""


def on_cpu(server: Server) -> bool:
    """Whether a rank is a CPU worker: its ledger is the host's."""
    return any(rank.gpu.kind == "cpu" for rank in server.ranks)


def several_engines(server: Server) -> bool:
    """Whether the server runs several data-parallel engines (a flag then counts for all of them together)."""
    dp = server.config.get("dp_size")
    return len(server.engines) > 1 or (isinstance(dp, int) and dp > 1)


def whole(value: object) -> int | None:
    """A positive whole number of the configuration; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
