"""The binomial tree: in each round, every rank that has the vector sends it to one that has not; reductions run back.

R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005.
L is log2 n, rounded up, for any number n of ranks. Best for small vectors.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.collectives.recursive import powers_of_two
from meshwright.collectives.rounds import Rounds, in_turn, staggered, transfer_around, write
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def levels(n: int) -> list[tuple[Integers, Integers]]:
    """Edges of the tree over positions 0 to n - 1, root 0: (nearer the root, farther), in the order of a broadcast."""
    near = [(np.arange(0, n - distance, 2 * distance), distance) for distance in reversed(powers_of_two(n))]
    return [(position, position + distance) for position, distance in near]


def broadcast_rounds(program: Builder, ranks: Integers, root: int = 0, first: int = 0, count: int = 1) -> Rounds:
    """ranks: [..., n]; the one at position `root` has slots first .. first + count, and all get them."""
    ranks = np.roll(ranks, -root, -1)
    for near, far in levels(ranks.shape[-1]):
        program.transfer(ranks[..., near], ranks[..., far], first, count)
        yield


def reduce_rounds(program: Builder, ranks: Integers, root: int = 0, first: int = 0, count: int = 1) -> Rounds:
    """ranks: [..., n]; the one at position `root` gets the sum of all their slots first .. first + count."""
    ranks = np.roll(ranks, -root, -1)
    for near, far in reversed(levels(ranks.shape[-1])):
        program.transfer(ranks[..., far], ranks[..., near], first, count, reduce=True)
        yield


def scatter_rounds(program: Builder, root: int) -> Rounds:
    """The root has the vector; of slot r, one a rank, rank r gets its copy, through the ranks between."""
    for near, far, first, count in _subtrees(program.ranks, root):
        transfer_around(program, near, far, first, count, program.chunks)
        yield


def gather_rounds(program: Builder, root: int) -> Rounds:
    """Rank r has slot r; the root gets them all."""
    for near, far, first, count in reversed(list(_subtrees(program.ranks, root))):
        transfer_around(program, far, near, first, count, program.chunks)
        yield


def _subtrees(n: int, root: int) -> Iterator[tuple[Integers, Integers, Integers, Integers]]:
    """Edges, and what lies below them: first rank and number of ranks, counted around from the root."""
    for near, far in levels(n):
        yield (near + root) % n, (far + root) % n, far + root, np.minimum(far - near, n - far)


def broadcast(ranks: int, root: int = 0, segments: int = 1) -> CollectiveProgram:
    """L rounds; the root sends L S bytes; L (alpha + S beta).

    In k segments: L + k - 1 rounds of S/k; this helps where a rank can send to several others at once.
    """
    program = Builder("broadcast", "binomial-tree", ranks, segments, root)
    everyone = np.arange(ranks)
    return write(program, staggered(broadcast_rounds(program, everyone, root, part) for part in range(segments)))


def reduce(ranks: int, root: int = 0, segments: int = 1) -> CollectiveProgram:
    """L rounds; S bytes a rank; L (alpha + S beta). In k segments: L + k - 1 rounds of S/k."""
    program = Builder("reduce", "binomial-tree", ranks, segments, root)
    everyone = np.arange(ranks)
    return write(program, staggered(reduce_rounds(program, everyone, root, part) for part in range(segments)))


def all_reduce(ranks: int, segments: int = 1) -> CollectiveProgram:
    """Reduce to rank 0, then broadcast.

    2L rounds; rank 0 sends L S bytes, the others between S and L S; 2L (alpha + S beta).
    In k segments, each of which comes down as soon as it is up: 2L + k - 1 rounds of S/k.
    """
    program = Builder("all-reduce", "binomial-tree", ranks, segments)
    everyone = np.arange(ranks)
    up_and_down = (
        in_turn(reduce_rounds(program, everyone, 0, part), broadcast_rounds(program, everyone, 0, part))
        for part in range(segments)
    )
    return write(program, staggered(up_and_down))


def scatter(ranks: int, root: int = 0) -> CollectiveProgram:
    """L rounds; the root sends (n-1)/n S bytes; L alpha + (n-1)/n S beta."""
    program = Builder("scatter", "binomial-tree", ranks, ranks, root)
    return write(program, scatter_rounds(program, root))


def gather(ranks: int, root: int = 0) -> CollectiveProgram:
    """L rounds; the root receives (n-1)/n S bytes; L alpha + (n-1)/n S beta."""
    program = Builder("gather", "binomial-tree", ranks, ranks, root)
    return write(program, gather_rounds(program, root))


def barrier(ranks: int) -> CollectiveProgram:
    """Signals run up the tree until rank 0 knows that all have come, then down. 2L rounds; 2L alpha."""
    program = Builder("barrier", "binomial-tree", ranks, chunks=1)

    def signals() -> Rounds:
        for near, far in reversed(levels(ranks)):
            program.signal(far, near)
            yield
        for near, far in levels(ranks):
            program.signal(near, far)
            yield

    return write(program, signals())
