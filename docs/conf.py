"""The documentation's site: Sphinx with MyST, so that every page is also plain Markdown on a code host.

    pip install -e '.[docs]' && sphinx-build -W --keep-going docs build/site

Nothing in the built pages is loaded from elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

from memledger import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "memledger"
author = "the memledger authors"
version = release = __version__
html_title = f"memledger {__version__}"
extensions = ["myst_parser"]
exclude_patterns = ["_build", "grafana"]
myst_heading_anchors = 4
highlight_language = "none"
html_theme = "furo"
html_copy_source = False
html_show_sourcelink = False
smartquotes = False

OPTIONAL = frozenset({"watch", "metrics", "fleet", "sweep", "configuration", "performance", "security"})
"""Pages of parts of the program that a checkout may not hold."""
HELP = "<!-- help of every command -->"


def _completed(app: Sphinx, name: str, content: list[str]) -> None:
    """Leave out of the table of contents what is not there, and print the commands' help in its page."""
    folder = Path(app.srcdir)
    if name == "index":
        lines = content[0].split("\n")
        content[0] = "\n".join(x for x in lines if x not in OPTIONAL or (folder / f"{x}.md").is_file())
    elif name == "commands":
        from command_help import markdown

        content[0] = content[0].replace(HELP, markdown(folder))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _completed)
