"""Bruck algorithms: messages to ranks at distance 1, 2, 4 ..., for any number of ranks.

J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, Efficient algorithms for all-to-all communications in multiport
message-passing systems, IEEE TPDS 8(11), 1997. L is log2 n, rounded up. Best for small vectors.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.recursive import list_powers_of_two
from meshwright.collectives.rounds import transfer_cyclic_range
from meshwright.program.collective import Builder, CollectiveProgram


def all_gather(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the Bruck all-gather: in the rounds with d = 1, 2, 4 ..., each rank
    r sends to rank r - d the d blocks (1/n of the vector each) that it has so far. This doubles the number of blocks on
    every rank; the last round sends only the missing blocks.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): L rounds; (n-1)/n S bytes sent per rank; time L alpha + (n-1)/n S beta. Blocks are stored at their
    final slots (buffers for one block) from the start, so no copies are needed; a message that wraps around the end of
    the vector is sent as two.
    """
    program = Builder("all-gather", "bruck", ranks, chunks=ranks)
    everyone = np.arange(ranks)
    for distance in list_powers_of_two(ranks):
        with program.round():
            count = min(distance, ranks - distance)
            transfer_cyclic_range(program, everyone, (everyone - distance) % ranks, everyone, count, ranks)
    return program.build()


def all_to_all(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the Bruck all-to-all: a block for the rank at distance i travels in
    hops of 1, 2, 4 ..., the binary digits of i.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): L rounds, in each of which a rank sends one message; at most L S/2 bytes per rank; time L alpha + L S/2
    beta. Blocks (the data for one rank) are copied into and out of each message.
    """
    program = Builder("all-to-all", "bruck", ranks, chunks=ranks, scratch=2 * ranks)
    rank = np.arange(ranks)[:, None]  # [n, 1]; distances and runs are [m]
    place = np.arange(ranks)
    blocks = 2 * ranks  # scratch: blocks by distance, then the outgoing message, then the incoming one
    going, coming = 3 * ranks, 3 * ranks + ranks // 2

    with program.round():
        program.copy(rank, source=(rank + place) % ranks, into=blocks + place)
    for distance in list_powers_of_two(ranks):
        start = np.arange(distance, ranks, 2 * distance)  # of the runs of distances that contain this hop
        count = np.minimum(distance, ranks - start)
        packed = distance * np.arange(len(start))
        with program.round():
            program.copy(rank, source=blocks + start, into=going + packed, count=count)
        with program.round():
            program.transfer(rank, (rank + distance) % ranks, going, count.sum(), into=coming)
        with program.round():
            program.copy(rank, source=coming + packed, into=blocks + start, count=count)
    with program.round():  # the block of distance i is from the rank i before
        program.copy(rank, source=blocks + place, into=ranks + (rank - place) % ranks)
    return program.build()
