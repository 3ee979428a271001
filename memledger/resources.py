"""Files that come with the package: in an installation inside it, in a checkout beside it."""

from __future__ import annotations

from pathlib import Path


def demo_log() -> Path:
    """The bundled log of `memledger demo`.

    Raises:
        FileNotFoundError: the installation lacks it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "demo_log", package.parent / "fixtures" / "demo"):
        found = sorted(folder.glob("*.log"))
        if found:
            return found[0]
    raise FileNotFoundError("the bundled log of the demo is missing from this installation; reinstall memledger")
