"""Which layers lie on which pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from memledger.model.architecture import NotModelledError

Item = TypeVar("Item")
Size = TypeVar("Size")


def stage_sizes(count: int, stages: int, framework: str | None = None) -> tuple[int, ...]:
    """Layers on each pipeline stage.

    Where they do not divide evenly, vLLM gives one more to the last stages but one, backwards (`distributed/utils.py`,
    `get_pp_indices`; `VLLM_PP_LAYER_PARTITION` overrides it). SGLang's rule was not read.

    Raises:
        NotModelledError: they do not divide evenly, under another engine than vLLM.
    """
    if stages < 1 or stages > count:
        raise NotModelledError(f"{count} layers cannot be spread over {stages} pipeline stages")
    sizes = [count // stages] * stages
    left = count % stages
    if left and framework != "vllm":
        raise NotModelledError(f"{count} layers do not divide evenly over {stages} pipeline stages")
    for back in range(2, left + 2):
        sizes[-back] += 1
    return tuple(sizes)


def stage_layers(layers: Sequence[Item], stages: int, stage: int, framework: str | None = None) -> tuple[Item, ...]:
    """The layers of pipeline stage `stage` (0-based)."""
    if stages == 1:
        return tuple(layers)
    sizes = stage_sizes(len(layers), stages, framework)
    if not 0 <= stage < stages:
        raise NotModelledError(f"there is no pipeline stage {stage} of {stages}")
    start = sum(sizes[:stage])
    return tuple(layers[start : start + sizes[stage]])


def stage_size(
    layers: tuple[Item, ...],
    stages: int,
    stage: int | None,
    framework: str | None,
    of: Callable[[tuple[Item, ...]], Size],
    key: Callable[[Size], int],
) -> Size:
    """`of` the layers of one pipeline stage; with `stage` None, of the stage for which `key` of it is largest."""
    if stage is not None:
        return of(stage_layers(layers, stages, stage, framework))
    return max((of(stage_layers(layers, stages, number, framework)) for number in range(stages)), key=key)
