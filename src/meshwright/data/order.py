"""Which sample comes when: a function of (seed, global sample number) alone, so any layout reads the same stream."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

LONGEST_PERIOD = 1 << 16  # samples after which a mixture repeats its sources, at most
_ROUNDS = 8


class SampleOrder:
    """Endless epochs over `sequences` samples, each epoch its own permutation; nothing is stored.

    An epoch's permutation is a balanced Feistel network over the smallest 4^h >= `sequences` numbers; its round keys
    are the SHA-512 of (seed, epoch). A number that falls outside is sent through again until it falls inside: cycle
    walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, method 2). `source`: the number of the
    source in a mixture, so that its sources have orders of their own.
    """

    def __init__(self, seed: int, sequences: int, source: int = 0) -> None:
        assert sequences >= 1, sequences
        self.seed, self.sequences = seed, sequences
        self._key = f"meshwright sample order, seed {seed}" + (f", source {source}" if source else "")
        # At least 16 numbers: with fewer the halves are too narrow for the rounds to reach every permutation.
        self._half_bits = max(2, ((sequences - 1).bit_length() + 1) // 2)

    def sample(self, numbers: ArrayLike) -> NDArray[np.int64]:
        """The sample, in [0, sequences), at each global sample number >= 0; the result has the shape of `numbers`."""
        wanted = np.asarray(numbers, dtype=np.int64)
        assert wanted.size == 0 or wanted.min() >= 0, wanted.min()
        epochs, places = np.divmod(wanted.ravel(), self.sequences)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._permuted(places[here].astype(np.uint64), int(epoch)).astype(np.int64)
        return samples.reshape(wanted.shape)

    def epoch(self, number: int) -> int:
        """The epoch, from 0, that global sample number `number` belongs to."""
        return number // self.sequences

    def _permuted(self, places: NDArray[np.uint64], epoch: int) -> NDArray[np.uint64]:
        digest = hashlib.sha512(f"{self._key}, epoch {epoch}".encode()).digest()
        keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        assert len(keys) == _ROUNDS
        result = self._feistel(places, keys)
        while (outside := np.flatnonzero(result >= self.sequences)).size:
            result[outside] = self._feistel(result[outside], keys)
        return result

    def _feistel(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << bits) | right


class MixtureOrder:
    """Samples of several sources by their weights, each source in endless epochs of its own; nothing is stored.

    The samples of source k are numbered from sequences[0] + ... + sequences[k-1] on. Which source comes at a place is
    periodic and as even as it can be: of any first n samples, source k gives n w_k / sum(w) to within 1 - 1/(2K - 2), K
    being the number of sources (Tijdeman, "The chairman assignment problem", 1980); so of any n in a row, to within
    twice that. The period is that of the weights as whole numbers, and its counts are exact; weights that need one of
    more than `LONGEST_PERIOD` samples are rounded so that it has about that many.
    """

    def __init__(self, seed: int, sequences: Sequence[int], weights: Sequence[float]) -> None:
        assert len(sequences) == len(weights) >= 1
        self.seed, self.sequences = seed, sum(sequences)
        self._orders = [SampleOrder(seed, count, source) for source, count in enumerate(sequences)]
        self._first = np.cumsum([0, *sequences[:-1]])
        self.parts = whole_weights(weights)
        self._sources = np.array(evenly(self.parts), dtype=np.int64)
        self._before = np.empty_like(self._sources)  # how often the source of a place came earlier in the period
        for source, count in enumerate(self.parts):
            self._before[self._sources == source] = np.arange(count)

    def sample(self, numbers: ArrayLike) -> NDArray[np.int64]:
        """The sample at each global sample number >= 0; the result has the shape of `numbers`."""
        wanted = np.asarray(numbers, dtype=np.int64)
        assert wanted.size == 0 or wanted.min() >= 0, wanted.min()
        periods, places = np.divmod(wanted.ravel(), len(self._sources))
        sources = self._sources[places]
        turns = periods * np.array(self.parts)[sources] + self._before[places]
        samples: NDArray[np.int64] = np.empty_like(turns)
        for source in np.unique(sources):
            here = sources == source
            samples[here] = self._orders[source].sample(turns[here]) + self._first[source]
        return samples.reshape(wanted.shape)

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` each source gives."""
        periods, rest = divmod(samples, len(self._sources))
        more = np.bincount(self._sources[:rest], minlength=len(self.parts))
        return [periods * part + int(extra) for part, extra in zip(self.parts, more, strict=True)]


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the ratio of `weights`, each taken as the decimal number that it is written as.

    Where they add up to more than `LONGEST_PERIOD`, others that come closest and add up to about that.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    total = sum(whole) // math.gcd(*whole)
    if total > LONGEST_PERIOD:
        whole = [max(1, round(Fraction(LONGEST_PERIOD * count, sum(whole)))) for count in whole]
    divisor = math.gcd(*whole)
    return [count // divisor for count in whole]


def evenly(counts: Sequence[int]) -> list[int]:
    """A period in which each number k in [0, K) stands counts[k] times, as evenly as it can be.

    The j-th turn of k, j from 0, belongs to the times t with 1/(2K-2) <= w t - j and, one earlier, w (t-1) - j <= 1 -
    1/(2K-2), where w is the share of k. Of the turns whose time has come, the one whose time ends first is taken, and
    then each gets its turn in time (Tijdeman 1980, theorem 1).
    """
    total, number = sum(counts), len(counts)
    if number == 1:
        return [0] * total
    step = 2 * number - 2
    turns = [0] * number
    period = []
    for time in range(1, total + 1):
        taken, ends = -1, 0
        for k, count in enumerate(counts):
            turn = turns[k]
            if turn < count and step * (count * time - turn * total) >= total:
                end = ((turn + 1) * step - 1) * total // (count * step)
                if taken < 0 or end < ends:
                    taken, ends = k, end
        turns[taken] += 1
        period.append(taken)
    return period


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
