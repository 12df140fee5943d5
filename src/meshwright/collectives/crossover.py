"""Crossovers: vector sizes at which the fastest algorithm changes, and times over size for every algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.collectives.choose import Chooser

SMALLEST, LARGEST = 2**10, 2**30  # bytes: default range
_STEP = 4.0  # ratio of adjacent sizes
_CLOSE = 1.02  # relative precision of a crossover


@dataclass(frozen=True)
class Crossover:
    """Vector size at which the fastest algorithm changes: for vectors smaller than `size` bytes algorithm `before` is
    the fastest, from `size` bytes on algorithm `after`."""

    size: int
    before: str
    after: str


@dataclass
class Curves:
    """Simulated times of all algorithms of one operation on one network, for several sizes of the vector.

    Attributes:
        chooser: Simulator of the operation's algorithms on the network.
        sizes: Sizes in bytes, ascending.
        seconds: {algorithm: seconds at each size}; infinite at sizes at which the algorithm was not simulated.
        bound: Lower bound of the seconds at each size.
    """

    chooser: Chooser
    sizes: list[float]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bound: list[float] = field(default_factory=list)

    @classmethod
    def simulate(
        cls, chooser: Chooser, least: float = SMALLEST, most: float = LARGEST, within: float = math.inf
    ) -> Curves:
        """Simulate every algorithm at vector sizes from `least` to `most` bytes (both included), each size about four
        times the previous size; return the curves of time over size.

        chooser: simulator of the operation's algorithms on the network. within: an algorithm whose closed-form time at
        a size exceeds `within` times the best simulated time is not simulated there, and gets infinite seconds;
        infinity (default): all algorithms are simulated.
        """
        steps = max(1, math.ceil(math.log(most / least, _STEP)))
        sizes = [least * (most / least) ** (step / steps) for step in range(steps + 1)]
        curves = cls(chooser, sizes, bound=[chooser.compute_lower_bound(size) for size in sizes])
        for size in sizes:
            best = math.inf
            forms = {name: chooser.compute_closed_form(name, size) for name in chooser.algorithms}
            for name in sorted(forms, key=lambda one: forms[one]):
                candidate = None if forms[name] > within * best else chooser.find_candidate(name, size)
                seconds = math.inf if candidate is None else candidate.seconds
                best = min(best, seconds)
                curves.seconds.setdefault(name, []).append(seconds)
        curves.seconds = {name: curves.seconds[name] for name in chooser.algorithms}  # in the order of the library
        return curves

    @classmethod
    def simulate_promising(cls, chooser: Chooser, most: float = LARGEST) -> Curves:
        """Simulate the algorithms that may be the fastest at vector sizes from 1 KiB to `most` bytes; return the curves
        of time over size. Algorithms that are far too slow by closed form are skipped; this does not change the
        crossovers (sizes at which the fastest algorithm changes).

        chooser: simulator of the operation's algorithms on the network.
        """
        inner, outer = chooser.network.tiers
        return cls.simulate(chooser, most=most, within=1.1 if inner == outer else 2.5)

    def find_fastest(self, index: int) -> str:
        """Return the name of the fastest algorithm at the vector size `self.sizes[index]`. If several algorithms are
        equally fast, return the first of them in the table of algorithms."""
        return _find_fastest({name: seconds[index] for name, seconds in self.seconds.items()})

    def find_crossovers(self) -> list[Crossover]:
        """Return the vector sizes at which the fastest algorithm changes, ascending, found by bisection between
        adjacent sizes of the curves."""
        found: list[Crossover] = []
        for index in range(len(self.sizes) - 1):
            ends = (self.sizes[index], self.find_fastest(index)), (self.sizes[index + 1], self.find_fastest(index + 1))
            least = [min(seconds[at] for seconds in self.seconds.values()) for at in (index, index + 1)]
            near = [
                name
                for name, seconds in self.seconds.items()
                if seconds[index] <= 2 * least[0] and seconds[index + 1] <= 2 * least[1]
            ]
            found += self._bisect(*ends, {*near, ends[0][1], ends[1][1]})
        return found

    def _bisect(self, low: tuple[float, str], high: tuple[float, str], names: set[str]) -> list[Crossover]:
        """Return the crossovers (vector sizes at which the fastest algorithm changes) between two sizes of the vector,
        found by bisection.

        low, high: (size in bytes, name of the fastest algorithm at that size). names: algorithms to simulate at sizes
        in between.
        """
        if low[1] == high[1]:
            return []
        if high[0] / low[0] < _CLOSE:
            return [Crossover(round(math.sqrt(low[0] * high[0])), low[1], high[1])]
        size = math.sqrt(low[0] * high[0])
        timed = {name: self.chooser.find_candidate(name, size) for name in self.seconds if name in names}
        middle = size, _find_fastest({name: one.seconds for name, one in timed.items() if one is not None})
        return [*self._bisect(low, middle, names), *self._bisect(middle, high, names)]


def _find_fastest(seconds: dict[str, float]) -> str:
    """Return the algorithm with the lowest time; of equally fast algorithms, the first. seconds: {algorithm: its
    time}."""
    least = min(seconds.values()) * (1 + 1e-9)
    return next(name for name, value in seconds.items() if value <= least)
