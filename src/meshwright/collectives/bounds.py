"""What no program can beat on a network: the farthest that data must come, and the bytes that must cross its cuts.

Both are bounds in the simulator's own model: messages pay the latency of their path, links carry no more than their
bandwidth, and a message is a sum of contributions that nobody can take apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.program.network import Floats, Network, sum_by_index
from meshwright.program.order import Integers


def lower_bound_seconds(operation: str, network: Network, total_bytes: float, root: int = 0) -> float:
    """Seconds that any program needs; total_bytes: the full vector.

    The larger of two: the least latency from a rank to the farthest one that needs its data; and, over each way to
    divide the ranks into blocks that the network names (single ranks, nodes, halves of a torus ...), the least latency
    of a message plus the time in which the links out of a block, into it, or of all blocks together carry what must
    cross them. For all-reduce on uniform links that is alpha + 2(n-1)/n S beta.
    """
    if network.ranks == 1:
        return 0.0
    latency = _farthest(operation, network, root)
    if total_bytes == 0 or operation == "barrier":
        return latency
    transport = max((_cut_seconds(operation, network, part, root) for part in network.partitions), default=0.0)
    return max(latency, network.least_latency + transport * total_bytes)


def _farthest(operation: str, network: Network, root: int) -> float:
    if operation == "send-receive":
        target = network.ranks - 1 if root != network.ranks - 1 else 0
        return float(network.compute_distances(root)[target])
    if operation in ("broadcast", "scatter"):
        return float(network.compute_distances(root).max())
    if operation in ("reduce", "gather"):
        return float(network.compute_distances(root, towards=True).max())
    # Everybody needs something of everybody: of rank 0 and for rank 0, at the least.
    return float(max(network.compute_distances(0).max(), network.compute_distances(0, towards=True).max()))


@dataclass(frozen=True)
class _Traffic:
    """Vectors that must leave each block, enter it, and pass between blocks all told."""

    out: Floats
    into: Floats
    total: float


def _cut_seconds(operation: str, network: Network, block: Integers, root: int) -> float:
    """Seconds a byte of the vector that the links between blocks need."""
    blocks = int(block.max()) + 1
    if blocks < 2:
        return 0.0
    tail, head = block[network.link_from], block[network.link_to]
    crosses = tail != head
    leaves, enters = crosses & (tail >= 0), crosses & (head >= 0)
    capacity_out = sum_by_index(tail[leaves], network.bandwidth[leaves], blocks)
    capacity_in = sum_by_index(head[enters], network.bandwidth[enters], blocks)
    traffic = _needed(operation, block[: network.ranks], blocks, root)
    return max(
        float((traffic.out / capacity_out).max()),
        float((traffic.into / capacity_in).max()),
        traffic.total / float(min(capacity_out.sum(), capacity_in.sum())),
    )


def _needed(operation: str, block: Integers, blocks: int, root: int) -> _Traffic:
    """What has to cross between blocks, in vectors. block: of each rank.

    The totals: a sum over ranks in k blocks needs a message from each other block to where a chunk is wanted, k-1 a
    chunk; the same goes for what is handed out. All-reduce needs both, 2(k-1): to let everybody know what everybody
    knows takes 2(k-1) messages (F. Harary, A. Schwenk, The communication problem on graphs and digraphs, 1974).
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
            target = ranks - 1 if root != ranks - 1 else 0
            apart = float(block[root] != block[target])
            at_target = (np.arange(blocks) == block[target]).astype(np.float64)
            return _Traffic(at_root * apart, at_target * apart, apart)
