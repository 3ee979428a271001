"""Plans for SGLang: a log's own pools resized, or pools from an architecture alone. The arithmetic is `memledger.model`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from memledger import plan_draft, words
from memledger.ledger import Capacity, Concurrency, Rank, Server
from memledger.model import sglang, sglang_inputs, sglang_plan
from memledger.model.architecture import Architecture, LatentAttention, NotModelledError, Parallel
from memledger.model.dtypes import normal_name
from memledger.model.sglang import SglangServer, Sizing
from memledger.model.sglang_plan import Smallest
from memledger.model.sglang_rules import NEWEST, Version, dotted, slots_flag_works, version_of
from memledger.model.sglang_state import Speculation
from memledger.model.versions import is_placeholder
from memledger.model.weights import weight_bytes
from memledger.plan_settings import modelled, sglang_flags, unmodelled
from memledger.plan_sglang_draft import WEIGHTS_BEFORE_POOLS_SINCE, DraftChange, change_of_draft
from memledger.plan_sglang_fraction import Card, default_fraction
from memledger.plan_values import CAPACITIES, Change, Plan, Side, Target, change, change_of, open_ends, spread
from memledger.plan_values import words as listed
from memledger.units import GIB, Amount

OUTSIDE: Final = (round(0.44 * GIB), round(0.6 * GIB), round(2.48 * GIB))
"""CUDA context, libraries and communication before the weights where there is no log: least, median and most of what 7 public
logs of servers on NVIDIA cards show in use before the weights (the median of one GPU's, the most of four GPUs')."""
MOST_FRACTION: Final = 0.95
_POOLS: Final = ("kv_cache/", "recurrent_state/", "request_tables")
_RESIZES: Final = (
    "state_slots",
    "state_memory_ratio",
    "max_running_requests",
    "max_total_tokens",
    "context_length",
    "page_size",
    "prefix_caching",
    "state_cache_mode",
    "overlap_disabled",
    "swa_full_tokens_ratio",
    "pool_bytes",
    "memory_fraction",
    "speculative_draft_tokens",
)
_SHARDING: Final = frozenset({"tp_size", "pp_size", "ep_size", "dp_size", "dp_attention"})
_UNCERTAIN: Final = "which release or strategy it is decides and is not certain"
_VLLM_ONLY: Final = ("state_checkpoint_blocks", "kernel_block_tokens", "dcp_size")


class Solved(msgspec.Struct, frozen=True):
    """One variant's sizings: as it is, after the settings, and for a target the smallest that serves it.

    `others`: what other releases or strategies that it may be would make of it; `after` is the one with the fewest tokens.
    `drafted`: bytes of draft weights after the settings, where those change them.
    """

    before: Sizing | None
    after: Sizing
    smallest: Smallest | None
    server: SglangServer
    others: tuple[Sizing, ...] = ()
    drafted: int | None = None


def parallel(config: Mapping[str, Any]) -> Parallel:
    """The sizes that a config names; 1 where it does not."""
    tp, pp, ep, dp = (config.get(f"{name}_size") or 1 for name in ("tp", "pp", "ep", "dp"))
    return Parallel(tp, pp, ep, dp, dp_attention=bool(config.get("dp_attention")))


def merged(*lists: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Command line words of several lists; a flag given twice keeps its last value."""
    found: dict[str, list[str]] = {}
    for part in lists:
        name = ""
        for word in part:
            if word.startswith("--"):
                name = word
                found[name] = [word]
            else:
                found[name].append(word)
    return tuple(word for group in found.values() for word in group)


# ------------------------------------------------------------------------------------------------------------ from a log


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
    """A plan for one GPU of a logged server: the one whose KV pool is smallest.

    Args:
        server: a start read from a log.
        settings: changes, by name.
        target: the load to be served.
        architecture: the model's, where it is known; its figures replace the log's where both agree.
        how: where the architecture was found.
        version: the release, where the log does not print it.
        total: the card's memory, where the log does not print it.
        draft: the architecture of the draft model, where there is one besides the model's own prediction layers.

    Raises:
        NotModelledError: the log lacks what the arithmetic needs, or a formula is not known.
    """
    if is_placeholder(server.framework_version):
        # A build's own number says nothing about its rules.
        server = msgspec.structs.replace(server, framework_version=version)
    rank = _rank(server)
    if rank.gpu.total_bytes is None and total is not None:
        rank = msgspec.structs.replace(rank, gpu=msgspec.structs.replace(rank.gpu, total_bytes=total.bytes))
    logged = sglang_inputs.from_rank(server, rank, version_of(version) if version else None)
    assumptions: list[str] = []
    not_modelled = list(unmodelled(settings))
    exact, architecture, how = _exact(server, rank, logged.server, architecture, how, assumptions)
    variants = (logged.server, logged.more, logged.less) if exact is None else (exact,)
    wanted = _wanted(settings, target, variants[0].context_length, not_modelled)
    sizes = parallel({**server.config, **{name: wanted[name] for name in _SHARDING if name in wanted}})
    drafted = change_of_draft(
        variants[0], rank, server.config, wanted, architecture, draft, sizes, assumptions, not_modelled
    )
    ends = (None,) if drafted is None else tuple(dict.fromkeys(drafted.weights.ends))
    solved = [
        _solve(one, wanted, target, server.config, rank, architecture, assumptions, not_modelled, (drafted, end))
        for one in variants
        for end in ends
    ]
    tokens = target.context or wanted.get("context_length") or variants[0].context_length
    others = _other_entries(rank)
    assumptions += negative(others)
    larger = wanted["gpu_total_bytes"] - (rank.gpu.total_bytes or 0) if "gpu_total_bytes" in wanted else 0
    draws = [
        _sides(msgspec.structs.replace(one, after=after), others, tokens, wanted, server.config, architecture, larger)
        for one in solved
        for after in (one.after, *one.others)
    ]
    before, after = draws[0]
    before = Side(_ordered(before.accounts), before.capacity, spread([b for b, _ in draws]))
    after, lost = _certain(before, [a for _, a in draws])
    if lost:
        why = _why_lost(lost, [sizing for one in solved for sizing in (one.after, *one.others)])
        if change(before, after) == Change():
            raise NotModelledError(why)
        not_modelled.insert(0, why)
    if exact is None:
        assumptions.append("bytes per slot and per token come from the log's rounded sizes; ranges hold their rounding")
    made = _finish(
        Plan(
            "sglang",
            server.framework_version,
            server.model,
            architecture=how,
            before=before,
            after=after,
            change=change_of(draws, before, after),
        ),
        solved,
        wanted,
        target,
        tokens,
        assumptions,
        not_modelled,
    )
    if lost and made.smallest is None:
        made = msgspec.structs.replace(made, feasible=None)
    return roomy(made)


