"""Data of collective calls between emulated ranks: each rank's tensors, and the results that each rank receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import _disable_current_modes

Tensors = Sequence[torch.Tensor]

REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@dataclass(slots=True)
class RankCall:
    """One rank's communication call: its tensors and its description.

    Attributes:
        inputs: Tensors that the rank sends.
        outputs: Tensors that receive the call's results.
        shown: Tensor whose dtype and shape are printed in reports, None if the call has no tensor.
        form: Text (root, reduction, shape) that must be equal on all ranks of a collective call.
        sliced: True if the inputs are consecutive slices of one tensor. The slices are then reduced as one vector,
            because the order of additions depends on an element's index in the vector.
        place: File and line of the call.
        number: Position among the rank's calls, from 1.
    """

    inputs: Tensors
    outputs: Tensors
    shown: torch.Tensor | None
    form: str = ""
    sliced: bool = False
    place: str = ""
    number: int = 0


# A real backend copies and adds outside PyTorch's dispatcher. Here the last rank to call does it for all ranks, and its
# dispatch modes (such as that of selective activation checkpointing) must not see these operations.
unseen_by_modes = _disable_current_modes


@unseen_by_modes()
def copy_results(outputs: Tensors, results: Tensors) -> None:
    """Copy results[i] of a call into its output tensor outputs[i], without recording the copies in autograd (a real
    backend does not record them either). A result and its output may differ in shape, but must have equally many
    elements (else ValueError)."""
    for output, result in zip(outputs, results, strict=True):
        if output.numel() != result.numel():
            raise ValueError(f"a result of shape {list(result.shape)} does not fit into {list(output.shape)}")
        output.data.copy_(result.view(output.shape))


def name_reduction(op: ReduceOp | ReduceOp.RedOpType) -> str:
    """Return the name of the reduction `op`, such as "SUM". Raises NotImplementedError for a reduction that is not
    emulated.
    """
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name not in REDUCTIONS:
        raise NotImplementedError(f"reduction {name} is not emulated (known: {', '.join(REDUCTIONS)})")
    return name


SEGMENT_BYTES = 2**20  # gloo's largest segment of a ring all-reduce


def _reduce(inputs: Sequence[Tensors], op: str) -> list[torch.Tensor]:
    """Return the elementwise reductions over the ranks of `inputs`, [rank][tensor], one for each tensor. op: name of
    the reduction, such as "SUM".

    The additions have the order of gloo's ring all-reduce (gloo/allreduce.cc), so that sums have the same bits as with
    gloo: all tensors of a rank are one vector, which is cut into n parts for n ranks; part p is summed over the ranks p
    - 1, p - 2, ..., p (modulo n), in this order.
    """
    vectors = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in inputs]
    ranks, itemsize = len(vectors), vectors[0].itemsize
    segments = max(-(-vectors[0].nbytes // SEGMENT_BYTES), 2 * ranks)
    per_rank = -(-segments // ranks)
    size = per_rank * -(-vectors[0].nbytes // (per_rank * ranks * itemsize))
    total = torch.empty_like(vectors[0])
    for part in range(ranks):
        pieces = [vectors[(part - 1 - hop) % ranks][part * size : (part + 1) * size] for hop in range(ranks)]
        total[part * size : (part + 1) * size] = reduce(REDUCTIONS[op], pieces)
    if op == "AVG":
        total = total / ranks
    sizes = [tensor.numel() for tensor in inputs[0]]
    return [piece.clone().view(tensor.shape) for piece, tensor in zip(total.split(sizes), inputs[0], strict=True)]


@unseen_by_modes()
@torch.no_grad()
def compute_results(operation: str, calls: Sequence[RankCall], op: str, root: int) -> list[list[torch.Tensor]]:
    """Compute the results of a collective call. Return tensors, [rank in group][output], that share no memory with the
    inputs.

    operation: name of the collective, such as "all_reduce". calls: [rank in group], the calls of the process group's
    ranks with their tensors. op: name of the reduction, such as "SUM". root: rank in the group of the root; ignored by
    operations without a root."""
    inputs = [[tensor.detach() for tensor in call.inputs] for call in calls]
    ranks = range(len(calls))
    if operation == "barrier":
        return [[] for _ in ranks]
    if operation in ("all_reduce", "reduce"):
        totals = _reduce(inputs, op)
        return [totals if operation == "all_reduce" or rank == root else [] for rank in ranks]
    if operation == "reduce_scatter":
        if calls[0].sliced:
            return [[total] for total in _reduce(inputs, op)]
        return [_reduce([[tensors[rank]] for tensors in inputs], op) for rank in ranks]  # gloo reduces one by one
    copies = [[tensor.clone() for tensor in tensors] for tensors in inputs]
    if operation == "broadcast":
        return [copies[root] for _ in ranks]
    if operation == "all_gather":
        return [[copy[0] for copy in copies] for _ in ranks]
    if operation == "gather":
        return [[copy[0] for copy in copies] if rank == root else [] for rank in ranks]
    if operation == "scatter":
        return [[copies[root][rank]] for rank in ranks]
    assert operation == "all_to_all", operation
    return [[copies[source][rank] for source in ranks] for rank in ranks]
