"""Closed forms of the time of each algorithm, if a message of b bytes costs alpha + b beta and links are not shared.

n ranks, a vector of S bytes, alpha seconds a message (latency), beta seconds a byte (1 / bandwidth). The forms hold on
the network that an algorithm was designed for: rings and chains on a ring, tori on a torus, meshes on a mesh,
hierarchies on nodes, all others on a switch; there the simulator agrees with them. They ignore distance, contention,
and the filling and draining of pipelines. Most are derived in R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005;
the generators name the paper of each algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.collectives.grid import resolve_ranks_per_node, resolve_sides
from meshwright.program.network import Network


@dataclass(frozen=True)
class Tier:
    """Latency and inverse bandwidth of one class of links (inside nodes or between nodes), for closed-form times.

    alpha: latency in seconds per message. beta: seconds per byte. gap: least time between the starts of two messages of
    a rank on one link, as a fraction of alpha.
    """

    alpha: float
    beta: float
    gap: float = 0.0

    def time_concurrent(self, sizes: Sequence[float]) -> float:
        """Return the seconds until all of several messages, sent at once over one link, have arrived. sizes: bytes of
        each message. The link carries them one after the other, with at least `gap` x `alpha` seconds between two
        starts."""
        waits = [place * self.gap * self.alpha + sum(sizes[place:]) * self.beta for place in range(len(sizes))]
        return self.alpha + max(waits, default=0.0)

    def time_rounds(self, count: float, size: float) -> float:
        """Return the seconds that `count` messages of `size` bytes each take over one link, one after the other."""
        return count * (self.alpha + size * self.beta)


@dataclass(frozen=True)
class CostInputs:
    """Inputs of a closed form (formula of an algorithm's time): ranks, vector size, links and options.

    size: bytes of the vector. link: links between nodes or leaf switches. inner: links inside a node or under one leaf
    switch; equal to `link` in a uniform network. segments (of the vector), ranks_per_node, dims (sides of the grid):
    options of the algorithm; None: the algorithm's default. cables: True if cables join neighbouring ranks, False if
    switches do. ports: number of links that a rank can use at once.
    """

    ranks: int
    size: float
    link: Tier
    inner: Tier
    segments: int | None = None
    ranks_per_node: int | None = None
    dims: tuple[int, ...] | None = None
    cables: bool = False
    ports: int = 1

    @property
    def share(self) -> float:
        """Size in bytes of one rank's equal share of the vector."""
        return self.size / self.ranks

    @property
    def levels(self) -> int:
        """log2 of the number of ranks, rounded up: rounds of a tree or of recursive doubling."""
        return (self.ranks - 1).bit_length()

    @property
    def core(self) -> int:
        """Number of ranks that run recursive halving or doubling (core ranks): the largest power of two not greater
        than the number of ranks."""
        return 1 << (self.ranks.bit_length() - 1)

    @property
    def extra(self) -> int:
        """Number of ranks beyond the largest power of two, which need extra rounds in recursive halving or doubling."""
        return self.ranks - self.core

    def get_node_shape(self) -> tuple[int, int]:
        """Return (number of nodes, ranks per node) of a hierarchical algorithm."""
        size = resolve_ranks_per_node("hierarchical", self.ranks, self.ranks_per_node)
        return self.ranks // size, size


Form = Callable[[CostInputs], float]


def compute_closed_form_seconds(
    operation: str,
    algorithm: str,
    network: Network,
    total_bytes: float,
    *,
    segments: int | None = None,
    groups: int | None = None,
    dims: Sequence[int] | None = None,
) -> float | None:
    """Return the seconds that a collective algorithm takes on a network by its closed form (formula), or None if the
    algorithm has no closed form.

    operation: such as "all-reduce". total_bytes: size of the full vector. segments (of the vector), groups (number of
    ranks per node), dims (sides of the grid): options; None: the algorithm's default. Formulas of hierarchical
    algorithms use the links inside and between nodes, all other formulas only the links between nodes.
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
    return form(CostInputs(n, total_bytes, outer, inner, segments, groups, shape, cables, ports))


# --- rings and pairs


def _make_ring_form(phases: int) -> Form:
    """Return the closed form (function from `CostInputs` to seconds) of a ring algorithm with `phases` x (n - 1)
    rounds, in which each of n ranks sends 1/n of the vector per round."""
    return lambda c: phases * c.link.time_rounds(c.ranks - 1, c.share)


def _make_bidirectional_ring_form(phases: int) -> Form:
    """Return the closed form (function from `CostInputs` to seconds) of a ring algorithm that sends half of the data in
    each direction. phases: 1 for reduce-scatter or all-gather, 2 for all-reduce."""
    return lambda c: phases * c.link.time_rounds(c.ranks - 1, c.share / (2 if c.cables and c.ranks > 2 else 1))


def _make_all_pairs_form(phases: int) -> Form:
    """Return the closed form (function from `CostInputs` to seconds) of an algorithm with `phases` rounds. In each
    round every rank sends 1/n of the vector to each other rank, spread over its own ports (network links)."""
    return lambda c: phases * c.link.time_concurrent([c.share] * math.ceil((c.ranks - 1) / c.ports))


def _compute_linear_gather_seconds(c: CostInputs) -> float:
    """Compute the seconds of a gather in which all ranks send to the root at once, spread over the root's ports
    (network links). c: ranks, vector size and links."""
    return c.link.time_rounds(1, (c.ranks - 1) / c.ports * c.share)


# --- recursive halving and doubling


def _compute_butterfly_seconds(c: CostInputs) -> float:
    """Compute the seconds of the butterfly all-reduce by closed form. c: ranks, vector size and links. The algorithm
    has two more rounds if the number of ranks is not a power of two."""
    return c.link.time_rounds(math.log2(c.core) + (2 if c.extra else 0), c.size)


def _compute_rabenseifner_seconds(c: CostInputs) -> float:
    """Compute the seconds of the Rabenseifner all-reduce by closed form. c: ranks, vector size and links."""
    halves = 2 * (math.log2(c.core) * c.link.alpha + (c.core - 1) / c.core * c.size * c.link.beta)
    return halves + (c.link.time_rounds(2, c.size) if c.extra else 0.0)


def _compute_exchange_seconds(c: CostInputs) -> float:
    """Compute the seconds of the exchanges of recursive halving or doubling among the m core ranks (m: largest power of
    two up to the n ranks). c: ranks, vector size and links. In exchange i (from 0), a core rank sends 2^i shares (1/n
    of the vector each), or up to 2^(i+1) if core ranks also hold the shares of the other n - m ranks."""
    distances = [1 << bit for bit in range(c.core.bit_length() - 1)]
    return sum(c.link.time_rounds(1, min(2 * d, d + c.extra) * c.share) for d in distances)


def _compute_recursive_halving_seconds(c: CostInputs) -> float:
    """Compute the seconds of a recursive-halving reduce-scatter by closed form. c: ranks, vector size and links."""
    return _compute_exchange_seconds(c) + (
        c.link.time_rounds(1, c.size) + c.link.time_rounds(1, c.share) if c.extra else 0.0
    )


def _compute_recursive_doubling_seconds(c: CostInputs) -> float:
    """Compute the seconds of a recursive-doubling all-gather by closed form. c: ranks, vector size and links."""
    return _compute_exchange_seconds(c) + (
        c.link.time_rounds(1, c.share) + c.link.time_rounds(1, c.size - c.share) if c.extra else 0.0
    )


def _compute_bruck_all_to_all_seconds(c: CostInputs) -> float:
    """Compute the seconds of the Bruck all-to-all by closed form. c: ranks, vector size and links."""
    moved = [sum(1 for place in range(c.ranks) if place >> bit & 1) for bit in range(c.levels)]
    return sum(c.link.time_rounds(1, blocks * c.share) for blocks in moved)


# --- trees and pipelines


def _make_binomial_tree_form(passes: int) -> Form:
    """Return the closed form (function from `CostInputs` to seconds) of a binomial-tree algorithm, pipelined over
    segments of the vector. passes: how often the data cross the tree, 1 for broadcast or reduce, 2 for all-reduce. With
    a switch, all messages that a rank sends in one round (up to one per tree level) share the rank's link."""

    def form(c: CostInputs) -> float:
        """Return the seconds of the algorithm for the inputs `c` (ranks, vector size, links, segments)."""
        k = c.segments or 1
        at_once = 1 if c.cables else min(k, c.levels)
        return c.link.time_rounds(passes * c.levels + k - 1, at_once * c.size / k)

    return form


def _compute_binomial_scatter_seconds(c: CostInputs) -> float:
    """Compute the seconds of a binomial-tree scatter or gather by closed form. c: ranks, vector size and links."""
    return c.levels * c.link.alpha + (c.ranks - 1) * c.share * c.link.beta


def _compute_chain_seconds(c: CostInputs) -> float:
    """Compute the seconds of a chain broadcast or reduce by closed form. c: ranks, vector size, links, segments."""
    k = c.segments or max(1, c.ranks - 1)
    return c.link.time_rounds(c.ranks + k - 2, c.size / k)


def _compute_double_tree_all_reduce_seconds(c: CostInputs) -> float:
    """Compute the seconds of the double-binary-tree all-reduce. c: ranks, vector size, links and segments."""
    height, k = c.ranks.bit_length() - 1, c.segments or 8
    # In a round, a rank sends one message up each tree and two down one of them.
    return (2 * height + k - 1) * c.link.time_concurrent([c.size / (2 * k)] * 4)


def _compute_double_tree_seconds(c: CostInputs) -> float:
    """Compute the seconds of a double-binary-tree broadcast or reduce (trees over all ranks but the root) by closed
    form. c: ranks, vector size, links and segments."""
    height, k = max(0, (c.ranks - 1).bit_length() - 1), c.segments or 8
    return (height + k) * c.link.time_concurrent([c.size / (2 * k)] * 2)


# --- nodes


def _compute_hierarchical_all_reduce_seconds(c: CostInputs) -> float:
    """Compute the seconds of the hierarchical all-reduce (trees inside nodes, ring between). c: ranks, ranks per node,
    vector size, links."""
    nodes, each = c.get_node_shape()
    inside = c.inner.time_rounds(2 * (each - 1).bit_length(), c.size)
    return inside + c.link.time_rounds(2 * (nodes - 1), c.size / nodes)


def _make_hierarchical_form(phases: int) -> Form:
    """Return the closed form (function from `CostInputs` to seconds) of a hierarchical algorithm with rings inside
    nodes and between nodes. phases: 1 for reduce-scatter or all-gather, 2 for all-reduce."""

    def form(c: CostInputs) -> float:
        """Return the seconds of the algorithm for the inputs `c` (ranks, ranks per node, vector size, links)."""
        nodes, each = c.get_node_shape()
        return phases * (c.inner.time_rounds(each - 1, c.size / each) + c.link.time_rounds(nodes - 1, c.share))

    return form


def _compute_hierarchical_tree_seconds(c: CostInputs) -> float:
    """Compute the seconds of a hierarchical broadcast or reduce. c: ranks, ranks per node, vector size and links."""
    nodes, each = c.get_node_shape()
    return c.link.time_rounds((nodes - 1).bit_length(), c.size) + c.inner.time_rounds((each - 1).bit_length(), c.size)


def _compute_hierarchical_all_to_all_seconds(c: CostInputs) -> float:
    """Compute the seconds of the hierarchical all-to-all. c: ranks, ranks per node, vector size and links."""
    nodes, each = c.get_node_shape()
    return c.inner.time_rounds(each - 1, c.size / each) + c.link.time_rounds(nodes - 1, c.size / nodes)


# --- tori and meshes


def _make_torus_form(phases: int, dimensions: int | None, turns: bool) -> Form:
    """Return the closed form (function from `CostInputs` to seconds) of a torus algorithm. The algorithm runs along one
    axis after the other, each in both directions.

    phases: 1 for reduce-scatter or all-gather, 2 for all-reduce. dimensions: number of axes if the inputs have no
    `dims`; None: one axis. turns: True if the vector is split into one segment per axis and segment i begins with axis
    i, so that all axes are busy; False if the whole vector begins with axis 0.
    """

    def form(c: CostInputs) -> float:
        """Return the seconds of the algorithm for the inputs `c` (ranks, sides of the grid, vector size, links)."""
        shape = resolve_sides("torus", c.ranks, c.dims, dimensions)
        ways = [2 if side > 2 else 1 for side in shape]
        rounds = _compute_axis_bytes(shape, c.size, turns)
        busiest = [max(size / way for size, way in zip(sizes, ways, strict=True)) for sizes in rounds]
        return phases * sum(
            c.link.time_rounds(1, most if c.cables else sum(sizes)) for most, sizes in zip(busiest, rounds, strict=True)
        )

    return form


def _make_mesh_form(phases: int, dimensions: int | None, turns: bool) -> Form:
    """Return the closed form (function from `CostInputs` to seconds) of a mesh algorithm. The algorithm runs along one
    axis after the other. phases: 1 for reduce-scatter or all-gather, 2 for all-reduce. dimensions: number of axes if
    the inputs have no `dims`; None: one axis. turns: True if the vector is split into one segment per axis and segment
    i begins with axis i, so that all axes are busy; False if the whole vector begins with axis 0."""

    def form(c: CostInputs) -> float:
        """Return the seconds of the algorithm for the inputs `c` (ranks, sides of the grid, vector size, links)."""
        rounds = _compute_axis_bytes(resolve_sides("mesh", c.ranks, c.dims, dimensions), c.size, turns)
        return phases * sum(c.link.time_rounds(1, max(sizes) if c.cables else 2 * sum(sizes)) for sizes in rounds)

    return form


def _compute_axis_bytes(shape: tuple[int, ...], size: float, turns: bool) -> list[list[float]]:
    """Return the bytes that a rank sends along each axis in each round of a reduce-scatter on a grid: [round][axis].

    shape: sides of the grid. size: bytes of the vector. turns: True if the vector is split into one segment per axis
    and segment i begins with axis i; False if the whole vector begins with axis 0.
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


def _make_latency_form(rounds: Callable[[CostInputs], float]) -> Form:
    """Return the closed form (function from `CostInputs` to seconds) of an algorithm whose messages have no data, such
    as a barrier. rounds: function from `CostInputs` to the number of rounds."""
    return lambda c: c.link.alpha * rounds(c)


# A reduce-scatter is an all-gather in reverse, at the same cost.
_SCATTER_OR_GATHER: dict[str, Form] = {
    "ring": _make_ring_form(1),
    "bidirectional-ring": _make_bidirectional_ring_form(1),
    "pairwise": _make_ring_form(1),
    "all-pairs": _make_all_pairs_form(1),
    "hierarchical": _make_hierarchical_form(1),
    "2d-torus": _make_torus_form(1, 2, turns=False),
    "3d-torus": _make_torus_form(1, 3, turns=False),
    "torus": _make_torus_form(1, None, turns=False),
    "2d-mesh": _make_mesh_form(1, 2, turns=False),
    "mesh": _make_mesh_form(1, None, turns=False),
}

CLOSED_FORMS: dict[str, dict[str, Form]] = {
    "send-receive": {"direct": lambda c: c.link.time_rounds(1, c.size)},
    "barrier": {
        "dissemination": _make_latency_form(lambda c: c.levels),
        "binomial-tree": _make_latency_form(lambda c: 2 * c.levels),
    },
    "broadcast": {
        "binomial-tree": _make_binomial_tree_form(1),
        "ring": _compute_chain_seconds,
        "double-binary-tree": _compute_double_tree_seconds,
        "scatter-all-gather": lambda c: _compute_binomial_scatter_seconds(c) + _make_ring_form(1)(c),
        "hierarchical": _compute_hierarchical_tree_seconds,
    },
    "scatter": {"binomial-tree": _compute_binomial_scatter_seconds, "linear": _make_all_pairs_form(1)},
    "gather": {"binomial-tree": _compute_binomial_scatter_seconds, "linear": _compute_linear_gather_seconds},
    "reduce": {
        "binomial-tree": _make_binomial_tree_form(1),
        "ring": _compute_chain_seconds,
        "double-binary-tree": _compute_double_tree_seconds,
        "reduce-scatter-gather": lambda c: _compute_recursive_halving_seconds(c) + _compute_binomial_scatter_seconds(c),
        "hierarchical": _compute_hierarchical_tree_seconds,
    },
    "all-gather": {
        **_SCATTER_OR_GATHER,
        "recursive-doubling": _compute_recursive_doubling_seconds,
        "bruck": _compute_binomial_scatter_seconds,
    },
    "reduce-scatter": {**_SCATTER_OR_GATHER, "recursive-halving": _compute_recursive_halving_seconds},
    "all-reduce": {
        "ring": _make_ring_form(2),
        "bidirectional-ring": _make_bidirectional_ring_form(2),
        "halving-doubling": lambda c: c.link.time_rounds(2 * c.levels, c.size),
        "rabenseifner": _compute_rabenseifner_seconds,
        "butterfly": _compute_butterfly_seconds,
        "binomial-tree": _make_binomial_tree_form(2),
        "double-binary-tree": _compute_double_tree_all_reduce_seconds,
        "all-pairs": _make_all_pairs_form(2),
        "hierarchical": _compute_hierarchical_all_reduce_seconds,
        "hierarchical-scatter": _make_hierarchical_form(2),
        "2d-torus": _make_torus_form(2, 2, turns=True),
        "3d-torus": _make_torus_form(2, 3, turns=True),
        "torus": _make_torus_form(2, None, turns=True),
        "2d-mesh": _make_mesh_form(2, 2, turns=True),
        "mesh": _make_mesh_form(2, None, turns=True),
    },
    "all-to-all": {
        "pairwise": _make_ring_form(1),
        "ring": lambda c: c.link.time_rounds(c.ranks - 1, c.size / 2),
        "all-pairs": _make_all_pairs_form(1),
        "bruck": _compute_bruck_all_to_all_seconds,
        "hierarchical": _compute_hierarchical_all_to_all_seconds,
    },
}