FREE: Final = ("free", "reserve")
"""What a GPU has left: all of it, or (vLLM) what is outside the budget."""


def roomy(plan: Plan) -> Plan:
    """Not feasible where the pools take more than is left: such a server dies as it starts. Open where they may."""
    assert plan.after is not None
    name = next((name for name in FREE if name in plan.after.accounts), None)
    if name is None or (plan.before is not None and plan.before.accounts.get(name, 0) < 0):
        return plan
    left = plan.after.accounts[name]
    least, most = plan.after.ranges.get(name, (left, left))
    if most < 0:
        return _too_large(plan, name)
    return msgspec.structs.replace(plan, feasible=None) if least < 0 and plan.feasible else plan


def _too_large(plan: Plan, name: str) -> Plan:
    """A plan whose pools take more than is left: what they take and what there is instead of a negative rest."""
    assert plan.after is not None
    pools = sum(plan.after.under(account) for account in ("kv_cache", "recurrent_state", "request_tables"))
    accounts, moved = dict(plan.after.accounts), dict(plan.change.accounts)
    left = accounts.pop(name)
    moved.pop(name, None)
    ranges = {account: ends for account, ends in plan.after.ranges.items() if account != name}
    open_changes = {account: ends for account, ends in plan.change.ranges.items() if account != name}
    return msgspec.structs.replace(
        plan,
        after=msgspec.structs.replace(plan.after, accounts=accounts, ranges=ranges),
        change=Change(moved, plan.change.capacity, open_changes),
        needed_bytes=pools,
        available_bytes=max(0, pools + left),
        ranges={},
        feasible=False,
    )


def _rank(server: Server) -> Rank:
    """The rank whose pools bind: the one with the fewest KV tokens."""
    with_pools = [r for r in server.ranks if r.capacity.kv_tokens or r.capacity.state_slots]
    if not with_pools:
        raise NotModelledError(
            "the log shows no pool of this server (no line 'KV Cache is allocated' or 'max_total_num_tokens='): it ends before, "
            "or it failed before its pools"
        )
    return min(with_pools, key=lambda r: (r.capacity.kv_tokens is None, r.capacity.kv_tokens or 0))


def _exact(
    server: Server,
    rank: Rank,
    logged: SglangServer,
    architecture: Architecture | None,
    how: str | None,
    notes: list[str],
) -> tuple[SglangServer | None, Architecture | None, str | None]:
    """(the server with the architecture's own figures, the architecture, how): None where they do not give the log's pools."""
    if architecture is not None:
        made = _with_shapes(server, logged, architecture)
        if made is not None and _gives(made, rank):
            return made, architecture, how
        notes.append(
            f"the architecture ({how}) does not give the log's pool sizes: the log's own figures are used for what does not change"
        )
        return None, architecture, how
    fitting: dict[Any, tuple[SglangServer, Architecture]] = {}
    for candidate in _same_class(rank):
        made = _with_shapes(server, logged, candidate)
        if made is None or not _gives(made, rank):
            continue
        # Of models with the same shapes, the one whose weights are stored plainly.
        if (made.slot, made.kv) not in fitting or candidate.quantization is None:
            fitting[made.slot, made.kv] = (made, candidate)
    if len(fitting) != 1:
        return None, None, None
    ((made, candidate),) = fitting.values()
    notes.append(
        f"the model is not in the bundled table; of its class, only the shapes of {candidate.name} give the log's pool sizes"
    )
    return made, candidate, f"shapes of {candidate.name} (bundled table)"


def _same_class(rank: Rank) -> Iterator[Architecture]:
    """The bundled architectures of the class that the log prints."""
    from memledger.model import table

    printed = {e.detail.get("type") for e in rank.entries if e.account == "weights/model"} - {None}
    if len(printed) != 1:
        return
    for name in table.names():
        try:
            match = table.look_up(name)
        except NotModelledError:
            continue
        if match is not None and match.architecture.class_name in printed:
            yield match.architecture


