"""What autograd keeps of one layer, operation by operation, as closed forms in rows, tokens, widths and degrees.

An entry is (name, shape, bytes of an element, torch's name of the type); a storage that several operations keep is one
entry. Only the sizes in `Local` are numbers of a batch: arrays of them in the place of numbers price many at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.layout import Layout
from meshwright.spec.chunks import padded_documents
from meshwright.spec.config import ModelConfig

INDEX = 8
"""Bytes of a place, a token or a number of rows (int64)."""


class Entry(NamedTuple):
    """A saved tensor. kind: element type, "x" (the model's), "wide" (at least float32), "index" (int64), "int32" or
    "bool"."""

    name: str
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Local:
    """Sizes and settings of a micro-batch on one rank.

    Attributes:
        rows: Sequences.
        whole: Tokens of a sequence.
        tokens: Tokens of a sequence on this cp rank.
        slice: `tokens` / tp with sequence parallelism, else `tokens`.
        narrow: True if activations are narrower than float32, the type of sums.
        device: "cpu" or "cuda".
        masked: True if sequences pack several documents.
        starts: Tokens at which documents begin in each sequence; None if unknown.
        pairs: True for training on response pairs.
    """

    config: ModelConfig
    layout: Layout
    rows: int
    whole: int
    tokens: int
    slice: int
    narrow: bool
    device: str = "cpu"
    masked: bool = False  # whether rows pack several documents
    starts: tuple[tuple[int, ...], ...] | None = None  # where they begin in each row, where that is known
    pairs: bool = False  # whether what is learnt from is pairs of responses, not the next token

    @property
    def heads(self) -> int:
        """Query heads on this rank."""
        return self.config.heads // self.layout.tp

    @property
    def kv_heads(self) -> int:
        """Key-value heads on this rank."""
        return max(1, self.config.kv_heads // self.layout.tp)

    @property
    def ring(self) -> bool:
        """True for ring attention."""
        return self.layout.cp > 1 and self.layout.cp_method == "ring"

    @property
    def spread(self) -> bool:
        """True if experts are expert-parallel."""
        return self.layout.expert_parallel

    @property
    def routed(self) -> int:
        """Number of tokens that this rank routes."""
        return self.rows * (self.tokens // self.layout.tp if self.spread else self.tokens)


def layer(at: Local, name: str, number: int, computed: int, input_kept: bool) -> Iterator[Entry]:
    """Yield the tensors that a layer saves without recompute.

    at: sizes of the micro-batch; name: prefix, "layers.N"; number: index of the layer; computed: token copies that this
    rank's experts compute in a mixture; input_kept: the layer's input is saved already and not yielded again.
    """
    config = at.config
    if config.encoder:
        yield from encoder_layer(at, name)
        return
    yield from norm(at, f"{name}.attention_norm", input_kept)
    yield from attention(at, f"{name}.attention", config.layer_window(number))
    if config.post_norms:
        yield from norm(at, f"{name}.attention_post_norm")
    yield from norm(at, f"{name}.mlp_norm")
    if config.has_experts(number):
        yield from mixture(at, f"{name}.mlp", computed)
    else:
        yield from feed_forward(at, f"{name}.mlp", config.intermediate // at.layout.tp, config.gated)
    if config.post_norms:
        yield from norm(at, f"{name}.mlp_post_norm")


def encoder_layer(at: Local, name: str) -> Iterator[Entry]:
    """Yield the tensors that an encoder layer (post-norm) saves. at: sizes of the micro-batch; name: prefix,
    "layers.N"."""
    yield from attention(at, f"{name}.attention", None)
    yield from norm(at, f"{name}.attention_norm")
    yield from feed_forward(at, f"{name}.mlp", at.config.intermediate, at.config.gated)
    yield from norm(at, f"{name}.mlp_norm")


def norm(at: Local, name: str, input_kept: bool = False) -> Iterator[Entry]:
    """Yield the tensors that a norm over the hidden dimension saves. at: sizes of the micro-batch; name: prefix, such
    as "layers.3.mlp_norm"; input_kept: its input is saved already and not yielded again."""
    shape = at.rows, at.slice, at.config.hidden
    if at.config.norm == "layernorm":
        if not input_kept:
            yield Entry(f"{name}.input", shape, "x")
        for what in ("mean", "deviation"):  # PyTorch keeps them in the input's type on a CPU
            yield Entry(f"{name}.{what}", (at.rows, at.slice, 1), "x" if at.device == "cpu" else "wide")
    else:
        yield from _rms(at, name, shape, input_kept)


def _rms(at: Local, name: str, shape: tuple[int, ...], input_kept: bool) -> Iterator[Entry]:
    """Yield the tensors that an RMS norm saves: its input in at least float32, a scale for each token, their product.

    at: sizes of the micro-batch; name: prefix; shape: of the input; input_kept: an input that is at least float32 is
    saved already and not yielded again.
    """
    if at.narrow or not input_kept:
        yield Entry(f"{name}.input", shape, "wide")
    yield Entry(f"{name}.scale", (*shape[:-1], 1), "wide")
    yield Entry(f"{name}.scaled", shape, "wide")


def attention(at: Local, name: str, window: int | None) -> Iterator[Entry]:
    """Yield the tensors that attention saves, from the norm's output to the residual addition. at: sizes of the
    micro-batch; name: prefix, "layers.N.attention"; window: most tokens that a query attends to, None for all."""
    config, layout = at.config, at.layout
    size, heads, kv_heads = config.head_dim, at.heads, at.kv_heads
    tokens = at.rows, at.tokens
    yield Entry(f"{name}.qkv.input", (*tokens, config.hidden), "x")
    traded = layout.cp > 1 and layout.cp_method == "ulysses"
    turned = config.positions == "rope" or config.query_key_norm  # then queries and keys are copies of the product's
    repeated = repeats(at, window)
    views = [not turned, not (turned or repeated), not repeated]
    wide_views = config.query_key_norm and not at.narrow  # what is normed is kept as it is
    if wide_views or (not traded and any(views)):
        yield Entry(f"{name}.qkv.output", (*tokens, (heads + 2 * kv_heads) * size), "x")
    if config.query_key_norm:
        yield from _rms(at, f"{name}.query_norm", (*tokens, heads, size), input_kept=True)
        yield from _rms(at, f"{name}.key_norm", (*tokens, kv_heads, size), input_kept=True)
    if traded:
        heads, copies = heads // layout.cp, max(1, layout.cp // kv_heads)
        kv_heads = kv_heads * copies // layout.cp
        yield Entry(f"{name}.traded", (at.rows, heads + 2 * kv_heads, at.whole, size), "x")
    elif turned:
        yield Entry(f"{name}.query", (at.rows, heads, at.tokens, size), "x")
        if not repeated:
            yield Entry(f"{name}.key", (at.rows, kv_heads, at.tokens, size), "x")
    length = at.whole if traded else at.tokens
    if at.ring:
        yield Entry(f"{name}.log_sum", (at.rows, heads, length), "wide")
    elif at.device == "cuda":
        yield from _fused(at, name, heads, length, window)
    elif config.encoder:
        yield Entry(f"{name}.log_sum", (at.rows, heads, length), "wide")
    yield Entry(f"{name}.output.input", (*tokens, at.heads * size), "x")


def _fused(at: Local, name: str, heads: int, length: int, window: int | None) -> Iterator[Entry]:
    """Yield the tensors that PyTorch's CUDA attention kernels save in addition to queries, keys, values and result, by
    their sources (aten/src/ATen/native/transformers/cuda).

    heads, length: query heads and tokens over which the rank attends; window: most tokens that a query attends to, None
    for all. Flash attention saves the log-sum-exp and the state of its random numbers. The memory-efficient kernel, for
    masks and float32, has a copy of keys and values for every query head, an additive mask, and the log-sum-exp for a
    multiple of 32 queries.
    """
    limited = dense_mask(at, window)
    if repeats(at, window):
        for what in ("keys", "values"):
            yield Entry(f"{name}.{what}_repeated", (at.rows, heads, length, at.config.head_dim), "x")
    # An encoder's mask is one for all layers, made of numbers to be added already.
    if limited and not at.config.encoder:
        yield Entry(f"{name}.mask", (at.rows if at.masked else 1, 1, length, length), "x")
    queries = -(-length // 32) * 32 if limited or not at.narrow else length
    yield Entry(f"{name}.log_sum", (at.rows, heads, queries), "wide")
    if not varlen(at, window):
        yield Entry(f"{name}.random_state", (2,), "index")
    if length > at.tokens:  # the kernel's own result, before it is traded back
        yield Entry(f"{name}.core", (at.rows, heads, length, at.config.head_dim), "x")


def repeats(at: Local, window: int | None) -> bool:
    """Return True if keys and values are copied for every query head, as the CUDA kernel does not support grouped
    queries. at: sizes of the micro-batch; window: most tokens that a query attends to, None for all."""
    if at.device != "cuda" or at.ring or at.config.encoder:
        return False
    copies = max(1, at.layout.cp // at.kv_heads)
    return at.heads > at.kv_heads * copies and (dense_mask(at, window) or not at.narrow)


def masked(at: Local, window: int | None) -> bool:
    """Return True if some token does not attend to all tokens before it, because of documents or a window. at: sizes of
    the micro-batch; window: most tokens that a query attends to, None for all."""
    return at.masked or (window is not None and window < at.whole)


def varlen(at: Local, window: int | None) -> bool:
    """Return True if attention runs in variable-length kernels, which need no mask (`model/varlen_attention.py`): on
    GPUs, with packed documents or a window, for types and head sizes that flash attention supports. window: tokens that
    a query sees at most."""
    size = at.config.head_dim
    flash = at.narrow and size % 8 == 0 and size <= 256
    return at.device == "cuda" and flash and not at.ring and not at.config.encoder and masked(at, window)


def dense_mask(at: Local, window: int | None) -> bool:
    """Return True if CUDA attention reads a mask of all pairs of tokens. window: tokens that a query sees at most."""
    return masked(at, window) and not varlen(at, window)


def varlen_documents(at: Local) -> int:
    """Return the number of documents for which variable-length attention is called; where it is not known how many are
    packed, the fewest."""
    if not at.masked:
        return at.rows
    return padded_documents(at.rows if at.starts is None else sum(map(len, at.starts)))


def feed_forward(at: Local, name: str, width: int, gated: bool, input_tokens: bool = True) -> Iterator[Entry]:
    """Yield the tensors that an MLP saves. at: sizes of the micro-batch; name: prefix, such as "layers.3.mlp"; width:
    hidden columns on this rank; gated: True for SwiGLU and the like; input_tokens: its input is not saved by others."""
    tokens = at.rows, at.tokens
    if input_tokens:
        yield Entry(f"{name}.up.input", (*tokens, at.config.hidden), "x")
    if gated or at.config.activation != "relu":  # ReLU needs its result alone
        yield Entry(f"{name}.up.output", (*tokens, width * (2 if gated else 1)), "x")
    if gated:
        yield Entry(f"{name}.activation", (*tokens, width), "x")
    yield Entry(f"{name}.down.input", (*tokens, width), "x")


def mixture(at: Local, name: str, received: int) -> Iterator[Entry]:
    """Yield the tensors that a mixture of experts saves. at: sizes of the micro-batch; name: prefix, "layers.N.mlp";
    received: token copies that this rank's experts compute."""
    config, layout, hidden = at.config, at.layout, at.config.hidden
    chosen, experts = config.experts_per_token, config.experts
    routed, copies = at.routed, at.routed * config.experts_per_token
    wide_router = config.router == "sigmoid" and at.narrow  # it multiplies copies in the type of sums
    if not wide_router or (config.shared_intermediate and not _apart(at)):
        yield Entry(f"{name}.input", (routed, hidden), "x")
    if wide_router:
        yield Entry(f"{name}.router.input", (routed, hidden), "wide")
        yield Entry(f"{name}.router.weight", (experts, hidden), "wide")
    yield Entry(f"{name}.router.scores", (routed, experts), "wide")
    yield Entry(f"{name}.router.chosen", (routed, chosen), "index")
    if config.normalise_choice:
        yield Entry(f"{name}.router.unnormalised", (routed, chosen), "wide")
        yield Entry(f"{name}.router.sum", (routed, 1), "wide")
    yield Entry(f"{name}.router.weights", (routed, chosen), "x")
    yield from balance(at, name)
    yield Entry(f"{name}.experts.inverse", (copies,), "index")
    held, width = experts // layout.ep, config.expert_intermediate // (layout.etp if at.spread else layout.tp)
    if at.spread:
        yield Entry(f"{name}.experts.order_here", (received,), "index")
        yield Entry(f"{name}.experts.inverse_here", (received,), "index")
    yield Entry(f"{name}.experts.ends", (held,), "int32")
    yield Entry(f"{name}.experts.up.input", (received, hidden), "x")
    yield Entry(f"{name}.experts.up.output", (received, 2 * width), "x")
    yield Entry(f"{name}.experts.activation", (received, width), "x")
    yield Entry(f"{name}.experts.down.input", (received, width), "x")
    yield Entry(f"{name}.experts.order", (copies,), "index")
    yield Entry(f"{name}.experts.output", (routed, chosen, hidden), "x")
    if config.shared_intermediate:
        yield from shared(at, f"{name}.shared")


def balance(at: Local, name: str) -> Iterator[Entry]:
    """Yield the tensors that the load-balancing loss and biases save. at: sizes of the micro-batch; name: prefix,
    "layers.N.mlp"."""
    if at.config.router_loss:
        yield Entry(f"{name}.router.load", (at.rows, at.config.experts), "wide")
    if at.config.router_bias:
        yield Entry(f"{name}.router.above_mean", (at.config.experts,), "wide")


def shared(at: Local, name: str) -> Iterator[Entry]:
    """Yield the tensors that the shared expert saves; its input is the mixture's, saved already, unless that is only a
    slice of the tokens. at: sizes of the micro-batch; name: prefix, "layers.N.mlp.shared"."""
    config = at.config
    yield from feed_forward(at, name, config.shared_intermediate // at.layout.tp, True, _apart(at))
    if config.shared_gate:
        yield Entry(f"{name}.gate", (at.rows, at.tokens, 1), "x")
        yield Entry(f"{name}.output", (at.rows, at.tokens, config.hidden), "x")


def _apart(at: Local) -> bool:
    """Return True if the shared expert reads all tokens, while the router reads only this rank's slice of them."""
    return at.spread and at.layout.tp > 1


def products(at: Local, name: str, mixed: bool, arrived: int, computed: int) -> Iterator[Entry]:
    """Yield the tensors that a layer saves under selective recomputation: results of matrix products and of reductions.

    at: sizes of the micro-batch; name: prefix, "layers.N"; mixed: the layer has experts; arrived, computed: token
    copies that this rank receives over ep, and that its experts compute.
    """
    config, layout = at.config, at.layout
    tokens = at.rows, at.tokens
    yield Entry(f"{name}.attention.qkv.output", (*tokens, (at.heads + 2 * at.kv_heads) * config.head_dim), "x")
    if at.ring:
        yield Entry(f"{name}.attention.core", (at.rows, at.heads, at.tokens, config.head_dim), "x")
        yield Entry(f"{name}.attention.log_sum", (at.rows, at.heads, at.tokens), "wide")
    yield from _row_parallel(at, f"{name}.attention.output")
    if not mixed:
        width = config.intermediate // layout.tp * (2 if config.gated else 1)
        yield Entry(f"{name}.mlp.up.output", (*tokens, width), "x")
        yield from _row_parallel(at, f"{name}.mlp.down")
        return
    yield from mixture_products(at, f"{name}.mlp", arrived, computed)


def _row_parallel(at: Local, name: str) -> Iterator[Entry]:
    """Yield the result of a row-parallel matrix product and, under tp, its sum over the ranks. name: prefix, such as
    "layers.3.attention.output"."""
    hidden = at.config.hidden
    yield Entry(f"{name}.product", (at.rows, at.tokens, hidden), "x")
    if at.layout.tp > 1:
        yield Entry(f"{name}.sum", (at.rows, at.slice, hidden), "x")


def mixture_products(at: Local, name: str, arrived: int, computed: int) -> Iterator[Entry]:
    """Yield the tensors that a mixture of experts saves under selective recomputation. at: sizes of the micro-batch;
    name: prefix, "layers.N.mlp"; arrived, computed: token copies that this rank receives over ep, and that its experts
    compute."""
    config, layout, hidden = at.config, at.layout, at.config.hidden
    copies = at.routed * config.experts_per_token
    width = config.expert_intermediate // (layout.etp if at.spread else layout.tp)
    logits = "wide" if config.router == "sigmoid" else "x"
    yield Entry(f"{name}.router.logits", (at.routed, config.experts), logits)
    yield Entry(f"{name}.experts.up.output", (computed, 2 * width), "x")
    yield Entry(f"{name}.experts.down.output", (computed, hidden), "x")
    if layout.ep > 1:
        yield Entry(f"{name}.experts.dispatched", (arrived, hidden), "x")
        yield Entry(f"{name}.experts.combined", (copies, hidden), "x")
    if layout.etp > 1:
        yield Entry(f"{name}.experts.sum", (arrived, hidden), "x")
    if config.router_loss:
        parts = (layout.cp > 1) + (at.spread and layout.tp > 1)
        for number in range(parts):
            yield Entry(f"{name}.router.load.{number}", (at.rows, config.experts), "wide")
    if config.shared_intermediate:
        columns = config.shared_intermediate // layout.tp
        yield Entry(f"{name}.shared.up.output", (at.rows, at.tokens, 2 * columns), "x")
        yield Entry(f"{name}.shared.down.output", (at.rows, at.tokens, hidden), "x")
        if config.shared_gate:
            yield Entry(f"{name}.shared.gate", (at.rows, at.tokens, 1), "x")
    if layout.tp > 1 and (not at.spread or config.shared_intermediate):
        yield Entry(f"{name}.output", (at.rows, at.slice, hidden), "x")
