"""The operators of attention, in order, each with its cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number, at_least
from meshwright.planner.cost.operators import (
    CollectiveCall,
    LinearShape,
    Operation,
    Operator,
    Phase,
    SavedTensor,
    elementwise_kernels,
    elementwise_operator,
    forward_and_backward,
    index_tensor,
    linear_operator,
    make_operator,
    rms_norm_saved,
    wide_tensor,
    x_tensor,
)
from meshwright.planner.cost.tensor_parallel import (
    column_parallel_calls,
    mean_square_calls,
    row_parallel_calls,
    row_parallel_saved,
)
from meshwright.spec.latent_attention import LatentAttention
from meshwright.spec.policy import ACCELERATOR_TILE
from meshwright.spec.work import keys_per_token

_ACTIVATIONS: tuple[tuple[Phase, int], ...] = (("forward", 1), ("input", 2))
"""Phases, with numbers of kernels, of a product of two activations: two input gradients, no weight gradient."""


def attention_operators(batch: MicroBatch, kind: LayerKind) -> Iterator[Operator]:
    """Yield the operators of attention in forward order: projections, rotary positions, softmax(q kᵀ) v and output
    projection. kind: kind of the layer."""
    config, tokens, window = batch.config, (batch.rows, batch.tokens), kind.window
    size = max(config.head_dim, config.value_dim)  # of queries, keys and values in the kernel
    query, key, value = (
        x_tensor(f"attention.{name}", batch.rows, heads, batch.tokens, features)
        for name, heads, features in (
            ("query", batch.heads, size), ("key", batch.kv_heads, size),
            ("value", batch.kv_heads, _count_value_features(batch)),
        )
    )  # fmt: skip
    rotated = kind.rotates or config.query_key_norm  # then queries and keys are copies of the product's
    repeated = batch.repeats(window)
    if config.latent is not None:
        yield from _latent_projections(batch, config.latent)
    else:
        fused = x_tensor("attention.qkv.output", *tokens, batch.qkv_width)
        # Views of the product's result that live on: queries, keys, values; or what is normalised in place of a copy.
        views = not batch.ulysses and (not rotated or not repeated)
        read = views or (config.query_key_norm and not batch.narrow)
        yield linear_operator(
            batch, "attention.qkv", LinearShape(batch.all_tokens, batch.qkv_width, config.hidden, bias=config.qkv_bias),
            saved=(x_tensor("attention.qkv.input", *tokens, config.hidden), *([fused] if read else [])), kept=(fused,),
            collectives=column_parallel_calls(batch, "attention.input"),
        )  # fmt: skip
    yield elementwise_operator(batch, "attention.join", batch.all_tokens * batch.qkv_width, "join")
    elements = batch.all_tokens * (batch.heads + batch.kv_heads) * size
    if config.query_key_norm:
        yield elementwise_operator(
            batch, "attention.norms", elements, "rmsnorm", saved=_query_key_norms(batch),
            kept=_saved_mean_squares(batch), collectives=[*mean_square_calls(batch)] * (2 * config.projection_norm),
            parameters=(batch.heads + batch.kv_heads if config.projection_norm else 2) * size,
        )  # fmt: skip
    if kind.rotates:
        yield elementwise_operator(batch, "attention.rotary", elements, "rotary")
        if config.rotated_norm:
            norms = _rotated_norms(batch, size)
            yield elementwise_operator(batch, "attention.rotated_norms", elements, "rmsnorm", saved=norms)
    elif kind.tempered:
        queries = batch.all_tokens * batch.heads * size
        saved = () if batch.ulysses else (query,)
        yield elementwise_operator(batch, "attention.temper", queries, "scaled", saved=saved)
    if batch.ulysses:
        yield _ulysses_operator(batch)
    elif rotated:
        copied = (value,) if config.latent else ()
        yield make_operator("attention.rotated", saved=((query,) if repeated else (query, key)) + copied)
    if batch.ring:
        yield make_operator("attention.ring", collectives=_ring_messages(batch))
    if batch.kernel == "scores":
        yield from _unfused_attention(batch)
    elif batch.kernel == "tiled":
        yield from _tiled_attention(batch, window)
    else:
        yield _flash_attention(batch, window)
    if config.attention_sinks:
        yield make_operator("attention.sinks", parameters=batch.heads)
    inner = batch.heads * config.value_dim
    yield linear_operator(
        batch, "attention.output", LinearShape(batch.all_tokens, config.hidden, inner, bias=config.output_bias),
        saved=(x_tensor("attention.output.input", *tokens, inner),), kept=row_parallel_saved(batch, "attention.output"),
        collectives=row_parallel_calls(batch, "attention.output"),
    )  # fmt: skip


def _latent_projections(batch: MicroBatch, latent: LatentAttention) -> Iterator[Operator]:
    """Yield the operators of multi-head latent attention (DeepSeek) before softmax(q kᵀ) v: down- and up-projections
    and the norms between them. latent: sizes of the latent vectors."""
    config, tokens = batch.config, (batch.rows, batch.tokens)
    for name, (outputs, inputs) in latent.products(config.hidden, batch.heads, config.head_dim).items():
        first = name == "qkv"
        output = x_tensor(f"attention.{name}.output", *tokens, outputs)
        saved = x_tensor(f"attention.{name}.input", *tokens, inputs)
        if not first:  # the input is normalised
            norm, elements = f"attention.{name.replace('_up', '_norm')}", batch.all_tokens * inputs
            copies = [wide_tensor(f"{norm}.input", *saved.shape)] * batch.narrow
            tensors = *copies, *rms_norm_saved(norm, saved.shape, centred=False)
            yield elementwise_operator(batch, norm, elements, "rmsnorm", saved=tensors, parameters=inputs)
        # Latent vectors are views of the first product, which the norms of wide types keep.
        yield linear_operator(
            batch, f"attention.{name}", LinearShape(batch.all_tokens, outputs, inputs),
            saved=(saved, output) if first and not batch.narrow else (saved,), kept=(output,),
            collectives=column_parallel_calls(batch, "attention.input") if first else (),
        )  # fmt: skip


def _query_key_norms(batch: MicroBatch) -> Iterator[SavedTensor]:
    """Yield the tensors that the norms of queries and keys save for the backward; they include a copy of the input only
    for types narrower than float32."""
    for name, heads in (("attention.query_norm", batch.heads), ("attention.key_norm", batch.kv_heads)):
        size = batch.config.head_dim
        one = (heads * size,) if batch.config.projection_norm else (heads, size)
        shape = batch.rows, batch.tokens, *one
        if batch.narrow:
            yield wide_tensor(f"{name}.input", *shape)
        yield from rms_norm_saved(name, shape, batch.config.zero_centred_norms)


def _rotated_norms(batch: MicroBatch, size: int) -> Iterator[SavedTensor]:
    """Yield the tensors saved for the backward by norms of queries and keys that follow the rotary rotation. size:
    elements of a head."""
    for name, heads in (("attention.query_rotated", batch.heads), ("attention.key_rotated", batch.kv_heads)):
        yield wide_tensor(f"{name}.input", batch.rows, heads, batch.tokens, size)
        yield wide_tensor(f"{name}.scale", batch.rows, heads, batch.tokens, 1)


def _saved_mean_squares(batch: MicroBatch) -> list[SavedTensor]:
    """Return the mean squares of queries and keys, all-reduced over tp. Selective recompute saves them, as it saves the
    results of all collectives."""
    names = ("query", "key") if batch.config.projection_norm and batch.layout.tp > 1 else ()
    return [wide_tensor(f"attention.{name}_norm.mean_square", batch.rows, batch.tokens, 1) for name in names]


def _ulysses_operator(batch: MicroBatch) -> Operator:
    """Return the operator of the all-to-alls of Ulysses context parallelism: before attention each cp rank receives all
    tokens of some heads; after it, its own tokens of all heads."""
    one = batch.all_tokens * batch.config.head_dim * batch.itemsize
    again = batch.layout.recompute != "none"
    sent = {
        "attention.heads": batch.heads + 2 * batch.kv_heads * batch.key_value_copies,
        "attention.tokens": batch.heads,
    }
    calls = [
        call
        for site, heads in sent.items()
        for call in forward_and_backward("context", "cp", "all-to-all", site, (heads * one,) * 2, again)
    ]
    heads, kv_heads = _kernel_heads(batch)
    exchanged = x_tensor("attention.exchanged", batch.rows, heads + 2 * kv_heads, batch.sequence, batch.config.head_dim)
    return make_operator("attention.all_to_all", saved=[exchanged], collectives=calls)


def _kernel_heads(batch: MicroBatch) -> tuple[Number, Number]:
    """Return the numbers of (query heads, key-value heads) for which this rank's attention kernel computes: under
    Ulysses, those after the all-to-all."""
    if not batch.ulysses:
        return batch.heads, batch.kv_heads
    return batch.heads // batch.cp, batch.kv_heads * batch.key_value_copies // batch.cp


def _unfused_attention(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of softmax(q kᵀ) v without a fused kernel: two batched matrix products with the scores
    written to memory, softmax and dropout."""
    size, heads = batch.config.head_dim, batch.rows * batch.heads
    queries, keys = batch.tokens, batch.sequence
    flops = 2.0 * queries * keys * size
    moved = batch.itemsize * (queries * keys + (queries + keys) * size)
    for name, shape in (("attention.scores", (queries, keys, size)), ("attention.values", (queries, size, keys))):
        both = [Operation(name, "product", phase, flops, moved, shape, heads * times) for phase, times in _ACTIVATIONS]
        yield make_operator(name, both)
    scores = heads * queries * keys
    yield elementwise_operator(batch, "attention.softmax", scores, "softmax")
    if batch.engine.dropout:
        yield elementwise_operator(batch, "attention.dropout", scores, "scores_dropout")


