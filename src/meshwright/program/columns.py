"""The steps of a program as columns of numbers: what both dialects have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from meshwright.program.order import Integers, Mask


@dataclass(frozen=True, eq=False)
class Columns:
    """One entry a step, rank by rank, and on each rank in the order in which it takes them."""

    rank: Integers
    group: Integers  # numbered from 0 on each rank; the steps of a group happen together
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
        return hash(tuple(getattr(self, column.name).tobytes() for column in fields(self)))

    @cached_property
    def group_index(self) -> Integers:
        """Number of each step's group among all groups of all ranks."""
        return np.cumsum((np.diff(self.rank, prepend=-1) != 0) | (np.diff(self.group, prepend=-1) != 0)) - 1

    @cached_property
    def group_rank(self) -> Integers:
        """Rank of each group, groups numbered as in `group_index`."""
        return self.rank[np.flatnonzero(np.diff(self.group_index, prepend=-1) != 0)]

    def of_rank(self, rank: int) -> range:
        """Indices of a rank's steps."""
        return range(int(np.searchsorted(self.rank, rank)), int(np.searchsorted(self.rank, rank, side="right")))

    def is_one_of(self, kinds: Iterable[int]) -> Mask:
        """One truth value a step."""
        return np.isin(self.kind, list(kinds))


def numbered_groups(rank: Integers, group: Integers) -> Integers:
    """Groups numbered from 0 on each rank, in their order; steps are sorted by rank, and a group's stand together."""
    new_rank = np.diff(rank, prepend=-1) != 0
    number = np.cumsum(new_rank | (np.diff(group, prepend=-1) != 0)) - 1
    first = np.flatnonzero(new_rank)
    counted: Integers = number - np.repeat(number[first], np.diff(np.append(first, len(rank))))
    return counted
