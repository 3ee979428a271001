"""Sizes of element types, under the names that SGLang, vLLM, torch and `config.json` use."""

from __future__ import annotations

from typing import Final

from memledger.model.architecture import NotModelledError

_BITS: Final[dict[str, int]] = {
    "float64": 64,
    "double": 64,
    "float32": 32,
    "float": 32,
    "fp32": 32,
    "int32": 32,
    "bfloat16": 16,
    "bf16": 16,
    "float16": 16,
    "fp16": 16,
    "half": 16,
    "int16": 16,
    "fp8": 8,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "fp8_inc": 8,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "int8": 8,
    "uint8": 8,
    "fp4": 4,
    "fp4_e2m1": 4,
    "float4_e2m1fn_x2": 4,
    "int4": 4,
    "nvfp4": 4,
    "mxfp4": 4,
}


def normal_name(dtype: str) -> str:
    """The type's name without `torch.`, in small letters; not checked."""
    return dtype.strip().lower().removeprefix("torch.")


def element_bits(dtype: str) -> int:
    """Bits of one element of the named type, scales not counted. `auto` is no type: resolve it first.

    Raises:
        NotModelledError: the name is not known.
    """
    try:
        return _BITS[normal_name(dtype)]
    except KeyError:
        raise NotModelledError(f"the size of element type {dtype!r} is not known") from None


def element_bytes(dtype: str) -> int:
    """Bytes of one element of the named type (`bfloat16`: 2, `fp8_e4m3`: 1, `float32`: 4).

    Raises:
        NotModelledError: the name is not known, or an element is smaller than a byte (use `element_bits`).
    """
    bits = element_bits(dtype)
    if bits % 8:
        raise NotModelledError(f"an element of type {dtype!r} is smaller than a byte")
    return bits // 8


def is_float8(dtype: str) -> bool:
    """Whether the named type is one of the 8-bit floating point types."""
    return normal_name(dtype).startswith(("fp8", "float8"))
