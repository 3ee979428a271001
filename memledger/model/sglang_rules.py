"""SGLang's rules that changed over its releases: slots per running request, what a cached prefix keeps, flag names.

Read in the sources of SGLang 0.5.6, 0.5.7, 0.5.9, 0.5.12 to 0.5.14, 0.5.16 to 0.5.18 and 0.5.23; the releases between
follow the same text. A version outside `OLDEST` .. `NEWEST` is refused: nothing is extrapolated.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from memledger.model.architecture import NotModelledError

Version = tuple[int, int, int]
Strategy = Literal["no_buffer", "extra_buffer", "extra_buffer_lazy"]

OLDEST: Final[Version] = (0, 4, 4)
"""Before, pools are sized alike but their lines and caps were not traced."""
OLDEST_STATE: Final[Version] = (0, 5, 2)
"""The first release with a pool for recurrent state."""
NEWEST: Final[Version] = (0, 5, 23)

ERAS: Final[tuple[tuple[Version, Version], ...]] = (
    ((0, 4, 4), (0, 5, 1)),
    ((0, 5, 2), (0, 5, 3)),
    ((0, 5, 4), (0, 5, 6)),
    ((0, 5, 7), (0, 5, 7)),
    ((0, 5, 8), (0, 5, 8)),
    ((0, 5, 9), (0, 5, 9)),
    ((0, 5, 10), (0, 5, 10)),
    ((0, 5, 11), (0, 5, 11)),
    ((0, 5, 12), (0, 5, 12)),
    ((0, 5, 13), (0, 5, 13)),
    ((0, 5, 14), (0, 5, 16)),
    ((0, 5, 17), (0, 5, 17)),
    ((0, 5, 18), (0, 5, 21)),
    ((0, 5, 22), (0, 5, 23)),
)
"""Spans of releases between which no rule of this package differs."""

BASE_SLOTS: Final = 3
"""`MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO`: the slots of a running request without tracking buffers."""
DEFAULT_STATE_RATIO: Final = "0.9"
"""`--mamba-full-memory-ratio` unless told (0.5.4+)."""
DEFAULT_SPECULATIVE_REQUESTS: Final = 48
"""What `max_running_requests` is reset to with speculative decoding unless told (0.4.5+)."""
FALLBACK_SLOTS: Final = 512
"""Slots without a radix cache and without `--max-running-requests` (0.5.2 to 0.5.8)."""

EXTRA_BUFFER_MODELS: Final[frozenset[str]] = frozenset(
    {
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3NextForCausalLM",
        "InternS2PreviewForConditionalGeneration",
        "MiniCPMV4_6ForConditionalGeneration",
        "BailingMoeV2_5ForCausalLM",
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
    }
)
"""Architectures whose "auto" strategy is extra_buffer from 0.5.14 on (0.5.14 `_support_mamba_cache_extra_buffer`; later lists are longer)."""


def version_of(text: str | None) -> tuple[Version, Version] | None:
    """The releases that a printed version may stand for; None where it does not say.

    `0.5.15.post1` is 0.5.15. A development or pre-release build of 0.5.7 lies between 0.5.6 and 0.5.7.
    """
    if text is None:
        return None
    release, _, _ = text.strip().removeprefix("v").partition("+")
    parts = release.split(".")
    numbers: list[int] = []
    for part in parts[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if len(digits) != len(part):
            break
    if len(numbers) < 2 or tuple(numbers) < (0, 1):
        return None
    version = (numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else 0)
    if version < (0, 1, 0):
        return None
    early = any(word in release for word in ("dev", "rc", "a", "b")) and "post" not in release
    low = (version[0], version[1], version[2] - 1) if early and version[2] else version
    return low, version


def eras(low: tuple[int, ...], high: tuple[int, ...], *, state: bool) -> tuple[tuple[Version, Version], ...]:
    """The spans of known releases within `low` .. `high`, over each of which the rules are the same.

    Args:
        low: oldest release that it may be, `(0,)` for unknown.
        high: newest, `(99,)` for unknown.
        state: whether the model has recurrent state (known from 0.5.2).

    Raises:
        NotModelledError: none of the releases is known.
    """
    first, last = _three(low), _three(high)
    oldest = OLDEST_STATE if state else OLDEST
    found = []
    for begin, end in ERAS:
        start, stop = max(begin, first, oldest), min(end, last)
        if start <= stop:
            found.append((start, stop))
    if not found:
        span = dotted(first) if first == last else f"{dotted(first)} to {dotted(last)}"
        raise NotModelledError(f"SGLang {span} is not modelled: known are {dotted(oldest)} to {dotted(NEWEST)}")
    return tuple(found)


def _three(version: tuple[int, ...]) -> Version:
    padded = (*version, 0, 0, 0)
    return padded[0], padded[1], padded[2]


def dotted(version: tuple[int, ...]) -> str:
    """`0.5.14`."""
    return ".".join(str(n) for n in version)


# --------------------------------------------------------------------------------------------------------------- slots


def slots_per_request(
    version: Version,
    *,
    radix_cache: bool,
    strategy: Strategy,
    overlap: bool,
    speculative: bool = False,
    skip_decode_lock: bool = False,
) -> int:
    """State slots that one running request counts for (`max_running_requests <= slots // r`).

    Source: `_calculate_mamba_ratio` (0.5.10+), `init_memory_pool` (0.5.4 to 0.5.9). 1 without a radix cache; else 3 and
    the tracking slots: 2 with extra_buffer under overlap scheduling, 1 without overlap or lazily. 0.5.8 and 0.5.9 look
    at speculation instead of overlap; 0.5.7 adds the tracking slots even where there is no buffer.
    `skip_decode_lock`: environment `SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1` (0.5.17+).
    """
    _require_state(version)
    if not radix_cache or version < (0, 5, 4):
        return 1
    if version < (0, 5, 7):
        return BASE_SLOTS
    buffered = strategy != "no_buffer"
    if version == (0, 5, 7):
        return BASE_SLOTS + (1 if buffered and speculative else 2)
    base = BASE_SLOTS
    if skip_decode_lock and version >= (0, 5, 17):
        base -= 1
        if not buffered:
            return base + 1
    if not buffered:
        return base
    if version < (0, 5, 10):
        return base + (1 if speculative else 2)
    if strategy == "extra_buffer_lazy" and version < (0, 5, 13):
        raise NotModelledError(f"SGLang {dotted(version)} has no strategy extra_buffer_lazy (0.5.13+)")
    return base + (2 if overlap and strategy == "extra_buffer" else 1)


def strategies(
    version: Version,
    *,
    strategy: str | None,
    overlap: bool | None,
    page_size: int | None,
    model_class: str | None = None,
    linear_backend: str | None = None,
) -> tuple[tuple[Strategy, bool], ...]:
    """What (strategy, overlap) may be in effect: one pair where it is certain, else every one that is possible.

    Up to 0.5.13 "auto" is no_buffer. From 0.5.14 "auto" is extra_buffer where overlap scheduling or a page size above 1
    is wanted and the architecture, with the triton linear attention backend, supports it; else no_buffer, which turns
    overlap off (`_handle_mamba_radix_cache`, `_mamba_radix_cache_resolution`).
    """
    if strategy in ("no_buffer", "extra_buffer", "extra_buffer_lazy"):
        named: Strategy = strategy  # type: ignore[assignment]
        return _overlaps(named, overlap)
    if strategy not in (None, "auto"):
        raise NotModelledError(f"strategy {strategy!r} is not known")
    if version < (0, 5, 14):
        known: list[tuple[Strategy, bool]] = [("no_buffer", False)]
        if strategy is None and version >= (0, 5, 7):
            known += _overlaps("extra_buffer", overlap)
        return tuple(known)
    wanted = None if overlap is None and page_size is None else overlap is not False or (page_size or 1) > 1
    if wanted is False:
        return (("no_buffer", False),)
    if overlap is not None and linear_backend == "triton" and model_class in EXTRA_BUFFER_MODELS:
        return _overlaps("extra_buffer", overlap)
    if linear_backend not in (None, "triton"):
        return (("no_buffer", False),)
    return (("no_buffer", False), *_overlaps("extra_buffer", overlap))


def _overlaps(strategy: Strategy, overlap: bool | None) -> tuple[tuple[Strategy, bool], ...]:
    if strategy == "no_buffer":
        return ((strategy, False),)
    # Overlap scheduling is on unless turned off.
    return ((strategy, overlap is not False),)


class PrefixCost(msgspec.Struct, frozen=True):
    """What the prefix cache keeps of the state: slots per cached prefix and per running request, in words too."""

    slots_per_prefix: int
    tracking_slots_per_request: int
    evictable: bool
    text: str


def prefix_cost(version: Version, *, radix_cache: bool, strategy: Strategy, overlap: bool) -> PrefixCost:
    """What one cached prefix keeps in the state pool. Cached states sit in slots that exist anyway: they add no bytes.

    Source: `mem_cache/mamba_radix_cache.py` (0.5.4+): one slot per tree node that holds a state, in the pool of the
    running requests, evictable; extra_buffer (0.5.7+) takes tracking slots per running request besides.
    """
    _require_state(version)
    if version < (0, 5, 4):
        return PrefixCost(0, 0, False, "none: the radix cache is turned off for models with recurrent state")
    if not radix_cache:
        return PrefixCost(0, 0, False, "none: the radix cache is off")
    if strategy == "no_buffer" or version < (0, 5, 7):
        return PrefixCost(1, 0, True, "one state slot per cached prefix, evictable, from the same pool")
    tracking = 2 if overlap and strategy == "extra_buffer" else 1
    return PrefixCost(
        1,
        tracking,
        True,
        f"one state slot per cached prefix, evictable, from the same pool; {tracking} tracking slots per running request",
    )


def _require_state(version: Version) -> None:
    if not OLDEST_STATE <= version <= NEWEST:
        raise NotModelledError(
            f"recurrent state in SGLang {dotted(version)} is not modelled (0.5.2 to {dotted(NEWEST)} are)"
        )


# --------------------------------------------------------------------------------------------------------------- flags


class Flag(msgspec.Struct, frozen=True):
    """A flag's name and the releases that take it."""

    name: str
    since: Version = OLDEST
    until: Version = NEWEST


