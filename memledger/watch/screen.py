"""A board as lines of text for a width: the screen of `memledger watch`, and what `--once` and `--plain` print. Pure.

A line is a row of spans, each with a look; `render` turns looks into colours of a terminal, `memledger.watch.tui` into its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from memledger import words as n
from memledger.ledger import Finding, Report, Server, Usage
from memledger.report.text import Style, paint, to_ascii
from memledger.report.view import Row, Table, header, live_tables, rank_tables
from memledger.sanitize import clean
from memledger.watch import growth_findings
from memledger.watch.board import Board, gpu_key, usages
from memledger.watch.growth_findings import DEVICE_NOISE, rate, span
from memledger.watch.series import Series

SEVERITIES: Final = ("error", "warning", "note", "info")
LOOKS: Final = {"error": "red", "warning": "yellow"}
MOST_FULL: Final = 2
"""GPUs that are shown in full; of more, one line each and one in full."""
MOST_HAPPENED: Final = 6
LABEL: Final = 17
LEAST_BAR: Final = 8

PARTS: Final = {
    "weights": "blue",
    "weights_and_non_torch": "blue",
    "kv_cache": "green",
    "recurrent_state": "cyan",
    "cuda_graphs": "magenta",
    "activations": "magenta",
    "since_start": "yellow",
    "other_processes": "red",
    "server_processes": "blue",
    "unattributed": "red",
    "unexplained": "red",
    "free": "dim",
}
"""The look of an account's bar; of all others: none."""
LETTERS: Final = {
    "weights": "w",
    "weights_and_non_torch": "w",
    "kv_cache": "K",
    "recurrent_state": "S",
    "cuda_graphs": "g",
    "since_start": "+",
    "other_processes": "o",
    "server_processes": "s",
    "unattributed": "?",
    "unexplained": "?",
    "free": ".",
}
"""The letter of an account in the one line of a GPU, so that it can be read without colours; of all others `a`."""


class Span(NamedTuple):
    """A piece of a line; `look` is a colour, `bold`, `dim`, or nothing."""

    text: str
    look: str = ""


Line = tuple[Span, ...]


def render(board: Board, width: int, *, style: Style, gpu: int = 0) -> list[str]:
    """The screen as text for a terminal, a pipe or a file."""
    told = screen(board, width, gpu=gpu)
    if not style.unicode:
        told = [tuple(Span(to_ascii(_plain_bars(s.text)), s.look) for s in line) for line in told]
    known = {"bold", "dim", "red", "yellow", "cyan", "green"}
    return ["".join(paint(s.text, s.look if s.look in known else "", style) for s in line).rstrip() for line in told]


def screen(board: Board, width: int, *, gpu: int = 0, full: bool = False, now_age_s: float | None = None) -> list[Line]:
    """All parts, one under the other.

    Args:
        board: what was seen.
        width: columns; no line is longer.
        gpu: which GPU is shown in full, where there are more than `MOST_FULL`.
        full: whether the findings are shown in full text.
        now_age_s: seconds since the last look, where that is late.
    """
    report = board.report()
    server = growth_findings.watched(report)
    parts = [
        _head(board, report, server, width, now_age_s),
        _gpus(board, report, server, width, gpu),
        _pools(board, server, width),
        _happened(board, width),
        _findings(board, server, width, full=full),
    ]
    lines: list[Line] = []
    for part in parts:
        if part and lines:
            lines.append(())
        lines += part
    return lines


def gpu_count(board: Board) -> int:
    """How many GPUs (or ranks) there are to choose from."""
    report = board.report()
    server = growth_findings.watched(report)
    return len(_tables(report, server))


# ---------------------------------------------------------------------------------------------------------------- head


def _head(board: Board, report: Report, server: Server | None, width: int, age_s: float | None) -> list[Line]:
    if server is None:
        what = "nothing of a server was seen yet" if board.last is None else "no ledger: " + _no_ledger(report)
    else:
        what = header(report, report.servers.index(server)).partition(", ")[0]
    lines: list[Line] = [(Span(text, "bold"),) for text in _wrapped(what, width)]
    last = board.last
    if last is not None:
        told = f"{_clock(last.at)}, watched for {span(board.clock_s)}, {n.plural(board.moments, 'look')}"
        lines += [(Span(text, "dim"),) for text in _wrapped(told, width)]
    if age_s is not None:
        late = f"the last look is {span(age_s)} old: the driver or the server answers late"
        lines += [(Span(text, "yellow"),) for text in _wrapped(late, width)]
    if board.end is not None:
        ended = f"ended {_clock(board.end.at)}: {clean(board.end.reason, 400)}"
        lines += [(Span(text, "red"),) for text in _wrapped(ended, width)]
    return lines


def _no_ledger(report: Report) -> str:
    why = next((s.reason for s in report.sources if s.reason), None)
    return clean(why, 300) if why else "the log names no server"


