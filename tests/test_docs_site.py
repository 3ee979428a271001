"""The documentation: the site builds without a warning, and what its pages show is what the program prints."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest

from memledger.cli.overview import COMMANDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DEMO = ROOT / "fixtures" / "demo" / "server.log"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MISSING = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
builds = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install '.[docs]')")


def blocks(kind):
    """Every fenced block of a kind, as a parameter (page, number, text)."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        texts = [text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language == kind]
        name = str(page.relative_to(DOCS))
        found += [pytest.param(name, number, text, id=f"{name}-{number}") for number, text in enumerate(texts, 1)]
    return found


# ---------------------------------------------------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(target / "trees"), str(DOCS)]
    done = subprocess.run([*command, str(target / "site")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target / "site"


class Links(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loaded, self.words = set(), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if "id" in named:
            self.ids.add(named["id"])
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])
        if tag in {"script", "img", "iframe", "source"} and named.get("src"):
            self.loaded.append(named["src"])
        if tag == "link" and named.get("rel") in {"stylesheet", "preload", "icon", "preconnect"}:
            self.loaded.append(named["href"])

    def handle_data(self, data):
        self.words.append(data)


@builds
def test_every_page_is_in_the_site_and_every_link_leads_somewhere(site):
    pages = {page: Links(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    for source in DOCS.rglob("*.md"):
        assert site / source.relative_to(DOCS).with_suffix(".html") in pages
    broken = []
    for page, found in pages.items():
        for link in found.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or page.name in {"search.html", "genindex.html"}:
                continue
            target = (page.parent / path).resolve() if path else page
            if target in pages:
                broken += [] if not anchor or anchor in pages[target].ids else [(page.name, link)]
            elif not target.is_file():
                broken.append((page.name, link))
    assert broken == []


@builds
def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = Links(page.read_text(encoding="utf-8")).loaded
        assert loaded
        assert not [address for address in loaded if "//" in address], page


@builds
def test_the_commands_page_has_every_option_of_every_command(site):
    words = " ".join(Links((site / "commands.html").read_text(encoding="utf-8")).words)
    for name, (module, _) in COMMANDS.items():
        assert f"Usage: memledger {name}" in words
        command = importlib.import_module(module).command
        shown = [p.opts[0] for p in command.params if isinstance(p, click.Option) and not p.hidden]
        assert not [option for option in shown if option not in words], name


def test_the_pictures_are_small_and_none_is_left_over():
    pictures = {path.name for path in (DOCS / "pictures").iterdir()}
    used = {name for page in DOCS.rglob("*.md") for name in re.findall(r"pictures/([\w.-]+)", page.read_text())}
    assert used == pictures
    assert all((DOCS / "pictures" / name).stat().st_size < 150_000 for name in pictures)


# --------------------------------------------------------------------------------------------------------- what pages show


def memledger(folder, arguments):
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "memledger", *arguments.split(), "--no-live"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return re.sub(r"[ \t]+$", "", done.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize(("page", "number", "text"), blocks("console"))
def test_an_output_on_a_page_is_what_the_program_prints(page, number, text, tmp_path):
    """`...` on a line of its own stands for any lines."""
    shutil.copy(DEMO, tmp_path / "server.log")
    for name, side in (("before.log", "a.log"), ("after.log", "b.log")):
        shutil.copy(ROOT / "fixtures" / "compare-state-slots" / side, tmp_path / name)
    command, _, shown = text.partition("\n")
    assert command.startswith("$ memledger ")
    printed = memledger(tmp_path, command.removeprefix("$ memledger "))
    at = 0
    for piece in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        found = printed.find(piece, at)
        assert found >= 0, f"{page}, block {number}: not printed:\n{piece}\nbut:\n{printed}"
        at = found + len(piece)


# ------------------------------------------------------------------------------------------------ commands on stand-in files


def stand_ins(folder):
    """What Docker, Kubernetes, Slurm and the journal make of the demo's log, and programs that print it like theirs."""
    lines = DEMO.read_text(encoding="utf-8").splitlines()
    failed = (ROOT / "fixtures" / "oom-sglang-capture" / "server.log").read_text(encoding="utf-8")
    host = ROOT / "fixtures" / "oom-host-pod"
    stamp = "2026-09-09T11:57:18.000000000Z"

    def write(name, text, **how):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, **{"encoding": "utf-8", **how})

    plain = "\n".join(lines) + "\n"
    write("plain", plain)
    write("server.log", plain)
    write("failed", failed)
    write("server-utf16.log", plain.replace("\n", "\r\n"), encoding="utf-16", newline="")
    write("slurm-4242.out", "".join(f"0: {line}\n" for line in lines))
    write("node0.out", plain)
    write("node1.out", plain.replace("srun: ", ""))
    write("stamped", "".join(f"{stamp} {line}\n" for line in lines))
    write("compose", "".join(f"sglang-1  | {line}\n" for line in lines))
    write(
        "json.log",
        "".join(json.dumps({"log": line + "\n", "stream": "stderr", "time": stamp}) + "\n" for line in lines),
    )
    write("pod-prefix", "".join(f"[pod/llm-0/server] {line}\n" for line in lines))
    write("var/log/pods/default_llm-0_uid/server/0.log", "".join(f"{stamp} stderr F {line}\n" for line in lines))
    write("short-iso", "".join(f"2026-09-09T11:57:18+0000 gpu-1 python3[7]: {line}\n" for line in lines))
    write(
        "journal-json",
        "".join(
            json.dumps({"MESSAGE": line, "_HOSTNAME": "gpu-1", "_SYSTEMD_UNIT": "llm.service"}) + "\n" for line in lines
        ),
    )
    write(
        "inspect",
        json.dumps(
            [{"State": {"Status": "exited", "OOMKilled": True, "ExitCode": 137}, "LogPath": "json.log"}], indent=4
        ),
    )
    write(
        "sacct",
        "JobID           State ExitCode     MaxRSS\n------------ ---------- -------- ----------\n4242         OUT_OF_MEM+    0:125  67108864K\n",
    )
    shutil.copy(host / "dmesg.txt", folder / "kernel")
    shutil.copy(host / "pod.txt", folder / "describe")
    programs = folder / "bin"
    programs.mkdir()
    here = folder
    scripts = {
        "docker": f"""case "$*" in
  *inspect*--format*) echo "{here}/json.log" ;; *inspect*) cat "{here}/inspect" ;;
  *compose*) cat "{here}/compose" ;; *logs\\ -t*) cat "{here}/stamped" >&2 ;; *) cat "{here}/plain" >&2 ;; esac""",
        "kubectl": f"""case "$*" in
  *describe*) cat "{here}/describe" ;; *--previous*) cat "{here}/failed" ;; *--prefix*) cat "{here}/pod-prefix" ;; *) cat "{here}/plain" ;; esac""",
        "journalctl": f"""case "$*" in
  *-k*) cat "{here}/kernel" ;; *short-iso*) cat "{here}/short-iso" ;; *json*) cat "{here}/journal-json" ;; *) cat "{here}/plain" ;; esac""",
        "sacct": f'cat "{here}/sacct"',
        "dmesg": f'cat "{here}/kernel"',
        "memledger": f'exec "{sys.executable}" -m memledger "$@" --no-live',
    }
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    return programs


@pytest.mark.parametrize(("page", "number", "text"), blocks("bash"))
def test_a_command_of_the_pages_works_on_stand_in_files(page, number, text, tmp_path):
    programs = stand_ins(tmp_path)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "100"}
    script = text.replace("/var/log/pods", str(tmp_path / "var" / "log" / "pods"))
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (page, number, done.stderr)
    if "memledger explain" in text:
        assert re.search(r"recurrent state .* 17\.92 ", done.stdout), (page, number, done.stdout)
    if "memledger oom" in text:
        assert re.search(r"^do ", done.stdout, re.MULTILINE) or "No line says" in done.stdout, (
            page,
            number,
            done.stdout,
        )
