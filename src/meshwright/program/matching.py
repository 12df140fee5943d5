"""Matching of sends with receives and the posting order of both kinds of programs, with errors that name the steps."""

from __future__ import annotations

import numpy as np

from meshwright.program.columns import StepProgram
from meshwright.program.order import (
    Deadlock,
    Integers,
    Mask,
    PostingOrder,
    ProgramError,
    UnmatchedTransfer,
    find_posting_order,
    match_transfers,
)


def match_steps(program: StepProgram, peer: Integers, is_send: Mask, is_receive: Mask) -> tuple[Integers, Integers]:
    """Match the k-th send from one rank to another with the k-th receive between them, for all pairs of ranks; return
    (step indices of the sends, step indices of their receives): [transfers] each.

    program: collective program or pipeline schedule. peer: [steps], rank at the other end of each transfer. is_send,
    is_receive: [steps], True for sends and receives. Raises `ProgramError`, which states the numbers of sends and
    receives, for a step without a counterpart.
    """
    rank = program.steps.rank
    try:
        return match_transfers(rank, peer, is_send, is_receive)
    except UnmatchedTransfer as error:
        unmatched = error
    own, other = rank[unmatched.step], peer[unmatched.step]
    counterpart, source, target = ("receive", own, other) if unmatched.is_send else ("send", other, own)
    sends = int((is_send & (rank == source) & (peer == target)).sum())
    receives = int((is_receive & (rank == target) & (peer == source)).sum())
    counts = f"from rank {source} to {target}: {sends} sends, {receives} receives"
    raise program.make_error(unmatched.step, f"rank {other} has no {counterpart} for it ({counts})")


def order_steps(program: StepProgram, sends: Integers, receives: Integers) -> PostingOrder:
    """Return an order in which all groups (steps that a rank posts together) can be posted even if every send blocks
    until its receive is posted. Raises `ProgramError` for a deadlock.

    program: collective program or pipeline schedule. sends, receives: [transfers], step indices of matched sends and
    receives."""
    s = program.steps
    try:
        return find_posting_order(s.group_rank, s.group_index[sends], s.group_index[receives])
    except Deadlock as deadlock:
        cycle = deadlock.groups
    partner = np.full(len(s), -1)
    partner[sends], partner[receives] = receives, sends
    waits = []
    for group, awaited in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        if s.group_rank[group] != s.group_rank[awaited]:  # the group before it has a transfer with the awaited group
            before = np.flatnonzero(s.group_index == group - 1)
            step = int(before[s.group_index[partner[before]] == awaited][0])
            waits.append((step, int(partner[step])))
    raise make_deadlock_error(program, "deadlock with blocking sends", waits)


def make_deadlock_error(program: StepProgram, reason: str, waits: list[tuple[int, int]]) -> ProgramError:
    """Return the error for ranks of `program` that wait for each other in a cycle. The message has `reason`, the step
    in which each rank waits, and the step for which it waits, from the lowest rank on.

    waits: pairs of step indices (waiting step, awaited step) in the order of the cycle.
    """
    first = waits.index(min(waits))
    texts = [
        f"{program.locate(step)} waits for {program.locate(awaited)}" for step, awaited in waits[first:] + waits[:first]
    ]
    if len(texts) > 8:
        texts = [*texts[:4], f"and {len(texts) - 8} more", *texts[-4:]]
    return program.make_error(waits[first][0], f"{reason}: " + "; ".join(texts))
