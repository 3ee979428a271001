"""Plans for vLLM: a logged block pool reshaped, or a pool from an architecture alone. The arithmetic is `memledger.model.vllm`'s."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from memledger import plan_draft, plan_vllm_dense, words
from memledger.ledger import ACCOUNTS, Capacity, Concurrency, Rank, Server
from memledger.model import vllm, vllm_facts
from memledger.model.architecture import (
    Architecture,
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba2,
    NotModelledError,
    Parallel,
)
from memledger.model.state import layer_state_bytes
from memledger.model.versions import Release, is_placeholder
from memledger.model.vllm import Pool, Settings
from memledger.model.weights import weight_bytes
from memledger.plan_settings import modelled, unmodelled, vllm_flags
from memledger.plan_sglang import largest, merged, negative, page_loss, parallel, resharded, roomy
from memledger.plan_values import Plan, Side, Target, change_of, open_ends, spread
from memledger.plan_vllm_dense import Draw
from memledger.units import GIB, Amount

KERNEL_BLOCK: Final = 16
"""The attention backend's smallest block unless told."""
OUTSIDE: Final = (round(0.07 * GIB), round(0.59 * GIB), round(2.78 * GIB))
"""Libraries and communication inside the budget, assumed where there is no log: least, median and most of the figures
"... GiB for non-torch memory" in public logs (11 servers, vLLM 0.6 to 0.26)."""
ACTIVATIONS: Final = (round(0.03 * GIB), round(1.68 * GIB), round(5.58 * GIB))
"""Peak of the profile run, assumed where there is no log: likewise "... GiB for peak activation" (11 servers)."""
GRAPHS: Final = (round(0.06 * GIB), round(0.51 * GIB), round(2.44 * GIB))
"""The engine's estimate of its CUDA graphs, assumed where there is no log: likewise "Estimated CUDA graph memory" (17)."""
_SGLANG_ONLY: Final = ("state_slots", "state_memory_ratio", "overlap_disabled", "swa_full_tokens_ratio", "dp_attention")
_BACKENDS: Final = {
    "fa2": "FLASH_ATTN",
    "fa3": "FLASH_ATTN",
    "fa4": "FLASH_ATTN",
    "triton": "TRITON_ATTN",
    "flex": "FLEX_ATTENTION",
}
_EXPORTING: Final = {GatedDeltaNet: "flashinfer", KimiDeltaAttention: "flashkda"}


class Guess(msgspec.Struct, frozen=True):
    """What a log and an architecture leave open: the kernel's block, the state's prefill backend, batches in flight."""

    kernel_block: int | None = None
    backend: str | None = None
    prefill_backend: str | None = None
    batches: int = 2


def make_pool(
    architecture: Architecture,
    config: Mapping[str, Any],
    version: str | None,
    length: int,
    guess: Guess,
    card: int | None = None,
    draft: Architecture | None = None,
) -> Pool:
    """The pool's shape for settings by their contract names."""
    at = vllm.modelled_release(version)
    batched = config.get("chunked_prefill_tokens") or vllm_facts.default_batched_tokens(at, card or 80 * GIB)
    draft_tokens = config.get("speculative_draft_tokens") or 0
    base = Settings(
        at,
        length,
        block_size=config.get("page_size"),
        backend=guess.backend,
        kernel_block=config.get("kernel_block_tokens") or guess.kernel_block,
        in_flight_tokens=vllm_facts.in_flight_tokens(at, batched, guess.batches),
        decode_context_parallel=config.get("dcp_size") or 1,
    )
    architecture = plan_draft.with_layers(architecture, config, draft, "vllm")
    told = config.get("state_checkpoint_blocks")
    pool = vllm.pool_of(
        architecture,
        _sizes(config),
        version,
        length,
        kv_dtype=_named(config.get("kv_cache_dtype")) or "auto",
        state_dtype=_named(config.get("state_dtype")),
        prefix_caching=config.get("prefix_caching"),
        state_mode=_mode(config),
        prefill_backend=config.get("linear_attention_backend_prefill")
        or _checkpointing(architecture, told)
        or guess.prefill_backend,
        draft_tokens=draft_tokens,
        draft=plan_draft.has_model(config, "vllm"),
        settings=base,
    )
    if told is not None and told != pool.settings.checkpoint_blocks:
        pool = msgspec.structs.replace(pool, settings=msgspec.structs.replace(pool.settings, checkpoint_blocks=told))
    return pool


def _checkpointing(architecture: Architecture, told: int | None) -> str | None:
    """The prefill backend that keeps a checkpoint where the user says there is one, or "triton", which keeps none."""
    if not told:
        return None if told is None else "triton"
    kinds = {type(layer.state) for layer in architecture.state_layers}
    return next((name for kind, name in _EXPORTING.items() if kind in kinds), None)


def _sizes(config: Mapping[str, Any]) -> Parallel:
    return msgspec.structs.replace(parallel(config), dp_attention=False)


