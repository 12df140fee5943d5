"""Dimensions and properties of a layer on one rank, from which sizes and conditions in the planner's tables are made
(`tables.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from meshwright.planner.cost.micro_batch import ITEM_BYTES, LayerKind, MicroBatch, Number, at_least
from meshwright.planner.cost.tables import compute_size
from meshwright.spec.latent_attention import LatentAttention
from meshwright.spec.policy import ACCELERATOR_TILE
from meshwright.spec.work import keys_per_token

RANDOM_STATE = 632
"""Numbers of eight bytes in the state of a CPU's random numbers."""


class Dimensions(dict[str, Number]):
    """Values of the sizes that the planner's tables name, for one kind of layer on one rank: {name: value}. A name is a
    dimension, such as "tokens", or a formula of dimensions, such as "2 tokens width" (a product). Each value is
    computed on first use.

    more: values of further dimensions, such as `computed` and `arrived`, the token copies of a mixture (`Routed`)."""

    def __init__(self, batch: MicroBatch, kind: LayerKind, more: Mapping[str, Number] | None = None) -> None:
        super().__init__(more or {})
        self.batch, self.kind = batch, kind

    def __missing__(self, name: str) -> Number:
        """Compute the value of a dimension by `FORMULAS`, or of a formula such as "2 tokens width". Raises `KeyError`
        for an unknown dimension."""
        found = FORMULAS[name](self.batch, self.kind) if name.isidentifier() else compute_size(name, self)
        self[name] = found
        return found


def core_heads(batch: MicroBatch) -> tuple[Number, Number]:
    """Return (query heads, key-value heads) that the attention kernel of one rank computes. Under Ulysses these are the
    heads after the all-to-all."""
    if not batch.ulysses:
        return batch.heads, batch.kv_heads
    return batch.heads // batch.cp, batch.kv_heads * batch.key_value_copies // batch.cp


