"""Ring all-to-all: every rank sends to the next one only, which keeps its own blocks and forwards the rest.

D. Bertsekas, J. Tsitsiklis, Parallel and distributed computation, 1989, section 1.3 (total exchange).
"""

from __future__ import annotations

import numpy as np

from meshwright.program.collective import Builder, CollectiveProgram


def all_to_all(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the ring all-to-all. Best on networks that are rings; on other
    networks `pairwise` sends fewer bytes.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: n-1 rounds;
    (n-1)/2 S bytes sent per rank, as every block takes all hops to its destination; time (n-1) alpha + (n-1)/2 S beta.
    """
    program = Builder("all-to-all", "ring", ranks, chunks=ranks, scratch=2 * ranks)
    rank, following = np.arange(ranks), (np.arange(ranks) + 1) % ranks
    output, here, coming = ranks, 2 * ranks, 3 * ranks  # here: blocks in the order in which ranks follow
    with program.round():
        program.copy(rank[:, None], source=(rank[:, None] + rank) % ranks, into=here + rank)
        program.copy(rank, source=rank, into=output + rank)
    here += 1
    for step in range(1, ranks):
        left = ranks - 1 - step  # blocks to pass on
        with program.round():
            program.transfer(rank, following, here, into=output + (following - step) % ranks)
            program.transfer(rank, following, here + 1, left, into=coming)
        here, coming = coming, 5 * ranks - coming
    return program.build()
