"""Forward steps on a GPU: the ragged batch is copied to preallocated buffers, and decode-only steps of one rank run as
CUDA graphs.

Shapes: T tokens of a step, R rows of logits, H hidden, V vocabulary, E experts, S sequences, I tiles of attention, W
block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from meshwright.comm.mesh import Mesh
from meshwright.kernels.operations import BLOCK_TOKENS
from meshwright.model import layers as modules
from meshwright.model.attention import Attention
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.experts import Mixture, sort_copies
from meshwright.model.loss import cap_logits_
from meshwright.model.rope import RotaryTable, pad_pairs
from meshwright.model.transformer import Transformer
from meshwright.planner.serving.device_ledger import DECODE_ROWS, PREFILL_ROWS, SCRATCH_BYTES, tile_scratch
from meshwright.serving.device_logits import DeviceLogits
from meshwright.serving.device_parameters import prepare_parameters
from meshwright.serving.logit_rows import Draw, StepOutput
from meshwright.serving.scheduler import StepBatch
from meshwright.serving.step_limits import StepLimits
from meshwright.serving.torch_runner import OrderedTensorParallel
from meshwright.serving.weights import RankWeights
from meshwright.spec.block_tables import block_tables
from meshwright.spec.rope_scaling import Rotation


class DeviceRunner:
    """Runner of serving steps on a GPU: computes one rank's pipeline stage with Triton kernels. It implements the
    interface `Runner`; `instruction_set` is the GPU's name, `version` the versions of torch and Triton.

    weights: reader of this rank's weights. mesh: gives the device and the axes tp and pp. dtype: dtype of parameters
    and KV cache. limits: sizes of KV pool and buffers. operations: the module `device_operations`, or one with the same
    functions. batch_invariant: True: the bits of a sequence's results do not depend on the rest of the batch. False,
    which is faster: torch chooses the kernels of matrix products by the number of tokens, and attention tiles are
    smaller in steps of decode tokens alone. graphs: True: capture decode steps as CUDA graphs.
    """

    def __init__(
        self, weights: RankWeights, mesh: Mesh, dtype: torch.dtype, limits: StepLimits, operations: ModuleType, *,
        batch_invariant: bool = False, graphs: bool = True,
    ) -> None:  # fmt: skip
        """Load the weights, allocate KV pool and buffers, compile the kernels and capture the CUDA graphs; arguments:
        see the class."""
        self.config, self._stage, self._limits = weights.config, weights.stage, limits
        self._operations, self._invariant, self._device = operations, batch_invariant, mesh.device
        self._tensor = OrderedTensorParallel(mesh)
        self.instruction_set = torch.cuda.get_device_name(self._device) if torch.cuda.is_available() else "cpu"
        self.version = f"torch {torch.__version__}, {operations.VERSION}" + ", batch-invariant" * batch_invariant
        axes = AxisOperations(tensor=self._tensor)
        self._model = Transformer(self.config, axes=axes, device=self._device, dtype=dtype, stages=[self._stage])
        self._model.requires_grad_(False).eval()
        weights.load_into(self._model, dtype)
        self._dtype = dtype
        prepare_parameters(self._model, self.config)
        head_dim = self.config.head_dim
        self._rotations: dict[Rotation | None, Any] = {None: None} | {
            turn: pad_pairs(RotaryTable(turn, torch.float32).get_table(limits.max_length, self._device), head_dim)
            for turn in self.config.rotations(self._stage.layers)
        }
        kv_heads = max(1, self.config.kv_heads // mesh.tp.size)
        # The last block is for padding tokens.
        shape = (limits.blocks + 1) * BLOCK_TOKENS, kv_heads, self.config.head_dim
        self._block_tables = block_tables(self.config, mesh.pp.size)
        self._cache = [
            (self._zeros(*shape, dtype=dtype), self._zeros(*shape, dtype=dtype))
            for _ in range(self._block_tables.depths[self._stage.index])
        ]
        group = self.config.heads // mesh.tp.size // kv_heads
        self._padded_group = 1 << (group - 1).bit_length()  # query heads per key-value head
        self._sizes = [1 << power for power in range((limits.max_sequences - 1).bit_length() + 1)]
        width = max(limits.token_budget, limits.logits, self._sizes[-1])
        many = len(self._block_tables.windows)
        tables = self._sizes[-1], many, -(-limits.max_length // BLOCK_TOKENS)
        # Rows of `numbers`: tokens, positions, output rows, the three of tiles, slots of each block table.
        self._numbers, self._tables = (self._zeros(*size, dtype=torch.int32) for size in ((6 + many, width), tables))
        pinned = torch.cuda.is_available()
        # Of two steps in turn: the next one is written while the copies of the last one may be queued.
        sizes = self._numbers.shape, self._tables.shape
        self._staged = [
            [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for size in sizes]
            + [torch.zeros(3 * limits.logits, dtype=torch.float64, pin_memory=pinned)]
            for _ in range(2)
        ]
        self._draws = self._zeros(3 * limits.logits, dtype=torch.float64)
        tile = tile_scratch(self.config, mesh.tp.size, limits.max_length)
        self._scratch = (
            self._zeros(max(SCRATCH_BYTES // 4, tile), dtype=torch.float32),
            self._zeros(width * kv_heads, dtype=torch.int32),
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        if graphs:
            self._warm_up()

    def memory(self) -> dict[str, int]:
        """Return {kind: bytes}: on the device `weights`, `kv` and `workspace` (buffers, and the extra KV block that
        padding tokens write to); on the host `pinned` (buffers from which batches are copied). Memory that steps,
        graphs and sampling take from the caching allocators is not counted."""
        tables = [self._numbers, self._tables, *self._scratch, self._draws]
        tables += [table for pair in self._rotations.values() if pair for table in pair]
        padding = sum(each.nbytes for pair in self._cache for each in pair) // (self._limits.blocks + 1)
        return {
            "weights": sum(each.nbytes for each in self._model.parameters()),
            "kv": self._limits.blocks * padding,
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
        size = next(each for each in self._sizes if each >= tokens) if decoding else tokens
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
                found = self.compute((size, tiles, size if decoding else rows), decoding, x_TH)
            if not self._stage.last:
                return found[:tokens].float().cpu().numpy()
            if not rows:
                if self._device.type == "cuda":  # until the staged batch can be overwritten
                    torch.cuda.current_stream(self._device).synchronize()
                return []
            draws = [each.prepare_draw(position) for each, position in batch.outputs()]
            return DeviceLogits(found[:rows], draws, self._operations, (staged_draws, self._draws))

    def compute(self, counts: tuple[int, int, int], decoding: bool, x_TH: torch.Tensor | None = None) -> torch.Tensor:
        """Compute this rank's pipeline stage for the batch in the device's buffers, without a host synchronization. The
        last stage returns the logits of the R output rows (tokens whose logits are wanted), float32 [R, V]; any other
        stage the hidden states [T, H]. counts: (number of tokens, number of attention tiles, number of output rows).
        decoding: True if every sequence has one token. x_TH: hidden states of the previous stage; None on the first."""
        tokens, tiles, rows = counts
        number = self._numbers
        lines = self._compute_tile_rows(decoding)
        many = 1 if decoding else lines // self._padded_group
        given = [
            self._operations.Tiles(
                number[3:6, :tiles], many, lines, number[1], number[6 + table], self._tables[:, table]
            )
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
            qkv, x_TH = self._norm_product(block.attention_norm, x_TH, delta_TH, block.attention.qkv)
            delta_TH = self._post_norm(block.attention_post_norm, self._attend(block.attention, qkv, layer, given))
            if isinstance(block.mlp, Mixture):
                delta_TH = self._mix_experts(block.mlp, self._add_norm(block.mlp_norm, x_TH, delta_TH))
            else:
                mlp: modules.FeedForward = block.mlp
                swiglu = mlp.gated and mlp.activation == "silu"
                up_TF, x_TH = self._norm_product(block.mlp_norm, x_TH, delta_TH, mlp.up, swiglu=swiglu)
                if not swiglu:
                    up_TF = self._activate(up_TF, mlp.activation, mlp.gated)
                delta_TH = self._linear(mlp.down, up_TF)
            delta_TH = self._post_norm(block.mlp_post_norm, delta_TH)
        assert x_TH is not None and delta_TH is not None
        if not self._stage.last:
            return x_TH + delta_TH
        if not rows:  # the middle of a prompt
            return self._zeros(0, self.config.vocabulary, dtype=torch.float32)
        if not decoding:
            x_TH, delta_TH = (each.index_select(0, number[2, :rows]) for each in (x_TH, delta_TH))
        head = model.embedding if model.head is None else model.head
        local_RV, _ = self._norm_product(model.final_norm, x_TH, delta_TH, head, dtype=torch.float32)
        if self.config.logit_softcap is not None:
            cap_logits_(local_RV, self.config.logit_softcap)
        return self._tensor.gather(local_RV, "head.output", dim=1)[:, : self.config.vocabulary]

    def _compute_tile_rows(self, decoding: bool) -> int:
        """Return the number of query rows (tokens x query heads per key-value head) of an attention tile. decoding:
        True if every sequence of the step has one token."""
        return max(DECODE_ROWS if decoding or self._invariant else PREFILL_ROWS, self._padded_group)

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
            numbers[:2, tokens:size], numbers[6:, tokens:size] = 0, self._limits.blocks * BLOCK_TOKENS
            numbers[3, :size] = numbers[5, :size] = np.arange(size)
            numbers[4, :size], tables[sequences:size, :, 0] = 1, self._limits.blocks
            return size
        most = self._compute_tile_rows(decoding) // self._padded_group
        begins = [np.arange(first, stop, most) for first, stop in zip(batch.starts, batch.starts[1:], strict=False)]
        owners = np.repeat(np.arange(sequences), [len(each) for each in begins])
        first_I = np.concatenate(begins)
        numbers[3, : len(first_I)], numbers[5, : len(first_I)] = first_I, owners
        numbers[4, : len(first_I)] = np.minimum(batch.starts[1:][owners] - first_I, most)
        return len(first_I)

    def _attend(self, attention: Attention, qkv: torch.Tensor, layer: int, given: Sequence[Any]) -> torch.Tensor:
        """Write the tokens' keys and values to the KV cache of a layer; return the output of its attention and output
        projection, [T, H]. attention: the layer's module. qkv: [T, (N + 2K) D], N query heads and K key-value heads of
        size D. layer: index of the layer. given: for each block table, the step's attention tiles
        (`device_operations.Tiles`)."""
        table, place = self._block_tables.layers[layer]
        cache, tiles = self._cache[place], given[table]
        norms, config = None, self.config
        if attention.query_norm is not None and attention.key_norm is not None:
            norms = attention.query_norm.weight, attention.key_norm.weight
        if config.projection_norm and norms is not None:
            ends = [0, len(norms[0]), len(norms[0]) + len(norms[1])]
            for begin, end, weight in zip(ends, ends[1:], norms, strict=False):
                part_TX = qkv[:, begin:end].contiguous()
                qkv[:, begin:end] = self._operations.add_norm(part_TX, None, weight, config.norm_epsilon)
            norms = None
        rotation = self._rotations[self.config.layer_rotation(layer)]
        self._operations.rotate_and_store(qkv, cache, tiles, rotation, norms, config.norm_epsilon)
        how = config.layer_window(layer), (config.score_scale, config.attention_softcap or 0.0, attention.sinks)
        return self._linear(attention.output, self._operations.attend(qkv, cache, tiles, *how, *self._scratch))

    def _mix_experts(self, mixture: Mixture, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the output [T, H] of the mixture-of-experts layer `mixture`, summed over the tensor-parallel ranks.
        x_TH: input, the normalized hidden states of T tokens."""
        config, experts, (tokens, hidden) = self.config, mixture.experts, x_TH.shape
        weights_TK, chosen_TK = mixture.router.choose(mixture.router.scores(x_TH, self._product))
        count, (order_N, *groups) = chosen_TK.shape[1], sort_copies(chosen_TK, experts.experts)
        plain = config.activation == "silu" and config.swiglu_limit is None
        activate = self._operations.swiglu if plain else experts.activate
        up_NX = self._grouped_product(experts.up, x_TH.index_select(0, order_N // count), groups)
        y_NH = self._grouped_product(experts.down, activate(up_NX), groups, experts.first)
        y_TKH = torch.empty_like(y_NH).index_copy_(0, order_N, y_NH).view(tokens, count, hidden).float()
        total_TH = y_TKH[:, 0] * weights_TK[:, :1]  # one by one: the order of torch's sum may depend on T
        for place in range(1, count):
            total_TH = total_TH + y_TKH[:, place] * weights_TK[:, place : place + 1]
        total_TH = total_TH.to(x_TH.dtype)
        if (shared := mixture.shared) is not None:
            up_TF = self._linear(shared.up, x_TH)
            shared_TH = self._linear(shared.down, self._activate(up_TF, shared.activation, shared.gated))
            if mixture.shared_gate is not None:
                shared_TH = self._linear(mixture.shared_gate, x_TH).sigmoid() * shared_TH
            total_TH = total_TH + shared_TH
        return self._tensor.leave(total_TH, "mlp.output")

    def _grouped_product(self, layer: Any, x_NX: torch.Tensor, groups: Sequence[Any], first: int = 0) -> torch.Tensor:
        """Return x Wᵀ + b, [N, Y], with the weight and bias of each row's expert. x_NX: input x, one row for each
        (token, expert) pair, sorted by expert. layer: module with the stacked weights and biases of all experts.
        groups: (expert of each row, exclusive end of each expert's rows). first: first output column to which a bias is
        added."""
        experts = len(groups[1])
        y_NY = self._operations.grouped_product(x_NX, layer.weight.unflatten(0, (experts, -1)), groups[1])
        if layer.bias is not None:
            bias_NZ = layer.bias.view(experts, -1)[groups[0]]
            y_NY[:, first : first + bias_NZ.shape[1]] += bias_NZ
        return y_NY  # type: ignore[no-any-return]

    def _activate(self, up_TF: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
        """Apply the activation function `activation` ("silu" ...) to `up_TF` [T, F] of T tokens. If `gated`, the first
        F/2 columns are the gate: return activation(gate) times the last F/2 columns, [T, F/2]."""
        if not gated:
            return modules.activate(up_TF, activation)
        if activation == "silu":
            return self._operations.swiglu(up_TF)
        gate_TF, up_TF = up_TF.chunk(2, dim=-1)
        return modules.activate(gate_TF, activation) * up_TF

    def _norm_product(
        self, norm: Any, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, linear: Any, *, swiglu: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Add the residual branch `delta_TH` (None: nothing) to the hidden states `x_TH`, apply `norm` (a module, or
        None) to the sum, and apply the layer `linear` to the result. Return (output of the layer [T, Y], the sum [T,
        H]). The sum may overwrite `x_TH`, which the caller must not use afterwards. swiglu: True: the layer is an MLP's
        gate and up projection; SwiGLU of its output is returned. dtype: dtype of the output; None: the dtype of `x_TH`.
        """
        bias = getattr(linear, "bias", None)
        if norm is None:
            x_TH = x_TH if delta_TH is None else x_TH.add_(delta_TH)
            y_TY = self._product(x_TH, linear.weight, bias, dtype)
            return self._operations.swiglu(y_TY) if swiglu else y_TY, x_TH
        if self._uses_gemv(x_TH) and isinstance(norm, modules.RMSNorm) and not (swiglu and bias is not None):
            scale = norm.weight, norm.epsilon
            return self._operations.gemv(  # type: ignore[no-any-return]
                x_TH, linear.weight, bias, dtype, norm=scale, delta_1X=delta_TH, gated=swiglu
            )
        y_TY = self._product(self._add_norm(norm, x_TH, delta_TH), linear.weight, bias, dtype)
        return self._operations.swiglu(y_TY) if swiglu else y_TY, x_TH

    def _post_norm(self, norm: Any, delta_TH: torch.Tensor) -> torch.Tensor:
        """Return a sublayer's output [T, H], ready to be added to the hidden states: `delta_TH` after the post-norm
        `norm` (a module, or None), times the model's residual scale."""
        if norm is not None:
            delta_TH = self._add_norm(norm, delta_TH, None)
        scale = self.config.residual_scale
        return delta_TH if scale == 1 else delta_TH * scale

    def _uses_gemv(self, x: torch.Tensor) -> bool:
        """Return True if the kernel `gemv` computes products of `x` [T, X] with parameters: for a single row (T = 1),
        unless the runner must be batch-invariant."""
        return len(x) == 1 and not self._invariant

    def _add_norm(self, norm: Any, x_TH: torch.Tensor, delta_TH: torch.Tensor | None) -> torch.Tensor:
        """Add the residual branch `delta_TH` (None: nothing) to the hidden states `x_TH` in place; return the norm of
        the sum, [T, H]. norm: the norm's module; None: return the sum itself."""
        if norm is None:
            return x_TH if delta_TH is None else x_TH.add_(delta_TH)
        if isinstance(norm, modules.RMSNorm):
            return self._operations.add_norm(x_TH, delta_TH, norm.weight, norm.epsilon)
        return norm(x_TH if delta_TH is None else x_TH.add_(delta_TH))

    def _linear(self, linear: modules.Linear, x_TX: torch.Tensor) -> torch.Tensor:
        """Return the output [T, Y] of the layer `linear` for the input `x_TX` of T tokens. The output of a row-parallel
        layer is summed over the tensor-parallel ranks before the bias is added."""
        if not isinstance(linear, modules.RowParallelLinear) or linear.tensor.trivial:
            return self._product(x_TX, linear.weight, linear.bias)
        y_TY = linear.tensor.leave(self._product(x_TX, linear.weight), linear.site)
        return y_TY if linear.bias is None else y_TY + linear.bias

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return x Wᵀ + b, [T, Y] for T rows. If the runner must be batch-invariant, the kernel `product` computes it;
        else torch, or the kernel `gemv` if T is 1 and W a parameter. x: input [T, X]. weight: W [Y, X]. bias: b [Y];
        None: no bias. dtype: dtype of the result; None: the dtype of `x`."""
        if self._invariant:
            return self._operations.product(x, weight, bias, dtype)
        if self._uses_gemv(x) and isinstance(weight, torch.nn.Parameter):  # which no kernel has just written
            return self._operations.gemv(x, weight, bias, dtype)[0]
        if dtype in (None, x.dtype):
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.T, out_dtype=dtype) if x.is_cuda else F.linear(x, weight, bias).to(dtype)

    def _zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of zeros of this shape and `dtype` on this rank's device."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _warm_up(self) -> None:
        """Run one step of `token_budget` tokens, a decode step of each padded batch size, and the sampling kernels, so
        that all kernels are compiled and all memory is allocated before the first request. The decode steps are
        captured as CUDA graphs that share a memory pool, except with tp or pp, whose steps communicate."""
        numbers = self._numbers
        numbers[6:].fill_(self._limits.blocks * BLOCK_TOKENS)
        self._tables.fill_(self._limits.blocks)
        pool, whole = None, self._stage.first and self._stage.last and self._tensor.trivial
        with torch.inference_mode():
            many, dtype = numbers.shape[1], self._dtype
            x_TH = None if self._stage.first else self._zeros(many, self.config.hidden, dtype=dtype)
            tokens = self._limits.token_budget
            most = self._compute_tile_rows(False) // self._padded_group
            first_I = torch.arange(0, tokens, most, dtype=torch.int32, device=self._device)
            numbers[3, : len(first_I)] = first_I
            numbers[4, : len(first_I)] = (tokens - first_I).clamp(max=most)
            self.compute((tokens, len(first_I), self._limits.logits), False, None if x_TH is None else x_TH[:tokens])
            numbers[3].copy_(torch.arange(numbers.shape[1]))
            numbers[4].fill_(1)
            for size in reversed(self._sizes):
                for _ in range(2):
                    found = self.compute((size, size, size), True, None if x_TH is None else x_TH[:size])
                if whole:
                    torch.cuda.synchronize(self._device)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        found = self.compute((size, size, size), True)
                    pool = graph.pool()
                    self._graphs[size] = graph, found
            if self._stage.last:
                DeviceLogits(found[:1], [Draw(1.0, 0.5, 0, 1)], self._operations, (self._staged[0][2], self._draws))
