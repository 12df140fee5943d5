"""Arrangement of ranks in a grid, in row-major order, or in nodes of equal size with consecutive ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from meshwright.errors import UserError
from meshwright.program.order import Integers


def list_factorizations(ranks: int, dimensions: int, least: int = 2) -> list[tuple[int, ...]]:
    """Return all ways to write `ranks` as a product of `dimensions` factors of at least `least`, each in ascending
    order."""
    if dimensions == 1:
        return [(ranks,)] if ranks >= least else []
    return [
        (side, *rest)
        for side in range(least, math.isqrt(ranks) + 1)
        if ranks % side == 0
        for rest in list_factorizations(ranks // side, dimensions - 1, side)
    ]


def find_nearly_cubic(ranks: int, dimensions: int) -> tuple[int, ...] | None:
    """Return the sides, ascending, of the grid with `ranks` ranks in `dimensions` dimensions that has the smallest
    diameter; None if `ranks` is not a product of `dimensions` sides of at least 2."""
    if ranks == 1:
        return (1,) * dimensions
    return min(list_factorizations(ranks, dimensions), key=sum, default=None)


def resolve_sides(
    what: str, ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None
) -> tuple[int, ...]:
    """Return the sides of the grid of a torus or mesh algorithm, such as (4, 4) for 16 ranks.

    what: name of the algorithm, for error messages. dims: the sides; None: `dimensions` sides, as equal as possible.
    dimensions: number of sides; None: as many as `dims` has. If both are None, the grid is one line, (ranks,).
    Raises UserError if the product of `dims` is not `ranks`, or if no `dimensions` sides of at least 2 have this
    product.
    """
    if dims is not None:
        given = tuple(int(side) for side in dims)
        written = "x".join(map(str, given))
        if len(given) != (dimensions or len(given)):
            raise UserError(f"{what}: dims {written} are {len(given)} sides, not {dimensions}")
        if min(given, default=0) < 1 or math.prod(given) != ranks:
            raise UserError(f"{what}: dims {written} hold {math.prod(given)} ranks, not {ranks}")
        return given
    if dimensions is None:
        return (ranks,)
    found = find_nearly_cubic(ranks, dimensions)
    if found is None:
        near = (
            (other, find_nearly_cubic(other, dimensions))
            for distance in range(1, ranks + 2**dimensions)
            for other in (ranks - distance, ranks + distance)
            if other > 1
        )
        legal = islice((f"{other} ({'x'.join(map(str, shape))})" for other, shape in near if shape), 2)
        raise UserError(
            f"{what} cannot take {ranks} ranks: no {dimensions} sides of at least 2 multiply to {ranks}; "
            f"near are {' and '.join(legal)}"
        )
    return found


def resolve_grid(
    kind: str, ranks: int, dims: Sequence[int] | None, dimensions: int | None
) -> tuple[str, tuple[int, ...]]:
    """Return the name (such as `2d-mesh`) of a torus or mesh algorithm and the sides of its grid (such as (4, 4)).

    kind: "torus" or "mesh". dims: the sides; None: `dimensions` sides, as equal as possible. dimensions: number of
    sides; None: as many as `dims` has. If both are None, the grid is one line, (ranks,). Raises UserError for sides
    whose product is not `ranks`.
    """
    name = f"{dimensions}d-{kind}" if dimensions else kind
    return name, resolve_sides(name, ranks, dims, dimensions)


def resolve_ranks_per_node(algorithm: str, ranks: int, ranks_per_node: int | None = None) -> int:
    """Return the number of ranks per node of a hierarchical algorithm on `ranks` ranks.

    That is `ranks_per_node` if given, else the largest divisor of `ranks` up to its square root. algorithm: name, for
    error messages. Raises UserError if `ranks_per_node` does not divide `ranks`.
    """
    if ranks_per_node is None:
        return max(size for size in range(1, math.isqrt(ranks) + 1) if ranks % size == 0)
    if ranks_per_node < 1 or ranks % ranks_per_node:
        legal = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise UserError(f"{algorithm}: nodes of {ranks_per_node} ranks do not divide {ranks} ranks; valid are {legal}")
    return ranks_per_node


def list_axis_phases(
    grid: Integers, order: Iterable[int], first: int = 0, count: int = 1
) -> list[tuple[Integers, Integers, int]]:
    """Return the phases of a reduce-scatter over a grid of ranks, one phase per axis. In the phase of an axis, the
    ranks of each line along this axis divide their common block of slots (buffers for one chunk each) among themselves.
    An all-gather runs the phases in reverse.

    grid: [X, Y ...], rank at each point. order: axis numbers in the order of the phases. first: first slot of the
    vector. count: number of slots of the block that each rank holds after the last phase. Returns for each phase (the
    ranks [..., n] of every line along the axis; the first slot [..., n] of the block that each rank holds after the
    phase; the number of slots of such a block).
    """
    coordinate, own, size = np.indices(grid.shape), np.full(grid.shape, first), grid.size * count
    result = []
    for axis in order:
        size //= grid.shape[axis]
        own = own + coordinate[axis] * size
        result.append((np.moveaxis(grid, axis, -1), np.moveaxis(own, axis, -1), size))
    return result
