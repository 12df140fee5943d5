"""Lower bounds of the time of an operation on a network: latency to the farthest rank, and bytes across its cuts.

Both hold in the simulator's model: messages take the latency of their route, links carry at most their bandwidth, and a
reduced message cannot be separated into its contributions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.program.contract import find_receiver
from meshwright.program.network import Floats, Network, sum_by_index
from meshwright.program.order import Integers


def compute_lower_bound_seconds(operation: str, network: Network, total_bytes: float, root: int = 0) -> float:
    """Return a lower bound on the seconds that any program needs for a collective operation on a vector of
    `total_bytes` bytes: the larger of a latency bound and a bandwidth bound. operation: name such as "all-reduce".
    network: ranks, switches and links. root: source or destination rank of a rooted operation.

    Latency bound: latency from a rank to the farthest rank that needs its data. Bandwidth bound: the largest time over
    all known cuts of the network into blocks (single ranks, nodes, halves of a torus ...). The time of a cut is the
    bytes that must leave or enter a block, divided by the bandwidth of the block's links, plus the lowest latency of a
    message. For all-reduce on uniform links the bandwidth bound is alpha + 2(n-1)/n S beta (n ranks, S bytes, alpha
    seconds per message, beta seconds per byte).
    """
    if network.ranks == 1:
        return 0.0
    latency = _compute_latency_bound(operation, network, root)
    if total_bytes == 0 or operation == "barrier":
        return latency
    transport = max((_compute_cut_seconds(operation, network, part, root) for part in network.partitions), default=0.0)
    return max(latency, network.min_latency + transport * total_bytes)


def _compute_latency_bound(operation: str, network: Network, root: int) -> float:
    """Return a lower bound in seconds of the time of a collective operation: the latency from a rank to the farthest
    rank that needs its data.

    operation: name such as "all-reduce". root: source or destination rank of a rooted operation. network: network with
    the latency of each link.
    """
    if operation == "send-receive":
        return float(network.compute_distances(root)[find_receiver(network.ranks, root)])
    if operation in ("broadcast", "scatter"):
        return float(network.compute_distances(root).max())
    if operation in ("reduce", "gather"):
        return float(network.compute_distances(root, towards=True).max())
    # All pairs communicate; paths from and to rank 0 bound the latency.
    return float(max(network.compute_distances(0).max(), network.compute_distances(0, towards=True).max()))


@dataclass(frozen=True)
class _Traffic:
    """Minimum traffic between blocks of ranks (such as nodes) that a collective operation requires, as multiples of the
    vector's bytes.

    out, into: [blocks], traffic that must leave and enter each block. total: traffic between all blocks together.
    """

    out: Floats
    into: Floats
    total: float


def _compute_cut_seconds(operation: str, network: Network, block: Integers, root: int) -> float:
    """Return the minimum time of a collective operation on the links between blocks of ranks, in seconds per byte of
    the vector; 0.0 for a single block. The time is the required traffic divided by the bandwidth of the links that
    carry the traffic. The result is the maximum for traffic out of a block, into a block, and between all blocks
    together.

    operation: name such as "all-reduce". block: [vertices], block number of each rank, then of each switch; -1: switch
    outside every block. root: source or destination rank of a rooted operation. network: network whose links cross the
    block boundaries.
    """
    blocks = int(block.max()) + 1
    if blocks < 2:
        return 0.0
    tail, head = block[network.link_from], block[network.link_to]
    crosses = tail != head
    leaves, enters = crosses & (tail >= 0), crosses & (head >= 0)
    capacity_out = sum_by_index(tail[leaves], network.bandwidth[leaves], blocks)
    capacity_in = sum_by_index(head[enters], network.bandwidth[enters], blocks)
    traffic = _compute_required_traffic(operation, block[: network.ranks], blocks, root)
    return max(
        float((traffic.out / capacity_out).max()),
        float((traffic.into / capacity_in).max()),
        traffic.total / float(min(capacity_out.sum(), capacity_in.sum())),
    )


def _compute_required_traffic(operation: str, block: Integers, blocks: int, root: int) -> _Traffic:
    """Return the minimum traffic between blocks of ranks (such as nodes) that a collective operation requires, as
    multiples of the vector's bytes.

    operation: name such as "all-reduce". block: [ranks], block number of each rank. blocks: number of blocks (k in the
    text below). root: source or destination rank.
    A reduction sends each chunk k-1 times between blocks, once from every block except the block that ends with the
    sum; a broadcast also sends each chunk k-1 times; an all-reduce sends each chunk 2(k-1) times, because gossip among
    k parties takes 2(k-1) directed messages (F. Harary, A. Schwenk, The communication problem on graphs and digraphs,
    1974).
    """
    ranks = len(block)
    share = np.bincount(block, minlength=blocks) / ranks
    at_root = (np.arange(blocks) == block[root]).astype(np.float64)
    elsewhere = 1 - at_root
    whole = np.ones(blocks)
    match operation:
        case "all-reduce":
            return _Traffic(whole, whole, 2.0 * (blocks - 1))
        case "reduce-scatter":
            return _Traffic(1 - share, share, blocks - 1.0)
        case "all-gather":
            return _Traffic(share, 1 - share, blocks - 1.0)
        case "broadcast":
            return _Traffic(at_root, elsewhere, blocks - 1.0)
        case "reduce":
            return _Traffic(elsewhere, at_root, blocks - 1.0)
        case "scatter":
            return _Traffic(at_root * (1 - share), elsewhere * share, float((elsewhere * share).sum()))
        case "gather":
            return _Traffic(elsewhere * share, at_root * (1 - share), float((elsewhere * share).sum()))
        case "all-to-all":
            crossing = ranks * share * (1 - share)
            return _Traffic(crossing, crossing, float(crossing.sum()))
        case _:
            target = block[find_receiver(ranks, root)]
            apart = float(block[root] != target)
            at_target = (np.arange(blocks) == target).astype(np.float64)
            return _Traffic(at_root * apart, at_target * apart, apart)
