"""Double binary tree: two trees over the same ranks, each for half of the vector; no rank is an inner node of both.

P. Sanders, J. Speck, J. L. Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
Computing 35(12), 2009; S. Jeaugey, Massively scale your deep learning training with NCCL 2.4, 2019.
Inner nodes of a tree send twice what they receive, leaves nothing; as each rank is at most once an inner node, it sends
as much as it receives. Segments are pipelined through the trees, one level a round. h = log2 n, rounded down, is the
height, k the number of segments. Best for medium and large vectors on many ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from meshwright.collectives.rounds import Rounds, build_from_rounds, run_in_sequence, run_staggered, run_together
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers

Tree: TypeAlias = list[tuple[Integers, Integers]]  # edges of each level, from the root down: (parents, children)


def compute_in_order_parents(n: int) -> Integers:
    """Return the parent of each node of a binary tree whose nodes 1 to n are numbered in order (left subtree, node,
    right subtree): [n + 1]. Entry 0 is -1 (unused); the root's parent is 0.

    Odd nodes are leaves, even nodes inner; the height is log2 n, rounded down.
    """
    node = np.arange(n + 1)
    lowest_bit = node & -node
    above = node - lowest_bit  # whose right side the node lies on
    parent_if_complete = above | 2 * lowest_bit  # the parent in a complete tree
    parent = np.where(parent_if_complete <= n, parent_if_complete, above)
    parent[0] = -1
    return parent


def build_two_trees(ranks: Integers, root: int | None = None) -> tuple[Tree, Tree]:
    """Build the in-order binary tree over `ranks`, and a second tree whose inner nodes are leaves of the first; return
    both.

    ranks: [n], in the order of the first tree's nodes. root: rank that is the parent of both trees' top nodes, None for
    none. A tree is returned as levels of edges from the root down, with a pair of arrays (parents, children) per level.
    The second tree takes the ranks in reverse order if their number is even, else shifted by one node.
    """
    complement = ranks[::-1] if len(ranks) % 2 == 0 else np.roll(ranks, -1)
    return _list_levels(ranks, root), _list_levels(complement, root)


def _list_levels(ranks: Integers, root: int | None) -> Tree:
    """Return the in-order binary tree over `ranks` as levels of edges from the root down, a pair of arrays (parents,
    children) per level. root: rank that is the parent of the tree's top node, None if there is none."""
    parent, rank = compute_in_order_parents(len(ranks)), np.concatenate([[-1 if root is None else root], ranks])
    levels, nodes = [], np.zeros(1, np.int64)
    while len(nodes := np.flatnonzero(np.isin(parent, nodes))):
        levels.append((rank[parent[nodes]], rank[nodes]))
    return levels[1:] if root is None else levels


def add_tree_reduce_rounds(program: Builder, tree: Tree, chunk: int) -> Rounds:
    """Add to the builder `program` the sends that reduce one chunk up a tree, one tree level per round. Each iteration
    of this generator adds the sends of one round, so that several algorithms can be interleaved.

    tree: levels of edges (parents, children), from the root down. chunk: number of the chunk.
    """
    for parents, children in reversed(tree):
        program.transfer(children, parents, chunk, reduce=True)
        yield


def add_tree_broadcast_rounds(program: Builder, tree: Tree, chunk: int) -> Rounds:
    """Add to the builder `program` the sends that broadcast one chunk down a tree, one tree level per round. Each
    iteration of this generator adds the sends of one round, so that several algorithms can be interleaved.

    tree: levels of edges (parents, children), from the root down. chunk: number of the chunk.
    """
    for parents, children in tree:
        program.transfer(parents, children, chunk)
        yield


def all_reduce(ranks: int, segments: int = 8) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the double-binary-tree all-reduce: each segment is reduced up a
    tree and broadcast down again.

    Costs for n ranks and a vector of S bytes in k segments, where a message of b bytes takes alpha + b beta seconds (h
    = log2 n, rounded down): 2h + k - 1 rounds; at most 2 S bytes sent per rank; time (2h + k - 1) (alpha + 2 S/k beta),
    near 2h alpha + 2 S beta.
    """
    program = Builder("all-reduce", "double-binary-tree", ranks, chunks=2 * segments)
    trees = build_two_trees(np.arange(ranks))
    return _run_in_segments(
        program,
        trees,
        lambda tree, chunk: run_in_sequence(
            add_tree_reduce_rounds(program, tree, chunk), add_tree_broadcast_rounds(program, tree, chunk)
        ),
    )


def broadcast(ranks: int, root: int = 0, segments: int = 8) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the double-binary-tree broadcast: rank `root` sends into both trees
    over the other ranks.

    Costs for n ranks and a vector of S bytes in k segments, where a message of b bytes takes alpha + b beta seconds (h:
    height of a tree over n-1 ranks): h + k rounds; at most S bytes sent per rank; time (h + k) (alpha + S/k beta).
    """
    program = Builder("broadcast", "double-binary-tree", ranks, chunks=2 * segments, root=root)
    trees = build_two_trees(np.roll(np.arange(ranks), -root)[1:], root)
    return _run_in_segments(program, trees, lambda tree, chunk: add_tree_broadcast_rounds(program, tree, chunk))


def reduce(ranks: int, root: int = 0, segments: int = 8) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the double-binary-tree reduce to rank `root`, the reverse of
    `broadcast`.

    Costs for n ranks and a vector of S bytes in k segments, where a message of b bytes takes alpha + b beta seconds (h:
    height of a tree over n-1 ranks): h + k rounds; S bytes sent per rank; time (h + k) (alpha + S/k beta).
    """
    program = Builder("reduce", "double-binary-tree", ranks, chunks=2 * segments, root=root)
    trees = build_two_trees(np.roll(np.arange(ranks), -root)[1:], root)
    return _run_in_segments(program, trees, lambda tree, chunk: add_tree_reduce_rounds(program, tree, chunk))


def _run_in_segments(
    program: Builder, trees: tuple[Tree, Tree], travel: Callable[[Tree, int], Rounds]
) -> CollectiveProgram:
    """Send the first half of the chunks through one tree and the second half through the other, pipelined: in every
    round one more chunk of each half starts. Return the finished program.

    program: builder of the program. trees: each as levels of edges (parents, children). travel: function (tree, chunk
    number) -> round generator that moves this chunk through the tree.
    """
    half = program.chunks // 2
    segments = (run_together([travel(trees[0], chunk), travel(trees[1], half + chunk)]) for chunk in range(half))
    return build_from_rounds(program, run_staggered(segments))
