"""Secrets of a log, of a command line and of an address: in none of the outputs, whatever command wrote them."""

import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from memledger.cli import app

FIXTURES = Path(__file__).parent.parent / "fixtures"
SECRETS = {
    "sk-live0123456789abcdefghij": "--api-key {}",
    "s3cr3tPassw0rd": "https://someone:{}@proxy.example/v1",
    "hf_AbCdEfGhIjKlMnOpQrStUv": "HF_TOKEN={}",
    "AKIAABCDEFGHIJKLMNOP": "aws_access_key_id={}",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln": "Authorization: Bearer {}",
    "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY": "'secret_access_key': '{}'",
}
KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
"""A line of a private key's body, which stands between lines that are shown."""
SAID = " ".join(form.format(secret) for secret, form in SECRETS.items())


@pytest.fixture
def log(tmp_path):
    """The demo's log with secrets where a log has them: arguments, lines of memory (understood or not), a failure, a request."""
    text = (FIXTURES / "demo" / "server.log").read_text(encoding="utf-8")
    text = text.replace("ServerArgs(", "ServerArgs(api_key='sk-live0123456789abcdefghij', ", 1)
    assert "api_key='sk-live" in text
    lines = text.split("\n")
    text = "\n".join(part for line in lines for part in ([line, KEY] if "KV Cache is allocated" in line else [line]))
    more = [
        f"[2026-09-09 17:58:00 TP0] Scratch pool of 3.50 GiB for {SAID}",
        f"[2026-09-09 17:58:01] Received request: prompt: '{SAID} KV Cache is allocated'",
        f"[2026-09-09 17:58:02 TP0] Scheduler hit an exception: Traceback (most recent call last): {SAID}",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 320.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which "
        f"113.62 MiB is free. {SAID}",
        KEY,
    ]
    path = tmp_path / "server.log"
    path.write_text(text + "\n".join(more) + "\n", encoding="utf-8")
    return path


def written(folder, *but):
    """Everything in the files of a folder, archives and tables unpacked, and their names."""
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path in but:
            continue
        found.append(path.name)
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                for member in archive:
                    inside = archive.extractfile(member)
                    found += [member.name, "" if inside is None else inside.read().decode("utf-8", "replace")]
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                found += [archive.read(name).decode("utf-8", "replace") for name in archive.namelist()]
        elif path.suffix == ".parquet":
            found.append(json.dumps(pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist(), default=str))
        else:
            found.append(path.read_bytes().decode("utf-8", "replace"))
    return "\n".join(found)


COMMANDS = {
    "explain": ["explain", "{log}", "--no-live", "--evidence", "--unrecognized", "--all-findings"],
    "explain json": ["explain", "{log}", "--no-live", "--format", "json"],
    "explain markdown": ["explain", "{log}", "--no-live", "--format", "markdown", "--evidence"],
    "explain html": ["explain", "{log}", "--no-live", "--html", "{out}/report.html"],
    "oom": ["oom", "{log}", "--no-live", "--evidence", "--all"],
    "oom json": ["oom", "{log}", "--no-live", "--format", "json"],
    "oom markdown": ["oom", "{log}", "--no-live", "--format", "markdown", "--evidence", "--all"],
    "oom html": ["oom", "{log}", "--no-live", "--html", "{out}/oom.html"],
    "oom collect": ["oom", "{log}", "--collect", "{out}/case.tar.gz"],
    "compare": ["compare", "{log}", "{demo}"],
    "compare json": ["compare", "{log}", "{demo}", "--format", "json"],
    "compare html": ["compare", "{log}", "{demo}", "--html", "{out}/compare.html"],
    "plan": ["plan", "{log}", "--concurrency", "4", "--context", "32k", "--format", "json"],
    "watch": ["watch", "{log}", "--once", "--record", "{out}/run.jsonl"],
    "fleet": ["fleet", "{log}", "--out", "{out}/fleet"],
}


WITHOUT_TEXT = {"compare", "compare json", "plan", "fleet"}
"""These show no line that held one."""


@pytest.mark.parametrize("name", COMMANDS)
def test_no_secret_of_a_log_is_in_any_output(name, log, tmp_path, capfd):
    if "html" in name:
        pytest.importorskip("plotly")
    if name == "fleet":
        pytest.importorskip("pyarrow")
    out = tmp_path / "out"
    out.mkdir()
    places = {"log": log, "out": out, "demo": FIXTURES / "demo" / "server.log"}
    code = app.run([word.format(**places) for word in COMMANDS[name]])
    shown = capfd.readouterr()
    everything = shown.out + shown.err + written(out)
    assert code in {0, 1}, shown.err
    assert len(everything) > 500
    assert [secret for secret in (*SECRETS, KEY) if secret in everything] == []
    assert ("***" in everything) == (name not in WITHOUT_TEXT)


def test_what_is_looked_for_would_be_found(log, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "server.log").write_bytes(log.read_bytes())
    assert [secret for secret in (*SECRETS, KEY) if secret not in written(tmp_path / "copy")] == []
