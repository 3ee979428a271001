"""A plan as text: the answer in a sentence, one table of before, after and change, then what binds and what is not known."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from tabulate import tabulate

from memledger import words
from memledger.plan_values import CAPACITIES, Plan, Side
from memledger.report.text import Style, to_ascii

_NAMES = {"sglang": "SGLang", "vllm": "vLLM"}
_CAPACITY_WORDS = {
    "kv_tokens": "KV tokens",
    "kv_swa_tokens": "KV tokens, window layers",
    "kv_blocks": "blocks",
    "kv_block_tokens": "tokens a block",
    "state_slots": "state slots",
    "slots_per_request": "slots a request",
    "max_running_requests": "running requests",
}
_ONE = {
    "kv_tokens": "KV token",
    "kv_swa_tokens": "KV token, window layers",
    "kv_blocks": "block",
    "state_slots": "state slot",
    "max_running_requests": "running request",
}
LEFT = ("free", "reserve")
"""Accounts of what is left of a GPU."""
LABEL_WIDTH = 13
NOT_KNOWN = "not known"
NARROWEST = 40
SMALLEST = 2**30 // 200
"""Bytes below which an account has no row: two decimals of a GiB would show nothing."""


def render(plan: Plan, style: Style | None = None) -> str:
    """The plan as lines of text, ending in a newline."""
    style = style or Style()
    lines = [header(plan), "", *_wrap(answer(plan), style.width), ""]
    if plan.after is not None:
        lines += [*_fitted(*table_rows(plan), style.width), ""]
    lines += _facts(plan, style.width)
    while lines and not lines[-1]:
        lines.pop()
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return text if style.unicode else to_ascii(text)


def header(plan: Plan) -> str:
    """The engine, its version, and the model."""
    model = plan.model.rsplit("/", 1)[-1] if plan.model else None
    engine = " ".join(filter(None, (_NAMES[plan.framework], plan.framework_version)))
    return " · ".join(part for part in (engine, model) if part)


def answer(plan: Plan) -> str:
    """The first sentences: whether it can be had, with which flags, and what it costs."""
    load = _load(plan)
    if plan.after is None:
        return f"Nothing could be planned: {'; '.join(plan.not_modelled)}."
    takes, has = (_size(plan, name) for name in ("needed_bytes", "available_bytes"))
    needed = f"it takes {takes} of pools" if takes else None
    there = f"there are {has}" if has else None
    if plan.feasible is False:
        if plan.needed_bytes is None:
            needed = there = None
        what = f"{load} can't be served" if load and not _no_room(plan) else _would_not_start(plan)
        short = "; ".join(filter(None, (needed, there)))
        instead = f" What fits: {'; '.join(plan.instead)}." if plan.instead else ""
        return f"{what}{': ' + short if short else ''}.{instead}"
    flags = " ".join(_shell(plan.flags))
    if load:
        if plan.feasible:
            sure = "can be served"
        elif plan.available_bytes is not None:
            sure = "may be served: what is assumed decides"
        else:
            which = "pools below" if _known(plan) else "smallest pools (below)"
            sure = f"are served by the {which}; whether the GPU has room for them is not known"
        text = f"{load} {sure}{': ' + flags if flags else ''}."
        rest = ", ".join(filter(None, (needed, there)))
        return f"{text} {rest[0].upper()}{rest[1:]}." if rest else text
    text = _effect(plan)
    return f"{flags}: {text}" if flags else text[0].upper() + text[1:]


def _size(plan: Plan, name: str) -> str | None:
    """A size of the plan for a sentence, as a range where it is one; None where it is not known."""
    value: int | None = getattr(plan, name)
    if value is None:
        return None
    low, high = (words.gib_about(int(end)) for end in plan.ranges.get(name, (value, value)))
    return low if low == high else f"{low.removesuffix(' GiB')} to {high}"


def _would_not_start(plan: Plan) -> str:
    if _no_room(plan):
        return "The server would not start: the pools would take more than there is"
    if plan.instead and plan.needed_bytes is None:
        return "The server can't serve with these settings"
    return "The server would not start: one request of the longest length does not fit"


def _no_room(plan: Plan) -> bool:
    """Whether the pools would take more than is left: then nothing is left."""
    before, after = plan.before, plan.after
    if plan.feasible is not False or before is None or after is None:
        return False
    return any(name in before.accounts and name not in after.accounts for name in LEFT)


def _load(plan: Plan) -> str | None:
    requests, tokens = plan.inputs.get("concurrency"), plan.inputs.get("context")
    if requests is None or tokens is None:
        return None
    return f"{words.plural(requests, 'request')} of {words.plural(tokens, 'token')} at once"


def _known(plan: Plan) -> bool:
    """Whether every account that is known before is known after."""
    return plan.before is None or plan.after is None or not plan.before.accounts.keys() - plan.after.accounts.keys()


def _effect(plan: Plan) -> str:
    """What the settings do to the capacity, in a sentence."""
    assert plan.after is not None
    after, before = plan.after.capacity, plan.before.capacity if plan.before is not None else None
    parts: list[str] = []
    unknown: list[str] = []
    for name in ("kv_tokens", "state_slots", "max_running_requests"):
        new = getattr(after, name)
        old = getattr(before, name) if before is not None else None
        if new is None:
            if old is not None:
                unknown.append(_CAPACITY_WORDS[name])
            continue
        if old is not None and old != new:
            parts.append(f"{_counted(name, new, plan.after)} instead of {_was(plan, name, old)}")
        elif old is None:
            parts.append(_counted(name, new, plan.after))
    if unknown:
        parts.append(f"{', '.join(unknown)} not known (see not modelled)")
    elif not _known(plan):
        parts.append("not all of it is known (see not modelled)")
    if not parts:
        return "no capacity changes." if plan.before is not None else "see the table."
    return f"{', '.join(parts)}."


def _counted(name: str, value: int, side: Side) -> str:
    """A capacity with its word: `1 running request`, `24 running requests`, `20 to 24 running requests`."""
    shown = _cell(name, value, side, size=False)
    return f"{shown} {_ONE[name] if shown == '1' and name in _ONE else _CAPACITY_WORDS[name]}"


def _was(plan: Plan, name: str, old: int) -> str:
    return _cell(name, old, plan.before, size=False) if plan.before is not None else words.count(old)


def _moved(plan: Plan, name: str, *, size: bool) -> str:
    """The change of a figure, as a range where it is one; nothing where there is none or it is not known."""
    moved = plan.change.accounts.get(name) if size else plan.change.capacity.get(name)
    if moved is None:
        return ""
    low, high = (
        words.signed_gib(int(end)) if size else f"{round(end, 2):+,.12g}"
        for end in plan.change.ranges.get(name, (moved, moved))
    )
    shown = low if low == high else f"{low} to {high}"
    return "" if shown == "0.00" else shown


def table_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of the table: accounts in GiB, then capacities; empty where nothing was planned."""
    after, before = plan.after, plan.before
    if after is None:
        return [], []
    header = ["GiB on one GPU", "after"] if before is None else ["GiB on one GPU", "before", "after", "change"]
    rows: list[list[str]] = []
    names = [*(before.accounts if before is not None else {}), *after.accounts]
    for name in sorted(dict.fromkeys(names), key=_order):
        sizes = (before.accounts.get(name) if before is not None else 0, after.accounts.get(name))
        if any(abs(size or 0) >= SMALLEST for size in sizes):
            rows.append(_row(plan, name, *sizes, size=True))
    for name in CAPACITIES:
        counts = (getattr(before.capacity, name) if before is not None else None, getattr(after.capacity, name))
        if counts != (None, None):
            rows.append(_row(plan, name, *counts, size=False))
    length, requests = after.capacity.concurrency.tokens_per_request, after.concurrency
    if requests is not None and length is not None:
        low, high = after.ranges.get("concurrency", (requests, requests))
        ends = [words.count(round(end, 2)) for end in (low, high)]
        row = [f"requests of {length:,}", ends[0] if ends[0] == ends[1] else " to ".join(ends)]
        if before is not None:
            same = before.capacity.concurrency.tokens_per_request == length
            was = before.concurrency if same else None
            row.insert(1, "" if was is None else words.count(round(was, 2)))
            row.append(_moved(plan, "concurrency", size=False))
        rows.append(row)
    return header, rows


