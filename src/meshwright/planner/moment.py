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
    """Of a flat buffer, posted; `later`: of a micro-batch after the first, whose gradients are then added."""

    flat: Flat
    later: bool


@dataclass(frozen=True, slots=True)
class Ways:
    """What a backward finds: whether there was one before it in the step, whose gradients are there already, whether it
    is the last one through its stage, and the reductions that were under way `before` it."""

    later: bool
    last: bool
    before: tuple[Reduction, ...] = ()


FIRST_AND_LAST = Ways(later=False, last=True)


@dataclass(frozen=True, slots=True)
class Moment:
    """`kept`: bytes that the stage's own saved activations have then; `extras`: what is there beside them. `place`: the
    number of the unit that is worked on; `back`: whether on the way back."""

    name: str
    kept: int
    extras: tuple[Extra, ...]
    part: StageMoments | None = None
    place: int = 0
    back: bool = False

    @property
    def bytes(self) -> int:
        return self.kept + sum(extra.bytes for extra in self.extras)

    def beside(self, more: Sequence[Extra]) -> Moment:
        """The same with more."""
        return replace(self, extras=(*self.extras, *more)) if more else self

    def saved(self) -> list[Saved]:
        """What `kept` is made of."""
        return [] if self.part is None else self.part.saved_at(self.place, self.back)
