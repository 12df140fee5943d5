"""Hierarchical algorithms for two tiers of links: k nodes of g consecutive ranks each, with fast links inside a node.

By default g is the largest divisor of the number n of ranks up to its square root. Best for any size if links between
nodes are slow; the algorithms that use all ranks of a node at once are best for large vectors.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives import binomial_tree, pairwise, ring
from meshwright.collectives.grid import resolve_ranks_per_node
from meshwright.collectives.rounds import Rounds, build_from_rounds
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def all_reduce(ranks: int, ranks_per_node: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the hierarchical all-reduce: reduce to the first rank inside each
    node, all-reduce between the nodes' first ranks, broadcast inside each node.

    ranks_per_node: number g of ranks in each node; None: the largest divisor of n up to its square root. X. Jia et al.,
    Highly scalable deep learning training system with mixed-precision, arXiv 1807.11205. Binomial trees inside nodes, a
    ring between nodes.

    Costs for n ranks in k nodes of g ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta
    seconds (L = log2 g, rounded up): 2L + 2(k-1) rounds; time 2L (alpha + S beta) inside nodes + 2(k-1) alpha +
    2(k-1)/k S beta between nodes. The first rank of a node sends L S bytes inside its node and 2(k-1)/k S bytes to
    another node.
    """
    nodes = _arrange_nodes("all-reduce", ranks, ranks_per_node)
    first, k = nodes[:, 0], len(nodes)
    program = Builder("all-reduce", "hierarchical", ranks, chunks=k)
    return build_from_rounds(
        program,
        binomial_tree.add_reduce_rounds(program, nodes, count=k),
        ring.add_reduce_scatter_rounds(program, first, np.arange(k)),
        ring.add_all_gather_rounds(program, first, np.arange(k)),
        binomial_tree.add_broadcast_rounds(program, nodes, count=k),
    )


