"""GEMS: two model replicas in opposite directions, with at most two micro-batches in flight."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.program.pipeline import Builder, PipelineProgram, place_cyclically


def gems(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the GEMS-MAST pipeline schedule: two replicas in opposite directions, at most two micro-batches in
    flight.

    Jain et al., SC 2020: GPU-Enabled Memory-Aware Model-Parallelism System, "memory-aware synchronized training".
    Replica 0 runs from rank 0 to the last rank, replica 1 from the last rank to rank 0. A backward travels against the
    direction of its forward, and so in the direction of the other replica's next forward, which follows the backward
    from rank to rank. The number of micro-batches must be even (`UserError`).

    Costs, for N micro-batches and D ranks:
    - bubble: a ratio of about (D-1) / (D+1/2) if a backward takes as long as two forwards (Li, Hoefler, arXiv
    2107.06925, table 2), (D-1) / (D+1) if it takes as long as one forward
    - peak activations: 1 micro-batch
    - weight copies: 2
    - transfers: as many as 1F1B
    """
    if micro_batches < 2 or micro_batches % 2:
        raise UserError(
            f"gems with {micro_batches} micro-batches: half of them run in each direction; the number must be even"
        )
    placement = (place_cyclically(ranks), tuple(reversed(place_cyclically(ranks))))
    program = Builder("gems", ranks, micro_batches, placement)
    half = micro_batches // 2
    for rank in program.ranks:
        for i in range(half):
            for replica in (0, 1):
                rank.forward(i + half * replica, replica=replica)
                rank.backward(i + half * replica, replica=replica)
    return program.build()
