"""The pre-filter: which literals stand where in a block of bytes.

`hyperscan` looks for all literals at once, at about the speed of `grep`; where it can't be imported, `re` finds the
lines that hold any of them. Both report the same lines with the same literals.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

from memledger.cache import cached, key_of

Hits = list[tuple[int, int]]
"""(index of the literal, offset of its end in the block), in order of the offsets; every literal of a line is reported."""

_MEMORY_LITERALS: Final = (b"GiB", b"MiB", b"TiB", b" GB", b" MB", b" TB", b" tokens", b" slots", b" blocks")
MEMORY_LITERALS: Final = _MEMORY_LITERALS + tuple(
    b"%d%s" % (digit, unit) for unit in (b"GB", b"MB", b"TB") for digit in range(10)
)
"""Literals that a memory-like figure cannot do without."""


KEPT_FROM: Final = 100
"""Fewer literals are compiled faster than a file is read."""


class Prefilter(Protocol):
    """Finds literals in blocks of bytes."""

    name: str

    def scan(self, block: bytes) -> Hits:
        """The literals of the block; a line that holds some has each of them reported at least once."""


def prefilter(literals: Sequence[bytes], *, fallback: bool = False) -> Prefilter:
    """A pre-filter for `literals`: hyperscan's where it can be imported and `fallback` is not asked for."""
    if not fallback:
        try:
            return HyperscanPrefilter(literals)
        except ImportError:
            pass
    return PythonPrefilter(literals)


class HyperscanPrefilter:
    """All literals at once through `hyperscan`.

    Raises:
        ImportError: hyperscan is not installed, or not for this machine.
    """

    name = "hyperscan"

    def __init__(self, literals: Sequence[bytes]) -> None:
        import hyperscan

        key = key_of(str(getattr(hyperscan, "__version__", "")), os.uname().machine, *literals)
        worth_keeping = len(literals) >= KEPT_FROM
        compiled = cached("literals", key, lambda: _compiled(literals)) if worth_keeping else _compiled(literals)
        try:
            self._database = _loaded(compiled)
        except hyperscan.HyperscanError:
            # Made on another kind of processor (a home folder shared between machines).
            self._database = _loaded(_compiled(literals))

    def scan(self, block: bytes) -> Hits:
        """The literals of the block."""
        hits: Hits = []
        append = hits.append

        def found(literal: int, _start: int, end: int, _flags: int, _context: object) -> None:
            append((literal, end))

        self._database.scan(block, match_event_handler=found)
        return hits


def _compiled(literals: Sequence[bytes]) -> bytes:
    import hyperscan

    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    count = len(literals)
    database.compile(
        expressions=list(literals), ids=list(range(count)), elements=count, flags=[0] * count, literal=True
    )
    return bytes(hyperscan.dumpb(database))


def _loaded(compiled: bytes) -> Any:
    import hyperscan

    database = hyperscan.loadb(compiled, hyperscan.HS_MODE_BLOCK)
    database.scratch = hyperscan.Scratch(database)
    database.scan(b"", match_event_handler=_ignore)  # fails at once where the database is another machine's
    return database


def _ignore(_literal: int, _start: int, _end: int, _flags: int, _context: object) -> None:
    """A literal that nobody asked for."""


class PythonPrefilter:
    """The same through `re`: one alternation finds the lines, each literal is then looked for in the line."""

    name = "python"

    def __init__(self, literals: Sequence[bytes]) -> None:
        self._literals = tuple(literals)
        self._any = re.compile(_any_of(sorted(set(literals))))

    def scan(self, block: bytes) -> Hits:
        """The literals of the block."""
        hits: Hits = []
        position = 0
        search = self._any.search
        while (found := search(block, position)) is not None:
            start = block.rfind(b"\n", 0, found.start()) + 1
            stop = block.find(b"\n", found.end())
            stop = len(block) if stop < 0 else stop
            line = block[start:stop]
            here = []
            for index, literal in enumerate(self._literals):
                at = line.find(literal)
                while at >= 0:
                    here.append((index, start + at + len(literal)))
                    at = line.find(literal, at + 1)
            here.sort(key=lambda hit: hit[1])
            hits.extend(here)
            position = stop
        return hits


def _any_of(literals: Sequence[bytes]) -> bytes:
    """A pattern for any of the sorted literals, shared beginnings written once: `re` tries alternatives one by one."""
    if b"" in literals:
        return b""  # one literal ends here: what would follow does not matter
    branches = []
    for first, group in itertools.groupby(literals, key=lambda literal: literal[:1]):
        members = list(group)
        # Of sorted literals, the first and the last share what all share.
        ends = enumerate(zip(members[0], members[-1], strict=False))
        shared = members[0][: next((i for i, (a, b) in ends if a != b), min(len(members[0]), len(members[-1])))]
        rest = _any_of([member[len(shared) :] for member in members])
        branches.append(re.escape(shared or first) + rest)
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"
