"""Training data: sources, cleaning, tokenizers, packing into a cache, and sample order."""

from meshwright.data.compression import measure_xz_bits_per_byte
from meshwright.data.order import MixtureOrder, SampleOrder
from meshwright.data.packing.packed import NO_TARGET, PackedDataset, PackedTokens, TokenBatch
from meshwright.data.packing.packed_examples import PackedExamples
from meshwright.data.preparation import find_prepared, prepare
from meshwright.data.prepared import PreparedData

__all__ = [
    "NO_TARGET",
    "MixtureOrder",
    "PackedDataset",
    "PackedExamples",
    "PackedTokens",
    "PreparedData",
    "SampleOrder",
    "TokenBatch",
    "find_prepared",
    "measure_xz_bits_per_byte",
    "prepare",
]
