"""Reading `config.json`: nested configs, layer kinds per family, quantisation, and what is refused."""

from __future__ import annotations

import pytest

from memledger.model.architecture import (
    Attention,
    DenseMlp,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Lightning,
    Mamba1,
    Mamba2,
    MoeMlp,
    NotModelledError,
    ShortConvolution,
)
from memledger.model.config import read_config, read_quantization
from memledger.model.families import known_types

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def read(**changes):
    return read_config({**PLAIN, **changes}, "config.json")


def test_plain_model():
    model = read()
    assert model.class_name == "LlamaForCausalLM"
    assert model.dtype == "float16"
    assert model.source == "config.json"
    assert len(model.layers) == 4
    assert model.layers[0].attention == Attention(8, 2, 64, 64)
    assert model.layers[0].mlp == DenseMlp(1024)
    assert not model.tied_embeddings
    assert model.rope_dim == 64


def test_without_kv_heads_every_query_head_has_its_own():
    model = read(num_key_value_heads=None)
    assert isinstance(model.layers[0].attention, Attention)
    assert model.layers[0].attention.kv_heads == 8


def test_nested_text_config_and_outer_fields():
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": {
            **PLAIN,
            **LINEAR,
            "model_type": "qwen3_5_text",
            "torch_dtype": None,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
        },
        "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 32},
    }
    model = read_config(outer, "x")
    assert model.model_type == "qwen3_5"
    assert model.class_name == "Qwen3_5ForConditionalGeneration"
    assert model.dtype == "bfloat16"
    assert (model.state_dtype, model.state_dtype_key) == ("float32", "mamba_ssm_dtype")
    assert [layer.state is not None for layer in model.layers] == [True, True, True, False]
    assert model.layers[0].state == GatedDeltaNet(4, 8, 32, 64, 4)
    assert isinstance(model.layers[3].attention, Attention)
    assert model.layers[3].attention.gated_output
    assert len(model.draft_layers) == 1
    assert model.multimodal
    assert model.vision_parameters == 2 * (4 * 256 + 2 * 16 * 32)
    assert model.rope_factor == 4


def test_layer_types_win_over_the_interval():
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    model = read(**LINEAR, model_type="qwen3_next", layer_types=kinds, full_attention_interval=4)
    assert [layer.attention is not None for layer in model.layers] == [True, False, False, True]


def test_latent_attention_and_experts_after_dense_layers():
    model = read(
        **LATENT,
        model_type="deepseek_v3",
        q_lora_rank=1536,
        n_routed_experts=8,
        n_shared_experts=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )
    assert model.layers[0].attention == LatentAttention(8, 512, 64, 128, 128, q_lora_rank=1536)
    assert model.layers[0].mlp == DenseMlp(1024)
    assert model.layers[1].mlp == MoeMlp(8, 64, shared_intermediate=128)
    assert model.draft_layers == (model.layers[1],)


def test_sliding_windows():
    gemma = read(model_type="gemma3_text", sliding_window=128, sliding_window_pattern=2)
    assert [layer.attention.window for layer in gemma.layers] == [128, None, 128, None]
    assert len(gemma.sliding_layers) == len(gemma.full_attention_layers) == 2
    switched_off = read(model_type="qwen2", sliding_window=128, use_sliding_window=False)
    assert not switched_off.sliding_layers
    mistral = read(model_type="mistral", sliding_window=128)
    assert len(mistral.sliding_layers) == 4
    longer_than_the_context = read(model_type="phi3", sliding_window=262144)
    assert not longer_than_the_context.sliding_layers


def test_kimi_linear_counts_layers_from_one():
    linear = {
        "num_heads": 4,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
    }
    model = read(**LATENT, model_type="kimi_linear", linear_attn_config=linear)
    assert model.layers[0].state == KimiDeltaAttention(4, 64, 4)
    assert isinstance(model.layers[1].attention, LatentAttention)
    with pytest.raises(NotModelledError, match="layer 2 is not in exactly one list"):
        read(**LATENT, model_type="kimi_linear", linear_attn_config={**linear, "full_attn_layers": [4]})


def test_nemotron_pattern_is_one_layer_a_sign():
    fields = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-*E",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_routed_experts": 4,
        "moe_intermediate_size": 64,
        "moe_latent_size": 32,
        "num_nextn_predict_layers": 1,
    }
    model = read(**fields)
    assert model.layers[0].state == Mamba2(8, 64, 2, 128, 4)
    assert model.layers[1].mlp == DenseMlp(1024, gated=False)
    assert isinstance(model.layers[2].attention, Attention)
    assert model.layers[3].mlp == MoeMlp(4, 64, gated=False, width=32)
    assert [layer.attention is not None for layer in model.draft_layers] == [True, False]
    listed = {
        **fields,
        "hybrid_override_pattern": None,
        "layers_block_type": ["mamba", "mlp", "attention", "moe"],
        "num_hidden_layers": None,
    }
    assert read(**listed).layers == model.layers


