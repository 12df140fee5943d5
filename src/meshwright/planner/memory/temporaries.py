"""Temporary tensors in addition to saved activations: in the backward of attention, of mixtures of experts and of
lookup tables, and in forward and backward of the loss.

They follow the engine's code: a variable keeps its tensor until the next one is assigned, so that the tensors of two
tiles are allocated at once. Checked against PyTorch's allocator on a CPU; workspaces of CUDA kernels follow their
sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.planner.cost.adapters import PACKED
from meshwright.planner.cost.blocks import layer_operators
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number, layer_kind
from meshwright.planner.memory.attention_tiles import Heads, InputStrides, backward_bytes
from meshwright.planner.memory.snapshot import NamedSnapshot, Saved, Temporary, activation, message, workspace
from meshwright.spec.adapter_config import BLOCK
from meshwright.spec.chunks import split_loss_chunks
from meshwright.spec.policy import ACCELERATOR_TILE, SLICE_LOGITS, TILE_QUERIES, TILE_SCORES, UNPACKED_AT_ONCE


class _Tiles(NamedTuple):
    """Sizes of the tiles into which attention over `length` queries and keys is split.

    rows, kv_heads: sequences and key-value heads processed together; group: query heads of each key-value head;
    queries: queries of a tile; several_groups: False if all sequences and heads are processed together.
    """

    rows: int
    kv_heads: int
    group: int
    queries: int
    length: int
    several_groups: bool

    @property
    def lines(self) -> int:
        """Number of rows of a tile's score matrix: queries, times sequences and query heads processed together."""
        return self.rows * self.kv_heads * self.group * self.queries

    @property
    def before(self) -> int:
        """Number of keys of the tile computed before the largest one, whose tensors are still allocated; 0 if there is
        none."""
        if self.length > self.queries:
            return (self.length - 1) // self.queries * self.queries
        return self.length if self.several_groups else 0


