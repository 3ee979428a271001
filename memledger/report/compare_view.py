"""What every report of a comparison shows, as tables of texts; text and Markdown lay out the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from memledger import words as n
from memledger.compare import words
from memledger.compare.meaning import per_token
from memledger.compare.values import Comparison, Meaning, Regression, Row, Step, Subject, Sweep
from memledger.sanitize import clean
from memledger.units import GIB

NOT_TOLD = "not in the log"


class Grid(msgspec.Struct, frozen=True):
    """A table: title, column heads, rows; `marked` are the rows that differ. `remarks` stand below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    remarks: tuple[str, ...] = ()


class Bar(msgspec.Struct, frozen=True):
    """One line of the waterfall. `share`: of the largest step, signed; None on the lines of A and B."""

    label: str
    share: float | None
    gib: str
    tolerance: str
    tokens: str
    basis: str


def title(subject: Subject) -> str:
    """`A  SGLang 0.5.16 · Model · TP0 of 4 ranks · server.log`."""
    name = "SGLang" if subject.framework == "sglang" else "vLLM"
    version = f"{name} {subject.framework_version}" if subject.framework_version else f"{name}, version not in the log"
    rank = subject.rank if subject.ranks <= 1 else f"{subject.rank} of {subject.ranks} ranks"
    start = f" start {subject.start}" if subject.start > 1 else ""
    model = subject.model.rstrip("/").rpartition("/")[2] if subject.model else "model not in the log"
    return clean(f"{subject.label}  {version} · {model} · {rank} · {_shown(subject.path)}{start}", 400)


def cause(comparison: Comparison) -> tuple[str, ...]:
    """The first sentences."""
    return tuple(clean(sentence, 2000) for sentence in comparison.cause)


def _shown(path: str) -> str:
    """The file's own name: the folder is the reader's."""
    return path.rstrip("/").rpartition("/")[2].encode("utf-8", "replace").decode()


def bars(comparison: Comparison) -> tuple[Bar, ...]:
    """A, every step that is not zero, the unexplained in any case, and B."""
    steps = [s for s in comparison.steps if s.bytes or s.kv_tokens or s.name == "unexplained"]
    if not steps:
        return ()
    by_tokens = all(s.kv_tokens is not None for s in steps)
    size = {id(s): (s.kv_tokens if by_tokens else s.bytes) or 0 for s in steps}
    top = max(abs(x) for x in size.values()) or 1
    capacity = comparison.capacity
    first = Bar("A", None, gib(capacity.pool_bytes.a), "", count(capacity.kv_tokens.a), "")
    last = Bar("B", None, gib(capacity.pool_bytes.b), "", count(capacity.kv_tokens.b), "")
    middle = [
        Bar(
            words.STEP_LABELS[s.name],
            size[id(s)] / top,
            n.signed_gib(s.bytes) if s.bytes else "0",
            n.tolerance(s.tolerance_bytes) if s.bytes or s.name == "unexplained" else "",
            "?" if s.kv_tokens is None else f"{s.kv_tokens:+,}" if s.kv_tokens else "0",
            "" if s.basis == "unknown" else s.basis,
        )
        for s in steps
    ]
    return (first, *middle, last)


def remarks(comparison: Comparison) -> tuple[str, ...]:
    """What is said below the waterfall: the steps' notes, what did not change, the interaction, the ledgers."""
    found = [f"{words.STEP_LABELS[s.name]}: {s.note}" for s in comparison.steps if s.note and _worth(s)]
    zero = [
        words.STEP_LABELS[s.name]
        for s in comparison.steps
        if not s.bytes and not s.kv_tokens and s.name not in {"unexplained", "not_in_the_logs"}
    ]
    if zero:
        found.append(f"no change by: {', '.join(zero)}")
    if comparison.interaction_tokens:
        found.append(
            f"{comparison.interaction_tokens:+,} tokens come from both changing at once (bytes, and tokens per byte): half stands in "
            "the steps in bytes, half in bytes per token"
        )
    # The steps' notes are our own words; only the ledgers' may quote a log.
    return (*found, *(clean(note, 1000) for note in comparison.notes))


