"""Compression baseline for a language model's bits per byte: `xz` on the same text."""

from __future__ import annotations

import lzma
from collections.abc import Iterable


def measure_xz_bits_per_byte(texts: Iterable[str]) -> float:
    """Compress the concatenated `texts` with `xz -9`; return the compressed size in bits per UTF-8 byte of text, nan if
    there is no text."""
    compressor = lzma.LZMACompressor(format=lzma.FORMAT_XZ, preset=9)
    plain = packed = 0
    for text in texts:
        data = text.encode()
        plain += len(data)
        packed += len(compressor.compress(data))
    packed += len(compressor.flush())
    return 8 * packed / plain if plain else float("nan")
