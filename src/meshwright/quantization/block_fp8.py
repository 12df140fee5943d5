"""Float8 weights with a scale for each block of a matrix (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""

from __future__ import annotations

import torch

from meshwright.spec.weight_formats import BlockFp8


def dequantize(values: torch.Tensor, scales: torch.Tensor, form: BlockFp8) -> torch.Tensor:
    """Dequantize `values`, float8 [rows, columns]; return float32 [rows, columns], each element times the scale of its
    block.

    scales: float32 [row blocks, column blocks]. form: number of rows and columns of a block, such as 128 x 128; the
    last blocks of a row or column may be smaller.
    """
    rows, columns = values.shape
    assert tuple(scales.shape) == form.scale_shape((rows, columns)), (values.shape, scales.shape)
    wide = values.to(torch.float32)
    for block, of_columns in enumerate(scales.float().repeat_interleave(form.columns, dim=1)[:, :columns]):
        wide[block * form.rows : (block + 1) * form.rows] *= of_columns
    return wide
