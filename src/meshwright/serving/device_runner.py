"""Forward steps on a GPU: the ragged batch is copied to preallocated buffers, and decode-only steps of one rank run as
CUDA graphs.

Shapes: T tokens of a step, R rows of logits, H hidden, V vocabulary, E experts, S sequences, I tiles of attention, W
block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from meshwright.comm.mesh import Mesh
from meshwright.kernels.device_attention import AttentionSettings, Pair, Tiles
from meshwright.kernels.operations import BLOCK_TOKENS
from meshwright.model import layers as modules
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.experts import Mixture
from meshwright.model.latent_attention import LatentAttention
from meshwright.model.loss import cap_logits_
from meshwright.parallel.expert import AllToAllTokenDispatcher
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.planner.serving.runners import SCRATCH_BYTES
from meshwright.serving.device_layers import DeviceLayers, prepare_parameters
from meshwright.serving.device_logits import DeviceLogits
from meshwright.serving.logit_rows import Draw, StepOutput
from meshwright.serving.position_tables import make_position_tables
from meshwright.serving.scheduler import StepBatch
from meshwright.serving.torch_runner import OrderedTensorParallel
from meshwright.serving.weights import RankWeights
from meshwright.spec.attention_tiles import AttentionSizes
from meshwright.spec.block_tables import block_tables, find_cached_shape
from meshwright.spec.rope_scaling import Temperature


class StepSizes(NamedTuple):
    """Sizes of a step, from which its kernel launches follow.

    Attributes:
        tokens: Number of tokens, those of padding included.
        tiles: Number of attention tiles.
        rows: Number of output rows (tokens whose logits are wanted).
        context: Maximum number of keys of a sequence.
        decoding: True if every sequence has one token.
    """

    tokens: int
    tiles: int
    rows: int
    context: int
    decoding: bool = False


class DeviceRunner:
    """Runner of serving steps on a GPU: computes one rank's pipeline stage with Triton kernels. It implements the
    interface `Runner`; `instruction_set` is the GPU's name, `version` the versions of torch and Triton.

    weights: reader of this rank's weights. mesh: gives the device and the axes tp, pp, and ep inside tp. sizes: sizes
    of KV pool and buffers, and the dtype of parameters and KV cache. operations: the module `device_operations`, or one
    with the same functions. batch_invariant: True: the bits of a sequence's results do not depend on the rest of the
    batch. False, which is faster: torch chooses the kernels of matrix products by the number of tokens, and attention
    tiles are smaller in steps of decode tokens alone. graphs: True: capture decode steps as CUDA graphs.
    """

    def __init__(
        self, weights: RankWeights, mesh: Mesh, sizes: ServingSizes, operations: ModuleType, *,
        batch_invariant: bool = False, graphs: bool = True,
    ) -> None:  # fmt: skip
        """Load the weights, allocate KV pool and buffers, compile the kernels and capture the CUDA graphs; arguments:
        see the class."""
        self.config, self._stage, self._sizes = weights.config, weights.stage, sizes
        self._operations, self._invariant, self._device = operations, batch_invariant, mesh.device
        self._tensor = OrderedTensorParallel(mesh)
        self.instruction_set = torch.cuda.get_device_name(self._device) if torch.cuda.is_available() else "cpu"
        self.version = f"torch {torch.__version__}, {operations.VERSION}" + ", batch-invariant" * batch_invariant
        # A dispatcher makes each rank hold whole experts. No token is sent: every tp rank has all tokens.
        dispatcher = AllToAllTokenDispatcher(mesh.ep, mesh.etp) if mesh.layout.expert_parallel else None
        axes = AxisOperations(tensor=self._tensor, dispatcher=dispatcher)
        self._dtype = dtype = getattr(torch, sizes.dtype)
        self._model = weights.build_model(axes, self._device, dtype)
        self._layers = DeviceLayers(self.config, operations, self._tensor, batch_invariant, weights.first_expert)
        kv_heads = max(1, self.config.kv_heads // mesh.tp.size)
        prepare_parameters(self._model, self.config, kv_heads)
        tables = make_position_tables(self.config, self._stage.layers, sizes.max_length, self._device)
        self._rotations: dict[Any, Any] = {None: None, **tables}
        self._block_tables = block_tables(self.config, mesh.pp.size)
        tensors, *vectors = find_cached_shape(self.config, kv_heads)
        shape = tensors, (sizes.blocks + 1) * BLOCK_TOKENS, *vectors  # the last block is for padding tokens
        depth = self._block_tables.depths[self._stage.index]
        self._cache = [self._zeros(*shape, dtype=dtype) for _ in range(depth)]
        self._attention = AttentionSizes.find(self.config, mesh.tp.size)
        self._padded_tokens = [1 << power for power in range((sizes.max_sequences - 1).bit_length() + 1)]
        width = max(sizes.token_budget, sizes.logit_rows, self._padded_tokens[-1])
        many = len(self._block_tables.windows)
        listed = self._padded_tokens[-1], many, -(-sizes.max_length // BLOCK_TOKENS)
        # Rows of `numbers`: tokens, positions, output rows, the three of tiles, slots of each block table.
        self._numbers, self._tables = (self._zeros(*size, dtype=torch.int32) for size in ((6 + many, width), listed))
        pinned = torch.cuda.is_available()
        # Of two steps in turn: the next one is written while the copies of the last one may be queued.
        self._draws = self._zeros(3 * sizes.logit_rows, dtype=torch.float64)
        copied = self._numbers, self._tables, self._draws
        self._staged = [
            [torch.zeros(each.shape, dtype=each.dtype, pin_memory=pinned) for each in copied] for _ in range(2)
        ]
        floats = max(SCRATCH_BYTES // 4, self._attention.count_scratch(sizes.max_length))
        counts = self._zeros(width * self._attention.groups, dtype=torch.int32)
        self._scratch = self._zeros(floats, dtype=torch.float32), counts
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        if graphs:
            self._warm_up()

    def memory(self) -> dict[str, int]:
        """Return {kind: bytes}: on the device `weights`, `kv` and `workspace` (buffers, and the extra KV block that
        padding tokens write to); on the host `pinned` (buffers from which batches are copied). Memory that steps,
        graphs and sampling take from the caching allocators is not counted."""
        tables = [self._numbers, self._tables, *self._scratch, self._draws]
        tables += [table for pair in self._rotations.values() if pair for table in pair]
        padding = sum(each.nbytes for each in self._cache) // (self._sizes.blocks + 1)
        return {
            "weights": sum(each.nbytes for each in self._model.parameters()),
            "kv": self._sizes.blocks * padding,
            "workspace": sum(each.nbytes for each in tables) + padding,
            "pinned": sum(each.nbytes for staged in self._staged for each in staged),
        }

    def run(
        self, batch: StepBatch, hidden: npt.NDArray[np.float32] | None = None, after: DeviceLogits | None = None
    ) -> StepOutput:
        """Compute this rank's pipeline stage for a batch of T tokens. The last stage returns the logits of the output
        rows (tokens whose logits are wanted) as `DeviceLogits`, which the GPU may still be computing. Any other stage
        returns its hidden states [T, H]. A result is valid until the next call or, if the next call gets it as `after`,
        until the call after that. hidden: the previous stage's hidden states [T, H]; None on the first stage. after:
        result of the previous call, from which the GPU samples this batch's input tokens; None: they are in `batch`."""
        tokens, rows, sequences = len(batch.tokens), len(batch.output_rows), len(batch.context)
        decoding = tokens == rows == sequences
        size = next(each for each in self._padded_tokens if each >= tokens) if decoding else tokens
        self._staged.reverse()
        *staged, staged_draws = self._staged[0]
        tiles = self._stage_batch(batch, size, decoding)
        with torch.inference_mode():
            self._numbers.copy_(staged[0], non_blocking=True)
            many = size if decoding else sequences
            self._tables[:many].copy_(staged[1][:many], non_blocking=True)
            if after is not None:
                after.copy_tokens_to(self._numbers[0, :tokens])
            if decoding and size in self._graphs:
                graph, found = self._graphs[size]
                graph.replay()
            else:
                x_TH = None
                if hidden is not None:
                    x_TH = self._zeros(size, self.config.hidden, dtype=self._dtype)
                    x_TH[:tokens] = torch.from_numpy(hidden)
                longest = int(batch.context.max())
                sizes = StepSizes(size, tiles, size if decoding else rows, longest, decoding)
                found = self.compute(sizes, x_TH)
            if not self._stage.last:
                return found[:tokens].float().cpu().numpy()
            if not rows:
                if self._device.type == "cuda":  # until the staged batch can be overwritten
                    torch.cuda.current_stream(self._device).synchronize()
                return []
            draws = [each.prepare_draw(position) for each, position in batch.outputs()]
            return DeviceLogits(found[:rows], draws, self._operations, (staged_draws, self._draws))

    def compute(self, sizes: StepSizes, x_TH: torch.Tensor | None = None) -> torch.Tensor:
        """Compute this rank's pipeline stage for the batch in the device's buffers, without a host synchronization. The
        last stage returns the logits of the R output rows (tokens whose logits are wanted), float32 [R, V]; any other
        stage the hidden states [T, H]. sizes: sizes of the step. x_TH: hidden states of the previous stage; None on the
        first."""
        tokens, tiles, rows, context, decoding = sizes
        number = self._numbers
        lines = self._attention.count_rows(decoding or self._invariant)
        many = 1 if decoding else lines // self._attention.padded
        given = [
            Tiles(number[3:6, :tiles], many, lines, number[1], number[6 + table], self._tables[:, table], context)
            for table in range(len(self._block_tables.windows))
        ]
        model, delta_TH = self._model, None
        if x_TH is None:
            x_TH = self._tensor.leave(model.embedding(number[0, :tokens]), "embedding")
            x_TH = modules.scale_embedding(x_TH, self.config.embedding_factor)
            if model.positions is not None:  # clamped: a token that is only scored may be beyond them
                x_TH = x_TH + model.positions(number[1, :tokens].clamp(max=self.config.max_positions - 1))
        for layer in self._stage.layers:
            block = model.layers[layer]
            parts, x_TH = self._layers.apply_norm_and_linear(block.attention_norm, x_TH, delta_TH, block.attention.qkv)
            delta_TH = self._layers.apply_post_norm(
                block.attention_post_norm, self._attend(block.attention, parts, layer, given)
            )
            if isinstance(block.mlp, Mixture):
                delta_TH = self._layers.mix_experts(block.mlp, self._layers.add_norm(block.mlp_norm, x_TH, delta_TH))
            else:
                mlp: modules.FeedForward = block.mlp
                swiglu = mlp.gated and mlp.activation == "silu"
                up_TF, x_TH = self._layers.apply_norm_and_linear(block.mlp_norm, x_TH, delta_TH, mlp.up, swiglu=swiglu)
                if not swiglu:
                    up_TF = self._layers.activate(up_TF, mlp.activation, mlp.gated)
                delta_TH = self._layers.linear(mlp.down, up_TF)
            delta_TH = self._layers.apply_post_norm(block.mlp_post_norm, delta_TH)
        assert x_TH is not None and delta_TH is not None
        if not self._stage.last:
            return x_TH + delta_TH
        if not rows:  # the middle of a prompt
            return self._zeros(0, self.config.vocabulary, dtype=torch.float32)
        if not decoding:
            x_TH, delta_TH = (each.index_select(0, number[2, :rows]) for each in (x_TH, delta_TH))
        head = model.embedding if model.head is None else model.head
        local_RV, _ = self._layers.apply_norm_and_linear(model.final_norm, x_TH, delta_TH, head, dtype=torch.float32)
        if self.config.logit_softcap is not None:
            cap_logits_(local_RV, self.config.logit_softcap)
        return self._tensor.gather(local_RV, "head.output", dim=1)[:, : self.config.vocabulary]

    def _stage_batch(self, batch: StepBatch, size: int, decoding: bool) -> int:
        """Write a batch into the pinned host buffers, and return the number of its attention tiles (groups of tokens of
        one sequence that are computed together). decoding: True if every sequence has one token; the batch is then
        padded to `size` sequences, the batch size of a CUDA graph."""
        numbers, tables = (each.numpy() for each in self._staged[0][:2])
        tokens, sequences = len(batch.tokens), len(batch.context)
        numbers[0, :tokens], numbers[1, :tokens], numbers[6:, :tokens] = batch.tokens, batch.positions, batch.slots
        numbers[2, : len(batch.output_rows)] = batch.output_rows
        tables[:sequences, :, : batch.block_tables.shape[2]] = batch.block_tables.transpose(1, 0, 2)
        if decoding:
            numbers[:2, tokens:size], numbers[6:, tokens:size] = 0, self._sizes.blocks * BLOCK_TOKENS
            numbers[3, :size] = numbers[5, :size] = np.arange(size)
            numbers[4, :size], tables[sequences:size, :, 0] = 1, self._sizes.blocks
            return size
        most = self._attention.count_rows(decoding or self._invariant) // self._attention.padded
        begins = [np.arange(first, stop, most) for first, stop in zip(batch.starts, batch.starts[1:], strict=False)]
        owners = np.repeat(np.arange(sequences), [len(each) for each in begins])
        first_I = np.concatenate(begins)
        numbers[3, : len(first_I)], numbers[5, : len(first_I)] = first_I, owners
        numbers[4, : len(first_I)] = np.minimum(batch.starts[1:][owners] - first_I, most)
        return len(first_I)

    def _attend(self, attention: Any, parts: torch.Tensor, layer: int, given: Sequence[Tiles]) -> torch.Tensor:
        """Write the tokens' keys and values to the KV cache of a layer; return the output of its attention and output
        projection, [T, H]. attention: the layer's module. parts: result of its projection `qkv` for T tokens. layer:
        index of the layer. given: for each block table, the step's attention tiles."""
        (table, place), config, operations = self._block_tables.layers[layer], self.config, self._operations
        positions, window, softcap = config.layer_positions(layer), config.layer_window(layer), config.attention_softcap
        cache, tiles, rotation = self._cache[place], given[table], self._rotations[positions]
        if isinstance(attention, LatentAttention):
            return self._attend_latent(attention, parts, cache, tiles, rotation)
        norms, epsilon = None, config.norm_epsilon
        if config.projection_norm:
            both = attention.query_norm, attention.key_norm
            ends = np.cumsum([len(norm.weight) for norm in both]).tolist()
            for part, norm in zip(parts.tensor_split(ends, 1), both, strict=False):
                part[:] = self._layers.add_norm(norm, part, None)
        elif attention.query_norm is not None:
            norms = attention.query_norm.weight, attention.key_norm.weight
        if rotated := config.layer_rotated_norm(layer):
            weight = parts.new_full((config.head_dim,), rotated[0], dtype=torch.float32)  # no rounding of the scale
            norms, epsilon = (weight, weight), rotated[1]
        queries_only = isinstance(positions, Temperature)
        operations.rotate_and_store(parts, cache, tiles, rotation, norms, epsilon, queries_only)
        settings = AttentionSettings(config.score_scale, softcap or 0.0, attention.sinks, window, config.window_chunks)
        return self._layers.linear(attention.output, operations.attend(parts, cache, tiles, settings, *self._scratch))

    def _attend_latent(
        self, attention: LatentAttention, parts: torch.Tensor, cache: torch.Tensor, tiles: Tiles, rotation: Pair
    ) -> torch.Tensor:
        """Write the tokens' latent vectors and rotary keys to `cache`; return the output of latent attention and its
        output projection, [T, H]. The up-projections of keys and values are absorbed into queries and outputs. parts:
        for each of T tokens the latent vector (R elements), the rotary key, and the queries of N heads or their latent
        vector."""
        latent, heads, tokens = attention.latent, attention.heads, len(parts)
        q = parts[:, latent.cached_dim :]
        if attention.query_up is not None:
            normed = self._layers.add_norm(attention.query_norm, q, None)
            q = self._layers.linear(attention.query_up, normed)
        q_TND = q.unflatten(1, (heads, attention.size))
        up_NOR = attention.latent_up.weight.unflatten(0, (heads, -1))
        wide_TNC = q.new_empty(tokens, heads, latent.cached_dim)
        norm, plain = (attention.latent_norm.weight, attention.latent_norm.epsilon), attention.plain
        operations = self._operations
        operations.multiply_heads(q_TND[:, :, :plain], up_NOR[:, :plain].mT, wide_TNC[:, :, : latent.rank])
        operations.rotate_and_store_latent(parts, q_TND, wide_TNC, cache[0], tiles, rotation, norm)
        scale, groups = self.config.score_scale, self._attention.groups
        settings = AttentionSettings(scale, key_only=latent.rotary_dim, groups=groups)
        found = operations.attend(wide_TNC.flatten(1), cache, tiles, settings, *self._scratch)
        out_TNV = q.new_empty(tokens, heads, latent.value_dim)
        operations.multiply_heads(found.unflatten(1, (heads, -1)), up_NOR[:, plain:], out_TNV)
        return self._layers.linear(attention.output, out_TNV.flatten(1))

    def _zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of zeros of this shape and `dtype` on this rank's device."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _warm_up(self) -> None:
        """Run one step of `token_budget` tokens, a decode step of each padded batch size, and the sampling kernels, so
        that all kernels are compiled and all memory is allocated before the first request. The decode steps are
        captured as CUDA graphs that share a memory pool, except with tp or pp, whose steps communicate."""
        numbers = self._numbers
        numbers[6:].fill_(self._sizes.blocks * BLOCK_TOKENS)
        self._tables.fill_(self._sizes.blocks)
        pool, whole = None, self._stage.first and self._stage.last and self._tensor.trivial
        with torch.inference_mode():
            x_TH = None if self._stage.first else self._zeros(numbers.shape[1], self.config.hidden, dtype=self._dtype)
            tokens = self._sizes.token_budget
            most = self._attention.count_rows(self._invariant) // self._attention.padded
            first_I = torch.arange(0, tokens, most, dtype=torch.int32, device=self._device)
            numbers[3, : len(first_I)] = first_I
            numbers[4, : len(first_I)] = (tokens - first_I).clamp(max=most)
            longest = self._sizes.max_length
            sizes = StepSizes(tokens, len(first_I), self._sizes.logit_rows, longest)
            self.compute(sizes, None if x_TH is None else x_TH[:tokens])
            numbers[3].copy_(torch.arange(numbers.shape[1]))
            numbers[4].fill_(1)
            for size in reversed(self._padded_tokens):
                sizes = StepSizes(size, size, size, longest, decoding=True)
                for _ in range(2):
                    found = self.compute(sizes, None if x_TH is None else x_TH[:size])
                if whole:
                    torch.cuda.synchronize(self._device)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        found = self.compute(sizes)
                    pool = graph.pool()
                    self._graphs[size] = graph, found
            if self._stage.last:
                DeviceLogits(found[:1], [Draw(1.0, 0.5, 0, 1)], self._operations, (self._staged[0][2], self._draws))