def _named(name: Any) -> str | None:
    return name.removeprefix("torch.") if isinstance(name, str) and name != "auto" else None


def _mode(config: Mapping[str, Any]) -> Any:
    mode = config.get("state_cache_mode")
    return mode if mode in {"none", "align", "all"} else None


# ------------------------------------------------------------------------------------------------------------ from a log


class Logged(msgspec.Struct, frozen=True):
    """A logged pool: its shape, how many blocks it has at least and at most, the bytes there are, and what was assumed."""

    pool: Pool
    guess: Guess
    blocks: vllm.BlockRange
    available: int
    tolerance: int


def from_log(
    server: Server,
    settings: Mapping[str, Any],
    target: Target,
    *,
    architecture: Architecture | None = None,
    how: str | None = None,
    version: str | None = None,
    total: Amount | None = None,
    draft: Architecture | None = None,
) -> Plan:
    """A plan for one GPU of a logged server. See `plan_sglang.from_log`; `total`: the card's memory, where the log has none.

    Raises:
        NotModelledError: the log or the architecture lacks what the arithmetic needs.
    """
    version = version if is_placeholder(server.framework_version) else server.framework_version
    if version is None:
        built = (
            f"is a build without a release ({built})" if (built := server.framework_version) else "is not in the log"
        )
        raise NotModelledError(f"the vLLM version {built}, and its pool differs by version: --framework-version N")
    at = plan_vllm_dense.release_of(version)
    rank = _rank(server)
    assumptions: list[str] = []
    not_modelled = list(unmodelled(settings))
    config = _config(server, rank)
    # What the user says of a draft is about the one that is planned, where the log's is the model's own layers.
    old_draft = None if plan_draft.own_layers(config, architecture, "vllm") else draft
    readings, guess, architecture = _readings(rank, architecture, how, config, version, at, assumptions, old_draft)
    wanted = _wanted(settings, at, not_modelled)
    asked = {**config, **wanted}
    asked = _consistent(asked, wanted)
    length = target.context or asked["context_length"]
    asked_length = length if target.concurrency else asked["context_length"]
    # What the user sets on the kernels wins over what the log's figures suggest.
    unchanged = not target.concurrency and not (
        set(wanted) - {"max_running_requests", "memory_fraction", "pool_bytes", "gpu_total_bytes"}
    )
    if unchanged:
        after_pools = [reading.pool for reading in readings]
    elif architecture is None:
        after_pools = [plan_vllm_dense.reshaped(one, config, wanted, asked_length, not_modelled) for one in readings]
    else:
        pool = make_pool(architecture, asked, version, asked_length, guess, rank.gpu.total_bytes, draft)
        after_pools = [pool] * len(readings)
    more = _more_bytes(rank, architecture, config, wanted, total, assumptions, not_modelled)
    drafted = _draft_weights((config, old_draft), (asked, draft), architecture, assumptions, not_modelled)
    cases = [(reading, pool, drawn) for reading, pool in zip(readings, after_pools, strict=True) for drawn in drafted]
    others = _other_entries(rank)
    assumptions += negative(others)
    now = rank.gpu.total_bytes or (total.bytes if total is not None else 0)
    draws = []
    for reading, after_pool, drawn in cases:
        # A pool given in bytes (--kv-cache-memory-bytes) stays as large, whatever the weights take.
        given = config.get("kv_cache_memory_bytes") is not None
        have = wanted["pool_bytes"] if "pool_bytes" in wanted else reading.available + (0 if given else more - drawn)
        if have <= 0:
            raise NotModelledError(
                "the server would not start: these settings leave nothing for the pool, whose budget would be short by "
                f"{words.gib_about(-have)}"
            )
        number = reading.blocks if not wanted and not target.concurrency else None
        before = _side(
            reading.pool, reading.blocks, reading.available, architecture, config, version, others, target.context
        )
        after = _after(after_pool, have, number, target, architecture, asked, version, others)
        _reweigh(after, architecture, asked=asked, config=config, wanted=wanted, drawn=drawn)
        _balance(before, after, wanted.get("gpu_total_bytes", now) - now)
        draws.append((before, after, have))
    _same_accounts([side for one, other, _ in draws for side in (one, other)])
    before, after, _ = draws[0]
    before = msgspec.structs.replace(before, ranges=spread([draw[0] for draw in draws]))
    after = msgspec.structs.replace(after, ranges=spread([draw[1] for draw in draws]))
    made = Plan(
        "vllm",
        version,
        server.model,
        architecture=how if architecture is not None else None,
        before=before,
        after=after,
        change=change_of([(one, other) for one, other, _ in draws], before, after),
    )
    card = rank.gpu.total_bytes or (total.bytes if total is not None else None)
    static = rank.budget.static_bytes
    plans = [
        _finish(
            made, pool, have, wanted, asked, target, list(assumptions), list(not_modelled),
            total=card, outside=None if static is None else static - reading.available,
        )
        for (reading, pool, _), (_, _, have) in zip(cases, draws, strict=True)
    ]  # fmt: skip
    return roomy(_together(plans))


