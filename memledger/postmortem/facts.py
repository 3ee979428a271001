"""What inputs say about a failure, line by line: recognised symptoms with their figures, before anybody asks for a cause.

A `Symptom` is one recognised line (or one line printed several times by the processes of a server). `SymptomLog` takes
the events of a reading in order and keeps a bounded number of them, so that a log of any length can be fed. The figures
have the names of the JSON contract (`Symptom.numbers`); `Symptom.amounts` has the same sizes with their tolerance.

`read_symptoms` reads inputs once for both: the ledger of every start (`memledger.pipeline.read`) and the symptoms, those
of inputs without a line of an engine included (a kernel log, `kubectl describe pod`, an `nvidia-smi` table).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from memledger.events import Event
from memledger.frameworks.torch_oom import OWN_PROCESS_NOTE, deviation, own_process, seconds_between
from memledger.grammar import RuleSet
from memledger.postmortem.symptom import KINDS, Frame, Role, Symptom, Symptoms
from memledger.postmortem.wordings import (
    COUNT_NAMES,
    FRAME_RULES,
    SIZE_NAMES,
    SIZE_NAMES_OF_RULE,
    SMI_MEMORY,
    SMI_NAME,
    SMI_PROCESS,
    STARTS,
    SUMMARY_ROWS,
    UNITS,
    WORDS,
    exit_code,
    frame_of,
    kind_of,
    time_of,
)
from memledger.sanitize import clean
from memledger.units import KIB, MIB, Amount

if TYPE_CHECKING:
    from memledger.pipeline import Reading

__all__ = ["KINDS", "Frame", "Role", "Symptom", "SymptomLog", "Symptoms", "read_symptoms"]

MOST_FIRST: Final = 100
MOST_LAST: Final = 100
"""Symptoms of one kind that are kept: the first and the last so many."""
MOST_TASKS: Final = 16
"""Rows of one task table of the kernel that are kept: the largest."""
MOST_FRAMES: Final = 80
MOST_PROCESSES: Final = 256
MOST_EVIDENCE: Final = 4
MERGE_LINES: Final = 3000
MERGE_SECONDS: Final = 300.0
MOST_CANDIDATES: Final = 64
"""The same figures within so many lines, seconds and symptoms are one incident printed again."""
NEAR_LINES: Final = 200
"""A traceback this many lines after its exception, or an exception after the head of its record, belongs to it."""
SUMMARY_LINES: Final = 40
"""A row of `torch.cuda.memory_summary()` so far behind the one before is another summary's."""


_OF_ONE_RULE: Final = frozenset({"startup_check", "engine_refusal", "engine_runtime"})
"""Kinds of which each rule is a failure of its own."""

_OF_ONE_CONTAINER: Final = frozenset({"container_exit", "container_time", "container_id"})
"""Kinds whose every line is of a container of its own, or of another of its lives."""


