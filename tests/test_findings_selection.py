import pytest
from sample_reports import hybrid, report

from memledger import findings
from memledger.findings.selection import Selection, parse_codes


@pytest.mark.parametrize(
    ("select", "ignore", "code", "wanted"),
    [
        ((), (), "ML101", True),
        (("ML1",), (), "ML101", True),
        (("ML1",), (), "ML201", False),
        ((), ("ML1",), "ML101", False),
        ((), ("ML1",), "ML201", True),
        (("ML101",), ("ML1",), "ML101", True),
        (("ML101",), ("ML1",), "ML102", False),
        (("ML1",), ("ML101",), "ML101", False),
        (("ML",), ("ML5",), "ML501", False),
        (("ML101",), ("ML101",), "ML101", False),
    ],
)
def test_the_longer_match_decides(select, ignore, code, wanted):
    assert Selection(select, ignore).wants(code) is wanted


def test_lists_prefixes_and_lower_case():
    assert parse_codes(["ml1, ML501", "ML501"]) == ("ML1", "ML501")


@pytest.mark.parametrize("code", ["ML44", "ML999", "101", "X", "ML1011"])
def test_what_no_finding_has_is_refused(code):
    with pytest.raises(ValueError, match="no finding's code"):
        parse_codes([code])


def test_applied_to_a_report():
    shown = findings.attach(report(hybrid()))
    assert {f.code for f in shown.servers[0].findings} >= {"ML101"}
    assert Selection(ignore=("ML101",)).apply(shown).servers[0].findings == tuple(
        f for f in shown.servers[0].findings if f.code != "ML101"
    )
    assert Selection().apply(shown) is shown
