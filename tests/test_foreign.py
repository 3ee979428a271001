"""A report that was read back may be somebody else's file: what no memledger wrote is refused in a sentence."""

import json

import msgspec
import pytest
from sample_reports import hybrid, report

from memledger.compare.load import NotAReportError, read_json
from memledger.foreign import problem
from memledger.ledger import Report
from memledger.live import snapshot
from memledger.live.sample import Sample
from memledger.live.snapshot import SCHEMA, Snapshot, SnapshotError
from memledger.report.json import encode


def plain():
    return json.loads(encode(report(hybrid())))


def changed(where, value):
    document = plain()
    holder = document
    *path, last = where
    for key in path:
        holder = holder[key]
    holder[last] = value
    return document


RANK = ("servers", 0, "ranks", 0)
ENTRY = (*RANK, "entries", 0)
HOSTILE = [
    ((*RANK, "gpu", "index"), -1),
    ((*ENTRY, "account"), "weights,model"),
    ((*ENTRY, "account"), "host/"),
    ((*ENTRY, "stage"), "nowhere"),
    ((*RANK, "stages", 0, "name"), "nowhere"),
    ((*ENTRY, "detail", "rows"), 0),
    ((*ENTRY, "detail", "slots"), "many"),
    ((*ENTRY, "detail", "modelled"), [1]),
    ((*ENTRY, "detail", "dtype"), {}),
    ((*ENTRY, "evidence", 0, "input"), 7),
    ((*ENTRY, "evidence", 0, "input"), -1),
    (("servers", 0, "span", 0, "input"), 7),
    (("servers", 0, "config", "tp_size"), 0),
    (("servers", 0, "config", "tp_size"), "2"),
    (("servers", 0, "config", "memory_fraction"), True),
    ((*ENTRY, "bytes"), 2**63),
    ((*ENTRY, "detail", "note"), 1e300),
]


def test_what_memledger_writes_is_no_problem():
    document = plain()
    assert problem(document, msgspec.convert(document, Report)) is None


@pytest.mark.parametrize(("where", "value"), HOSTILE)
def test_a_changed_report_is_refused_in_one_sentence(where, value, tmp_path):
    document = changed(where, value)
    file = tmp_path / "r.json"
    file.write_text(json.dumps(document))
    with pytest.raises(NotAReportError) as error:
        read_json(str(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("where", "value"), HOSTILE)
def test_a_changed_snapshot_is_refused_in_one_sentence(where, value, tmp_path):
    taken = json.loads(snapshot.encode(Snapshot(SCHEMA, "0", Sample(taken_at=""))))
    file = tmp_path / "s.json"
    file.write_text(json.dumps({**taken, "report": changed(where, value)}))
    with pytest.raises(SnapshotError) as error:
        snapshot.read(str(file))
    assert "\n" not in str(error.value)


def test_nesting_has_an_end():
    value = []
    for _ in range(5000):
        value = [value]
    assert problem(value, None) is not None
