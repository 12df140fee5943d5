"""List of the operations of a forward step that one call into the compiled library executes, and the conversion of each
operation to the ctypes structs that the library reads. Torch-free."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from meshwright.kernels import structures
from meshwright.kernels.operations import (
    Activation,
    AnyOp,
    Attention,
    Embed,
    Experts,
    Gate,
    LatentAttention,
    LayerCache,
    Linear,
    Norm,
    RopeStore,
    Scale,
    StepArrays,
)
from meshwright.kernels.structures import BFLOAT16, Float32, PackedMatrix, get_address, get_row_layout

_INT32 = np.dtype(np.int32)
Execute = Callable[["ctypes.Array[structures.Op]", int, int, structures.Step], None]
"""Executes the entries from one index to another (exclusive) of an array of operations on a step."""

_KINDS = "embed norm round linear rope_store attention route sort combine scale"
KIND = {name: number for number, name in enumerate(_KINDS.split())}
"""Numbers of the kinds of operations in `structures.h`."""

_NORM = {"rms": 0, "layer": 1}
_ACTIVATION = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5}
_ROUTER = {"softmax": 0, "sigmoid": 1, "logits": 2}
_HEADS_TOGETHER = 16  # most heads of latent attention that one thread computes at a time


class OpList:
    """List of the operations of a forward step. The compiled library executes the operations in order, each on all
    threads; an operation begins when the previous one is complete. An operation takes one or more entries (structs
    `structures.Op`); `len()` is the number of entries.

    execute: function (entries, begin, end, step) that executes the entries from `begin` to `end` (exclusive) on a
    batch, such as `Kernels.execute`."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._ops: list[structures.Op] = []
        self._held: list[AnyOp] = []  # the arrays whose addresses `_ops` has
        self._array: Any = None

    def __len__(self) -> int:
        return len(self._ops)

    @property
    def array(self) -> Any:
        """Entries of the list as a ctypes array of `structures.Op`."""
        if self._array is None:
            self._array = (structures.Op * len(self._ops))(*self._ops)
        return self._array

    def append(self, op: AnyOp) -> int:
        """Append the operation `op`, such as a `Linear`; return the index of its first entry, for use as `begin` or
        `end` of `run`. Mixture-of-experts layers, latent attention, gates and products in bfloat16 take several
        entries, every other operation takes one. Raises `ValueError` if the shapes of the operation's arrays are
        inconsistent."""
        begin = len(self._ops)
        self._ops += list(_LOWER[type(op)](op))  # all or, after an error, none
        self._held.append(op)
        self._array = None
        return begin

    def run(self, step: StepArrays, begin: int = 0, end: int | None = None) -> None:
        """Execute the entries from index `begin` to `end` (exclusive; None: to the last) on `step`, the ragged batch of
        a forward step, and return when they are done."""
        tokens, starts, tables, rows = step.tokens, step.starts, step.block_tables, step.output_rows
        given = (tokens, step.positions, step.slots, starts, tables, rows)
        sizes = len(tokens), len(starts) - 1, tables.shape[-1], len(rows)
        arrays = structures.Step(*[get_address(each, _INT32) for each in given], *sizes)
        self._execute(self.array, begin, len(self._ops) if end is None else end, arrays)


def make_matrix_struct(weight: PackedMatrix) -> structures.Matrix:
    """Convert a packed weight matrix to its ctypes struct for the compiled library. The struct holds the address of the
    matrix's buffer, which must stay allocated."""
    size = len(weight.buffer) // weight.count
    return structures.Matrix(
        weight.buffer.ctypes.data, weight.n, weight.k, weight.count, size, bfloat16=weight.bfloat16, packed=True
    )


