"""Temporary tensors of the backward of attention and of mixtures of experts, beside saved activations.

They are counted as the engine's loops allocate: a variable keeps its tensor until the next one is assigned, so that two
tiles are allocated at once. Compared with PyTorch's record of its allocator on a CPU; workspaces of CUDA kernels are
those of their sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.planner.cost.adapters import PACKED
from meshwright.planner.cost.blocks import block
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch
from meshwright.planner.memory.attention_tiles import Heads, Lies, backward_bytes
from meshwright.planner.memory.tensors import Saved, Temporary
from meshwright.spec.adapter_config import BLOCK
from meshwright.spec.policy import ACCELERATOR_TILE, TILE_QUERIES, TILE_SCORES, UNPACKED_AT_ONCE


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


def attention_backward(at: MicroBatch, kind: LayerKind, x: int) -> Iterator[tuple[str, list[Temporary]]]:
    """Yield (snapshot name, temporary tensors) of attention's backward. at: sizes of the micro-batch; kind: of the
    layer; x: bytes of an activation's element."""
    window = kind.window
    wide, size = max(4, x), at.config.head_dim
    of_head = at.rows * at.tokens * size
    result = Temporary("activations", "gradient of attention's result", at.heads * of_head * x)
    if at.ring:
        yield "", [result, *ring_backward(at, window, x, wide)]
        return
    heads, kv_heads = at.heads, at.kv_heads
    if at.layout.cp > 1:
        copies = max(1, at.layout.cp // kv_heads)
        heads, kv_heads = heads // at.layout.cp, kv_heads * copies // at.layout.cp
        of_head *= at.layout.cp
    if at.repeats(window):
        kv_heads = heads
    three = (heads + 2 * kv_heads) * of_head * x
    gradients = Temporary("activations", "gradients of queries, keys and values", three)
    tiled = (at.device == "cpu" and not at.config.encoder) or at.capped  # an encoder's kernel is PyTorch's own
    inside = list(tiled_backward(at, heads, kv_heads, kind, x, wide)) if tiled else []
    if at.device == "cuda" and not at.capped:
        inside = list(fused_backward(at, heads, kv_heads, window, x))
    yield "", [result, gradients, *inside]
    if at.layout.cp > 1:  # what travels, what is sent of it and what comes, before it is put together
        yield (
            ".tokens exchanged",
            [
                result,
                Temporary("communication", "gradient of the result after the all-to-all", 3 * heads * of_head * x),
            ],
        )
        freed = Temporary("activations", "queries, keys and values after the all-to-all, freed", -three)
        yield (
            ".heads exchanged",
            [gradients, freed, Temporary("communication", "gradients after the all-to-all", 3 * three)],
        )


def fused_backward(at: MicroBatch, heads: int, kv_heads: int, window: int | None, x: int) -> Iterator[Temporary]:
    """Yield the workspaces of PyTorch's CUDA attention backward (aten/src/ATen/native/transformers/cuda).

    at: sizes of the micro-batch; heads, kv_heads: on this rank; window: most tokens that a query attends to, None for
    all; x: bytes of an element. Flash attention (flash_attn/flash_api.cpp, `mha_bwd`) rounds up to 128 queries and 32
    elements of a head; with variable lengths (`mha_varlen_bwd`) it has 128 queries more for each document; the
    memory-efficient kernel is in attention_backward.cu.
    """
    size, length = at.config.head_dim, at.whole
    narrow = x < 4
    if narrow and not at.dense_mask(window):
        documents = at.varlen_documents if at.varlen(window) else 0
        for name, size_of in flash_backward(at, heads, kv_heads, length, documents).items():
            yield Temporary("workspace", name, size_of)
        return
    yield Temporary("workspace", "result times its gradient", at.rows * heads * (-(-length // 32) * 32) * 4)
    wide = "upcast gradient of queries" if narrow else "elements of result times its gradient"
    yield Temporary("workspace", wide, at.rows * heads * length * size * 4)


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


def tiled_backward(
    at: MicroBatch, heads: int, kv_heads: int, kind: LayerKind, x: int, wide: int
) -> Iterator[Temporary]:
    """Yield the temporaries of tiled attention's backward: masks, tiles, gradient sums of keys and values.

    at: sizes of the micro-batch; heads, kv_heads: on this rank; kind: of the layer; x, wide: bytes of an element of
    inputs and sums.
    """
    cut = _cut(at, heads, kv_heads, at.whole)
    whole = Heads(
        at.rows, kv_heads, cut.rows, cut.kv_heads, cut.group, at.config.head_dim, cut.length, cut.queries
    )  # fmt: skip
    rotated = (kind.rotates or at.config.query_key_norm) and at.layout.cp == 1
    lies = Lies(rotated, at.layout.cp > 1, at.config.attention_softcap is not None)
    found = backward_bytes(whole, lies, kind.window, x, wide, at.starts, at.masked and at.starts is None)
    if found.masks:
        yield Temporary("workspace", "tile masks", found.masks)
    yield Temporary("workspace", "attention tiles", found.tiles)
    yield Temporary("workspace", "tile keys and values", found.keys_and_values)


def ring_backward(at: MicroBatch, window: int | None, x: int, wide: int) -> Iterator[Temporary]:
    """Yield the temporaries of ring attention's backward: gradient sums, KV blocks in flight, a tile or kernel results.

    at: sizes of the micro-batch; window: most tokens that a query attends to, None for all; x, wide: bytes of an
    element of inputs and sums.
    """
    heads, kv_heads, size, ranks = at.heads, at.kv_heads, at.config.head_dim, at.layout.cp
    of_head = at.rows * at.tokens * size
    yield Temporary("workspace", "result times its gradient", at.rows * heads * at.tokens * wide)
    yield Temporary("workspace", "upcast gradient of queries", heads * of_head * wide)
    yield Temporary("communication", "upcast gradients of keys and values", 6 * kv_heads * of_head * wide)
    passing = 2 * kv_heads * of_head * x * (1 + min(2, ranks - 1))
    results = (heads + 2 * kv_heads) * of_head * x  # after the last ring step
    if at.flash:  # a call with half of the tokens, and with documents copies of what is concatenated
        half, copied = at.tokens // 2, at.masked and at.rows > 1
        inside = flash_backward(at, heads, kv_heads, half, at.ring_documents if at.masked else 0)
        log_sums = at.rows * heads * half * wide
        work = results // 2 + sum(inside.values()) + log_sums + copied * (3 * heads + 2 * kv_heads) * of_head // 2 * x
    else:
        piece = at.tokens // 2
        cut = _cut(at, heads, kv_heads, piece)
        tile = 2 * wide if x == wide else 3 * wide + x  # a narrow product and its copy in the wide type
        before = (2 * wide if x == wide else wide + x) if cut.before else 0
        columns = size * x * (3 if before else 2) + wide
        work = cut.lines * (piece * (tile + before) + columns) + cut.queries**2 * wide
        if x < wide:
            work += cut.rows * cut.kv_heads * at.tokens * size * wide
    if passing + work >= results:
        yield Temporary("communication", "keys and values in transfer", passing)
        yield Temporary("workspace", "attention tiles", work)
    else:
        yield Temporary("activations", "gradients of queries, keys and values", results)


def mixture_backward(
    at: MicroBatch, name: str, whole: Sequence[Saved], x: int, split: bool
) -> Iterator[tuple[str, list[Temporary]]]:
    """Yield (snapshot name, temporary tensors) of the backward of a mixture of experts: shared expert, then routing
    weights, matrix products and dispatch of the experts.

    at: sizes of the micro-batch; name: of the mixture, "layers.N.mlp"; whole: saved activations without recompute; x:
    bytes of an element; split: weight gradients are queued and computed later.
    """
    config, layout = at.config, at.layout
    sizes = {each.name.removeprefix(f"{name}."): each for each in whole if each.name.startswith(f"{name}.")}

    def freed(*names: str) -> Temporary:
        """Return an entry of negative bytes for the freed saved activations whose names begin with one of `names`."""
        found = sum(each.bytes for title, each in sizes.items() if title.startswith(names))
        return Temporary("activations", "freed", 0 if split else -found)

    hidden = config.hidden * x
    used: tuple[str, ...] = ()
    beside: list[Temporary] = []
    if config.shared_intermediate:
        columns = at.rows * at.tokens * (config.shared_intermediate // layout.tp) * x
        yield (
            ".shared",
            [Temporary("activations", "gradients of the shared expert's gate and up", (2 + split) * columns)],
        )
        used = ("shared.",)
        beside = [Temporary("activations", "gradient of the shared expert's input", at.rows * at.tokens * hidden)]
    copies = at.routed_tokens * config.experts_per_token * hidden
    yield ".weights", [freed(*used), *beside, Temporary("activations", "gradients of the experts' results", 2 * copies)]
    rows = sizes["experts.up.output"].shape[0]
    columns = rows * (config.expert_intermediate // (layout.etp if at.spread else layout.tp)) * x
    weight = 0 if split or config.adapter else config.experts // layout.ep * columns // max(1, rows) * config.hidden
    used = (*used, "experts.output", "experts.order")
    results = Temporary("activations", "gradients of the experts' results", rows * hidden)
    inner = Temporary("activations", "gradient of down's input", columns)
    made = Temporary("workspace", "weight gradient of the experts", weight)
    yield ".experts.down", [freed(*used), *beside, results, inner, made]
    used = (*used, "experts.down.input")
    three = Temporary("activations", "gradients of gate and up, and of their product", 3 * columns)
    yield ".experts", [freed(*used), *beside, three, *([results] if split else [])]
    used = (*used, "experts.up.output", "experts.activation")
    both = Temporary("activations", "gradients of gate and up", 2 * columns)
    arriving = Temporary("activations", "gradient of the experts' tokens", rows * hidden)
    yield ".experts.up", [freed(*used), *beside, both, arriving, made._replace(bytes=2 * weight)]
    most = max(rows * hidden, copies)
    yield (
        ".dispatch",
        [freed(*used, "experts."), *beside, Temporary("activations", "gradients of tokens sent", 2 * most)],
    )


def unpacked_weight(at: MicroBatch, layer: int, name: str = "", result: int = 0) -> list[Temporary]:
    """Return the largest weight of a layer that is unpacked for its products, with what it is computed from, or the
    product; nothing if the base of an adapter is not packed. at: sizes of the micro-batch; name: beginning of the
    products' names; result: bytes of the product."""
    if at.config.adapter is None or at.config.adapter.packed is None:
        return []
    found = (one for one in block(at, layer) if one.name.startswith(PACKED) and one.name.startswith(name))
    sizes = [one.shape[1] * one.shape[2] for each in found for one in each.operations[:3] if one.shape]
    most = max(sizes, default=0)
    once = min(most, UNPACKED_AT_ONCE[at.device] * BLOCK)
    return [Temporary("workspace", "unpacked weight", int(most * at.itemsize + max(result, 6 * once)))]
