"""The operators of attention, in order, each with its cost."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number, at_least
from meshwright.planner.cost.operators import (
    FLASH_BACKWARD,
    CollectiveCall,
    LinearShape,
    Operation,
    Operator,
    Phase,
    SavedTensor,
    elementwise_kernels,
    linear_operator,
    rms_norm_saved,
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
    config = batch.config
    size = max(config.head_dim, config.value_dim)  # of queries, keys and values in the kernel
    tokens, window = (batch.rows, batch.tokens), kind.window
    rotated = kind.rotates or config.query_key_norm  # then queries and keys are copies of the product's
    repeated = batch.repeats(window)
    fused = SavedTensor("attention.qkv.output", (*tokens, batch.qkv_width), "x")
    # Views of the product's result that live on: queries, keys, values; or what is normalised in place of a copy.
    views = not batch.ulysses and (not rotated or not repeated)
    read = views or (config.query_key_norm and not batch.narrow)
    saved = (SavedTensor("attention.qkv.input", (*tokens, config.hidden), "x"), *([fused] if read else []))
    if config.latent is not None:
        yield from _latent_projections(batch, config.latent)
    else:
        yield linear_operator(
            batch, "attention.qkv", LinearShape(batch.all_tokens, batch.qkv_width, config.hidden, bias=config.qkv_bias),
            saved=saved, kept=(fused,), collectives=tuple(column_parallel_calls(batch, "attention.input")),
        )  # fmt: skip
    yield Operator(
        "attention.join", elementwise_kernels(batch, "attention.join", batch.all_tokens * batch.qkv_width, "join")
    )
    elements = batch.all_tokens * (batch.heads + batch.kv_heads) * size
    if config.query_key_norm:
        yield Operator(
            "attention.norms", elementwise_kernels(batch, "attention.norms", elements, "rmsnorm"),
            tuple(_query_key_norms(batch)), kept=_saved_mean_squares(batch),
            collectives=tuple(mean_square_calls(batch)) * 2 if config.projection_norm else (),
            parameters=(batch.heads + batch.kv_heads if config.projection_norm else 2) * size,
        )  # fmt: skip
    if kind.rotates:
        yield Operator("attention.rotary", elementwise_kernels(batch, "attention.rotary", elements, "rotary"))
        if config.rotated_norm:
            name = "attention.rotated_norms"
            yield Operator(
                name, elementwise_kernels(batch, name, elements, "rmsnorm"), tuple(_rotated_norms(batch, size))
            )
    elif kind.tempered:
        queries = batch.all_tokens * batch.heads * size
        saved = (
            ()
            if batch.ulysses
            else (SavedTensor("attention.query", (batch.rows, batch.heads, batch.tokens, size), "x"),)
        )
        yield Operator("attention.temper", elementwise_kernels(batch, "attention.temper", queries, "scaled"), saved)
    if batch.ulysses:
        yield from _ulysses_operators(batch)
    elif rotated:
        query = SavedTensor("attention.query", (batch.rows, batch.heads, batch.tokens, size), "x")
        key = SavedTensor("attention.key", (batch.rows, batch.kv_heads, batch.tokens, size), "x")
        value = (SavedTensor("attention.value", key.shape, "x"),) if config.latent else ()  # padded
        yield Operator("attention.rotated", saved=((query,) if repeated else (query, key)) + value)
    if batch.ring:
        yield Operator("attention.ring", collectives=tuple(_ring_messages(batch)))
    if batch.kernel == "scores":
        yield from _unfused_attention(batch)
    elif batch.kernel == "tiled":
        yield from _tiled_attention(batch, window)
    else:
        yield _flash_attention(batch, window)
    if config.attention_sinks:
        yield Operator("attention.sinks", parameters=batch.heads)
    inner = batch.heads * config.value_dim
    yield linear_operator(
        batch, "attention.output", LinearShape(batch.all_tokens, config.hidden, inner, bias=config.output_bias),
        saved=(SavedTensor("attention.output.input", (*tokens, inner), "x"),),
        kept=row_parallel_saved(batch, "attention.output"),
        collectives=tuple(row_parallel_calls(batch, "attention.output")),
    )  # fmt: skip


def _latent_projections(batch: MicroBatch, latent: LatentAttention) -> Iterator[Operator]:
    """Yield the operators of multi-head latent attention (DeepSeek) before softmax(q kᵀ) v: down- and up-projections
    and the norms between them. latent: sizes of the latent vectors."""
    config, tokens = batch.config, (batch.rows, batch.tokens)
    for name, (outputs, inputs) in latent.products(config.hidden, batch.heads, config.head_dim).items():
        first = name == "qkv"
        output = SavedTensor(f"attention.{name}.output", (*tokens, outputs), "x")
        saved = SavedTensor(f"attention.{name}.input", (*tokens, inputs), "x")
        if not first:  # the input is normalised
            norm = name.replace("_up", "_norm")
            copies = (SavedTensor(f"attention.{norm}.input", saved.shape, "wide"),) if batch.narrow else ()
            yield Operator(
                f"attention.{norm}",
                elementwise_kernels(batch, f"attention.{norm}", batch.all_tokens * inputs, "rmsnorm"),
                (*copies, *rms_norm_saved(f"attention.{norm}", saved.shape, centred=False)), parameters=inputs,
            )  # fmt: skip
        # Latent vectors are views of the first product, which the norms of wide types keep.
        yield linear_operator(
            batch, f"attention.{name}", LinearShape(batch.all_tokens, outputs, inputs),
            saved=(saved, output) if first and not batch.narrow else (saved,), kept=(output,),
            collectives=tuple(column_parallel_calls(batch, "attention.input")) if first else (),
        )  # fmt: skip


def _query_key_norms(batch: MicroBatch) -> Iterator[SavedTensor]:
    """Yield the tensors that the norms of queries and keys save for the backward; they include a copy of the input only
    for types narrower than float32."""
    for name, heads in (("attention.query_norm", batch.heads), ("attention.key_norm", batch.kv_heads)):
        size = batch.config.head_dim
        one = (heads * size,) if batch.config.projection_norm else (heads, size)
        shape = batch.rows, batch.tokens, *one
        if batch.narrow:
            yield SavedTensor(f"{name}.input", shape, "wide")
        yield from rms_norm_saved(name, shape, batch.config.zero_centred_norms)


def _rotated_norms(batch: MicroBatch, size: int) -> Iterator[SavedTensor]:
    """Yield the tensors saved for the backward by norms of queries and keys that follow the rotary rotation. size:
    elements of a head."""
    for name, heads in (("attention.query_rotated", batch.heads), ("attention.key_rotated", batch.kv_heads)):
        shape = batch.rows, heads, batch.tokens
        yield SavedTensor(f"{name}.input", (*shape, size), "wide")
        yield SavedTensor(f"{name}.scale", (*shape, 1), "wide")


def _saved_mean_squares(batch: MicroBatch) -> tuple[SavedTensor, ...]:
    """Return the mean squares of queries and keys, all-reduced over tp. Selective recompute saves them, as it saves the
    results of all collectives."""
    if not batch.config.projection_norm or batch.layout.tp == 1:
        return ()
    shape = batch.rows, batch.tokens, 1
    return tuple(SavedTensor(f"attention.{name}_norm.mean_square", shape, "wide") for name in ("query", "key"))


def _ulysses_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the all-to-alls of Ulysses context parallelism: before attention each cp rank receives all tokens of some
    heads; after it, its own tokens of all heads."""
    one = batch.all_tokens * batch.config.head_dim * batch.itemsize
    again = batch.layout.recompute != "none"
    sent = {
        "attention.heads": batch.heads + 2 * batch.kv_heads * batch.key_value_copies,
        "attention.tokens": batch.heads,
    }
    calls = []
    for site, heads in sent.items():
        calls.append(CollectiveCall("context", "cp", "all-to-all", ((site, heads * one),), "forward", 1, again))
        calls.append(CollectiveCall("context", "cp", "all-to-all", ((f"{site}.backward", heads * one),), "input"))
    heads, kv_heads = _kernel_heads(batch)
    shape = batch.rows, heads + 2 * kv_heads, batch.sequence, batch.config.head_dim
    exchanged = SavedTensor("attention.exchanged", shape, "x")
    yield Operator("attention.all_to_all", saved=(exchanged,), collectives=tuple(calls))


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
        yield Operator(name, tuple(both))
    scores = heads * queries * keys
    yield Operator("attention.softmax", elementwise_kernels(batch, "attention.softmax", scores, "softmax"))
    if batch.engine.dropout:
        yield Operator("attention.dropout", elementwise_kernels(batch, "attention.dropout", scores, "scores_dropout"))


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
    both: tuple[Phase, Phase] = ("forward", "input")
    products = [Operation("attention.scores", "float32 product", phase, flops, wide, shape, tiles) for phase in both]
    yield Operator("attention.scores", tuple(products))
    passes = elementwise_kernels(batch, "attention.softmax", scores / tiles, "capped_softmax")
    yield Operator("attention.softmax", tuple(one._replace(count=one.count * tiles) for one in passes))
    value = Operation("attention.values", "product", "forward", flops, narrow, shape, tiles)
    # Of probabilities, values, queries and keys.
    gradients = Operation("attention.gradients", "product", "input", flops, narrow, shape, 4 * tiles)
    saved = _flash_attention(batch, window)
    yield Operator("attention.values", (value, gradients), saved.saved, saved.kept)


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