def _with_shapes(server: Server, logged: SglangServer, architecture: Architecture) -> SglangServer | None:
    """The logged server with slot and token of an architecture; None where they can't be told."""
    config = server.config
    try:
        sizes = parallel(config)
        slot = sglang_inputs.state_slot(
            architecture, sizes, version=server.framework_version, state_dtype=_dtype(config.get("state_dtype"))
        )
        token = sglang_inputs.kv_token(architecture, sizes, _kv_dtype(config.get("kv_cache_dtype")))
    except NotModelledError:
        return None
    if (slot is None) != (logged.slot is None):
        return None
    if logged.kv is not None:
        token = msgspec.structs.replace(token, draft=logged.kv.draft)
    return msgspec.structs.replace(
        logged, slot=slot, kv=token if logged.kv is not None else None, model_class=architecture.class_name
    )


def _dtype(name: Any) -> str | None:
    return normal_name(name) if isinstance(name, str) and name not in {"auto", "model"} else None


def _kv_dtype(name: Any) -> str:
    return normal_name(name) if isinstance(name, str) else "auto"


def _gives(server: SglangServer, rank: Rank) -> bool:
    """Whether the sizing of a server in effect gives the sizes that the log printed, within their roundings."""
    try:
        accounts = sglang.agreed(sglang.readings(server)).accounts
    except NotModelledError:
        return False
    page = 0 if server.page_size > 1 else 128
    kv = server.kv
    slack = {"kv_cache": page * (kv.full + kv.draft + kv.sliding) if kv is not None else 0}
    compared = False
    for prefix in ("kv_cache", "recurrent_state/conv", "recurrent_state/ssm", "recurrent_state/speculative_ssm"):
        entries = [e for e in rank.entries if f"{e.account}/".startswith(f"{prefix}/")]
        if not entries:
            continue
        size = sum(v for name, v in accounts.items() if f"{name}/".startswith(f"{prefix}/"))
        allowed = sum(e.tolerance_bytes for e in entries) + slack.get(prefix, 0)
        if abs(size - sum(e.bytes for e in entries)) > allowed:
            return False
        compared = True
    return compared


def _wanted(
    settings: Mapping[str, Any], target: Target, context_length: int | None, not_modelled: list[str]
) -> dict[str, Any]:
    """The settings that are planned with: names put straight, and a context length that the target needs."""
    found = modelled(settings)
    for name in _VLLM_ONLY:
        if found.pop(name, None) is not None:
            not_modelled.append(f"{name}: vLLM only")
    algorithm = found.get("speculative_algorithm")
    if algorithm is not None and algorithm.lower() in {"none", "off"}:
        found.pop("speculative_algorithm")
        found["speculative_draft_tokens"] = 0
    if "chunked_prefill_tokens" in found:
        not_modelled.append("chunked_prefill_tokens: it changes activations, outside the pools")
    if "attention_backend_decode" in found or "linear_attention_backend_prefill" in found:
        not_modelled.append("attention backends: their workspaces are not modelled")
    length = found.get("context_length") or context_length
    if target.context is not None and length is not None and target.context > length:
        found["context_length"] = target.context
    return found


def _solve(
    server: SglangServer,
    settings: Mapping[str, Any],
    target: Target,
    config: Mapping[str, Any],
    rank: Rank,
    architecture: Architecture | None,
    assumptions: list[str],
    not_modelled: list[str],
    draft: tuple[DraftChange | None, int | None],
) -> Solved:
    before = sglang.agreed(sglang.readings(server))
    changed = _changed(server, settings, config, rank, architecture, assumptions)
    change, drafted = draft
    if change is not None and drafted is not None:
        changed = change.applied(changed, drafted)
    found = sglang.readings(changed) if changed is not server else sglang.readings(server)
    found = tuple(sorted(found, key=lambda one: one.kv_tokens or 0))
    if len(found) > 1 and target.concurrency is None:
        told = "; ".join(_reading(one) for one in found)
        if not any(text.startswith(_UNCERTAIN) for text in not_modelled):
            not_modelled.append(f"{_UNCERTAIN}: {told}")
    after = found[0]
    smallest = None
    if target.concurrency is not None and target.context is not None:
        smallest = sglang_plan.smallest(
            changed, target.concurrency, target.context, cached_prefixes=target.cached_prefixes
        )
        served = (smallest.after,) if smallest.after is not None else _in_effect(changed, smallest, target)
        return Solved(before, served[0], smallest, changed, served[1:], drafted)
    return Solved(before, after, smallest, changed, found[1:], drafted)


def _in_effect(server: SglangServer, smallest: Smallest, target: Target) -> tuple[Sizing, ...]:
    """What each release that it may be makes of the flags for a target, fewest tokens first; the smallest where none can be told."""
    settings: dict[str, Any] = {"max_running_requests": (target.concurrency or 1) * server.attention_dp}
    if smallest.minimum.state_slots is not None and "--max-mamba-cache-size" in smallest.flags:
        settings["state_slots"] = smallest.minimum.state_slots * server.attention_dp
    try:
        found = sglang.readings(sglang_plan.changed(server, settings))
    except NotModelledError:
        return (smallest.minimum,)
    return tuple(sorted(found, key=lambda one: one.kv_tokens or 0))


def _reading(one: Sizing) -> str:
    low, high = one.versions
    span = dotted(low) if low == high else f"{dotted(low)} to {dotted(high)}"
    parts = []
    if one.state_slots is not None:
        parts.append(f"{words.plural(one.state_slots, 'slot')} at {one.slots_per_request} a request")
    if one.kv_tokens is not None:
        parts.append(words.plural(one.kv_tokens, "KV token"))
    if one.max_running_requests is not None:
        parts.append(words.plural(one.max_running_requests, "running request"))
    return f"{span}: {', '.join(parts)}"


