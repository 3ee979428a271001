"""Recurrent state bytes per slot: shapes, sharding, default types, and figures that engines printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.model import state, table
from memledger.model.architecture import (
    Architecture,
    GatedDeltaNet,
    KimiDeltaAttention,
    Lightning,
    Mamba1,
    Mamba2,
    NotModelledError,
    Parallel,
    ShortConvolution,
)
from memledger.units import GIB, MIB

ONE = Parallel()
QWEN_NEXT = GatedDeltaNet(k_heads=16, v_heads=32, k_dim=128, v_dim=128, conv_kernel=4)


def arch(name: str) -> Architecture:
    found = table.look_up(name)
    assert found is not None
    return found.architecture


@pytest.mark.parametrize(
    ("name", "layers", "conv", "ssm", "total", "total16"),
    [
        ("Qwen/Qwen3-Next-80B-A3B", 36, 1.688, 72.00, 73.69, 37.69),
        ("Qwen/Qwen3.5-27B", 48, 2.812, 144.00, 146.81, 74.81),
        ("Qwen/Qwen3.6-27B", 48, 2.812, 144.00, 146.81, 74.81),
        ("Qwen/Qwen3.5-35B-A3B", 30, 1.406, 60.00, 61.41, 31.41),
        ("Qwen/Qwen3.6-35B-A3B", 30, 1.406, 60.00, 61.41, 31.41),
        ("Qwen/Qwen3.5-122B-A10B", 36, 2.531, 144.00, 146.53, 74.53),
        ("Qwen/Qwen3.5-397B-A17B", 45, 3.164, 180.00, 183.16, 93.16),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 20, 1.406, 40.00, 41.41, 21.41),
        ("moonshotai/Kimi-K3", 69, 14.555, 414.00, 428.55, 221.55),
        ("inclusionAI/Ling-3.0-flash", 35, 2.461, 70.00, 72.46, 37.46),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 23, 0.809, 46.00, 46.81, 23.81),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", 40, 2.344, 160.00, 162.34, 82.34),
        ("nvidia/Nemotron-H-56B-Base-8K", 54, 6.328, 864.00, 870.33, 438.33),
        ("ibm-granite/granite-4.0-h-small", 36, 1.740, 144.00, 145.74, 73.74),
        ("tiiuae/Falcon-H1-7B-Instruct", 44, 0.902, 132.00, 132.90, 66.90),
        ("ai21labs/Jamba-v0.1", 28, 1.312, 14.00, 15.31, 8.31),
        ("MiniMaxAI/MiniMax-Text-01", 70, 0, 280.00, 280.00, 140.00),
        ("inclusionAI/Ring-mini-linear-2.0", 16, 0, 16.00, 16.00, 8.00),
        ("LiquidAI/LFM2-1.2B", 10, 0.078, 0, 0.08, 0.08),
        ("LiquidAI/LFM2-8B-A1B", 18, 0.141, 0, 0.14, 0.14),
    ],
)
def test_slot_of_known_models(name, layers, conv, ssm, total, total16):
    model = arch(name)
    assert len(model.state_layers) == layers
    slot = state.slot_bytes(model, ONE, "bfloat16", "float32")
    assert slot.conv / MIB == pytest.approx(conv, abs=0.00051)
    assert slot.temporal / MIB == pytest.approx(ssm, abs=0.0051)
    assert slot.total / MIB == pytest.approx(total, abs=0.0051)
    assert state.slot_bytes(model, ONE, "bfloat16", "bfloat16").total / MIB == pytest.approx(total16, abs=0.0051)


# SGLang's pool has one slot more than it announces.
@pytest.mark.parametrize(
    ("name", "tp", "slots", "conv", "ssm"),
    [
        pytest.param("inclusionAI/Ling-3.0-flash", 1, 117, 0.28, 8.07, id="S2"),
        pytest.param("Qwen/Qwen3-Next-80B-A3B", 4, 80, None, 1.42, id="S8"),
        pytest.param("Qwen/Qwen3.5-27B", 1, 124, 0.34, 17.58, id="S1 (consistency: geometry of a relative)"),
        pytest.param("moonshotai/Kimi-K3", 8, 257, 0.46, 13.04, id="S7 (consistency: model not named)"),
    ],
)
def test_logged_state_sizes(name, tp, slots, conv, ssm):
    slot = state.slot_bytes(arch(name), Parallel(tp=tp), "bfloat16", "float32")
    assert (slots + 1) * slot.temporal / GIB == pytest.approx(ssm, abs=0.005)
    if conv is not None:
        assert (slots + 1) * slot.conv / GIB == pytest.approx(conv, abs=0.005)


def test_logged_short_convolution():
    """S9, consistency only: the width 1536 was solved from the logged size."""
    conv, temporal = state.layer_state_bytes(ShortConvolution(1536, 3), 1, "bfloat16", "float32")
    assert temporal == 0
    assert 85293 * 10 * conv / GIB == pytest.approx(4.88, abs=0.005)


@pytest.mark.parametrize(("tp", "channels", "heads"), [(1, 8192, 32), (2, 4096, 16), (4, 2048, 8), (8, 1024, 4)])
def test_shapes_as_the_engine_makes_them(tp, channels, heads):
    """Shapes that SGLang 0.5.23's own code gives for this geometry: (channels, 3) and (heads, 128, 128)."""
    assert state.conv_elements(QWEN_NEXT, tp) == channels * 3
    assert state.temporal_elements(QWEN_NEXT, tp) == heads * 128 * 128


