"""Two levels: nodes with fast links inside, slower ones between them. k nodes of g consecutive ranks each.

groups: g; unless said, the largest divisor of n that is not above its square root. Best for any size where links
between nodes are slow; the forms that use all ranks of a node at once are best for large vectors.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives import binomial_tree, pairwise, ring
from meshwright.collectives.grid import ranks_per_node
from meshwright.collectives.rounds import Rounds, write
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def all_reduce(ranks: int, groups: int | None = None) -> CollectiveProgram:
    """Reduce inside each node, all-reduce among the nodes' first ranks, broadcast inside.

    X. Jia et al., Highly scalable deep learning training system with mixed-precision, arXiv 1807.11205.
    Binomial trees inside, a ring across: with L = log2 g, rounded up, 2L + 2(k-1) rounds; 2L (alpha + S beta) inside
    + 2(k-1) alpha + 2(k-1)/k S beta across. A first rank sends L S + 2(k-1)/k S bytes, of which the last part leaves
    its node.
    """
    nodes = _nodes("all-reduce", ranks, groups)
    first, k = nodes[:, 0], len(nodes)
    program = Builder("all-reduce", "hierarchical", ranks, chunks=k)
    return write(
        program,
        binomial_tree.reduce_rounds(program, nodes, count=k),
        ring.reduce_scatter_rounds(program, first, np.arange(k)),
        ring.all_gather_rounds(program, first, np.arange(k)),
        binomial_tree.broadcast_rounds(program, nodes, count=k),
    )


def all_reduce_scattered(ranks: int, groups: int | None = None) -> CollectiveProgram:
    """Reduce-scatter inside each node, all-reduce across among ranks with the same place, all-gather inside.

    M. Cho, U. Finkler, M. Serrano, D. Kung, H. Hunter, BlueConnect, IBM Journal of R&D 63(6), 2019.
    Rings everywhere: 2(g-1) + 2(k-1) rounds; 2(n-1)/n S bytes a rank, of which 2(k-1)/n S leave the node;
    2(g-1) alpha + 2(g-1)/g S beta inside + 2(k-1) alpha + 2(k-1)/n S beta across.
    """
    nodes = _nodes("all-reduce", ranks, groups)
    k, g = nodes.shape
    program = Builder("all-reduce", "hierarchical-scatter", ranks, chunks=ranks)
    share = np.arange(ranks).reshape(g, k)  # row i: what the ranks with place i sum up across
    return write(
        program,
        ring.reduce_scatter_rounds(program, nodes, share[:, 0], k),
        ring.reduce_scatter_rounds(program, nodes.T, share),
        ring.all_gather_rounds(program, nodes.T, share),
        ring.all_gather_rounds(program, nodes, share[:, 0], k),
    )


def reduce_scatter(ranks: int, groups: int | None = None) -> CollectiveProgram:
    """Inside each node first, for the ranks with the same place in all nodes; then across.

    (g-1) + (k-1) rounds; (n-1)/n S bytes a rank, of which (k-1)/n S leave the node;
    (g-1) alpha + (g-1)/g S beta inside, in messages of k blocks, + (k-1) alpha + (k-1)/n S beta across.
    """
    nodes = _nodes("reduce-scatter", ranks, groups)
    program = Builder("reduce-scatter", "hierarchical", ranks, chunks=ranks)
    return write(
        program,
        ring.reduce_scatter_rounds(program, nodes[:, None], nodes),  # in every node, for each node's blocks
        ring.reduce_scatter_rounds(program, nodes.T, nodes.T),
    )


def all_gather(ranks: int, groups: int | None = None) -> CollectiveProgram:
    """Across first, among the ranks with the same place; then what each has gathered inside the node.

    Z. Zhang et al., MiCS: near-linear scaling for training gigantic model on public cloud, VLDB 2022.
    (k-1) + (g-1) rounds; (n-1)/n S bytes a rank, of which (k-1)/n S leave the node;
    (k-1) alpha + (k-1)/n S beta across + (g-1) alpha + (g-1)/g S beta inside, in messages of k blocks.
    """
    nodes = _nodes("all-gather", ranks, groups)
    program = Builder("all-gather", "hierarchical", ranks, chunks=ranks)
    return write(
        program,
        ring.all_gather_rounds(program, nodes.T, nodes.T),
        ring.all_gather_rounds(program, nodes[:, None], nodes),
    )


def broadcast(ranks: int, root: int = 0, groups: int | None = None) -> CollectiveProgram:
    """To one rank of every node, then inside: binomial trees. log2 k + log2 g rounds, each rounded up, of S bytes."""
    nodes = _nodes("broadcast", ranks, groups)
    node, place = divmod(root, nodes.shape[1])
    program = Builder("broadcast", "hierarchical", ranks, chunks=1, root=root)
    return write(
        program,
        binomial_tree.broadcast_rounds(program, nodes[:, place], node),
        binomial_tree.broadcast_rounds(program, nodes, place),
    )


def reduce(ranks: int, root: int = 0, groups: int | None = None) -> CollectiveProgram:
    """Inside each node, then across: binomial trees. log2 g + log2 k rounds, each rounded up, of S bytes."""
    nodes = _nodes("reduce", ranks, groups)
    node, place = divmod(root, nodes.shape[1])
    program = Builder("reduce", "hierarchical", ranks, chunks=1, root=root)
    return write(
        program,
        binomial_tree.reduce_rounds(program, nodes, place),
        binomial_tree.reduce_rounds(program, nodes[:, place], node),
    )


def all_to_all(ranks: int, groups: int | None = None) -> CollectiveProgram:
    """Inside the node, each rank hands the one with place j all that is for place j anywhere; then across, where one
    message carries what all ranks of a node have for one rank. Copies in between bring each message together.

    C. Hwang et al., Tutel: adaptive mixture-of-experts at scale, MLSys 2023, its two-dimensional hierarchical form.
    (g-1) + (k-1) rounds; (g-1)/g S + (k-1)/k S bytes a rank; (g-1) alpha + (g-1)/g S beta inside + (k-1) alpha +
    (k-1)/k S beta across, in k-1 messages instead of n-g.
    """
    nodes = _nodes("all-to-all", ranks, groups)
    k, g = nodes.shape
    program = Builder("all-to-all", "hierarchical", ranks, chunks=ranks, scratch=2 * ranks)
    output, ready, met = ranks, 2 * ranks, 3 * ranks
    rank = nodes[..., None]  # [k, g, 1]

    def sort(source: int, rows: int, columns: int) -> Rounds:
        """Copy blocks from [rows, columns] order to [columns, rows]."""
        place = np.arange(ranks)
        program.copy(rank, source + place, ready + place % columns * rows + place // columns)
        yield

    def keep(source: Integers, into: Integers, count: int) -> Rounds:
        program.copy(nodes, source, into, count)
        yield

    node, place = np.divmod(nodes, g)
    return write(
        program,
        sort(0, k, g),  # now by place, then by node
        keep(ready + place * k, met + place * k, k),
        pairwise.all_to_all_rounds(program, nodes, ready + np.arange(g) * k, met + np.arange(g) * k, k),
        sort(met, g, k),  # from (sender's place, node) to (node, sender's place)
        keep(ready + node * g, output + node * g, g),
        pairwise.all_to_all_rounds(program, nodes.T, ready + np.arange(k) * g, output + np.arange(k) * g, g),
    )


def _nodes(operation: str, ranks: int, groups: int | None) -> Integers:
    """[k, g] ranks."""
    return np.arange(ranks).reshape(-1, ranks_per_node(f"hierarchical {operation}", ranks, groups))
