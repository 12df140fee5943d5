"""Arguments of attention on a GPU. Free of torch."""

from __future__ import annotations

from typing import Any, NamedTuple

Tensor = Any
"""Tensor of torch, which this package does not import."""
Pair = tuple[Tensor, Tensor]


class Tiles(NamedTuple):
    """Attention tiles of a step. A tile is a group of consecutive tokens of one sequence, whose attention one program
    of the kernel computes together.

    Attributes:
        numbers: int32 [3, I], for each of the I tiles: index of its first token in the step, number of tokens, and row
            of its sequence in `tables`.
        tokens: Maximum number of tokens of a tile.
        rows: Query rows of a tile, tokens x query heads per key-value head (padded): 16 or 64.
        positions, slots: Position and KV-cache slot of each of the step's T tokens, int32 [T].
        tables: The layer's block table of each sequence, int32 [sequences, blocks]; may be a strided view.
        context: Maximum number of keys of a sequence in this step, known on the host; in a captured CUDA graph that of
            all steps.
    """

    numbers: Tensor
    tokens: int
    rows: int
    positions: Tensor
    slots: Tensor
    tables: Tensor
    context: int


class AttentionSettings(NamedTuple):
    """Settings of a layer's attention.

    Attributes:
        scale: Factor of the scores.
        softcap: c that turns scores x into c tanh(x / c); 0: none.
        sinks: Attention sink of each query head, [N] for N heads; None: none.
        window: Number of keys that a token attends to, the token's key included; None: all keys.
        chunks: True: a token attends to its chunk of `window` positions instead.
        key_only: Latent attention: last elements of a cached vector that are part of the key alone; 0: other attention.
        groups: Latent attention: number of groups of query heads, each of which one program computes.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    window: int | None = None
    chunks: bool = False
    key_only: int = 0
    groups: int = 0
