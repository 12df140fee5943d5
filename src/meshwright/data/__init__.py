"""Data: sources, cleaning, tokenizers, packing into a cache, and the order in which samples are read."""

from meshwright.data.compression import xz_bits_per_byte
from meshwright.data.order import MixtureOrder, SampleOrder
from meshwright.data.packing.packed import NO_TARGET, PackedTokens, TokenBatch, TokenRows
from meshwright.data.packing.packed_examples import PackedExamples
from meshwright.data.preparation import prepare
from meshwright.data.prepared import PreparedData

__all__ = [
    "NO_TARGET",
    "MixtureOrder",
    "PackedExamples",
    "PackedTokens",
    "PreparedData",
    "SampleOrder",
    "TokenBatch",
    "TokenRows",
    "prepare",
    "xz_bits_per_byte",
]
