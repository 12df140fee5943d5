"""Halving-doubling all-reduce of whole vectors: up and down a tree of rank pairs."""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, build_from_rounds
from meshwright.program.collective import Builder, CollectiveProgram


def all_reduce(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the halving-doubling all-reduce, in which the number of active
    ranks halves, then doubles again.

    In each round the upper half of the active ranks sends its vectors to the lower half, which adds them; the upper
    half then waits. When rank 0 has the sum, the rounds run in reverse, and each rank that has the sum sends it to its
    partner. (`rabenseifner` halves the vector instead.) Source: the minimum-spanning-tree reduce and broadcast of E.
    Chan et al., Collective communication: theory, practice, and experience, CCPE 19(13), 2007. Best for small vectors;
    `butterfly` needs half the rounds.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): for any n, 2L rounds; rank 0 sends L S bytes; time 2L (alpha + S beta).
    """
    program = Builder("all-reduce", "halving-doubling", ranks, chunks=1)
    pairs = []
    while ranks > 1:
        half = (ranks + 1) // 2
        pairs.append((np.arange(ranks - half), np.arange(half, ranks)))
        ranks = half

    def up_and_down() -> Rounds:
        """Add the rounds of the all-reduce to the program, first up the tree of rank pairs, then down: a generator that
        adds one round's sends per iteration."""
        for lower, upper in pairs:
            program.transfer(upper, lower, 0, reduce=True)
            yield
        for lower, upper in reversed(pairs):
            program.transfer(lower, upper, 0)
            yield

    return build_from_rounds(program, up_and_down())
