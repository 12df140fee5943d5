"""Matrix products that overlap with the collective call of their input or output (tensor and sequence parallelism).

The tokens are multiplied in chunks, while other chunks are in flight. With sequence parallelism a chunk is the tokens
of one rank, sent between pairs of ranks: an all-gather begins with the rank's own chunk, a reduce-scatter ends with it.
Without it, a chunk is all-reduced while the next one is computed. Bytes are those of the collective call. Where
PyTorch's symmetric memory serves the ranks (`choose_product_overlap`), its fused operators replace the chunks of
all-gathers and reduce-scatters, but not of all-reduces. All are custom operators, so that inside compiled blocks too
bytes are recorded and faults can be injected into chunks.

Shapes: G ranks, B sequences of S tokens, s = S / G of them on a rank, N tokens of a chunk, X inputs and Y outputs of
the product.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from meshwright.comm.collectives import all_reduce, rotate, run_fused
from meshwright.comm.custom_operator import custom_operator
from meshwright.comm.handle import DONE
from meshwright.comm.mesh import Axis, find_axis

Tensors = Sequence[torch.Tensor]
MIN_CAPABILITY = 8, 0
"""Compute capability from which PyTorch tests symmetric memory (torch/testing, `requires_cuda_p2p_access`)."""


def choose_product_overlap(setting: str, axis: Axis, fusible: bool) -> str:
    """Return how products overlap with the collective calls over the tensor-parallel `axis`: "off", "chunks" or
    "symmetric" (memory).

    setting: `train.tensor_overlap`. "off", "chunks": the result. "auto": off on a CPU, where nothing overlaps; on a GPU
    symmetric memory, if all ranks of the run are on one node, whose GPUs read each other's memory, else chunks.
    fusible: False if symmetric memory is no choice: it fuses no all-reduces (layouts without sequence parallelism), and
    has not been tried in a CUDA graph. On GPUs "auto" with `fusible` is collective."""
    automatic = setting == "auto" and axis.communicator.device.type == "cuda"
    if not (automatic and fusible):
        return "chunks" if automatic or setting == "chunks" else "off"
    here = torch.cuda.current_device()
    peers = (device for device in range(torch.cuda.device_count()) if device != here)
    able = hasattr(torch.ops.symm_mem, "fused_all_gather_matmul") and (
        torch.cuda.device_count() >= axis.size  # fewer are visible if each rank sees its own GPU alone
        and torch.cuda.get_device_capability(here) >= MIN_CAPABILITY
        and all(torch.cuda.can_device_access_peer(here, peer) for peer in peers)
    )
    everyone: list[tuple[str, bool]] = [("", False)] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), able))
    one_node = len({host for host, _ in everyone}) == 1
    return "symmetric" if one_node and all(each for _, each in everyone) else "chunks"


def multiply_gathered(
    x_BsX: torch.Tensor, matrix_XY: torch.Tensor, key: str, site: str, saves_gathered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (product [B, S, Y] of the tokens of all ranks of an axis with `matrix_XY`, these tokens [B, S, X]).

    x_BsX: tokens of this rank. key: `Axis.key`. site: label of the calls in traces. saves_gathered: if False, no tokens
    are returned."""
    axis = find_axis(key)
    if axis.communicator.product_overlap == "symmetric":
        multiply = partial(_gather_fused, matrix_XY, saves_gathered)
        y_BSY, x_BSX = run_fused(multiply, x_BsX, "all_gather", x_BsX.nbytes * axis.size, axis, site)
        return y_BSY, x_BSX
    x_GBsX = x_BsX.new_empty(axis.size, *x_BsX.shape)
    y_GBsY = x_BsX.new_empty(*x_GBsX.shape[:-1], matrix_XY.shape[1])
    x_GBsX[axis.rank] = x_BsX
    sources = [(axis.rank - distance) % axis.size for distance in range(axis.size)]
    handles = [DONE]
    for distance in range(1, axis.size):
        arriving = x_GBsX[sources[distance]]
        handles.append(rotate(arriving, x_GBsX[axis.rank], axis, site, async_op=True, distance=distance))
    for source, handle in zip(sources, handles, strict=True):
        handle.wait()
        torch.mm(x_GBsX[source].flatten(0, 1), matrix_XY, out=y_GBsY[source].flatten(0, 1))
    return _join_tokens(y_GBsY), _join_tokens(x_GBsX) if saves_gathered else x_BsX.new_empty(0)


def multiply_and_reduce(xs_BSX: Tensors, matrices_XY: Tensors, axis: Axis, site: str) -> torch.Tensor:
    """Return the sum [B, S, Y] over the ranks of `axis`, and over the pairs of a tensor in `xs_BSX` and a matrix in
    `matrices_XY`, of their products, in G chunks of the B x S tokens: a chunk is all-reduced, in place, while the next
    one is multiplied. X may differ between pairs. site: label of the calls in traces."""
    y_BSY = xs_BSX[0].new_empty(*xs_BSX[0].shape[:2], matrices_XY[0].shape[1])
    chunks = zip(*(each.flatten(0, 1).chunk(axis.size) for each in (y_BSY, *xs_BSX)), strict=True)
    # A generator: a chunk is multiplied when the call of the one before it has been posted.
    products = (_sum_products(xs_NX, matrices_XY, y_NY) for y_NY, *xs_NX in chunks)
    for handle in [all_reduce(product_NY, axis, site, async_op=True) for product_NY in products]:
        handle.wait()
    return y_BSY


