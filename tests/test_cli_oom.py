"""`memledger oom` on whole inputs: what each fixture's incident is, exit codes, and inputs that are no logs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from memledger.cli import app
from memledger.cli.incidents import FailureTap
from memledger.events import Event
from memledger.report.oom_json import schema
from memledger.units import parse_amount

FIXTURES = Path(__file__).parent.parent / "fixtures"
CASES = sorted(path.parent for path in FIXTURES.glob("oom-*/incident.json"))
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 95.00 GiB of "
    "which 1.91 GiB is free. Including non-PyTorch memory, this process has 92.57 GiB memory in use. Of the allocated "
    "memory 89.02 GiB is allocated by PyTorch, and 1.44 GiB is reserved by PyTorch but unallocated.\n"
)


def expected(case):
    return json.loads((case / "incident.json").read_text(encoding="utf-8"))


def paths(case):
    return [str(case / name) for name in expected(case)["inputs"]]


def run(*arguments):
    return app.run(["oom", *map(str, arguments)])


def document(capsysbinary, *arguments):
    code = run(*arguments, "--format", "json", "--no-live")
    got = json.loads(capsysbinary.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(got)
    return code, got


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_incident_is_what_a_person_reads_in_the_inputs(case, capsysbinary):
    wanted = expected(case)
    code, got = document(capsysbinary, *paths(case))
    assert code == 0
    kinds = wanted["kind"] if isinstance(wanted["kind"], list) else [wanted["kind"]]
    phases = wanted["phase"] if isinstance(wanted["phase"], list) else [wanted["phase"]]
    fitting = [one for one in got["incidents"] if one["kind"] in kinds]
    assert fitting, f"{wanted['shows']}: {[(one['kind'], one['cause']) for one in got['incidents']]}"
    incident = fitting[0]
    assert wanted["phase"] is None or incident["phase"] in phases
    assert incident["fatal"] is not False
    for name, text in wanted["numbers"].items():
        have = incident["numbers"][name]
        if not isinstance(text, str):
            assert have == text, name
            continue
        size = parse_amount(*text.split())
        assert have is not None, name
        assert abs(have - size.bytes) <= size.tolerance, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rows_of_an_incident_sum_to_the_total(case, capsysbinary):
    _, got = document(capsysbinary, *paths(case))
    for incident in got["incidents"]:
        rows = [row for row in incident["holders"] if row["level"] == 0]
        totals = [row for row in rows if row["kind"] == "total"]
        parts = [row for row in rows if row["kind"] in {"holder", "free", "unaccounted"}]
        if totals and all(row["bytes"] is not None for row in (*totals, *parts)):
            assert sum(row["bytes"] for row in parts) == totals[0]["bytes"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_text_is_the_golden_one(case, capsysbinary, update_golden, monkeypatch):
    monkeypatch.chdir(case)
    assert run(*expected(case)["inputs"], "--no-live", "--no-color", "--width", "80") == 0
    shown = capsysbinary.readouterr().out.decode()
    golden = case / "oom.txt"
    if update_golden:
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_inputs_may_come_in_any_order(case, capsysbinary):
    _, forward = document(capsysbinary, *paths(case))
    _, backward = document(capsysbinary, *reversed(paths(case)))
    told = [sorted((one["kind"], one["confidence"]) for one in got["incidents"]) for got in (forward, backward)]
    assert told[0] == told[1]


def test_markdown_is_written(capsysbinary):
    assert run(*paths(FIXTURES / "oom-vllm-prefill"), "--format", "markdown", "--no-live") == 0
    shown = capsysbinary.readouterr().out.decode()
    assert shown.startswith("### vLLM 0.25.0")
    assert "\n| " in shown


def test_standard_input_is_read():
    command = [sys.executable, "-m", "memledger", "oom", "-", "--format", "json", "--no-live"]
    done = subprocess.run(command, input=TORCH.encode(), capture_output=True, check=True)
    got = json.loads(done.stdout)
    assert got["inputs"][0]["path"] == "-"
    assert got["incidents"][0]["numbers"]["requested_bytes"] == 2 * 2**30


def test_a_healthy_log_has_no_incident_and_says_so(capsysbinary):
    healthy = FIXTURES / "vllm-0.31-tp2" / "server.log"
    code, got = document(capsysbinary, healthy)
    assert (code, got["incidents"]) == (0, [])
    assert run(healthy, "--no-live") == 0
    assert b"No line says that memory ran out" in capsysbinary.readouterr().out


# --------------------------------------------------------------------------------------------------- inputs that are none


def test_no_input_is_wrong_usage(capsys):
    assert run() == 2
    assert "memledger oom server.log" in capsys.readouterr().err


def test_a_missing_file_exits_4_with_a_document(tmp_path, capsysbinary):
    code, got = document(capsysbinary, tmp_path / "absent.log")
    assert code == 4
    assert got["incidents"] == []
    assert {s["name"]: s["status"] for s in got["sources"]}["log"] == "unavailable"


def test_what_could_be_read_is_reported_beside_what_could_not(tmp_path, capsysbinary):
    log = tmp_path / "server.log"
    log.write_text(TORCH)
    code, got = document(capsysbinary, log, tmp_path / "absent.log")
    assert code == 4
    assert len(got["incidents"]) == 1
    assert run(log, tmp_path / "absent.log", "--no-live") == 4
    shown = capsysbinary.readouterr()
    assert b"2.00 GiB" in shown.out
    assert b"absent.log" in shown.err


@pytest.mark.parametrize(
    ("data", "looks_like"),
    [
        (b"", "an empty file"),
        (b"\n \n\n", "blank lines only"),
        (bytes(range(256)) * 40, "binary data"),
        (b"\x7fELF" + bytes(100), "an ELF program"),
        (b"hello\nworld\n" * 30, "text of another program"),
    ],
    ids=["empty", "blank", "binary", "program", "text"],
)
def test_nothing_recognised_exits_3_and_says_what_was_looked_for(tmp_path, capsysbinary, data, looks_like):
    log = tmp_path / "x.log"
    log.write_bytes(data)
    code, got = document(capsysbinary, log)
    assert (code, got["incidents"], got["servers"]) == (3, [], [])
    assert run(log, "--no-live") == 3
    shown = capsysbinary.readouterr()
    assert shown.out == b""
    assert looks_like in shown.err.decode()
    assert "Looked for" in shown.err.decode()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_exits_4(tmp_path, capsysbinary):
    log = tmp_path / "x.log"
    log.write_text(TORCH)
    log.chmod(0)
    assert document(capsysbinary, log)[0] == 4


def test_a_folder_exits_4(tmp_path, capsysbinary):
    assert document(capsysbinary, tmp_path)[0] == 4


@pytest.mark.parametrize("length", range(20, len(TORCH), 37))
def test_a_message_may_break_off_anywhere(tmp_path, capsysbinary, length):
    log = tmp_path / "x.log"
    log.write_text(TORCH[:length])
    code, got = document(capsysbinary, log)
    assert code in {0, 3}
    for incident in got["incidents"]:
        numbers = incident["numbers"]
        assert numbers["requested_bytes"] in {None, 2 * 2**30}
        assert numbers["free_bytes"] is None or abs(numbers["free_bytes"] - 1.91 * 2**30) < 6e6
        assert numbers["total_bytes"] in {None, 95 * 2**30}


@pytest.mark.parametrize("format_", ["text", "markdown", "json"])
def test_escapes_and_secrets_of_an_input_are_not_printed(tmp_path, capsysbinary, format_):
    log = tmp_path / "x.log"
    log.write_text(
        "\x1b]0;title\x07\x1b[31m" + TORCH.replace("GPU 0", "api_key=abcdefgh12345678 GPU 0") + TORCH
        + "Out of memory: Killed process 7 (\x1b[2Jpy\u202ethon) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB\n"
    )  # fmt: skip
    assert run(log, "--format", format_, "--no-live", "--evidence") in {0, 3}
    shown = capsysbinary.readouterr().out.decode()
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "abcdefgh12345678" not in shown


def test_a_model_config_that_cannot_be_used_exits_4_with_a_document(tmp_path, capsysbinary):
    code, got = document(capsysbinary, *paths(FIXTURES / "oom-vllm-weights"), "--model-config", tmp_path / "no.json")
    assert code == 4
    assert got["incidents"]


# ----------------------------------------------------------------------------------------------------------- in explain


def explain(capsysbinary, *arguments):
    code = app.run(["explain", *map(str, arguments), "--no-live", "--no-color"])
    return code, capsysbinary.readouterr()


def test_explain_shows_the_incident_of_a_log_in_two_lines(capsysbinary):
    log = FIXTURES / "oom-vllm-prefill" / "server.log"
    code, shown = explain(capsysbinary, log, "--width", "300")
    lines = shown.out.decode().splitlines()
    found = [i for i, line in enumerate(lines) if line.startswith("incident ")]
    assert code == 0
    assert len(found) == 1
    assert lines[found[0] + 1].split() == ["next", "memledger", "oom", str(log)]


def test_explain_shows_none_where_nothing_failed(capsysbinary):
    _, shown = explain(capsysbinary, FIXTURES / "vllm-0.31-tp2" / "server.log")
    assert b"memledger oom" not in shown.out


def test_explain_points_to_oom_for_an_input_that_is_no_server_log(capsysbinary):
    code, shown = explain(capsysbinary, FIXTURES / "oom-host-pod" / "dmesg.txt")
    assert code == 3
    assert b"memledger oom" in shown.err


def test_the_json_of_explain_is_as_before(capsysbinary):
    log = FIXTURES / "oom-vllm-prefill" / "server.log"
    code = app.run(["explain", str(log), "--format", "json", "--no-live"])
    assert code == 0
    assert "incidents" not in json.loads(capsysbinary.readouterr().out)


def test_the_postmortem_is_not_imported_for_a_healthy_log():
    log = FIXTURES / "vllm-0.31-tp2" / "server.log"
    script = (
        "import sys; from memledger.cli import app; code = app.run(['explain', sys.argv[1], '--no-live']);"
        "print(code, [m for m in sys.modules if 'postmortem' in m], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(log)], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "0 []"


def test_the_tap_takes_frames_that_stand_before_the_failure():
    from memledger.grammar import load_rules
    from memledger.scan import Scanner

    text = b'Traceback (most recent call last):\n  File "/x/vllm/v1/worker/gpu_model_runner.py", line 3, in capture_model\n    f()\n'
    tap = FailureTap()
    events = list(Scanner(load_rules()).events([text + TORCH.encode()], 0))
    for event in events:
        assert isinstance(event, Event)
        tap(event)
    (found,) = tap._log.symptoms().of("torch_oom")
    assert "capture_model" in found.functions


def test_a_failure_behind_an_unknown_prefix_is_pointed_out(tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_text(
        "node7: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 79.18 GiB\n"
    )
    assert app.run(["oom", str(log), "--no-live"]) == 3
    assert "line 1, speaks of memory running out and is not read" in capsys.readouterr().err
    log.write_text((FIXTURES / "demo" / "server.log").read_text() + log.read_text())
    assert app.run(["oom", str(log), "--no-live", "--width", "200"]) == 0
    assert "No line that could be read says that memory ran out" in capsys.readouterr().out
