"""The Markdown report is for pasting into an issue thread: heading, cause, table, details; and nothing in it can be markup."""

import pytest
from sample_reports import at, dense, gib, hybrid, rank, report

from memledger import findings
from memledger.ledger import Evidence, Failure, Unrecognized, Usage, entry
from memledger.report.markdown import escape, render
from memledger.report.view import Options


def markdown(*servers, options=None, **changes):
    return render(findings.attach(report(*servers, **changes)), options)


def test_heading_cause_table_facts():
    lines = markdown(hybrid()).splitlines()
    assert lines[0].startswith("### SGLang 0.5.18 · Qwen3.8-27B-FP8 · 1 GPU")
    assert lines[2].startswith("**17.9 GiB is recurrent state for 124 slots")
    assert lines[2].endswith("`ML101`")
    assert lines[4].startswith("| GPU 0")
    assert set(lines[5]) <= set("|:-")
    assert any(line.startswith("- capacity: 330,323 KV tokens") for line in lines)
    assert lines[-1] == "<sub>memledger 0.1.0, from server.log</sub>"


def test_every_row_has_as_many_cells_as_the_head():
    output = markdown(hybrid(), dense(), options=Options(all_starts=True))
    rows = [line for line in output.splitlines() if line.startswith("|")]
    assert len(rows) > 15
    assert {line.count("|") - line.count("\\|") for line in rows} == {7}


def test_evidence_and_other_starts_are_folded_away():
    output = markdown(dense(), hybrid(), options=Options(evidence=True))
    assert "<details><summary>Log lines</summary>" in output
    assert "line 88: text of line 88" in output
    assert "<details><summary>Other starts</summary>" in output


def test_the_footer_is_the_last_line_once():
    output = markdown(dense(), hybrid(), options=Options(all_starts=True))
    assert output.count("<sub>") == 1
    assert markdown(dense(), hybrid()).splitlines()[-1].startswith("<sub>")


def test_codes_look_alike_and_the_advice_is_there():
    server = hybrid(
        usage=Usage(peak_running_requests=3, peak_kv_usage=0.99, peak_queued_requests=2, retractions=50, seen=True)
    )
    output = markdown(server)
    assert "`ML101`" in output
    assert "`ML504`" in output
    assert "\\[ML" not in output
    assert "- next: memledger explain --gpu-total SIZE (the card's size or name)" in output


def test_a_share_is_never_minus_zero():
    entries = (
        entry("weights/model", gib(15.0), "logged", stage="weights"),
        entry("free", gib(8.51), "logged", stage="final"),
    )
    output = markdown(dense(ranks=(rank(23.5, [("weights", 8.51)], entries),)))
    assert "-0.0" not in output.replace("-0.01", "")
    assert "| -0.01 |" in output.replace("  ", "")


def test_unread_lines_on_request():
    unread = Unrecognized(1, (Evidence(0, 5, "New pool: 3.50 GB"),))
    assert "New pool" not in markdown(dense(), unrecognized=unread)
    assert "line 5: New pool: 3.50 GB" in markdown(dense(), unrecognized=unread, options=Options(unrecognized=True))


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a|b", "a\\|b"),
        ("`code` *x* _y_", "\\`code\\` \\*x\\* \\_y\\_"),
        ("<script>&amp;", "&lt;script&gt;&amp;amp;"),
        ("[x](http://e)", "\\[x\\](http://e)"),
        ("two\nlines", "two lines"),
        ("thanks @someone, see #12", "thanks @<!-- -->someone, see #<!-- -->12"),
        ("0.1.0 is #tokens", "0.1.0 is #tokens"),
    ],
)
def test_nothing_is_taken_for_markup(text, escaped):
    assert escape(text) == escaped


def test_a_fence_is_longer_than_any_in_the_quoted_lines():
    server = dense(failures=(Failure("decode", "serving", {}, at(3, "```evil``` <b>")),))
    output = markdown(server, options=Options(evidence=True))
    assert "````text\n" in output
    assert "<b>" in output.split("````text")[1].split("````")[0]
    assert "<b>" not in output.split("````text")[0]
