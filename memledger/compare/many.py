"""Three or more inputs: a table with one column each, rows that differ marked; for sweeps of one flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from memledger.compare.differences import ENGINE_ONLY, SETTINGS
from memledger.compare.meaning import Measured, fits, meaning
from memledger.compare.side import Side
from memledger.compare.values import Row


def settings(sides: Sequence[Side]) -> tuple[Row, ...]:
    """Every setting that a side tells; settings of one engine alone only where all are of that engine."""
    alike = len({side.server.framework for side in sides}) == 1
    rows = []
    for name, get in SETTINGS:
        if name in ENGINE_ONLY and not alike:
            continue
        values = tuple(get(side) for side in sides)
        if any(value is not None for value in values):
            rows.append(Row(name, values, _differs(values)))
    return tuple(rows)


def figures(measured: Sequence[Measured], context: int | None) -> tuple[Row, ...]:
    """Capacity and what decides it, of each input."""
    told = [meaning(one, context) for one in measured]
    rows: list[tuple[str, list[Any]]] = [
        ("kv_tokens", [m.printed_tokens for m in told]),
        ("token_rule", [m.rule for m in told]),
        ("effective_tokens", [m.effective_tokens for m in told]),
        ("pool_bytes", [m.pool_bytes for m in told]),
        ("kv_bytes_per_token", [m.kv_bytes_per_token for m in told]),
        ("state_bytes_held", [m.state_bytes_held for m in told]),
        ("state_bytes_per_request", [m.state_bytes_per_request for m in told]),
        ("requests_that_fit", [fits(one, context).requests if context else None for one in measured]),
    ]
    rows += [(f"{name}_bytes", [get(one.side) for one in measured]) for name, get in _PARTS]
    spreads = {"kv_bytes_per_token": [m.kv_bytes_per_token_tolerance or 0 for m in told]}
    found = [Row(name, tuple(values), _differs(values, spreads.get(name))) for name, values in rows]
    return tuple(row for row in found if any(value is not None for value in row.values))


def _part(name: str) -> Callable[[Side], int | None]:
    def get(side: Side) -> int | None:
        amount = side.parts[name].amount
        return amount.bytes if amount is not None else None

    return get


_PARTS: Final[tuple[tuple[str, Callable[[Side], int | None]], ...]] = (
    ("device_total", lambda side: side.device.bytes if side.device is not None else None),
    ("budget", lambda side: side.budget.bytes if side.budget is not None else None),
    ("weights", _part("weights")),
    ("draft", _part("draft")),
    ("activations", _part("activations")),
    ("window_pool", _part("window_pool")),
    ("cuda_graphs_held", lambda side: side.graphs_held.bytes if side.graphs_held is not None else None),
)


def _differs(values: Sequence[Any], spreads: Sequence[int] | None = None) -> bool:
    """Whether the known values are not the same; with `spreads` (half of what the printed digits leave open) beyond those."""
    if spreads is not None:
        ranges = [(v - s, v + s) for v, s in zip(values, spreads, strict=True) if v is not None]
        return bool(ranges) and max(low for low, _ in ranges) > min(high for _, high in ranges)
    known = [value for value in values if value is not None]
    return any(value != known[0] for value in known[1:])
