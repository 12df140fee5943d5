"""Dissemination barrier: in each round, the number of ranks that a rank has heard from doubles.

D. Hensgen, R. Finkel, U. Manber, Two algorithms for barrier synchronization, IJPP 17(1), 1988.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.recursive import list_powers_of_two
from meshwright.program.collective import Builder, CollectiveProgram


def barrier(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the dissemination barrier: each rank signals the ranks at distance
    1, 2, 4 ...

    Costs for n ranks, where a message without data takes alpha seconds: log2 n rounds, rounded up, for any n; time
    rounds x alpha.
    """
    program = Builder("barrier", "dissemination", ranks, chunks=1)
    everyone = np.arange(ranks)
    for distance in list_powers_of_two(ranks):
        with program.round():
            program.signal(everyone, (everyone + distance) % ranks)
    return program.build()
