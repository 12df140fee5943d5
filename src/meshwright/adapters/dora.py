"""DoRA: a LoRA adapter whose output features have trained magnitudes (Liu et al. 2024, arXiv:2402.09353)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.adapters.low_rank import LowRank, Rows
from meshwright.model.layers import Linear
from meshwright.model.precision import at_least_float32

NORM_SITE = "adapter.norms"
SumOverRanks = Callable[[torch.Tensor, str], torch.Tensor]
"""Function (tensor, label of the call in traces) -> the tensor summed over the ranks that split a layer's inputs."""


class WeightDecomposed(LowRank):
    """DoRA adapter of one linear layer y = x Wᵀ (Liu et al. 2024, arXiv:2402.09353). The adapted layer uses W' = W + s
    B A with each row i scaled to a trained magnitude m_i: its output feature i is multiplied by m_i / n_i, where n_i is
    the norm of the row (eq. 5), treated as a constant in backward (section 4.3). Parameters: `a` and `b`, the stacked
    matrices A and B as in `LowRank`, and `magnitude`, the m_i of all adapted output features.

    rows: range of output features of each adapted matrix; inputs: number of inputs; rank: rank of A and B; scale: s;
    options: `device` and `dtype` of the parameters. sums: function that sums a tensor over the ranks of a row-parallel
    layer, each of which holds some columns of W'; None: this rank holds all columns."""

    def __init__(
        self,
        rows: Sequence[Rows],
        inputs: int,
        rank: int,
        scale: float,
        sums: SumOverRanks | None = None,
        **options: Any,
    ) -> None:
        super().__init__(rows, inputs, rank, scale, **options)
        self.sums = sums
        self.magnitude = nn.Parameter(torch.empty(self.b.shape[0], **options))

    def forward(self, x: torch.Tensor, y: torch.Tensor, layer: Linear) -> torch.Tensor:
        """Return the output of the adapted layer without bias, [..., Y]. In a row-parallel layer this is the rank's
        partial sum.

        x: input of the layer, [..., X], with X input features on this rank. y: output of the base layer without bias,
        [..., Y], with Y output features on this rank; in a row-parallel layer a partial sum. layer: the base layer,
        whose weight enters the row norms."""
        if not self.enabled:
            return y
        weight = layer.weight if layer.packed is None else layer.packed.unpack(layer.weight, self.a.dtype)
        groups = zip(self.rows, self.a.split(self.rank), self.b.split([r.size for r in self.rows]), strict=True)
        matrices = ((weight[each.start : each.start + each.size], a_RX, b_YR) for each, a_RX, b_YR in groups)
        factors = self.magnitude / compute_row_norms(matrices, self.scale, self.sums)
        return (y + self.product(x, y.shape[-1])) * fill_factors(factors, self.rows, y.shape[-1])


@torch.no_grad()
def compute_row_norms(
    matrices: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], scale: float, sums: SumOverRanks | None
) -> torch.Tensor:
    """Return the Euclidean norm of each row of W + s B A, [..., rows], for all adapted matrices of a layer. The sum is
    not formed: the squared norms are ||W||² + 2 s (W Aᵀ) B + s² B (A Aᵀ) Bᵀ, row by row.

    matrices: (W [..., rows, X], A [..., R, X], B [..., rows, R]) of each adapted matrix, with X input features and rank
    R. In a row-parallel layer W and A have this rank's columns only. scale: s. sums: function that sums the squares
    over the ranks that hold the other columns; None: this rank holds all columns."""
    squares, dtype = [], torch.float32
    for weight, a, b in matrices:
        dtype, wide = weight.dtype, at_least_float32(weight.dtype)
        crossed = 2 * (weight @ a.mT).to(wide) + scale * (b @ (a @ a.mT)).to(wide)
        norms = torch.linalg.vector_norm(weight, dim=-1, dtype=wide)
        squares.append(norms.square() + scale * (crossed * b).sum(dim=-1))
    total = torch.cat(squares, dim=-1)
    if sums is not None:
        total = sums(total, NORM_SITE)
    return total.clamp(min=torch.finfo(total.dtype).tiny).sqrt().to(dtype)


def fill_factors(factors: torch.Tensor, rows: Sequence[Rows], outputs: int) -> torch.Tensor:
    """Return one factor per output feature of a layer, [..., outputs]. Adapted output features get their factor from
    `factors`; all other output features get 1.

    factors: [..., adapted output features], in the order of `rows`. rows: ranges of the adapted output features.
    outputs: number of output features of the layer on this rank."""
    parts, end = [], 0
    for each, part in zip(rows, factors.split([each.size for each in rows], dim=-1), strict=True):
        if each.start > end:
            parts.append(factors.new_ones(*factors.shape[:-1], each.start - end))
        parts.append(part)
        end = each.start + each.size
    if end < outputs:
        parts.append(factors.new_ones(*factors.shape[:-1], outputs - end))
    return torch.cat(parts, dim=-1)
