"""The HTML report in a real browser: it draws, says nothing on the console, asks for nothing, and is accessible."""

import importlib.util
import os
from pathlib import Path

import pytest
from browser import Browser, find_browser

from memledger.cli import app
from memledger.report import html_page

FIXTURES = Path(__file__).parent.parent / "fixtures"
PATH = find_browser()
pytestmark = pytest.mark.skipif(PATH is None, reason="no Chromium or Chrome on PATH (MEMLEDGER_BROWSER names one)")
EXPLAINED = (
    "demo",
    "vllm-0.31-tp2",
    "sglang-0.5.12-pp2-tp2",
    "sglang-0.5.23-cpu",
    "vllm-0.21-free-memory-fail",
    "vllm-0.17-oom-serving",
    "watch-leak",
)
COMPARED = ("compare-capped", "compare-weights")
FAILED = ("oom-sglang-kv-pool", "oom-vllm-prefill")
PAGES = (*EXPLAINED, *COMPARED, *FAILED, "plan")


@pytest.fixture(scope="module")
def browser():
    try:
        found = Browser(PATH)
    except (AssertionError, OSError) as error:
        pytest.skip(f"{PATH} does not start here: {error}")
    yield found
    found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")

    def made(name):
        target = folder / f"{name}.html"
        if not target.exists():
            quiet = ["--html", str(target), "--no-live"]
            if name == "plan":
                load = ["--concurrency", "4", "--context", "32k"]
                app.run(["plan", str(FIXTURES / "demo" / "server.log"), *load, *quiet])
            elif name.startswith("compare-"):
                app.run(["compare", *(str(FIXTURES / name / side) for side in ("a.log", "b.log")), *quiet])
            elif name.startswith("oom-"):
                app.run(["oom", str(FIXTURES / name / "server.log"), *quiet])
            else:
                (log,) = (path for path in (FIXTURES / name).iterdir() if path.name in {"server.log", "watch.jsonl"})
                app.run(["explain", str(log), *quiet])
        return target

    return made


# Texts of one chart whose boxes overlap by more than a hair.
OVERLAPPING = """Array.from(document.querySelectorAll('.chart')).flatMap(chart => {
  const boxes = Array.from(chart.querySelectorAll('text')).filter(t => t.textContent.trim() && getComputedStyle(t).display !== 'none')
    .map(t => [t.textContent, t.getBoundingClientRect()]).filter(([, r]) => r.width > 0 && r.height > 0);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([, q]) =>
    Math.min(p.right, q.right) - Math.max(p.left, q.left) > 3 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 5)
    .map(([b]) => [a, b]));
})"""


LOOKS = [(name, 390, True) for name in PAGES]
LOOKS += [(name, 1280, False) for name in ("demo", "vllm-0.31-tp2", "compare-capped", "oom-vllm-prefill", "plan")]


@pytest.mark.parametrize(("name", "width", "dark"), LOOKS)
def test_it_draws_every_chart_asks_for_nothing_and_fits_the_window(browser, pages, name, width, dark):
    page = pages(name)
    browser.open(page, width=width, dark=dark)
    drawn = "Array.from(document.querySelectorAll('[data-chart]')).map(p => [p.dataset.drawn, p.querySelectorAll('path').length, p.getBoundingClientRect().height])"
    charts = browser.run(drawn)
    assert charts
    assert all(state == "yes" and shapes > 0 and height > 50 for state, shapes, height in charts)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OVERLAPPING) == []
    assert browser.complaints() == []
    assert browser.requests() == [page.resolve().as_uri()]