def _flash_attention(batch: MicroBatch, window: int | None) -> Operator:
    """Return the operator of softmax(q kᵀ) v in a flash-attention kernel, for this rank's heads and tokens. Under ring
    attention every cp rank has the same work. window: most tokens that a query attends to, None for all."""
    config, size = batch.config, batch.config.head_dim
    # A decoder's kernel skips masked keys, an encoder's computes all keys with a mask.
    seen = batch.sequence if config.encoder else max(1, round(batch.sequence / batch.documents))
    keys_seen = keys_per_token(seen, window, not config.encoder, config.window_chunks)
    # The engine `meshwright` pads the values of latent attention to the size of queries.
    columns = 2 * size if batch.engine.name == "meshwright" else size + config.value_dim
    flops = 2.0 * keys_seen * batch.heads * columns * batch.all_tokens
    moved = batch.itemsize * batch.all_tokens * (batch.qkv_width + batch.heads * size)
    name = "attention.core.ring" if batch.ring else "attention.core"
    shape = (
        batch.sequence / (2 * batch.cp) if batch.ring else batch.sequence,
        keys_seen,
        size,
    )  # a rank has pieces of each sequence
    operations = (
        Operation(name, "attention", "forward", flops, moved, shape),
        Operation(name, "attention", "input", FLASH_BACKWARD * flops, 2 * moved, shape),
    )
    heads, _ = _kernel_heads(batch)
    length = batch.sequence if batch.ulysses else batch.tokens
    log_sum = SavedTensor("attention.log_sum", (batch.rows, heads, length), "wide")
    if batch.ring:
        result = SavedTensor("attention.core", (batch.rows, batch.heads, batch.tokens, size), "x")
        padded = (result,) if config.value_dim < size else ()  # of which the output's input is a copy
        return Operator("attention.core", operations, (log_sum, *padded), (result, log_sum))
    if batch.device == "cuda" and not batch.capped:
        return Operator("attention.core", operations, tuple(_cuda_kernel_saved(batch, heads, length, window)))
    return Operator("attention.core", operations, (log_sum,) if config.encoder else ())


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
            yield SavedTensor(f"attention.{what}_repeated", (batch.rows, heads, length, size), "x")
    # An encoder's additive mask is one for all layers.
    if limited and not batch.config.encoder:
        yield SavedTensor("attention.mask", (batch.rows if batch.masked else 1, 1, length, length), "x")
    queries = -(-length // 32) * 32 if limited or not batch.narrow else length
    yield SavedTensor("attention.log_sum", (batch.rows, heads, queries), "wide")
    if not batch.varlen(window):
        yield SavedTensor("attention.random_state", (2,), "index")
    if batch.ulysses:  # the kernel's own result, before the all-to-all
        yield SavedTensor("attention.core", (batch.rows, heads, length, size), "x")
