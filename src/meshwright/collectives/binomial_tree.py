"""Binomial-tree algorithms: in each broadcast round, every rank that has the vector sends it to one that has not;
reductions run in reverse.

R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005.
L is log2 n, rounded up, for any number n of ranks. Best for small vectors.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.collectives.recursive import list_powers_of_two
from meshwright.collectives.rounds import (
    Rounds,
    build_from_rounds,
    run_in_sequence,
    run_staggered,
    transfer_cyclic_range,
)
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def list_tree_levels(n: int) -> list[tuple[Integers, Integers]]:
    """Return the edges of a binomial tree over positions 0 to n - 1 with root 0, in levels: level i has the edges that
    a broadcast from the root uses in round i.

    Each level is a pair of arrays (parents, children) with one entry per edge.
    """
    near = [(np.arange(0, n - distance, 2 * distance), distance) for distance in reversed(list_powers_of_two(n))]
    return [(position, position + distance) for position, distance in near]


def add_broadcast_rounds(program: Builder, ranks: Integers, root: int = 0, first: int = 0, count: int = 1) -> Rounds:
    """Add a binomial-tree broadcast to the builder `program`. Each iteration of this generator adds the sends of one
    round, so that several algorithms can be interleaved.

    ranks: [..., n], ranks of each of several independent groups. root: position of the source among the n ranks of a
    group. first, count: first slot (buffer for one chunk) and number of slots to send.
    """
    ranks = np.roll(ranks, -root, -1)
    for near, far in list_tree_levels(ranks.shape[-1]):
        program.transfer(ranks[..., near], ranks[..., far], first, count)
        yield


def add_reduce_rounds(program: Builder, ranks: Integers, root: int = 0, first: int = 0, count: int = 1) -> Rounds:
    """Add a binomial-tree reduce to the builder `program`. Each iteration of this generator adds the sends of one
    round, so that several algorithms can be interleaved.

    ranks: [..., n], ranks of each of several independent groups. root: position of the destination among the n ranks of
    a group. first, count: first slot (buffer for one chunk) and number of slots to reduce.
    """
    ranks = np.roll(ranks, -root, -1)
    for near, far in reversed(list_tree_levels(ranks.shape[-1])):
        program.transfer(ranks[..., far], ranks[..., near], first, count, reduce=True)
        yield


def add_scatter_rounds(program: Builder, root: int) -> Rounds:
    """Add a binomial-tree scatter to the builder `program`. Each iteration of this generator adds the sends of one
    round, so that several algorithms can be interleaved.

    root: source rank. A parent sends to its child the slots (buffers for one chunk, slot r for rank r) of all ranks in
    the child's subtree.
    """
    for near, far, first, count in _list_subtrees(program.ranks, root):
        transfer_cyclic_range(program, near, far, first, count, program.chunks)
        yield


def add_gather_rounds(program: Builder, root: int) -> Rounds:
    """Add a binomial-tree gather to the builder `program`. Each iteration of this generator adds the sends of one
    round, so that several algorithms can be interleaved.

    root: destination rank. Rank r contributes slot r (buffer for one chunk). A child sends to its parent the slots of
    all ranks in the child's subtree.
    """
    for near, far, first, count in reversed(list(_list_subtrees(program.ranks, root))):
        transfer_cyclic_range(program, far, near, first, count, program.chunks)
        yield


def _list_subtrees(n: int, root: int) -> Iterator[tuple[Integers, Integers, Integers, Integers]]:
    """Yield the edges of a binomial tree over n ranks, level by level from the root down: four arrays with one entry
    per child.

    The arrays are: parent rank, child rank, first rank of the child's subtree, and number of ranks in that subtree. A
    subtree consists of consecutive ranks that wrap around after rank n - 1: a first rank f of n or more is rank f
    modulo n. root: root rank of the tree.
    """
    for near, far in list_tree_levels(n):
        yield (near + root) % n, (far + root) % n, far + root, np.minimum(far - near, n - far)


def broadcast(ranks: int, root: int = 0, segments: int = 1) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the binomial-tree broadcast from rank `root`. Best for small
    vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): with one segment, L rounds; the root sends L S bytes; time L (alpha + S beta).

    segments: number k of segments of the vector, which are sent as a pipeline: L + k - 1 rounds with messages of S/k
    bytes. This is faster only if a rank can send to several ranks at once.
    """
    program = Builder("broadcast", "binomial-tree", ranks, segments, root)
    everyone = np.arange(ranks)
    return build_from_rounds(
        program, run_staggered(add_broadcast_rounds(program, everyone, root, part) for part in range(segments))
    )


def reduce(ranks: int, root: int = 0, segments: int = 1) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the binomial-tree reduce to rank `root`. Best for small vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): with one segment, L rounds; S bytes sent per rank; time L (alpha + S beta).

    segments: number k of segments of the vector, which are reduced as a pipeline: L + k - 1 rounds with messages of S/k
    bytes.
    """
    program = Builder("reduce", "binomial-tree", ranks, segments, root)
    everyone = np.arange(ranks)
    return build_from_rounds(
        program, run_staggered(add_reduce_rounds(program, everyone, root, part) for part in range(segments))
    )


def all_reduce(ranks: int, segments: int = 1) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the binomial-tree all-reduce: reduce to rank 0, then broadcast.
    Best for small vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): with one segment, 2L rounds; rank 0 sends L S bytes, each other rank between S and L S bytes; time 2L
    (alpha + S beta).

    segments: number k of segments of the vector, each of which is broadcast as soon as it is reduced: 2L + k - 1 rounds
    with messages of S/k bytes.
    """
    program = Builder("all-reduce", "binomial-tree", ranks, segments)
    everyone = np.arange(ranks)
    up_and_down = (
        run_in_sequence(add_reduce_rounds(program, everyone, 0, part), add_broadcast_rounds(program, everyone, 0, part))
        for part in range(segments)
    )
    return build_from_rounds(program, run_staggered(up_and_down))


def scatter(ranks: int, root: int = 0) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the binomial-tree scatter from rank `root`.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): L rounds; the root sends (n-1)/n S bytes; time L alpha + (n-1)/n S beta.
    """
    program = Builder("scatter", "binomial-tree", ranks, ranks, root)
    return build_from_rounds(program, add_scatter_rounds(program, root))


def gather(ranks: int, root: int = 0) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the binomial-tree gather to rank `root`.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (L = log2 n,
    rounded up): L rounds; the root receives (n-1)/n S bytes; time L alpha + (n-1)/n S beta.
    """
    program = Builder("gather", "binomial-tree", ranks, ranks, root)
    return build_from_rounds(program, add_gather_rounds(program, root))


def barrier(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the binomial-tree barrier: signals up the tree to rank 0, then back
    down the tree.

    Costs for n ranks, where a message without data takes alpha seconds (L = log2 n, rounded up): 2L rounds; time 2L
    alpha.
    """
    program = Builder("barrier", "binomial-tree", ranks, chunks=1)

    def signals() -> Rounds:
        """Generate the rounds of the barrier: add to the program one round of signals per tree level, first up the tree
        to rank 0, then down, and yield after each round."""
        for near, far in reversed(list_tree_levels(ranks)):
            program.signal(far, near)
            yield
        for near, far in list_tree_levels(ranks):
            program.signal(near, far)
            yield

    return build_from_rounds(program, signals())
