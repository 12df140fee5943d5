"""LoRA adapters of routed experts: a matrix A and B for each adapted matrix of each expert, on one rank's experts.

Shapes: N token copies sorted by expert, E experts on this rank, X inputs and Y outputs of an expert's layer on this
rank, R rank of the adapter, M adapted matrices of an expert in the layer (gate and up are one layer), Z their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.adapters.low_rank import Rows
from meshwright.model.experts import Experts
from meshwright.model.layers import Linear
from meshwright.model.weight_gradients import grouped_linear


class ExpertLowRank(nn.Module):
    """LoRA adapters of one linear layer of each of E routed experts on this rank: y + s x Aᵀ Bᵀ with the A and B of
    each token copy's expert (Hu et al. 2021, arXiv:2106.09685, eq. 3). Parameters, both uninitialised and stacked by
    expert: `a` [E x M x R, X] and `b` [E x Z, R].

    rows: range of output features of each of an expert's M adapted matrices, in ascending order; experts: E; inputs: X;
    rank: R; scale: s; options: `device` and `dtype` of the parameters. Attribute `enabled`: False to return y.
    """

    def __init__(
        self, rows: Sequence[Rows], experts: int, inputs: int, rank: int, scale: float, **options: Any
    ) -> None:
        super().__init__()
        self.rows, self.experts, self.rank, self.scale, self.enabled = tuple(rows), experts, rank, scale, True
        self.a = nn.Parameter(torch.empty(experts * len(rows) * rank, inputs, **options))
        self.b = nn.Parameter(torch.empty(experts * sum(each.size for each in rows), rank, **options))

    def forward(self, x_NX: torch.Tensor, y_NY: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return y + s x Aᵀ Bᵀ, [N, Y], for the N token copies `x_NX`, sorted by expert, and the experts' outputs
        `y_NY`; where several ranks split an expert's width, both outputs are partial sums. ends_E: exclusive end index
        of each expert's copies.
        """
        if not self.enabled:
            return y_NY
        return _AddLowRankTerms.apply(x_NX, y_NY, self.a, self.b, ends_E, self)  # type: ignore[no-untyped-call, no-any-return]

    def split(self, low_NL: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield (slice of output features, slice of `low_NL` [N, R], view of `b` [E, size, R]) for each of the M
        adapted matrices of an expert.

        low_NL: x Aᵀ of all adapted matrices, L = M x R. b: the parameter `b`, or its gradient.
        """
        stacked = b.unflatten(0, (self.experts, -1)).split([each.size for each in self.rows], dim=1)
        for each, low_NR, b_EYR in zip(self.rows, low_NL.split(self.rank, dim=1), stacked, strict=True):
            yield slice(each.start, each.start + each.size), low_NR, b_EYR


class _AddLowRankTerms(torch.autograd.Function):
    """Autograd function that adds s x Aᵀ Bᵀ to the outputs of the routed experts, one adapted matrix (such as gate,
    then up) after another to save memory.
    """

    @staticmethod
    def forward(
        context: Any,
        x_NX: torch.Tensor,
        y_NY: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        ends_E: torch.Tensor,
        adapter: ExpertLowRank,
    ) -> torch.Tensor:
        """Return y + s x Aᵀ Bᵀ, [N, Y]; arguments: those of `ExpertLowRank.forward`, its parameters and itself."""
        multiply = torch.ops.meshwright.grouped_product
        low = multiply(x_NX, a.unflatten(0, (adapter.experts, -1)), ends_E, None, 0).mul_(adapter.scale)
        out, end = torch.empty_like(y_NY), 0
        for columns, low_NR, b_EYR in adapter.split(low, b):
            out[:, end : columns.start] = y_NY[:, end : columns.start]
            product = multiply(low_NR.contiguous(), b_EYR, ends_E, None, 0)
            torch.add(y_NY[:, columns], product, out=out[:, columns])
            end, product = columns.stop, None
        out[:, end:] = y_NY[:, end:]
        context.save_for_backward(x_NX, a, b, ends_E, low)
        context.adapter = adapter
        return out

    @staticmethod
    def backward(context: Any, dy_NY: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, y, A and B, given the output gradient `dy_NY`; None for the other inputs. context:
        autograd context.
        """
        x_NX, a, b, ends_E, low = context.saved_tensors
        adapter, operators = context.adapter, torch.ops.meshwright
        d_low, d_b, dx_NX = torch.empty_like(low), torch.empty_like(b), None
        pairs = zip(adapter.split(low, b), adapter.split(d_low, d_b), strict=True)
        for (columns, low_NR, b_EYR), (_, d_low_NR, d_b_EYR) in pairs:
            d_low_NR.copy_(operators.grouped_product_input(dy_NY[:, columns], b_EYR, ends_E))
            d_b_EYR.copy_(operators.grouped_product_weight(dy_NY[:, columns], low_NR.contiguous(), ends_E))
        d_low *= adapter.scale
        d_a = operators.grouped_product_weight(d_low, x_NX, ends_E).flatten(0, 1)
        if context.needs_input_grad[0]:
            dx_NX = operators.grouped_product_input(d_low, a.unflatten(0, (adapter.experts, -1)), ends_E)
        return dx_NX, dy_NY, d_a, d_b, None, None


class AdaptedExperts(Experts):
    """Routed experts with LoRA adapters: the attribute `adapter` of an adapted linear layer is an `ExpertLowRank`."""

    def _apply_experts(self, x_NH: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs [N, H] of this rank's experts, adapters included, for the token copies `x_NH`, sorted by
        expert; where several ranks split an expert's width, this rank's partial sums. ends_E: exclusive end index of
        each expert's copies.
        """
        hidden_NF = self.activate(_multiply(x_NH, self.up, ends_E))
        return _multiply(hidden_NF, self.down, ends_E, self.first)


def _multiply(x_NX: torch.Tensor, layer: Linear, ends_E: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the outputs [N, Y] of a linear layer of the experts for the token copies `x_NX`, sorted by expert; with
    those of its adapters if it has any.

    ends_E: exclusive end index of each expert's copies. first: index of the output feature to which the first element
    of the bias is added (the bias may be shorter than Y).
    """
    y_NY = grouped_linear(x_NX, layer, ends_E, first)
    if layer.adapter is None:
        return y_NY
    adapted_NY: torch.Tensor = layer.adapter(x_NX, y_NY, ends_E)
    return adapted_NY


def attach_to_experts(module: Experts, layer: str, adapter: ExpertLowRank) -> None:
    """Attach the LoRA adapters `adapter`, one for each expert, to the linear layer `layer` ("up" or "down") of the
    routed experts `module`, in place.
    """
    module.__class__ = AdaptedExperts
    getattr(module, layer).adapter = adapter
