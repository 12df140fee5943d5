"""Temporary tensors beside saved activations: in the backward of attention, of mixtures of experts and of lookup
tables, and in both passes of the loss.

They are counted as the engine's loops allocate: a variable keeps its tensor until the next one is assigned, so that two
tiles are allocated at once. Compared with PyTorch's record of its allocator on a CPU; workspaces of CUDA kernels are
those of their sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.planner.cost.adapters import PACKED
from meshwright.planner.cost.blocks import block
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number, layer_kind
from meshwright.planner.memory.attention_tiles import Heads, InputStrides, backward_bytes
from meshwright.planner.memory.snapshot import NamedSnapshot, Saved, Temporary, activation, message, workspace
from meshwright.spec.adapter_config import BLOCK
from meshwright.spec.chunks import loss_chunks
from meshwright.spec.policy import ACCELERATOR_TILE, SLICE_LOGITS, TILE_QUERIES, TILE_SCORES, UNPACKED_AT_ONCE


class _Tiles(NamedTuple):
    """Tiling of attention over `length` queries and keys.

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
        """Number of queries of all sequences and heads in a tile."""
        return self.rows * self.kv_heads * self.group * self.queries

    @property
    def before(self) -> int:
        """Number of keys of the tile processed before the longest one, whose tensors are still allocated; 0 without
        one."""
        if self.length > self.queries:
            return (self.length - 1) // self.queries * self.queries
        return self.length if self.several_groups else 0


