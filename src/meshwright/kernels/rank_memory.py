"""Memory of a serving rank's operations, counted by kind: packed weights, other weights, activation buffers, KV cache.
Torch-free."""

from __future__ import annotations

import numpy as np

from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import ExpertsWorkspace, LayerCache
from meshwright.kernels.structures import Array, Float32, PackedMatrix
from meshwright.spec.config import ModelConfig


class RankMemory:
    """Arrays that the operations of one rank use. kernels: compiled library, which allocates and packs them. dtype:
    "float32" or "bfloat16", of packed weights and KV cache. tokens: rows of the activation buffers, the token budget.

    Attributes:
        nbytes: {kind: bytes}: `weights` (embeddings, norms, biases), `packed` (weight matrices), `workspace`, `kv`
            (cache), `logits`.
    """

    def __init__(self, kernels: Kernels, dtype: str, tokens: int) -> None:
        self._kernels, self._dtype, self._tokens = kernels, dtype, tokens
        self.nbytes = dict.fromkeys(("weights", "packed", "workspace", "kv", "logits"), 0)
        self._buffers: dict[tuple[str, int], Float32] = {}
        self._experts: ExpertsWorkspace | None = None

    def pack(self, values: Array, dtype: str | None = None) -> PackedMatrix:
        """Return `values`, one matrix [Y, X] or several [count, Y, X], packed for the kernels' products. dtype:
        "float32" or "bfloat16"; None: that of the rank."""
        packed = self._kernels.pack(values, dtype or self._dtype)
        self.nbytes["packed"] += packed.buffer.nbytes
        return packed

    def copy(self, values: Array) -> Array:
        """Return a copy of a weight array, and count its bytes as `weights`."""
        self.nbytes["weights"] += values.nbytes
        return values.copy()

    def get_buffer(self, name: str, width: int, rows: int | None = None) -> Float32:
        """Return the activation buffer named `name`, float32 [rows, width]. It is allocated once and shared by all
        layers. rows: None: the token budget."""
        key = name, width
        if key not in self._buffers:
            self._buffers[key] = self._kernels.allocate((self._tokens if rows is None else rows, width), np.float32)
            self._buffers[key][...] = 0
            self.nbytes["workspace"] += self._buffers[key].nbytes
        return self._buffers[key]

    def get_experts_workspace(self, config: ModelConfig, width: int) -> ExpertsWorkspace:
        """Return the buffers of mixture-of-experts layers, allocated once and shared by all layers. width: experts'
        intermediate size on this rank."""
        if self._experts is None:
            sizes = config.experts, config.experts_per_token, config.hidden, width
            self._experts = ExpertsWorkspace(self._tokens, *sizes)
            self.nbytes["workspace"] += self._experts.nbytes
        return self._experts

    def allocate_cache(self, config: ModelConfig, blocks: int, kv_heads: int) -> tuple[Array, Array]:
        """Allocate the arrays (keys, values) of a layer's `LayerCache`. blocks: number of KV blocks. kv_heads:
        key-value heads of the rank; latent vectors have one."""
        latent, dtype = config.latent, np.float32 if self._dtype == "float32" else np.uint16
        sizes = (kv_heads, config.head_dim) if latent is None else (1, latent.cached_dim)
        shapes = LayerCache.compute_shapes(blocks, *sizes, latent is not None)
        keys, values = (self._kernels.allocate(shape, dtype) for shape in shapes)
        self.nbytes["kv"] += keys.nbytes + values.nbytes
        return keys, values

    def allocate_logits(self, rows: int, width: int) -> Float32:
        """Allocate the logits [rows, width]."""
        self.nbytes["logits"] += 4 * rows * width
        return self._kernels.allocate((rows, width), np.float32)
