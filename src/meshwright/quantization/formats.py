"""The storage formats of weights by name: plain, int8, NF4, and NF4 with quantized scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.quantization.double_quantization import NAME, BufferSlice, DoubleQuantized, Matrix
from meshwright.quantization.packing import UNPACKED, QuantizedFormat, WeightFormat

__all__ = ["WeightFormat", "get_weight_format", "round_trip"]


def get_weight_format(name: str | None, slices: Sequence[BufferSlice] = ()) -> WeightFormat:
    """Return the storage format of a flat weight buffer by its name: a `QuantizedFormat` for "nf4", "nf4-double" or
    "int8"; for None the plain `WeightFormat`, which does not quantize. slices: slices of matrices that the buffer
    holds, needed for "nf4-double" only.
    """
    if name == NAME:
        return DoubleQuantized(slices)
    return UNPACKED if name is None else QuantizedFormat(name)


class _OneMatrix(NamedTuple):
    """Buffer slice that holds one whole matrix. The object describes both the slice and the matrix (its attribute
    `entry` is the object itself)."""

    model_shape: tuple[int, ...]
    numel: int
    name: str = ""
    offset: int = 0
    begin: int = 0
    columns: None = None

    @property
    def entry(self) -> Matrix:
        """Matrix that the slice holds: this object."""
        return self


def round_trip(name: str, values: torch.Tensor) -> torch.Tensor:
    """Quantize the weights `values` of one matrix to the format `name` and dequantize them again, to measure the
    rounding error; return float64 of the same shape. values: row-major [output, input] or flattened.
    """
    flat = values.reshape(-1)
    form = get_weight_format(name, [_OneMatrix((1, flat.numel()), flat.numel())])
    form.compute_scales(lambda *_: flat, flat.device)
    return form.unpack(form.pack(flat), torch.float32).double().view(values.shape)
