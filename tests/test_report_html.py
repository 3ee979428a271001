"""The HTML report as text: one file, nothing loaded, log text is text, and the figures of the other reports."""

import base64
import hashlib
import html as standard
import itertools
import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from sample_reports import at, dense, dense_rank, gib, hybrid, rank, report

from memledger.around import Neighbour
from memledger.cli import app
from memledger.grammar import load_rules
from memledger.history import History, Sample, Track, look_again
from memledger.ledger import Evidence, Input, Residual, entry
from memledger.pipeline import explain
from memledger.report import html, html_charts, html_page, html_time
from memledger.report.html_page import Chapter, Page, Section
from memledger.report.view import Options

FIXTURES = Path(__file__).parent.parent / "fixtures"
pytest.importorskip("jinja2")
pytest.importorskip("plotly")


class Document(HTMLParser):
    """Every element with its attributes, the text of scripts, and the text outside of them."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.text, self.stack = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.stack.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag in self.stack:
            while self.stack.pop() != tag:
                pass

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "script":
            self.scripts[-1] += data
        elif not self.stack or self.stack[-1] != "style":
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    @property
    def charts(self):
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def page():
    return html.document(report(hybrid()), Options(command="memledger explain server.log"))


@pytest.fixture(scope="module")
def document(page):
    return Document(page)


class TestOneFile:
    def test_it_is_smaller_than_six_megabytes(self, page):
        assert len(page.encode()) < 6_000_000

    def test_no_element_names_an_address(self, document):
        loading = {"src", "srcset", "data", "action", "formaction", "poster", "background", "ping", "manifest"}
        assert not [e for e in document.elements if loading & e[1].keys()]
        assert not [
            e for e in document.elements if e[0] in {"link", "iframe", "object", "embed", "img", "base", "form"}
        ]
        assert all(attrs["href"].startswith("#") for _, attrs in document.elements if "href" in attrs)

    def test_the_policy_names_the_scripts_by_their_hashes_and_allows_no_address(self, document):
        (policy,) = (a["content"] for _, a in document.elements if a.get("http-equiv") == "Content-Security-Policy")
        directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        assert directives["default-src"] == "'none'"
        wanted = [
            f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in document.scripts[1:]
        ]
        assert directives["script-src"].split() == wanted
        assert not re.search(r"https?:|\*|data:|unsafe-eval|(?<!style-src )'unsafe-inline'", policy)

    def test_the_style_sheet_loads_nothing(self, page):
        style = page[page.index("<style>") : page.index("</style>")]
        assert "url(" not in style
        assert "@import" not in style
        assert "prefers-color-scheme: dark" in style
        assert "@media print" in style


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


class TestColours:
    """Text on a bar has the contrast that WCAG asks for (4.5); no checker looks into a drawing."""

    def test_white_text_on_every_account(self):
        script = (html_page._TEMPLATES / "report.js").read_text(encoding="utf-8")
        colours = re.findall(
            r"#[0-9a-f]{6}", script.partition("const COLOURS")[2].partition("const MORE")[2].partition(";")[0]
        )
        colours += re.findall(r"#[0-9a-f]{6}", script.partition("const COLOURS")[2].partition("};")[0])
        assert len(set(colours)) > 12
        assert [c for c in set(colours) if contrast(c, "#ffffff") < 4.5] == []

    def test_text_on_rising_falling_and_level_columns(self):
        style = (html_page._TEMPLATES / "report.css").read_text(encoding="utf-8")
        themes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
        assert len(themes) == 3
        for theme in themes:
            named = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", theme))
            on = {"#fff": "#ffffff"}.get(named["on"], named["on"])
            assert [n for n in ("rise", "fall", "level") if contrast(named[n], on) < 4.5] == []


class TestContent:
    def test_the_cause_comes_first_and_then_what_to_do(self):
        text = Document(explained(FIXTURES / "demo" / "server.log")).words
        assert text.index("The cause") < text.index("What to do") < text.index("Where the memory is")
        assert text.index("Where the memory is") < text.index("Free memory, stage by stage") < text.index("Log lines")

    def test_findings_carry_their_flags_as_they_are_typed(self):
        log = FIXTURES / "demo" / "server.log"
        text = Document(explained(log)).words
        assert "--max-mamba-cache-size 20" in text
        assert "recurrent state -14.91 GiB" in text

    def test_what_the_cause_says_is_not_said_again(self):
        text = Document(explained(FIXTURES / "demo" / "server.log")).words
        assert text.count("At most 3 ever ran: 15.6 GiB were never needed") == 1
        assert re.search(r"ML101 Lines 66 , 91 \.", text)
        assert "state slots idle ML101 --max-mamba-cache-size 20 recurrent state -14.91 GiB" in text

    def test_a_heading_is_not_shown_twice(self, tmp_path):
        target = Document(incident("oom-sglang-capture", tmp_path))
        hidden = [a for _, a in target.elements if a.get("class") == "unseen"]
        assert target.words.count("Who held the memory") == 2
        assert len(hidden) == 1

    def test_an_advice_is_named_by_what_it_changes(self, tmp_path):
        text = Document(incident("oom-sglang-capture", tmp_path)).words
        assert "Lower the memory fraction Lower --mem-fraction-static from 0.93 to 0.91" in text
        assert "Need less memory Or capture fewer sizes" in text

    def test_every_chart_has_a_name_and_its_figures_in_a_table(self, document):
        places = [a for _, a in document.elements if "data-chart" in a]
        assert len(places) == len(document.charts) == 4
        assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in places)
        for size in ("28.47", "20.16", "17.92", "8.90", "10.08", "17.58"):
            assert size in document.words

    def test_headings_leave_no_level_out(self, document):
        levels = [int(tag[1]) for tag, _ in document.elements if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(later <= before + 1 for before, later in itertools.pairwise(levels))

    def test_no_id_stands_twice_and_every_link_leads_somewhere(self, document):
        ids = [a["id"] for _, a in document.elements if "id" in a]
        assert len(ids) == len(set(ids))
        assert {a["href"][1:] for _, a in document.elements if "href" in a} <= set(ids)

    def test_two_servers_are_two_chapters(self):
        text = html.document(report(hybrid(label="one"), dense(label="two")))
        parsed = Document(text)
        ids = [a["id"] for _, a in parsed.elements if "id" in a]
        assert len(ids) == len(set(ids))
        assert sum(a.get("class") == "chapter" for _, a in parsed.elements) == 2

    def test_a_rank_that_is_not_there_is_an_error(self):
        with pytest.raises(LookupError, match="no rank"):
            html.document(report(hybrid()), Options(rank="TP7"))


class TestCharts:
    def test_the_parts_of_a_bar_sum_to_the_opening_balance(self):
        one = hybrid()
        (figure, *_) = html._where(one, one.ranks, html.v.build(report(one), 0, Options()))
        total = sum(part.values[0] or 0 for part in figure.chart.parts)
        assert total == pytest.approx(78.48, abs=0.001)

    def test_each_rank_has_its_bar(self):
        server = dense(ranks=tuple(dense_rank(tp) for tp in range(8)))
        figure = html._where(server, server.ranks, html.v.build(report(server), 0, Options()))[0]
        assert figure.chart.bars == tuple(f"TP{tp}" for tp in range(8))

    def test_ranks_without_end_share_bars(self):
        server = dense(ranks=tuple(dense_rank(tp) for tp in range(64)))
        figure = html._where(server, server.ranks, html.v.build(report(server), 0, Options()))[0]
        assert len(figure.chart.bars) == 1

    def test_hovering_shows_bytes_tolerance_basis_and_the_line(self):
        one = hybrid()
        figure = html._where(one, one.ranks, html.v.build(report(one), 0, Options()))[0]
        (weights,) = (part for part in figure.chart.parts if part.name == "weights")
        for word in ("28.47 GiB", "±<0.01", f"{gib(28.47).bytes:,} bytes", "logged", "line 71: text of line 71"):
            assert word in weights.hover[0]

    def test_a_negative_row_is_said_where_it_has_no_area(self):
        entries = (
            entry("weights/model", gib(30.0), "logged", stage="weights", evidence=at(1)),
            entry("kv_cache/k", gib(10.0), "logged", stage="pools", evidence=at(2)),
            entry("released", gib(-2.0), "derived", stage="pools"),
            entry("free", gib(5.0), "logged", stage="final", evidence=at(3)),
        )
        figure = html_charts.tree_of("GPU 0", rank(43.0, [("final", 5.0)], entries))
        assert all(node.value >= 0 for node in figure.chart.nodes)
        assert "given back -2.00 GiB" in figure.says
        assert any("given back -2.00 GiB" in remark for remark in figure.table.remarks)

    def test_over_counting_is_no_area_either(self):
        entries = (
            entry("weights/model", gib(30.0), "logged", stage="weights"),
            entry("free", gib(5.0), "logged", stage="final"),
        )
        figure = html_charts.tree_of("GPU 0", rank(33.0, [("final", 5.0)], entries))
        assert "exceed what memory fell by 2.00 GiB" in figure.says
        assert "unexplained" not in {node.id for node in figure.chart.nodes}

    def test_stages_chain_from_the_first_reading_to_the_last(self):
        columns = html_charts.free_memory("GPU 0", hybrid().ranks[0]).chart.columns
        assert columns[0].level
        assert columns[-1].level
        assert columns[0].value + sum(c.value for c in columns[1:-1]) == pytest.approx(columns[-1].value, abs=0.001)

    def test_a_stage_whose_reading_is_not_in_the_log_is_in_the_table_and_not_drawn(self):
        one = hybrid().ranks[0]
        first = msgspec.structs.replace(one.stages[0], free_before_bytes=None)
        figure = html_charts.free_memory("GPU 0", msgspec.structs.replace(one, stages=(first, *one.stages[1:])))
        assert "weights" not in {column.label for column in figure.chart.columns}
        assert figure.table.rows[0][1].text == "?"

    def test_without_serving_lines_nothing_is_called_used(self):
        silent = hybrid(usage=type(hybrid().usage)())
        assert html_charts.uses_of(silent, silent.ranks) is None

    def test_what_the_last_stage_takes_as_reserve_is_kept_free(self):
        server = explain([str(FIXTURES / "vllm-0.31-tp2" / "server.log")]).servers[0]
        (figure, *_) = html._stages(server, server.ranks)
        assert [c.label for c in figure.chart.columns][-2:] == ["final", "kept free"]
        assert figure.chart.columns[-1].value == pytest.approx(5.12, abs=0.005)
        assert "5.12 GiB of the last fall are kept free" in figure.table.remarks[0]

    def test_where_no_free_memory_is_read_nothing_is_said_to_be_used_up(self):
        one = explain([str(FIXTURES / "vllm-0.17-oom-serving" / "server.log")]).servers[0].ranks[0]
        figure = html_charts.free_memory("TP0", one)
        told = [(c.label, c.text) for c in figure.chart.columns]
        assert told == [
            ("card total", "79.18"),
            ("weights", "-31.62"),
            ("KV cache", "-37.64"),
            ("CUDA graphs", "-0.81"),
            ("rest", "9.11"),
        ]
        assert [c.level for c in figure.chart.columns] == [True, False, False, False, True]
        assert "free or held by what it does not name" in figure.says
        assert [row[1].text for row in figure.table.rows] == [text for _, text in told]

    def test_a_reading_of_nothing_free_is_a_reading(self):
        entries = (entry("weights/model", gib(30.0), "logged"), entry("free", gib(0.0), "logged", stage="final"))
        figure = html_charts.free_memory("GPU 0", rank(30.0, [("final", 0.0)], entries))
        assert [(c.label, c.text) for c in figure.chart.columns][-1] == ("free after", "0.00")

    @pytest.mark.parametrize("name", ["vllm-0.17-oom-serving", "demo", "vllm-0.31-tp2"])
    def test_bar_and_areas_call_what_is_left_by_the_same_name(self, name):
        server = explain([str(FIXTURES / name / "server.log")]).servers[0]
        stack, tree, *_ = html._where(server, server.ranks[:1], html.v.build(report(server), 0, Options()))
        left = {p.name for p in stack.chart.parts if p.colour == "unexplained" and (p.values[0] or 0) > 0.01}
        assert {n.label.rpartition(" ")[0] for n in tree.chart.nodes if n.colour == "unexplained"} == left

    def test_a_column_without_a_figure_is_left_out_of_the_ledger(self):
        one = rank(43.0, [("final", 5.0)], (entry("weights/model", gib(30.0), "logged"),))
        (table,) = html.v.rank_tables(
            dense(), [msgspec.structs.replace(one, residual=Residual(None, None, None, "open"))]
        )
        assert [head.text for head in html_charts.ledger_grid(table).heads] == ["account", "GiB", "±", "basis", "note"]

    def test_peaks_are_shares_of_the_pool(self):
        one = hybrid()
        pools = {pool.label: pool.share for pool in html_charts.uses_of(one, one.ranks).chart.pools}
        assert pools == {"KV cache": 0.12, "recurrent state": 0.12, "running requests": 3 / 24}


class TestOverTime:
    def figures(self, name):
        report = explain([str(FIXTURES / name / "server.log")])
        server = report.servers[0]
        return html_time.over_time(server, server.ranks, look_again(report, load_rules()).tracks[0])

    def test_pools_and_requests_stand_at_the_same_moments(self):
        (figure,) = self.figures("vllm-0.31-tp2")
        chart = figure.chart
        assert chart.places == (0.0, 10.0, 20.0, 30.0)
        assert chart.unit == "seconds since the first serving line"
        assert [(c.name, c.values) for c in chart.shares] == [("KV cache (of 35.57 GiB)", (0.009, 0.441, 0.992, 0.9))]
        assert [(c.name, c.values[2]) for c in chart.counts] == [("running requests", 201), ("queued requests", 12)]
        assert "line 43, 10-08 16:51:40\nKV cache: 99.2 % of 35.57 GiB\nrunning requests: 201" in chart.hover[2]

    def test_a_hybrid_shows_both_of_its_pools(self):
        (figure,) = self.figures("demo")
        assert [c.name for c in figure.chart.shares] == ["KV cache (of 20.16 GiB)", "recurrent state (of 17.92 GiB)"]
        assert max(v for v in figure.chart.shares[1].values if v is not None) == 0.12

    def test_over_a_silence_no_line_is_drawn(self):
        seconds = (*map(float, range(50)), 5000.0, 5001.0)
        samples = tuple(Sample(0, i, None, running=1) for i in range(52))
        (figure,) = html_time.over_time(dense(), (), [Track("", samples, seconds)])
        assert figure.chart.breaks == (50,)
        assert self.figures("vllm-0.31-tp2")[0].chart.breaks == ()

    def test_the_table_holds_the_largest_of_each_stretch(self):
        (figure,) = self.figures("demo")
        rows = figure.table.rows
        assert len(rows) == html_time.MOST_ROWS
        assert {row[-2].text for row in rows} >= {"3"}
        assert "largest figures" in figure.table.remarks[0]

    def test_of_many_schedulers_the_fullest_are_drawn_and_the_rest_named(self):
        figures = self.figures("sglang-0.4.10-mla-dp-attention")
        assert [f.title.rpartition(", ")[2] for f in figures] == ["DP5", "DP2", "DP3", "DP1"]
        report = explain([str(FIXTURES / "sglang-0.4.10-mla-dp-attention" / "server.log")])
        made = html.document(report, Options(), look_again(report, load_rules()))
        assert "4 more schedulers with emptier pools are not drawn." in Document(made).words

    def test_why_nothing_is_drawn_is_said(self):
        report = explain([str(FIXTURES / "demo" / "server.log")])
        why = "what was read from a pipe can&#39;t be read a second time"
        assert why in html.document(report, Options(), History({}, {0: standard.unescape(why)}))


class TestLogLines:
    def test_neighbours_stand_beside_what_is_quoted_in_order(self):
        quoted = [Evidence(0, 5, "five"), Evidence(0, 6, "six"), Evidence(0, 20, "twenty")]
        around = [Neighbour(0, line, str(line)) for line in (3, 4, 7, 8, 18, 19, 21, 22)]
        rows = html_page._rows(quoted, around, several=False)
        assert [row.place for row in rows] == ["3", "4", "5", "6", "7", "8", "18", "19", "20", "21", "22"]
        assert [row.anchor for row in rows if row.anchor] == ["line-1-5", "line-1-6", "line-1-20"]
        assert [row.place for row in rows if row.gap] == ["18"]

    def test_where_quoted_lines_give_way_their_neighbours_go_with_them(self):
        around = [Neighbour(0, line, str(line)) for line in (4, 6, 19, 21)]
        rows = html_page._rows([Evidence(0, 5, "five")], around, several=False)
        assert [row.place for row in rows] == ["4", "5", "6"]

    def test_a_command_reads_them_from_the_log(self, capsysbinary):
        log = FIXTURES / "oom-vllm-prefill" / "server.log"
        assert app.run(["oom", str(log), "--no-live", "--format", "html"]) == 0
        parsed = Document(capsysbinary.readouterr().out.decode())
        beside = [attrs for tag, attrs in parsed.elements if tag == "li" and "beside" in attrs.get("class", "")]
        assert len(beside) >= 4


def test_a_flag_is_not_broken_and_its_text_stays_text():
    made = str(html_page._with_flags("use --max-num-seqs 4 <b>--x-y</b> a--b"))
    assert made == (
        'use <span class="flag">--max-num-seqs</span> 4 &lt;b&gt;<span class="flag">--x-y</span>&lt;/b&gt; a--b'
    )


HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "<a href=javascript:alert(3)>press</a>",
    "' onmouseover='alert(4)",
    "{{ 7 * 7 }}",
    "\u2028alert(5)\u2029",
    "\x1b[31mred\x1b]8;;http://evil.example\x07press",
    "token=hf_abcdefghijklmnopqrstuvwxyz",
)


@pytest.mark.parametrize("text", HOSTILE)
class TestHostileText:
    def test_it_stays_text_wherever_it_comes_from(self, text):
        found = entry("weights/model", gib(30.0), "logged", stage="weights", evidence=at(1, text), note=text)
        free = entry("free", gib(5.0), "logged", stage="final", evidence=at(2, text))
        one = rank(35.0, [("weights", 5.0)], (found, free), host=text)
        server = hybrid(
            model=text,
            label=text,
            framework_version=text,
            ranks=(one, msgspec.structs.replace(one, tp=1)),
            notes=(text,),
        )
        parsed = Document(html.document(report(server, paths=(text,)), Options(command=text)))
        assert len(parsed.scripts) == 3
        assert not [e for e in parsed.elements if any(name.startswith("on") for name in e[1])]
        assert all(attrs["href"].startswith("#") for _, attrs in parsed.elements if "href" in attrs)
        shown = parsed.words + parsed.scripts[0]
        assert not {"\u2028", "\u2029", "\x1b", "\x07"} & set(shown)
        assert "hf_abcdefghijklmnop" not in shown
        assert "49" not in re.findall(r"(?<![\d.,])49(?![\d.,])", parsed.words)

    def test_charts_hold_no_character_that_ends_their_script(self, text):
        chart = html_page.Waterfall((html_page.Fall(text, 1.0, f"{text}\n{text}"),))
        written = html_page.embedded_json([chart])
        assert not set("<>&\u2028\u2029") & set(written)
        assert len(json.loads(written)[0]["columns"][0]["hover"].split("\n")) == 2


def test_text_of_a_log_is_shown_in_full():
    line = Evidence(0, 71, "<b>&amp; \"quoted\" 'text' {{ x }}")
    found = entry("weights/model", gib(30.0), "logged", stage="weights", evidence=(line,))
    one = rank(35.0, [("weights", 5.0)], (found, entry("free", gib(5.0), "logged", stage="final")))
    text = html.document(report(hybrid(ranks=(one,))))
    assert standard.escape(line.text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;") in text


class TestSize:
    def test_quoted_lines_give_way_first(self):
        long = tuple(Evidence(0, i, "x" * 3900) for i in range(1, 399))
        made = html_page.render(
            Page("memledger", "t", (Chapter("c", (Section("s", items=("kept",)),)),), (Input("a", 1, 1),), long)
        )
        assert len(made.encode()) < html_page.MOST_BYTES
        assert "358 more lines are named in the tables" in made
        assert "kept" in made

    def test_then_chapters(self):
        chapters = tuple(Chapter(f"start {i}", (Section("s", items=("y" * 3000,) * 40),)) for i in range(40))
        made = html_page.render(Page("memledger", "t", chapters))
        assert len(made.encode()) < html_page.MOST_BYTES
        assert "36 more chapters are left out" in made

    def test_what_can_not_fit_is_said(self):
        chapter = Chapter("c", (Section("s", items=("y" * 3900,) * 400),))
        with pytest.raises(html_page.TooLargeError, match="--start N"):
            html_page.render(Page("memledger", "t", (chapter,)))


# ------------------------------------------------------------------------------------------------------ the command line


def explained(log, *more):
    from memledger.cli import reading

    return html.document(reading.read([str(log)], [], None, look_here=False).report, Options(*more))


def incident(name, folder):
    page = folder / "incident.html"
    assert app.run(["oom", str(FIXTURES / name / "server.log"), "--no-live", "--html", str(page)]) == 0
    return page.read_text(encoding="utf-8")


class TestCommands:
    def test_a_file_beside_the_usual_report(self, tmp_path, capsysbinary):
        target = tmp_path / "page.html"
        log = str(FIXTURES / "demo" / "server.log")
        assert app.run(["explain", log, "--no-live"]) == 0
        without = capsysbinary.readouterr()
        assert app.run(["explain", log, "--no-live", "--html", str(target)]) == 0
        assert capsysbinary.readouterr() == without
        assert target.read_bytes().startswith(b"<!DOCTYPE html>")
        assert list(tmp_path.iterdir()) == [target]

    def test_a_page_on_stdout(self, capsysbinary):
        log = str(FIXTURES / "demo" / "server.log")
        assert app.run(["explain", log, "--no-live", "--format", "html"]) == 0
        out = capsysbinary.readouterr().out
        assert out.startswith(b"<!DOCTYPE html>")
        assert out.endswith(b"</html>")

    @pytest.mark.parametrize(
        ("command", "says"),
        [
            (["compare", "compare-weights/a.log", "compare-weights/b.log"], "Steps from A to B"),
            (
                ["compare", "compare-weights/a.log", "compare-weights/b.log", "compare-capped/a.log"],
                "3 runs side by side",
            ),
            (["plan", "demo/server.log", "--concurrency", "4", "--context", "32k"], "--max-running-requests 4"),
            (["oom", "oom-vllm-prefill/server.log"], "--max-num-batched-tokens 4096"),
            (["oom", "oom-vllm-weights/server.log", "oom-sglang-kv-pool/server.log"], "Other incidents"),
            (["oom", "demo/server.log"], "No line says that memory ran out"),
        ],
    )
    def test_the_other_commands_have_a_page_too(self, tmp_path, monkeypatch, capsysbinary, command, says):
        monkeypatch.chdir(FIXTURES)
        target = tmp_path / "page.html"
        code = app.run([*command, "--no-live"])
        without = capsysbinary.readouterr()
        assert app.run([*command, "--no-live", "--html", str(target)]) == code
        assert capsysbinary.readouterr() == without
        assert says in Document(target.read_text(encoding="utf-8")).words

    def test_the_waterfall_of_a_comparison_ends_at_b(self, tmp_path, monkeypatch, capsysbinary):
        monkeypatch.chdir(FIXTURES)
        target = tmp_path / "page.html"
        app.run(["compare", "compare-weights/a.log", "compare-weights/b.log", "--no-live", "--html", str(target)])
        (chart,) = Document(target.read_text(encoding="utf-8")).charts
        first, *steps, last = chart["columns"]
        assert first["value"] + sum(step["value"] for step in steps) == last["value"]

    def test_what_can_not_be_written_is_said_and_leaves_the_old_file(self, tmp_path, capsysbinary):
        assert app.run(["demo", "--html", str(tmp_path / "none" / "page.html")]) == 74
        assert b"--html" in capsysbinary.readouterr().err

    @pytest.mark.parametrize(
        "command",
        [
            ["explain", "nothing.log"],
            ["demo"],
            ["compare", "a.log", "b.log"],
            ["plan", "a.log", "--concurrency", "1", "--context", "1"],
            ["oom", "a.log"],
        ],
    )
    @pytest.mark.parametrize("how", [["--html", "page.html"], ["--format", "html"]])
    def test_without_the_extra_one_sentence_names_the_command(self, tmp_path, monkeypatch, capsysbinary, command, how):
        monkeypatch.chdir(tmp_path)
        there = html_page.importlib.util.find_spec
        gone = {"jinja2", "plotly"}
        monkeypatch.setattr(html_page.importlib.util, "find_spec", lambda name: None if name in gone else there(name))
        assert app.run([*command, *how]) == 2
        out, err = capsysbinary.readouterr()
        assert out == b""
        assert err.decode().splitlines() == [
            f"Error: An HTML report needs jinja2 and plotly: {shlex.quote(sys.executable)} -m pip install 'jinja2>=3.1' 'plotly>=6.0'"
        ]
        assert not list(tmp_path.iterdir())

    def test_nothing_recognised_writes_no_page(self, tmp_path, capsysbinary):
        log = tmp_path / "a.log"
        log.write_text("nothing of interest\n")
        assert app.run(["explain", str(log), "--html", str(tmp_path / "page.html")]) == 3
        assert not (tmp_path / "page.html").exists()

    def test_a_report_in_a_terminal_imports_none_of_it(self):
        names = "{'jinja2', 'plotly', 'markupsafe', 'memledger.report.html', 'memledger.report.html_page', 'memledger.cli.html_output'}"
        code = f"import sys; from memledger.cli.app import run; run(['demo']); print(sorted({names} & set(sys.modules)), file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "[]"

    def test_a_page_does_not_import_plotly(self, tmp_path):
        code = f"import sys; from memledger.cli.app import run; run(['demo', '--html', {str(tmp_path / 'p.html')!r}]); print('plotly' in sys.modules, file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "False"
