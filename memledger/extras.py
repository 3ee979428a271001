"""The command that installs what an extra needs, for the Python that runs here.

It names the packages themselves: that works for whoever installed memledger from an index as for whoever did from a clone,
and for an environment that is not the shell's. Only called where something is missing.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "gpu-memledger"


def install_command(extra: str) -> str:
    """`/venv/bin/python -m pip install 'jinja2>=3.1' 'plotly>=6.0'`; by uv where its environment has no pip."""
    python = shlex.quote(sys.executable or "python3")
    tool = f"{python} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python}"
    return f"{tool} {' '.join(shlex.quote(one) for one in requirements(extra) or [_whole(extra)])}"


def requirements(extra: str) -> list[str]:
    """What an extra of the installed memledger asks for; none where memledger was not installed but runs from its source."""
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    named = re.compile(rf"""\bextra\s*==\s*["']{re.escape(extra)}["']""")
    return [name.strip() for name, _, marker in (one.partition(";") for one in declared) if named.search(marker)]


def _whole(extra: str) -> str:
    """memledger itself with the extra: its source where that lies around the package, else by name."""
    source = Path(__file__).parent.parent
    return f"{source}[{extra}]" if (source / "setup.cfg").is_file() else f"{DISTRIBUTION}[{extra}]"
