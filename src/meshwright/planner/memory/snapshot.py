"""Memory snapshots of a pipeline stage, the tensors of which they consist, and the state in which a backward begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import Number
from meshwright.planner.memory.states import Flat


@dataclass(frozen=True, slots=True)
class Saved:
    """An activation saved by a forward for its backward. name: such as "layers.3.mlp.up.input"; dtype: torch's type
    name; bytes: of its whole storage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: Number


class Temporary(NamedTuple):
    """A tensor of a memory snapshot that is neither persistent nor a saved activation. category: of the memory ledger,
    such as "workspace"; bytes: negative for a saved activation that is already freed."""

    category: str
    name: str
    bytes: int


NamedSnapshot = tuple[str, list[Temporary]]
"""A snapshot's name, to follow that of its unit, such as ".attention", and its temporaries."""


def activation(name: str, size: int) -> Temporary:
    """Return an activation or a gradient of one, of `size` bytes, that is allocated for a moment."""
    return Temporary("activations", name, size)


def workspace(name: str, size: int) -> Temporary:
    """Return a workspace of `size` bytes: what a kernel or a loop allocates while it runs."""
    return Temporary("workspace", name, size)


def message(name: str, size: int) -> Temporary:
    """Return a tensor of `size` bytes on its way between ranks."""
    return Temporary("communication", name, size)


class Reduction(NamedTuple):
    """A gradient reduction in flight. flat: the flat parameter buffer whose gradient is reduced; later: it is of a
    micro-batch after the first, so its result is accumulated."""

    flat: Flat
    later: bool


@dataclass(frozen=True, slots=True)
class BackwardState:
    """State of a pipeline stage when a backward begins.

    later: the backward is not the first of the step; last: it is the last through this stage; before: gradient
    reductions in flight.
    """

    later: bool
    last: bool
    before: tuple[Reduction, ...] = ()


class Buffers(NamedTuple):
    """Flat buffers of a stage. units: its FSDP units, each a layer, the embedding or the head; flats: flat parameter
    buffers by unit; reused: number of unsharded gradient buffers that layers reuse, by elements; tied: head and
    embedding share a matrix."""

    units: Sequence[str]
    flats: Mapping[str, Sequence[Flat]]
    reused: Mapping[int, int]
    tied: bool


FIRST_AND_LAST = BackwardState(later=False, last=True)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A memory snapshot of a pipeline stage: the tensors that are allocated at one point of a forward or backward.

    Attributes:
        name: Such as "layers.3: forward".
        saved_bytes: Bytes of the stage's own saved activations of this micro-batch.
        temporaries: Other tensors.
        stage: Index of the stage; None for a snapshot without saved activations.
        list_saved: Function that returns the saved activations whose bytes `saved_bytes` sums.
    """

    name: str
    saved_bytes: int
    temporaries: tuple[Temporary, ...]
    stage: int | None = None
    list_saved: Callable[[], list[Saved]] = list

    @property
    def bytes(self) -> int:
        """Total bytes of the snapshot."""
        return self.saved_bytes + sum(one.bytes for one in self.temporaries)

    def with_more(self, more: Sequence[Temporary]) -> Snapshot:
        """Return a copy of the snapshot with the tensors `more` added."""
        return replace(self, temporaries=(*self.temporaries, *more)) if more else self
