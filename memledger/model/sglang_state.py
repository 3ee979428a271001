"""SGLang's pool of recurrent state: its bytes, its printed line, and how many slots it gets, by version.

Sources, by release: `mem_cache/memory_pool.py: MambaPool`; `_handle_max_mamba_cache` in `model_executor/model_runner.py`
(to 0.5.6), `model_executor/model_runner_kv_cache_mixin.py` (0.5.7 to 0.5.15) and `mem_cache/kv_cache_configurator.py`
(0.5.16+).
"""

from __future__ import annotations

from fractions import Fraction

import msgspec

from memledger.model.architecture import NotModelledError
from memledger.model.sglang_rules import FALLBACK_SLOTS, Version, dotted
from memledger.units import GIB


class StateSlot(msgspec.Struct, frozen=True):
    """Bytes of one state slot on one rank, all layers of the rank; what a printed log gives, or the model's shapes.

    `charged`: bytes that the budget charges for a slot where they differ (a pipeline stage with fewer layers than the
    largest). `conv_kernel`: width of the convolution, for speculative windows; None: not known.
    `dense_windows`: speculative windows are never deduplicated (KDA). `gated_delta`: GDN, None where not known.
    """

    conv: int
    ssm: int
    charged: int | None = None
    conv_kernel: int | None = None
    dense_windows: bool = False
    gated_delta: bool | None = None

    @property
    def total(self) -> int:
        """Both parts."""
        return self.conv + self.ssm

    @property
    def budgeted(self) -> int:
        """Bytes that sizing charges for one slot."""
        return self.total if self.charged is None else self.charged


class Speculation(msgspec.Struct, frozen=True):
    """Speculative decoding: draft tokens verified in one step (D), draft steps, and branches per step.

    `reserves_tokens`: EAGLE-like algorithms, for which releases up to 0.5.6 add tokens to the KV pool.
    `logged_conv_request`: bytes of one request's windows as a log's pool line gives them, where the kernel is not known.
    """

    draft_tokens: int
    steps: int | None = None
    topk: int | None = None
    reserves_tokens: bool = True
    logged_conv_request: int | None = None


class StatePool(msgspec.Struct, frozen=True):
    """Bytes of the state pool's tensors on one rank."""

    slots: int
    conv: int
    ssm: int
    speculative_conv: int = 0
    speculative_ssm: int = 0
    speculative: bool = False

    @property
    def total(self) -> int:
        """All tensors."""
        return self.conv + self.ssm + self.speculative_conv + self.speculative_ssm

    def accounts(self) -> dict[str, int]:
        """Bytes by account of the ledger."""
        found = {"recurrent_state/conv": self.conv, "recurrent_state/ssm": self.ssm}
        if self.speculative:
            found["recurrent_state/speculative_conv"] = self.speculative_conv
            found["recurrent_state/speculative_ssm"] = self.speculative_ssm
        return found

    def printed(self, version: Version) -> str:
        """The pool's line in the log of a release, its trailing blank included."""
        if version < (0, 5, 2):
            raise NotModelledError(f"SGLang {dotted(version)} prints no state pool")
        slots = f"max_mamba_cache_size: {self.slots}, " if version >= (0, 5, 4) else ""
        text = f"Mamba Cache is allocated. {slots}conv_state size: {_gb(self.conv)}, ssm_state size: {_gb(self.ssm)} "
        if self.speculative and version >= (0, 5, 3):
            text += (
                f"intermediate_ssm_state_cache size: {_gb(self.speculative_ssm)} "
                f"intermediate_conv_window_cache size: {_gb(self.speculative_conv)} "
            )
        return text


def _gb(size: int) -> str:
    return f"{size / GIB:.2f}GB"


