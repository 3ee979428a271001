"""How many state slots one running request of SGLang takes: printed, inferred from the request cap, or by version."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from memledger.findings.figures import release, several_engines, whole
from memledger.ledger import Capacity, Server

DEFAULT_LEAST: Final = 2048
"""`max_running_requests` that SGLang chooses itself is at least this (model_runner.py, 0.5.2 to 0.5.23)."""


class PerRequest(msgspec.Struct, frozen=True):
    """Slots that one request may take; `how` says how that is known. One value: it is certain."""

    options: tuple[int, ...]
    how: str

    @property
    def certain(self) -> int | None:
        """The number, where there is only one."""
        return self.options[0] if len(self.options) == 1 else None

    @property
    def words(self) -> str:
        """`5`, `3 or 5`."""
        *first, last = (str(n) for n in self.options)
        return f"{', '.join(first)} or {last}" if first else last


def slots_per_request(server: Server, capacity: Capacity) -> PerRequest:
    """Slots of one request.

    Printed by the line about the cap (0.5.17 and later); 1 without a radix cache; where SGLang set the cap itself and it
    is below its own default, the cap is `slots // slots per request`; else by version and strategy (SGLang,
    `_calculate_mamba_ratio`: 3 for no_buffer, 5 for extra_buffer, 4 without overlap or with extra_buffer_lazy, 0.5.8 to
    0.5.23; 0.5.7 gave no_buffer 5), as far as slots and cap allow.
    """
    if capacity.slots_per_request:
        return PerRequest((capacity.slots_per_request,), "printed")
    config = server.config
    if config.get("prefix_caching") is False:
        return PerRequest((1,), "without a prefix cache")
    slots, cap = capacity.state_slots, capacity.max_running_requests
    options = _by_version(server, config)
    if slots and cap:
        inferred = [r for r in (1, 3, 4, 5) if slots // r == cap]
        own = "memory_fraction" in config and whole(config.get("max_running_requests")) is None
        # The other bound that SGLang sets itself is half the KV tokens.
        own = own and (capacity.kv_tokens or 0) // 2 > cap
        if own and cap < DEFAULT_LEAST and len(inferred) == 1 and not several_engines(server):
            return PerRequest((inferred[0],), f"{slots} slots // {cap} requests")
        # The cap never exceeds what the slots serve.
        options = tuple(r for r in options if slots // r >= cap) or options
    return PerRequest(options, "by version and strategy")


def _by_version(server: Server, config: dict[str, Any]) -> tuple[int, ...]:
    version, mode = release(server), config.get("state_cache_mode")
    speculative = bool(config.get("speculative_algorithm"))
    if version is not None and version < (0, 5, 4):
        return (1,)
    if version is not None and version < (0, 5, 7):
        return (3,)
    if version is not None and version < (0, 5, 8):
        return (4, 5) if speculative else (5,)
    if mode == "no_buffer":
        return (3,) if version is not None else (3, 5)
    if mode == "extra_buffer_lazy":
        return (4,)
    if mode == "extra_buffer":
        if version is not None and version < (0, 5, 10):
            return (4,) if speculative else (5,)
        overlap = config.get("overlap_disabled")
        return (4,) if overlap is True else (5,) if overlap is False else (4, 5)
    return (3,) if version is not None and mode == "auto" and version < (0, 5, 14) else (3, 5)
