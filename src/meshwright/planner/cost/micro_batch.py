"""A micro-batch on one rank: the sizes from which every figure of an operator is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost.engines import ENGINES, AttentionKernel, Engine
from meshwright.spec.chunks import pad_document_count, split_loss_chunks
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.policy import SLICE_LOGITS
from meshwright.spec.work import count_predictions

Starts = tuple[tuple[int, ...], ...]
"""For each sequence, the token positions at which its documents begin."""

Number = Any
"""An int or a float of one layout, or an array of them for many layouts."""

DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""Torch's type name of activations and parameters under each precision; in fp8 training only operands of matrix
products are 8-bit."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}
"""Bytes of an element by torch's type name."""


class Adapted(NamedTuple):
    """A linear layer with an adapter. layer: name of its operator, such as "attention.qkv". matrices: for each adapted
    matrix in the layer, such as q and v in qkv, numbers of output features (of the matrix, of the layer)."""

    layer: str
    matrices: tuple[tuple[int, int], ...]


class LayerKind(NamedTuple):
    """Properties of a transformer layer on which its operators depend; layers of one kind cost the same.

    Attributes:
        window: Most tokens that a query attends to; None for all.
        mixed: True for a mixture of experts.
        rotates: True if queries and keys have rotary positions.
        tempered: True if queries are multiplied by a factor that depends on the position.
        adapted: Linear layers with an adapter.
        begins: True if all parameters before the layer are frozen.
    """

    window: int | None
    mixed: bool
    rotates: bool
    tempered: bool = False
    adapted: tuple[Adapted, ...] = ()
    begins: bool = False


def layer_kind(config: ModelConfig, layer: int) -> LayerKind:
    """Return the kind of the layer with index `layer`."""
    rotates = config.layer_rotation(layer) is not None
    tempered = config.layer_temperature(layer) is not None
    plain = LayerKind(config.layer_window(layer), config.has_experts(layer), rotates, tempered)
    if config.adapter is None:
        return plain
    adapted = _adapted_layers(config)
    return plain._replace(adapted=adapted.get(layer, ()), begins=not any(before < layer for before in adapted))


