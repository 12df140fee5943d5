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

    inputs: tensors that the rank sends. outputs: tensors that receive the call's results. shown: tensor whose dtype and
    shape are printed in reports, None if the call has no tensor. form: text (root, reduction, shape) that must be equal
    on all ranks of a collective call. place: file and line of the call. number: position among the rank's calls, from
    1.
    """

    inputs: Tensors
    outputs: Tensors
    shown: torch.Tensor | None
    form: str = ""
    place: str = ""
    number: int = 0


# A real backend copies and adds outside PyTorch's dispatcher. Here the last rank to call does it for all ranks, and its
# dispatch modes (such as that of selective activation checkpointing) must not see these operations.
unseen_by_modes = _disable_current_modes


@unseen_by_modes()
def copy_results(outputs: Tensors, results: Tensors) -> None:
    """Copy a call's results into its output tensors without recording the copy in autograd, as a real backend writes
    them. A result and its output may differ in shape, but must have equally many elements (else ValueError)."""
    for output, result in zip(outputs, results, strict=True):
        if output.numel() != result.numel():
            raise ValueError(f"a result of shape {list(result.shape)} does not fit into {list(output.shape)}")
        output.data.copy_(result.view(output.shape))


def name_reduction(op: ReduceOp | ReduceOp.RedOpType) -> str:
    """Return the name of a reduction, such as "SUM". Raises NotImplementedError for one that is not emulated."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name not in REDUCTIONS:
        raise NotImplementedError(f"reduction {name} is not emulated (known: {', '.join(REDUCTIONS)})")
    return name


def _reduce(tensors: Tensors, op: str) -> torch.Tensor:
    """Return the reduction of `tensors`, one per rank, computed in rank order. op: name such as "SUM"."""
    total = reduce(REDUCTIONS[op], tensors) if len(tensors) > 1 else tensors[0].clone()
    return total / len(tensors) if op == "AVG" else total


@unseen_by_modes()
@torch.no_grad()
def compute_results(operation: str, calls: Sequence[RankCall], op: str, root: int) -> list[list[torch.Tensor]]:
    """Compute the results of a collective call; return tensors [rank in group][output] that share no memory with the
    inputs.

    operation: such as "all_reduce". calls: [rank in group], the calls of the process group's ranks with their tensors.
    op: name of the reduction, such as "SUM". root: rank in the group, for operations that have one.
    """
    inputs = [[tensor.detach() for tensor in call.inputs] for call in calls]
    ranks = range(len(calls))
    if operation == "barrier":
        return [[] for _ in ranks]
    if operation in ("all_reduce", "reduce"):
        totals = [_reduce(tensors, op) for tensors in zip(*inputs, strict=True)]
        return [totals if operation == "all_reduce" or rank == root else [] for rank in ranks]
    if operation == "reduce_scatter":
        # A rank's own part first, the order in which comm/ sums.
        orders = [[rank, *(other for other in ranks if other != rank)] for rank in ranks]
        return [[_reduce([inputs[source][rank] for source in order], op)] for rank, order in enumerate(orders)]
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
