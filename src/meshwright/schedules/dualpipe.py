"""DualPipe: micro-batches enter at both ends of the pipeline; forwards of one direction overlap backwards of the
other."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.program.pipeline import Builder, PipelineProgram, RankBuilder, place_cyclically
from meshwright.schedules.phrases import Chunk, PhraseWriter


def dualpipe(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the DualPipe schedule: two pipelines in opposite directions, with overlapped forwards and backwards.

    DeepSeek-V3 report, arXiv 2412.19437, section 3.2.1, figure 5. Replica 0 runs from rank 0 to the last rank with the
    first half of the micro-batches, replica 1 from the last rank to rank 0 with the second half; rank r has stage r of
    replica 0 and stage ranks-1-r of replica 1. Ranks must be even, micro-batches even and at least 2 x ranks
    (`UserError`).

    Costs (table 2 of the report; F, B: forward and full backward of a rank's stage; W: the weight-gradient part of B;
    F&B: an overlapped forward and backward):
    - bubble: (ranks/2 - 1) (F&B + B - 3W), exact if forward = input gradient >= W
    - peak activations: ranks + 1 micro-batches
    - weight copies: 2
    - transfers: as many as 1F1B
    """
    if ranks < 2 or ranks % 2:
        raise UserError(f"dualpipe on {ranks} ranks: the number of ranks must be even")
    if micro_batches % 2 or micro_batches < 2 * ranks:
        raise UserError(
            f"dualpipe with {micro_batches} micro-batches on {ranks} ranks: half of them run in each direction; "
            f"the number must be even and at least {2 * ranks} (2 per rank)"
        )
    placement = (place_cyclically(ranks), tuple(reversed(place_cyclically(ranks))))
    program = Builder("dualpipe", ranks, micro_batches, placement)
    first_half, second_half = range(micro_batches // 2), range(micro_batches // 2, micro_batches)
    for rank in program.ranks:
        down, up = (stages[0] for stages in rank.stages)
        ends = [Chunk(down, first_half, replica=0), Chunk(up, second_half, replica=1)]
        # Chunk 0 is the one whose data enters at the nearer end of the pipeline.
        write_dual_order(rank, ends if down < up else ends[::-1], ranks // 2)
    return program.build()


def write_dual_order(rank: RankBuilder, chunks: list[Chunk], half: int) -> None:
    """Append one rank's steps under DualPipe or DualPipeV (DeepSeek-V3 report, section 3.2.1) to `rank`, the builder of
    the rank's steps.

    chunks: the rank's two stages with their micro-batches, the lower stage number first. The lower stage number is the
    rank's distance from an end of the pipeline, which determines the rank's order of steps. half: number of ranks from
    an end to the middle of the pipeline: half of the ranks under DualPipe, all ranks under DualPipeV (whose last rank
    holds the two middle stages)."""
    depth, to_the_middle = chunks[0].stage, half - chunks[0].stage - 1
    order = PhraseWriter(rank, chunks)
    # Numbers: steps of the schedule in DeepSeek's published code.
    order.write("F0", 2 * to_the_middle)  # 1
    order.write("F0 F1", depth + 1)  # 2
    order.write("I1 W F1", to_the_middle)  # 3
    main = len(chunks[0].micro_batches) - 2 * half + depth + 1
    if to_the_middle == 0:  # 4; the first pair is not overlapped, because other ranks wait for its forward
        order.write("F0 B1 F1&B0")
        main -= 1
    order.write("F0&B1 F1&B0", main)
    order.write("B1 F1&B0", to_the_middle)  # 5
    # 6: the second half of these backwards defers its weight gradients, so that the next rank starts sooner
    whole, split = divmod(depth + 1, 2)
    order.write("B1 B0", whole)
    order.write("B1 I0", split)
    order.write("I1 I0", whole)
    order.write("W I0", to_the_middle)  # 7
    order.write("W", depth + 1)  # 8
    order.finish()
