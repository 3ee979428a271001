"""Reads a Hugging Face `config.json` into an `Architecture`.

Multimodal configs nest the language model under `text_config`; that part is read. Every model type has its reader in
`families.py`; a type that has none is refused, since a wrong layer kind would give wrong bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memledger.model.architecture import Architecture, NotModelledError, Quantization
from memledger.model.families import FAMILIES, REFUSED, Fields, known_types

_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_MROPE_COPIES: Final = 4
"""vLLM stores four times the positions for M-RoPE models (`rotary_embedding/mrope.py`)."""


def read_config(mapping: Mapping[str, Any], source: str, name: str | None = None) -> Architecture:
    """The architecture that a `config.json` describes.

    `source`: where the mapping comes from, kept in the result. `name`: the model's name; default is what the config says
    of itself, else the source.

    Raises:
        NotModelledError: the model type is not known, or a field that layer sizes need is missing.
    """
    text = language_part(mapping)
    model_type = _model_type(mapping, text)
    reader = FAMILIES.get(model_type)
    if reader is None:
        if model_type in REFUSED:
            raise NotModelledError(f"{source}: model type {model_type!r} is not modelled: {REFUSED[model_type]}")
        known = ", ".join(known_types())
        raise NotModelledError(f"{source}: model type {model_type!r} is not modelled (known: {known})")
    fields = Fields(text, source)
    layers = reader.layers(fields)
    draft = reader.draft(fields) if reader.draft else ()
    count = fields.layers()
    if not reader.splits_layers and len(layers) != count:
        raise NotModelledError(f"{source}: {len(layers)} layer types for {count} layers")
    state_key = next((key for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype") if text.get(key)), None)
    rope_dim, rope_rows, mrope = _rope(fields, reader.rope)
    return Architecture(
        name=name or _own_name(mapping) or source,
        model_type=model_type,
        class_name=_class_name(mapping, text),
        hidden=fields.integer("hidden_size"),
        vocabulary=fields.weight_only("vocab_size"),
        layers=layers,
        max_positions=fields.optional("max_position_embeddings"),
        tied_embeddings=bool(_either(mapping, text, "tie_word_embeddings", reader.tied)),
        dtype=_dtype(mapping, text),
        state_dtype=str(text[state_key]).removeprefix("torch.") if state_key else None,
        state_dtype_key=state_key,
        draft_layers=draft,
        quantization=read_quantization(_either(mapping, text, "quantization_config", None)),
        vision_parameters=_vision_parameters(mapping.get("vision_config")),
        rope_dim=rope_dim,
        rope_factor=_MROPE_COPIES if mrope else 1,
        rope_rows=rope_rows,
        rope_tables=2 if reader.two_ropes else 1,
        multimodal=isinstance(mapping.get("vision_config"), Mapping),
        unknown=tuple(dict.fromkeys(fields.absent)),
        source=source,
        notes=tuple(dict.fromkeys(fields.notes)),
    )


def language_part(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: a nested one where there is one, else the whole."""
    for key in _NESTED:
        inner = mapping.get(key)
        if isinstance(inner, Mapping):
            return language_part(inner)
    return mapping


