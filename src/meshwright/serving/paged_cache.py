"""KV cache in blocks for plain torch, the counterpart of the kernels' own.

Shapes: T tokens (padding at the end included), N query heads, K key-value heads, G query heads of a key-value head, D
head size, C tokens that a token attends to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from meshwright.kernels.operations import BLOCK_TOKENS
from meshwright.model.precision import at_least_float32
from meshwright.serving.scheduler import StepBatch
from meshwright.spec.config import ModelConfig


class _Segment(NamedTuple):
    """One token of a batch for attention. row: its index among the selected tokens. slots_C: KV-cache slots of the
    positions 0 to its own, in order."""

    row: int
    slots_C: torch.Tensor


class PagedCache:
    """Paged KV cache (blocks of `BLOCK_TOKENS` tokens) of some layers in plain torch, for a ragged batch of sequences.

    Attention is computed token by token, so that a token's result does not depend on which others are in the batch.
    Positions are always given by the caller, so `length` stays 0.
    """

    length = 0

    def __init__(
        self, config: ModelConfig, layers: range, blocks: int, kv_heads: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`kv_heads`: those of this rank."""
        shape = (blocks * BLOCK_TOKENS, kv_heads, config.head_dim)
        self._keys = {layer: torch.empty(shape, dtype=dtype, device=device) for layer in layers}
        self._values = {layer: torch.empty(shape, dtype=dtype, device=device) for layer in layers}
        self._windows = {layer: config.layer_window(layer) for layer in layers}
        self._device = device
        self._segments: list[_Segment] = []
        self._slots_T = torch.zeros(0, dtype=torch.long)

    @property
    def nbytes(self) -> int:
        """Size of the keys and values of all layers in bytes."""
        return sum(each.nbytes for each in (*self._keys.values(), *self._values.values()))

    def touch(self) -> None:
        """Write zeros to the whole KV cache, so that its memory is resident from now on."""
        for each in (*self._keys.values(), *self._values.values()):
            each.zero_()

    def select(self, batch: StepBatch, begin: int, end: int) -> None:
        """Select the tokens with the indices `begin` to `end` (exclusive) of a batch as input of the next calls of
        `attend`, which may have padding after them."""
        self._slots_T = torch.from_numpy(batch.slots[begin:end]).long().to(self._device)
        self._segments = []
        for number, (first, stop) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
            low, high = max(int(first), begin), min(int(stop), end)
            if low >= high:
                continue
            positions = np.arange(int(batch.positions[high - 1]) + 1)
            table = batch.block_tables[number]
            slots = torch.from_numpy(table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS)
            slots = slots.long().to(self._device)
            for row in range(low, high):
                self._segments.append(_Segment(row - begin, slots[: len(slots) - (high - row - 1)]))

    def attend(self, layer: int, q_BNTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor) -> torch.Tensor:
        """Write the keys and values of the selected tokens to the cache of layer number `layer`; return the causal
        attention of each over its sequence, inside the layer's sliding window, [1, N, T, D]; 0 for padding."""
        tokens = len(self._slots_T)
        for cache, new in ((self._keys[layer], k_BKTD), (self._values[layer], v_BKTD)):
            cache[self._slots_T] = new[0, :, :tokens].transpose(0, 1).to(cache.dtype)
        out_BNTD = torch.zeros_like(q_BNTD)
        for segment in self._segments:
            q_ND = q_BNTD[0, :, segment.row]
            out_BNTD[0, :, segment.row] = self._attend_segment(layer, q_ND, segment.slots_C)
        return out_BNTD

    def advance(self, tokens: int) -> None:
        """Do nothing: the scheduler counts the tokens of each sequence."""

    def _attend_segment(self, layer: int, q_ND: torch.Tensor, slots_C: torch.Tensor) -> torch.Tensor:
        """Return the attention [N, D] of one token's queries `q_ND` over the KV-cache slots `slots_C`, computed in
        float32 or float64."""
        window = self._windows[layer]
        if window is not None:  # blocks behind the window may be free: nothing there is read
            slots_C = slots_C[max(0, len(slots_C) - window) :]
        wide = at_least_float32(q_ND.dtype)
        k_KCD, v_KCD = (each[layer][slots_C].transpose(0, 1).to(wide) for each in (self._keys, self._values))
        q_KGSD = q_ND.to(wide).unflatten(0, (k_KCD.shape[0], -1))[:, :, None]
        scores_KGSC = torch.matmul(q_KGSD * q_ND.shape[-1] ** -0.5, k_KCD.mT[:, None])
        out_KGSD = torch.matmul(scores_KGSC.softmax(dim=-1), v_KCD[:, None])
        return out_KGSD[:, :, 0].flatten(0, 1).to(q_ND.dtype)
