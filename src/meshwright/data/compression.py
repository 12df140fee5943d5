"""What a general-purpose compressor makes of the same text: the yardstick beside a model's bits per byte."""

from __future__ import annotations

import lzma
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders

from meshwright.data.tokenizers.kinds import BYTES

_JOINS = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]).__getstate__()


def xz_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits per UTF-8 byte that `xz -9` needs for `texts` written one after another. nan without any text."""
    compressor = lzma.LZMACompressor(format=lzma.FORMAT_XZ, preset=9)
    plain = packed = 0
    for text in texts:
        data = text.encode()
        plain += len(data)
        packed += len(compressor.compress(data))
    packed += len(compressor.flush())
    return 8 * packed / plain if plain else float("nan")


def token_byte_counts(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """How many UTF-8 bytes of text each token id stands for, [vocabulary]; special tokens stand for 0.

    So bits per byte is exact over any tokens, not only over whole documents. None unless decoding is joining: of a
    byte-level tokenizer, where a token has one character per byte, or of one that writes its text and single bytes.
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