def _make_cache_struct(cache: LayerCache) -> structures.Cache:
    """Convert a layer's KV cache to its ctypes struct. Raises `ValueError` if keys and values have different numbers of
    blocks or heads, or if their shapes are not those of `LayerCache.compute_shapes`."""
    blocks, kv_heads = cache.keys.shape[:2]
    latent = not cache.keys.size
    if (cache.keys.shape, cache.values.shape) != LayerCache.compute_shapes(blocks, kv_heads, cache.head_dim, latent):
        raise ValueError(
            f"keys {cache.keys.shape} and values {cache.values.shape} are not those of LayerCache.compute_shapes"
        )
    wide = BFLOAT16 if cache.keys.dtype == BFLOAT16 else np.dtype(np.float32)
    return structures.Cache(
        None if latent else get_address(cache.keys, wide),
        get_address(cache.values, wide),
        kv_heads,
        cache.head_dim,
        wide == BFLOAT16,
        cache.table,
    )


def _make_op(
    kind: str, out: Float32, x: Float32 | None, *, width: int, in_width: int | None = None, **fields: Any
) -> structures.Op:
    """Create the ctypes struct of one operation. Raises `ValueError` if the rows of `out` or `x` do not have the given
    widths.

    kind: operation, a key of `KIND` such as "linear". out: buffer to write, with rows of `width` elements. x: buffer to
    read, with rows of `in_width` elements (None: `width`). fields: further fields of `structures.Op`.
    """
    for array, columns in ((out, width), (x, width if in_width is None else in_width)):
        if array is not None and array.shape[1] != columns:
            raise ValueError(f"{kind}: a buffer has rows of {array.shape[1]} elements, expected {columns}")
    op = structures.Op(kind=KIND[kind], size=width, **fields)
    op.out, op.out_stride = get_row_layout(out)
    if x is not None:
        op.input, op.in_stride = get_row_layout(x)
    return op


def _lower_embed(op: Embed) -> Iterator[structures.Op]:
    """Yield the ctypes struct of the `Embed` operation `op` (embedding lookup by token ID or position)."""
    if isinstance(op.table, np.ndarray):
        wide = BFLOAT16 if op.table.dtype == BFLOAT16 else np.dtype(np.float32)
        (n, k), data = op.table.shape, get_address(op.table, wide)
        table = structures.Matrix(data, n, k, 1, op.table.nbytes, bfloat16=wide == BFLOAT16)
    else:
        table, k = make_matrix_struct(op.table), op.table.k
    mode = op.ids == "positions"
    yield _make_op("embed", op.out, None, width=k, mode=mode, first=op.first, accumulate=op.accumulate, matrix=table)


def _lower_norm(op: Norm) -> Iterator[structures.Op]:
    """Yield the ctypes struct of the `Norm` operation `op` (RMSNorm or LayerNorm)."""
    yield _make_op(
        "norm", op.out, op.x, width=len(op.weight), mode=_NORM[op.kind], epsilon=op.epsilon,
        weight=get_address(op.weight, np.float32), bias=get_address(op.bias, np.float32, len(op.weight)),
        outputs=op.rows == "outputs",
    )  # fmt: skip


def _lower_linear(op: Linear) -> Iterator[structures.Op]:
    """Yield the ctypes structs of the `Linear` operation `op`: two in bfloat16, else one. Raises `ValueError` if a
    matrix reads or writes columns that a buffer does not have, or if several matrices have no column strides."""
    weight, (out_step, in_step) = op.weight, op.steps
    width = _find_width(weight.n, op.out.shape[1], op.activation)
    bias, last = get_address(op.bias, np.float32, weight.count * weight.n), weight.count - 1
    out, x = op.out, op.x
    if any(op.steps):
        if last * out_step + weight.n > out.shape[1] or last * in_step + weight.k > x.shape[1]:
            raise ValueError(f"linear: {weight.count} matrices [{weight.n}, {weight.k}], expected rows for all of them")
        out, x = out[:, : weight.n], x[:, : weight.k]
    elif weight.count > 1:
        raise ValueError(f"linear: {weight.count} matrices need the steps between their columns")
    yield from _make_product(
        out, x, weight, op.activation, width=width, outputs=op.rows == "outputs", bias=bias, accumulate=op.accumulate,
        out_step=out_step, in_step=in_step,
    )  # fmt: skip