FLAGS: Final[dict[str, tuple[Flag, ...]]] = {
    "state_slots": (Flag("--max-mamba-cache-size", (0, 5, 2)),),
    "state_memory_ratio": (Flag("--mamba-full-memory-ratio", (0, 5, 4)),),
    "state_dtype": (Flag("--mamba-ssm-dtype", (0, 5, 4)),),
    "state_cache_mode": (
        Flag("--mamba-scheduler-strategy", (0, 5, 7), (0, 5, 13)),
        Flag("--mamba-radix-cache-strategy", (0, 5, 14)),
    ),
    "max_running_requests": (Flag("--max-running-requests"),),
    "max_total_tokens": (Flag("--max-total-tokens"),),
    "memory_fraction": (Flag("--mem-fraction-static"),),
    "context_length": (Flag("--context-length"),),
    "kv_cache_dtype": (Flag("--kv-cache-dtype"),),
    "page_size": (Flag("--page-size"),),
    "swa_full_tokens_ratio": (Flag("--swa-full-tokens-ratio", (0, 4, 10)),),
    "speculative_draft_tokens": (Flag("--speculative-num-draft-tokens"),),
    "tp_size": (Flag("--tp-size"),),
    "dp_size": (Flag("--dp-size"),),
}
"""Config name of the contract: the flag that sets it, by release. 0.5.14+ still take --mamba-scheduler-strategy, deprecated."""


def flags(setting: str, value: object, low: Version, high: Version) -> tuple[str, ...]:
    """The command line words that set a config name in every release from `low` to `high`.

    Raises:
        NotModelledError: there is no such flag, or its name differs between these releases.
    """
    if setting == "prefix_caching":
        return () if value else ("--disable-radix-cache",)
    if setting == "overlap_disabled":
        return ("--disable-overlap-schedule",) if value else ()
    known = FLAGS.get(setting)
    if known is None:
        raise NotModelledError(f"no SGLang flag is known for {setting}")
    for flag in known:
        if flag.since <= low and high <= flag.until:
            return flag.name, str(value)
    told = ", ".join(f"{f.name} from {dotted(f.since)} to {dotted(f.until)}" for f in known)
    span = dotted(low) if low == high else f"{dotted(low)} to {dotted(high)}"
    raise NotModelledError(f"no single flag sets {setting} in SGLang {span}: {told}")


def slots_flag_works(version: Version, *, radix_cache: bool) -> bool:
    """Whether `--max-mamba-cache-size` sets the slots: 0.5.4 to 0.5.6 ignore it unless the radix cache is off."""
    return not (radix_cache and (0, 5, 4) <= version < (0, 5, 7))