def _tiled_attention(batch: MicroBatch, window: int | None) -> Iterator[Operator]:
    """Yield the operators of attention with softcap c, softmax(c tanh(q kᵀ / c)) v, computed tile by tile in plain
    torch on an accelerator (`model/tiled_attention.py`).

    The scores of a tile are written to memory in float32, and the backward computes them again. The product q kᵀ is in
    float32, the others are in the model's type. window: most tokens that a query attends to, None for all.
    """
    size = batch.config.head_dim
    seen = max(1, round(batch.sequence / batch.documents))
    tile = min(ACCELERATOR_TILE[0], seen)
    keys = keys_per_tile(seen, tile, window)
    lines = batch.all_tokens * batch.heads  # queries of all heads
    tiles = at_least(lines * keys // ACCELERATOR_TILE[1], -(-batch.tokens // tile))
    scores = lines * keys
    shape, flops = (lines / tiles, keys, size), 2.0 * scores * size / tiles
    operands = (lines + batch.all_tokens * batch.kv_heads) * size
    wide = batch.wide * (scores + operands) / tiles
    narrow = batch.itemsize * (scores + operands) / tiles
    product = Operation("attention.scores", "float32 product", "forward", flops, wide, shape, tiles)
    yield make_operator("attention.scores", (product, product._replace(phase="input")))
    passes = elementwise_kernels(batch, "attention.softmax", scores / tiles, "capped_softmax")
    yield make_operator("attention.softmax", (one._replace(count=one.count * tiles) for one in passes))
    value = Operation("attention.values", "product", "forward", flops, narrow, shape, tiles)
    # Of probabilities, values, queries and keys.
    gradients = Operation("attention.gradients", "product", "input", flops, narrow, shape, 4 * tiles)
    yield _flash_attention(batch, window)._replace(name="attention.values", operations=(value, gradients))


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


def _count_value_features(batch: MicroBatch) -> int:
    """Return the number of features of a value vector in the attention kernel. The engine `meshwright` pads the values
    of latent attention to the size of queries, except on a CPU without context parallelism."""
    if batch.engine.name == "meshwright" and (batch.device == "cuda" or batch.ring or batch.ulysses):
        return max(batch.config.head_dim, batch.config.value_dim)
    return batch.config.value_dim


def _flash_attention(batch: MicroBatch, window: int | None) -> Operator:
    """Return the operator of softmax(q kᵀ) v in a flash-attention kernel, for this rank's heads and tokens. Under ring
    attention every cp rank has the same work. window: most tokens that a query attends to, None for all."""
    config, size = batch.config, batch.config.head_dim
    # A decoder's kernel skips masked keys, an encoder's computes all keys with a mask.
    seen = batch.sequence if config.encoder else max(1, round(batch.sequence / batch.documents))
    keys_seen = keys_per_token(seen, window, not config.encoder, config.window_chunks)
    values, per_feature = _count_value_features(batch), 2.0 * keys_seen * batch.heads * batch.all_tokens
    forward = per_feature * (size + values)
    # The scores again, gradients of queries and keys; gradients of probabilities and values (`FLASH_BACKWARD`).
    backward = per_feature * (3 * size + 2 * values)
    moved = batch.itemsize * batch.all_tokens * (batch.qkv_width + batch.heads * size)
    name = "attention.core.ring" if batch.ring else "attention.core"
    row = batch.sequence / (2 * batch.cp) if batch.ring else batch.sequence  # a rank has pieces of each sequence
    operations = (
        Operation(name, "attention", "forward", forward, moved, (row, keys_seen, size)),
        Operation(name, "attention", "input", backward, 2 * moved, (row, keys_seen, size)),
    )
    heads, _ = _kernel_heads(batch)
    length = batch.sequence if batch.ulysses else batch.tokens
    log_sum = wide_tensor("attention.log_sum", batch.rows, heads, length)
    saved: Iterable[SavedTensor] = (log_sum,) if config.encoder else ()
    kept: tuple[SavedTensor, ...] = ()
    if batch.ring:
        result = x_tensor("attention.core", batch.rows, batch.heads, batch.tokens, size)
        # The output's input is a copy of a padded result.
        saved, kept = (log_sum, result) if config.value_dim < size else (log_sum,), (result, log_sum)
    elif batch.device == "cuda" and not batch.capped:
        saved = _cuda_kernel_saved(batch, heads, length, window)
    return make_operator("attention.core", operations, saved=saved, kept=kept)


def _ring_messages(batch: MicroBatch) -> Iterator[CollectiveCall]:
    """Yield the messages of ring attention, each of which overlaps the attention with the previous KV block: keys and
    values in the forward; in the backward also their gradients, the last of which are sent back to the rank that owns
    the keys."""
    one = 2 * batch.kv_heads * batch.all_tokens * batch.config.head_dim
    blocks, gradients = one * batch.itemsize, one * batch.wide
    back = ("attention.ring.backward", blocks), ("attention.ring.gradients", gradients)
    sent, again = (("attention.ring", blocks),), batch.layout.recompute == "full"
    yield CollectiveCall("context", "ring", "send", sent, "forward", batch.cp - 1, again, "attention")
    yield CollectiveCall("context", "ring", "send", back, "input", batch.cp - 1, overlaps="attention")
    yield CollectiveCall("context", "ring", "send", back[1:], "input")


def _cuda_kernel_saved(batch: MicroBatch, heads: Number, length: Number, window: int | None) -> Iterator[SavedTensor]:
    """Yield the tensors that PyTorch's CUDA attention kernels save for the backward in addition to queries, keys,
    values and result, as in their sources (aten/src/ATen/native/transformers/cuda).

    heads, length: query heads and tokens for which the rank computes; window: most tokens that a query attends to, None
    for all. Flash attention saves the log-sum-exp and the random-number state. The memory-efficient kernel (for masks
    and float32) saves keys and values repeated for every query head, an additive mask, and the log-sum-exp for a number
    of queries rounded up to a multiple of 32.
    """
    limited, size = batch.dense_mask(window), batch.config.head_dim
    if batch.repeats(window):
        for what in ("keys", "values"):
            yield x_tensor(f"attention.{what}_repeated", batch.rows, heads, length, size)
    # An encoder's additive mask is one for all layers.
    if limited and not batch.config.encoder:
        yield x_tensor("attention.mask", batch.rows if batch.masked else 1, 1, length, length)
    queries = -(-length // 32) * 32 if limited or not batch.narrow else length
    yield wide_tensor("attention.log_sum", batch.rows, heads, queries)
    if not batch.varlen(window):
        yield index_tensor("attention.random_state", 2)
    if batch.ulysses:  # the kernel's own result, before the all-to-all
        yield x_tensor("attention.core", batch.rows, heads, length, size)
