"""How findings stand in the report: the cause first, at most one more beside it, the rest under `also`, information on request."""

import json
from pathlib import Path

import pytest
from finding_helpers import serving, sglang, vllm, worker
from sample_reports import dense, hybrid, report

from memledger import findings
from memledger.cli import app
from memledger.ledger import Capacity, Failure, Usage
from memledger.report.text import Style, render
from memledger.report.view import Options, build
from memledger.units import GIB

DEMO = Path(__file__).resolve().parent.parent / "fixtures" / "demo" / "server.log"


def first(server):
    return [cause.code for cause in build(findings.attach(report(server)), 0, Options()).cause]


def test_the_chief_finding_and_one_more_warning():
    rank = worker(80.0, weights__model=30.0, kv_cache__k=2.0, free=40.0, capacity=Capacity(kv_tokens=25000))
    assert first(sglang(rank, usage=serving(9, 9, 0.99, retractions=50))) == ["ML501", "ML504"]


def test_a_failure_stands_beside_what_explains_it():
    failure = Failure("cuda_oom", "serving", {"requested_bytes": 4 * GIB, "kv_usage": 0.24})
    assert first(vllm(worker(80.0, kv_cache__pool=40.0), failures=(failure,), state="failed")) == ["ML201", "ML202"]


def test_a_warning_that_explains_nothing_does_not_stand_beside_a_failure():
    failure = Failure("free_memory_too_small", "startup", {"free_bytes": 8 * GIB, "total_bytes": 80 * GIB})
    server = vllm(worker(80.0, in_use_at_start=72.0, free=8.0), failures=(failure,), state="failed")
    assert first(server) == ["ML201"]
    # What was in use stands in ML201 already; another figure of it would be news.
    assert "ML303" not in render(findings.attach(report(server)))
    other = vllm(worker(80.0, in_use_at_start=70.0, free=10.0), failures=(failure,), state="failed")
    assert "ML303" in render(findings.attach(report(other)))


def test_a_hybrid_without_serving_lines_says_what_is_reserved_beside_where_memory_went():
    assert first(hybrid(usage=Usage())) == [None, "ML105"]


def test_a_healthy_server_is_told_where_its_memory_went():
    assert first(dense()) == [None]


def test_a_failed_server_with_its_failure_ignored_is_not_said_to_have_none():
    failed = dense(state="failed", failures=(Failure("cuda_oom", "serving", {}),))
    assert "no line says that memory was the reason" not in render(report(failed))
    assert "no line says that memory was the reason" in render(report(dense(state="failed")))


def test_information_on_request_only():
    server = vllm(worker(80.0, weights__model=20.0, kv_cache__pool=50.0))
    shown = findings.attach(report(server))
    assert "ML506" not in render(shown)
    assert "ML506" in render(shown, Options(all_findings=True), Style(100))


@pytest.fixture
def explain(capfdbinary):
    def explain(*args):
        code = app.run(["explain", str(DEMO), *args])
        return code, capfdbinary.readouterr()

    return explain


def codes(out):
    return {f["code"] for server in json.loads(out)["servers"] for f in server["findings"]}


def test_select_and_ignore_choose_in_every_format(explain):
    assert codes(explain("--format", "json")[1].out) >= {"ML101", "ML103"}
    assert codes(explain("--format", "json", "--select", "ML1", "--ignore", "ML103")[1].out) == {"ML101"}
    assert b"ML101" not in explain("--ignore", "ML101,ML103")[1].out


def test_an_ignored_finding_is_no_reason_to_fail(explain):
    assert explain("--fail-on", "code=ML101")[0] == 1
    assert explain("--fail-on", "code=ML101", "--ignore", "ml1")[0] == 0


def test_a_mistyped_code_is_wrong_usage(explain):
    code, captured = explain("--select", "ML44")
    assert code == 2
    assert b"'ML44' is no finding's code (ML101) or group (ML1)" in captured.err