def multiply_and_scatter(xs_BSX: Tensors, matrices_XY: Tensors, axis: Axis, site: str) -> torch.Tensor:
    """Return this rank's tokens [B, s, Y] of the sum that `multiply_and_reduce` returns, whose arguments it takes;
    16-bit products are added in float32."""
    whole, columns = xs_BSX[0], matrices_XY[0].shape[1]
    if axis.communicator.product_overlap == "symmetric":
        # One product, of the operands side by side.
        x_BSX, matrix_XY = (
            each[0] if len(each) == 1 else torch.cat([*each], at) for each, at in ((xs_BSX, 2), (matrices_XY, 0))
        )
        size = whole.nbytes // whole.shape[2] * columns
        return run_fused(partial(_scatter_fused, matrix_XY), x_BSX, "reduce_scatter", size, axis, site)[0]
    xs_GBsX = [each.unflatten(1, (axis.size, -1)).movedim(1, 0) for each in xs_BSX]
    sums_GBsY = whole.new_empty(*xs_GBsX[0].shape[:-1], columns)
    in_flight = []
    for distance in range(1, axis.size):
        sent = torch.empty_like(sums_GBsY[0])
        _sum_products([each[(axis.rank + distance) % axis.size] for each in xs_GBsX], matrices_XY, sent)
        arriving = sums_GBsY[(axis.rank - distance) % axis.size]
        in_flight.append((rotate(arriving, sent, axis, site, async_op=True, distance=distance), sent))
    _sum_products([each[axis.rank] for each in xs_GBsX], matrices_XY, sums_GBsY[axis.rank])
    for handle, _ in in_flight:  # what is sent is not freed before
        handle.wait()
    return sums_GBsY.sum(dim=0)


def _sum_products(xs: Tensors, matrices: Tensors, out: torch.Tensor) -> torch.Tensor:
    """Write to the contiguous `out` [..., Y], and return, the sum of the products of `xs` [..., X] with `matrices`."""
    total = out.view(-1, out.shape[-1])
    for number, (x, matrix) in enumerate(zip(xs, matrices, strict=True)):
        torch.addmm(total, x.flatten(0, -2), matrix, beta=min(number, 1), out=total)
    return out


def _gather_fused(matrix_XY: torch.Tensor, saves_gathered: bool, x_BsX: torch.Tensor, group: str) -> list[torch.Tensor]:
    """Run `multiply_gathered`, whose arguments these are, by symmetric memory. group: name of the process group."""
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    x_BSX, (y_BSY,) = fused(x_BsX, [matrix_XY], 1, group, return_A=saves_gathered)
    return [y_BSY.contiguous(), x_BSX.contiguous() if saves_gathered else x_BsX.new_empty(0)]


def _scatter_fused(matrix_XY: torch.Tensor, x_BSX: torch.Tensor, group: str) -> list[torch.Tensor]:
    """Run `multiply_and_scatter`, whose arguments these are, by symmetric memory. group: name of the process group."""
    return [torch.ops.symm_mem.fused_matmul_reduce_scatter(x_BSX, matrix_XY, "sum", 1, group).contiguous()]


def _join_tokens(parts_GBsX: torch.Tensor) -> torch.Tensor:
    """Return the ranks' tokens `parts_GBsX` as [B, S, X]; a copy unless B is 1."""
    return parts_GBsX.movedim(0, 1).flatten(1, 2)


def _allocate_gathered(
    x: torch.Tensor, matrix: torch.Tensor, axis: str, site: str, saves_gathered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised results of `gather_product`, whose arguments it takes, for torch.compile."""
    x_BSX = x.new_empty(x.shape[0], x.shape[1] * find_axis(axis).size, x.shape[2])
    return x_BSX.new_empty(*x_BSX.shape[:2], matrix.shape[1]), x_BSX if saves_gathered else x.new_empty(0)


@custom_operator("meshwright::product_sum")
def product_sum(xs: Tensors, matrices: Tensors, axis: str, site: str, call: str) -> torch.Tensor:
    """Return the sum, over the ranks of an axis, of the products of `xs`, each [B, S, X], with `matrices`, each [X, Y].
    call: "scatter" for this rank's tokens [B, s, Y] (`multiply_and_scatter`), "reduce" for all [B, S, Y]
    (`multiply_and_reduce`). axis: `Axis.key`; site: label of the calls in traces."""
    return (multiply_and_scatter if call == "scatter" else multiply_and_reduce)(xs, matrices, find_axis(axis), site)


def _allocate_sum(xs: Tensors, matrices: Tensors, axis: str, site: str, call: str) -> torch.Tensor:
    """Return an uninitialised result of `product_sum`, whose arguments it takes, for torch.compile."""
    ranks = find_axis(axis).size if call == "scatter" else 1
    return xs[0].new_empty(xs[0].shape[0], xs[0].shape[1] // ranks, matrices[0].shape[1])


custom_operator("meshwright::gather_product")(multiply_gathered).register_fake(_allocate_gathered)
product_sum.register_fake(_allocate_sum)
