"""Bruck's algorithms: messages to the ranks 1, 2, 4 ... places away, for any number of ranks, power of two or not.

J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, Efficient algorithms for all-to-all communications in multiport
message-passing systems, IEEE TPDS 8(11), 1997. L is log2 n, rounded up. Best for small vectors.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.recursive import powers_of_two
from meshwright.collectives.rounds import transfer_around
from meshwright.program.collective import Builder, CollectiveProgram


def all_gather(ranks: int) -> CollectiveProgram:
    """A rank that has the blocks of the d ranks from itself on sends them to the one d places before it.

    L rounds; (n-1)/n S bytes a rank; L alpha + (n-1)/n S beta. Blocks lie where they belong from the start, so that no
    copy is needed, and a message that runs past the vector's end is two.
    """
    program = Builder("all-gather", "bruck", ranks, chunks=ranks)
    everyone = np.arange(ranks)
    for distance in powers_of_two(ranks):
        with program.round():
            count = min(distance, ranks - distance)
            transfer_around(program, everyone, (everyone - distance) % ranks, everyone, count, ranks)
    return program.build()


def all_to_all(ranks: int) -> CollectiveProgram:
    """A block that has i places to go takes those of the steps of 1, 2, 4 ... places that i is the sum of.

    L rounds of one message; at most L S/2 bytes a rank; L alpha + L S/2 beta. Blocks are copied into and out of each
    message.
    """
    program = Builder("all-to-all", "bruck", ranks, chunks=ranks, scratch=2 * ranks)
    rank = np.arange(ranks)[:, None]  # [n, 1]; places and runs are [m]
    place = np.arange(ranks)
    blocks = 2 * ranks  # scratch: the blocks by places to go, then what goes out, then what comes in
    going, coming = 3 * ranks, 3 * ranks + ranks // 2

    with program.round():
        program.copy(rank, source=(rank + place) % ranks, into=blocks + place)
    for distance in powers_of_two(ranks):
        start = np.arange(distance, ranks, 2 * distance)  # of the runs of places that this step is part of
        count = np.minimum(distance, ranks - start)
        packed = distance * np.arange(len(start))
        with program.round():
            program.copy(rank, source=blocks + start, into=going + packed, count=count)
        with program.round():
            program.transfer(rank, (rank + distance) % ranks, going, count.sum(), into=coming)
        with program.round():
            program.copy(rank, source=coming + packed, into=blocks + start, count=count)
    with program.round():  # the block that went i places is from the rank i places before
        program.copy(rank, source=blocks + place, into=ranks + (rank - place) % ranks)
    return program.build()
