"""Dimensions and properties of a layer on one rank, from which sizes and conditions in the planner's tables are made
(`tables.py`): those that are sums of products or plain attributes are listed in `dimensions.toml`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from meshwright.planner.cost.micro_batch import ITEM_BYTES, LayerKind, MicroBatch, Number, at_least, at_most
from meshwright.planner.cost.tables import compute_size, holds
from meshwright.spec.policy import ACCELERATOR_TILE
from meshwright.spec.work import keys_per_token
from meshwright.toml import read_packaged_toml

_TABLE = read_packaged_toml("planner/cost/dimensions.toml")


class Dimensions(dict[str, Number]):
    """Values of the sizes that the planner's tables name, for one kind of layer on one rank: {name: value}. A name is a
    dimension, such as "tokens", or a formula of dimensions, such as "2 tokens width" (a product). Each value is
    computed on first use.

    more: values of further dimensions, such as `computed` and `arrived`, the token copies of a mixture (`Routed`)."""

    def __init__(self, batch: MicroBatch, kind: LayerKind, more: Mapping[str, Number] | None = None) -> None:
        super().__init__(more or {})
        self.batch, self.kind, key = batch, kind, ("dimensions", kind)
        if key not in batch.operators:
            batch.operators[key] = Dimensions(batch, kind) if more else self
        self._shared: Dimensions = batch.operators[key]  # without `more`

    def __missing__(self, name: str) -> Number:
        """Compute the value of a dimension, or of a formula such as "2 tokens width". Raises `KeyError` for an unknown
        dimension."""
        if not name.isidentifier():
            found = compute_size(name, self)
        elif self._shared is not self:
            found = self._shared[name]
        elif name in _SIZES:
            true = list_properties(self.batch, self.kind)
            found = compute_size(next(size for size, condition in _SIZES[name] if holds(condition, true)), self)
        else:
            found = FORMULAS[name](self.batch, self.kind)
        self[name] = found
        return found


def core_heads(batch: MicroBatch) -> tuple[Number, Number]:
    """Return (query heads, key-value heads) that the attention kernel of one rank computes. Under Ulysses these are the
    heads after the all-to-all."""
    if not batch.ulysses:
        return batch.heads, batch.kv_heads
    return batch.heads // batch.cp, batch.kv_heads * batch.key_value_copies // batch.cp


def count_flash_lines(batch: MicroBatch, heads: Number, length: Number, documents: int) -> Number:
    """Return the number of query rows, summed over heads and sequences, for which flash attention's backward allocates
    workspaces. The kernel pads each sequence to a multiple of 128 (flash_attn/flash_api.cpp, `mha_bwd`). With variable
    lengths (`mha_varlen_bwd`) it adds 128 for each document instead.

    heads: query heads on this rank; length: tokens of a sequence in the call; documents: number of documents in a
    variable-length call, 0 for a call of fixed length."""
    return heads * (batch.rows * length + 128 * documents if documents else batch.rows * (-(-length // 128) * 128))


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


def _count_outputs(batch: MicroBatch, product: str) -> int:
    """Return the number of output features, on this rank, of one linear layer of latent attention. product: name of the
    linear layer, such as "qkv"."""
    config = batch.config
    assert config.latent is not None
    return config.latent.products(config.hidden, batch.heads, config.head_dim)[product][0]


Formula = Callable[[MicroBatch, LayerKind], Any]


def _read_field(path: str) -> Formula:
    """Return a formula that reads an attribute of the micro-batch. path: such as "config.hidden"."""
    read = attrgetter(path)
    return lambda batch, kind: read(batch)


_SIZES = {
    name: [tuple(map(str.strip, each.partition("?")[::2])) for each in ([found] if isinstance(found, str) else found)]
    for name, found in _TABLE["sizes"].items()
}
"""{dimension: [(size, condition)], of which the first that applies counts}."""

FORMULAS: dict[str, Formula] = {
    **{name: _read_field(owner + name) for owner, names in _TABLE["fields"].items() for name in names.split()},
    **{name: _read_field(path) for name, path in _TABLE["renamed"].items()},
    # Bytes of an element of what is sent to experts.
    "sent": lambda batch, kind: 1 if batch.eight_bit and batch.engine.eight_bit_activations else batch.itemsize,
    "core_heads": lambda batch, kind: core_heads(batch)[0],
    "core_kv_heads": lambda batch, kind: core_heads(batch)[1],
    "core_head": lambda batch, kind: max(batch.config.head_dim, batch.config.value_dim),
    "core_value": _core_value,
    # Buffers of a gather of tokens: more than one sequence is copied from the parts of the ranks.
    "gather_copies": lambda batch, kind: at_most(batch.rows, 2),
    "padded_lines": lambda batch, kind: -(-(batch.sequence if batch.ulysses else batch.tokens) // 32) * 32,
    "flash_head": lambda batch, kind: -(-batch.config.head_dim // 32) * 32,
    "flash_lines": lambda batch, kind: count_flash_lines(
        batch, core_heads(batch)[0], batch.sequence,
        batch.varlen_documents if "varlen" in list_properties(batch, kind) else 0,
    ),
    "seen": _seen,
    "piece": lambda batch, kind: batch.sequence / (2 * batch.cp) if batch.ring else batch.sequence,
    "tile_keys": _tile_keys,
    "tiles": _tiles,
    "tile_lines": lambda batch, kind: batch.all_tokens * batch.heads / _tiles(batch, kind),
    "tile_operands": lambda batch, kind: batch.all_tokens * (batch.heads + batch.kv_heads) * batch.config.head_dim
    / _tiles(batch, kind),
    "latent_qkv": lambda batch, kind: _count_outputs(batch, "qkv"),
    "latent_up": lambda batch, kind: _count_outputs(batch, "latent_up"),
    "per_expert": lambda batch, kind: batch.arriving / (batch.config.experts // batch.ep),  # copies, under equal load
    "labels": lambda batch, kind: len(batch.config.labels),
}  # fmt: skip
"""{dimension: its value for a micro-batch and a kind of layer}."""

DIMENSIONS = frozenset({*FORMULAS, *_SIZES})
"""Names of all dimensions."""


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
    tp. "fits_flash": flash attention supports the element type (16 bits) and the head size (a multiple of 8, up to
    256)."""
    config, layout, window, adapter = batch.config, batch.layout, kind.window, batch.config.adapter
    mixture = ("front" if batch.layout.expert_parallel else "mixture") if kind.mixed else "dense"
    owners = {"batch": batch, "kind": kind}
    paths = ((name, *path.split(".", 1)) for name, path in _TABLE["properties"].items())
    found = {
        **{name: bool(attrgetter(path)(owners[owner])) for name, owner, path in paths},
        "encoder" if config.encoder else mixture: True, layout.recompute: True, config.router: True, config.norm: True,
        f"{config.head}_head": True, {"scores": "unfused", "tiled": "tiled"}.get(batch.kernel, "fused"): True,
        "cuda": batch.device == "cuda", "meshwright": batch.engine.name == "meshwright",
        "windowed": window is not None and window < batch.sequence, "softcap": config.attention_softcap is not None,
        "fits_flash": batch.narrow and config.head_dim % 8 == 0 and config.head_dim <= 256,
        "summed": layout.tp > 1, "sequence_parallel": layout.tensor_sequence_parallel,
        "split_sequence": layout.cp > 1, "several_ep": layout.ep > 1, "several_etp": layout.etp > 1,
        "scaled_residual": config.residual_scale != 1, "scaled_embedding": config.embedding_factor != 1,
        "divided_logits": config.logit_divisor != 1, "relu": config.activation == "relu",
        "latent_queries": config.latent is not None and config.latent.query_rank is not None,
        "padded_values": config.value_dim < config.head_dim,
        "learned_positions": config.positions == "learned" and config.max_positions > 0,
        "packed": bool(adapter and adapter.packed), "masked_adapter": bool(adapter and adapter.dropout),
        "dora": bool(adapter and adapter.kind == "dora"),
        "adapted_experts": any(".experts." in one.layer for one in kind.adapted),
        **{f"adapted_{one.layer.replace('.', '_')}": True for one in kind.adapted},
        "core_selective": batch.engine.selective == "core",
        "overlaps_products": batch.engine.overlaps_tensor == "products",
    }  # fmt: skip
    for name, condition in _TABLE["conditions"].items():
        found[name] = holds(condition, {each for each, value in found.items() if value})
    return found


def element_types(dtype: str) -> dict[str, str]:
    """Return {element type of `SavedTensor`, such as "wide": torch's type name}. dtype: torch's type name of
    activations and parameters."""
    wide = dtype if dtype == "float64" else "float32"
    return {"x": dtype, "wide": wide, "index": "int64", "int32": "int32", "bool": "bool"}


def element_bytes(dtype: str, kind: str) -> int:
    """Return the bytes of an element. dtype: torch's type name of activations; kind: element type of `SavedTensor`."""
    return ITEM_BYTES[element_types(dtype)[kind]]