def state_pool(
    slot: StateSlot,
    slots: int,
    *,
    version: Version | None = None,
    requests: int | None = None,
    speculation: Speculation | None = None,
    cuda: bool = True,
    prefill_worker: bool = False,
) -> StatePool:
    """The pool's tensors for `slots` slots: `slots + 1` rows (row 0 is padding), in every release.

    With speculation, intermediate states: up to 0.5.6 `(slots + 1) * D` of both parts; from 0.5.7 `(requests + 1) * D`
    temporal states, and as many dense windows, or from 0.5.14 on CUDA with one branch (not KDA) one window of
    `D + kernel - 2` columns per request instead of `D` windows of `kernel - 1`. A prefill worker of a disaggregated pair
    allocates none from 0.5.22.

    Args:
        slot: bytes per slot.
        slots: K, on this rank.
        version: needed with speculation only.
        requests: R, the rank's rows of running requests (not counting the padding row).
        speculation: None without.
        cuda: whether the device is CUDA or ROCm (NPU and CPU keep dense windows).
        prefill_worker: prefill side of a disaggregated pair.
    """
    if slots < 0:
        raise NotModelledError(f"{slots} slots are no pool")
    conv, ssm = (slots + 1) * slot.conv, (slots + 1) * slot.ssm
    if speculation is None:
        return StatePool(slots, conv, ssm)
    if version is None:
        raise NotModelledError("speculative states differ by version, which is not known")
    if prefill_worker and version >= (0, 5, 22):
        return StatePool(slots, conv, ssm)
    tokens = speculation.draft_tokens
    if version < (0, 5, 7):
        return StatePool(slots, conv, ssm, conv * tokens, ssm * tokens, True)
    if requests is None:
        raise NotModelledError("speculative states go by running requests, whose number is not known")
    window = window_bytes(slot, speculation, version, cuda=cuda)
    return StatePool(slots, conv, ssm, (requests + 1) * window, (requests + 1) * tokens * slot.ssm, True)


def window_bytes(slot: StateSlot, speculation: Speculation, version: Version, *, cuda: bool = True) -> int:
    """Bytes of one request's intermediate convolution windows (0.5.7+). Source: `conv_window_dedup_enabled` (0.5.14+)."""
    tokens = speculation.draft_tokens
    if not slot.conv:
        return 0
    if speculation.logged_conv_request is not None:
        return speculation.logged_conv_request
    if version < (0, 5, 14) or not cuda or slot.dense_windows or (speculation.topk or 1) > 1:
        return tokens * slot.conv
    if slot.conv_kernel is None or slot.conv_kernel < 2:
        raise NotModelledError("the convolution's width is not known, on which the windows kept for speculation depend")
    columns = slot.conv_kernel - 1
    if slot.conv % columns:
        raise NotModelledError(f"{slot.conv} bytes of convolution state are no {columns} columns")
    return slot.conv // columns * (tokens + columns - 1)


class SlotChoice(msgspec.Struct, frozen=True):
    """How many slots the pool gets on one rank, why, and what of the budget it takes (`charged`, bytes)."""

    slots: int
    charged: int
    how: str


class SlotRequest(msgspec.Struct, frozen=True):
    """What decides the number of slots, apart from the version and the bytes.

    `requested`: `--max-mamba-cache-size`; `running`: `--max-running-requests` (both for the whole server);
    `attention_dp`: data-parallel ranks under DP attention; `per_request`: r; `ratio`: `--mamba-full-memory-ratio`.
    `given`: slots in effect, read from a log: nothing is chosen then, only charged.
    """

    per_request: int
    radix_cache: bool
    ratio: Fraction
    attention_dp: int = 1
    requested: int | None = None
    running: int | None = None
    given: int | None = None
    draft_tokens: int = 0
    prefill_worker: bool = False

    @property
    def running_here(self) -> int | None:
        """Running requests asked for, on one attention data-parallel rank."""
        return None if self.running is None else self.running // self.attention_dp


def choose_slots(version: Version, slot: StateSlot, rest: int | None, want: SlotRequest) -> SlotChoice:
    """The slots K of one rank and the bytes that sizing takes off the budget for them.

    Args:
        version: one release.
        slot: bytes per slot.
        rest: budget for state and KV together, bytes; None where only explicit numbers decide.
        want: the flags.

    Raises:
        NotModelledError: the budget is needed and not known, or it holds no slot (such a server does not start).
    """
    if version < (0, 5, 2):
        raise NotModelledError(f"SGLang {dotted(version)} has no pool for recurrent state")
    if version < (0, 5, 7):
        return _to_0_5_6(version, slot, rest, want)
    if version < (0, 5, 13):
        return _to_0_5_12(version, slot, rest, want)
    return _from_0_5_13(version, slot, rest, want)


