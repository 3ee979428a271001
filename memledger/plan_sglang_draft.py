"""What a draft model that comes or goes does to SGLang's pools: its weights, its KV, and who pays for them by release.

Draft weights are loaded before the pools are sized from 0.5.14, so the budget is smaller by them; before, they come out of
what is left outside it. The draft's KV layers are in the cost of a token from 0.5.11 (`memledger.model.sglang.cost`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from memledger import plan_draft
from memledger.ledger import Rank
from memledger.model import kv as kv_sizes
from memledger.model.architecture import Architecture, NotModelledError, Parallel
from memledger.model.dtypes import normal_name
from memledger.model.sglang import SglangServer

WEIGHTS_BEFORE_POOLS_SINCE: Final = (0, 5, 14)


class DraftChange(msgspec.Struct, frozen=True):
    """A draft that comes or goes. `weights`: of the draft afterwards; `logged`: before; `token`: KV bytes of one token."""

    weights: plan_draft.Weights
    logged: int
    token: int
    charged: bool

    def applied(self, server: SglangServer, drafted: int) -> SglangServer:
        """The changed server with this draft, whose weights are `drafted` bytes."""
        fields: dict[str, Any] = {}
        if server.kv is not None:
            fields["kv"] = msgspec.structs.replace(server.kv, draft=self.token)
        if self.charged:
            fields["more_budget"] = server.more_budget - (drafted - self.logged)
        return msgspec.structs.replace(server, **fields)


def token_bytes(
    base: Architecture, config: Mapping[str, Any], draft: Architecture | None, sizes: Parallel, kv_dtype: Any
) -> int:
    """KV bytes of one token on one rank in the draft's layers.

    Raises:
        NotModelledError: the draft is not known.
    """
    found = msgspec.structs.replace(base, draft_layers=plan_draft.layers(config, base, draft, "sglang"))
    name = normal_name(kv_dtype) if isinstance(kv_dtype, str) else "auto"
    return kv_sizes.model_token_bytes(found, sizes, name, framework="sglang", layers="all", draft=True)


def change_of_draft(
    server: SglangServer,
    rank: Rank,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    architecture: Architecture | None,
    draft: Architecture | None,
    sizes: Parallel,
    assumptions: list[str],
    not_modelled: list[str],
) -> DraftChange | None:
    """What the settings do to the draft of a logged server; None where it stays, or where there is none on either side.

    Raises:
        NotModelledError: there is a draft afterwards that is not known, or the release that decides is not.
    """
    if not {"speculative_draft_tokens", "speculative_algorithm"} & set(settings):
        return None
    asked = {**config, **settings}
    had = (
        server.speculation is not None
        and str(config.get("speculative_algorithm")).lower() not in (plan_draft.NO_MODEL["sglang"])
    )
    has = plan_draft.has_model(asked, "sglang")
    named = str(settings.get("speculative_algorithm") or config.get("speculative_algorithm")).lower()
    if had == has and (not has or named == str(config.get("speculative_algorithm")).lower()):
        return None
    weights = plan_draft.weights(asked, architecture, draft, sizes, "sglang")
    logged = sum(e.bytes for e in rank.entries if e.account == "weights/draft")
    token = 0
    if has:
        base = architecture or draft
        assert base is not None
        kv_dtype = settings.get("kv_cache_dtype") or config.get("kv_cache_dtype")
        token = token_bytes(base, asked, draft, sizes, kv_dtype)
        assumptions.append(plan_draft.told(weights))
        not_modelled.append("CUDA graphs and activations of the draft")
    low, high = server.versions
    charged = low >= WEIGHTS_BEFORE_POOLS_SINCE or _loaded_before_pools(rank)
    if not charged and high >= WEIGHTS_BEFORE_POOLS_SINCE and weights.high != logged:
        raise NotModelledError(
            "from 0.5.14 the draft's weights come off the pools' budget, before they come out of what is left outside it; "
            "the release is not in the log: --framework-version N"
        )
    if charged and had and logged:
        assumptions.append("the draft's weights give back what the log printed for their loading")
    return DraftChange(weights, logged, token, charged)


def _loaded_before_pools(rank: Rank) -> bool:
    """Whether the log shows the draft's weights before the pools: so it is in 0.5.14 and later alone."""
    names = [stage.name for stage in rank.stages]
    return "draft_weights" in names and "pools" in names and names.index("draft_weights") < names.index("pools")
