"""What torch's out-of-memory message says, whichever engine prints it."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from memledger.events import Event
from memledger.units import Amount

OWN_PROCESS_NOTE: Final = (
    "listed under the host's process id, as in a container: beside it there is no room for what torch itself reserved"
)

_TORCH_TIME: Final = re.compile(r"(?:\[rank\d+\]: ?)?\[[EWIF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d)")


def own_process(event: Event) -> int | None:
    """Which of the "other" processes is the one that prints: its place in the list, None where none is.

    In a container with process ids of its own, the driver reports the host's, and torch finds no entry that is its own
    (c10/cuda/CUDACachingAllocator.cpp compares ids). What torch itself reserved must then be inside the largest entry,
    and beside all entries there is no room for it in what is in use on the GPU (total minus free).
    """
    sizes = event.fields.get("other")
    total, allocated = event.amount("total"), event.amount("allocated")
    if event.amount("process") is not None or not isinstance(sizes, tuple) or total is None or allocated is None:
        return None
    # "Not available" stands in this place, too: then the entry is known and only its size is not.
    if event.fields.get("process", ()) is None and "this process has" in event.message:
        return None
    used = total - (event.amount("free") or Amount(0))
    reserved = allocated + (event.amount("unallocated") or Amount(0))
    known = [(i, size) for i, size in enumerate(sizes) if isinstance(size, Amount)]
    if not known:
        return None
    held = sum(size.bytes for _, size in known)
    slack = used.tolerance + reserved.tolerance + sum(size.tolerance for _, size in known)
    index, largest = max(known, key=lambda item: item[1].bytes)
    inside = largest.bytes + slack >= reserved.bytes
    return index if inside and held + reserved.bytes > used.bytes + slack else None


def printed_time(event: Event) -> str | None:
    """When a line was printed: from its prefix, else from torch's own stamp (`[E716 19:47:26.3 ...]`, no year)."""
    if event.prefix.time is not None:
        return event.prefix.time
    found = _TORCH_TIME.match(event.message)
    return f"--{int(found[1]):02d}-{found[2]}T{found[3]}" if found is not None else None


_SIZE: Final = r"\d[\d.]{0,20} (?:bytes|[KMGT]iB)"
_OLD_FRAME: Final = re.compile(r"(?:out of memory\. )?Tried to allocate [\d.]+ \w+ (?P<frame>\(GPU \d.*)")
_OLD_FORM: Final = (
    rf"\(GPU \d{{1,6}}; {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free; "
    rf"(?:{_SIZE} cached\)|(?:{_SIZE} allowed; )?{_SIZE} reserved in total by PyTorch\)).*"
)
_SHORTENED: Final = re.compile(r"\s*(?:\.\.\.|…|\[).*")


def deviation(message: str) -> str | None:
    """Why no PyTorch printed this message, None where one may have (a message that is cut anywhere may be genuine).

    Only the form with everything in brackets behind `Tried to allocate` is judged (torch 1.0 to 2.0,
    c10/cuda/CUDACachingAllocator.cpp): it is history and does not change any more.
    """
    text = " ".join(message.split())
    found = _OLD_FRAME.search(text)
    if found is None:
        return None
    import regex

    frame = _SHORTENED.sub("", found["frame"])
    if regex.fullmatch(_OLD_FORM, frame, partial=True, timeout=1.0) is not None:
        return None
    return (
        "the text has the brackets of torch 1.0 to 2.0 and not what those print in them: it was retold, not printed, "
        "and its figures prove nothing"
    )


def seconds_between(earlier: str | None, later: str | None) -> float | None:
    """Seconds between two printed times, with or without a year; None where they do not compare."""
    if earlier is None or later is None:
        return None
    try:
        first, second = (datetime.fromisoformat("2000" + t[1:] if t.startswith("--") else t) for t in (earlier, later))
    except ValueError:
        return None
    if earlier.startswith("--") != later.startswith("--"):
        first, second = (t.replace(year=2000) for t in (first, second))
    return (second.replace(tzinfo=None) - first.replace(tzinfo=None)).total_seconds()
