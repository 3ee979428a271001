"""Reserved against used over time, as values of a chart: shares of each pool, and requests running and queued."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

from memledger import words as n
from memledger.history import DeviceTrack, Held, Sample, Track
from memledger.ledger import Rank, Server, account_total
from memledger.report import view as v
from memledger.report.html_page import Cell, Curve, Figure, Grid, Timeline
from memledger.units import GIB

MOST_TRACKS = 4
"""Schedulers with a chart of their own: those whose pools were the fullest."""
MOST_ROWS = 40
FIRST = {"line": "serving line", "look": "look"}
LONG_GAP_MEDIANS = 20
LONG_GAP_SHARE = 0.01
_SHARES: tuple[tuple[str, str, Callable[[Sample], float | None], str | None], ...] = (
    ("KV cache", "kv_cache", lambda s: s.kv, "kv_cache"),
    ("window KV", "kv_window", lambda s: s.swa, None),
    ("recurrent state", "recurrent_state", lambda s: s.state, "recurrent_state"),
)
_COUNTS: tuple[tuple[str, str, Callable[[Sample], float | None]], ...] = (
    ("running requests", "running", lambda s: s.running),
    ("queued requests", "queued", lambda s: s.queued),
)


def over_time(server: Server, ranks: Sequence[Rank], tracks: Sequence[Track]) -> tuple[Figure, ...]:
    """A chart for each scheduler (of many: the fullest) that printed at least two serving lines."""
    drawn = [track for track in tracks if len(track.samples) > 1]
    drawn.sort(key=lambda track: -max((s.kv or s.state or 0.0 for s in track.samples), default=0.0))
    return tuple(_figure(server, _rank_of(ranks, track), track) for track in drawn[:MOST_TRACKS])


def in_words(tracks: Sequence[Track]) -> tuple[str, ...]:
    """The peaks of a recording's looks: those that the report gives elsewhere are of the log's serving lines."""
    return tuple(f"{_says(track)}." for track in tracks[:MOST_TRACKS] if track.of == "look")


def not_drawn(tracks: Sequence[Track]) -> tuple[str, ...]:
    """A sentence on the schedulers that have no chart; none where each has one."""
    rest = sum(len(track.samples) > 1 for track in tracks) - MOST_TRACKS
    return (f"{n.plural(rest, 'more scheduler')} with emptier pools are not drawn.",) if rest > 0 else ()


def _rank_of(ranks: Sequence[Rank], track: Track) -> Rank | None:
    mine = [rank for rank in ranks if rank.dp is not None and f"DP{rank.dp}" == track.name] or list(ranks)
    return v.worst(mine) if mine else None


def _figure(server: Server, rank: Rank | None, track: Track) -> Figure:
    reserved = {name: _reserved(rank, account) for name, _, _, account in _SHARES}
    shares = tuple(
        Curve(name + (f" (of {reserved[name]} GiB)" if reserved[name] else ""), colour, _values(track, figure))
        for name, colour, figure, _ in _SHARES
        if any(figure(sample) is not None for sample in track.samples)
    )
    counts = tuple(
        Curve(name, colour, _values(track, figure))
        for name, colour, figure in _COUNTS
        if any(figure(sample) is not None for sample in track.samples)
    )
    xs, unit = _places(track)
    hover = tuple(_hover(sample, reserved, track.of) for sample in track.samples)
    title = "Use of the pools over time" + (f", {track.name}" if track.name else "")
    chart = Timeline(xs, _breaks(track), unit, shares, counts, hover)
    return Figure(title, _says(track), chart, _grid(title, track))


def _reserved(rank: Rank | None, account: str | None) -> str:
    held = account_total(rank.entries, account) if rank is not None and account is not None else None
    return n.gib(held.bytes) if held is not None and held.bytes > 0 else ""


def _values(track: Track, figure: Callable[[Sample], float | None]) -> tuple[float | None, ...]:
    return tuple(None if (value := figure(sample)) is None else round(value, 5) for sample in track.samples)


def _places(track: Track) -> tuple[tuple[float, ...], str]:
    """Where the samples stand: time since the first, in a unit that fits; the log's line where no time is printed."""
    if track.seconds is None:
        whole = {"line": "log", "look": "recording"}[track.of]
        return tuple(float(sample.line) for sample in track.samples), f"{track.of} of the {whole}"
    return _in_unit(track.seconds, FIRST[track.of])


def _in_unit(seconds: Sequence[float], first: str) -> tuple[tuple[float, ...], str]:
    for size, name in ((2 * 86400.0, "days"), (2 * 3600.0, "hours"), (180.0, "minutes"), (0.0, "seconds")):
        if seconds[-1] >= size:
            unit = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}[name]
            return tuple(round(s / unit, 4) for s in seconds), f"{name} since the first {first}"
    raise AssertionError("a time before the first")


def _breaks(track: Track) -> tuple[int, ...]:
    """Samples after a silence: SGLang prints serving lines only while it computes, so between them nothing is known."""
    if track.seconds is None:
        return ()
    gaps = [after - before for before, after in itertools.pairwise(track.seconds)]
    long = max(LONG_GAP_MEDIANS * statistics.median(gaps), LONG_GAP_SHARE * track.seconds[-1])
    return tuple(i for i, gap in enumerate(gaps, 1) if gap > long)


