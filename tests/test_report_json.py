"""The JSON report keeps the contract of docs/json.md, and the schema in docs/ is the one of the types."""

import json
from pathlib import Path

import jsonschema
import pytest
from sample_reports import at, dense, dense_rank, hybrid, report

from memledger import findings
from memledger.ledger import Failure, Gpu, Unrecognized
from memledger.pipeline import explain
from memledger.report.json import encode, schema, schema_text
from memledger.resources import demo_log

DOCS = Path(__file__).resolve().parent.parent / "docs"
SCHEMA_FILE = DOCS / "schema" / "explain.schema.json"


def document(*servers, **changes):
    return json.loads(encode(findings.attach(report(*servers, **changes))))


def test_the_schema_in_docs_is_current(update_golden):
    if update_golden:
        SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "pytest --update-golden writes it anew"


@pytest.mark.parametrize(
    "servers",
    [
        (),
        (hybrid(),),
        (dense(), hybrid()),
        (dense(ranks=(), failures=(Failure("weights", "weights", {"free_bytes": 1}, at(3)),)),),
    ],
    ids=["nothing", "hybrid", "two starts", "failed"],
)
def test_reports_are_valid_against_the_schema(servers):
    jsonschema.Draft202012Validator(schema()).validate(document(*servers))


def test_the_schema_refuses_what_is_not_a_report():
    wrong = document(hybrid())
    wrong["servers"][0]["ranks"][0]["residual"]["verdict"] = "fine"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema()).validate(wrong)


def test_the_names_of_the_contract_are_there_and_unknown_is_null():
    got = document(hybrid())
    assert got["schema"] == "memledger/1"
    assert got["inputs"][0] == {"path": "server.log", "bytes": 1000, "lines": 100, "notes": []}
    server = got["servers"][0]
    assert server["framework"] == "sglang"
    assert server["label"] is None
    rank = server["ranks"][0]
    assert (rank["dp"], rank["tp"], rank["pid"]) == (None, 0, None)
    entry = next(e for e in rank["entries"] if e["account"] == "kv_cache/k")
    assert entry["basis"] == "logged"
    assert entry["evidence"] == [{"input": 0, "line": 88, "text": "text of line 88"}]
    assert rank["residual"]["base"] == "first_reading"
    assert rank["capacity"]["concurrency"] == {"tokens_per_request": None, "requests": None}
    assert server["usage"]["peak_running_requests"] == 3
    finding = next(f for f in server["findings"] if f["code"] == "ML101")
    assert finding["remedies"][0]["flags"] == ["--max-mamba-cache-size", "20"]
    effects = finding["remedies"][0]["effects"]
    assert effects[0] == {"account": "recurrent_state", "bytes": pytest.approx(-16e9, rel=0.01)}
    assert {"capacity": "state_slots", "change": -104} in effects


def test_stage_residuals_sum_to_the_rank_in_the_document():
    rank = document(hybrid())["servers"][0]["ranks"][0]
    assert sum(stage["residual"]["bytes"] for stage in rank["stages"]) == rank["residual"]["bytes"]


def test_every_start_is_in_the_document():
    assert len(document(dense(), dense(), hybrid())["servers"]) == 3


def test_text_from_the_log_is_cleaned_and_masked():
    server = dense(
        model="m\x1b[31m\u202e",
        label="svc\x07",
        config={"chat_template": "x\x00y", "extra": "--api-key sk-verysecret12345"},
        ranks=(dense_rank(gpu=Gpu(name="card\x1b[1m")),),
    )
    raw = encode(report(server)).decode()
    assert "\\u001b" not in raw
    assert "\\u0000" not in raw
    assert "verysecret" not in raw


def test_the_document_ends_in_a_newline_and_is_valid_utf_8():
    raw = encode(report(dense(model="\ud800x"), unrecognized=Unrecognized(1, at(3)), paths=("bad\udcff.log",)))
    assert raw.endswith(b"}\n")
    raw.decode("utf-8")


def example(demo):
    """The demo's document cut to what docs/json.md shows."""
    (server,) = demo["servers"]
    (rank,) = server["ranks"]
    rank["entries"] = [e for e in rank["entries"] if e["account"] == "recurrent_state/ssm"]
    rank["stages"] = [s for s in rank["stages"] if s["name"] == "warmup"]
    names = ("tp_size", "memory_fraction", "max_running_requests", "context_length", "kv_cache_dtype")
    server["config"] = {name: server["config"][name] for name in names}
    server["findings"] = [f for f in server["findings"] if f["code"] == "ML101"]
    server["engines"] = server["notes"] = []
    demo["inputs"][0]["path"] = "server.log"
    return "```json\n" + json.dumps(demo, indent=2, ensure_ascii=False) + "\n```\n"


def test_the_example_in_the_docs_is_real(update_golden):
    page = DOCS / "json.md"
    text = page.read_text(encoding="utf-8")
    shown = example(json.loads(encode(findings.attach(explain([str(demo_log())])))))
    if update_golden:
        text = text[: text.index("```json\n")] + shown
        page.write_text(text, encoding="utf-8")
    assert text.endswith(shown), "pytest --update-golden writes it anew"


def test_every_field_of_the_schema_is_explained():
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    for name in (
        "Report",
        "Server",
        "Rank",
        "Finding",
        "Entry",
        "Stage",
        "Residual",
        "Capacity",
        "Budget",
        "Live",
        "LiveGpu",
        "LiveProcess",
        "LiveRow",
        "LiveUsage",
        "LogCheck",
    ):
        for field in schema()["$defs"][name]["properties"]:
            assert f"`{field}`" in text or f"`{field}[]`" in text or f'"{field}"' in text, f"{name}.{field}"