def all_reduce_scattered(ranks: int, ranks_per_node: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the BlueConnect all-reduce: reduce-scatter inside each node,
    all-reduce between nodes among the ranks with the same local rank, all-gather inside each node.

    ranks_per_node: number g of ranks in each node; None: the largest divisor of n up to its square root. M. Cho, U.
    Finkler, M. Serrano, D. Kung, H. Hunter, BlueConnect, IBM Journal of R&D 63(6), 2019. All phases use rings.

    Costs for n ranks in k nodes of g ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta
    seconds: 2(g-1) + 2(k-1) rounds; 2(n-1)/n S bytes sent per rank, of which 2(k-1)/n S leave the node; time 2(g-1)
    alpha + 2(g-1)/g S beta inside nodes + 2(k-1) alpha + 2(k-1)/n S beta between nodes.
    """
    nodes = _arrange_nodes("all-reduce", ranks, ranks_per_node)
    k, g = nodes.shape
    program = Builder("all-reduce", "hierarchical-scatter", ranks, chunks=ranks)
    share = np.arange(ranks).reshape(g, k)  # row i: slots that ranks of local rank i reduce across nodes
    return build_from_rounds(
        program,
        ring.add_reduce_scatter_rounds(program, nodes, share[:, 0], k),
        ring.add_reduce_scatter_rounds(program, nodes.T, share),
        ring.add_all_gather_rounds(program, nodes.T, share),
        ring.add_all_gather_rounds(program, nodes, share[:, 0], k),
    )


def reduce_scatter(ranks: int, ranks_per_node: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the hierarchical reduce-scatter: first inside each node, then
    between nodes. The second phase runs among the ranks with the same local rank. Both phases use rings.

    ranks_per_node: number g of ranks in each node; None: the largest divisor of n up to its square root.

    Costs for n ranks in k nodes of g ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta
    seconds: (g-1) + (k-1) rounds; (n-1)/n S bytes sent per rank, of which (k-1)/n S leave the node; time (g-1) alpha +
    (g-1)/g S beta inside nodes + (k-1) alpha + (k-1)/n S beta between nodes. Each message inside a node has k blocks,
    of 1/n of the vector each.
    """
    nodes = _arrange_nodes("reduce-scatter", ranks, ranks_per_node)
    program = Builder("reduce-scatter", "hierarchical", ranks, chunks=ranks)
    return build_from_rounds(
        program,
        ring.add_reduce_scatter_rounds(program, nodes[:, None], nodes),  # in every node, for each node's blocks
        ring.add_reduce_scatter_rounds(program, nodes.T, nodes.T),
    )


def all_gather(ranks: int, ranks_per_node: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the hierarchical all-gather: first between nodes, then inside each
    node. The first phase runs among the ranks with the same local rank. Both phases use rings.

    ranks_per_node: number g of ranks in each node; None: the largest divisor of n up to its square root. Z. Zhang et
    al., MiCS: near-linear scaling for training gigantic model on public cloud, VLDB 2022.

    Costs for n ranks in k nodes of g ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta
    seconds: (k-1) + (g-1) rounds; (n-1)/n S bytes sent per rank, of which (k-1)/n S leave the node; time (k-1) alpha +
    (k-1)/n S beta between nodes + (g-1) alpha + (g-1)/g S beta inside nodes. Each message inside a node has k blocks,
    of 1/n of the vector each.
    """
    nodes = _arrange_nodes("all-gather", ranks, ranks_per_node)
    program = Builder("all-gather", "hierarchical", ranks, chunks=ranks)
    return build_from_rounds(
        program,
        ring.add_all_gather_rounds(program, nodes.T, nodes.T),
        ring.add_all_gather_rounds(program, nodes[:, None], nodes),
    )


def broadcast(ranks: int, root: int = 0, ranks_per_node: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the hierarchical broadcast from rank `root`: to one rank of every
    node, then inside each node. Both phases use binomial trees.

    ranks_per_node: number g of ranks in each node; None: the largest divisor of n up to its square root.

    Costs for n ranks in k nodes of g ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta
    seconds: log2 k + log2 g rounds, with each logarithm rounded up; every message has S bytes.
    """
    nodes = _arrange_nodes("broadcast", ranks, ranks_per_node)
    node, place = divmod(root, nodes.shape[1])
    program = Builder("broadcast", "hierarchical", ranks, chunks=1, root=root)
    return build_from_rounds(
        program,
        binomial_tree.add_broadcast_rounds(program, nodes[:, place], node),
        binomial_tree.add_broadcast_rounds(program, nodes, place),
    )


def reduce(ranks: int, root: int = 0, ranks_per_node: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the hierarchical reduce to rank `root`: first inside each node to
    one rank of the node, then between these ranks. Both phases use binomial trees.

    ranks_per_node: number g of ranks in each node; None: the largest divisor of n up to its square root.

    Costs for n ranks in k nodes of g ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta
    seconds: log2 g + log2 k rounds, with each logarithm rounded up; every message has S bytes.
    """
    nodes = _arrange_nodes("reduce", ranks, ranks_per_node)
    node, place = divmod(root, nodes.shape[1])
    program = Builder("reduce", "hierarchical", ranks, chunks=1, root=root)
    return build_from_rounds(
        program,
        binomial_tree.add_reduce_rounds(program, nodes, place),
        binomial_tree.add_reduce_rounds(program, nodes[:, place], node),
    )


def all_to_all(ranks: int, ranks_per_node: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the hierarchical all-to-all: first inside each node, then between
    nodes. The second phase runs among the ranks with the same local rank.

    ranks_per_node: number g of ranks in each node; None: the largest divisor of n up to its square root. Inside a node,
    the rank with local rank l collects all blocks for ranks with local rank l of any node; this rank then sends one
    message to each other node. Copies between the two phases make each message contiguous. Source: the two-dimensional
    hierarchical all-to-all of C. Hwang et al., Tutel: adaptive mixture-of-experts at scale, MLSys 2023.

    Costs for n ranks in k nodes of g ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta
    seconds: (g-1) + (k-1) rounds; (g-1)/g S + (k-1)/k S bytes sent per rank; time (g-1) alpha + (g-1)/g S beta inside
    nodes + (k-1) alpha + (k-1)/k S beta between nodes, in k-1 messages instead of the n-g of a direct exchange.
    """
    nodes = _arrange_nodes("all-to-all", ranks, ranks_per_node)
    k, g = nodes.shape
    program = Builder("all-to-all", "hierarchical", ranks, chunks=ranks, scratch=2 * ranks)
    output, ready, met = ranks, 2 * ranks, 3 * ranks
    rank = nodes[..., None]  # [k, g, 1]

    def reorder_blocks(source: int, rows: int, columns: int) -> Rounds:
        """Add to the program the round in which every rank transposes its blocks (data for one rank, one slot each)
        from [rows, columns] to [columns, rows] order. A generator of this one round, which can be interleaved with
        others.

        source: first slot read; the blocks are written to the scratch slots from `ready` on. rows, columns: numbers
        whose product is the number of ranks.
        """
        place = np.arange(ranks)
        program.copy(rank, source + place, ready + place % columns * rows + place // columns)
        yield

    def copy_slots(source: Integers, into: Integers, count: int) -> Rounds:
        """Add to the program the round in which every rank copies `count` slots (buffers for one chunk): a generator of
        this one round, which can be interleaved with others. source, into: [nodes, ranks per node], first slot read and
        written on each rank."""
        program.copy(nodes, source, into, count)
        yield

    node, place = np.divmod(nodes, g)
    return build_from_rounds(
        program,
        reorder_blocks(0, k, g),  # now by local rank, then by node
        copy_slots(ready + place * k, met + place * k, k),
        pairwise.add_all_to_all_rounds(program, nodes, ready + np.arange(g) * k, met + np.arange(g) * k, k),
        reorder_blocks(met, g, k),  # from (sender's local rank, node) to (node, sender's local rank)
        copy_slots(ready + node * g, output + node * g, g),
        pairwise.add_all_to_all_rounds(program, nodes.T, ready + np.arange(k) * g, output + np.arange(k) * g, g),
    )


def _arrange_nodes(operation: str, ranks: int, ranks_per_node: int | None) -> Integers:
    """Return the ranks of each node: [nodes, ranks per node], consecutive ranks in a node.

    operation: name for error messages. ranks_per_node: number of ranks in each node; None: the largest divisor of
    `ranks` up to its square root. Raises UserError if `ranks_per_node` does not divide `ranks`.
    """
    return np.arange(ranks).reshape(-1, resolve_ranks_per_node(f"hierarchical {operation}", ranks, ranks_per_node))
