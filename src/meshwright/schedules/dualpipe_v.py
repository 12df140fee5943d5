"""DualPipeV: DualPipe folded in half; each rank has stages of both directions, so one copy of the weights suffices."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.program.pipeline import Builder, PipelineProgram, place_in_v_shape
from meshwright.schedules.dualpipe import write_dual_order
from meshwright.schedules.phrases import Chunk


def dualpipe_v(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the DualPipeV schedule: DualPipe folded in half, so that one copy of the weights suffices.

    Sea AI Lab: "DualPipe could be better without the Dual", 2025; second form in the DualPipe repository. The stages
    run from rank 0 to the last rank and back; rank 0 has the first and the last stage. The order of steps on a rank is
    that of DualPipe on twice as many ranks, with all micro-batches instead of half of them in each direction. Needs at
    least 2 x ranks micro-batches (`UserError`).

    Costs, with p = 2 x ranks stages (F, B: forward and full backward of one stage, half a rank's share; W: the
    weight-gradient part of B; F&B: an overlapped forward and backward):
    - bubble: (p/2 - 1) (F&B + B - 3W), exact if forward = input gradient >= W. If overlap gains nothing, and forward,
    input gradient and W take 1 each on a rank, that is ranks - 1; or half of it if, in an overlapped pair, the output
    of the forward is sent before the backward runs
    - peak activations: p + 1 in units of a stage, or ranks + 1/2 micro-batches
    - weight copies: 1
    - transfers: twice as many as 1F1B
    """
    if micro_batches < 2 * ranks:
        raise UserError(
            f"dualpipe-v with {micro_batches} micro-batches on {ranks} ranks: "
            f"at least {2 * ranks} (2 per rank) are needed"
        )
    program = Builder("dualpipe-v", ranks, micro_batches, (place_in_v_shape(ranks),))
    for rank in program.ranks:
        write_dual_order(rank, [Chunk(stage, range(micro_batches)) for stage in rank.stages[0]], ranks)
    return program.build()
