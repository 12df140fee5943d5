"""The operations of a forward step as data (`op_list.py` has the list that one call executes). Torch-free.

Buffers are float32 matrices with contiguous rows, a row per token (T) or per output (R: the rows whose logits are
needed), allocated for the token budget; views that take some columns are allowed. A list keeps its arrays alive.

Shapes: T tokens of the step, R outputs, S sequences, W block tables, H hidden, F intermediate, V vocabulary, N query
heads, K key-value heads, D head size, E experts, B KV blocks of 16 tokens, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.kernels.structures import Array, Float32, PackedMatrix

BLOCK_TOKENS = 16
"""Tokens of a KV block: the vector width of the kernels."""

Int32 = npt.NDArray[np.int32]
Rows = Literal["tokens", "outputs"]


class StepArrays(Protocol):
    """Ragged batch of one forward step over S sequences: int32 arrays, C-contiguous.

    tokens, positions: [T] ids and indices in their sequence; sequence s has the tokens starts[s] to starts[s + 1]
    (exclusive). slots: [T], place of the token's key and value in the KV cache: block * 16 + offset. block_tables: [W,
    S, blocks], KV blocks of each sequence for each of W block tables (kinds of attention); the first dimension may be
    left out for W = 1. output_rows: [R], tokens whose logits are wanted. `serving.scheduler.StepBatch` is one.
    """

    tokens: Int32  # [T]
    positions: Int32  # [T]
    slots: Int32  # [W, T]
    starts: Int32  # [S+1], first token of each sequence, then T
    block_tables: Int32  # [W, S, most blocks]
    output_rows: Int32  # [R], indices into T


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of one layer: B blocks of 16 tokens for K key-value heads of size D, float32 or bfloat16 bits (uint16),
    zeroed when allocated.

    keys: [B, K, D, 16]. values: [B, K, 16, D rounded up to a multiple of 16]. head_dim: D. table: number of the block
    table that lists each sequence's blocks; layers with different block tables may share arrays.
    """

    keys: Array
    values: Array
    head_dim: int
    table: int = 0

    @staticmethod
    def shapes(blocks: int, kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (shape of keys, shape of values) of a layer's KV cache with `blocks` KV blocks of 16 tokens."""
        padded = -(-head_dim // 16) * 16
        return (blocks, kv_heads, head_dim, BLOCK_TOKENS), (blocks, kv_heads, BLOCK_TOKENS, padded)


@dataclass(frozen=True, slots=True)
class Embed:
    """Embedding lookup: out[t] = table[id - first], zeros for an ID outside the table; `accumulate`: added to out[t].

    `out`: [T, H]; `table`: [V, H] float32 or bfloat16 bits, or the packed matrix of a tied head, which is not copied;
    `ids`: token IDs, or "positions" for learned positions; `first`: first ID of the table, above 0 for a
    vocabulary-parallel slice.
    """

    out: Float32
    table: Array | PackedMatrix
    ids: Literal["tokens", "positions"] = "tokens"
    first: int = 0
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation over rows of `len(weight)` elements: out = norm(x) * weight + bias (None: 0). `kind`: "rms"
    (RMSNorm) or "layer" (LayerNorm); `epsilon`: added to the mean square or variance; `rows`: "tokens" (T rows) or
    "outputs" (R rows). `x` and `out` may be the same array."""

    out: Float32
    x: Float32
    weight: Float32
    bias: Float32 | None = None
    epsilon: float = 1e-5
    kind: Literal["rms", "layer"] = "rms"
    rows: Rows = "tokens"


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layer: out = x Wᵀ + bias. `weight`: packed W [Y, X]; `accumulate`: add to the present values of `out` (a
    residual connection); `rows`: the buffers have a row per token ("tokens", T) or per row of logits ("outputs", R)."""

    out: Float32
    x: Float32
    weight: PackedMatrix
    bias: Float32 | None = None
    accumulate: bool = False
    rows: Rows = "tokens"


@dataclass(frozen=True, slots=True)
class RopeStore:
    """QK norm (if given) and rotary embedding of the step's queries and keys, in place; keys and values are then
    written into their KV-cache slots.

    `qkv`: [T, (N + 2K) D], queries first, then keys, then values; `heads`: N; `cosine`, `sine`: [P, R/2] by position,
    for the R <= D rotated features, whose pairs are i and i + R/2 (None: no rotation, learned positions); `query_norm`,
    `key_norm`: RMSNorm weights [D].
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
    """Causal grouped-query attention of the step's queries, the first N D columns of `qkv` [T, (N + 2K) D], over the
    cached keys and values of their sequences.

    `out`: [T, N D]; `heads`: N; `window`: tokens that a token attends to, itself included (0: no limit); `scale`:
    factor of the scores, D ** -0.5 as a rule. Score softcaps and attention sinks are not implemented.
    """

    out: Float32
    qkv: Float32
    cache: LayerCache
    heads: int
    scale: float
    window: int = 0


@dataclass(frozen=True, slots=True)
class Activation:
    """Activation of an MLP. `gated`: out = activation(gate) * up, where x [T, 2F] has the columns of gate first, then
    those of up; else out = activation(x), x [T, F]. `kind`: "relu2" is relu squared, "gelu_tanh" GELU's tanh
    approximation."""

    out: Float32
    x: Float32
    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
    gated: bool


class ExpertsWorkspace:
    """Temporary buffers of the mixture-of-experts layers of a model, shared by all layers. tokens: maximum tokens of a
    step. top_k: experts per token, of `experts` experts of intermediate size `width`. nbytes: bytes of all buffers."""

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
    """Mixture-of-experts layer: out[t] = sum over the token's top-k experts of weight * down(act(gate) * up), as in
    `model/experts.py`; experts that this rank does not hold add nothing. `accumulate`: added to out[t].

    `router`: packed [E, H] in float32; `up`, `down`: packed [held, 2F, H] (gate first) and [held, H, F] of the held
    experts; `first`: index of the first held expert; `router_bias` [E]: added to scores for the choice only;
    `normalise`: weights sum to 1; `scale`: factor on the weights.
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
    """Sigmoid gate of a shared expert, row by row: out *= sigmoid(x · weight). `x`: [T, H]; `weight`: [H]."""

    out: Float32
    x: Float32
    weight: Float32


@dataclass(frozen=True, slots=True)
class TakeRows:
    """Copy of the rows whose logits are wanted: out[r] = x[output_rows[r]]. out: [R, H], x: [T, H]; H hidden size."""

    out: Float32
    x: Float32


AnyOp = Embed | Norm | Linear | RopeStore | Attention | Activation | Experts | Gate | TakeRows
