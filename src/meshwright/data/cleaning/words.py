"""64-bit hashes of the words of a text and of its word n-grams."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

# Polynomial hashes modulo 2^64: with prefix sums and the inverse of an odd base, any stretch is one subtraction.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)

_FOLD = bytes(
    byte if byte >= 0x80 or chr(byte).isdigit() or chr(byte).islower() else byte + 32 if chr(byte).isupper() else 32
    for byte in range(256)
)
# UTF-8 of punctuation beyond ASCII: Latin-1 signs, U+2000-206F, U+3000-303F, fullwidth forms.
_UNICODE_SIGNS = re.compile(
    rb"\xc2[\x80-\xbf]|\xe2[\x80\x81][\x80-\xbf]|\xe3\x80[\x80-\xbf]"
    rb"|\xef\xbc[\x81-\x8f\x9a-\xa0\xbb-\xbf]|\xef\xbd[\x80\x9b-\xa5]",
    re.DOTALL,
)
# Kana and Han, which are written without spaces: every character is a separate word.
_OWN_WORD = re.compile(rb"\xe3[\x81-\x83\x90-\xbf][\x80-\xbf]|[\xe4-\xe9][\x80-\xbf][\x80-\xbf]", re.DOTALL)


class Words:
    """Words of a text as 64-bit hashes, for comparison in lower case without punctuation (GPT-3, arXiv:2005.14165,
    appendix C). In scripts without spaces (Han, kana) every character is a word. len() gives the number of words.

    hashes: hash of each word in order, uint64 [words].
    """

    def __init__(self, text: str) -> None:
        """Split `text` into words and hash each."""
        data = (text if text.isascii() else text.lower()).encode().translate(_FOLD)
        if not text.isascii():
            data = _OWN_WORD.sub(rb" \g<0> ", _UNICODE_SIGNS.sub(b" ", data))
        array = np.frombuffer(data, np.uint8)
        inside = np.zeros(len(array) + 2, bool)
        np.not_equal(array, 32, out=inside[1:-1])
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        starts, ends = edges[0::2], edges[1::2]
        powers, inverses = _compute_powers(len(array))
        prefix = _compute_prefix_sums(array.astype(np.uint64) * powers[: len(array)])
        self.hashes = mix_bits((prefix[ends] - prefix[starts]) * inverses[starts])

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.hashes)

    def hash_ngrams(self, n: int) -> Hashes:
        """Return the hash of each n-gram (n consecutive words), uint64 [words - n + 1]; empty if there are fewer than n
        words.
        """
        if len(self) < n:
            return np.empty(0, np.uint64)
        powers, inverses = _compute_powers(len(self))
        prefix = _compute_prefix_sums(self.hashes * powers[: len(self)])
        return mix_bits((prefix[n:] - prefix[:-n]) * inverses[: len(self) - n + 1])


def mix_bits(values: Hashes) -> Hashes:
    """Mix the bits of each uint64 in `values`, in place, by the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast
    Splittable Pseudorandom Number Generators", 2014); return `values`.
    """
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _compute_prefix_sums(values: Hashes) -> Hashes:
    """Return the prefix sums of `values` [n] modulo 2^64, uint64 [n + 1], beginning with 0."""
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=sums[1:])
    return sums


def _compute_powers(count: int) -> tuple[Hashes, Hashes]:
    """Return two arrays, the powers of the hash base and of its inverse modulo 2^64, for the exponents 0, 1, 2 ...: at
    least `count` of each."""
    return _compute_powers_of_two(max(16, (count - 1).bit_length()))


@cache
def _compute_powers_of_two(bits: int) -> tuple[Hashes, Hashes]:
    """Return (powers of the hash base, powers of its inverse) modulo 2^64 for the exponents 0 to 2^bits - 1, uint64
    [2^bits] each.
    """

    def powers(base: int) -> Hashes:
        """Return the powers of `base` modulo 2^64 for the exponents 0 to 2^bits - 1."""
        values = np.full(1 << bits, base, np.uint64)
        values[0] = 1
        return np.cumprod(values, dtype=np.uint64)

    return powers(_BASE), powers(_INVERSE)
