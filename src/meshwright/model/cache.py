"""Keys and values of the tokens a model has read, kept for generation.

Shapes: B rows, K key-value heads, D head size, S new tokens, C tokens in the cache.
"""

from __future__ import annotations

import torch

from meshwright.spec.config import ModelConfig


class KeyValueCache:
    """KV cache of every layer for generation, in buffers that double when they are full. All sequences have the same
    length. `rows`: number of sequences. `capacity`: tokens in the first buffers.
    """

    def __init__(self, config: ModelConfig, *, rows: int = 1, capacity: int = 256) -> None:
        self.length = 0  # tokens that every layer has seen; the transformer advances it after its last layer
        self._windows = [config.layer_window(layer) for layer in range(config.layers)]
        self._buffers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * config.layers
        self._rows, self._capacity = rows, capacity

    def append(self, layer: int, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens to the cache of `layer`; return the keys and values that they may attend to, [B, K, C, D],
        as views.

        With a sliding window a single new token gets only the tokens inside it; several new tokens get all, to be
        masked.
        """
        assert k_BKSD.shape[0] == self._rows, (k_BKSD.shape, self._rows)
        sequence = k_BKSD.shape[2]
        length = self.length + sequence
        buffers = tuple(
            _grow_buffer(old, new, self.length, length, self._capacity)
            for old, new in zip(self._buffers[layer] or (None, None), (k_BKSD, v_BKSD), strict=True)
        )
        self._buffers[layer] = (buffers[0], buffers[1])
        for buffer, new in zip(buffers, (k_BKSD, v_BKSD), strict=True):
            buffer[:, :, self.length : length] = new
        window = self._windows[layer]
        oldest = max(0, length - window) if window is not None and sequence == 1 else 0
        return buffers[0][:, :, oldest:length], buffers[1][:, :, oldest:length]


def _grow_buffer(old: torch.Tensor | None, new: torch.Tensor, used: int, needed: int, capacity: int) -> torch.Tensor:
    """Return a cache buffer with room for at least `needed` tokens: `old` if it is large enough, else a larger copy
    of its `used` tokens with the shape and dtype of `new`. `capacity`: smallest number of tokens.
    """
    if old is not None and old.shape[2] >= needed:
        return old
    size = max(capacity, needed if old is None else max(needed, 2 * old.shape[2]))
    buffer = new.new_empty(*new.shape[:2], size, new.shape[3])
    if old is not None:
        buffer[:, :, :used] = old[:, :, :used]
    return buffer
