"""Forward steps in plain torch on a CPU: the reference of the kernels, and what runs without a compiler.

Shapes: T tokens of a step, R rows of logits, H hidden, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from meshwright.comm.collectives import all_gather
from meshwright.comm.mesh import Mesh
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.transformer import Transformer
from meshwright.parallel.tensor import TensorParallel
from meshwright.serving.paged_cache import PagedCache
from meshwright.serving.scheduler import StepBatch
from meshwright.serving.step_limits import StepLimits
from meshwright.serving.weights import RankWeights
from meshwright.spec.block_tables import block_tables

TILE_TOKENS = 16
"""Rows of every product on a CPU. torch chooses kernels by shape, so a fixed shape makes a token's result independent of
the number of tokens."""


class OrderedTensorParallel(TensorParallel):
    """Tensor-parallel operations whose all-reduce adds the ranks' partial results in rank order, so that the result
    does not depend on the tensor's size; without sequence parallelism and gradients."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.tp, sequence_parallel=False)

    def leave(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """Return the all-reduced partial results of a row-parallel layer, [B, S, H], added in rank order. `site`: label
        of the call in traces."""
        if self.trivial:
            return x_BSH
        parts = x_BSH.new_empty(self.size, *x_BSH.shape)
        all_gather(parts, x_BSH.contiguous(), self.axis, site)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class TorchRunner:
    """Runner of serving steps in plain torch: the model with a paged KV cache. Tokens are computed in tiles of a fixed
    number (one by one in models with experts), so that a token's bits do not depend on the rest of the batch.

    Attributes:
        config: Configuration of the model.
        blocks: Number of KV blocks in its pool.
        instruction_set: Name of the device.
        version: "torch" and its version.
    """

    def __init__(self, weights: RankWeights, mesh: Mesh, dtype: torch.dtype, limits: StepLimits) -> None:
        self.config, self.blocks, self._stage = weights.config, limits.blocks, weights.stage
        self.instruction_set, self.version = mesh.device.type, f"torch {torch.__version__}"
        self._device, self._dtype = mesh.device, dtype
        axes = AxisOperations(tensor=OrderedTensorParallel(mesh))
        self._model = Transformer(
            self.config, axes=axes, device=self._device, dtype=dtype, stages=[self._stage]
        ).requires_grad_(False)
        self._model.eval()
        weights.load_into(self._model, dtype)
        kv_heads = max(1, self.config.kv_heads // mesh.tp.size)
        tables, layers = block_tables(self.config, mesh.pp.size), self._stage.layers
        self._cache = PagedCache(self.config, tables, layers, limits.blocks, kv_heads, dtype, self._device)
        if limits.touched:
            self._cache.touch()
        self._tile = 1 if self.config.experts else TILE_TOKENS
        self._logit_rows = limits.logits

    def memory(self) -> dict[str, int]:
        """Return {kind: bytes}: `weights`, `kv` (cache), `logits`."""
        return {
            "weights": sum(each.nbytes for each in self._model.parameters()),
            "kv": self._cache.nbytes,
            "logits": 4 * self._logit_rows * self.config.vocabulary,
        }

    def run(self, batch: StepBatch, hidden: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Compute this rank's pipeline stage for a batch. Return the logits [R, V] of its output rows, or from a stage
        that is not last the hidden states [T, H]. `hidden`: the previous stage's hidden states, None on the first."""
        tokens, size = len(batch.tokens), self._tile
        states = []
        with torch.inference_mode():
            for begin in range(0, tokens, size):
                end = min(tokens, begin + size)
                x_TH = None if hidden is None else hidden[begin:end]
                states.append(self._run_tile(batch, begin, end, size, x_TH)[: end - begin])
            states_TH = torch.cat(states)
            if self._stage.last:
                return self._logits(states_TH[torch.from_numpy(batch.output_rows).long()])
            return states_TH.float().cpu().numpy()

    def _run_tile(
        self, batch: StepBatch, begin: int, end: int, size: int, x_TH: npt.NDArray[np.float32] | None
    ) -> torch.Tensor:
        """Run this rank's pipeline stage on the tokens with indices `begin` to `end` (exclusive) of a batch, padded to
        `size` tokens; return the hidden states [size, H]. `x_TH`: the previous stage's output for them, None on the
        first stage."""
        numbers = np.zeros((2, 1, size), np.int64)
        numbers[0, 0, : end - begin] = batch.tokens[begin:end]
        # A prompt's last token, if only a target, may be beyond the last position: nothing reads its state.
        numbers[1, 0, : end - begin] = np.minimum(batch.positions[begin:end], self.config.max_positions - 1)
        tokens_BS, positions_BS = torch.from_numpy(numbers).to(self._device)
        x_BSH = None
        if x_TH is not None:
            x_BSH = torch.zeros(1, size, self.config.hidden, dtype=self._dtype, device=self._device)
            x_BSH[0, : end - begin] = torch.from_numpy(x_TH)
        self._cache.select(batch, begin, end)
        return self._model.hidden(tokens_BS, cache=self._cache, positions=positions_BS, stage=self._stage, x_BSH=x_BSH)[
            0
        ]

    def _logits(self, states_RH: torch.Tensor) -> npt.NDArray[np.float32]:
        """Return the logits [R, V] for the final-norm outputs `states_RH`."""
        rows, size = len(states_RH), self._tile
        out_RV = np.empty((rows, self.config.vocabulary), np.float32)
        for begin in range(0, rows, size):
            tile = states_RH.new_zeros(1, size, self.config.hidden)
            part = states_RH[begin : begin + size]
            tile[0, : len(part)] = part
            out_RV[begin : begin + size] = self._model.scores(tile)[0, : len(part)].float().cpu().numpy()
        return out_RV
