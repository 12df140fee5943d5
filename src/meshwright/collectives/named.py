"""The programs that a recipe names for the gradients of data parallelism and ZeRO: found, checked, given to their axes.

[collectives]
all_reduce = "rabenseifner"        # or "native", "auto", "@FILE"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from meshwright.collectives.library import ALGORITHMS, generate
from meshwright.errors import CheckFailed, UserError
from meshwright.layout import Layout
from meshwright.program.check_collective import CheckedCollective, check_collective
from meshwright.program.load import load_program
from meshwright.recipe import CollectivesRecipe

OPERATIONS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}
"""Key of the table -> operation."""

AXES = ("data", "shard", "replica")

# What "auto" weighs rounds, messages and bytes with: the order of what sockets between processes of one machine cost.
# Assumed, not measured: only their proportions decide.
ROUND = 6e-5  # seconds
MESSAGE = 3e-5  # seconds of the rank that sends it
BANDWIDTH = 1e9  # bytes a second


@dataclass(frozen=True)
class Named:
    """What a recipe names for one operation on one axis: one program, or with "auto" several to choose from."""

    programs: tuple[CheckedCollective, ...]

    @cached_property
    def _costs(self) -> list[tuple[float, float]]:
        """Of each program: seconds whatever the size, and seconds a byte of the vector; of the busiest rank."""
        costs = []
        for checked in self.programs:
            messages = np.bincount(checked.program.steps.rank[checked.sends], minlength=1).max()
            constant = checked.rounds * ROUND + float(messages) * MESSAGE
            costs.append((constant, float(checked.bytes_sent(1.0).max(initial=0)) / BANDWIDTH))
        return costs

    def for_bytes(self, total_bytes: float) -> CheckedCollective:
        """The program for a vector of so many bytes: the one whose rounds, messages and bytes take least."""
        seconds = [constant + total_bytes * byte for constant, byte in self._costs]
        return self.programs[seconds.index(min(seconds))]


def named_programs(
    collectives: CollectivesRecipe, layout: Layout, where: Callable[[str], str] = lambda key: "recipe"
) -> dict[tuple[str, str], Named]:
    """(axis, key of the table) -> what serves there. Calls that are not in it stay torch.distributed's own.

    A program serves those of the data, shard and replica axes whose number of ranks it can take; the one on which the
    operation moves gradients or parameters must be among them.

    Raises UserError in one line that starts with `where` of the key, such as `collectives.all_reduce`.
    """
    found: dict[tuple[str, str], Named] = {}
    sizes = {axis: layout.group_size(axis) for axis in AXES}
    for key, operation in OPERATIONS.items():
        value = getattr(collectives, key)
        if value == "native":
            continue
        try:
            if value.startswith("@"):
                fitting = _from_file(value, operation, sizes, _main_axis(layout, key))
            else:
                fitting = _by_name(value, operation, sizes, _main_axis(layout, key))
        except (UserError, CheckFailed) as error:
            raise UserError(f"{where(f'collectives.{key}')}: collectives.{key}: {error}") from None
        found |= {(axis, key): named for axis, named in fitting.items()}
    return found


def _main_axis(layout: Layout, key: str) -> str:
    """The axis on which the operation moves gradients or parameters."""
    if key != "all_reduce":
        return "shard"
    return "data" if layout.zero == 0 else "replica"


def _from_file(path: str, operation: str, sizes: dict[str, int], main: str) -> dict[str, Named]:
    program = load_program(path, "collective")
    if program.operation != operation:
        raise UserError(f"{path} is a program for {program.operation}, not for {operation}")
    if program.reduction != "sum":
        raise UserError(f"{path} forms the {program.reduction}; gradients are summed")
    if sizes[main] not in (1, program.ranks):
        raise UserError(f"{path} is a program for {program.ranks} ranks; axis {main} of this layout has {sizes[main]}")
    if operation != "all-reduce" and program.chunks % program.ranks:
        raise UserError(
            f"{path} has {program.chunks} chunks; equal shares need a multiple of its {program.ranks} ranks"
        )
    named = Named((check_collective(program),))
    return {axis: named for axis, size in sizes.items() if size == program.ranks}


def _by_name(algorithm: str, operation: str, sizes: dict[str, int], main: str) -> dict[str, Named]:
    found = {}
    for axis, size in sizes.items():
        if size > 1:
            try:
                found[axis] = _generated(operation, algorithm, size)
            except UserError:
                if axis == main:
                    raise
    return found


@cache
def _generated(operation: str, algorithm: str, ranks: int) -> Named:
    if algorithm != "auto":
        return Named((check_collective(generate(operation, algorithm, ranks)),))
    programs = []
    for name in ALGORITHMS[operation]:
        try:
            programs.append(check_collective(generate(operation, name, ranks)))
        except UserError:
            continue  # not for so many ranks
    return Named(tuple(programs))
