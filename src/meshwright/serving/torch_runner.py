"""Forward steps in plain torch on a CPU: the reference for the compiled kernels, and the fallback without a compiler.

Shapes: T tokens of a step (of a tile in the cache, padding at the end included), R rows of logits, H hidden, V
vocabulary, N query heads, K key-value heads, G query heads of a key-value head, D head size, C tokens that a token
attends to, W block tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from meshwright.comm.collectives import all_gather
from meshwright.comm.mesh import Mesh
from meshwright.kernels.operations import BLOCK_TOKENS
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.precision import at_least_float32
from meshwright.parallel.tensor import TensorParallel
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.planner.serving.runners import TILE_TOKENS
from meshwright.serving.scheduler import StepBatch
from meshwright.serving.weights import RankWeights
from meshwright.spec.block_tables import BlockTables, block_tables, find_cached_shape
from meshwright.spec.config import ModelConfig


class OrderedTensorParallel(TensorParallel):
    """Tensor-parallel operations over the axis tp of `mesh`, for inference: without sequence parallelism and gradients.
    All-reduces add the ranks' partial results in rank order. (A backend may choose the order by the tensor's size, so
    that a token's result would depend on the size of the batch.)"""

    def __init__(self, mesh: Mesh) -> None:
        """Use the tp axis of `mesh`."""
        super().__init__(mesh.tp, sequence_parallel=False)

    def leave(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """All-reduce a rank's partial result of a row-parallel layer over the tensor-parallel ranks, in rank order;
        return the sum. x_BSH: partial result, [B, S, H] for B sequences of S tokens and hidden size H. `site`: label of
        the call in traces."""
        if self.trivial:
            return x_BSH
        parts = x_BSH.new_empty(self.size, *x_BSH.shape)
        all_gather(parts, x_BSH.contiguous(), self.axis, site)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class PagedCache:
    """Paged KV cache (blocks of `BLOCK_TOKENS` tokens) of a pipeline stage's layers in plain torch, for a ragged batch
    of sequences. Layers with different block tables (one per sliding window) share tensors, because a KV block belongs
    to only one table. Attention is computed token by token, so that a token's result does not depend on the rest of the
    batch.

    config: configuration of the model. tables: block table of each of the model's layers. layers: indices of the
    stage's layers. blocks: number of KV blocks. kv_heads: key-value heads of this rank. dtype: dtype of keys and
    values. With latent attention the cache holds one latent vector and rotary key per token, which all heads and tp
    ranks share, in place of keys and values. The attribute `length` of the model's cache interface stays 0, since
    callers always pass positions.

    Attributes:
        pairs: Tensors [2, slots, K, D] of keys and values, for K key-value heads of size D. With latent attention they
            are [1, slots, 1, C], latent vectors of size C. Each tensor serves one layer of every block table.
    """

    length = 0

    def __init__(
        self, config: ModelConfig, tables: BlockTables, layers: range, blocks: int, kv_heads: int, dtype: torch.dtype
    ) -> None:
        """Allocate the cache tensors, zeros; arguments: see the class."""
        tensors, *vectors = find_cached_shape(config, kv_heads)
        depth = 1 + max(tables.layers[layer][1] for layer in layers)
        self.pairs = [torch.empty(tensors, blocks * BLOCK_TOKENS, *vectors, dtype=dtype) for _ in range(depth)]
        self._layers, self._scale, self._softcap = tables.layers, config.score_scale, config.attention_softcap
        self._config = config
        self._contexts: list[torch.Tensor] = []  # of each selected token: slots [W, C] of its context
        self._slots_WT = torch.zeros(len(tables.windows), 0, dtype=torch.long)

    def select(self, batch: StepBatch, begin: int, end: int) -> None:
        """Select the tokens with the indices `begin` to `end` (exclusive) of a batch. The following calls of `attend`
        get the queries, keys and values of the selected tokens, perhaps with padding after them."""
        self._slots_WT = torch.from_numpy(batch.slots[:, begin:end]).long()
        self._contexts = []
        for row in range(begin, end):
            positions, owner = np.arange(batch.positions[row] + 1), batch.starts.searchsorted(row, side="right") - 1
            blocks_WC = batch.block_tables[:, owner, positions // BLOCK_TOKENS]
            self._contexts.append(torch.from_numpy(blocks_WC * BLOCK_TOKENS + positions % BLOCK_TOKENS).long())

    def attend(
        self, layer: int, q_BNTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write the keys and values of the selected tokens to the cache of the layer with index `layer`. Return their
        causal attention inside the layer's sliding window, [1, N, T, D] for T tokens and N query heads of size D; 0 for
        padding.

        q_BNTD: queries [1, N, T, D]. k_BKTD, v_BKTD: keys and values [1, K, T, D] of K key-value heads. v_BKTD is None
        for latent attention, whose keys are also its values. sinks: attention-sink logit of each query head [N]; None:
        no sinks."""
        table, place = self._layers[layer]
        tokens = self._slots_WT.shape[1]
        for cache, new in zip(self.pairs[place], (k_BKTD,) if v_BKTD is None else (k_BKTD, v_BKTD), strict=True):
            cache[self._slots_WT[table]] = new[0, :, :tokens].transpose(0, 1).to(cache.dtype)
        out_BNTD = torch.zeros_like(q_BNTD)
        for row, slots_WC in enumerate(self._contexts):
            out_BNTD[0, :, row] = self._attend_token(layer, q_BNTD[0, :, row], slots_WC[table], sinks)
        return out_BNTD

    def advance(self, tokens: int) -> None:
        """Do nothing (part of the interface of the model's caches): the scheduler counts the tokens of each
        sequence."""

    def _attend_token(
        self, layer: int, q_ND: torch.Tensor, slots_C: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the attention of one token over its context in the layer with index `layer`, [N, D] for N query heads
        of size D; computed in float32 or float64.

        q_ND: queries of the token. slots_C: KV-cache slots of the C tokens of its context. sinks: attention-sink logit
        of each query head [N]; None: no sinks."""
        slots_C = slots_C[self._config.first_key(layer, len(slots_C) - 1) :]  # blocks before it may have been freed
        wide = at_least_float32(q_ND.dtype)
        k_KCD, *values = (each[slots_C].transpose(0, 1).to(wide) for each in self.pairs[self._layers[layer][1]])
        v_KCD = values[0] if values else k_KCD
        q_KGSD = q_ND.to(wide).unflatten(0, (k_KCD.shape[0], -1))[:, :, None]
        scores_KGSC = torch.matmul(q_KGSD * self._scale, k_KCD.mT[:, None])
        if self._softcap is not None:
            scores_KGSC = self._softcap * (scores_KGSC / self._softcap).tanh()
        p_KGSC = scores_KGSC.softmax(dim=-1)
        if sinks is not None:
            log_sum_KGS1 = scores_KGSC.logsumexp(dim=-1, keepdim=True)
            p_KGSC = p_KGSC * torch.sigmoid(log_sum_KGS1 - sinks.to(wide).view(*q_KGSD.shape[:2], 1, 1))
        out_KGSD = torch.matmul(p_KGSC, v_KCD[:, None])
        return out_KGSD[:, :, 0].flatten(0, 1).to(q_ND.dtype)


class TorchRunner:
    """Runner of serving steps on a CPU in plain torch: the model with a paged KV cache. Tokens are computed in tiles of
    a fixed number (one by one in models with experts), so that a token's bits do not depend on the rest of the batch.

    weights: reader of this rank's weights. mesh: gives the axes tp and pp. sizes: sizes of KV pool and buffers, and the
    dtype of parameters and KV cache.

    Attributes:
        config: Configuration of the model.
        instruction_set: "cpu".
        version: "torch" and its version.
    """

    def __init__(self, weights: RankWeights, mesh: Mesh, sizes: ServingSizes) -> None:
        """Load the weights and allocate the KV cache; arguments: see the class."""
        self.config, self._stage = weights.config, weights.stage
        self.instruction_set, self.version = "cpu", f"torch {torch.__version__}"
        self._dtype = dtype = getattr(torch, sizes.dtype)
        axes = AxisOperations(tensor=OrderedTensorParallel(mesh))
        self._model = weights.build_model(axes, "cpu", dtype)
        self._model.attention_inputs.served_length = sizes.max_length
        kv_heads = max(1, self.config.kv_heads // mesh.tp.size)
        tables, layers = block_tables(self.config, mesh.pp.size), self._stage.layers
        self._cache = PagedCache(self.config, tables, layers, sizes.blocks, kv_heads, dtype)
        for pair in self._cache.pairs if sizes.resident else ():
            pair.zero_()  # so that its memory is resident
        self._tile = 1 if self.config.experts else TILE_TOKENS
        self._logit_rows = sizes.logit_rows if self._stage.last else 0

    def memory(self) -> dict[str, int]:
        """Return {kind: bytes}: `weights`, `kv` (cache), `logits` (of a step; 0 unless this is the last pipeline
        stage)."""
        return {
            "weights": sum(each.nbytes for each in self._model.parameters()),
            "kv": sum(each.nbytes for each in self._cache.pairs),
            "logits": 4 * self._logit_rows * self.config.vocabulary,
        }

    def run(self, batch: StepBatch, hidden: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Compute this rank's pipeline stage for a batch of T tokens. The last stage returns the logits of the R output
        rows (tokens whose logits are wanted), [R, V] for V vocabulary entries. Any other stage returns the hidden
        states, [T, H] with hidden size H. `hidden`: the previous stage's hidden states [T, H]; None on the first stage.
        """
        with torch.inference_mode():
            begins = range(0, len(batch.tokens), self._tile)
            states_TH = torch.cat([self._run_tile(batch, begin, hidden) for begin in begins])
            if self._stage.last:
                return self._logits(states_TH[torch.from_numpy(batch.output_rows).long()])
            return states_TH.float().numpy()

    def _run_tile(self, batch: StepBatch, begin: int, hidden: npt.NDArray[np.float32] | None) -> torch.Tensor:
        """Run this rank's pipeline stage on one tile of tokens, padded to the fixed tile size. Return the hidden states
        of the tile's tokens, [T, H] for T tokens of hidden size H, without padding.

        batch: the whole batch. begin: index in `batch` of the tile's first token. `hidden`: the previous stage's output
        for all tokens of the batch, None on the first stage."""
        size, end = self._tile, min(len(batch.tokens), begin + self._tile)
        numbers = np.zeros((2, 1, size), np.int64)
        numbers[0, 0, : end - begin] = batch.tokens[begin:end]
        # A prompt's last token, if only a target, may be beyond the last position: nothing reads its state.
        numbers[1, 0, : end - begin] = np.minimum(batch.positions[begin:end], self.config.max_positions - 1)
        tokens_BS, positions_BS = torch.from_numpy(numbers)
        x_BSH = None
        if hidden is not None:
            x_BSH = torch.zeros(1, size, self.config.hidden, dtype=self._dtype)
            x_BSH[0, : end - begin] = torch.from_numpy(hidden[begin:end])
        self._cache.select(batch, begin, end)
        given = {"cache": self._cache, "positions": positions_BS, "stage": self._stage, "x_BSH": x_BSH}
        return self._model.hidden(tokens_BS, **given)[0, : end - begin]

    def _logits(self, states_RH: torch.Tensor) -> npt.NDArray[np.float32]:
        """Return the logits [R, V] of R output rows (tokens whose logits are wanted), for V vocabulary entries.
        states_RH: outputs of the final norm, with hidden size H."""
        rows, size = len(states_RH), self._tile
        out_RV = np.empty((rows, self.config.vocabulary), np.float32)
        for begin in range(0, rows, size):
            part = states_RH[begin : begin + size]
            tile = F.pad(part, (0, 0, 0, size - len(part)))[None]
            out_RV[begin : begin + size] = self._model.output_logits(tile)[0, : len(part)].float().numpy()
        return out_RV
