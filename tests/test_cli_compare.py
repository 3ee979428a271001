"""`memledger compare` on the command line: exit codes, one sentence for what is wrong, one valid document at 0, 1 and 3."""

import json
from pathlib import Path

import jsonschema
import pytest

from memledger.cli import app
from memledger.report.compare_json import schema

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
A = str(FIXTURES / "compare-capped" / "a.log")
B = str(FIXTURES / "compare-capped" / "b.log")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))

    def call(*args):
        code = app.run(["compare", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def document(text):
    found = json.loads(text)
    jsonschema.Draft202012Validator(schema()).validate(found)
    return found


def explained(path, name):
    import contextlib
    import io
    import sys

    class Binary(io.TextIOWrapper):
        pass

    stream = Binary(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(stream):
        assert app.run(["explain", path, "--format", "json", "--no-live"]) == 0
    stream.flush()
    Path(name).write_bytes(stream.buffer.getvalue())
    assert sys.stdout is not stream
    return name


def test_two_logs_give_the_cause_the_waterfall_and_the_tables(run):
    code, out, err = run(A, B)
    assert (code, err) == (0, "")
    assert "B prints 242,961 KV tokens fewer than A" in out
    for part in ("left in budget", "what the figures mean", "what differs", "unexplained"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_json_document_is_valid_and_names_its_inputs(run):
    code, out, _ = run(A, B, "--format", "json")
    found = document(out)
    assert code == 0
    assert found["schema"] == "memledger/1"
    assert [i["path"] for i in found["inputs"]] == [A, B]
    assert sum(s["bytes"] for s in found["comparison"]["steps"]) == (
        found["comparison"]["capacity"]["pool_bytes"]["b"] - found["comparison"]["capacity"]["pool_bytes"]["a"]
    )


def test_markdown(run):
    code, out, _ = run(A, B, "--format", "markdown")
    assert code == 0
    assert "| **A**" in out
    assert "| what differs" in out


def test_a_report_compares_like_the_log(run, tmp_path):
    old = explained(A, str(tmp_path / "old.json"))
    from_log, from_report = run(A, B), run(old, B)
    assert from_report[0] == 0
    assert from_report[1].replace("old.json", "a.log") == from_log[1]
    with_config = run(old, B, "--gpu-total", "80GiB")
    assert with_config[1].replace("old.json", "a.log") == run(A, B, "--gpu-total", "80GiB")[1]


def test_the_card_splits_the_budget_into_its_terms(run):
    files = [str(FIXTURES / "compare-engines" / f"{name}.log") for name in "ab"]
    names = [s["name"] for s in document(run(*files, "--format", "json")[1])["comparison"]["steps"]]
    assert "device_total" not in names
    found = document(run(*files, "--format", "json", "--gpu-total", "79.19GiB")[1])["comparison"]
    steps = {s["name"]: s for s in found["steps"]}
    assert steps["device_total"]["bytes"] == pytest.approx(0, abs=2**24)
    # 0.71 GiB in use before are off SGLang's base only: about 0.885 of it at the mean of both fractions.
    assert steps["in_use_at_start"]["bytes"] / 2**30 == pytest.approx(0.63, abs=0.01)
    assert sum(s["bytes"] for s in found["steps"]) == (
        found["capacity"]["pool_bytes"]["b"] - found["capacity"]["pool_bytes"]["a"]
    )


def test_three_inputs_are_a_table(run):
    code, out, _ = run(A, B, A)
    assert code == 0
    assert "* KV tokens, printed" in out
    found = document(run(A, B, A, "--format", "json")[1])
    assert found["comparison"] is None
    assert [c["label"] for c in found["sweep"]["columns"]] == ["A", "B", "C"]
    assert "| capacity" in run(A, B, A, "--format", "markdown")[1]


def test_expect_exits_1_with_the_waterfall_when_the_limit_holds(run, tmp_path):
    old = explained(A, str(tmp_path / "old.json"))
    code, out, _ = run("--expect", old, B, "--max-regression", "kv_tokens=-5%")
    assert code == 1
    assert out.startswith("kv_tokens=-5%: exceeded; 442,961 -> 200,000, -54.8 %")
    assert "left in budget" in out
    code, out, _ = run("--expect", old, B, "--max-regression", "kv_tokens=-60%", "--format", "json")
    assert code == 0
    assert document(out)["regressions"][0]["holds"] is False
    code, out, _ = run("--expect", old, A, "--max-regression", "kv_tokens=-0%")
    assert code == 0
    code, out, _ = run("--expect", old, B, "--max-regression", "kv_tokens=-5%", "--format", "json")
    assert code == 1
    assert document(out)["regressions"][0]["holds"] is True


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "Give two inputs"),
        ((A,), "Give two inputs"),
        (("-", "-"), "once only"),
        (("--expect", A), "takes one input"),
        (("--expect", A, B, B), "takes one input"),
        ((A, B, A, "--max-regression", "kv_tokens=-5%"), "compares two"),
        ((A, B, "--max-regression", "kv_tokens=5%"), "written with -"),
        ((A, B, "--context", "0"), "at least 1"),
        ((A, B, "--context", "x"), "x"),
        ((A, B, "--start", "2"), "there is no start 2"),
        ((A, B, "--start-b", "9"), "B (" + B + "): there is no start 9"),
        ((A, B, "--start", "1", "--start-a", "1"), "exclude each other"),
        ((A, B, "--rank", "TP7"), "no rank 'TP7'"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_2(run, args, says):
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def bad_inputs(folder):
    (folder / "empty.log").write_bytes(b"")
    (folder / "other.log").write_text("Jan 1 00:00:01 host kernel: hello\n" * 20)
    (folder / "binary.log").write_bytes(bytes(range(256)) * 40)
    (folder / "other.json").write_text('{"hello": 1}')
    (folder / "no-server.json").write_text(
        '{"schema": "memledger/1", "version": "0.1.0", "inputs": [{"path": "x", "bytes": 0, "lines": 0}],'
        ' "sources": [], "servers": []}'
    )
    (folder / "plan.json").write_text('{"schema": "memledger/1", "plan": null}')
    (folder / "wrong.json").write_text('{"schema": "memledger/1", "servers": [{"framework": "other"}]}')
    huge = '{"schema": "memledger/1", "version": "1", "inputs": [], "sources": [], "servers": [], "x": [{"y": -1e300}]}'
    (folder / "huge.json").write_text(huge)
    (folder / "cut.json").write_text('{"schema": "memledger/1", "version"')
    (folder / "folder").mkdir()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("empty.log", 3),
        ("other.log", 3),
        ("binary.log", 3),
        ("other.json", 3),
        ("no-server.json", 3),
        ("plan.json", 4),
        ("wrong.json", 4),
        ("cut.json", 4),
        ("huge.json", 4),
        ("missing.log", 4),
        ("folder", 4),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_an_input_that_cannot_be_compared_is_said_in_a_sentence(run, tmp_path, name, code, first):
    bad_inputs(tmp_path)
    files = (name, B) if first else (A, name)
    got, out, err = run(*files)
    assert got == code
    assert out == ""
    assert name in err
    assert "Traceback" not in err
    assert "internal error" not in err
    got, out, _ = run(*files, "--format", "json")
    assert got == code
    assert document(out)["comparison"] is None


def test_a_config_that_cannot_be_used_is_an_input_that_cannot_be_read(run):
    code, out, err = run(A, B, "--model-config", "nowhere.json", "--format", "json")
    assert code == 4
    assert err == "memledger: --model-config: nowhere.json: no such file.\n"
    assert document(out)["comparison"] is None


def test_hostile_text_of_a_log_does_not_reach_the_terminal(run, tmp_path):
    text = Path(A).read_text().replace("/models/Llama-3.1-8B-Instruct", "/models/\x1b[31mred\x07")
    text = text.replace("SGLang Version 0.5.18", "SGLang Version 0.5.18\x1b[31m")
    (tmp_path / "hostile.log").write_text(text)
    for form in ("text", "json", "markdown"):
        _, out, _ = run("hostile.log", B, "--format", form)
        assert "\x1b" not in out
        assert "\x07" not in out


def test_a_huge_figure_in_a_report_does_not_break_the_comparison(run, tmp_path):
    old = explained(A, str(tmp_path / "old.json"))
    found = json.loads(Path(old).read_text())
    for rank in found["servers"][0]["ranks"]:
        rank["capacity"]["kv_tokens"] = 2**62
        for row in rank["entries"]:
            row["bytes"] = 2**62
    Path(old).write_text(json.dumps(found))
    code, out, err = run(old, B)
    assert (code, err) == (0, "")
    assert "unexplained" in out


@pytest.mark.parametrize(
    "modelled", ["x", 5, [1], {"token_bytes": "many"}, {"state": {"request_blocks": "x"}, "blocks": 1}]
)
def test_a_report_that_somebody_changed_is_refused_or_read_but_never_an_error(run, tmp_path, modelled):
    old = explained(str(FIXTURES / "compare-engines" / "b.log"), str(tmp_path / "old.json"))
    found = json.loads(Path(old).read_text())
    for row in found["servers"][0]["ranks"][0]["entries"]:
        row["detail"]["modelled"] = modelled
    Path(old).write_text(json.dumps(found))
    code, out, err = run(old, B, "--format", "json")
    assert code in {0, 4}
    assert "internal error" not in err
    document(out)


def test_the_example_in_the_docs_is_what_the_program_prints(run):
    files = [str(FIXTURES / "compare-engines" / f"{name}.log") for name in "ab"]
    _, out, _ = run(*files, "--gpu-total", "79.19GiB", "--no-live")
    example = out[: out.index("what differs")].rstrip()
    block = "\n".join(f"    {line}".rstrip() for line in example.split("\n"))
    docs = (FIXTURES.parent / "docs" / "compare.md").read_text(encoding="utf-8")
    assert block in docs
    _, out, _ = run(*files, "--no-live")
    table = out[out.index("per GPU    ") : out.index("  budget rule: ")].rstrip()
    readme = (FIXTURES.parent / "README.md").read_text(encoding="utf-8")
    assert "\n".join(f"    {line}".rstrip() for line in table.split("\n")) in readme
