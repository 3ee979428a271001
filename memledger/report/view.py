"""What every report shows, as values: a `Server` turned into a header, sentences, tables and facts.

Text, Markdown and later formats render the same view, so that they cannot disagree. Text that came from a log passes
`memledger.sanitize.clean` here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Final, Literal

import msgspec

from memledger import words as n
from memledger.cards import card_named, parse_total
from memledger.findings.live import gpu_name, process_name
from memledger.ledger import (
    ACCOUNTS,
    CLOSED_SHARE,
    Capacity,
    Entry,
    Evidence,
    Finding,
    Live,
    LiveGpu,
    LiveProcess,
    LiveRow,
    Rank,
    Report,
    Server,
    Stage,
    account_total,
)
from memledger.sanitize import clean
from memledger.units import GIB, Amount, total

ACCOUNT_LABELS: Final = {
    "in_use_at_start": "in use at start",
    "cuda_context": "CUDA context",
    "other_processes": "other processes",
    "driver_reserved": "driver",
    "weights": "weights",
    "weights_and_non_torch": "weights+non-torch",
    "kv_cache": "KV cache",
    "recurrent_state": "recurrent state",
    "cuda_graphs": "CUDA graphs",
    "activations": "activations",
    "non_torch": "non-torch",
    "workspace": "workspace",
    "communication": "communication",
    "request_tables": "request tables",
    "allocator_slack": "allocator slack",
    "released": "given back",
    "reserve": "reserve",
    "free": "free",
}
STAGE_WORDS: Final = {
    "init": "before the weights",
    "weights": "while loading weights",
    "draft_weights": "while loading the draft",
    "pools": "while allocating the pools",
    "draft_pools": "while allocating the draft's pool",
    "warmup": "between pools and capture",
    "graphs": "in graph capture",
    "final": "after capture",
    "serving": "since the start",
}
_SNAPSHOT: Final = re.compile(r"[0-9a-f]{32,64}|snapshots")
TELLING_SHARE: Final = 0.01
"""Share of the opening from which an account is named in the first sentence."""
ALIKE_SHARE: Final = 0.01
"""Ranks are shown as one table when every row differs by no more than its tolerance or this share of the opening."""
MOST_TABLES: Final = 4
LONGEST_SILENCE_SECONDS: Final = 3600
"""On average between two lines of a log that is one piece: servers print something for every health check or scrape."""
_STATE_WORDS: Final = {"starting": "starting", "serving": "serving", "failed": "failed", "stopped": "stopped"}
_FRAMEWORKS: Final = {"sglang": "SGLang", "vllm": "vLLM"}
_SUBJECTS: Final = {
    "in_use_at_start": ("memory in use before the start", "takes"),
    "weights": ("weights", "hold"),
    "kv_cache": ("the KV cache", "holds"),
    "recurrent_state": ("recurrent state", "holds"),
    "cuda_graphs": ("CUDA graphs", "hold"),
    "activations": ("activations", "take"),
    "request_tables": ("request tables", "hold"),
}
_PARTS: Final = {
    "weights/model": "model",
    "weights/draft": "draft",
    "weights/lora": "LoRA",
    "kv_cache/k": "K",
    "kv_cache/v": "V",
    "kv_cache/latent": "latent",
    "kv_cache/index": "index",
    "kv_cache/swa_k": "window K",
    "kv_cache/swa_v": "window V",
    "kv_cache/draft": "draft",
    "kv_cache/pool": "pool",
    "kv_cache/unused": "in no block",
    "recurrent_state/conv": "conv",
    "recurrent_state/ssm": "ssm",
    "recurrent_state/speculative_conv": "speculative conv",
    "recurrent_state/speculative_ssm": "speculative ssm",
    "cuda_graphs/decode": "decode",
    "cuda_graphs/prefill": "prefill",
    "cuda_graphs/draft": "draft",
}


class Row(msgspec.Struct, frozen=True):
    """One row of a table. `bytes` is None where the figure is not known; `share` is of the opening balance."""

    kind: Literal["entry", "unexplained", "free", "opening", "total"]
    account: str
    label: str
    bytes: int | None
    tolerance: int = 0
    share: float | None = None
    basis: str = ""
    lines: tuple[Evidence, ...] = ()
    note: str = ""


class Table(msgspec.Struct, frozen=True):
    """One GPU's ledger (or its host memory): the rank shown and the labels of the ranks it stands for."""

    title: str
    rows: tuple[Row, ...]
    remarks: tuple[str, ...] = ()
    host: bool = False


class Cause(msgspec.Struct, frozen=True):
    """What comes first: one or two sentences, with the finding's code where a finding says them."""

    text: str
    code: str | None = None
    severity: str = "info"


class View(msgspec.Struct, frozen=True):
    """One start of one server as it is shown."""

    index: int
    header: str
    cause: tuple[Cause, ...]
    tables: tuple[Table, ...]
    more_ranks: tuple[str, ...]
    facts: tuple[Fact, ...]
    evidence: tuple[Evidence, ...]


class Fact(msgspec.Struct, frozen=True):
    """One line below the tables: its name, what it says, and the code of the finding that says it."""

    name: str
    text: str
    code: str | None = None


class Options(msgspec.Struct, frozen=True):
    """What the reader asked to see."""

    rank: str | None = None
    all_starts: bool = False
    start: int | None = None
    evidence: bool = False
    unrecognized: bool = False
    command: str = "memledger explain"
    gpu_total: bool = False
    """Whether the card's total was given by hand: nothing more is asked for then."""
    all_findings: bool = False
    incidents: dict[int, str] = {}
    """The cause of the failure of a start, by the start's index, where its log has one (`memledger.postmortem`)."""
    oom_command: str = "memledger oom"


# ------------------------------------------------------------------------------------------------------------ choosing


def choose_servers(report: Report, options: Options) -> list[int]:
    """The indices of the servers that are shown in full: all, one start by its number, or of each server one start.

    Starts of one engine in the same inputs under the same label are one server's. Of these it is the last start if it
    failed, else the last that tells about as much as any.

    Raises:
        LookupError: there is no start of that number.
    """
    count = len(report.servers)
    live = report.live
    if live is not None and live.server is not None and options.start is None and not options.all_starts:
        return [live.server]
    if options.start is not None:
        if not 1 <= options.start <= count:
            raise LookupError(f"there is no start {options.start}: the input holds {n.plural(count, 'start')}")
        return [options.start - 1]
    if options.all_starts:
        return list(range(count))
    starts: dict[object, list[int]] = {}
    for index, server in enumerate(report.servers):
        starts.setdefault((server.framework, server.label, tuple({s.input: None for s in server.span})), []).append(
            index
        )
    return sorted(_telling_start(report, indices) for indices in starts.values())[-MOST_TABLES:]


def _telling_start(report: Report, indices: Sequence[int]) -> int:
    # A start that failed is what the reader came for when it is the last; its failure says more than its memory.
    if report.servers[indices[-1]].failures:
        return indices[-1]
    told = {
        i: max((len({top_account(e.account) for e in r.entries}) for r in report.servers[i].ranks), default=0)
        for i in indices
    }
    return max(i for i in indices if told[i] * 2 >= max(told.values()))


