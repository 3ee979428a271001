"""The reports on incidents: text, Markdown and JSON of one view, with nothing of an input in them unclean."""

import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest
from sample_incidents import at, negative, prefill, report, server

from memledger.ledger import Input
from memledger.postmortem.incident import KINDS, Advice, Holder, Numbers, Phase
from memledger.report import oom_markdown, oom_text
from memledger.report.oom_json import encode, schema, schema_text
from memledger.report.oom_view import PHASES, build, confidence, headline, state_words
from memledger.report.text import Style

SCHEMA_FILE = Path(__file__).parent.parent / "docs" / "schema" / "oom.schema.json"
HOSTILE = "\x1b[31mred\x1b[0m \u202eevil api_key=abcdefgh12345678 `x` <b> | @someone\nsecond line"


def text(*incidents, **options):
    return oom_text.render(report(*incidents), Style(80), **options)


def test_the_schema_in_docs_is_current(update_golden):
    if update_golden:
        SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "pytest --update-golden writes it anew"


@pytest.mark.parametrize("incidents", [(), (prefill(),), (prefill(), negative())], ids=["none", "one", "two"])
def test_json_is_valid_against_the_schema(incidents):
    document = json.loads(encode(report(*incidents)))
    jsonschema.Draft202012Validator(schema()).validate(document)
    assert document["schema"] == "memledger/1"
    assert len(document["incidents"]) == len(incidents)


def test_json_has_the_names_of_the_contract_and_unknown_is_null():
    incident = json.loads(encode(report(prefill(numbers=Numbers(gpu_index=0), at=None))))["incidents"][0]
    assert incident["kind"] == "prefill"
    assert incident["at"] is None
    assert incident["numbers"]["requested_bytes"] is None
    assert incident["numbers"]["other_processes"] == []
    assert {"phase", "confidence", "cause", "server", "findings", "evidence"} <= incident.keys()


def test_the_cause_comes_first_and_its_confidence_is_said_in_words():
    lines = text(prefill()).splitlines()
    assert lines[0].startswith("vLLM 0.25.0 · example-hybrid-30b · GPU 3 · TP0, TP1")
    cause = lines.index("") + 1
    assert lines[cause] == "A prefill of 8,192 tokens asked for 2.00 GiB with 1.91 GiB free."
    assert lines[cause + 1].startswith("Likely: a conclusion")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [60, 80, 132])
def test_no_line_is_wider_than_asked(width):
    shown = oom_text.render(report(prefill(), negative()), Style(width), everything=True)
    wide = [line for line in shown.splitlines() if len(line) > width and "CUDA_LAUNCH_BLOCKING" not in line]
    assert wide == []


def test_the_table_says_who_held_the_memory_and_sums_to_the_total():
    rows = {
        found.group(1).strip(): float(found.group(2))
        for line in text(prefill()).splitlines()
        if (found := re.match(r"( {0,2}[a-zA-Z,0-9 ]+?) {2,}(?:[▏▎▍▌▋▊▉█]+ +)?(\d+\.\d\d) ", line))
    }
    held = rows["this process"] + rows["process 4242"] + rows["free"] + rows["unaccounted"]
    assert held == pytest.approx(rows["total"], abs=0.02)
    assert rows["asked for"] == 2.0


def test_a_size_that_is_not_available_is_a_question_mark_and_never_a_number():
    shown = text(prefill(holders=(Holder("this process", None, note="not available: printed as all ones"),)))
    row = next(line for line in shown.splitlines() if line.startswith("this process"))
    assert " ? " in row


def test_what_was_asked_what_the_server_did_and_what_followed_are_there():
    shown = " ".join(text(prefill()).split())
    assert "asked 2.00 GiB: between 1.995" in shown or "asked 2 GiB: between 1.995" in shown
    assert (
        "doing 1 running, 0 waiting; KV 12 %, 8,192 tokens scheduled (vLLM's crash dump, 2026-09-09 12:03:11)" in shown
    )
    assert "then 2026-09-09 12:03:12: EngineDeadError (4 times)" in shown
    assert "CUDA out of memory (" not in shown, "the cause is no consequence of itself"


def test_the_timeline_says_the_day_once():
    shown = text(prefill())
    assert "before it, 2026-09-09" in shown
    assert re.search(r"^11:51:00 +54\.82 +weights loaded$", shown, re.MULTILINE)
    assert re.search(r"^12:03:11 +1\.91  the failure$", shown, re.MULTILINE)


