"""Direct algorithms between the root and each other rank: send-receive, linear scatter and gather."""

from __future__ import annotations

import numpy as np

from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.contract import find_receiver


def send_receive(ranks: int, root: int = 0) -> CollectiveProgram:
    """Generate the program (steps of every rank) of a send from rank `root` to the last of `ranks` ranks (to rank 0 if
    the root is the last).

    Costs for a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: 1 round; S bytes sent; time
    alpha + S beta.
    """
    program = Builder("send-receive", "direct", ranks, 1, root)
    with program.round():
        program.transfer(root, find_receiver(ranks, root), 0)
    return program.build()


def scatter(ranks: int, root: int = 0) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the linear scatter: rank `root` sends to all ranks at once. Best
    for large vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: 1 round of n-1
    messages; the root sends (n-1)/n S bytes. Time: alpha + (n-1)/n S beta if a rank can have many messages in flight,
    (n-1) alpha + (n-1)/n S beta if it sends them one after the other.
    """
    program = Builder("scatter", "linear", ranks, ranks, root)
    with program.round():
        program.transfer(root, np.arange(ranks), np.arange(ranks))
    return program.build()


def gather(ranks: int, root: int = 0) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the linear gather: all ranks send to rank `root` at once.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: 1 round of n-1
    messages; S/n bytes per rank. Time: alpha + (n-1)/n S beta if a rank can have many messages in flight, (n-1) alpha +
    (n-1)/n S beta if the messages arrive one after the other.
    """
    program = Builder("gather", "linear", ranks, ranks, root)
    with program.round():
        program.transfer(np.arange(ranks), root, np.arange(ranks))
    return program.build()