def choose_ranks(server: Server, label: str | None) -> list[Rank]:
    """The ranks that a label names: `TP3`, `dp1 tp0`, `pid 4242`; all where no label is given.

    Raises:
        LookupError: no rank carries the label.
    """
    if label is None:
        return list(server.ranks)
    wanted = set(label.upper().replace(",", " ").replace("PID ", "PID").split())
    found = [r for r in server.ranks if wanted <= _rank_words(r)]
    if not found:
        names = list(dict.fromkeys(rank_name(server, r) for r in server.ranks))
        known = ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")
        from memledger.nearest import nearest

        near = nearest(label, names)
        meant = f" (did you mean {near!r}?)" if near is not None else ""
        raise LookupError(f"no rank {label!r}{meant}: the log has {known or 'no ranks'}")
    return found


def rank_name(server: Server, rank: Rank) -> str:
    """The rank's label; with its process where others carry the same one (data-parallel engines that do not say which)."""
    again = rank.pid is not None and sum(r.label == rank.label for r in server.ranks) > 1
    return f"{rank.label} (pid {rank.pid})" if again else rank.label


def _rank_words(rank: Rank) -> set[str]:
    return (
        set(rank.label.upper().split())
        | {f"TP{rank.tp or 0}"}
        | ({f"PID{rank.pid}"} if rank.pid is not None else set())
    )


# ------------------------------------------------------------------------------------------------------------ the view


def build(report: Report, index: int, options: Options) -> View:
    """The view of one server.

    Raises:
        LookupError: `options.rank` names no rank.
    """
    server = report.servers[index]
    ranks = choose_ranks(server, options.rank)
    groups = fold(ranks)
    telling = [g for g in groups if any(e.account != "free" for e in worst(g).entries)] or groups
    shown = telling[:MOST_TABLES]
    rest = [g for g in groups if g not in shown]
    tables = [t for group in shown for t in rank_tables(server, group)]
    tables += live_tables(report, index)
    spoken = about(server, ranks)
    return View(
        index=index,
        header=header(report, index),
        cause=causes(spoken, several=len(server.ranks) > 1),
        tables=tuple(tables),
        more_ranks=tuple(_one_line(group) for group in rest),
        facts=(*_facts(spoken, report, options, live=_is_about(report, index)), *_incident(index, options)),
        evidence=tuple(_evidence(spoken)) if options.evidence else (),
    )


def about(server: Server, ranks: Sequence[Rank]) -> Server:
    """The server as far as the shown ranks go: a finding that speaks of another rank says what it says of these."""
    if len(ranks) == len(server.ranks):
        return server
    from memledger.findings import find

    narrowed = msgspec.structs.replace(server, ranks=tuple(ranks), findings=())
    mine = {r.label for r in ranks}
    others = sorted({r.label for r in server.ranks} - mine, key=len, reverse=True)
    named = re.compile(rf"\b(?:{'|'.join(map(re.escape, others))})\b") if others else None
    again = {f.code: f for f in find(narrowed)} if named is not None else {}
    kept = [again.get(f.code) if named is not None and named.search(f.text) else f for f in server.findings]
    return msgspec.structs.replace(narrowed, findings=tuple(f for f in kept if f is not None))


def header(report: Report, index: int) -> str:
    """`SGLang 0.5.18 · Qwen3.8-27B-FP8 · 1 GPU · serving · 2026-09-09 11:57:18, 6 h of log, 1 start`."""
    server = report.servers[index]
    name = _FRAMEWORKS[server.framework] + (
        f" {clean(server.framework_version, 40)}" if server.framework_version else ""
    )
    parts = [name, model_name(server.model) or "model not in the log", devices(server)]
    if server.label:
        parts.append(clean(server.label, 60))
    parts.append(_STATE_WORDS.get(server.state, "state not in the log"))
    if server.started_at is not None:
        parts.append(clean(server.started_at, 40).replace("T", " ").removeprefix("--"))
    if report.live is not None and report.live.server == index and report.live.pid is not None:
        parts.append(f"pid {report.live.pid}")
    tail = []
    if (span := log_length(server)) is not None:
        tail.append(f"{span} of log")
    count = len(report.servers)
    if server.span:
        tail.append(n.plural(count, "start") if count == 1 else f"start {index + 1} of {count}")
    elif report.live is not None:
        tail.append("no log")
    return ", ".join([" · ".join(parts), *tail])


def log_length(server: Server) -> str | None:
    """How long the log is, in words; None where its lines can't be one piece (excerpts of different days pasted together)."""
    length = n.seconds_between(server.started_at, server.ended_at)
    lines = sum(span.last_line - span.first_line + 1 for span in server.span)
    if length is None or not 1 <= length <= lines * LONGEST_SILENCE_SECONDS:
        return None
    return n.duration(length)


def model_name(path: str | None) -> str | None:
    """The last telling part of a model's path: `models--org--Name/snapshots/ab12` is `Name`."""
    if not path:
        return None
    parts = [p for p in PurePosixPath(clean(path, 200).rstrip("/")).parts if p != "/"]
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.split("--")[-1]
    named = [p for p in parts if not _SNAPSHOT.fullmatch(p)]
    if not named:
        return parts[-1] if parts else None
    return "/".join(parts[-2:]) if parts[-1].isdigit() and len(parts) > 1 else named[-1]


def devices(server: Server) -> str:
    """How many devices, from the configured sizes, and how many of their ranks the log shows."""
    ranks = server.ranks
    kinds = {r.gpu.kind for r in ranks}
    word = {"cpu": "CPU worker", "npu": "NPU", "xpu": "XPU"}.get(
        str(next(iter(kinds))) if len(kinds) == 1 else "", "GPU"
    )
    names = {r.gpu.name for r in ranks if r.gpu.name}
    sizes = {k: v for k in ("tp", "pp", "dp", "ep") if isinstance(v := server.config.get(f"{k}_size"), int) and v > 1}
    if not ranks:
        return " ".join(f"{k.upper()}{v}" for k, v in sizes.items()) or "no rank in the log"
    least = sizes.get("tp", 1) * sizes.get("pp", 1)
    text = f"{len(ranks)} of at least {least} {word}s" if len(ranks) < least else n.plural(len(ranks), word)
    if len(names) == 1:
        text += f" ({clean(names.pop(), 60)})"
    if sizes:
        text = " ".join(f"{k.upper()}{v}" for k, v in sizes.items()) + ", " + text
    return text + (" in this log" if len(ranks) < least else "")


def causes(server: Server, *, several: bool | None = None) -> tuple[Cause, ...]:
    """The sentences that come first: the finding that matters most, else where the memory went; and at most one more.

    `several`: whether the log holds more ranks than one (not only those that are shown).
    """
    chief = chief_finding(server)
    if chief is not None:
        second = _second_finding(server, chief)
        return tuple(Cause(f.text, f.code, f.severity) for f in (chief, second) if f is not None)
    balance = next((f for f in server.findings if f.code in _BALANCE_CODES), None)
    text = plain_sentence(server, several=several)
    if server.state == "failed":
        why = "" if server.failures else "; no line says that memory was the reason"
        text = f"The server failed{why}. {text}"
    first = Cause(text) if balance is None else Cause(text, balance.code, balance.severity)
    state = next((f for f in server.findings if f.code in _STATE_CODES and f.severity != "info"), None)
    return (first,) if state is None else (first, Cause(state.text, state.code, state.severity))


def _second_finding(server: Server, chief: Finding) -> Finding | None:
    """What stands beside the chief finding: of a failure what explains it, else the next warning."""
    rest = [f for f in server.findings if f is not chief and f.code not in _BALANCE_CODES and f.severity != "info"]
    if chief.code == "ML201":
        rest = [f for f in rest if f.code in _EXPLAINING_CODES]
    else:
        rest = [f for f in rest if SEVERITIES.index(f.severity) >= SEVERITIES.index("warning")]
    return max(rest, key=lambda f: (SEVERITIES.index(f.severity), abs(f.bytes)), default=None)


