"""The chain: the vector passes through all ranks of a ring in segments, so that every link is busy most of the time.

Used for large vectors since J. Watts, R. van de Geijn, A pipelined broadcast for multidimensional meshes, Parallel
Processing Letters 5(2), 1995. k is the number of segments, n - 1 unless said.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, write
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def chain_rounds(program: Builder, path: Integers, reduce: bool = False) -> Rounds:
    """Chunk c takes hop h of the path, which runs through all ranks, in round c + h."""
    hops, chunks = len(path) - 1, program.chunks
    for step in range(hops + chunks - 1 if hops else 0):
        chunk = np.arange(max(0, step - hops + 1), min(chunks, step + 1))
        hop = step - chunk
        program.transfer(path[hop], path[hop + 1], chunk, reduce=reduce)
        yield


def broadcast(ranks: int, root: int = 0, segments: int | None = None) -> CollectiveProgram:
    """From the root around the ring. Best for large vectors, with many segments.

    n + k - 2 rounds; S bytes a rank; (n + k - 2) (alpha + S/k beta).
    """
    program = Builder("broadcast", "ring", ranks, segments or max(1, ranks - 1), root)
    return write(program, chain_rounds(program, np.roll(np.arange(ranks), -root)))


def reduce(ranks: int, root: int = 0, segments: int | None = None) -> CollectiveProgram:
    """Around the ring to the root, each rank adding its own. Best for large vectors, with many segments.

    n + k - 2 rounds; S bytes a rank; (n + k - 2) (alpha + S/k beta).
    """
    program = Builder("reduce", "ring", ranks, segments or max(1, ranks - 1), root)
    return write(program, chain_rounds(program, np.roll(np.arange(ranks), -root - 1), reduce=True))