def _to_0_5_6(version: Version, slot: StateSlot, rest: int | None, want: SlotRequest) -> SlotChoice:
    """0.5.2 and 0.5.3: explicit numbers only, the intermediate states in no budget. 0.5.4 to 0.5.6: `1 + D` per slot."""
    factor = 1 if version < (0, 5, 4) else 1 + want.draft_tokens
    size = slot.budgeted * factor
    if want.given is not None:
        return SlotChoice(want.given, want.given * size, "from the log")
    divide = want.attention_dp
    if version >= (0, 5, 4) and divide > 1:
        if slot.gated_delta is None:
            raise NotModelledError(
                "0.5.4 to 0.5.6 divide the slots by DP attention for GDN models only; the kind is not known"
            )
        divide = divide if slot.gated_delta else 1
    if version < (0, 5, 4) or not want.radix_cache:
        slots, how = _explicit_or_running(want, FALLBACK_SLOTS)
    else:
        slots, how = _positive(_share(rest, want.ratio) // size), "ratio"
    return SlotChoice(slots // divide, slots // divide * size, how)


def _to_0_5_12(version: Version, slot: StateSlot, rest: int | None, want: SlotRequest) -> SlotChoice:
    """0.5.7 to 0.5.12: the intermediate states are taken off first (0.5.7: under the ratio only, for all DP ranks)."""
    size = slot.budgeted
    old = version == (0, 5, 7)
    running = want.running if old else want.running_here
    intermediate = 0
    if want.draft_tokens:
        if running is None:
            raise NotModelledError("with speculation the number of running requests decides, and it is not known")
        intermediate = size * running * want.draft_tokens
    explicit = want.requested is not None or (
        not want.radix_cache and (want.running is not None or version < (0, 5, 9))
    )
    if old and explicit:
        intermediate = 0
    if want.given is not None:
        return SlotChoice(want.given, want.given * size + intermediate, "from the log")
    if explicit:
        slots, how = _explicit_or_running(want, FALLBACK_SLOTS)
        slots //= want.attention_dp
    else:
        left = None if rest is None else rest - intermediate
        slots, how = _positive(_share(left, want.ratio) // size), "ratio"
    return SlotChoice(slots, slots * size + intermediate, how)


def _from_0_5_13(version: Version, slot: StateSlot, rest: int | None, want: SlotRequest) -> SlotChoice:
    """0.5.13+: the intermediate states come out of the state's own share; 0.5.17+ charges the padding rows too."""
    size = slot.budgeted
    padding = 1 if version >= (0, 5, 17) else 0
    tokens = 0 if want.prefill_worker and version >= (0, 5, 22) else want.draft_tokens
    explicit: int | None = None
    how = "ratio"
    if want.requested is not None:
        explicit, how = want.requested // want.attention_dp, "flag"
    elif not want.radix_cache and want.running is not None:
        explicit, how = want.running // want.attention_dp, "running requests"
    if want.given is not None:
        slots, by = want.given, "from the log"
    elif explicit is not None:
        slots, by = explicit, how
    else:
        share = _share(rest, want.ratio)
        if tokens:
            each = size * (1 + Fraction(tokens, want.per_request))
            slots = _positive((share - padding * size * (1 + tokens)) // each)
        else:
            slots = _positive((share - padding * size) // size)
        by = how
    charged = (slots + padding) * size
    if tokens:
        if want.running_here is None:
            raise NotModelledError("with speculation the number of running requests decides, and it is not known")
        served = slots if how == "running requests" else min(want.running_here, slots // want.per_request)
        charged += size * (served + padding) * tokens
    return SlotChoice(slots, charged, by)


def _explicit_or_running(want: SlotRequest, fallback: int) -> tuple[int, str]:
    if want.requested is not None:
        return want.requested, "flag"
    if want.running is not None:
        return want.running, "running requests"
    return fallback, "default"


def _share(rest: int | None, ratio: Fraction) -> Fraction:
    """The state's share of the budget: `rest * q / (1 + q)`."""
    if rest is None:
        raise NotModelledError("the budget for state and KV is not known, and the slots are a share of it")
    return rest * ratio / (1 + ratio)


def _positive(slots: int) -> int:
    if slots <= 0:
        raise NotModelledError("the budget holds no state slot: such a server does not start")
    return slots
