"""From A's pool to B's, per GPU, in steps that sum exactly: bytes to the byte, tokens to the token.

Every step is a difference b - a of figures of the two sides, so that swapping the sides changes every sign and nothing else.

* Bytes: `pool = fraction x (device - in use) - weights - draft - activations - graph estimate - state - window pool - other -
  left - unused - residual`. The product's terms are attributed at the mean of both sides, each other term is one step.
* Tokens: `printed = pool x per_byte + (what the figure counts) + (what the model's arithmetic does not give)`. A change of
  `x` bytes counts `x` times the mean of both sides' tokens per byte; the change of tokens per byte counts the mean of both
  pools: the product of both changes (the interaction) is split in two halves, and `interaction_tokens` names it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import msgspec

from memledger.compare.meaning import MODEL_SHARE, Measured, per_token
from memledger.compare.side import GROUPS, Part, Side, weakest
from memledger.compare.values import Form, Missing, Step
from memledger.units import GIB, ZERO, Amount

_REST: Final = "not_in_the_logs"


class Waterfall(msgspec.Struct, frozen=True):
    """The steps; none with a `reason` where a pool is not known."""

    form: Form
    steps: tuple[Step, ...]
    missing: tuple[Missing, ...] = ()
    reason: str | None = None
    interaction_tokens: int | None = None


class _Move(msgspec.Struct, frozen=True):
    """A step in bytes: how the pool changes, and how that is known."""

    name: str
    amount: Amount
    basis: str
    note: str | None = None


def build(a: Measured, b: Measured) -> Waterfall:
    """The waterfall from `a` to `b`."""
    missing_pools = [label for label, one in (("A", a), ("B", b)) if one.side.pool.amount is None]
    if missing_pools:
        which = " and ".join(missing_pools)
        return Waterfall("none", (), reason=f"the size of the KV pool is not in the log of {which}: no steps in bytes")
    form, moves, missing = _moves(a.side, b.side)
    return _with_tokens(form, moves, missing, a, b)


# ---------------------------------------------------------------------------------------------------------- bytes


def _moves(a: Side, b: Side) -> tuple[Form, list[_Move], list[Missing]]:
    """Every step in bytes but the last two, and what is not in the logs."""
    if a.given or b.given:
        return "given", _given(a, b), []
    moves: list[_Move] = []
    missing: list[Missing] = []
    _budget_moves(a, b, moves, missing)
    for name in GROUPS:
        _group_move(name, a, b, moves, missing)
    if not missing and a.left is not None and b.left is not None:
        moves.append(_Move("left_in_budget", -(b.left - a.left), "derived", _left_note(a, b)))
    return ("partial" if missing else "budget"), moves, missing


def _given(a: Side, b: Side) -> list[_Move]:
    """A pool of given size depends on nothing else: the whole difference is the rule's."""
    assert a.pool.amount is not None and b.pool.amount is not None
    both = "both pools are" if a.given and b.given else "A's pool is" if a.given else "B's pool is"
    change = b.pool.amount - a.pool.amount + (b.unused - a.unused)
    note = f"{both} given in bytes: weights, activations and graphs do not change it"
    basis = weakest((a.pool.basis, b.pool.basis))
    others = [_Move(name, ZERO, basis) for name in GROUPS]
    return [_Move("budget_rule", change, basis, note), *others]


def _budget_moves(a: Side, b: Side, moves: list[_Move], missing: list[Missing]) -> None:
    """Device, memory in use before, and the fraction's rule; one step where the terms are not known on both sides."""
    lacking = tuple(label for label, side in (("A", a), ("B", b)) if side.budget is None)
    if lacking:
        missing.append(Missing("budget_rule", lacking, "the budget (what the memory fraction is a share of)"))
        return
    assert a.budget is not None and b.budget is not None
    change = b.budget - a.budget
    note = f"{_rule(a)} against {_rule(b)}"
    fractions = [_fraction(side) for side in (a, b)]
    mean = None if fractions[0] is None or fractions[1] is None else (fractions[0] + fractions[1]) / 2
    terms: list[_Move] = []
    if (
        mean is not None
        and a.device is not None
        and b.device is not None
        and a.in_use is not None
        and b.in_use is not None
    ):
        terms = [
            _Move("device_total", _scaled(b.device - a.device, mean), "logged"),
            _Move("in_use_at_start", _scaled(-(b.in_use - a.in_use), mean), "derived", _in_use_note(a, b)),
        ]
    elif (
        mean is not None
        and a.fraction_of == b.fraction_of == "free"
        and a.opening is not None
        and b.opening is not None
    ):
        free = f"{a.opening.bytes / GIB:.2f} against {b.opening.bytes / GIB:.2f} GiB free before loading"
        terms = [_Move("free_before_loading", _scaled(b.opening - a.opening, mean), "derived", free)]
    rest = change.bytes - sum(term.amount.bytes for term in terms)
    moves += [*terms, _Move("budget_rule", Amount(rest, change.tolerance), "derived", note)]