SEVERITIES: Final = ("info", "note", "warning", "error")
_BALANCE_CODES: Final = ("ML301", "ML302")
"""Findings that the plain sentence and the table say already: where the memory went matters more than the rest of it."""
_STATE_CODES: Final = ("ML101", "ML102", "ML103", "ML104", "ML105")
"""What a hybrid's operator asks first: whether its reserved state is needed."""
_EXPLAINING_CODES: Final = frozenset({"ML202", "ML203", "ML204", "ML205", "ML402", "ML403", "ML601"})
"""Findings that say why a failure happened."""


def chief_finding(server: Server) -> Finding | None:
    """The finding to begin with: the most severe, then the largest. None where nothing is worse than a note."""
    ranked = [f for f in server.findings if f.severity in {"warning", "error"} and f.code not in _BALANCE_CODES]
    return max(ranked, key=lambda f: (SEVERITIES.index(f.severity), abs(f.bytes)), default=None)


def opening_words(rank: Rank) -> str:
    """What the shares are of."""
    if rank.residual.base == "device":
        return "card total"
    return "free at the start"


def plain_sentence(server: Server, *, several: bool | None = None) -> str:
    """Where the memory went, for the rank with the largest residual."""
    ranks = [r for r in server.ranks if r.entries]
    if not ranks:
        if server.usage.peak_running_requests is not None or server.usage.peak_kv_usage is not None:
            return "The log holds no start-up of this server, only serving lines: what was allocated is not in it."
        return "No line gives the size of an allocation in this start."
    named = [r for r in ranks if any(e.account not in {"free", "reserve"} and e.bytes > 0 for e in r.entries)]
    rank = worst(named or ranks)
    opening = rank.residual.opening_bytes
    rows = [(a, t) for a, t in account_totals(rank) if a not in {"free", "reserve"} and t.bytes > 0]
    rows.sort(key=lambda item: -item[1].bytes)
    if not rows:
        if any(e.account.startswith("host/") for e in rank.entries):
            return _host_sentence(rank)
        return "The log gives readings of free memory but names no allocation."
    # What holds next to nothing is no answer to where the memory went.
    rows = [rows[0], *(row for row in rows[1:] if opening is None or row[1].bytes >= TELLING_SHARE * opening)]
    where = f" on {rank_name(server, rank)}" if (len(server.ranks) > 1 if several is None else several) else ""
    subject, verb = _SUBJECTS.get(rows[0][0], (ACCOUNT_LABELS[rows[0][0]], "takes"))
    held = [_held(a, t.bytes, opening) for a, t in rows[:3]]
    held[0] = held[0].replace(subject, f"{subject} {verb}", 1)
    listed = ", ".join(held[:-1]) + (" and " if len(held) > 1 else "") + held[-1]
    if opening is None:
        names = ", ".join(f"{n.gib_about(t.bytes)} of {ACCOUNT_LABELS.get(a, a)}" for a, t in rows[:3])
        return f"The log names {names}{where}; how much memory there was is not in it."
    of = "the card's" if rank.residual.base == "device" else "the"
    start = "" if rank.residual.base == "device" else " free at the start"
    # A size that the user gave is no figure of the log.
    given = next((e.detail["source"] for e in rank.entries if "source" in e.detail), None)
    source = f" ({clean(str(given), 40)})" if given is not None else ""
    return f"Of {of} {n.gib_about(opening)}{source}{start}{where}, {listed}; {_remainder(rank)}."


def _host_sentence(rank: Rank) -> str:
    sums: dict[str, int] = {}
    for entry in rank.entries:
        account = top_account(entry.account.removeprefix("host/"))
        sums[account] = sums.get(account, 0) + entry.bytes
    free = sums.pop("free", None)
    held = [_held(account, size, None) for account, size in sorted(sums.items(), key=lambda item: -item[1])[:3]]
    start = "The server runs on the CPU" if rank.gpu.kind == "cpu" else "The log names no GPU memory"
    text = (
        f"{start}; in host memory it keeps {', '.join(held)}" if held else f"{start}; no allocation is named in the log"
    )
    return text + (f"; {n.gib_about(free)} are free." if free is not None else ".")


def _held(account: str, size: int, opening: int | None) -> str:
    subject = _SUBJECTS.get(account, (ACCOUNT_LABELS.get(account, account.replace("_", " ")), ""))[0]
    return f"{subject} {n.gib_about(size)}" + (f" ({n.percent(size / opening)})" if opening else "")


def _remainder(rank: Rank) -> str:
    parts = []
    free = account_total(rank.entries, "free")
    if free is not None:
        parts.append(f"{n.gib_about(free.bytes)} are free")
    if (reserve := account_total(rank.entries, "reserve")) is not None and reserve.bytes > 0:
        parts.append(f"{n.gib_about(reserve.bytes)} are kept free")
    residual = rank.residual
    if residual.bytes is None or residual.verdict == "open":
        parts.append("the balance is open: " + (residual.reason or "not enough is in the log"))
    elif abs(residual.bytes) < 0.005 * GIB:
        parts.append("nothing is unexplained")
    elif not beyond_tolerance(rank):
        parts.append("nothing is unexplained within the tolerance")
    elif residual.bytes > 0:
        stage = worst_stage(rank)
        where = f" (most of it {STAGE_WORDS[stage.name]})" if stage is not None and residual.verdict != "closed" else ""
        parts.append(f"{n.gib_about(residual.bytes)} {'are ' if not parts else ''}unexplained{where}")
    else:
        parts.append(f"the entries exceed what memory fell by {n.gib_about(-residual.bytes)}")
    return ", ".join(parts)


def worst(ranks: Sequence[Rank]) -> Rank:
    """The rank with the largest residual either way; judged ranks before open ones."""
    return max(ranks, key=lambda r: (r.residual.verdict != "open", abs(r.residual.bytes or 0)))


def beyond_tolerance(rank: Rank) -> bool:
    """Whether more (or less) than the rounding of the figures remains: a gap inside the tolerance is none."""
    residual = rank.residual
    return abs(residual.bytes or 0) > max(residual.tolerance_bytes or 0, 0.005 * GIB)


def worst_stage(rank: Rank) -> Stage | None:
    """The stage in which most of the residual arose (same sign as the residual)."""
    if not rank.residual.bytes:
        return None
    sign = 1 if rank.residual.bytes > 0 else -1
    stages = [s for s in rank.stages if (s.residual.bytes or 0) * sign > 0]
    return max(stages, key=lambda s: abs(s.residual.bytes or 0), default=None)


# ------------------------------------------------------------------------------------------------------------- folding


def top_account(account: str) -> str:
    """`kv_cache/k` belongs to `kv_cache`."""
    return account.partition("/")[0]


def account_totals(rank: Rank) -> list[tuple[str, Amount]]:
    """The sum per top account of the device ledger, in the order of a report."""
    sums: dict[str, list[Amount]] = {}
    for entry in rank.entries:
        if not entry.account.startswith("host/"):
            sums.setdefault(top_account(entry.account), []).append(entry.amount)
    order = {name: i for i, name in enumerate(dict.fromkeys(top_account(a) for a in ACCOUNTS))}
    return sorted(((a, total(amounts)) for a, amounts in sums.items()), key=lambda item: order.get(item[0], len(order)))


