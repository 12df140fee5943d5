"""The root and each other rank by themselves: send-receive, and linear scatter and gather."""

from __future__ import annotations

import numpy as np

from meshwright.program.collective import Builder, CollectiveProgram


def send_receive(ranks: int, root: int = 0) -> CollectiveProgram:
    """From the root to the last other rank. 1 round; S bytes; alpha + S beta."""
    program = Builder("send-receive", "direct", ranks, 1, root)
    with program.round():
        program.transfer(root, ranks - 1 if root != ranks - 1 else 0, 0)
    return program.build()


def scatter(ranks: int, root: int = 0) -> CollectiveProgram:
    """The root sends to all at once. 1 round of n-1 messages; the root sends (n-1)/n S bytes; alpha + (n-1)/n S beta
    where a rank has many messages under way, else (n-1) alpha. Best for large vectors: nothing travels twice."""
    program = Builder("scatter", "linear", ranks, ranks, root)
    with program.round():
        program.transfer(root, np.arange(ranks), np.arange(ranks))
    return program.build()


def gather(ranks: int, root: int = 0) -> CollectiveProgram:
    """All send to the root at once. 1 round of n-1 messages; S/n bytes a rank; as `scatter`, backwards."""
    program = Builder("gather", "linear", ranks, ranks, root)
    with program.round():
        program.transfer(np.arange(ranks), root, np.arange(ranks))
    return program.build()
