"""Lowering of a pipeline stage to the operations of the compiled CPU kernels: walks the modules, packs their weights,
allocates buffers.

Shapes: T tokens of the budget, R rows of logits, H hidden, N query heads, K key-value heads, D head size, F width of an
MLP, V vocabulary, P ranks of tp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.kernels import operations as op
from meshwright.kernels.library import Kernels
from meshwright.kernels.memory_pages import reserve_pool
from meshwright.kernels.op_list import OpList
from meshwright.kernels.rank_allocator import RankAllocator
from meshwright.kernels.row_order import find_gate_order, find_row_order, spread_bias
from meshwright.kernels.structures import PackedMatrix
from meshwright.model import layers as modules
from meshwright.model.attention import Attention as AttentionModule
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.block import Block
from meshwright.model.experts import Mixture
from meshwright.model.latent_attention import LatentAttention
from meshwright.model.transformer import Transformer
from meshwright.parallel.expert import AllToAllTokenDispatcher
from meshwright.parallel.tensor import TensorParallel
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.position_tables import make_position_tables
from meshwright.serving.weights import RankWeights
from meshwright.spec.block_tables import block_tables
from meshwright.spec.rope_scaling import Rotation, Temperature

Float32 = npt.NDArray[np.float32]
Order = npt.NDArray[np.int64]


@dataclass(slots=True)
class Segment:
    """Consecutive kernel operations of a model, and the tensor-parallel all-reduce that follows them.

    end: exclusive end index of these operations in `Lowering.ops`. partial: buffer [T, H] that is all-reduced over tp,
    for a budget of T tokens and hidden size H; None: no all-reduce. bias: [H], added to the sum; None: 0. residual:
    buffer [T, H] to which the result is added; None: the result is written to `partial`. norms: this rank's slices of
    RMSNorm weights; `partial` is then not summed, but its first columns, a slice of as many for each norm, are
    normalised in place over the columns of all ranks."""

    end: int
    partial: Float32 | None = None
    residual: Float32 | None = None
    bias: Float32 | None = None
    norms: tuple[Float32, ...] = ()


class Lowering:
    """Builder of the list of kernel operations that compute one rank's pipeline stage on a CPU, with all buffers and
    packed weights that they use. Construction reads the weights, packs them and allocates the KV pool.

    kernels: compiled library that will execute the operations. weights: reader of this rank's weights. mesh: gives the
    axes tp, pp, ep and etp. dtype: "float32" or "bfloat16", of packed weights and KV cache. sizes: sizes of KV pool
    and buffers.

    Attributes:
        ops: The operations, in order.
        segments: Slices of `ops` between all-reduces over tp; a single slice without tp.
        states: Hidden states [T, H], input and output of the stage; T: the token budget of a step.
        logits: Logits [R, V / P] of this rank's vocabulary slice, P tensor-parallel ranks; None unless this is the last
            stage.
        nbytes: {kind: bytes}, as `RankAllocator` counts them.
    """

    def __init__(self, kernels: Kernels, weights: RankWeights, mesh: Mesh, dtype: str, sizes: ServingSizes) -> None:
        """Read and pack the weights, allocate all buffers and build the list of operations; arguments: see the
        class."""
        self.config, self._stage = weights.config, weights.stage
        self._weights, self._dtype, self._sizes = weights, dtype, sizes
        self._split = not mesh.tp.trivial
        self.ops: OpList = kernels.create_op_list()
        self.segments: list[Segment] = []
        self._memory = RankAllocator(kernels, dtype, sizes.token_budget)
        self.nbytes = self._memory.nbytes
        self._kv_heads = max(1, self.config.kv_heads // mesh.tp.size)
        self._tables = block_tables(self.config, mesh.pp.size)
        depth = self._tables.depths[self._stage.index]
        # Each is for one layer of every block table, because a KV block belongs to only one table.
        self._caches = [self._memory.allocate_cache(self.config, sizes.blocks, self._kv_heads) for _ in range(depth)]
        dispatcher = AllToAllTokenDispatcher(mesh.ep, mesh.etp) if mesh.layout.expert_parallel else None
        axes = AxisOperations(tensor=TensorParallel(mesh.tp, sequence_parallel=False), dispatcher=dispatcher)
        self._first_token = mesh.tp.rank * -(-self.config.vocabulary // mesh.tp.size)
        self._model = Transformer(self.config, axes=axes, device="meta", stages=[self._stage])
        self._names = {id(module): name for name, module in self._model.named_modules()}
        self._rotations: dict[Rotation | Temperature | None, Any] = {None: (None, None)}
        tables = make_position_tables(self.config, self._stage.layers, sizes.max_length, torch.device("cpu"))
        copy = self._memory.copy
        self._rotations |= {key: tuple(copy(each.numpy()) for each in pair) for key, pair in tables.items()}
        del tables  # large for long contexts
        self.states = self._memory.get_buffer("states", self.config.hidden)
        self.logits: Float32 | None = None
        with reserve_pool([each for pair in self._caches for each in pair if sizes.resident]):
            self._lower_stage()  # reads and packs the weights meanwhile
        kernels.end_packing()

    def _lower_stage(self) -> None:
        """Append to `ops` the kernel operations of the whole pipeline stage: embedding, transformer blocks, head."""
        packed = self._lower_embedding() if self._stage.first else None
        for layer in self._stage.layers:
            self._lower_block(self._model.layers[layer], layer)
        if self._stage.last:
            self._lower_head(packed)
        self.segments.append(Segment(len(self.ops)))

    def _lower_embedding(self) -> PackedMatrix | None:
        """Append to `ops` the lookup of token and position embeddings. Return the packed embedding matrix if this stage
        also has a tied output head, else None."""
        packed = self._pack_weight(self._model.embedding) if self._stage.last and self.config.tied else None
        table = packed or self._memory.copy(self._read_shard("embedding.weight", self._dtype == "bfloat16"))
        self.ops.append(op.Embed(self.states, table, first=self._first_token))
        self._sum_over_ranks(self.states)
        if (factor := self.config.embedding_factor) != 1:
            factor = torch.tensor(factor, dtype=getattr(torch, self._dtype)).item()  # as the model rounds it
            self.ops.append(op.Scale(self.states, self.states, factor))
        if self._model.positions is not None:
            positions = self._memory.copy(self._read_shard("positions.weight", self._dtype == "bfloat16"))
            self.ops.append(op.Embed(self.states, positions, ids="positions", accumulate=True))
        return packed

    def _lower_block(self, block: Block, layer: int) -> None:
        """Append to `ops` the operations of the transformer block with index `layer`. block: the block's module."""
        lower: Any = self._lower_latent_attention if self.config.latent else self._lower_attention
        attended = lower(block.attention, self._lower_input(block.attention_norm), layer)
        self._lower_row_parallel(block.attention.output, attended, block.attention_post_norm)
        normed = self._lower_input(block.mlp_norm)
        if isinstance(block.mlp, Mixture):
            self._lower_mixture(block.mlp, normed, block.mlp_post_norm)
        else:
            self._lower_row_parallel(block.mlp.down, self._lower_up(block.mlp, normed), block.mlp_post_norm)

    def _lower_input(self, norm: nn.Module | None) -> Float32:
        """Append to `ops` the norm before a sublayer; return the buffer with the sublayer's input, [T, H] for T tokens
        of hidden size H. norm: the norm's module; None: the hidden states themselves are the input."""
        if norm is None:
            return self.states
        normed = self._memory.get_buffer("normed", self.config.hidden)
        self._lower_norm(norm, normed, self.states)
        return normed

    def _lower_attention(self, attention: AttentionModule, x: Float32, layer: int) -> Float32:
        """Append to `ops` QKV projection, RoPE, KV-cache write and attention of the layer with index `layer`. Return
        the buffer of the attention output, [T, N D] for T tokens and N query heads of size D. attention: the layer's
        module. x: input [T, H] with hidden size H."""
        config = self.config
        heads, kv_heads, size = attention.heads, attention.kv_heads, attention.size
        qkv = self._memory.get_buffer("qkv", (heads + 2 * kv_heads) * size)
        self._lower_linear(attention.qkv, qkv, x)
        q_norm, k_norm = (self._read_optional(each, "weight") for each in (attention.query_norm, attention.key_norm))
        if config.projection_norm:
            assert q_norm is not None and k_norm is not None
            if self._split:
                self.segments.append(Segment(len(self.ops), qkv, norms=(q_norm, k_norm)))
            else:
                ends = np.cumsum([len(q_norm), len(k_norm)])
                for part, weight in zip(np.split(qkv, ends, axis=1), (q_norm, k_norm), strict=False):
                    self.ops.append(op.Norm(part, part, weight, None, config.norm_epsilon))
            q_norm = k_norm = None
        table, place = self._tables.layers[layer]
        cache, positions = op.LayerCache(*self._caches[place], size, table), config.layer_positions(layer)
        epsilon = config.norm_epsilon
        if rotated := config.layer_rotated_norm(layer):
            factor, epsilon = rotated
            q_norm = k_norm = np.full(size, factor, np.float32)
        (cosine, sine), queries_only = self._rotations[positions], isinstance(positions, Temperature)
        self.ops.append(op.RopeStore(qkv, cache, heads, cosine, sine, q_norm, k_norm, epsilon, queries_only))
        out, window = self._memory.get_buffer("attention", heads * size), config.layer_window(layer) or 0
        softcap, sinks = config.attention_softcap or 0.0, self._read_optional(attention, "sinks")
        chunks = config.window_chunks and window > 0
        self.ops.append(op.Attention(out, qkv, cache, heads, config.score_scale, window, softcap, sinks, chunks))
        return out

    def _lower_latent_attention(self, attention: LatentAttention, x: Float32, layer: int) -> Float32:
        """Append to `ops` the latent attention of the layer with index `layer`. Return the buffer of the attention
        output, [T, N V] for T tokens and N heads with values of size V. attention: the layer's module. x: input [T, H]
        with hidden size H."""
        latent, heads, (table, place) = attention.latent, attention.heads, self._tables.layers[layer]
        queries = None if attention.query_up is None else self._memory.get_buffer("queries", heads * attention.size)
        both, plain = self._read_matrix(attention.latent_up).reshape(heads, -1, latent.rank), attention.plain
        ups = [self._memory.pack(each) for each in (both[:, :plain].swapaxes(1, 2), both[:, plain:])]
        cosine, sine = self._rotations[self.config.layer_positions(layer)]
        out = self._memory.get_buffer("attention", heads * latent.value_dim)
        self.ops.append(
            op.LatentAttention(
                out, x, self._pack_weight(attention.qkv), self._read_parameter(attention.latent_norm, "weight"),
                self._read_optional(attention.query_norm, "weight"),
                None if attention.query_up is None else self._pack_weight(attention.query_up), ups[0], ups[1],
                self._memory.get_buffer("wide", heads * latent.cached_dim + attention.qkv.weight.shape[0]), queries,
                self._memory.get_buffer("attended", heads * latent.cached_dim),
                op.LayerCache(*self._caches[place], latent.cached_dim, table), cosine, sine, self.config.score_scale,
            )
        )  # fmt: skip
        return out

    def _lower_mixture(self, mixture: Mixture, x: Float32, norm: nn.Module | None) -> None:
        """Append to `ops` a mixture-of-experts layer (routed and shared experts), whose result is added to the hidden
        states. mixture: the layer's module. x: normed input, [T, H] for T tokens of hidden size H. norm: post-norm of
        the result, or None."""
        config, experts = self.config, mixture.experts
        workspace = self._memory.get_experts_workspace(config, experts.down.weight.shape[1])
        added = not self._split and self.config.plain_residual
        out = self.states if added else self._memory.get_buffer("partial", config.hidden)
        router_bias = self._read_optional(mixture.router, "bias")
        router = self._pack_weight(mixture.router, dtype="float32")
        values = self._read_matrix(experts.up).reshape(experts.held, -1, config.hidden)
        order = find_gate_order(experts.down.weight.shape[1], config.experts_interleaved)
        up = self._memory.pack(values, order=order)
        down = self._memory.pack(self._read_matrix(experts.down).reshape(experts.held, config.hidden, -1))
        biases: tuple[Float32 | None, Float32 | None, Float32 | None] = (None, None, None)
        if config.mlp_bias:
            up_bias = self._read_parameter(experts.up, "bias", order)
            down_bias = self._read_shard(f"{self._names[id(experts.down)]}.bias", bfloat16=False)
            down_bias = self._memory.copy(spread_bias(down_bias, experts.held, config.hidden, experts.first))
            biases, router_bias = (router_bias, up_bias, down_bias), None
        self.ops.append(
            op.Experts(
                out, x, router, up, down, workspace, config.experts_per_token,
                op.Activation(config.activation, True, config.swiglu_limit or 0.0, config.swiglu_alpha),
                "logits" if config.routed_input else config.router, biases, router_bias, config.normalise_choice,
                config.routed_scale, (config.expert_groups, config.groups_per_token), config.routed_input,
                self._weights.first_expert, accumulate=added,
            )
        )  # fmt: skip
        if mixture.shared is not None:
            self._lower_shared(mixture, mixture.shared, x, out)
        if not added:
            self._lower_sum(out, None, norm)

    def _lower_shared(self, mixture: Mixture, shared: modules.FeedForward, x: Float32, out: Float32) -> None:
        """Append to `ops` the shared expert of a mixture-of-experts layer, with its sigmoid gate, if any; the result is
        added to `out`. mixture: the layer's module. shared: the expert's MLP. x, out: normed input and output, [T, H]
        for T tokens of hidden size H."""
        hidden = self._lower_up(shared, x)
        if mixture.shared_gate is not None:  # a factor per token, applied before the down projection
            weight, scores = self._pack_weight(mixture.shared_gate, "float32"), self._memory.get_buffer("gate", 1)
            self.ops.append(op.Gate(hidden, x, weight, scores))
        self._lower_linear(shared.down, out, hidden, accumulate=True)

    def _lower_up(self, mlp: modules.FeedForward, x: Float32) -> Float32:
        """Append to `ops` the up projection and activation of the MLP `mlp`; return the buffer of the result, [T, F]
        for T tokens and intermediate size F. x: normed input [T, H] with hidden size H."""
        hidden = self._memory.get_buffer("hidden", mlp.down.weight.shape[1])
        order = find_gate_order(hidden.shape[1]) if mlp.gated else None
        bias, up = self._read_optional(mlp.up, "bias", order), self._memory.pack(self._read_matrix(mlp.up), order=order)
        self.ops.append(op.Linear(hidden, x, up, bias, activation=op.Activation(mlp.activation, mlp.gated)))
        return hidden

    def _lower_head(self, packed: PackedMatrix | None) -> None:
        """Append to `ops` the final norm of the output rows (tokens whose logits are wanted) and the output head.
        packed: the packed embedding matrix of a tied head; None: the head's own weight is packed."""
        rows = self._memory.get_buffer("rows", self.config.hidden, self._sizes.logit_rows)
        assert self._model.final_norm is not None
        self._lower_norm(self._model.final_norm, rows, self.states, "outputs", self.config.logit_divisor)
        if packed is None:
            packed = self._pack_weight(self._model.embedding if self._model.head is None else self._model.head)
        self.logits = self._memory.allocate_logits(self._sizes.logit_rows, packed.n)
        self.ops.append(op.Linear(self.logits, rows, packed, rows="outputs"))
        if self.config.logit_softcap is not None:
            self.ops.append(op.Scale(self.logits, self.logits, softcap=self.config.logit_softcap, rows="outputs"))

    def _lower_norm(
        self, norm: nn.Module, out: Float32, x: Float32, rows: op.Rows = "tokens", divisor: float = 1.0
    ) -> None:
        """Append to `ops` a norm over the hidden dimension, from `x` to `out`, whose result is divided by `divisor`.
        rows: "tokens" (all tokens of the step) or "outputs" (the tokens whose logits are wanted)."""
        weight, bias = self._read_parameter(norm, "weight"), self._read_optional(norm, "bias")
        for factors in [each for each in (weight, bias) if each is not None]:
            factors /= np.float32(divisor)
        kind: Literal["rms", "layer"] = "rms" if isinstance(norm, modules.RMSNorm) else "layer"
        self.ops.append(op.Norm(out, x, weight, bias, self.config.norm_epsilon, kind, rows))

    def _lower_linear(self, linear: modules.Linear, out: Float32, x: Float32, accumulate: bool = False) -> None:
        """Append to `ops` a linear layer with its bias, from `x` to `out`. accumulate: add to the present values of
        `out`."""
        self.ops.append(op.Linear(out, x, self._pack_weight(linear), self._read_optional(linear, "bias"), accumulate))

    def _lower_row_parallel(self, linear: modules.Linear, x: Float32, norm: nn.Module | None) -> None:
        """Append to `ops` a row-parallel linear layer with input `x`, whose output is all-reduced over tp and added to
        the hidden states. norm: post-norm, applied to the output before it is added, or None."""
        if not self._split and self.config.plain_residual:
            self._lower_linear(linear, self.states, x, accumulate=True)
            return
        partial, bias = self._memory.get_buffer("partial", self.config.hidden), self._read_optional(linear, "bias")
        self.ops.append(op.Linear(partial, x, self._pack_weight(linear), None if self._split else bias))
        self._lower_sum(partial, bias, norm)

    def _lower_sum(self, partial: Float32, bias: Float32 | None, norm: nn.Module | None) -> None:
        """Append to `ops` the residual addition of a sublayer: all-reduce `partial` over tp, add `bias`, apply the
        post-norm and the residual scale, and add the result to the hidden states. partial: [T, H] for T tokens of
        hidden size H. bias: [H], or None. norm: the post-norm's module, or None."""
        if self.config.plain_residual:
            self._sum_over_ranks(partial, self.states, bias)
            return
        self._sum_over_ranks(partial, None, bias)
        if norm is not None:
            self._lower_norm(norm, partial, partial)
        self.ops.append(op.Scale(self.states, partial, self.config.residual_scale, accumulate=True))

    def _sum_over_ranks(self, partial: Float32, residual: Float32 | None = None, bias: Float32 | None = None) -> None:
        """End the current segment (operations between two all-reduces) with an all-reduce of `partial` over tp.
        Afterwards `bias` is added to the sum, and the result is added to `residual` (None: written back to `partial`).
        Does nothing without tp, where the operations themselves add bias and residual. partial, residual: [T, H] for T
        tokens of hidden size H. bias: [H], or None."""
        if self._split:
            self.segments.append(Segment(len(self.ops), partial, residual, bias))

    def _pack_weight(self, module: nn.Module, dtype: str | None = None) -> PackedMatrix:
        """Return the weight of `module`, packed for the kernels' matrix products. dtype: "float32" or "bfloat16" (None:
        the model's dtype)."""
        return self._memory.pack(self._read_matrix(module), dtype)

    def _read_matrix(self, module: nn.Module) -> npt.NDArray[Any]:
        """Return this rank's shard of the weight of `module`, [Y, X] for Y outputs and X inputs, with the rows in the
        order that the kernels need. The array is float32, or uint16 with the bits of bfloat16, and valid until the next
        read.
        """
        name = f"{self._names[id(module)]}.weight"
        # Packing widens bfloat16 in the processor's cache.
        return self._read_shard(name, self._dtype == "bfloat16" or self._weights.is_bfloat16(name))

    def _read_parameter(self, module: nn.Module | None, leaf: str, order: Order | None = None) -> Float32:
        """Return the parameter named `leaf` ("weight" or "bias") of `module`, a norm or linear layer, as a new float32
        array. The weight of a norm that multiplies by 1 + weight is returned with the 1 added. order: index of the
        element of each matrix's bias at each position, for matrices packed in this order: [matrices, positions] is
        returned."""
        values: Float32 = self._read_shard(f"{self._names[id(module)]}.{leaf}", bfloat16=False)
        values = self._memory.copy(values if order is None else values.reshape(-1, order.max() + 1)[:, order])
        if isinstance(module, modules.RMSNorm):
            values += np.float32(module.centre)
        return values

    def _read_optional(self, module: nn.Module | None, leaf: str, order: Order | None = None) -> Float32 | None:
        """Return the parameter named `leaf` of a module as `_read_parameter` does; None if the module is None or lacks
        it."""
        return None if getattr(module, leaf, None) is None else self._read_parameter(module, leaf, order)

    def _read_shard(self, name: str, bfloat16: bool) -> npt.NDArray[Any]:
        """Read this rank's shard of the parameter `name`, with its rows in the order that the kernels need. Return it
        as a float32 array, or if `bfloat16` as a uint16 array of bfloat16 bits. The array is valid until the next
        read."""
        values = self._weights.read(name, torch.bfloat16 if bfloat16 else torch.float32)
        array = (values.view(torch.uint16) if bfloat16 else values).numpy()
        order = find_row_order(self.config, name, len(array), self._kv_heads)
        return array if order is None else np.take(array, order, axis=0)
