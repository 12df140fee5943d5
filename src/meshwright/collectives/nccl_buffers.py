"""Device memory of NCCL's buffers, which it allocates outside torch's allocator: an upper estimate for a layout.

Between two GPUs of a node each channel of a connection has buffers of all three protocols at the receiver (LL 512 KiB,
LL128 4.7 MiB, Simple 4 MiB: NVIDIA/nccl, src/init.cc `computeBuffSizes`, src/include/device.h; src/transport/p2p.cc),
which pages of 2 MiB round up to 10 MiB, and a page of flags at both ends.

Published: an all-to-all of 8 H100 takes 3.28 GB, in buffers of 10 and 2 MiB (NVIDIA/nccl, issue 1685), here 3.29 GB;
all-reduces of groups of 3 or 4 A100 take 688 MB, of pairs 544 MB (issue 964), here 705 MB. Fewer channels (16 of an
H800, 2 to 4 without NVLink) take less. Not counted: NVLink SHARP, network plug-ins.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from meshwright.collectives.communicators import Communicator, list_communicators
from meshwright.layout import Layout

CONNECTION_BYTES = (10 + 2 + 2) << 20
"""Bytes on each rank of one channel of a connection over which it sends and receives."""
CHANNELS = 24
"""Channels of collectives between GPUs with NVLink (A100 and H100: "24 coll channels, 32 p2p channels per peer")."""
NODE_PEER_CHANNELS, NETWORK_PEER_CHANNELS = 32, 2
"""Channels of point-to-point messages to each rank of the same node, and of other nodes (NCCL_NCHANNELS_PER_NET_PEER).
"""
NEIGHBOURS = 2
"""Connections of a channel for collectives: the ring's and the tree's."""


def estimate_buffer_bytes(
    layout: Layout, devices_per_node: int, sub_axes: Mapping[str, Communicator] = MappingProxyType({})
) -> int:
    """Return the bytes that NCCL's buffers take on one rank, at most: every communicator has connected all of its
    algorithms, and shares no buffers with another (the default of `ncclCommSplit`). 0 for one rank.

    devices_per_node: GPUs of a node; messages to other nodes have fewer channels. sub_axes: as in
    `list_communicators`."""
    total = 0
    for (size, stride, _), axes in list_communicators(layout, sub_axes).items():
        peers = max(_count_peers(layout, axis) for axis in axes)
        near = min(peers, max(0, devices_per_node // stride - 1))
        channels = near * NODE_PEER_CHANNELS + (peers - near) * NETWORK_PEER_CHANNELS
        if any(axis not in ("pp", "cp", "ep") for axis in axes):
            channels += NEIGHBOURS * CHANNELS
        total += channels * CONNECTION_BYTES
        assert peers < size
    return total


def _count_peers(layout: Layout, axis: str) -> int:
    """Return the number of ranks to which a rank sends point-to-point messages over an axis: neighbours in the pipeline
    and in ring attention, all others in an all-to-all."""
    if axis not in ("cp", "ep", "pp"):
        return 0
    others = layout.group_size(axis) - 1
    return min(2, others) if axis == "pp" or (axis == "cp" and layout.cp_method == "ring") else others
