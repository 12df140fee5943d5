"""Memory of a serving rank's operations, counted by kind: packed weights, other weights, activation buffers, KV cache.
Torch-free."""

from __future__ import annotations

import numpy as np

from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import ExpertsWorkspace, LayerCache
from meshwright.kernels.structures import Array, Float32, PackedMatrix
from meshwright.spec.block_tables import find_cached_shape
from meshwright.spec.config import ModelConfig


class RankAllocator:
    """Allocator of the arrays that the operations of one rank use; counts their bytes by kind.

    kernels: compiled library, which allocates and packs the arrays. dtype: "float32" or "bfloat16", of packed weights
    and KV cache. tokens: token budget of a step, the default number of rows of an activation buffer.

    Attributes:
        nbytes: {kind: bytes}: `weights` (embeddings, norms, biases), `packed` (weight matrices), `workspace`, `kv`
            (cache), `logits`."""

    def __init__(self, kernels: Kernels, dtype: str, tokens: int) -> None:
        self._kernels, self._dtype, self._tokens = kernels, dtype, tokens
        self.nbytes = dict.fromkeys(("weights", "packed", "workspace", "kv", "logits"), 0)
        self._buffers: dict[tuple[str, int], Float32] = {}
        self._experts: ExpertsWorkspace | None = None

    def pack(self, values: Array, dtype: str | None = None, order: Array | None = None) -> PackedMatrix:
        """Return weight matrices packed in the kernels' memory layout, and add their bytes to `nbytes["packed"]`.
        values: one matrix [Y, X] (Y outputs, X inputs) or several [count, Y, X]. dtype: "float32" or "bfloat16"; None:
        the dtype of the rank's weights. order: index of the output to be packed at each position; None: as they are."""
        packed = self._kernels.pack(values, dtype or self._dtype, order)
        self.nbytes["packed"] += packed.buffer.nbytes
        return packed

    def copy(self, values: Array) -> Array:
        """Return a copy of the weight array `values`, and add its bytes to `nbytes["weights"]`."""
        self.nbytes["weights"] += values.nbytes
        return values.copy()

    def get_buffer(self, name: str, width: int, rows: int | None = None) -> Float32:
        """Return the activation buffer called `name`, float32 [rows, width]. The buffer is allocated at the first call
        and shared by all layers. width: elements of a row. rows: number of rows; None: the token budget of a step."""
        key = name, width
        if key not in self._buffers:
            self._buffers[key] = self._kernels.allocate((self._tokens if rows is None else rows, width), np.float32)
            self._buffers[key][...] = 0
            self.nbytes["workspace"] += self._buffers[key].nbytes
        return self._buffers[key]

    def get_experts_workspace(self, config: ModelConfig, width: int) -> ExpertsWorkspace:
        """Return the buffers of mixture-of-experts layers, allocated once and shared by all layers. config:
        configuration of the model. width: experts' intermediate size on this rank."""
        if self._experts is None:
            sizes = config.experts, config.experts_per_token, config.hidden, width
            self._experts = ExpertsWorkspace(self._tokens, *sizes)
            self.nbytes["workspace"] += self._experts.nbytes
        return self._experts

    def allocate_cache(self, config: ModelConfig, blocks: int, kv_heads: int) -> tuple[Array, Array]:
        """Allocate the KV cache of one layer; return (keys, values) in the shapes of `LayerCache`. config:
        configuration of the model. blocks: number of KV blocks. kv_heads: key-value heads of the layer on this rank; 1
        for latent attention."""
        tensors, heads, size = find_cached_shape(config, kv_heads)
        dtype = np.float32 if self._dtype == "float32" else np.uint16
        shapes = LayerCache.compute_shapes(blocks, heads, size, tensors == 1)
        keys, values = (self._kernels.allocate(shape, dtype) for shape in shapes)
        self.nbytes["kv"] += keys.nbytes + values.nbytes
        return keys, values

    def allocate_logits(self, rows: int, width: int) -> Float32:
        """Allocate the buffer of logits, float32 [rows, width], and count its bytes as `logits`. rows: tokens whose
        logits are needed, at most. width: entries of the vocabulary on this rank."""
        self.nbytes["logits"] += 4 * rows * width
        return self._kernels.allocate((rows, width), np.float32)
