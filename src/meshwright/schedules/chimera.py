"""Chimera: two pipelines in opposite directions, each of which computes in the other's bubbles."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.program.pipeline import Builder, Kind, PipelineProgram, place_cyclically


def chimera(ranks: int, micro_batches: int, forward_doubling: bool = False) -> PipelineProgram:
    """Generate the Chimera pipeline schedule: two pipelines in opposite directions, each of which computes in the
    other's bubbles (Li, Hoefler, SC 2021, arXiv 2107.06925, section 3.1; more micro-batches than ranks: section 3.5).

    Replica 0 of the model runs down the ranks, replica 1 up. Time is divided into slots of one forward or one backward:
    the i-th micro-batch of a direction enters at slot 2i, advances one stage per slot, turns at the last stage and
    returns. As the number of ranks is even, the two directions use a rank in slots of different parity and never
    collide. ranks/2 micro-batches per direction form a unit; units follow each other without idle slots (direct
    concatenation). Ranks and micro-batches must be even (`UserError`).

    forward_doubling: True if a slot holds two forwards or one backward; suits backwards that take as long as two
    forwards. A unit then has twice as many micro-batches. The paper runs the two forwards as one batch; here they are
    separate steps, and the first is sent while the second is computed.

    Costs, for N >= D micro-batches in whole units on D ranks (table 2 of the paper):
    - bubble ratio: (D-2) / (2N+D-2) if a backward takes as long as a forward. If as long as two forwards:
      (D-2) / (3N/2+D-2) for N = D; with more units ranks wait at every unit boundary; (D-2) / (2N+D-2) with forward
      doubling
    - peak activations: D/2 + 1 micro-batches on the outer ranks to D on the inner ranks; with forward doubling 3D/2 + 1
      to 2D
    - weight copies: 2
    - transfers: as many as 1F1B"""
    if ranks < 2 or ranks % 2:
        raise UserError(f"chimera on {ranks} ranks: the number of ranks must be even")
    if micro_batches < 2 or micro_batches % 2:
        raise UserError(
            f"chimera with {micro_batches} micro-batches: half of them run in each direction; the number must be even"
        )
    placement = (place_cyclically(ranks), tuple(reversed(place_cyclically(ranks))))
    program = Builder("chimera", ranks, micro_batches, placement)
    half, a_slot = micro_batches // 2, 2 if forward_doubling else 1
    for rank in program.ranks:
        steps: list[tuple[int, int, Kind, int, int]] = []  # slot, micro-batch, kind, stage, replica
        for replica, (stage,) in enumerate(rank.stages):
            for i in range(half):
                unit, place = divmod(i, a_slot * ranks // 2)
                begins = unit * (1 + a_slot) * ranks
                forward = begins + 2 * (place // a_slot) + stage
                backward = begins + 2 * place + 2 * ranks - 1 - stage
                micro_batch = i + half * replica
                steps.append((forward, micro_batch, Kind.FORWARD, stage, replica))
                steps.append((backward, micro_batch, Kind.BACKWARD, stage, replica))
        for _, micro_batch, kind, stage, replica in sorted(steps):
            rank.add(kind, micro_batch, stage, replica)
    return program.build()
