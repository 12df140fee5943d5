"""Network topologies of clusters: switch, ring, full mesh, tori, meshes, nodes with fast inner links, spine and leaf.

Latencies are in seconds a message, bandwidths in bytes a second and direction; cables are full-duplex. On a route
through a switch, each of the two links has half of the latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshwright.program.network import Network, Routes
from meshwright.program.order import Integers

LATENCY = 5e-6  # default: about that of a collective library over 200 Gbit/s Ethernet or InfiniBand
BANDWIDTH = 25e9
GAP = 0.2  # fraction of the latency: about the sender's overhead for a message
INNER_LATENCY = 3e-6  # default: inside a node of eight H100 (NVLink 4, one direction)
INNER_BANDWIDTH = 450e9


def build_switch(ranks: int, latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> Network:
    """Build a network in which every rank has one port to a non-blocking switch: uniform links, equal distances.

    latency: seconds between two ranks. bandwidth: bytes per second of a port, in each direction.
    """
    rank = np.arange(ranks)
    hub = np.full(ranks, ranks)
    return Network(
        name="switch",
        ranks=ranks,
        link_from=np.concatenate([rank, hub]),
        link_to=np.concatenate([hub, rank]),
        latency=np.full(2 * ranks, latency / 2),
        bandwidth=np.full(2 * ranks, float(bandwidth)),
        find_routes=lambda source, target: Routes.from_hops(np.stack([source, ranks + target], axis=1)),
        gap=GAP,
        tiers=((latency, bandwidth),) * 2,
        partitions=(np.append(rank, -1),),
        switches=("switch",),
    )


def build_full_mesh(ranks: int, latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> Network:
    """Build a network with a dedicated cable between every pair of ranks.

    latency: latency of each cable in seconds. bandwidth: bytes per second of each cable, in each direction.
    """
    source, target = np.divmod(np.arange(ranks * ranks), max(ranks, 1))
    number = np.cumsum(source != target) - 1
    source, target = source[source != target], target[source != target]
    return Network(
        name="full-mesh",
        ranks=ranks,
        link_from=source,
        link_to=target,
        latency=np.full(len(source), float(latency)),
        bandwidth=np.full(len(source), float(bandwidth)),
        find_routes=lambda a, b: Routes.from_hops(number[a * ranks + b][:, None]),
        gap=GAP,
        tiers=((latency, bandwidth),) * 2,
        partitions=(np.arange(ranks), np.arange(ranks) * 2 // ranks),
    )


def build_ring(ranks: int, latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> Network:
    """Build a ring: cables to the next and previous rank; messages take the shorter direction.

    latency: latency of a cable in seconds. bandwidth: bytes per second of a cable, in each direction.
    """
    return _build_grid("ring", (ranks,), latency, bandwidth, around=True)


def build_torus(dims: Sequence[int], latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> Network:
    """Build a grid of any dimension with wrap-around cables (a torus).

    dims: sides of the grid, such as (4, 4). Consecutive ranks are neighbours in the last dimension; a side of 2 has one
    cable. latency: latency of a cable in seconds. bandwidth: bytes per second of a cable, in each direction.
    Messages are routed dimension by dimension, from the last to the first, and in each dimension in the shorter
    direction (towards higher coordinates if both directions are equally long).
    """
    return _build_grid(f"torus:{'x'.join(map(str, dims))}", tuple(dims), latency, bandwidth, around=True)


def build_mesh(dims: Sequence[int], latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> Network:
    """Build a grid of any dimension without wrap-around cables. dims: sides of the grid, such as (4, 4). latency:
    latency of a cable in seconds. bandwidth: bytes per second of a cable, in each direction."""
    return _build_grid(f"mesh:{'x'.join(map(str, dims))}", tuple(dims), latency, bandwidth, around=False)


def _build_grid(name: str, dims: tuple[int, ...], latency: float, bandwidth: float, around: bool) -> Network:
    """Build a torus or a mesh network.

    name: name of the network. dims: sides of the grid. latency, bandwidth: of each cable, in seconds, and in bytes per
    second in each direction. around: True for a torus (wrap-around cables), False for a mesh.
    """
    ranks = math.prod(dims)
    rank = np.arange(ranks)
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    number = np.full((len(dims), 2, ranks), -1)  # of the link from each rank along each axis, upwards and downwards
    link_from: list[Integers] = []
    link_to: list[Integers] = []
    for axis, (size, stride) in enumerate(zip(dims, strides, strict=True)):
        place = rank // stride % size
        for way, step in enumerate((1, -1)):
            if size == 1 or (around and size == 2 and step < 0):
                continue
            has = np.ones(ranks, np.bool_) if around else (place + step >= 0) & (place + step < size)
            number[axis, way, has] = sum(map(len, link_from)) + np.arange(has.sum())
            link_from.append(rank[has])
            link_to.append((rank + ((place + step) % size - place) * stride)[has])

    def find_routes(source: Integers, target: Integers) -> Routes:
        """Return the routes of messages from rank source[i] to rank target[i], for each i, one dimension of the grid
        after the other. source, target: [pairs]."""
        hops: list[Integers] = []
        here = source.copy()
        for axis in reversed(range(len(dims))):
            size, stride = dims[axis], strides[axis]
            away = target // stride % size - source // stride % size
            if around:
                away = (away + (size - 1) // 2) % size - (size - 1) // 2  # -(size-1)/2 .. size/2: a tie goes up
            for hop in range(int(np.abs(away).max(initial=0))):
                moves, step = hop < np.abs(away), np.sign(away)
                hops.append(np.where(moves, number[axis, (step < 0).astype(int), here], -1))
                there = (here // stride % size + step) % size
                here = np.where(moves, here + (there - here // stride % size) * stride, here)
        return Routes.from_hops(np.stack(hops, axis=1) if hops else np.zeros((len(source), 0), np.int64))

    # Possible bottlenecks: single ranks, and the halves and slices of each dimension.
    partitions = [rank]
    for size, stride in zip(dims, strides, strict=True):
        if size > 1:
            partitions += [rank // stride % size * 2 // size, rank // stride % size]
    links = sum(map(len, link_from))
    return Network(
        name=name,
        ranks=ranks,
        link_from=np.concatenate(link_from) if links else np.zeros(0, np.int64),
        link_to=np.concatenate(link_to) if links else np.zeros(0, np.int64),
        latency=np.full(links, float(latency)),
        bandwidth=np.full(links, float(bandwidth)),
        find_routes=find_routes,
        gap=GAP,
        tiers=((latency, bandwidth),) * 2,
        partitions=tuple(partitions),
        dims=dims,
    )


def build_nodes(
    nodes: int,
    devices: int,
    inner: tuple[float, float] = (INNER_LATENCY, INNER_BANDWIDTH),
    outer: tuple[float, float] = (LATENCY, BANDWIDTH),
    rails: bool = False,
    adapters: int | None = None,
) -> Network:
    """Build a network of nodes, whose devices share a fast switch, joined by an outer network.

    nodes: number of nodes. devices: ranks per node. inner, outer: (latency in seconds, bandwidth in bytes per second).
    rails: True if the outer network is one switch for each local rank: device r of a node reaches device r of every
    other node; messages to another local rank first go over inner links to the device on the target's rail (as in
    NCCL's PXN). False: one non-blocking switch for all.
    adapters: network adapters per node, each shared by equally many devices, which reach it over inner links. None:
    every device has its own.
    """
    ranks = nodes * devices
    rank = np.arange(ranks)
    node, place = np.divmod(rank, devices)
    shared = adapters is not None
    ports = nodes * adapters if adapters is not None else ranks
    port_node = np.arange(ports) // (adapters or devices)
    port_of = node * adapters + place * adapters // devices if adapters is not None else rank
    node_vertex, outside = ranks + node, ranks + nodes
    port_vertex = ranks + port_node if shared else rank
    hub = outside + (place if rails and not shared else np.zeros(ports, np.int64))
    half = np.repeat([inner[0] / 2, outer[0] / 2], [2 * ranks, 2 * ports])
    leave, enter, out, into = np.split(np.arange(2 * ranks + 2 * ports), [ranks, 2 * ranks, 2 * ranks + ports])

    def find_routes(source: Integers, target: Integers) -> Routes:
        """Return the routes of messages from rank source[i] to rank target[i], for each i. source, target: [pairs]."""
        across = node[source] != node[target]
        gate = port_of[source]  # rank or adapter at which the message leaves the node
        to_gate = np.full(len(source), shared)
        if rails and not shared:
            gate = node[source] * devices + place[target]
            to_gate = gate != source
        none = np.full(len(source), -1)
        return Routes.from_hops(
            np.stack(
                [
                    np.where(~across | to_gate, leave[source], none),
                    np.where(across & to_gate & (not shared), enter[gate if not shared else source], none),
                    np.where(across, out[gate], none),
                    np.where(across, into[port_of[target]], none),
                    np.where(~across | shared, enter[target], none),
                ],
                axis=1,
            )
        )

    described = [
        f"nodes:{nodes}x{devices}",
        *(["rails"] if rails else []),
        *([f"adapters={adapters}"] if shared else []),
    ]
    outsides = devices if rails and not shared else 1
    return Network(
        name=",".join(described),
        ranks=ranks,
        link_from=np.concatenate([rank, node_vertex, port_vertex, hub]),
        link_to=np.concatenate([node_vertex, rank, hub, port_vertex]),
        latency=half,
        bandwidth=np.repeat([float(inner[1]), float(outer[1])], [2 * ranks, 2 * ports]),
        find_routes=find_routes,
        gap=GAP,
        tiers=(inner, outer),
        partitions=(
            np.concatenate([rank, np.full(nodes + outsides, -1)]),
            np.concatenate([node, np.arange(nodes), np.full(outsides, -1)]),
        ),
        switches=(
            *(f"node {number}" for number in range(nodes)),
            *((f"rail {number}" for number in range(devices)) if outsides > 1 else ("network",)),
        ),
        ranks_per_node=devices,
    )


def build_spine_leaf(
    leaves: int,
    ranks_per_leaf: int,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    oversubscription: float = 1.0,
    spines: int = 1,
) -> Network:
    """Build a spine-leaf network: `leaves` switches with `ranks_per_leaf` ranks each, joined by `spines` switches.

    latency: latency in seconds of a message under one leaf switch; a message across a spine switch has twice this
    latency. bandwidth: bytes per second of a rank's port, in each direction. oversubscription: total bandwidth of the
    ranks of a leaf switch, divided by the total bandwidth of its cables to the spine switches, in each direction. A
    leaf switch has one cable to each spine switch, all with the same bandwidth. A message to rank t goes through spine
    number t modulo `spines`.
    """
    ranks = leaves * ranks_per_leaf
    rank = np.arange(ranks)
    leaf = rank // ranks_per_leaf
    up_leaf, up_spine = np.divmod(np.arange(leaves * spines), spines)
    leaf_vertex, spine_vertex = ranks + up_leaf, ranks + leaves + up_spine
    trunk = bandwidth * ranks_per_leaf / oversubscription / spines

    def find_routes(source: Integers, target: Integers) -> Routes:
        """Return the routes of messages from rank source[i] to rank target[i], for each i. source, target: [pairs]."""
        across, none = leaf[source] != leaf[target], np.full(len(source), -1)
        spine = target % spines
        up = 2 * ranks + leaf[source] * spines + spine
        down = 2 * ranks + leaves * spines + leaf[target] * spines + spine
        return Routes.from_hops(
            np.stack([source, np.where(across, up, none), np.where(across, down, none), ranks + target], axis=1)
        )

    described = f"spine-leaf:{leaves}x{ranks_per_leaf}"
    described += f",oversubscription={oversubscription:g}" if oversubscription != 1 else ""
    return Network(
        name=described + (f",spines={spines}" if spines > 1 else ""),
        ranks=ranks,
        link_from=np.concatenate([rank, ranks + leaf, leaf_vertex, spine_vertex]),
        link_to=np.concatenate([ranks + leaf, rank, spine_vertex, leaf_vertex]),
        latency=np.full(2 * (ranks + leaves * spines), latency / 2),
        bandwidth=np.repeat([float(bandwidth), trunk], [2 * ranks, 2 * leaves * spines]),
        find_routes=find_routes,
        gap=GAP,
        tiers=((latency, bandwidth), (2 * latency, bandwidth / oversubscription)),
        partitions=(
            np.concatenate([rank, np.full(leaves + spines, -1)]),
            np.concatenate([leaf, np.arange(leaves), np.full(spines, -1)]),
        ),
        switches=(*(f"leaf {number}" for number in range(leaves)), *(f"spine {number}" for number in range(spines))),
        ranks_per_node=ranks_per_leaf,
    )
