"""Makes the pictures of the pages: charts of HTML reports on the fixtures, as the browser draws them.

python docs/make_pictures.py            # needs Chromium and the extra `html`; writes docs/pictures/*.svg
"""

from __future__ import annotations

import html
import re
import sys
import tempfile
import urllib.parse
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
WIDTH = 860

PICTURES: dict[str, tuple[list[str], int]] = {
    "demo-accounts": (["explain", "fixtures/demo/server.log"], 0),
    "demo-tree": (["explain", "fixtures/demo/server.log"], 1),
    "demo-stages": (["explain", "fixtures/demo/server.log"], 2),
    "demo-peaks": (["explain", "fixtures/demo/server.log"], 3),
    "demo-time": (["explain", "fixtures/demo/server.log"], 4),
    "demo-plan": (["plan", "fixtures/demo/server.log", "--concurrency", "4", "--context", "128k"], 0),
    "engines-waterfall": (
        ["compare", "fixtures/compare-engines/a.log", "fixtures/compare-engines/b.log", "--gpu-total", "79.19GiB"],
        0,
    ),
}
"""The command whose report holds the chart, and which of its charts it is (from 0)."""

_DRAW = """(() => {
  const place = document.querySelectorAll('[data-chart]')[NUMBER];
  const layout = Object.assign({}, place.layout, { paper_bgcolor: '#fcfcfb', plot_bgcolor: '#fcfcfb' });
  return Plotly.newPlot(document.createElement('div'), place.data, layout)
    .then((made) => Plotly.toImage(made, { format: 'svg', width: WIDTH, height: place.layout.height }));
})()"""


def _short(svg: str) -> str:
    """The same picture with a class for each style that stands in it more than once."""
    styles = [style for style, count in Counter(re.findall(r' style="([^"]*)"', svg)).items() if count > 1]
    for number, style in enumerate(styles):
        svg = svg.replace(f' style="{style}"', f' data-s="{number}"')
    rules = "".join(f'[data-s="{number}"]{{{style}}}' for number, style in enumerate(styles))
    head, end, rest = svg.partition(">")
    return f"{head}{end}<style>{html.unescape(rules)}</style>{rest}"


def main() -> None:
    """Write every picture."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import Browser, find_browser

    from memledger.cli import app

    path = find_browser()
    if path is None:
        raise SystemExit("no Chromium or Chrome on PATH (MEMLEDGER_BROWSER names one)")
    (HERE / "pictures").mkdir(exist_ok=True)
    browser = Browser(path)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, (command, number) in PICTURES.items():
                page = Path(folder) / f"{name}.html"
                full = [str(ROOT / word) if word.startswith("fixtures/") else word for word in command]
                app.run([*full, "--no-live", "--html", str(page)])
                browser.open(page, width=WIDTH + 80)
                drawn = browser.run(_DRAW.replace("NUMBER", str(number)).replace("WIDTH", str(WIDTH)))
                svg = _short(urllib.parse.unquote(drawn.partition(",")[2]))
                (HERE / "pictures" / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")
    finally:
        browser.close()


if __name__ == "__main__":
    main()
