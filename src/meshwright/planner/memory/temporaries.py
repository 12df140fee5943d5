"""Temporary tensors in addition to saved activations, in forward and backward, by the rows of `tensors.toml`;
workspaces of attention, and of the weights and masks of adapters.

They follow the engine's code: a variable keeps its tensor until the next one is assigned, so that the tensors of two
tiles are allocated at once. Checked against PyTorch's allocator on a CPU; workspaces of CUDA kernels follow their
sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from meshwright.planner.cost.adapters import PACKED
from meshwright.planner.cost.blocks import layer_operators
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number, layer_kind
from meshwright.planner.memory.attention_tiles import TiledAttention, backward_bytes, choose_tiles
from meshwright.planner.memory.dimensions import list_dimensions, list_properties
from meshwright.planner.memory.snapshot import NamedSnapshot, Saved, Temporary, activation, message, workspace
from meshwright.planner.memory.tables import Item, compute_size, holds, load_table, parse_items, select_items
from meshwright.spec.adapter_config import BLOCK
from meshwright.spec.chunks import split_loss_chunks
from meshwright.spec.policy import SLICE_LOGITS, UNPACKED_AT_ONCE


class _Row(NamedTuple):
    """A snapshot in `tensors.toml`. name: after its unit's; tensors: temporaries with their sizes; freed, held:
    beginnings of the names of saved activations freed before and made by then."""

    name: str
    tensors: tuple[Item, ...]
    freed: tuple[str, ...]
    held: tuple[str, ...]


@cache
def _rows(section: str, properties: frozenset[str]) -> list[_Row]:
    """Return the snapshots of a pass in `tensors.toml` that exist. section: such as "attention"."""
    table, found = load_table("tensors.toml"), []
    for row in table[section]:
        if holds((row["if"],) if "if" in row else (), properties):
            tensors, freed, held = (
                select_items(parse_items(row.get(key, ()), table["groups"]), properties)
                for key in ("tensors", "freed", "held")
            )
            found.append(_Row(row["name"], tensors, *(tuple(item.name for item in items) for items in (freed, held))))
    return found


@dataclass(frozen=True, slots=True)
class Pass:
    """Sizes of a pass through a unit, from which its snapshots follow.

    Attributes:
        dimensions, properties: Of the layer or of the loss, as in `tensors.toml`.
        saved: Saved activations to which the rows' `freed` and `held` refer.
        prefix: Beginning of their names that the rows leave out, such as "layers.3.".
    """

    dimensions: Mapping[str, Number]
    properties: frozenset[str]
    saved: Sequence[Saved] = ()
    prefix: str = ""

    @classmethod
    def of_layer(
        cls, batch: MicroBatch, layer: int, saved: Sequence[Saved] = (), *, split: bool = False, **dimensions: Number
    ) -> Pass:
        """Return a pass through the layer with index `layer`. split: only input gradients are computed; dimensions:
        further ones."""
        kind, computed = layer_kind(batch.config, layer), batch.load(layer).computed
        copies = max(computed, batch.copies)
        return cls(
            list_dimensions(batch, kind)
            | {"split": int(split), "computed": computed, "most_copies": copies} | dimensions,
            list_properties(batch, kind) | ({"split"} if split else set()), saved, f"layers.{layer}.",
        )  # fmt: skip

    def snapshots(self, section: str) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, temporaries) for each snapshot of a section that exists: saved activations freed before
        it as an entry of negative bytes, those made by then, and its tensors."""
        for row in _rows(section, self.properties):
            freed, held = (tuple(self.prefix + name for name in names) for names in (row.freed, row.held))
            found = [activation(each.name, each.bytes) for each in self.saved if each.name.startswith(held)]
            if size := sum(each.bytes for each in self.saved if freed and each.name.startswith(freed)):
                found.append(activation("freed", -size))
            for item in row.tensors:
                category, _, name = item.name.rpartition(": ")
                found.append(Temporary(category or "activations", name, int(compute_size(item.value, self.dimensions))))
            yield row.name, found


# --- attention


def attention_workspaces(batch: MicroBatch, kind: LayerKind) -> Iterator[Temporary]:
    """Yield the temporaries inside the backward of attention's kernel. kind: kind of the layer."""
    if batch.ring:
        yield from ring_backward(batch)
        return
    heads, kv_heads = batch.heads, batch.kv_heads
    if batch.ulysses:
        heads, kv_heads = heads // batch.cp, kv_heads * batch.key_value_copies // batch.cp
    if batch.repeats(kind.window):
        kv_heads = heads
    if batch.device == "cuda" and not batch.capped:
        yield from fused_backward(batch, heads, kv_heads, kind.window)
    elif not batch.config.encoder or batch.capped:  # an encoder's kernel is PyTorch's own
        yield from tiled_backward(batch, heads, kv_heads, kind)


