"""A fleet for a terminal: the worst groups, the worst ranks, what was not read; within the width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

import msgspec
from tabulate import tabulate

from memledger import words as n
from memledger.fleet.summary import Figures, Group, Summary, WorstRank
from memledger.report.fleet_json import FleetReport
from memledger.report.text import Style, to_ascii

LEAST_WIDTH: Final = 60
"""The figures take so much beside the shortest name."""
_UNKNOWN: Final = "-"
_LEAST_CELL: Final = 8
_FLEET: Final = "the fleet"
_CODES: Final = {"bold": "1"}
_NUMBERS: Final = ("logs", "ranks", "idle state", "KV unused", "unexpl.", "OOM")
_HEADS: Final = {"framework_version": "engine", "gpu": "GPU", "gpu_kind": "GPU kind"}
_STATUS_WORDS: Final = {
    "ok": "read",
    "partial": "read in part",
    "nothing_recognised": "with nothing of SGLang or vLLM",
    "unreadable": "not readable",
    "time_limit": "over the time limit",
    "memory_limit": "over the memory limit",
    "crashed": "that ended their reader",
    "internal_error": "with an internal error",
}


def render(report: FleetReport, style: Style | None = None) -> str:
    """The whole report as text, ending in a newline."""
    style = style or Style()
    style = msgspec.structs.replace(style, width=max(style.width, LEAST_WIDTH))
    fleet = report.fleet
    lines = _wrapped(_first(report), style)
    if fleet.groups:
        lines += ["", *_groups(fleet, style)]
    if fleet.worst:
        lines += ["", *_worst(fleet.worst, style)]
    if fleet.unread:
        lines += ["", *_unread(fleet, style)]
    lines += ["", *_wrapped(_written(report), style)]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return text if style.unicode else to_ascii(text)


def _first(report: FleetReport) -> str:
    fleet = report.fleet
    parts = [f"{n.count(number)} {_STATUS_WORDS[status]}" for status, number in fleet.statuses.items()]
    text = f"{n.plural(fleet.files, 'log')}: {', '.join(parts) or 'none read'}; "
    text += f"{n.plural(fleet.starts, 'start')}, {n.plural(fleet.total.ranks, 'rank')} of the latest ones."
    if report.left:
        text += f" {n.plural(report.left, 'log')} left: the same command goes on with them."
    return text


def _groups(fleet: Summary, style: Style) -> list[str]:
    """The figures of each group, the fleet's own last; a name that has no room beside its figures stands above them."""
    names = [group_name(group, fleet.group_by) for group in fleet.groups]
    numbers = [_numbers(group.figures) for group in fleet.groups]
    table = tabulate(
        [_NUMBERS, *numbers, _numbers(fleet.total)],
        tablefmt="plain",
        colalign=["right"] * len(_NUMBERS),
        disable_numparse=True,
    ).splitlines()
    room = style.width - len(table[0]) - 2
    beside = max(map(len, names)) <= room
    margin = min(room, max(len(_FLEET), *map(len, names))) if beside else max(room, len(_FLEET))
    lines = [_paint(f"{'':<{margin}}  {table[0]}", "bold", style)]
    for name, row, group in zip(names, table[1:], fleet.groups, strict=False):
        if not beside:
            lines.append(_cut(name, style.width))
        lines += [f"{name if beside else '':<{margin}}  {row}", *_ooms(group.figures, style)]
    lines += [f"{_FLEET:<{margin}}  {table[-1]}", *_ooms(fleet.total, style)]
    return [*lines, *_wrapped(_note(fleet), style)]


def group_name(group: Group, by: Sequence[str]) -> str:
    """What the ranks of a group have in common, in words."""
    parts = [
        _HEADS.get(name, name.replace("_", " ")) + " unknown" if value is None else value
        for value, name in zip(group.values, by, strict=True)
    ]
    return ", ".join(parts) or "all"


def _note(fleet: Summary) -> str:
    shown = len(fleet.groups)
    more = f"{n.count(shown)} of {n.count(fleet.groups_in_all)} groups (--top). " if shown < fleet.groups_in_all else ""
    return (
        f"{more}GiB over the ranks of the latest starts; what a log does not tell adds nothing (- where none does). "
        "KV unused: above the peak of the usage lines; it holds cached prefixes at best."
    )


def _numbers(figures: Figures) -> list[str]:
    return [
        n.count(figures.logs),
        n.count(figures.ranks),
        n.gib(figures.idle_state_bytes) if figures.idle_state_known else _UNKNOWN,
        n.gib(figures.kv_never_used_bytes) if figures.kv_never_used_known else _UNKNOWN,
        n.gib(figures.unexplained_bytes) if figures.unexplained_known else _UNKNOWN,
        n.count(sum(figures.oom_kinds.values())),
    ]


def _ooms(figures: Figures, style: Style) -> list[str]:
    kinds = ", ".join(f"{kind} {n.count(number)}" for kind, number in figures.oom_kinds.items())
    return textwrap.wrap(kinds, style.width, initial_indent="  OOM  ", subsequent_indent="       ") if kinds else []


def _worst(ranks: Sequence[WorstRank], style: Style) -> list[str]:
    numbers = [
        [_size(rank.idle_state_bytes), _size(rank.kv_never_used_bytes), _size(rank.unexplained_bytes)] for rank in ranks
    ]
    heads = ["rank", *_NUMBERS[2:5]]
    place = [f"{rank.rank}, start {rank.start}" if rank.start > 1 else rank.rank for rank in ranks]
    taken = (
        max(len(heads[0]), *map(len, place))
        + sum(max(len(h), *(len(r[i]) for r in numbers)) for i, h in enumerate(heads[1:]))
        + 8
    )
    room = max(_LEAST_CELL, style.width - taken)
    rows = [[_cut(r.file, room, start=True), where, *row] for r, where, row in zip(ranks, place, numbers, strict=True)]
    table = tabulate(
        [["worst", *heads], *rows],
        tablefmt="plain",
        colalign=["left", "left", "right", "right", "right"],
        disable_numparse=True,
    ).splitlines()
    return [_paint(table[0], "bold", style), *table[1:]]


def _unread(fleet: Summary, style: Style) -> list[str]:
    lines = ["not read"]
    for one in fleet.unread:
        lines += textwrap.wrap(
            f"{one.file}: {_reason(one.file, one.error or one.status)}",
            style.width,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    more = sum(
        number for status, number in fleet.statuses.items() if status not in {"ok", "partial", "nothing_recognised"}
    )
    if more > len(fleet.unread):
        lines.append(f"  and {n.count(more - len(fleet.unread))} more: rows whose `status` says so")
    return lines


def _reason(file: str, error: str) -> str:
    return error.removeprefix(f"{file}: ")


def _written(report: FleetReport) -> str:
    out = report.outputs
    before = f" ({n.count(report.kept)} logs were done before)" if report.kept else ""
    return f"{n.plural(out.rows, 'row')} in {out.parquet} and {out.json_lines}{before}."


def _paint(text: str, how: str, style: Style) -> str:
    return f"\x1b[{_CODES[how]}m{text}\x1b[0m" if style.colour else text


def _cut(text: str, width: int, *, start: bool = False) -> str:
    """Cut to a width, at the end (or the start: of a path the end tells more)."""
    if len(text) <= width:
        return text
    return f"…{text[len(text) - width + 1 :]}" if start else f"{text[: width - 1]}…"


def _size(size: int | None) -> str:
    return n.gib(size) if size is not None else _UNKNOWN


def _wrapped(text: str, style: Style) -> list[str]:
    return textwrap.wrap(text, style.width, break_on_hyphens=False, break_long_words=False)
