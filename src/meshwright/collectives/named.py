"""Collective programs that a recipe names for gradients and parameters of data parallelism and ZeRO.

[collectives]
all_reduce = "rabenseifner"        # or "native", "auto", "@FILE"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from meshwright.collectives.library import ALGORITHMS, generate
from meshwright.errors import CheckFailed, UserError
from meshwright.layout import Layout
from meshwright.program.check_collective import CheckedCollective, check_collective
from meshwright.program.load import load_program

if TYPE_CHECKING:  # serving ranks do not import the recipe
    from meshwright.recipe import CollectivesRecipe

OPERATIONS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}
"""Key of the recipe's table -> operation."""

AXES = ("data", "shard", "replica")

# Cost model of "auto": typical of sockets between processes of one machine. Assumed, not measured; only the ratios
# affect the choice.
ROUND = 6e-5  # seconds
MESSAGE = 3e-5  # seconds of the sending rank
BANDWIDTH = 1e9  # bytes a second


@dataclass(frozen=True)
class NamedProgram:
    """Collective program that a recipe (job file) selects, by name or file, for one operation on one mesh axis.

    programs: the verified program; for "auto" several programs, of which `choose_program` returns the fastest for the
    size of a vector.
    """

    programs: tuple[CheckedCollective, ...]

    @cached_property
    def _costs(self) -> list[tuple[float, float]]:
        """Estimated cost of each program in `programs`: (fixed seconds, seconds per byte of the vector), for the rank
        with the most messages and the rank with the most bytes."""
        costs = []
        for checked in self.programs:
            messages = np.bincount(checked.program.steps.rank[checked.sends], minlength=1).max()
            constant = checked.rounds * ROUND + float(messages) * MESSAGE
            costs.append((constant, float(checked.bytes_sent(1.0).max(initial=0)) / BANDWIDTH))
        return costs

    def choose_program(self, total_bytes: float) -> CheckedCollective:
        """Return the program with the lowest estimated time for a vector of `total_bytes` bytes."""
        seconds = [constant + total_bytes * byte for constant, byte in self._costs]
        return self.programs[seconds.index(min(seconds))]


def load_named_programs(
    collectives: CollectivesRecipe, layout: Layout, where: Callable[[str], str] = lambda key: "recipe"
) -> dict[tuple[str, str], NamedProgram]:
    """Load and verify the collective programs that a recipe (job file) selects; return {(axis name, operation such as
    "all_reduce"): program}. Operations that are not in the result use torch.distributed.

    collectives: table [collectives] of the recipe, with an algorithm, "auto", "native" or "@FILE" for each operation.
    layout: parallel layout, which gives the number of ranks on the mesh axes data, shard and replica. The result has an
    entry for each of these axes if the program accepts its number of ranks. where: function from a key such as
    `collectives.all_reduce` to the beginning of the error message, such as file and line. Raises UserError if a program
    does not accept the axis on which its operation moves gradients or parameters in this layout.
    """
    found: dict[tuple[str, str], NamedProgram] = {}
    sizes = {axis: layout.group_size(axis) for axis in AXES}
    for key, operation in OPERATIONS.items():
        value = getattr(collectives, key)
        if value == "native":
            continue
        try:
            if value.startswith("@"):
                fitting = _load_from_file(value, operation, sizes, _find_main_axis(layout, key))
            else:
                fitting = _generate_by_name(value, operation, sizes, _find_main_axis(layout, key))
        except (UserError, CheckFailed) as error:
            raise UserError(f"{where(f'collectives.{key}')}: collectives.{key}: {error}") from None
        found |= {(axis, key): named for axis, named in fitting.items()}
    return found


def _find_main_axis(layout: Layout, key: str) -> str:
    """Return the mesh axis ("data", "shard" or "replica") on which a collective operation moves gradients or parameters
    in this layout. key: the operation, such as "all_reduce"."""
    if key != "all_reduce":
        return "shard"
    return "data" if layout.zero == 0 else "replica"


def _load_from_file(path: str, operation: str, sizes: dict[str, int], main: str) -> dict[str, NamedProgram]:
    """Load and verify a collective program from a file; return {axis name: program} for the axes that have exactly as
    many ranks as the program.

    path: with leading `@`. operation: such as "all-reduce". sizes: axis name -> number of ranks. main: axis on which
    this operation moves gradients or parameters. Raises UserError if the main axis has more than one rank, but not as
    many as the program, or if the program is for another operation.
    """
    program = load_program(path, "collective")
    if program.operation != operation:
        raise UserError(f"{path} is a program for {program.operation}, not for {operation}")
    if program.reduction != "sum":
        raise UserError(f"{path} computes the {program.reduction}; gradients are summed")
    if sizes[main] not in (1, program.ranks):
        raise UserError(f"{path} has {program.ranks} ranks; axis {main} of this layout has {sizes[main]}")
    if operation != "all-reduce" and program.chunks % program.ranks:
        raise UserError(
            f"{path} has {program.chunks} chunks; equal shares need a multiple of its {program.ranks} ranks"
        )
    named = NamedProgram((check_collective(program),))
    return {axis: named for axis, size in sizes.items() if size == program.ranks}


def _generate_by_name(algorithm: str, operation: str, sizes: dict[str, int], main: str) -> dict[str, NamedProgram]:
    """Generate the program (steps of every rank) of an algorithm for each axis whose number of ranks the algorithm
    accepts; return {axis name: program}. Axes of one rank are left out.

    operation: such as "all-reduce". sizes: axis name -> number of ranks. main: axis on which this operation moves
    gradients or parameters; raises UserError if the algorithm does not accept the main axis's number of ranks.
    """
    found = {}
    for axis, size in sizes.items():
        if size > 1:
            try:
                found[axis] = _generate_programs(operation, algorithm, size)
            except UserError:
                if axis == main:
                    raise
    return found


@cache
def _generate_programs(operation: str, algorithm: str, ranks: int) -> NamedProgram:
    """Generate and verify the program of an algorithm for `ranks` ranks; for "auto", the programs of all algorithms
    that accept this number of ranks.

    operation: such as "all-reduce". Raises UserError if the named algorithm does not accept the number of ranks.
    """
    if algorithm != "auto":
        return NamedProgram((check_collective(generate(operation, algorithm, ranks)),))
    programs = []
    for name in ALGORITHMS[operation]:
        try:
            programs.append(check_collective(generate(operation, name, ranks)))
        except UserError:
            continue  # does not accept this number of ranks
    return NamedProgram(tuple(programs))