def _lines(batch: MicroBatch, kind: LayerKind) -> Number:
    """Return the number of queries for which the attention kernel saves a log-sum-exp, for one head of one sequence.
    PyTorch's memory-efficient kernel (used for masks and float32) rounds it up to a multiple of 32
    (aten/src/ATen/native/transformers/cuda)."""
    length = batch.sequence if batch.ulysses else batch.tokens
    cuda = batch.device == "cuda" and not batch.ring
    return -(-length // 32) * 32 if cuda and (batch.dense_mask(kind.window) or not batch.narrow) else length


def count_flash_lines(batch: MicroBatch, heads: Number, length: Number, documents: int) -> Number:
    """Return the number of query rows, summed over heads and sequences, for which flash attention's backward allocates
    workspaces. The kernel pads each sequence to a multiple of 128 (flash_attn/flash_api.cpp, `mha_bwd`). With variable
    lengths (`mha_varlen_bwd`) it adds 128 for each document instead.

    heads: query heads on this rank; length: tokens of a sequence in the call; documents: number of documents in a
    variable-length call, 0 for a call of fixed length."""
    return heads * (batch.rows * length + 128 * documents if documents else batch.rows * (-(-length // 128) * 128))


def _mask_rows(batch: MicroBatch) -> Number:
    """Return the number of attention masks of a micro-batch: one for each sequence, or 1 if all sequences share it."""
    return batch.rows if batch.masked else 1


def _visible_rows(batch: MicroBatch, kind: LayerKind) -> Number:
    """Return the number of sequences for which CPU attention saves a vector with the first visible key of each query; 1
    if all sequences share one vector."""
    windowed = kind.window is not None and kind.window < batch.sequence
    return batch.rows if windowed and batch.config.window_chunks else _mask_rows(batch)


def _attended(batch: MicroBatch) -> int:
    """Return the mean number of tokens of a document."""
    return max(1, round(batch.sequence / batch.documents))


def _seen(batch: MicroBatch, kind: LayerKind) -> float:
    """Return the mean number of keys for which the attention kernel computes the scores of a query. A decoder's kernel
    skips masked keys; an encoder's kernel computes all keys and applies a mask."""
    config = batch.config
    length = batch.sequence if config.encoder else _attended(batch)
    return keys_per_token(length, kind.window, not config.encoder, config.window_chunks)


def _core_value(batch: MicroBatch, kind: LayerKind) -> int:
    """Return the number of features of a value vector in the attention kernel. The engine `meshwright` pads the values
    of latent attention to the size of queries, except on a CPU without context parallelism."""
    if batch.engine.name == "meshwright" and (batch.device == "cuda" or batch.ring or batch.ulysses):
        return max(batch.config.head_dim, batch.config.value_dim)
    return batch.config.value_dim


def keys_per_tile(sequence: int, tile: int, window: int | None) -> float:
    """Return the mean number of keys for which tiled attention computes the scores of a query: the keys to which any
    query of the same tile attends. sequence: tokens; tile: queries of a tile; window: most tokens that a query attends
    to, None for all."""
    total = 0
    for start in range(0, sequence, tile):
        stop = min(sequence, start + tile)
        oldest = 0 if window is None else max(0, start - window + 1)
        total += (stop - start) * (stop - oldest)
    return total / sequence


def _tile_keys(batch: MicroBatch, kind: LayerKind) -> float:
    """Return the mean number of keys for which attention written in plain torch on an accelerator computes the scores
    of a query: the keys to which any query of the same tile (block of queries) attends."""
    seen = _attended(batch)
    return keys_per_tile(seen, min(ACCELERATOR_TILE[0], seen), kind.window)


def _tiles(batch: MicroBatch, kind: LayerKind) -> Number:
    """Return the number of tiles (blocks of queries) into which attention written in plain torch is split on an
    accelerator, summed over heads and sequences."""
    scores = batch.all_tokens * batch.heads * _tile_keys(batch, kind)
    return at_least(scores // ACCELERATOR_TILE[1], -(-batch.tokens // min(ACCELERATOR_TILE[0], _attended(batch))))


def _latent(batch: MicroBatch) -> LatentAttention:
    """Return the model's sizes of latent attention. The model must have latent attention."""
    assert batch.config.latent is not None
    return batch.config.latent


def _count_outputs(batch: MicroBatch, product: str) -> int:
    """Return the number of output features, on this rank, of one linear layer of latent attention. product: name of the
    linear layer, such as "qkv"."""
    return _latent(batch).products(batch.config.hidden, batch.heads, batch.config.head_dim)[product][0]


Formula = Callable[[MicroBatch, LayerKind], Any]

_BATCH = (
    "rows", "tokens", "slice", "sequence", "all_tokens", "predictions", "responses", "heads", "kv_heads", "copies",
    "arriving", "expert_width", "vocabulary", "wide", "tp", "cp", "ep", "etp",
)  # fmt: skip
_MODEL = "hidden", "experts", "token_types"


def _read_field(path: str) -> Formula:
    """Return a function (micro-batch, layer kind) -> value that reads a field of the micro-batch. path: the field, such
    as "rows" or "config.hidden"."""
    return lambda batch, kind: attrgetter(path)(batch)


FORMULAS: dict[str, Formula] = {
    **{name: _read_field(name) for name in _BATCH},
    **{name: _read_field(f"config.{name}") for name in _MODEL},
    # Bytes of an element of activations (`wide`: of sums) and of what is sent to experts; of the loss for a logit.
    "x": lambda batch, kind: batch.itemsize,
    "sent": lambda batch, kind: 1 if batch.eight_bit and batch.engine.eight_bit_activations else batch.itemsize,
    "loss_bytes": lambda batch, kind: batch.engine.loss_bytes,
    # Numbers of the residual stream; 1 with tp, else 0; float32 numbers of a vector that a norm saves, those that an
    # encoder's norm saves in the type of activations; vectors of its parameters.
    "stream": lambda batch, kind: batch.rows * batch.slice * batch.config.hidden,
    "summed": lambda batch, kind: int(batch.layout.tp > 1),
    "statistics": lambda batch, kind: 2 if batch.config.norm == "layernorm" else 1,
    "saved_statistics": lambda batch, kind: 2 if batch.narrow else 1,
    "norm_vectors": lambda batch, kind: 1 + batch.config.norm_bias,
    # Attention: features of a head; `core_*`: sizes of its kernel, under Ulysses those after the all-to-all, with
    # `core_keys` key-value heads after their repetition and `core_all` heads of queries, keys and values.
    "qkv": lambda batch, kind: batch.qkv_width,
    "head": lambda batch, kind: batch.config.head_dim,
    "value": lambda batch, kind: batch.config.value_dim,
    "inner": lambda batch, kind: batch.heads * batch.config.head_dim,
    "kv_copies": lambda batch, kind: batch.key_value_copies,
    "core_heads": lambda batch, kind: core_heads(batch)[0],
    "core_keys": lambda batch, kind: core_heads(batch)[0 if batch.repeats(kind.window) else 1],
    "core_all": lambda batch, kind: core_heads(batch)[0] + 2 * core_heads(batch)[1],
    "core_tokens": lambda batch, kind: batch.sequence if batch.ulysses else batch.tokens,
    "core_head": lambda batch, kind: max(batch.config.head_dim, batch.config.value_dim),
    "core_value": _core_value,
    "lines": _lines,
    "flash_head": lambda batch, kind: -(-batch.config.head_dim // 32) * 32,
    "flash_lines": lambda batch, kind: count_flash_lines(
        batch, core_heads(batch)[0], batch.sequence, batch.varlen_documents if batch.varlen(kind.window) else 0
    ),
    "mask_rows": lambda batch, kind: _mask_rows(batch),
    "visible_rows": _visible_rows,
    "random_state": lambda batch, kind: RANDOM_STATE,
    "seen": _seen,
    "piece": lambda batch, kind: batch.sequence / (2 * batch.cp) if batch.ring else batch.sequence,
    "tile_keys": _tile_keys,
    "tiles": _tiles,
    "tile_lines": lambda batch, kind: batch.all_tokens * batch.heads / _tiles(batch, kind),
    "tile_operands": lambda batch, kind: batch.all_tokens * (batch.heads + batch.kv_heads) * batch.config.head_dim
    / _tiles(batch, kind),
    "query_rank": lambda batch, kind: _latent(batch).query_rank,
    "latent_rank": lambda batch, kind: _latent(batch).rank,
    "latent_qkv": lambda batch, kind: _count_outputs(batch, "qkv"),
    "latent_up": lambda batch, kind: _count_outputs(batch, "latent_up"),
    # A dense MLP and a shared expert: hidden features, and outputs of the up projection with its gate.
    "gates": lambda batch, kind: 2 if batch.config.gated else 1,
    "width": lambda batch, kind: batch.config.intermediate // batch.tp,
    "up": lambda batch, kind: batch.config.intermediate // batch.tp * (2 if batch.config.gated else 1),
    "shared_width": lambda batch, kind: batch.config.shared_intermediate // batch.tp,
    "shared_up": lambda batch, kind: 2 * (batch.config.shared_intermediate // batch.tp),
    # A mixture of experts: tokens that the rank routes (of a sequence, of all); copies that arrive under equal load, at
    # an expert; its up projection; its slice of the second bias.
    "mixture_tokens": lambda batch, kind: batch.slice if batch.expert_parallel else batch.tokens,
    "routed": lambda batch, kind: batch.routed_tokens,
    "chosen": lambda batch, kind: batch.config.experts_per_token,
    "experts_here": lambda batch, kind: batch.config.experts // batch.ep,
    "per_expert": lambda batch, kind: batch.arriving / (batch.config.experts // batch.ep),
    "expert_up": lambda batch, kind: 2 * batch.expert_width,
    "expert_bias": lambda batch, kind: batch.config.hidden // (batch.etp if batch.expert_parallel else batch.tp),
    # Both ends.
    "words": lambda batch, kind: batch.config.vocabulary,
    "labels": lambda batch, kind: len(batch.config.labels),
    "positions": lambda batch, kind: batch.config.max_positions,
}  # fmt: skip
"""{dimension: its value for a micro-batch and a kind of layer}; those without a comment are fields of both or of the
model."""


def list_properties(batch: MicroBatch, kind: LayerKind) -> frozenset[str]:
    """Return the names of the properties that hold for a layer of one kind. A property is a yes-or-no fact that
    conditions in the planner's tables test, such as "gated". Results are cached in `batch.operators`."""
    key = "properties", kind
    if key not in batch.operators:
        batch.operators[key] = frozenset(name for name, value in find_properties(batch, kind).items() if value)
    found: frozenset[str] = batch.operators[key]
    return found


def find_properties(batch: MicroBatch, kind: LayerKind) -> dict[str, bool]:
    """Return {property: True if it holds} for a layer of one kind. Properties are yes-or-no facts that conditions in
    the planner's tables test: of the model ("gated"), the layout ("ring"), recompute ("full"), the device ("cuda") and
    the engine.

    Some names: "encoder", "dense", "mixture": kind of the layer; "front": a layer whose mixture is expert-parallel, so
    that only the operators before the mixture are compiled. "summed": outputs are all-reduced or reduce-scattered over
    tp; "gathers": inputs are all-gathered (sequence parallelism). "cuda_attention": PyTorch's CUDA kernels compute
    attention. "repeated": keys and values are repeated for every query head. "rotated": queries and keys are copies,
    made by rotary positions or norms."""
    config, layout, window, engine = batch.config, batch.layout, kind.window, batch.engine
    cuda = batch.device == "cuda"
    mixture = ("front" if batch.expert_parallel else "mixture") if kind.mixed else "dense"
    return {
        "encoder" if config.encoder else mixture: True, layout.recompute: True, config.router: True, config.norm: True,
        f"{config.head}_head": True, "summed": layout.tp > 1,
        "gathers": layout.tp > 1 and layout.tensor_sequence_parallel, "ring": batch.ring, "ulysses": batch.ulysses,
        "split_sequence": layout.cp > 1, "expert_parallel": batch.expert_parallel, "several_ep": layout.ep > 1,
        "several_etp": layout.etp > 1, "cuda": cuda, "cuda_attention": cuda and not batch.ring,
        "narrow": batch.narrow, "masked": batch.masked, "capped": batch.capped, "flash": batch.flash,
        "varlen": batch.varlen(window), "limited": batch.limited(window),
        "windowed": window is not None and window < batch.sequence,
        "pre_norms": config.pre_norms, "post_norms": config.post_norms, "zero_centred": config.zero_centred_norms,
        "scaled_residual": config.residual_scale != 1, "latent": config.latent is not None,
        "latent_queries": config.latent is not None and config.latent.query_rank is not None,
        "padded_values": config.value_dim < config.head_dim, "rotates": kind.rotates,
        "rotated": kind.rotates or config.query_key_norm, "query_key_norm": config.query_key_norm,
        "projection_norm": config.projection_norm, "rotated_norm": config.rotated_norm, "tempered": kind.tempered,
        "qkv_bias": config.qkv_bias, "output_bias": config.output_bias, "sinks": config.attention_sinks,
        "grouped": batch.grouped, "repeated": batch.repeats(window),
        "dense_mask": cuda and not batch.ring and batch.dense_mask(window),
        {"scores": "unfused", "tiled": "tiled"}.get(batch.kernel, "fused"): True,
        "gated": config.gated, "relu": config.activation == "relu", "mlp_bias": config.mlp_bias,
        "adapter": config.adapter is not None, "packed": bool(config.adapter and config.adapter.packed),
        "masked_adapter": bool(config.adapter and config.adapter.dropout),
        "dora": bool(config.adapter and config.adapter.kind == "dora"),
        "adapted_experts": any(".experts." in one.layer for one in kind.adapted),
        **{f"adapted_{one.layer.replace('.', '_')}": True for one in kind.adapted}, "mixed": kind.mixed,
        "shared": config.shared_intermediate > 0,
        "shared_gate": config.shared_gate, "normalised": config.normalise_choice,
        "router_loss": bool(config.router_loss),
        "router_bias": config.router_bias, "wide_router": config.router == "sigmoid" and batch.narrow,
        "routed_input": config.routed_input, "clamped": config.swiglu_limit is not None,
        "labelled": bool(config.labels), "scaled_embedding": config.embedding_factor != 1,
        "embedding_norm": config.embedding_norm, "token_types": config.token_types > 0,
        "learned_positions": config.positions == "learned" and config.max_positions > 0,
        "divided_logits": config.logit_divisor != 1, "capped_logits": bool(config.logit_softcap),
        "pairs": batch.responses > 0, "dropout": engine.dropout, "stops_early": engine.stops_early,
        "core_selective": engine.selective == "core", "overlaps_tensor": engine.overlaps_tensor is not None,
        "overlaps_products": engine.overlaps_tensor == "products",
    }  # fmt: skip


def element_types(dtype: str) -> dict[str, str]:
    """Return {element type of `SavedTensor`, such as "wide": torch's type name}. dtype: torch's type name of
    activations and parameters."""
    wide = dtype if dtype == "float64" else "float32"
    return {"x": dtype, "wide": wide, "index": "int64", "int32": "int32", "bool": "bool"}


def element_bytes(dtype: str, kind: str) -> int:
    """Return the bytes of an element. dtype: torch's type name of activations; kind: element type of `SavedTensor`."""
    return ITEM_BYTES[element_types(dtype)[kind]]
