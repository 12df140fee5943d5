"""Dimensions and properties of a layer on one rank, from which sizes and conditions in the planner's tables are made
(`tables.py`): those that are sums of products or plain attributes are listed in `dimensions.toml`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter, eq, gt, ne
from typing import Any

from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number, at_least, at_most, layer_kind
from meshwright.planner.cost.tables import compute_size, holds, parse_factor
from meshwright.spec.policy import ACCELERATOR_TILE
from meshwright.spec.work import keys_per_token
from meshwright.toml import read_packaged_toml

_TABLE = read_packaged_toml("planner/cost/dimensions.toml")

Sizes = Mapping[str, Number] | None
Flags = Mapping[str, object] | None


class Dimensions(dict[str, Number]):
    """Values of the sizes that the planner's tables name, for one kind of layer on one rank: {name: value}. A name is a
    dimension, such as "tokens", or a formula of dimensions, such as "2 tokens width" (a product). Each value is
    computed on first use.

    more: values of further dimensions; flags: {property: True if it holds} of properties that are not the layer's.
    Attribute `true`: names of all properties that hold, which conditions in the tables test."""

    def __init__(self, batch: MicroBatch, kind: LayerKind, more: Sizes = None, flags: Flags = None) -> None:
        super().__init__(more or {})
        self.batch, self.kind, key = batch, kind, ("dimensions", kind)
        if key not in batch.operators:
            batch.operators[key] = Dimensions(batch, kind) if more or flags else self
        self._shared: Dimensions = batch.operators[key]  # without `more` and `flags`
        alone = self._shared is self
        found = find_properties(batch, kind) if alone else flags or {}
        self.true: frozenset[str] = frozenset() if alone else self._shared.true
        if found:  # else the same set, whose hash is known
            self.true = self.true.union(name for name, value in found.items() if value)

    def __missing__(self, name: str) -> Number:
        """Compute the value of a dimension, or of a formula such as "2 tokens width". Raises `KeyError` for an unknown
        dimension."""
        if not name.isidentifier():
            found = compute_size(name, self)
        elif self._shared is not self:
            found = self._shared[name]
        elif name in _SIZES:
            found = compute_size(next(size for size, condition in _SIZES[name] if holds(condition, self.true)), self)
        elif name in _FIELDS:
            found = _FIELDS[name](self.batch)
        else:
            found = FORMULAS[name](self)
        self[name] = found
        return found


def layer_dimensions(batch: MicroBatch, layer: int, more: Sizes = None, flags: Flags = None) -> Dimensions:
    """Return the dimensions of the layer with index `layer`, with the known numbers of token copies of its mixture of
    experts (`MicroBatch.routed`). more, flags: as for `Dimensions`."""
    kind, sizes = layer_kind(batch.config, layer), dict(more or {})
    if layer in batch.routed:
        routed = batch.routed[layer]
        sizes |= routed._asdict() | {"most_copies": max(routed.computed, Dimensions(batch, kind)["copies"])}
    return Dimensions(batch, kind, sizes, flags)


def count_flash_lines(batch: MicroBatch, heads: Number, length: Number, documents: int) -> Number:
    """Return the number of query rows, summed over heads and sequences, for which flash attention's backward allocates
    workspaces. The kernel pads each sequence to a multiple of 128 (flash_attn/flash_api.cpp, `mha_bwd`). With variable
    lengths (`mha_varlen_bwd`) it adds 128 for each document instead.

    heads: query heads on this rank; length: tokens of a sequence in the call; documents: number of documents in a
    variable-length call, 0 for a call of fixed length."""
    return heads * (batch.rows * length + 128 * documents if documents else batch.rows * (-(-length // 128) * 128))


def _compute_seen(sizes: Dimensions) -> float:
    """Return the mean number of keys for which the attention kernel computes the scores of a query. A decoder's kernel
    skips masked keys; an encoder's kernel computes all keys and applies a mask."""
    batch, config = sizes.batch, sizes.batch.config
    length = batch.sequence if config.encoder else sizes["document"]
    return keys_per_token(length, sizes.kind.window, not config.encoder, config.window_chunks)


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


def _count_outputs(sizes: Dimensions, product: str) -> int:
    """Return the number of output features, on this rank, of one linear layer of latent attention. product: name of the
    linear layer, such as "qkv"."""
    config = sizes.batch.config
    assert config.latent is not None
    return config.latent.products(config.hidden, sizes["heads"], config.head_dim)[product][0]


_FIELDS = {name: attrgetter(path) for name, path in _TABLE["fields"].items()}
_SIZES = {
    name: [tuple(map(str.strip, each.partition("?")[::2])) for each in ([found] if isinstance(found, str) else found)]
    for name, found in _TABLE["sizes"].items()
}
"""{dimension: [(size, condition)], of which the first that applies counts}."""

