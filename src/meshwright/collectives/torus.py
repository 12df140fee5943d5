"""Tori of any dimension: rings along one axis after the other, with all axes and both directions busy at once.

N. Jain, Y. Sabharwal, Optimal bucket algorithms for large MPI collectives on torus interconnects, ICS 2010; on two
axes also H. Mikami et al., Massively distributed SGD: ImageNet/ResNet-50 training in a flash, arXiv 1811.05233.
Sides X, Y, Z ... (dims), ranks row by row; dimensions: how many sides, where the name says it (2d-torus); without
either, one side: a ring. Best for large and medium vectors where the links form such a torus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshwright.collectives import ring
from meshwright.collectives.grid import phases, sides
from meshwright.collectives.rounds import Rounds, in_turn, together, write
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def all_reduce(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """Reduce-scatter along each axis in turn, all-gather back. With d axes, the vector has 2d parts, one for each way
    to go: beginning at any of the axes, round in either direction.

    2[(X-1) + (Y-1) + ...] rounds; 2(n-1)/n S bytes a rank; with equal sides as many alpha
    + 2 S/(2d) [(X-1)/X + (Y-1)/XY + ...] beta.
    """
    name, shape = _name_and_sides(ranks, dims, dimensions)
    axes = range(len(shape))
    program = Builder("all-reduce", name, ranks, chunks=2 * len(shape) * ranks)
    grid = np.arange(ranks).reshape(shape)

    def part(start: int, way: int) -> Rounds:
        order = [*axes[start:], *axes[:start]]
        steps = phases(grid, order, first=(2 * start + (way < 0)) * ranks)
        along = [(lines[..., ::way], own[..., ::way], count) for lines, own, count in steps]
        return in_turn(
            *(ring.reduce_scatter_rounds(program, *step) for step in along),
            *(ring.all_gather_rounds(program, *step) for step in reversed(along)),
        )

    return write(program, together(part(start, way) for start in axes for way in (1, -1)))


def reduce_scatter(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """One axis after the other, round both ways, so that blocks stay whole.

    (X-1) + (Y-1) + ... rounds; (n-1)/n S bytes a rank; as many alpha + (n-1)/n S/2 beta.
    """
    name, shape = _name_and_sides(ranks, dims, dimensions)
    program = Builder("reduce-scatter", name, ranks, chunks=2 * ranks)
    steps = phases(np.arange(ranks).reshape(shape), range(len(shape)), count=2)
    return write(program, *(_both_ways(ring.reduce_scatter_rounds, program, *step) for step in steps))


def all_gather(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """As `reduce_scatter`, backwards: (X-1) + (Y-1) + ... rounds; (n-1)/n S bytes a rank; as many alpha
    + (n-1)/n S/2 beta."""
    name, shape = _name_and_sides(ranks, dims, dimensions)
    program = Builder("all-gather", name, ranks, chunks=2 * ranks)
    steps = phases(np.arange(ranks).reshape(shape), range(len(shape)), count=2)
    return write(program, *(_both_ways(ring.all_gather_rounds, program, *step) for step in reversed(steps)))


def _both_ways(
    rounds: Callable[[Builder, Integers, Integers, int], Rounds],
    program: Builder,
    lines: Integers,
    own: Integers,
    count: int,
) -> Rounds:
    """The first half of every block goes one way round, the second half the other."""
    half = count // 2
    backwards = own[..., ::-1] + half
    return together([rounds(program, lines, own, half), rounds(program, lines[..., ::-1], backwards, half)])


def _name_and_sides(ranks: int, dims: Sequence[int] | None, dimensions: int | None) -> tuple[str, tuple[int, ...]]:
    name = f"{dimensions}d-torus" if dimensions else "torus"
    return name, sides(name, ranks, dims, dimensions)
