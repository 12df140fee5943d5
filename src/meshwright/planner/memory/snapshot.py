"""Memory snapshots of a pipeline stage, and the tensors of which they consist."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import Number


class Allocation(NamedTuple):
    """One tensor in memory, or several equal tensors.

    Attributes:
        category: Such as "activations".
        name: Such as "layers.3.mlp.up.input".
        shape, dtype: Shape and torch's type name of each tensor; empty if unknown.
        bytes: Bytes of all tensors together; an array for many layouts.
        stage: Pipeline stage; None if the tensors belong to none.
        first, last: Events between which the tensors are allocated, such as "forward".
    """

    category: str
    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: Number = 0
    stage: int | None = None
    first: str = "start"
    last: str = "end"


NamedSnapshot = tuple[str, list[Allocation]]
"""(suffix of the snapshot's name after its unit's, such as ".attention"; temporaries)."""


def activation(name: str, size: int) -> Allocation:
    """Return a short-lived activation, or the gradient of an activation. size: bytes."""
    return Allocation("activations", name, bytes=size)


def message(name: str, size: int) -> Allocation:
    """Return a tensor that is being sent or received. size: bytes."""
    return Allocation("communication", name, bytes=size)


def count_bytes(tensors: Iterable[Allocation]) -> Number:
    """Return the total bytes of tensors."""
    return sum(each.bytes for each in tensors)


class Snapshot(NamedTuple):
    """A memory snapshot of a pipeline stage: the tensors that are allocated at one point of a forward or backward.

    Attributes:
        name: Such as "layers.3: forward".
        temporaries: All tensors that are neither persistent nor saved activations.
        units: Number of the stage's first units whose saved activations are allocated; None: the snapshot has no saved
            activations, not even those that belong to no unit.
    """

    name: str
    temporaries: tuple[Allocation, ...]
    units: int | None = None
