"""Low-rank adapters of linear layers, on one rank's shard of the layer: LoRA and rsLoRA.

Shapes: X inputs and Y outputs of the layer on this rank, R rank of the adapter, M adapted matrices in the layer (query,
key and value are one layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.model.layers import Linear


class Rows(NamedTuple):
    """Range [start, start + size) of a layer's output features on this rank that one adapted matrix produces (query,
    key or value of a fused qkv)."""

    start: int
    size: int


class LowRank(nn.Module):
    """LoRA adapter of one linear layer y = x Wᵀ: it returns y + s x Aᵀ Bᵀ (Hu et al. 2021, arXiv:2106.09685, eq. 3).
    Parameters: `a` [M x R, X], the matrices A of M adapted matrices stacked, and `b`, their matrices B stacked, [output
    features of all adapted matrices, R]; both are uninitialised.

    rows: range of output features of each adapted matrix, in ascending order; inputs: X; rank: R; scale: s; options:
    `device` and `dtype` of the parameters. Attribute `enabled`: False to return y, the base layer's output."""

    def __init__(self, rows: Sequence[Rows], inputs: int, rank: int, scale: float, **options: Any) -> None:
        super().__init__()
        self.rows, self.rank, self.scale, self.enabled = tuple(rows), rank, scale, True
        self.a = nn.Parameter(torch.empty(len(rows) * rank, inputs, **options))
        self.b = nn.Parameter(torch.empty(sum(each.size for each in rows), rank, **options))

    def forward(self, x: torch.Tensor, y: torch.Tensor, layer: Linear) -> torch.Tensor:
        """Return the output of the adapted layer without bias, [..., Y], for its input `x` [..., X] and the base
        layer's output `y` [..., Y] without bias. In a row-parallel layer `y` and the result are this rank's partial
        sums. `layer`: the base layer; unused here (DoRA reads its weight)."""
        return y + self.product(x, y.shape[-1]) if self.enabled else y

    def product(self, x: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return s x Aᵀ Bᵀ, the adapter's contribution to the layer's output, [..., Y], for `x` [..., X]; zeros for
        output features without adapter. outputs: Y."""
        low = F.linear(x, self.a) * self.scale
        parts, end = [], 0
        factors = zip(self.rows, low.split(self.rank, dim=-1), self.b.split([r.size for r in self.rows]), strict=True)
        for each, low_R, b_YR in factors:
            if each.start > end:
                parts.append(low.new_zeros(*low.shape[:-1], each.start - end))
            parts.append(F.linear(low_R, b_YR))
            end = each.start + each.size
        if end < outputs:
            parts.append(low.new_zeros(*low.shape[:-1], outputs - end))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