def fused_backward(batch: MicroBatch, heads: int, kv_heads: int, window: int | None) -> Iterator[Temporary]:
    """Yield the workspaces of PyTorch's CUDA attention backward (aten/src/ATen/native/transformers/cuda).

    heads, kv_heads: numbers on this rank; window: most tokens that a query attends to, None for all. Flash attention
    (flash_attn/flash_api.cpp, `mha_bwd`) rounds up to 128 queries and 32 elements of a head; with variable lengths
    (`mha_varlen_bwd`) it has 128 queries more for each document; the memory-efficient kernel is in
    attention_backward.cu.
    """
    length = batch.sequence
    if batch.narrow and not batch.dense_mask(window):
        documents = batch.varlen_documents if batch.varlen(window) else 0
        for name, size in flash_backward(batch, heads, kv_heads, length, documents).items():
            yield workspace(name, size)
        return
    yield workspace("result times its gradient", batch.rows * heads * (-(-length // 32) * 32) * 4)
    wide = "upcast gradient of queries" if batch.narrow else "elements of result times its gradient"
    yield workspace(wide, batch.rows * heads * length * batch.config.head_dim * 4)


def flash_backward(batch: MicroBatch, heads: int, kv_heads: int, length: int, documents: int) -> dict[str, int]:
    """Return {name: bytes} of the workspaces of flash attention's backward in a 16-bit type.

    heads, kv_heads: numbers on this rank; length: tokens of a sequence in the call; documents: number of documents in a
    variable-length call, 0 for a call of fixed length.
    """
    size = batch.config.head_dim
    lines = heads * (batch.rows * length + 128 * documents if documents else batch.rows * (-(-length // 128) * 128))
    found = {"result times its gradient": lines * 4, "upcast gradient of queries": lines * (-(-size // 32) * 32) * 4}
    if kv_heads < heads:
        found["gradients of keys and values of every query head"] = 4 * batch.rows * length * heads * size
    return found


def tiled_backward(batch: MicroBatch, heads: int, kv_heads: int, kind: LayerKind) -> Iterator[Temporary]:
    """Yield the temporaries of tiled attention's backward: masks, tiles, gradient sums of keys and values. heads,
    kv_heads: numbers on this rank; kind: kind of the layer."""
    config, apart = batch.config, batch.layout.cp > 1
    found = backward_bytes(
        TiledAttention(
            choose_tiles(batch, heads, kv_heads, batch.sequence), batch.rows, kv_heads, config.head_dim, batch.itemsize,
            batch.wide, (kind.rotates or config.query_key_norm) and not apart, apart,
            config.attention_softcap is not None, kind.window, batch.starts, batch.masked and batch.starts is None,
        )
    )  # fmt: skip
    if found.masks:
        yield workspace("tile masks", found.masks)
    yield workspace("attention tiles", found.tiles)
    yield workspace("tile keys and values", found.keys_and_values)


def ring_backward(batch: MicroBatch) -> Iterator[Temporary]:
    """Yield the temporaries of ring attention's backward: gradient sums, KV blocks being sent and received, and the
    tensors of a tile or of the kernel's results."""
    heads, kv_heads, size, x, wide = batch.heads, batch.kv_heads, batch.config.head_dim, batch.itemsize, batch.wide
    of_head, half = batch.rows * batch.tokens * size, batch.tokens // 2
    yield workspace("result times its gradient", batch.rows * heads * batch.tokens * wide)
    yield workspace("upcast gradient of queries", heads * of_head * wide)
    yield message("upcast gradients of keys and values", 6 * kv_heads * of_head * wide)
    passing = 2 * kv_heads * of_head * x * (1 + min(2, batch.cp - 1))
    results = (heads + 2 * kv_heads) * of_head * x  # after the last ring step
    if batch.flash:  # a call with half of the tokens, and with documents copies of what is concatenated
        copied = batch.masked and batch.rows > 1
        inside = flash_backward(batch, heads, kv_heads, half, batch.ring_documents if batch.masked else 0)
        log_sums = batch.rows * heads * half * wide
        work = results // 2 + sum(inside.values()) + log_sums + copied * (3 * heads + 2 * kv_heads) * of_head // 2 * x
    else:
        cut = choose_tiles(batch, heads, kv_heads, half)
        tile = 2 * wide if x == wide else 3 * wide + x  # a narrow product and its copy in the wide type
        before = (2 * wide if x == wide else wide + x) if cut.before else 0
        columns = size * x * (3 if before else 2) + wide
        work = cut.lines * (half * (tile + before) + columns) + cut.queries**2 * wide
        if x < wide:
            work += cut.rows * cut.kv_heads * batch.tokens * size * wide
    if passing + work >= results:
        yield message("keys and values in transfer", passing)
        yield workspace("attention tiles", work)
    else:
        yield activation("gradients of queries, keys and values", results)


# --- adapters


def unpacked_weight(batch: MicroBatch, layer: int, name: str = "", result: int = 0) -> list[Temporary]:
    """Return the temporary of a layer's largest weight that is dequantized for its matrix product, with the buffer of
    the dequantization or the product's result, whichever is larger; an empty list if weights are not quantized.

    name: only weights whose operator's name begins so; result: bytes of the product's result.
    """
    if batch.config.adapter is None or batch.config.adapter.packed is None:
        return []
    found = (one for one in layer_operators(batch, layer) if one.name.startswith(PACKED) and one.name.startswith(name))
    sizes = [one.shape[1] * one.shape[2] for each in found for one in each.operations[:3] if one.shape]
    most = max(sizes, default=0)
    once = min(most, UNPACKED_AT_ONCE[batch.device] * BLOCK)
    return [workspace("unpacked weight", int(most * batch.itemsize + max(result, 6 * once)))]


MASK_BYTES = 12
"""Bytes of each element while the mask of an adapter's dropout is computed: three int32 numbers."""


def adapter_masks(batch: MicroBatch, layer: int, name: str = "") -> list[Temporary]:
    """Return the temporaries of the largest dropout mask of a layer's adapters; nothing without dropout. name:
    beginning of the names of the adapted products."""
    if batch.config.adapter is None or not batch.config.adapter.dropout:
        return []
    found = (
        one for each in layer_operators(batch, layer) for one in each.operations if one.name.endswith(".adapter.a")
    )
    sizes = [one.shape[0] * one.shape[2] * one.count for one in found if one.shape and one.name.startswith(name)]
    return [workspace("dropout masks of adapters", int(MASK_BYTES * max(sizes, default=0)))]


def adapter_backward(layer: Pass, batch: MicroBatch, number: int) -> Iterator[NamedSnapshot]:
    """Yield (snapshot name, temporaries) for the backward of a dense MLP with dropout masks of adapters or dequantized
    weights. layer: its pass; number: index of the layer."""
    for name, extras in layer.snapshots("adapted_mlp"):
        product = name.removeprefix(".")
        yield f"{name}.dropout", [*extras, *adapter_masks(batch, number, product)]
        result = compute_size("rows tokens width x" if product == "mlp.down" else "stream x", layer.dimensions)
        yield f"{name}.unpack", [*extras, *unpacked_weight(batch, number, product, result)]


# --- both ends of the model


def loss_pass(batch: MicroBatch, saved: Sequence[Saved], compiled: bool, again: bool) -> Pass:
    """Return the pass through the loss. saved: saved activations of the stage; compiled: the loss is compiled; again:
    True in the backward, if the forward saved no gradient."""
    config, x = batch.config, batch.itemsize
    width = min(batch.vocabulary, config.vocabulary)
    chunks = split_loss_chunks(batch.predictions, width, batch.device) if config.head in ("next", "masked") else []
    longest, several = max(chunks, default=0), len(chunks) > 1
    adds = batch.narrow and batch.device == "cuda"  # products add to the float32 sum themselves
    kept = {each.name: each.bytes for each in saved}
    every = {
        "again": again, "several_chunks": several, "compiled_loss": compiled,
        "keeps_hidden": "head.hidden.gradient" in kept, "keeps_weight": "head.weight.gradient" in kept,
        "computes_weight": (again and config.adapter is None) or "head.weight.gradient" in kept,
    }  # fmt: skip
    found = Pass.of_layer(batch, 0, saved)
    sizes = {
        "longest": longest, "head_width": width, "kept_weight": kept.get("head.weight.gradient", 0),
        "sliced": longest if batch.device != "cpu" else min(longest, max(1, SLICE_LOGITS // width)),
        "weight_bytes": batch.wide if several else x,
        "summed_bytes": batch.wide if len(chunks) > 2 or adds else x,  # the sum of all but the last chunk
        "chunk_bytes": 0 if adds else several * x * (2 if batch.narrow else 1),
    }  # fmt: skip
    true = found.properties | {name for name, value in every.items() if value}
    return replace(found, dimensions={**found.dimensions, **sizes}, properties=true, prefix="")


def embedding_pass(batch: MicroBatch, unit: str) -> Pass:
    """Return the pass through an embedding table. unit: "embedding", "positions" or "token_types"."""
    config = batch.config
    tables = {"positions": config.max_positions, "token_types": config.token_types}
    return Pass.of_layer(batch, 0, table=tables.get(unit) or batch.vocabulary)