def fold(ranks: Sequence[Rank]) -> list[list[Rank]]:
    """Groups of ranks whose rows agree, in order of the first rank of each."""
    groups: list[list[Rank]] = []
    for rank in ranks:
        for group in groups:
            if alike(group[0], rank):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups


def alike(one: Rank, other: Rank) -> bool:
    """Whether two ranks can share a table: same accounts, every row equal within its tolerance or 1 % of the opening."""
    first, second = dict(account_totals(one)), dict(account_totals(other))
    if first.keys() != second.keys() or one.residual.base != other.residual.base or one.gpu.kind != other.gpu.kind:
        return False
    share = ALIKE_SHARE * max(one.residual.opening_bytes or 0, other.residual.opening_bytes or 0)
    host_one, host_other = (account_total(r.entries, "host") for r in (one, other))
    if (host_one is None) != (host_other is None):
        return False
    return all(
        abs(first[a].bytes - second[a].bytes) <= max(share, first[a].tolerance + second[a].tolerance) for a in first
    )


def _title(server: Server, group: Sequence[Rank]) -> tuple[str, tuple[str, ...]]:
    """The table's title, and how far the ranks it stands for differ."""
    rank = worst(group)
    if len(group) == 1:
        return rank_title(server, rank), ()
    labels = label_range(group)
    spread_account, spread = "", 0
    totals = [dict(account_totals(r)) for r in group]
    for account in totals[0]:
        figures = [t[account].bytes for t in totals]
        if max(figures) - min(figures) > spread:
            spread_account, spread = account, max(figures) - min(figures)
    residuals = [r.residual.bytes for r in group if r.residual.bytes is not None]
    remarks = []
    if spread >= 0.005 * GIB:
        remarks.append(
            f"the {len(group)} ranks differ by at most {n.gib_about(spread)} ({ACCOUNT_LABELS[spread_account]})"
        )
    else:
        remarks.append(f"the {len(group)} ranks are alike")
    any_beyond = any(map(beyond_tolerance, group))
    if any_beyond and max(residuals) - min(residuals) >= 0.005 * GIB:
        what = "beyond their entries" if is_live(rank) else "unexplained"
        remarks.append(f"{what} {n.signed_gib(min(residuals))} to {n.signed_gib(max(residuals))} GiB")
    which = "worst" if any_beyond else "shown"
    return f"{labels}, {which} {rank_name(server, rank)}", (", ".join(remarks),)


def rank_title(server: Server, rank: Rank) -> str:
    """`GPU 0` where there is one rank, else its label; a CPU worker is one."""
    if len(server.ranks) > 1:
        host = f" on {clean(rank.host, 60)}" if rank.host else ""
        card = f" on GPU {rank.gpu.index}" if is_live(rank) and rank.gpu.index is not None else ""
        return rank_name(server, rank) + card + host
    if rank.gpu.kind == "cpu":
        return "CPU"
    if rank.gpu.index is None and any((rank.dp, rank.pp, rank.tp)):
        # One rank of several: which GPU it has is not told.
        return rank.label
    word = {"npu": "NPU", "xpu": "XPU"}.get(rank.gpu.kind or "", "GPU")
    return f"{word} {rank.gpu.index if rank.gpu.index is not None else 0}"


def label_range(group: Sequence[Rank]) -> str:
    """`TP0-TP7`, `PP0 TP0-TP1, PP1 TP0-TP1`, `DP0 TP0 ... DP7 TP7 (8 ranks)`: the ranks of a table in few words."""
    labels = [r.label for r in group]
    if len(group) > 1 and len(set(labels)) == 1:
        pids = [r.pid for r in group if r.pid is not None]
        which = f", pid {pids[0]} ... {pids[-1]}" if len(pids) > 1 else ""
        return f"{labels[0]} ({len(group)} ranks{which})"
    keys = [(r.dp, r.pp, r.tp) for r in group]
    if len(set(keys)) == len(keys) and all(r.tp is not None for r in group):
        # The expert rank adds nothing where the others tell the ranks apart.
        runs: dict[tuple[int | None, int | None], list[int]] = {}
        for dp, pp, tp in keys:
            runs.setdefault((dp, pp), []).append(tp or 0)
        named = [
            " ".join(
                [
                    *(f"{word}{at}" for word, at in (("DP", dp), ("PP", pp)) if at is not None),
                    number_ranges("TP", sorted(tps)),
                ]
            )
            for (dp, pp), tps in runs.items()
        ]
        if len(named) <= MOST_TABLES:
            return ", ".join(named)
    if len(labels) <= MOST_TABLES:
        return ", ".join(labels)
    return f"{labels[0]} ... {labels[-1]} ({len(labels)} ranks)"


def number_ranges(prefix: str, values: Sequence[int]) -> str:
    """`TP0-TP3, TP5` from 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    words = []
    for run in runs:
        words.append(f"{prefix}{run[0]}" if len(run) == 1 else f"{prefix}{run[0]}-{prefix}{run[-1]}")
    return ", ".join(words)


def _one_line(group: Sequence[Rank]) -> str:
    rank = worst(group)
    rows = [f"{ACCOUNT_LABELS[a]} {n.gib(t.bytes)}" for a, t in account_totals(rank)]
    if rank.residual.bytes is not None:
        rows.append(f"unexplained {n.signed_gib(rank.residual.bytes)}")
    if not rows:
        return f"{label_range(group)}: no figure in the log"
    return f"{label_range(group)}: {', '.join(rows)} GiB"


# -------------------------------------------------------------------------------------------------------------- tables


def rank_tables(server: Server, group: Sequence[Rank]) -> list[Table]:
    """The ledger of ranks that are alike (by the worst of them), and its host memory."""
    rank = worst(group)
    title, remarks = _title(server, group)
    tables = []
    device = [e for e in rank.entries if not e.account.startswith("host/")]
    if device:
        candidates = (candidate_words(rank),) if rank.residual.verdict == "unexplained" and not is_live(rank) else ()
        tables.append(Table(title, tuple(_device_rows(rank, device)), (*remarks, *(c for c in candidates if c))))
    host = [e for e in rank.entries if e.account.startswith("host/")]
    if host:
        tables.append(Table(f"host memory, {title}", tuple(_host_rows(host)), () if device else remarks, host=True))
    return tables


def _device_rows(rank: Rank, entries: Sequence[Entry]) -> list[Row]:
    opening = rank.residual.opening_bytes
    rows = []
    free_row: Row | None = None
    for account, amount in account_totals(rank):
        under = [e for e in entries if top_account(e.account) == account]
        row = Row(
            "free" if account == "free" else "entry",
            account,
            ACCOUNT_LABELS.get(account, account.replace("_", " ")),
            amount.bytes,
            amount.tolerance,
            amount.bytes / opening if opening else None,
            _basis(under),
            _lines(under),
            account_note(account, under, rank.capacity),
        )
        if account == "free":
            free_row = row
        else:
            rows.append(row)
    rows += rest_rows(rank)
    if free_row is not None:
        rows.append(free_row)
    if opening is not None:
        rows.append(
            Row(
                "opening",
                "opening",
                opening_words(rank),
                opening,
                0,
                1.0,
                "",
                rank.residual.evidence,
                verdict_words(rank),
            )
        )
    else:
        known = total([e.amount for e in entries])
        rows.append(
            Row("total", "total", "sum of the above", known.bytes, known.tolerance, None, "", (), verdict_words(rank))
        )
    return rows


def rest_rows(rank: Rank) -> list[Row]:
    """What the entries of a rank leave of its balance, by the names that it has there; none without a balance."""
    residual = rank.residual
    opening = residual.opening_bytes
    if residual.bytes is None:
        return []
    if residual.since_start_bytes is not None:
        return _live_rest(rank)
    share = residual.bytes / opening if opening else None
    if residual.verdict == "open":
        label = "rest"
    else:
        label = "over-counted" if residual.bytes < -(residual.tolerance_bytes or 0) else "unexplained"
    return [
        Row(
            "unexplained",
            "unexplained",
            label,
            residual.bytes,
            residual.tolerance_bytes or 0,
            share,
            "",
            (),
            _residual_note(rank),
        )
    ]


def _live_rest(rank: Rank) -> list[Row]:
    """What is left of a live ledger: what the rank's process holds beyond its entries, and what no process holds."""
    residual = rank.residual
    opening = residual.opening_bytes
    grown = residual.since_start_bytes or 0
    nobody = (residual.bytes or 0) - grown
    rows = []
    for account, label, size, tolerance, note in (
        (
            "since_start",
            "since the start",
            grown,
            residual.tolerance_bytes or 0,
            "allocator, and what was loaded since",
        ),
        ("unattributed", "unattributed", nobody, 0, ""),
    ):
        share = size / opening if opening else None
        rows.append(Row("unexplained", account, label, size, tolerance, share, "", (), note))
    return rows


