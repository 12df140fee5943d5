"""Differentiable collective operators of the model, as conjugate pairs: backward of each runs its conjugate.

`OPERATORS` defines each operator once: its forward, the result it allocates, its conjugate; registration, fake
implementation and autograd are generated from it. They are custom operators, so that bytes are recorded and faults
injected inside compiled blocks too. On an axis of size 1 each returns its input. `site`: label of the call in traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from meshwright.comm import collectives
from meshwright.comm.custom_operator import custom_operator
from meshwright.comm.mesh import Axis, find_axis
from meshwright.comm.transport import RowCounts


def copy_to(x: torch.Tensor, axis: Axis, site: str) -> torch.Tensor:
    """Enter a tensor-parallel region: forward returns `x`, backward all-reduces the gradient over `axis`.

    This is f in Megatron-LM (arXiv 1909.08053, section 3). site: label of the calls in traces.
    """
    return _call_operator("copy_to", x, axis, site)


def reduce_from(x: torch.Tensor, axis: Axis, site: str) -> torch.Tensor:
    """Leave a tensor-parallel region: forward all-reduces (sums) `x` over `axis`, backward returns the gradient
    unchanged.

    This is g in Megatron-LM (arXiv 1909.08053, section 3). site: label of the calls in traces.
    """
    return _call_operator("reduce_from", x, axis, site)


def gather_from(x: torch.Tensor, axis: Axis, site: str, dim: int = 1) -> torch.Tensor:
    """All-gather `x` along `dim` over the ranks of `axis` in forward, reduce-scatter the gradient in backward.

    Used where a sequence-parallel region ends (arXiv 2205.05198, section 4.2.2, g). site: label of the calls in traces.
    """
    return _call_operator("gather_from", x, axis, site, dim)


def reduce_scatter_to(x: torch.Tensor, axis: Axis, site: str, dim: int = 1) -> torch.Tensor:
    """Reduce-scatter `x` along `dim` over the ranks of `axis` in forward, all-gather the gradient in backward.

    Used where a sequence-parallel region begins (arXiv 2205.05198, section 4.2.2, conjugate of g). site: label of the
    calls in traces."""
    return _call_operator("reduce_scatter_to", x, axis, site, dim)


def split_to(x: torch.Tensor, axis: Axis, site: str, dim: int = 1) -> torch.Tensor:
    """Return this rank's slice along `dim` of `x`, which is equal on all ranks of `axis`; backward all-gathers the
    gradient.

    site: label of the calls in traces."""
    return _call_operator("split_to", x, axis, site, dim)


def all_to_all(x: torch.Tensor, axis: Axis, site: str, split: int, join: int) -> torch.Tensor:
    """All-to-all of equal parts over `axis`: send part i of `x` along dim `split` to rank i, return the received parts
    concatenated along dim `join`.

    Backward is the inverse all-to-all (DeepSpeed-Ulysses: arXiv 2309.14509, section 3.1). site: label of the calls in
    traces."""
    return _call_operator("all_to_all", x, axis, site, split, join)


def join_from(x: torch.Tensor, axis: Axis, site: str, dim: int = 1) -> torch.Tensor:
    """All-gather `x` along `dim` over the ranks of `axis` in forward. Backward returns this rank's slice of the
    gradient, which must be equal on all ranks.

    Forward and backward are those of `split_to`, exchanged. site: label of the calls in traces."""
    return _call_operator("join_from", x, axis, site, dim)


def all_to_all_rows(
    x: torch.Tensor, axis: Axis, site: str, source_sizes: list[int], output_sizes: list[int]
) -> torch.Tensor:
    """All-to-all of uneven parts over `axis`: send source_sizes[i] rows (dim 0) of `x` to rank i and return the
    received rows, in rank order.

    output_sizes: number of rows received from each rank. Backward returns the gradients of received rows to their
    senders. site: label of the calls in traces."""
    token = launch_rows(x, axis, site, source_sizes, output_sizes)
    return wait_for_rows(token, axis, site, source_sizes, x.shape[1], output_sizes)


def launch_rows(
    x: torch.Tensor, axis: Axis, site: str, source_sizes: list[int], output_sizes: list[int]
) -> torch.Tensor:
    """Launch the all-to-all of `all_to_all_rows`, which has these arguments, without waiting for it. Return a token,
    from which `wait_for_rows` makes the received rows. Until then no other such call may be in flight over `axis`.

    Backward waits for the gradients of the rows of `x`, which the backward of `wait_for_rows` has launched: what is
    computed between the two functions overlaps with communication, and so does its backward."""
    return _call_operator("launch_rows", x, axis, site, source_sizes, x.shape[1], output_sizes)


def wait_for_rows(
    token: torch.Tensor, axis: Axis, site: str, source_sizes: list[int], width: int, output_sizes: list[int]
) -> torch.Tensor:
    """Wait for the all-to-all that `launch_rows` launched and return the received rows, [sum(output_sizes), width].

    `token`: result of `launch_rows`; other arguments: those of `launch_rows`, and `width`, the number of columns of its
    `x`."""
    return _call_operator("wait_for_rows", token, axis, site, source_sizes, width, output_sizes)


def gather_rows(x: torch.Tensor, axis: Axis, site: str, sizes: list[int]) -> torch.Tensor:
    """Return the `x` of the ranks of `axis` concatenated along dim 0; rank i contributes sizes[i] rows. Backward
    reduce-scatters the gradient.

    site: label of the calls in traces."""
    return _call_operator("gather_rows", x, axis, site, sizes)


def reduce_scatter_rows(x: torch.Tensor, axis: Axis, site: str, sizes: list[int]) -> torch.Tensor:
    """Return this rank's rows (dim 0) of the sum of `x` over the ranks of `axis`; rank i gets sizes[i] rows.

    Backward all-gathers the gradient. site: label of the calls in traces."""
    return _call_operator("reduce_scatter_rows", x, axis, site, sizes)


def _call_operator(name: str, x: torch.Tensor, axis: Axis, site: str, *arguments: int | list[int]) -> torch.Tensor:
    """Call the custom operator `name`, such as "gather_from", on `x` over `axis` and return its result; on an axis of
    size 1 return `x`.

    site: label of the calls in traces. arguments: further arguments of the operator, such as dims or sizes.
    """
    return x if axis.trivial else getattr(torch.ops.meshwright, name)(x, axis.key, site, *arguments)


# --- forward of each operator, given the axis, the call site and the operator's own arguments


def _forward_all_reduce(x: torch.Tensor, axis: Axis, site: str) -> torch.Tensor:
    """Return the sum of `x` over the ranks of `axis`, as a new tensor (forward of `reduce_from`). site: label of the
    call in traces."""
    total = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(total, axis, site)
    return total


def _forward_all_gather(x: torch.Tensor, axis: Axis, site: str, dim: int) -> torch.Tensor:
    """Return the `x` of the ranks of `axis` concatenated along `dim` (forward of `gather_from` and `join_from`). site:
    label of the call in traces."""
    parts = x.new_empty((axis.size, *x.shape))
    if axis.communicator.faults.active is not None:
        parts.zero_()  # a skipped call must not leave the right values of an earlier one
    collectives.all_gather(parts, x.contiguous(), axis, site)
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()  # copies unless all dims before `dim` are 1


def _forward_reduce_scatter(x: torch.Tensor, axis: Axis, site: str, dim: int) -> torch.Tensor:
    """Return this rank's slice along `dim` of the sum of `x` over the ranks of `axis` (forward of `reduce_scatter_to`).
    site: label of the call in traces."""
    parts = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(parts[0])
    collectives.reduce_scatter(mine, parts, axis, site)
    return mine


def _forward_split(x: torch.Tensor, axis: Axis, site: str, dim: int) -> torch.Tensor:
    """Return a copy of this rank's slice along `dim` of `x`, which is equal on all ranks of `axis` (forward of
    `split_to`). site: ignored, as nothing is sent."""
    return x.chunk(axis.size, dim)[axis.rank].clone()


def _forward_all_to_all(x: torch.Tensor, axis: Axis, site: str, split: int, join: int) -> torch.Tensor:
    """Send part i of `x` along dim `split` to rank i of `axis`; return the received parts concatenated along dim `join`
    (forward of `all_to_all`). site: label of the call in traces."""
    parts = torch.stack(x.chunk(axis.size, split))
    arrived = torch.empty_like(parts)
    collectives.all_to_all(arrived, parts, axis, site)
    return torch.cat(arrived.unbind(), dim=join)


def _forward_launch_rows(
    x: torch.Tensor, axis: Axis, site: str, source_sizes: list[int], width: int, output_sizes: list[int]
) -> torch.Tensor:
    """Launch an all-to-all of rows and return a token (forward of `launch_rows`). site: label of the call in traces."""
    arrived = _empty_rows(x, sum(output_sizes))
    sizes = RowCounts(output_sizes, source_sizes)
    assert axis.key not in axis.communicator.launched_rows, f"{site}: another call over the axis is in flight"
    handle = collectives.all_to_all(arrived, x.contiguous(), axis, site, sizes, async_op=True)
    axis.communicator.launched_rows[axis.key] = handle, arrived
    return x.new_empty(0)


def _forward_wait_for_rows(
    token: torch.Tensor, axis: Axis, site: str, source_sizes: list[int], width: int, output_sizes: list[int]
) -> torch.Tensor:
    """Return the rows of the all-to-all in flight over `axis` (forward of `wait_for_rows`)."""
    handle, arrived = axis.communicator.launched_rows.pop(axis.key)
    handle.wait()
    return arrived


def _forward_all_to_all_rows(
    x: torch.Tensor, axis: Axis, site: str, source_sizes: list[int], output_sizes: list[int]
) -> torch.Tensor:
    """Run the all-to-all of `all_to_all_rows`, which has these arguments, without autograd."""
    _forward_launch_rows(x, axis, site, source_sizes, 0, output_sizes)
    return _forward_wait_for_rows(x, axis, site, source_sizes, 0, output_sizes)


def _forward_gather_rows(x: torch.Tensor, axis: Axis, site: str, sizes: list[int]) -> torch.Tensor:
    """Return the `x` of the ranks of `axis` concatenated along dim 0, where rank i has sizes[i] rows (forward of
    `gather_rows`): an all-to-all in which each rank sends all its rows to every rank. site: label of the call in
    traces."""
    copies = x.repeat(axis.size, *(1 for _ in x.shape[1:]))
    return _forward_all_to_all_rows(copies, axis, site, [len(x)] * axis.size, sizes)


def _forward_reduce_scatter_rows(x: torch.Tensor, axis: Axis, site: str, sizes: list[int]) -> torch.Tensor:
    """Return this rank's rows (dim 0) of the sum of `x` over the ranks of `axis`, where rank i gets sizes[i] rows
    (forward of `reduce_scatter_rows`): an all-to-all, then the sum of what arrived, in rank order. site: label of the
    call in traces."""
    arrived = _forward_all_to_all_rows(x, axis, site, sizes, [sizes[axis.rank]] * axis.size)
    return arrived.unflatten(0, (axis.size, -1 if len(arrived) else 0)).sum(dim=0)


# --- shapes of results


def _empty_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an uninitialized tensor like `x` with `rows` rows (dim 0)."""
    return x.new_empty((rows, *x.shape[1:]))


