"""Two sides put together: the comparison as one value, with its cause in one or two sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from memledger import words as n
from memledger.compare import differences, hybrid, many, meaning, waterfall
from memledger.compare.meaning import Measured, per_token
from memledger.compare.side import Side, choose_rank, side_of, whole_pools
from memledger.compare.values import Capacity, Comparison, Difference, Meaning, Pair, Step, Subject, Sweep
from memledger.compare.words import STEP_CAUSES, STEP_LABELS, setting
from memledger.ledger import Rank, Server
from memledger.units import GIB

TELLING: Final = 0.25
"""Share of the largest step from which another one is named beside it."""


class Entrant(msgspec.Struct, frozen=True):
    """One input of a comparison: which server of it, and which ranks the user wants to look at (all where empty)."""

    label: str
    input: int
    path: str
    start: int
    server: Server
    ranks: tuple[Rank, ...] = ()


def side(entrant: Entrant) -> Side:
    """The side that stands for an input. A server without a rank has a rank of which nothing is known."""
    ranks = entrant.ranks or entrant.server.ranks
    return side_of(entrant.server, choose_rank(entrant.server, ranks) or Rank(tp=0))


def subject(entrant: Entrant, one: Side) -> Subject:
    """Which input, start and rank a side is."""
    server = entrant.server
    return Subject(
        label=entrant.label,
        input=entrant.input,
        path=entrant.path,
        start=entrant.start,
        framework=server.framework,
        framework_version=server.framework_version,
        model=server.model,
        rank=one.rank.label,
        ranks=len(server.ranks),
        verdict=one.rank.residual.verdict,
    )


def compare(first: Entrant, second: Entrant, context: int | None = None) -> Comparison:
    """The comparison of two inputs; `context`: tokens of a request for the requests that fit."""
    side_a, side_b = side(first), side(second)
    at = meaning.common_context(side_a, side_b, context)
    shared = meaning.common_context(side_a, side_b, None)
    a, b = _measured(side_a, side_b, shared)
    meanings = (meaning.meaning(a, at), meaning.meaning(b, at))
    differ, same = differences.compare(side_a, side_b)
    fall = waterfall.build(a, b)
    return Comparison(
        a=subject(first, side_a),
        b=subject(second, side_b),
        cause=(*_cause(a, b, meanings, fall), *_not_of_one_kind(differ)),
        capacity=_capacity(meanings, at),
        differences=differ,
        same=same,
        meanings=meanings,
        form=fall.form,
        steps=fall.steps,
        reason=fall.reason,
        not_in_logs=fall.missing,
        interaction_tokens=fall.interaction_tokens,
        hybrid=hybrid.hybrid(side_a, side_b),
        notes=_notes(side_a, side_b),
    )


def _measured(side_a: Side, side_b: Side, context: int | None) -> tuple[Measured, Measured]:
    """Both at one context length where both can be; where one can't, each at its own."""
    alike = differences.same_model(side_a, side_b)
    several = alike and (meaning.has_several_kinds(side_a) or meaning.has_several_kinds(side_b))
    a, b = (meaning.measure(one, context, several=several) for one in (side_a, side_b))
    if a.several_kinds and b.several_kinds and a.length != b.length:
        a, b = (meaning.measure(one, several=several) for one in (side_a, side_b))
    return a, b


def sweep(entrants: Sequence[Entrant], context: int | None = None) -> Sweep:
    """Three or more inputs, one column each."""
    sides = [side(entrant) for entrant in entrants]
    lengths = [length for one in sides if (length := meaning.maximum_length(one)) is not None]
    at = context if context is not None else min(lengths, default=None)
    measured = [meaning.measure(one) for one in sides]
    return Sweep(
        columns=tuple(subject(entrant, one) for entrant, one in zip(entrants, sides, strict=True)),
        settings=many.settings(sides),
        figures=many.figures(measured, at),
    )


def _capacity(meanings: tuple[Meaning, Meaning], context: int | None) -> Capacity:
    a, b = meanings
    return Capacity(
        kv_tokens=Pair(a.printed_tokens, b.printed_tokens),
        pool_bytes=Pair(a.pool_bytes, b.pool_bytes),
        kv_bytes_per_token=Pair(a.kv_bytes_per_token, b.kv_bytes_per_token),
        state_bytes_per_request=Pair(a.state_bytes_per_request, b.state_bytes_per_request),
        requests_that_fit=Pair(a.fits.requests, b.fits.requests),
        context=context,
    )