def is_live(rank: Rank) -> bool:
    """Whether the rank's ledger is one of now: its free memory was read from the device."""
    return any(e.account == "free" and e.basis == "live" for e in rank.entries)


def verdict_words(rank: Rank) -> str:
    """The verdict with what it means."""
    residual = rank.residual
    since = residual.since_start_bytes
    if since is not None and residual.verdict in {"unexplained", "over_counted"} and residual.opening_bytes:
        rest = abs((residual.bytes or 0) - since)
        if rest <= CLOSED_SHARE * residual.opening_bytes:
            return "closes but for what changed since the start"
    wider = " (unified memory)" if rank.gpu.unified_memory and residual.verdict == "closed" else ""
    words = {
        "closed": f"closed: within {'3 %' if rank.gpu.unified_memory else '1 %'}{wider}",
        "unexplained": "does not close",
        "over_counted": "does not close",
        "open": f"open: {residual.reason or 'not enough readings in the log'}",
    }
    return words[residual.verdict]


def _residual_note(rank: Rank) -> str:
    stage = worst_stage(rank)
    residual = rank.residual
    if residual.verdict == "open":
        if is_live(rank):
            return "held by what is not known" if (residual.bytes or 0) > (residual.tolerance_bytes or 0) else ""
        return (
            "free, or held by what the log does not name"
            if (residual.bytes or 0) > (residual.tolerance_bytes or 0)
            else ""
        )
    if stage is None or residual.bytes is None or abs(residual.bytes) <= (residual.tolerance_bytes or 0):
        return ""
    return f"{n.signed_gib(stage.residual.bytes or 0)} {STAGE_WORDS[stage.name]}"


def candidate_words(rank: Rank) -> str:
    """What may have moved memory in the stage where most of the residual arose; empty where nothing is to explain."""
    stage = worst_stage(rank)
    residual = rank.residual
    if stage is None or not stage.candidates or (residual.bytes or 0) <= (residual.tolerance_bytes or 0):
        return ""
    return f"no line names what was taken {STAGE_WORDS[stage.name]}; candidates: {', '.join(stage.candidates)}"


def _host_rows(entries: Sequence[Entry]) -> list[Row]:
    """One row per host account; a CPU build has the whole tree there, folded like a GPU's."""
    whole = total([e.amount for e in entries])
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(top_account(entry.account.removeprefix("host/")), []).append(entry)
    rows = []
    for account in sorted(groups, key=lambda a: a == "free"):
        under = groups[account]
        amount = total([e.amount for e in under])
        share = amount.bytes / whole.bytes if whole.bytes else None
        inner = [msgspec.structs.replace(e, account=e.account.removeprefix("host/")) for e in under]
        note = account_note(account, inner, Capacity())
        label = ACCOUNT_LABELS.get(account, account.replace("_", " "))
        rows.append(
            Row(
                "entry",
                f"host/{account}",
                label,
                amount.bytes,
                amount.tolerance,
                share,
                _basis(under),
                _lines(under),
                note,
            )
        )
    if len(rows) > 1:
        rows.append(Row("total", "total", "sum", whole.bytes, whole.tolerance))
    return rows


def _basis(entries: Sequence[Entry]) -> str:
    sizes: dict[str, int] = {}
    for entry in entries:
        sizes[entry.basis] = sizes.get(entry.basis, 0) + abs(entry.bytes)
    names = sorted(sizes, key=lambda b: -sizes[b])
    return names[0] + ("+" if len(names) > 1 else "") if names else ""


def _lines(entries: Sequence[Entry]) -> tuple[Evidence, ...]:
    found = {(e.input, e.line): e for entry in entries for e in entry.evidence}
    return tuple(found[key] for key in sorted(found))


# --------------------------------------------------------------------------------------------------------------- notes


def account_note(account: str, entries: Sequence[Entry], capacity: Capacity) -> str:
    """What stands behind a row: tokens and bytes per token, slots, the split of a parent, formulas of derived parts."""
    size = sum(e.bytes for e in entries)
    parts: list[str] = []
    if account == "kv_cache":
        parts = _kv_note(entries, capacity)
    elif account == "recurrent_state":
        parts = _state_note(entries, capacity)
    elif account == "other_processes":
        return _others_note(entries)
    elif len(entries) > 1:
        parts = [split_note(entries)]
    logged = [e for e in entries if e.basis == entries[0].basis]
    parts += [f"{n.gib(e.bytes)} {e.basis}" for e in entries if e.basis != logged[0].basis and abs(e.bytes) < abs(size)]
    details = [detail_note(e.detail) for e in entries]
    parts += list(dict.fromkeys(d for d in details if d))
    return ", ".join(p for p in parts if p)


MOST_OTHERS: Final = 3


def _others_note(entries: Sequence[Entry]) -> str:
    """Who the others on the GPU are, the largest first."""
    rows = sorted(entries, key=lambda e: -e.bytes)
    named = [process_name(LiveRow(e.account, e.bytes, 0, e.basis, e.detail)) for e in rows[:MOST_OTHERS]]
    more = f" and {len(rows) - MOST_OTHERS} more" if len(rows) > MOST_OTHERS else ""
    return clean(", ".join(named) + more, 300)


# ------------------------------------------------------------------------------------------------------ the machine now


_LIVE_LABELS: Final = {
    "driver_reserved": "driver",
    "server_processes": "this server",
    "other_processes": "other processes",
    "page_cache": "page cache",
    "free": "free",
}


def _is_about(report: Report, index: int) -> bool:
    """Whether the machine's facts stand with this start: the one that is lined up, else the last."""
    live = report.live
    return live is not None and index == (live.server if live.server is not None else len(report.servers) - 1)


def live_tables(report: Report, index: int) -> list[Table]:
    """The devices as they are now, where they are not in the ranks' tables already."""
    live = report.live
    if live is None or not _is_about(report, index):
        return []
    shown = {(r.gpu.uuid, r.gpu.index) for r in report.servers[index].ranks if is_live(r)}
    rest = [g for g in live.gpus if (g.uuid, g.index) not in shown]
    return [_live_table(gpu) for gpu in rest[:MOST_TABLES]]


