"""A micro-batch on one rank: the sizes from which every figure of an operator is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost.engines import ENGINES, AttentionKernel, Engine
from meshwright.spec.chunks import padded_documents
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.work import count_predictions

Starts = tuple[tuple[int, ...], ...]
"""For each sequence, the tokens at which its documents begin."""

Number = Any
"""An int or a float of one layout, or an array of them for many layouts."""

DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""Torch's type name of activations and parameters under a precision; in fp8 training only operands of products are
narrower."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}
"""Bytes of an element by torch's type name."""


class Adapted(NamedTuple):
    """A linear layer with an adapter. layer: name of its operator, such as "attention.qkv"; shares: of the outputs that
    each adapted matrix has."""

    layer: str
    shares: tuple[float, ...]


class LayerKind(NamedTuple):
    """What layers with equal operators have in common. window: most tokens that a query attends to, None for all;
    mixed: True for a mixture of experts; rotates: True if queries and keys have rotary positions; tempered: True if
    queries are multiplied by factors that depend on the position; adapted: linear layers with an adapter; begins: True
    if all parameters before the layer are frozen."""

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
def _adapted_layers(config: ModelConfig) -> dict[int, tuple[Adapted, ...]]:
    """Return the linear layers with an adapter, by index of the transformer layer."""
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
            shares = tuple(entry.model_shape[0] / outputs for entry in adapted)
            found[int(layer)] = (*found.get(int(layer), ()), Adapted(operator, shares))
    return found