def _fraction(side: Side) -> Fraction | None:
    """The budget's share of what it is a share of, exactly."""
    if side.budget is None or side.opening is None or side.opening.bytes <= 0:
        return None
    return Fraction(side.budget.bytes, side.opening.bytes)


def _scaled(amount: Amount, factor: Fraction) -> Amount:
    return Amount(_round(amount.bytes * factor), _ceil(amount.tolerance * factor))


def _rule(side: Side) -> str:
    if side.as_read and side.budget is not None and side.opening is not None:
        kept = (side.opening.bytes - side.budget.bytes) / GIB
        return f"{side.opening.bytes / GIB:.2f} GiB free before loading, {kept:.2f} of it outside the pools at the end"
    fraction = side.server.config.get("memory_fraction")
    share = f"{fraction:g}" if isinstance(fraction, (int, float)) else "a share"
    base = "free before loading" if side.fraction_of == "free" else "of the device"
    size = f"{side.opening.bytes / GIB:.2f} GiB " if side.opening is not None else ""
    return f"{share} of {size}{base}"


def _in_use_note(a: Side, b: Side) -> str | None:
    if a.server.framework == b.server.framework == "vllm":
        return "vLLM does not charge it to the budget"
    if a.server.framework == b.server.framework:
        return None
    return "SGLang takes it off before its fraction, vLLM does not charge it"


def _group_move(name: str, a: Side, b: Side, moves: list[_Move], missing: list[Missing]) -> None:
    first, second = _alike(name, a, b), _alike(name, b, a)
    lacking = tuple(label for label, part in (("A", first), ("B", second)) if part.amount is None)
    if lacking:
        what = (first if first.amount is None else second).what or name.replace("_", " ")
        missing.append(Missing(name, lacking, what))
        return
    assert first.amount is not None and second.amount is not None
    basis = weakest((first.basis, second.basis))
    moves.append(_Move(name, -(second.amount - first.amount), basis, _notes(first.note, second.note)))


def _alike(name: str, side: Side, other: Side) -> Part:
    """A part as both sides can tell it: where one prints weights and memory outside torch as one figure, the other's are added."""
    part = side.parts[name]
    if (
        not other.combined
        or side.combined
        or side.server.framework == "sglang"
        or name not in {"weights", "activations"}
    ):
        return part
    outside = [e for e in side.rank.entries if e.account == "non_torch"]
    if part.amount is None or not outside:
        return part
    moved = Amount(sum(e.bytes for e in outside), sum(e.tolerance_bytes for e in outside))
    amount = part.amount + moved if name == "weights" else part.amount - moved
    note = "with memory outside torch, which the other log prints in one figure with the weights"
    return msgspec.structs.replace(part, amount=amount, note=note if name == "weights" else part.note)


def _notes(first: str | None, second: str | None) -> str | None:
    if first == second:
        return first
    said = [f"{label}: {note}" for label, note in (("A", first), ("B", second)) if note]
    return "; ".join(said) or None


def _left_note(a: Side, b: Side) -> str | None:
    assert a.left is not None and b.left is not None
    if a.left.is_zero() and b.left.is_zero():
        return None
    said = [
        f"{label}: {_left(side)}"
        for label, side in (("A", a), ("B", b))
        if side.left is not None and not side.left.is_zero()
    ]
    return "; ".join(said)


