"""Element types by their safetensors names, and conversion of their bytes to numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ElementType:
    """Element type of tensors. bits: size of an element in bits. read: function that converts raw bytes, uint8 [n], to
    numbers [8 n / bits]; None: values of this type cannot be read."""

    bits: int
    read: Callable[[NDArray[np.uint8]], NDArray[Any]] | None = None


def _make_numpy_type(kind: str) -> ElementType:
    """Create the `ElementType` of a NumPy dtype: its `read` views raw bytes as little-endian values. kind: name of the
    dtype, such as "f4" (float32).
    """
    dtype = np.dtype(kind).newbyteorder("<")
    return ElementType(8 * dtype.itemsize, lambda raw: raw.view(dtype))


def _read_bfloat16(raw: NDArray[np.uint8]) -> NDArray[Any]:
    """Convert raw bytes [2 n] of bfloat16 values to float32 [n]."""
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_float8_codes(exponent_bits: int, mantissa_bits: int, infinities: bool) -> NDArray[np.float32]:
    """Return the values of all 256 codes of an 8-bit float, float32 [256] (Micikevicius et al. 2022, arXiv:2209.05433,
    table 1).

    exponent_bits, mantissa_bits: sizes of both fields. infinities: True if the highest exponent encodes infinities and
    NaNs (E5M2); False if only the code of all ones, with either sign, is NaN (E4M3).
    """
    codes = np.arange(256)
    sign = np.where(codes >= 128, -1.0, 1.0)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    bias = (1 << exponent_bits - 1) - 1
    value = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent.astype(float) - bias)
    )
    highest = exponent == (1 << exponent_bits) - 1
    if infinities:
        value = np.where(highest, np.where(mantissa == 0, np.inf, np.nan), value)
    else:  # E4M3: only the code of all ones is NaN
        value = np.where(codes & 0x7F == 0x7F, np.nan, value)
    return (sign * value).astype(np.float32)


def _make_lookup_type(values: NDArray[np.float32]) -> ElementType:
    """Create an 8-bit `ElementType` whose `read` maps each byte to its entry in the table `values`, float32 [256]."""
    return ElementType(8, lambda raw: values[raw])


ELEMENT_TYPES: dict[str, ElementType] = {
    "BOOL": _make_numpy_type("?"), "U8": _make_numpy_type("u1"), "I8": _make_numpy_type("i1"),
    "U16": _make_numpy_type("u2"), "I16": _make_numpy_type("i2"),
    "U32": _make_numpy_type("u4"), "I32": _make_numpy_type("i4"),
    "U64": _make_numpy_type("u8"), "I64": _make_numpy_type("i8"), "F16": _make_numpy_type("f2"),
    "BF16": ElementType(16, _read_bfloat16), "F32": _make_numpy_type("f4"), "F64": _make_numpy_type("f8"),
    "F8_E4M3": _make_lookup_type(_decode_float8_codes(4, 3, infinities=False)),
    "F8_E5M2": _make_lookup_type(_decode_float8_codes(5, 2, infinities=True)),
    "F8_E8M0": ElementType(8), "F4": ElementType(4), "F6_E2M3": ElementType(6), "F6_E3M2": ElementType(6),
    "C64": ElementType(64),
}  # fmt: skip
"""Types without `read` are counted and sized, but their values are not read."""