class _Draft:
    """A symptom in the making."""

    def __init__(self, event: Event, kind: str, phase: str | None, order: int, era: int) -> None:
        self.event = event
        self.kind = kind
        self.role = KINDS[kind]
        self.phase = phase
        self.order = order
        self.era = era
        self.last_line = event.line
        self.time = time_of(event)
        self.prefix = event.prefix
        self.amounts: dict[str, Amount] = {}
        self.counts: dict[str, int | float] = {}
        self.words: dict[str, str] = {}
        self.not_available: list[str] = []
        self.others: list[dict[str, int | None]] = []
        self.frames: tuple[Frame, ...] = ()
        self.notes: list[str] = []
        self.evidence = [event.evidence]
        self.repeats = 0
        self._read(event)

    def _read(self, event: Event) -> None:
        own_names = SIZE_NAMES_OF_RULE.get(f"{event.rule.framework}.{event.id}", {})
        for field, value in event.fields.items():
            if isinstance(value, Amount):
                self.amounts[f"{own_names.get(field, SIZE_NAMES.get(field, field))}_bytes"] = value
            elif isinstance(value, (bool, tuple)):
                continue
            elif isinstance(value, (int, float)):
                self.counts[COUNT_NAMES.get(field, field)] = value
            elif isinstance(value, str):
                if field in WORDS and value.strip():
                    self.words[field] = clean(value.strip(), 300)
            else:
                self.not_available.append(f"{own_names.get(field, SIZE_NAMES.get(field, field))}_bytes")
        if (code := exit_code(event)) is not None:
            self.counts["exit_code"] = code
        self.others = _other_processes(event)
        if (mine := own_process(event)) is not None:
            own = self.others.pop(mine)
            sizes = event.fields["other"]
            if isinstance(sizes, tuple) and isinstance(sizes[mine], Amount):
                self.amounts["process_bytes"] = sizes[mine]
            if own["pid"] is not None:
                self.counts["process_pid"] = own["pid"]
            self.notes.append(f"this process is {OWN_PROCESS_NOTE}")
        if self.kind == "mps_limit":
            written = event.word("hex")
            self.amounts = {"limit_bytes": Amount(int(written, 16))} if written else _exact(self.amounts)
        if self.kind == "memory_limit":
            # A quantity of Kubernetes is exact, however few digits it has.
            self.amounts = _exact(self.amounts)
        if self.kind == "unreliable" and (why := deviation(event.message)) is not None:
            self.notes.append(why)

    def agrees(self, other: _Draft) -> bool:
        """Whether the two say the same thing of the same process, as far as both say anything."""
        if not self._same_kind(other) or self.era != other.era or self.event.input != other.event.input:
            return False
        if abs(other.event.line - self.last_line) > MERGE_LINES:
            return False
        seconds = seconds_between(self.time, other.time)
        if seconds is not None and abs(seconds) > MERGE_SECONDS:
            return False
        mine, its = self.prefix, other.prefix
        if any(
            a is not None and b is not None and a != b for a, b in ((mine.source, its.source), (mine.host, its.host))
        ):
            return False
        if not self._same_figures(other):
            return False
        # Each process quotes what its child said: worker, executor, engine core, API server. Two ranks are two.
        return not (mine.ranks and its.ranks and any(its.ranks.get(k, v) != v for k, v in mine.ranks.items()))

    def _same_kind(self, other: _Draft) -> bool:
        if self.kind == other.kind:
            if self.kind in _OF_ONE_CONTAINER:
                return False
            return self.kind not in _OF_ONE_RULE or self.event.rule.full_id == other.event.rule.full_id
        # The head of a message on a line of its own, and the brackets that give it away on the next.
        retold = {self.kind, other.kind} == {"torch_oom", "unreliable"}
        return retold and not self.amounts and 0 <= other.event.line - self.last_line <= 1

    def _same_figures(self, other: _Draft) -> bool:
        for name, amount in other.amounts.items():
            if name in self.amounts and self.amounts[name].bytes != amount.bytes:
                return False
        for name, value in other.counts.items():
            if self.counts.get(name, value) != value:
                return False
        for name in ("name", "library", "type", "text", "what"):
            if self.words.get(name, None) != other.words.get(name, None) and name in self.words and name in other.words:
                return False
        if self.frames and other.frames and not self.amounts and not other.amounts and self.frames != other.frames:
            # Without figures only the tracebacks tell two failures apart.
            return False
        return self.kind != "exit_code" or self.event.message == other.event.message

    def merge(self, other: _Draft) -> None:
        """Take over what `other` says more."""
        self.repeats += 1
        if other.kind == "unreliable":
            self.kind, self.role = other.kind, other.role
        self.last_line = other.event.line
        if len(self.evidence) < MOST_EVIDENCE and other.event.evidence.text != self.evidence[-1].text:
            # Of the kernel's two lines on one kill the one with the sizes says it to a reader.
            ahead = self.event.id == "oom_kill" and other.event.id == "killed_process"
            self.evidence.insert(0 if ahead else len(self.evidence), other.event.evidence)
        if len(other.amounts) > len(self.amounts):
            self.event, self.others = other.event, other.others or self.others
            self.notes = self.notes + [note for note in other.notes if note not in self.notes]
            self.not_available = list(dict.fromkeys([*self.not_available, *other.not_available]))
        self.amounts = {**other.amounts, **self.amounts}
        self.counts = {**other.counts, **self.counts}
        self.words = {**other.words, **self.words}
        self.phase = self.phase or other.phase
        self.time = self.time or other.time
        if not self.prefix.ranks and other.prefix.ranks:
            self.prefix = other.prefix
        if not self.frames:
            self.frames = other.frames

    def build(self) -> Symptom:
        return Symptom(
            self.kind,
            self.role,
            self.event.rule.full_id,
            self.prefix,
            self.event.input,
            self.evidence[0].line,
            clean(self.event.message, 4000),
            self.time,
            self.amounts,
            self.counts,
            self.words,
            tuple(self.not_available),
            tuple(self.others),
            self.frames,
            self.phase,
            tuple(self.notes),
            tuple(self.evidence),
            self.repeats,
        )


