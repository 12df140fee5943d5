"""Formats of quantized weights on disk that are read, as a ``config.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError
from meshwright.limits import shorten_repr

READ_FORMATS = (
    'float8 in blocks ("quant_method": "fp8" with a "weight_block_size", as DeepSeek-V3), MXFP4 ("quant_method": '
    '"mxfp4", as gpt-oss)'
)
_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """Weights in float8 (E4M3) with one float32 scale for each block of ``rows`` x ``columns`` elements
    (arXiv:2412.19437, section 3.3.2). The scale of a tensor ``NAME`` is the tensor ``NAME_scale_inv``; a weight is its
    float8 value times the scale of its block."""

    rows: int
    columns: int

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix of `shape`: a scale for each whole or partial block."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)


@dataclass(frozen=True, slots=True)
class MxFp4:
    """Weights in float4 (E2M1) with one scale, a power of two (E8M0), for each 32 elements of a row (OCP Microscaling
    Formats 1.0, section 5).

    The checkpoint has two tensors for a matrix [..., output, input]. ``NAME_blocks``, uint8 [..., output, blocks, 16],
    holds the codes, two in a byte, the low half first. ``NAME_scales``, uint8 [..., output, blocks], holds the
    exponents of the scales plus 127. The weights ``NAME`` of the model are the transpose, [..., input, output]."""


WeightFormat = BlockFp8 | MxFp4


def read_weight_format(data: Mapping[str, Any], where: str) -> WeightFormat | None:
    """Return the format of the quantized weights that a ``config.json`` object (`data`) describes; None if the weights
    are not quantized. Raises ``UserError`` for an unsupported format; the message lists the supported formats. where:
    name of the configuration in errors."""
    key = next((key for key in _KEYS if data.get(key) is not None), None)
    if key is None:
        return None
    described = data[key]
    if not isinstance(described, Mapping):
        raise UserError(f'{where}: "{key}" must be an object, not {shorten_repr(described)}')
    if described.get("quant_method") == "mxfp4":
        return MxFp4()
    is_fp8 = described.get("quant_method") == "fp8" and described.get("fmt", "e4m3") == "e4m3"
    match described.get("weight_block_size"):
        case [int(rows), int(columns)] if is_fp8 and rows > 0 and columns > 0:
            return BlockFp8(rows, columns)
    given = ", ".join(f'"{name}" {shorten_repr(described[name])}' for name in _NAMED if name in described)
    raise UserError(
        f'{where}: quantized weights ("{key}" with {given or "no quant_method"}) cannot be read; read are '
        f"{READ_FORMATS} and unquantized weights"
    )


_NAMED = ("quant_method", "fmt", "weight_block_size", "bits")
