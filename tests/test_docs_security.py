"""docs/security.md: every test that it names exists, and every row of a threat names one."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
ROW = re.compile(r"^\| (?!threat|---)(.+)$", re.MULTILINE)


def functions(file):
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists():
    assert len(NAMED) > 40
    assert [f"{file}::{name}" for file, name in NAMED if name not in functions(file)] == []


def test_every_threat_is_pinned_by_a_test():
    rows = ROW.findall(PAGE)
    assert len(rows) > 20
    assert [row for row in rows if "`test_" not in row] == []
