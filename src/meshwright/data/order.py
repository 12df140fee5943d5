"""Which sample comes when: a function of (seed, global sample number) alone, so any layout reads the same stream."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 8


class SampleOrder:
    """Endless epochs over `sequences` samples, each epoch its own permutation; nothing is stored.

    An epoch's permutation is a balanced Feistel network over the smallest 4^h >= `sequences` numbers; its round keys
    are the SHA-512 of (seed, epoch). A number that falls outside is sent through again until it falls inside: cycle
    walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, method 2).
    """

    def __init__(self, seed: int, sequences: int) -> None:
        assert sequences >= 1, sequences
        self.seed, self.sequences = seed, sequences
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
        digest = hashlib.sha512(f"meshwright sample order, seed {self.seed}, epoch {epoch}".encode()).digest()
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


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
