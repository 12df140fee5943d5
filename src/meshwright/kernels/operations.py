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
    """Ragged batch of one forward step: T tokens of S sequences, as int32 arrays, C-contiguous. A sequence has W block
    tables, one for each sliding-window size among the model's layers; for W = 1 the dimension W may be left out.

    tokens, positions: [T], token IDs and positions in their sequences. starts: [S + 1]; sequence s has the tokens with
    the indices starts[s] to starts[s + 1] (exclusive), whose positions are consecutive. slots: [W, T], for each block
    table and token, the KV-cache slot of the token's key and value: block * 16 + offset in the block. block_tables:
    [W, S, blocks], KV blocks of each sequence. output_rows: [R], indices of the tokens whose logits are needed.
    `serving.scheduler.StepBatch` is such a batch."""

    tokens: Int32  # [T]
    positions: Int32  # [T]
    slots: Int32  # [W, T]
    starts: Int32  # [S+1], first token of each sequence, then T
    block_tables: Int32  # [W, S, most blocks]
    output_rows: Int32  # [R], indices into T


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of one layer of the model, in B blocks of 16 tokens. The layer has K key-value heads of size D.

    keys: [B, K, D, 16]. values: [B, K, 16, D rounded up to a multiple of 16]. Both arrays are float32, or uint16 that
    holds the bits of bfloat16, and start as zeros. For latent attention, `values` holds latent vectors with rotary keys
    as a single head, and `keys` is empty. head_dim: D. table: number of the block table that lists the blocks of each
    sequence in this layer: index into the first dimension of `StepArrays.block_tables`. Layers with different block
    tables may share the two arrays."""

    keys: Array
    values: Array
    head_dim: int
    table: int = 0

    @staticmethod
    def compute_shapes(
        blocks: int, kv_heads: int, head_dim: int, latent: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (shape of keys, shape of values) of a layer's KV cache. blocks: number of KV blocks of 16 tokens.
        kv_heads: key-value heads of size `head_dim`. latent: True for latent attention, where `values` also serves as
        keys, and `keys` is empty."""
        padded = -(-head_dim // 16) * 16
        keys = (blocks, kv_heads, 0 if latent else head_dim, BLOCK_TOKENS)
        return keys, (blocks, kv_heads, BLOCK_TOKENS, padded)


@dataclass(frozen=True, slots=True)
class Embed:
    """Embedding lookup for T tokens: out[t] = table[id - first], zeros for an ID outside the table.

    out: [T, H]. table: embedding table [V, H], float32 or bfloat16 bits; if the output head is tied to the embedding,
    the head's packed matrix, from which rows are then read. ids: look up "tokens" (token IDs) or "positions" (learned
    positions). first: first ID of the table, above 0 for a vocabulary-parallel slice. accumulate: if True, add to the
    present out[t]."""

    out: Float32
    table: Array | PackedMatrix
    ids: Literal["tokens", "positions"] = "tokens"
    first: int = 0
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation of rows of H = `len(weight)` elements: out = norm(x) * weight + bias.

    out, x: [rows, H], may be the same array. weight, bias: [H] (bias None: 0). kind: "rms" (RMSNorm) or "layer"
    (LayerNorm). epsilon: added to the mean square or variance. rows: "tokens" if the buffers have a row per token of
    the step; "outputs": `out` has only a row per token whose logits are needed, computed from that token's row of `x`.
    """

    out: Float32
    x: Float32
    weight: Float32
    bias: Float32 | None = None
    epsilon: float = 1e-5
    kind: Literal["rms", "layer"] = "rms"
    rows: Rows = "tokens"


@dataclass(frozen=True, slots=True)
class Activation:
    """Activation of the results of a product, with intermediate size F.

    gated: if True, it is activation(gate) * up, where the rows of the weight are in the order of
    `row_order.find_gate_order`; if False, activation(x). kind: "relu2" is relu squared, "gelu_tanh" GELU's tanh
    approximation. limit: if not 0, gate is capped at `limit`, up is clamped to [-limit, limit], and 1 is then added to
    up (gpt-oss). alpha: "silu" is x sigmoid(alpha x)."""

    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
    gated: bool
    limit: float = 0.0
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layer: out = activation(x Wᵀ + bias), from input size X to output size Y.

    out, x: [rows, Y] and [rows, X]. weight: packed W [Y, X], or [count, Y, X] with `steps`. bias: [Y], or [count Y] in
    the order of the matrices (None: 0). With a gated activation `out` is [rows, F], and Y is twice F padded to a
    multiple of 16: the rows of W and elements of `bias` are in the order of `row_order.find_gate_order`. accumulate: if
    True, the result is added to the present values of `out` (a residual connection). rows: "tokens" if `x` and `out`
    have a row per token of the step, "outputs" if a row per token whose logits are wanted. steps: column strides (of
    `out`, of `x`) between matrices, if `weight` has several (one per head). Matrix i reads X columns of `x` from column
    i * steps[1] on, and writes Y columns of `out` from column i * steps[0] on. activation: of the results (None:
    none)."""

    out: Float32
    x: Float32
    weight: PackedMatrix
    bias: Float32 | None = None
    accumulate: bool = False
    rows: Rows = "tokens"
    steps: tuple[int, int] = (0, 0)
    activation: Activation | None = None


@dataclass(frozen=True, slots=True)
class RopeStore:
    """QK norm (if given) and rotary embedding of the step's queries and keys, in place; keys and values are then
    written into the KV cache. T tokens, N query heads and K key-value heads of size D.

    qkv: [T, (N + 2K) D], queries first, then keys, then values. cache: KV cache of the layer. heads: N. cosine, sine:
    [positions, R/2], where the first R <= D features of a head are rotated in pairs i and i + R/2; None: no rotation
    (learned positions). query_norm, key_norm: RMSNorm weights [D] (None: no norm); epsilon: of these norms.
    queries_alone: if True, the keys are not rotated.
    """

    qkv: Float32
    cache: LayerCache
    heads: int
    cosine: Float32 | None = None
    sine: Float32 | None = None
    query_norm: Float32 | None = None
    key_norm: Float32 | None = None
    epsilon: float = 1e-6
    queries_alone: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal grouped-query attention of the step's T tokens over the cached keys and values of their sequences, with N
    query heads and K key-value heads of size D.

    qkv: [T, (N + 2K) D]; only its first N D columns, the queries, are read. out: [T, N D]. cache: the layer's KV cache.
    heads: N. window: tokens that a token attends to, itself included (0: no limit). scale: factor of the scores,
    usually D ** -0.5. softcap: c that turns the scaled scores x into c tanh(x / c) (0: none). sinks: [N], for each
    query head one more score, to a key without a value (None: none). chunks: if True, a token attends only to tokens of
    its chunk of `window` positions, counted from position 0."""

    out: Float32
    qkv: Float32
    cache: LayerCache
    heads: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Float32 | None = None
    chunks: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2: arXiv:2405.04434, section 2.1) over cached latent vectors, up to the
    input of the output projection. The projections to keys and values are absorbed into the projections of the queries
    and of the attention's output (section 2.1.2). T tokens; N heads, whose queries have size D = P + E with E rotated
    features and whose values have size V; latent vectors of size R, cached with the rotary key as C = R + E elements.

    out: [T, N V]. x: [T, H]. down: packed [C + Q, H], which projects to the latent vector, the rotary key and the
    queries' latent vector of size Q, or without `query_up` the queries themselves, Q = N D. latent_norm, query_norm:
    weights of the RMSNorms on both latent vectors, [R] and [Q] (None: no norm), with epsilon. query_up: packed [N D,
    Q]. key_up: packed, a matrix [R, P] for each head. value_up: packed, a matrix [V, R] for each head. wide: temporary
    buffer [T, N C + C + Q]. queries: temporary buffer [T, N D], unused without `query_up`. attended: temporary buffer
    [T, N C]. cache: the layer's KV cache, of latent vectors. cosine, sine: [positions, E/2]. scale: factor of the
    scores."""

    out: Float32
    x: Float32
    down: PackedMatrix
    latent_norm: Float32
    query_norm: Float32 | None
    query_up: PackedMatrix | None
    key_up: PackedMatrix
    value_up: PackedMatrix
    wide: Float32
    queries: Float32 | None
    attended: Float32
    cache: LayerCache
    cosine: Float32
    sine: Float32
    scale: float
    epsilon: float = 1e-6


class ExpertsWorkspace:
    """Temporary buffers of the mixture-of-experts layers of a model, shared by all layers.

    tokens: maximum number of tokens of a step. experts: number of experts. top_k: experts per token. hidden: hidden
    size. width: experts' intermediate size on this rank. Attribute `nbytes`: bytes of all buffers."""

    def __init__(self, tokens: int, experts: int, top_k: int, hidden: int, width: int) -> None:
        rows = tokens * top_k
        self.scores = np.zeros((tokens, experts), np.float32)
        self.weights = np.zeros((tokens, top_k), np.float32)
        self.chosen = np.zeros((tokens, top_k), np.int32)
        self.order, self.ends = np.zeros(rows, np.int32), np.zeros(experts, np.int32)
        self.act = np.zeros((rows, width), np.float32)
        self.down = np.zeros((rows, hidden), np.float32)
        self.nbytes = sum(array.nbytes for array in vars(self).values())


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture-of-experts layer: out[t] = sum over the token's top-k experts of weight * down(act(gate) * up); experts
    that this rank does not hold add nothing. T tokens, H hidden size, F intermediate size, E experts.

    out, x: [T, H]. router: packed [E, H], float32. up, down: packed [held, 2F, H] (in the order of
    `row_order.find_gate_order`) and [held, H, F] of the experts that this rank holds, which are those from index
    `first` on. workspace: temporary buffers. top_k: experts per token. activation: gated. router_kind: function
    that turns router logits into scores; "logits": the choice is by logits, the weights are their sigmoids. biases:
    of router [E], up [held, 2F], in the order of its rows, and down [held, H] (None: 0). choice_bias: [E], added to
    the scores for the top-k choice, not for the weights. normalise: if True, the top-k weights of a token are
    divided by their sum. scale: factor on the weights. groups: (G, K): group-limited routing: the experts form G
    groups, and a token's experts are chosen from its K best groups. The score of a group is the highest score of
    its experts or, with router_kind "sigmoid", the sum of the two highest. on_input: if True, the weights are
    factors of the experts' inputs, not of their outputs. accumulate: if True, add the result to the present out[t]."""

    out: Float32
    x: Float32
    router: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    workspace: ExpertsWorkspace
    top_k: int
    activation: Activation = Activation("silu", gated=True)
    router_kind: Literal["softmax", "sigmoid", "logits"] = "softmax"
    biases: tuple[Float32 | None, Float32 | None, Float32 | None] = (None, None, None)
    choice_bias: Float32 | None = None
    normalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    on_input: bool = False
    first: int = 0
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """Sigmoid gate of a shared expert, which scales `out` in place: out[t] *= sigmoid(x[t] · weight). out: [T, X]. x:
    [T, H]. weight: packed [1, H]. scores: temporary buffer [T, 1]."""

    out: Float32
    x: Float32
    weight: PackedMatrix
    scores: Float32


@dataclass(frozen=True, slots=True)
class Scale:
    """Product of rows and a number: out = factor * x, then with a softcap c > 0 out = c tanh(out / c).

    out, x: [rows, X], may be the same array. accumulate: if True, the result is added to the present values of `out`.
    rows: "tokens" if the buffers have a row per token of the step, "outputs" if a row per token whose logits are
    wanted."""

    out: Float32
    x: Float32
    factor: float = 1.0
    softcap: float = 0.0
    accumulate: bool = False
    rows: Rows = "tokens"


AnyOp = Embed | Norm | Linear | RopeStore | Attention | LatentAttention | Experts | Gate | Scale
