"""Torus algorithms, for any dimension: rings along one axis after the other, with all axes and both directions busy.

N. Jain, Y. Sabharwal, Optimal bucket algorithms for large MPI collectives on torus interconnects, ICS 2010; on two axes
also H. Mikami et al., Massively distributed SGD: ImageNet/ResNet-50 training in a flash, arXiv 1811.05233.
dims: sides X, Y, Z ..., ranks in row-major order; dimensions: number of sides, if the name has it (2d-torus); without
either, one ring. Best for large and medium vectors on a torus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshwright.collectives import ring
from meshwright.collectives.grid import list_axis_phases, resolve_grid
from meshwright.collectives.rounds import Rounds, build_from_rounds, run_in_sequence, run_together
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def all_reduce(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the torus all-reduce: reduce-scatter along each axis in turn, then
    all-gather in reverse.

    With d axes, the vector has 2d segments: for each axis, two segments that start with this axis, one in each
    direction. dims: sides of the grid, such as (4, 4). dimensions: number of sides, as equal as possible, if `dims` is
    None. If both are None, the grid is one ring.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (X, Y ...: the
    sides): 2[(X-1) + (Y-1) + ...] rounds; 2(n-1)/n S bytes sent per rank; with equal sides, time rounds x alpha + 2
    S/(2d) [(X-1)/X + (Y-1)/XY + ...] beta.
    """
    name, shape = resolve_grid("torus", ranks, dims, dimensions)
    axes = range(len(shape))
    program = Builder("all-reduce", name, ranks, chunks=2 * len(shape) * ranks)
    grid = np.arange(ranks).reshape(shape)

    def run_part(start: int, direction: int) -> Rounds:
        """Add the rounds for one part of the vector to the program: a generator that adds one round's sends per
        iteration, so that several algorithms can be interleaved.

        start: number of the axis along which the part's reduce-scatter begins. direction: 1 or -1, direction of the
        rings.
        """
        order = [*axes[start:], *axes[:start]]
        steps = list_axis_phases(grid, order, first=(2 * start + (direction < 0)) * ranks)
        along = [(lines[..., ::direction], own[..., ::direction], count) for lines, own, count in steps]
        return run_in_sequence(
            *(ring.add_reduce_scatter_rounds(program, *step) for step in along),
            *(ring.add_all_gather_rounds(program, *step) for step in reversed(along)),
        )

    return build_from_rounds(program, run_together(run_part(start, sign) for start in axes for sign in (1, -1)))


def reduce_scatter(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the torus reduce-scatter: one axis after the other in both
    directions, in contiguous blocks.

    dims: sides of the grid, such as (4, 4). dimensions: number of sides, as equal as possible, if `dims` is None. If
    both are None, the grid is one ring.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (X, Y ...: the
    sides): (X-1) + (Y-1) + ... rounds; (n-1)/n S bytes sent per rank; time rounds x alpha + (n-1)/n S/2 beta.
    """
    name, shape = resolve_grid("torus", ranks, dims, dimensions)
    program = Builder("reduce-scatter", name, ranks, chunks=2 * ranks)
    steps = list_axis_phases(np.arange(ranks).reshape(shape), range(len(shape)), count=2)
    return build_from_rounds(
        program, *(_run_both_directions(ring.add_reduce_scatter_rounds, program, *step) for step in steps)
    )


def all_gather(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the torus all-gather: one axis after the other, the reverse of the
    torus reduce-scatter.

    dims: sides of the grid, such as (4, 4). dimensions: number of sides, as equal as possible, if `dims` is None. If
    both are None, the grid is one ring.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (X, Y ...: the
    sides): (X-1) + (Y-1) + ... rounds; (n-1)/n S bytes sent per rank; time rounds x alpha + (n-1)/n S/2 beta.
    """
    name, shape = resolve_grid("torus", ranks, dims, dimensions)
    program = Builder("all-gather", name, ranks, chunks=2 * ranks)
    steps = list_axis_phases(np.arange(ranks).reshape(shape), range(len(shape)), count=2)
    return build_from_rounds(
        program, *(_run_both_directions(ring.add_all_gather_rounds, program, *step) for step in reversed(steps))
    )


def _run_both_directions(
    rounds: Callable[[Builder, Integers, Integers, int], Rounds],
    program: Builder,
    lines: Integers,
    own: Integers,
    count: int,
) -> Rounds:
    """Add to the builder `program` a ring algorithm that runs in both directions at once, each direction for one half
    of every block (consecutive slots). Each iteration of this generator adds the sends of one round, so that several
    algorithms can be interleaved.

    rounds: `ring.add_reduce_scatter_rounds` or `ring.add_all_gather_rounds`. lines: [..., n], ranks of each ring. own:
    [..., n], first slot (buffer for one chunk) of the block that each rank owns. count: number of slots in a block,
    even.
    """
    half = count // 2
    backwards = own[..., ::-1] + half
    return run_together([rounds(program, lines, own, half), rounds(program, lines[..., ::-1], backwards, half)])
