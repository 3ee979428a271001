"""What every report on incidents shows, as values: text and Markdown render the same view.

Text that came from an input passes `memledger.sanitize.clean` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from memledger import words as n
from memledger.ledger import Evidence, Report
from memledger.lookalike import spoken_of
from memledger.postmortem.incident import Advice, Holder, Incident, Moment, OomReport, ServerState
from memledger.report.view import Fact, Row, Table, failure_text, model_name, where
from memledger.sanitize import clean

PHASES: Final[dict[str, str]] = {
    "start": "at the start, before the weights",
    "weights": "while loading the weights",
    "profiling": "in the profile run",
    "pools": "while allocating the pools",
    "graph_capture": "in graph capture",
    "warmup": "in warm-up",
    "serving": "while serving",
    "prefill": "while serving, in a prefill",
    "decode": "while serving, in a decode step",
    "wake_up": "on wake-up from sleep",
    "host": "on the host",
    "unknown": "when is not in the input",
}
_FRAMEWORKS: Final = {"sglang": "SGLang", "vllm": "vLLM"}
_SAYS: Final[dict[str, tuple[str, ...]]] = {
    "lower": ("lower", "less", "fewer", "smaller", "shorter"),
    "raise": ("raise", "more", "higher", "larger"),
    "free": ("free", "end ", "stop", "kill"),
    "change": ("",),
    "none": ("",),
}
"""Words that tell a direction already: it is put before a text without them."""
_DATED: Final = len("2026-09-09T")
MOST_RANKS: Final = 4
LONGEST: Final = 1200
"""Characters of one sentence of an incident: the arithmetic needs more than a log line."""


class Step(msgspec.Struct, frozen=True):
    """One row of the timeline, in words; sizes in GiB."""

    at: str
    taken: str
    free: str
    what: str


class OomView(msgspec.Struct, frozen=True):
    """One incident as it is shown in full."""

    index: int
    header: str
    cause: str
    confidence: str
    severity: str
    table: Table | None
    facts: tuple[Fact, ...]
    steps: tuple[Step, ...]
    todo: tuple[Fact, ...]
    evidence: tuple[Evidence, ...]


def chief(report: OomReport) -> int:
    """The index of the incident to begin with: the first that ended a server, else the first."""
    fatal = [i for i, one in enumerate(report.incidents) if one.fatal]
    return fatal[0] if fatal else 0


def build(report: OomReport, index: int, *, evidence: bool = False) -> OomView:
    """The view of one incident."""
    one = report.incidents[index]
    places = _as_report(report)
    return OomView(
        index=index,
        header=header(report, one),
        cause=headline(one),
        confidence=confidence(one),
        severity="error" if one.fatal else "warning" if one.kind != "not_device_memory" else "info",
        table=_table(one),
        facts=tuple(_facts(one, places)),
        # The failure alone is no way to it.
        steps=tuple(_step(moment) for moment in one.timeline) if len(one.timeline) > 1 else (),
        todo=tuple(_todo(one)),
        evidence=_evidence(one) if evidence else (),
    )


def headline(one: Incident) -> str:
    """The cause in plain words; of what only looks like device memory, that it is none."""
    cause = clean(one.cause, LONGEST).rstrip()
    if cause and cause[-1] not in ".!?":
        cause += "."
    if one.kind == "not_device_memory" and "not a device out-of-memory" not in cause.lower():
        return f"Not a device out-of-memory: {cause}"
    return cause[:1].upper() + cause[1:] if not _is_name(cause) else cause


def _is_name(text: str) -> bool:
    """Whether a sentence begins with a word that keeps its small letter: `vLLM`, `max_num_seqs`."""
    first = text.split(" ", 1)[0]
    return any(ch.isupper() or ch in "_-./(" for ch in first[1:])


def confidence(one: Incident) -> str:
    """How sure the cause is, in words, and what kind of failure that makes it."""
    value = one.confidence
    if value >= 0.9:
        words = "Certain: the input itself says so"
    elif value > 0.7:
        words = "Nearly certain: the figures leave no other reading"
    elif value >= 0.5:
        words = "Likely: a conclusion, no line says it outright"
    elif value >= 0.3:
        words = "Possible: the input fits it and does not decide"
    else:
        words = "Not known: the input does not decide"
    basis = f", from {clean(one.basis, 300)}" if one.basis else ""
    code = f" ({one.code})" if one.code else ""
    kind = f" Code: {one.code}." if one.kind == "unknown" and one.code else f" Kind: {one.kind}{code}."
    return f"{words} (confidence {value:.2f}{basis}).{kind}"


def short(report: OomReport, one: Incident) -> str:
    """An incident that is not shown in full, in one line."""
    places = [where(one.evidence[0], _as_report(report))] if one.evidence else []
    parts = [*([_time(one.at)] if one.at else []), *places, *_rank_words(one)]
    return f"{', '.join(parts)}: {headline(one)}" if parts else headline(one)


def header(report: OomReport, one: Incident) -> str:
    """`vLLM 0.25.0 · example-model · GPU 0 · TP0, TP1 · while serving · 2026-09-09 12:03:11 · ended the server`."""
    server = report.servers[one.server] if one.server is not None and one.server < len(report.servers) else None
    parts = []
    if server is not None:
        version = f" {clean(server.framework_version, 40)}" if server.framework_version else ""
        parts += [_FRAMEWORKS[server.framework] + version]
        parts += [name] if (name := model_name(server.model)) else []
        parts += [clean(server.label, 60)] if server.label else []
    elif one.evidence and one.evidence[0].input < len(report.inputs):
        path = report.inputs[one.evidence[0].input].path
        parts.append("standard input" if path == "-" else clean(path.encode("utf-8", "replace").decode(), 80))
    if one.numbers.gpu_index is not None:
        parts.append(f"GPU {one.numbers.gpu_index}")
    parts += [words for words in _rank_words(one) if words not in parts]
    if one.phase != "unknown":
        parts.append(PHASES[one.phase])
    if one.at:
        parts.append(_time(one.at))
    if one.fatal is not None:
        parts.append("ended the server" if one.fatal else "the server went on")
    return " · ".join(parts) or "a failure"


def _rank_words(one: Incident) -> list[str]:
    ranks = [clean(rank, 40) for rank in one.ranks]
    if len(ranks) <= MOST_RANKS:
        return [", ".join(ranks)] if ranks else []
    return [f"{', '.join(ranks[: MOST_RANKS - 1])} and {len(ranks) - MOST_RANKS + 1} more ranks"]


def _time(at: str) -> str:
    return clean(at, 40).replace("T", " ").removeprefix("--")


def _as_report(report: OomReport) -> Report:
    """For what needs only the inputs of a report."""
    return Report(report.version, report.inputs, (), ())


# -------------------------------------------------------------------------------------------------- who held the memory


def _table(one: Incident) -> Table | None:
    if not one.holders:
        return None
    whole = next((h.bytes for h in one.holders if h.kind == "total"), None)
    title = "host memory then" if one.phase == "host" or one.kind == "host_memory" else "GPU memory then"
    if one.numbers.gpu_index is not None and one.kind != "host_memory":
        title = f"GPU {one.numbers.gpu_index} then"
    return Table(title, tuple(_row(holder, whole) for holder in one.holders), host=one.kind == "host_memory")


def _row(holder: Holder, whole: int | None) -> Row:
    share = holder.bytes / whole if holder.bytes is not None and whole else None
    label = "  " * holder.level + clean(holder.label, 60)
    size, tolerance, lines, note = holder.bytes, holder.tolerance_bytes, holder.evidence, clean(holder.note, 300)
    if holder.kind == "unaccounted":
        return Row("unexplained", holder.kind, label, size, tolerance, share, holder.basis, lines, note)
    if holder.kind == "total":
        return Row("total", holder.kind, label, size, tolerance, share, holder.basis, lines, note)
    if holder.kind == "asked":
        # What was wanted is no part of the sum above it.
        return Row("opening", holder.kind, label, size, tolerance, share, holder.basis, lines, note)
    return Row(
        "free" if holder.kind == "free" else "entry",
        holder.kind,
        label,
        size,
        tolerance,
        share,
        holder.basis,
        lines,
        note,
    )


# ------------------------------------------------------------------------------------------------------- what else was


def _facts(one: Incident, places: Report) -> list[Fact]:
    facts = []
    if one.evidence:
        first = one.evidence[0]
        facts.append(Fact("failed", f"{where(first, places)}: {clean(failure_text(first.text))}"))
    if (asked := _asked(one)) is not None:
        facts.append(Fact("asked", asked))
    if one.state is not None and (doing := state_words(one.state)):
        facts.append(Fact("doing", doing))
    facts += [Fact("then", _link(link.what, link.at, link.times)) for link in one.chain if link.role == "consequence"]
    facts += [Fact("found", f"{clean(finding.text, LONGEST)}", finding.code) for finding in one.findings]
    return facts + [Fact("note", clean(note, LONGEST)) for note in one.notes]


def _asked(one: Incident) -> str | None:
    size = one.numbers.requested_bytes
    told = clean(one.request.text, LONGEST) if one.request is not None else ""
    if size is None:
        return told or None
    return f"{n.amount(size)}: {told}" if told and not told.startswith(n.amount(size)) else told or n.amount(size)


def state_words(state: ServerState) -> str:
    """What the server was doing, in words: `3 running, 0 waiting; KV 45 %; 8,192 tokens scheduled (the last usage line)`."""
    parts = []
    if state.running is not None:
        parts.append(f"{n.count(state.running)} running")
    if state.waiting is not None:
        parts.append(f"{n.count(state.waiting)} waiting")
    text = ", ".join(parts)
    rest = []
    if state.kv_usage is not None:
        rest.append(f"KV {n.percent(state.kv_usage)}")
    if state.state_usage is not None:
        rest.append(f"state {n.percent(state.state_usage)}")
    if state.scheduled_tokens is not None:
        rest.append(f"{n.plural(state.scheduled_tokens, 'token')} scheduled")
    if state.new_tokens is not None:
        rest.append(f"{n.plural(state.new_tokens, 'new token')} in the last batch")
    text = "; ".join(filter(None, (text, ", ".join(rest))))
    told = ", ".join(
        filter(None, (clean(state.basis, 200) if state.basis else "", _time(state.at) if state.at else ""))
    )
    return f"{text} ({told})" if text and told else text


def _link(what: str, at: str | None, times: int) -> str:
    again = f" ({times} times)" if times > 1 else ""
    return (f"{_time(at)}: " if at else "") + f"{clean(what, 300)}{again}"


def _step(moment: Moment) -> Step:
    taken = "" if moment.taken_bytes is None else n.gib(moment.taken_bytes)
    free = "" if moment.free_bytes is None else n.gib(moment.free_bytes)
    return Step(_time(moment.at) if moment.at else "", taken, free, clean(moment.what, 300))


def same_day(steps: Sequence[Step]) -> str:
    """The date that all steps share (with the blank after it), to be said once; empty where they do not."""
    days = {step.at[: step.at.rindex(" ") + 1] for step in steps if " " in step.at}
    return days.pop() if len(days) == 1 and all(" " in step.at for step in steps if step.at) else ""


# ---------------------------------------------------------------------------------------------------------- what to do


def _todo(one: Incident) -> list[Fact]:
    facts = []
    for candidate in one.candidates:
        facts.append(Fact("maybe", f"{clean(candidate.cause, LONGEST).rstrip('.')} ({candidate.kind})"))
        if candidate.command:
            facts.append(Fact("decide", clean(candidate.command, LONGEST)))
    for advice in one.advice:
        facts += _advice(advice)
    return facts + [Fact("collect", clean(item, LONGEST)) for item in one.collect]


def _advice(advice: Advice) -> list[Fact]:
    text = clean(advice.text, LONGEST)
    said = any(word in text.lower() for word in _SAYS[advice.direction])
    facts = [Fact("do", text if said else f"{advice.direction}: {text}")]
    if advice.remedy is not None and advice.remedy.flags:
        effects = _effects(advice)
        flags = clean(" ".join(advice.remedy.flags), LONGEST)
        facts.append(Fact("flags", f"{flags}{effects}"))
    return facts


def _effects(advice: Advice) -> str:
    assert advice.remedy is not None
    told = []
    for effect in advice.remedy.effects:
        if effect.account is not None and effect.bytes is not None:
            told.append(f"{clean(effect.account, 40)} {n.signed_gib(effect.bytes)} GiB")
        elif effect.capacity is not None and effect.change is not None:
            told.append(f"{clean(effect.capacity, 40)} {effect.change:+,}")
    if advice.remedy.basis:
        told.append(clean(advice.remedy.basis, 300))
    return f"   ({'; '.join(told)})" if told else ""


def _evidence(one: Incident) -> tuple[Evidence, ...]:
    groups = [one.evidence, *(h.evidence for h in one.holders), *(link.evidence for link in one.chain)]
    groups += [m.evidence for m in one.timeline] + [f.evidence for f in one.findings]
    groups += [one.state.evidence] if one.state is not None else []
    found: dict[tuple[int, int], Evidence] = {}
    for group in groups:
        for item in group:
            found.setdefault((item.input, item.line), item)
    return tuple(found[key] for key in sorted(found))


# ------------------------------------------------------------------------------------------------------ without incident


def nothing_failed(report: OomReport) -> str:
    """The sentence for an input without a failure."""
    unread = spoken_of(report.unrecognized.examples, [item.path for item in report.inputs])
    starts = len(report.servers)
    if not starts:
        return unread or "No failure in it: what it holds says nothing of memory running out."
    states = ", ".join(dict.fromkeys(server.state for server in report.servers))
    said = f"No line says that memory ran out: {n.plural(starts, 'start')} of a server ({states})."
    return said if unread is None else f"{said.replace('line says', 'line that could be read says')} {unread}"