@lru_cache(maxsize=64)
def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Return the kind of each layer of a model, in order."""
    return tuple(layer_kind(config, layer) for layer in range(config.layers))


def layer_examples(config: ModelConfig) -> dict[LayerKind, int]:
    """Return {layer kind: index of the first layer of this kind} for the layers of a model."""
    return {kind: at for at, kind in reversed([*enumerate(layer_kinds(config))])}


@lru_cache(maxsize=64)
def _adapted_layers(config: ModelConfig) -> dict[int, tuple[Adapted, ...]]:
    """Return {layer index: its linear layers with an adapter}."""
    tensors = {tensor.name: tensor for tensor in parameter_table(config).tensors}
    found: dict[int, tuple[Adapted, ...]] = {}
    for name, second in tensors.items():
        module, _, part = name.rpartition(".adapter.")
        if part == "b" and module.startswith("layers."):
            _, layer, operator = module.split(".", 2)
            whole, adapted = (  # of one of the experts
                [entry for entry in tensor.entries if entry.expert is None or entry.expert[0] == 0]
                for tensor in (tensors[f"{module}.weight"], second)
            )
            outputs = sum(entry.model_shape[0] for entry in whole)
            matrices = tuple((entry.model_shape[0], outputs) for entry in adapted)
            found[int(layer)] = (*found.get(int(layer), ()), Adapted(operator, matrices))
    return found


class Routed(NamedTuple):
    """Numbers of token copies of one mixture-of-experts layer on a rank. Each token has one copy for each expert that
    it chooses. arrived: copies that this rank receives over ep; computed: copies that its experts compute, including
    copies received by the other ranks of its etp group."""

    arrived: Number
    computed: Number


@dataclass(frozen=True)
class MicroBatch:
    """Sizes and settings of a micro-batch on one rank, from which operators compute their costs; for one layout, or for
    many layouts that differ only in the sizes of their axes.

    Attributes:
        config: Model.
        layout: Layout; for many layouts any one of them, as the same axes are larger than 1 in all (`structure`).
        rows: Number of sequences.
        sequence: Tokens of a sequence.
        tp, cp, ep, etp: Sizes of the axes; integer arrays [layouts] for many layouts.
        recompute: Activation checkpointing, such as "full"; an array of texts [layouts] for many layouts.
        dtype: Torch's type name of activations and parameters.
        engine: Training engine whose kernels compute.
        kernel: Attention kernel, such as "flash-2".
        documents: Average number of documents packed into a sequence.
        eight_bit: True if the linear layers of transformer layers compute in fp8.
        device: "cpu" or "cuda".
        masked: True if sequences pack several documents.
        starts: For each sequence, the token positions at which documents begin; None if unknown.
        responses: Most responses with preferences (DPO, KTO) in a sequence; 0 for next-token training.
        gathers_again: True if linear layers that overlap with all-gathers save their tokens before it.
        routed: Token copies by index of the layer with experts; layers that are missing have equal load on all ranks.
        operators: Cache of the operators' lists and of properties, filled by `blocks` and `dimensions`.
    """

    config: ModelConfig
    layout: Layout
    rows: Number
    sequence: int
    tp: Number
    cp: Number
    ep: Number
    etp: Number
    recompute: Any
    dtype: str = "bfloat16"
    engine: Engine = ENGINES["meshwright"]
    kernel: AttentionKernel = "flash-2"
    documents: float = 1.0
    eight_bit: bool = False
    device: str = "cpu"
    masked: bool = False
    starts: Starts | None = None
    responses: int = 0
    gathers_again: bool = False
    routed: Mapping[int, Routed] = field(default_factory=dict, hash=False)
    operators: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, config: ModelConfig, layout: Layout, rows: int, sequence: int, *, packed: bool | Starts = False,
        **options: Any,
    ) -> MicroBatch:  # fmt: skip
        """Return a micro-batch of `rows` sequences of `sequence` tokens under one layout.

        packed: False if each sequence is one document, True if sequences pack several documents at unknown positions,
        or for each sequence the token positions at which documents begin. options: further fields of `MicroBatch`."""
        starts = None if isinstance(packed, bool) else packed
        masked = any(len(row) > 1 for row in starts) if starts is not None else bool(packed)
        options |= {"masked": masked, "starts": starts if masked else None}
        axes = layout.tp, layout.cp, layout.ep, layout.etp
        return cls(config, layout, rows, sequence, *axes, layout.recompute, **options)

    @cached_property
    def recomputed(self) -> MicroBatch:
        """A micro-batch whose forward saves, without recompute, what the recomputed forward of this one saves."""
        layout, again = self.layout.with_(recompute="none"), self.layout.recompute == "selective"
        return replace(self, layout=layout, recompute="none", gathers_again=again)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations and parameters."""
        return ITEM_BYTES[self.dtype]

    @property
    def wide(self) -> int:
        """Bytes of an element of sums, such as accumulated gradients: 4 (float32), or 8 in float64 training."""
        return max(4, self.itemsize)

    @property
    def narrow(self) -> bool:
        """True if activations have a 16-bit type."""
        return self.itemsize < 4

    @cached_property
    def tokens(self) -> Number:
        """Number of tokens of a sequence that this cp rank has."""
        return self.sequence // self.cp

    @cached_property
    def slice(self) -> Number:
        """Number of tokens of a sequence that this rank has in norms and the residual stream: with sequence
        parallelism, `tokens` divided by tp."""
        return self.tokens // self.tp if self.layout.tensor_sequence_parallel else self.tokens

    @cached_property
    def all_tokens(self) -> Number:
        """Number of tokens of all sequences that this cp rank has."""
        return self.rows * self.tokens

    @cached_property
    def heads(self) -> Number:
        """Number of query heads of this tp rank."""
        return self.config.heads // self.tp

    @cached_property
    def kv_heads(self) -> Number:
        """Number of key-value heads of this tp rank, at least 1."""
        return at_least(self.config.kv_heads // self.tp, 1)

    @property
    def stream_bytes(self) -> Number:
        """Bytes of the residual stream on this rank, and of a message to another pipeline stage."""
        return self.rows * self.slice * self.config.hidden * self.itemsize

    @property
    def ring(self) -> bool:
        """True under ring attention (context parallelism by KV blocks sent around a ring)."""
        return self.layout.cp > 1 and self.layout.cp_method == "ring"

    @property
    def ulysses(self) -> bool:
        """True under Ulysses context parallelism (all-to-alls that exchange heads for tokens)."""
        return self.layout.cp > 1 and self.layout.cp_method == "ulysses"

    @cached_property
    def vocabulary(self) -> Number:
        """Number of vocabulary entries of the embedding and the head on a tp rank, rounded up; the last ranks may have
        fewer."""
        return -(-self.config.vocabulary // self.tp)

    @cached_property
    def predictions(self) -> Number:
        """Number of positions on this cp rank for which the head computes logits."""
        if isinstance(self.rows, np.ndarray):
            return (
                np.array([count_predictions(self.config, rows, self.sequence) for rows in self.rows.tolist()])
                // self.cp
            )
        return count_predictions(self.config, self.rows, self.tokens)

    @property
    def loss_chunks(self) -> list[int]:
        """Numbers of tokens of the chunks in which the loss is computed."""
        return split_loss_chunks(self.predictions, self.vocabulary, self.device)

    def loss_slice(self, tokens: int) -> int:
        """Return the number of tokens of a chunk whose logits are in float32 at once. tokens: tokens of the chunk."""
        return tokens if self.device != "cpu" else min(tokens, max(1, SLICE_LOGITS // self.vocabulary))

    @property
    def grouped(self) -> bool:
        """True if several query heads share a key-value head in the attention kernel."""
        return bool(np.all(self.heads > self.kv_heads * at_least(self.cp // self.kv_heads, 1)))

    @property
    def varlen_documents(self) -> int:
        """Number of documents in one call of variable-length attention; if unknown, the smallest possible number."""
        if not self.masked:
            return int(self.rows)
        return pad_document_count(self.rows if self.starts is None else sum(map(len, self.starts)))

    @property
    def ring_documents(self) -> int:
        """Number of sequences that one variable-length attention call gets under ring attention. Each cp rank holds two
        chunks of every sequence, and each part of a document in a chunk counts as a sequence; the largest number of
        parts is returned. One part for each sequence if the document lengths are unknown."""
        if self.starts is None:
            return pad_document_count(self.rows)
        chunk = self.tokens // 2
        counts = (
            sum(1 + sum(first < start < first + chunk for start in row) for row in self.starts)
            for first in range(0, self.sequence, chunk)
        )
        return pad_document_count(max(counts))


def at_least(value: Number, least: int) -> Number:
    """Return max(value, least) for a number, or elementwise for an array."""
    return np.maximum(value, least) if isinstance(value, np.ndarray) else max(value, least)


def at_most(value: Number, most: Number) -> Number:
    """Return min(value, most) for a number, or elementwise for an array."""
    return np.minimum(value, most) if isinstance(value, np.ndarray) else min(value, most)


def structure(layout: Layout, config: ModelConfig) -> tuple[object, ...]:
    """Return a key that is equal for layouts whose costs can be computed together as arrays. They agree in the set of
    axes larger than 1, and in whether query heads share key-value heads."""
    batch = MicroBatch.of(config, layout, 1, layout.cp)
    return (
        layout.tp > 1, layout.tensor_sequence_parallel, layout.cp > 1 and layout.cp_method,
        layout.ep > 1, layout.etp > 1, batch.grouped,
    )  # fmt: skip