def _left(side: Side) -> str:
    assert side.left is not None
    if side.left.bytes < 0:
        return f"{-side.left.bytes / GIB:.2f} GiB more than the budget went into pools and what is beside them"
    return f"{side.left.bytes / GIB:.2f} GiB of the budget did not become pool (a limit on tokens, a smaller rank, other buffers)"


# ---------------------------------------------------------------------------------------------------------- tokens


def _with_tokens(form: Form, moves: list[_Move], missing: list[Missing], a: Measured, b: Measured) -> Waterfall:
    pool_a, pool_b = a.side.pool.amount, b.side.pool.amount
    assert pool_a is not None and pool_b is not None
    unused = b.side.unused - a.side.unused
    moved = sum(move.amount.bytes for move in moves)
    rest = pool_b.bytes - pool_a.bytes - moved + unused.bytes
    told, untold = (0, rest) if missing else (rest, 0)
    spread = _rest_tolerance(a.side, b.side, moves)
    terms = _terms(a, b)
    steps = [_step(m.name, m.amount, m.basis, m.note, terms) for m in moves]
    steps.append(_rate_step(a, b, terms))
    rounding = _step(
        "rounding_and_groups",
        -unused,
        "derived",
        _rounding_note(a, b),
        terms,
        terms.counting if terms is not None else None,
    )
    if missing:
        note = "; ".join(f"{item.what} ({' and '.join(item.sides)})" for item in missing)
        steps.append(_step(_REST, Amount(untold, spread), "unknown", note, terms))
    last = _step(
        "unexplained",
        Amount(told, 0 if missing else spread),
        "derived",
        _model_note(a, b, terms),
        terms,
        terms.beside_model if terms is not None else None,
    )
    if terms is not None:
        last = msgspec.structs.replace(last, tolerance_tokens=last.tolerance_tokens + _ceil(terms.tolerance))
        # What rounding each step to whole tokens leaves belongs to rounding, not to the unexplained.
        total = terms.change - sum(s.kv_tokens or 0 for s in (*steps, last))
        rounding = msgspec.structs.replace(rounding, kv_tokens=total)
    place = next((i for i, s in enumerate(steps) if s.name == _REST), len(steps))
    steps.insert(place, rounding)
    interaction = None if terms is None else _round(terms.interaction)
    return Waterfall(form, (*steps, last), tuple(missing), None, interaction)


class _Terms(msgspec.Struct, frozen=True):
    """The token side of the equation: `mean` tokens per byte, `change` of the printed figure, and its parts."""

    mean: Fraction
    change: int
    rate: Fraction
    counting: Fraction
    beside_model: Fraction
    tolerance: Fraction
    interaction: Fraction
    by_model: bool


def _terms(a: Measured, b: Measured) -> _Terms | None:
    """None where a side has no token figure, or none that goes with its pool."""
    if a.printed is None or b.printed is None or a.effective is None or b.effective is None:
        return None
    rate_a, rate_b = a.per_byte, b.per_byte
    if rate_a is None or rate_b is None:
        return None
    by_model = _model_stands(a) and _model_stands(b)
    if by_model:
        assert a.model is not None and b.model is not None
        rate_a, rate_b = 1 / a.model, 1 / b.model
    pool_a, pool_b = a.side.pool.amount, b.side.pool.amount
    assert pool_a is not None and pool_b is not None
    beside_a, beside_b = a.effective - pool_a.bytes * rate_a, b.effective - pool_b.bytes * rate_b
    spread = pool_a.tolerance * rate_a + pool_b.tolerance * rate_b if by_model else Fraction(0)
    return _Terms(
        mean=(rate_a + rate_b) / 2,
        change=b.printed - a.printed,
        rate=Fraction(pool_a.bytes + pool_b.bytes, 2) * (rate_b - rate_a),
        counting=(b.printed - b.effective) - (a.printed - a.effective),
        beside_model=beside_b - beside_a,
        tolerance=spread,
        interaction=(pool_b.bytes - pool_a.bytes) * (rate_b - rate_a),
        by_model=by_model,
    )


def _model_stands(one: Measured) -> bool:
    """Whether the model's bytes per token are near enough to the measured ones to be what is compared."""
    if one.model is None or one.per_byte is None or one.several_kinds:
        return False
    return abs(1 / one.per_byte - one.model) <= MODEL_SHARE * one.model


def _step(
    name: str, amount: Amount, basis: str, note: str | None, terms: _Terms | None, more: Fraction | None = None
) -> Step:
    tokens = None if terms is None else _round(amount.bytes * terms.mean + (more or 0))
    spread = 0 if terms is None else _ceil(amount.tolerance * terms.mean)
    return Step(name, amount.bytes, tokens, amount.tolerance, weakest((basis,)), spread, note)


def _rate_step(a: Measured, b: Measured, terms: _Terms | None) -> Step:
    if terms is None:
        lacking = " and ".join(label for label, one in (("A", a), ("B", b)) if one.per_byte is None)
        return Step(
            "kv_bytes_per_token", 0, None, 0, "unknown", note=f"no token figure that goes with the pool: {lacking}"
        )
    if terms.by_model:
        assert a.model is not None and b.model is not None
        first, second = per_token(round(a.model), None), per_token(round(b.model), None)
        note = f"{first} for both" if a.model == b.model else f"{first} against {second}"
        return Step(
            "kv_bytes_per_token", 0, _round(terms.rate), 0, "modelled", note=f"{note}, by the model's arithmetic"
        )
    assert a.per_byte is not None and b.per_byte is not None
    note = f"{round(1 / a.per_byte):,} B against {round(1 / b.per_byte):,} B{_rate_why(a, b)}"
    return Step("kv_bytes_per_token", 0, _round(terms.rate), 0, "derived", note=note)


def _rate_why(a: Measured, b: Measured) -> str:
    """What else than the model and its element type is in the bytes per token."""
    said = []
    shared = [label for label, one in (("A", a), ("B", b)) if one.several_kinds]
    if shared:
        said.append(f"{' and '.join(shared)}: with the state and window blocks of requests of that length")
    if len(shared) == 2 and a.length != b.length and a.length is not None and b.length is not None:
        said.append(
            f"requests of {a.length:,} against {b.length:,} tokens: how much of it is the length is not in the logs"
        )
    return f" ({'; '.join(said)})" if said else ""


def _rounding_note(a: Measured, b: Measured) -> str | None:
    counts = [(one.printed or 0) - (one.effective or 0) for one in (a, b)]
    if counts[0] == counts[1]:
        return None
    words = {
        "slots": "tokens of the full-attention pool",
        "blocks": "blocks times block size",
        "blocks_per_group": "blocks over groups, times block size",
        "effective": "requests of maximum length times that length",
    }
    first, second = words.get(a.rule), words.get(b.rule)
    if first is None or second is None:
        return None
    if first == second:
        lengths = [one.side.rank.capacity.concurrency.tokens_per_request for one in (a, b)]
        return (
            f"the printed figures are for requests of {lengths[0]:,} against {lengths[1]:,} tokens"
            if all(lengths)
            else None
        )
    return f"what the printed figure counts: {first} against {second}"


def _model_note(a: Measured, b: Measured, terms: _Terms | None) -> str | None:
    if terms is None or not terms.by_model or abs(terms.beside_model) <= terms.tolerance:
        return None
    assert a.model is not None and b.model is not None and a.per_byte is not None and b.per_byte is not None
    first, second = 1 / a.per_byte, 1 / b.per_byte
    return (
        f"the figures give {round(first):,} and {round(second):,} B a token, the model {round(a.model):,} and "
        f"{round(b.model):,}: {float(abs(first / a.model - second / b.model)) * 100:.1f} % of one is not explained"
    )


def _rest_tolerance(a: Side, b: Side, moves: list[_Move]) -> int:
    """What the printed digits leave open in the remainder: the two sides' own where both are told in full."""
    if a.unexplained is not None and b.unexplained is not None and any(m.name == "left_in_budget" for m in moves):
        return a.unexplained.tolerance + b.unexplained.tolerance
    pools = [side.pool.amount.tolerance for side in (a, b) if side.pool.amount is not None]
    return sum(pools) + sum(move.amount.tolerance for move in moves)


def _round(value: Fraction) -> int:
    """The nearest whole number, halves away from zero, so that the sign alone changes with the sides."""
    size = (abs(value) * 2 + 1) // 2
    return int(size) if value >= 0 else -int(size)


def _ceil(value: Fraction | int) -> int:
    return int(-(-value // 1))
