"""Closed forms: how long each algorithm takes if messages cost alpha + bytes x beta and nothing is in the way.

n ranks, a vector of S bytes, alpha seconds a message, beta seconds a byte (1 / bandwidth). The forms hold on the
network that an algorithm was made for: rings and chains on a ring, tori on a torus, meshes on a mesh, hierarchies on
nodes, all others on a switch; there the simulator agrees with them. They know nothing of distance, of links that others
use too, or of what has less to do while a pipeline fills and empties. R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA
19(1), 2005, derive most of them; the generators name the paper of each algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.collectives.grid import ranks_per_node, sides
from meshwright.program.network import Network


@dataclass(frozen=True)
class Tier:
    """Links of one kind: seconds a message (alpha) and a byte (beta); gap: the part of alpha that a link's next message
    waits for."""

    alpha: float
    beta: float
    gap: float = 0.0

    def together(self, sizes: Sequence[float]) -> float:
        """Messages that leave by one link at once: a gap apart, or as fast as their bytes get out."""
        waits = [place * self.gap * self.alpha + sum(sizes[place:]) * self.beta for place in range(len(sizes))]
        return self.alpha + max(waits, default=0.0)

    def rounds(self, count: float, size: float) -> float:
        """So many messages of so many bytes, one after the other."""
        return count * (self.alpha + size * self.beta)


@dataclass(frozen=True)
class Case:
    """What a closed form depends on. groups: ranks a node. cables: every rank has a link for each neighbour and each
    way, so that all can be busy at once, instead of one port; ports: how many it has."""

    ranks: int
    size: float
    link: Tier
    inner: Tier
    segments: int | None = None
    groups: int | None = None
    dims: tuple[int, ...] | None = None
    cables: bool = False
    ports: int = 1

    @property
    def share(self) -> float:
        """Bytes of the vector for each rank."""
        return self.size / self.ranks

    @property
    def levels(self) -> int:
        """log2 n, rounded up."""
        return (self.ranks - 1).bit_length()

    @property
    def core(self) -> int:
        """The power of two at or below n."""
        return 1 << (self.ranks.bit_length() - 1)

    @property
    def extra(self) -> int:
        """Ranks beyond it, which fold into others."""
        return self.ranks - self.core

    def per_node(self) -> tuple[int, int]:
        """Nodes, and ranks of each."""
        size = ranks_per_node("hierarchical", self.ranks, self.groups)
        return self.ranks // size, size


Form = Callable[[Case], float]


def closed_form_seconds(
    operation: str,
    algorithm: str,
    network: Network,
    total_bytes: float,
    *,
    segments: int | None = None,
    groups: int | None = None,
    dims: Sequence[int] | None = None,
) -> float | None:
    """Seconds by the closed form, or None for a program that has none. Options as `generate` takes them.

    alpha and beta are those of the network's links; where it has two tiers, hierarchical algorithms go by both, all
    others by the outer one.
    """
    form = CLOSED_FORMS.get(operation, {}).get(algorithm)
    if form is None:
        return None
    if network.ranks == 1:
        return 0.0
    inner, outer = (Tier(latency, 1 / bandwidth, network.gap) for latency, bandwidth in network.tiers)
    shape = tuple(dims) if dims is not None else None
    n, cables = network.ranks, not network.switches
    ports = max(1, network.links // n) if cables else 1
    return form(Case(n, total_bytes, outer, inner, segments, groups, shape, cables, ports))


# --- rings and pairs


def _ring(phases: int) -> Form:
    return lambda c: phases * c.link.rounds(c.ranks - 1, c.share)


def _both_ways(phases: int) -> Form:
    """Half of every block each way: twice as fast where each way has its own link, as rings of more than two have."""
    return lambda c: phases * c.link.rounds(c.ranks - 1, c.share / (2 if c.cables and c.ranks > 2 else 1))


def _at_once(phases: int) -> Form:
    """A message to everybody, over the links that a rank has."""
    return lambda c: phases * c.link.together([c.share] * math.ceil((c.ranks - 1) / c.ports))


def _from_all(c: Case) -> float:
    """A message from everybody, each out of another rank, over the links that one rank has."""
    return c.link.rounds(1, (c.ranks - 1) / c.ports * c.share)


# --- recursive halving and doubling


def _butterfly(c: Case) -> float:
    return c.link.rounds(math.log2(c.core) + (2 if c.extra else 0), c.size)


def _rabenseifner(c: Case) -> float:
    halves = 2 * (math.log2(c.core) * c.link.alpha + (c.core - 1) / c.core * c.size * c.link.beta)
    return halves + (c.link.rounds(2, c.size) if c.extra else 0.0)


def _exchanges(c: Case) -> float:
    """log2 m exchanges of 1, 2, 4 ... shares; where extra ranks have folded into others, these have two shares each."""
    distances = [1 << bit for bit in range(c.core.bit_length() - 1)]
    return sum(c.link.rounds(1, min(2 * d, d + c.extra) * c.share) for d in distances)


def _recursive_halving(c: Case) -> float:
    return _exchanges(c) + (c.link.rounds(1, c.size) + c.link.rounds(1, c.share) if c.extra else 0.0)


def _recursive_doubling(c: Case) -> float:
    return _exchanges(c) + (c.link.rounds(1, c.share) + c.link.rounds(1, c.size - c.share) if c.extra else 0.0)


def _bruck_all_to_all(c: Case) -> float:
    moved = [sum(1 for place in range(c.ranks) if place >> bit & 1) for bit in range(c.levels)]
    return sum(c.link.rounds(1, blocks * c.share) for blocks in moved)


# --- trees and pipelines


def _whole(rounds_of_tree: int) -> Form:
    """The whole vector up or down a binomial tree; in k segments, the next starts a round later, and a rank with one
    port sends to as many at once as there are segments under way."""

    def form(c: Case) -> float:
        k = c.segments or 1
        at_once = 1 if c.cables else min(k, c.levels)
        return c.link.rounds(rounds_of_tree * c.levels + k - 1, at_once * c.size / k)

    return form


def _halved(c: Case) -> float:
    """A share for each rank down a binomial tree, or up."""
    return c.levels * c.link.alpha + (c.ranks - 1) * c.share * c.link.beta


def _chain(c: Case) -> float:
    k = c.segments or max(1, c.ranks - 1)
    return c.link.rounds(c.ranks + k - 2, c.size / k)


def _two_trees_all_reduce(c: Case) -> float:
    height, k = c.ranks.bit_length() - 1, c.segments or 8
    return (2 * height + k - 1) * c.link.together([c.size / (2 * k)] * 4)  # up both trees, down one of them to two


def _two_trees(c: Case) -> float:
    """Both trees hang below the root, over the other n-1 ranks."""
    height, k = max(0, (c.ranks - 1).bit_length() - 1), c.segments or 8
    return (height + k) * c.link.together([c.size / (2 * k)] * 2)


# --- nodes


def _hierarchical_all_reduce(c: Case) -> float:
    nodes, each = c.per_node()
    inside = c.inner.rounds(2 * (each - 1).bit_length(), c.size)
    return inside + c.link.rounds(2 * (nodes - 1), c.size / nodes)


def _hierarchical(phases: int) -> Form:
    """Rings inside each node over a node's share, rings across over a rank's."""

    def form(c: Case) -> float:
        nodes, each = c.per_node()
        return phases * (c.inner.rounds(each - 1, c.size / each) + c.link.rounds(nodes - 1, c.share))

    return form


def _hierarchical_tree(c: Case) -> float:
    nodes, each = c.per_node()
    return c.link.rounds((nodes - 1).bit_length(), c.size) + c.inner.rounds((each - 1).bit_length(), c.size)


def _hierarchical_all_to_all(c: Case) -> float:
    nodes, each = c.per_node()
    return c.inner.rounds(each - 1, c.size / each) + c.link.rounds(nodes - 1, c.size / nodes)


# --- tori and meshes


def _torus(phases: int, dimensions: int | None, turns: bool) -> Form:
    """Along one axis after the other, half of every block one way round and half the other; with `turns`, a part of the
    vector begins at each axis. A ring of two has only one link."""

    def form(c: Case) -> float:
        shape = sides("torus", c.ranks, c.dims, dimensions)
        ways = [2 if side > 2 else 1 for side in shape]
        rounds = _on_axes(shape, c.size, turns)
        busiest = [max(size / way for size, way in zip(sizes, ways, strict=True)) for sizes in rounds]
        return phases * sum(
            c.link.rounds(1, most if c.cables else sum(sizes)) for most, sizes in zip(busiest, rounds, strict=True)
        )

    return form


def _mesh(phases: int, dimensions: int | None, turns: bool) -> Form:
    """As a torus, but blocks run from both ends of each line: a whole block over each link and each way, so that a rank
    with one port sends two."""

    def form(c: Case) -> float:
        rounds = _on_axes(sides("mesh", c.ranks, c.dims, dimensions), c.size, turns)
        return phases * sum(c.link.rounds(1, max(sizes) if c.cables else 2 * sum(sizes)) for sizes in rounds)

    return form


def _on_axes(shape: tuple[int, ...], size: float, turns: bool) -> list[list[float]]:
    """For each round of a reduce-scatter over the axes of a grid: the bytes that a rank sends along each axis.

    What is left of a part shrinks from axis to axis.
    """
    axes = list(range(len(shape)))
    starts = axes if turns else [0]
    rounds = [[0.0] * len(shape) for _ in range(sum(shape) - len(shape))]
    for start in starts:
        left, number = size / len(starts), 0
        for axis in axes[start:] + axes[:start]:
            left /= shape[axis]
            for _ in range(shape[axis] - 1):
                rounds[number][axis] += left
                number += 1
    return rounds


def _alpha(rounds: Callable[[Case], float]) -> Form:
    return lambda c: c.link.alpha * rounds(c)


# A reduce-scatter is an all-gather run backwards, and costs the same.
_ONE_WAY: dict[str, Form] = {
    "ring": _ring(1),
    "bidirectional-ring": _both_ways(1),
    "pairwise": _ring(1),
    "all-pairs": _at_once(1),
    "hierarchical": _hierarchical(1),
    "2d-torus": _torus(1, 2, turns=False),
    "3d-torus": _torus(1, 3, turns=False),
    "torus": _torus(1, None, turns=False),
    "2d-mesh": _mesh(1, 2, turns=False),
    "mesh": _mesh(1, None, turns=False),
}

CLOSED_FORMS: dict[str, dict[str, Form]] = {
    "send-receive": {"direct": lambda c: c.link.rounds(1, c.size)},
    "barrier": {
        "dissemination": _alpha(lambda c: c.levels),
        "binomial-tree": _alpha(lambda c: 2 * c.levels),
    },
    "broadcast": {
        "binomial-tree": _whole(1),
        "ring": _chain,
        "double-binary-tree": _two_trees,
        "scatter-all-gather": lambda c: _halved(c) + _ring(1)(c),
        "hierarchical": _hierarchical_tree,
    },
    "scatter": {"binomial-tree": _halved, "linear": _at_once(1)},
    "gather": {"binomial-tree": _halved, "linear": _from_all},
    "reduce": {
        "binomial-tree": _whole(1),
        "ring": _chain,
        "double-binary-tree": _two_trees,
        "reduce-scatter-gather": lambda c: _recursive_halving(c) + _halved(c),
        "hierarchical": _hierarchical_tree,
    },
    "all-gather": {**_ONE_WAY, "recursive-doubling": _recursive_doubling, "bruck": _halved},
    "reduce-scatter": {**_ONE_WAY, "recursive-halving": _recursive_halving},
    "all-reduce": {
        "ring": _ring(2),
        "bidirectional-ring": _both_ways(2),
        "halving-doubling": lambda c: c.link.rounds(2 * c.levels, c.size),
        "rabenseifner": _rabenseifner,
        "butterfly": _butterfly,
        "binomial-tree": _whole(2),
        "double-binary-tree": _two_trees_all_reduce,
        "all-pairs": _at_once(2),
        "hierarchical": _hierarchical_all_reduce,
        "hierarchical-scatter": _hierarchical(2),
        "2d-torus": _torus(2, 2, turns=True),
        "3d-torus": _torus(2, 3, turns=True),
        "torus": _torus(2, None, turns=True),
        "2d-mesh": _mesh(2, 2, turns=True),
        "mesh": _mesh(2, None, turns=True),
    },
    "all-to-all": {
        "pairwise": _ring(1),
        "ring": lambda c: c.link.rounds(c.ranks - 1, c.size / 2),
        "all-pairs": _at_once(1),
        "bruck": _bruck_all_to_all,
        "hierarchical": _hierarchical_all_to_all,
    },
}