def _config(server: Server, rank: Rank) -> dict[str, Any]:
    """What the log says of the settings, with the longest request.

    Raises:
        NotModelledError: that is not in the log.
    """
    config = {name: value for name, value in server.config.items() if value is not None}
    if "context_length" not in config and rank.capacity.concurrency.tokens_per_request:
        config["context_length"] = rank.capacity.concurrency.tokens_per_request
    if "context_length" not in config:
        raise NotModelledError(
            "the longest request is not in the log (max_seq_len or 'Maximum concurrency for N tokens per request'); a "
            "request's blocks depend on it"
        )
    return config


def _reweigh(
    after: Side,
    architecture: Architecture | None,
    *,
    asked: Mapping[str, Any],
    config: Mapping[str, Any],
    wanted: Mapping[str, Any],
    drawn: int,
) -> None:
    """The weights under another sharding, and with what a draft adds (`drawn`)."""
    held = after.accounts.get("weights/model")
    if held is None:
        return
    if architecture is not None and set(wanted) & {"tp_size", "pp_size"}:
        held = resharded(held, architecture, _sizes(config), _sizes(asked), "vllm")
    after.accounts["weights/model"] = held + drawn


def _same_accounts(sides: list[Side]) -> None:
    """0 for every account that only other sides have."""
    names = dict.fromkeys(name for side in sides for name in side.accounts)
    for side, name in itertools.product(sides, names):
        side.accounts.setdefault(name, 0)


def _balance(before: Side, after: Side, larger: int) -> None:
    """0 for what only the other side has, and what stays free; `larger`: what the card has more."""
    _same_accounts([before, after])
    _give_back(before, after, larger)


def _together(plans: list[Plan]) -> Plan:
    """The first of the plans for the ends of what is open, with their ranges; feasible only where all of them are."""
    # What would do must do at the least pool that is possible.
    least = min(plans, key=lambda plan: plan.available_bytes or 0)
    most = max(plans, key=lambda plan: plan.needed_bytes or 0)
    feasible = {plan.feasible for plan in plans}
    return msgspec.structs.replace(
        plans[0],
        instead=least.instead,
        flags=most.flags,
        feasible=plans[0].feasible if len(feasible) == 1 else None,
        ranges=open_ends(
            available_bytes=[plan.available_bytes for plan in plans],
            needed_bytes=[plan.needed_bytes for plan in plans],
        ),
    )


def _readings(
    rank: Rank,
    architecture: Architecture | None,
    how: str | None,
    config: Mapping[str, Any],
    version: str,
    at: Release,
    assumptions: list[str],
    draft: Architecture | None,
) -> tuple[tuple[Draw, ...], Guess, Architecture | None]:
    """(the logged pool, what was guessed for it, the architecture); by its own figures alone where the layers don't tell."""
    said: str | None = None
    if architecture is None:
        said = (how or "no architecture").partition(";")[0]
    elif at < vllm_facts.OLDEST:
        said = f"vLLM {version}: pool arithmetic before {vllm_facts.wording(vllm_facts.OLDEST)} is not modelled"
    else:
        said = plan_draft.missing(config, architecture, draft, "vllm")
    if said is None:
        assert architecture is not None
        logged = _logged(rank, architecture, config, version, assumptions, draft)
        return tuple(Draw(logged.pool, *end) for end in _ends(logged)), logged.guess, architecture
    try:
        found = plan_vllm_dense.dense_pool(rank, config, at, assumptions)
    except NotModelledError as error:
        raise NotModelledError(
            f"vLLM's pool follows from the model's layers ({said}), and the log's own figures do not do: {error}"
        ) from error
    if architecture is not None:
        assumptions.insert(0, f"the model's layers ({how}) are not used: {said}")
    return found, Guess(), None


def _rank(server: Server) -> Rank:
    found = [r for r in server.ranks if r.capacity.kv_tokens or any(e.account == "kv_cache/pool" for e in r.entries)]
    if not found:
        raise NotModelledError(
            "the log shows no KV pool of this server (no line 'GPU KV cache size', 'Available KV cache memory' or '# GPU "
            "blocks'): it ends before, or it failed before its pool"
        )
    # All ranks have as many blocks as the one with the fewest bytes; ranks whose bytes no line prints come last.
    sizes = {id(r): sum(e.bytes for e in r.entries if e.account == "kv_cache/pool") for r in found}
    return min(found, key=lambda r: (r.capacity.kv_tokens or 0, not sizes[id(r)], sizes[id(r)]))


