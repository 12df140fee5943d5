"""Halving and doubling of the set of ranks: all-reduce of the whole vector up and down a tree of pairs."""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, write
from meshwright.program.collective import Builder, CollectiveProgram


def all_reduce(ranks: int) -> CollectiveProgram:
    """The upper half of the ranks add their vectors to those of the lower half and wait, until one rank has the sum;
    then each rank that has it sends it back, until all have it. (`rabenseifner` halves the vector instead.)

    E. Chan et al., Collective communication: theory, practice, and experience, CCPE 19(13), 2007: its minimum-spanning
    tree reduce and broadcast. Best for small vectors; `butterfly` needs half the rounds.
    With L = log2 n, rounded up, for any n: 2L rounds; rank 0 sends L S bytes; 2L (alpha + S beta).
    """
    program = Builder("all-reduce", "halving-doubling", ranks, chunks=1)
    pairs = []
    while ranks > 1:
        half = (ranks + 1) // 2
        pairs.append((np.arange(ranks - half), np.arange(half, ranks)))
        ranks = half

    def up_and_down() -> Rounds:
        for lower, upper in pairs:
            program.transfer(upper, lower, 0, reduce=True)
            yield
        for lower, upper in reversed(pairs):
            program.transfer(lower, upper, 0)
            yield

    return write(program, up_and_down())