def _exact(amounts: dict[str, Amount]) -> dict[str, Amount]:
    """Sizes that were set and not measured: however few digits they have."""
    return {name: Amount(amount.bytes) for name, amount in amounts.items()}


def _other_processes(event: Event) -> list[dict[str, int | None]]:
    pids, sizes = event.fields.get("other_pid"), event.fields.get("other")
    if not isinstance(pids, tuple) or not isinstance(sizes, tuple):
        return []
    return [
        {"pid": pid if isinstance(pid, int) else None, "bytes": size.bytes if isinstance(size, Amount) else None}
        for pid, size in zip(pids, sizes, strict=False)
    ]


class _Kept:
    """The first and the last symptoms of one kind; those between them are counted."""

    def __init__(self) -> None:
        self.first: list[_Draft] = []
        self.last: deque[_Draft] = deque()

    def add(self, draft: _Draft, left_out: dict[str, int]) -> None:
        if len(self.first) < MOST_FIRST:
            self.first.append(draft)
            return
        self.last.append(draft)
        if len(self.last) > MOST_LAST:
            gone = self.last.popleft()
            left_out[gone.kind] = left_out.get(gone.kind, 0) + 1 + gone.repeats

    def __iter__(self) -> Iterator[_Draft]:
        yield from self.first
        yield from self.last


_Process = tuple[Any, ...]