def _make_product(
    out: Float32, x: Float32, packed: PackedMatrix, activation: Activation | None, **fields: Any
) -> Iterator[structures.Op]:
    """Yield the ctypes structs of a product: the rounding of its input, for kernels that multiply in bfloat16, and the
    product itself. packed: its weight. fields: further fields of `structures.Op`, and `width` as in `_make_op`."""
    if activation is not None:
        fields |= {"activation": _ACTIVATION[activation.kind], "gated": activation.gated}
        fields |= {"softcap": activation.limit, "scale": activation.alpha}
    for kind in ("round", "linear") if packed.bfloat16 else ("linear",):
        yield _make_op(kind, out, x, in_width=packed.k, matrix=make_matrix_struct(packed), **fields)


def _find_width(rows: int, columns: int, activation: Activation | None) -> int:
    """Return the number of elements that a product with a matrix of `rows` outputs writes to rows of `columns`. Raises
    `ValueError` if a gated activation does not have as many outputs for gate and for up, padded to panels of 16."""
    if activation is None or not activation.gated:
        return rows
    if rows != 2 * (columns + -columns % 16):
        raise ValueError(f"linear: {rows} outputs for gate and up, expected twice {columns} in panels of 16")
    return columns


def _lower_rope_store(op: RopeStore) -> Iterator[structures.Op]:
    """Yield the ctypes struct of the `RopeStore` operation `op` (QK norm, rotary embedding and the
    write to the KV cache)."""
    cache, size = _make_cache_struct(op.cache), op.cache.head_dim
    rotated, count = (0, None) if op.cosine is None else (2 * op.cosine.shape[1], op.cosine.size)
    yield _make_op(
        "rope_store", op.qkv, None, width=(op.heads + 2 * cache.kv_heads) * size, cache=cache, heads=op.heads,
        rotated=rotated, cosine=get_address(op.cosine, np.float32), sine=get_address(op.sine, np.float32, count),
        query_norm=get_address(op.query_norm, np.float32, size), key_norm=get_address(op.key_norm, np.float32, size),
        epsilon=op.epsilon, mode=op.queries_alone,
    )  # fmt: skip


def _lower_attention(op: Attention) -> Iterator[structures.Op]:
    """Yield the ctypes struct of the `Attention` operation `op`. Its `window` 0 (no sliding window) is encoded as a
    window of 2^40 tokens."""
    cache, size, window = _make_cache_struct(op.cache), op.cache.head_dim, op.window or 1 << 40
    yield _make_op(
        "attention", op.out, op.qkv, width=op.heads * size, in_width=(op.heads + 2 * cache.kv_heads) * size,
        cache=cache, heads=op.heads, scale=op.scale, window=window, softcap=op.softcap, mode=op.chunks,
        bias=get_address(op.sinks, np.float32, op.heads),
    )  # fmt: skip


def _lower_latent_attention(op: LatentAttention) -> Iterator[structures.Op]:
    """Yield the ctypes structs of the latent attention `op` in this order: (1) projection of the input; (2) norm of the
    latent vector; (3) norm and projection of the queries' latent vector, if the model has one; (4) rotation and cache
    write; (5) product of the queries with the key projection; (6) attention; (7) product of its output with the value
    projection. Products in bfloat16 take two."""
    heads, rank, plain, cached = op.key_up.count, op.key_up.n, op.key_up.k, op.cache.head_dim
    begin = heads * cached
    queries = op.wide[:, begin + cached :]
    yield from _lower_linear(Linear(op.wide[:, begin:], op.x, op.down))
    latent = op.wide[:, begin : begin + rank]
    yield from _lower_norm(Norm(latent, latent, op.latent_norm, epsilon=op.epsilon))
    if op.query_up is not None and op.query_norm is not None and op.queries is not None:
        yield from _lower_norm(Norm(queries, queries, op.query_norm, epsilon=op.epsilon))
        yield from _lower_linear(Linear(op.queries, queries, op.query_up))
        queries = op.queries
    size, cache = queries.shape[1] // heads, _make_cache_struct(op.cache)
    if size != plain + cached - rank or cache.keys:
        raise ValueError(f"expected a cache of latent vectors, and queries of {plain + cached - rank} elements")
    keyed = op.wide[:, : begin + cached]
    tables = {name: get_address(getattr(op, name), np.float32, op.cosine.size) for name in ("cosine", "sine")}
    rotated = _make_op(
        "rope_store", keyed, queries, width=begin + cached, in_width=heads * size, cache=cache, heads=heads, first=rank,
        in_step=size, rotated=cached - rank, **tables,
    )  # fmt: skip
    rotated.input += 4 * plain  # the rotated features of a query are its last
    yield rotated
    yield from _lower_linear(Linear(op.wide[:, :begin], queries, op.key_up, steps=(cached, size)))
    parts = range(1, heads + 1)
    cache.kv_heads = next(count for count in parts if heads % count == 0 and heads <= count * _HEADS_TOGETHER)
    yield _make_op(
        "attention", op.attended, keyed, width=begin, in_width=begin + cached, cache=cache, heads=heads, first=rank,
        scale=op.scale, window=1 << 40,
    )  # fmt: skip
    yield from _lower_linear(Linear(op.out, op.attended, op.value_up, steps=(op.value_up.n, cached)))


