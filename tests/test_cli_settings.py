"""Defaults from `MEMLEDGER_*` variables and the config file: which one holds, and what is said of one that can't be used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memledger.cli import app, settings
from memledger.resources import demo_log

LOG = str(demo_log())


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home without a config file; gives the path where one is looked for."""
    for name in [name for name in os.environ if name.startswith("MEMLEDGER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SUDO_UID", raising=False)
    (tmp_path / "memledger").mkdir()
    return tmp_path / "memledger" / "config.toml"


@pytest.fixture
def run(capsys):
    def call(*args):
        code = app.run(list(args))
        written = capsys.readouterr()
        return code, written.out, written.err

    return call


def is_json(text):
    try:
        return bool(json.loads(text))
    except ValueError:
        return False


def test_the_command_line_beats_a_variable_and_a_variable_the_file(home, run, monkeypatch):
    assert not is_json(run("explain", LOG)[1])
    home.write_text('format = "json"\n')
    assert is_json(run("explain", LOG)[1])
    monkeypatch.setenv("MEMLEDGER_FORMAT", "markdown")
    assert "|" in run("explain", LOG)[1]
    assert not is_json(run("explain", LOG)[1])
    assert is_json(run("explain", LOG, "--format", "json")[1])
    assert not is_json(run("--no-config", "explain", LOG)[1])


def test_a_commands_own_default_beats_the_general_one(home, run, monkeypatch):
    home.write_text('format = "text"\n[explain]\nformat = "json"\n')
    assert is_json(run("explain", LOG)[1])
    monkeypatch.setenv("MEMLEDGER_FORMAT", "json")
    monkeypatch.setenv("MEMLEDGER_EXPLAIN_FORMAT", "markdown")
    assert not is_json(run("explain", LOG)[1])


def test_a_general_format_that_a_command_does_not_have_is_not_meant_for_it(home, run):
    home.write_text('format = "markdown"\n')
    assert run("rules", "--framework", "vllm")[0] == 0
    home.write_text('[rules]\nformat = "markdown"\n')
    code, _, err = run("rules", "--framework", "vllm")
    assert code == 2
    assert "[rules] format" in err


def test_conditions_codes_and_flags_of_explain(home, run):
    home.write_text('[explain]\nfail_on = ["code=ML101"]\nevidence = true\nselect = ["ML1"]\n')
    code, _, err = run("explain", LOG)
    assert code == 1
    assert "--fail-on code=ML101" in err
    home.write_text('[explain]\nignore = ["ML101"]\n')
    assert "[ML101]" not in run("explain", LOG)[1]
    assert "[ML101]" in run("--no-config", "explain", LOG)[1]


@pytest.mark.parametrize(("text", "given"), [("1", True), ("true", True), ("0", False), ("off", False)])
def test_a_flag_as_a_variable(home, run, monkeypatch, text, given):
    monkeypatch.setenv("MEMLEDGER_EXPLAIN_EVIDENCE", text)
    plain = run("--no-config", "explain", LOG)[1]
    assert (run("explain", LOG)[1] != plain) is given


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'formatt = "json"', "no key 'formatt'; did you mean format?"),
        (b"[explian]\n", "explian: there is no command of that name; did you mean explain?"),
        (b"[width]\n", "width: there is no command of that name"),
        (b"[explain]\nevidense = true", "[explain] has no key 'evidense'; did you mean evidence?"),
        (b"explain = 1", "write a table, [explain]"),
        (b"width = '100'", "width: give a whole number, not '100'"),
        (b"width = true", "width: give a whole number, not True"),
        (b"width = 3", "Invalid value for '--width'"),
        (b"no_color = 'yes'", "give true or false"),
        (b"[explain]\nselect = 'ML1'", "give a list of texts"),
        (b"gpu_total = 'h1000'", "no card 'h1000'"),
        (b"format = [", "it is no TOML"),
        (b"\xff\xfe", "it is not UTF-8"),
        (b"a = " + b"[" * 100000, "it is no TOML"),
        (b"#" * (2**20 + 1), "it is larger than 1 MiB"),
        (b'"\x1b[31m" = 1', "it is no TOML"),
        (b'"\\u001b[31m" = 1', "there is no key"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_sentence_with_where_it_stands(home, run, content, said):
    home.write_bytes(content)
    code, out, err = run("explain", LOG)
    assert (code, out) == (2, "")
    assert said in err
    assert str(home) in err
    assert "\x1b" not in err
    assert "Traceback" not in err
    assert run("--no-config", "explain", LOG)[0] == 0
    assert run("explain", "--help")[0] == 0
    assert run("config")[0] == 2


def test_a_wrong_variable_is_named(home, run, monkeypatch):
    monkeypatch.setenv("MEMLEDGER_WIDTH", "wide")
    code, _, err = run("explain", LOG)
    assert code == 2
    assert "(From MEMLEDGER_WIDTH.)" in err
    monkeypatch.delenv("MEMLEDGER_WIDTH")
    monkeypatch.setenv("MEMLEDGER_NO_COLOR", "perhaps")
    assert "MEMLEDGER_NO_COLOR: give 1 or 0" in run("explain", LOG)[2]


def test_an_error_about_the_command_line_is_not_blamed_on_a_default(home, run):
    home.write_text("width = 100\n")
    assert "From" not in run("explain", LOG, "--width", "3")[2]


def test_a_file_that_others_may_write_or_that_is_none_is_not_used(home, run):
    home.write_text("width = 100\n")
    home.chmod(0o666)
    assert "other users may write it" in run("explain", LOG)[2]
    home.unlink()
    os.mkfifo(home)
    assert "no regular file" in run("explain", LOG)[2]
    home.unlink()
    home.mkdir()
    assert run("explain", LOG)[0] == 2


def test_a_file_of_another_user_is_not_used(home, run, monkeypatch):
    home.write_text("width = 100\n")
    owner = home.stat().st_uid
    monkeypatch.setattr(settings.os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(settings, "_owners", lambda: {owner + 1})
    assert "belongs to another user" in run("explain", LOG)[2]


def test_a_file_that_cant_be_read(home, run):
    home.symlink_to(home)
    code, _, err = run("explain", LOG)
    assert code == 2
    assert "it can't be read" in err


def test_under_sudo_the_callers_file_is_used(home, monkeypatch):
    monkeypatch.setattr(settings.os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_UID", "1234")
    assert settings._owners() == {0, 1234}
    monkeypatch.setattr(settings.os, "geteuid", lambda: 7)
    assert settings._owners() == {0, 7}


def test_another_file_and_none(home, run, monkeypatch, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text('format = "json"\n')
    monkeypatch.setenv("MEMLEDGER_CONFIG", str(other))
    assert is_json(run("explain", LOG)[1])
    home.write_text('format = "json"\n')
    monkeypatch.setenv("MEMLEDGER_CONFIG", "")
    assert not is_json(run("explain", LOG)[1])
    monkeypatch.setenv("MEMLEDGER_CONFIG", str(tmp_path / "none.toml"))
    assert "there is no such file" in run("explain", LOG)[2]


def test_where_the_file_is_looked_for():
    assert settings.place({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/memledger/config.toml")
    assert settings.place({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}) == Path("/h/.config/memledger/config.toml")
    assert settings.place({"HOME": "/h"}) == Path("/h/.config/memledger/config.toml")
    assert settings.place({}) is None


def test_config_shows_which_default_comes_from_where(home, run, monkeypatch):
    code, out, _ = run("config")
    assert code == 0
    assert "there is none" in out
    assert "No default is set" in out
    home.write_text('width = 100\n[explain]\nselect = ["ML1"]\n')
    monkeypatch.setenv("MEMLEDGER_OOM_WIDTH", "90")
    monkeypatch.setenv("MEMLEDGER_WIDHT", "90")
    code, out, _ = run("config", "--format", "json")
    assert code == 0
    rows = {(row["command"], row["key"]): (row["value"], row["origin"]) for row in json.loads(out)["defaults"]}
    assert rows["oom", "width"] == ("90", "MEMLEDGER_OOM_WIDTH")
    assert rows["explain", "width"] == (100, f"{home}, width")
    assert rows["explain", "select"] == (["ML1"], f"{home}, [explain] select")
    assert ("explain", "evidence") not in rows
    assert "MEMLEDGER_WIDHT: nothing reads this variable; MEMLEDGER_WIDTH may be meant" in run("config")[2]
    everything = run("config", "--all")[1]
    assert "evidence" in everything
    assert "127.0.0.1:9841" in everything


def test_config_checks_values_of_every_command(home, run):
    home.write_text("[export]\ninterval = 0.001\n")
    assert run("explain", LOG)[0] == 0
    code, _, err = run("config")
    assert code == 2
    assert "[export] interval" in err


def test_every_key_is_an_option_of_some_command_and_stands_in_the_docs():
    import importlib

    from memledger.cli.overview import COMMANDS

    text = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    commands = {name: importlib.import_module(module).command for name, (module, _) in COMMANDS.items()}
    for key in settings.EVERYWHERE:
        assert any(settings.option_of(command, key) for command in commands.values()), key
        assert f"| `{key}` |" in text
    for name, keys in settings.OWN.items():
        for key in keys:
            assert settings.option_of(commands[name], key) is not None, (name, key)
            assert f"| `[{name}] {key}` |" in text
    for variable in settings.OTHER_VARIABLES:
        assert f"| `{variable}` |" in text


def test_without_a_file_and_variables_nothing_about_defaults_is_imported(home):
    code = (
        "import sys; from memledger.cli.app import run; run(['explain', sys.argv[1]]);"
        "print(sorted({'memledger.cli.settings', 'memledger.cli.help_pages', 'memledger.cli.completion',"
        " 'memledger.nearest', 'prometheus_client'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, LOG], check=False, capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == "[]"