def _fitted(header: list[str], rows: list[list[str]], width: int) -> list[str]:
    """The table within a width: with ranges on two lines where it is too wide, then with names on two, then row by row."""
    for fold_names in (None, False, True):
        lines = _columns(header, [_folded(row, fold_names) for row in rows] if fold_names is not None else rows)
        if max(map(len, lines)) <= width:
            return lines
    lines = []
    for label, *cells in rows:
        told = [f"{name} {cell}" for name, cell in zip(header[1:], cells, strict=True) if cell]
        lines += _wrap(f"{label}: {', '.join(told)}", width, later="  ")
    return [header[0], *lines]


def _folded(row: list[str], fold_names: bool) -> list[str]:
    label, *cells = row
    if fold_names:
        label = label.replace("/", "/\n  ").replace(", ", ",\n  ")
    return [label, *(cell.replace(" to ", "\nto ") for cell in cells)]


def _columns(header: list[str], rows: list[list[str]]) -> list[str]:
    text = tabulate(
        rows,
        headers=header,
        tablefmt="plain",
        colalign=("left", *("right",) * (len(header) - 1)),
        disable_numparse=True,
        preserve_whitespace=True,
    )
    return [line.rstrip() for line in text.splitlines()]


def _order(name: str) -> int:
    from memledger.ledger import ACCOUNTS

    return ACCOUNTS.index(name) if name in ACCOUNTS else len(ACCOUNTS)