def _changed(
    server: SglangServer,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    rank: Rank,
    architecture: Architecture | None,
    assumptions: list[str],
) -> SglangServer:
    """The server with all settings; itself where there are none."""
    if not settings:
        return server
    plain = {name: settings[name] for name in _RESIZES if name in settings}
    if settings.get("speculative_algorithm") and "speculative_draft_tokens" not in settings:
        raise NotModelledError(
            "another speculative algorithm needs its draft tokens: --set speculative_draft_tokens=N beside it"
        )
    slot = kv = None
    reshaped = set(settings) & (_SHARDING | {"state_dtype", "kv_cache_dtype"})
    asked = {**config, **{name: settings[name] for name in _SHARDING if name in settings}}
    if reshaped & _SHARDING and architecture is None:
        raise NotModelledError(
            f"{', '.join(sorted(reshaped & _SHARDING))}: how the model divides is not in the log; --model-config FILE would tell"
        )
    if server.slot is not None and reshaped & (_SHARDING | {"state_dtype"}):
        slot = _new_slot(server, settings, config, asked, architecture, assumptions)
    if server.kv is not None and reshaped & (_SHARDING | {"kv_cache_dtype"}):
        kv = _new_kv(server, settings, config, asked, architecture)
    new = sglang_plan.changed(server, plain, slot=slot, kv=kv)
    extra: dict[str, Any] = {}
    if new.speculation is not None and {"speculative_steps", "speculative_topk"} & set(settings):
        steps, topk = (settings.get(f"speculative_{name}") for name in ("steps", "topk"))
        extra["speculation"] = msgspec.structs.replace(
            new.speculation, steps=steps or new.speculation.steps, topk=topk or new.speculation.topk
        )
    if reshaped & _SHARDING and architecture is not None:
        freed = _weights_freed(rank, architecture, config, asked)
        assumptions.append(
            f"the weights of one GPU change by {words.signed_gib(-freed)} GiB (modelled); the pools get the rest"
        )
        sizes = parallel(asked)
        extra |= {
            "more_budget": new.more_budget + freed,
            "attention_dp": sizes.dp if sizes.dp_attention else 1,
        }
    if "gpu_total_bytes" in settings:
        if rank.gpu.total_bytes is None:
            raise NotModelledError(
                "gpu_total_bytes: the log does not print the card's memory, so the difference is not known; --gpu CARD would tell"
            )
        if server.fraction is None:
            raise NotModelledError(
                "gpu_total_bytes: --mem-fraction-static in effect is not in the log (the line 'server_args=' would tell)"
            )
        more = settings["gpu_total_bytes"] - rank.gpu.total_bytes
        extra["more_budget"] = extra.get("more_budget", new.more_budget) + round(more * server.fraction)
        extra["kv_tokens"] = extra["kv_swa_tokens"] = None
        assumptions.append("another card: all that is outside the pools is taken to stay as it is")
    return msgspec.structs.replace(new, **extra) if extra else new


def _new_slot(
    server: SglangServer,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    asked: Mapping[str, Any],
    architecture: Architecture | None,
    assumptions: list[str],
) -> Any:
    assert server.slot is not None
    now, wanted = _dtype(config.get("state_dtype")), _dtype(settings.get("state_dtype"))
    if architecture is not None:
        low, high = server.versions
        version = dotted(low) if low == high else None
        return sglang_inputs.state_slot(architecture, parallel(asked), version=version, state_dtype=wanted or now)
    if wanted is None:
        raise NotModelledError("state_dtype: what the model's own type is needs its architecture (--model-config FILE)")
    if now is None:
        now = "float32"
        assumptions.append("the state is float32 now (SGLang's default; the log does not say)")
    return sglang_plan.resized_state(server.slot, now, wanted)


def _new_kv(
    server: SglangServer,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    asked: Mapping[str, Any],
    architecture: Architecture | None,
) -> Any:
    assert server.kv is not None
    now = _kv_dtype(config.get("kv_cache_dtype"))
    wanted = _kv_dtype(settings.get("kv_cache_dtype") or now)
    if architecture is not None:
        if server.kv.draft and set(asked.items()) != set(config.items()):
            raise NotModelledError("how the draft model's KV divides is not known")
        made = sglang_inputs.kv_token(architecture, parallel(asked), wanted)
        if not server.kv.draft:
            return made
        draft = sglang_plan.resized_kv(server.kv, now, wanted).draft
        return msgspec.structs.replace(made, draft=draft)
    if now == "auto" or wanted == "auto":
        raise NotModelledError("kv_cache_dtype: the type now is not in the log; --model-config FILE would tell")
    return sglang_plan.resized_kv(server.kv, now, wanted)


def _weights_freed(rank: Rank, architecture: Architecture, config: Mapping[str, Any], asked: Mapping[str, Any]) -> int:
    """Bytes of weights that another sharding takes off one GPU: the logged weights by the ratio of the modelled ones."""
    logged = sum(e.bytes for e in rank.entries if e.account == "weights/model")
    return logged - resharded(logged, architecture, parallel(config), parallel(asked), "sglang")