@pytest.mark.parametrize(("name", "dark"), [(name, i % 2 == 1) for i, name in enumerate(PAGES)])
def test_axe_finds_no_serious_fault(browser, pages, name, dark):
    browser.open(pages(name), width=390 if dark else 1280, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.run(axe() + "; 0")
    found = browser.run(
        "axe.run(document).then(r => r.violations.map(v => [v.id, v.impact, v.nodes.map(n => n.html.slice(0, 150)).slice(0, 3)]))"
    )
    assert [v for v in found if v[1] in {"serious", "critical"}] == []


def test_a_part_that_the_axis_names_leaves_every_bar_its_figure(browser, tmp_path):
    figures = (1.0, 60.0, 600.0)
    texts = tuple(f"{figure:g}" for figure in figures)
    for name, shown in (("tokens/s", list(texts)), ("swap", ["swap600"])):
        part = html_page.Part(name, "weights", figures, texts, texts)
        chart = html_page.Stack(("a", "b", "c"), (part,), "tokens/s")
        section = html_page.Section("s", figures=(html_page.Figure("t", "says", chart),))
        page = tmp_path / f"{name[:4]}.html"
        page.write_text(html_page.render(html_page.Page("c", "t", (html_page.Chapter("t", (section,)),))))
        browser.open(page, width=390)
        assert browser.run("Array.from(document.querySelectorAll('.bartext')).map(t => t.textContent)") == shown


def test_a_window_of_another_width_is_drawn_anew_and_no_text_stands_on_another(browser, pages):
    browser.open(pages("demo"), width=1280)
    for width in (900, 700, 560, 360, 1100):
        browser.resize(width)
        fits = f"Array.from(document.querySelectorAll('.chart')).every(c => c.layout.width <= {width} && c.layout.width > {width} - 240)"
        browser.wait(fits, f"the charts do not follow the window's width of {width}")
        assert browser.run(OVERLAPPING) == [], width


@pytest.mark.parametrize("name", PAGES)
def test_on_paper_nothing_is_wider_than_a_page(browser, pages, name):
    """A browser prints a page that is wider than the paper smaller, until it fits."""
    browser.open(pages(name))
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        browser.resize(717)  # A4 between the margins of Chromium
        # The change of the window's width is answered first: it would be drawn over the paper's.
        narrow = "Array.from(document.querySelectorAll('.chart')).every(c => c.layout.width <= 717)"
        browser.wait(narrow, "the charts do not follow the window's width")
        browser.run("window.dispatchEvent(new Event('beforeprint'))")
        drawn = "Array.from(document.querySelectorAll('.chart')).every(c => c.layout.width === 680)"
        browser.wait(drawn, "the charts are not drawn for paper")
        assert browser.run("Array.from(document.querySelectorAll('details')).every(d => d.open)")
        assert browser.run("document.documentElement.scrollWidth") <= 717
        assert browser.run(OVERLAPPING) == []
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def axe():
    """The text of axe-core: of the file that MEMLEDGER_AXE names, else of a package that holds it."""
    if named := os.environ.get("MEMLEDGER_AXE"):
        return Path(named).read_text(encoding="utf-8")
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None:
        pytest.skip("axe-core is not installed: pip install --no-deps axe-playwright-python")
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


HOSTILE = (
    "<script>window.stolen = 1</script>",
    "</script><script>window.stolen = 2</script>",
    "<img src=http://evil.example/x.png onerror=window.stolen=3>",
    '"><svg onload=window.stolen=4>',
    "<a href='javascript:window.stolen=5'>press</a>",
    "\u2028window.stolen = 6\u2029",
    "\x1b]8;;http://evil.example\x07press\x1b]8;;\x07\x1b[31mred",
    "<!--<script>",
    "{{ 7 * 7 }} {% raw %} %{text}",
)


def hostile_log(folder):
    """The demo's log with markup in every line that a figure comes from, and in the model's name."""
    lines = (FIXTURES / "demo" / "server.log").read_text(encoding="utf-8").splitlines()
    marked = [f"{line} {HOSTILE[0]} {HOSTILE[i % len(HOSTILE)]}" for i, line in enumerate(lines)]
    marked = [line.replace("Qwen3.8-27B-FP8", "Qwen3.8<script>window.stolen=8</script>") for line in marked]
    target = folder / "<script>window.stolen=9<.script>.log"
    target.write_text("\n".join(marked) + "\n", encoding="utf-8")
    return target


def test_what_a_log_injects_stays_text(browser, tmp_path):
    page = tmp_path / "page.html"
    app.run(
        ["explain", str(hostile_log(tmp_path)), "--no-live", "--html", str(page), "--all-findings", "--unrecognized"]
    )
    assert page.stat().st_size < 6_000_000
    browser.open(page)
    assert browser.run("window.stolen") is None
    assert browser.complaints() == []
    assert browser.requests() == [page.resolve().as_uri()]
    assert browser.run("document.scripts.length") == 3
    assert (
        browser.run("document.querySelectorAll('main img, main a:not([href^=\"#\"]), [onerror], [onload]').length") == 0
    )
    text = browser.run("document.body.innerText")
    assert "<script>window.stolen = 1</script>" in text
    assert "{{ 7 * 7 }}" in text
    assert not {"\u2028", "\x1b", "\x07"} & set(text)
    # What is shown on hovering goes through the chart library, which reads tags in texts.
    hovered = browser.run(
        "JSON.stringify(Array.from(document.querySelectorAll('.chart')).flatMap(c => c.data.flatMap(t => t.hovertext || [])))"
    )
    assert "&lt;script&gt;" in hovered
    assert "<script" not in hovered.lower()
    assert "<a " not in hovered.lower()


def test_a_line_number_leads_to_its_line(browser, pages):
    browser.open(pages("demo"))
    missing = browser.run(
        "Array.from(document.querySelectorAll('a[href^=\"#\"]')).filter(a => !document.getElementById(a.getAttribute('href').slice(1))).length"
    )
    assert missing == 0
    assert browser.run("document.querySelectorAll('main a[href^=\"#line-\"]').length") > 5


def test_it_follows_the_readers_colours(browser, pages):
    light = "getComputedStyle(document.body).backgroundColor"
    browser.open(pages("demo"))
    first = browser.run(light)
    browser.open(pages("demo"), dark=True)
    assert browser.run(light) != first
    assert browser.run("document.querySelector('.chart').layout.font.color") == "#e8eaed"
