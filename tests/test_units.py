"""Printed figures become bytes with the tolerance that their digits allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.units import GIB, Amount, parse_amount, total


@pytest.mark.parametrize(
    ("text", "unit", "size", "tolerance"),
    [
        ("6.46", "GiB", round(6.46 * GIB), 0.005 * GIB),
        ("76.4", "GiB.2", round(76.4 * GIB), 0.005 * GIB),
        ("14.9889", "GiB", round(14.9889 * GIB), 0.00005 * GIB),
        ("78.5927734375", "GiB.2", 84388347904, 0.5e-10 * GIB),
        ("146.81", "MiB", round(146.81 * 2**20), 0.005 * 2**20),
        ("8", "GiB", 8 * GIB, 0.5 * GIB),
        ("5.37", "GB10", 5_370_000_000, 5_000_000),
        ("1,234,567", "B", 1_234_567, 0),
        ("-0.41", "GiB", round(-0.41 * GIB), 0.005 * GIB),
    ],
)
def test_a_printed_figure_is_bytes_plus_half_of_its_last_digit(text, unit, size, tolerance):
    got = parse_amount(text, unit)
    assert got is not None
    assert abs(got.bytes - size) <= 1
    assert tolerance <= got.tolerance <= tolerance + 1


@pytest.mark.parametrize(
    ("text", "unit"), [("17179869184.00", "GiB"), ("18446744073709551615", "B"), ("8589934592.00", "GiB")]
)
def test_all_ones_means_not_available_never_16_gib(text, unit):
    assert parse_amount(text, unit) is None


@pytest.mark.parametrize("text", ["", "abc", "1.2.3", "nan", "inf"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match="not a"):
        parse_amount(text, "GiB")


@given(st.integers(0, 2**40), st.integers(0, 4))
def test_the_true_size_lies_within_the_tolerance_of_what_is_printed(size, digits):
    printed = f"{size / GIB:.{digits}f}"
    got = parse_amount(printed, "GiB")
    assert got is not None
    assert abs(got.bytes - size) <= got.tolerance + 1


@given(st.integers(0, 2**40), st.integers(1, 4))
def test_fewer_digits_never_make_a_figure_more_certain(size, digits):
    fine = parse_amount(f"{size / GIB:.{digits}f}", "GiB")
    coarse = parse_amount(f"{size / GIB:.{digits - 1}f}", "GiB")
    assert fine is not None
    assert coarse is not None
    assert coarse.tolerance > fine.tolerance


@given(st.lists(st.builds(Amount, st.integers(-(2**50), 2**50), st.integers(0, 2**30))))
def test_sums_and_differences_add_tolerances(amounts):
    whole = total(amounts)
    assert whole.bytes == sum(a.bytes for a in amounts)
    assert whole.tolerance == sum(a.tolerance for a in amounts)
    assert (whole - whole).bytes == 0
    assert (whole - whole).tolerance == 2 * whole.tolerance
