"""The dissemination barrier: in each round, what a rank has heard doubles.

D. Hensgen, R. Finkel, U. Manber, Two algorithms for barrier synchronization, IJPP 17(1), 1988.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.recursive import powers_of_two
from meshwright.program.collective import Builder, CollectiveProgram


def barrier(ranks: int) -> CollectiveProgram:
    """Each rank signals the ones 1, 2, 4 ... places on. log2 n rounds, rounded up, for any n; as many alpha."""
    program = Builder("barrier", "dissemination", ranks, chunks=1)
    everyone = np.arange(ranks)
    for distance in powers_of_two(ranks):
        with program.round():
            program.signal(everyone, (everyone + distance) % ranks)
    return program.build()