def _lower_experts(op: Experts) -> Iterator[structures.Op]:
    """Yield the ctypes structs of the mixture-of-experts layer `op`: router product, top-k choice, sorting of the
    assignments by expert, up projections with their activation, down projections, weighted sum; projections in bfloat16
    take two each. Raises `ValueError` if the workspace was allocated for another number of experts or another top-k
    than the layer has."""
    space, count = op.workspace, op.router.n
    if space.scores.shape[1] != count or space.chosen.shape[1] != op.top_k:
        raise ValueError(
            f"the workspace is for {space.scores.shape[1]} experts, {space.chosen.shape[1]} of them chosen"
        )
    routing = structures.Routing(
        *(array.ctypes.data for array in (space.weights, space.chosen, space.order, space.ends)),
        *(op.top_k, count, op.first, op.up.count, *op.groups, op.scale, op.normalise),
    )
    bias = get_address(op.choice_bias, np.float32, count)
    width, hidden = space.act.shape[1], op.up.k
    of_up = get_address(op.biases[1], np.float32, op.up.count * op.up.n)
    of_down = get_address(op.biases[2], np.float32, op.up.count * hidden)
    yield from _lower_linear(Linear(space.scores, op.x, op.router, op.biases[0]))
    yield _make_op("route", space.scores, None, width=count, mode=_ROUTER[op.router_kind], bias=bias, routing=routing)
    yield _make_op("sort", space.scores, None, width=count, routing=routing)
    factors = space.weights.ctypes.data if op.on_input else None
    yield from _make_product(
        space.act, op.x, op.up, op.activation, width=_find_width(op.up.n, width, op.activation), mode=True, bias=of_up,
        weight=factors, routing=routing,
    )  # fmt: skip
    yield from _make_product(space.down, space.act, op.down, None, width=hidden, bias=of_down, routing=routing)
    yield _make_op(
        "combine", op.out, space.down, width=hidden, mode=op.on_input, accumulate=op.accumulate, routing=routing
    )


def _lower_gate(op: Gate) -> Iterator[structures.Op]:
    """Yield the ctypes structs of the `Gate` operation `op`: first the product of input and gate weight, then the
    scaling of `out` by the sigmoid of this product."""
    yield from _lower_linear(Linear(op.scores, op.x, op.weight))
    factors = get_address(op.scores, np.float32)
    yield _make_op("scale", op.out, op.out, width=op.out.shape[1], weight=factors)


def _lower_scale(op: Scale) -> Iterator[structures.Op]:
    """Yield the ctypes struct of the `Scale` operation `op` (rows times a number, softcap)."""
    yield _make_op(
        "scale", op.out, op.x, width=op.out.shape[1], scale=op.factor, softcap=op.softcap, accumulate=op.accumulate,
        outputs=op.rows == "outputs",
    )  # fmt: skip


_LOWER: dict[type, Callable[[Any], Iterator[structures.Op]]] = {
    Embed: _lower_embed,
    Norm: _lower_norm,
    Linear: _lower_linear,
    RopeStore: _lower_rope_store,
    Attention: _lower_attention,
    LatentAttention: _lower_latent_attention,
    Experts: _lower_experts,
    Gate: _lower_gate,
    Scale: _lower_scale,
}
