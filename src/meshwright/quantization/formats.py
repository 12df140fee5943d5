"""The storage formats of weights by name: plain, int8, NF4, and NF4 with quantized scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.quantization.double_quantization import NAME, BufferSlice, DoubleQuantized, Matrix
from meshwright.quantization.packing import UNPACKED, QuantizedFormat, UnquantizedFormat

__all__ = ["UnquantizedFormat", "get_weight_format", "round_trip"]


def get_weight_format(name: str | None, slices: Sequence[BufferSlice] = ()) -> UnquantizedFormat:
    """Return the storage format of a weight buffer by its name, "nf4", "nf4-double" or "int8"; None: not quantized.
    slices: the slices of matrices that the buffer holds."""
    if name == NAME:
        return DoubleQuantized(slices)
    return UNPACKED if name is None else QuantizedFormat(name)


class _OneMatrix(NamedTuple):
    """Slice of a buffer that holds one matrix and nothing else, which is `entry` too."""

    model_shape: tuple[int, ...]
    numel: int
    name: str = ""
    offset: int = 0
    begin: int = 0
    columns: None = None

    @property
    def entry(self) -> Matrix:
        """The matrix."""
        return self


def round_trip(name: str, values: torch.Tensor) -> torch.Tensor:
    """Quantize the weights `values` of one matrix, row-major [output, input] or flattened, and dequantize them; return
    the result in float64, same shape. Shows the rounding error of the format `name`."""
    flat = values.reshape(-1)
    form = get_weight_format(name, [_OneMatrix((1, flat.numel()), flat.numel())])
    form.measure(lambda *_: flat, flat.device)
    return form.unpack(form.pack(flat), torch.float32).double().view(values.shape)
