"""The worst of a fleet: what its rows sum up to, by group, and the ranks that leave the most unused."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from memledger.fleet.columns import Row

GROUPS: Final = ("model", "framework_version", "gpu")
"""What the table is grouped by, unless told."""
_ENGINES: Final = {"sglang": "SGLang", "vllm": "vLLM"}
MEASURES: Final = ("idle_state_bytes", "kv_never_used_bytes", "unexplained_bytes")


class Figures(msgspec.Struct, frozen=True):
    """Sums over ranks of the latest starts (bytes), and counts. `*_known`: ranks whose figure is in the log; the others add nothing.

    `oom_kinds`: incidents of each kind, over all starts.
    """

    logs: int = 0
    ranks: int = 0
    idle_state_bytes: int = 0
    idle_state_known: int = 0
    kv_never_used_bytes: int = 0
    kv_never_used_known: int = 0
    unexplained_bytes: int = 0
    unexplained_known: int = 0
    over_counted_ranks: int = 0
    oom_kinds: dict[str, int] = {}

    @property
    def worth(self) -> int:
        """What groups are ordered by: all bytes that no workload had."""
        return self.idle_state_bytes + self.kv_never_used_bytes + self.unexplained_bytes


class Group(msgspec.Struct, frozen=True):
    """Ranks that have these values in common; `values` is in the order of `Summary.group_by`, null: not in the log."""

    values: tuple[str | None, ...]
    figures: Figures


class WorstRank(msgspec.Struct, frozen=True):
    """One rank with its figures (null: not in the log)."""

    file: str
    start: int
    rank: str
    model: str | None
    idle_state_bytes: int | None
    kv_never_used_bytes: int | None
    unexplained_bytes: int | None


class Unread(msgspec.Struct, frozen=True):
    """One file that gave nothing."""

    file: str
    status: str
    error: str | None


class Summary(msgspec.Struct, frozen=True):
    """What a fleet comes to. `statuses`: files of each status; `groups` and `worst`: the first of all, largest first; `groups_in_all` counts all groups."""

    files: int
    starts: int
    statuses: dict[str, int]
    group_by: tuple[str, ...]
    groups: tuple[Group, ...]
    groups_in_all: int
    total: Figures
    worst: tuple[WorstRank, ...]
    unread: tuple[Unread, ...]


class _Sums:
    def __init__(self) -> None:
        self.files = 0
        self._last_file = -1
        self.ranks = 0
        self.sizes: Counter[str] = Counter()
        self.known: Counter[str] = Counter()
        self.over = 0
        self.ooms: Counter[str] = Counter()

    def add_file(self, number: int) -> None:
        """Count a file once; its rows come together."""
        if number != self._last_file:
            self._last_file = number
            self.files += 1

    def add_rank(self, row: Row) -> None:
        self.ranks += 1
        self.over += row.get("verdict") == "over_counted"
        for name in MEASURES:
            if (value := row.get(name)) is not None:
                self.sizes[name] += value
                self.known[name] += 1

    def figures(self) -> Figures:
        size, known = self.sizes, self.known
        return Figures(
            logs=self.files,
            ranks=self.ranks,
            idle_state_bytes=size["idle_state_bytes"],
            idle_state_known=known["idle_state_bytes"],
            kv_never_used_bytes=size["kv_never_used_bytes"],
            kv_never_used_known=known["kv_never_used_bytes"],
            unexplained_bytes=size["unexplained_bytes"],
            unexplained_known=known["unexplained_bytes"],
            over_counted_ranks=self.over,
            oom_kinds=dict(sorted(self.ooms.items(), key=lambda item: (-item[1], item[0]))),
        )


class Summarizer:
    """Takes the rows of one file after the other; what it keeps does not grow with the number of files, only with that of groups."""

    def __init__(self, group_by: Sequence[str] = GROUPS, top: int = 10) -> None:
        self._by = tuple(group_by)
        self._top = top
        self._groups: dict[tuple[str | None, ...], _Sums] = {}
        self._total = _Sums()
        self._statuses: Counter[str] = Counter()
        self._starts = 0
        self._files = 0
        self._worst: list[tuple[int, int, Row]] = []
        self._unread: list[Unread] = []
        self._rows = 0

    def add(self, rows: Sequence[Row]) -> None:
        """One file."""
        number = self._files
        self._files += 1
        first = rows[0]
        status = str(first.get("status"))
        self._statuses[status] += 1
        self._starts += first.get("starts") or 0
        if "starts" not in first and len(self._unread) < self._top:
            self._unread.append(Unread(str(first.get("file")), status, first.get("error")))
        seen: set[int | None] = set()
        for row in rows:
            self._rows += 1
            start = row.get("start")
            kinds = row.get("oom_kinds") or () if start not in seen else ()  # they stand on each rank of a start
            seen.add(start)
            if row.get("latest"):
                self._take_rank(row, number, kinds)
            elif kinds:
                for sums in self._of(row):
                    sums.add_file(number)
                    sums.ooms.update(kinds)

    def _take_rank(self, row: Row, number: int, kinds: Iterable[str]) -> None:
        for sums in self._of(row):
            sums.add_file(number)
            sums.ooms.update(kinds)
            if "rank" in row:
                sums.add_rank(row)
        size = sum(max(0, row.get(name) or 0) for name in MEASURES)
        if size:
            # The first of equals stays: a heap's smallest is the one of largest number.
            item = (size, -self._rows, row)
            (heapq.heappushpop if len(self._worst) >= self._top else heapq.heappush)(self._worst, item)

    def _of(self, row: Row) -> tuple[_Sums, _Sums]:
        values = tuple(group_value(row, name) for name in self._by)
        return self._groups.setdefault(values, _Sums()), self._total

    def summary(self) -> Summary:
        """All that was taken."""
        groups = [Group(values, sums.figures()) for values, sums in self._groups.items()]
        groups.sort(key=lambda g: (-g.figures.worth, -sum(g.figures.oom_kinds.values()), [v or "" for v in g.values]))
        worst = [row for _, _, row in sorted(self._worst, key=lambda item: (-item[0], -item[1]))]
        return Summary(
            self._files,
            self._starts,
            dict(sorted(self._statuses.items())),
            self._by,
            tuple(groups[: self._top]),
            len(groups),
            self._total.figures(),
            tuple(map(_worst, worst)),
            tuple(self._unread),
        )


def group_value(row: Row, name: str) -> str | None:
    """A row's value for a group. A device that the log does not name goes by its kind and memory."""
    value = row.get(name)
    if value is None and name == "gpu" and row.get("gpu_total_bytes"):
        return " ".join(filter(None, (row.get("gpu_kind"), f"{row['gpu_total_bytes'] / 2**30:.0f} GiB")))
    if name == "framework_version" and row.get("framework"):
        return " ".join(filter(None, (_ENGINES.get(row["framework"]), value)))
    return str(value) if value is not None else None


def _worst(row: Row) -> WorstRank:
    return WorstRank(
        row["file"], row["start"], row.get("rank", ""), row.get("model"), *(row.get(name) for name in MEASURES)
    )
