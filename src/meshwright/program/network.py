"""A network as data: vertices (ranks and switches), links of one direction each, and the route from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.program.order import Integers, concatenate_ranges

Floats: TypeAlias = NDArray[np.float64]


def totals(index: Integers, values: ArrayLike, length: int) -> Floats:
    """Sum of the values that belong to each index 0 to length - 1."""
    return np.bincount(index, np.asarray(values), minlength=length).astype(np.float64)


@dataclass(frozen=True)
class Routes:
    """Routes one behind the other: those links that route i takes are `link[first[i] : first[i + 1]]`."""

    first: Integers
    link: Integers

    def __len__(self) -> int:
        return len(self.first) - 1

    @classmethod
    def from_hops(cls, hops: ArrayLike) -> Routes:
        """From a matrix with one row a route and one column a hop; -1 stands for no hop."""
        hops = np.asarray(hops, np.int64)
        taken = hops >= 0
        return cls(np.concatenate([[0], np.cumsum(taken.sum(axis=1))]), hops[taken])

    @cached_property
    def route(self) -> Integers:
        """The route that each entry of `link` belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.first))

    def sum(self, of_link: Floats) -> Floats:
        """Sum of a quantity of links over each route."""
        return totals(self.route, of_link[self.link], len(self))

    def entries(self, routes: Integers) -> tuple[Integers, Integers]:
        """The links of some routes, and beside each the position in `routes` that it belongs to."""
        start, end = self.first[routes], self.first[routes + 1]
        return np.repeat(np.arange(len(routes)), end - start), self.link[concatenate_ranges(start, end)]


@dataclass(frozen=True)
class Network:
    """Vertices 0 to ranks - 1 are the ranks, those after them switches; a link leads from one vertex to another.

    latency: seconds that a link adds to a message; bandwidth: bytes a second that it carries in its direction. A cable
    that carries as much both ways at once is two links. `find_routes(sources, targets)` gives one route a pair of
    different ranks: a path of links from one to the other. `tiers`: (latency, bandwidth) of a message between ranks
    that are near each other, and of one between ranks that are far: what closed forms go by. `gap`: the part of a
    message's latency for which it holds up the next one that the same group sends over the same first link (as in LogP,
    D. Culler et al., PPoPP 1993). `partitions` say where to look for bottlenecks: each gives every vertex the number of
    its block, or -1 to vertices (never ranks) that belong to none. `dims` and `groups` are what the network's shape
    suggests to algorithms that ask for it: the sides of a torus, the ranks of one node.
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
    groups: int | None = None

    @property
    def links(self) -> int:
        return len(self.latency)

    @property
    def vertices(self) -> int:
        return self.ranks + len(self.switches)

    def route(self, source: int, target: int) -> Integers:
        """The links that a message from one rank to another takes, in their order."""
        return self.find_routes(np.array([source]), np.array([target])).link

    def vertex_name(self, vertex: int) -> str:
        """`rank 3`, or the name of a switch."""
        return f"rank {vertex}" if vertex < self.ranks else self.switches[vertex - self.ranks]

    def link_name(self, link: int) -> str:
        """`rank 3 → rank 4`; of several side by side, which."""
        ends = (self.link_from == self.link_from[link]) & (self.link_to == self.link_to[link])
        beside = np.flatnonzero(ends)
        number = f" (link {np.searchsorted(beside, link)})" if len(beside) > 1 else ""
        return f"{self.vertex_name(int(self.link_from[link]))} → {self.vertex_name(int(self.link_to[link]))}{number}"

    def distances(self, rank: int, towards: bool = False) -> Floats:
        """Least latency of any path from `rank` (or, with `towards`, to it) to each rank, over however many relays."""
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
    def least_latency(self) -> float:
        """No message between two ranks takes less: the cheapest link out of a rank and the cheapest into one."""
        if self.ranks == 1:
            return 0.0
        into = self.latency[self.link_to < self.ranks].min()
        leaving = self.link_from < self.ranks
        direct = self.link_to[leaving] < self.ranks
        return float((self.latency[leaving] + np.where(direct, 0.0, into)).min())