def _live_table(gpu: LiveGpu) -> Table:
    whole = gpu.total_bytes
    rows = []
    for account, label in _LIVE_LABELS.items():
        under = [row for row in gpu.rows if row.account == account]
        if not under:
            continue
        sizes = [row.bytes for row in under if row.bytes is not None]
        size = sum(sizes) if sizes else None
        names = [process_name(row) for row in under if "pid" in row.detail]
        note = ", ".join(names[:MOST_OTHERS]) + (
            f" and {len(names) - MOST_OTHERS} more" if len(names) > MOST_OTHERS else ""
        )
        kind: Literal["free", "entry"] = "free" if account == "free" else "entry"
        share = size / whole if size is not None and whole else None
        rows.append(Row(kind, account, label, size, 0, share, "live", (), clean(note, 300)))
    residual = gpu.residual
    if residual.bytes is not None:
        row = Row(
            "unexplained", "unattributed", "unattributed", residual.bytes, residual.tolerance_bytes or 0,
            residual.bytes / whole if whole else None,
        )  # fmt: skip
        rows.insert(len(rows) - (1 if rows and rows[-1].kind == "free" else 0), row)
    note = (
        "closed: within 1 %"
        if residual.verdict == "closed"
        else f"open: {residual.reason}"
        if residual.reason
        else "does not close"
    )
    rows.append(
        Row(
            "opening" if whole is not None else "total",
            "opening",
            "card total",
            whole,
            0,
            1.0 if whole else None,
            "",
            (),
            note,
        )
    )
    name = f" ({clean(gpu.name, 60)})" if gpu.name else ""
    return Table(f"{gpu_name(gpu)} now{name}", tuple(rows), tuple(clean(note, 300) for note in gpu.notes))


def process_words(process: LiveProcess) -> str:
    """`TP0 pid 4243 on GPU 0: 70.92 GiB = ledger 68.20 + context 0.44 +- 0.16 + 2.28 since the start`."""
    who = f"{process.label} " if process.label else ""
    role = f" ({process.role.replace('_', ' ')})" if not process.label else ""
    where = f" on GPU {process.gpu_index}" if process.gpu_index is not None else ""
    text = f"{who}pid {process.pid}{role}{where}"
    if process.zombie:
        return text + ": a zombie, it has ended"
    if process.used_bytes is None and process.gpu_index is None and not process.notes and process.resident_bytes:
        return text + f": {n.gib(process.resident_bytes)} GiB of host memory"
    if process.used_bytes is None:
        return text + ": no figure of this process" + (f" ({'; '.join(process.notes)})" if process.notes else "")
    text += f": {n.gib(process.used_bytes)} GiB"
    names = {"ledger": "ledger", "cuda_context": "context", "in_use_at_start": "before the first reading"}
    parts = [f"{names.get(r.account, r.account)} {n.gib(r.bytes or 0)}" for r in process.rows]
    if parts and process.growth_bytes is None:
        rest = process.used_bytes - sum(r.bytes or 0 for r in process.rows)
        text += f" = {' + '.join(parts)} + {n.gib(rest)} of the rest"
    elif parts and process.growth_bytes is not None:
        grown = f"{n.signed_gib(process.growth_bytes)} {n.tolerance(process.growth_tolerance_bytes or 0)}".strip()
        text += f" = {' + '.join(parts)}, {grown} since the start"
        if process.expected_bytes:
            text += f" (profiled peak {n.gib(process.expected_bytes)})"
    return text + (f" ({'; '.join(process.notes)})" if process.notes else "")


MOST_PROCESSES: Final = 8


def live_facts(report: Report, server: Server) -> list[Fact]:
    """Below the tables: whether the log is the process's, its processes, its load, and how the sample was made."""
    live = report.live
    if live is None:
        return []
    facts = []
    if (check := live.log) is not None:
        words = {"yes": "of this process", "no": "not of this process", "unknown": "perhaps of this process"}
        facts.append(Fact("log", clean(f"{words[check.verdict]}: {'; '.join(check.reasons)}", 400)))
    ranks = [p for p in live.processes if p.rank is not None or p.used_bytes or p.zombie]
    facts += [Fact("process", clean(process_words(p), 400)) for p in ranks[:MOST_PROCESSES]]
    if len(ranks) > MOST_PROCESSES:
        facts.append(Fact("process", f"{len(ranks) - MOST_PROCESSES} more (--format json)"))
    facts += [Fact("now", text) for text in _now_words(live)]
    facts += [Fact("note", clean(text, 300)) for text in live.notes]
    facts += [
        Fact(s.name, clean(f"{s.status}: {s.reason}", 300))
        for s in report.sources
        if s.name in {"nvml", "smi", "proc", "metrics"} and s.reason and s.status != "ok"
    ]
    if live.server is not None and not server.span:
        facts += [Fact("log", clean(s.reason, 400)) for s in report.sources if s.name == "log" and s.reason]
    facts.append(Fact("sampled", clean(_sampled(live), 200)))
    return facts


def _now_words(live: Live) -> list[str]:
    usage = live.usage
    if usage is None:
        return []
    parts = []
    if usage.running_requests is not None:
        parts.append(f"{n.count(usage.running_requests)} running")
    if usage.queued_requests is not None:
        parts.append(f"{n.count(usage.queued_requests)} queued")
    shares = (("KV", usage.kv_usage), ("window KV", usage.swa_usage), ("state slots", usage.state_usage))
    parts += [f"{name} {n.percent(value)}" for name, value in shares if value is not None]
    return [", ".join(parts)] if parts else []


def _sampled(live: Live) -> str:
    parts = [live.taken_at.replace("T", " ")] if live.taken_at else []
    if live.pid is not None:
        parts.append(
            f"server pid {live.pid}"
            + (f", started {live.started_at[:19].replace('T', ' ')}" if live.started_at else "")
        )
    if live.port is not None:
        parts.append(f"port {live.port}")
    if live.container is not None:
        parts.append(f"container {live.container[:12]}")
    calls = list(dict.fromkeys(g.memory_call for g in live.gpus if g.memory_call))
    if calls:
        parts.append(", ".join(calls) + (f", driver {live.driver_version}" if live.driver_version else ""))
    return "; ".join(parts) or "a saved sample without its time"


def split_note(entries: Sequence[Entry]) -> str:
    """`model 67.56 + draft 1.58`: the parts of a parent, K and V as one where they are equal."""
    sums: dict[str, int] = {}
    for entry in entries:
        name = _PARTS.get(entry.account, entry.account.partition("/")[2].replace("_", " "))
        sums[name] = sums.get(name, 0) + entry.bytes
    for prefix in ("", "window "):
        k, v = f"{prefix}K", f"{prefix}V"
        if k in sums and sums.get(k) == sums.get(v):
            sums = {(f"{prefix}K+V 2 x" if name == k else name): size for name, size in sums.items() if name != v}
    named = [f"{name} {n.gib(size)}".strip() for name, size in sums.items() if size]
    return " + ".join(named) if len(named) > 1 or any("x" in name for name in named) else ""


