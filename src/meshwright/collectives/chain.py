"""Chain algorithms: the vector is pipelined through all ranks of a ring in segments, which keeps every link busy.

J. Watts, R. van de Geijn, A pipelined broadcast for multidimensional meshes, Parallel Processing Letters 5(2), 1995. k
is the number of segments (default: n - 1).
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, build_from_rounds
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def add_chain_rounds(program: Builder, path: Integers, reduce: bool = False) -> Rounds:
    """Add to the builder `program` the sends that move all chunks of the vector along a path of ranks: chunk c takes
    hop h in round c + h. Each iteration of this generator adds the sends of one round, so that several algorithms can
    be interleaved.

    path: all ranks, in order of the path. reduce: True if each rank adds its own data to the chunks that pass.
    """
    hops, chunks = len(path) - 1, program.chunks
    for step in range(hops + chunks - 1 if hops else 0):
        chunk = np.arange(max(0, step - hops + 1), min(chunks, step + 1))
        hop = step - chunk
        program.transfer(path[hop], path[hop + 1], chunk, reduce=reduce)
        yield


def broadcast(ranks: int, root: int = 0, segments: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the chain (pipelined ring) broadcast from rank `root`. Best for
    large vectors, in many segments.

    Costs for n ranks and a vector of S bytes in k segments (default n - 1), where a message of b bytes takes alpha + b
    beta seconds: n + k - 2 rounds; S bytes sent per rank; time (n + k - 2) (alpha + S/k beta).
    """
    program = Builder("broadcast", "ring", ranks, segments or max(1, ranks - 1), root)
    return build_from_rounds(program, add_chain_rounds(program, np.roll(np.arange(ranks), -root)))


def reduce(ranks: int, root: int = 0, segments: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the chain (pipelined ring) reduce to rank `root`: segments travel
    around the ring, and each rank adds its own data to them.

    Best for large vectors, in many segments.

    Costs for n ranks and a vector of S bytes in k segments (default n - 1), where a message of b bytes takes alpha + b
    beta seconds: n + k - 2 rounds; S bytes sent per rank; time (n + k - 2) (alpha + S/k beta).
    """
    program = Builder("reduce", "ring", ranks, segments or max(1, ranks - 1), root)
    return build_from_rounds(program, add_chain_rounds(program, np.roll(np.arange(ranks), -root - 1), reduce=True))
