"""Two binary trees over the same ranks, each for half of the vector; no rank is an inner node of both.

P. Sanders, J. Speck, J. L. Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
Computing 35(12), 2009; S. Jeaugey, Massively scale your deep learning training with NCCL 2.4, 2019.
Inner nodes send twice what they receive, leaves nothing: with one role of each kind, every rank sends as much as it
receives. The vector runs through in segments, one level of the trees in a round. h = log2 n, rounded down, is a tree's
height, k the number of segments. Best for medium and large vectors on many ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from meshwright.collectives.rounds import Rounds, in_turn, staggered, together, write
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers

Tree: TypeAlias = list[tuple[Integers, Integers]]  # edges of each level, from the root down: (parents, children)


def in_order_tree(n: int) -> Integers:
    """Parent of each of the nodes 1 to n of a binary tree, numbered from left to right; the root's is 0.

    Odd nodes are leaves and even ones are not; the height is log2 n, rounded down. [n + 1]; entry 0 is -1.
    """
    node = np.arange(n + 1)
    lowest_bit = node & -node
    above = node - lowest_bit  # whose right side the node lies on
    beside = above | 2 * lowest_bit  # the parent in a complete tree
    parent = np.where(beside <= n, beside, above)
    parent[0] = -1
    return parent


def two_trees(ranks: Integers, root: int | None = None) -> tuple[Tree, Tree]:
    """The in-order tree over these ranks and its complement: mirrored where their number is even, else shifted by one.

    With a root: both hang below it.
    """
    complement = ranks[::-1] if len(ranks) % 2 == 0 else np.roll(ranks, -1)
    return _edges(ranks, root), _edges(complement, root)


def _edges(ranks: Integers, root: int | None) -> Tree:
    parent, rank = in_order_tree(len(ranks)), np.concatenate([[-1 if root is None else root], ranks])
    levels, nodes = [], np.zeros(1, np.int64)
    while len(nodes := np.flatnonzero(np.isin(parent, nodes))):
        levels.append((rank[parent[nodes]], rank[nodes]))
    return levels[1:] if root is None else levels


def up(program: Builder, tree: Tree, chunk: int) -> Rounds:
    """The sum of a chunk over the tree, one level in a round."""
    for parents, children in reversed(tree):
        program.transfer(children, parents, chunk, reduce=True)
        yield


def down(program: Builder, tree: Tree, chunk: int) -> Rounds:
    """A chunk from the root to all, one level in a round."""
    for parents, children in tree:
        program.transfer(parents, children, chunk)
        yield


def all_reduce(ranks: int, segments: int = 8) -> CollectiveProgram:
    """Each segment goes up both trees and comes down again.

    2h + k - 1 rounds; at most 2 S bytes a rank; (2h + k - 1) (alpha + 2 S/k beta), near 2h alpha + 2 S beta.
    """
    program = Builder("all-reduce", "double-binary-tree", ranks, chunks=2 * segments)
    trees = two_trees(np.arange(ranks))
    return _in_segments(
        program, trees, lambda tree, chunk: in_turn(up(program, tree, chunk), down(program, tree, chunk))
    )


def broadcast(ranks: int, root: int = 0, segments: int = 8) -> CollectiveProgram:
    """The root feeds both trees over the other ranks.

    With h the height of a tree over n-1 ranks: h + k rounds; at most S bytes a rank; (h + k) (alpha + S/k beta).
    """
    program = Builder("broadcast", "double-binary-tree", ranks, chunks=2 * segments, root=root)
    trees = two_trees(np.roll(np.arange(ranks), -root)[1:], root)
    return _in_segments(program, trees, lambda tree, chunk: down(program, tree, chunk))


def reduce(ranks: int, root: int = 0, segments: int = 8) -> CollectiveProgram:
    """As `broadcast`, backwards: h + k rounds; S bytes a rank; (h + k) (alpha + S/k beta)."""
    program = Builder("reduce", "double-binary-tree", ranks, chunks=2 * segments, root=root)
    trees = two_trees(np.roll(np.arange(ranks), -root)[1:], root)
    return _in_segments(program, trees, lambda tree, chunk: up(program, tree, chunk))


def _in_segments(
    program: Builder, trees: tuple[Tree, Tree], travel: Callable[[Tree, int], Rounds]
) -> CollectiveProgram:
    """The first half of the chunks travels through the first tree, the second half through the second."""
    half = program.chunks // 2
    segments = (together([travel(trees[0], chunk), travel(trees[1], half + chunk)]) for chunk in range(half))
    return write(program, staggered(segments))
