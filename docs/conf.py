"""The documentation's site: Sphinx with MyST, so that every page is also plain Markdown on a code host.

    pip install -e '.[docs]' && sphinx-build -W --keep-going docs build/site

Nothing in the built pages is loaded from elsewhere.
"""

from __future__ import annotations

import re
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
html_show_copyright = False
smartquotes = False

OPTIONAL = frozenset({"watch", "metrics", "fleet", "sweep", "configuration", "performance", "security"})
"""Pages of parts of the program that a checkout may not hold."""
OTHERS = "(other pages)"
HELP = "<!-- help of every command -->"
_LINK = re.compile(r"\[([^\]]*)\]\((?:\.\./)?(\w+)\.md[^)]*\)")


def _completed(app: Sphinx, name: str, content: list[str]) -> None:
    """What depends on the checkout: the table of contents, the commands' help, and links to pages that may not be there."""
    folder = Path(app.srcdir)
    there = {page.stem for page in folder.glob("*.md")}
    if name == "index":
        content[0] = _contents(content[0], there)
    elif name == "commands":
        from command_help import markdown

        content[0] = content[0].replace(HELP, markdown(folder))
    content[0] = _LINK.sub(lambda link: link[1] if link[2] in OPTIONAL - there else link[0], content[0])


def _contents(text: str, there: set[str]) -> str:
    """The index without pages that are not there, and with those that have no place of their own."""
    lines = [line for line in text.split("\n") if line not in OPTIONAL - there]
    others = sorted(there - set(lines) - {"index"})
    at = lines.index(OTHERS)
    return "\n".join([*lines[:at], *others, *lines[at + 1 :]])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _completed)
