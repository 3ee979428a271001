"""A series in bounded memory; what came with new load."""

from memledger.watch.series import MOST_POINTS, Load, Series


def test_a_long_series_keeps_a_bounded_number_of_points_and_its_ends():
    one = Series()
    for i in range(100_000):
        one.add(float(i), str(i), float(i))
    assert len(one.points) < MOST_POINTS
    assert one.points[0] == (0.0, 0.0)
    assert one.last == (99_999.0, 99_999.0)
    assert (one.peak, one.peak_at) == (99_999.0, "99999")
    assert one.trend(1.0).seconds == 99_999.0


def test_a_clock_that_goes_back_is_passed_over():
    one = Series()
    one.add(10.0, "a", 1.0)
    one.add(5.0, "b", 99.0)
    assert one.last == (10.0, 1.0)
    assert one.peak == 1.0


def test_growth_is_credited_to_new_peaks_of_load():
    one = Series()
    one.add(1, "", 100, load_rose=False)
    one.add(2, "", 130, load_rose=True)
    one.add(3, "", 140, load_rose=False)
    assert one.came_with_load == 0.75


def test_without_a_figure_of_load_nothing_is_credited():
    one = Series()
    one.add(1, "", 100, load_rose=None)
    one.add(2, "", 130, load_rose=None)
    assert one.came_with_load is None
    assert Load().rose(1.0, {}) is None


def test_load_rises_with_a_new_peak_and_for_a_few_seconds():
    load = Load()
    assert load.rose(0.0, {"running": 3.0}) is False
    assert load.rose(1.0, {"running": 5.0}) is True
    assert load.rose(2.0, {"running": 1.0}) is True
    assert load.rose(30.0, {"running": 1.0}) is True, "the look before was 28 s ago: it may have come in between"
    assert load.rose(31.0, {"running": 5.0}) is False
    assert load.rose(40.0, {"running": 6.0}) is True


def test_a_pool_that_creeps_up_is_no_new_load_at_every_look():
    load = Load()
    rose = [load.rose(float(i), {"kv": 0.3 + i * 0.0001}) for i in range(600)]
    assert sum(rose) < 30
