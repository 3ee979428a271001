"""Numbers in words: the one way every report prints sizes, counts and shares."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from memledger.units import GIB, KIB, MIB


def gib(size: int) -> str:
    """Bytes as GiB with two decimals and no unit: `20.16`; `<0.01` where two decimals would print a zero."""
    value = size / GIB
    if 0 < abs(value) < 0.005:
        return "<0.01" if size > 0 else ">-0.01"
    text = f"{value:,.2f}"
    return "0.00" if text == "-0.00" else text


def gib_about(size: int) -> str:
    """Bytes as GiB for a sentence: one decimal from 10 GiB up (`115.4 GiB`), two below, with the unit.

    Engines print GiB with two decimals: a smaller unit would show digits that no line holds.
    """
    value = abs(size) / GIB
    if value >= 9.995:
        return f"{size / GIB:,.1f} GiB"
    if 0 < value < 0.005:
        return "less than 0.005 GiB" if size > 0 else "-0.00 GiB"
    return f"{size / GIB:.2f} GiB"


def tolerance(size: int, plus_minus: str = "±") -> str:
    """A tolerance in GiB: `±0.03`; nothing for an exact figure."""
    if size == 0:
        return ""
    value = size / GIB
    return f"{plus_minus}{value:.2f}" if value >= 0.005 else f"{plus_minus}<0.01"


def signed_gib(size: int) -> str:
    """Bytes as GiB with a sign: `+0.31`, `-0.40`, `0.00`."""
    text = f"{size / GIB:+,.2f}"
    return "0.00" if text in {"+0.00", "-0.00"} else text


def signed_or_zero(size: int) -> str:
    """A residual in GiB: `0.31`, `-0.40`; `0.00` where two decimals show nothing."""
    return signed_gib(size).removeprefix("+")


def amount(size: int) -> str:
    """Bytes in the unit that suits them: `64 KiB`, `146.8 MiB`, `2.10 GiB`; hundredths of a GiB stay such: `0.02 GiB`."""
    hundredths = round(size * 100 / GIB)
    if 0 < abs(hundredths) < 100 and abs(hundredths * GIB - size * 100) <= 100:
        # It was printed in GiB with two decimals: 20.5 MiB would be finer than what the line says.
        return f"{hundredths / 100:.2f} GiB"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= unit:
            value = size / unit
            if value == int(value):
                return f"{int(value):,} {name}"
            return f"{value:,.2f} {name}" if unit == GIB else f"{value:,.1f} {name}"
    return f"{size} B"


def quotient(size: int, tolerance: int, parts: int) -> str:
    """Bytes over a count, with no more digits than the tolerance lets stand: `64.0 KiB`, `28 KiB`, `about 27 KiB`."""
    each, spread = size / parts, tolerance / parts
    unit, name = next(((u, name) for u, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if each >= u), (1, "B"))
    value, spread = each / unit, spread / unit
    if abs(value - round(value)) <= min(spread, 0.005) and spread < 0.5:
        return f"{round(value):,} {name}"
    if spread <= 0.1:
        return f"{value:,.1f} {name}"
    return f"{'' if spread <= 0.5 else 'about '}{value:,.0f} {name}"


def count(number: float) -> str:
    """A count with thousands separators; a fraction keeps two decimals."""
    if isinstance(number, int) or number == int(number):
        return f"{int(number):,}"
    return f"{number:,.2f}"


def count_short(number: int) -> str:
    """A large count for a sentence: `575K`, `1.02M`."""
    if abs(number) >= 999_500:
        return f"{number / 1e6:.2f}M"
    if abs(number) >= 10_000:
        return f"{number / 1e3:.0f}K"
    return f"{number:,}"


def percent(fraction: float, digits: int = 0) -> str:
    """A fraction as a share: `12 %`, with `digits` decimals; never rounds something down to nothing."""
    text = f"{fraction * 100:.{digits}f}"
    if float(text) == 0 and fraction != 0:
        return f"<{10**-digits:.{digits}f} %" if fraction > 0 else f">-{10**-digits:.{digits}f} %"
    return f"{text} %"


def share(fraction: float, sign: str) -> str:
    """A share with one decimal for a column: `36.3%`; never `-0.0%`."""
    text = f"{fraction * 100:.1f}"
    return f"{'0.0' if text == '-0.0' else text}{sign}"


_UNIT: Final = re.compile(r"(?<=\d) (?=(?:%|[KMGT]?i?B)(?![\w/]))")


def glued(text: str) -> str:
    """`text` with a no-break space between a number and its unit, for wrapping."""
    return _UNIT.sub("\xa0", text)


def seconds_between(start: str | None, end: str | None) -> float | None:
    """Seconds between two ISO times; None where one is missing or they do not compare.

    Both may be without a year (`--07-09T21:34:56`, as vLLM prints them); an end in January after a start in December is
    the next year's.
    """
    if start is None or end is None:
        return None
    yearless = start.startswith("--") and end.startswith("--")
    # 2000 is a leap year: 29 February is a date.
    years = ("2000-", "2001-" if start[2:4] == "12" and end[2:4] == "01" else "2000-") if yearless else ("", "")
    try:
        first, last = (
            datetime.fromisoformat(year + (time[2:] if year else time))
            for year, time in zip(years, (start, end), strict=True)
        )
        seconds = (last - first).total_seconds()
    except (ValueError, TypeError):
        return None
    return seconds if seconds >= 0 else None


def duration(seconds: float) -> str:
    """A time in words: `6 h`, `14 min`, `38 s`."""
    for size, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size or (seconds >= size and name == "h"):
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def plural(number: int, one: str, many: str | None = None) -> str:
    """`1 GPU`, `8 GPUs`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def dtype(name: str) -> str:
    """A data type as people write it: `torch.bfloat16` is `bf16`."""
    short = name.removeprefix("torch.")
    return {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float8_e4m3fn": "fp8 e4m3",
        "float8_e4m3fnuz": "fp8 e4m3",
        "float8_e5m2": "fp8 e5m2",
        "float4_e2m1fn_x2": "fp4",
    }.get(short, short)