def _logged(
    rank: Rank,
    architecture: Architecture,
    config: Mapping[str, Any],
    version: str | None,
    assumptions: list[str],
    draft: Architecture | None = None,
) -> Logged:
    """The pool that gives the log's figures, the likeliest reading first."""
    capacity = rank.capacity
    entries = [e for e in rank.entries if e.account in {"kv_cache/pool", "host/kv_cache/pool"}]
    amount = Amount(sum(e.bytes for e in entries), sum(e.tolerance_bytes for e in entries)) if entries else None
    printed = capacity.concurrency.requests
    refusal: NotModelledError | None = None
    for index, guess in enumerate(_guesses(config)):
        try:
            pool = make_pool(
                architecture, config, version, config["context_length"], guess, rank.gpu.total_bytes, draft
            )
            _check_block(pool, capacity.kv_block_tokens)
            if capacity.kv_blocks is not None:
                blocks = vllm.BlockRange(capacity.kv_blocks, capacity.kv_blocks)
            else:
                blocks = vllm.blocks_from_figures(
                    pool,
                    tokens=capacity.kv_tokens,
                    concurrency=None if printed is None else f"{printed:.2f}",
                    available=amount,
                )
        except NotModelledError as error:
            refusal = refusal or error
            continue
        if index:
            assumptions.append(f"what the log leaves open, chosen so that its figures come out: {_told(guess, pool)}")
        elif (
            pool.settings.checkpoint_blocks == 0
            and pool.settings.state_mode == "align"
            and not config.get("linear_attention_backend_prefill")
        ):
            assumptions.append("the state's prefill backend is triton (no checkpoint block)")
        size = pool.bytes_per_block
        least, most = blocks.low * size, (blocks.high + 1) * size - 1
        middle = (least + most) // 2 if amount is None else min(max(amount.bytes, least), most)
        return Logged(pool, guess, blocks, middle, amount.tolerance if amount is not None else 0)
    assert refusal is not None
    raise NotModelledError(f"the model's layers do not give the log's pool: {refusal}")


def _check_block(pool: Pool, printed: int | None) -> None:
    if printed is not None and pool.block.tokens != printed:
        raise NotModelledError(f"the architecture gives blocks of {pool.block.tokens} tokens, the log {printed}")


def _guesses(config: Mapping[str, Any]) -> Iterator[Guess]:
    """What may be in effect where the log does not say; the likeliest first."""
    backend = _BACKENDS.get(str(config.get("attention_backend_decode")))
    first = Guess(None, backend) if backend else Guess(KERNEL_BLOCK)
    kernels = [first, *(Guess(size) for size in (16, 32, 64, 128) if Guess(size) != first)]
    for kernel, prefill, batches in itertools.product(kernels, ("triton", "flashinfer", "flashkda"), (2, 1)):
        yield msgspec.structs.replace(kernel, prefill_backend=prefill, batches=batches)


def _told(guess: Guess, pool: Pool) -> str:
    parts = [f"kernel blocks of {guess.kernel_block} tokens" if guess.kernel_block else f"backend {guess.backend}"]
    if pool.settings.state_mode == "align":
        parts.append(f"{words.plural(pool.settings.checkpoint_blocks, 'checkpoint block')} for each state group")
    if pool.count("sliding"):
        parts.append(f"{words.plural(guess.batches, 'batch', 'batches')} in flight")
    return ", ".join(parts)


