import pytest
from finding_helpers import sglang

from memledger.findings.slots import slots_per_request
from memledger.ledger import Capacity

SLOTS = Capacity(kv_tokens=330323, state_slots=124)


def options(version=None, capacity=SLOTS, **config):
    return slots_per_request(sglang(version=version, **config), capacity).options


@pytest.mark.parametrize(
    ("version", "config", "expected"),
    [
        (None, {}, (3, 5)),
        ("0.5.3", {}, (1,)),
        ("0.5.6", {}, (3,)),
        ("0.5.7", {}, (5,)),
        ("0.5.7", {"speculative_algorithm": "EAGLE"}, (4, 5)),
        ("0.5.9", {"state_cache_mode": "extra_buffer", "speculative_algorithm": "NEXTN"}, (4,)),
        ("0.5.9", {"state_cache_mode": "no_buffer"}, (3,)),
        ("0.5.18", {"state_cache_mode": "extra_buffer"}, (4, 5)),
        ("0.5.18", {"state_cache_mode": "extra_buffer", "overlap_disabled": False}, (5,)),
        ("0.5.18", {"state_cache_mode": "extra_buffer", "overlap_disabled": True}, (4,)),
        ("0.5.18", {"state_cache_mode": "extra_buffer_lazy"}, (4,)),
        ("0.5.18", {"prefix_caching": False}, (1,)),
        ("0.5.18", {}, (3, 5)),
    ],
)
def test_by_version_and_strategy(version, config, expected):
    assert options(version, **config) == expected


def test_what_is_printed_wins():
    assert options("0.5.6", Capacity(state_slots=124, slots_per_request=5)) == (5,)


def test_the_cap_excludes_what_would_not_serve_it():
    assert options(None, Capacity(state_slots=186, max_running_requests=62)) == (3,)


def test_a_cap_that_the_engine_chose_tells_the_number():
    capacity = Capacity(kv_tokens=330323, state_slots=124, max_running_requests=24)
    assert options(None, capacity, memory_fraction=0.85) == (5,)
    assert options(None, capacity, memory_fraction=0.85, max_running_requests=24) == (3, 5)


def test_a_cap_by_kv_tokens_tells_nothing():
    few = Capacity(kv_tokens=48, state_slots=124, max_running_requests=24)
    assert options(None, few, memory_fraction=0.85) == (3, 5)
