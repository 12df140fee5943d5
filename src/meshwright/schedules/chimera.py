"""Chimera: two pipelines in opposite directions, each of which computes in the gaps that the other leaves."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.program.pipeline import Builder, Kind, PipelineProgram, straight


def chimera(ranks: int, micro_batches: int) -> PipelineProgram:
    """Chimera (Li, Hoefler, SC 2021, arXiv 2107.06925, sections 3.1 and 3.2; more micro-batches than ranks: by direct
    concatenation, section 3.5).

    Replica 0 runs down the ranks, replica 1 up. In slots of one forward or one backward, the i-th micro-batch of a
    direction enters at slot 2i, goes on by a stage a slot, turns at the last stage and comes back. As the number of
    ranks is even, one direction meets a rank in even slots where the other meets it in odd ones: they never collide.
    ranks/2 micro-batches a direction make a unit; a unit starts 2 x ranks slots after the one before. Ranks and
    micro-batches must be even (`UserError`).

    Costs, for N micro-batches and D ranks (table 2 of the paper):
    - bubble: D - 2 slots, a ratio of (D-2) / (2N+D-2) where a backward takes as long as a forward. Where it takes
      longer, the joints between units wait too; the paper's forward doubling avoids that for twice the activations
    - peak activations: D/2 + 1 micro-batches on the outer ranks to D on the inner ones, for N >= D
    - weight copies: 2
    - transfers: those of 1F1B
    """
    if ranks < 2 or ranks % 2:
        raise UserError(f"chimera on {ranks} ranks: it pairs the ranks from both ends; take an even number of ranks")
    if micro_batches < 2 or micro_batches % 2:
        raise UserError(
            f"chimera with {micro_batches} micro-batches: half of them run in each direction; take an even number"
        )
    placement = (straight(ranks), tuple(reversed(straight(ranks))))
    program = Builder("chimera", ranks, micro_batches, placement)
    half = micro_batches // 2
    for rank in program.ranks:
        slots: dict[int, tuple[Kind, int, int, int]] = {}
        for replica, (stage,) in enumerate(rank.held):
            for i in range(half):
                unit, place = divmod(i, ranks // 2)
                enters = 2 * (ranks * unit + place)
                slots[enters + stage] = Kind.FORWARD, i + half * replica, stage, replica
                slots[enters + 2 * ranks - 1 - stage] = Kind.BACKWARD, i + half * replica, stage, replica
        for slot in sorted(slots):
            rank.add(*slots[slot])
    return program.build()
