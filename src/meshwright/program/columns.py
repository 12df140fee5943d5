"""Common parts of collective and pipeline programs: step columns, and errors that name a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from meshwright.program.order import Integers, Mask, ProgramError


@dataclass(frozen=True, eq=False)
class StepColumns:
    """Steps of a program as columns [steps], sorted by rank and, on each rank, in execution order.

    rank: rank that runs the step. group: number of the step's group, from 0 on each rank; the steps of a group run
    together. kind: operation of the step, a `Kind` of collective or pipeline programs.
    """

    rank: Integers
    group: Integers  # numbered from 0 on each rank; the steps of one group run together
    kind: Integers

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.rank)

    def __eq__(self, other: object) -> bool:
        """Return True if `other` has the same type and equal columns."""
        return type(self) is type(other) and all(
            np.array_equal(getattr(self, column.name), getattr(other, column.name)) for column in fields(self)
        )

    def __hash__(self) -> int:
        """Return the hash of all columns, so that programs can be cache keys."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of the contents of all columns, computed once."""
        return hash(tuple(getattr(self, column.name).tobytes() for column in fields(self)))

    @cached_property
    def group_index(self) -> Integers:
        """Index of the group (consecutive steps of a rank that start together) of each step: [steps]. Groups are
        numbered from 0 over all ranks, rank by rank."""
        return np.cumsum((np.diff(self.rank, prepend=-1) != 0) | (np.diff(self.group, prepend=-1) != 0)) - 1

    @cached_property
    def group_rank(self) -> Integers:
        """Rank of each group (consecutive steps of a rank that start together): [groups]. Groups are numbered from 0
        over all ranks, rank by rank."""
        return self.rank[np.flatnonzero(np.diff(self.group_index, prepend=-1) != 0)]

    def of_rank(self, rank: int) -> range:
        """Return the indices of the steps of rank `rank` in the columns, as a range."""
        return range(int(np.searchsorted(self.rank, rank)), int(np.searchsorted(self.rank, rank, side="right")))

    def has_kind(self, kinds: Iterable[int]) -> Mask:
        """Return a mask [steps]: True for steps whose kind is one of `kinds`."""
        return np.isin(self.kind, list(kinds))


class StepProgram:
    """Base class of collective and pipeline programs: the steps of all ranks, and methods that describe a step in error
    messages."""

    steps: StepColumns

    def describe(self, step: int) -> str:
        """Return the text of the step with index `step`, such as `send data[3] to 1` or `2F5`; also for a step with
        invalid values."""
        raise NotImplementedError

    def locate(self, step: int) -> str:
        """Return text such as `rank 2, step 7 (1F3)` for the step with index `step`: its rank, the number of its group
        (steps that run together), and the step itself."""
        return f"rank {self.steps.rank[step]}, step {self.steps.group[step]} ({self.describe(step)})"

    def make_error(self, step: int, reason: str) -> ProgramError:
        """Return a `ProgramError` about the step with index `step`; its message names the step's rank and text, then
        `reason`."""
        return ProgramError(int(self.steps.rank[step]), int(self.steps.group[step]), self.describe(step), reason)

    def refuse(self, bad: Mask, reason: str) -> None:
        """Raise `ProgramError` about the first step for which the mask `bad` [steps] is True; do nothing if there is
        none.

        reason: message; names of step columns in braces, such as `{rank}`, are replaced by the values of that step.
        """
        if bad.any():
            step = int(np.argmax(bad))
            values = {column.name: getattr(self.steps, column.name)[step] for column in fields(self.steps)}
            raise self.make_error(step, reason.format(**values))


def count_in_runs(starts: Mask) -> Integers:
    """Return the position of each entry within its run of consecutive entries, from 0. starts: mask, True where a run
    begins.

    Example: [True, False, False, True, False] gives [0, 1, 2, 0, 1]. Entry 0 begins a run in any case.
    """
    index = np.arange(len(starts))
    position: Integers = index - np.maximum.accumulate(np.where(starts, index, 0))
    return position


def renumber_groups(rank: Integers, group: Integers) -> Integers:
    """Renumber groups (steps that a rank runs together) so that each rank's groups count from 0 without gaps; return
    the group number of each step: [steps].

    rank, group: [steps], rank and old group number of each step, sorted by rank, with the steps of a group adjacent.
    """
    new_rank = np.diff(rank, prepend=-1) != 0
    number = np.cumsum(new_rank | (np.diff(group, prepend=-1) != 0)) - 1
    counted: Integers = number - np.maximum.accumulate(np.where(new_rank, number, 0))
    return counted