# ---------------------------------------------------------------------------------------------------------------- GPUs


class _Gpu(NamedTuple):
    """One ledger of the screen: `key` tells its device in the series."""

    title: str
    key: str
    table: Table


def _tables(report: Report, server: Server | None) -> list[_Gpu]:
    if server is None:
        return []
    found = []
    for rank in server.ranks:
        for table in rank_tables(server, [rank])[:1]:
            found.append(_Gpu(table.title, gpu_key(rank.gpu.index, rank.gpu.uuid), table))
    live = report.live
    for table in live_tables(report, report.servers.index(server)):
        match = [g for g in (live.gpus if live is not None else ()) if table.title.startswith(f"GPU {g.index} ")]
        found.append(_Gpu(table.title, gpu_key(match[0].index, match[0].uuid) if match else "", table))
    return [one for one in found if one.table.rows]


def _gpus(board: Board, report: Report, server: Server | None, width: int, chosen: int) -> list[Line]:
    all_of_them = _tables(report, server)
    if len(all_of_them) <= MOST_FULL:
        lines: list[Line] = []
        for one in all_of_them:
            lines += [(), *_ledger(board, one, width)] if lines else _ledger(board, one, width)
        return lines
    chosen %= len(all_of_them)
    lines = [_in_one_line(one, width, chosen=i == chosen) for i, one in enumerate(all_of_them)]
    letters = "w weights K KV cache S state g graphs + growth o others ? nobody's a all else . free"
    lines += [(Span(text, "dim"),) for text in _wrapped(letters, width)]
    return [*lines, (), *_ledger(board, all_of_them[chosen], width)]


def _ledger(board: Board, one: _Gpu, width: int) -> list[Line]:
    rows = [row for row in one.table.rows if row.bytes is not None]
    lines: list[Line] = [(Span(_cut(one.title, width), "bold"),)]
    notes = [_moves(board, one, row) for row in rows]
    # label, two blanks, bar, two blanks, GiB (8), two blanks, share (6), two blanks, what moves
    taken = LABEL + 2 + 8 + 2 + 6
    note = min(max(map(len, notes), default=0), max(0, width - taken - 4 - LEAST_BAR))
    bar = width - taken - 2 - (note + 2 if note else 0)
    for row, moves in zip(rows, notes, strict=True):
        size = n.gib(row.bytes or 0).rjust(8)
        share = (n.share(row.share, "%") if row.share is not None else "").rjust(6)
        look = PARTS.get(row.account, "")
        drawn = "" if row.kind in {"opening", "total"} or bar < LEAST_BAR else _bar(row.share or 0.0, bar)
        lines.append(
            (
                Span(_cut(row.label, LABEL).ljust(LABEL) + "  "),
                Span(drawn.ljust(max(bar, 0)), look),
                Span(f"  {size}  {share}"),
                *(
                    (Span("  " + _cut(moves, note), "yellow" if moves.startswith("+") else "dim"),)
                    if moves and note
                    else ()
                ),
            )
        )
    return lines


def _moves(board: Board, one: _Gpu, row: Row) -> str:
    """What is known of the row's growth: only what is no fixed reservation can move."""
    kinds = {"since_start": "process", "other_processes": "others", "free": "free", "unattributed": "nobody"}
    kind = kinds.get(row.account)
    if kind is None:
        return ""
    series = [s for key, s in board.series.items() if key[0] == kind and key[1] == one.key]
    if not series:
        return ""
    return _trend_words(max(series, key=lambda s: s.last[1] if s.last is not None else 0.0))


def _trend_words(series: Series) -> str:
    trend = series.trend(DEVICE_NOISE)
    if trend.verdict == "not_enough":
        return ""
    if trend.verdict == "flat":
        return f"flat for {span(trend.seconds)}"
    moved = f"{'+' if trend.rise > 0 else '-'}{n.amount(round(abs(trend.rise) / 2**20) * 2**20)}"
    if trend.verdict == "growing":
        return f"+{rate(trend)}"
    words = {"step": "in a step", "settled": "then flat", "uneven": "by fits", "shrinking": ""}
    return f"{moved} {words[trend.verdict]}".rstrip()


def _in_one_line(one: _Gpu, width: int, *, chosen: bool) -> Line:
    rows = [r for r in one.table.rows if r.bytes is not None and r.kind not in {"opening", "total"}]
    whole = next((r.bytes for r in one.table.rows if r.kind in {"opening", "total"}), None) or sum(
        max(0, r.bytes or 0) for r in rows
    )
    free = next((r.bytes for r in rows if r.account == "free"), None)
    tail = f"  {n.gib(free)} free" if free is not None else ""
    room = width - 2 - LABEL - 1 - len(tail)
    spans = [
        Span("> " if chosen else "  ", "bold"),
        Span(_cut(one.title, LABEL).ljust(LABEL + 1), "bold" if chosen else ""),
    ]
    drawn, done = 0, 0.0
    for row in rows:
        done += max(0, row.bytes or 0) / whole if whole else 0.0
        cells = max(0, min(room, round(done * room)) - drawn)
        spans.append(Span(LETTERS.get(row.account, "a") * cells, PARTS.get(row.account, "")))
        drawn += cells
    return (*spans, Span(" " * max(0, room - drawn) + tail))


