"""The operations of a forward step as data, and the list of them that one call into the library executes. Torch-free.

Buffers are float32 matrices with contiguous rows, a row per token (T) or per output (R: the rows whose logits are
needed), allocated for the token budget; views that take some columns are allowed. A list keeps its arrays alive.

Shapes: T tokens of the step, R outputs, S sequences, H hidden, F intermediate, V vocabulary, N query heads, K key-value
heads, D head size, E experts, B KV blocks of 16 tokens, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.kernels import structures
from meshwright.kernels.structures import BFLOAT16, Array, Float32, address, rows_of

if TYPE_CHECKING:
    from meshwright.kernels.library import Kernels, PackedMatrix

BLOCK_TOKENS = 16
"""Tokens of a KV block: the vector width of the kernels."""

Int32 = npt.NDArray[np.int32]
Rows = Literal["tokens", "outputs"]

_KINDS = (
    *("embed", "norm", "linear", "rope_store", "attention", "activation", "route", "group", "grouped_linear"),
    *("combine", "gate", "take_rows", "add", "greedy", "pack"),
)
KIND = {name: number for number, name in enumerate(_KINDS)}
"""Numbers of the kinds of operations in `structures.h`."""

_ROWS = {"tokens": 0, "outputs": 1, "assignments": 2}
_NORM = {"rms": 0, "layer": 1}
_ACTIVATION = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
_ROUTER = {"softmax": 0, "sigmoid": 1}


class StepArrays(Protocol):
    """The ragged batch of one step, int32 and C-contiguous (`serving.scheduler.StepBatch` is one).

    A token's position is its index in its sequence; its key and value are at `block_tables[s, position // 16]`, place
    `position % 16`, which `slots` says as one number: block * 16 + place.
    """

    tokens: Int32  # [T]
    positions: Int32  # [T]
    slots: Int32  # [T]
    starts: Int32  # [S+1], first token of each sequence, then T
    block_tables: Int32  # [S, most blocks]
    output_rows: Int32  # [R], indices into T


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of one layer, float32 or bfloat16 bits (uint16), zeroed at the start. `keys`: [B, K, D, 16]; `values`:
    [B, K, 16, D rounded up to 16]; `head_dim`: D."""

    keys: Array
    values: Array
    head_dim: int

    @staticmethod
    def shapes(blocks: int, kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of keys and values."""
        padded = -(-head_dim // 16) * 16
        return (blocks, kv_heads, head_dim, BLOCK_TOKENS), (blocks, kv_heads, BLOCK_TOKENS, padded)


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] (+)= table[id - first], zeros for an ID outside the table (vocabulary-parallel slice, first token
    `first`). `table`: [V, H] float32 or bfloat16 bits, or the packed matrix of a tied head (one copy of it); `ids`: the
    tokens, or their positions (learned positions)."""

    out: Float32
    table: Array | PackedMatrix
    ids: Literal["tokens", "positions"] = "tokens"
    first: int = 0
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Norm:
    """out = norm(x) * weight + bias over rows of `len(weight)` elements; "rms": RMSNorm, "layer": LayerNorm. `x` may be
    `out`."""

    out: Float32
    x: Float32
    weight: Float32
    bias: Float32 | None = None
    epsilon: float = 1e-5
    kind: Literal["rms", "layer"] = "rms"
    rows: Rows = "tokens"


@dataclass(frozen=True, slots=True)
class Linear:
    """out (+)= x Wᵀ + bias. `weight`: packed W [Y, X]; `accumulate`: add the result to `out` (residual)."""

    out: Float32
    x: Float32
    weight: PackedMatrix
    bias: Float32 | None = None
    accumulate: bool = False
    rows: Rows = "tokens"


@dataclass(frozen=True, slots=True)
class RopeStore:
    """Norm (if given) and rotate queries and keys in place, and write keys and values into their KV slots.

    `qkv`: [T, (N + 2K) D], queries first; `cosine`, `sine`: [P, R/2] for the R <= D rotated features, whose pairs are i
    and i + R/2 (None: learned positions); `query_norm`, `key_norm`: RMSNorm weights [D].
    """

    qkv: Float32
    cache: LayerCache
    heads: int
    cosine: Float32 | None = None
    sine: Float32 | None = None
    query_norm: Float32 | None = None
    key_norm: Float32 | None = None
    epsilon: float = 1e-6


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal grouped-query attention of the queries in `qkv` over the cached keys and values of their sequences.

    `out`: [T, N D]; `window`: tokens that a token attends to, itself included (0: all before it); `scale`: factor of
    the scores, D ** -0.5 as a rule. Score softcaps and attention sinks are not implemented.
    """

    out: Float32
    qkv: Float32
    cache: LayerCache
    heads: int
    scale: float
    window: int = 0


@dataclass(frozen=True, slots=True)
class Activation:
    """out = activation(gate) * up with x = [gate, up] of [T, 2F], or activation(x) of [T, F] if not `gated`."""

    out: Float32
    x: Float32
    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
    gated: bool


class ExpertsWorkspace:
    """Buffers of the mixture-of-experts layers, shared by all of them, for `tokens` tokens of a step with `top_k` of
    `experts` experts of width `width` each. `nbytes`: its size."""

    def __init__(self, tokens: int, experts: int, top_k: int, hidden: int, width: int) -> None:
        rows = tokens * top_k
        self.scores = np.zeros((tokens, experts), np.float32)
        self.weights = np.zeros((tokens, top_k), np.float32)
        self.chosen = np.zeros((tokens, top_k), np.int32)
        self.order, self.ends = np.zeros(rows, np.int32), np.zeros(experts, np.int32)
        self.up = np.zeros((rows, 2 * width), np.float32)
        self.act = np.zeros((rows, width), np.float32)
        self.down = np.zeros((rows, hidden), np.float32)
        self.nbytes = sum(array.nbytes for array in vars(self).values())


@dataclass(frozen=True, slots=True)
class Experts:
    """out (+)= sum over a token's top-k experts, in the order of their scores, of weight * down(act(gate) * up), as
    `model/experts.py` defines it; experts that this rank does not hold add nothing.

    `router`: packed [E, H] in float32; `up`, `down`: the held experts' [2F, H] and [H, F], packed together
    (`Kernels.pack` of [held, 2F, H]); `first`: index of the first held one; `router_bias` [E]: changes only the choice.
    """

    out: Float32
    x: Float32
    router: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    workspace: ExpertsWorkspace
    top_k: int
    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    router_kind: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: Float32 | None = None
    normalise: bool = False
    scale: float = 1.0
    first: int = 0
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """out *= sigmoid(x · weight), row by row: the gate of a shared expert. `weight`: [H]."""

    out: Float32
    x: Float32
    weight: Float32


@dataclass(frozen=True, slots=True)
class TakeRows:
    """out[r] = x[output_rows[r]], [R, H]."""

    out: Float32
    x: Float32


@dataclass(frozen=True, slots=True)
class Add:
    """out += x."""

    out: Float32
    x: Float32
    rows: Rows = "tokens"


@dataclass(frozen=True, slots=True)
class Greedy:
    """Of each row of logits [R, V]: the index of the largest (the lowest among equals), and the logarithm of the sum of
    exponentials, so that the token's log-probability is logits[r, tokens[r]] - log_sums[r]. `tokens`: int32 [R];
    `log_sums`: float64 [R]."""

    tokens: Int32
    log_sums: npt.NDArray[np.float64]
    logits: Float32


AnyOp = Embed | Norm | Linear | RopeStore | Attention | Activation | Experts | Gate | TakeRows | Add | Greedy


class OpList:
    """Operations that the library executes in order, on the thread pool, with a barrier after each."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._ops: list[structures.Op] = []
        self._held: list[AnyOp] = []  # the arrays whose addresses `_ops` has
        self._array: Any = None

    def __len__(self) -> int:
        return len(self._ops)

    @property
    def array(self) -> Any:
        """The operations as a ctypes array."""
        if self._array is None:
            self._array = (structures.Op * len(self._ops))(*self._ops)
        return self._array

    def append(self, op: AnyOp) -> int:
        """Append an operation; return the index of its first entry (experts are several), for `run`'s range: a segment
        ends where `len` of the list was. Raises `ValueError` where arrays do not fit."""
        begin = len(self._ops)
        self._ops.extend(_LOWER[type(op)](op))
        self._held.append(op)
        self._array = None
        return begin

    def run(self, step: StepArrays, begin: int = 0, end: int | None = None) -> None:
        """Execute the entries `begin` to `end` (exclusive; None: all) on the batch `step`; returns when they are
        done."""
        arrays = structures.Step(
            *(address(getattr(step, name), np.int32) for name in StepArrays.__annotations__),
            token_count=len(step.tokens),
            sequences=len(step.starts) - 1,
            table_width=step.block_tables.shape[1],
            outputs=len(step.output_rows),
        )
        self._kernels.execute(self.array, begin, len(self._ops) if end is None else end, arrays)


def packed_matrix(weight: PackedMatrix) -> structures.Matrix:
    """Return the structure of a packed matrix."""
    size = len(weight.buffer) // weight.count
    return structures.Matrix(
        weight.buffer.ctypes.data, weight.n, weight.k, weight.count, size, bfloat16=weight.bfloat16, packed=True
    )


def _cache(cache: LayerCache) -> structures.Cache:
    """Return the structure of a layer's KV cache; `ValueError` if the arrays do not fit each other."""
    blocks, kv_heads = cache.keys.shape[:2]
    if (cache.keys.shape, cache.values.shape) != LayerCache.shapes(blocks, kv_heads, cache.head_dim):
        raise ValueError(f"keys {cache.keys.shape} and values {cache.values.shape} are not those of LayerCache.shapes")
    wide = BFLOAT16 if cache.keys.dtype == BFLOAT16 else np.dtype(np.float32)
    return structures.Cache(
        address(cache.keys, wide), address(cache.values, wide), kv_heads, cache.head_dim, wide == BFLOAT16
    )


def _op(
    kind: str, out: Float32, x: Float32 | None, *, width: int, in_width: int | None = None, **fields: Any
) -> structures.Op:
    """Return an operation that writes rows of `width` elements to `out` and reads rows of `in_width` (default
    `width`) from `x`; `ValueError` if the buffers' rows have other widths."""
    for array, columns in ((out, width), (x, width if in_width is None else in_width)):
        if array is not None and array.shape[1] != columns:
            raise ValueError(f"{kind}: a buffer has rows of {array.shape[1]} elements, expected {columns}")
    op = structures.Op(kind=KIND[kind], size=width, **fields)
    op.out, op.out_stride = rows_of(out)
    if x is not None:
        op.input, op.in_stride = rows_of(x)
    return op


def _lower_embed(op: Embed) -> list[structures.Op]:
    if isinstance(op.table, np.ndarray):
        wide = BFLOAT16 if op.table.dtype == BFLOAT16 else np.dtype(np.float32)
        (n, k), data = op.table.shape, address(op.table, wide)
        table = structures.Matrix(data, n, k, 1, op.table.nbytes, bfloat16=wide == BFLOAT16)
    else:
        table, k = packed_matrix(op.table), op.table.k
    mode = op.ids == "positions"
    return [_op("embed", op.out, None, width=k, mode=mode, first=op.first, accumulate=op.accumulate, matrix=table)]


def _lower_norm(op: Norm) -> list[structures.Op]:
    size = len(op.weight)
    return [
        _op(
            "norm",
            op.out,
            op.x,
            width=size,
            mode=_NORM[op.kind],
            rows=_ROWS[op.rows],
            weight=address(op.weight, np.float32),
            bias=address(op.bias, np.float32, size),
            epsilon=op.epsilon,
        )
    ]


def _lower_linear(op: Linear) -> list[structures.Op]:
    return [
        _op(
            "linear",
            op.out,
            op.x,
            width=op.weight.n,
            in_width=op.weight.k,
            rows=_ROWS[op.rows],
            bias=address(op.bias, np.float32, op.weight.n),
            accumulate=op.accumulate,
            matrix=packed_matrix(op.weight),
        )
    ]


def _lower_rope_store(op: RopeStore) -> list[structures.Op]:
    cache, size = _cache(op.cache), op.cache.head_dim
    rotated = 0 if op.cosine is None else 2 * op.cosine.shape[1]
    return [
        _op(
            "rope_store",
            op.qkv,
            None,
            width=(op.heads + 2 * cache.kv_heads) * size,
            cache=cache,
            heads=op.heads,
            rotated=rotated,
            cosine=address(op.cosine, np.float32),
            sine=address(op.sine, np.float32, None if op.cosine is None else op.cosine.size),
            query_norm=address(op.query_norm, np.float32, size),
            key_norm=address(op.key_norm, np.float32, size),
            epsilon=op.epsilon,
        )
    ]


def _lower_attention(op: Attention) -> list[structures.Op]:
    cache, size = _cache(op.cache), op.cache.head_dim
    return [
        _op(
            "attention",
            op.out,
            op.qkv,
            width=op.heads * size,
            in_width=(op.heads + 2 * cache.kv_heads) * size,
            cache=cache,
            heads=op.heads,
            scale=op.scale,
            window=op.window,
        )
    ]


def _lower_activation(op: Activation, rows: str = "tokens", **fields: Any) -> list[structures.Op]:
    width = op.out.shape[1]
    wide = 2 * width if op.gated else width
    mode = _ACTIVATION[op.kind]
    return [
        _op(
            "activation",
            op.out,
            op.x,
            width=width,
            in_width=wide,
            mode=mode,
            gated=op.gated,
            rows=_ROWS[rows],
            **fields,
        )
    ]


def _lower_experts(op: Experts) -> list[structures.Op]:
    space, count = op.workspace, op.router.n
    if space.scores.shape[1] != count or space.chosen.shape[1] != op.top_k:
        raise ValueError(
            f"the workspace is for {space.scores.shape[1]} experts, {space.chosen.shape[1]} of them chosen"
        )
    routing = structures.Routing(
        *(array.ctypes.data for array in (space.weights, space.chosen, space.order, space.ends)),
        *(op.top_k, count, op.first, op.up.count, op.scale, op.normalise),
    )
    bias = address(op.router_bias, np.float32, count)
    up, down = packed_matrix(op.up), packed_matrix(op.down)
    width, hidden = op.up.n, op.up.k
    return [
        *_lower_linear(Linear(space.scores, op.x, op.router)),
        _op("route", space.scores, None, width=count, mode=_ROUTER[op.router_kind], bias=bias, routing=routing),
        _op("group", space.scores, None, width=count, routing=routing),
        _op("grouped_linear", space.up, op.x, width=width, in_width=hidden, mode=True, matrix=up, routing=routing),
        *_lower_activation(Activation(space.act, space.up, op.kind, gated=True), "assignments", routing=routing),
        _op("grouped_linear", space.down, space.act, width=hidden, in_width=width // 2, matrix=down, routing=routing),
        _op("combine", op.out, space.down, width=hidden, accumulate=op.accumulate, routing=routing),
    ]


def _lower_gate(op: Gate) -> list[structures.Op]:
    matrix = structures.Matrix(k=op.x.shape[1])
    weight = address(op.weight, np.float32, op.x.shape[1])
    return [_op("gate", op.out, op.x, width=op.out.shape[1], in_width=op.x.shape[1], weight=weight, matrix=matrix)]


def _lower_take_rows(op: TakeRows) -> list[structures.Op]:
    return [_op("take_rows", op.out, op.x, width=op.out.shape[1], rows=_ROWS["outputs"])]


def _lower_add(op: Add) -> list[structures.Op]:
    return [_op("add", op.out, op.x, width=op.out.shape[1], rows=_ROWS[op.rows])]


def _lower_greedy(op: Greedy) -> list[structures.Op]:
    lowered = structures.Op(kind=KIND["greedy"], size=op.logits.shape[1], rows=_ROWS["outputs"])
    lowered.input, lowered.in_stride = rows_of(op.logits)
    lowered.indices, lowered.log_sums = address(op.tokens, np.int32), address(op.log_sums, np.float64)
    return [lowered]


_LOWER: dict[type, Callable[[Any], list[structures.Op]]] = {
    Embed: _lower_embed,
    Norm: _lower_norm,
    Linear: _lower_linear,
    RopeStore: _lower_rope_store,
    Attention: _lower_attention,
    Activation: _lower_activation,
    Experts: _lower_experts,
    Gate: _lower_gate,
    TakeRows: _lower_take_rows,
    Add: _lower_add,
    Greedy: _lower_greedy,
}
