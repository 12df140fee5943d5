"""Broadcast and reduce for large vectors, in two halves: scatter and all-gather, reduce-scatter and gather.

M. Barnett, S. Gupta, D. Payne, L. Shuler, R. van de Geijn, J. Watts, Interprocessor collective communication library,
SHPCC 1994 (broadcast); R. Rabenseifner, Optimization of collective reduction operations, ICCS 2004 (reduce).
L is log2 n, rounded up. Best for large vectors: every rank sends about 2 S instead of the root log2 n S.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives import binomial_tree, recursive, ring
from meshwright.collectives.rounds import write
from meshwright.program.collective import Builder, CollectiveProgram


def broadcast(ranks: int, root: int = 0) -> CollectiveProgram:
    """Scatter down a binomial tree, then all-gather around the ring.

    L + n-1 rounds; the root sends 2(n-1)/n S bytes, the others less; (L + n-1) alpha + 2(n-1)/n S beta.
    """
    program = Builder("broadcast", "scatter-all-gather", ranks, ranks, root)
    everyone = own = np.arange(ranks)
    return write(program, binomial_tree.scatter_rounds(program, root), ring.all_gather_rounds(program, everyone, own))


def reduce(ranks: int, root: int = 0) -> CollectiveProgram:
    """Reduce-scatter by recursive halving, then gather up a binomial tree.

    n = 2^k: 2L rounds; 2L alpha + 2(n-1)/n S beta. Else 2 more rounds, as `recursive.reduce_scatter` says.
    """
    program = Builder("reduce", "reduce-scatter-gather", ranks, ranks, root)
    return write(
        program,
        recursive.reduce_scatter_rounds(program, np.arange(ranks)),
        binomial_tree.gather_rounds(program, root),
    )
