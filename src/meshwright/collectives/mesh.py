"""Mesh algorithms, for grids of any dimension without wrap-around links: blocks run along lines in both directions.

S. Kumar, N. Jouppi, Highly available data parallel ML training on mesh networks, arXiv 2011.03605.
dims: sides X, Y ..., ranks in row-major order; dimensions: number of sides, if the name has it (2d-mesh); without
either, one line. The sum of a block arrives at its owner from both ends of a line, which takes as long as a ring in one
direction, twice as long as one in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.collectives.grid import list_axis_phases, resolve_grid
from meshwright.collectives.rounds import Rounds, build_from_rounds, run_in_sequence, run_together
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def add_reduce_scatter_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """Add a reduce-scatter along lines of ranks to the builder `program`. Each block is summed along the line, from
    both ends towards the rank that ends with it; a rank sends the block with the farthest destination first. Each
    iteration of this generator adds the sends of one round, so that several algorithms can be interleaved.

    ranks: [..., n], ranks of each line. own: [..., n], first slot (buffer for one chunk) of the block that each rank
    ends with. count: number of consecutive slots in a block.
    """
    n = ranks.shape[-1]
    for step in range(n - 1):
        sender = np.arange(step + 1)
        for line, blocks in ((ranks, own), (ranks[..., ::-1], own[..., ::-1])):
            block = blocks[..., sender + n - 1 - step]
            program.transfer(line[..., sender], line[..., sender + 1], block, count, reduce=True)
        yield


def add_all_gather_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """Add an all-gather along lines of ranks to the builder `program`. Each block travels from its owner to both ends
    of the line. Each iteration of this generator adds the sends of one round, so that several algorithms can be
    interleaved.

    ranks: [..., n], ranks of each line. own: [..., n], first slot (buffer for one chunk) of the block that each rank
    starts with. count: number of consecutive slots in a block.
    """
    n = ranks.shape[-1]
    for step in range(n - 1):
        sender = np.arange(step, n - 1)
        for line, blocks in ((ranks, own), (ranks[..., ::-1], own[..., ::-1])):
            program.transfer(line[..., sender], line[..., sender + 1], blocks[..., sender - step], count)
        yield


def all_reduce(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the mesh all-reduce: reduce-scatter along each axis in turn, then
    all-gather in reverse.

    Best for large vectors on a mesh. With d axes, the vector has d segments, and segment i starts with axis i. dims:
    sides of the grid, such as (4, 4). dimensions: number of sides, as equal as possible, if `dims` is None. If both are
    None, the grid is one line.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (X, Y ...: the
    sides): 2[(X-1) + (Y-1) + ...] rounds; at most 2 (1 + 1/X + 1/XY + ...) S bytes sent per rank; with equal sides,
    time rounds x alpha + 2 S/d [(X-1)/X + (Y-1)/XY + ...] beta.
    """
    name, shape = resolve_grid("mesh", ranks, dims, dimensions)
    axes = range(len(shape))
    program = Builder("all-reduce", name, ranks, chunks=len(shape) * ranks)

    def run_part(start: int) -> Rounds:
        """Add to the program the rounds for one part of the vector, whose reduce-scatter begins along axis number
        `start`: a generator that adds one round's sends per iteration, so that the parts can be interleaved."""
        steps = list_axis_phases(np.arange(ranks).reshape(shape), [*axes[start:], *axes[:start]], first=start * ranks)
        return run_in_sequence(
            *(add_reduce_scatter_rounds(program, *step) for step in steps),
            *(add_all_gather_rounds(program, *step) for step in reversed(steps)),
        )

    return build_from_rounds(program, run_together(run_part(start) for start in axes))


def reduce_scatter(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the mesh reduce-scatter: one axis after the other.

    dims: sides of the grid, such as (4, 4). dimensions: number of sides, as equal as possible, if `dims` is None. If
    both are None, the grid is one line.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (X, Y ...: the
    sides): (X-1) + (Y-1) + ... rounds; (n-1)/n S bytes sent per rank; time rounds x alpha + (n-1)/n S beta.
    """
    name, shape = resolve_grid("mesh", ranks, dims, dimensions)
    program = Builder("reduce-scatter", name, ranks, chunks=ranks)
    steps = list_axis_phases(np.arange(ranks).reshape(shape), range(len(shape)))
    return build_from_rounds(program, *(add_reduce_scatter_rounds(program, *step) for step in steps))


def all_gather(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the mesh all-gather: one axis after the other, the reverse of the
    mesh reduce-scatter.

    dims: sides of the grid, such as (4, 4). dimensions: number of sides, as equal as possible, if `dims` is None. If
    both are None, the grid is one line.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds (X, Y ...: the
    sides): (X-1) + (Y-1) + ... rounds; time rounds x alpha + (n-1)/n S beta.
    """
    name, shape = resolve_grid("mesh", ranks, dims, dimensions)
    program = Builder("all-gather", name, ranks, chunks=ranks)
    steps = list_axis_phases(np.arange(ranks).reshape(shape), range(len(shape)))
    return build_from_rounds(program, *(add_all_gather_rounds(program, *step) for step in reversed(steps)))
