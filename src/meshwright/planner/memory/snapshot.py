"""Memory snapshots of a pipeline stage, the tensors of which they consist, and the state in which a backward begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import Number
from meshwright.planner.memory.states import Flat


@dataclass(frozen=True, slots=True)
class Saved:
    """An activation that a forward saves for its backward. name: such as "layers.3.mlp.up.input"; shape: sizes on this
    rank; dtype: torch's type name; bytes: size of the whole storage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: Number


class Temporary(NamedTuple):
    """A tensor of a memory snapshot that is neither persistent nor a saved activation. name: such as "layers.3.mlp.up";
    category: category of the memory ledger, such as "workspace"; bytes: size. An entry with negative bytes stands for a
    saved activation that is already freed."""

    category: str
    name: str
    bytes: int


NamedSnapshot = tuple[str, list[Temporary]]
"""(suffix of the snapshot's name after its unit's, such as ".attention"; temporaries)."""


def activation(name: str, size: int) -> Temporary:
    """Return a temporary of category "activations": a short-lived activation, or the gradient of an activation. size:
    bytes."""
    return Temporary("activations", name, size)


def workspace(name: str, size: int) -> Temporary:
    """Return a temporary of category "workspace": memory that a kernel or loop allocates while it runs. size: bytes."""
    return Temporary("workspace", name, size)


def message(name: str, size: int) -> Temporary:
    """Return a temporary of category "communication": a tensor that is being sent or received. size: bytes."""
    return Temporary("communication", name, size)


class Reduction(NamedTuple):
    """A gradient reduction in flight. flat: flat parameter buffer whose gradient is reduced; later: True for a
    micro-batch after the first, so that the result is added to an earlier sum."""

    flat: Flat
    later: bool


@dataclass(frozen=True, slots=True)
class BackwardState:
    """State of a pipeline stage when a backward begins. later: True if the stage has already run a backward in this
    step; last: True for its last backward of the step; before: gradient reductions in flight."""

    later: bool
    last: bool
    before: tuple[Reduction, ...] = ()


class Buffers(NamedTuple):
    """Flat parameter buffers of a stage, in which ZeRO shards parameters.

    Attributes:
        units: FSDP units of the stage, each a layer, the embedding or the head.
        flats: {unit: its flat parameter buffers}.
        reused: {number of elements: number of buffers} of the unsharded gradient buffers that layers share.
        tied: True if head and embedding share their weight.
    """

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
        saved_bytes: Bytes of this micro-batch's saved activations in the stage.
        temporaries: All other tensors that are not persistent.
        stage: Index of the stage; None for a snapshot without saved activations.
        list_saved: Function that returns the saved activations counted in `saved_bytes`.
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

    def with_more(self, added: Sequence[Temporary]) -> Snapshot:
        """Return a copy of the snapshot with the tensors `added` in addition."""
        return replace(self, temporaries=(*self.temporaries, *added)) if added else self
