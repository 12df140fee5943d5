"""Interface of the KV caches that attention layers read and write.

Shapes: B sequences, N query heads, K key-value heads, D head size, S new tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch


class AttentionCache(Protocol):
    """Interface of a KV cache of all attention layers. It stores the keys and values of new tokens, and computes the
    attention of new tokens to the cached tokens and to themselves.

    length: number of cached tokens of each sequence. Position IDs of new tokens start at `length`, unless the caller
    passes others."""

    length: int

    def attend(
        self, layer: int, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Store the keys `k_BKSD` and values `v_BKSD` of S new tokens of each sequence in the cache of layer number
        `layer`. Return the causal attention [B, N, S, D] of the new queries `q_BNSD` to the cached and the new tokens,
        within the layer's sliding window. `v_BKSD` None: the keys are the values too, stored once (latent attention).

        `sinks`: attention-sink score of each query head [N]; None: none."""

    def advance(self, tokens: int) -> None:
        """Add `tokens`, the number of new tokens of each sequence, to `length`, the number of cached tokens. Called
        when all layers have stored the new keys and values."""
