"""Paged KV cache in plain torch, the counterpart of the compiled kernels' cache.

Shapes: T tokens (padding at the end included), N query heads, K key-value heads, G query heads of a key-value head, D
head size, C tokens that a token attends to, W block tables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from meshwright.kernels.operations import BLOCK_TOKENS
from meshwright.model.precision import at_least_float32
from meshwright.serving.scheduler import StepBatch
from meshwright.spec.block_tables import BlockTables
from meshwright.spec.config import ModelConfig


class _Segment(NamedTuple):
    """One token of a batch for attention. row: its index among the selected tokens (see `PagedCache.select`). slots_WC:
    for each block table, the KV-cache slots of the positions 0 to its own, in order."""

    row: int
    slots_WC: torch.Tensor


class PagedCache:
    """Paged KV cache (blocks of `BLOCK_TOKENS` tokens) of a stage's layers in plain torch, for a ragged batch of
    sequences. Layers of different block tables share tensors, as each block belongs to one table.

    Attention is computed token by token, so that a token's result does not depend on which others are in the batch.
    Callers always give the positions, so `length`, of the interface of the model's caches, stays 0.
    """

    length = 0

    def __init__(
        self, config: ModelConfig, tables: BlockTables, layers: range, blocks: int, kv_heads: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`tables`: block tables of the model; `layers`: those of this rank's stage; `kv_heads`: those of this rank."""
        shape = (2, blocks * BLOCK_TOKENS, kv_heads, config.head_dim)
        depth = 1 + max(tables.layers[layer][1] for layer in layers)
        self._pairs = [torch.empty(shape, dtype=dtype, device=device) for _ in range(depth)]  # keys, values
        self._layers = tables.layers
        self._windows = {layer: config.layer_window(layer) for layer in layers}
        self._device = device
        self._segments: list[_Segment] = []
        self._slots_WT = torch.zeros(len(tables.windows), 0, dtype=torch.long)

    @property
    def nbytes(self) -> int:
        """Size of the keys and values of all layers in bytes."""
        return sum(each.nbytes for each in self._pairs)

    def touch(self) -> None:
        """Write zeros to the whole KV cache, so that its memory is resident from now on."""
        for each in self._pairs:
            each.zero_()

    def select(self, batch: StepBatch, begin: int, end: int) -> None:
        """Select the tokens with the indices `begin` to `end` (exclusive) of a batch: the following calls of `attend`
        get the queries, keys and values of these, perhaps with padding after them."""
        self._slots_WT = torch.from_numpy(batch.slots[:, begin:end]).long().to(self._device)
        self._segments = []
        for number, (first, stop) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
            low, high = max(int(first), begin), min(int(stop), end)
            if low >= high:
                continue
            positions = np.arange(int(batch.positions[high - 1]) + 1)
            blocks_WC = batch.block_tables[:, number, positions // BLOCK_TOKENS]
            slots_WC = torch.from_numpy(blocks_WC * BLOCK_TOKENS + positions % BLOCK_TOKENS).long().to(self._device)
            for row in range(low, high):
                self._segments.append(_Segment(row - begin, slots_WC[:, : len(positions) - (high - row - 1)]))

    def attend(self, layer: int, q_BNTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor) -> torch.Tensor:
        """Write the keys and values of the selected tokens to the cache of the layer with index `layer`. Return their
        causal attention, inside the layer's sliding window, [1, N, T, D]; 0 for padding."""
        table, place = self._layers[layer]
        tokens = self._slots_WT.shape[1]
        for cache, new in zip(self._pairs[place], (k_BKTD, v_BKTD), strict=True):
            cache[self._slots_WT[table]] = new[0, :, :tokens].transpose(0, 1).to(cache.dtype)
        out_BNTD = torch.zeros_like(q_BNTD)
        for segment in self._segments:
            q_ND = q_BNTD[0, :, segment.row]
            out_BNTD[0, :, segment.row] = self._attend_segment(layer, q_ND, segment.slots_WC[table])
        return out_BNTD

    def advance(self, tokens: int) -> None:
        """Do nothing (part of the interface of the model's caches): the scheduler counts the tokens of each
        sequence."""

    def _attend_segment(self, layer: int, q_ND: torch.Tensor, slots_C: torch.Tensor) -> torch.Tensor:
        """Return the attention [N, D] of one token's queries `q_ND` over the KV-cache slots `slots_C`, computed in
        float32 or float64."""
        window = self._windows[layer]
        if window is not None:  # blocks before the window may have been freed
            slots_C = slots_C[max(0, len(slots_C) - window) :]
        wide = at_least_float32(q_ND.dtype)
        k_KCD, v_KCD = (each[slots_C].transpose(0, 1).to(wide) for each in self._pairs[self._layers[layer][1]])
        q_KGSD = q_ND.to(wide).unflatten(0, (k_KCD.shape[0], -1))[:, :, None]
        scores_KGSC = torch.matmul(q_KGSD * q_ND.shape[-1] ** -0.5, k_KCD.mT[:, None])
        out_KGSD = torch.matmul(scores_KGSC.softmax(dim=-1), v_KCD[:, None])
        return out_KGSD[:, :, 0].flatten(0, 1).to(q_ND.dtype)
