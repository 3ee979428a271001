"""Numbers in words: no unit is lost, nothing is rounded into a lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger import words
from memledger.units import GIB, KIB, MIB


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (round(20.16 * GIB), "20.16"),
        (1234 * GIB, "1,234.00"),
        (0, "0.00"),
        (MIB, "<0.01"),
        (-MIB, ">-0.01"),
        (-2 * GIB, "-2.00"),
    ],
)
def test_gib(size, text):
    assert words.gib(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (round(115.36 * GIB), "115.4 GiB"),
        (round(6.29 * GIB), "6.29 GiB"),
        (35 * MIB, "0.03 GiB"),
        (MIB, "less than 0.005 GiB"),
        (0, "0.00 GiB"),
        (round(9.996 * GIB), "10.0 GiB"),
    ],
)
def test_gib_in_a_sentence(size, text):
    assert words.gib_about(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (64 * KIB, "64 KiB"), (round(146.8 * MIB), "146.8 MiB"), (3 * GIB, "3 GiB")],
)
def test_amount(size, text):
    assert words.amount(size) == text


def test_a_quotient_has_no_more_digits_than_its_tolerance_lets_stand():
    assert words.quotient(round(20.16 * GIB), round(0.01 * GIB), 330323) == "64 KiB"
    assert words.quotient(125 * round(146.8125 * MIB), round(0.01 * GIB), 125) == "146.8 MiB"
    assert words.quotient(round(0.18 * GIB), round(0.01 * GIB), 6827) == "about 28 KiB"
    assert words.quotient(7 * KIB + 512, 0, 1) == "7.5 KiB"
    assert words.quotient(10, 0, 4) == "2.5 B"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (575_000, "575K"),
        (1_017_000, "1.02M"),
        (999_600, "1.00M"),
        (9_999, "9,999"),
        (10_000, "10K"),
        (-575_000, "-575K"),
    ],
)
def test_counts_in_a_sentence(number, text):
    assert words.count_short(number) == text


@pytest.mark.parametrize(
    ("fraction", "digits", "text"),
    [
        (0.12, 0, "12 %"),
        (1.0, 0, "100 %"),
        (0.0, 0, "0 %"),
        (0.001, 0, "<1 %"),
        (0.0001, 1, "<0.1 %"),
        (0.053, 1, "5.3 %"),
    ],
)
def test_a_share_never_becomes_nothing(fraction, digits, text):
    assert words.percent(fraction, digits) == text


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [
        ("2026-09-09T11:57:18", "2026-09-09T17:57:18", "6 h"),
        ("2026-09-09T11:57:18", "2026-09-09T11:57:56", "38 s"),
        ("2026-09-09T11:57:18", "2026-09-09T12:11:18", "14 min"),
        ("2026-09-09T11:57:18", "2026-09-12T11:57:18", "3 days"),
        ("2026-09-09T11:57:18", "2026-09-08T11:57:18", None),
        ("--09-09T11:57:18", "--09-09T12:57:18", "1 h"),
        ("--12-31T23:00:00", "--01-01T01:00:00", "2 h"),
        ("--02-28T00:00:00", "--02-29T00:00:00", "24 h"),
        ("--03-01T00:00:00", "--02-29T00:00:00", None),
        ("--09-09T11:57:18", "2026-09-09T12:57:18", None),
        ("2026-09-09T11:57:18", "2026-09-09T11:57:18+00:00", None),
        ("2026-09-09", "yesterday", None),
        (None, "2026-09-09T11:57:18", None),
    ],
)
def test_durations(start, end, text):
    seconds = words.seconds_between(start, end)
    assert (None if seconds is None else words.duration(seconds)) == text


def test_a_figure_printed_in_gib_is_not_shown_in_a_finer_unit():
    assert words.amount(round(0.02 * GIB)) == "0.02 GiB"
    assert words.amount(-round(0.87 * GIB)) == "-0.87 GiB"
    assert words.amount(20 * MIB) == "20 MiB"
    assert words.amount(round(877.25 * MIB)) == "877.2 MiB"


def test_a_number_stays_with_its_unit():
    assert words.glued("weights 15.0 GiB (64 %), 3 requests") == "weights 15.0\xa0GiB (64\xa0%), 3 requests"


@pytest.mark.parametrize(("fraction", "text"), [(0.363, "36.3%"), (-0.0001, "0.0%"), (0.0, "0.0%"), (-0.02, "-2.0%")])
def test_a_share_in_a_column_has_no_minus_zero(fraction, text):
    assert words.share(fraction, "%") == text


@given(st.integers(-(2**50), 2**50))
def test_a_residual_is_shown_with_its_sign(size):
    text = words.signed_or_zero(size)
    assert text == "0.00" or (text[0] == "-") is (size < 0)
    assert abs(float(text.replace(",", "")) * GIB - size) <= 0.00501 * GIB


def test_data_types():
    assert [words.dtype(t) for t in ("torch.bfloat16", "torch.float8_e4m3fn", "fp8_e5m2", "torch.float32")] == [
        "bf16",
        "fp8 e4m3",
        "fp8_e5m2",
        "fp32",
    ]
