"""`--fail-on` expressions: what they mean, and that a wrong one says what would do."""

import msgspec
import pytest
from sample_reports import dense, dense_rank, hybrid, report

from memledger import findings
from memledger.conditions import not_judged, parse_condition, reasons
from memledger.units import GIB


def with_residual(size, verdict="unexplained", opening=100 * GIB):
    base = dense_rank()
    residual = msgspec.structs.replace(base.residual, bytes=size, verdict=verdict, opening_bytes=opening)
    return dense(ranks=(msgspec.structs.replace(base, residual=residual),))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("unexplained>2%", True),
        ("unexplained > 2 %", True),
        ("unexplained>=3%", True),
        ("unexplained>3%", False),
        ("unexplained<5%", True),
        ("unexplained>2.5GiB", True),
        ("unexplained>2.5 GB", True),
        ("unexplained>4096MiB", False),
        ("UNEXPLAINED>1gib", True),
    ],
)
def test_unexplained_is_a_share_of_the_opening_or_a_size(text, holds):
    assert bool(reasons(parse_condition(text), [with_residual(3 * GIB)])) is holds


def test_the_residual_is_signed_and_open_ledgers_are_not_judged():
    condition = parse_condition("unexplained>1%")
    assert reasons(condition, [with_residual(-3 * GIB, "over_counted")]) == []
    open_one = with_residual(30 * GIB, "open")
    assert reasons(condition, [open_one]) == []
    assert not_judged(condition, [open_one]) == ["TP0: the ledger is open"]
    assert reasons(parse_condition("verdict=open"), [open_one]) == ["TP0: open"]


def test_codes_and_severities_look_at_findings():
    (server,) = findings.attach(report(hybrid())).servers
    assert reasons(parse_condition("code=ml101"), [server]) == ["ML101 (warning)"]
    assert reasons(parse_condition("code!=ML101"), [server]) == []
    assert reasons(parse_condition("code!=ML999"), [server]) == ["no ML999"]
    assert reasons(parse_condition("severity>=warning"), [server]) == ["ML101 (warning)"]
    assert reasons(parse_condition("severity=error"), [server]) == []
    assert not_judged(parse_condition("code=ML101"), [server]) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a condition"),
        ("unexplained", "is not a condition"),
        ("unexplained>", "is not a condition"),
        ("unexplained>5", "neither a share nor a size"),
        ("unexplained>5KB/s", "neither a share nor a size"),
        ("code>ML101", "write code=ML101"),
        ("code=101", "write code=ML101"),
        ("severity>=bad", "no severity 'bad'"),
        ("verdict=fine", "write verdict=NAME"),
        ("free<1GiB", "nothing is called 'free'"),
    ],
)
def test_a_wrong_expression_says_what_would_do(text, said):
    with pytest.raises(ValueError, match=said):
        parse_condition(text)
