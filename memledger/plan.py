"""`memledger plan`: what other settings would give, from a log's own figures or from a model's architecture alone.

Pure: inputs to a `Plan` value (`memledger.plan_values`). The engines' arithmetic is in `memledger.model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from memledger import plan_sglang, plan_vllm, words
from memledger.ledger import Server
from memledger.model.architecture import Architecture, NotModelledError
from memledger.plan_values import Change, Plan, PlanReport, Side, Target
from memledger.sanitize import clean
from memledger.units import Amount

__all__ = ["Facts", "Plan", "PlanReport", "Side", "Target", "choose_server", "make_plan", "refused", "which_start"]


class Facts(msgspec.Struct, frozen=True):
    """What a plan stands on besides a log: the engine, the architecture (and `how` it was found), the card, the draft.

    `chosen`: which of several starts it is for, as a sentence.
    """

    framework: Literal["sglang", "vllm"]
    version: str | None = None
    architecture: Architecture | None = None
    how: str | None = None
    total: Amount | None = None
    card: str | None = None
    draft: Architecture | None = None
    draft_how: str | None = None
    chosen: str | None = None


def choose_server(servers: Sequence[Server], start: int | None = None) -> Server:
    """The start to plan for: the Nth, else the last one whose pools are in the log, else the last.

    Raises:
        LookupError: there is no such start.
    """
    if start is not None:
        if start > len(servers):
            raise LookupError(f"there is no start {start}: the log holds {len(servers)}")
        return servers[start - 1]
    with_pools = [s for s in servers if any(r.capacity.kv_tokens or r.capacity.state_slots for r in s.ranks)]
    return (with_pools or list(servers))[-1]


def which_start(servers: Sequence[Server], chosen: Server, *, asked: bool) -> str | None:
    """The sentence on which start a plan is for, where there are several; None where the user asked for one or there is one."""
    if asked or len(servers) < 2:
        return None
    number = next(index for index, one in enumerate(servers, 1) if one is chosen)
    others = {one.model for one in servers} - {chosen.model}
    model = f" ({chosen.model})" if chosen.model and others else ""
    how = "the last one whose pools are in the log" if number < len(servers) else "the last"
    return f"start {number} of {len(servers)} in the input{model}, {how}; --start N plans for another"


def make_plan(server: Server | None, settings: Mapping[str, Any], target: Target, facts: Facts) -> Plan:
    """The plan for a logged server, or without one for an architecture.

    Raises:
        NotModelledError: nothing could be planned; the message says why and what would help.
    """
    module = plan_sglang if facts.framework == "sglang" else plan_vllm
    if server is not None:
        made = module.from_log(
            server, settings, target,
            architecture=facts.architecture, how=facts.how, version=facts.version, total=facts.total, draft=facts.draft,
        )  # fmt: skip
    elif facts.architecture is None:
        raise NotModelledError(facts.how or "no architecture: give --model-config FILE or --model NAME")
    else:
        made = module.without_log(
            facts.architecture, settings, target,
            how=facts.how, version=facts.version, total=facts.total, draft=facts.draft,
        )  # fmt: skip
    if server is not None and settings and made.change == Change() and not (made.not_modelled or made.flags):
        nothing = f"{', '.join(settings)}: nothing here changes with it"
        made = msgspec.structs.replace(made, assumptions=(*made.assumptions, nothing))
    made = _with_card(made, server, settings, facts)
    if facts.chosen is not None:
        made = msgspec.structs.replace(made, assumptions=(facts.chosen, *made.assumptions))
    if facts.draft is not None:
        made = msgspec.structs.replace(made, assumptions=(f"the draft: {facts.draft_how}", *made.assumptions))
        if settings.get("speculative_algorithm") and "speculative_draft_model" not in settings and made.flags:
            unnamed = "the draft model's name: the flags need it (--set speculative_draft_model=NAME puts it in)"
            made = msgspec.structs.replace(made, not_modelled=(*made.not_modelled, unnamed))
    made = _too_long(_too_few_slots(made), server, settings, target, facts.architecture)
    return _safe(msgspec.structs.replace(made, inputs=_inputs(settings, target, facts)))


def _with_card(plan: Plan, server: Server | None, settings: Mapping[str, Any], facts: Facts) -> Plan:
    """Says which card a logged server is taken to run on, and which one it is planned for."""
    said = []
    if server is not None and facts.total is not None:
        named = f"{facts.card}, " if facts.card else ""
        said.append(f"the log's card: {named}{words.gib(facts.total.bytes)} GiB (--gpu)")
    if server is not None and "gpu_total_bytes" in settings:
        said.append(f"another card: {words.gib(settings['gpu_total_bytes'])} GiB (gpu_total_bytes)")
    return msgspec.structs.replace(plan, assumptions=(*said, *plan.assumptions))


def _too_few_slots(plan: Plan) -> Plan:
    """Not feasible where the state slots serve no request at all."""
    capacity = plan.after.capacity if plan.after is not None else None
    if capacity is None or capacity.state_slots is None or capacity.slots_per_request is None:
        return plan
    if capacity.state_slots >= capacity.slots_per_request:
        return plan
    why = f"{capacity.slots_per_request} state slots or more: a running request takes that many"
    return msgspec.structs.replace(plan, feasible=False, needed_bytes=None, instead=(why, *plan.instead))


def _too_long(
    plan: Plan, server: Server | None, settings: Mapping[str, Any], target: Target, architecture: Architecture | None
) -> Plan:
    """Not feasible where requests are longer than the model's positions and than what the log's engine took already."""
    length = max(target.context or 0, settings.get("context_length") or 0)
    logged = server.config.get("context_length") if server is not None else None
    took = logged if isinstance(logged, int) else 0
    if plan.after is None or length <= took:
        return plan
    if architecture is None or architecture.max_positions is None:
        sentence = f"that the model takes {length:,} tokens; the log's longest is {took:,}"
        return msgspec.structs.replace(plan, assumptions=(sentence, *plan.assumptions)) if took else plan
    # A scaled rotary table reaches further than the configured positions.
    most = max(architecture.max_positions, architecture.rope_rows or 0)
    if length <= most:
        return plan
    why = f"{length:,} tokens are longer than the model's {most:,} positions: the engines refuse it unless overridden"
    return msgspec.structs.replace(
        plan,
        feasible=False,
        needed_bytes=None,
        instead=(f"requests of up to {most:,} tokens ({why})",),
        assumptions=(why, *plan.assumptions),
    )


def refused(
    server: Server | None, settings: Mapping[str, Any], target: Target, facts: Facts, why: NotModelledError
) -> Plan:
    """The plan where nothing could be planned: what was asked for, and the reason."""
    return _safe(
        Plan(
            facts.framework,
            (server.framework_version if server is not None else None) or facts.version,
            server.model if server is not None else None,
            architecture=facts.how if facts.architecture is not None else None,
            inputs=_inputs(settings, target, facts),
            assumptions=(facts.chosen,) if facts.chosen is not None else (),
            not_modelled=(str(why),),
        )
    )


def _inputs(settings: Mapping[str, Any], target: Target, facts: Facts) -> dict[str, Any]:
    found: dict[str, Any] = dict(settings)
    if target.concurrency is not None:
        found["concurrency"] = target.concurrency
    if target.context is not None:
        found["context"] = target.context
    if target.cached_prefixes:
        found["keep_prefixes"] = target.cached_prefixes
    if facts.total is not None:
        found.setdefault("gpu_total_bytes", facts.total.bytes)
    return found


def _safe(plan: Plan) -> Plan:
    """Text that comes from the log or from files, cleaned and masked."""
    return msgspec.structs.replace(
        plan,
        framework_version=_clean(plan.framework_version),
        model=_clean(plan.model),
        architecture=_clean(plan.architecture),
        assumptions=tuple(clean(text) for text in plan.assumptions),
        not_modelled=tuple(clean(text) for text in plan.not_modelled),
    )


def _clean(text: str | None) -> str | None:
    return clean(text) if text is not None else None
