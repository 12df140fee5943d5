"""Tensor parallelism: ranks split the matrix products of each layer (Shoeybi et al. 2019, arXiv:1909.08053).

Idea: the first product of a layer is split by columns, the second by rows, with communication at two points: all ranks
need the layer's input, and their partial results are summed. With sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2) each rank holds a slice of the tokens between those products.
Mathematics: with A = [A_1 ... A_N] cut by columns and B = [B_1; ...; B_N] by rows, an elementwise f commutes with the
cut, so that f(X A) B = sum over ranks i of f(X A_i) B_i; the same holds for attention, which is computed head by head.
Communication: conjugate pairs of operators (comm/operators.py); what one does forward, the other does backward:

    enter: identity     | all-reduce         leave: all-reduce     | identity        (f and g of arXiv:1909.08053)
    enter: all-gather   | reduce-scatter     leave: reduce-scatter | all-gather      (g and its conjugate, with slices)

Overlap: with `train.tensor_overlap` a product is computed in chunks while other chunks of its collective call are in
flight (comm/products.py), else none inside a layer. The sums of partial gradients are in flight together.
Gradients: tensors that several ranks replicate and use for their own tokens or heads alone get partial gradients:
norms, learned positions and biases after a reduce-scatter (sequence parallelism), norms of queries and keys, key-value
heads that ranks share. The parameter table lists them; `PartialGradients` sums them once a step, all units together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.operators import copy_to, gather_from, join_from, reduce_from, reduce_scatter_to, split_to
from meshwright.model.axis_operations import Overlap, TensorOperations
from meshwright.parallel.recompute import discard
from meshwright.parallel.zero import FsdpUnit
from meshwright.spec.parameters import ParameterTable

GRADIENT_SITE = "tensor.gradients"
SHARED_HEADS_SITE = "tensor.gradients.shared_heads"


class TensorParallel(TensorOperations):
    """Tensor-parallel communication of one rank over `axis` (tp). If the axis has size 1, every operation returns its
    input.

    `sequence_parallel`: True if each rank holds only a slice of the tokens outside of column- and row-parallel
    products. `saves_gathered`: True if products that overlap with an all-gather save the gathered input for backward;
    False if backward gathers it again, as selective activation checkpointing does."""

    def __init__(self, axis: Axis, sequence_parallel: bool, saves_gathered: bool = True) -> None:
        self.axis = axis
        self.saves_gathered = saves_gathered
        self.sequence_parallel = sequence_parallel
        self.size = axis.size
        self.rank = axis.rank
        self.trivial = axis.trivial

    def enter(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """Return the input of a column-parallel product, [B, S, H] for B sequences of S tokens and hidden size H.
        Without sequence parallelism it is `x_BSH` unchanged. With it, `x_BSH` is a token slice [B, S / tp, H], and the
        slices of the tp ranks are all-gathered.

        `site`: label of the call in traces."""
        return (gather_from if self.sequence_parallel else copy_to)(x_BSH, self.axis, site)

    def leave(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """Sum the partial results `x_BSH` of a row-parallel product over the tp ranks. Return the sum, [B, S, H] for B
        sequences of S tokens and hidden size H; with sequence parallelism this rank's token slice of it, [B, S / tp,
        H].

        `site`: label of the call in traces."""
        return (reduce_scatter_to if self.sequence_parallel else reduce_from)(discard(x_BSH), self.axis, site)

    def overlap(self, column: bool, site: str) -> Overlap | None:
        """Return the overlap of the products of a column-parallel (`column`) or row-parallel linear layer with their
        collective calls; None if there is none. `site`: label of the calls in traces."""
        # Outside of compiled blocks this all-reduce overlaps with the weight gradient; in chunks the last is exposed.
        in_one_call = column and not self.sequence_parallel and not torch.compiler.is_compiling()
        if self.trivial or in_one_call or self.axis.communicator.product_overlap == "off":
            return None
        calls = ("gather", "scatter") if self.sequence_parallel else ("", "reduce")
        return Overlap(*(calls if column else calls[::-1]), self.saves_gathered, self.axis.key, site)

    def reduce(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """Return the sum of `x` (any shape) over the tp ranks; backward passes the gradient through unchanged. `site`:
        label of the call in traces."""
        return reduce_from(x, self.axis, site)

    def average(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """Return the mean of `x` (any shape) over the tp ranks; backward returns the mean of the ranks' gradients.
        `site`: label of the calls in traces."""
        return reduce_from(copy_to(x / self.size, self.axis, site), self.axis, site)

    def gather(self, x: torch.Tensor, site: str, dim: int) -> torch.Tensor:
        """Concatenate the tp ranks' tensors `x` along dim `dim`; return the result on every rank. Backward sums the
        gradient over the ranks and returns this rank's slice of the sum. `site`: label of the call in traces."""
        return gather_from(x, self.axis, site, dim)

    def split_tokens(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """Return this rank's token slice [B, S / tp, H] of `x_BSH` [B, S, H], which is equal on all tp ranks (B
        sequences of S tokens, hidden size H). `site`: label of the call in traces."""
        return split_to(x_BSH, self.axis, site)

    def join_tokens(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """Concatenate the token slices `x_BSH` [B, S / tp, H] of the tp ranks; return [B, S, H] (B sequences of S
        tokens, hidden size H). Inverse of `split_tokens`. `site`: label of the call in traces."""
        return join_from(x_BSH, self.axis, site)

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> None:
        """Replace `x` by its sum (op="max": its maximum) over the tp ranks, in place and without autograd. `site`:
        label of the call in traces."""
        all_reduce(x, self.axis, site, op)


class PartialGradients:
    """Gradients of one rank that must be summed over tp (for experts, etp) ranks. Such ranks hold the same parameters,
    but their gradients cover different tokens, heads or slices of a layer's width. The partial gradients are views of
    the gradient shards of the FSDP `units`.

    `table`: parameter table of the model; `mesh`: device mesh of this rank."""

    def __init__(self, units: Iterable[FsdpUnit], table: ParameterTable, mesh: Mesh) -> None:
        views: dict[tuple[str, int], list[torch.Tensor]] = {}
        # Blocks of other ranks too: all ranks create all groups.
        neighbours = {key: mesh.make_block_axis(*key) for key in table.list_partial_blocks(mesh.layout)}
        for unit in units:
            for part, low, high in unit.flat.find_slices(unit.start, unit.stop):
                if part.partial:
                    view = unit.gradient[low - unit.start : high - unit.start]
                    views.setdefault((part.axis, part.copies), []).append(view)
        self._groups = [
            (neighbours[key], GRADIENT_SITE if key[1] == getattr(mesh, key[0]).size else SHARED_HEADS_SITE, found)
            for key, found in views.items()
        ]

    def all_reduce(self) -> None:
        """Replace this rank's partial gradients by their sums over the ranks that hold the same parameters, in
        place."""
        in_flight = []
        for axis, site, views in self._groups:
            together = torch.cat(views)
            in_flight.append((all_reduce(together, axis, site, async_op=True), together, views))
        for handle, together, views in in_flight:
            handle.wait()
            for view, total in zip(views, together.split([view.numel() for view in views]), strict=True):
                view.copy_(total)
