"""Interleaved schedules: several chunks per rank in cyclic placement, which divides the bubble by the number of chunks.

Costs are in F, B, I and W, a rank's forward, full backward, input and weight gradient of one micro-batch over all of
its chunks, for p ranks, m micro-batches and v chunks. A micro-batch crosses v p - 1 boundaries between ranks, not p -
1.
"""

from __future__ import annotations

import numpy as np

from meshwright.program.order import Integers
from meshwright.program.pipeline import Builder, PipelineProgram, place_cyclically
from meshwright.schedules.placement import split_evenly


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> PipelineProgram:
    """Generate the interleaved 1F1B schedule (virtual pipeline stages), depth first, with `chunks` stages per rank.

    Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473, section 2.2, figure 4. The micro-batches run in rounds: all
    micro-batches of a round pass through one chunk of a rank before the next chunk begins. If `ranks` divides
    `micro_batches`, each round has `ranks` micro-batches; otherwise there are as many rounds of at least `ranks`
    micro-batches as possible, of nearly equal sizes (with fewer micro-batches than ranks, a single round). Costs, for p
    ranks, m micro-batches, v chunks, and F and B the times of a rank's forward and full backward over all its chunks:
    - bubble: (p - 1)(F + B) / v, for m >= p
    - peak activations: if p divides m, p + (p - 1 - 2r) / v micro-batches on rank r (at most m); if the first round
    has g > p micro-batches, g - (g + 1 - 2p) / v on rank 0
    - weight copies: 1
    - transfers: v times as many as 1F1B
    """
    program = Builder("interleaved", ranks, micro_batches, (place_cyclically(ranks, chunks),))
    taken = split_into_rounds(ranks, micro_batches)
    forwards, backwards = order_depth_first(program.ranks[0].stages[0], taken)
    for rank in program.ranks:
        shift = np.array([0, rank.rank])
        warm_up = (chunks - 1) * len(taken[0]) + 2 * (ranks - 1 - rank.rank)
        rank.alternate(forwards + shift, backwards + shift, warm_up)
    return program.build()


def interleaved_zero_bubble(ranks: int, micro_batches: int, chunks: int = 2) -> PipelineProgram:
    """Generate the interleaved ZB-H1 pipeline schedule, with `chunks` stages per rank and split backwards.

    PyTorch's `ScheduleInterleavedZeroBubble`, after Qi et al. 2024, arXiv 2401.10241. Any number of ranks and
    micro-batches. Costs, for p ranks, m micro-batches, v chunks, and F, I and W the times of a rank's forward, input
    gradient and weight gradient over all its chunks:
    - bubble: (p - 1)(F + I - W) / v, for m >= p
    - peak activations: if p divides m, p micro-batches on every rank; with rounds of g > p, g - (g - p) / v
    - weight copies: 1
    - transfers: v times as many as 1F1B
    """
    program = Builder("interleaved-zb", ranks, micro_batches, (place_cyclically(ranks, chunks),))
    taken = split_into_rounds(ranks, micro_batches)
    forwards, backwards = order_depth_first(program.ranks[0].stages[0], taken)
    for rank in program.ranks:
        shift = np.array([0, rank.rank])
        warm_up = (chunks - 1) * len(taken[0]) + ranks - 1 - rank.rank
        rank.alternate(forwards + shift, backwards + shift, warm_up, put_off=rank.rank)
    return program.build()


def looped_bfs(ranks: int, micro_batches: int, chunks: int = 2) -> PipelineProgram:
    """Generate the breadth-first GPipe schedule: all micro-batches run through one of a rank's `chunks` stages before
    its next stage.

    Lamy-Poirier 2023, arXiv 2211.05953, section 4; backwards in PyTorch's order, last micro-batch first. A rank uses
    the weights of one chunk at a time: sharded weights are all-gathered once per chunk and pass, not once per round of
    micro-batches.

    Any number of ranks and micro-batches. Costs, for p ranks, m micro-batches, v chunks, and F and B the times of a
    rank's forward and full backward over all its chunks:
    - bubble: (p - 1)(F + B) / v, for m >= p
    - peak activations: m micro-batches on every rank
    - weight copies: 1
    - transfers: v times as many as GPipe
    """
    program = Builder("looped-bfs", ranks, micro_batches, (place_cyclically(ranks, chunks),))
    for rank in program.ranks:
        for stage in rank.stages[0]:
            for m in range(micro_batches):
                rank.forward(m, stage)
        for stage in reversed(rank.stages[0]):
            for m in reversed(range(micro_batches)):
                rank.backward(m, stage)
    return program.build()


def split_into_rounds(ranks: int, micro_batches: int) -> list[range]:
    """Split the micro-batches 0 to micro_batches - 1 into the rounds of interleaved 1F1B; return the micro-batches of
    each round. All micro-batches of a round pass through one model chunk of a rank before the rank's next chunk begins.

    There are as many rounds of at least `ranks` micro-batches as possible, with sizes that differ by at most one,
    larger ones first. If `ranks` divides `micro_batches`, the result equals Megatron's rounds of `ranks` micro-batches;
    if all rounds are equally large, it equals PyTorch's.
    """
    return split_evenly(micro_batches, max(1, micro_batches // ranks))


def order_depth_first(stages: tuple[int, ...], rounds: list[range]) -> tuple[Integers, Integers]:
    """Return (forwards, backwards) of one rank in depth-first order, each [passes, 2], micro-batch and stage: the
    micro-batches of a round pass through all stages of the rank before the micro-batches of the next round start.
    Backwards take the stages in descending order.

    stages: stages of the rank, ascending. rounds: consecutive micro-batches of each round.
    """
    forwards = [(m, stage) for taken in rounds for stage in stages for m in taken]
    backwards = [(m, stage) for taken in rounds for stage in reversed(stages) for m in taken]
    return np.array(forwards), np.array(backwards)
