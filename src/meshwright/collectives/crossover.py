"""Where one algorithm gives way to another as vectors grow: time over size for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.collectives.choose import Chooser

SMALLEST, LARGEST = 2**10, 2**30  # bytes: the range that is looked at, unless said
_STEP = 4.0  # from size to size
_CLOSE = 1.02  # a crossover is found to within so much


@dataclass(frozen=True)
class Crossover:
    """At `size` bytes, `after` takes over from `before`."""

    size: int
    before: str
    after: str


@dataclass
class Curves:
    """Time over size on one network. seconds: per algorithm, one number a size; bound: the lower bound, likewise."""

    chooser: Chooser
    sizes: list[float]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bound: list[float] = field(default_factory=list)

    @classmethod
    def over(cls, chooser: Chooser, least: float = SMALLEST, most: float = LARGEST, within: float = math.inf) -> Curves:
        """All algorithms that take so many ranks, at powers of four from `least` to `most` bytes and at both ends.

        within: leave out (as infinite) what its closed form puts above so many times the best of a size.
        """
        steps = max(1, math.ceil(math.log(most / least, _STEP)))
        sizes = [least * (most / least) ** (step / steps) for step in range(steps + 1)]
        curves = cls(chooser, sizes, bound=[chooser.lower_bound(size) for size in sizes])
        for size in sizes:
            best = math.inf
            forms = {name: chooser.closed_form(name, size) for name in chooser.algorithms}
            for name in sorted(forms, key=lambda one: forms[one]):
                candidate = None if forms[name] > within * best else chooser.candidate(name, size)
                seconds = math.inf if candidate is None else candidate.seconds
                best = min(best, seconds)
                curves.seconds.setdefault(name, []).append(seconds)
        curves.seconds = {name: curves.seconds[name] for name in chooser.algorithms}  # in the order of the library
        return curves

    @classmethod
    def quick(cls, chooser: Chooser, least: float = SMALLEST, most: float = LARGEST) -> Curves:
        """As `over`, for the crossovers alone: without what is not near the best by its closed form, which is off by
        more where links are of two kinds."""
        inner, outer = chooser.network.tiers
        return cls.over(chooser, least, most, within=1.1 if inner == outer else 2.5)

    def best(self, index: int) -> str:
        """The fastest algorithm at a size; of equals, the first in the library."""
        return _first_least({name: seconds[index] for name, seconds in self.seconds.items()})

    def crossovers(self) -> list[Crossover]:
        """Where the best changes."""
        found: list[Crossover] = []
        for index in range(len(self.sizes) - 1):
            ends = (self.sizes[index], self.best(index)), (self.sizes[index + 1], self.best(index + 1))
            least = [min(seconds[at] for seconds in self.seconds.values()) for at in (index, index + 1)]
            near = [
                name
                for name, seconds in self.seconds.items()
                if seconds[index] <= 2 * least[0] and seconds[index + 1] <= 2 * least[1]
            ]
            found += self._between(*ends, {*near, ends[0][1], ends[1][1]})
        return found

    def _between(self, low: tuple[float, str], high: tuple[float, str], names: set[str]) -> list[Crossover]:
        """Crossovers between two sizes, by halving, among the algorithms that are near the best at both."""
        if low[1] == high[1]:
            return []
        if high[0] / low[0] < _CLOSE:
            return [Crossover(round(math.sqrt(low[0] * high[0])), low[1], high[1])]
        size = math.sqrt(low[0] * high[0])
        timed = {name: self.chooser.candidate(name, size) for name in self.seconds if name in names}
        middle = size, _first_least({name: one.seconds for name, one in timed.items() if one is not None})
        return [*self._between(low, middle, names), *self._between(middle, high, names)]


def _first_least(seconds: dict[str, float]) -> str:
    """The fastest; of equals, the first."""
    least = min(seconds.values()) * (1 + 1e-9)
    return next(name for name, value in seconds.items() if value <= least)
