"""How a number of ranks is arranged: as the sides of a grid or torus, or in nodes of equal size.

Ranks lie in a grid row by row (the last coordinate runs fastest); a node's ranks are consecutive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from meshwright.errors import UserError
from meshwright.program.order import Integers


def factorisations(ranks: int, dimensions: int, least: int = 2) -> list[tuple[int, ...]]:
    """All ways to write `ranks` as a product of so many factors of at least `least`, in ascending order."""
    if dimensions == 1:
        return [(ranks,)] if ranks >= least else []
    return [
        (side, *rest)
        for side in range(least, math.isqrt(ranks) + 1)
        if ranks % side == 0
        for rest in factorisations(ranks // side, dimensions - 1, side)
    ]


def nearly_cubic(ranks: int, dimensions: int) -> tuple[int, ...] | None:
    """The sides of the grid with the fewest hops from end to end, ascending; None where no side may be 1."""
    if ranks == 1:
        return (1,) * dimensions
    return min(factorisations(ranks, dimensions), key=sum, default=None)


def sides(what: str, ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> tuple[int, ...]:
    """The sides of a grid: `dims`, or else as square as the number of ranks allows, or one line without `dimensions`.

    `what` is named in errors. Raises UserError where `dims` does not multiply to `ranks`, or where no sides of at
    least 2 do.
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
    found = nearly_cubic(ranks, dimensions)
    if found is None:
        near = (
            (other, nearly_cubic(other, dimensions))
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


def ranks_per_node(what: str, ranks: int, groups: int | None = None) -> int:
    """Ranks of one node: `groups`, or the largest divisor of `ranks` that is not above its square root."""
    if groups is None:
        return max(size for size in range(1, math.isqrt(ranks) + 1) if ranks % size == 0)
    if groups < 1 or ranks % groups:
        legal = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise UserError(f"{what}: nodes of {groups} ranks do not divide {ranks} ranks; right would be one of {legal}")
    return groups


def phases(
    grid: Integers, order: Iterable[int], first: int = 0, count: int = 1
) -> list[tuple[Integers, Integers, int]]:
    """How a reduce-scatter goes through a grid, one axis after the other; an all-gather takes them in reverse.

    grid: [X, Y ...] ranks. order: of the axes. The vector begins at slot `first` and has `count` slots a rank. For each
    axis: its lines of ranks, [..., n]; the first slot of the block that each rank has after it; slots of that block.
    """
    coordinate, own, size = np.indices(grid.shape), np.full(grid.shape, first), grid.size * count
    result = []
    for axis in order:
        size //= grid.shape[axis]
        own = own + coordinate[axis] * size
        result.append((np.moveaxis(grid, axis, -1), np.moveaxis(own, axis, -1), size))
    return result