def _kv_note(entries: Sequence[Entry], capacity: Capacity) -> list[str]:
    parts = []
    simple = {e.account for e in entries} <= _ONE_POOL
    used = sum(e.bytes for e in entries if e.account != "kv_cache/unused")
    rounding = sum(e.tolerance_bytes for e in entries)
    tokens, blocks = capacity.kv_tokens, capacity.kv_blocks
    if simple and tokens:
        # Pools of blocks: where several kinds of layers share one pool, the printed tokens are not the pool's own count.
        each = f" x {n.quotient(used, rounding, tokens)}" if _counts_tokens(entries, tokens, blocks) else ""
        parts.append(f"{n.count(tokens)} tokens{each}")
    elif simple and blocks:
        parts.append(f"{n.count(blocks)} blocks x {n.quotient(used, rounding, blocks)}")
    if not simple or len(entries) != 2 or {e.account for e in entries} != {"kv_cache/k", "kv_cache/v"}:
        parts.append(split_note(entries))
    return parts + _dtypes(entries)


def _counts_tokens(entries: Sequence[Entry], tokens: int, blocks: int | None) -> bool:
    if all(e.account not in {"kv_cache/pool", "kv_cache/unused"} for e in entries):
        return True
    return blocks is not None and blocks > 0 and tokens % blocks == 0


def _dtypes(entries: Sequence[Entry]) -> list[str]:
    return sorted(
        {n.dtype(clean(str(e.detail["dtype"]), 40)) for e in entries if e.detail.get("dtype") not in {None, "auto"}}
    )


def _state_note(entries: Sequence[Entry], capacity: Capacity) -> list[str]:
    parts = []
    slots = capacity.state_slots
    base = [e for e in entries if isinstance(e.detail.get("rows"), int) and e.detail["rows"] > 0]
    if slots:
        padding = max((e.detail["rows"] for e in base), default=slots) - slots
        text = f"{n.count(slots)}+{padding} slots" if padding > 0 else f"{n.count(slots)} slots"
        if base:
            rows = slots + max(padding, 0)
            text += f" x {n.quotient(sum(e.bytes for e in base), sum(e.tolerance_bytes for e in base), rows)}"
        parts.append(text)
    parts += _dtypes(entries)
    if len(entries) > 1:
        parts.append(split_note(entries))
    return parts


_ONE_POOL: Final = {"kv_cache/k", "kv_cache/v", "kv_cache/latent", "kv_cache/index", "kv_cache/pool", "kv_cache/unused"}
_NOTE_KEYS: Final = ("note", "what", "backend", "quantization")
LONGEST_FORMULA: Final = 60


def detail_note(detail: dict[str, Any]) -> str:
    """The words of an entry's detail; its formula where nothing else is said and it is short."""
    words = ", ".join(clean(str(detail[key]), 120) for key in _NOTE_KEYS if detail.get(key))
    formula = detail.get("formula")
    if not words and isinstance(formula, str) and len(formula) <= LONGEST_FORMULA:
        return clean(formula)
    return words


# --------------------------------------------------------------------------------------------------------------- facts


def _facts(server: Server, report: Report, options: Options, *, live: bool) -> list[Fact]:
    facts = [Fact("also", f.text, f.code) for f in _other_findings(server, options)]
    facts += [Fact("budget", text) for text in budget_words(server)]
    facts += [Fact("capacity", text) for text in capacity_words(server)]
    if server.span or server.usage.seen:
        facts.append(Fact("used", usage_words(server)))
    if live:
        facts += live_facts(report, server)
    facts += [Fact("failed", text) for text in failure_lines(server, report)]
    facts += [Fact("note", clean(text, 300)) for text in server.notes]
    seen = {span.input for span in server.span}
    facts += [
        Fact("note", clean(text, 300)) for i, item in enumerate(report.inputs) if i in seen for text in item.notes
    ]
    if len(report.inputs) > 1:
        named = [f"{i + 1} {clean(item.path, 120)}" for i, item in enumerate(report.inputs) if i in seen]
        facts.append(Fact("inputs", ", ".join(named[:8]) + (" ..." if len(named) > 8 else "")))
    facts += [Fact("model", clean(s.reason, 300)) for s in report.sources if s.name == "model" and s.reason]
    facts += [Fact("unread", text) for text in _unread(report, options)]
    facts += [Fact("next", text) for text in next_words(server, options)]
    return facts


def _incident(index: int, options: Options) -> list[Fact]:
    """The failure in two lines: what it comes to, and the command that says more."""
    cause = options.incidents.get(index)
    return [] if cause is None else [Fact("incident", cause), Fact("next", options.oom_command)]


def _other_findings(server: Server, options: Options) -> list[Finding]:
    first = {cause.code for cause in causes(server)}
    # The balance stands in the table already; mere information is shown where it is asked for.
    hidden = set() if options.all_findings else {f.code for f in server.findings if f.severity == "info"}
    if options.rank is not None:
        hidden |= {"ML304"}  # compares ranks, and one was asked for
    chief = chief_finding(server)
    if chief is not None and chief.code == "ML201":
        # A start that ended because of what others held says how much that is.
        hidden |= {f.code for f in server.findings if f.code == "ML303" and f"{n.gib(f.bytes)} GiB" in chief.text}
    rest = [f for f in server.findings if f.code not in first | hidden | set(_BALANCE_CODES)]
    return sorted(rest, key=lambda f: (-SEVERITIES.index(f.severity), -abs(f.bytes)))


def budget_words(server: Server) -> list[str]:
    """What the engine allowed itself, of the first rank that says it."""
    for rank in server.ranks:
        budget = rank.budget
        if budget.static_bytes is None:
            continue
        text = f"{n.gib_about(budget.static_bytes)} allowed"
        if budget.slack_bytes is not None:
            text += f", {n.gib_about(budget.slack_bytes)} outside it"
        if budget.rule:
            text += f": {clean(budget.rule, 160).partition(':')[0]}"
        return [text]
    return []


def capacity_words(server: Server) -> list[str]:
    """What the pools hold, once where all engines agree, else per engine."""
    engines = [(f"DP{e.dp}", e.capacity) for e in server.engines] or [(r.label, r.capacity) for r in server.ranks[:1]]
    engines = [(name, c) for name, c in engines if c != Capacity()]
    if not engines and server.ranks:
        engines = [(r.label, r.capacity) for r in server.ranks if r.capacity != Capacity()][:1]
    if not engines:
        return []
    if len({c for _, c in engines}) == 1:
        text = _capacity(server, engines[0][1])
        return [f"{text}; each of {len(engines)} engines" if len(engines) > 1 else text]
    lines = [f"{name}: {_capacity(server, c)}" for name, c in engines]
    return lines[:MOST_TABLES] + (
        [f"{len(lines) - MOST_TABLES} more engines (--format json)"] if len(lines) > MOST_TABLES else []
    )


def _capacity(server: Server, capacity: Capacity) -> str:
    parts = []
    if capacity.kv_tokens is not None:
        text = f"{n.count(capacity.kv_tokens)} KV tokens"
        if capacity.kv_swa_tokens is not None:
            text += f" ({n.count(capacity.kv_swa_tokens)} in the sliding window)"
        parts.append(text)
    if capacity.kv_blocks is not None:
        each = f" of {n.count(capacity.kv_block_tokens)} tokens" if capacity.kv_block_tokens else ""
        parts.append(f"{n.count(capacity.kv_blocks)} blocks{each}")
    if capacity.max_running_requests is not None:
        parts.append(n.plural(capacity.max_running_requests, "running request") + _bound(capacity))
    if capacity.state_slots is not None and not _bound(capacity):
        each = f" ({n.count(capacity.slots_per_request)} a request)" if capacity.slots_per_request else ""
        parts.append(f"{n.count(capacity.state_slots)} state slots{each}")
    if capacity.concurrency.requests is not None:
        tokens = capacity.concurrency.tokens_per_request
        parts.append(
            f"{n.count(capacity.concurrency.requests)} requests"
            + (f" of {n.count(tokens)} tokens at once" if tokens else " at once")
        )
    if isinstance(context := server.config.get("context_length"), int):
        parts.append(f"context {n.count(context)}")
    return "; ".join(parts)


