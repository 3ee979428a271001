"""Plans for vLLM logs whose model is not known: by the log's own figures, where every layer keeps every token."""

from pathlib import Path

import msgspec
import pytest

from memledger import pipeline
from memledger.ledger import Concurrency
from memledger.model.architecture import NotModelledError
from memledger.model.versions import is_placeholder
from memledger.plan import Facts, Target, make_plan
from memledger.units import GIB, Amount

FIXTURES = Path(__file__).parent.parent / "fixtures"


def logged(name):
    return pipeline.explain([str(FIXTURES / name / "server.log")]).servers[-1]


def plan(server, target=None, total=None, **settings):
    return make_plan(
        server, settings, target or Target(), Facts("vllm", None, None, "no architecture of it found", total)
    )


def with_capacity(server, **fields):
    """The server with other printed capacities on every rank."""
    ranks = tuple(
        msgspec.structs.replace(rank, capacity=msgspec.structs.replace(rank.capacity, **fields))
        for rank in server.ranks
    )
    return msgspec.structs.replace(server, ranks=ranks)


def test_bytes_per_token_come_from_the_pool_and_ranges_hold_its_rounding():
    found = plan(logged("vllm-0.10.2-actual-usage"), context_length=4096)
    assert found.before.capacity.kv_tokens == 100_016 and found.before.capacity.kv_blocks == 6251
    assert found.before.under("kv_cache") == 9_832_039_134, "the log prints the bytes in use"
    assert found.architecture is None
    (said,) = [text for text in found.assumptions if text.startswith("from the log")]
    assert "9.16 GiB of pool for 100,016 tokens" in said and "96.0 KiB" in said
    assert found.after.capacity.concurrency == Concurrency(4096, 6251 / 256)
    assert found.flags == ("--max-model-len", "4096")


def test_nothing_changed_is_nothing_different():
    found = plan(logged("vllm-0.10.2-actual-usage"), max_running_requests=8)
    assert found.before.accounts == found.after.accounts
    assert found.change.accounts == {}


def test_a_load_takes_its_blocks_and_the_null_block():
    found = plan(logged("vllm-0.10.2-actual-usage"), Target(4, 8192))
    assert found.feasible is True
    assert found.smallest.capacity.kv_blocks == 1 + 4 * 512
    each = found.before.under("kv_cache") // 6251
    assert found.needed_bytes == (1 + 4 * 512) * each
    low, high = found.ranges["needed_bytes"]
    assert low < found.needed_bytes == high, "a block has the pool's bytes over its blocks at most"
    assert plan(logged("vllm-0.10.2-actual-usage"), Target(13, 8192)).feasible is False


def test_kv_in_8_bits_holds_twice_the_tokens():
    server = logged("vllm-0.10.2-actual-usage")
    found = plan(server, kv_cache_dtype="fp8")
    low, high = found.after.ranges["kv_tokens"]
    assert low <= 200_032 <= high + 16 and high - low < 200
    with pytest.raises(NotModelledError, match="latent KV"):
        latent = msgspec.structs.replace(server, config={**server.config, "kv_cache_format": "fp8_ds_mla"})
        plan(latent, kv_cache_dtype="bfloat16")
    with pytest.raises(NotModelledError, match="the type now is not in the log"):
        unknown = msgspec.structs.replace(server, config={**server.config, "dtype": None, "kv_cache_dtype": None})
        plan(unknown, kv_cache_dtype="fp8")


def test_another_fraction_of_the_card():
    found = plan(logged("vllm-0.10.2-actual-usage"), memory_fraction=0.95, total=Amount(80 * GIB))
    used = logged("vllm-0.10.2-actual-usage").config["memory_fraction"]
    card = logged("vllm-0.10.2-actual-usage").ranks[0].gpu.total_bytes or 80 * GIB
    grown = found.after.under("kv_cache") - found.before.under("kv_cache")
    assert abs(grown - card * (0.95 - used)) < 2


def test_another_block_size_rounds_requests_up_to_it():
    found = plan(logged("vllm-0.10.2-actual-usage"), Target(4, 8200), page_size=128)
    assert found.smallest.capacity.kv_block_tokens == 128
    assert found.smallest.capacity.kv_blocks == 1 + 4 * 65


