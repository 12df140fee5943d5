"""Low-rank adapters of linear layers, on one rank's shard of the layer: LoRA and rsLoRA.

Shapes: X inputs and Y outputs of the layer on this rank, R rank of the adapter, M adapted matrices in the layer (query,
key and value are one layer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.adapters.dropout import Dropout
from meshwright.comm.custom_operator import custom_operator
from meshwright.model.axis_operations import Overlap
from meshwright.model.layers import Linear, ParallelLinear
from meshwright.model.weight_gradients import SaveOperands, apply_function, multiply_overlapped
from meshwright.quantization.packing import QuantizedMatmul


class Rows(NamedTuple):
    """Range [start, start + size) of a linear layer's output features on this rank that one adapted matrix produces,
    such as the query part of a fused qkv.
    """

    start: int
    size: int


class LowRank(nn.Module):
    """LoRA adapter of one linear layer y = x Wᵀ: it returns y + s x Aᵀ Bᵀ (Hu et al. 2021, arXiv:2106.09685, eq. 3).
    The layer may fuse several matrices, M of them adapted, such as the query and value parts of qkv.

    Parameters, both uninitialised: `a` [M x R, X], the matrices A of all adapted matrices, stacked; `b` [adapted output
    features, R], the matrices B of all adapted matrices, stacked. Attributes: `enabled`: False to return y, the base
    layer's output; `dropout`: dropout of the input x; None: no dropout.

    rows: range of output features of each adapted matrix, in ascending order. inputs: X, number of input features.
    rank: R. scale: s. options: `device` and `dtype` of the parameters."""

    dropout: Dropout | None = None

    def __init__(self, rows: Sequence[Rows], inputs: int, rank: int, scale: float, **options: Any) -> None:
        super().__init__()
        self.rows, self.rank, self.scale, self.enabled = tuple(rows), rank, scale, True
        self.a = nn.Parameter(torch.empty(len(rows) * rank, inputs, **options))
        self.b = nn.Parameter(torch.empty(sum(each.size for each in rows), rank, **options))

    def forward(self, x: torch.Tensor, y: torch.Tensor, layer: Linear) -> torch.Tensor:
        """Return the output of the adapted layer without bias, [..., Y]. In a row-parallel layer this is the rank's
        partial sum.

        x: input of the layer, [..., X], with X input features on this rank. y: output of the base layer without bias,
        [..., Y], with Y output features; in a row-parallel layer a partial sum. layer: the base layer; unused here
        (DoRA reads its weight)."""
        return y + self.product(x, y.shape[-1]) if self.enabled else y

    def split(self, low: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]:
        """Split tensors by adapted matrix. Yield for each of the layer's M adapted matrices (its range of output
        features, its slice of `low` [..., R], its rows of `b`).

        low: x Aᵀ of all adapted matrices, [..., M x R], with R the rank of the adapter. b: the parameter `b` (stacked
        matrices B), or a tensor of its shape, such as its gradient."""
        sizes = [each.size for each in self.rows]
        return zip(self.rows, low.split(self.rank, dim=-1), b.split(sizes), strict=True)

    def adapted_product(self, x: torch.Tensor, layer: Linear, overlap: Overlap | None = None) -> torch.Tensor:
        """Return x (W + s B A)ᵀ, [..., Y], the output of the adapted layer without bias. If W is frozen, the term s x
        Aᵀ Bᵀ is added to x Wᵀ in place, without a copy.

        x: input of the layer, [..., X], with X input features on this rank. layer: the base layer, with Y output
        features. overlap: overlap of the products with their collective calls, only where `can_overlap`; x and the
        result are then those of `model.weight_gradients.linear`."""
        if not self._is_fused(layer):
            return self(x, layer.base_product(x), layer)  # type: ignore[no-any-return]
        keys_BC = self.dropout.tokens.keys_BC if self.dropout is not None and self.dropout.active else None
        low = saved = None
        if overlap is not None and layer.ends_recompute:
            with torch.no_grad():
                low = self.project(x, keys_BC)
            saved = apply_function(SaveOperands, x, layer.weight, self.a, self.b, low, keys_BC).grad_fn
        fixed = self, layer.packed, overlap, saved, low
        return apply_function(_AdaptedProduct, x, layer.weight, self.a, self.b, keys_BC, fixed)

    def project(self, x: torch.Tensor, keys_BC: torch.Tensor | None) -> torch.Tensor:
        """Return x Aᵀ, [..., M x R], for the input `x` of the layer, [..., X], after dropout.

        keys_BC: random-number key of each token, for C tokens of each of B sequences; None: nothing is dropped."""
        if keys_BC is not None and self.dropout is not None:
            x = self.dropout.apply(x, self.dropout.mask(keys_BC))
        return F.linear(x, self.a)

    def can_overlap(self, layer: ParallelLinear, column: bool) -> bool:
        """Return True if the products of `layer` and of its adapter overlap together with the collective calls of the
        layer. Those of a column-parallel layer (`column`) do not if backward gathers the tokens again, or if the input
        gradients of layer and adapter differ by a dropout mask, so that one call cannot sum both."""
        return self._is_fused(layer) and (not column or (layer.tensor.saves_gathered and self.dropout is None))

    def _is_fused(self, layer: Linear) -> bool:
        """Return True if one autograd function computes `layer` and its adapter: outside of compiled graphs, with a
        frozen W."""
        plain = type(self) is LowRank and self.enabled and not torch.compiler.is_compiling()
        return plain and not layer.weight.requires_grad

    def product(self, x: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return s x Aᵀ Bᵀ, [..., Y], the adapter's contribution to the layer's output; zeros for output features
        without adapter. x: input of the layer, [..., X]. outputs: Y, number of output features of the layer on this
        rank."""
        dropout = self.dropout if self.dropout is not None and self.dropout.active else None
        low = (F.linear(x, self.a) if dropout is None else dropout.product(x, self.a)) * self.scale
        parts, end = [], 0
        for each, low_R, b_YR in self.split(low, self.b):
            if each.start > end:
                parts.append(low.new_zeros(*low.shape[:-1], each.start - end))
            parts.append(F.linear(low_R, b_YR))
            end = each.start + each.size
        if end < outputs:
            parts.append(low.new_zeros(*low.shape[:-1], outputs - end))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


