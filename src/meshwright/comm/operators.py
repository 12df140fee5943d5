"""Collective calls inside the model, as autograd pairs: what one does forward, its conjugate does backward.

They are custom operators, so that bytes are recorded and planted faults served inside compiled blocks too. On an axis
of size 1 each returns its input.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.comm import collectives
from meshwright.comm.custom_operator import custom_operator
from meshwright.comm.mesh import Axis, axis_of


def copy_to(x: torch.Tensor, axis: Axis, site: str) -> torch.Tensor:
    """Enter a region where each rank computes its share from the whole `x`: forward x, backward the sum of the ranks'
    gradients (Megatron-LM's f: arXiv 1909.08053, section 3)."""
    return x if axis.trivial else torch.ops.meshwright.copy_to(x, axis.key, site)


def reduce_from(x: torch.Tensor, axis: Axis, site: str) -> torch.Tensor:
    """Leave such a region: forward the sum of the ranks' `x`, backward the gradient as it is (Megatron-LM's g)."""
    return x if axis.trivial else torch.ops.meshwright.reduce_from(x, axis.key, site)


def gather_from(x: torch.Tensor, axis: Axis, site: str, dim: int = 1) -> torch.Tensor:
    """Forward the ranks' `x` concatenated along `dim`; backward the sum of the ranks' gradients, each its own slice
    (sequence parallel: arXiv 2205.05198, section 4.2.2, g)."""
    return x if axis.trivial else torch.ops.meshwright.gather_from(x, axis.key, site, dim)


def reduce_scatter_to(x: torch.Tensor, axis: Axis, site: str, dim: int = 1) -> torch.Tensor:
    """Forward this rank's slice along `dim` of the sum of the ranks' `x`; backward the gradients concatenated
    (sequence parallel: arXiv 2205.05198, section 4.2.2, the conjugate of g)."""
    return x if axis.trivial else torch.ops.meshwright.reduce_scatter_to(x, axis.key, site, dim)


def split_to(x: torch.Tensor, axis: Axis, site: str, dim: int = 1) -> torch.Tensor:
    """Forward this rank's slice of `x` (the same on all ranks) along `dim`; backward the gradients concatenated."""
    return x if axis.trivial else torch.ops.meshwright.split_to(x, axis.key, site, dim)


def all_to_all(x: torch.Tensor, axis: Axis, site: str, split: int, join: int) -> torch.Tensor:
    """Forward part i of `x` along dim `split` goes to rank i, and what arrives is concatenated along dim `join`;
    backward the gradients go back the same way (DeepSpeed-Ulysses: arXiv 2309.14509, section 3.1)."""
    return x if axis.trivial else torch.ops.meshwright.all_to_all(x, axis.key, site, split, join)


def join_from(x: torch.Tensor, axis: Axis, site: str, dim: int = 1) -> torch.Tensor:
    """Forward the ranks' `x` concatenated along `dim`; backward this rank's slice of the gradient, which is the same on
    all ranks (the conjugate of `split_to`)."""
    return x if axis.trivial else torch.ops.meshwright.join_from(x, axis.key, site, dim)


def exchange(x: torch.Tensor, axis: Axis, site: str, source_sizes: list[int], output_sizes: list[int]) -> torch.Tensor:
    """Forward: source_sizes[i] rows of `x` to the i-th rank, output_sizes[i] rows from it, in the order of the ranks;
    backward the gradients the way back."""
    if axis.trivial:
        return x
    return torch.ops.meshwright.exchange(x, axis.key, site, source_sizes, output_sizes)


def gather_rows(x: torch.Tensor, axis: Axis, site: str, sizes: list[int]) -> torch.Tensor:
    """Forward the ranks' `x` concatenated along dim 0, sizes[i] rows of the i-th; backward the sum of the ranks'
    gradients of this rank's rows."""
    return x if axis.trivial else torch.ops.meshwright.gather_rows(x, axis.key, site, sizes)


def reduce_scatter_rows(x: torch.Tensor, axis: Axis, site: str, sizes: list[int]) -> torch.Tensor:
    """Forward this rank's rows of the sum of the ranks' `x`, sizes[i] rows for the i-th; backward the gradients
    concatenated."""
    return x if axis.trivial else torch.ops.meshwright.reduce_scatter_rows(x, axis.key, site, sizes)


def _sum(x: torch.Tensor, key: str, site: str) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(total, axis_of(key), site)
    return total


def _gather(x: torch.Tensor, key: str, site: str, dim: int) -> torch.Tensor:
    axis = axis_of(key)
    parts = x.new_empty((axis.size, *x.shape))
    if axis.communicator.faults.active is not None:
        parts.zero_()  # what a skipped call leaves must not be the right values that lay here before
    collectives.all_gather(parts, x.contiguous(), axis, site)
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()  # copies unless all dims before `dim` are 1


def _sum_slice(x: torch.Tensor, key: str, site: str, dim: int) -> torch.Tensor:
    axis = axis_of(key)
    parts = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(parts[0])
    collectives.reduce_scatter(mine, parts, axis, site)
    return mine


def _slice(x: torch.Tensor, key: str, dim: int) -> torch.Tensor:
    axis = axis_of(key)
    return x.chunk(axis.size, dim)[axis.rank].clone()


def _swap(x: torch.Tensor, key: str, site: str, split: int, join: int) -> torch.Tensor:
    axis = axis_of(key)
    parts = torch.stack(x.chunk(axis.size, split))
    arrived = torch.empty_like(parts)
    collectives.all_to_all(arrived, parts, axis, site)
    return torch.cat(arrived.unbind(), dim=join)


def _longer(x: torch.Tensor, key: str, dim: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= axis_of(key).size
    return x.new_empty(shape)


def _shorter(x: torch.Tensor, key: str, dim: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] //= axis_of(key).size
    return x.new_empty(shape)


@custom_operator("meshwright::copy_to")
def _copy_to(x: torch.Tensor, axis: str, site: str) -> torch.Tensor:
    return x.clone()


@custom_operator("meshwright::reduce_from")
def _reduce_from(x: torch.Tensor, axis: str, site: str) -> torch.Tensor:
    return _sum(x, axis, site)


@custom_operator("meshwright::gather_from")
def _gather_from(x: torch.Tensor, axis: str, site: str, dim: int) -> torch.Tensor:
    return _gather(x, axis, site, dim)


@custom_operator("meshwright::reduce_scatter_to")
def _reduce_scatter_to(x: torch.Tensor, axis: str, site: str, dim: int) -> torch.Tensor:
    return _sum_slice(x, axis, site, dim)


@custom_operator("meshwright::split_to")
def _split_to(x: torch.Tensor, axis: str, site: str, dim: int) -> torch.Tensor:
    return _slice(x, axis, dim)


@custom_operator("meshwright::all_to_all")
def _all_to_all(x: torch.Tensor, axis: str, site: str, split: int, join: int) -> torch.Tensor:
    return _swap(x, axis, site, split, join)


_copy_to.register_fake(lambda x, axis, site: torch.empty_like(x))
_reduce_from.register_fake(lambda x, axis, site: x.new_empty(x.shape))
_gather_from.register_fake(lambda x, axis, site, dim: _longer(x, axis, dim))
_reduce_scatter_to.register_fake(lambda x, axis, site, dim: _shorter(x, axis, dim))
_split_to.register_fake(lambda x, axis, site, dim: _shorter(x, axis, dim))
_all_to_all.register_fake(lambda x, axis, site, split, join: _longer(_shorter(x, axis, split), axis, join))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # torch passes these by name
    ctx.axis, ctx.site = inputs[1], inputs[2] + ".backward"
    ctx.dim = inputs[3] if len(inputs) > 3 else 0


_copy_to.register_autograd(
    lambda context, g: (torch.ops.meshwright.reduce_from(g, context.axis, context.site), None, None),
    setup_context=_remember,
)
_reduce_from.register_autograd(
    lambda context, g: (torch.ops.meshwright.copy_to(g, context.axis, context.site), None, None),
    setup_context=_remember,
)
_gather_from.register_autograd(
    lambda context, g: (
        torch.ops.meshwright.reduce_scatter_to(g.contiguous(), context.axis, context.site, context.dim),
        None,
        None,
        None,
    ),
    setup_context=_remember,
)
_reduce_scatter_to.register_autograd(
    lambda context, g: (
        torch.ops.meshwright.gather_from(g.contiguous(), context.axis, context.site, context.dim),
        None,
        None,
        None,
    ),
    setup_context=_remember,
)
_split_to.register_autograd(
    lambda context, g: (
        torch.ops.meshwright.gather_from(g.contiguous(), context.axis, context.site, context.dim),
        None,
        None,
        None,
    ),
    setup_context=_remember,
)


def _remember_dims(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.axis, site, ctx.split, ctx.join = inputs
    ctx.site = site + ".backward"


_all_to_all.register_autograd(
    lambda context, g: (
        torch.ops.meshwright.all_to_all(g, context.axis, context.site, context.join, context.split),
        None,
        None,
        None,
        None,
    ),
    setup_context=_remember_dims,
)


@custom_operator("meshwright::join_from")
def _join_from(x: torch.Tensor, axis: str, site: str, dim: int) -> torch.Tensor:
    return _gather(x, axis, site, dim)


@custom_operator("meshwright::slice_of")
def _slice_of(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    return _slice(x, axis, dim)


@custom_operator("meshwright::exchange")
def _exchange(x: torch.Tensor, axis: str, site: str, source_sizes: list[int], output_sizes: list[int]) -> torch.Tensor:
    arrived = _rows(x, sum(output_sizes))
    collectives.all_to_all(arrived, x.contiguous(), axis_of(axis), site, output_sizes, source_sizes)
    return arrived


@custom_operator("meshwright::gather_rows")
def _gather_rows(x: torch.Tensor, axis: str, site: str, sizes: list[int]) -> torch.Tensor:
    whole = _rows(x, sum(sizes))
    collectives.all_gather_rows(whole, x.contiguous(), axis_of(axis), site, sizes)
    return whole


@custom_operator("meshwright::reduce_scatter_rows")
def _reduce_scatter_rows(x: torch.Tensor, axis: str, site: str, sizes: list[int]) -> torch.Tensor:
    part = _rows(x, sizes[axis_of(axis).rank])
    collectives.reduce_scatter_rows(part, x.contiguous(), axis_of(axis), site, sizes)
    return part


def _rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty((rows, *x.shape[1:]))


_join_from.register_fake(lambda x, axis, site, dim: _longer(x, axis, dim))
_slice_of.register_fake(lambda x, axis, dim: _shorter(x, axis, dim))
_exchange.register_fake(lambda x, axis, site, source_sizes, output_sizes: _rows(x, sum(output_sizes)))
_gather_rows.register_fake(lambda x, axis, site, sizes: _rows(x, sum(sizes)))
_reduce_scatter_rows.register_fake(lambda x, axis, site, sizes: _rows(x, sizes[axis_of(axis).rank]))
_join_from.register_autograd(
    lambda context, g: (torch.ops.meshwright.slice_of(g, context.axis, context.dim), None, None, None),
    setup_context=_remember,
)


def _remember_sizes(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.axis, ctx.site, ctx.sizes = inputs[1], inputs[2] + ".backward", inputs[3:]


_exchange.register_autograd(
    lambda context, g: (
        torch.ops.meshwright.exchange(g, context.axis, context.site, *reversed(context.sizes)),
        *(None,) * 4,
    ),
    setup_context=_remember_sizes,
)
_gather_rows.register_autograd(
    lambda context, g: (
        torch.ops.meshwright.reduce_scatter_rows(g, context.axis, context.site, *context.sizes),
        *(None,) * 3,
    ),
    setup_context=_remember_sizes,
)
_reduce_scatter_rows.register_autograd(
    lambda context, g: (
        torch.ops.meshwright.gather_rows(g, context.axis, context.site, *context.sizes),
        *(None,) * 3,
    ),
    setup_context=_remember_sizes,
)