def _worth(step: Step) -> bool:
    """Notes on steps that move nothing are left out, but for graphs: why they take nothing is a frequent question."""
    return bool(step.bytes or step.kv_tokens or step.name in {"cuda_graphs", "unexplained", "kv_bytes_per_token"})


def meanings(comparison: Comparison) -> Grid:
    """What the figures count, and the same figures in the same units."""
    a, b = comparison.meanings
    context = comparison.capacity.context
    rows = [
        ("the printed figure", clean(a.text, 400), clean(b.text, 400)),
        ("KV tokens, printed", count(a.printed_tokens), count(b.printed_tokens)),
        ("by one measure", _effective(a), _effective(b)),
        ("KV pool, GiB", _pool(a), _pool(b)),
        ("bytes per token", _each(a), _each(b)),
        ("by the model", _model(a), _model(b)),
        ("state reserved", _size(a.state_bytes_held), _size(b.state_bytes_held)),
        ("state per request", _size(a.state_bytes_per_request), _size(b.state_bytes_per_request)),
        (f"requests of {context:,}" if context else "requests that fit", _fits(a), _fits(b)),
    ]
    optional = {"by the model", "state reserved", "state per request"}
    kept = tuple(row for row in rows if row[0] not in optional or any(cell != "-" for cell in row[1:]))
    notes = tuple(f"{label}: {note}" for label, one in (("A", a), ("B", b)) for note in one.notes)
    return Grid("what the figures mean", ("", "A", "B"), kept, remarks=tuple(clean(note, 400) for note in notes))


def differences(comparison: Comparison) -> Grid:
    """What differs, and what only one side tells."""
    rows = tuple((words.setting(d.name), value(d.name, d.a), value(d.name, d.b)) for d in comparison.differences)
    same = "; ".join(f"{words.setting(s.name)} {value(s.name, s.value)}" for s in comparison.same)
    notes = [f"{words.setting(d.name)}: {d.note}" for d in comparison.differences if d.note]
    if same:
        notes.append(f"the same: {same}")
    return Grid("what differs", ("", "A", "B"), rows, remarks=tuple(clean(note, 2000) for note in notes))


def hybrid(comparison: Comparison) -> Grid | None:
    """State, the cost of a cached prefix, and the backends of each layer kind."""
    found = comparison.hybrid
    if found is None:
        return None
    a, b = found.states
    rows = [
        ("state per slot", _size(a.bytes_per_slot), _size(b.bytes_per_slot)),
        ("slots per request", count(a.slots_per_request, "-"), count(b.slots_per_request, "-")),
        ("state per request", _size(a.bytes_per_request), _size(b.bytes_per_request)),
        ("state cache mode", clean(a.mode or "-"), clean(b.mode or "-")),
        ("a cached prefix", _checkpoint(a.bytes_per_checkpoint), _checkpoint(b.bytes_per_checkpoint)),
        *(
            (f"{row.layer}, {row.phase}", _backend(row.a, row.a_raw), _backend(row.b, row.b_raw))
            for row in found.backends
        ),
    ]
    notes = (f"A: {a.text}", f"B: {b.text}")
    kept = tuple(row for row in rows if any(cell != "-" for cell in row[1:]))
    return Grid("state and backends", ("", "A", "B"), kept, remarks=notes)