def _bound(capacity: Capacity) -> str:
    slots, each, running = capacity.state_slots, capacity.slots_per_request, capacity.max_running_requests
    if slots and each and running is not None and slots // each == running:
        return f" (bound by state slots: {n.count(slots)} at {each} a request)"
    return ""


def usage_words(server: Server) -> str:
    """The peaks, or that there are none to tell."""
    u = server.usage
    parts = []
    if u.peak_running_requests == 0 and u.ran_between_samples:
        parts.append("no sample shows a running request (tokens were computed between them)")
    elif u.peak_running_requests is not None:
        parts.append(f"at most {n.count(u.peak_running_requests)} running")
    if u.peak_queued_requests is not None:
        parts.append(f"{n.count(u.peak_queued_requests)} queued")
    shares = [("KV", u.peak_kv_usage), ("window KV", u.peak_swa_usage), ("state slots", u.peak_state_usage)]
    peaks = [f"{name} {n.percent(value)}" for name, value in shares if value is not None]
    text = ", ".join(parts)
    if peaks:
        text += ("; " if text else "") + ", ".join(peaks)
    for name, value in (("preemption", u.preemptions), ("retraction", u.retractions)):
        if value:
            text += ("; " if text else "") + n.plural(value, name)
    if not text:
        return "no serving lines in the log: what the workload needed can't be told"
    return text


MOST_FAILURES: Final = 5
_EXCEPTION: Final = re.compile(r"(?:\b[A-Za-z_]\w*\.)*\b[A-Za-z]\w*(?:Error|Exception)\b: ?(?=\S)")
_BARE: Final = re.compile(r"Traceback \(most recent call last\):\s*$")
_NUMBER: Final = re.compile(r"\d+")
_RAN_OUT: Final = re.compile(r"\b[A-Z]{2,4} out of memory\.")
_NATIVE: Final = re.compile(r"^\[[EFIW]\d+ [^\]]*\] ")
"""What libraries written in C++ put before a message (glog's form)."""
ALIKE_LENGTH: Final = 90


def failure_lines(server: Server, report: Report) -> list[str]:
    """What failed, as the log says it: the exception's own text with where it stands, the same text only once."""
    found: dict[str, list[tuple[Evidence | None, str]]] = {}
    for failure in server.failures:
        said: list[tuple[Evidence | None, str]] = [(e, failure_text(e.text)) for e in failure.evidence] or [
            (None, f"{failure.kind} in {failure.phase}".replace("_", " "))
        ]
        line = max(said, key=lambda item: _tells(item[1]))
        found.setdefault(_alike(line[1]), []).append((line[0], line[1]))
    telling = {key: lines for key, lines in found.items() if not _BARE.search(key)} or found
    texts = []
    for lines in telling.values():
        first, text = lines[0]
        more = f" and {len(lines) - 1} more like it" if len(lines) > 1 else ""
        texts.append((f"{where(first, report)}{more}: " if first is not None else "") + clean(text))
    return texts[:MOST_FAILURES]


def _alike(text: str) -> str:
    """What texts that say the same have in common: no numbers; of an allocation only from what ran out on.

    It is their start only, for the lines are cut at different places.
    """
    found = _RAN_OUT.search(text)
    return _NUMBER.sub("#", text[found.start() :] if found is not None else text)[:ALIKE_LENGTH]


def failure_text(line: str) -> str:
    """A failing line without what stands before its message, from the exception's name on where it has one.

    `(Worker pid=7) ERROR 03-12 08:22:28 [x.py:1] ValueError: Free memory ...` is `ValueError: Free memory ...`.
    """
    from memledger.prefix import records

    messages = [_NATIVE.sub("", record.message.strip()) for record in records(line)]
    message = max(messages, key=_tells)
    found = _EXCEPTION.search(message)
    return message[found.start() :] if found is not None else message


def _tells(message: str) -> tuple[bool, bool, bool]:
    """How much a line says of a failure: the exception with a figure, then either, last of all a bare traceback's head."""
    return not _BARE.search(message), _EXCEPTION.search(message) is not None, _NUMBER.search(message) is not None


def where(evidence: Evidence, report: Report) -> str:
    """`line 71`, or `server.log:71` where there are several inputs."""
    if len(report.inputs) > 1 and evidence.input < len(report.inputs):
        return f"{clean(report.inputs[evidence.input].path, 200)}:{evidence.line}"
    return f"line {evidence.line}"


def _unread(report: Report, options: Options) -> list[str]:
    count = report.unrecognized.count
    if not count:
        return []
    hint = "" if options.unrecognized else " (--unrecognized)"
    return [f"{n.plural(count, 'memory-like line')} not understood{hint}"]


def next_words(server: Server, options: Options) -> list[str]:
    """Commands that tell more, where there is more to tell."""
    ranks = server.ranks
    # Only a ledger that opens at a reading of free memory can be opened at the card's total instead.
    readings = [r.residual.opening_bytes or 0 for r in ranks if r.residual.base == "first_reading"]
    asks = bool(readings) and not options.gpu_total and all(r.gpu.kind in {None, "cuda", "rocm"} for r in ranks)
    if not asks or all(r.gpu.total_bytes is not None for r in ranks):
        return []
    named = next((r.gpu.name for r in ranks if r.gpu.name is not None), None)
    card = card_named(named) if named is not None else None
    if card is None:
        return [f"{options.command} --gpu-total SIZE (the card's size or name)"]
    whole = parse_total(card).amount
    return [f"{options.command} --gpu-total {card}"] if whole.bytes + whole.tolerance >= max(readings) else []


def _evidence(server: Server) -> list[Evidence]:
    found: dict[tuple[int, int], Evidence] = {}
    groups = [e.evidence for r in server.ranks for e in r.entries]
    groups += [r.residual.evidence for r in server.ranks]
    groups.append(server.usage.evidence)
    groups += [f.evidence for f in server.failures]
    groups += [f.evidence for f in server.findings]
    for group in groups:
        for evidence in group:
            found.setdefault((evidence.input, evidence.line), evidence)
    return [found[key] for key in sorted(found)]


def other_starts(report: Report, shown: Sequence[int]) -> list[str]:
    """The starts that are not shown in full, one line each."""
    lines = []
    for index, server in enumerate(report.servers):
        if index in shown:
            continue
        lead = chief_finding(server)
        outcome = (
            lead.text
            if lead is not None and server.state == "failed"
            else _STATE_WORDS.get(server.state, "state not in the log")
        )
        begin = (
            clean(server.started_at, 40).replace("T", " ").removeprefix("--")
            if server.started_at
            else _span_words(server, report)
        )
        name = _FRAMEWORKS[server.framework] + (
            f" {clean(server.framework_version, 40)}" if server.framework_version else ""
        )
        lines.append(f"{index + 1}  {begin}  {name}  {model_name(server.model) or '-'}  {outcome}")
    return lines


def _span_words(server: Server, report: Report) -> str:
    if not server.span:
        return "-"
    first = server.span[0]
    return where(Evidence(first.input, first.first_line, ""), report)
