"""One moment of a stage's forward or backward, and what a backward finds when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from meshwright.planner.memory.saved import Saved
from meshwright.planner.memory.states import Flat
from meshwright.planner.memory.temporaries import Extra

if TYPE_CHECKING:
    from meshwright.planner.memory.moments import StageMoments


class Reduction(NamedTuple):
    """A gradient reduction in flight. flat: the flat parameter buffer whose gradient is reduced; later: it is of a
    micro-batch after the first, so its result is accumulated."""

    flat: Flat
    later: bool


@dataclass(frozen=True, slots=True)
class Ways:
    """State of a pipeline stage when a backward begins.

    later: the backward is not the first of the step; last: it is the last through this stage; before: gradient
    reductions in flight.
    """

    later: bool
    last: bool
    before: tuple[Reduction, ...] = ()


FIRST_AND_LAST = Ways(later=False, last=True)


@dataclass(frozen=True, slots=True)
class Moment:
    """A memory snapshot of a pipeline stage: the tensors that are allocated at one point of a forward or backward.

    Attributes:
        name: Such as "layers.3: forward".
        kept: Bytes of the stage's own saved activations of this micro-batch.
        extras: Other tensors.
        part: Predictor of the stage's snapshots; None for one without saved activations.
        place: Index of the unit (layer, embedding, head) being computed.
        back: True in the backward.
    """

    name: str
    kept: int
    extras: tuple[Extra, ...]
    part: StageMoments | None = None
    place: int = 0
    back: bool = False

    @property
    def bytes(self) -> int:
        """Total bytes of the snapshot."""
        return self.kept + sum(extra.bytes for extra in self.extras)

    def beside(self, more: Sequence[Extra]) -> Moment:
        """Return a copy of the snapshot with the tensors `more` added."""
        return replace(self, extras=(*self.extras, *more)) if more else self

    def saved(self) -> list[Saved]:
        """Return the saved activations whose bytes `kept` sums."""
        return [] if self.part is None else self.part.saved_at(self.place, self.back)
