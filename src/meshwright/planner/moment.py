"""One moment of a stage's forward or backward, and what a backward finds when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from meshwright.planner.saved import Saved
from meshwright.planner.states import Flat
from meshwright.planner.temporaries import Extra

if TYPE_CHECKING:
    from meshwright.planner.moments import StageMoments


class Reduction(NamedTuple):
    """A posted gradient reduction. flat: flat buffer whose gradient it sums; later: of a micro-batch after the first,
    so its result is accumulated."""

    flat: Flat
    later: bool


@dataclass(frozen=True, slots=True)
class Ways:
    """State of a stage when a backward begins.

    later: it is not the first of the step; last: it is the last through this stage; before: reductions in flight.
    """

    later: bool
    last: bool
    before: tuple[Reduction, ...] = ()


FIRST_AND_LAST = Ways(later=False, last=True)


@dataclass(frozen=True, slots=True)
class Moment:
    """A memory snapshot of a stage.

    Attributes:
        name: Such as "layers.3: forward".
        kept: Bytes of the stage's own saved activations of this micro-batch.
        extras: Other tensors.
        part: The stage; None where it has none.
        place: Index of the unit (layer, embedding, head) being computed.
        back: It is in the backward.
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
        """Return the snapshot with further tensors, `more`, in memory."""
        return replace(self, extras=(*self.extras, *more)) if more else self

    def saved(self) -> list[Saved]:
        """Return the saved activations that `kept` counts."""
        return [] if self.part is None else self.part.saved_at(self.place, self.back)
