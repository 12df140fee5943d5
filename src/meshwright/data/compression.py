"""Baselines for bits per byte: `xz` on the same text, and the UTF-8 bytes that each token stands for."""

from __future__ import annotations

import lzma
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders

from meshwright.data.tokenizers.kinds import BYTES

_JOINS = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]).__getstate__()


def measure_xz_bits_per_byte(texts: Iterable[str]) -> float:
    """Compress the concatenated `texts` with `xz -9`; returns compressed bits per UTF-8 byte of text, nan if there is
    no text.
    """
    compressor = lzma.LZMACompressor(format=lzma.FORMAT_XZ, preset=9)
    plain = packed = 0
    for text in texts:
        data = text.encode()
        plain += len(data)
        packed += len(compressor.compress(data))
    packed += len(compressor.flush())
    return 8 * packed / plain if plain else float("nan")


def count_token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """Return the number of UTF-8 bytes of text that each token id stands for, int64 [vocabulary]; special tokens count
    0.

    With these numbers bits per byte is exact for any run of tokens, not only for whole documents. Returns None unless
    the tokenizer decodes by concatenating the tokens' bytes (byte-level tokenizers, and those that decode byte fallback
    tokens and join the rest).
    """
    plain = isinstance(tokenizer.decoder, decoders.Sequence) and tokenizer.decoder.__getstate__() == _JOINS
    if not plain and not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    single = set(BYTES) if plain else set()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    counts = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    for token, number in vocabulary.items():
        if number not in added:
            counts[number] = 1 if token in single else len(token.encode()) if plain else len(token)
        elif not added[number].special:
            counts[number] = len(token.encode())
    return counts
