"""Keeps of what was found (`.fuzz/`) the inputs that reach new code, small ones first: the corpus that the tests run.

    python tests/fuzz/merge.py                  # every target that was run
    python tests/fuzz/merge.py scan prefix

The corpus stays small: inputs of at most 2 KiB, and as many of them as fit into 32 KiB for each target.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
FOUND: Final = HERE.parents[1] / ".fuzz"
CORPUS: Final = HERE / "corpus"
LARGEST: Final = 2 * 2**10
MOST_BYTES: Final = 32 * 2**10


def main() -> None:
    """Merge the targets named, or all that were run."""
    names = sys.argv[1:] or sorted(path.name for path in FOUND.glob("*") if path.is_dir() and not path.suffix)
    for name in names:
        kept = merge(name)
        print(f"{name}: {len(kept)} inputs, {sum(path.stat().st_size for path in kept):,} bytes")


def merge(name: str) -> list[Path]:
    """Write the corpus of a target anew, from what it is and what was found."""
    corpus = CORPUS / name
    with tempfile.TemporaryDirectory() as folder:
        small, covering = Path(folder, "small"), Path(folder, "covering")
        small.mkdir()
        covering.mkdir()
        for path in [*_inputs(corpus), *_inputs(FOUND / name)]:
            if path.stat().st_size <= LARGEST:
                shutil.copyfile(path, small / path.name)
        arguments = [sys.executable, str(HERE / "run.py"), name, "-set_cover_merge=1", str(covering), str(small)]
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        chosen = _that_fit(_inputs(covering))
        shutil.rmtree(corpus, ignore_errors=True)
        corpus.mkdir(parents=True)
        return [Path(shutil.copyfile(path, corpus / path.name)) for path in chosen]


def _inputs(folder: Path) -> list[Path]:
    """The inputs of a folder: libFuzzer names them by their SHA-1; crashes and slow units are told by a word before it."""
    return sorted(path for path in folder.glob("*") if path.is_file() and len(path.name) == 40)


def _that_fit(inputs: list[Path]) -> list[Path]:
    chosen: list[Path] = []
    room = MOST_BYTES
    for path in sorted(inputs, key=lambda one: (one.stat().st_size, one.name)):
        room -= path.stat().st_size
        if room < 0:
            break
        chosen.append(path)
    return chosen


if __name__ == "__main__":
    main()