def test_candidates_come_with_the_command_that_decides_and_advice_with_its_flags():
    shown = text(prefill())
    assert "decide     CUDA_LAUNCH_BLOCKING=1 memledger oom server.log" in shown
    assert "flags      --gpu-memory-utilization 0.89" in shown
    assert "do 4.7 GiB less for the pools" in " ".join(shown.split())


def test_the_direction_of_an_advice_is_said_where_its_text_does_not():
    plain = Advice("raise", "the fraction, by the 4.7 GiB that are missing")
    assert "do raise: the fraction, by the 4.7 GiB" in " ".join(text(prefill(advice=(plain,))).split())


def test_a_negative_says_that_it_is_no_device_out_of_memory_and_why():
    shown = " ".join(text(negative()).split())
    assert "Not a device out-of-memory: a Triton kernel asked for 163,840 bytes" in shown
    again = negative(cause="This is not a device out-of-memory: tokens ran out")
    assert headline(again).lower().count("not a device out-of-memory") == 1


def test_of_several_incidents_the_fatal_one_is_shown_in_full_and_the_others_in_a_line():
    shown = text(negative(fatal=False), prefill())
    assert shown.startswith("vLLM 0.25.0")
    assert "1 more (--all shows it in full)" in shown
    assert "Not a device out-of-memory" in shown
    assert "1 more" not in text(negative(fatal=False), prefill(), everything=True)


def test_no_incident_is_said_in_a_sentence():
    assert text() == "No line says that memory ran out: 1 start of a server (failed).\n"
    assert "No failure in it" in oom_text.render(report(servers=()), Style(80))


def test_evidence_is_printed_on_request_only():
    assert "line 9: a line" not in text(prefill())
    assert "line 9: a line" in text(prefill(), evidence=True)


def test_several_inputs_name_the_file_of_a_line():
    two = report(prefill(evidence=at(3, "x", 1)), inputs=(Input("a.log", 1, 1), Input("dmesg.txt", 1, 1)))
    assert "dmesg.txt:3: x" in oom_text.render(two, Style(80))


@pytest.mark.parametrize(
    ("value", "word"), [(0.95, "Certain"), (0.8, "Nearly"), (0.7, "Likely"), (0.4, "Possible"), (0.1, "Not known")]
)
def test_confidence_in_words(value, word):
    assert confidence(prefill(confidence=value)).startswith(word)


def test_every_phase_and_kind_has_words():
    assert set(PHASES) == set(Phase.__args__)
    for kind in KINDS:
        assert build(report(prefill(kind=kind)), 0).header


def test_unknown_figures_of_the_state_are_left_out():
    state = msgspec.structs.replace(prefill().state, running=None, waiting=None, kv_usage=None, basis=None, at=None)
    assert state_words(state) == "8,192 tokens scheduled"


def hostile():
    one = prefill(
        cause=HOSTILE, ranks=(HOSTILE,), notes=(HOSTILE,), collect=(HOSTILE,), evidence=at(1, HOSTILE), basis=HOSTILE, at=HOSTILE
    )  # fmt: skip
    return report(
        one, negative(cause=HOSTILE), servers=(server(model=HOSTILE, label=HOSTILE),), inputs=(Input(HOSTILE, 1, 1),)
    )


@pytest.mark.parametrize("render", [
    lambda r: oom_text.render(r, Style(80), everything=True, evidence=True),
    lambda r: oom_markdown.render(r, everything=True, evidence=True),
    lambda r: json.dumps({**json.loads(encode(r)), "inputs": []}, ensure_ascii=False),
], ids=["text", "markdown", "json"])  # fmt: skip
def test_nothing_of_an_input_reaches_a_report_unclean(render):
    shown = render(hostile())
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "abcdefgh12345678" not in shown


def test_markdown_escapes_what_would_be_markup():
    shown = oom_markdown.render(hostile())
    outside = re.sub(r"```.*?```", "", shown, flags=re.DOTALL)
    assert "<b>" not in outside
    assert "@someone" not in outside
    assert "`x`" not in outside


def test_markdown_has_the_same_cause_table_and_commands_as_the_text():
    shown = oom_markdown.render(report(prefill()))
    assert "**A prefill of 8,192 tokens asked for 2.00 GiB with 1.91 GiB free.**" in shown
    assert "| this process" in shown
    assert "--gpu-memory-utilization 0.89" in shown


def test_ascii_where_the_output_shows_no_more():
    shown = oom_text.render(report(prefill()), Style(80, unicode=False))
    assert shown.isascii()
    assert "92.57" in shown
