"""The command that installs an extra is one that works here, whatever way memledger was installed."""

import configparser
import importlib.util
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from memledger import extras

ROOT = Path(__file__).parent.parent
EXTRAS = ("html", "tui", "prometheus", "fleet", "sweep", "ray")


def declared():
    """The extras of setup.cfg, each as the set of its requirements."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return {name: set(text.split("\n")) - {""} for name, text in parser["options.extras_require"].items()}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_packages_of_the_extra_are_named_for_this_python(extra):
    python, dash_m, *command = shlex.split(extras.install_command(extra))
    assert (python, dash_m) == (sys.executable, "-m")
    assert command[:2] == ["pip", "install"]
    assert {one.replace("-", "_") for one in command[2:]} == {one.replace("-", "_") for one in declared()[extra]}


def test_an_environment_of_uv_has_no_pip(monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else there(name))
    assert extras.install_command("sweep") == f"uv pip install --python {shlex.quote(sys.executable)} 'httpx>=0.27'"


def test_where_memledger_is_not_installed_its_source_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert shlex.split(extras.install_command("html"))[-1] == f"{ROOT}[html]"


def test_a_python_whose_path_has_a_blank_is_quoted(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/my tools/python")
    assert extras.install_command("html").startswith("'/opt/my tools/python' -m pip install ")


def test_all_holds_every_extra_but_ray_which_is_large():
    found = declared()
    assert found["all"] == set().union(*(found[name] for name in EXTRAS if name != "ray"))


@pytest.mark.parametrize(
    "command", [["explain", "--no-live"], ["oom", "--no-live"], ["plan", "--concurrency", "1", "--context", "1k"]]
)
def test_a_report_in_a_terminal_loads_nothing_of_an_extra(command):
    """What an extra brings takes time to import: a command that does not use it does not pay for it."""
    modules = {re.match(r"\w+", one)[0] for extra in EXTRAS for one in declared()[extra]}
    assert {"plotly", "jinja2", "textual", "prometheus_client", "httpx", "pyarrow", "fsspec", "ray"} <= modules
    log = ROOT / "fixtures" / "demo" / "server.log"
    words = [command[0], str(log), *command[1:]]
    code = f"import sys; from memledger.cli.app import run; run({words}); print(sorted({modules} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout
