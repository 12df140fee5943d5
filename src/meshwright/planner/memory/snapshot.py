"""A memory snapshot of a pipeline stage, and the state in which a backward begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.planner.memory.states import Flat
from meshwright.planner.memory.tensors import Saved, Temporary


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
        kept: Bytes of the stage's own saved activations of this micro-batch.
        temporaries: Other tensors.
        stage: Index of the stage; None for a snapshot without saved activations.
        list_saved: Function that returns the saved activations whose bytes `kept` sums.
    """

    name: str
    kept: int
    temporaries: tuple[Temporary, ...]
    stage: int | None = None
    list_saved: Callable[[], list[Saved]] = list

    @property
    def bytes(self) -> int:
        """Total bytes of the snapshot."""
        return self.kept + sum(one.bytes for one in self.temporaries)

    def beside(self, more: Sequence[Temporary]) -> Snapshot:
        """Return a copy of the snapshot with the tensors `more` added."""
        return replace(self, temporaries=(*self.temporaries, *more)) if more else self
