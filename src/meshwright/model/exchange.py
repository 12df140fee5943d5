"""Expert parallelism inside a layer: tokens travel to the ranks that hold their experts, and the results come back.

Each rank holds E / ep experts, and of each of them its columns (1 / etp of its width). A rank sends every copy of its
tokens to the rank of ep that holds the expert (GShard, Lepikhin et al. 2020, arXiv:2006.16668, section 3.2); ranks of
etp share what they received, each multiplies its columns, and the parts are summed on the way back. How many tokens go
where is agreed on before each exchange: nothing is dropped, nothing filled up, and a rank that gets none takes part in
every call all the same.

Shapes: N copies of this rank's tokens, sorted by expert; R copies that its experts get; H hidden; E experts, L = E / ep
of them held here; P ranks of ep, G of etp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from meshwright.comm import collectives
from meshwright.comm.mesh import Axes, Axis
from meshwright.comm.operators import exchange, gather_rows, reduce_scatter_rows
from meshwright.errors import RanksDisagree

COUNTS_SITE = "experts.counts"


class Routes(NamedTuple):
    """How many rows go where in one exchange. `sent`, `received`: to and from each rank of ep; `shared`: what each rank
    of etp received; `counts_GPL`: rows by rank of etp, rank of ep and held expert."""

    sent: list[int]
    received: list[int]
    shared: list[int]
    counts_GPL: torch.Tensor


class Exchange:
    """What `compute` does to rows that are sorted by expert, done where the experts are."""

    def __init__(self, experts: int, axes: Axes) -> None:
        self.ep, self.etp = axes.ep, axes.etp
        self.held = experts // self.ep.size

    def __call__(
        self,
        x_NH: torch.Tensor,
        ends_E: torch.Tensor,
        compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """`compute(x_RH, ends_L)` for rows that are sorted by held expert; `ends_E`, `ends_L`: where an expert's rows
        end."""
        routes = self._agree(ends_E)
        x_RH = exchange(x_NH, self.ep, "experts.dispatch", routes.sent, routes.received)
        x_RH = gather_rows(x_RH, self.etp, "experts.gather", routes.shared)

        expert_GPL = torch.arange(self.held, device=x_NH.device).repeat(self.etp.size * self.ep.size)
        expert_R = expert_GPL.repeat_interleave(routes.counts_GPL.flatten(), output_size=sum(routes.shared))
        order_R = expert_R.argsort(stable=True)
        inverse_R = inverse(order_R)
        ends_L = routes.counts_GPL.sum(dim=(0, 1)).cumsum(0, dtype=torch.int32)
        y_RH = compute(Permuted.apply(x_RH, order_R, inverse_R), ends_L)
        y_RH = Permuted.apply(y_RH, inverse_R, order_R)

        y_RH = reduce_scatter_rows(y_RH, self.etp, "experts.sum", routes.shared)
        return exchange(y_RH, self.ep, "experts.combine", routes.received, routes.sent)

    def _agree(self, ends_E: torch.Tensor) -> Routes:
        """Tell every rank of ep how many rows it will get for which expert, and every rank of etp what came."""
        counts_PL = ends_E.long().diff(prepend=ends_E.new_zeros(1)).view(self.ep.size, self.held)
        arriving_PL = self._told(counts_PL, self.ep)
        counts_GPL = self._told(arriving_PL.reshape(1, -1), self.etp).reshape(self.etp.size, self.ep.size, self.held)
        sent, received, shared = torch.cat(
            [counts_PL.sum(dim=1), arriving_PL.sum(dim=1), counts_GPL.sum(dim=(1, 2))]
        ).split([self.ep.size, self.ep.size, self.etp.size])
        return Routes(sent.tolist(), received.tolist(), shared.tolist(), counts_GPL)

    def _told(self, counts: torch.Tensor, axis: Axis) -> torch.Tensor:
        """What the ranks of an axis tell this one: row i of everybody's `counts` goes to rank i, a single row to all.

        Each row has one more column, by which a receiver knows that it is whole, of this call, and from whom and for
        whom: ranks that believed wrong sizes would wait for ever or read what was never sent."""
        if axis.trivial:
            return counts
        # Of all calls of these ranks: the same number on all of them.
        number = (axis.communicator.calls.count(axis.calls_group) + 1) << 40
        ranks, mine = counts.new_tensor(axis.ranks), axis.ranks[axis.rank]
        to_all = len(counts) == 1
        signature = number + (mine << 20) + (ranks[:1] if to_all else ranks)
        signed = torch.cat([counts, (-counts.sum(dim=1) - signature)[:, None]], dim=1)
        told = signed.new_zeros(axis.size, signed.shape[1])
        if to_all:
            collectives.all_gather(told, signed, axis, COUNTS_SITE)
        else:
            collectives.all_to_all(told, signed, axis, COUNTS_SITE)
        expected = number + (ranks << 20) + (axis.ranks[0] if to_all else mine)
        wrong = told.sum(dim=1) != -expected
        if bool(wrong.any()):
            senders = ", ".join(str(axis.ranks[place]) for place in wrong.nonzero().flatten().tolist())
            raise RanksDisagree(
                f"rank {axis.ranks[axis.rank]} got from rank {senders} numbers of tokens that are not those of this "
                f"call, in {COUNTS_SITE} (axis {axis.name}): the ranks are not at the same place"
            )
        return told[:, :-1]


def stay_out_of_graphs() -> None:
    """Have compiled graphs leave exchanges out: what goes where is known only when they run. To be called before
    anything is compiled, and not sooner: it loads the compiler, over a second."""
    if not _disabled:
        Exchange.__call__ = torch.compiler.disable(Exchange.__call__)  # type: ignore[method-assign]
        _disabled.append(True)


_disabled: list[bool] = []


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Permuted(torch.autograd.Function):
    """x[order]. The way back is a gather too, by the inverse: no sum in an order that nobody fixes."""

    @staticmethod
    def forward(context: Any, x_NH: torch.Tensor, order_N: torch.Tensor, inverse_N: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(inverse_N)
        return x_NH.index_select(0, order_N)

    @staticmethod
    def backward(context: Any, d_NH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse_N,) = context.saved_tensors
        return d_NH.index_select(0, inverse_N), None, None