def _bar(share: float, width: int) -> str:
    filled = max(0.0, min(1.0, share)) * width
    whole = int(filled)
    eighths = "▏▎▍▌▋▊▉"
    part = int((filled - whole) * 8)
    return "█" * whole + (eighths[part - 1] if part else "")


def _plain_bars(text: str) -> str:
    return "".join("#" if c in "█▉▊▋▌▍▎▏" else c for c in text)


# ------------------------------------------------------------------------------------------- pools, events and findings


def _pools(board: Board, server: Server | None, width: int) -> list[Line]:
    last = board.last
    lines: list[Line] = []
    for name, usage in usages(last) if last is not None else ():
        head = f"{name} " if name else ""
        for kind, label, share in (("kv", "KV cache", usage.kv_usage), ("state", "state slots", usage.state_usage)):
            if share is not None:
                lines.append(_pool(head + label, share, _peak(board, server, kind, name, share=True), width))
        counts = [
            f"{count:,} {word}{_peak(board, server, kind, name, share=False)}"
            for kind, word, count in (
                ("running", "running", usage.running_requests),
                ("queued", "queued", usage.queued_requests),
            )
            if count is not None
        ]
        if counts:
            lines += [(Span(text),) for text in _wrapped(f"{head + 'requests':<{LABEL}}  {', '.join(counts)}", width)]
    return lines


def _pool(label: str, share: float, peak: str, width: int) -> Line:
    tail = f"  {n.percent(share):>5} in use{peak}"
    room = width - LABEL - 2 - len(tail)
    bar = _bar(share, room).ljust(room, "·") if room >= LEAST_BAR else ""
    look = "yellow" if share >= 0.95 else "green"
    return (Span(_cut(label, LABEL).ljust(LABEL) + "  "), Span(bar, look), Span(_cut(tail, width - LABEL - 2)))


def _peak(board: Board, server: Server | None, kind: str, name: str, *, share: bool) -> str:
    """The most that was seen: by this watch with its time, or, where that is more, by the log as a whole."""
    series = board.series.get((kind, "", name))
    if series is None or series.peak is None:
        return ""
    usage = server.usage if server is not None and not name else Usage()
    logged = {
        "kv": usage.peak_kv_usage,
        "state": usage.peak_state_usage,
        "running": usage.peak_running_requests,
        "queued": usage.peak_queued_requests,
    }[kind]
    peak, when = series.peak, _clock(series.peak_at or "")
    if logged is not None and logged > peak:
        peak, when = logged, "in the log"
    most = n.percent(peak) if share else f"{peak:,.0f}"
    return f", peak {most} {when}".rstrip() if share else f" (peak {most} {when})"


def _happened(board: Board, width: int) -> list[Line]:
    latest = list(board.happened)[-MOST_HAPPENED:]
    return [(Span(_cut(f"{_clock(seen.at)}  {clean(seen.text, 300)}", width), "dim"),) for seen in reversed(latest)]


def _findings(board: Board, server: Server | None, width: int, *, full: bool) -> list[Line]:
    found = sorted(server.findings if server is not None else (), key=lambda f: (SEVERITIES.index(f.severity), f.code))
    shown = [f for f in found if full or f.severity != "info" or f.code == "ML016"]
    lines: list[Line] = []
    for finding in shown:
        since = board.first_seen.get(finding.code)
        when = f"  since {_clock(since)}" if since and since != board.first_at else ""
        head = f"[{finding.code}] {finding.title}{when}"
        lines.append((Span(_cut(head, width), LOOKS.get(finding.severity, "bold" if full else "")),))
        if full or finding.severity in {"error", "warning"}:
            lines += _text_of(finding, width, full=full)
    return lines


def _text_of(finding: Finding, width: int, *, full: bool) -> Iterator[Line]:
    yield from ((Span(f"  {text}"),) for text in _wrapped(clean(finding.text, 2000), width - 2))
    for remedy in finding.remedies if full else ():
        yield from ((Span(f"  {text}", "cyan"),) for text in _wrapped(" ".join(remedy.flags), width - 2))


def _wrapped(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(n.glued(text), max(width, 10), break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines] or [""]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _clock(at: str) -> str:
    """The time of an ISO date, as people read it."""
    return at[11:19] if len(at) >= 19 else at


def totals(lines: Sequence[Line]) -> list[str]:
    """The lines without their looks."""
    return ["".join(s.text for s in line) for line in lines]
