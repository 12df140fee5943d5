"""ZB-V: two chunks per rank in a V shape, with split backwards; near-zero bubble at the memory of 1F1B."""

from __future__ import annotations

from meshwright.program.pipeline import Builder, PipelineProgram, place_in_v_shape
from meshwright.schedules.phrases import Chunk, PhraseWriter


def zb_v(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the ZB-V pipeline schedule: two stages per rank in a V shape, split backwards, near-zero bubble at
    1F1B's memory.

    Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6 and its figure.

    Costs, with forward = input gradient = weight gradient = 1 on a rank (1/2 on a stage), free transfers and at least 2
    x ranks micro-batches:
    - bubble: (ranks - 1) / 2 before a rank's first forward, none after it
    - peak activations: `ranks` micro-batches on every rank, no more than 1F1B
    - weight copies: 1
    - transfers: twice as many as 1F1B, as every micro-batch runs from rank 0 to the last rank and back

    With fewer than 2 x ranks - 1 micro-batches, the schedule for 2 x ranks - 1 micro-batches is used, without the steps
    of the missing micro-batches.
    """
    program = Builder("zb-v", ranks, micro_batches, (place_in_v_shape(ranks),))
    all_micro_batches = range(micro_batches)
    fills_the_pipeline = max(micro_batches, 2 * ranks - 1)
    for rank in program.ranks:
        to_the_turn = ranks - rank.rank  # ranks from here to the last one, where the V turns
        order = PhraseWriter(rank, [Chunk(stage, all_micro_batches) for stage in rank.stages[0]])
        # warm-up
        order.write("F0", 2 * to_the_turn - 1)
        order.write("F1 F0", rank.rank)
        order.write("F1 I1 W1", to_the_turn)
        # steady
        order.write("F0 I0 W0 F1 I1 W1", fills_the_pipeline - ranks)
        # cool-down: input gradients first, because other ranks wait for them
        order.write("I0 I1", rank.rank)
        order.write("I0 W0", to_the_turn)
        order.write("W1", rank.rank)
        order.write("W0", rank.rank)
        order.finish()
    return program.build()
