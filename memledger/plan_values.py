"""What a plan is: frozen values whose field names are the JSON contract (docs/json.md, "A plan"). Sizes are bytes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from memledger.ledger import Capacity, Input, Source

CAPACITIES = (
    "kv_tokens",
    "kv_swa_tokens",
    "kv_blocks",
    "kv_block_tokens",
    "state_slots",
    "slots_per_request",
    "max_running_requests",
)
"""Whole-number capacities, in the order of a table; `concurrency` beside them."""


class Target(msgspec.Struct, frozen=True):
    """The load to be served by each data-parallel engine: `concurrency` requests of `context` tokens at once.

    `cached_prefixes`: states of cached prefixes to be kept besides (SGLang).
    """

    concurrency: int | None = None
    context: int | None = None
    cached_prefixes: int = 0


class Side(msgspec.Struct, frozen=True):
    """One GPU before or after. `ranges`: lowest and highest value of a figure that an input leaves open.

    The keys of `ranges` are those of `accounts` and of `capacity` (`concurrency`: its requests); a figure that is exact
    has none.
    """

    # An account that is known before and absent after is not known; one that is gone is 0.
    accounts: dict[str, int] = {}
    capacity: Capacity = Capacity()
    ranges: dict[str, tuple[float, float]] = {}

    @property
    def concurrency(self) -> float | None:
        """Requests of `capacity.concurrency.tokens_per_request` tokens that run at once."""
        return self.capacity.concurrency.requests

    def under(self, prefix: str) -> int:
        """Bytes at or under an account."""
        return sum(
            size for name, size in self.accounts.items() if name == prefix or name.startswith(prefix.rstrip("/") + "/")
        )


class Change(msgspec.Struct, frozen=True):
    """After minus before: bytes by account, and capacities in their own units; what does not change is left out.

    `ranges`: lowest and highest change of a figure that an input leaves open.
    """

    accounts: dict[str, int] = {}
    capacity: dict[str, float] = {}
    ranges: dict[str, tuple[float, float]] = {}


class Plan(msgspec.Struct, frozen=True):
    """What the settings give, and for a target the smallest reservation that serves it.

    * `inputs`: settings, target and facts that were given; `architecture`: where the model's shapes come from.
    * `before`: as logged (null without a log); `after`: with the flags; `change`: their difference.
    * `smallest`: the least pools that serve the target, as if nothing else were reserved; `needed_bytes`: what they take of
      the budget, `available_bytes`: what there is for pools (null where not known); `ranges`: lowest and highest of the
      two, by name, where an input leaves them open.
    * `feasible`: whether the server starts and serves the target; null where that is not known. `instead`: what would do.
    * `binding_limit`: the capacities that bind the number of requests, by name.
    """

    framework: Literal["sglang", "vllm"]
    framework_version: str | None = None
    model: str | None = None
    architecture: str | None = None
    inputs: dict[str, Any] = {}
    before: Side | None = None
    after: Side | None = None
    change: Change = Change()
    smallest: Side | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    ranges: dict[str, tuple[float, float]] = {}
    flags: tuple[str, ...] = ()
    feasible: bool | None = None
    instead: tuple[str, ...] = ()
    binding_limit: str | None = None
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()


class PlanReport(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    """What `memledger plan --format json` prints."""

    version: str
    inputs: tuple[Input, ...]
    sources: tuple[Source, ...]
    plan: Plan | None
    schema_: str = "memledger/1"


def change(before: Side | None, after: Side | None) -> Change:
    """What differs between two sides, in the order of the ledger; what is unknown (absent) on either side is left out."""
    if before is None or after is None:
        return Change()
    accounts = {}
    for name in before.accounts:
        moved = after.accounts.get(name, before.accounts[name]) - before.accounts[name]
        if moved:
            accounts[name] = moved
    capacity: dict[str, float] = {}
    for name in CAPACITIES:
        old, new = getattr(before.capacity, name), getattr(after.capacity, name)
        if old is not None and new is not None and old != new:
            capacity[name] = new - old
    was, now = before.capacity.concurrency, after.capacity.concurrency
    if was.requests is not None and now.requests is not None and was.tokens_per_request == now.tokens_per_request:
        moved_requests = now.requests - was.requests
        capacity |= {"concurrency": moved_requests} if moved_requests else {}
    return Change(accounts, capacity)


def change_of(pairs: list[tuple[Side, Side]], before: Side, after: Side) -> Change:
    """What differs between two sides, and how far the changes of the pairs that may be true instead reach."""
    first = change(before, after)
    others = [change(one, other) for one, other in pairs]
    ranges: dict[str, tuple[float, float]] = {}
    for name in first.accounts | first.capacity:
        moved = [one.accounts.get(name, one.capacity.get(name, 0)) for one in others]
        if min(moved) != max(moved):
            ranges[name] = (min(moved), max(moved))
    return msgspec.structs.replace(first, ranges=ranges)


def open_ends(**values: list[int | None]) -> dict[str, tuple[float, float]]:
    """Lowest and highest of figures by name, where every value is known and they differ."""
    found: dict[str, tuple[float, float]] = {}
    for name, each in values.items():
        known = [value for value in each if value is not None]
        if known and len(known) == len(each) and min(known) != max(known):
            found[name] = (min(known), max(known))
    return found


def spread(sides: list[Side]) -> dict[str, tuple[float, float]]:
    """Lowest and highest of every figure that differs between the sides."""
    found: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys(name for side in sides for name in side.accounts):
        values = [side.accounts.get(name, 0) for side in sides]
        if min(values) != max(values):
            found[name] = (min(values), max(values))
    for name in CAPACITIES:
        known = [value for side in sides if (value := getattr(side.capacity, name)) is not None]
        if known and min(known) != max(known):
            found[name] = (min(known), max(known))
    requests = [side.concurrency for side in sides if side.concurrency is not None]
    if requests and min(requests) != max(requests):
        found["concurrency"] = (min(requests), max(requests))
    return found


def words(names: tuple[str, ...]) -> str | None:
    """Limits as one text; None for none."""
    return ", ".join(names) or None