def _notes(a: Side, b: Side) -> tuple[str, ...]:
    found = []
    for label, one in (("A", a), ("B", b)):
        pools = {
            sum(e.bytes for e in whole_pools(r) if e.account.startswith("kv_cache/")) for r in one.server.ranks
        } - {0}
        if len(one.server.ranks) > 1 and len(pools) > 1:
            found.append(
                f"{label}: its {len(one.server.ranks)} ranks differ; shown is the one with the smallest pool, {one.rank.label}"
            )
        if (why := _failure(one)) is not None:
            found.append(f"{label}: {why}")
        if one.rank.gpu.unified_memory:
            found.append(f"{label}: unified memory: page cache and other programs move its readings")
        residual = one.rank.residual
        if residual.verdict == "open" and residual.reason:
            found.append(f"{label}'s ledger is open: {residual.reason}")
        elif residual.verdict in {"unexplained", "over_counted"} and residual.bytes is not None:
            found.append(f"{label}'s ledger does not close: {n.signed_gib(residual.bytes)} GiB ({residual.verdict})")
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------ cause


KIND: Final = ("model", "tp_size", "pp_size")
"""Settings whose difference makes weights and bytes per token two different things."""


def _not_of_one_kind(differ: Sequence[Difference]) -> tuple[str, ...]:
    """What makes the two hard to compare at all."""
    said = [f"{setting(d.name)} {d.a} against {d.b}" for d in differ if d.name in KIND and d.status == "differs"]
    return (f"They are not of one kind: {', '.join(said)}.",) if said else ()


def _cause(a: Measured, b: Measured, meanings: tuple[Meaning, Meaning], fall: waterfall.Waterfall) -> tuple[str, ...]:
    sentences = [_headline(meanings, _each(a, b))]
    if fall.reason is not None:
        told = [f"{label}: {why}" for label, one in (("A", a), ("B", b)) if (why := _failure(one.side)) is not None]
        return (sentences[0], *told, *_known(a.side, b.side), fall.reason[0].upper() + fall.reason[1:] + ".")
    if all(not step.bytes and not step.kv_tokens for step in fall.steps):
        return (*sentences, "Nothing that decides the KV pool differs.")
    if (counted := _counting(a, b, meanings, fall)) is not None:
        return (sentences[0], counted)
    sentences.append(_main(fall, meanings))
    last = fall.steps[-1]
    if last.note is not None:
        first, second = (per_token(m.kv_bytes_per_token or 0, m.kv_bytes_per_token_tolerance) for m in meanings)
        model = meanings[0].model_bytes_per_token, meanings[1].model_bytes_per_token
        gives = f"{model[0]:,} B for both" if model[0] == model[1] else f"{model[0]:,} and {model[1]:,} B"
        off = abs(
            (meanings[0].kv_bytes_per_token or 0) / (model[0] or 1)
            - (meanings[1].kv_bytes_per_token or 0) / (model[1] or 1)
        )
        sentences.append(
            f"Bytes per token come out as {first} and {second} where the model gives {gives}: {n.percent(off, 1)} stays unexplained."
        )
    return tuple(sentences)


def _failure(one: Side) -> str | None:
    """Why a server did not come up, in a sentence; None where it did."""
    if one.server.state != "failed":
        return None
    from memledger.findings.failures import failure_summary

    found = failure_summary(one.server)
    return found.text if found is not None else "it failed; its log does not say why."


def _known(a: Side, b: Side) -> tuple[str, ...]:
    """What both sides tell of the budget and of what is in it, where a pool is not known."""
    if a.budget is None or b.budget is None:
        return ()
    said = [f"budget {_gib(a.budget.bytes)} against {_gib(b.budget.bytes)} GiB"]
    left = [a.budget, b.budget]
    for name, part in a.parts.items():
        first, second = part.amount, b.parts[name].amount
        if first is None or second is None or not (first.bytes or second.bytes):
            continue
        said.append(f"{STEP_LABELS[name]} {_gib(first.bytes)} against {_gib(second.bytes)} GiB")
        left = [left[0] - first, left[1] - second]
    rest = f"that leaves {_gib(left[0].bytes)} against {_gib(left[1].bytes)} GiB for the pool" if len(said) > 1 else ""
    return ("; ".join(filter(None, [f"Both logs tell: {', '.join(said)}", rest])) + ".",)


