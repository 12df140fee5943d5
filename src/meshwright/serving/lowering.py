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
from meshwright.kernels.structures import PackedMatrix
from meshwright.model import layers as modules
from meshwright.model.attention import Attention as AttentionModule
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.block import Block
from meshwright.model.experts import Mixture
from meshwright.model.rope import RotaryTable, find_half_rotation_order, pad_pairs
from meshwright.model.transformer import Transformer
from meshwright.parallel.expert import AllToAllTokenDispatcher
from meshwright.parallel.tensor import TensorParallel
from meshwright.serving.step_limits import StepLimits
from meshwright.serving.weights import RankWeights
from meshwright.spec.block_tables import block_tables
from meshwright.spec.rope_scaling import Rotation

Float32 = npt.NDArray[np.float32]


@dataclass(slots=True)
class Segment:
    """Consecutive kernel operations of a model, up to index `end` (exclusive) in its list, and the tensor-parallel
    all-reduce that follows them.

    partial: buffer [T, H] that is all-reduced over tp; None: no all-reduce. bias: [H], added to the sum; None: 0.
    residual: buffer [T, H] to which the result is added; None: the result is written to `partial`.
    """

    end: int
    partial: Float32 | None = None
    residual: Float32 | None = None
    bias: Float32 | None = None


