"""Expert parallelism: experts are split over ranks, and a token dispatcher sends each token to its experts and back.

Idea: each rank of ep holds E / ep experts and routes its own tokens; an all-to-all dispatches every copy of a token to
the rank that holds its expert, another combines the results (GShard, Lepikhin et al. 2020, arXiv:2006.16668, section
3.2; Switch Transformer, Fedus et al. 2021, arXiv:2101.03961, section 2.4). Dispatch is dropless: there is no capacity
and no padding, experts multiply groups of rows of any size (MegaBlocks, Gale et al. 2022, arXiv:2211.15841).
Expert tensor parallelism: ranks of etp hold 1 / etp of each expert's width, gather what they received, and reduce-
scatter the partial sums of their products.
Communication: ranks first exchange how many rows go where, because message sizes differ in every step; a rank that gets
none takes part in every call all the same.

Shapes: N copies of this rank's tokens, sorted by expert; R copies that its experts get; H hidden; E experts, L = E / ep
of them held here; P ranks of ep, G of etp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshwright.comm import collectives
from meshwright.comm.mesh import Axis
from meshwright.comm.operators import exchange, gather_rows, reduce_scatter_rows
from meshwright.errors import RanksDisagree
from meshwright.model.permutation import Permuted, invert_permutation

COUNTS_SITE = "experts.counts"


class Routes(NamedTuple):
    """Row counts of one dispatch. `sent`, `received`: rows to and from each rank of ep; `shared`: rows that each rank
    of etp received; `counts_GPL`: rows by rank of etp, rank of ep and local expert."""

    sent: list[int]
    received: list[int]
    shared: list[int]
    counts_GPL: torch.Tensor


class Dispatched(NamedTuple):
    """State that `combine` needs of a dispatch: its routes, and the permutation that sorted received rows by expert,
    with its inverse."""

    routes: Routes
    order_R: torch.Tensor
    inverse_R: torch.Tensor


class AllToAllTokenDispatcher:
    """All-to-all token dispatcher of one rank (implements `model.axis_operations.TokenDispatcher`)."""

    def __init__(self, ep: Axis, etp: Axis) -> None:
        self.ep, self.etp = ep, etp
        self.expert_ranks, self.width_ranks = ep.size, etp.size

    def dispatch(self, x_NH: torch.Tensor, ends_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Dispatched]:
        """Send token copies `x_NH`, sorted by expert (expert e ends at index `ends_E[e]`), to the ranks of their
        experts. Return the received copies [R, H] sorted by local expert, the end index of each, and the state for
        `combine`."""
        routes = self._agree_on_routes(ends_E)
        x_RH = exchange(x_NH, self.ep, "experts.dispatch", routes.sent, routes.received)
        x_RH = gather_rows(x_RH, self.etp, "experts.gather", routes.shared)

        held = routes.counts_GPL.shape[2]
        expert_GPL = torch.arange(held, device=x_NH.device).repeat(self.etp.size * self.ep.size)
        expert_R = expert_GPL.repeat_interleave(routes.counts_GPL.flatten(), output_size=sum(routes.shared))
        order_R = expert_R.argsort(stable=True)
        inverse_R = invert_permutation(order_R)
        ends_L = routes.counts_GPL.sum(dim=(0, 1)).cumsum(0, dtype=torch.int32)
        return Permuted.apply(x_RH, order_R, inverse_R), ends_L, Dispatched(routes, order_R, inverse_R)

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Return expert outputs `y_RH` to the ranks of their tokens: [N, H] in the order before `dispatch`."""
        routes, order_R, inverse_R = dispatched
        y_RH = Permuted.apply(y_RH, inverse_R, order_R)
        y_RH = reduce_scatter_rows(y_RH, self.etp, "experts.sum", routes.shared)
        return exchange(y_RH, self.ep, "experts.combine", routes.received, routes.sent)

    def _agree_on_routes(self, ends_E: torch.Tensor) -> Routes:
        """Exchange the row counts by expert over ep, and the counts of received rows over etp; return the routes."""
        counts_PL = ends_E.long().diff(prepend=ends_E.new_zeros(1)).view(self.ep.size, -1)
        arriving_PL = self._share_counts(counts_PL, self.ep)
        counts_GPL = self._share_counts(arriving_PL.reshape(1, -1), self.etp).reshape(self.etp.size, *counts_PL.shape)
        sent, received, shared = torch.cat(
            [counts_PL.sum(dim=1), arriving_PL.sum(dim=1), counts_GPL.sum(dim=(1, 2))]
        ).split([self.ep.size, self.ep.size, self.etp.size])
        return Routes(sent.tolist(), received.tolist(), shared.tolist(), counts_GPL)

    def _share_counts(self, counts: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Return the counts that each rank of the axis sends to this one, one tensor row per sender: row i of `counts`
        goes to rank i, a single row to all ranks.

        A checksum column verifies that each row is intact, of this call, and its sender and receiver: with wrong sizes
        ranks would hang or read data that was never sent. Raises RanksDisagree.
        """
        if axis.trivial:
            return counts
        # Of all calls of these ranks: the same number on all of them.
        number = (axis.communicator.calls.count(axis.calls_group) + 1) << 40
        ranks, mine = counts.new_tensor(axis.ranks), axis.ranks[axis.rank]
        to_all = len(counts) == 1
        signature = number + (mine << 20) + (ranks[:1] if to_all else ranks)
        signed = torch.cat([counts, (-counts.sum(dim=1) - signature)[:, None]], dim=1)
        received = signed.new_zeros(axis.size, signed.shape[1])
        if to_all:
            collectives.all_gather(received, signed, axis, COUNTS_SITE)
        else:
            collectives.all_to_all(received, signed, axis, COUNTS_SITE)
        expected = number + (ranks << 20) + (axis.ranks[0] if to_all else mine)
        wrong = received.sum(dim=1) != -expected
        if bool(wrong.any()):
            senders = ", ".join(str(axis.ranks[place]) for place in wrong.nonzero().flatten().tolist())
            raise RanksDisagree(
                f"rank {axis.ranks[axis.rank]} got from rank {senders} numbers of tokens that are not those of this "
                f"call, in {COUNTS_SITE} (axis {axis.name}): the ranks are not at the same place"
            )
        return received[:, :-1]
