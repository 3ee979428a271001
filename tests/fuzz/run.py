"""Coverage-guided fuzzing with atheris (`pip install -e '.[fuzz]'`).

    python tests/fuzz/run.py scan                          # until a crash, or Ctrl-C
    python tests/fuzz/run.py scan -max_total_time=1200     # what follows the name goes to libFuzzer
    python tests/fuzz/run.py scan crash-0123               # one input again

It begins with the kept corpus, the lines of the rules' samples and the small fixtures; what it finds goes to `.fuzz/NAME` at the
top of the repository (not under version control). `merge.py` keeps of it what reaches new code.
"""

from __future__ import annotations

import random
import re
import resource
import shlex
import sys
from pathlib import Path
from typing import Final

import atheris

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
FOUND: Final = ROOT / ".fuzz"
SLOWEST_SECONDS: Final = 20
MEMORY_MIB: Final = 2048

sys.path[:0] = [str(HERE), str(ROOT)]
atheris.enabled_hooks.add("str")
with atheris.instrument_imports(include=["memledger"]):
    import targets


def main() -> None:
    """Fuzz one target."""
    if len(sys.argv) < 2 or sys.argv[1] not in targets.TARGETS:
        sys.exit(f"usage: run.py {'|'.join(targets.TARGETS)} [libFuzzer's arguments]")
    name, given = sys.argv[1], sys.argv[2:]
    # What a hostile pickle asks for is refused here as in the program.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MIB * 2**20,) * 2)
    how = {"custom_mutator": _mutate_json} if name in targets.JSON_TARGETS else {}
    # libFuzzer starts itself again for a merge, through a shell: this is how.
    again = shlex.join([sys.executable, str(Path(__file__).resolve()), name])
    atheris.Setup([again, *options(name, given), *given], targets.TARGETS[name], **how)
    atheris.Fuzz()


def options(name: str, given: list[str]) -> list[str]:
    """libFuzzer's arguments; folders only where no input is named."""
    chosen = [
        f"-timeout={SLOWEST_SECONDS}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-max_len={targets.LARGEST}",
        "-print_final_stats=1",
    ]
    if any(not one.startswith("-") for one in given):
        return chosen
    found = FOUND / name
    seeds = FOUND / f"{name}.seeds"
    for folder in (found, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(targets.seeds(name)):
        (seeds / f"{number:03}").write_bytes(data)
    folders = [str(found), str(seeds), *([str(kept)] if (kept := HERE / "corpus" / name).is_dir() else [])]
    if words := "".join(f'"{_escaped(word)}"\n' for word in targets.words(name)):
        dictionary = FOUND / f"{name}.dict"
        dictionary.write_text(words)
        chosen.append(f"-dict={dictionary}")
    return [*chosen, f"-artifact_prefix={found}/", *folders]


def _mutate_json(data: bytes, most: int, seed: int) -> bytes:
    """A value of the document put in place of another: bytes turned over would break its form nearly always."""
    draw = random.Random(seed)
    if draw.random() < 0.1:
        return atheris.Mutate(data, most)
    return targets.mutated_json(data, draw)[:most]


def _escaped(word: bytes) -> str:
    return "".join(chr(b) if re.match(rb"[A-Za-z0-9 _.:=/,#()-]", bytes([b])) else f"\\x{b:02x}" for b in word)


if __name__ == "__main__":
    main()