class SymptomLog:
    """Collects symptoms from events in order (all events of all inputs, one input after the other)."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._left_out: dict[str, int] = {}
        self._recent: deque[_Draft] = deque(maxlen=MOST_CANDIDATES)
        self._order = 0
        self._era = 0
        self._found_in_era = False
        self._frames: dict[_Process, list[Frame]] = {}
        self._frames_from: dict[_Process, int] = {}
        self._latest: dict[_Process, _Draft] = {}
        self._head: dict[tuple[int, str | None], Event] = {}
        self._table: list[_Draft] = []
        self._summary: _Draft | None = None
        self._card: tuple[int, str, int] | None = None
        self._input: int | None = None

    def feed(self, event: Event) -> None:
        """Take one event."""
        if event.input != self._input:
            self._end_input()
            self._input = event.input
        rule = f"{event.rule.framework}.{event.id}"
        if rule in FRAME_RULES:
            self._take_frame(event)
            return
        if rule in {"system.traceback_begin", "sglang.scheduler_exception"}:
            self._take_head(event)
        elif event.prefix.time is not None:
            self._head.pop((event.input, event.prefix.source), None)
        if rule in STARTS and self._found_in_era:
            self._era += 1
            self._found_in_era = False
        if rule == "system.smi_row":
            self._take_smi(event)
            return
        kind, phase = kind_of(event)
        if not kind:
            return
        draft = _Draft(event, kind, phase, self._order, self._era)
        self._order += 1
        if kind == "kernel_task":
            self._take_task(draft)
        elif kind == "memory_summary":
            self._take_summary(draft)
        else:
            self._take(draft)

    def symptoms(self) -> Symptoms:
        """What was found so far."""
        self._end_input()
        drafts = sorted((d for kept in self._kept.values() for d in kept), key=lambda d: d.order)
        _size_pages(drafts)
        return Symptoms(tuple(draft.build() for draft in drafts), dict(self._left_out))

    # -- one symptom

    def _take(self, draft: _Draft) -> None:
        process = _process(draft.event)
        self._own(draft)
        ends_traceback = draft.event.rule.framework != "system" and draft.kind != "allocator_retry"
        if ends_traceback:
            frames = tuple(self._frames.pop(process, ()))
            before = self._latest.get(process)
            if (
                frames
                and before is not None
                and not before.frames
                and draft.role not in {"cause", "not_memory"}
                and draft.event.line - before.last_line <= NEAR_LINES
            ):
                # The traceback printed behind the exception it belongs to, or the one of who raised it again.
                before.frames = frames
            draft.frames = frames
        if draft.role != "context":
            self._found_in_era = True
        for earlier in reversed(self._recent):
            if earlier.agrees(draft):
                earlier.merge(draft)
                if ends_traceback:
                    self._latest[process] = earlier
                return
        self._keep(draft)
        if ends_traceback:
            if len(self._latest) >= MOST_PROCESSES:
                self._latest.clear()
            self._latest[process] = draft

    def _keep(self, draft: _Draft) -> None:
        self._recent.append(draft)
        self._kept.setdefault(draft.kind, _Kept()).add(draft, self._left_out)

    def _own(self, draft: _Draft) -> None:
        """An exception without a prefix is the rank's whose record it ends."""
        head = self._head.get((draft.event.input, draft.event.prefix.source))
        prefix = draft.event.prefix
        if head is None or prefix.time or prefix.ranks or prefix.pid is not None:
            return
        if head.prefix.style == "vllm" or draft.event.id == "nccl_alloc_failed":
            # vLLM's tracebacks have the prefix on every line, the exception's too; what NCCL prints ends none.
            return
        if draft.event.line - head.line <= NEAR_LINES:
            draft.prefix = head.prefix
            draft.time = draft.time or head.prefix.time

    # -- tracebacks

    def _take_head(self, event: Event) -> None:
        process = _process(event)
        self._head[(event.input, event.prefix.source)] = event
        before = self._latest.get(process)
        frames = self._frames.pop(process, None)
        if frames and before is not None and not before.frames and event.line - before.last_line <= NEAR_LINES:
            before.frames = tuple(frames)
        if event.rule.framework == "sglang":
            # What follows has no prefix of its own.
            self._frames.pop(_bare(event), None)

    def _take_frame(self, event: Event) -> None:
        process = _process(event)
        known = self._frames.get(process)
        if known is None:
            if len(self._frames) >= MOST_PROCESSES:
                self._frames.clear()
                self._frames_from.clear()
            known = self._frames[process] = []
            self._frames_from[process] = event.line
        known.append(frame_of(event))
        if len(known) > MOST_FRAMES:
            # The outermost say least.
            del known[0]

    def _end_input(self) -> None:
        for process, frames in self._frames.items():
            before = self._latest.get(process) or self._without_frames(self._frames_from[process])
            if before is not None and not before.frames:
                before.frames = tuple(frames)
        self._flush_table()
        self._summary = self._card = None
        self._frames.clear()
        self._frames_from.clear()
        self._latest.clear()
        self._head.clear()
        self._recent.clear()

    def _without_frames(self, line: int) -> _Draft | None:
        """The last failure before a line, if without a traceback: one that an excerpt cuts off, under another prefix, is its."""
        for draft in reversed(self._recent):
            if draft.role in {"cause", "consequence"} and draft.event.line < line:
                return None if draft.frames else draft
        return None

    # -- tables

    def _take_smi(self, event: Event) -> None:
        """A row of nvidia-smi: the name of a GPU, its memory on the line after, or a process (sizes in MiB)."""
        named = SMI_NAME.search(event.text)
        if named is not None:
            self._card = (int(named["gpu"]), clean(named["name"], 60), event.line)
            return
        process = SMI_PROCESS.search(event.text)
        memory = SMI_MEMORY.search(event.text)
        if process is not None:
            draft = self._row(event, "smi_process")
            draft.counts = {"gpu_index": int(process["gpu"]), "pid": int(process["pid"])}
            draft.words["name"] = clean(process["name"], 80)
            draft.amounts["used_bytes"] = Amount(int(process["used"]) * MIB, MIB // 2)
            self._keep(draft)
        elif memory is not None:
            draft = self._row(event, "smi_device")
            if self._card is not None and 0 < event.line - self._card[2] <= 2:
                draft.counts["gpu_index"], draft.words["name"] = self._card[:2]
            for name in ("used", "total"):
                draft.amounts[f"{name}_bytes"] = Amount(int(memory[name]) * MIB, MIB // 2)
            self._keep(draft)

    def _row(self, event: Event, kind: str) -> _Draft:
        self._order += 1
        return _Draft(event, kind, None, self._order, self._era)

    def _take_summary(self, draft: _Draft) -> None:
        """The rows of one `torch.cuda.memory_summary()` are one symptom."""
        event, what = draft.event, draft.event.word("what")
        whole = self._summary
        title = event.count("gpu") is not None
        if whole is None or title or event.line - whole.last_line > SUMMARY_LINES:
            whole = self._summary = draft
            whole.amounts = {}
            self._keep(whole)
        whole.last_line = event.line
        whole.counts.update(draft.counts)
        if whole is not draft and len(whole.evidence) < MOST_EVIDENCE and what in {"Allocated", "GPU reserved"}:
            whole.evidence.append(event.evidence)
        if what is not None:
            for name, lead in (("current", ""), ("peak", "peak_")):
                sizes = [size for unit in UNITS if (size := event.amount(f"{name}_{unit}")) is not None]
                if sizes:
                    whole.amounts[f"{lead}{SUMMARY_ROWS[what]}_bytes"] = sizes[0]

    def _take_task(self, draft: _Draft) -> None:
        """Of one table (rows that follow each other) the largest rows."""
        if self._table and draft.event.line - self._table[-1].last_line > NEAR_LINES:
            self._flush_table()
        self._table.append(draft)
        if len(self._table) > 2 * MOST_TASKS:
            self._table = self._largest()

    def _largest(self) -> list[_Draft]:
        ranked = sorted(self._table, key=lambda d: -d.counts.get("rss_pages", 0))
        for draft in ranked[MOST_TASKS:]:
            self._left_out[draft.kind] = self._left_out.get(draft.kind, 0) + 1
        return sorted(ranked[:MOST_TASKS], key=lambda d: d.order)

    def _flush_table(self) -> None:
        if len(self._table) > MOST_TASKS:
            self._table = self._largest()
        for draft in self._table:
            self._kept.setdefault(draft.kind, _Kept()).add(draft, self._left_out)
        self._table = []


def _process(event: Event) -> _Process:
    """Whose line it is, as far as its prefix tells processes apart."""
    prefix = event.prefix
    return (event.input, prefix.source, prefix.host, prefix.pid, prefix.process, *sorted(prefix.ranks.items()))


def _bare(event: Event) -> _Process:
    return (event.input, event.prefix.source, event.prefix.host, None, None)


def _size_pages(drafts: list[_Draft]) -> None:
    """Sizes of the kernel's task rows, where the line of a killed process says how large its pages are.

    The table counts pages (mm/oom_kill.c, dump_task), of 4 KiB on x86 and up to 64 KiB elsewhere; the line about the
    killed process has the same resident size in kB.
    """
    pages: dict[tuple[int, int], float] = {
        (d.event.input, int(d.counts["pid"])): d.counts["rss_pages"]
        for d in drafts
        if d.kind == "kernel_task" and d.counts.get("rss_pages") and "pid" in d.counts
    }
    sizes: dict[int, set[int]] = {}
    for draft in drafts:
        if draft.kind not in {"kernel_oom", "cgroup_oom"} or "anon_rss_bytes" not in draft.amounts:
            continue
        known = pages.get((draft.event.input, int(draft.counts.get("pid", -1))))
        if known:
            parts = ("anon_rss_bytes", "file_rss_bytes", "shmem_rss_bytes")
            resident = sum(draft.amounts[part].bytes for part in parts if part in draft.amounts)
            fitting = [size for size in (4 * KIB, 16 * KIB, 64 * KIB) if 0.9 <= resident / (known * size) <= 1.1]
            sizes.setdefault(draft.event.input, set()).add(fitting[0] if len(fitting) == 1 else 0)
    for draft in drafts:
        size = sizes.get(draft.event.input, set())
        if draft.kind == "kernel_task" and len(size) == 1 and 0 not in size:
            page = next(iter(size))
            for name in ("rss", "total_vm"):
                if (count := draft.counts.get(f"{name}_pages")) is not None:
                    draft.amounts[f"{name}_bytes"] = Amount(int(count) * page)


def read_symptoms(paths: Iterable[str], rules: RuleSet | None = None, **options: Any) -> tuple[Reading, Symptoms]:
    """The report on every input (`memledger.pipeline.read`, whose options it takes) and the symptoms, in one pass."""
    from memledger import pipeline

    log = SymptomLog()
    reading = pipeline.read(paths, rules, tap=log.feed, **options)
    return reading, log.symptoms()
