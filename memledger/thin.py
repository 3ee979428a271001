"""Leaving out usage lines that can raise no maximum, and logged requests, before the reader sees them.

Of the usage lines of a block, those that raise no maximum within the block raise none in the file either, whatever came
before. Their literals are taken out of what was found, so the reader does not meet them. It meets exactly the lines that
it would have read, the first and the last of each run among them, and decides about these as ever.

What the reader may pass over unread must not count: after a line that may take following lines with it (a request whose
text has line ends, a record that a container split), nothing is taken out as far as that may reach.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Final

from memledger.prefilter import Hits
from memledger.request_text import end_of_request, shows_request
from memledger.usage import DIGITS, LONGEST_SHAPE, Shape, Shapes, candidates

_WORTH_IT: Final = 4
"""Fewer lines of a shape are all given to the reader."""


class Thinner:
    """Takes out the literals of usage lines that raise no maximum.

    It reads the shapes that the reader knows (in a helper, those known when it was forked) and changes nothing.
    """

    def __init__(self, shapes: Shapes, marks: frozenset[int], lines_taken: int) -> None:
        """Prepare.

        Args:
            shapes: the shapes known.
            marks: the literals of lines that show a request.
            lines_taken: how many lines a record may take with it that is no request.
        """
        self.shapes = shapes
        self._marks = marks
        self._lines_taken = lines_taken

    def thinned(self, data: bytes, start: int, hits: Hits) -> Hits:
        """The literals in `data` that the reader needs, of lines that start at `start` or later and end in `data`."""
        kept: Hits = []
        run: dict[Shape, tuple[list[bytes], list[int]]] = {}
        known = self.shapes.get
        # The line that is cut by the start is the block before's as well.
        as_is = data.find(b"\n", start - 1) + 1 if start else 0
        if start and not as_is:
            return hits
        position = 0
        for index, (_, end) in enumerate(hits):
            if end <= position:
                continue
            left = data.rfind(b"\n", position, end) + 1 or position
            right = data.find(b"\n", end)
            if right < 0:
                kept += hits[index:]
                break
            position = right
            line = data[left:right]
            shape = known(line.translate(None, DIGITS)) if right - left <= LONGEST_SHAPE else None
            if shape is not None and shape.columns is not None and left >= as_is:
                if shape not in run:
                    run[shape] = ([], [])
                lines, indexes = run[shape]
                lines.append(line)
                indexes.append(index)
                continue
            same = index
            while same < len(hits) and hits[same][1] <= right:
                same += 1
            here = _each_once(hits[index:same])
            if shape is None:
                reached = self._reaches(data, left, right, here)
                if reached == right and left >= as_is:
                    continue  # a request that ends on its line: nothing in it is looked at
                kept += _needed(run, hits)
                as_is = max(as_is, reached)
            kept += here
        kept += _needed(run, hits)
        kept.sort(key=itemgetter(1))
        return kept

    def _reaches(self, data: bytes, left: int, right: int, hits: Hits) -> int:
        """How far the line may take following lines with it; beyond the end of `data` where that is not known.

        `right` only where it shows a request that ends there.
        """
        if any(literal in self._marks for literal, _ in hits) and shows_request(data[left:right]):
            end = end_of_request(data, left, right, more=True)
            return len(data) + 1 if end is None else end
        for _ in range(self._lines_taken):
            right = data.find(b"\n", right + 1)
            if right < 0:
                return len(data) + 1
        return right + 1


def _each_once(hits: Hits) -> Hits:
    """The first of each literal: which stand in a line counts, not how often."""
    if len(hits) < 3:
        return hits
    first: dict[int, int] = {}
    for literal, end in hits:
        first.setdefault(literal, end)
    return list(first.items())


def _needed(run: dict[Shape, tuple[list[bytes], list[int]]], hits: Hits) -> Hits:
    """The literals of the lines of a run that the reader needs; the run is over."""
    found: set[int] = set()
    for shape, (lines, indexes) in run.items():
        if len(lines) < _WORTH_IT or shape.columns is None:
            found.update(indexes)
        else:
            found.update(indexes[i] for i in candidates(shape.columns, lines))
            found.add(indexes[-1])
    run.clear()
    return [hits[index] for index in found]
