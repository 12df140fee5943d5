"""Baseline schedules GPipe and 1F1B.

Costs are in F and B, a rank's forward and full backward of one micro-batch, for p ranks and m micro-batches.
"""

from __future__ import annotations

from meshwright.program.pipeline import Builder, PipelineProgram, place_cyclically


def gpipe(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the GPipe pipeline schedule: all forwards, then all backwards.

    Huang et al. 2019, arXiv 1811.06965, figure 2c; in PyTorch's order. Any number of ranks and micro-batches. Costs,
    for p ranks, m micro-batches, and F and B the times of a rank's forward and full backward:
    - bubble: (p - 1)(F + B)
    - peak activations: m micro-batches on every rank
    - weight copies: 1
    - transfers: one for each micro-batch, boundary between ranks, and direction
    """
    program = Builder("gpipe", ranks, micro_batches, (place_cyclically(ranks),))
    for rank in program.ranks:
        for m in range(micro_batches):
            rank.forward(m)
        for m in range(micro_batches):
            rank.backward(m)
    return program.build()


def one_f_one_b(ranks: int, micro_batches: int) -> PipelineProgram:
    """Generate the 1F1B pipeline schedule: after the warm-up each rank alternates one forward and one backward.

    PipeDream-flush (Narayanan et al. 2021, arXiv 2006.09503, section 3.2) and DAPPLE (Fan et al. 2021, arXiv
    2007.01045, section 3). Any number of ranks and micro-batches. Costs, for p ranks, m micro-batches, and F and B the
    times of a rank's forward and full backward:
    - bubble: (p - 1)(F + B), as GPipe
    - peak activations: min(m, p - r) micro-batches on rank r
    - weight copies: 1
    - transfers: as many as GPipe
    """
    return generate_1f1b("1f1b", ranks, micro_batches)


def generate_1f1b(name: str, ranks: int, micro_batches: int, update_each: bool = False) -> PipelineProgram:
    """Generate a pipeline schedule with the steps of 1F1B, in which forwards and backwards alternate after the warm-up.
    name: name that the schedule gets. ranks, micro_batches: numbers of pipeline ranks and micro-batches. update_each:
    True to add an optimizer step after each backward; False for none."""
    program = Builder(name, ranks, micro_batches, (place_cyclically(ranks),))
    for rank in program.ranks:
        warm_up = min(ranks - 1 - rank.rank, micro_batches)
        for m in range(warm_up):
            rank.forward(m)
        for m in range(micro_batches):
            if warm_up + m < micro_batches:
                rank.forward(warm_up + m)
            rank.backward(m)
            if update_each:
                rank.update(m)
    return program.build()