class Lowering:
    """Builder of the list of kernel operations that compute one rank's pipeline stage on a CPU, with all buffers and
    packed weights that they use. Construction reads the weights, packs them and allocates the KV pool.

    kernels: compiled library that will execute the operations. weights: reader of this rank's weights. mesh: gives the
    axes tp, pp, ep and etp. dtype: "float32" or "bfloat16", of packed weights and KV cache. limits: sizes of KV pool
    and buffers.

    Attributes:
        ops: The operations, in order.
        segments: Slices of `ops` between all-reduces over tp; a single one without tp.
        states: Hidden states [T, H], input and output of the stage; T: the token budget of a step.
        logits: Logits [R, V / P] of this rank's vocabulary slice, P tensor-parallel ranks; None unless this is the last
            stage.
        nbytes: {kind: bytes}: `weights` (embeddings, norms, biases), `packed` (weight matrices), `workspace`, `kv`
            (cache), `logits`.
    """

    def __init__(self, kernels: Kernels, weights: RankWeights, mesh: Mesh, dtype: str, limits: StepLimits) -> None:
        """Read and pack the weights, allocate all buffers and build the list of operations; arguments: see the
        class."""
        self.config, self._stage = weights.config, weights.stage
        self._kernels, self._weights, self._dtype, self._limits = kernels, weights, dtype, limits
        self._split = not mesh.tp.trivial
        self.ops: OpList = kernels.create_op_list()
        self.segments: list[Segment] = []
        self.nbytes = dict.fromkeys(("weights", "packed", "workspace", "kv", "logits"), 0)
        kv_heads = max(1, self.config.kv_heads // mesh.tp.size)
        self._order, self._value_rows = find_half_rotation_order(self.config), kv_heads * self.config.head_dim
        self._tables = block_tables(self.config, mesh.pp.size)
        self._caches = [self._make_cache(kv_heads) for _ in range(self._tables.depths[self._stage.index])]
        self._buffers: dict[str, Float32] = {}
        self._experts_workspace: op.ExpertsWorkspace | None = None
        axes = AxisOperations(
            tensor=TensorParallel(mesh.tp, sequence_parallel=False),
            dispatcher=AllToAllTokenDispatcher(mesh.ep, mesh.etp) if mesh.layout.expert_parallel else None,
        )
        self._first_expert = 0
        if axes.dispatcher is not None:
            # Later blocks of ep x etp ranks hold copies of the same experts, which must not add to the sum again.
            copies = mesh.tp.rank >= mesh.ep.size * mesh.etp.size
            self._first_expert = self.config.experts if copies else mesh.ep.rank * (self.config.experts // mesh.ep.size)
        self._first_token = mesh.tp.rank * -(-self.config.vocabulary // mesh.tp.size)
        self._model = Transformer(self.config, axes=axes, device="meta", stages=[self._stage])
        self._names = {id(module): name for name, module in self._model.named_modules()}
        self._rotations: dict[Rotation | None, tuple[Float32, Float32] | tuple[None, None]] = {None: (None, None)}
        for rotation in self.config.rotations(self._stage.layers):
            tables = RotaryTable(rotation, torch.float32).get_table(limits.max_length, torch.device("cpu"))
            tables = pad_pairs(tables, self.config.head_dim)
            cosine, sine = (self._copy_weight(table[: limits.max_length].numpy()) for table in tables)
            self._rotations[rotation] = cosine, sine
        self.states = self._get_buffer("states", self.config.hidden)
        self.logits: Float32 | None = None
        with reserve_pool([each for pair in self._caches for each in pair if limits.resident]):
            self._lower_stage()  # reads and packs the weights meanwhile
        kernels.end_packing()

    def _make_cache(self, kv_heads: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Allocate one pair of KV-cache arrays (keys, values). It serves one layer of each block table: layers with
        different tables can share arrays, because a KV block belongs to only one table. kv_heads: key-value heads of
        this rank."""
        dtype, size = np.float32 if self._dtype == "float32" else np.uint16, self.config.head_dim
        keys, values = (
            self._kernels.allocate(shape, dtype)
            for shape in op.LayerCache.compute_shapes(self._limits.blocks, kv_heads, size)
        )
        self.nbytes["kv"] += keys.nbytes + values.nbytes
        return keys, values

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
        table = packed or self._copy_weight(self._read_shard("embedding.weight", self._dtype == "bfloat16"))
        self.ops.append(op.Embed(self.states, table, first=self._first_token))
        self._sum_over_ranks(self.states)
        if (factor := self.config.embedding_factor) != 1:
            factor = torch.tensor(factor, dtype=getattr(torch, self._dtype)).item()  # as the model rounds it
            self.ops.append(op.Scale(self.states, self.states, factor))
        if self._model.positions is not None:
            positions = self._copy_weight(self._read_shard("positions.weight", self._dtype == "bfloat16"))
            self.ops.append(op.Embed(self.states, positions, ids="positions", accumulate=True))
        return packed

    def _lower_block(self, block: Block, layer: int) -> None:
        """Append to `ops` the operations of the transformer block with index `layer`. block: the block's module."""
        assert isinstance(block.attention, AttentionModule)  # others: `find_kernel_gap`
        attended = self._lower_attention(block.attention, self._lower_input(block.attention_norm), layer)
        self._lower_row_parallel(block.attention.output, attended, block.attention_post_norm)
        normed = self._lower_input(block.mlp_norm)
        if isinstance(block.mlp, Mixture):
            self._lower_mixture(block.mlp, normed, block.mlp_post_norm)
        else:
            self._lower_row_parallel(block.mlp.down, self._lower_up(block.mlp, normed), block.mlp_post_norm)

    def _lower_input(self, norm: nn.Module | None) -> Float32:
        """Append to `ops` the norm before a sublayer; return the buffer with the sublayer's input [T, H]. norm: the
        norm's module; None: there is none, and the hidden states are the input."""
        if norm is None:
            return self.states
        normed = self._get_buffer("normed", self.config.hidden)
        self._lower_norm(norm, normed, self.states)
        return normed

    def _lower_attention(self, attention: AttentionModule, x: Float32, layer: int) -> Float32:
        """Append to `ops` QKV projection, RoPE, KV-cache write and attention of the layer with index `layer`; return
        the buffer of the attention output [T, N D]. attention: the layer's module. x: input [T, H]."""
        config = self.config
        heads, kv_heads, size = attention.heads, attention.kv_heads, attention.size
        qkv = self._get_buffer("qkv", (heads + 2 * kv_heads) * size)
        self._lower_linear(attention.qkv, qkv, x)
        q_norm, k_norm = (self._read_optional(each, "weight") for each in (attention.query_norm, attention.key_norm))
        if config.projection_norm:
            ends = heads * size, (heads + kv_heads) * size
            for begin, end, weight in ((0, ends[0], q_norm), (*ends, k_norm)):
                part = qkv[:, begin:end]
                assert weight is not None
                self.ops.append(op.Norm(part, part, weight, None, config.norm_epsilon))
            q_norm = k_norm = None
        table, place = self._tables.layers[layer]
        cache = op.LayerCache(*self._caches[place], size, table)
        cosine, sine = self._rotations[self.config.layer_rotation(layer)]
        self.ops.append(op.RopeStore(qkv, cache, heads, cosine, sine, q_norm, k_norm, config.norm_epsilon))
        out, window = self._get_buffer("attention", heads * size), config.layer_window(layer) or 0
        softcap = config.attention_softcap or 0.0
        self.ops.append(op.Attention(out, qkv, cache, heads, config.score_scale, window, softcap))
        return out

    def _lower_mixture(self, mixture: Mixture, x: Float32, norm: nn.Module | None) -> None:
        """Append to `ops` a mixture-of-experts layer (routed and shared experts); the result is added to the hidden
        states. mixture: the layer's module. x: normed input [T, H]. norm: post-norm of the result, or None.
        """
        config, experts = self.config, mixture.experts
        width = experts.down.weight.shape[1]
        if self._experts_workspace is None:
            self._experts_workspace = op.ExpertsWorkspace(
                self._limits.token_budget, config.experts, config.experts_per_token, config.hidden, width
            )
            self.nbytes["workspace"] += self._experts_workspace.nbytes
        added = not self._split and self._adds_directly(norm)
        out = self.states if added else self._get_buffer("partial", config.hidden)
        router_bias = self._read_optional(mixture.router, "bias")
        router = self._pack_weight(mixture.router, dtype="float32")
        up, down = (self._pack_weight(stacked, count=experts.held) for stacked in (experts.up, experts.down))
        self.ops.append(
            op.Experts(
                out, x, router, up, down, self._experts_workspace, config.experts_per_token, config.activation,
                config.router, router_bias, config.normalise_choice, config.routed_scale, self._first_expert,
                accumulate=added,
            )
        )  # fmt: skip
        if mixture.shared is not None:
            self._lower_shared(mixture, mixture.shared, x, out)
        if not added:
            self._lower_sum(out, None, norm)

    def _lower_shared(self, mixture: Mixture, shared: modules.FeedForward, x: Float32, out: Float32) -> None:
        """Append to `ops` the shared expert of a mixture-of-experts layer (`mixture`) with its sigmoid gate, if it has
        one; the result is added to `out` [T, H]. shared: the expert's MLP. x: normed input [T, H]."""
        hidden = self._lower_up(shared, x)
        if mixture.shared_gate is not None:  # a factor per token, applied before the down projection
            self.ops.append(op.Gate(hidden, x, self._read_parameter(mixture.shared_gate, "weight").reshape(-1)))
        self._lower_linear(shared.down, out, hidden, accumulate=True)

    def _lower_up(self, mlp: modules.FeedForward, x: Float32) -> Float32:
        """Append to `ops` the up projection and activation of the MLP `mlp`; return the buffer of the result, [T, F].
        x: normed input [T, H]."""
        up = self._get_buffer("up", mlp.up.weight.shape[0])
        self._lower_linear(mlp.up, up, x)
        hidden = self._get_buffer("hidden", mlp.down.weight.shape[1])
        self.ops.append(op.Activation(hidden, up, mlp.activation, mlp.gated))
        return hidden

    def _lower_head(self, packed: PackedMatrix | None) -> None:
        """Append to `ops` the final norm of the output rows (tokens whose logits are wanted) and the output head.
        packed: the packed embedding matrix of a tied head; None: the head's own weight is packed."""
        rows = self._get_buffer("rows", self.config.hidden, self._limits.logits)
        self.ops.append(op.TakeRows(rows, self.states))
        assert self._model.final_norm is not None
        self._lower_norm(self._model.final_norm, rows, rows, "outputs", self.config.logit_divisor)
        if packed is None:
            packed = self._pack_weight(self._model.embedding if self._model.head is None else self._model.head)
        self.logits = self._kernels.allocate((self._limits.logits, packed.n), np.float32)
        self.nbytes["logits"] += self.logits.nbytes
        self.ops.append(op.Linear(self.logits, rows, packed, rows="outputs"))
        if self.config.logit_softcap is not None:
            self.ops.append(op.Scale(self.logits, self.logits, softcap=self.config.logit_softcap, rows="outputs"))

    def _lower_norm(
        self, norm: nn.Module, out: Float32, x: Float32, rows: op.Rows = "tokens", divisor: float = 1.0
    ) -> None:
        """Append to `ops` a norm over the hidden dimension, from `x` to `out`, whose result is divided by `divisor`.
        rows: "tokens" (all T tokens of the step) or "outputs" (the R tokens whose logits are wanted)."""
        weight, bias = self._read_parameter(norm, "weight"), self._read_optional(norm, "bias")
        for factors in (weight, bias) if divisor != 1 else ():
            if factors is not None:
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
        if not self._split and self._adds_directly(norm):
            self._lower_linear(linear, self.states, x, accumulate=True)
            return
        partial, bias = self._get_buffer("partial", self.config.hidden), self._read_optional(linear, "bias")
        self.ops.append(op.Linear(partial, x, self._pack_weight(linear), None if self._split else bias))
        self._lower_sum(partial, bias, norm)

    def _adds_directly(self, norm: nn.Module | None) -> bool:
        """Return True if a sublayer's output is added to the residual stream as it is, without post-norm or residual
        scale. norm: the sublayer's post-norm, or None."""
        return norm is None and self.config.residual_scale == 1

    def _lower_sum(self, partial: Float32, bias: Float32 | None, norm: nn.Module | None) -> None:
        """Append to `ops` the residual addition of a sublayer: all-reduce `partial` [T, H] over tp, add `bias`, apply
        the post-norm and the residual scale, and add the result to the hidden states. bias: [H], or None. norm: the
        post-norm's module, or None."""
        if self._adds_directly(norm):
            self._sum_over_ranks(partial, self.states, bias)
            return
        self._sum_over_ranks(partial, None, bias)
        if norm is not None:
            self._lower_norm(norm, partial, partial)
        self.ops.append(op.Scale(self.states, partial, self.config.residual_scale, accumulate=True))

    def _sum_over_ranks(self, partial: Float32, residual: Float32 | None = None, bias: Float32 | None = None) -> None:
        """End the current segment (operations between two all-reduces) with an all-reduce of `partial` [T, H] over tp.
        Afterwards `bias` [H] is added to the sum, and the result is added to `residual` [T, H]; None: the result is
        written back to `partial`. Does nothing without tp, where the operations themselves add bias and residual."""
        if self._split:
            self.segments.append(Segment(len(self.ops), partial, residual, bias))

    def _pack_weight(self, module: nn.Module, dtype: str | None = None, count: int = 1) -> PackedMatrix:
        """Return the weight of `module`, packed for the kernels' matrix products. dtype: "float32" or "bfloat16" (None:
        that of the model). count: number of experts' matrices that are stacked along dim 0."""
        name = f"{self._names[id(module)]}.weight"
        # Packing widens bfloat16 in the processor's cache.
        values = self._read_shard(name, self._dtype == "bfloat16" or self._weights.is_bfloat16(name))
        values = self._order_features(name, values)
        if count > 1:
            values = values.reshape(count, -1, values.shape[-1])
        packed = self._kernels.pack(values, dtype or self._dtype)
        self.nbytes["packed"] += packed.buffer.nbytes
        return packed

    def _read_parameter(self, module: nn.Module | None, leaf: str) -> Float32:
        """Return the parameter named `leaf` ("weight" or "bias") of `module`, a norm or linear layer, as a new float32
        array. The weight of a norm that multiplies by 1 + weight is returned with the 1 added."""
        name = f"{self._names[id(module)]}.{leaf}"
        values = self._copy_weight(self._order_features(name, self._read_shard(name, bfloat16=False)))
        if isinstance(module, modules.RMSNorm):
            values += np.float32(module.centre)
        return values

    def _order_features(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the weight rows `values` of the parameter `name` with the features of queries and keys permuted to the
        order of half-rotations (`find_half_rotation_order`), for RoPE in the kernels; other parameters are returned as
        they are."""
        if self._order is None or not any(part in name for part in (".qkv.", ".query_norm.", ".key_norm.")):
            return values
        ordered, size = values.copy(), self.config.head_dim
        count = len(values) - (self._value_rows if ".qkv." in name else 0)
        ordered[:count] = (
            values[:count].reshape(-1, size, *values.shape[1:])[:, self._order].reshape(ordered[:count].shape)
        )
        return ordered

    def _read_optional(self, module: nn.Module | None, leaf: str) -> Float32 | None:
        """Return the parameter named `leaf` of a module as float32; None if the module is None or lacks it."""
        return None if getattr(module, leaf, None) is None else self._read_parameter(module, leaf)

    def _read_shard(self, name: str, bfloat16: bool) -> npt.NDArray[Any]:
        """Read this rank's shard of the parameter `name`. Return it as a float32 array, or if `bfloat16` as a uint16
        array of bfloat16 bits. The array is valid until the next read."""
        if bfloat16:
            return self._weights.read(name, torch.bfloat16).view(torch.uint16).numpy()
        return self._weights.read(name, torch.float32).numpy()

    def _copy_weight(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy of the weight array `values`, a view that the next read of a parameter overwrites, and count
        its bytes as `weights`."""
        self.nbytes["weights"] += values.nbytes
        return values.copy()

    def _get_buffer(self, name: str, width: int, rows: int | None = None) -> Float32:
        """Return the workspace buffer named `name`, float32 [rows, width]. It is allocated once and shared by all
        layers. rows: None: the token budget."""
        rows = self._limits.token_budget if rows is None else rows
        key = f"{name}.{width}"
        if key not in self._buffers:
            self._buffers[key] = self._kernels.allocate((rows, width), np.float32)
            self._buffers[key][...] = 0
            self.nbytes["workspace"] += self._buffers[key].nbytes
        return self._buffers[key]