def resharded(
    logged: int, architecture: Architecture, before: Parallel, after: Parallel, framework: Literal["sglang", "vllm"]
) -> int:
    """Logged weights of one GPU under another sharding, by the ratio of the modelled ones.

    Where the model's format is not modelled, the ratio is that of its 16-bit weights.
    """
    try:
        sizes = [weight_bytes(architecture, each, framework).bytes for each in (before, after)]
    except NotModelledError:
        plain = msgspec.structs.replace(architecture, quantization=None)
        sizes = [weight_bytes(plain, each, framework).bytes for each in (before, after)]
    return logged * sizes[1] // sizes[0]


def _other_entries(rank: Rank) -> dict[str, int]:
    """Logged bytes of everything but the pools, by account."""
    found: dict[str, int] = {}
    for item in rank.entries:
        name = item.account.removeprefix("host/") if rank.gpu.kind == "cpu" else item.account
        if not name.startswith((*_POOLS, "host/")):
            found[name] = found.get(name, 0) + item.bytes
    return found


def negative(entries: Mapping[str, int]) -> list[str]:
    """Remarks on entries that the log prints as negative."""
    return [f"{name} is printed as negative in the log, and carried as it is" for name in entries if entries[name] < 0]


def _sides(
    solved: Solved,
    others: dict[str, int],
    tokens: int | None,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    architecture: Architecture | None,
    larger: int,
) -> tuple[Side, Side]:
    """Before and after; what the pools give up or take, and what the card has more (`larger`), is free memory."""
    assert solved.before is not None
    if solved.drafted is not None:
        others = {"weights/draft": 0, **others}
    before = side(solved.before, others, tokens, solved.server.speculation)
    after_others = dict(others)
    if solved.drafted is not None:
        after_others["weights/draft"] = solved.drafted
        if not solved.drafted and "cuda_graphs/draft" in others:
            after_others["cuda_graphs/draft"] = 0
    if set(settings) & _SHARDING and architecture is not None and "weights/model" in others:
        asked = {**config, **settings}
        after_others["weights/model"] = resharded(
            others["weights/model"], architecture, parallel(config), parallel(asked), "sglang"
        )
    after = side(solved.after, after_others, tokens, solved.server.speculation)
    _fill(before, solved.before, after)
    _fill(after, solved.after, before)
    both = before.accounts.keys() & after.accounts.keys()
    # The small request table may be known on one side alone; without a whole pool, what is free is not known.
    if (before.accounts.keys() ^ after.accounts.keys()) - {"request_tables"}:
        after.accounts.pop("free", None)
    elif "free" in others:
        held = [sum(s.accounts[name] for name in both) for s in (before, after)]
        after.accounts["free"] = others["free"] + larger - (held[1] - held[0])
    return before, after


def _fill(one: Side, sizing: Sizing, other: Side) -> None:
    """Nothing, said as 0, for pools that only the other side has; what a sizing could not tell stays absent."""
    for name in other.accounts:
        known = {
            "kv_cache/": sizing.kv_tokens is not None,
            "recurrent_state/": sizing.state_slots is not None,
        }
        if any(told and name.startswith(prefix) for prefix, told in known.items()):
            one.accounts.setdefault(name, 0)


def _certain(before: Side, draws: list[Side]) -> tuple[Side, tuple[str, ...]]:
    """(the first side without what another leaves open, with its ranges; what is known before but not after)."""
    first = draws[0]
    accounts = {name: size for name, size in first.accounts.items() if all(name in one.accounts for one in draws)}
    if any(name not in accounts for one in draws for name in one.accounts if name != "request_tables"):
        accounts.pop("free", None)
    names = [name for name in CAPACITIES if any(getattr(one.capacity, name) is None for one in draws)]
    capacity = msgspec.structs.replace(first.capacity, **dict.fromkeys(names))
    if any(one.concurrency is None for one in draws):
        capacity = msgspec.structs.replace(capacity, concurrency=Concurrency())
    ranges = {name: ends for name, ends in spread(draws).items() if name in accounts or name in CAPACITIES}
    ranges = {name: ends for name, ends in ranges.items() if name not in names}
    if capacity.concurrency.requests is not None and "concurrency" in spread(draws):
        ranges["concurrency"] = spread(draws)["concurrency"]
    lost = [name for name in before.accounts if name not in accounts]
    lost += [name for name in names if getattr(before.capacity, name) is not None]
    return Side(_ordered(accounts), capacity, ranges), tuple(lost)


def _ordered(accounts: Mapping[str, int]) -> dict[str, int]:
    """Accounts in the order of the ledger."""
    from memledger.ledger import ACCOUNTS

    return {name: accounts[name] for name in ACCOUNTS if name in accounts}


def _why_lost(lost: tuple[str, ...], found: list[Sizing]) -> str:
    """The sentence on what the settings leave unknown, and why."""
    if any(one.budget is None for one in found):
        why = (
            "the log does not tell what the pools may take together (the lines 'KV Cache is allocated' and "
            "'max_total_num_tokens=' would), so what the settings give or take is open"
        )
    else:
        why = "the releases or strategies that it may be do not agree"
    return f"not known with these settings: {', '.join(lost)} ({why})"