def _each(a: Measured, b: Measured) -> str:
    """What one of the figures is of: a GPU, or a rank where a server runs on a CPU."""
    return "rank" if "cpu" in {a.side.rank.gpu.kind, b.side.rank.gpu.kind} else "GPU"


def _headline(meanings: tuple[Meaning, Meaning], each: str) -> str:
    a, b = meanings
    pools = f"KV pool {_gib(a.pool_bytes)} against {_gib(b.pool_bytes)} GiB per {each}"
    if a.printed_tokens is None or b.printed_tokens is None:
        return f"{pools}; KV tokens {_count(a.printed_tokens)} against {_count(b.printed_tokens)}."
    change = b.printed_tokens - a.printed_tokens
    if not change:
        return f"A and B print the same {a.printed_tokens:,} KV tokens; {pools}."
    share = f", {change / a.printed_tokens * 100:+.1f} %" if a.printed_tokens else ""
    word = "more" if change > 0 else "fewer"
    return f"B prints {abs(change):,} KV tokens {word} than A ({b.printed_tokens:,} against {a.printed_tokens:,}{share}); {pools}."


def _counting(a: Measured, b: Measured, meanings: tuple[Meaning, Meaning], fall: waterfall.Waterfall) -> str | None:
    """The sentence where most of the difference is what the figures count, not memory."""
    step = _named(fall.steps, "rounding_and_groups")
    tokens = {s.name: abs(s.kv_tokens or 0) for s in fall.steps}
    if step is None or step.note is None or tokens["rounding_and_groups"] < max(tokens.values()):
        return None
    first, second = meanings[0].effective_tokens, meanings[1].effective_tokens
    if first is None or second is None or not step.kv_tokens:
        return None  # a side whose tokens are not known, or steps that are known in bytes only
    measure = meanings[1].measure if b.several_kinds else meanings[0].measure
    same = f"By one measure ({measure}) A holds {first:,} and B {second:,}"
    share = n.percent((second - first) / first, 1) if first else "?"
    change = f"{second - first:+,} tokens ({share})" if second != first else "the same"
    return f"{step.kv_tokens:+,} of it is what the figure counts, not memory. {same}: {change}."


def _main(fall: waterfall.Waterfall, meanings: tuple[Meaning, Meaning]) -> str:
    """The largest step, and the others that are of its order."""
    by_tokens = all(step.kv_tokens is not None for step in fall.steps)
    ranked = sorted(fall.steps, key=lambda s: (-_size(s, by_tokens=by_tokens), fall.steps.index(s)))
    top = _size(ranked[0], by_tokens=by_tokens)
    named = [s for s in ranked[:3] if _size(s, by_tokens=by_tokens) >= TELLING * top]
    if named[0].name == "not_in_the_logs":
        lacking = "; ".join(f"{item.what} ({' and '.join(item.sides)})" for item in fall.missing)
        beside = f"; beside it {', '.join(_said(s) for s in named[1:])}" if named[1:] else ""
        size = _said(named[0], bare=True)
        return f"The pool's size makes the difference: {size} come from figures that the logs do not print: {lacking}{beside}."
    first = f"Most of it is {STEP_CAUSES[named[0].name]}, {_said(named[0], bare=True)}"
    rest = "; ".join(_said(s) for s in named[1:])
    return f"{first}; then {rest}." if rest else f"{first}."


def _said(step: Step, *, bare: bool = False) -> str:
    parts = [f"{step.bytes / GIB:+.2f} GiB"] if step.bytes else []
    if step.kv_tokens:
        parts.append(f"{step.kv_tokens:+,} tokens")
    size = parts[0] + (f" ({parts[1]})" if len(parts) > 1 else "") if parts else "nothing"
    return size if bare else f"{STEP_CAUSES[step.name]} {size}"


def _size(step: Step, *, by_tokens: bool) -> int:
    return abs((step.kv_tokens if by_tokens else step.bytes) or 0)


def _named(steps: Sequence[Step], name: str) -> Step | None:
    return next((step for step in steps if step.name == name), None)


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / GIB:.2f}"


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
