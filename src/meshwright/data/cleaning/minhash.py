"""MinHash signatures of word shingles, and the banding that finds near duplicates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cleaning.words import Hashes, Words, mix_bits

_BLOCK = 1 << 17  # products computed at a time, which fit in the CPU cache


@dataclass(frozen=True)
class MinHash:
    """Near-duplicate search by MinHash and locality-sensitive hashing. A document's signature consists of bands * rows
    minima and is divided into bands; two documents that agree in all minima of a band count as duplicates.

    bands: number of bands. rows: number of hash functions in each band. words: length of a shingle (n-gram of words).
    Broder, "On the resemblance and containment of documents", 1997; bands and rows: Leskovec, Rajaraman and Ullman,
    Mining of Massive Datasets, section 3.4.
    """

    bands: int
    rows: int
    words: int

    def match_probability(self, similarity: float) -> float:
        """Return the probability that two documents of Jaccard similarity s (`similarity`, in [0, 1]) have an equal
        band: 1 - (1 - s^rows)^bands.
        """
        return 1 - (1 - similarity**self.rows) ** self.bands

    @property
    def threshold(self) -> float:
        """Jaccard similarity, in [0, 1], around which the probability of a match rises most steeply: about (1 /
        bands)^(1 / rows).
        """
        return float((1 / self.bands) ** (1 / self.rows))

    def hash_shingles(self, text: str) -> Hashes:
        """Hash the shingles of a text (n-grams of `words` words, lower case, no punctuation), uint64 [shingles]. A text
        of fewer than `words` words is one shingle, a text without words has none."""
        words = Words(text)
        return words.hash_ngrams(min(self.words, len(words))) if len(words) else np.empty(0, np.uint64)

    def compute_signature(self, shingles: Hashes) -> NDArray[np.uint32]:
        """Compute the MinHash signature, uint32 [bands * rows]: the minimum of each hash function over the hashes
        `shingles` [shingles].
        """
        factors, terms = self._hash_coefficients
        keys = (shingles >> np.uint64(32)).astype(np.uint32)
        signature = np.full(len(factors), 0xFFFFFFFF, np.uint32)
        step = max(1, _BLOCK // len(factors))
        for begin in range(0, len(keys), step):
            products = factors[:, None] * keys[None, begin : begin + step]  # modulo 2^32
            products += terms[:, None]
            np.minimum(signature, products.min(axis=1), out=signature)
        return signature

    def hash_bands(self, signature: NDArray[np.uint32]) -> Hashes:
        """Hash each band of a signature [bands * rows] to one key, uint64 [bands]; equal bands have equal keys."""
        values = signature.astype(np.uint64).reshape(self.bands, self.rows) + np.uint64(1)
        return mix_bits((values * self._band_weights).sum(axis=1, dtype=np.uint64))

    @cached_property
    def _hash_coefficients(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Pseudorandom coefficients of the hash functions x -> factor * x + term modulo 2^32, as (factors, terms),
        uint32 [bands * rows] each; the factors are odd."""
        count = self.bands * self.rows
        values = mix_bits(np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        drawn = (values >> np.uint64(32)).astype(np.uint32)
        return drawn[:count] | np.uint32(1), drawn[count:]

    @cached_property
    def _band_weights(self) -> Hashes:
        """Pseudorandom odd weights, uint64 [rows]; a band's key is a hash of the sum of its minima with these
        weights."""
        return mix_bits(np.arange(1, self.rows + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)) | np.uint64(1)
