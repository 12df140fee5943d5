"""The ring: every rank sends to the next one only. Reduce-scatter, all-gather, all-reduce; one way round or both.

P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009;
known in deep learning since A. Gibiansky, Bringing HPC techniques to deep learning, 2017.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, together, write
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def reduce_scatter_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """The sum of each block travels once around the ring and is complete where it belongs.

    ranks: [..., n], rings. own: [..., n], first slot of the block that each rank is to end with. count: slots a block.
    """
    for step in range(1, ranks.shape[-1]):
        program.transfer(ranks, np.roll(ranks, -1, -1), np.roll(own, step, -1), count, reduce=True)
        yield


def all_gather_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """Each block travels once around the ring from the rank that owns it. Arguments as in `reduce_scatter_rounds`."""
    for step in range(ranks.shape[-1] - 1):
        program.transfer(ranks, np.roll(ranks, -1, -1), np.roll(own, step, -1), count)
        yield


def all_reduce(ranks: int) -> CollectiveProgram:
    """Reduce-scatter, then all-gather. Best for large vectors: no algorithm sends fewer bytes.

    2(n-1) rounds; 2(n-1)/n S bytes a rank; 2(n-1) alpha + 2(n-1)/n S beta.
    """
    program = Builder("all-reduce", "ring", ranks, chunks=ranks)
    everyone = own = np.arange(ranks)
    return write(program, reduce_scatter_rounds(program, everyone, own), all_gather_rounds(program, everyone, own))


def reduce_scatter(ranks: int) -> CollectiveProgram:
    """Best for large vectors. n-1 rounds; (n-1)/n S bytes a rank; (n-1) alpha + (n-1)/n S beta."""
    program = Builder("reduce-scatter", "ring", ranks, chunks=ranks)
    return write(program, reduce_scatter_rounds(program, np.arange(ranks), np.arange(ranks)))


def all_gather(ranks: int) -> CollectiveProgram:
    """Best for large vectors. n-1 rounds; (n-1)/n S bytes a rank; (n-1) alpha + (n-1)/n S beta."""
    program = Builder("all-gather", "ring", ranks, chunks=ranks)
    return write(program, all_gather_rounds(program, np.arange(ranks), np.arange(ranks)))


def bidirectional_all_reduce(ranks: int) -> CollectiveProgram:
    """Half of every block goes one way round, half the other: for rings whose links carry both directions at once.

    2(n-1) rounds; 2(n-1)/n S bytes a rank, half of them over each of its two links; 2(n-1) alpha + (n-1)/n S beta.
    """
    program = Builder("all-reduce", "bidirectional-ring", ranks, chunks=2 * ranks)
    ways = _both_ways(ranks)
    return write(
        program,
        together(reduce_scatter_rounds(program, *way) for way in ways),
        together(all_gather_rounds(program, *way) for way in ways),
    )


def bidirectional_reduce_scatter(ranks: int) -> CollectiveProgram:
    """As `bidirectional_all_reduce`: n-1 rounds; (n-1)/n S bytes a rank; (n-1) alpha + (n-1)/n S/2 beta."""
    program = Builder("reduce-scatter", "bidirectional-ring", ranks, chunks=2 * ranks)
    return write(program, together(reduce_scatter_rounds(program, *way) for way in _both_ways(ranks)))


def bidirectional_all_gather(ranks: int) -> CollectiveProgram:
    """As `bidirectional_all_reduce`: n-1 rounds; (n-1)/n S bytes a rank; (n-1) alpha + (n-1)/n S/2 beta."""
    program = Builder("all-gather", "bidirectional-ring", ranks, chunks=2 * ranks)
    return write(program, together(all_gather_rounds(program, *way) for way in _both_ways(ranks)))


def _both_ways(ranks: int) -> tuple[tuple[Integers, Integers], tuple[Integers, Integers]]:
    """The ring and the ring reversed, each with its half of every rank's block: (ranks, own)."""
    everyone = np.arange(ranks)
    return (everyone, 2 * everyone), (everyone[::-1], 2 * everyone[::-1] + 1)