def _ends(logged: Logged) -> list[tuple[int, int]]:
    """(blocks, bytes) of the likeliest reading, then of the least and the most that the printed figures allow."""
    size = logged.pool.bytes_per_block
    likely = min(max(logged.available // size, logged.blocks.low), logged.blocks.high)
    found = [(likely, logged.available)]
    if logged.blocks.exact is None:
        found.append((logged.blocks.low, max(logged.available - logged.tolerance, logged.blocks.low * size)))
        found.append(
            (logged.blocks.high, min(logged.available + logged.tolerance, (logged.blocks.high + 1) * size - 1))
        )
    return found


def _wanted(settings: Mapping[str, Any], at: Release, not_modelled: list[str]) -> dict[str, Any]:
    """The settings that are planned with."""
    found = modelled(settings)
    for name in _SGLANG_ONLY:
        if found.pop(name, None) is not None:
            not_modelled.append(f"{name}: SGLang only")
    if found.pop("max_total_tokens", None) is not None:
        not_modelled.append("max_total_tokens: SGLang only; pool_bytes sets vLLM's pool")
    for name in ("speculative_steps", "speculative_topk"):
        if found.pop(name, None) is not None:
            not_modelled.append(f"{name}: no part of vLLM's pool")
    algorithm = found.get("speculative_algorithm")
    if algorithm is not None and algorithm.lower() in {"none", "off"}:
        found["speculative_draft_tokens"] = 0
    if "chunked_prefill_tokens" in found:
        not_modelled.append("chunked_prefill_tokens: the activations of larger or smaller batches")
    if found.get("attention_backend_decode"):
        not_modelled.append("attention backends: their workspaces are not modelled")
    if "state_checkpoint_blocks" in found and at < vllm_facts.CHECKPOINT_BLOCKS_SINCE:
        since = vllm_facts.wording(vllm_facts.CHECKPOINT_BLOCKS_SINCE)
        not_modelled.append(f"state_checkpoint_blocks: a request's state takes none before {since}")
        found.pop("state_checkpoint_blocks")
    if "ep_size" in found:
        not_modelled.append("ep_size: how experts are spread over GPUs")
    return found


def _consistent(asked: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Logged settings that a new one makes void are dropped: the state's mode follows prefix caching unless set."""
    if "prefix_caching" in wanted and "state_cache_mode" not in wanted:
        asked.pop("state_cache_mode", None)
    if "state_cache_mode" in wanted and "prefix_caching" not in wanted:
        asked["prefix_caching"] = wanted["state_cache_mode"] != "none"
    return asked


def _more_bytes(
    rank: Rank,
    architecture: Architecture | None,
    config: Mapping[str, Any],
    wanted: Mapping[str, Any],
    total: Amount | None,
    assumptions: list[str],
    not_modelled: list[str],
) -> int:
    """What the settings add to the bytes that the pool gets."""
    more = 0
    card = rank.gpu.total_bytes or (total.bytes if total is not None else None)
    fraction = config.get("memory_fraction")
    if "pool_bytes" in wanted:
        return 0
    given = config.get("kv_cache_memory_bytes") is not None
    if given and set(wanted) & {"memory_fraction", "gpu_total_bytes"}:
        not_modelled.append("memory_fraction and gpu_total_bytes: the pool is given in bytes, so they do not move it")
        return 0
    if "gpu_total_bytes" in wanted:
        if card is None or fraction is None:
            raise NotModelledError(
                "gpu_total_bytes: the card's memory or the utilisation now is not in the log (--gpu would tell)"
            )
        used = wanted.get("memory_fraction", fraction)
        more += round(wanted["gpu_total_bytes"] * used - card * fraction)
        assumptions.append("another card: activations, graphs and libraries are taken to stay as they are")
    elif "memory_fraction" in wanted:
        if card is None or fraction is None:
            raise NotModelledError(
                "memory_fraction: the pool grows by a share of the card's memory, which is not in the log (--gpu CARD would tell)"
            )
        more += round(card * (wanted["memory_fraction"] - fraction))
        not_modelled.append("whether what remains outside the budget suffices")
    if architecture is not None and set(wanted) & {"tp_size", "pp_size"}:
        logged = sum(e.bytes for e in rank.entries if e.account == "weights/model")
        asked = {**config, **wanted}
        freed = logged - resharded(logged, architecture, _sizes(config), _sizes(asked), "vllm")
        more += freed
        gets = "the pool is given in bytes and stays" if given else "the pool gets the rest"
        assumptions.append(
            f"the weights of one GPU change by {words.signed_gib(-freed)} GiB (modelled); {gets}, "
            "activations and libraries are taken to stay as they are"
        )
    return more


def _draft_weights(
    before: tuple[Mapping[str, Any], Architecture | None],
    after: tuple[Mapping[str, Any], Architecture | None],
    architecture: Architecture | None,
    assumptions: list[str],
    not_modelled: list[str],
) -> tuple[int, ...]:
    """What the draft's weights take more `after` (settings, draft) than `before`: the middle, the least, the most."""
    (config, _), (asked, _) = before, after
    if plan_draft.method(config) == plan_draft.method(asked):
        return (0,)
    if not (plan_draft.has_model(config, "vllm") or plan_draft.has_model(asked, "vllm")):
        return (0,)
    old, new = (plan_draft.weights(one, architecture, draft, _sizes(asked), "vllm") for one, draft in (before, after))
    for size in (old, new):
        if size.high:
            assumptions.append(f"{plan_draft.told(size)}, and come off the pool or go back to it")
    not_modelled.append("CUDA graphs and activations of the draft")
    return tuple(dict.fromkeys((new.bytes - old.bytes, new.low - old.high, new.high - old.low)))


def _other_entries(rank: Rank) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in rank.entries:
        if not item.account.startswith(("kv_cache/", "recurrent_state/", "host/")):
            found[item.account] = found.get(item.account, 0) + item.bytes
    return found


def _give_back(before: Side, after: Side, larger: int) -> None:
    """What the pool gives up or takes, and what the card has more (`larger`), is memory that stays free."""
    name = next((name for name in ("free", "reserve") if name in before.accounts), None)
    if name is None:
        return
    moved = sum(after.accounts.values()) - sum(before.accounts.values())
    after.accounts[name] = before.accounts[name] + larger - moved


# ------------------------------------------------------------------------------------------------------------- one side


def _side(
    pool: Pool,
    number: int,
    available: int,
    architecture: Architecture | None,
    config: Mapping[str, Any],
    version: str | None,
    others: Mapping[str, int],
    tokens: int | None,
) -> Side:
    """One GPU with a pool of `number` blocks in `available` bytes; `tokens`: the length that requests are counted at."""
    size = number * pool.bytes_per_block
    every = {**others, **_accounts(pool, size, architecture, config, version)}
    if available > size:
        every["kv_cache/unused"] = available - size
    printed = vllm.capacity(pool, number)
    length = tokens or pool.settings.max_model_len
    requests = printed.concurrency
    if length != pool.settings.max_model_len:
        requests = number / vllm.request_blocks(pool, length).total
    return Side(
        {name: every[name] for name in ACCOUNTS if name in every},
        Capacity(
            kv_tokens=printed.tokens,
            kv_blocks=number,
            kv_block_tokens=pool.block.tokens,
            max_running_requests=config.get("max_running_requests"),
            concurrency=Concurrency(length, requests),
        ),
    )


def _accounts(
    pool: Pool, size: int, architecture: Architecture | None, config: Mapping[str, Any], version: str | None
) -> dict[str, int]:
    """The pool's bytes by account; in a hybrid split for a pool full of requests of the longest length."""
    if architecture is None:
        return {"kv_cache/pool": size}
    states = [layer.state for layer in architecture.state_layers if layer.state is not None]
    if not states:
        return {"kv_cache/pool": size}
    split = vllm.split_pool(pool, size)
    conv, ssm = _state_types(architecture, config, version)
    tp = _sizes(config).attention_tp
    drafts = config.get("speculative_draft_tokens") or 0
    parts = [layer_state_bytes(state, tp, conv, ssm, "vllm", drafts) for state in states]
    windows, total = sum(c for c, _ in parts), sum(c + t for c, t in parts)
    share = split.state_bytes * windows // total if total else 0
    found = {
        "kv_cache/pool": split.kv_bytes,
        "recurrent_state/conv": share,
        "recurrent_state/ssm": split.state_bytes - share,
    }
    return {name: bytes_ for name, bytes_ in found.items() if bytes_}


def _state_types(architecture: Architecture, config: Mapping[str, Any], version: str | None) -> tuple[str, str]:
    from memledger.model.state import default_dtypes

    conv, ssm = default_dtypes(architecture, "vllm", version)
    return conv, _named(config.get("state_dtype")) or ssm


def _after(
    pool: Pool,
    available: int,
    number: int | None,
    target: Target,
    architecture: Architecture | None,
    asked: Mapping[str, Any],
    version: str | None,
    others: Mapping[str, int],
) -> Side:
    """With a target that fits: the smallest pool that serves it, and its cap; else what `available` bytes hold."""
    held = vllm.blocks(pool, available) if number is None else number
    if target.concurrency is not None and target.context is not None:
        smallest = vllm.smallest_reservation(pool, target.concurrency, target.context)
        asked = {**asked, "max_running_requests": target.concurrency}
        if smallest.blocks <= held:
            return _side(pool, smallest.blocks, smallest.bytes, architecture, asked, version, others, target.context)
    return _side(pool, held, available, architecture, asked, version, others, target.context)


def _finish(
    plan: Plan,
    pool: Pool,
    available: int | None,
    wanted: Mapping[str, Any],
    asked: Mapping[str, Any],
    target: Target,
    assumptions: list[str],
    not_modelled: list[str],
    *,
    total: int | None = None,
    outside: int | None = None,
) -> Plan:
    """The plan with its flags, what binds, and whether server and target fit."""
    at = pool.settings.release
    given, missing = vllm_flags(wanted, at)
    not_modelled += missing
    flags: tuple[str, ...] = tuple(given)
    instead: list[str] = []
    feasible: bool | None = None
    needed = smallest = None
    held = None if available is None else vllm.blocks(pool, available)
    null = 1 if at >= vllm_facts.NULL_BLOCK_CHECKED_SINCE else 0
    if target.concurrency is not None and target.context is not None:
        found = vllm.smallest_reservation(pool, target.concurrency, target.context, total=total, outside_pool=outside)
        needed = found.bytes
        smallest = _bare_side(pool, found.blocks, target)
        flags = merged(given, [word for flag in found.flags for word in flag.split()])
        if held is not None:
            feasible = found.blocks <= held
        if feasible is False:
            instead = _instead(pool, held or 0, target, found.utilization)
        elif found.utilization is not None:
            assumptions.append(
                f"the same as --gpu-memory-utilization {found.utilization:g}, if nothing outside the pool changes"
            )
        assumptions.append("every request is taken to be that long at the same time, no prefix shared")
    elif held is not None:
        each = vllm.request_blocks(pool, pool.settings.max_model_len).total
        feasible = each <= held - null
        needed = (each + null) * pool.bytes_per_block
        if not feasible:
            longest = largest(
                pool.settings.max_model_len, lambda length: vllm.request_blocks(pool, length).total <= held - null
            )
            instead = [f"--max-model-len {longest}"] if longest else []
    if "page_size" in wanted:
        assumptions.append(page_loss(pool.block.tokens, target.context or pool.settings.max_model_len, "block"))
        if pool.block.enlarged:
            assumptions.append(
                f"the engine raises page_size to {pool.block.tokens} tokens, so that a block holds a state"
            )
    if pool.hybrid:
        assumptions.append(
            "state and KV share one pool: the split is for a pool full of requests of the longest length; a running request "
            f"takes {words.amount(vllm.state_cost(pool).bytes)} of state"
        )
    if "max_running_requests" in wanted or target.concurrency is not None:
        not_modelled.append(
            "CUDA graphs and activations: another number of running requests captures other batch sizes"
        )
    return msgspec.structs.replace(
        plan,
        smallest=smallest,
        needed_bytes=needed,
        available_bytes=available,
        flags=flags,
        feasible=feasible,
        instead=tuple(instead),
        binding_limit=_binding(plan.after, target, feasible),
        assumptions=tuple(dict.fromkeys(assumptions)),
        not_modelled=tuple(dict.fromkeys(not_modelled)),
    )


def _bare_side(pool: Pool, number: int, target: Target) -> Side:
    printed = vllm.capacity(pool, number)
    each = vllm.request_blocks(pool, target.context or pool.settings.max_model_len).total
    return Side(
        {"kv_cache/pool": number * pool.bytes_per_block},
        Capacity(
            kv_tokens=printed.tokens,
            kv_blocks=number,
            kv_block_tokens=pool.block.tokens,
            max_running_requests=target.concurrency,
            concurrency=Concurrency(target.context, number / each),
        ),
    )


def _binding(after: Side | None, target: Target, feasible: bool | None) -> str | None:
    if feasible is False:
        return "kv_blocks"
    if after is None or after.concurrency is None:
        return None
    cap = after.capacity.max_running_requests
    if target.concurrency is not None:
        return "kv_blocks, max_running_requests"
    if cap is None:
        return "kv_blocks"
    return "max_running_requests" if cap <= int(after.concurrency) else "kv_blocks"


def _instead(pool: Pool, held: int, target: Target, utilization: float | None) -> list[str]:
    """What would do where the target does not fit."""
    requests, tokens = target.concurrency or 1, target.context or 1

    def blocks(length: int) -> int:
        return vllm.request_blocks(pool, length, resident=True).total

    found = []
    most = max(0, held - 1) // blocks(tokens)
    if most:
        found.append(f"{words.plural(most, 'request')} of {words.plural(tokens, 'token')}")
    longest = largest(tokens - 1, lambda length: 1 + requests * blocks(length) <= held)
    if longest:
        found.append(f"{words.plural(requests, 'request')} of {words.plural(longest, 'token')}")
    if utilization is not None:
        found.append(f"--gpu-memory-utilization {utilization:g}, if the card has that much to spare")
    return found


# --------------------------------------------------------------------------------------------------------- without a log


def without_log(
    architecture: Architecture,
    settings: Mapping[str, Any],
    target: Target,
    *,
    how: str | None = None,
    version: str | None = None,
    total: Amount | None = None,
    draft: Architecture | None = None,
) -> Plan:
    """A plan from an architecture; the pool's bytes are `pool_bytes`, worked out from the card (ranges), or not known.

    Raises:
        NotModelledError: nothing to size is given, or a formula is not known.
    """
    if version is None:
        raise NotModelledError("vLLM's pool differs by version: --framework-version N")
    at = vllm.modelled_release(version)
    assumptions: list[str] = []
    not_modelled = list(unmodelled(settings))
    wanted = _wanted(settings, at, not_modelled)
    if "gpu_total_bytes" in wanted:
        total = Amount(wanted["gpu_total_bytes"])
    length = (
        (target.context if target.concurrency else None) or wanted.get("context_length") or architecture.max_positions
    )
    if length is None:
        raise NotModelledError("the longest request is not known: --set context_length=N")
    if not target.concurrency and "context_length" not in wanted:
        assumptions.append(f"context_length {length:,}, the model's own")
    guess = Guess(KERNEL_BLOCK, None, "triton")
    asked = {"state_checkpoint_blocks": 0, **_consistent(dict(wanted), wanted)}
    pool = make_pool(architecture, asked, version, length, guess, total.bytes if total is not None else None, draft)
    assumptions += _defaults(pool, architecture, wanted)
    available, others = _available(architecture, asked, version, pool, total, assumptions, draft)
    if not available and target.concurrency is None:
        raise NotModelledError(
            "nothing to size: give --set pool_bytes=SIZE, --gpu CARD or a target (--concurrency, --context)"
        )
    sides = [
        _after(pool, size, None, target, architecture, asked, version, other)
        for size, other in zip(available, others, strict=True)
    ]
    after = None
    if sides:
        after = msgspec.structs.replace(sides[0], ranges=spread(sides))
    elif target.concurrency is not None and target.context is not None:
        smallest = vllm.smallest_reservation(pool, target.concurrency, target.context)
        cap = {**asked, "max_running_requests": target.concurrency}
        after = _side(pool, smallest.blocks, smallest.bytes, architecture, cap, version, {}, target.context)
    made = Plan("vllm", version, architecture.name, architecture=how or architecture.source, after=after)
    ends: list[int | None] = [*available] if available else [None]
    plans = [_finish(made, pool, size, wanted, asked, target, list(assumptions), list(not_modelled)) for size in ends]
    return _together(plans)


def _defaults(pool: Pool, architecture: Architecture, wanted: Mapping[str, Any]) -> list[str]:
    """What was taken for settings that were not given and that matter."""
    found = []
    if "kernel_block_tokens" not in wanted:
        found.append(f"kernel blocks of {KERNEL_BLOCK} tokens")
    if "prefix_caching" not in wanted and architecture.state_layers:
        found.append(f"state cache mode {pool.settings.state_mode}")
    if pool.settings.state_mode == "align" and not {
        "state_checkpoint_blocks",
        "linear_attention_backend_prefill",
    } & set(wanted):
        found.append("no checkpoint block for state groups")
        if _always_checkpoints(pool, architecture):
            note = "Mamba-2 layers take one in this release: --set state_checkpoint_blocks=1"
            return [f"not given: {', '.join(found)} ({note})"]
    if architecture.state_layers and "state_dtype" not in wanted:
        found.append("the engine's own state type")
    if pool.count("sliding"):
        found.append(f"{pool.settings.in_flight_tokens:,} tokens in flight")
    return [f"not given, so as the engine's defaults: {', '.join(found)}"] if found else []


def _always_checkpoints(pool: Pool, architecture: Architecture) -> bool:
    states = (layer.state for layer in architecture.state_layers)
    return pool.settings.release >= vllm_facts.CHECKPOINT_BLOCKS_SINCE and any(isinstance(s, Mamba2) for s in states)


def _available(
    architecture: Architecture,
    asked: Mapping[str, Any],
    version: str | None,
    pool: Pool,
    total: Amount | None,
    assumptions: list[str],
    draft: Architecture | None,
) -> tuple[list[int], list[dict[str, int]]]:
    """Bytes for the pool, and all else, by account: one reading, or the middle, the least and the most; none if not known."""
    if "pool_bytes" in asked:
        return [asked["pool_bytes"]], [{}]
    if total is None:
        return [], []
    weights = weight_bytes(architecture, _sizes(asked), "vllm")
    drafted = plan_draft.weights(asked, architecture, draft, _sizes(asked), "vllm")
    if drafted.high:
        assumptions.append(plan_draft.told(drafted))
    utilization = asked.get("memory_fraction")
    used = vllm_facts.default_utilization(pool.settings.release) if utilization is None else utilization
    if utilization is None:
        assumptions.append(f"--gpu-memory-utilization {used:g}, that version's default")
    charged = vllm_facts.graph_estimate_charged(pool.settings.release)
    told = [
        f"{name} {low / GIB:.2f} to {high / GIB:.2f} GiB"
        for name, (low, _, high) in (("libraries", OUTSIDE), ("activations", ACTIVATIONS), ("CUDA graphs", GRAPHS))
        if name != "CUDA graphs" or charged
    ]
    assumptions.append(
        f"{', '.join(told)} (least and most in public logs); weights {words.gib(weights.low)} to "
        f"{words.gib(weights.high)} GiB (modelled)"
    )
    sizes: list[int] = []
    others: list[dict[str, int]] = []
    for end in ("middle", "least", "most"):
        outside, activations, graphs = (_end(pair, end) for pair in (OUTSIDE, ACTIVATIONS, GRAPHS))
        held = {
            "middle": weights.bytes + drafted.bytes,
            "least": weights.high + drafted.high,
            "most": weights.low + drafted.low,
        }[end]
        card = total.bytes + {"middle": 0, "least": -total.tolerance, "most": total.tolerance}[end]
        found = vllm.budget(
            version, card, consumed=held + outside, headroom=activations, utilization=used,
            graph_estimate=graphs if charged else 0,
        )  # fmt: skip
        if found.available <= 0 and end == "middle":
            raise NotModelledError(
                f"the weights leave nothing for the pool: {words.gib(held)} GiB of weights on a GPU of {words.gib(card)} GiB"
            )
        sizes.append(max(0, found.available))
        others.append({"weights/model": held, "activations": activations, "non_torch": outside})
    return sizes, others


def _end(three: tuple[int, int, int], end: str) -> int:
    """The least pool has the most of all else."""
    return {"middle": three[1], "least": three[2], "most": three[0]}[end]
