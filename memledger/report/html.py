"""`memledger explain --html`: the report as one HTML file, from the view that text and Markdown render."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memledger import words as n
from memledger.history import NO_SERVING_LINE, History, Track
from memledger.ledger import Evidence, Finding, Rank, Remedy, Report, Server
from memledger.report import view as v
from memledger.report.html_charts import free_memory, ledger_grid, stack_of, tree_of, uses_of
from memledger.report.html_page import Chapter, Figure, Fix, Lead, Page, Problem, Section, render
from memledger.report.html_time import growth_of, in_words, not_drawn, over_time

MOST_BARS = 16
"""Ranks with a bar of their own; of more, one bar for those that are alike."""
MOST_CHAINS = 4


def document(report: Report, options: v.Options | None = None, history: History | None = None) -> str:
    """The whole report as one HTML document; `history`: how the pools filled over time.

    Raises:
        LookupError: `options` name a start or a rank that is not there.
        MissingExtraError: a library of the extra `html` is missing.
        TooLargeError: the page can't be brought under 6 MB.
    """
    return render(page(report, options or v.Options(), history))


def page(report: Report, options: v.Options, history: History | None = None) -> Page:
    """What the page shows."""
    shown = v.choose_servers(report, options)
    all_lines = msgspec.structs.replace(options, evidence=True)
    views = [v.build(report, index, all_lines) for index in shown]
    chapters = tuple(_chapter(view, report, options, history or History()) for view in views)
    lines = {(e.input, e.line): e for view in views for e in view.evidence}
    title = chapters[0].title if len(chapters) == 1 else f"{n.plural(len(chapters), 'start')} of a server"
    if not chapters:
        title = "No server in this input"
    return Page(options.command, title, chapters, report.inputs, tuple(lines.values()), _after(report, shown, options))


def _after(report: Report, shown: Sequence[int], options: v.Options) -> tuple[Section, ...]:
    sections = [Section("Other starts", raw=tuple(v.other_starts(report, shown)))]
    if options.unrecognized and report.unrecognized.count:
        lines = tuple(f"{v.where(e, report)}: {e.text}" for e in report.unrecognized.examples)
        sections.append(Section("Memory-like lines not understood", raw=lines))
    return tuple(sections)


def _chapter(view: v.View, report: Report, options: v.Options, history: History) -> Chapter:
    server = report.servers[view.index]
    ranks = v.choose_ranks(server, options.rank)
    spoken = v.about(server, ranks)
    tracks = history.tracks.get(view.index, ())
    facts = tuple(fact for fact in view.facts if fact.name not in {"also", "incident", "next"})
    incident = [f for f in view.facts if f.name == "incident"]
    leads = (
        *(Lead(c.text, c.code, c.severity, _lines_of(spoken, c)) for c in view.cause),
        *(Lead(f.text, severity="error") for f in incident),
    )
    return Chapter(
        view.header,
        (
            Section("The cause", leads=leads),
            Section("What to do", problems=_problems(spoken, view.cause, options)),
            Section(
                "Where the memory is",
                figures=_where(spoken, ranks, view),
                grids=tuple(ledger_grid(table) for table in view.tables),
                items=view.more_ranks,
            ),
            Section("Free memory, stage by stage", figures=_stages(spoken, ranks)),
            Section("What grew", figures=growth_of(history.devices.get(view.index, ()))),
            Section(
                "Reserved against used",
                figures=_used(spoken, ranks, tracks),
                items=(*_not_drawn(spoken), *in_words(tracks), *not_drawn(tracks), *_no_time(history, view.index)),
            ),
            Section("More of this start", facts=facts),
            Section("More to run", raw=tuple(fact.text for fact in view.facts if fact.name == "next")),
        ),
    )


# ----------------------------------------------------------------------------------------------------- where it all is


def _where(server: Server, ranks: Sequence[Rank], view: v.View) -> tuple[Figure, ...]:
    """A bar for every GPU, and the accounts within accounts of each table."""
    groups = [[rank] for rank in ranks] if len(ranks) <= MOST_BARS else v.fold(ranks)[:MOST_BARS]
    tables = [table for group in groups for table in v.rank_tables(server, group)]
    tables += [t for t in view.tables if t not in tables and t.title not in {x.title for x in tables} and _is_now(t)]
    figures = []
    for host, title in ((False, "GPU memory by account"), (True, "Host memory by account")):
        chosen = [t for t in tables if t.host is host]
        if (figure := stack_of(title, chosen)) is not None:
            figures.append(figure)
    for group in _told(ranks):
        if (figure := tree_of(v.rank_title(server, v.worst(group)), v.worst(group))) is not None:
            figures.append(figure)
    return tuple(figures)


def _is_now(table: v.Table) -> bool:
    return " now" in table.title


def _told(ranks: Sequence[Rank]) -> list[list[Rank]]:
    return [group for group in v.fold(ranks) if v.worst(group).entries][:MOST_CHAINS]


def _stages(server: Server, ranks: Sequence[Rank]) -> tuple[Figure, ...]:
    found = [free_memory(v.rank_title(server, v.worst(group)), v.worst(group)) for group in _told(ranks)]
    return tuple(figure for figure in found if figure is not None)


def _used(server: Server, ranks: Sequence[Rank], tracks: Sequence[Track]) -> tuple[Figure, ...]:
    figure = uses_of(server, ranks)
    if figure is not None and any(track.of == "look" for track in tracks):
        figure = msgspec.structs.replace(figure, title=f"{figure.title}, by the log")
    return (*((figure,) if figure is not None else ()), *over_time(server, ranks, tracks))


def _no_time(history: History, index: int) -> tuple[str, ...]:
    why = history.missing.get(index)
    return (f"Nothing is drawn over time: {why}.",) if why is not None and why != NO_SERVING_LINE else ()


def _not_drawn(server: Server) -> tuple[str, ...]:
    if not server.span and not server.usage.seen:
        return ()
    return (f"Used, by the serving lines: {v.usage_words(server)}.",)


# ------------------------------------------------------------------------------------------------------------ findings


def _problems(server: Server, causes: Sequence[v.Cause], options: v.Options) -> tuple[Problem, ...]:
    """The findings, the cause's own first, then by severity and size; mere information where it is asked for.

    What the cause has said word for word stands here only where something can be done about it, and is not said twice.
    """
    first = {cause.code for cause in causes}
    said = {(cause.code, cause.text) for cause in causes}
    kept = [f for f in server.findings if options.all_findings or f.severity != "info" or f.code in first]
    kept.sort(key=lambda f: (f.code not in first, -v.SEVERITIES.index(f.severity), -abs(f.bytes)))
    shown = []
    for finding in kept:
        one = problem(finding)
        if (finding.code, finding.text) not in said:
            shown.append(one)
        elif one.fixes:
            shown.append(msgspec.structs.replace(one, text="", lines=()))
    return tuple(shown)


def _lines_of(server: Server, cause: v.Cause) -> tuple[Evidence, ...]:
    """The lines of the finding that a cause repeats; none where it sums the ledger up."""
    return next((f.evidence for f in server.findings if (f.code, f.text) == (cause.code, cause.text)), ())


def problem(finding: Finding) -> Problem:
    """One finding with its ways out."""
    fixes = tuple(fix(remedy) for remedy in finding.remedies if remedy.flags)
    return Problem(finding.code, finding.title, finding.severity, finding.text, finding.evidence, fixes)


def fix(remedy: Remedy) -> Fix:
    """Flags as they are typed, and what they would change in words."""
    import shlex

    effects = []
    for effect in remedy.effects:
        if effect.account is not None and effect.bytes is not None:
            name = v.ACCOUNT_LABELS.get(effect.account, effect.account.replace("_", " "))
            effects.append(f"{name} {n.signed_gib(effect.bytes)} GiB")
        elif effect.capacity is not None and effect.change is not None:
            effects.append(f"{effect.capacity.replace('_', ' ').replace('kv ', 'KV ')} {effect.change:+,}")
    return Fix(" ".join(shlex.quote(flag) for flag in remedy.flags), tuple(effects), remedy.basis)


def quoted(groups: Sequence[Sequence[Evidence]]) -> tuple[Evidence, ...]:
    """Each line once, in the order of the inputs."""
    found = {(e.input, e.line): e for group in groups for e in group}
    return tuple(found[key] for key in sorted(found))