def test_other_hybrids():
    jamba = read(
        model_type="jamba", mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, attn_layer_period=4, attn_layer_offset=2
    )
    assert jamba.layers[0].state == Mamba1(1024, 16, 4, 32)
    assert [layer.attention is not None for layer in jamba.layers] == [False, False, True, False]
    ring = read(model_type="bailing_moe_linear", layer_group_size=2, num_experts=4, moe_intermediate_size=64)
    assert ring.layers[0].state == Lightning(8, 64)
    lfm = read(model_type="lfm2", conv_L_cache=3, full_attn_idxs=[1])
    assert lfm.layers[0].state == ShortConvolution(512, 3)
    assert isinstance(lfm.layers[1].attention, Attention)
    falcon = read(
        model_type="falcon_h1", mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4
    )
    assert all(layer.attention and layer.state for layer in falcon.layers)


def test_mamba2_head_size_may_be_left_to_the_widths():
    fields = {
        "model_type": "granitemoehybrid",
        "mamba_n_heads": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "shared_intermediate_size": 64,
    }
    model = read(**fields, mamba_d_head="auto", layer_types=["mamba", "mamba", "attention", "mamba"])
    assert model.layers[0].state == Mamba2(16, 64, 1, 128, 4)
    with pytest.raises(NotModelledError, match="layer_types is missing"):
        read(**fields, mamba_d_head="auto")


def test_yarn_makes_a_longer_table():
    model = read(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096})
    assert model.rope_rows == 16384


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_field_is_named(missing):
    with pytest.raises(NotModelledError, match=missing):
        read(**{missing: None})


@pytest.mark.parametrize("nonsense", ["many", -3, 2.5, True])
def test_nonsense_in_a_number_field_is_refused(nonsense):
    with pytest.raises(NotModelledError, match="num_key_value_heads is no whole number"):
        read(num_key_value_heads=nonsense)


def test_fields_that_only_weights_need_may_be_absent():
    model = read(intermediate_size=None, vocab_size=None)
    assert set(model.unknown) == {"intermediate_size", "vocab_size"}


def test_unknown_model_types_and_layer_kinds_are_refused():
    with pytest.raises(NotModelledError, match="'deepseek_v4' is not modelled: its attention keeps"):
        read(model_type="deepseek_v4")
    with pytest.raises(NotModelledError, match=r"'retnet' is not modelled \(known: bailing_hybrid"):
        read(model_type="retnet")
    with pytest.raises(NotModelledError, match="model type ''"):
        read_config({}, "empty")
    with pytest.raises(NotModelledError, match="retention"):
        read(layer_types=["retention"] * 4)
    with pytest.raises(NotModelledError, match="does not name 4 layers"):
        read(layer_types=["full_attention"])


def test_known_types_are_sorted_and_without_the_text_ending():
    assert known_types() == sorted(known_types())
    assert not [name for name in known_types() if name.endswith("_text")]


@pytest.mark.parametrize(
    ("config", "method", "bits", "group", "zeros"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8, 128, False),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", 8, None, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "gptq", 4, 128, True),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "awq", 4, 64, True),
        ({"quant_method": "mxfp4"}, "mxfp4", 4, 32, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 4, 16, False),
        ({"quantization": {"quant_algo": "FP8"}}, "fp8", 8, None, False),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
                },
            },
            "compressed-tensors",
            4,
            32,
            False,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            "nvfp4",
            4,
            16,
            False,
        ),
    ],
)
def test_quantisation(config, method, bits, group, zeros):
    found = read_quantization(config)
    assert found is not None
    assert (found.method, found.bits, found.group, found.zero_points) == (method, bits, group, zeros)
    assert not found.mixed


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
        },
        {"quant_method": "bitsandbytes"},
    ],
)
def test_mixed_and_unknown_quantisation_is_marked(config):
    found = read_quantization(config)
    assert found is not None
    assert found.mixed


def test_no_quantisation():
    assert read_quantization(None) is None
    assert read_quantization({}) is None
    assert read().quantization is None


@pytest.mark.parametrize("key", ["intermediate_size", "vocab_size", "head_dim", "hidden_size"])
@pytest.mark.parametrize("value", [0, -1, "64", True])
def test_a_size_that_is_no_size_is_refused_by_name(key, value):
    with pytest.raises(NotModelledError, match=key):
        read_config({**PLAIN, key: value}, "x")


def test_laguna_has_its_own_query_heads_in_each_layer_and_a_gate_per_head():
    config = {
        **PLAIN,
        "model_type": "laguna",
        "head_dim": 64,
        "sliding_window": 512,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads_per_layer": [8, 16, 16, 8],
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
        "gating": "per-head",
    }
    layers = read_config(config, "x").layers
    assert [layer.attention.query_heads for layer in layers] == [8, 16, 16, 8]
    assert [layer.attention.window for layer in layers] == [None, 512, 512, None]
    assert all(layer.attention.head_gate and not layer.attention.gated_output for layer in layers)
    assert [isinstance(layer.mlp, MoeMlp) for layer in layers] == [False, True, True, True]
    with pytest.raises(NotModelledError, match="num_attention_heads_per_layer"):
        read_config({**config, "num_attention_heads_per_layer": [8, 16]}, "x")