FORMULAS: dict[str, Callable[[Dimensions], Number]] = {
    "kv_copies": lambda sizes: at_least(sizes["cp"] // sizes["kv_heads"], 1),  # ranks with a copy, under Ulysses
    # Buffers of a gather of tokens: more than one sequence is copied from the parts of the ranks.
    "gather_copies": lambda sizes: at_most(sizes["rows"], 2),
    "padded_lines": lambda sizes: -(-sizes["core_tokens"] // 32) * 32,
    "flash_head": lambda sizes: -(-sizes["head_dim"] // 32) * 32,
    "flash_lines": lambda sizes: count_flash_lines(
        sizes.batch, sizes["core_heads"], sizes.batch.sequence,
        sizes.batch.varlen_documents if "varlen" in sizes.true else 0,
    ),
    "document": lambda sizes: max(1, round(sizes.batch.sequence / sizes.batch.documents)),  # tokens, in the mean
    "seen": _compute_seen,
    "piece": lambda sizes: sizes["sequence"] / sizes["2 cp"] if sizes.batch.ring else sizes["sequence"],
    # Attention in plain torch on an accelerator: queries of a tile; keys to which any of them attends, in the mean;
    # tiles, summed over heads and sequences.
    "tile_queries": lambda sizes: min(ACCELERATOR_TILE[0], sizes["document"]),
    "tile_keys": lambda sizes: keys_per_tile(sizes["document"], sizes["tile_queries"], sizes.kind.window),
    "tiles": lambda sizes: at_least(
        sizes["all_tokens heads tile_keys"] // ACCELERATOR_TILE[1], -(-sizes["tokens"] // sizes["tile_queries"])
    ),
    "tile_lines": lambda sizes: sizes["all_tokens heads"] / sizes["tiles"],
    "tile_operands": lambda sizes: sizes["all_tokens heads head + all_tokens kv_heads head"] / sizes["tiles"],
    "latent_qkv": lambda sizes: _count_outputs(sizes, "qkv"),
    "latent_up": lambda sizes: _count_outputs(sizes, "latent_up"),
    "per_expert": lambda sizes: sizes["arriving"] / sizes["experts_here"],  # copies, under equal load
    "labels": lambda sizes: len(sizes.batch.config.labels),
}  # fmt: skip
"""{dimension: function that computes it from others}."""


def find_properties(batch: MicroBatch, kind: LayerKind) -> dict[str, bool]:
    """Return {property: True if it holds} for a layer of one kind. Properties are yes-or-no facts that conditions in
    the planner's tables test: of the model ("gated"), the layout ("ring"), recompute ("full"), the device ("cuda") and
    the engine.

    Some names: "encoder", "dense", "mixture": kind of the layer; "front": a layer whose mixture is expert-parallel, so
    that only the operators before the mixture are compiled. "summed": outputs are all-reduced or reduce-scattered over
    tp. "fits_flash": flash attention supports the element type (16 bits) and the head size (a multiple of 8, up to
    256)."""
    config, window = batch.config, kind.window
    mixture = ("front" if batch.layout.expert_parallel else "mixture") if kind.mixed else "dense"
    found = {
        **{name: _test_attribute(text, {"batch": batch, "kind": kind}) for name, text in _TABLE["properties"].items()},
        "encoder" if config.encoder else mixture: True, batch.layout.recompute: True, config.router: True,
        config.norm: True, f"{config.head}_head": True,
        "windowed": window is not None and window < batch.sequence, "padded_values": config.value_dim < config.head_dim,
        "fits_flash": batch.narrow and config.head_dim % 8 == 0 and config.head_dim <= 256,
        "learned_positions": config.positions == "learned" and config.max_positions > 0,
        "adapted_experts": any(".experts." in one.layer for one in kind.adapted),
        **{f"adapted_{one.layer.replace('.', '_')}": True for one in kind.adapted},
    }  # fmt: skip
    true = {name for name, value in found.items() if value}
    for name, condition in _TABLE["conditions"].items():
        found[name] = holds(condition, true)
        true.update([name] if found[name] else [])
    return found


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {"==": eq, "!=": ne, ">": gt, "": lambda found, _: bool(found)}


@cache
def _parse_test(text: str) -> tuple[list[str], Callable[[Any, Any], bool], str | float]:
    """Parse a test of an attribute, such as "batch.config.norm == rmsnorm", into its path, comparison and value."""
    path, sign, value = f"{text}  ".split(" ", 2)
    return path.split("."), _COMPARISONS[sign], parse_factor(value.strip())


def _test_attribute(text: str, owners: Mapping[str, Any]) -> bool:
    """Return True if an attribute is true, or compares with a word or number as `text` says, such as
    "batch.config.norm == rmsnorm". The attributes of None are None. owners: {first name of the path: its object}."""
    (owner, *names), compare, value = _parse_test(text)
    found = owners[owner]
    for name in names:
        found = None if found is None else getattr(found, name)
    return compare(found, value)


def element_types(dtype: str) -> dict[str, str]:
    """Return {element type of `SavedTensor`, such as "wide": torch's type name}. dtype: torch's type name of
    activations and parameters."""
    wide = dtype if dtype == "float64" else "float32"
    return {"x": dtype, "wide": wide, "index": "int64", "int32": "int32", "bool": "bool"}
