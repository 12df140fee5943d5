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
    """A posted gradient reduction of a flat buffer. later: of a micro-batch after the first, so its result is
    accumulated."""

    flat: Flat
    later: bool


@dataclass(frozen=True, slots=True)
class Ways:
    """State in which a backward begins: not the first of the step (`later`), the last through its stage, reductions in
    flight."""

    later: bool
    last: bool
    before: tuple[Reduction, ...] = ()


FIRST_AND_LAST = Ways(later=False, last=True)


@dataclass(frozen=True, slots=True)
class Moment:
    """A memory snapshot of a stage. kept: bytes of its own saved activations; extras: other tensors.

    place: index of the unit being computed; back: in the backward.
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
        """Return the snapshot with more tensors."""
        return replace(self, extras=(*self.extras, *more)) if more else self

    def saved(self) -> list[Saved]:
        """Return the saved activations that `kept` counts."""
        return [] if self.part is None else self.part.saved_at(self.place, self.back)
