"""What may have been meant by a name that is not there."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable
from typing import Final

MOST_NAMES: Final = 5000
"""Names of a folder that are looked at."""


def nearest_file(name: str) -> str | None:
    """The file in the same folder whose name is most like it, written as `name` was; None where none is."""
    folder, base = os.path.split(name)
    try:
        with os.scandir(folder or ".") as found:
            # A name that was written right is there, yet can't be opened: a link to nothing.
            names = sorted(e.name for e in itertools.islice(found, MOST_NAMES) if e.name != base)
    except (OSError, ValueError):
        return None
    near = nearest(base, names)
    return None if near is None else os.path.join(folder, near)  # noqa: PTH118 - a ./ that was written stays


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `name`, upper and lower case apart; None where none is."""
    by_key = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), by_key, n=1)
    return by_key[near[0]] if near else None