def _choose_tiles(batch: MicroBatch, heads: int, kv_heads: int, length: int) -> _Tiles:
    """Return the tile sizes of attention with `heads` query and `kv_heads` key-value heads over `length` tokens. batch:
    sizes of the micro-batch."""
    most_queries, most = (TILE_QUERIES, TILE_SCORES) if batch.device == "cpu" else ACCELERATOR_TILE
    group, queries = max(1, heads // kv_heads), min(most_queries, length)
    per_head = group * queries * length
    together = max(1, min(kv_heads, most // per_head))
    rows = max(1, min(batch.rows, most // (per_head * kv_heads)))
    return _Tiles(rows, together, group, queries, length, together < kv_heads or rows < batch.rows)


def attention_backward(batch: MicroBatch, kind: LayerKind) -> Iterator[NamedSnapshot]:
    """Yield (snapshot name, temporaries) for attention's backward. kind: kind of the layer."""
    window, x = kind.window, batch.itemsize
    of_head = batch.rows * batch.tokens * batch.config.head_dim
    result = activation("gradient of attention's result", batch.heads * of_head * x)
    if batch.ring:
        yield "", [result, *ring_backward(batch)]
        return
    heads, kv_heads = batch.heads, batch.kv_heads
    if batch.layout.cp > 1:
        heads, kv_heads, of_head = heads // batch.cp, kv_heads * batch.key_value_copies // batch.cp, of_head * batch.cp
    if batch.repeats(window):
        kv_heads = heads
    three = (heads + 2 * kv_heads) * of_head * x
    gradients = activation("gradients of queries, keys and values", three)
    inside: list[Temporary] = []
    if batch.device == "cuda" and not batch.capped:
        inside = list(fused_backward(batch, heads, kv_heads, window))
    elif not batch.config.encoder or batch.capped:  # an encoder's kernel is PyTorch's own
        inside = list(tiled_backward(batch, heads, kv_heads, kind))
    yield "", [result, gradients, *inside]
    if batch.layout.cp > 1:  # received, sent, and received again before it is joined
        exchanged = message("gradient of the result after the all-to-all", 3 * heads * of_head * x)
        yield ".tokens exchanged", [result, exchanged]
        freed = activation("queries, keys and values after the all-to-all, freed", -three)
        yield ".heads exchanged", [gradients, freed, message("gradients after the all-to-all", 3 * three)]


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
    cut = _choose_tiles(batch, heads, kv_heads, batch.sequence)
    sizes = Heads(
        batch.rows, kv_heads, cut.rows, cut.kv_heads, cut.group, batch.config.head_dim, cut.length, cut.queries
    )
    rotated = (kind.rotates or batch.config.query_key_norm) and batch.layout.cp == 1
    strides = InputStrides(rotated, batch.layout.cp > 1, batch.config.attention_softcap is not None)
    unknown = batch.masked and batch.starts is None
    found = backward_bytes(sizes, strides, kind.window, batch.itemsize, batch.wide, batch.starts, unknown)
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
        cut = _choose_tiles(batch, heads, kv_heads, half)
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


def mixture_backward(
    batch: MicroBatch, name: str, unrecomputed: Sequence[Saved], split: bool
) -> Iterator[NamedSnapshot]:
    """Yield (snapshot name, temporaries) for the backward of a mixture of experts: shared expert, routing weights, the
    experts' matrix products, dispatch.

    name: prefix of its tensors, "layers.N.mlp"; unrecomputed: saved activations without recompute; split: True if
    weight gradients are queued and computed later.
    """
    config, layout, x = batch.config, batch.layout, batch.itemsize
    sizes = {each.name.removeprefix(f"{name}."): each for each in unrecomputed if each.name.startswith(f"{name}.")}

    def freed(*names: str) -> Temporary:
        """Return an entry of negative bytes for the freed saved activations whose names begin with one of `names`."""
        found = sum(each.bytes for title, each in sizes.items() if title.startswith(names))
        return activation("freed", 0 if split else -found)

    hidden = config.hidden * x
    used: tuple[str, ...] = ()
    beside: list[Temporary] = []
    if config.shared_intermediate:
        columns = batch.rows * batch.tokens * (config.shared_intermediate // layout.tp) * x
        yield ".shared", [activation("gradients of the shared expert's gate and up", (2 + split) * columns)]
        used = ("shared.",)
        beside = [activation("gradient of the shared expert's input", batch.rows * batch.tokens * hidden)]
    copies = batch.copies * hidden
    yield ".weights", [freed(*used), *beside, activation("gradients of the experts' results", 2 * copies)]
    rows = sizes["experts.up.output"].shape[0]
    columns = rows * batch.expert_width * x
    weight = 0 if split or config.adapter else config.experts // layout.ep * columns // max(1, rows) * config.hidden
    used = (*used, "experts.output", "experts.order")
    results = activation("gradients of the experts' results", rows * hidden)
    made = workspace("weight gradient of the experts", weight)
    yield ".experts.down", [freed(*used), *beside, results, activation("gradient of down's input", columns), made]
    used = (*used, "experts.down.input")
    three = activation("gradients of gate and up, and of their product", 3 * columns)
    yield ".experts", [freed(*used), *beside, three, *([results] if split else [])]
    used = (*used, "experts.up.output", "experts.activation")
    both = activation("gradients of gate and up", 2 * columns)
    arriving = activation("gradient of the experts' tokens", rows * hidden)
    yield ".experts.up", [freed(*used), *beside, both, arriving, made._replace(bytes=2 * weight)]
    most = max(rows * hidden, copies)
    yield ".dispatch", [freed(*used, "experts."), *beside, activation("gradients of tokens sent", 2 * most)]


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


def unadapted_experts(batch: MicroBatch, layer: int, saved: Sequence[Saved], copies: Number) -> list[Temporary]:
    """Return the output of the experts' gate and up projections to which the product of an adapter is added, and that
    product, beyond what the layer saves later; nothing without such an adapter. saved: saved activations of the layer;
    copies: bytes of its token copies that are not saved."""
    adapted = next((one for one in layer_kind(batch.config, layer).adapted if one.layer == "mlp.experts.up"), None)
    if adapted is None:
        return []
    later = (".experts.activation", ".experts.down.input", ".experts.down.adapter.low", ".experts.output")
    output = sum(each.bytes for each in saved if each.name.endswith(".experts.up.output"))
    after = sum(each.bytes for each in saved if each.name.endswith(later) or ".mlp.shared." in each.name)
    return [workspace("experts before their adapter", max(0, int(output * (1 + max(adapted.shares)) - after - copies)))]


# --- both ends of the model


def loss_snapshots(batch: MicroBatch, saved: Sequence[Saved], compiled: bool, again: bool) -> list[NamedSnapshot]:
    """Return (snapshot name, temporaries) of the loss at two points: when the logits of its last chunk are computed,
    and when the head's weight gradient is added.

    saved: saved activations of the stage; compiled: the loss is compiled; again: True in the backward, if the forward
    saved no gradient.
    """
    config, x = batch.config, batch.itemsize
    stream = batch.rows * batch.slice * config.hidden * x
    both = [activation("output of the last layer", stream)] if config.encoder else []
    if config.head not in ("next", "masked"):
        return [("", both)]
    width = min(batch.vocabulary, config.vocabulary)
    chunks = split_loss_chunks(batch.predictions, width, batch.device)
    longest, hidden = max(chunks, default=0), batch.predictions * config.hidden * x
    weight, several = width * config.hidden, len(chunks) > 1
    both.append(Temporary("logits", "chunk", longest * width * x))
    if not again:
        of_norm = "final_norm.", "transform"
        both += [activation(one.name, one.bytes) for one in saved if one.name.startswith((*of_norm, "head.known"))]
        both.append(activation("head.input", hidden))
    frozen, names = config.adapter is not None, {each.name for each in saved}
    computes = (again and not frozen) or "head.weight.gradient" in names  # the weight's gradient
    if computes or again or (frozen and "head.hidden.gradient" in names):
        both.append(activation("head.hidden.gradient", hidden))
    at_once = longest if batch.device != "cpu" else min(longest, max(1, SLICE_LOGITS // width))
    wide = [] if compiled else [workspace("upcast logits", 2 * at_once * width * batch.wide)]
    summed = activation("head.weight.gradient", weight * (batch.wide if several else x))
    so_far = summed._replace(bytes=weight * (batch.wide if len(chunks) > 2 else x))  # of all but the last chunk
    found = [(".statistics", [*both, *wide, *([so_far] if computes and several else [])])]
    if computes:
        parts = (x if several else 0) + (x if several and x < batch.wide else 0)
        found.append((".gradient", [*both, summed, workspace("gradient of a chunk", weight * parts)]))
    return found


def loss_backward(batch: MicroBatch, saved: Sequence[Saved]) -> Iterator[Temporary]:
    """Yield the gradients of the head's input and weight that the loss's backward allocates, and copies of them. saved:
    saved activations of the stage."""
    x, hidden = batch.itemsize, batch.predictions * batch.config.hidden
    yield activation("gradient of the head's input", hidden * (x if x == batch.wide else x + batch.wide))
    if batch.config.adapter is not None:  # the head is frozen
        if not any(each.name == "head.hidden.gradient" for each in saved):
            yield activation("gradient of the head's input, unscaled", hidden * x)
        return
    matrix = batch.vocabulary * batch.config.hidden * x
    weight = next((each for each in saved if each.name == "head.weight.gradient"), None)
    yield Temporary("gradients", "head weight gradient", matrix)
    if weight is not None and weight.dtype != batch.dtype and batch.device == "cpu":  # elsewhere number by number
        yield workspace("upcast head weight gradient", weight.bytes)
    if weight is None:  # computed now
        yield Temporary("gradients", "head weight gradient, unscaled", matrix)
        yield activation("gradient of the head's input, unscaled", hidden * x)


def table_backward(batch: MicroBatch, unit: str) -> Iterator[Temporary]:
    """Yield the temporaries of the backward of an embedding table, which accumulates in float32. unit: "embedding",
    "positions" or "token_types"."""
    config, x = batch.config, batch.itemsize
    tables = {"positions": config.max_positions, "token_types": config.token_types}
    table = (tables.get(unit) or batch.vocabulary) * config.hidden
    rows = batch.all_tokens * config.hidden
    yield activation("gradient of the rows", rows * x)
    if x < batch.wide:
        yield workspace("upcast gradient of the rows", rows * batch.wide)
        yield Temporary("gradients", f"{unit} gradient", table * x)
    yield Temporary("gradients", f"{unit} upcast gradient", table * batch.wide)
