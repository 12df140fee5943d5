"""Network model: vertices (ranks and switches), directed links, and the route between each pair of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.program.order import Integers, expand_ranges

Floats: TypeAlias = NDArray[np.float64]


def sum_by_index(index: Integers, values: ArrayLike, length: int) -> Floats:
    """Return the sums of those entries of `values` that have equal `index`: [length].

    Entry i of the result is the sum of values[j] over all j with index[j] = i.
    """
    return np.bincount(index, np.asarray(values), minlength=length).astype(np.float64)


@dataclass(frozen=True)
class Routes:
    """Routes of messages in a network; route i takes the links `link[first[i] : first[i + 1]]`, in order.

    first: [routes + 1], positions in `link`. link: [hops of all routes], link numbers.
    """

    first: Integers
    link: Integers

    def __len__(self) -> int:
        """Return the number of routes."""
        return len(self.first) - 1

    @classmethod
    def from_hops(cls, hops: ArrayLike) -> Routes:
        """Build routes from a matrix [routes, hops] of link numbers, in which -1 stands for no hop."""
        hops = np.asarray(hops, np.int64)
        taken = hops >= 0
        return cls(np.concatenate([[0], np.cumsum(taken.sum(axis=1))]), hops[taken])

    @cached_property
    def route(self) -> Integers:
        """Number of the route to which each entry of `link` belongs: [hops of all routes]."""
        return np.repeat(np.arange(len(self)), np.diff(self.first))

    def sum_over_links(self, of_link: Floats) -> Floats:
        """Return the sum of a quantity over the links of each route: [routes].

        of_link: [links], the quantity of each link, such as its latency.
        """
        return sum_by_index(self.route, of_link[self.link], len(self))

    def select_links(self, routes: Integers) -> tuple[Integers, Integers]:
        """Return all hops of the routes with numbers `routes`, as two arrays [hops]: index into `routes` of the route
        that takes the hop, and link number."""
        position, hop = expand_ranges(self.first[routes], self.first[routes + 1])
        return position, self.link[hop]


@dataclass(frozen=True)
class Network:
    """Network of ranks (vertices 0 to ranks - 1), switches (the vertices after them) and directed links.

    Attributes:
        name: Text for reports.
        ranks: Number of ranks.
        link_from, link_to: [links], vertices. A full-duplex cable is two links.
        latency: [links], seconds that a link adds to a message.
        bandwidth: [links], bytes per second.
        find_routes: Function (source ranks [n], target ranks [n]) -> the n routes between these pairs.
        tiers: Two pairs (latency in seconds, bytes per second), from which closed-form times of algorithms are
            computed: between ranks of one node or leaf switch, and between other ranks. Both are equal in a uniform
            network.
        gap: Extra delay between two messages of one group (steps posted together) that start on the same link, as a
            fraction of the message's latency (the gap of LogP, D. Culler et al., PPoPP 1993).
        partitions: Cuts of the network that may be bottlenecks, for the lower bound: arrays [vertices] with the index
            of each vertex's block; -1 for switches outside every block.
        switches: Names of the switches.
        dims: Sides of a torus or mesh, the default for algorithms on grids; None for other networks.
        ranks_per_node: Number of ranks in each node, the default for hierarchical algorithms; None for networks without
            nodes.
    """

    name: str
    ranks: int
    link_from: Integers
    link_to: Integers
    latency: Floats
    bandwidth: Floats
    find_routes: Callable[[Integers, Integers], Routes]
    tiers: tuple[tuple[float, float], tuple[float, float]] = ((0.0, np.inf), (0.0, np.inf))
    gap: float = 0.0
    partitions: tuple[Integers, ...] = ()
    switches: tuple[str, ...] = ()
    dims: tuple[int, ...] | None = None
    ranks_per_node: int | None = None

    @property
    def links(self) -> int:
        """Number of directed links of the network."""
        return len(self.latency)

    @property
    def vertices(self) -> int:
        """Number of vertices of the network: ranks and switches."""
        return self.ranks + len(self.switches)

    def format_vertex(self, vertex: int) -> str:
        """Return the text of vertex number `vertex`: `rank 3`, or the name of a switch."""
        return f"rank {vertex}" if vertex < self.ranks else self.switches[vertex - self.ranks]

    def format_link(self, link: int) -> str:
        """Return the text of link number `link`: `rank 3 → rank 4`, with a number if several links join the same
        vertices."""
        ends = (self.link_from == self.link_from[link]) & (self.link_to == self.link_to[link])
        parallel = np.flatnonzero(ends)
        number = f" (link {np.searchsorted(parallel, link)})" if len(parallel) > 1 else ""
        return (
            f"{self.format_vertex(int(self.link_from[link]))} → {self.format_vertex(int(self.link_to[link]))}{number}"
        )

    def compute_distances(self, rank: int, towards: bool = False) -> Floats:
        """Return the latency in seconds of the fastest path from `rank` to each rank, indexed by rank.

        towards: True for the paths from each rank to `rank` instead.
        """
        tail, head = (self.link_to, self.link_from) if towards else (self.link_from, self.link_to)
        distance = np.full(self.vertices, np.inf)
        distance[rank] = 0.0
        for _ in range(self.vertices):
            before = distance.copy()
            np.minimum.at(distance, head, before[tail] + self.latency)
            if np.array_equal(before, distance):
                break
        return distance[: self.ranks]

    @cached_property
    def min_latency(self) -> float:
        """Lower bound of the latency between any two ranks, in seconds; 0 for a single rank. It is the minimum of two
        numbers: the lowest latency of a link between two ranks; the lowest latency of a link from a rank to a switch,
        plus the lowest latency of a link from a switch to a rank."""
        if self.ranks == 1:
            return 0.0
        into = self.latency[self.link_to < self.ranks].min()
        leaving = self.link_from < self.ranks
        direct = self.link_to[leaving] < self.ranks
        return float((self.latency[leaving] + np.where(direct, 0.0, into)).min())