def test_speculation_widens_the_convolution_in_vllm_only():
    assert state.conv_elements(QWEN_NEXT, 1, 3, "vllm") == 8192 * 6
    assert state.conv_elements(QWEN_NEXT, 1, 3, "sglang") == 8192 * 3
    assert state.conv_elements(Mamba1(8192, 16, 4), 1, 3, "vllm") == 8192 * 3
    assert state.conv_elements(Lightning(64, 128), 1, 3, "vllm") == 0


def test_mamba2_groups_that_do_not_divide_are_replicated():
    """The convolution stops shrinking: one group stays on each GPU."""
    one_group = Mamba2(heads=128, head_dim=64, groups=1, state_size=128, conv_kernel=4)
    assert state.conv_elements(one_group, 1) == (8192 + 2 * 128) * 3
    assert state.conv_elements(one_group, 8) == (1024 + 2 * 128) * 3
    assert state.temporal_elements(one_group, 8) == 16 * 64 * 128


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(NotModelledError, match="does not start"):
        state.temporal_elements(QWEN_NEXT, 5)


@pytest.mark.parametrize(
    ("name", "framework", "version", "expected"),
    [
        ("Qwen/Qwen3-Next-80B-A3B", "sglang", None, ("bfloat16", "float32")),
        ("Qwen/Qwen3-Next-80B-A3B", "vllm", None, ("bfloat16", "bfloat16")),
        ("Qwen/Qwen3.5-27B", "vllm", "0.17.0", ("bfloat16", "float32")),
        ("Qwen/Qwen3.5-27B", "vllm", "0.16.0", ("bfloat16", "bfloat16")),
        ("Qwen/Qwen3.5-27B", "sglang", "0.5.23", ("bfloat16", "float32")),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "vllm", "0.12.0", ("bfloat16", "bfloat16")),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "vllm", "0.13.0", ("bfloat16", "float32")),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "sglang", None, ("bfloat16", "float32")),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "vllm", None, ("bfloat16", "float32")),
        ("ibm-granite/granite-4.0-h-small", "vllm", "0.33.0", ("bfloat16", "bfloat16")),
        ("ibm-granite/granite-4.0-h-small", "sglang", "0.5.4", ("bfloat16", "float32")),
    ],
)
def test_default_types(name, framework, version, expected):
    assert state.default_dtypes(arch(name), framework, version) == expected


def test_sglang_obeys_the_config_from_0_5_9():
    from msgspec.structs import replace

    model = replace(arch("Qwen/Qwen3.5-27B"), state_dtype="bfloat16")
    assert state.default_dtypes(model, "sglang", "0.5.8") == ("bfloat16", "float32")
    assert state.default_dtypes(model, "sglang", "0.5.9") == ("bfloat16", "bfloat16")
    with pytest.raises(NotModelledError, match=r"0\.5\.9"):
        state.default_dtypes(model, "sglang", None)


def test_sglang_does_not_read_the_other_engines_key():
    from msgspec.structs import replace

    nemotron = replace(arch("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), state_dtype="bfloat16")
    assert nemotron.state_dtype_key == "mamba_ssm_cache_dtype"
    assert state.default_dtypes(nemotron, "sglang", "0.5.23") == ("bfloat16", "float32")


def test_a_type_that_depends_on_an_unknown_version_is_refused():
    with pytest.raises(NotModelledError, match=r"0\.17\.0"):
        state.default_dtypes(arch("Qwen/Qwen3.5-27B"), "vllm", None)


def test_pipeline_stages_share_the_layers():
    model = arch("Qwen/Qwen3-Next-80B-A3B")
    whole = state.slot_bytes(model, ONE, "bfloat16", "float32").total
    assert state.slot_bytes(model, Parallel(pp=4), "bfloat16", "float32").total * 4 == whole


powers = st.sampled_from([1, 2, 4, 8, 16])
STATES = st.one_of(
    st.builds(GatedDeltaNet, st.just(16), st.sampled_from([16, 32, 64]), st.just(128), st.just(128), st.integers(2, 5)),
    st.builds(KimiDeltaAttention, st.sampled_from([16, 32, 96]), st.just(128), st.integers(2, 5)),
    st.builds(
        Mamba2,
        st.sampled_from([16, 64, 128]),
        st.just(64),
        st.sampled_from([1, 2, 8, 16]),
        st.just(128),
        st.integers(2, 5),
    ),
    st.builds(Mamba1, st.sampled_from([4096, 8192]), st.just(16), st.integers(2, 5)),
    st.builds(Lightning, st.sampled_from([16, 64]), st.just(128)),
    st.builds(ShortConvolution, st.sampled_from([1024, 2048]), st.integers(2, 5)),
)


@given(STATES, powers)
def test_ranks_hold_at_least_the_whole(layer, tp):
    """Equal where everything divides; more only for Mamba-2, whose groups are replicated."""
    whole_conv, whole_ssm = state.layer_state_bytes(layer, 1, "bfloat16", "float32")
    conv, ssm = state.layer_state_bytes(layer, tp, "bfloat16", "float32")
    assert ssm * tp == whole_ssm
    assert conv * tp >= whole_conv
    if not (isinstance(layer, Mamba2) and layer.groups % tp):
        assert conv * tp == whole_conv


@given(STATES, powers)
def test_half_the_width_is_half_the_state(layer, tp):
    _, wide = state.layer_state_bytes(layer, tp, "bfloat16", "float32")
    _, narrow = state.layer_state_bytes(layer, tp, "bfloat16", "bfloat16")
    assert narrow * 2 == wide


@given(st.integers(1, 64), st.integers(1, 64))
def test_more_heads_take_more_state(few, more):
    assert state.temporal_elements(Lightning(few + more, 128)) > state.temporal_elements(Lightning(few, 128))
