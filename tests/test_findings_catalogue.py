import re
from pathlib import Path

from click.testing import CliRunner

from memledger import findings
from memledger.cli.finding import command
from memledger.findings.catalogue import ALL, BY_CODE, GROUPS, PAGES, document, matching

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "memledger" / "findings"
DOCUMENT = ROOT / "docs" / "findings.md"


def made_in_code():
    """Code and title of every `Finding(...)` in the package."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.glob("*.py"))
    return dict(re.findall(r'Finding\(\s*"(ML\d{3})",\s*"([^"]+)"', text))


def test_every_finding_has_a_page_with_its_title_and_every_page_a_finding():
    assert made_in_code() == {page.code: page.title for page in PAGES}


def test_every_group_has_a_name_and_codes_are_in_order():
    assert [p.code for p in ALL] == sorted(BY_CODE)
    assert len(ALL) == len(BY_CODE)
    assert {code[:3] for code in BY_CODE} == set(GROUPS)


def test_there_is_one_function_for_each_code():
    assert len(findings._FAMILIES) == len(PAGES)


def test_the_document_is_current(update_golden):
    if update_golden:
        DOCUMENT.write_text(document(), encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "pytest --update-golden writes it anew"


def test_the_command_prints_a_page():
    result = CliRunner().invoke(command, ["ml101"])
    assert result.exit_code == 0
    assert result.output.startswith("ML101: state slots idle\n")
    assert "--max-mamba-cache-size" in result.output


def test_a_group_prints_all_its_pages():
    output = CliRunner().invoke(command, ["ML6"]).output
    assert re.findall(r"^(ML\d{3}):", output, re.MULTILINE) == [p.code for p in matching("ML6")]


def test_without_a_code_all_are_listed():
    output = CliRunner().invoke(command, []).output
    assert re.findall(r"^  (ML\d{3})  ", output, re.MULTILINE) == list(BY_CODE)


def test_a_code_that_does_not_exist_is_wrong_usage():
    result = CliRunner().invoke(command, ["ML999"])
    assert result.exit_code == 2
    assert "no finding's code" in result.output
