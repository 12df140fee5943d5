"""Sample order: a function of (seed, global sample number) alone, so that every layout reads the same samples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.data.cleaning.words import mix_bits

MAX_PERIOD = 1 << 16  # maximum samples after which the sequence of sources of a mixture repeats
_ROUNDS = 8


class SampleOrder:
    """Training order of `sequences` samples: endless epochs, each a pseudorandom permutation. Indices are computed per
    sample and never stored, so that resuming and any data-parallel layout see the same order.

    seed: random seed of the training run. sequences: number of samples. source: index of the data source in a mixture;
    each has a different order. An epoch's permutation is a balanced Feistel network over [0, 4^h), 4^h >= `sequences`,
    with round keys from the SHA-512 of (seed, epoch). A result outside [0, sequences) is permuted again until it falls
    inside: cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, method 2).
    """

    def __init__(self, seed: int, sequences: int, source: int = 0) -> None:
        """Derive the size of the Feistel network from `sequences`; nothing is stored per sample. Arguments: see the
        class."""
        assert sequences >= 1, sequences
        self.seed, self.sequences = seed, sequences
        self._key = f"meshwright sample order, seed {seed}" + (f", source {source}" if source else "")
        # At least 16 numbers: with fewer the halves are too narrow for the rounds to reach every permutation.
        self._half_bits = max(2, ((sequences - 1).bit_length() + 1) // 2)

    def sample(self, numbers: ArrayLike) -> NDArray[np.int64]:
        """Return the sample indices, in [0, sequences), at the positions `numbers` >= 0 of the training order; int64 of
        the same shape."""
        wanted = np.asarray(numbers, dtype=np.int64)
        assert wanted.size == 0 or wanted.min() >= 0, wanted.min()
        epochs, positions = np.divmod(wanted.ravel(), self.sequences)
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._permute(positions[here].astype(np.uint64), int(epoch)).astype(np.int64)
        return samples.reshape(wanted.shape)

    def epoch(self, number: int) -> int:
        """Return the epoch, from 0, to which position `number` of the training order belongs."""
        return number // self.sequences

    def _permute(self, positions: NDArray[np.uint64], epoch: int) -> NDArray[np.uint64]:
        """Map `positions` in an epoch to sample indices, both in [0, sequences). epoch: number of the epoch, from 0."""
        digest = hashlib.sha512(f"{self._key}, epoch {epoch}".encode()).digest()
        keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        assert len(keys) == _ROUNDS
        result = self._apply_feistel(positions, keys)
        while (outside := np.flatnonzero(result >= self.sequences)).size:
            result[outside] = self._apply_feistel(result[outside], keys)
        return result

    def _apply_feistel(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Encrypt `values`, uint64 in [0, 4^h), by the Feistel network; return values in the same range. keys: one
        round key per round, uint64 [rounds]. h: `_half_bits`, half the width of the permuted numbers in bits.
        """
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            left, right = right, left ^ (mix_bits(right + key) & mask)
        return (left << bits) | right


class MixtureOrder:
    """Training order of a weighted mixture of K data sources, each shuffled in separate endless epochs; computed per
    sample and never stored.

    seed: random seed of the training run. sequences: number of samples of each source; source k's samples have the
    indices from sequences[0] + ... + sequences[k-1] on. weights: w, relative share of each source.

    The pattern of sources is periodic and as even as possible: among the first n samples, source k has its share n w_k
    / sum(w), with an error of at most 1 - 1/(2K - 2) samples (Tijdeman, "The chairman assignment problem", 1980). The
    period is the sum of the smallest integers with the ratios of the weights; if it would exceed `MAX_PERIOD` (65,536),
    these integers are scaled down and rounded.
    """

    def __init__(self, seed: int, sequences: Sequence[int], weights: Sequence[float]) -> None:
        """Compute one period of the pattern of sources; arguments: see the class."""
        assert len(sequences) == len(weights) >= 1
        self.seed, self.sequences = seed, sum(sequences)
        self._orders = [SampleOrder(seed, count, source) for source, count in enumerate(sequences)]
        self._first = np.cumsum([0, *sequences[:-1]])
        self.parts = reduce_weights(weights)
        self._sources = np.array(interleave_evenly(self.parts), dtype=np.int64)
        self._before = np.empty_like(self._sources)  # earlier entries of the same source in the period
        for source, count in enumerate(self.parts):
            self._before[self._sources == source] = np.arange(count)

    def sample(self, numbers: ArrayLike) -> NDArray[np.int64]:
        """Return the sample indices at the positions `numbers` >= 0 of the training order; int64 of the same shape.
        Indices count the samples of all sources, source after source."""
        wanted = np.asarray(numbers, dtype=np.int64)
        assert wanted.size == 0 or wanted.min() >= 0, wanted.min()
        periods, positions = np.divmod(wanted.ravel(), len(self._sources))
        sources = self._sources[positions]
        turns = periods * np.array(self.parts)[sources] + self._before[positions]
        samples: NDArray[np.int64] = np.empty_like(turns)
        for source in np.unique(sources):
            here = sources == source
            samples[here] = self._orders[source].sample(turns[here]) + self._first[source]
        return samples.reshape(wanted.shape)

    def count_by_source(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples of the training order each source has, [sources]."""
        periods, rest = divmod(samples, len(self._sources))
        more = np.bincount(self._sources[:rest], minlength=len(self.parts))
        return [periods * part + int(extra) for part, extra in zip(self.parts, more, strict=True)]


def reduce_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers that have the ratios of `weights`, [sources]: [0.5, 0.25] gives [2, 1].

    A weight is taken as the decimal number that its `repr` shows, 0.1 as 1/10. If the sum of the integers exceeds
    65,536 (`MAX_PERIOD`), they are scaled and rounded to a sum of about this number.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    total = sum(whole) // math.gcd(*whole)
    if total > MAX_PERIOD:
        whole = [max(1, round(Fraction(MAX_PERIOD * count, sum(whole)))) for count in whole]
    divisor = math.gcd(*whole)
    return [count // divisor for count in whole]


def interleave_evenly(counts: Sequence[int]) -> list[int]:
    """Return source indices, [sum(counts)], in which source k occurs counts[k] times, spread as evenly as possible: [2,
    1] gives [0, 1, 0]. Each position goes to the source with the earliest deadline among those whose next occurrence is
    already allowed (Tijdeman 1980, theorem 1).
    """
    # With w the share of source k, its occurrence j (from 0) is allowed at positions t (from 1) at which
    # w t - j >= 1/(2K-2) and w (t-1) - j <= 1 - 1/(2K-2); the last of them is its deadline.
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
