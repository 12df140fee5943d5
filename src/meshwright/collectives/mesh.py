"""Meshes of any dimension: as a torus without the links that close its rings, so that blocks run along lines.

S. Kumar, N. Jouppi, Highly available data parallel ML training on mesh networks, arXiv 2011.03605.
Sides X, Y ... (dims), ranks row by row; dimensions: how many sides, where the name says it (2d-mesh); without either,
one side: a line. On a line both directions are used from the start: a block's sum comes from both
ends to its owner. It takes as long as a ring that uses one direction, twice as long as one that uses both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.collectives.grid import phases, sides
from meshwright.collectives.rounds import Rounds, in_turn, together, write
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def reduce_scatter_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """What lies on either side of a block's owner is summed on the way to it, the farthest block first.

    ranks: [..., n], lines. own: [..., n], first slot of the block that each rank is to end with. count: slots a block.
    """
    n = ranks.shape[-1]
    for step in range(n - 1):
        sender = np.arange(step + 1)
        for line, blocks in ((ranks, own), (ranks[..., ::-1], own[..., ::-1])):
            block = blocks[..., sender + n - 1 - step]
            program.transfer(line[..., sender], line[..., sender + 1], block, count, reduce=True)
        yield


def all_gather_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """Each block runs from its owner to both ends. Arguments as in `reduce_scatter_rounds`."""
    n = ranks.shape[-1]
    for step in range(n - 1):
        sender = np.arange(step, n - 1)
        for line, blocks in ((ranks, own), (ranks[..., ::-1], own[..., ::-1])):
            program.transfer(line[..., sender], line[..., sender + 1], blocks[..., sender - step], count)
        yield


def all_reduce(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """Reduce-scatter along each axis in turn, all-gather back; with d axes, one part of the vector begins at each.
    Best for large vectors where the links form such a mesh.

    2[(X-1) + (Y-1) + ...] rounds; at most 2 (1 + 1/X + 1/XY + ...) S bytes a rank; with equal sides as many alpha
    + 2 S/d [(X-1)/X + (Y-1)/XY + ...] beta.
    """
    name, shape = _name_and_sides(ranks, dims, dimensions)
    axes = range(len(shape))
    program = Builder("all-reduce", name, ranks, chunks=len(shape) * ranks)

    def part(start: int) -> Rounds:
        steps = phases(np.arange(ranks).reshape(shape), [*axes[start:], *axes[:start]], first=start * ranks)
        return in_turn(
            *(reduce_scatter_rounds(program, *step) for step in steps),
            *(all_gather_rounds(program, *step) for step in reversed(steps)),
        )

    return write(program, together(part(start) for start in axes))


def reduce_scatter(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """One axis after the other.

    (X-1) + (Y-1) + ... rounds; (n-1)/n S bytes a rank; as many alpha + (n-1)/n S beta.
    """
    name, shape = _name_and_sides(ranks, dims, dimensions)
    program = Builder("reduce-scatter", name, ranks, chunks=ranks)
    steps = phases(np.arange(ranks).reshape(shape), range(len(shape)))
    return write(program, *(reduce_scatter_rounds(program, *step) for step in steps))


def all_gather(ranks: int, dims: Sequence[int] | None = None, dimensions: int | None = None) -> CollectiveProgram:
    """As `reduce_scatter`, backwards: (X-1) + (Y-1) + ... rounds; as many alpha + (n-1)/n S beta."""
    name, shape = _name_and_sides(ranks, dims, dimensions)
    program = Builder("all-gather", name, ranks, chunks=ranks)
    steps = phases(np.arange(ranks).reshape(shape), range(len(shape)))
    return write(program, *(all_gather_rounds(program, *step) for step in reversed(steps)))


def _name_and_sides(ranks: int, dims: Sequence[int] | None, dimensions: int | None) -> tuple[str, tuple[int, ...]]:
    name = f"{dimensions}d-mesh" if dimensions else "mesh"
    return name, sides(name, ranks, dims, dimensions)
