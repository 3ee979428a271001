"""The help: one screen for all commands, a page with examples and exit codes for each, and examples that are right."""

import importlib
import re
import shlex

import click
import pytest

from memledger.cli import app, help_pages
from memledger.cli.overview import COMMANDS, EXAMPLES, help_text


def command_of(name):
    return importlib.import_module(COMMANDS[name][0]).command


def parsed(name, words):
    """Whether a command takes these words: its options exist and their values are none that it refuses."""
    return command_of(name).make_context(name, list(words), resilient_parsing=False)


def test_the_help_is_one_screen_with_every_command_and_an_example():
    lines = help_text().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", help_text(), re.M), name
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_a_page_with_examples_and_what_its_options_are(name, capsys):
    assert app.run([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert f"Usage: memledger {name}" in page
    assert "Examples:" in page
    assert "Exit codes:" in page
    assert set(help_pages.EXAMPLES) == set(help_pages.EXIT_CODES) == set(COMMANDS)
    for option in command_of(name).params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            assert max(option.opts, key=len) in page


@pytest.mark.parametrize("name", list(COMMANDS))
def test_examples_are_what_the_commands_take(name):
    shown = [f"memledger {name} {EXAMPLES[name][0]}"]
    shown += [help_pages.whole(words) for words, _ in help_pages.EXAMPLES[name]]
    for line in shown:
        words = shlex.split(line.partition(" > ")[0])
        given = words[words.index("memledger") + 1 :]
        assert given[0] == name
        assert parsed(name, given[1:]) is not None


def test_the_page_needs_no_default_that_can_be_used(monkeypatch, capsys):
    monkeypatch.setenv("MEMLEDGER_WIDTH", "wide")
    assert app.run(["explain", "--help"]) == 0
    assert "Examples:" in capsys.readouterr().out