class Routed(NamedTuple):
    """Number of token copies in one mixture of experts. arrived: received by this rank over ep; computed: computed by
    its experts, which includes those that the other etp ranks received."""

    arrived: Number
    computed: Number


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on one rank, under one layout or under many that differ only in the sizes of their axes.

    Attributes:
        config: Model.
        layout: Layout; of many, any one: which axes are larger than 1 is the same for all (`structure`).
        rows: Number of sequences.
        whole: Tokens of a sequence.
        tp, cp, ep, etp: Sizes of the axes: numbers of one layout, or integer arrays [layouts].
        dtype: Torch's type name of activations and parameters.
        engine: Training engine whose kernels compute.
        kernel: Attention kernel.
        documents: Average number of documents packed into a sequence.
        eight_bit: True if linear layers of blocks compute in fp8.
        device: "cpu" or "cuda".
        masked: True if sequences pack several documents.
        starts: Tokens at which documents begin in each sequence; None if unknown.
        responses: Most responses with preferences in a sequence; 0 for next-token training.
        routed: Token copies by layer with experts; equal load unless given.
    """

    config: ModelConfig
    layout: Layout
    rows: Number
    whole: int
    tp: Number
    cp: Number
    ep: Number
    etp: Number
    dtype: str = "bfloat16"
    engine: Engine = ENGINES["meshwright"]
    kernel: AttentionKernel = "flash-2"
    documents: float = 1.0
    eight_bit: bool = False
    device: str = "cpu"
    masked: bool = False
    starts: Starts | None = None
    responses: int = 0
    routed: Mapping[int, Routed] = field(default_factory=dict, hash=False)

    @classmethod
    def of(
        cls, config: ModelConfig, layout: Layout, rows: int, sequence: int, *, packed: bool | Starts = False,
        **options: Any,
    ) -> MicroBatch:  # fmt: skip
        """Return a micro-batch of `rows` sequences of `sequence` tokens under one layout. packed: True if sequences
        pack several documents, or the tokens at which they begin in each; options: further fields."""
        starts = None if isinstance(packed, bool) else packed
        masked = any(len(row) > 1 for row in starts) if starts is not None else bool(packed)
        options |= {"masked": masked, "starts": starts if masked else None}
        return cls(config, layout, rows, sequence, layout.tp, layout.cp, layout.ep, layout.etp, **options)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations and parameters."""
        return ITEM_BYTES[self.dtype]

    @property
    def sum_dtype(self) -> str:
        """Torch's type name of master weights and sums of gradients."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def wide(self) -> int:
        """Bytes of an element of sums: at least those of float32."""
        return max(4, self.itemsize)

    @property
    def narrow(self) -> bool:
        """True if activations are narrower than float32."""
        return self.itemsize < 4

    @cached_property
    def tokens(self) -> Number:
        """Tokens of a sequence on this rank of cp."""
        return self.whole // self.cp

    @cached_property
    def slice(self) -> Number:
        """Tokens of a sequence outside of matrix products: sequence parallelism divides them by tp."""
        return self.tokens // self.tp if self.layout.tensor_sequence_parallel else self.tokens

    @cached_property
    def all_tokens(self) -> Number:
        """Tokens of all sequences on this rank of cp."""
        return self.rows * self.tokens

    @cached_property
    def heads(self) -> Number:
        """Query heads on this rank."""
        return self.config.heads // self.tp

    @cached_property
    def kv_heads(self) -> Number:
        """Key-value heads on this rank."""
        return at_least(self.config.kv_heads // self.tp, 1)

    @cached_property
    def qkv_width(self) -> Number:
        """Columns of the product that computes queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.config.head_dim

    @property
    def ring(self) -> bool:
        """True for ring attention."""
        return self.layout.cp > 1 and self.layout.cp_method == "ring"

    @property
    def ulysses(self) -> bool:
        """True for context parallelism by all-to-alls of heads and tokens."""
        return self.layout.cp > 1 and self.layout.cp_method == "ulysses"

    @property
    def expert_parallel(self) -> bool:
        """True if experts are expert-parallel."""
        return self.layout.expert_parallel

    @cached_property
    def routed_tokens(self) -> Number:
        """Number of tokens that this rank routes to experts."""
        return self.rows * (self.tokens // self.tp if self.expert_parallel else self.tokens)

    @cached_property
    def copies(self) -> Number:
        """Number of (token, expert) pairs that this rank routes."""
        return self.routed_tokens * self.config.experts_per_token

    @cached_property
    def expert_width(self) -> Number:
        """Hidden columns of an expert on this rank."""
        return self.config.expert_intermediate // (self.etp if self.expert_parallel else self.tp)

    @cached_property
    def vocabulary(self) -> Number:
        """Rows of the embedding and of the head on a rank of tp; the last ranks may have fewer."""
        return -(-self.config.vocabulary // self.tp)

    @cached_property
    def predictions(self) -> Number:
        """Number of positions on this rank of cp that the head computes."""
        if isinstance(self.rows, np.ndarray):
            return (
                np.array([count_predictions(self.config, rows, self.whole) for rows in self.rows.tolist()]) // self.cp
            )
        return count_predictions(self.config, self.rows, self.tokens)

    def load(self, layer: int) -> Routed:
        """Return the token copies that this rank receives and computes in a layer with experts."""
        if layer in self.routed:
            return self.routed[layer]
        return Routed(self.copies, self.copies * (self.etp if self.expert_parallel else 1))

    @property
    def key_value_copies(self) -> Number:
        """Copies of each key-value head that all-to-alls over cp make, where there are fewer heads than ranks."""
        return at_least(self.cp // self.kv_heads, 1)

    @property
    def grouped(self) -> bool:
        """True if several query heads share a key-value head in the attention kernel."""
        return bool(np.all(self.heads > self.kv_heads * self.key_value_copies))

    # --- masks of the CUDA attention kernels

    def limited(self, window: int | None) -> bool:
        """Return True if some token does not attend to all tokens before it, because of documents or a window. window:
        most tokens that a query attends to, None for all."""
        return self.masked or (window is not None and window < self.whole)

    @property
    def capped(self) -> bool:
        """True if a GPU computes attention tile by tile (`model/tiled_attention.py`): the scores have a softcap, or
        heads have sinks, which otherwise flash attention alone supports."""
        config = self.config
        tiled = config.attention_softcap is not None or (config.attention_sinks and not self._fits_flash)
        return tiled and self.device == "cuda" and self.engine.name == "meshwright"

    @property
    def _fits_flash(self) -> bool:
        """True if queries have a type and size of flash attention."""
        return self.narrow and self.config.head_dim % 8 == 0 and self.config.head_dim <= 256

    @property
    def flash(self) -> bool:
        """True if flash attention supports the queries (`model/varlen_attention.py`): on GPUs, for narrow types and
        head sizes that are multiples of 8 up to 256."""
        return self.device == "cuda" and not self.capped and self._fits_flash

    def varlen(self, window: int | None) -> bool:
        """Return True if attention runs in variable-length kernels, which need no mask (`model/varlen_attention.py`):
        with packed documents, a window or sinks, where flash attention supports the queries. window: most tokens that a
        query attends to, None for all."""
        special = self.limited(window) or self.config.attention_sinks
        return self.flash and not self.ring and not self.config.encoder and special

    def dense_mask(self, window: int | None) -> bool:
        """Return True if CUDA attention reads a mask of all pairs of tokens. window: most tokens that a query attends
        to, None for all."""
        return self.limited(window) and not self.varlen(window) and not self.capped

    def repeats(self, window: int | None) -> bool:
        """Return True if keys and values are copied for every query head, as the CUDA kernel does not support grouped
        queries. window: most tokens that a query attends to, None for all."""
        if self.device != "cuda" or self.ring or self.config.encoder or self.capped:
            return False
        return self.grouped and (self.dense_mask(window) or not self.narrow)

    @property
    def varlen_documents(self) -> int:
        """Number of documents for which variable-length attention is called; where it is not known how many are packed,
        the fewest."""
        if not self.masked:
            return int(self.rows)
        return padded_documents(self.rows if self.starts is None else sum(map(len, self.starts)))

    @property
    def ring_documents(self) -> int:
        """Number of pieces of documents for which variable-length attention is called over one chunk of ring attention,
        of the chunk with the most pieces; where it is not known how many are packed, the fewest."""
        if self.starts is None:
            return padded_documents(self.rows)
        chunk = self.tokens // 2
        return padded_documents(
            max(
                sum(1 + sum(first < start < first + chunk for start in row) for row in self.starts)
                for first in range(0, self.whole, chunk)
            )
        )


def at_least(value: Number, least: int) -> Number:
    """Return a number, or each element of an array, raised to at least `least`."""
    return np.maximum(value, least) if isinstance(value, np.ndarray) else max(value, least)


def at_most(value: Number, most: Number) -> Number:
    """Return a number, or each element of an array, lowered to at most `most`."""
    return np.minimum(value, most) if isinstance(value, np.ndarray) else min(value, most)


def structure(layout: Layout, config: ModelConfig) -> tuple[object, ...]:
    """Return what layouts must have in common to be computed as arrays: recompute, which axes are larger than 1, and if
    query heads share key-value heads."""
    at = MicroBatch.of(config, layout, 1, layout.cp)
    return (
        layout.recompute, layout.tp > 1, layout.tensor_sequence_parallel, layout.cp > 1 and layout.cp_method,
        layout.ep > 1, layout.etp > 1, at.grouped,
    )  # fmt: skip