def sweep(found: Sweep) -> tuple[Grid, ...]:
    """Figures and settings, one column for each input; rows that differ are marked, settings that do not stand below."""
    heads = ("", *(subject.label for subject in found.columns))
    figures = [row for row in found.figures if any(row.values)]
    apart = [row for row in found.settings if row.differs or None in row.values]
    same = [f"{words.setting(r.name)} {value(r.name, r.values[0])}" for r in found.settings if r not in apart]
    remark = (clean(f"the same: {'; '.join(same)}", 2000),) if same else ()
    return (
        Grid(
            "capacity",
            heads,
            tuple((words.figure(row.name), *_cells(row)) for row in figures),
            frozenset(i for i, row in enumerate(figures) if row.differs),
        ),
        Grid(
            "settings",
            heads,
            tuple((words.setting(row.name), *_cells(row)) for row in apart),
            frozenset(i for i, row in enumerate(apart) if row.differs),
            remark,
        ),
    )


def _cells(row: Row) -> list[str]:
    return [value(row.name, item) for item in row.values]


def regressions(found: Sequence[Regression]) -> list[str]:
    """One sentence for each limit."""
    said = []
    for one in found:
        change = "" if one.change is None else _change(one)
        word = "exceeded" if one.holds else "kept" if one.note is None else "not judged"
        figures = f"{value(one.figure, one.old)} -> {value(one.figure, one.new)}"
        said.append(f"{clean(one.text)}: {word}; {figures}{change}{f' ({one.note})' if one.note else ''}")
    return said


def _change(one: Regression) -> str:
    assert one.change is not None
    if one.text.rstrip().endswith("%"):
        return f", {one.change * 100:+.1f} %"
    return f", {n.signed_gib(int(one.change))} GiB" if one.figure == "pool_bytes" else f", {one.change:+,.0f}"


# ------------------------------------------------------------------------------------------------------------- cells


def value(name: str, item: Any) -> str:
    """A figure or a setting as it is read."""
    if item is None:
        return NOT_TOLD
    if isinstance(item, bool):
        return "on" if item else "off"
    if isinstance(item, int):
        if name == "kv_bytes_per_token":
            return f"{item:,} B"
        return (
            f"{item / GIB:.2f} GiB"
            if name.endswith("_bytes") and item >= GIB
            else n.amount(item)
            if _is_size(name)
            else f"{item:,}"
        )
    return clean(str(item), 200)


def _is_size(name: str) -> bool:
    return name.endswith("_bytes") or name in {"state_bytes_held", "state_bytes_per_request"}


def gib(size: int | None) -> str:
    """Bytes in GiB, or a question mark."""
    return "?" if size is None else f"{size / GIB:.2f}"


def count(number: int | None, unknown: str = NOT_TOLD) -> str:
    """A count, or what stands for an unknown one."""
    return unknown if number is None else f"{number:,}"


def _effective(one: Meaning) -> str:
    if one.effective_tokens is None:
        return NOT_TOLD
    return f"{one.effective_tokens:,} ({one.measure})"


def _pool(one: Meaning) -> str:
    if one.pool_bytes is None:
        return NOT_TOLD
    spread = n.tolerance(one.pool_tolerance_bytes or 0)
    return f"{one.pool_bytes / GIB:.2f} {spread}".rstrip()


def _each(one: Meaning) -> str:
    if one.kv_bytes_per_token is None:
        return NOT_TOLD
    return per_token(one.kv_bytes_per_token, one.kv_bytes_per_token_tolerance)


def _model(one: Meaning) -> str:
    return "-" if one.model_bytes_per_token is None else f"{one.model_bytes_per_token:,} B"


def _size(size: int | None) -> str:
    return "-" if size is None else n.amount(size)


def _checkpoint(size: int | None) -> str:
    return "-" if size is None else "keeps nothing" if size == 0 else f"keeps {n.amount(size)}"


def _fits(one: Meaning) -> str:
    fits = one.fits
    if fits.requests is None:
        return fits.note or NOT_TOLD
    by = f" (by the {fits.bound_by})" if fits.bound_by else ""
    note = f"; {fits.note}" if fits.note else ""
    return f"{fits.requests:,}{by}{note}"


def _backend(name: str | None, raw: str | None) -> str:
    if name is None:
        return NOT_TOLD
    return clean(f"{name} ({raw})" if raw else name, 120)