def side(sizing: Sizing, others: Mapping[str, int], tokens: int | None, speculation: Speculation | None) -> Side:
    """One GPU with the pools of a sizing and all else as given; `tokens`: the length that requests are counted at."""
    ordered = _ordered({**others, **sizing.accounts})
    requests: int | None = None
    if tokens is not None:
        requests, _ = sizing.requests_of(tokens, speculation.draft_tokens if speculation is not None else 0)
    return Side(
        ordered,
        Capacity(
            kv_tokens=sizing.kv_tokens,
            kv_swa_tokens=sizing.kv_swa_tokens,
            state_slots=sizing.state_slots,
            slots_per_request=sizing.slots_per_request,
            max_running_requests=sizing.max_running_requests,
            concurrency=Concurrency(tokens if requests is not None else None, requests),
        ),
    )


def _finish(
    plan: Plan,
    every: list[Solved],
    settings: Mapping[str, Any],
    target: Target,
    tokens: int | None,
    assumptions: list[str],
    not_modelled: list[str],
) -> Plan:
    """The plan with its flags, what binds, and whether the target is met; `every`: the likeliest first."""
    solved = every[0]
    after, found, server = solved.after, solved.smallest, solved.server
    if settings.get("state_slots") is not None and not all(
        slots_flag_works(v, radix_cache=server.radix) for v in after.versions
    ):
        raise NotModelledError(
            "0.5.4 to 0.5.6 ignore --max-mamba-cache-size while the radix cache is on; add --set prefix_caching=off"
        )
    given, missing = sglang_flags(settings, after.versions)
    not_modelled += missing
    draft = server.speculation.draft_tokens if server.speculation is not None else 0
    binding = after.requests_of(tokens, draft)[1] if tokens is not None else after.binding
    feasible: bool | None = True
    instead: list[str] = []
    smallest = needed = available = None
    available = after.budget
    flags = tuple(given)
    if found is not None:
        feasible, needed, binding = found.fits, found.needed, found.binding or binding
        flags = merged(given, found.flags)
        smallest = side(found.minimum, {}, target.context, server.speculation)
        available = _budget(server)
        not_modelled += found.notes
        if feasible is False:
            # What would do must do at the least budget that is possible.
            least = min(every, key=lambda one: _budget(one.server) or 0)
            instead = _instead(least.server, target, needed, _budget(least.server))
            binding = binding or ("kv_tokens",)
        assumptions.append("every request is taken to be that long at the same time, no prefix shared")
    if after.prefix is not None and after.prefix.slots_per_prefix and after.spare_slots is not None:
        assumptions.append(
            f"cached prefixes: {after.prefix.text}; {words.plural(max(0, after.spare_slots), 'slot')} besides those of "
            "running requests"
        )
    if "page_size" in settings:
        assumptions.append(page_loss(settings["page_size"], tokens, "page"))
    old = solved.before
    if old is not None:
        if old.max_running_requests != after.max_running_requests:
            not_modelled.append("CUDA graphs: another number of running requests captures other batch sizes")
        if "memory_fraction" in settings:
            not_modelled.append("whether what remains outside the budget suffices for graphs and activations")
    return msgspec.structs.replace(
        plan,
        smallest=smallest,
        needed_bytes=needed,
        available_bytes=available,
        ranges=open_ends(
            needed_bytes=[one.smallest.needed if one.smallest is not None else None for one in every],
            available_bytes=[_budget(one.server) for one in every] if available is not None else [],
        ),
        flags=flags,
        feasible=feasible,
        instead=tuple(instead),
        binding_limit=listed(binding),
        assumptions=tuple(dict.fromkeys(assumptions)),
        not_modelled=tuple(dict.fromkeys(not_modelled)),
    )


def _budget(server: SglangServer) -> int | None:
    try:
        budgets = {one.budget for one in sglang.readings(server)}
    except NotModelledError:
        return None
    return budgets.pop() if len(budgets) == 1 else None


def _instead(server: SglangServer, target: Target, needed: int, available: int | None) -> list[str]:
    """What would do where the target can't be met: fewer requests, shorter ones, a larger budget."""
    requests, tokens = target.concurrency or 1, target.context or 1

    def serves(number: int, length: int) -> bool:
        try:
            return sglang_plan.smallest(server, number, length, cached_prefixes=target.cached_prefixes).fits is True
        except NotModelledError:
            return False

    found = []
    most = largest(requests - 1, lambda number: serves(number, tokens))
    if most:
        found.append(f"{words.plural(most, 'request')} of {words.plural(tokens, 'token')}")
    longest = largest(tokens - 1, lambda length: serves(requests, length))
    if longest:
        found.append(f"{words.plural(requests, 'request')} of {words.plural(longest, 'token')}")
    if available is not None:
        fraction = _fraction_for(server, needed, available)
        if fraction is not None:
            found.append(
                f"--mem-fraction-static {fraction:g}, if what it leaves outside the pools is enough for graphs and activations"
            )
    return found


def _fraction_for(server: SglangServer, needed: int, available: int) -> float | None:
    source = server.budget
    pre = source.pre if source is not None else server.pre
    fraction = source.fraction if source is not None else server.fraction
    if pre is None or fraction is None:
        return None
    wanted = sglang.Budget(available, pre, fraction).fraction_for(needed)
    return wanted if wanted <= MOST_FRACTION else None


