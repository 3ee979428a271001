"""Which layers lie on which pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from memledger.model.architecture import NotModelledError

Item = TypeVar("Item")


def stage_sizes(count: int, stages: int) -> tuple[int, ...]:
    """Layers on each pipeline stage where they divide evenly.

    Raises:
        NotModelledError: they do not divide evenly; which stage then gets more differs between engines and versions.
    """
    if stages < 1 or stages > count:
        raise NotModelledError(f"{count} layers cannot be spread over {stages} pipeline stages")
    if count % stages:
        raise NotModelledError(f"{count} layers do not divide evenly over {stages} pipeline stages")
    return (count // stages,) * stages


def stage_layers(layers: Sequence[Item], stages: int, stage: int) -> tuple[Item, ...]:
    """The layers of pipeline stage `stage` (0-based)."""
    if stages == 1:
        return tuple(layers)
    sizes = stage_sizes(len(layers), stages)
    if not 0 <= stage < stages:
        raise NotModelledError(f"there is no pipeline stage {stage} of {stages}")
    start = sum(sizes[:stage])
    return tuple(layers[start : start + sizes[stage]])