@custom_operator("meshwright::add_low_rank")
def _add_low_rank(
    y: torch.Tensor, low: torch.Tensor, b: torch.Tensor, starts: Sequence[int], sizes: Sequence[int], scale: float
) -> torch.Tensor:
    """Return y + s x Aᵀ Bᵀ, [..., Y], without autograd. One operator, so that activation checkpointing can save its
    result instead of `y`, the output of the base layer, which nothing else reads.

    low: x Aᵀ of all adapted matrices, [..., M x R]. b: stacked matrices B. starts, sizes: range of output features of
    each adapted matrix, in ascending order. scale: s."""
    out, low, y = torch.empty_like(y), low.flatten(0, -2), y.flatten(0, -2)
    flat, end = out.view(y.shape), 0
    for start, size, low_R, b_YR in zip(starts, sizes, low.split(b.shape[1], dim=-1), b.split(sizes), strict=True):
        flat[:, end:start] = y[:, end:start]
        end = start + size
        torch.addmm(y[:, start:end], low_R, b_YR.T, alpha=scale, out=flat[:, start:end])
    flat[:, end:] = y[:, end:]
    return out


_add_low_rank.register_fake(lambda y, low, b, starts, sizes, scale: torch.empty_like(y))


class _AdaptedProduct(torch.autograd.Function):
    """Autograd function of the adapted layer's output x (W + s B A)ᵀ with a frozen W, which may be quantized."""

    @staticmethod
    def forward(
        context: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        keys_BC: torch.Tensor | None,
        layer: tuple[LowRank, QuantizedMatmul | None, Overlap | None, Any, torch.Tensor | None],
    ) -> torch.Tensor:
        """Return x (W + s B A)ᵀ, [..., Y], for the input `x` of the layer, [..., X].

        weight: W, or its quantized bytes. a, b: stacked matrices A and B. keys_BC: random-number key of each token, for
        C tokens of each of B sequences, from which the dropout mask is derived; None: nothing is dropped. layer: (the
        adapter, function that dequantizes W and multiplies (None: W is not quantized), overlap of the products with
        their collective calls, context of `SaveOperands` that has what backward reads (None: it is saved here), x Aᵀ
        (None: it is computed here)). context: autograd context."""
        adapter, packed, overlap, saved, low = layer
        y = None
        context.adapter, context.packed, context.overlap, context.operands = layer[:4]
        matrix = weight if packed is None else packed.unpack(weight, x.dtype)
        if overlap is not None and overlap.forward == "gather":
            x, y = multiply_overlapped(x, matrix.T, overlap, overlap.forward, overlap.site)
        low = adapter.project(x, keys_BC) if low is None else low
        context.save_for_backward(*((x, weight, a, b, low, keys_BC) if saved is None else ()))
        if overlap is not None and y is None:  # one sum over ranks of the products of layer and adapter
            of_adapter = low, b.T * adapter.scale
            return multiply_overlapped(x, matrix.T, overlap, overlap.forward, overlap.site, of_adapter)[1]
        y = F.linear(x, matrix) if y is None else y
        starts, sizes = zip(*adapter.rows, strict=True)
        adapted: torch.Tensor = torch.ops.meshwright.add_low_rank(y, low, b, starts, sizes, adapter.scale)
        return adapted

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, a and b, given the output gradient `dy`; None for the other inputs. context:
        autograd context.
        """
        x, weight, a, b, low, keys_BC = (context.operands or context).saved_tensors
        context.operands = None  # frees them
        adapter, packed, overlap, dx, shape = context.adapter, context.packed, context.overlap, None, x.shape
        site = "" if overlap is None else f"{overlap.site}.backward"
        call, needs_x = "" if overlap is None else overlap.backward, context.needs_input_grad[0]
        matrix = weight if packed is None or not (needs_x or call) else packed.unpack(weight, dy.dtype)
        if overlap is not None and call == "gather":
            dy, dx = multiply_overlapped(dy, matrix, overlap, call, site)
        dy, low = dy.flatten(0, -2), low.flatten(0, -2)
        d_low, d_b = torch.empty_like(low), torch.empty_like(b)
        parts = zip(adapter.split(low, b), adapter.split(d_low, d_b), strict=True)
        for (each, low_R, b_YR), (_, d_low_R, d_b_YR) in parts:
            part = dy[:, each.start : each.start + each.size]
            torch.mm(part, b_YR, out=d_low_R)
            torch.mm(part.T, low_R, out=d_b_YR)
        d_low *= adapter.scale
        d_b *= adapter.scale
        dropout = None if keys_BC is None else adapter.dropout
        mask = x.new_empty(0) if dropout is None else dropout.mask(keys_BC)
        d_a = d_low.T @ (x if dropout is None else dropout.apply(x, mask)).flatten(0, -2)
        if overlap is not None and needs_x and call in ("scatter", "reduce"):
            dy, d_low = (each.unflatten(0, shape[:-1]) for each in (dy, d_low))
            dx = multiply_overlapped(dy, matrix, overlap, call, site, (d_low, a))[1]
        elif needs_x:
            dx = dy @ matrix if dx is None else dx.flatten(0, -2)
            if dropout is None:
                dx = torch.addmm(dx, d_low, a, out=dx).view(shape)
            else:
                dx = dx.view(shape).add_((d_low @ a).view(shape).masked_fill_(~mask, 0.0).mul_(dropout.scale))
        return dx, None, d_a, d_b, None, None
