"""Grouped matrix products of experts: token copies sorted by expert, each group multiplied by its expert's matrix.

On CUDA in bf16 PyTorch's grouped_mm computes all groups in one kernel, without a host synchronisation. Elsewhere there
is one product per expert. The gradient of an expert without tokens is zero.

Shapes: N token copies sorted by expert, E experts, X and Y input and output size. `ends_E` (int32): end index of each
expert's copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.custom_operator import custom_operator

ALIGNMENT = 16  # bytes; the strides of grouped_mm operands must be multiples of it


def grouped_product(
    x_NX: Tensor, weight_EYX: Tensor, ends_E: Tensor, bias_EZ: Tensor | None = None,
    first: int = 0,
) -> Tensor:  # fmt: skip
    """Return x Wᵀ + b, [N, Y], for N token copies `x_NX` sorted by expert; differentiable. (A token has one copy for
    each of its experts.) Each copy is multiplied by the W, and gets the b, of its expert.

    `weight_EYX`: W [Y, X] of each of E experts; `ends_E`: exclusive end index of each expert's copies, int32.
    `bias_EZ`: b of each expert, added to the Z outputs that start at index `first`; None: no bias.
    """
    return torch.ops.meshwright.grouped_product(x_NX, weight_EYX, ends_E, bias_EZ, first)


@custom_operator("meshwright::grouped_product")
def _compute_grouped_product(
    x_NX: Tensor, weight_EYX: Tensor, ends_E: Tensor, bias_EZ: Tensor | None, first: int
) -> Tensor:
    """Compute x Wᵀ + b, [N, Y], without autograd, for N token copies `x_NX` (one for each of a token's experts) sorted
    by expert. `weight_EYX`: W of each of E experts; `ends_E`: exclusive end index of each expert's copies; `bias_EZ`: b
    of each expert, added from output `first` on; None: no bias."""
    if _supports_grouped_mm(x_NX, weight_EYX):
        y_NY = F.grouped_mm(x_NX, weight_EYX.mT, offs=ends_E)
    else:
        y_NY = x_NX.new_empty(x_NX.shape[0], weight_EYX.shape[1])
        for expert, rows in _iterate_expert_slices(ends_E):
            torch.mm(x_NX[rows], weight_EYX[expert].T, out=y_NY[rows])
    if bias_EZ is not None:
        copies_E = ends_E.long().diff(prepend=ends_E.new_zeros(1, dtype=torch.long))
        of_copies_NZ = bias_EZ.repeat_interleave(copies_E, dim=0, output_size=len(y_NY))
        y_NY[:, first : first + bias_EZ.shape[1]] += of_copies_NZ
    return y_NY


@custom_operator("meshwright::grouped_product_input")
def _compute_input_gradient(dy_NY: Tensor, weight_EYX: Tensor, ends_E: Tensor) -> Tensor:
    """Return dy W, [N, X], the gradient of the grouped product's input, where W is the matrix of each token copy's
    expert.

    `dy_NY`: gradient of the output for N token copies sorted by expert; `weight_EYX`: W of each of E experts; `ends_E`:
    exclusive end index of each expert's copies."""
    if _supports_grouped_mm(dy_NY, weight_EYX):
        return F.grouped_mm(dy_NY.contiguous(), weight_EYX, offs=ends_E)
    dx_NX = dy_NY.new_empty(dy_NY.shape[0], weight_EYX.shape[2])
    for expert, rows in _iterate_expert_slices(ends_E):
        torch.mm(dy_NY[rows], weight_EYX[expert], out=dx_NX[rows])
    return dx_NX


@custom_operator("meshwright::grouped_product_weight")
def _compute_weight_gradient(dy_NY: Tensor, x_NX: Tensor, ends_E: Tensor) -> Tensor:
    """Return the gradient [E, Y, X] of the grouped product's weights: for each expert dyᵀ x over its token copies; 0
    for an expert without token copies.

    `dy_NY`, `x_NX`: output gradient and input of N token copies sorted by expert; `ends_E`: exclusive end index of each
    expert's copies."""
    if _supports_grouped_mm(dy_NY, x_NX):
        return F.grouped_mm(dy_NY.contiguous().T, x_NX, offs=ends_E)
    dw_EYX = x_NX.new_empty(len(ends_E), dy_NY.shape[1], x_NX.shape[1])
    idle = set(range(len(ends_E)))  # zeroing all experts first would write the whole tensor once more
    for expert, rows in _iterate_expert_slices(ends_E):
        torch.mm(dy_NY[rows].T, x_NX[rows], out=dw_EYX[expert])
        idle.discard(expert)
    for expert in idle:
        dw_EYX[expert].zero_()
    return dw_EYX


def sum_bias_gradients(dy_NZ: Tensor, ends_E: Tensor) -> Tensor:
    """Return the gradient [E, Z] of the biases of E experts: for each expert the sum of the output gradients `dy_NZ`
    over its token copies. `ends_E`: exclusive end index of each expert's copies."""
    ones_N8 = dy_NZ.new_ones(len(dy_NZ), ALIGNMENT // 2)  # as many columns as grouped_mm needs in bf16
    if _supports_grouped_mm(dy_NZ, ones_N8):  # a product with ones: no host synchronisation
        return _compute_weight_gradient(dy_NZ.contiguous(), ones_N8, ends_E)[..., 0]
    d_bias_EZ = dy_NZ.new_zeros(len(ends_E), dy_NZ.shape[1])
    for expert, rows in _iterate_expert_slices(ends_E):
        torch.sum(dy_NZ[rows], dim=0, out=d_bias_EZ[expert])
    return d_bias_EZ


def _supports_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """Return True if PyTorch's grouped_mm supports the operands `a` and `b`: CUDA, bf16 and strides aligned to 16
    bytes.
    """
    aligned = all(size * a.element_size() % ALIGNMENT == 0 for size in (a.shape[-1], *b.shape[1:]))
    return a.is_cuda and a.dtype == torch.bfloat16 and aligned


def _iterate_expert_slices(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (expert index, slice of its token copies) for each expert that has token copies. `ends_E`: exclusive end
    index of each expert's copies.
    """
    start = 0
    for expert, stop in enumerate(ends_E.tolist()):
        if stop > start:
            yield expert, slice(start, stop)
        start = stop


_compute_grouped_product.register_fake(lambda x, weight, ends, bias, first: x.new_empty(x.shape[0], weight.shape[1]))
_compute_input_gradient.register_fake(lambda dy, weight, ends: dy.new_empty(dy.shape[0], weight.shape[2]))
_compute_weight_gradient.register_fake(lambda dy, x, ends: x.new_empty(len(ends), dy.shape[1], x.shape[1]))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save in `ctx` those inputs of the grouped product that backward reads: token copies, weights and end indices.
    This is the `setup_context` function of torch.library.register_autograd; `output` is unused."""
    x_NX, weight_EYX, ends_E, bias_EZ, first = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x_NX if needs_weight else None, weight_EYX if needs_x else None, ends_E)
    ctx.biased = slice(first, first + bias_EZ.shape[1]) if bias_EZ is not None and ctx.needs_input_grad[3] else None


def _backward_formula(ctx: Any, dy_NY: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the grouped product's inputs, in their order, given the output gradient `dy_NY`:
    gradients of token copies, weight and bias, and None for each input that needs no gradient. This is the `backward`
    function of torch.library.register_autograd."""
    x_NX, weight_EYX, ends_E = ctx.saved_tensors
    return (
        None if weight_EYX is None else torch.ops.meshwright.grouped_product_input(dy_NY, weight_EYX, ends_E),
        None if x_NX is None else torch.ops.meshwright.grouped_product_weight(dy_NY, x_NX, ends_E),
        None,
        None if ctx.biased is None else sum_bias_gradients(dy_NY[:, ctx.biased], ends_E),
        None,
    )


_compute_grouped_product.register_autograd(_backward_formula, setup_context=_save_for_backward)
