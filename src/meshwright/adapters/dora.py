"""DoRA: a LoRA adapter whose output features have trained magnitudes (Liu et al. 2024, arXiv:2402.09353)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.adapters.low_rank import LowRank, Rows
from meshwright.model.axis_operations import TensorOperations
from meshwright.model.layers import Linear
from meshwright.model.precision import at_least_float32

NORM_SITE = "adapter.norms"


class WeightDecomposed(LowRank):
    """DoRA adapter of one linear layer y = x Wᵀ (Liu et al. 2024, arXiv:2402.09353). The adapted layer uses W' = W + s
    B A with each row i scaled to a trained magnitude m_i: its output feature i is multiplied by m_i / n_i, where n_i is
    the norm of the row (eq. 5), treated as a constant in backward (section 4.3). Parameters: `a` and `b`, the stacked
    matrices A and B as in `LowRank`, and `magnitude`, the m_i of all adapted output features.

    rows: range of output features of each adapted matrix; inputs: number of inputs; rank: rank of A and B; scale: s;
    options: `device` and `dtype` of the parameters. tensor: communication of tensor parallelism for a row-parallel
    layer, whose ranks each hold some columns of W'; None: this rank holds all columns."""

    def __init__(
        self,
        rows: Sequence[Rows],
        inputs: int,
        rank: int,
        scale: float,
        tensor: TensorOperations | None = None,
        **options: Any,
    ) -> None:
        super().__init__(rows, inputs, rank, scale, **options)
        self.tensor = tensor
        self.magnitude = nn.Parameter(torch.empty(self.b.shape[0], **options))

    def forward(self, x: torch.Tensor, y: torch.Tensor, layer: Linear) -> torch.Tensor:
        """Return the output of the adapted layer without bias, [..., Y]; in a row-parallel layer, this rank's partial
        sum of it.

        `x`: input of the layer [..., X]. `y`: output of the base layer without bias [..., Y] (row-parallel: partial
        sum). `layer`: the base layer, whose weight enters the row norms.
        """
        if not self.enabled:
            return y
        weight = layer.weight if layer.packed is None else layer.packed.unpack(layer.weight, self.a.dtype)
        factors, parts, end = self.magnitude / self._row_norms(weight), [], 0
        for each, factor in zip(self.rows, factors.split([each.size for each in self.rows]), strict=True):
            if each.start > end:
                parts.append(factor.new_ones(each.start - end))
            parts.append(factor)
            end = each.start + each.size
        if end < y.shape[-1]:
            parts.append(factors.new_ones(y.shape[-1] - end))
        return (y + self.product(x, y.shape[-1])) * torch.cat(parts)

    @torch.no_grad()
    def _row_norms(self, weight_YX: torch.Tensor) -> torch.Tensor:
        """Return the Euclidean norms of the adapted rows of W + s B A, [adapted output features], without forming that
        matrix: row by row, the squared norm is ||W||² + 2 s (W Aᵀ) B + s² B (A Aᵀ) Bᵀ.

        `weight_YX`: W; in a row-parallel layer this rank's columns of W, where squared norms are summed over tp.
        """
        squares, wide = [], at_least_float32(weight_YX.dtype)
        groups = zip(self.rows, self.a.split(self.rank), self.b.split([r.size for r in self.rows]), strict=True)
        for each, a_RX, b_YR in groups:
            weight = weight_YX[each.start : each.start + each.size]
            crossed = 2 * (weight @ a_RX.T).to(wide) + self.scale * (b_YR @ (a_RX @ a_RX.T)).to(wide)
            norms = torch.linalg.vector_norm(weight, dim=1, dtype=wide)
            squares.append(norms.square() + self.scale * (crossed * b_YR).sum(dim=1))
        total = torch.cat(squares)
        if self.tensor is not None:
            total = self.tensor.reduce(total, NORM_SITE)
        return total.clamp(min=torch.finfo(wide).tiny).sqrt().to(weight_YX.dtype)
