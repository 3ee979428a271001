"""The arithmetic on a message's figures, and the rows of who held the memory."""

import pytest

from memledger.events import Prefix
from memledger.postmortem import figures
from memledger.postmortem.symptom import KINDS, Symptom
from memledger.units import GIB, MIB, Amount

SPREAD = GIB // 200
"""Half of the last digit of a figure in GiB with two decimals."""


def message(others=(), not_available=(), **sizes):
    amounts = {f"{name}_bytes": Amount(int(size), SPREAD) for name, size in sizes.items()}
    listed = tuple({"pid": pid, "bytes": size} for pid, size in others)
    return Symptom(
        "torch_oom",
        KINDS["torch_oom"],
        "any.oom",
        Prefix(),
        0,
        1,
        "a line",
        amounts=amounts,
        not_available=not_available,
        other_processes=listed,
    )


FULL = {
    "total": 80 * GIB,
    "free": 1 * GIB,
    "process": 70 * GIB,
    "torch_allocated": 60 * GIB,
    "reserved_unallocated": 2 * GIB,
    "private_pools": GIB,
}


def test_what_is_reserved_outside_and_unaccounted_for():
    numbers = figures.numbers_of(message([(812, 6 * GIB)], **FULL))
    # Private pools are inside what torch allocated: subtracted once, never added.
    assert numbers.torch_reserved_bytes == 62 * GIB
    assert numbers.outside_torch_bytes == 8 * GIB
    assert numbers.unaccounted_bytes == 3 * GIB


def test_a_process_without_a_size_takes_part_in_no_sum():
    numbers = figures.numbers_of(message([(812, None)], **FULL))
    assert numbers.unaccounted_bytes == 9 * GIB
    assert numbers.other_processes[0].bytes is None


@pytest.mark.parametrize("missing", ["total", "free"])
def test_without_the_device_nothing_is_accounted_for(missing):
    sizes = {name: size for name, size in FULL.items() if name != missing}
    assert figures.numbers_of(message(**sizes)).unaccounted_bytes is None


def test_the_rows_of_level_0_sum_to_the_total():
    symptom = message([(812, 6 * GIB)], requested=512 * MIB, **FULL)
    rows = [row for row in figures.holders_of(symptom, figures.numbers_of(symptom)) if row.level == 0]
    parts = [row.bytes for row in rows if row.kind in {"holder", "free", "unaccounted"}]
    assert sum(parts) == next(row.bytes for row in rows if row.kind == "total")
    assert [row.bytes for row in rows if row.kind == "asked"] == [512 * MIB]


def test_the_parts_of_this_process_are_within_it():
    symptom = message(**FULL)
    rows = figures.holders_of(symptom, figures.numbers_of(symptom))
    inside = [row.bytes for row in rows if row.level == 1]
    assert sum(inside) == next(row.bytes for row in rows if row.label == "this process")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requested": 900 * MIB}, "More was free"),
        ({"torch_allocated": 90 * GIB}, "more than the device has"),
        ({"process": 85 * GIB}, "add up to more than the device"),
    ],
)
def test_what_is_odd_is_said_and_only_then(changes, said):
    sizes = {**FULL, "requested": 2 * GIB}
    plain = figures.notes_of(figures.numbers_of(message(**sizes)))
    odd = figures.notes_of(figures.numbers_of(message(**{**sizes, **changes})))
    assert plain == ()
    assert any(said in note for note in odd)


def test_figures_that_the_driver_did_not_give_are_named():
    numbers = figures.numbers_of(message(not_available=("process_bytes",), total=80 * GIB))
    assert figures.notes_of(numbers) == ("The driver gave no figure for process.",)