@pytest.mark.parametrize(
    "setting",
    [{"tp_size": 2}, {"pp_size": 2}, {"dcp_size": 2}, {"speculative_draft_tokens": 2, "speculative_algorithm": "mtp"}],
)
def test_what_follows_from_the_layers_is_refused(setting):
    with pytest.raises(NotModelledError, match="follows from the model's layers; --model-config FILE would tell"):
        plan(logged("vllm-0.10.2-actual-usage"), **setting)


def test_the_rank_with_the_fewest_bytes_decides_and_one_without_a_pool_line_does_not():
    server = logged("vllm-0.10.2-actual-usage")
    (rank,) = server.ranks
    silent = msgspec.structs.replace(rank, entries=())
    larger = msgspec.structs.replace(
        rank,
        entries=tuple(
            msgspec.structs.replace(e, bytes=e.bytes + GIB) if e.account == "kv_cache/pool" else e for e in rank.entries
        ),
    )
    several = msgspec.structs.replace(server, ranks=(silent, larger, rank))
    assert plan(several, context_length=4096).before.under("kv_cache") == 9_832_039_134


def test_state_settings_are_named_not_ignored():
    found = plan(logged("vllm-0.10.2-actual-usage"), state_dtype="bfloat16", context_length=4096)
    assert any(
        text.startswith("state_dtype: by its figures this pool holds no recurrent state") for text in found.not_modelled
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vllm-0.25-hybrid", "'Setting attention block size ...': the pool holds recurrent state too"),
        ("vllm-0.8.5-v1-tp4", "does not print the pool's bytes"),
    ],
)
def test_pools_that_the_log_does_not_tell_are_refused(name, why):
    with pytest.raises(NotModelledError, match=why):
        plan(logged(name), context_length=4096)


def test_window_groups_are_told_by_the_concurrency_up_to_0_20_0():
    server = logged("vllm-0.10.2-actual-usage")
    more = with_capacity(server, kv_blocks=None, concurrency=Concurrency(8192, 22.5))
    with pytest.raises(NotModelledError, match=r"22\.50 requests of 8,192 tokens are not 100,016 tokens"):
        plan(more, context_length=4096)
    silent = with_capacity(server, kv_blocks=None, concurrency=Concurrency(8192, None))
    with pytest.raises(NotModelledError, match="'Maximum concurrency for"):
        plan(silent, context_length=4096)


def test_printed_blocks_that_are_not_the_tokens_are_refused():
    server = with_capacity(logged("vllm-0.10.2-actual-usage"), kv_blocks=12_502, kv_block_tokens=16)
    with pytest.raises(NotModelledError, match="100,016 tokens are not 12,502 blocks of 16"):
        plan(server, context_length=4096)


def test_later_releases_need_whole_blocks_or_printed_groups():
    server = with_capacity(logged("vllm-0.10.2-actual-usage"), kv_blocks=None)
    server = msgspec.structs.replace(server, framework_version="0.22.0")
    found = plan(server, context_length=4096)
    assert any("the printed tokens are whole blocks" in text for text in found.assumptions)
    with pytest.raises(NotModelledError, match="are not whole blocks"):
        plan(with_capacity(server, kv_tokens=100_017), context_length=4096)
    newer = plan(msgspec.structs.replace(server, framework_version="0.31.0"), context_length=4096)
    assert any("prints no group sizes" in text for text in newer.assumptions)


def test_a_build_without_a_release_needs_its_version():
    server = msgspec.structs.replace(logged("vllm-0.10.2-actual-usage"), framework_version="0.1.dev15917+g0a6396b45")
    with pytest.raises(NotModelledError, match=r"a build without a release.*--framework-version N"):
        plan(server, context_length=4096)
    found = make_plan(server, {"context_length": 4096}, Target(), Facts("vllm", "0.10.2"))
    assert found.framework_version == "0.10.2" and found.after.capacity.kv_tokens == 100_016


@pytest.mark.parametrize(
    ("version", "is_one"),
    [
        (None, True),
        ("0.1.dev1+g1", True),
        ("0.0.0+x.g1", True),
        ("0.1.20", False),
        ("0.6.3.post1", False),
        ("0.33.0", False),
    ],
)
def test_placeholders_of_versions(version, is_one):
    assert is_placeholder(version) is is_one
