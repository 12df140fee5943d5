"""KV cache that keeps each layer's keys and values in one growing buffer, the reference for cached attention.

Shapes: B sequences, N query heads, K key-value heads, D head size, S new tokens, C tokens in the cache.
"""

from __future__ import annotations

import torch

from meshwright.model.documents import ONE_DOCUMENT
from meshwright.model.scaled_dot_product import attend, make_attention_mask
from meshwright.model.tiled_attention import ScoreSettings
from meshwright.spec.config import ModelConfig


class KeyValueCache:
    """KV cache of all layers for generation; all sequences have the same length. `rows`: number of sequences.
    `capacity`: tokens per sequence for which buffers are first allocated; a full buffer is replaced by one of twice its
    size."""

    def __init__(self, config: ModelConfig, *, rows: int = 1, capacity: int = 256) -> None:
        self.length = 0
        self._scores = ScoreSettings(config.score_scale)
        self._windows = [config.layer_window(layer) for layer in range(config.layers)]
        self._buffers: list[torch.Tensor | None] = [None] * config.layers
        self._rows, self._capacity = rows, capacity
        self._masks: dict[
            tuple[int | None, int], torch.Tensor | None
        ] = {}  # of the current call, by window and number of new tokens

    def attend(
        self, layer: int, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Append the keys and values of S new tokens to the cache of layer number `layer`; return the causal attention
        [B, N, S, D] of their queries over the cached tokens and themselves."""
        assert k_BKSD.shape[0] == self._rows, (k_BKSD.shape, self._rows)
        assert sinks is None, "which serving's cache computes"
        sequence, window = k_BKSD.shape[2], self._windows[layer]
        length = self.length + sequence
        buffer = _grow_buffer(self._buffers[layer], k_BKSD, self.length, length, self._capacity)
        self._buffers[layer] = buffer
        buffer[0, :, :, self.length : length] = k_BKSD
        buffer[1, :, :, self.length : length] = k_BKSD if v_BKSD is None else v_BKSD
        # A single new token reads the keys in its window; several read all keys, masked.
        oldest = max(0, length - window) if window is not None and sequence == 1 else 0
        k_BKCD, v_BKCD = buffer[:, :, :, oldest:length]
        if (window, sequence) not in self._masks:
            self._masks[window, sequence] = self._mask(sequence, window, q_BNSD.device)
        return attend(q_BNSD, k_BKCD, v_BKCD, self._masks[window, sequence], self._scores)

    def advance(self, tokens: int) -> None:
        """Add `tokens`, the number of new tokens of each sequence, to `length`; called after the last layer."""
        self.length += tokens
        self._masks.clear()

    def _mask(self, sequence: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return the attention mask of `sequence` new tokens: boolean [1, 1, S, C], True where a token may attend; with
        an empty cache, the mask that `make_attention_mask` returns (None: plain causal). None for a single new token
        after others, which attends to all keys passed. window: sliding window in tokens; None: without."""
        if self.length == 0:
            visible = make_attention_mask(ONE_DOCUMENT, sequence, window, device)
            assert visible is None or isinstance(visible, torch.Tensor)
            return visible
        if sequence == 1:
            return None
        indices_C = torch.arange(self.length + sequence, device=device)
        now_S1 = indices_C[self.length :, None]
        mask_SC = indices_C <= now_S1
        if window is not None:
            mask_SC &= indices_C > now_S1 - window
        return mask_SC[None, None]


def _grow_buffer(old: torch.Tensor | None, new: torch.Tensor, used: int, needed: int, capacity: int) -> torch.Tensor:
    """Return a buffer [2, B, K, C, D] of keys and values for at least `needed` tokens: `old` if it has room, else a
    larger one with a copy of the first `used` tokens. `new` [B, K, S, D]: gives B, K, D and the dtype. `capacity`:
    minimum C of a new buffer."""
    if old is not None and old.shape[3] >= needed:
        return old
    size = max(capacity, needed if old is None else max(needed, 2 * old.shape[3]))
    buffer = new.new_empty(2, *new.shape[:2], size, new.shape[3])
    if old is not None:
        buffer[:, :, :, :used] = old[:, :, :, :used]
    return buffer