def _hover(sample: Sample, reserved: dict[str, str], of: str) -> str:
    lines = [f"{of} {sample.line}" + (f", {_clock(sample.time)}" if sample.time else "")]
    for name, _, figure, _ in _SHARES:
        if (share := figure(sample)) is not None:
            whole = f" of {reserved[name]} GiB" if reserved[name] else ""
            lines.append(f"{name}: {n.percent(share, 1)}{whole}")
    lines += [f"{name}: {value:,.0f}" for name, _, figure in _COUNTS if (value := figure(sample)) is not None]
    return "\n".join(lines)


def _clock(time: str) -> str:
    return time.removeprefix("--").replace("T", " ")


def _says(track: Track) -> str:
    told = []
    for name, _, figure, _ in _SHARES:
        if (most := _most(track.samples, figure)) is not None:
            told.append(f"{name} at most {n.percent(most)} of its pool")
    for name, _, figure in _COUNTS:
        if (most := _most(track.samples, figure)) is not None:
            told.append(f"at most {most:,.0f} {name}")
    first, last = track.samples[0], track.samples[-1]
    return f"From {track.of} {first.line} to {track.of} {last.line}: " + ", ".join(told)


def _most(samples: Sequence[Sample], figure: Callable[[Sample], float | None]) -> float | None:
    return max((value for sample in samples if (value := figure(sample)) is not None), default=None)


def _grid(title: str, track: Track) -> Grid:
    """The samples as rows; of more than `MOST_ROWS`, the largest figures of stretches."""
    count = min(MOST_ROWS, len(track.samples))
    cuts = [i * len(track.samples) // count for i in range(count + 1)]
    shares = [(name, figure) for name, _, figure, _ in _SHARES if _most(track.samples, figure) is not None]
    counts = [(name, figure) for name, _, figure in _COUNTS if _most(track.samples, figure) is not None]
    timed = any(sample.time for sample in track.samples)
    heads = (
        Cell(f"from {track.of}"),
        *([Cell("time")] if timed else []),
        *(Cell(name, number=True) for name, _ in (*shares, *counts)),
    )
    rows = tuple(
        (
            Cell(f"{piece[0].line:,}"),
            *([Cell(_clock(piece[0].time or ""))] if timed else []),
            *(Cell(_word(_most(piece, f), lambda x: n.percent(x, 1)), number=True) for _, f in shares),
            *(Cell(_word(_most(piece, f), lambda x: f"{x:,.0f}"), number=True) for _, f in counts),
        )
        for piece in (track.samples[a:b] for a, b in itertools.pairwise(cuts))
    )
    thinned = len(track.samples) > count
    remarks = (f"Each row holds the largest figures from its {track.of} up to the next row's.",) if thinned else ()
    return Grid(title, heads, rows, remarks)


def _word(value: float | None, shown: Callable[[float], str]) -> str:
    return "" if value is None else shown(value)


# ---------------------------------------------------------------------------------------------------- a device's memory


def growth_of(devices: Sequence[DeviceTrack]) -> tuple[Figure, ...]:
    """How much more each holder of a device's memory had than at the first look, of the first devices."""
    found = (_growth(device) for device in devices[:MOST_TRACKS])
    return tuple(figure for figure in found if figure is not None)


def _growth(device: DeviceTrack) -> Figure | None:
    places = sorted({at for one in device.held for at, _ in one.points})
    if len(places) < 2:
        return None
    sizes = [dict(one.points) for one in device.held]
    curves = []
    for i, (one, by_place) in enumerate(zip(device.held, sizes, strict=True)):
        first = one.points[0][1]
        changes = tuple(round((by_place[at] - first) / GIB, 5) if at in by_place else None for at in places)
        colour = {"others": "other_processes", "nobody": "unexplained", "free": "free"}.get(one.kind, f"more-{i}")
        curves.append(Curve(one.name, colour, changes))
    hover = tuple(
        "\n".join(
            f"{one.name}: {_change(one, size[at])}" for one, size in zip(device.held, sizes, strict=True) if at in size
        )
        for at in places
    )
    told = ", ".join(f"{one.name} {_change(one, one.points[-1][1])}" for one in device.held)
    title = f"{device.device}: memory against the first look"
    xs, unit = _in_unit(places, "look")
    chart = Timeline(xs, (), unit, (), tuple(curves), hover, counted="GiB more", whole=False)
    return Figure(title, f"At the last look: {told}", chart, _growth_grid(title, device))


def _change(one: Held, size: int) -> str:
    return f"{n.gib(size)} GiB, {n.signed_gib(size - one.points[0][1])}"


def _growth_grid(title: str, device: DeviceTrack) -> Grid:
    heads = (Cell("holder"), *(Cell(name, number=True) for name in ("first, GiB", "largest", "last", "change")))
    rows = tuple(
        (
            Cell(one.name),
            *(
                Cell(text, number=True)
                for text in (
                    n.gib(one.points[0][1]),
                    n.gib(max(size for _, size in one.points)),
                    n.gib(one.points[-1][1]),
                    n.signed_gib(one.points[-1][1] - one.points[0][1]),
                )
            ),
        )
        for one in device.held
    )
    return Grid(title, heads, rows)
