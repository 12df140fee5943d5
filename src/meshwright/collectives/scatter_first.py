"""Van de Geijn broadcast (scatter, all-gather) and Rabenseifner reduce (reduce-scatter, gather).

M. Barnett, S. Gupta, D. Payne, L. Shuler, R. van de Geijn, J. Watts, Interprocessor collective communication library,
SHPCC 1994 (broadcast); R. Rabenseifner, Optimization of collective reduction operations, ICCS 2004 (reduce). L is log2
n, rounded up. Best for large vectors: every rank sends about 2 S instead of the root log2 n S.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives import binomial_tree, recursive, ring
from meshwright.collectives.rounds import build_from_rounds
from meshwright.program.collective import Builder, CollectiveProgram


def broadcast(ranks: int, root: int = 0) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the van de Geijn broadcast from rank `root`: binomial-tree scatter,
    then ring all-gather.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): L + n-1 rounds; the root sends 2(n-1)/n S bytes, each other rank fewer; time (L + n-1) alpha + 2(n-1)/n
    S beta.
    """
    program = Builder("broadcast", "scatter-all-gather", ranks, ranks, root)
    everyone = own = np.arange(ranks)
    return build_from_rounds(
        program, binomial_tree.add_scatter_rounds(program, root), ring.add_all_gather_rounds(program, everyone, own)
    )


def reduce(ranks: int, root: int = 0) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the Rabenseifner reduce to rank `root`: recursive-halving
    reduce-scatter, then binomial-tree gather.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): if n is a power of two, 2L rounds; time 2L alpha + 2(n-1)/n S beta. Otherwise 2 more rounds: the ranks
    beyond the largest power of two send their vectors to neighbours before the halving and receive their shares after
    it.
    """
    program = Builder("reduce", "reduce-scatter-gather", ranks, ranks, root)
    return build_from_rounds(
        program,
        recursive.add_reduce_scatter_rounds(program, np.arange(ranks)),
        binomial_tree.add_gather_rounds(program, root),
    )
