"""Permutations of tensor rows (dim 0) whose backward is a permutation too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def invert_permutation(order: Tensor) -> Tensor:
    """Return the inverse of the permutation `order` [N]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Permuted(torch.autograd.Function):
    """Autograd function that permutes the rows (dim 0) of a tensor, x[order], and may first repeat each row. Backward
    gathers by the inverse permutation instead of scattering, so that sums are formed in a deterministic order."""

    @staticmethod
    def forward(context: Any, x_TH: Tensor, order_N: Tensor, inverse_N: Tensor, copies: int | None = None) -> Tensor:
        """Return the permuted rows, [N, H]. `order_N`: permutation; `inverse_N`: its inverse. `copies`: number of times
        that each row of `x_TH` is repeated before the permutation, N = T x copies; None: rows are not repeated, N = T.
        """
        context.save_for_backward(inverse_N)
        context.copies = copies
        return x_TH.index_select(0, order_N if copies is None else order_N // copies)

    @staticmethod
    def backward(context: Any, d_NH: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `x_TH`: the output gradient `d_NH` in the order before the permutation, summed over
        the copies of each row."""
        (inverse_N,) = context.saved_tensors
        d_x = d_NH.index_select(0, inverse_N)
        if context.copies is not None:
            d_x = d_x.unflatten(0, (-1, context.copies)).sum(dim=1)
        return d_x, None, None, None
