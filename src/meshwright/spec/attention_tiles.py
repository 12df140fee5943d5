"""Tiles of attention in serving on a GPU: sizes that the kernels and the memory ledger share."""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.spec.config import ModelConfig

SECTION = 256
"""Keys of a section of the context; attention computes one partial result per section."""
DECODE_ROWS, PREFILL_ROWS = 16, 64
"""Query rows of a tile of attention in decoding and in prefill; batch-invariant answers and latent attention, whose
rows are longer, use those of decoding throughout."""
LATENT_GROUP = 16
"""Most query heads of latent attention that one program computes."""


class AttentionSizes(NamedTuple):
    """Sizes of attention on one rank.

    Attributes:
        heads: Number of query heads.
        groups: Number of groups of query heads, each of which one program computes: the heads of a key-value head, or
            in latent attention, where all share one key, some of the heads.
        padded: Query heads of a group, rounded up to a power of 2.
        size: Elements of a head's result: of a value, or of a latent vector.
        rows: Query rows of a tile in prefill.
    """

    heads: int
    groups: int
    padded: int
    size: int
    rows: int

    @classmethod
    def find(cls, config: ModelConfig, tp: int) -> AttentionSizes:
        """Return the sizes of attention on one of `tp` ranks that share the heads."""
        heads, latent = config.heads // tp, config.latent
        groups = heads // math.gcd(heads, LATENT_GROUP) if latent else max(1, config.kv_heads // tp)
        padded = 1 << (heads // groups - 1).bit_length()
        if latent is not None:
            return cls(heads, groups, padded, latent.rank, DECODE_ROWS)
        return cls(heads, groups, padded, config.head_dim, PREFILL_ROWS)

    def count_rows(self, few: bool) -> int:
        """Return the number of query rows (tokens x padded heads of a group) of a tile. few: True: those of
        decoding."""
        return max(DECODE_ROWS if few else self.rows, self.padded)

    def count_scratch(self, max_length: int) -> int:
        """Return the number of float32 elements of the partial results of one tile: a vector of a head's size and two
        sums for each token of the tile, query head, and section of a context of `max_length` tokens."""
        tokens = self.count_rows(few=False) // self.padded
        return tokens * self.heads * (self.size + 2) * -(-max_length // SECTION)