def _cut(at: MicroBatch, heads: int, kv_heads: int, length: int) -> _Tiles:
    """Return the tiling of attention with `heads` query and `kv_heads` key-value heads over `length` tokens. at: sizes
    of the micro-batch."""
    most_queries, most = (TILE_QUERIES, TILE_SCORES) if at.device == "cpu" else ACCELERATOR_TILE
    group, queries = max(1, heads // kv_heads), min(most_queries, length)
    per_head = group * queries * length
    together = max(1, min(kv_heads, most // per_head))
    rows = max(1, min(at.rows, most // (per_head * kv_heads)))
    return _Tiles(rows, together, group, queries, length, together < kv_heads or rows < at.rows)


def attention_backward(at: MicroBatch, kind: LayerKind) -> Iterator[NamedSnapshot]:
    """Yield the snapshots of attention's backward. kind: of the layer."""
    window, x = kind.window, at.itemsize
    of_head = at.rows * at.tokens * at.config.head_dim
    result = activation("gradient of attention's result", at.heads * of_head * x)
    if at.ring:
        yield "", [result, *ring_backward(at)]
        return
    heads, kv_heads = at.heads, at.kv_heads
    if at.layout.cp > 1:
        heads, kv_heads, of_head = heads // at.cp, kv_heads * at.key_value_copies // at.cp, of_head * at.cp
    if at.repeats(window):
        kv_heads = heads
    three = (heads + 2 * kv_heads) * of_head * x
    gradients = activation("gradients of queries, keys and values", three)
    inside: list[Temporary] = []
    if at.device == "cuda" and not at.capped:
        inside = list(fused_backward(at, heads, kv_heads, window))
    elif not at.config.encoder or at.capped:  # an encoder's kernel is PyTorch's own
        inside = list(tiled_backward(at, heads, kv_heads, kind))
    yield "", [result, gradients, *inside]
    if at.layout.cp > 1:  # received, sent, and received again before it is joined
        exchanged = message("gradient of the result after the all-to-all", 3 * heads * of_head * x)
        yield ".tokens exchanged", [result, exchanged]
        freed = activation("queries, keys and values after the all-to-all, freed", -three)
        yield ".heads exchanged", [gradients, freed, message("gradients after the all-to-all", 3 * three)]


def fused_backward(at: MicroBatch, heads: int, kv_heads: int, window: int | None) -> Iterator[Temporary]:
    """Yield the workspaces of PyTorch's CUDA attention backward (aten/src/ATen/native/transformers/cuda).

    heads, kv_heads: on this rank; window: most tokens that a query attends to, None for all. Flash attention
    (flash_attn/flash_api.cpp, `mha_bwd`) rounds up to 128 queries and 32 elements of a head; with variable lengths
    (`mha_varlen_bwd`) it has 128 queries more for each document; the memory-efficient kernel is in
    attention_backward.cu.
    """
    length = at.whole
    if at.narrow and not at.dense_mask(window):
        documents = at.varlen_documents if at.varlen(window) else 0
        for name, size in flash_backward(at, heads, kv_heads, length, documents).items():
            yield workspace(name, size)
        return
    yield workspace("result times its gradient", at.rows * heads * (-(-length // 32) * 32) * 4)
    wide = "upcast gradient of queries" if at.narrow else "elements of result times its gradient"
    yield workspace(wide, at.rows * heads * length * at.config.head_dim * 4)


def flash_backward(at: MicroBatch, heads: int, kv_heads: int, length: int, documents: int) -> dict[str, int]:
    """Return the bytes of the workspaces of flash attention's backward in a 16-bit type, by name. heads, kv_heads: on
    this rank; length: tokens of a sequence in the call; documents: for variable lengths; 0: none."""
    size = at.config.head_dim
    lines = heads * (at.rows * length + 128 * documents if documents else at.rows * (-(-length // 128) * 128))
    found = {
        "result times its gradient": lines * 4,
        "upcast gradient of queries": lines * (-(-size // 32) * 32) * 4,
    }
    if kv_heads < heads:
        found["gradients of keys and values of every query head"] = 4 * at.rows * length * heads * size
    return found


def tiled_backward(at: MicroBatch, heads: int, kv_heads: int, kind: LayerKind) -> Iterator[Temporary]:
    """Yield the temporaries of tiled attention's backward: masks, tiles, gradient sums of keys and values. heads,
    kv_heads: on this rank; kind: of the layer."""
    cut = _cut(at, heads, kv_heads, at.whole)
    sizes = Heads(at.rows, kv_heads, cut.rows, cut.kv_heads, cut.group, at.config.head_dim, cut.length, cut.queries)
    rotated = (kind.rotates or at.config.query_key_norm) and at.layout.cp == 1
    strides = InputStrides(rotated, at.layout.cp > 1, at.config.attention_softcap is not None)
    unknown = at.masked and at.starts is None
    found = backward_bytes(sizes, strides, kind.window, at.itemsize, at.wide, at.starts, unknown)
    if found.masks:
        yield workspace("tile masks", found.masks)
    yield workspace("attention tiles", found.tiles)
    yield workspace("tile keys and values", found.keys_and_values)


def ring_backward(at: MicroBatch) -> Iterator[Temporary]:
    """Yield the temporaries of ring attention's backward: gradient sums, KV blocks in flight, a tile or kernel
    results."""
    heads, kv_heads, size, x, wide = at.heads, at.kv_heads, at.config.head_dim, at.itemsize, at.wide
    of_head, half = at.rows * at.tokens * size, at.tokens // 2
    yield workspace("result times its gradient", at.rows * heads * at.tokens * wide)
    yield workspace("upcast gradient of queries", heads * of_head * wide)
    yield message("upcast gradients of keys and values", 6 * kv_heads * of_head * wide)
    passing = 2 * kv_heads * of_head * x * (1 + min(2, at.cp - 1))
    results = (heads + 2 * kv_heads) * of_head * x  # after the last ring step
    if at.flash:  # a call with half of the tokens, and with documents copies of what is concatenated
        copied = at.masked and at.rows > 1
        inside = flash_backward(at, heads, kv_heads, half, at.ring_documents if at.masked else 0)
        log_sums = at.rows * heads * half * wide
        work = results // 2 + sum(inside.values()) + log_sums + copied * (3 * heads + 2 * kv_heads) * of_head // 2 * x
    else:
        cut = _cut(at, heads, kv_heads, half)
        tile = 2 * wide if x == wide else 3 * wide + x  # a narrow product and its copy in the wide type
        before = (2 * wide if x == wide else wide + x) if cut.before else 0
        columns = size * x * (3 if before else 2) + wide
        work = cut.lines * (half * (tile + before) + columns) + cut.queries**2 * wide
        if x < wide:
            work += cut.rows * cut.kv_heads * at.tokens * size * wide
    if passing + work >= results:
        yield message("keys and values in transfer", passing)
        yield workspace("attention tiles", work)
    else:
        yield activation("gradients of queries, keys and values", results)


def mixture_backward(at: MicroBatch, name: str, whole: Sequence[Saved], split: bool) -> Iterator[NamedSnapshot]:
    """Yield the snapshots of the backward of a mixture of experts: shared expert, then routing weights, matrix products
    and dispatch of the experts.

    name: of the mixture, "layers.N.mlp"; whole: saved activations without recompute; split: weight gradients are
    queued and computed later.
    """
    config, layout, x = at.config, at.layout, at.itemsize
    sizes = {each.name.removeprefix(f"{name}."): each for each in whole if each.name.startswith(f"{name}.")}

    def freed(*names: str) -> Temporary:
        """Return an entry of negative bytes for the freed saved activations whose names begin with one of `names`."""
        found = sum(each.bytes for title, each in sizes.items() if title.startswith(names))
        return activation("freed", 0 if split else -found)

    hidden = config.hidden * x
    used: tuple[str, ...] = ()
    beside: list[Temporary] = []
    if config.shared_intermediate:
        columns = at.rows * at.tokens * (config.shared_intermediate // layout.tp) * x
        yield ".shared", [activation("gradients of the shared expert's gate and up", (2 + split) * columns)]
        used = ("shared.",)
        beside = [activation("gradient of the shared expert's input", at.rows * at.tokens * hidden)]
    copies = at.copies * hidden
    yield ".weights", [freed(*used), *beside, activation("gradients of the experts' results", 2 * copies)]
    rows = sizes["experts.up.output"].shape[0]
    columns = rows * at.expert_width * x
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


def unpacked_weight(at: MicroBatch, layer: int, name: str = "", result: int = 0) -> list[Temporary]:
    """Return the largest weight of a layer that is unpacked for its products, with what it is computed from, or the
    product; nothing if the base of an adapter is not packed. name: beginning of the products' names; result: bytes of
    the product."""
    if at.config.adapter is None or at.config.adapter.packed is None:
        return []
    found = (one for one in block(at, layer) if one.name.startswith(PACKED) and one.name.startswith(name))
    sizes = [one.shape[1] * one.shape[2] for each in found for one in each.operations[:3] if one.shape]
    most = max(sizes, default=0)
    once = min(most, UNPACKED_AT_ONCE[at.device] * BLOCK)
    return [workspace("unpacked weight", int(most * at.itemsize + max(result, 6 * once)))]


MASK_BYTES = 12
"""Bytes of each element while the mask of an adapter's dropout is computed: three int32 numbers."""


def adapter_masks(at: MicroBatch, layer: int, name: str = "") -> list[Temporary]:
    """Return the temporaries of the largest dropout mask of a layer's adapters; nothing without dropout. name:
    beginning of the names of the adapted products."""
    if at.config.adapter is None or not at.config.adapter.dropout:
        return []
    found = (one for each in block(at, layer) for one in each.operations if one.name.endswith(".adapter.a"))
    sizes = [one.shape[0] * one.shape[2] for one in found if one.shape and one.name.startswith(name)]
    return [workspace("dropout masks of adapters", int(MASK_BYTES * max(sizes, default=0)))]


def unadapted_experts(at: MicroBatch, layer: int, saved: Sequence[Saved], copies: Number) -> list[Temporary]:
    """Return the output of the experts' gate and up projections to which the product of an adapter is added, and that
    product, beyond what the layer saves later; nothing without such an adapter. saved: saved activations of the layer;
    copies: bytes of its token copies that are not saved."""
    adapted = next((one for one in layer_kind(at.config, layer).adapted if one.layer == "mlp.experts.up"), None)
    if adapted is None:
        return []
    later = (".experts.activation", ".experts.down.input", ".experts.down.adapter.low", ".experts.output")
    output = sum(each.bytes for each in saved if each.name.endswith(".experts.up.output"))
    after = sum(each.bytes for each in saved if each.name.endswith(later) or ".mlp.shared." in each.name)
    return [workspace("experts before their adapter", max(0, int(output * (1 + max(adapted.shares)) - after - copies)))]


# --- both ends of the model


def loss_snapshots(at: MicroBatch, saved: Sequence[Saved], compiled: bool, again: bool) -> list[NamedSnapshot]:
    """Return the snapshots of the loss: at the logits of its last chunk, and when the head's weight gradient is added.

    saved: saved activations of the stage; compiled: the loss is compiled; again: in the backward, since the forward
    saved no gradient.
    """
    config, x = at.config, at.itemsize
    stream = at.rows * at.slice * config.hidden * x
    both = [activation("output of the last layer", stream)] if config.encoder else []
    if config.head not in ("next", "masked"):
        return [("", both)]
    width = min(at.vocabulary, config.vocabulary)
    chunks = loss_chunks(at.predictions, width, at.device)
    longest, hidden = max(chunks, default=0), at.predictions * config.hidden * x
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
    at_once = longest if at.device != "cpu" else min(longest, max(1, SLICE_LOGITS // width))
    wide = [] if compiled else [workspace("upcast logits", 2 * at_once * width * at.wide)]
    summed = activation("head.weight.gradient", weight * (at.wide if several else x))
    so_far = summed._replace(bytes=weight * (at.wide if len(chunks) > 2 else x))  # of all but the last chunk
    found = [(".statistics", [*both, *wide, *([so_far] if computes and several else [])])]
    if computes:
        parts = (x if several else 0) + (x if several and x < at.wide else 0)
        found.append((".gradient", [*both, summed, workspace("gradient of a chunk", weight * parts)]))
    return found


def loss_backward(at: MicroBatch, saved: Sequence[Saved]) -> Iterator[Temporary]:
    """Yield the gradients of the head's input and weight, and their copies, that the loss's backward allocates."""
    x, hidden = at.itemsize, at.predictions * at.config.hidden
    yield activation("gradient of the head's input", hidden * (x if x == at.wide else x + at.wide))
    if at.config.adapter is not None:  # the head is frozen
        if not any(each.name == "head.hidden.gradient" for each in saved):
            yield activation("gradient of the head's input, unscaled", hidden * x)
        return
    matrix = at.vocabulary * at.config.hidden * x
    weight = next((each for each in saved if each.name == "head.weight.gradient"), None)
    yield Temporary("gradients", "head weight gradient", matrix)
    if weight is not None and weight.dtype != at.dtype and at.device == "cpu":  # elsewhere number by number
        yield workspace("upcast head weight gradient", weight.bytes)
    if weight is None:  # computed now
        yield Temporary("gradients", "head weight gradient, unscaled", matrix)
        yield activation("gradient of the head's input, unscaled", hidden * x)


def table_backward(at: MicroBatch, unit: str) -> Iterator[Temporary]:
    """Yield the temporaries of the backward of a lookup table, unit "embedding" or so, which sums in float32."""
    config, x = at.config, at.itemsize
    tables = {"positions": config.max_positions, "token_types": config.token_types}
    table = (tables.get(unit) or at.vocabulary) * config.hidden
    rows = at.all_tokens * config.hidden
    yield activation("gradient of the rows", rows * x)
    if x < at.wide:
        yield workspace("upcast gradient of the rows", rows * at.wide)
        yield Temporary("gradients", f"{unit} gradient", table * x)
    yield Temporary("gradients", f"{unit} upcast gradient", table * at.wide)
