"""Comparing engine versions: the first three numbers of a release, nothing more."""

from __future__ import annotations

import re

_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")

Release = tuple[int, int, int]


def release(version: str | None) -> Release | None:
    """`(major, minor, patch)` of a version text: `0.19.2rc1.dev3+gabc` gives `(0, 19, 2)`; None where it has no such start.

    Pre-releases and development builds count as the release they lead to: they carry its code more often than not, and
    a caller for whom that is not good enough must look at the text.
    """
    found = _RELEASE.match(version or "")
    if found is None:
        return None
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch or 0)


def is_placeholder(version: str | None) -> bool:
    """Whether a version text tells no release: none, or a build's own number (`0.1.dev15917+g0a6396b45`, `0.0.0+g1`).

    Builds from a source tree without its tags get such numbers; neither engine released anything below 0.1.0 that is read here.
    """
    found = release(version)
    return found is None or found < (0, 0, 1) or (found < (0, 2, 0) and "dev" in (version or ""))
