"""The draft of speculative decoding in a plan: whose layers it has, what its weights take, and where it is not known.

A draft is never taken to be nothing: methods that guess from the text alone have none; prediction layers of the model's
own are in its config; any other draft needs its own `config.json` (`--draft-config`), or the plan says that it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from memledger import words
from memledger.model.architecture import Architecture, Layer, NotModelledError, Parallel
from memledger.model.weights import weight_bytes

Framework = Literal["sglang", "vllm"]

NO_MODEL: Final = {
    "sglang": frozenset({"ngram", "lookahead"}),
    "vllm": frozenset({"ngram", "ngram_gpu", "suffix"}),
}
"""Methods that guess from the text alone: no draft weights, no draft KV."""
_OWN_LAYERS: Final = {
    "sglang": frozenset({"eagle", "nextn", "frozen_kv_mtp", "mtp"}),
    "vllm": frozenset({"mtp"}),
}
"""Methods that run the model's own prediction layers where no draft model is named."""
_WHOLE_MODEL: Final = frozenset({"standalone", "draft_model"})
"""Methods whose draft is a model of its own; others take the target's embedding, and mostly its head."""


class Weights(msgspec.Struct, frozen=True):
    """Draft weights of one GPU, bytes: the middle, and the least and the most that they may be."""

    bytes: int
    low: int
    high: int

    @property
    def ends(self) -> tuple[int, int, int]:
        """The three, the middle first."""
        return self.bytes, self.low, self.high


def method(config: Mapping[str, Any]) -> str | None:
    """The method in effect, in small letters; None without speculation (no draft tokens, or off)."""
    if not config.get("speculative_draft_tokens"):
        return None
    named = str(config.get("speculative_algorithm") or "").lower()
    return None if named in {"none", "off"} else named or "mtp"


def has_model(config: Mapping[str, Any], framework: Framework) -> bool:
    """Whether a draft model, or prediction layers, are loaded."""
    named = method(config)
    return named is not None and named not in NO_MODEL[framework]


def _own(named: str, framework: Framework) -> bool:
    return named in _OWN_LAYERS[framework] or named.endswith("_mtp")


def own_layers(config: Mapping[str, Any], architecture: Architecture | None, framework: Framework) -> bool:
    """Whether the draft in effect is the model's own prediction layers, by its method and its config."""
    named = method(config)
    return bool(named and _own(named, framework) and architecture is not None and architecture.draft_layers)


def missing(
    config: Mapping[str, Any], architecture: Architecture | None, draft: Architecture | None, framework: Framework
) -> str | None:
    """Why the draft in effect is not known, and what would help; None where it is, or where there is none."""
    named = method(config)
    if named is None or named in NO_MODEL[framework] or draft is not None:
        return None
    if _own(named, framework):
        if architecture is not None and architecture.draft_layers:
            return None
        why = "the model's layers are not known" if architecture is None else "its config names no prediction layers"
        return (
            f"speculative decoding by {named}: what the draft's weights and KV take off the pools is not known, for {why}; "
            "--draft-config FILE (the draft's config.json) would tell"
        )
    return (
        f"speculative decoding by {named}: what the draft's weights and KV take off the pools is not known; "
        "--draft-config FILE (the draft's config.json) would tell"
    )


def layers(
    config: Mapping[str, Any], architecture: Architecture | None, draft: Architecture | None, framework: Framework
) -> tuple[Layer, ...]:
    """The layers of the draft in effect; none without one.

    Raises:
        NotModelledError: there is one, and it is not known.
    """
    if not has_model(config, framework):
        return ()
    if (why := missing(config, architecture, draft, framework)) is not None:
        raise NotModelledError(why)
    if draft is not None:
        return draft.layers
    return architecture.draft_layers if architecture is not None else ()


def with_layers(
    architecture: Architecture, config: Mapping[str, Any], draft: Architecture | None, framework: Framework
) -> Architecture:
    """The architecture whose draft layers are those in effect.

    Raises:
        NotModelledError: there is a draft, and it is not known.
    """
    return msgspec.structs.replace(architecture, draft_layers=layers(config, architecture, draft, framework))


def weights(
    config: Mapping[str, Any],
    architecture: Architecture | None,
    draft: Architecture | None,
    sizes: Parallel,
    framework: Framework,
) -> Weights:
    """Draft weights of one GPU; nothing without a draft.

    A draft of the target's (EAGLE and its kin) shares the target's embedding and mostly its head once it is loaded, and adds
    a projection of up to three hidden states: the range holds both.

    Raises:
        NotModelledError: there is a draft, and it or its weights are not known.
    """
    if not has_model(config, framework):
        return Weights(0, 0, 0)
    if (why := missing(config, architecture, draft, framework)) is not None:
        raise NotModelledError(why)
    if draft is None:
        assert architecture is not None
        with_it, without = (weight_bytes(architecture, sizes, framework, draft=flag) for flag in (True, False))
        size = with_it.bytes - without.bytes
        return Weights(size, min(size, with_it.low - without.low), max(size, with_it.high - without.high))
    last = msgspec.structs.replace(sizes, pp=1)
    found = weight_bytes(draft, last, framework)
    if (method(config) or "") in _WHOLE_MODEL:
        return Weights(found.bytes, found.low, found.high)
    shared = found.parts.get("embedding", 0)
    joined = 3 * draft.hidden * draft.hidden * 2
    low, high = max(0, found.low - shared), found.high + joined
    return Weights((low + high) // 2, low, high)


def told(size: Weights) -> str:
    """The sentence on what a draft's weights are taken to be."""
    low, high = words.gib(size.low), words.gib(size.high)
    return f"the draft's weights take {low if low == high else f'{low} to {high}'} GiB of one GPU (modelled)"
