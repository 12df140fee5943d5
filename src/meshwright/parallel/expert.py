"""Expert parallelism: experts are split over ranks, and a token dispatcher sends each token to its experts and back.

Idea: each rank of ep holds E / ep experts and routes its own tokens; an all-to-all dispatches every copy of a token to
the rank that holds its expert, another combines the results (GShard, Lepikhin et al. 2020, arXiv:2006.16668, section
3.2; Switch Transformer, Fedus et al. 2021, arXiv:2101.03961, section 2.4). Dispatch is dropless: there is no capacity
and no padding, experts multiply groups of tokens of any size (MegaBlocks, Gale et al. 2022, arXiv:2211.15841).
Expert tensor parallelism: ranks of etp hold 1 / etp of each expert's width, gather what they received, and reduce-
scatter the partial sums of their products.
Mathematics: y_t = sum over the experts e of token t of w_te f_e(x_t). The copies of all tokens, sorted by expert, are a
permutation of rows; dispatch moves them, combine is its inverse, and the gradient of either is the other.
Communication: ranks first exchange how many copies go where, because message sizes differ in every step; a rank that
receives none still takes part in every call. The host reads these numbers once a layer, in forward alone: recompute
takes the routes of forward.
Overlap: while the copies travel, in forward and in backward, the shared expert, if there is one, is computed; combine
is waited for at once.

Shapes: N copies of this rank's tokens, sorted by expert; R copies that its experts get; H hidden; E experts, L = E / ep
of them held here; P ranks of ep, G of etp.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import torch

from meshwright.comm import collectives, operators
from meshwright.comm.mesh import Axis
from meshwright.errors import RanksDisagree
from meshwright.model.axis_operations import Meanwhile, do_nothing
from meshwright.model.permutation import Permuted, invert_permutation
from meshwright.parallel.recompute import compute_once, discard

COUNTS_SITE = "experts.counts"
KEYS_SITE = "experts.keys"


class Routes(NamedTuple):
    """Numbers of token copies in one expert-parallel dispatch (a token has one copy for each of its experts).

    `sent`: copies that this rank sends to each ep rank. `received`: copies that this rank receives from each ep rank.
    `shared`: copies that each etp rank has received over ep, and that the etp ranks then all-gather. `counts_GPL[g, p,
    l]`: copies for local expert l that etp rank g has received from ep rank p."""

    sent: list[int]
    received: list[int]
    shared: list[int]
    counts_GPL: torch.Tensor


Dispatched = tuple[Routes, torch.Tensor, torch.Tensor]
"""State of a dispatch that `combine` needs: numbers of token copies sent and received, the permutation that sorted the
R received copies by expert, and its inverse."""


class AllToAllTokenDispatcher:
    """All-to-all token dispatcher of one rank (implements `model.axis_operations.TokenDispatcher`).

    `ep`: mesh axis of the ranks that hold different experts; `etp`: mesh axis of the ranks that each hold a slice of
    the width of the same experts."""

    def __init__(self, ep: Axis, etp: Axis) -> None:
        self.ep = ep
        self.etp = etp
        self.expert_ranks = ep.size
        self.width_ranks = etp.size
        self.width_rank = etp.rank

    def dispatch(
        self, x_NH: torch.Tensor, ends_E: torch.Tensor, meanwhile: Meanwhile = do_nothing
    ) -> tuple[torch.Tensor, torch.Tensor, Dispatched]:
        """Send token copies to the ranks of their experts (a token has one copy for each of its experts). Return
        (received copies [R, H], sorted by local expert; exclusive end index of each local expert's copies, int32
        [experts on this rank]; state that `combine` needs), for R received copies of hidden size H.

        `x_NH`: the N copies of this rank's tokens, sorted by expert. `ends_E`: index in `x_NH` at which the copies of
        each expert end (exclusive). `meanwhile`: called while the copies are in flight; its backward overlaps with that
        of the dispatch."""
        routes = compute_once(lambda: self._agree_on_routes(ends_E))
        token = operators.launch_rows(x_NH, self.ep, "experts.dispatch", routes.sent, routes.received)
        meanwhile()
        x_RH = operators.wait_for_rows(token, self.ep, "experts.dispatch", routes.sent, x_NH.shape[1], routes.received)
        x_RH = operators.gather_rows(x_RH, self.etp, "experts.gather", routes.shared)

        held = routes.counts_GPL.shape[2]
        expert_GPL = torch.arange(held, device=x_NH.device).repeat(self.etp.size * self.ep.size)
        expert_R = expert_GPL.repeat_interleave(routes.counts_GPL.flatten(), output_size=sum(routes.shared))
        order_R = expert_R.argsort(stable=True)
        inverse_R = invert_permutation(order_R)
        ends_L = routes.counts_GPL.sum(dim=(0, 1)).cumsum(0, dtype=torch.int32)
        return Permuted.apply(x_RH, order_R, inverse_R, None), ends_L, (routes, order_R, inverse_R)

    def dispatch_keys(self, keys_N: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Send the random-number keys of token copies, which determine dropout masks in adapters, to the ranks of the
        copies' experts, as `dispatch` does with the copies. Return the keys of the R copies that this rank received,
        [R], sorted by local expert.

        `keys_N`: one integer for each of the N copies of this rank's tokens, sorted by expert; `dispatched`: third
        result of `dispatch`."""
        routes, order_R, _ = dispatched
        keys_R = operators.all_to_all_rows(keys_N[:, None], self.ep, KEYS_SITE, routes.sent, routes.received)
        return operators.gather_rows(keys_R, self.etp, KEYS_SITE, routes.shared)[order_R, 0]

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Send expert outputs back to the ranks of their tokens; outputs are summed over the etp ranks that split an
        expert's width. Return the outputs for this rank's N token copies, [N, H] with hidden size H, in the order in
        which they were dispatched.

        `y_RH`: outputs of this rank's experts for the R copies received. `dispatched`: third result of `dispatch`."""
        routes, order_R, inverse_R = dispatched
        y_RH = Permuted.apply(discard(y_RH), inverse_R, order_R, None)  # backward reads what the tokens' ranks receive
        y_RH = operators.reduce_scatter_rows(y_RH, self.etp, "experts.sum", routes.shared)
        y_RH = y_RH if self.ep.trivial else discard(y_RH)
        return operators.all_to_all_rows(y_RH, self.ep, "experts.combine", routes.received, routes.sent)

    def _agree_on_routes(self, ends_E: torch.Tensor) -> Routes:
        """Exchange the numbers of token copies before a dispatch; return them as `Routes`. First the ep ranks exchange
        the numbers of copies that they send to each expert. Then the etp ranks exchange the numbers of copies that they
        have received.

        `ends_E`: exclusive end index of each expert's copies on this rank. Raises RanksDisagree if a checksum is wrong.
        """
        counts_PL = ends_E.long().diff(prepend=ends_E.new_zeros(1)).view(self.ep.size, -1)
        arriving_PL, wrong_P = self._share_counts(counts_PL, self.ep)
        counts_GX, wrong_G = self._share_counts(arriving_PL.reshape(1, -1).expand(self.etp.size, -1), self.etp)
        counts_GPL = counts_GX.reshape(self.etp.size, *counts_PL.shape)
        sums = counts_PL.sum(dim=1), arriving_PL.sum(dim=1), counts_GPL.sum(dim=(1, 2))
        sent, received, shared, from_ep, from_etp = read_on_host(*sums, wrong_P, wrong_G)
        for axis, wrong in ((self.ep, from_ep), (self.etp, from_etp)):
            if any(wrong):
                senders = ", ".join(str(rank) for rank, bad in zip(axis.ranks, wrong, strict=True) if bad)
                raise RanksDisagree(
                    f"rank {axis.ranks[axis.rank]} received token counts of another call from rank {senders}, in "
                    f"{COUNTS_SITE} (axis {axis.name}): the ranks are out of step"
                )
        return Routes(sent, received, shared, counts_GPL)

    def _share_counts(self, counts: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange integer counts over an axis by an all-to-all: row i of `counts` [ranks, columns] is sent to rank i.
        Return (received counts [ranks, columns], row i from rank i; error flags [ranks], 0 where the checksum of the
        row is right).

        The checksum shows whether a row is intact, belongs to this call, and has the right sender and receiver. (With
        wrong counts, ranks would hang or read data that was never sent.)"""
        if axis.trivial:
            return counts, counts.new_zeros(1)
        # The number of this group's next call, equal on all of its ranks, and one for each sender and receiver.
        call = ((axis.communicator.calls.count_calls(axis.recorder_group) + 1) << 40) + (axis.ranks[0] << 20)
        pairs = torch.arange(axis.size**2, device=counts.device).view(axis.size, -1)
        signed = torch.cat([counts, -(counts.sum(dim=1) + call + pairs[axis.rank])[:, None]], dim=1)
        received = torch.zeros_like(signed)
        collectives.all_to_all(received, signed, axis, COUNTS_SITE)
        return received[:, :-1].contiguous(), received.sum(dim=1) + call + pairs[:, axis.rank]


def read_on_host(*vectors: torch.Tensor) -> list[list[int]]:
    """Return the numbers in the integer `vectors` as lists. All vectors are copied to the host at once, so that the
    host waits for the device only once."""
    numbers = iter(torch.cat(vectors).tolist())
    return [list(islice(numbers, len(each))) for each in vectors]
