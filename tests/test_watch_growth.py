"""Growth is told from noise, steps, warm-up and gaps."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.units import GIB, MIB
from memledger.watch.growth import bucketed, judge, theil_sen

NOISE = 32 * MIB


def series(figure, count=600, every=1.0):
    return [(i * every, figure(i)) for i in range(count)]


def test_fewer_than_twelve_looks_or_less_than_a_minute_say_nothing():
    assert judge(series(lambda i: i * GIB, 11, 60), NOISE).verdict == "not_enough"
    assert judge(series(lambda i: i * GIB, 59), NOISE).verdict == "not_enough"
    assert judge([], NOISE).verdict == "not_enough"


@given(st.integers(0, 2**32), st.sampled_from([1.0, 15.0, 60.0]))
def test_noise_is_flat_whatever_it_looks_like(seed, every):
    noise = random.Random(seed)
    points = series(lambda _: 40 * GIB + noise.uniform(-NOISE / 3, NOISE / 3), 400, every)
    assert judge(points, NOISE).verdict == "flat"


def test_a_leak_is_growing_with_its_slope_in_the_interval():
    noise = random.Random(7)
    found = judge(series(lambda i: 40 * GIB + i * MIB + noise.gauss(0, 5 * MIB)), NOISE)
    assert found.verdict == "growing"
    assert found.low <= MIB <= found.high
    assert found.high - found.low < 0.05 * MIB


@pytest.mark.parametrize("sign", [1, -1])
def test_what_moves_steadily_moved_over_all_of_the_time(sign):
    found = judge(series(lambda i: 40 * GIB + sign * i * MIB, 601), NOISE)
    assert found.verdict == ("growing" if sign > 0 else "shrinking")
    assert found.rise == pytest.approx(sign * 600 * MIB)
    assert found.rise == pytest.approx(found.slope * found.seconds)


def test_a_fall_at_once_is_as_large_as_it_was():
    found = judge(series(lambda i: 40 * GIB - (i >= 300) * 5 * GIB), NOISE)
    assert found.verdict == "shrinking"
    assert found.rise == -5 * GIB


def test_a_leak_in_stairs_is_growing():
    assert judge(series(lambda i: i // 40 * 128 * MIB), NOISE).verdict == "growing"


@given(st.integers(70, 530), st.integers(64, 10_000))
def test_one_step_is_a_step_wherever_it_stands_but_at_the_very_ends(where, size):
    found = judge(series(lambda i: (i >= where) * size * MIB), NOISE)
    assert found.verdict == "step"
    assert abs(found.stepped_at - where) < 15


def test_growth_that_ended_has_settled():
    noise = random.Random(3)
    found = judge(series(lambda i: min(i, 250) * 8 * MIB + noise.gauss(0, 4 * MIB)), NOISE)
    assert found.verdict == "settled"
    assert found.time_to(GIB) is None


def test_what_is_given_back_is_shrinking():
    assert judge(series(lambda i: 10 * GIB - i * MIB), NOISE).verdict == "shrinking"


def test_a_single_peak_moves_nothing():
    found = judge(series(lambda i: 40 * GIB + (20 * GIB if i == 300 else 0)), NOISE)
    assert found.verdict == "flat"


def test_a_gap_in_time_counts_as_time_not_as_a_step():
    points = [(t, t * MIB) for t in [*range(300), *range(3300, 3600)]]
    found = judge(points, NOISE)
    assert found.slope == pytest.approx(MIB, rel=0.01)


def test_time_to_a_full_device_has_an_interval():
    found = judge(series(lambda i: i * MIB), NOISE)
    middle, early, late = found.time_to(3600 * MIB)
    assert middle == pytest.approx(3600, rel=0.02)
    assert early <= middle <= late


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(-1e12, 1e12)), min_size=2, max_size=60))
def test_whatever_the_figures_the_slope_lies_in_its_interval(pairs):
    points = sorted(dict(pairs).items())
    if len(points) < 2 or any(b[0] - a[0] < 1e-3 for a, b in itertools.pairwise(points)):
        return
    slope, low, high = theil_sen(points)
    assert low <= slope <= high


def test_points_of_one_moment_have_no_slope():
    with pytest.raises(ValueError, match="one moment"):
        theil_sen([(1.0, 2.0), (1.0, 3.0)])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=500, unique=True), st.integers(2, 90))
def test_buckets_are_few_and_in_order(times, most):
    found = bucketed([(t, t) for t in sorted(times)], most)
    assert 0 < len(found) <= max(most, 1)
    assert found == sorted(found)
