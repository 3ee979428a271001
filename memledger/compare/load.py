"""From a path to a `Report`: a log is explained, a JSON report of `memledger explain` and a snapshot are read back.

The one place that knows which kinds of input there are: whatever can be turned into a `Report` compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from memledger import foreign, pipeline
from memledger.grammar import RuleSet
from memledger.ledger import Report
from memledger.opening import open_file

LARGEST_JSON: Final = 256 * 2**20
"""Bytes: no report is larger; what is, is read as a log."""
HEAD: Final = 64
"""Bytes at the beginning of a file by which its kind is told."""
_OTHER_KEYS: Final = {"plan": "a plan", "comparison": "a comparison", "incidents": "a report of `memledger oom`"}


class NotAReportError(ValueError):
    """The file is JSON of memledger, but no report that can be compared; the message says what it is."""


class Loaded(msgspec.Struct, frozen=True):
    """What was read, and whether it was a JSON report (`decoded`): complete as it is, with the model's figures in it."""

    reading: pipeline.Reading
    decoded: bool = False

    @property
    def report(self) -> Report:
        """The report."""
        return self.reading.report


def load_input(path: str, rules: RuleSet) -> Loaded:
    """The report of one input: a JSON report as it was written, anything else read as a log.

    Raises:
        NotAReportError: the file is a JSON document of memledger that holds no servers.
    """
    found = read_json(path)
    if found is not None:
        return Loaded(pipeline.Reading(found, heads=(b"{",) * len(found.inputs)), decoded=True)
    return Loaded(pipeline.read([path], rules, cores=None))


def read_json(path: str) -> Report | None:
    """The report in a file; None where the file is no JSON document of memledger.

    Raises:
        NotAReportError: it is one, but not of `memledger explain`, or damaged.
    """
    data = _beginning_with_brace(path)
    if data is None:
        return None
    if b"memledger-snapshot/" in data[:HEAD]:
        return _snapshot(path)
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if b'"memledger/' in data[:4096]:
            raise NotAReportError("it is a JSON report of memledger, cut off or damaged") from None
        return None
    if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("memledger/"):
        return None
    return _report(document)


def _report(document: dict[str, Any]) -> Report:
    if document["schema"] != "memledger/1":
        shown = str(document["schema"])[:40]
        raise NotAReportError(f"its schema is {shown}; this version reads memledger/1")
    for key, what in _OTHER_KEYS.items():
        if key in document:
            raise NotAReportError(f"it is {what}, not a report of `memledger explain --format json`")
    try:
        report = msgspec.convert(document, Report)
    except msgspec.ValidationError as error:
        raise NotAReportError(
            foreign.problem(document, None) or f"it is not a report of `memledger explain --format json`: {error}"
        ) from None
    if (why := foreign.problem(document, report)) is not None:
        raise NotAReportError(why)
    return report


def _snapshot(path: str) -> Report:
    """The log's report that a snapshot holds: the machine beside it says nothing of how the pool came about."""
    from memledger.live.snapshot import SnapshotError, read

    try:
        taken = read(path)
    except SnapshotError as error:
        # The name stands before the sentence already.
        raise NotAReportError(str(error).partition(": ")[2]) from error
    if taken.report is None:
        raise NotAReportError(f"it is a snapshot of `memledger {taken.kind}`: it holds no report")
    return taken.report


def _beginning_with_brace(path: str) -> bytes | None:
    """The file's bytes where it begins like a JSON object, and is a file of a report's size."""
    file = Path(path)
    try:
        if path == "-" or not file.is_file() or file.stat().st_size > LARGEST_JSON:
            return None
        with open_file(file) as stream:
            head = stream.read(HEAD)
            if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
                return None
            return (head + stream.read()).removeprefix(b"\xef\xbb\xbf")
    except OSError:
        return None
