"""The charts of an HTML report, as values: which bars, how wide, and what is shown on hovering; in GiB of 2**30 bytes.

A chart never shows a figure that the table beside it does not hold. What can't be drawn to scale (a negative row in an
area) is said in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from memledger import words as n
from memledger.ledger import Entry, Evidence, Rank, Server, Stage, account_total
from memledger.report import view as v
from memledger.report.html_page import (
    Cell,
    Fall,
    Figure,
    Grid,
    Node,
    Part,
    Stack,
    Tree,
    Use,
    Uses,
    Waterfall,
)
from memledger.units import GIB

MOST_EVIDENCE = 2
"""Log lines that are quoted on hovering."""
LEAST_DRAWN = GIB // 1000
_KNOWN_COLOURS = frozenset(v.ACCOUNT_LABELS)
HEADS = ("GiB", "±", "share", "basis", "line", "note")


def gib(size: int) -> float:
    """Bytes as GiB, as precise as a chart can show."""
    return round(size / GIB, 5)


# -------------------------------------------------------------------------------------------------------- ledger tables


def ledger_grid(table: v.Table) -> Grid:
    """A ledger as a table with every figure that the charts hold."""
    heads = [Cell("account"), *(Cell(name, number=name in {"GiB", "±", "share", "line"}) for name in HEADS)]
    rows = [_ledger_row(row) for row in table.rows]
    shown = [any(row[at].text or row[at].lines for row in rows) for at in range(1, len(heads))]
    return Grid(table.title, _keep(heads, shown), tuple(_keep(row, shown) for row in rows), table.remarks)


def _keep(cells: Sequence[Cell], shown: Sequence[bool]) -> tuple[Cell, ...]:
    return (cells[0], *(cell for cell, wanted in zip(cells[1:], shown, strict=True) if wanted))


def _ledger_row(row: v.Row) -> list[Cell]:
    strong = row.kind in {"opening", "total", "unexplained"}
    size = "?" if row.bytes is None else n.signed_or_zero(row.bytes) if row.kind == "unexplained" else n.gib(row.bytes)
    return [
        Cell(row.label, strong=strong),
        Cell(size, number=True),
        Cell(n.tolerance(row.tolerance), number=True),
        Cell("" if row.share is None else n.share(row.share, " %"), number=True),
        Cell(row.basis),
        Cell("", number=True, lines=row.lines),
        Cell(row.note),
    ]


# ----------------------------------------------------------------------------------------------------------- the stack


def stack_of(title: str, tables: Sequence[v.Table]) -> Figure | None:
    """One bar per table, from the rows that sum to its last; None where no row has a size."""
    tables = [t for t in tables if any(_drawn(row) for row in t.rows)]
    if not tables:
        return None
    by_account: dict[str, list[v.Row | None]] = {}
    for place, table in enumerate(tables):
        for row in table.rows:
            if _drawn(row):
                by_account.setdefault(row.account + "\0" + row.label, [None] * len(tables))[place] = row
    order = sorted(by_account, key=lambda key: _place(key.partition("\0")[0]))
    parts = tuple(
        Part(
            (first := next(row for row in by_account[key] if row is not None)).label.strip(),
            _colour(first, i),
            tuple(None if row is None or row.bytes is None else gib(row.bytes) for row in by_account[key]),
            tuple("" if row is None else hover(row, tables[at].title) for at, row in enumerate(by_account[key])),
            tuple("" if row is None or row.bytes is None else n.gib(row.bytes) for row in by_account[key]),
        )
        for i, key in enumerate(order)
    )
    return Figure(title, _says(tables), Stack(tuple(table.title for table in tables), parts))


def _drawn(row: v.Row) -> bool:
    # A part of another row (an indented label) is in that row's size already.
    return row.kind in {"entry", "free", "unexplained"} and bool(row.bytes) and not row.label.startswith(" ")


def _place(account: str) -> int:
    """Holders first, then what no line explains, what is free last."""
    return {"unexplained": 1, "since_start": 1, "unattributed": 1, "reserve": 2, "free": 3}.get(
        account.removeprefix("host/"), 0
    )


def _colour(row: v.Row, place: int) -> str:
    if row.kind == "unexplained":
        return "unexplained"
    account = row.account.removeprefix("host/")
    return account if account in _KNOWN_COLOURS or account in {"server_processes", "page_cache"} else f"more-{place}"


def _says(tables: Sequence[v.Table]) -> str:
    told = []
    for table in tables[:4]:
        rows = sorted((r for r in table.rows if _drawn(r)), key=lambda r: -abs(r.bytes or 0))[:4]
        told.append(f"{table.title}: " + ", ".join(f"{r.label.strip()} {n.gib_about(r.bytes or 0)}" for r in rows))
    more = f"; and {len(tables) - 4} more" if len(tables) > 4 else ""
    return "; ".join(told) + more


def hover(row: v.Row, title: str) -> str:
    """Size to the byte, tolerance, share, basis, note and the first log lines of a row."""
    assert row.bytes is not None
    size = f"{row.label.strip()}: {n.gib(row.bytes)} GiB {n.tolerance(row.tolerance)}".rstrip()
    share = f", {n.share(row.share, ' %')}" if row.share is not None else ""
    lines = [title, size + share, f"{row.bytes:,} bytes" + (f", basis: {row.basis}" if row.basis else "")]
    return "\n".join([*lines, *([row.note] if row.note else []), *evidence_words(row.lines)])


def evidence_words(lines: Sequence[Evidence]) -> list[str]:
    """The first log lines, cut short: the page quotes them in full."""
    told = [f"line {e.line}: {e.text[:240]}{'...' if len(e.text) > 240 else ''}" for e in lines[:MOST_EVIDENCE]]
    more = len(lines) - MOST_EVIDENCE
    return [*told, f"and {n.plural(more, 'more line')}"] if more > 0 else told


# ------------------------------------------------------------------------------------------------------------ the tree


def tree_of(title: str, rank: Rank) -> Figure | None:
    """Accounts within accounts of one rank; None where fewer than two can be drawn."""
    groups: dict[str, list[Entry]] = {}
    negative: list[Entry] = []
    entries = [e for e in rank.entries if not e.account.startswith("host/")]
    for entry in entries or rank.entries:
        if entry.bytes > 0:
            groups.setdefault(v.top_account(entry.account.removeprefix("host/")), []).append(entry)
        elif entry.bytes < 0:
            negative.append(entry)
    if len(groups) < 2:
        return None
    nodes = [Node("root", "", title, 0, "root", title)]
    for place, (account, under) in enumerate(sorted(groups.items(), key=lambda item: (_place(item[0]), item[0]))):
        nodes += _branch(account, under, account if account in _KNOWN_COLOURS else f"more-{place}")
    rest = rank.residual.bytes
    nodes += [_rest_node(row, rank) for row in v.rest_rows(rank) if (row.bytes or 0) > LEAST_DRAWN]
    says = "Accounts within accounts, by size"
    if negative:
        taken = ", ".join(f"{_label(e)} {n.signed_gib(e.bytes)} GiB" for e in negative)
        says += f"; not drawn, because it takes away: {taken}"
    if rest is not None and rest < -LEAST_DRAWN:
        says += f"; the entries exceed what memory fell by {n.gib_about(-rest)}"
    return Figure(f"{title}: accounts within accounts", says, Tree(tuple(nodes)), _tree_grid(title, rank, says))


def _rest_node(row: v.Row, rank: Rank) -> Node:
    assert row.bytes is not None
    text = f"{row.label}: {n.gib(row.bytes)} GiB {n.tolerance(row.tolerance)}".rstrip()
    hovered = "\n".join([text, *([row.note] if row.note else []), v.verdict_words(rank)])
    return Node(row.account, "root", f"{row.label} {n.gib(row.bytes)}", gib(row.bytes), "unexplained", hovered)


def _branch(account: str, under: Sequence[Entry], colour: str) -> list[Node]:
    label = v.ACCOUNT_LABELS.get(account, account.replace("_", " "))
    whole = sum(e.bytes for e in under)
    if len(under) == 1:
        return [Node(account, "root", f"{label} {n.gib(whole)}", gib(whole), colour, _entry_hover(under[0]))]
    top = Node(account, "root", f"{label} {n.gib(whole)}", 0, colour, f"{label}: {n.gib(whole)} GiB\n{whole:,} bytes")
    leaves = [
        Node(f"{account}-{i}", account, f"{_label(e)} {n.gib(e.bytes)}", gib(e.bytes), colour, _entry_hover(e))
        for i, e in enumerate(under)
    ]
    return [top, *leaves]


def _label(entry: Entry) -> str:
    return entry.account.partition("/")[2].replace("_", " ") or v.ACCOUNT_LABELS.get(entry.account, entry.account)


def _entry_hover(entry: Entry) -> str:
    lines = [
        f"{entry.account}: {n.gib(entry.bytes)} GiB {n.tolerance(entry.tolerance_bytes)}".rstrip(),
        f"{entry.bytes:,} bytes, basis: {entry.basis}" + (f", taken in stage {entry.stage}" if entry.stage else ""),
    ]
    note = v.detail_note(entry.detail)
    return "\n".join([*lines, *([note] if note else []), *evidence_words(entry.evidence)])


def _tree_grid(title: str, rank: Rank, says: str) -> Grid:
    heads = ("account", "bytes", "GiB", "±", "basis", "stage", "line")
    rows = tuple(
        (
            Cell(e.account),
            Cell(f"{e.bytes:,}", number=True),
            Cell(n.gib(e.bytes), number=True),
            Cell(n.tolerance(e.tolerance_bytes), number=True),
            Cell(e.basis),
            Cell(e.stage or ""),
            Cell("", number=True, lines=e.evidence),
        )
        for e in rank.entries
    )
    head_cells = tuple(Cell(name, number=name in {"bytes", "GiB", "±", "line"}) for name in heads)
    return Grid(f"{title}: every entry", head_cells, rows, (says,) if ";" in says else ())


# ---------------------------------------------------------------------------------------------------------- the stages


def free_memory(title: str, rank: Rank) -> Figure | None:
    """Free memory from the opening balance to the last reading; None where no stage has both readings."""
    whole = [s for s in rank.stages if s.free_before_bytes is not None and s.free_after_bytes is not None]
    kept = account_total(rank.entries, "reserve")
    reserve = kept.bytes if kept is not None else 0
    read = any(e.account == "free" for e in rank.entries)
    if whole and whole[-1].free_after_bytes == 0 and reserve <= 0 and not read:
        # No reading says that nothing is free: the balance was drawn down to what the log does not name.
        whole.pop()
        if not whole:
            return _by_account(title, rank)
    if not whole:
        return None
    columns: list[Fall] = []
    last: int | None = None
    for stage in whole:
        before, after = stage.free_before_bytes, stage.free_after_bytes
        assert before is not None and after is not None
        if last is None or before != last:
            columns.append(_level("free before", before))
        moved = after - before
        last = after
        if moved:
            columns.append(Fall(stage_name(stage), gib(moved), _stage_hover(stage), text=n.signed_gib(moved)))
    assert last is not None
    first = whole[0].free_before_bytes
    says = f"Free memory goes from {n.gib_about(first or 0)} to {n.gib_about(last)}"
    columns.append(_level("free after", last))
    remarks: tuple[str, ...] = ()
    if last == 0 and reserve > 0:
        columns[-1:] = _kept_free(reserve)
        says += f", of which {n.gib_about(reserve)} are kept free"
        remarks = (f"{n.gib(reserve)} GiB of the last fall are kept free: no reading shows them (reserve).",)
    grid = msgspec.structs.replace(_stage_grid(title, rank.stages), remarks=remarks)
    return Figure(f"{title}: free memory", says, Waterfall(tuple(columns)), grid)


def _level(label: str, size: int) -> Fall:
    return Fall(label, gib(size), f"free: {n.gib(size)} GiB", True, n.gib(size))


def _by_account(title: str, rank: Rank) -> Figure | None:
    """Where the log reads no free memory at all: what there was, what it names of it, and what that leaves."""
    rest = rank.residual
    if rest.bytes is None or rest.opening_bytes is None:
        return None
    columns = [
        Fall(
            v.opening_words(rank),
            gib(rest.opening_bytes),
            f"{rest.opening_bytes:,} bytes",
            True,
            n.gib(rest.opening_bytes),
        )
    ]
    for account, amount in v.account_totals(rank):
        if not amount.bytes:
            continue
        label = v.ACCOUNT_LABELS.get(account, account.replace("_", " "))
        hovered = f"{label}: {n.gib(amount.bytes)} GiB {n.tolerance(amount.tolerance)}".rstrip()
        columns.append(
            Fall(label, -gib(amount.bytes), f"{hovered}\n{amount.bytes:,} bytes", text=n.signed_gib(-amount.bytes))
        )
    for row in v.rest_rows(rank):
        hovered = f"{row.label}: {n.gib(row.bytes or 0)} GiB {n.tolerance(row.tolerance)}".rstrip()
        columns.append(
            Fall(
                row.label,
                gib(row.bytes or 0),
                "\n".join([hovered, *([row.note] if row.note else [])]),
                True,
                n.gib(row.bytes or 0),
            )
        )
    says = (
        f"No free memory is read in the log. Of {n.gib_about(rest.opening_bytes)} it names all but "
        f"{n.gib_about(rest.bytes)}, which are free or held by what it does not name"
    )
    heads = (Cell("step"), Cell("GiB", number=True))
    rows = tuple((Cell(c.label, strong=c.level), Cell(c.text, number=True)) for c in columns)
    grid = Grid(f"{title}: what the log names", heads, rows, (f"{says}.",))
    return Figure(f"{title}: what the log names of the memory", says, Waterfall(tuple(columns)), grid)


def _kept_free(size: int) -> list[Fall]:
    """What the last stage takes off as reserve is free memory after all: it comes back as a level of its own."""
    words = f"kept free: {n.gib(size)} GiB\n{size:,} bytes, basis: derived; no reading shows them"
    return [Fall("kept free", gib(size), words, True, n.gib(size))]


def stage_name(stage: Stage) -> str:
    """A stage as it is read."""
    return stage.name.replace("_", " ")


def _stage_hover(stage: Stage) -> str:
    assert stage.free_before_bytes is not None and stage.free_after_bytes is not None
    lines = [
        f"{stage_name(stage)}: {n.gib(stage.free_before_bytes)} to {n.gib(stage.free_after_bytes)} GiB free",
        f"{stage.free_after_bytes - stage.free_before_bytes:+,} bytes",
    ]
    if stage.residual.bytes is not None:
        spread = n.tolerance(stage.residual.tolerance_bytes or 0)
        lines.append(f"unexplained: {n.signed_gib(stage.residual.bytes)} GiB {spread}".rstrip())
    if stage.candidates:
        lines.append(f"may move memory without a line: {', '.join(stage.candidates)}")
    return "\n".join(lines)


def _stage_grid(title: str, stages: Iterable[Stage]) -> Grid:
    heads = ("stage", "free before", "free after", "change", "unexplained", "±", "may move memory without a line")
    rows = []
    for stage in stages:
        before, after, rest = stage.free_before_bytes, stage.free_after_bytes, stage.residual
        cells = [
            "?" if before is None else n.gib(before),
            "?" if after is None else n.gib(after),
            "?" if before is None or after is None else n.signed_gib(after - before),
            "?" if rest.bytes is None else n.signed_gib(rest.bytes),
            n.tolerance(rest.tolerance_bytes or 0),
        ]
        numbers = [Cell(text, number=True) for text in cells]
        rows.append((Cell(stage_name(stage)), *numbers, Cell(", ".join(stage.candidates))))
    head_cells = tuple(Cell(name, number=0 < i < len(heads) - 1) for i, name in enumerate(heads))
    return Grid(f"{title}: free memory by stage, GiB", head_cells, tuple(rows))


# ------------------------------------------------------------------------------------------------------------- the use


def uses_of(server: Server, ranks: Sequence[Rank]) -> Figure | None:
    """Pools by their peak: the engine prints shares of a pool, and these are drawn; None where no line gives one.

    Bytes are those that are reserved on the worst rank; how many of them were in use is not computed, because a pool may
    hold blocks that a share does not count.
    """
    rank = v.worst(ranks) if ranks else None
    use = server.usage
    pools: list[Use] = []
    rows: list[tuple[Cell, ...]] = []
    shares = (
        ("KV cache", use.peak_kv_usage, "kv_cache"),
        ("window KV", use.peak_swa_usage, None),
        ("recurrent state", use.peak_state_usage, "recurrent_state"),
    )
    for label, share, account in shares:
        if share is None:
            continue
        held = account_total(rank.entries, account) if rank is not None and account is not None else None
        reserved = n.gib(held.bytes) if held is not None and held.bytes > 0 else ""
        text = f"{label}: at most {n.percent(share, 1)} of the pool was in use"
        hovered = [text, f"reserved: {reserved} GiB"] if reserved else [text]
        pools.append(Use(label, round(share, 5), "\n".join([*hovered, *evidence_words(use.evidence)])))
        rows.append((Cell(label), Cell(reserved, number=True), Cell(n.percent(share, 1), number=True)))
    slots = _running(server, rank)
    if slots is not None:
        ran, most = slots
        pools.append(Use("running requests", round(ran / most, 5), f"at most {ran:,} of {most:,} requests ran at once"))
        rows.append((Cell("running requests"), Cell(f"{most:,} requests", number=True), Cell(f"{ran:,}", number=True)))
    if not pools:
        return None
    heads = (Cell("pool"), Cell("reserved, GiB", number=True), Cell("used at the peak", number=True))
    says = ", ".join(f"{pool.label} {n.percent(pool.share)}" for pool in pools)
    grid = Grid("Reserved and used at the peak", heads, tuple(rows))
    return Figure("Peak use of what was reserved", f"At the peak: {says}", Uses(tuple(pools)), grid)


def _running(server: Server, rank: Rank | None) -> tuple[int, int] | None:
    """Requests that ran and that could, of one engine; None where either is not told or several engines are summed."""
    ran = server.usage.peak_running_requests
    most = rank.capacity.max_running_requests if rank is not None else None
    summed = server.usage.scope != "engine" or len(server.engines) > 1
    return None if summed or ran is None or not most or server.usage.ran_between_samples else (ran, most)