def page_loss(page: int, tokens: int | None, word: str) -> str:
    """The sentence on what rounding up to whole pages (blocks) loses for each request."""
    told = f"{word}s of {words.plural(page, 'token')}: requests take whole {word}s"
    if tokens is None:
        return f"{told}, so up to {words.plural(page - 1, 'token')} of each one's last stay unused"
    lost = -tokens % page
    return f"{told}; one of {words.plural(tokens, 'token')} leaves {words.plural(lost, 'token')} of its last unused"


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` that fits, 0 for none; whatever is below one that fits, fits too."""
    low, high = 0, max(0, limit)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


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
    """A plan from an architecture. The budget is `pool_bytes`, or worked out from the card's memory (ranges), or unknown.

    Raises:
        NotModelledError: nothing to size is given, or a formula is not known.
    """
    assumptions: list[str] = []
    not_modelled = list(unmodelled(settings))
    wanted = _wanted(settings, target, architecture.max_positions, not_modelled)
    if "gpu_total_bytes" in wanted:
        total = Amount(wanted["gpu_total_bytes"])
    sizes = parallel(wanted)
    if (why := plan_draft.missing(wanted, architecture, draft, "sglang")) is not None:
        if target.concurrency is not None or total is not None or {"pool_bytes", "max_total_tokens"} & set(wanted):
            raise NotModelledError(why)
        not_modelled.append(why)
    else:
        architecture = plan_draft.with_layers(architecture, wanted, draft, "sglang")
    base = _bare(architecture, sizes, wanted, version, assumptions)
    drafted = plan_draft.Weights(0, 0, 0)
    if total is not None:
        drafted = plan_draft.weights(wanted, architecture, draft, sizes, "sglang")
        assumptions += [plan_draft.told(drafted)] if drafted.high else []
    budgets = _budgets(architecture, sizes, wanted, base, total, drafted, assumptions)
    others: list[dict[str, int]] = [{}]
    if total is not None:
        weights = weight_bytes(architecture, sizes, "sglang")
        others = [{"weights/model": size} for size in (weights.bytes, weights.high, weights.low)]
        if drafted.high:
            others = [
                {**one, "weights/draft": size}
                for one, size in zip(others, (drafted.bytes, drafted.high, drafted.low), strict=True)
            ]
    tokens = target.context or wanted.get("context_length") or base.context_length
    servers = [msgspec.structs.replace(base, budget=budget) for budget in budgets]
    solved, sides = _solve_each(servers, others, target, tokens, not_modelled)
    may_not_start = len(solved) < len(budgets)
    after = msgspec.structs.replace(sides[0], ranges=spread(sides))
    if may_not_start:
        after = _from_nothing(after)
    if not after.accounts:
        raise NotModelledError(
            "nothing to size: give --set pool_bytes=SIZE, --set state_slots=N, --gpu CARD or a target"
        )
    flags_of = {name: value for name, value in wanted.items() if name != "pool_bytes"}
    plan = _finish(
        Plan("sglang", version, architecture.name, architecture=how or architecture.source, after=after),
        solved,
        flags_of,
        target,
        tokens,
        assumptions,
        not_modelled,
    )
    if may_not_start and plan.available_bytes is not None:
        most = plan.ranges.get("available_bytes", (0, plan.available_bytes))[1]
        plan = msgspec.structs.replace(plan, ranges={**plan.ranges, "available_bytes": (0, most)}, instead=())
    served = {one.smallest.fits for one in solved if one.smallest is not None}
    if len(served) > 1 or (may_not_start and plan.feasible):
        plan = msgspec.structs.replace(plan, feasible=None)
    return plan


def _solve_each(
    servers: list[SglangServer],
    others: list[dict[str, int]],
    target: Target,
    tokens: int | None,
    not_modelled: list[str],
) -> tuple[list[Solved], list[Side]]:
    """The sizing for each budget, the likeliest first; one that a server would not start with is left out, and said.

    Raises:
        NotModelledError: the likeliest can't be sized.
    """
    solved, sides = [], []
    for index, server in enumerate(servers):
        try:
            one = _solve_bare(server, target)
        except NotModelledError as error:
            if not index:
                raise
            not_modelled.append(f"at the least that is assumed to be there, such a server does not start: {error}")
            continue
        solved.append(one)
        sides.append(side(one.after, others[min(index, len(others) - 1)], tokens, server.speculation))
    return solved, sides


def _from_nothing(after: Side) -> Side:
    """The side with ranges of its pools that begin at nothing, where at the least there is no room for any."""
    ranges = dict(after.ranges)
    for name, size in after.accounts.items():
        if name.startswith(_POOLS):
            ranges[name] = (0, ranges.get(name, (0, size))[1])
    for name in CAPACITIES:
        value = getattr(after.capacity, name)
        if value is not None and name != "slots_per_request":
            ranges[name] = (0, ranges.get(name, (0, value))[1])
    if after.concurrency is not None:
        ranges["concurrency"] = (0, ranges.get("concurrency", (0, after.concurrency))[1])
    return msgspec.structs.replace(after, ranges=ranges)


def _bare(
    architecture: Architecture,
    sizes: Parallel,
    settings: Mapping[str, Any],
    version: str | None,
    assumptions: list[str],
) -> SglangServer:
    """The server that architecture and settings describe; what they leave open is the engine's default."""
    fields: dict[str, Any] = {"flags_known": True}
    names = {
        "page_size": "page_size",
        "prefix_caching": "radix_cache",
        "state_cache_mode": "strategy",
        "state_memory_ratio": "state_ratio",
        "max_running_requests": "max_running_requests",
        "max_total_tokens": "max_total_tokens",
        "context_length": "context_length",
        "swa_full_tokens_ratio": "swa_ratio",
    }
    fields |= {field: settings[name] for name, field in names.items() if name in settings}
    fields["overlap"] = not settings.get("overlap_disabled", False)
    fields["linear_backend"] = settings.get("linear_attention_backend_prefill", "triton")
    if settings.get("speculative_draft_tokens"):
        fields["speculation"] = Speculation(
            settings["speculative_draft_tokens"], settings.get("speculative_steps"), settings.get("speculative_topk")
        )
    if "state_slots" in settings:
        fields["state_slots"] = settings["state_slots"] // (sizes.dp if sizes.dp_attention else 1)
    if "max_total_tokens" in settings and not {"pool_bytes", "memory_fraction", "gpu_total_bytes"} & set(settings):
        page = settings.get("page_size", 1)
        fields["kv_tokens"] = sglang.page_down(settings["max_total_tokens"], page)
    defaults = [
        f"{name} {value}"
        for name, value in (("prefix_caching", "on"), ("page_size", "1"), ("kv_cache_dtype", "the model's"))
        if name not in settings
    ]
    if architecture.state_layers:
        defaults += [] if "state_dtype" in settings else ["state_dtype the engine's own"]
        defaults += [] if "overlap_disabled" in settings else ["overlap scheduling on"]
        defaults += [] if "linear_attention_backend_prefill" in settings else ["linear attention by triton"]
    if defaults:
        assumptions.append(f"not given, so as the engine's defaults: {', '.join(defaults)}")
    return sglang_inputs.from_architecture(
        architecture,
        sizes,
        version=version,
        kv_dtype=_kv_dtype(settings.get("kv_cache_dtype")),
        state_dtype=_dtype(settings.get("state_dtype")),
        **fields,
    )


def _budgets(
    architecture: Architecture,
    sizes: Parallel,
    settings: Mapping[str, Any],
    server: SglangServer,
    total: Amount | None,
    drafted: plan_draft.Weights,
    assumptions: list[str],
) -> list[sglang.Budget | None]:
    """The budget: one, or the middle, the least and the most of what is assumed."""
    if "pool_bytes" in settings:
        return [sglang.Budget(settings["pool_bytes"])]
    if total is None:
        return [None]
    weights = weight_bytes(architecture, sizes, "sglang")
    if "memory_fraction" in settings:
        least = most = settings["memory_fraction"]
    else:
        least, most = _own_fraction(architecture, sizes, settings, server, total, assumptions)
    assumptions.append(
        f"{OUTSIDE[0] / GIB:.2f} to {OUTSIDE[2] / GIB:.2f} GiB of context and libraries before the weights (as public logs "
        f"show); weights {words.gib(weights.low)} to {words.gib(weights.high)} GiB (modelled)"
    )
    version: Version = _newest(server)

    def budget(card: int, outside: int, held: int, fraction: float) -> sglang.Budget:
        pre = card - outside
        return sglang.budget(version, pre, pre - held, fraction, multimodal=architecture.multimodal)

    if version < WEIGHTS_BEFORE_POOLS_SINCE:
        drafted = plan_draft.Weights(0, 0, 0)
    low = budget(total.bytes - total.tolerance, OUTSIDE[2], weights.high + drafted.high, least)
    high = budget(total.bytes + total.tolerance, OUTSIDE[0], weights.low + drafted.low, most)
    middle = budget(total.bytes, OUTSIDE[1], weights.bytes + drafted.bytes, round((least + most) / 2, 3))
    if middle.rest <= 0:
        raise NotModelledError(
            f"the weights leave nothing for the pools: {words.gib(weights.bytes)} GiB of weights on a GPU of "
            f"{words.gib(total.bytes)} GiB"
        )
    return [middle, low, high]


def _own_fraction(
    architecture: Architecture,
    sizes: Parallel,
    settings: Mapping[str, Any],
    server: SglangServer,
    total: Amount,
    assumptions: list[str],
) -> tuple[float, float]:
    """What SGLang makes of `--mem-fraction-static` itself, least and most."""
    card = Card(
        total.bytes,
        tp=sizes.tp,
        pp=sizes.pp,
        attention_dp=sizes.dp if sizes.dp_attention else 1,
        latent=any(isinstance(layer.attention, LatentAttention) for layer in architecture.layers),
        multimodal=architecture.multimodal,
        speculation=plan_draft.method(settings),
        chunked_prefill_tokens=settings.get("chunked_prefill_tokens"),
        max_running_requests=server.max_running_requests,
    )
    least, most = default_fraction(server.versions, card)
    told = f"{least:g}" if least == most else f"between {least:g} and {most:g}"
    why = "by the size of its vision tower" if card.multimodal else "by release and flags"
    assumptions.append(
        f"memory_fraction {told}, as SGLang works it out for the card{'' if least == most else f' ({why})'}"
    )
    return least, most


def _newest(server: SglangServer) -> Version:
    high = (*server.versions[1], 0, 0, 0)
    return min(NEWEST, (high[0], high[1], high[2]))


def _solve_bare(server: SglangServer, target: Target) -> Solved:
    if server.budget is not None and server.budget.rest <= 0:
        raise NotModelledError("the weights leave nothing for the pools")
    smallest = None
    if target.concurrency is not None and target.context is not None:
        smallest = sglang_plan.smallest(
            server, target.concurrency, target.context, cached_prefixes=target.cached_prefixes
        )
        return Solved(None, smallest.after or smallest.minimum, smallest, server)
    return Solved(None, sglang.agreed(sglang.readings(server)), None, server)
