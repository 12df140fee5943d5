"""Columns that the steps of collective programs and of pipeline programs share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from meshwright.program.order import Integers, Mask


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
        return len(self.rank)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            np.array_equal(getattr(self, column.name), getattr(other, column.name)) for column in fields(self)
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of the contents of all columns, computed once."""
        return hash(tuple(getattr(self, column.name).tobytes() for column in fields(self)))

    @cached_property
    def group_index(self) -> Integers:
        """Index of each step's group (consecutive steps of a rank that start together), with the groups of all ranks
        numbered consecutively, rank by rank: [steps]."""
        return np.cumsum((np.diff(self.rank, prepend=-1) != 0) | (np.diff(self.group, prepend=-1) != 0)) - 1

    @cached_property
    def group_rank(self) -> Integers:
        """Rank of each group (consecutive steps of a rank that start together), groups numbered over all ranks from 0:
        [groups]."""
        return self.rank[np.flatnonzero(np.diff(self.group_index, prepend=-1) != 0)]

    def of_rank(self, rank: int) -> range:
        """Return the range of step indices (positions in the columns) that belong to rank `rank`."""
        return range(int(np.searchsorted(self.rank, rank)), int(np.searchsorted(self.rank, rank, side="right")))

    def has_kind(self, kinds: Iterable[int]) -> Mask:
        """Return a mask [steps]: True for steps whose kind is one of `kinds`."""
        return np.isin(self.kind, list(kinds))


def renumber_groups(rank: Integers, group: Integers) -> Integers:
    """Return the group number of each step [steps], renumbered so that each rank's groups count from 0 without gaps.

    rank, group: [steps], rank and old group number of each step, sorted by rank, with the steps of a group adjacent.
    """
    new_rank = np.diff(rank, prepend=-1) != 0
    number = np.cumsum(new_rank | (np.diff(group, prepend=-1) != 0)) - 1
    first = np.flatnonzero(new_rank)
    counted: Integers = number - np.repeat(number[first], np.diff(np.append(first, len(rank))))
    return counted
