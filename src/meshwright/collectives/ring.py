"""Ring algorithms: every rank sends to the next one only, in one direction or both.

P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009; known in
deep learning since A. Gibiansky, Bringing HPC techniques to deep learning, 2017.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, build_from_rounds, run_together
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def add_reduce_scatter_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """Add a ring reduce-scatter to the builder `program`. The partial sum of each block travels once around the ring
    and ends at its owner. Each iteration of this generator adds the sends of one round, so that several algorithms can
    be interleaved.

    ranks: [..., n], ranks of each of several independent rings. own: [..., n], first slot (buffer for one chunk) of the
    block that each rank ends with. count: number of consecutive slots in a block.
    """
    for step in range(1, ranks.shape[-1]):
        program.transfer(ranks, np.roll(ranks, -1, -1), np.roll(own, step, -1), count, reduce=True)
        yield


def add_all_gather_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """Add a ring all-gather to the builder `program`. Each block travels once around the ring from its owner. Each
    iteration of this generator adds the sends of one round, so that several algorithms can be interleaved.

    ranks: [..., n], ranks of each of several independent rings. own: [..., n], first slot (buffer for one chunk) of the
    block that each rank starts with. count: number of consecutive slots in a block.
    """
    for step in range(ranks.shape[-1] - 1):
        program.transfer(ranks, np.roll(ranks, -1, -1), np.roll(own, step, -1), count)
        yield


def all_reduce(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the ring all-reduce: reduce-scatter, then all-gather. Best for
    large vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: 2(n-1) rounds;
    2(n-1)/n S bytes sent per rank, fewest of all algorithms; time 2(n-1) alpha + 2(n-1)/n S beta.
    """
    program = Builder("all-reduce", "ring", ranks, chunks=ranks)
    everyone = own = np.arange(ranks)
    return build_from_rounds(
        program, add_reduce_scatter_rounds(program, everyone, own), add_all_gather_rounds(program, everyone, own)
    )


def reduce_scatter(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the ring reduce-scatter. Best for large vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: n-1 rounds;
    (n-1)/n S bytes sent per rank; time (n-1) alpha + (n-1)/n S beta.
    """
    program = Builder("reduce-scatter", "ring", ranks, chunks=ranks)
    return build_from_rounds(program, add_reduce_scatter_rounds(program, np.arange(ranks), np.arange(ranks)))


def all_gather(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the ring all-gather. Best for large vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: n-1 rounds;
    (n-1)/n S bytes sent per rank; time (n-1) alpha + (n-1)/n S beta.
    """
    program = Builder("all-gather", "ring", ranks, chunks=ranks)
    return build_from_rounds(program, add_all_gather_rounds(program, np.arange(ranks), np.arange(ranks)))


def bidirectional_all_reduce(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the bidirectional-ring all-reduce: one half of every block (1/n of
    the vector) in each direction. For full-duplex links.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: 2(n-1) rounds;
    2(n-1)/n S bytes sent per rank, half of them over each of its two links; time 2(n-1) alpha + (n-1)/n S beta.
    """
    program = Builder("all-reduce", "bidirectional-ring", ranks, chunks=2 * ranks)
    ways = _split_directions(ranks)
    return build_from_rounds(
        program,
        run_together(add_reduce_scatter_rounds(program, *way) for way in ways),
        run_together(add_all_gather_rounds(program, *way) for way in ways),
    )


def bidirectional_reduce_scatter(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the bidirectional-ring reduce-scatter: one half of every block (1/n
    of the vector) in each direction.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: n-1 rounds;
    (n-1)/n S bytes sent per rank; time (n-1) alpha + (n-1)/n S/2 beta.
    """
    program = Builder("reduce-scatter", "bidirectional-ring", ranks, chunks=2 * ranks)
    return build_from_rounds(
        program, run_together(add_reduce_scatter_rounds(program, *way) for way in _split_directions(ranks))
    )


def bidirectional_all_gather(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the bidirectional-ring all-gather: one half of every block (1/n of
    the vector) in each direction.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: n-1 rounds;
    (n-1)/n S bytes sent per rank; time (n-1) alpha + (n-1)/n S/2 beta.
    """
    program = Builder("all-gather", "bidirectional-ring", ranks, chunks=2 * ranks)
    return build_from_rounds(
        program, run_together(add_all_gather_rounds(program, *way) for way in _split_directions(ranks))
    )


def _split_directions(ranks: int) -> tuple[tuple[Integers, Integers], tuple[Integers, Integers]]:
    """Return the ranks and half blocks for the two directions of a bidirectional ring, as a pair of arrays [ranks] for
    each direction: ranks in ring order, and the first slot of the half block that each rank owns. A block is a rank's
    1/n of the vector, stored in two slots (buffers for one chunk). One direction moves the first half of every block,
    the other the second."""
    everyone = np.arange(ranks)
    return (everyone, 2 * everyone), (everyone[::-1], 2 * everyone[::-1] + 1)