def _model_type(mapping: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The language model's type without `_text`; the outer type where the inner one is absent."""
    for part in (text, mapping):
        found = part.get("model_type")
        if isinstance(found, str) and found:
            return found.removesuffix("_text")
    return ""


def _class_name(mapping: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for part in (mapping, text):
        found = part.get("architectures")
        if isinstance(found, list) and found:
            return str(found[0])
    return ""


def _own_name(mapping: Mapping[str, Any]) -> str | None:
    found = mapping.get("_model") or mapping.get("_name_or_path")
    return str(found) if found else None


def _either(mapping: Mapping[str, Any], text: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value that stands outside or inside; the inner one wins, as the engines read the text config."""
    for part in (text, mapping):
        if part.get(key) is not None:
            return part[key]
    return default


def _dtype(mapping: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The weights' element type; both engines turn float32 and an absent type into 16 bits, bfloat16 here."""
    found = _either(mapping, text, "torch_dtype", None) or _either(mapping, text, "dtype", None) or "bfloat16"
    found = str(found).removeprefix("torch.")
    return "bfloat16" if found == "auto" else found


def _rope(fields: Fields, used: bool) -> tuple[int | None, int | None, bool]:
    """(rotary dimensions, rows of the table where they are not `max_position_embeddings`, M-RoPE)."""
    if not used or fields.get("position_embedding_type") == "nope":
        return None, None, False
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        scaling = {}
    mrope = "mrope_section" in scaling or fields.get("model_type", "").startswith(("qwen3_5", "qwen3_vl", "qwen2_vl"))
    rows = None
    if (scaling.get("rope_type") or scaling.get("type")) == "yarn" and scaling.get("factor"):
        original = scaling.get("original_max_position_embeddings") or fields.get("max_position_embeddings") or 0
        rows = int(original * scaling["factor"])
    latent = fields.optional("qk_rope_head_dim")
    if latent:
        return latent, rows, mrope
    if fields.optional("rotary_dim"):
        return fields.integer("rotary_dim"), rows, mrope
    part = fields.get("partial_rotary_factor") or scaling.get("partial_rotary_factor")
    if part is None:
        part = 0.25 if fields.get("model_type", "").startswith(("qwen3_5", "qwen3_next")) else 1.0
    return int(fields.head_dim() * part), rows, mrope


def read_quantization(config: Any) -> Quantization | None:
    """The quantisation that a config's `quantization_config` describes; None for none."""
    if not isinstance(config, Mapping) or not config:
        return None
    if isinstance(config.get("quantization"), Mapping):  # ModelOpt's separate hf_quant_config.json
        return _modelopt(config["quantization"], tuple(config["quantization"].get("exclude_modules") or ()))
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    skipped = tuple(
        str(item)
        for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
        for item in config.get(key) or ()
    )
    if method in {"gptq", "awq"}:
        return Quantization(
            method,
            bits=config.get("bits"),
            group=config.get("group_size"),
            skipped=skipped,
            # GPTQ checkpoints hold packed zeros even when symmetric; AWQ says so.
            zero_points=method == "gptq" or bool(config.get("zero_point", True)),
        )
    if method == "fp8":
        block = config.get("weight_block_size")
        return Quantization(method, bits=8, group=int(block[0]) if block else None, skipped=skipped)
    if method == "mxfp4":
        return Quantization(method, bits=4, group=32, skipped=skipped)
    if method == "compressed-tensors":
        return _compressed_tensors(config, skipped)
    if method.startswith("modelopt") or method in {"nvfp4", "mixed_precision"}:
        return _modelopt(config, skipped)
    return Quantization(method, skipped=skipped, mixed=True)


def _compressed_tensors(config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    """One group of weights with one format; several groups are mixed."""
    groups = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    if len(groups) != 1 or not groups[0].get("num_bits"):
        return Quantization("compressed-tensors", skipped=skipped, mixed=True)
    weights = groups[0]
    bits = int(weights["num_bits"])
    block = weights.get("block_structure")
    group = weights.get("group_size")
    method = "nvfp4" if bits == 4 and weights.get("type") == "float" else "fp8" if bits == 8 else "compressed-tensors"
    return Quantization(
        method,
        bits=bits,
        group=int(block[0]) if block else int(group) if group and group > 0 else None,
        skipped=skipped,
        zero_points=not weights.get("symmetric", True),
    )


def _modelopt(config: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    """ModelOpt's NVFP4 and FP8; layers in several formats are mixed."""
    algorithm = str(config.get("quant_algo") or "").upper()
    if algorithm == "NVFP4":
        return Quantization("nvfp4", bits=4, group=16, skipped=skipped)
    if algorithm == "FP8":
        return Quantization("fp8", bits=8, skipped=skipped)
    return Quantization("modelopt", skipped=skipped, mixed=True)


def _vision_parameters(config: Any) -> int | None:
    """Parameters of a vision tower of plain transformer blocks: `depth * (4 h^2 + 2 h I)`; None where fields are missing.

    An estimate: patch embedding, merger and position tables come on top (a few per cent).
    """
    if not isinstance(config, Mapping):
        return None
    depth = config.get("depth") or config.get("num_hidden_layers")
    hidden, intermediate = config.get("hidden_size"), config.get("intermediate_size")
    if not all(isinstance(value, int) for value in (depth, hidden, intermediate)):
        return None
    assert isinstance(depth, int) and isinstance(hidden, int) and isinstance(intermediate, int)
    return depth * (4 * hidden * hidden + 2 * hidden * intermediate)
