"""What README shows is what the program prints."""

import re
from pathlib import Path

from memledger.cli import app

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(?<=\n    \$ memledger demo --width 110\n\n)(?:    .*\n|\n)+?(?=\nEvery figure)", re.MULTILINE)


def demo(capsysbinary):
    assert app.run(["demo", "--width", "110", "--no-color"]) == 0
    text = capsysbinary.readouterr().out.decode("utf-8")
    return "".join(f"    {line}\n" if line else "\n" for line in text.rstrip().split("\n"))


def test_the_first_screen_of_readme_is_the_demo_as_printed(capsysbinary, update_golden):
    printed = demo(capsysbinary)
    readme = README.read_text(encoding="utf-8")
    (shown,) = BLOCK.findall(readme)
    if update_golden:
        README.write_text(readme.replace(shown, printed), encoding="utf-8")
        return
    assert shown == printed


OOM_BLOCK = re.compile(
    r"(?<=\n    \$ memledger oom server\.log --width 100\n\n)(?:    .*\n|\n)+?(?=\nNo conclusion)", re.MULTILINE
)


def test_the_example_of_oom_is_its_report_as_printed(capsysbinary, update_golden, monkeypatch):
    monkeypatch.chdir(README.parent / "fixtures" / "oom-sglang-capture")
    assert app.run(["oom", "server.log", "--no-live", "--no-color", "--width", "100"]) == 0
    text = capsysbinary.readouterr().out.decode("utf-8")
    printed = "".join(f"    {line}\n" if line else "\n" for line in text.rstrip().split("\n"))
    readme = README.read_text(encoding="utf-8")
    (shown,) = OOM_BLOCK.findall(readme)
    if update_golden:
        README.write_text(readme.replace(shown, printed), encoding="utf-8")
        return
    assert shown == printed


def test_every_page_of_the_documentation_is_named_and_every_link_leads_to_a_file():
    text = README.read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w/.-]+)", text))
    assert [link for link in linked if not (README.parent / link).exists()] == []
    pages = {str(page.relative_to(README.parent)) for page in (README.parent / "docs").rglob("*.md")}
    # The site's own first page, the help as `--help` prints it, and what the page on arithmetic leads to.
    reached_otherwise = {f"docs/{name}.md" for name in ("index", "commands", "arithmetic-sglang", "arithmetic-vllm")}
    assert pages - linked == reached_otherwise