def _empty_gathered(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return an uninitialized tensor like `x`, but `axis.size` times as long in `dim`."""
    return x.new_empty([size * axis.size if at == dim else size for at, size in enumerate(x.shape)])


def _empty_split(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return an uninitialized tensor like `x`, but with 1 / `axis.size` of its length in `dim`."""
    return x.new_empty([size // axis.size if at == dim else size for at, size in enumerate(x.shape)])


class Operator(NamedTuple):
    """Definition of a differentiable collective operator, from which `_register` registers it with torch.

    conjugate: name of the operator that computes the gradient; that operator takes the further arguments in reverse
    order. forward: implementation, a function of x, axis, site and the further arguments. result: function of x, axis
    and the further arguments that allocates an uninitialised result, for torch.compile. arguments: schema of the
    further arguments, such as "int dim".
    """

    conjugate: str
    forward: Callable[..., torch.Tensor]
    result: Callable[..., torch.Tensor]
    arguments: str = ""


DIM = ", SymInt dim"
SIZES = ", SymInt[] sizes"
LAUNCHED = ", SymInt[] source_sizes, SymInt width, SymInt[] output_sizes"
OPERATORS = {
    "copy_to": Operator("reduce_from", lambda x, axis, site: x.clone(), lambda x, axis: torch.empty_like(x)),
    "reduce_from": Operator("copy_to", _forward_all_reduce, lambda x, axis: x.new_empty(x.shape)),
    "gather_from": Operator("reduce_scatter_to", _forward_all_gather, _empty_gathered, DIM),
    "reduce_scatter_to": Operator("gather_from", _forward_reduce_scatter, _empty_split, DIM),
    "split_to": Operator("join_from", _forward_split, _empty_split, DIM),
    "join_from": Operator("split_to", _forward_all_gather, _empty_gathered, DIM),
    "all_to_all": Operator(
        "all_to_all",
        _forward_all_to_all,
        lambda x, axis, split, join: _empty_gathered(_empty_split(x, axis, split), axis, join),
        ", SymInt split, SymInt join",
    ),
    "launch_rows": Operator("wait_for_rows", _forward_launch_rows, lambda x, axis, *sizes: x.new_empty(0), LAUNCHED),
    "wait_for_rows": Operator(
        "launch_rows",
        _forward_wait_for_rows,
        lambda token, axis, source_sizes, width, output_sizes: token.new_empty(sum(output_sizes), width),
        LAUNCHED,
    ),
    "gather_rows": Operator(
        "reduce_scatter_rows", _forward_gather_rows, lambda x, axis, sizes: _empty_rows(x, sum(sizes)), SIZES
    ),
    "reduce_scatter_rows": Operator(
        "gather_rows", _forward_reduce_scatter_rows, lambda x, axis, sizes: _empty_rows(x, sizes[axis.rank]), SIZES
    ),
}


def _register(name: str, operator: Operator) -> None:
    """Register `operator` with torch under the name `name`: custom operator, fake implementation for torch.compile, and
    autograd formula."""

    def forward(x: torch.Tensor, axis: str, site: str, *arguments: Any) -> torch.Tensor:
        """Run the operator's forward on `x` over the mesh axis whose `Axis.key` is `axis`. site: label of the call in
        traces. arguments: further arguments, such as dims or sizes."""
        return operator.forward(x, find_axis(axis), site, *arguments)

    def fake(x: torch.Tensor, axis: str, site: str, *arguments: Any) -> torch.Tensor:
        """Return an uninitialised tensor of the shape of the operator's result; torch.compile calls this instead of the
        operator when it traces. Same arguments as `forward`."""
        return operator.result(x, find_axis(axis), *arguments)

    def save_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # torch passes these by name
        """Save axis key, call site and further arguments for backward. ctx: autograd context. inputs: the operator's
        inputs: x, axis key, site, further arguments. output: the operator's result (unused)."""
        _, ctx.axis, site, *arguments = inputs
        ctx.site = site + ".backward"
        ctx.arguments = arguments[::-1]

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the operator's inputs: for x the conjugate operator's result on `gradient` (the
        result's gradient), for all others None. ctx: autograd context filled by `save_context`."""
        conjugate = getattr(torch.ops.meshwright, operator.conjugate)
        return conjugate(gradient, ctx.axis, ctx.site, *ctx.arguments), None, None, *(None for _ in ctx.arguments)

    schema = f"(Tensor x, str axis, str site{operator.arguments}) -> Tensor"
    registered = custom_operator(f"meshwright::{name}", schema)(forward)
    registered.register_fake(fake)
    registered.register_autograd(backward, setup_context=save_context)


for _name, _operator in OPERATORS.items():
    _register(_name, _operator)
