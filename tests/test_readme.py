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