def _row(plan: Plan, name: str, old: int | None, new: int | None, *, size: bool) -> list[str]:
    after, before = plan.after, plan.before
    assert after is not None
    label = name if size else _CAPACITY_WORDS[name]
    row = [label, "none" if name in LEFT and new is None and _no_room(plan) else _cell(name, new, after, size=size)]
    if before is not None:
        row.insert(1, _cell(name, old, before, size=size))
        row.append(_moved(plan, name, size=size))
    return row


def _cell(name: str, value: int | None, side: Side, *, size: bool) -> str:
    if value is None:
        return NOT_KNOWN

    def shown(number: float) -> str:
        return words.gib(int(number)) if size else words.count(number)

    if name in side.ranges:
        low, high = (shown(end) for end in side.ranges[name])
        if low != high:
            return f"{low} to {high}"
    return shown(value)


def _facts(plan: Plan, width: int) -> list[str]:
    lines: list[str] = []
    last = ""
    for name, text in fact_pairs(plan):
        lines += _fact("" if name == last else name, text, width)
        last = name
    return lines


def fact_pairs(plan: Plan) -> list[tuple[str, str]]:
    """What stands below the table, each with its name: what binds, the least that does, the model, what is not known."""
    pairs: list[tuple[str, str]] = []
    if plan.binding_limit and plan.after is not None:
        names = [_CAPACITY_WORDS.get(name, name) for name in plan.binding_limit.split(", ")]
        pairs.append(("binds", ", ".join(names)))
    if plan.smallest is not None and plan.needed_bytes is not None and not _no_room(plan):
        held = [
            _counted(name, getattr(plan.smallest.capacity, name), plan.smallest)
            for name in ("state_slots", "kv_tokens" if plan.framework == "sglang" else "kv_blocks")
            if getattr(plan.smallest.capacity, name) is not None
        ]
        pairs.append(("smallest", f"{words.gib(plan.needed_bytes)} GiB: {', '.join(held)}"))
    if plan.architecture and plan.after is not None:
        pairs.append(("model", plan.architecture))
    pairs += [("assumed", text) for text in plan.assumptions]
    if plan.after is not None:
        pairs += [("not modelled", text) for text in plan.not_modelled]
    return pairs


def _fact(label: str, text: str, width: int) -> list[str]:
    return _wrap(text, width, label.ljust(LABEL_WIDTH), " " * LABEL_WIDTH)


def _wrap(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        max(NARROWEST, width),
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
        break_long_words=False,
    ) or [first]


def _shell(flags: Iterable[str]) -> list[str]:
    import shlex

    return [shlex.quote(flag) for flag in flags]
